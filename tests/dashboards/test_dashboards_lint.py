"""Each rule of the lint finds what it is for, and our boards break none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from dashboards.build import build
from dashboards.foreign import FOREIGN
from dashboards.lint import ALLOWED, Allowed, lint, panels, queries

BOARDS = build()
FLEET = "prioscope-fleet"

Json = dict[str, Any]


def test_our_boards_break_no_rule() -> None:
    assert lint(BOARDS) == []


def test_every_exception_is_needed_and_has_a_reason() -> None:
    without = {(finding.rule, finding.board, finding.panel) for finding in lint(BOARDS, allowed=())}
    for item in ALLOWED:
        assert item.reason
        assert any(item.rule == rule and item.board == board for rule, board, _ in without)


def test_every_declared_foreign_metric_is_asked_for() -> None:
    asked = " ".join(query.expr for board in BOARDS.values() for query in queries(board))
    assert [name for name in FOREIGN if name not in asked] == []


def panel(board: Json, kind: str) -> Json:
    """Return the first panel of a kind."""
    found: Json = next(item for item in panels(board) if item["type"] == kind)
    return found


def first_link(board: Json) -> Json:
    """Return the link of the matrix to the Service board."""
    table = next(item for item in panels(board) if item["title"].startswith("Time in violation by service"))
    found: Json = table["fieldConfig"]["overrides"][1]["properties"][0]["value"][0]
    return found


def ask(expr: str, **target: Any) -> Callable[[Json], None]:
    """Return a change that gives the first time series this query."""
    return lambda board: panel(board, "timeseries")["targets"][0].update({"expr": expr, **target})


BREAKS: dict[str, tuple[str, Callable[[Json], object]]] = {
    "uid that is too long": ("uid", lambda board: board.update(uid="x" * 41)),
    "an old schema": ("schema-version", lambda board: board.update(schemaVersion=12)),
    "fields that Grafana dropped": ("schema-version", lambda board: board.update(rows=[])),
    "no tag": ("tag", lambda board: board.update(tags=[])),
    "no way to the other boards": ("links", lambda board: board.update(links=[])),
    "no description of a panel": ("description", lambda board: panel(board, "stat").pop("description")),
    "no title": ("title", lambda board: panel(board, "stat").update(title="")),
    "no unit": ("unit", lambda board: panel(board, "stat")["fieldConfig"]["defaults"].pop("unit")),
    "a plugin": ("core-panels", lambda board: panel(board, "stat").update(type="acme-gauge-panel")),
    "the same id twice": ("ids", lambda board: panel(board, "stat").update(id=panel(board, "table")["id"])),
    "panels that overlap": ("layout", lambda board: panel(board, "stat")["gridPos"].update(w=6)),
    "a panel beyond the grid": ("layout", lambda board: panel(board, "stat")["gridPos"].update(x=22)),
    "raw labels as names": ("legend", ask("sum(up) by (job)", legendFormat="__auto")),
    "a data source of one Grafana": (
        "datasource",
        lambda board: panel(board, "stat")["targets"][0].update(datasource={"type": "prometheus", "uid": "P1809F"}),
    ),
    "data source not first": ("datasource", lambda board: board["templating"]["list"].reverse()),
    "variable without label": ("variables", lambda board: board["templating"]["list"][1].pop("label")),
    "variable that is not refreshed": ("variables", lambda board: board["templating"]["list"][1].update(refresh=1)),
    "All that misses series without the label": (
        "variables",
        lambda board: board["templating"]["list"][1].pop("allValue"),
    ),
    "a variable that is not there": ("variables", ask('sum(gpu_up{node="$host"})', legendFormat="up")),
    "a variable of an unknown metric": (
        "metrics",
        lambda board: board["templating"]["list"][1]["query"].update(query="label_values(nonsense_total, cluster)"),
    ),
    "a variable of an unknown label": (
        "labels",
        lambda board: board["templating"]["list"][1]["query"].update(query="label_values(gpu_up, colour)"),
    ),
    "a query that does not parse": ("promql", ask("sum(gpu_up", legendFormat="up")),
    "an unknown metric": ("metrics", ask("sum(gpu_upp)", legendFormat="up")),
    "a label that the metric lacks": ("labels", ask('sum(gpu_up{service="chat"})', legendFormat="up")),
    "a fixed window": ("rate-interval", ask("sum(rate(gpu_xid_errors_total[5m]))", legendFormat="errors")),
    "the whole range in a curve": ("rate-interval", ask("sum(rate(gpu_xid_errors_total[$__range]))", legendFormat="e")),
    "a counter without rate": ("counters", ask("sum(gpu_xid_errors_total)", legendFormat="errors")),
    "the rate of a gauge": ("counters", ask("sum(rate(gpu_power_watts[$__rate_interval]))", legendFormat="power")),
    "a link to nowhere": ("links", lambda board: first_link(board).update(url="/d/prioscope-nowhere")),
    "a link with a variable that is not there": (
        "links",
        lambda board: first_link(board).update(url=first_link(board)["url"] + "&var-colour=red"),
    ),
    "a link that loses the time range": (
        "links",
        lambda board: first_link(board).update(url="/d/prioscope-service?${datasource:queryparam}"),
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_the_lint_finds(what: str) -> None:
    rule, change = BREAKS[what]
    board = copy.deepcopy(BOARDS[FLEET])
    change(board)
    found = [finding for finding in lint({**BOARDS, FLEET: board}) if finding.rule == rule]
    assert found, f"{rule} found nothing"
    assert all(finding.message and finding.cure for finding in found)


def test_a_label_that_only_relabelling_gives_may_match_an_absent_one() -> None:
    board = copy.deepcopy(BOARDS[FLEET])
    ask('sum(gpu_up{cluster=~"$cluster|"})', legendFormat="up")(board)
    assert lint({**BOARDS, FLEET: board}) == []


def test_an_exception_excuses_one_panel_only() -> None:
    board = copy.deepcopy(BOARDS[FLEET])
    excused, other = [item for item in panels(board) if item["type"] == "stat"][:2]
    for item in (excused, other):
        item["fieldConfig"]["defaults"].pop("unit")
    allowed = [Allowed("unit", FLEET, excused["title"], "it is a name")]
    assert [finding.panel for finding in lint({**BOARDS, FLEET: board}, allowed)] == [other["title"]]
