"""Errors that reach the user: one line that names the input, one that names the cure, and an exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes of every ``rca`` command (docs/architecture.md, decision 7)."""

    OK = 0
    USAGE = 2
    NOT_FOUND = 3
    INCONCLUSIVE = 4
    UNREACHABLE = 5


class PrioscopeError(Exception):
    """Base class. ``str(error)`` says what is wrong; ``cure`` says what to do about it."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(message)
        self.cure = cure


class InvalidInputError(PrioscopeError):
    """The input exists but is malformed, inconsistent or unsafe."""

    exit_code = ExitCode.USAGE


class NotFoundError(PrioscopeError):
    """The named incident, node or file does not exist."""

    exit_code = ExitCode.NOT_FOUND


class SourceUnreachableError(PrioscopeError):
    """A data source did not answer."""

    exit_code = ExitCode.UNREACHABLE


__all__ = ["ExitCode", "InvalidInputError", "NotFoundError", "PrioscopeError", "SourceUnreachableError"]
