"""The File source: plays a recording (JSON Lines of `exporters.model.Snapshot`), for demo, tests and post-mortems."""

from __future__ import annotations

import contextlib
import gzip
import logging
import statistics
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final, cast

from exporters.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from exporters.model import Snapshot, decode
from exporters.sources.base import EndOfStreamError

_log = logging.getLogger(__name__)

#: Snapshots looked at to find out how far apart they were recorded.
_SAMPLE: Final = 50


class FileSource:
    """Gives the snapshots of a recording, one a poll, with the times of the recording.

    A recording that a crash cut off is played up to there, and that is logged.

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
        self._compressed = self.path.suffix == ".gz"
        if follow and self._compressed:
            raise InvalidInputError(f"{path} is compressed and cannot be followed", cure="record without .gz")
        self._follow = follow
        self._stream: BinaryIO | None = None
        self._ended = False
        self._partial = b""
        self._line = 0

    def poll(self) -> Snapshot:
        """Return the next snapshot.

        Raises:
            EndOfStreamError: there is no other (not with ``follow``).
            SourceUnreachableError: there is no other yet (with ``follow``).
            InvalidInputError: the next line is not a snapshot; the message names file and line.
        """
        while not self._ended:
            try:
                if self._stream is None:
                    self._stream = self._open()
                self._partial += self._stream.readline()
            except EOFError:
                # The end of the compressed data is missing: it was not closed.
                self._end(cut_off=True)
                break
            except OSError as error:
                raise InvalidInputError(
                    f"{self.path} cannot be read: {error.strerror or error}", cure="check the file and its permissions"
                ) from None
            if not self._partial.endswith(b"\n"):
                if self._follow:
                    # Either the end, or a line that is still being written.
                    raise SourceUnreachableError(
                        f"{self.path} has no new snapshot", cure="is `rca exporter record` still running?"
                    )
                self._end(cut_off=bool(self._partial))
                break
            line, self._partial = self._partial, b""
            self._line += 1
            if line.strip():
                return decode(line, f"{self.path}:{self._line}")
        raise EndOfStreamError

    def _open(self) -> BinaryIO:
        if self._compressed:
            return cast("BinaryIO", gzip.open(self.path))
        return self.path.open("rb")

    def _end(self, *, cut_off: bool) -> None:
        self.close()
        if cut_off:
            _log.warning("%s was cut off after line %d", self.path, self._line)

    def close(self) -> None:
        """Close the file."""
        self._ended = True
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def recorded_interval(path: Path | str, default: float = 15.0) -> float:
    """Return the median of the seconds between the first snapshots of a recording; ``default`` for fewer than two.

    Raises:
        NotFoundError: there is no such file.
        InvalidInputError: it cannot be read, or one of those lines is not a snapshot.
    """
    times: list[float] = []
    with contextlib.closing(FileSource(path)) as source, contextlib.suppress(EndOfStreamError):
        for _ in range(_SAMPLE):
            times.append(source.poll().time)
    gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    return statistics.median(gaps) if gaps else default


__all__ = ["FileSource", "recorded_interval"]
