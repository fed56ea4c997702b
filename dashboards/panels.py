"""What every board is made of: panels, queries, thresholds, overrides, links and their layout.

grafanalib's own panels are those of Grafana 8. `Visual` and `Query` are attrs subclasses that say what Grafana 13
reads; `dashboards.modernize` does the rest. Boards use the functions, so that every panel has a title, a description
and a unit, and the same thing looks the same everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attr
from grafanalib import core

from exporters.boards import Board
from exporters.model import Basis, ViolationType, WorkloadState

Json: TypeAlias = dict[str, Any]
#: grafanalib has no types; without this, mypy's plugin would know only the fields that are added here.
_attrs: Any = attr.s

Steps: TypeAlias = Sequence[tuple[float | None, str]]

GRID_COLUMNS: Final = 24

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "text"

#: One colour for each priority level, on every board.
PRIORITY_COLOURS: Final[Mapping[str, str]] = {
    "P0": "red",
    "P1": "orange",
    "P2": "yellow",
    "P3": "blue",
    "unknown": "purple",
    "overflow": "text",
}

#: What a violation type is called, and its colour.
VIOLATIONS: Final[Mapping[str, tuple[str, str]]] = {
    ViolationType.INVERSION: ("Priority inversion", "red"),
    ViolationType.SCHEDULING_DELAY: ("Scheduling delay", "orange"),
    ViolationType.FRAGMENTATION_BLOCKED: ("Blocked by fragmentation", "purple"),
    ViolationType.PREEMPTION_FAILED: ("Preemption failed", "yellow"),
    ViolationType.WRONG_WAY_PREEMPTION: ("Preempted by a less urgent one", "super-light-red"),
    ViolationType.QOS_MISMATCH: ("QoS class mismatch", "blue"),
}

BASES: Final[Mapping[str, str]] = {
    Basis.HELD: "held what the victim needs",
    Basis.STARTED: "started while the victim waited",
    Basis.DOMINATED: "took all that the victim needs",
}

STATES: Final[Mapping[str, tuple[str, str]]] = {
    WorkloadState.PENDING: ("Waiting", "orange"),
    WorkloadState.REQUEUED: ("Requeued", "red"),
    WorkloadState.HELD: ("On hold", "text"),
    WorkloadState.RUNNING: ("Running", "green"),
    WorkloadState.SUSPENDED: ("Suspended", "yellow"),
    WorkloadState.COMPLETING: ("Completing", "blue"),
}

#: Nothing is fine, anything is not.
ANY_IS_BAD: Final[Steps] = ((None, GREEN), (1, RED))
#: How long something urgent may be blocked before it is worse than a nuisance.
BLOCKED_SECONDS: Final[Steps] = ((None, GREEN), (1, YELLOW), (300, ORANGE), (1800, RED))
#: Of a ratio of which less is better.
LOW_RATIO: Final[Steps] = ((None, GREEN), (0.3, YELLOW), (0.5, ORANGE), (0.7, RED))
NEUTRAL: Final[Steps] = ((None, BLUE),)
#: For a name whose value is what its bearer took; 0 is that of nobody.
SOMEBODY: Final[Steps] = ((None, GREEN), (0.001, ORANGE))


@_attrs
class Query(core.Target):  # type: ignore[misc]
    """A Prometheus query. An ``instant`` one gives the value now, with ``format`` ``table`` as rows with label"
    " columns."""

    range: bool = attr.ib(default=True)

    def to_json_data(self) -> Json:
        """Return the query as grafanalib does, with what Grafana's editor adds."""
        data: Json = super().to_json_data()
        return data | {"editorMode": "code", "range": self.range, "exemplar": False}


