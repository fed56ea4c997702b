"""Where the store is when nobody says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

#: Environment variable with the URL of the store.
VARIABLE: Final = "PRIOSCOPE_STORE"
_SYSTEM: Final = Path("/var/lib/prioscope")
_FILE: Final = "store.db"


def default_url() -> str:
    """Return ``$PRIOSCOPE_STORE``, else an SQLite file in the first of these folders that fits.

    ``$STATE_DIRECTORY`` (systemd), ``/var/lib/prioscope`` where it exists and may be written, else
    ``$XDG_DATA_HOME/prioscope`` or ``~/.local/share/prioscope``.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return named
    state = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if state:
        folder = Path(state)
    elif _SYSTEM.is_dir() and os.access(_SYSTEM, os.W_OK):
        folder = _SYSTEM
    else:
        data = os.environ.get("XDG_DATA_HOME", "")
        # The specification has relative paths ignored.
        base = Path(data) if data and Path(data).is_absolute() else Path.home() / ".local" / "share"
        folder = base / "prioscope"
    return f"sqlite:///{folder / _FILE}"
