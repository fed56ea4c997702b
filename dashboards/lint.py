"""Rules for boards, checked on the generated JSON, so that boards written by hand or by others can be checked too.

They are the rules of the public dashboard-linter that apply to these boards, and those that keep the boards together:
every link leads somewhere, every variable and every metric exists, and what opens is readable. A rule that a panel has
to break is excused in `ALLOWED`, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import promql_parser

from dashboards.foreign import FOREIGN
from dashboards.frame import TAG
from dashboards.modernize import SCHEMA_VERSION
from dashboards.panels import GRID_COLUMNS
from exporters.catalog import METRICS, MetricType

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that is broken: where, what is wrong, and what to do about it. ``panel`` is empty for a whole board."""

    rule: str
    board: str
    panel: str
    message: str
    cure: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """A rule that one panel may break, and why. ``panel`` is its title, or ``*``."""

    rule: str
    board: str
    panel: str
    reason: str


ALLOWED: Final[tuple[Allowed, ...]] = ()

#: Panels that come with Grafana; any other has to be installed first.
CORE_PANELS: Final = frozenset(
    {
        *("alertlist", "annolist", "barchart", "bargauge", "canvas", "dashlist", "gauge", "geomap", "heatmap"),
        *("histogram", "logs", "nodeGraph", "piechart", "row", "stat", "state-timeline", "status-history", "table"),
        *("text", "timeseries", "traces", "trend", "xychart"),
    }
)
#: Panels without data: no unit, no query.
_STILL: Final = frozenset({"row", "text", "dashlist", "alertlist", "annolist"})
_DROPPED: Final = ("__inputs", "__requires", "gnetId", "hideControls", "rows", "sharedCrosshair", "style")

#: Labels that Prometheus, its configuration or a rule gives any series.
_ANY_LABEL: Final = frozenset({"__name__", "instance", "job"})
_OVER_RATE: Final = frozenset({"rate", "increase", "irate"})
#: Stand in for Grafana's intervals, so that they are told from literal ones; no board writes such durations itself.
_RATE_INTERVAL: Final = timedelta(seconds=97)
_RANGE: Final = timedelta(seconds=9973)
_DURATIONS: Final = {
    "$__rate_interval": "97s",
    "${__rate_interval}": "97s",
    "$__range": "9973s",
    "${__range}": "9973s",
    "$__interval": "61s",
    "${__interval}": "61s",
}

