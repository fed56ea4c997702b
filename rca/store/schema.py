"""The tables, as SQLAlchemy sees them. ``migrations/`` makes them; a test compares the two.

Bundles are rows and not files beside the database: the bundle and the state that says *captured* commit together, two
servers on one PostgreSQL share them without a shared disk, and one backup holds everything. They have a table of their
own so that a list never reads them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Moment(TypeDecorator[datetime]):
    """A time as microseconds since 1970 (UTC): exact, sortable, and the same in every database."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:  # noqa: ARG002
        """Encode."""
        return None if value is None else (value - _EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Decode."""
        return None if value is None else _EPOCH + timedelta(microseconds=int(value))


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

#: ``labels``, ``annotations``, ``not_checked`` and ``version`` are JSON text.
incidents = Table(
    "incidents",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("starts_at", Moment, nullable=False),
    Column("received_at", Moment, nullable=False),
    Column("updated_at", Moment, nullable=False),
    Column("ended_at", Moment),
    Column("title", Text, nullable=False),
    Column("alertname", Text, nullable=False),
    Column("labels", Text, nullable=False),
    Column("annotations", Text, nullable=False),
    Column("generator_url", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("next_attempt_at", Moment),
    Column("problem", Text, nullable=False),
    Column("partial", Integer, nullable=False),
    Column("recapture", Boolean, nullable=False),
    Column("bundle_bytes", BigInteger, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("explained_at", Moment),
    Column("victim", Text, nullable=False),
    Column("victim_metric", Text, nullable=False),
    Column("cause", Text, nullable=False),
    Column("mechanism", Text, nullable=False),
    Column("confidence", Double),
    Column("not_checked", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("lease_owner", String(200), nullable=False),
    Column("lease_until", Moment),
    # One alert is one incident, through however many routes and from however many Alertmanagers it comes.
    UniqueConstraint("fingerprint", "starts_at"),
    Index("ix_incidents_state_received_at", "state", "received_at"),
    Index("ix_incidents_starts_at_id", "starts_at", "id"),
    Index("ix_incidents_updated_at", "updated_at"),
)

alerts = Table(
    "alerts",
    metadata,
    Column("group_key", String(64), primary_key=True),
    Column("fingerprint", String(64), primary_key=True),
    Column("starts_at", Moment, primary_key=True),
    Column("incident_id", String(200), ForeignKey("incidents.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("group_text", Text, nullable=False),
    Column("receiver", Text, nullable=False),
    Column("ends_at", Moment),
    Column("first_at", Moment, nullable=False),
    Column("last_at", Moment, nullable=False),
    Column("times", Integer, nullable=False),
)

bundles = Table(
    "bundles",
    metadata,
    Column("incident_id", String(200), ForeignKey("incidents.id", ondelete="CASCADE"), primary_key=True),
    Column("captured_at", Moment, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

#: Only ever added to: a further explanation is a further revision. ``data`` is zlib-compressed JSON.
explanations = Table(
    "explanations",
    metadata,
    Column("incident_id", String(200), ForeignKey("incidents.id", ondelete="CASCADE"), primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("created_at", Moment, nullable=False),
    Column("verdict", String(32), nullable=False),
    Column("trigger", String(32), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

#: Updates that did not win (P10).
conflicts = Table(
    "conflicts",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("incident_id", String(200), ForeignKey("incidents.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("at", Moment, nullable=False),
    Column("writer", String(200), nullable=False),
    Column("base", Text, nullable=False),
    Column("stored", Text, nullable=False),
    Column("change", Text, nullable=False),
)

#: What is still to be told to other systems: written in the transaction of the explanation, so that a crash loses none.
publications = Table(
    "publications",
    metadata,
    Column("incident_id", String(200), ForeignKey("incidents.id", ondelete="CASCADE"), primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("target", String(32), primary_key=True),
    Column("attempts", Integer, nullable=False),
    Column("next_attempt_at", Moment, nullable=False),
    Column("done_at", Moment),
    Column("problem", Text, nullable=False),
    Index("ix_publications_done_at_next_attempt_at", "done_at", "next_attempt_at"),
)

#: One row: the identity of this database, which tells its writers from those of another one.
identity = Table("identity", metadata, Column("id", String(32), primary_key=True), Column("created_at", Moment))
