"""From the URL of a store to an engine that is set up for it."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, InterfaceError, OperationalError

from rca.errors import InvalidInputError, NotFoundError, SourceUnreachableError

#: How long a writer waits for another one.
BUSY_SECONDS: Final = 30
CONNECT_SECONDS: Final = 5
STATEMENT_SECONDS: Final = 60


def connect(url: str, *, must_exist: bool, pool: int) -> Engine:
    """Return an engine for ``url`` (see `rca.store.open_store`, also for what is raised)."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, must_exist, pool)
    return _postgresql(parsed, pool)


def _parse(text: str) -> URL:
    if "://" not in text:
        text = f"sqlite:///{text}"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Not repeated: it may hold a password.
        raise InvalidInputError(
            "the store's URL cannot be read", cure="write it as sqlite:///PATH or postgresql://USER@HOST/DATABASE"
        ) from None
    if url.drivername in ("postgres", "postgresql"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise InvalidInputError(
            f"the store cannot be a {url.drivername} database",
            cure="write it as sqlite:///PATH or postgresql://USER@HOST/DATABASE",
        )
    return url


def _sqlite(url: URL, must_exist: bool, pool: int) -> Engine:
    if not url.database or url.database == ":memory:":
        raise InvalidInputError("the store needs a file", cure="write it as sqlite:///PATH")
    path = Path(url.database).expanduser()
    if not path.exists():
        if must_exist:
            raise NotFoundError(
                f"there is no store at {path}",
                cure="start `rca serve`, or name the store with --store or $PRIOSCOPE_STORE",
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Labels and telemetry are nobody else's business.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, stat.S_IRUSR | stat.S_IWUSR))
        except OSError as error:
            raise InvalidInputError(
                f"cannot make the store {path}: {error.strerror}", cure="choose a place with --store"
            ) from None
    engine = create_engine(
        url.set(database=str(path)), connect_args={"timeout": BUSY_SECONDS}, pool_size=pool, max_overflow=pool
    )

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        # Transactions are begun below, with the lock that they need.
        connection.isolation_level = None
        cursor = connection.cursor()
        # Takes effect in a new file only, and before its first table.
        cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
        _write_ahead(cursor)
        for pragma in (
            # An answer of 202 promises that the alert survives a power cut, too.
            "synchronous=FULL",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        # A transaction that reads first and asks for the write lock later can fail without waiting.
        write = connection.get_execution_options().get("write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _write_ahead(cursor: sqlite3.Cursor) -> None:
    """Turn on the write-ahead log. SQLite's busy time-out does not cover this: of several that come first, it fails."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _postgresql(url: URL, pool: int) -> Engine:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise InvalidInputError(
            "PostgreSQL needs the extra 'postgres'", cure="pip install 'prioscope[postgres]'"
        ) from None
    return create_engine(
        url,
        pool_pre_ping=True,
        pool_size=pool,
        max_overflow=pool,
        connect_args={
            "connect_timeout": CONNECT_SECONDS,
            "application_name": "prioscope",
            "options": f"-c statement_timeout={STATEMENT_SECONDS * 1000}",
        },
    )


@contextmanager
def spoken(engine: Engine) -> Iterator[None]:
    """Turn the errors of a database that is away, full or damaged into ours, without its password.

    Raises:
        SourceUnreachableError: it does not answer, or cannot write.
        InvalidInputError: the file is no database, or the user may not do this.
    """
    where = engine.url.render_as_string(hide_password=True)
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        raise SourceUnreachableError(
            f"the store {where} does not answer: {_reason(error)}", cure="check that it runs and has space"
        ) from None
    except DatabaseError as error:
        if error.connection_invalidated:
            raise SourceUnreachableError(
                f"the connection to the store {where} broke", cure="check that the database runs"
            ) from None
        if "not a database" in str(error.orig) or type(error.orig).__name__ in (
            "InsufficientPrivilege",
            "DatabaseError",
        ):
            raise InvalidInputError(
                f"the store {where} cannot be used: {_reason(error)}", cure="name another one with --store"
            ) from None
        raise


def _reason(error: DBAPIError) -> str:
    lines = str(error.orig).strip().splitlines()
    return lines[0] if lines else type(error.orig).__name__
