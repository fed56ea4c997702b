"""Where incidents live between the alert and the engineer: SQLite by default, PostgreSQL by URL.

Importing this package imports no database library; `open_store` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rca.store.location import default_url
from rca.store.records import (
    FINAL,
    Alert,
    BacklogFullError,
    ConflictError,
    ExplanationInfo,
    Filter,
    Page,
    Publication,
    Receipt,
    Retention,
    State,
    StoredConflict,
    StoredIncident,
    incident_id,
)

if TYPE_CHECKING:
    from rca.store.database import Store


def open_store(url: str | None = None, *, must_exist: bool = False) -> Store:
    """Open the store at ``url`` (default: `default_url`) and bring its schema up to date.

    Args:
        url: ``sqlite:///PATH``, a path, or ``postgresql://…``.
        must_exist: do not create an SQLite file that is not there, as for commands that only read.

    Raises:
        InvalidInputError: the URL is malformed or of another database, or the schema is newer than this version.
        NotFoundError: ``must_exist`` and there is no such file.
        SourceUnreachableError: the database does not answer.
    """
    from rca.store.database import Store

    return Store.open(url or default_url(), must_exist=must_exist)


__all__ = [
    "FINAL",
    "Alert",
    "BacklogFullError",
    "ConflictError",
    "ExplanationInfo",
    "Filter",
    "Page",
    "Publication",
    "Receipt",
    "Retention",
    "State",
    "StoredConflict",
    "StoredIncident",
    "default_url",
    "incident_id",
    "open_store",
]
