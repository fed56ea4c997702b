"""How every command writes: data to stdout or a file, notes and errors to stderr."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rca.errors import InvalidInputError, PrioscopeError

if TYPE_CHECKING:
    from rich.console import Console


def emit(text: str, out: Path | None = None) -> None:
    """Write ``text`` as UTF-8 to ``out``, or to stdout; a reader that went away, as in ``| head``, is no error.

    Raises:
        InvalidInputError: ``out`` cannot be written.
    """
    if out is not None:
        # Whole or not at all: half a report could be read as the answer. Devices and pipes are written as they are.
        partial = out.with_name(f".{out.name}.partial") if out.is_file() or not out.exists() else out
        try:
            partial.write_text(text, encoding="utf-8")
            if partial is not out:
                partial.replace(out)
        except OSError as error:
            if partial is not out:
                partial.unlink(missing_ok=True)
            raise InvalidInputError(
                f"cannot write {out}: {error.strerror}", cure="choose a file in an existing, writable directory"
            ) from None
        return
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()


def silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain about a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Return a console for tables on stdout; a reader that went away is no error here either."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1

    return _Console(highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Write a line for people to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def report_error(error: PrioscopeError) -> None:
    """Write ``error`` as one line, and its cure as another, to stderr."""
    # A message may quote a hostile name from a bundle.
    from rca.report.format import printable

    note(f"error: {printable(str(error))}")
    if error.cure:
        note(f"cure: {printable(error.cure)}")


def use_colour(no_color: bool, stream: TextIO | None = None) -> bool:
    """Whether to colour: on a terminal, unless ``--no-color``, ``NO_COLOR`` or a dumb terminal says otherwise."""
    stream = sys.stdout if stream is None else stream
    # https://no-color.org: any non-empty value counts.
    return not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def terminal_width() -> int:
    """Columns of the terminal (or ``COLUMNS``); 100 where there is none. Lines longer than 120 are hard to read."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)
