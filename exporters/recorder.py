"""Records the snapshots of a source as JSON Lines, for the File source, tests and post-mortems."""

from __future__ import annotations

import gzip
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from exporters.errors import InvalidInputError, SourceUnreachableError
from exporters.model import encode
from exporters.sources.base import EndOfStreamError, Source

_log = logging.getLogger(__name__)


def record(
    open_source: Callable[[], Source],
    out: Path,
    *,
    interval: float,
    polls: int | None = None,
    append: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Poll and write until ``polls`` snapshots, the end of the source, SIGTERM or SIGINT; return how many were written.

    Each snapshot is on disk before the next poll, so that what was recorded before a crash can be read. A poll that
    fails is logged and skipped.

    Raises:
        InvalidInputError: ``out`` exists (without ``append``) or cannot be written.
        SourceUnreachableError: the first poll fails: there is nothing to record.
    """
    if out.exists() and not append:
        raise InvalidInputError(f"{out} exists", cure="choose another file, or go on with it: --append")
    source = open_source()
    written = 0
    try:
        with _stopped() as stop, _writer(out) as stream:
            due = clock()
            while not stop.is_set() and (polls is None or written < polls):
                try:
                    snapshot = source.poll()
                except EndOfStreamError:
                    break
                except (SourceUnreachableError, OSError) as error:
                    if not written:
                        raise
                    _log.error("not recorded: %s", error)
                else:
                    try:
                        stream.write(encode(snapshot))
                        stream.flush()
                    except OSError as error:
                        raise InvalidInputError(
                            f"cannot write {out}: {error.strerror}", cure="make room, or choose another file"
                        ) from None
                    written += 1
                due = max(due + interval, clock())
                if polls is None or written < polls:
                    stop.wait(due - clock())
    finally:
        source.close()
    return written


@contextmanager
def _writer(out: Path) -> Iterator[BinaryIO]:
    try:
        stream = cast("BinaryIO", gzip.open(out, "ab")) if out.suffix == ".gz" else out.open("ab")  # noqa: SIM115
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {out}: {error.strerror}", cure="choose a file in an existing, writable folder"
        ) from None
    with stream:
        yield stream


@contextmanager
def _stopped() -> Iterator[threading.Event]:
    """Give an event that SIGTERM and SIGINT set (in the main thread; elsewhere nothing does)."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["record"]
