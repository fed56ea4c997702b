"""Secrets from files, read again when the file changes, and never shown."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from rca.errors import InvalidInputError

_MOST: Final = 65_536


class Secret:
    """The content of a file without the white space around it. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._value = ""

    def __repr__(self) -> str:
        return f"Secret({str(self._path)!r})"

    def read(self) -> str:
        """Return the secret; where the file went away meanwhile, what it held last.

        Raises:
            InvalidInputError: it was never readable, is empty, or holds more than one line.
        """
        with self._lock:
            try:
                found = self._path.stat()
                seen = (found.st_mtime_ns, found.st_size, found.st_ino)
                if seen != self._seen:
                    self._value = self._checked(self._path.read_bytes()[: _MOST + 1])
                    self._seen = seen
            except OSError as error:
                if not self._value:
                    raise InvalidInputError(
                        f"the secret in {self._path} cannot be read: {error.strerror}",
                        cure="check the path and its permissions",
                    ) from None
            return self._value

    def _checked(self, data: bytes) -> str:
        try:
            text = data.decode().strip()
        except UnicodeDecodeError:
            text = ""
        if not text or len(text.split()) > 1 or len(data) > _MOST or not text.isascii() or not text.isprintable():
            raise InvalidInputError(
                f"{self._path} does not hold a secret", cure="write one line of ASCII without spaces into it"
            )
        return text