_VARIABLE: Final = re.compile(r"\$(?P<plain>\w+)|\$\{(?P<braced>\w+)[^}]*\}|\[\[(?P<old>\w+)[^\]]*\]\]")
_BOARD_LINK: Final = re.compile(r"^/d/(?P<uid>[^/?]+)(?:/[^?]*)?(?:\?(?P<query>.*))?$")
_PASSED: Final = re.compile(r"\$\{(\w+):queryparam\}")
_UID: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
_LABEL_VALUES: Final = re.compile(r"label_values\((?:(?P<series>.+),\s*)?(?P<label>\w+)\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a board: its text as PromQL, with stand-ins for Grafana's variables, and where it is asked."""

    panel: str
    expr: str
    instant: bool


def panels(board: Json) -> Iterator[Json]:
    """Yield every panel of ``board``, those in collapsed rows too."""
    for panel in board.get("panels", ()):
        yield panel
        yield from panel.get("panels", ())


def plain(expr: str) -> str:
    """Return ``expr`` with stand-ins for Grafana's intervals and variables, so that it is PromQL."""
    for name, duration in _DURATIONS.items():
        expr = expr.replace(name, duration)
    return _VARIABLE.sub("1", expr)


def queries(board: Json) -> Iterator[Query]:
    """Yield every query of ``board``: of panels and of annotations."""
    for panel in panels(board):
        for target in panel.get("targets", ()):
            yield Query(panel.get("title", ""), target.get("expr", ""), bool(target.get("instant")))
    for annotation in board.get("annotations", {}).get("list", ()):
        if "expr" in annotation:
            yield Query(f"annotation {annotation['name']}", annotation["expr"], False)


def lint(boards: Mapping[str, Json], allowed: Iterable[Allowed] = ALLOWED) -> list[Finding]:
    """Return what is wrong with ``boards`` (by uid); links are checked among them."""
    excused = {(item.rule, item.board, item.panel) for item in allowed}
    found = [
        finding
        for uid, board in boards.items()
        for rule in _RULES
        for finding in rule(board, boards)
        if not {(finding.rule, uid, finding.panel), (finding.rule, uid, "*")} & excused
    ]
    return sorted(found, key=lambda item: (item.board, item.panel, item.rule, item.message))


# --- the board


def _identity(board: Json, boards: Mapping[str, Json]) -> Iterator[Finding]:  # noqa: ARG001
    uid = str(board.get("uid") or "")
    if not _UID.fullmatch(uid):
        yield _of("uid", board, f"the uid is {uid!r}", "give 1 to 40 letters, digits, - or _: links go by it")
    if board.get("schemaVersion") != SCHEMA_VERSION:
        message = f"schemaVersion is {board.get('schemaVersion')}"
        yield _of("schema-version", board, message, f"build it again: {SCHEMA_VERSION} is what Grafana 13 writes")
    for name in _DROPPED:
        if name in board:
            yield _of("schema-version", board, f"has {name}, which Grafana dropped", "pass it through modernize()")
    if not board.get("title") or not board.get("description"):
        yield _of("description", board, "has no title or no description", "say what it answers")
    if TAG not in board.get("tags", ()):
        yield _of("tag", board, f"lacks the tag {TAG}", "add it: the links at the top of each board list by it")
    links = board.get("links", ())
    siblings = [link for link in links if link.get("type") == "dashboards" and TAG in link.get("tags", ())]
    if not any(link.get("includeVars") and link.get("keepTime") for link in siblings):
        message = "does not link to the other boards with variables and time range"
        yield _of("links", board, message, "build it with dashboards.frame.dashboard")


def _layout(board: Json, boards: Mapping[str, Json]) -> Iterator[Finding]:  # noqa: ARG001
    taken: dict[tuple[int, int], str] = {}
    ids: set[int] = set()
    for panel in panels(board):
        title = str(panel.get("title", ""))
        if panel.get("id") in ids or not panel.get("id"):
            yield _at("ids", board, panel, f"the id {panel.get('id')} is used twice or missing", "number the panels")
        ids.add(panel.get("id", 0))
        place = panel.get("gridPos", {})
        x, y, width, height = (int(place.get(name, 0)) for name in "xywh")
        if not width or not height or x + width > GRID_COLUMNS:
            yield _at("layout", board, panel, f"does not fit the grid of {GRID_COLUMNS} columns", "make it narrower")
        cells = {(column, line) for column in range(x, x + width) for line in range(y, y + height)}
        others = sorted({taken[cell] for cell in cells if cell in taken})
        if others:
            yield _at("layout", board, panel, f"overlaps {others[0]!r}", "lay the panels out with arrange()")
        taken |= dict.fromkeys(cells, title)


def _variables(board: Json, boards: Mapping[str, Json]) -> Iterator[Finding]:  # noqa: ARG001
    variables = board.get("templating", {}).get("list", ())
    names = [variable["name"] for variable in variables]
    if not variables or variables[0].get("type") != "datasource":
        message = "the first variable is not the data source"
        yield _of("datasource", board, message, "the other variables ask it: put it first")
    for name in {name for name in names if names.count(name) > 1}:
        yield _of("variables", board, f"the variable {name} is defined twice", "remove one")
    for variable in variables:
        name = variable["name"]
        if not variable.get("label"):
            yield _of("variables", board, f"the variable {name} has no label", "say what it chooses")
        if variable.get("type") != "query":
            continue
        if variable.get("refresh") != 2:
            message = f"the variable {name} is not refreshed when the time range changes"
            yield _of("variables", board, message, "set refresh to 2: what was there yesterday is found yesterday")
        if variable.get("includeAll") and not variable.get("allValue"):
            message = f"'All' of {name} lists every value, and misses series without the label"
            yield _of("variables", board, message, "set allValue to .*")
    used = set(_used_variables({key: value for key, value in board.items() if key != "uid"}))
    for name in sorted(used - set(names)):
        yield _of("variables", board, f"${name} is not defined", "define it in templating, or correct the name")


def _used_variables(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        for match in _VARIABLE.finditer(value):
            name = match["plain"] or match["braced"] or match["old"]
            # $1 is a group of a regular expression; names that begin with __ are Grafana's own.
            if not name.startswith("__") and not name.isdigit():
                yield name
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _used_variables(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _used_variables(item)


# --- panels


def _panel_words(board: Json, boards: Mapping[str, Json]) -> Iterator[Finding]:  # noqa: ARG001
    for panel in panels(board):
        kind = panel.get("type", "")
        if kind not in CORE_PANELS:
            message = f"the panel type {kind} does not come with Grafana"
            yield _at("core-panels", board, panel, message, "use one that does: a board must open everywhere")
        if not panel.get("title") and kind != "text":
            yield _at("title", board, panel, "has no title", "say what it shows")
        if kind in _STILL:
            continue
        if not panel.get("description"):
            yield _at("description", board, panel, "has no description", "say how to read it")
        if not panel.get("fieldConfig", {}).get("defaults", {}).get("unit"):
            yield _at("unit", board, panel, "has no unit", "set one; a plain count has the unit none")
        if not panel.get("targets"):
            yield _at("queries", board, panel, "asks nothing", "add a query, or make it a text")
        references = [target.get("refId") for target in panel.get("targets", ())]
        if len(set(references)) != len(references) or not all(references):
            yield _at("queries", board, panel, "two queries have the same refId, or none", "letter them")
        for target in panel.get("targets", ()):
            if kind in ("timeseries", "state-timeline") and target.get("legendFormat", "__auto") in ("", "__auto"):
                message = "a curve is named by its raw labels"
                yield _at("legend", board, panel, message, "give the query a legend")


def _sources(board: Json, boards: Mapping[str, Json]) -> Iterator[Finding]:  # noqa: ARG001
    for panel in panels(board):
        for owner in (panel, *panel.get("targets", ())):
            source = owner.get("datasource")
            if panel.get("type") not in _STILL and source != {"type": "prometheus", "uid": "${datasource}"}:
                message = f"asks the data source {source}"
                yield _at("datasource", board, panel, message, "ask ${datasource}: a file must work in any Grafana")
                break


def _links(board: Json, boards: Mapping[str, Json]) -> Iterator[Finding]:
    own = {variable["name"] for variable in board.get("templating", {}).get("list", ())}
    for panel in panels(board):
        for url in _urls(panel):
            match = _BOARD_LINK.match(url)
            if match is None:
                if not url.startswith(("http://", "https://", "${incident_server}", "${runbooks}")):
                    message = f"the link {url} leads to no board and no known place"
                    yield _at("links", board, panel, message, "use board_url(), or an address")
                continue
            target = boards.get(match["uid"])
            if target is None:
                yield _at("links", board, panel, f"the link leads to {match['uid']}, which is no board", "correct it")
                continue
            there = {variable["name"] for variable in target["templating"]["list"]}
            query = match["query"] or ""
            passed = set(_PASSED.findall(query))
            for name in sorted((passed | set(re.findall(r"(?:^|&)var-(\w+)=", query))) - there):
                message = f"the link passes {name}, which {match['uid']} does not have"
                yield _at("links", board, panel, message, "pass a variable of that board")
            for name in sorted(passed - own):
                yield _at("links", board, panel, f"the link passes on {name}, which is not here", "define it here")
            kept = {"datasource", "cluster", "queue"} & there
            if not kept <= passed or "${__url_time_range}" not in query:
                message = f"the link to {match['uid']} loses the data source, the cluster, the queue or the time range"
                yield _at("links", board, panel, message, "make it with board_url()")


def _urls(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("url"), str):
            yield value["url"]
        for item in value.values():
            yield from _urls(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _urls(item)


# --- queries


def _promql(board: Json, boards: Mapping[str, Json]) -> Iterator[Finding]:  # noqa: ARG001
    for query in queries(board):
        try:
            tree = promql_parser.parse(plain(query.expr))
        except ValueError as error:
            yield _in("promql", board, query, f"the query does not parse: {error}", "correct it")
            continue
        yield from _walk(board, query, tree, "")
    for variable in board.get("templating", {}).get("list", ()):
        if variable.get("type") == "query":
            yield from _variable_query(board, variable)


def _walk(board: Json, query: Query, node: Any, inside: str) -> Iterator[Finding]:
    match type(node).__name__:
        case "VectorSelector":
            yield from _selector(board, query, node, inside, ranged=False)
        case "MatrixSelector":
            selector = node.vector_selector
            interval = node.range
            wanted = interval == _RATE_INTERVAL or (interval == _RANGE and query.instant)
            if inside in _OVER_RATE and not wanted:
                message = f"{inside}() of {selector.name} has a fixed window"
                cure = "use $__rate_interval, or $__range in a query for one moment"
                yield _in("rate-interval", board, query, message, cure)
            yield from _selector(board, query, selector, inside, ranged=True)
        case "Call":
            for argument in node.args:
                yield from _walk(board, query, argument, node.func.name)
        case "AggregateExpr":
            if inside in _OVER_RATE:
                message = f"{inside}() of a sum: a restart of one exporter shows as a jump"
                yield _in("counters", board, query, message, "take the sum of the rates")
            yield from _walk(board, query, node.expr, "")
            if node.param is not None:
                yield from _walk(board, query, node.param, "")
        case "BinaryExpr":
            yield from _walk(board, query, node.lhs, "")
            yield from _walk(board, query, node.rhs, "")
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            yield from _walk(board, query, node.expr, inside)


def _selector(board: Json, query: Query, selector: Any, inside: str, *, ranged: bool) -> Iterator[Finding]:
    name = selector.name
    if not name:
        yield _in("metrics", board, query, "selects series without a metric name", "name the metric")
        return
    known = _known(name)
    if known is None:
        cure = "correct the name, or declare it in exporters/catalog.py or dashboards/foreign.py"
        yield _in("metrics", board, query, f"{name} is not a known metric", cure)
        return
    counter, labels = known
    if counter and not (ranged and inside in {*_OVER_RATE, "resets"}):
        yield _in("counters", board, query, f"{name} is a counter and not in rate()", "take its rate or increase")
    if not counter and ranged and inside in _OVER_RATE:
        yield _in(
            "counters", board, query, f"{name} is no counter, and {inside}() is taken of it", "use deriv or delta"
        )
    if labels is None:
        return
    for matcher in selector.matchers.matchers:
        if matcher.name not in labels and not _matches_absent(matcher):
            message = f"{name} has no label {matcher.name}"
            yield _in("labels", board, query, message, "correct the label, or let it match an absent one: name=~'x|'")


def _matches_absent(matcher: Any) -> bool:
    operator = str(matcher.op)
    if "Not" in operator:
        return False
    return re.fullmatch(matcher.value, "") is not None if "Re" in operator else not matcher.value


def _known(name: str) -> tuple[bool, frozenset[str] | None] | None:
    """Return whether ``name`` counts, and its labels (None: any); None for an unknown metric."""
    if name in METRICS and METRICS[name].type is not MetricType.HISTOGRAM:
        metric = METRICS[name]
        return metric.type is MetricType.COUNTER, _ANY_LABEL | set(metric.labels)
    if name in FOREIGN and FOREIGN[name].kind != "histogram":
        return FOREIGN[name].kind == "counter", None
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    if base == name:
        return None
    if base in METRICS and METRICS[base].type is MetricType.HISTOGRAM:
        return True, _ANY_LABEL | {*METRICS[base].labels, "le"}
    if base in FOREIGN and FOREIGN[base].kind == "histogram":
        return True, None
    return None


def _variable_query(board: Json, variable: Json) -> Iterator[Finding]:
    asked = variable["query"]["query"] if isinstance(variable["query"], Mapping) else variable["query"]
    name = variable["name"]
    match = _LABEL_VALUES.fullmatch(asked)
    if match is None or match["series"] is None:
        message = f"the variable {name} does not ask for label_values(series, label)"
        yield _of("variables", board, message, "other queries scan every series")
        return
    try:
        selector: Any = promql_parser.parse(plain(match["series"]))
    except ValueError as error:
        yield _of("promql", board, f"the variable {name} does not parse: {error}", "correct it")
        return
    matchers = {matcher.name: matcher for matcher in selector.matchers.matchers}
    if selector.name:
        metrics = [selector.name]
    else:
        pattern = re.compile(matchers["__name__"].value if "__name__" in matchers else "")
        metrics = [metric for metric in METRICS if pattern.fullmatch(metric)]
    if not metrics or any(_known(metric) is None for metric in metrics):
        yield _of("metrics", board, f"the variable {name} asks for an unknown metric", "correct the name")
        return
    for metric in metrics:
        known = _known(metric)
        labels = known[1] if known else None
        if labels is None:
            continue
        if match["label"] not in labels:
            yield _of("labels", board, f"the variable {name}: {metric} has no {match['label']}", "correct the label")
        for label, matcher in matchers.items():
            if label not in labels and not _matches_absent(matcher):
                yield _of(
                    "labels", board, f"the variable {name}: {metric} has no {label}", "let it match an absent one"
                )


# --- findings


def _of(rule: str, board: Json, message: str, cure: str) -> Finding:
    return Finding(rule, str(board.get("uid", "")), "", message, cure)


def _at(rule: str, board: Json, panel: Json, message: str, cure: str) -> Finding:
    return Finding(rule, str(board.get("uid", "")), panel.get("title") or f"panel {panel.get('id')}", message, cure)


def _in(rule: str, board: Json, query: Query, message: str, cure: str) -> Finding:
    return Finding(rule, str(board.get("uid", "")), query.panel, message, cure)


_RULES: Final[tuple[Callable[[Json, Mapping[str, Json]], Iterator[Finding]], ...]] = (
    _identity,
    _layout,
    _variables,
    _panel_words,
    _sources,
    _links,
    _promql,
)

__all__ = ["ALLOWED", "Allowed", "Finding", "Query", "lint", "panels", "plain", "queries"]
