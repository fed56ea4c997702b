"""Input files: plain or gzip, bounded, with errors that name the file."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from rca.errors import InvalidInputError, NotFoundError

#: Most bytes that one input may unpack to (a gzip bomb would fill the memory).
MAX_BYTES: Final = 8 * 1024**3
#: Longest line, hence largest single JSON document, that is read into memory.
MAX_LINE_BYTES: Final = 2 * 1024**3

_GZIP_MAGIC = b"\x1f\x8b"


class ByteReader(Protocol):
    """The part of a binary file that the importers use."""

    def read(self, size: int = -1, /) -> bytes:
        """Return at most ``size`` bytes, all the rest if negative."""

    def readline(self, size: int = -1, /) -> bytes:
        """Return one line of at most ``size`` bytes."""


Progress = Callable[[int], None]
"""Called with the number of bytes of the file (as stored) read since the last call."""


@contextlib.contextmanager
def open_input(path: Path, progress: Progress | None = None) -> Iterator[ByteReader]:
    """Open ``path`` for reading bytes; gzip is recognised by its content, not by the name.

    Errors that arise while the caller reads (truncated gzip, I/O) are turned into `InvalidInputError` here.

    Raises:
        NotFoundError: nothing is at ``path``.
        InvalidInputError: ``path`` is a directory, unreadable, or damaged.
    """
    if not path.exists():
        raise NotFoundError(f"no file at {path}", cure="check the path")
    if path.is_dir():
        raise InvalidInputError(f"{path} is a directory", cure="name the files in it, e.g. with a shell glob")
    try:
        with path.open("rb") as raw:
            counted = _Counted(raw, progress) if progress else raw
            packed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=counted) as unpacked:
                    yield unpacked
            else:
                yield counted
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidInputError(
            f"{path} is a damaged or truncated gzip file: {error}", cure="copy or export it again"
        ) from None
    except OSError as error:
        raise InvalidInputError(
            f"cannot read {path}: {error.strerror or error}", cure="check the file's permissions"
        ) from None


class _Counted:
    """A binary reader that reports how much was read."""

    def __init__(self, raw: BinaryIO, progress: Progress) -> None:
        self._raw, self._progress = raw, progress

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(size)
        self._progress(len(data))
        return data

    def readline(self, size: int = -1) -> bytes:
        data = self._raw.readline(size)
        self._progress(len(data))
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._raw.seek(offset, whence)


def read_all(path: Path, progress: Progress | None = None) -> bytes:
    """Return the whole content of ``path``, unpacked.

    Raises:
        NotFoundError, InvalidInputError: see `open_input`; also when it unpacks to more than `MAX_BYTES`.
    """
    with open_input(path, progress) as stream:
        data = stream.read(MAX_BYTES + 1)
    _check_size(path, len(data))
    return data


def json_documents(path: Path, progress: Progress | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield each JSON document of ``path`` with the words that locate it in an error.

    The file holds either one document (on any number of lines) or one document a line (JSON Lines), which is read
    line by line, so that its size is no limit.

    Raises:
        NotFoundError, InvalidInputError: see `open_input`; also for an empty file or an over-long line.
    """
    with open_input(path, progress) as stream:
        number = 0
        seen = 0
        first = b""
        while not first:
            line = stream.readline(MAX_LINE_BYTES + 1)
            if not line:
                raise InvalidInputError(f"{path} is empty", cure="export the spans again")
            number += 1
            seen += len(line)
            first = line.strip().removeprefix(b"\xef\xbb\xbf")
        if not _is_complete(first):
            _check_size(path, seen)
            rest = stream.read(MAX_BYTES + 1)
            _check_size(path, seen + len(rest))
            yield str(path), first + b"\n" + rest
            return
        yield f"{path}, line {number}", first
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise InvalidInputError(
                    f"{path}, line {number} is longer than {MAX_LINE_BYTES:,} bytes", cure="split the export"
                )
            if text := line.strip():
                yield f"{path}, line {number}", text


def _is_complete(line: bytes) -> bool:
    """Whether ``line`` is a whole JSON document by itself."""
    import msgspec

    if not line.endswith((b"}", b"]")):
        return False
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _check_size(path: Path, size: int) -> None:
    if size > MAX_BYTES:
        raise InvalidInputError(f"{path} unpacks to more than {MAX_BYTES:,} bytes", cure="split the export")


__all__ = ["MAX_BYTES", "Progress", "json_documents", "open_input", "read_all"]