@_attrs
class Visual(core.Panel):  # type: ignore[misc]
    """A panel of any kind in its present form: field settings that hold for every field, options of the kind."""

    kind: str = attr.ib(default="timeseries")
    unit: str = attr.ib(default="")
    decimals: int | None = attr.ib(default=None)
    minimum: float | None = attr.ib(default=None)
    maximum: float | None = attr.ib(default=None)
    no_value: str | None = attr.ib(default=None)
    steps: Steps = attr.ib(default=())
    color: Json | None = attr.ib(default=None)
    mappings: list[Json] = attr.ib(factory=list)
    field_links: list[Json] = attr.ib(factory=list)
    custom: Json = attr.ib(factory=dict)
    options: Json = attr.ib(factory=dict)
    overrides: list[Json] = attr.ib(factory=list)

    def to_json_data(self) -> Json:
        """Return the panel as plain data."""
        defaults = {
            "color": self.color,
            "custom": self.custom,
            "decimals": self.decimals,
            "links": self.field_links,
            "mappings": self.mappings,
            "max": self.maximum,
            "min": self.minimum,
            "noValue": self.no_value,
            "thresholds": {
                "mode": "absolute",
                "steps": [{"color": colour, "value": value} for value, colour in self.steps],
            },
            "unit": self.unit,
        }
        data: Json = self.panel_json({"type": self.kind, "options": self.options})
        data["fieldConfig"] = {"defaults": defaults, "overrides": self.overrides}
        return data


# --- queries


def query(expr: str, legend: str = "", *, ref: str = "") -> Query:
    """Return a query for a series over the time range; ``legend`` is Grafana's, with ``{{label}}``."""
    return Query(expr=expr, legendFormat=legend or "__auto", refId=ref)


def now(expr: str, legend: str = "", *, ref: str = "") -> Query:
    """Return a query for the value at the end of the time range."""
    return Query(expr=expr, legendFormat=legend or "__auto", refId=ref, instant=True, range=False)


def rows(expr: str, *, ref: str = "") -> Query:
    """Return a query for a table: one row a series at the end of the time range, its labels as columns."""
    return Query(expr=expr, refId=ref, instant=True, range=False, format="table")


def _lettered(queries: Sequence[Any]) -> list[Any]:
    return [
        query if query.refId else attr.evolve(query, refId=chr(ord("A") + index)) for index, query in enumerate(queries)
    ]


# --- fields


def override(matcher: str, name: str, **properties: Any) -> Json:
    """Return settings for the fields that ``matcher`` (``byName``, ``byRegexp``, ``byType``) finds.

    The names of ``properties`` are those of Grafana with ``__`` for a dot: ``custom__width=90``.
    """
    return {
        "matcher": {"id": matcher, "options": name},
        "properties": [{"id": key.replace("__", "."), "value": value} for key, value in properties.items()],
    }


def column(name: str, **properties: Any) -> Json:
    """Return settings for the field of this name."""
    return override("byName", name, **properties)


def fixed(colour: str) -> Json:
    """Return the colour setting for one fixed colour."""
    return {"mode": "fixed", "fixedColor": colour}


def thresholds(steps: Steps) -> Json:
    """Return thresholds as the value of an override."""
    return {"mode": "absolute", "steps": [{"color": colour, "value": value} for value, colour in steps]}


def texts(names: Mapping[str, str | tuple[str, str]]) -> list[Json]:
    """Return a mapping from values to what they are called, with a colour where there is one."""
    options: dict[str, Json] = {}
    for index, (value, shown) in enumerate(names.items()):
        text, colour = (shown, None) if isinstance(shown, str) else shown
        options[str(value)] = {"index": index, "text": text} | ({"color": colour} if colour else {})
    return [{"type": "value", "options": options}]


def named(names: Mapping[str, tuple[str, str]]) -> list[Json]:
    """Return overrides that give series of these names a readable name and a colour."""
    return [column(str(key), displayName=text, color=fixed(colour)) for key, (text, colour) in names.items()]


def priority_series() -> list[Json]:
    """Return overrides that give every series named after a priority level its colour."""
    return [column(level, color=fixed(colour)) for level, colour in PRIORITY_COLOURS.items()]


