"""Geometry of the HTML report's drawings, as plain data. The template only places what is computed here.

Lengths are in SVG user units. Nothing in here formats markup, so nothing in here can inject any.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rca.explanation import Attribution, Explanation, Series
from rca.incident import Window
from rca.report import format as fmt

#: More nodes than this cannot be read; the drawing says how many it leaves out.
MAX_NODES: Final = 48
MAX_CHARTS: Final = 8

_BOX_WIDTH: Final = 176.0
_BOX_HEIGHT: Final = 42.0
_COLUMN_PITCH: Final = 238.0
_ROW_PITCH: Final = 58.0
_MARGIN: Final = 10.0
_LABEL_LENGTH: Final = 21


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A box: centre, label, tooltip, and what decides its look."""

    x: float
    y: float
    label: str
    caption: str
    tooltip: str
    tint: float
    rounded: bool
    role: str


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """A curve (SVG path data); `label` stands at (`label_x`, `label_y`) on the path of the anomaly."""

    data: str
    relation: str
    on_path: bool
    tooltip: str
    label: str = ""
    label_x: float = 0.0
    label_y: float = 0.0


@dataclass(frozen=True, slots=True)
class Graph:
    """The call-graph drawing."""

    width: float
    height: float
    box_width: float
    box_height: float
    nodes: tuple[DrawnNode, ...]
    edges: tuple[DrawnEdge, ...]
    relations: tuple[tuple[str, str], ...]
    drawn: int
    total: int
    largest_left_out: float


def select_nodes(explanation: Explanation, limit: int = MAX_NODES) -> list[str]:
    """Choose what to draw: the path and the victim, the candidate causes, then their neighbours.

    Neighbours come nearest first, and among equals the more suspicious first.
    """
    known = {node.node: node for node in explanation.nodes}
    chosen: dict[str, None] = {}

    def take(names: Iterable[str]) -> None:
        for name in names:
            if name in known and len(chosen) < limit:
                chosen.setdefault(name)

    take([explanation.impact.victim.node])
    if explanation.path is not None:
        take(name for hop in explanation.path.hops for name in (hop.source, hop.target))
    take(cause.node for cause in explanation.causes)
    neighbours = _neighbours(explanation)

    def suspicion(name: str) -> tuple[float, float, str]:
        node = known[name]
        return (-node.cause_probability, -(node.deviation or 0.0), name)

    frontier = list(chosen)
    while frontier and len(chosen) < limit:
        ring = {name for node in frontier for name in neighbours.get(node, ())} - chosen.keys()
        frontier = sorted((name for name in ring if name in known), key=suspicion)
        take(frontier)
    return list(chosen)


def _neighbours(explanation: Explanation) -> dict[str, list[str]]:
    neighbours: dict[str, list[str]] = {}
    for edge in explanation.edges:
        neighbours.setdefault(edge.caller, []).append(edge.callee)
        neighbours.setdefault(edge.callee, []).append(edge.caller)
    return neighbours


def _distances(explanation: Explanation) -> dict[str, int]:
    """Hops from the victim, whichever way the dependencies point."""
    neighbours = _neighbours(explanation)
    start = explanation.impact.victim.node
    distance = {start: 0}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for other in neighbours.get(node, ()):
            if other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return distance


