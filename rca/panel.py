"""Long metric tables as dense arrays on a regular grid: the input of feature extraction.

Baseline and incident each get their own grid, because they may lie months apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rca.columns import flat, floats, integers, valid
from rca.errors import InvalidInputError
from rca.graph import CallGraph, Floats, Ints, build
from rca.incident import Incident, Window

#: More grid steps than this in one window are averaged into fewer: a week at 1 s would not fit in memory.
MAX_STEPS = 720
#: Grid points before the incident window that go with it: what was normal just before, when the baseline is old.
LEAD = 3
#: Values at least this large are treated as not measured.
LARGEST = 1e15
#: Rows from which the sampling step is estimated.
SAMPLED_ROWS = 200_000
#: Bounds the memory of one metric's grid on large graphs.
MAX_CELLS = 20_000_000


@dataclass(frozen=True)
class Panel:
    """Everything measured, aligned with a `CallGraph` of N nodes and E edges.

    Attributes:
        baseline, window: metric name -> values, shape [N, Tb] and [N, LEAD + Ti]; NaN where nothing was measured. The
            first `LEAD` columns of a window lie before the incident.
        edge_baseline, edge_window: the callers' view of their callees, shape [E, Tb] and [E, LEAD + Ti].
        step, baseline_step: seconds between grid points of the window and of the baseline.
        window_start: Unix seconds of the first incident grid point (column `LEAD`).
        victim: node index; ``metric``: the victim's metric.
        onset: seconds from ``window_start`` to the reported start of the symptom, or None.
    """

    graph: CallGraph
    baseline: Mapping[str, Floats]
    window: Mapping[str, Floats]
    edge_baseline: Mapping[str, Floats]
    edge_window: Mapping[str, Floats]
    step: float
    baseline_start: float
    baseline_step: float
    window_start: float
    victim: int
    metric: str
    onset: float | None = None


def from_incident(incident: Incident, *, victim: str | None = None, metric: str | None = None) -> Panel:
    """Align the metrics of ``incident`` on a grid.

    Raises:
        NotFoundError: the victim is not in the call graph.
        InvalidInputError: there is nothing to align (no metric rows in either window).
    """
    header = incident.header
    graph = build(incident)
    victim_index = graph.find(victim or header.victim.node)
    table = incident.metrics
    times = integers(table.column("timestamp")) / 1e6
    values = floats(table.column("value"))
    node = _codes(table.column("node"), graph.index)
    metrics = flat(pc.dictionary_encode(table.column("metric")))
    metric_codes = integers(metrics.indices)
    metric_names = metrics.dictionary.to_pylist()
    is_edge = valid(table.column("peer"))
    peer = _codes(table.column("peer"), graph.index)
    # Several relations may join the same two nodes; what the caller measures belongs to the call.
    pairs = {}
    for k in np.argsort(-graph.relations, kind="stable"):
        pairs[int(graph.callers[k]) * len(graph.nodes) + int(graph.callees[k])] = int(k)
    edge = np.full(len(times), -1, dtype=np.int64)
    if is_edge.any():
        unique, inverse = np.unique(node[is_edge] * len(graph.nodes) + peer[is_edge], return_inverse=True)
        edge[is_edge] = np.array([pairs.get(int(key), -1) for key in unique], dtype=np.int64)[inverse]
    # Beyond any unit in use: a broken probe, and sums of it would overflow.
    usable = np.isfinite(values) & (np.abs(values) < LARGEST) & np.where(is_edge, (edge >= 0) & (peer >= 0), node >= 0)
    step = _step(times, node, peer, metric_codes, header.window)
    grids = {}
    spans = {}
    first = header.window.start - timedelta(seconds=LEAD * step)
    for name, span in (("baseline", header.baseline), ("window", Window(first, header.window.end))):
        inside = usable & (times >= span.start.timestamp()) & (times < span.end.timestamp())
        if inside.any() and span.seconds / step > _cells(span, step, len(graph.nodes) + len(graph.callers)):
            span = _trimmed(span, times[inside], step, keep_start=name == "window")
        spans[name] = span
        grids[name] = _grid(
            span, step, inside, times, values, node, edge, is_edge, metric_codes, metric_names,
            len(graph.nodes), len(graph.callers),
        )  # fmt: skip
    if not any(np.isfinite(values[:, LEAD:]).any() for group in grids["window"] for values in group.values()):
        raise InvalidInputError(
            f"incident {header.id}: no metric value lies in the incident window "
            f"{header.window.start:%Y-%m-%dT%H:%M:%SZ} to {header.window.end:%Y-%m-%dT%H:%M:%SZ}",
            cure="check the window and that timestamps are UTC: `rca incident show`",
        )
    return Panel(
        graph=graph,
        baseline=grids["baseline"][0],
        window=grids["window"][0],
        edge_baseline=grids["baseline"][1],
        edge_window=grids["window"][1],
        step=step,
        baseline_start=spans["baseline"].start.timestamp(),
        baseline_step=_width(spans["baseline"], step, len(graph.nodes) + len(graph.callers)),
        window_start=header.window.start.timestamp(),
        victim=victim_index,
        metric=metric or header.victim.metric,
        onset=None if header.onset is None else header.onset.timestamp() - header.window.start.timestamp(),
    )


def _codes(column: pa.ChunkedArray, index: Mapping[str, int]) -> Ints:
    """Map a string column to node positions, -1 for unknown or null."""
    encoded = flat(pc.dictionary_encode(column))
    lookup = np.array([index.get(name, -1) for name in encoded.dictionary.to_pylist()] + [-1], dtype=np.int64)
    mapped: Ints = lookup[integers(encoded.indices, missing=len(lookup) - 1)]
    return mapped


def _step(times: Floats, node: Ints, peer: Ints, metric: Ints, window: Window) -> float:
    """The usual distance between two samples of one series, in seconds."""
    if len(times) > SAMPLED_ROWS:
        # Some series are enough to know the usual distance: keep those of every k-th node.
        some = node % (len(times) // SAMPLED_ROWS + 1) == 0
        if some.sum() > SAMPLED_ROWS // 20:
            times, node, peer, metric = times[some], node[some], peer[some], metric[some]
    if len(times) < 2:
        return max(window.seconds, 1.0)
    order = np.lexsort((times, metric, peer, node))
    same = (
        (np.diff(node[order]) == 0) & (np.diff(peer[order]) == 0) & (np.diff(metric[order]) == 0)
    )  # fmt: skip
    gaps = np.diff(times[order])[same]
    gaps = gaps[gaps > 0]
    step = float(np.median(gaps)) if len(gaps) else window.seconds
    return max(step, window.seconds / MAX_STEPS, 1e-3)


def _cells(span: Window, step: float, rows: int) -> int:
    """Grid points of a window. A long one keeps its step only while that fits in memory."""
    most = min(20 * MAX_STEPS, max(MAX_STEPS, MAX_CELLS // max(rows, 1)))
    return min(max(int(np.ceil(span.seconds / step - 1e-6)), 1), most)


def _trimmed(span: Window, times: Floats, step: float, *, keep_start: bool) -> Window:
    """The part of a window that holds samples: most of a window of years would be empty cells."""
    start = span.start if keep_start else datetime.fromtimestamp(float(times.min()), UTC)
    end = datetime.fromtimestamp(float(times.max()) + step, UTC)
    return Window(start, min(max(end, start + timedelta(seconds=step)), span.end))


def _width(span: Window, step: float, rows: int) -> float:
    return span.seconds / _cells(span, step, rows)


def _grid(
    span: Window,
    step: float,
    inside: np.ndarray[tuple[int], np.dtype[np.bool_]],
    times: Floats,
    values: Floats,
    node: Ints,
    edge: Ints,
    is_edge: np.ndarray[tuple[int], np.dtype[np.bool_]],
    metric: Ints,
    names: list[str],
    node_count: int,
    edge_count: int,
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Average the samples of each series in each grid cell; only metrics with a value in the window appear."""
    steps = _cells(span, step, node_count + edge_count)
    width = span.seconds / steps
    cell = np.minimum(((times - span.start.timestamp()) / width).astype(np.int64), steps - 1)
    nodes: dict[str, Floats] = {}
    edges: dict[str, Floats] = {}
    for target, rows, position, count in (
        (nodes, inside & ~is_edge, node, node_count),
        (edges, inside & is_edge, edge, edge_count),
    ):
        for code in np.unique(metric[rows]).tolist():
            chosen = rows & (metric == code)
            flat = position[chosen] * steps + cell[chosen]
            total = np.bincount(flat, weights=values[chosen], minlength=count * steps)
            number = np.bincount(flat, minlength=count * steps)
            with np.errstate(invalid="ignore", divide="ignore"):
                target[names[int(code)]] = (total / number).reshape(count, steps)
    return nodes, edges
