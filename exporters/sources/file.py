"""The File source: plays a recording (JSON Lines of `exporters.model.Snapshot`), for demo, tests and post-mortems."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO, Final

from exporters.model import Snapshot, decode, read_snapshots
from exporters.sources.base import EndOfStreamError
from rca.errors import InvalidInputError, NotFoundError, SourceUnreachableError

#: Snapshots looked at to find out how far apart they were recorded.
_SAMPLE: Final = 50


class FileSource:
    """Gives the snapshots of a recording, one a poll, with the times of the recording.

    Args:
        path: JSON Lines, as `rca exporter record` writes them; ``.gz`` is compressed.
        follow: At the end wait for lines that are appended, instead of raising `EndOfStreamError`.

    Raises:
        NotFoundError: there is no such file.
        InvalidInputError: the file is compressed and to be followed.
    """

    def __init__(self, path: Path | str, *, follow: bool = False) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise NotFoundError(f"{path} is not a file", cure="record one with `rca exporter record`")
        if follow and self.path.suffix == ".gz":
            raise InvalidInputError(f"{path} is compressed and cannot be followed", cure="record without .gz")
        self._follow = follow
        self._snapshots: Iterator[Snapshot] | None = None if follow else read_snapshots(self.path)
        self._stream: BinaryIO | None = None
        self._partial = b""
        self._line = 0

    def poll(self) -> Snapshot:
        """Return the next snapshot.

        Raises:
            EndOfStreamError: there is no other (not with ``follow``).
            SourceUnreachableError: there is no other yet (with ``follow``).
            InvalidInputError: the next line is not a snapshot; the message names file and line.
        """
        if self._snapshots is not None:
            snapshot = next(self._snapshots, None)
            if snapshot is None:
                raise EndOfStreamError
            return snapshot
        return self._next_line()

    def _next_line(self) -> Snapshot:
        try:
            if self._stream is None:
                self._stream = self.path.open("rb")
            while True:
                self._partial += self._stream.readline()
                if not self._partial.endswith(b"\n"):
                    # Either the end, or a line that is still being written.
                    raise SourceUnreachableError(
                        f"{self.path} has no new snapshot", cure="is `rca exporter record` still running?"
                    )
                line, self._partial = self._partial, b""
                self._line += 1
                if line.strip():
                    return decode(line, f"{self.path}:{self._line}")
        except OSError as error:
            raise InvalidInputError(
                f"{self.path} cannot be read: {error.strerror}", cure="check its permissions"
            ) from None

    def close(self) -> None:
        """Close the file."""
        self._snapshots = iter(())
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def recorded_interval(path: Path | str, default: float = 15.0) -> float:
    """Return the median of the seconds between the first snapshots of a recording; ``default`` for fewer than two.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it cannot be read, or one of those lines is not a snapshot.
    """
    times = [snapshot.time for snapshot in islice(read_snapshots(path), _SAMPLE)]
    gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    return statistics.median(gaps) if gaps else default


__all__ = ["FileSource", "recorded_interval"]