def draw_graph(explanation: Explanation, limit: int = MAX_NODES) -> Graph:
    """Lay the graph out in columns by distance from the victim, which stands at the right; the path is a line."""
    selected = select_nodes(explanation, limit)
    nodes = {node.node: node for node in explanation.nodes}
    places = _place(explanation, selected)
    on_path = _path_edges(explanation)
    first = explanation.causes[0].node if explanation.causes else None
    victim = explanation.impact.victim.node

    drawn_nodes = []
    for name in selected:
        node = nodes[name]
        x, y = places[name]
        probability = f"{fmt.share(node.cause_probability)} cause"
        deviation = "not measured" if node.deviation is None else f"largest deviation {fmt.number(node.deviation)} σ"
        role = "victim" if name == victim else "cause" if name == first else ""
        drawn_nodes.append(
            DrawnNode(
                x=x,
                y=y,
                label=fmt.shorten(fmt.printable(name), _LABEL_LENGTH),
                caption=f"{fmt.words(node.kind)} · {'victim' if role == 'victim' else probability}",
                tooltip=f"{fmt.printable(name)} ({fmt.words(node.kind)}): {probability}, {deviation}",
                tint=0.0 if node.cause_probability < 0.005 else round(0.06 + 0.44 * node.cause_probability, 3),
                rounded=node.kind == "service",
                role=role,
            )
        )
    drawn_edges = []
    kept = set(selected)
    for edge in explanation.edges:
        if edge.caller not in kept or edge.callee not in kept or edge.caller == edge.callee:
            continue
        verb = fmt.relation_verb(edge.relation)
        tooltip = (
            f"{fmt.printable(edge.caller)} {verb} {fmt.printable(edge.callee)}: "
            f"the anomaly crossed with {fmt.share(edge.probability)}"
        )
        hop = next((pair for pair in ((edge.callee, edge.caller), (edge.caller, edge.callee)) if pair in on_path), None)
        start, end = hop or (edge.callee, edge.caller)
        data, label_x, label_y = _curve(places[start], places[end])
        drawn_edges.append(
            DrawnEdge(
                data,
                edge.relation,
                hop is not None,
                tooltip,
                fmt.share(on_path[hop]) if hop is not None else "",
                label_x,
                label_y,
            )
        )
    # The path is drawn last, above the rest.
    drawn_edges.sort(key=lambda edge: edge.on_path)
    left_out = [node.cause_probability for node in explanation.nodes if node.node not in kept]
    return Graph(
        width=max((x for x, _ in places.values()), default=0.0) + _BOX_WIDTH / 2 + _MARGIN,
        height=max((y for _, y in places.values()), default=0.0) + _BOX_HEIGHT / 2 + _MARGIN,
        box_width=_BOX_WIDTH,
        box_height=_BOX_HEIGHT,
        nodes=tuple(drawn_nodes),
        edges=tuple(drawn_edges),
        relations=tuple(sorted({(edge.relation, fmt.relation_verb(edge.relation)) for edge in drawn_edges})),
        drawn=len(selected),
        total=len(explanation.nodes),
        largest_left_out=max(left_out, default=0.0),
    )


def _path_edges(explanation: Explanation) -> dict[tuple[str, str], float]:
    hops = explanation.path.hops if explanation.path is not None else ()
    return {(hop.source, hop.target): hop.probability for hop in hops}


def _place(explanation: Explanation, selected: Sequence[str]) -> dict[str, tuple[float, float]]:
    distance = _distances(explanation)
    connected = [distance[name] for name in selected if name in distance]
    # Nodes that nothing connects to the victim stand in a column of their own.
    apart = max(connected, default=0) + 1
    columns: dict[int, list[str]] = {}
    for name in selected:
        columns.setdefault(distance.get(name, apart), []).append(name)
    path = [name for pair in _path_edges(explanation) for name in pair]
    spine = set(path) | {explanation.impact.victim.node}
    neighbours = _neighbours(explanation)
    row: dict[str, float] = {}
    depths = sorted(columns)
    for sweep in range(4):
        for depth in depths if sweep % 2 == 0 else reversed(depths):
            names = columns[depth]

            def centre(name: str) -> tuple[float, str]:
                rows = [row[other] for other in neighbours.get(name, ()) if other in row and other != name]
                return (sum(rows) / len(rows) if rows else row.get(name, 0.0), name)

            # Path nodes keep the middle, so that the path reads as one straight line.
            middle = sorted((name for name in names if name in spine), key=lambda name: (name not in path, name))
            rest = sorted((name for name in names if name not in spine), key=centre)
            above = [name for name in rest if centre(name)[0] < 0]
            half = len(rest) // 2
            if abs(len(above) - half) > 1:
                above = rest[:half]
            below = [name for name in rest if name not in set(above)]
            if middle:
                order = [*above, *middle, *below]
                origin = float(len(above))
            else:
                order = rest
                origin = (len(rest) - 1) / 2
            for index, name in enumerate(order):
                row[name] = index - origin
    top = min(row.values(), default=0.0)
    last = len(depths) - 1
    return {
        name: (
            _MARGIN + _BOX_WIDTH / 2 + (last - column) * _COLUMN_PITCH,
            _MARGIN + _BOX_HEIGHT / 2 + (row[name] - top) * _ROW_PITCH,
        )
        for column, depth in enumerate(depths)
        for name in columns[depth]
    }