def priority_column(name: str = "Priority") -> Json:
    """Return the override for a table's column that holds a priority level."""
    # Plain yellow cannot be read on white.
    levels = {level: (level, colour.replace("yellow", "dark-yellow")) for level, colour in PRIORITY_COLOURS.items()}
    return column(name, mappings=texts(levels), custom__cellOptions={"type": "color-text"}, custom__width=85)


def violation_column(name: str = "Violation") -> Json:
    """Return the override for a table's column that holds a violation type."""
    return column(name, mappings=texts(VIOLATIONS), custom__cellOptions={"type": "color-text"}, custom__width=185)


def gauge_column(name: str, unit: str, steps: Steps = NEUTRAL, **properties: Any) -> Json:
    """Return the override for a table's column of numbers that are drawn as bars."""
    if unit == "percentunit":
        properties = {"decimals": 1} | properties
    return column(
        name,
        unit=unit,
        thresholds=thresholds(steps),
        color={"mode": "thresholds"},
        custom__cellOptions={"type": "gauge", "mode": "basic", "valueDisplayMode": "text"},
        **properties,
    )


def coloured_column(name: str, unit: str, steps: Steps, **properties: Any) -> Json:
    """Return the override for a table's column of numbers whose background says how bad they are."""
    return column(
        name,
        unit=unit,
        thresholds=thresholds(steps),
        color={"mode": "thresholds"},
        custom__cellOptions={"type": "color-background", "mode": "basic"},
        **properties,
    )


def reason_column() -> Json:
    """Return the override for a table's column that says how strong the case for an inversion is."""
    return column("Because it", mappings=texts(BASES), custom__width=215)


# --- links

#: Kept by every link between boards: where the data comes from, which cluster, and when.
_KEPT: Final = "${datasource:queryparam}&${cluster:queryparam}&${queue:queryparam}&${__url_time_range}"


def board_url(board: str, **variables: str) -> str:
    """Return the address of ``board`` with ``variables`` set; data source, cluster, queue and time range are kept.

    A value is one of Grafana's expressions, such as `cell` returns, or `KEEP`.
    """
    own = "".join(f"&{_assign(name, value)}" for name, value in variables.items())
    return f"/d/{board}?{_KEPT}{own}"


def _assign(name: str, value: str) -> str:
    return f"${{{name}:queryparam}}" if value == KEEP else f"var-{name}={value}"


#: As a value in `board_url`: what is chosen on this board, one or several or all.
KEEP: Final = "keep"


def cell(name: str) -> str:
    """Return the expression for the value in column ``name`` of the row that was clicked, fit for an address."""
    accessor = f".{name}" if name.isidentifier() else f'["{name}"]'
    return f"${{__data.fields{accessor}:percentencode}}"


def series_label(name: str) -> str:
    """Return the expression for a label of the series that was clicked, fit for an address."""
    return f"${{__field.labels.{name}:percentencode}}"


#: The name of the column that was clicked, fit for an address.
COLUMN_NAME: Final = "${__field.name:percentencode}"

#: The address of the incident server; a variable of every board.
INCIDENT_SERVER: Final = "${incident_server}"
RUNBOOKS: Final = "${runbooks}"


def link(title: str, url: str, *, new_tab: bool = False) -> Json:
    """Return a data link."""
    return {"title": title, "url": url, "targetBlank": new_tab}


def service_link(service: str, **variables: str) -> Json:
    """Return the link to the Service board for ``service``."""
    return link("Open the service", board_url(Board.SERVICE, service=service, **variables))


def pod_link(pod: str, service: str = "") -> Json:
    """Return the link to the Pod board for ``pod``."""
    variables = {"service": service} if service else {}
    return link("Open the pod or job", board_url(Board.POD, **variables, pod=pod))


