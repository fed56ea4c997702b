"""Incidents, alerts, bundles, explanations, conflicts, publications."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_PARENT = "incidents.id"


def _incident() -> sa.Column[str]:
    return sa.Column("incident_id", sa.String(200), nullable=False)


def _parent(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["incident_id"], [_PARENT], name=f"fk_{table}_incident_id", ondelete="CASCADE")


def upgrade() -> None:
    """Make every table."""
    op.create_table(
        "incidents",
        sa.Column("id", sa.String(200), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        sa.Column("received_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("title", sa.Text, nullable=False),
        sa.Column("alertname", sa.Text, nullable=False),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("annotations", sa.Text, nullable=False),
        sa.Column("generator_url", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_attempt_at", sa.BigInteger),
        sa.Column("problem", sa.Text, nullable=False),
        sa.Column("partial", sa.Integer, nullable=False),
        sa.Column("recapture", sa.Boolean, nullable=False),
        sa.Column("bundle_bytes", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("explained_at", sa.BigInteger),
        sa.Column("victim", sa.Text, nullable=False),
        sa.Column("victim_metric", sa.Text, nullable=False),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("mechanism", sa.Text, nullable=False),
        sa.Column("confidence", sa.Double),
        sa.Column("not_checked", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("lease_owner", sa.String(200), nullable=False),
        sa.Column("lease_until", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_incidents"),
        sa.UniqueConstraint("fingerprint", "starts_at", name="uq_incidents_fingerprint_starts_at"),
    )
    op.create_index("ix_incidents_state_received_at", "incidents", ["state", "received_at"])
    op.create_index("ix_incidents_starts_at_id", "incidents", ["starts_at", "id"])
    op.create_index("ix_incidents_updated_at", "incidents", ["updated_at"])
    op.create_table(
        "alerts",
        sa.Column("group_key", sa.String(64), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        _incident(),
        sa.Column("group_text", sa.Text, nullable=False),
        sa.Column("receiver", sa.Text, nullable=False),
        sa.Column("ends_at", sa.BigInteger),
        sa.Column("first_at", sa.BigInteger, nullable=False),
        sa.Column("last_at", sa.BigInteger, nullable=False),
        sa.Column("times", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("group_key", "fingerprint", "starts_at", name="pk_alerts"),
        _parent("alerts"),
    )
    op.create_index("ix_alerts_incident_id", "alerts", ["incident_id"])
    op.create_table(
        "bundles",
        _incident(),
        sa.Column("captured_at", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("incident_id", name="pk_bundles"),
        _parent("bundles"),
    )
    op.create_table(
        "explanations",
        _incident(),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("verdict", sa.String(32), nullable=False),
        sa.Column("trigger", sa.String(32), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("incident_id", "revision", name="pk_explanations"),
        _parent("explanations"),
    )
    op.create_table(
        "conflicts",
        sa.Column("number", sa.Integer, autoincrement=True, nullable=False),
        _incident(),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("writer", sa.String(200), nullable=False),
        sa.Column("base", sa.Text, nullable=False),
        sa.Column("stored", sa.Text, nullable=False),
        sa.Column("change", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_conflicts"),
        _parent("conflicts"),
    )
    op.create_index("ix_conflicts_incident_id", "conflicts", ["incident_id"])
    op.create_table(
        "publications",
        _incident(),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("target", sa.String(32), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_attempt_at", sa.BigInteger, nullable=False),
        sa.Column("done_at", sa.BigInteger),
        sa.Column("problem", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("incident_id", "revision", "target", name="pk_publications"),
        _parent("publications"),
    )
    op.create_index("ix_publications_done_at_next_attempt_at", "publications", ["done_at", "next_attempt_at"])
    op.create_table(
        "identity",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_identity"),
    )


def downgrade() -> None:
    """Drop every table."""
    for table in ("identity", "publications", "conflicts", "explanations", "bundles", "alerts", "incidents"):
        op.drop_table(table)
