"""The errors of `exporters.errors`, under the name that analysis code uses: one base class for the whole toolkit."""

from exporters.errors import (
    ExitCode,
    InvalidInputError,
    NotFoundError,
    PrioscopeError,
    SourceUnreachableError,
)

__all__ = ["ExitCode", "InvalidInputError", "NotFoundError", "PrioscopeError", "SourceUnreachableError"]