def incident_links(incident: str) -> list[Json]:
    """Return the links to an incident's board and to its page."""
    return [
        link("Open the incident", board_url(Board.INCIDENT, incident=incident)),
        link("Open the report", f"{INCIDENT_SERVER}/incidents/{incident}", new_tab=True),
    ]


# --- panels


def _visual(
    kind: str, title: str, description: str, queries: Sequence[Query], size: tuple[int, int], **more: Any
) -> Visual:
    width, height = size
    return Visual(
        kind=kind,
        title=title,
        description=description,
        targets=_lettered(queries),
        gridPos=core.GridPos(h=height, w=width, x=0, y=0),
        maxDataPoints=None,
        **more,
    )


def stat(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str = "none",
    steps: Steps = NEUTRAL,
    width: int = 4,
    height: int = 4,
    legend: str = "",
    show: str = "auto",
    decimals: int | None = None,
    no_value: str = "not known",
    mappings: Sequence[Json] = (),
    links: Sequence[Json] = (),
    background: bool = True,
    over_time: bool = False,
) -> Visual:
    """Return one large figure. ``show="name"`` shows the legend, for an answer that is a name.

    ``no_value`` is shown when the query gives nothing, which must not read as zero.
    """
    asked = query(expr, legend) if over_time else now(expr, legend)
    return _visual(
        "stat",
        title,
        description,
        [asked],
        (width, height),
        unit=unit,
        decimals=decimals,
        no_value=no_value,
        steps=steps,
        color={"mode": "thresholds"},
        mappings=list(mappings),
        field_links=list(links),
        options={
            "colorMode": "background" if background else "value",
            "graphMode": "area" if over_time else "none",
            "justifyMode": "center",
            "orientation": "auto",
            "percentChangeColorMode": "standard",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "showPercentChange": False,
            "textMode": show,
            "wideLayout": True,
        },
    )


def timeseries(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    steps: Steps = (),
    minimum: float | None = 0,
    maximum: float | None = None,
    overrides: Sequence[Json] = (),
    links: Sequence[Json] = (),
    legend_table: bool = False,
    steady: bool = False,
    rare: bool = False,
    least_maximum: float | None = None,
    no_value: str = "none seen",
) -> Visual:
    """Return curves over time. ``steps`` are drawn behind them; ``steady`` is for values that hold until the next.

    ``rare`` is for rates of what happens every few minutes: with the shortest windows most of them would have none.
    ``least_maximum`` is where the axis ends at least: that of a curve which is always 0 would go to 100.
    """
    return _visual(
        "timeseries",
        title,
        description,
        queries,
        (width, height),
        unit=unit,
        no_value=no_value,
        minimum=minimum,
        maximum=maximum,
        steps=steps,
        color={"mode": "palette-classic"},
        field_links=list(links),
        interval="5m" if rare else None,
        custom={
            "axisLabel": "",
            "axisPlacement": "auto",
            **({} if least_maximum is None else {"axisSoftMax": least_maximum}),
            "drawStyle": "line",
            "fillOpacity": 30 if stacked else 8,
            "gradientMode": "none",
            "lineInterpolation": "stepAfter" if steady else "linear",
            "lineWidth": 1 if stacked else 2,
            "pointSize": 4,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
            "thresholdsStyle": {"mode": "dashed+area" if steps else "off"},
        },
        options={
            "legend": {
                "calcs": ["lastNotNull", "max"] if legend_table else [],
                "displayMode": "table" if legend_table else "list",
                "placement": "bottom",
                "showLegend": True,
            },
            "tooltip": {"hideZeros": False, "mode": "multi", "sort": "desc"},
        },
        overrides=list(overrides),
    )


