"""What reads Slurm: a `Reader` gives one `Dump` per call, by HTTP (`rest`) or by Slurm's commands (`commands`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from exporters.errors import InvalidInputError, SourceUnreachableError
from exporters.sources.slurm.records import Dump, Part

#: Configuration and QOS are read again after this long.
CONFIG_SECONDS: Final = 300.0

T = TypeVar("T")


class Reader(Protocol):
    """Reads one cluster."""

    def read(self) -> Dump:
        """Read jobs, nodes and partitions once.

        Raises:
            SourceUnreachableError: neither jobs nor nodes could be read.
        """

    def close(self) -> None:
        """Let go of connections."""


@dataclass
class Reading:
    """The parts of one dump as they come in, and what went wrong with the others."""

    unread: dict[str, str]
    first: SourceUnreachableError | InvalidInputError | None = None

    def part(self, what: str, read: Callable[[], Part]) -> Part | None:
        """Return what ``read`` gives; None when it fails, and remember why."""
        try:
            return read()
        except (SourceUnreachableError, InvalidInputError) as error:
            self.unread[what] = str(error)
            self.first = self.first or error
            return None

    def check(self, jobs: Part | None, nodes: Part | None) -> None:
        """Raise when there is nothing to report."""
        if jobs is None and nodes is None and self.first is not None:
            raise SourceUnreachableError(str(self.first), cure=self.first.cure)


@dataclass
class Remembered(Generic[T]):
    """A value that is read now and then. After a failure the old one stays, and the next call tries again."""

    read: Callable[[], T]
    seconds: float = CONFIG_SECONDS
    clock: Callable[[], float] = time.monotonic
    value: T | None = None
    at: float | None = None

    def get(self) -> T | None:
        """Return the value, read anew when it is too old.

        Raises:
            SourceUnreachableError, InvalidInputError: it cannot be read and never was.
        """
        now = self.clock()
        if self.at is None or now - self.at >= self.seconds:
            try:
                self.value = self.read()
                self.at = now
            except (SourceUnreachableError, InvalidInputError):
                if self.at is None:
                    raise
        return self.value
