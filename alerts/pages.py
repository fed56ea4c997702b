"""The runbook pages: one for each alert, ``alerts/runbooks/NAME.md``."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Final

from exporters.errors import NotFoundError

SECTIONS: Final = ("Meaning", "Impact", "Diagnosis", "Mitigation")


def folder() -> Path:
    """Return where the pages lie."""
    return Path(str(resources.files("alerts") / "runbooks"))


def names() -> list[str]:
    """Return the alerts that have a page."""
    return sorted(path.stem for path in folder().glob("*.md"))


def page(name: str) -> str:
    """Return the page of an alert; the prefix may be left out.

    Raises:
        NotFoundError: there is no such page.
    """
    known = {known.lower(): known for known in names()}
    found = known.get(name.lower()) or known.get(f"prioscope{name.lower()}")
    if found is None:
        close = difflib.get_close_matches(name, known.values(), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "`rca alerts list` shows every alert"
        raise NotFoundError(f"there is no alert {name!r}", cure=hint)
    return (folder() / f"{found}.md").read_text(encoding="utf-8")