def table(
    title: str,
    description: str,
    queries: Sequence[Query],
    columns: Mapping[str, str],
    *,
    width: int = 12,
    height: int = 8,
    overrides: Sequence[Json] = (),
    sort: str = "",
    descending: bool = True,
    then: str = "",
    unit: str = "none",
    decimals: int | None = None,
    no_value: str = "none seen",
) -> Visual:
    """Return a table with ``columns`` (field of the answer: heading) in that order, and no other.

    A single query's value is the field ``Value``; with several, which are merged by their labels, ``Value #`` and the
    query's letter. Rows are sorted by the column ``sort``, and where that is equal, the largest ``then`` first.
    """
    several = [{"id": "merge", "options": {}}] if len(queries) > 1 else []
    return _visual(
        "table",
        title,
        description,
        queries,
        (width, height),
        unit=unit,
        decimals=decimals,
        no_value=no_value,
        steps=((None, GREEN),),
        color={"mode": "thresholds"},
        custom={
            "align": "auto",
            "cellOptions": {"type": "auto"},
            "inspect": False,
            "minWidth": 75,
        },
        options={
            "cellHeight": "sm",
            "showHeader": True,
            "sortBy": [
                *([{"desc": descending, "displayName": sort}] if sort else []),
                *([{"desc": True, "displayName": then}] if then else []),
            ],
        },
        transformations=[*several, chosen(columns)],
        # A label that looks like a number stays as it is, and an empty cell is not an empty table.
        overrides=[override("byType", "string", unit="string", noValue="–"), *overrides],
    )


def chosen(columns: Mapping[str, str]) -> Json:
    """Return the transformation that keeps ``columns`` only, renames them and puts them in this order."""
    return {
        "id": "organize",
        "options": {
            "includeByName": dict.fromkeys(columns, True),
            "excludeByName": {},
            "indexByName": {name: index for index, name in enumerate(columns)},
            "renameByName": {name: heading for name, heading in columns.items() if name != heading},
        },
    }


_EMPTY_CELL: Final[Json] = {
    "type": "special",
    "options": {"match": "null", "result": {"color": "transparent", "index": 0, "text": "–"}},
}


def matrix(
    title: str,
    description: str,
    asked: Query,
    row: str,
    by: str,
    *,
    heading: str,
    unit: str,
    steps: Steps,
    cells: str,
    links: Sequence[Json],
    row_links: Sequence[Json] = (),
    order: Sequence[str] = tuple(PRIORITY_COLOURS),
    worst_first: bool = True,
    heading_width: int = 160,
    width: int = 12,
    height: int = 10,
    decimals: int | None = None,
    no_value: str = "none seen",
) -> Visual:
    """Return a table with a row for each label ``row``, a column for each label ``by``, and coloured, linked cells.

    ``cells`` is a regular expression for the names of the columns that hold values. ``heading`` names the first column.
    Rows with the largest values come first, or (not ``worst_first``) are in the order of their names.
    The links of a cell belong in an override by regular expression: Grafana gives those the name of the column.
    """
    corner = f"{row}\\{by}"
    return _visual(
        "table",
        title,
        description,
        [asked],
        (width, height),
        unit=unit,
        decimals=decimals,
        no_value=no_value,
        steps=steps,
        color={"mode": "thresholds"},
        custom={
            "align": "center",
            "cellOptions": {"type": "color-background", "mode": "basic"},
            "inspect": False,
            "minWidth": 60,
        },
        options={"cellHeight": "md", "showHeader": True, "sortBy": []},
        transformations=[
            {
                "id": "sortBy",
                "options": {
                    "fields": {},
                    "sort": [{"desc": worst_first, "field": "Value" if worst_first else row}],
                },
            },
            {
                "id": "groupingToMatrix",
                "options": {"columnField": by, "rowField": row, "valueField": "Value", "emptyValue": "null"},
            },
            {
                "id": "organize",
                "options": {
                    "excludeByName": {},
                    "includeByName": {},
                    "indexByName": {name: index for index, name in enumerate((corner, *order))},
                    "renameByName": {corner: heading},
                },
            },
        ],
        overrides=[
            column(
                heading,
                custom__align="left",
                custom__cellOptions={"type": "auto"},
                # Not a least width: the cells would then be pushed out of the panel.
                custom__width=heading_width,
                **({"links": list(row_links)} if row_links else {}),
            ),
            # An empty cell is not the same as an empty matrix.
            override("byRegexp", cells, links=list(links), noValue="–", mappings=[_EMPTY_CELL]),
        ],
    )