def _curve(start: tuple[float, float], end: tuple[float, float]) -> tuple[str, float, float]:
    (x1, y1), (x2, y2) = start, end
    half_width, half_height = _BOX_WIDTH / 2, _BOX_HEIGHT / 2
    if x1 != x2:
        side = 1.0 if x2 > x1 else -1.0
        ax, bx = x1 + side * half_width, x2 - side * half_width
        bend = (bx - ax) / 2
        data = f"M{ax:.1f} {y1:.1f}C{ax + bend:.1f} {y1:.1f} {bx - bend:.1f} {y2:.1f} {bx:.1f} {y2:.1f}"
        return data, (ax + bx) / 2, (y1 + y2) / 2
    side = 1.0 if y2 > y1 else -1.0
    if abs(y2 - y1) <= _ROW_PITCH + 1:
        ay, by = y1 + side * half_height, y2 - side * half_height
        return f"M{x1:.1f} {ay:.1f}L{x2:.1f} {by:.1f}", x1, (ay + by) / 2
    ax = x1 + half_width
    bulge = ax + min(60.0, 18.0 + abs(y2 - y1) / 8)
    data = f"M{ax:.1f} {y1:.1f}C{bulge:.1f} {y1:.1f} {bulge:.1f} {y2:.1f} {ax:.1f} {y2:.1f}"
    return data, ax + 0.75 * (bulge - ax), (y1 + y2) / 2


# --- time series ------------------------------------------------------------------------------------------------------

CHART_WIDTH: Final = 460.0
CHART_HEIGHT: Final = 170.0
_PLOT_LEFT: Final = 62.0
_PLOT_RIGHT: Final = 452.0
_PLOT_TOP: Final = 10.0
_PLOT_BOTTOM: Final = 142.0
_MAX_POINTS: Final = 400


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Band:
    """A shaded span of the time axis."""

    x: float
    width: float
    role: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One small time-series plot."""

    node: str
    metric: str
    line: str
    dots: tuple[tuple[float, float], ...]
    bands: tuple[Band, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    onset_x: float | None
    break_x: float | None
    baseline_y: float | None
    baseline_label: str
    description: str


@dataclass(frozen=True, slots=True)
class _TimeAxis:
    """Maps time to x. Two segments when the baseline is so long, or so long ago, that the incident would vanish."""

    segments: tuple[tuple[float, float, float, float], ...]

    @classmethod
    def of(cls, baseline: Window, incident: Window) -> _TimeAxis:
        spans = sorted(
            (window.start.timestamp(), window.end.timestamp(), window is incident) for window in (baseline, incident)
        )
        start, end = spans[0][0], max(span[1] for span in spans)
        if incident.seconds >= 0.2 * (end - start):
            return cls(((start, end, _PLOT_LEFT, _PLOT_RIGHT),))
        gap = 10.0
        room = _PLOT_RIGHT - _PLOT_LEFT - gap
        share = 0.45 if spans[0][2] else 0.55
        middle = _PLOT_LEFT + share * room
        return cls(
            (
                (spans[0][0], spans[0][1], _PLOT_LEFT, middle),
                (spans[1][0], spans[1][1], middle + gap, _PLOT_RIGHT),
            )
        )

    def x(self, time: float) -> float | None:
        for start, end, left, right in self.segments:
            if start <= time <= end:
                return left + (right - left) * (time - start) / (end - start)
        return None

    def breaks(self) -> float | None:
        if len(self.segments) == 1:
            return None
        return (self.segments[0][3] + self.segments[1][2]) / 2

    def ticks(self) -> tuple[Tick, ...]:
        ticks: list[Tick] = []
        for start, end, left, right in self.segments:
            step = _time_step((end - start) / max(2.0, (right - left) / 90.0))
            days = step >= 86400
            time = math.ceil(start / step) * step
            while time <= end:
                at = left + (right - left) * (time - start) / (end - start)
                moment = datetime.fromtimestamp(time, UTC)
                if not ticks or at - ticks[-1].at > 44:
                    ticks.append(Tick(at, moment.strftime("%d %b" if days else "%H:%M" if step >= 60 else "%H:%M:%S")))
                time += step
        return tuple(ticks)


def _time_step(least: float) -> float:
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    return next((float(step) for step in steps if step >= least), 86400.0 * math.ceil(least / 86400))


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round values from at most ``low`` to at least ``high``."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high <= low:
        low, high = low - 0.5 * abs(low or 1.0), high + 0.5 * abs(high or 1.0)
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def draw_charts(explanation: Explanation, limit: int = MAX_CHARTS) -> tuple[tuple[Chart, ...], int]:
    """Draw the explanation's series in its order; return the charts and how many series were left out."""
    charts = [
        _chart(series, explanation)
        for series in explanation.series
        if any(value is not None and math.isfinite(value) for value in series.values)
    ]
    return tuple(charts[:limit]), max(0, len(charts) - limit)


