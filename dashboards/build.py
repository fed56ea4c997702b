"""All boards as the JSON that is imported, provisioned or pushed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dashboards.modernize import modernize

#: The boards: modules of this package with a function ``board() -> grafanalib.core.Dashboard``.
BOARDS: Final = (
    "fleet",
    "service",
    "pod",
    "fragmentation",
    "scheduler",
    "incident",
    "exporter_health",
)

#: The boards as they are checked in.
GENERATED: Final = Path(__file__).parent / "generated"


def build(names: tuple[str, ...] = BOARDS) -> dict[str, dict[str, Any]]:
    """Return the boards as plain data, by uid.

    Raises:
        ValueError: two boards have the same uid.
    """
    boards: dict[str, dict[str, Any]] = {}
    for name in names:
        board = modernize(importlib.import_module(f"dashboards.{name}").board())
        if board["uid"] in boards:
            raise ValueError(f"dashboards/{name}.py has the uid {board['uid']}, which another board has")
        boards[board["uid"]] = board
    return boards


def addressed(board: dict[str, Any], addresses: Mapping[str, str]) -> dict[str, Any]:
    """Return ``board`` with other values for its variables that hold addresses: ``incident_server``, ``runbooks``."""
    variables = []
    for variable in board["templating"]["list"]:
        url = addresses.get(variable["name"])
        if url is not None:
            option = {"selected": True, "text": url, "value": url}
            variable = {**variable, "query": url, "current": option, "options": [option]}
        variables.append(variable)
    return {**board, "templating": {"list": variables}}


def render(board: Mapping[str, Any]) -> str:
    """Return ``board`` as the text of its file: keys sorted, so that a change shows as what it is."""
    return json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def file_name(uid: str) -> str:
    """Return the name of the file of the board ``uid``."""
    return f"{uid}.json"