def state_timeline(
    title: str,
    description: str,
    queries: Sequence[Query],
    mappings: Sequence[Json],
    *,
    width: int = 24,
    height: int = 7,
    links: Sequence[Json] = (),
) -> Visual:
    """Return coloured bars of states over time, one a series; ``mappings`` name the numbers."""
    return _visual(
        "state-timeline",
        title,
        description,
        queries,
        (width, height),
        unit="none",
        steps=((None, GREY),),
        color={"mode": "thresholds"},
        mappings=list(mappings),
        field_links=list(links),
        custom={"fillOpacity": 75, "lineWidth": 0},
        options={
            "alignValue": "left",
            "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
            "mergeValues": True,
            "rowHeight": 0.85,
            "showValue": "auto",
            "tooltip": {"hideZeros": False, "mode": "single", "sort": "none"},
        },
    )


def node_graph(
    title: str,
    description: str,
    nodes: Query,
    edges: Query,
    transformations: Sequence[Json],
    *,
    width: int,
    height: int,
) -> Visual:
    """Return a graph of nodes and edges. Grafana takes the frame with a field ``source`` for the edges."""
    return _visual(
        "nodeGraph",
        title,
        description,
        [nodes, edges],
        (width, height),
        unit="percentunit",
        options={
            "edges": {"mainStatUnit": "percentunit"},
            "nodes": {
                "arcs": [{"color": "red", "field": "arc__cause"}, {"color": "green", "field": "arc__other"}],
                "mainStatUnit": "percentunit",
            },
            "zoomMode": "cooperative",
        },
        transformations=list(transformations),
    )


def text(content: str, *, width: int = 24, height: int = 3, title: str = "", description: str = "") -> Visual:
    """Return a panel of Markdown."""
    return _visual(
        "text",
        title,
        description,
        [],
        (width, height),
        options={
            "code": {"language": "plaintext", "showLineNumbers": False, "showMiniMap": False},
            "content": content,
            "mode": "markdown",
        },
    )


# --- layout


def arrange(items: Iterable[Any]) -> list[Any]:
    """Place `Visual`s where they first fit, line by line; a string starts a row with that heading. Ids count from 1.

    Raises:
        ValueError: a panel is wider than the grid.
    """
    placed: list[Any] = []
    taken: set[tuple[int, int]] = set()
    top = bottom = 0
    for number, item in enumerate(items, start=1):
        if isinstance(item, str):
            placed.append(
                core.RowPanel(title=item, id=number, gridPos=core.GridPos(h=1, w=GRID_COLUMNS, x=0, y=bottom))
            )
            top = bottom = bottom + 1
            continue
        width, height = item.gridPos.w, item.gridPos.h
        if width > GRID_COLUMNS:
            raise ValueError(f"the panel {item.title!r} is {width} columns wide; the grid has {GRID_COLUMNS}")
        corners = ((x, y) for y in itertools.count(top) for x in range(GRID_COLUMNS - width + 1))
        x, y = next(corner for corner in corners if not taken & _cells(corner, width, height))
        taken |= _cells((x, y), width, height)
        placed.append(attr.evolve(item, id=number, gridPos=core.GridPos(h=height, w=width, x=x, y=y)))
        bottom = max(bottom, y + height)
    return placed


def _cells(corner: tuple[int, int], width: int, height: int) -> set[tuple[int, int]]:
    x, y = corner
    return {(column, line) for column in range(x, x + width) for line in range(y, y + height)}
