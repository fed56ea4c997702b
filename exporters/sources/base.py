"""What every source is: something that reads one system and returns snapshots of it."""

from __future__ import annotations

from typing import Protocol

from exporters.model import Snapshot


class EndOfStreamError(Exception):
    """A source has nothing more to give, such as a recording that was played to its end."""


class Source(Protocol):
    """Reads one system. `poll` and `close` are called from one thread."""

    def poll(self) -> Snapshot:
        """Return what the system looks like now. Parts that cannot be read are in `Snapshot.unread`.

        Raises:
            SourceUnreachableError: nothing can be read; the next poll tries again.
            EndOfStreamError: there will never be another snapshot.
        """

    def close(self) -> None:
        """Let go of connections, threads and files. Called once."""


__all__ = ["EndOfStreamError", "Source"]
