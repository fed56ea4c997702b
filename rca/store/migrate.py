"""Brings a database to the schema of this version, once, however many processes start together."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, Engine, inspect, text

from rca.errors import InvalidInputError
from rca.store.schema import identity

if TYPE_CHECKING:
    from alembic.config import Config

#: The newest migration. A test holds it against the folder.
HEAD: Final = "0001"
#: Any number that other programs on the same PostgreSQL do not use.
_LOCK: Final = 0x7072696F73636F70


def current(connection: Connection) -> str | None:
    """Return the revision of the database; None: it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def upgrade(engine: Engine) -> None:
    """Run what migrations there are to run.

    Raises:
        InvalidInputError: the database belongs to a newer version of Prioscope, or to another program.
    """
    with engine.connect() as connection:
        if current(connection) == HEAD:
            return
    # Alembic is imported only where there is something to do.
    from alembic import command
    from alembic.script import ScriptDirectory

    with engine.execution_options(write=True).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        found = current(connection)
        if found == HEAD:
            return
        settings = config(connection)
        known = {script.revision for script in ScriptDirectory.from_config(settings).walk_revisions()}
        if found is not None and found not in known:
            raise InvalidInputError(
                f"the store {engine.url.render_as_string()} has schema {found}; this prioscope knows up to {HEAD}",
                cure="upgrade prioscope: pip install -U prioscope",
            )
        if found is None and inspect(connection).get_table_names():
            raise InvalidInputError(
                f"the database {engine.url.render_as_string()} holds other tables",
                cure="give prioscope a database of its own",
            )
        command.upgrade(settings, "head")
        if found is None:
            connection.execute(identity.insert().values(id=secrets.token_hex(8), created_at=datetime.now(UTC)))


def config(connection: Connection) -> Config:
    """Return Alembic's configuration for ``connection``."""
    from alembic.config import Config

    settings = Config()
    settings.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    settings.attributes["connection"] = connection
    return settings
