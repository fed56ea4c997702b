"""What Grafana does with a panel's queries before it shows them: variables, intervals, columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.lint import panels

#: Every variable at "All", or at what the demo has.
VALUES = {"incident": "INC-4711", "objective": "0.99"}
#: Grafana's rate interval is four scrapes, and no less than a panel's own interval and one scrape.
RATE_INTERVAL = "60s"
RATE_INTERVALS = {"5m": "315s"}


@dataclass(frozen=True)
class Asked:
    """One query of a panel, as Grafana would send it."""

    board: str
    panel: str
    expr: str
    instant: bool
    legend: str

    def __str__(self) -> str:
        return f"{self.board}, {self.panel!r}: {self.expr}"


def interpolate(expr: str, interval: str = "", values: Mapping[str, str] = VALUES) -> str:
    """Fill in the variables of a query, of a panel with the shortest interval ``interval``."""
    expr = expr.replace("$__rate_interval", RATE_INTERVALS.get(interval, RATE_INTERVAL)).replace("$__range", "3600s")
    # Not the $1 of label_replace.
    return re.sub(r"\$([a-zA-Z_]\w*)", lambda match: values.get(match[1], ".*"), expr)


def asked(board: Mapping[str, Any]) -> Iterator[Asked]:
    """Yield the queries of all panels and annotations."""
    for panel in panels(board):
        for target in panel.get("targets", ()):
            expr = interpolate(target["expr"], panel.get("interval", ""))
            yield Asked(board["uid"], panel["title"], expr, target["instant"], target.get("legendFormat", ""))
    for annotation in board["annotations"]["list"]:
        if "expr" in annotation:
            yield Asked(board["uid"], annotation["name"], interpolate(annotation["expr"]), False, "")


def columns(panel: Mapping[str, Any]) -> set[str]:
    """Return the labels that the transformations of a panel read."""
    found: set[str] = set()
    calculated: set[str] = set()
    for step in panel.get("transformations", ()):
        options = step["options"]
        if step["id"] == "calculateField":
            calculated.add(options["alias"])
        if step["id"] == "organize":
            found |= set(options["includeByName"])
        elif step["id"] == "groupingToMatrix":
            found |= {options["columnField"], options["rowField"]}
    return {name for name in found - calculated if not name.startswith("Value")}