def _chart(series: Series, explanation: Explanation) -> Chart:
    impact = explanation.impact
    axis = _TimeAxis.of(impact.baseline_window, impact.window)
    points = sorted(
        (
            (time, value if value is not None and math.isfinite(value) else None)
            for time, value in zip(series.timestamps, series.values, strict=True)
        ),
        key=lambda point: point[0],
    )
    measured = [(time, value) for time, value in points if value is not None]
    low, high = min(value for _, value in measured), max(value for _, value in measured)
    # Start at zero unless that would flatten the change, as with an availability of 99.1 %.
    if low >= 0 and high - low > 0.25 * high:
        low = 0.0
    levels = nice_ticks(low, high)
    bottom, top = levels[0], levels[-1]

    def y(value: float) -> float:
        return _PLOT_BOTTOM - (_PLOT_BOTTOM - _PLOT_TOP) * (value - bottom) / (top - bottom)

    line, dots = _line(points, axis, y)
    start, end = impact.baseline_window.start.timestamp(), impact.baseline_window.end.timestamp()
    normal = sorted(value for time, value in measured if start <= time < end)
    median = normal[len(normal) // 2] if normal else None
    bands = []
    for window, role in ((impact.baseline_window, "baseline"), (impact.window, "incident")):
        left, right = axis.x(window.start.timestamp()), axis.x(window.end.timestamp())
        if left is not None and right is not None:
            bands.append(Band(left, right - left, role))
    onset = axis.x(impact.onset.timestamp()) if impact.onset is not None else None
    label = fmt.metric_label(series.metric)
    return Chart(
        node=fmt.printable(series.node),
        metric=label,
        line=line,
        dots=dots,
        bands=tuple(bands),
        x_ticks=axis.ticks(),
        y_ticks=tuple(Tick(y(level), fmt.quantity(level, series.unit)) for level in levels),
        onset_x=onset,
        break_x=axis.breaks(),
        baseline_y=None if median is None else y(median),
        baseline_label="" if median is None else f"baseline median {fmt.quantity(median, series.unit)}",
        description=(
            f"{label} of {fmt.printable(series.node)}: from {fmt.quantity(min(v for _, v in measured), series.unit)} "
            f"to {fmt.quantity(max(v for _, v in measured), series.unit)}, {fmt.plural(len(measured), 'sample')}"
        ),
    )


def _line(
    points: Sequence[tuple[float, float | None]], axis: _TimeAxis, y: Callable[[float], float]
) -> tuple[str, tuple[tuple[float, float], ...]]:
    """Return path data with a break at each gap, and the samples that stand alone between gaps."""
    spacing = sorted(later[0] - earlier[0] for earlier, later in itertools.pairwise(points))
    widest = 3.0 * spacing[len(spacing) // 2] if spacing else math.inf
    runs: list[list[tuple[float, float]]] = [[]]
    previous: tuple[float, int] | None = None
    for time, value in points:
        x = axis.x(time)
        if value is None or x is None:
            runs.append([])
            continue
        segment = next(i for i, (start, end, _, _) in enumerate(axis.segments) if start <= time <= end)
        if previous is not None and (time - previous[0] > widest or segment != previous[1]):
            runs.append([])
        runs[-1].append((x, y(value)))
        previous = (time, segment)
    total = sum(len(run) for run in runs)
    data, dots = [], []
    for run in runs:
        if len(run) == 1:
            dots.append(run[0])
        elif run:
            kept = _thin(run, max(4, round(_MAX_POINTS * len(run) / total)))
            data.append("M" + "L".join(f"{x:.1f} {height:.1f}" for x, height in kept))
    return "".join(data), tuple((round(x, 1), round(height, 1)) for x, height in dots[:_MAX_POINTS])


def _thin(run: list[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """Keep at most about ``limit`` points, with the lowest and highest of each stretch, so that no spike is lost."""
    if len(run) <= limit:
        return run
    size = math.ceil(2 * len(run) / limit)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(run), size):
        chunk = run[start : start + size]
        ends = {min(range(len(chunk)), key=lambda i: chunk[i][1]), max(range(len(chunk)), key=lambda i: chunk[i][1])}
        kept.extend(chunk[index] for index in sorted(ends))
    return kept


# --- attribution bars -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """One attribution: positions are per cent of the bar's width."""

    nodes: str
    start: float
    width: float
    low: float
    high: float
    figure: str
    interval: str
    counterfactual: str
    shapley: str
    extrapolates: bool


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of one engine, on one scale."""

    lead: str
    zero: float
    ticks: tuple[Tick, ...]
    bars: tuple[Bar, ...]
    notes: tuple[str, ...]
    extrapolates: bool


def draw_bars(attribution: Attribution) -> Bars:
    """Scale the contributions from 0 to 100 %, or further where an interval reaches beyond."""
    low = min([0.0, *(min(entry.low, entry.contribution) for entry in attribution.entries)])
    high = max([1.0, *(max(entry.high, entry.contribution) for entry in attribution.entries)])

    def at(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    bars = []
    for entry in attribution.entries:
        left, right = sorted((at(0.0), at(entry.contribution)))
        bars.append(
            Bar(
                nodes=fmt.names(entry.nodes),
                start=left,
                width=round(right - left, 2),
                low=at(entry.low),
                high=at(entry.high),
                figure=fmt.share(entry.contribution),
                interval=fmt.interval(entry.low, entry.high),
                counterfactual=fmt.quantity(entry.counterfactual, attribution.unit),
                shapley="–" if entry.shapley is None else fmt.share(entry.shapley),
                extrapolates=entry.extrapolates,
            )
        )
    ticks = tuple(Tick(at(level), f"{round(100 * level)} %") for level in (0.0, 0.25, 0.5, 0.75, 1.0))
    return Bars(
        lead=(
            f"{fmt.metric_label(attribution.metric)} was {fmt.quantity(attribution.factual, attribution.unit)}; "
            f"with these nodes back to normal it would have been (engine: {fmt.words(attribution.engine)}):"
        ),
        zero=at(0.0),
        ticks=ticks,
        bars=tuple(bars),
        notes=tuple(fmt.printable(note) for note in attribution.notes),
        extrapolates=any(entry.extrapolates for entry in attribution.entries),
    )
