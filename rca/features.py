"""What the network sees: deviations from each node's own baseline, and how they add up along the calls.

Nothing here depends on a node's name or on absolute scale beyond R1's features, so that a model trained on simulated
clusters works on graphs it never saw (docs/architecture.md, decision 4). Missing measurements are masked, not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import networkx as nx
import numpy as np
import numpy.typing as npt

from rca.graph import NODE_KINDS, RELATIONS, CallGraph, Floats, Ints, hops
from rca.incident import Relation
from rca.panel import LEAD, Panel
from rca.signals import Signal, signal_of

#: Version of the feature layout; weights carry the version they were trained on.
VERSION: Final = 1

Bools = npt.NDArray[np.bool_]
Floats32 = npt.NDArray[np.float32]

#: Least standard deviation by unit: below it, a change cannot be told from rounding.
_FLOOR = {Signal.ERRORS: 0.003, Signal.LATENCY: 2e-4, Signal.CPU: 0.01, Signal.MEMORY: 0.005, Signal.GPU: 0.01}
_RELATIVE_FLOOR = 0.02
#: Share of the remaining samples that must be outside for a value to have left its baseline for good.
STAYS_OUTSIDE = 0.6
_CENTRES = (
    "latency_mean_seconds",
    "latency_p90_seconds",
    "latency_p95_seconds",
    "latency_p50_seconds",
    "latency_p99_seconds",
)
_TAILS = ("latency_p95_seconds", "latency_p90_seconds", "latency_p99_seconds")


@dataclass(frozen=True)
class Deviation:
    """How one metric of R rows (nodes or edges) changed. All arrays have shape [R]; NaN where unknown.

    Attributes:
        baseline, sigma: median and robust standard deviation (with a floor) before the incident.
        post: mean after the onset. ``peak``: the most extreme value after the onset.
        z: (post - baseline) / sigma. ``z_peak``: of the peak. ``z_local``: against the samples just before the onset.
        ratio: log(post / baseline). ``count``, ``baseline_count``: samples behind the two.
        onset: first step of the window at which the value left the baseline for good, NaN if it never did.
    """

    metric: str
    baseline: Floats
    sigma: Floats
    post: Floats
    peak: Floats
    z: Floats
    z_peak: Floats
    z_local: Floats
    ratio: Floats
    count: Ints
    baseline_count: Ints
    onset: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Features:
    """Inputs of the network and the statistics behind them.

    Attributes:
        node: [N, len(NODE_FEATURES)] float32. ``edge``: [2E, len(EDGE_FEATURES)] float32.
        edge_index: [2, 2E]; the first E columns carry the effect from callee to caller, the last E the load from
            caller to callee.
        onset: column of the window (lead-in included) at which the symptom began.
        deviations: per node metric. ``edge_deviations``: per call metric.
        weight, error_weight: effect on the victim of one second, or of one more error, at each node, [N]. ``own``,
            ``own_errors``: each node's own excess, in seconds
            (latency) or as a ratio (errors), [N]. ``calls``: calls per request of each edge, [E].
        centre: the latency metric that the seconds refer to, or None when no latency is measured.
    """

    node: Floats32
    edge: Floats32
    edge_index: Ints
    onset: int
    deviations: Mapping[str, Deviation]
    edge_deviations: Mapping[str, Deviation]
    weight: Floats
    error_weight: Floats
    own: Floats
    own_errors: Floats
    calls: Floats
    centre: str | None


def _sorted_stats(values: Floats) -> tuple[Floats, Floats, Ints, Floats]:
    """Median, robust sigma, number of samples and standard deviation of each row, ignoring NaN."""
    count = np.isfinite(values).sum(axis=1)
    median = _median(values, count)
    sigma = 1.4826 * _median(np.abs(values - median[:, None]), count)
    filled = np.where(np.isfinite(values), values - median[:, None], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt((filled**2).sum(axis=1) / count)
    return median, sigma, count, spread


def _median(values: Floats, count: Ints) -> Floats:
    if values.shape[1] == 0:
        return np.full(len(values), np.nan)
    ordered = np.sort(values, axis=1)  # NaN sorts last
    rows = np.arange(len(values))
    low = ordered[rows, np.maximum((count - 1) // 2, 0)]
    high = ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.where(count > 0, (low + high) / 2, np.nan)


def _row_mean(values: Floats) -> Floats:
    count = np.isfinite(values).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        out: Floats = np.where(count > 0, np.nansum(values, axis=1) / count, np.nan)
    return out


def deviate(metric: str, baseline: Floats, window: Floats, onset: int, step: float) -> Deviation:
    """Compare ``window`` ([R, Ti]) with ``baseline`` ([R, Tb]) from column ``onset`` on; ``step`` in seconds."""
    signal = signal_of(metric)
    median, sigma, baseline_count, spread = _sorted_stats(baseline)
    floor = _FLOOR.get(signal, 1e-9)
    sigma = np.maximum.reduce([sigma, 0.3 * spread, _RELATIVE_FLOOR * np.abs(median), np.full_like(sigma, floor)])
    if signal is Signal.TRAFFIC:
        # A count has at least the spread of chance: a rate of one request an hour is not "always zero".
        sigma = np.maximum(sigma, np.sqrt(np.maximum(np.nan_to_num(median), 0.0) * step + 1.0) / step)
    # A spread estimated from few samples is itself unsure.
    sigma = sigma * np.sqrt(1.0 + 4.0 / np.maximum(baseline_count, 1))
    post_values = window[:, onset:]
    post = _row_mean(post_values)
    count = np.isfinite(post_values).sum(axis=1)
    far = np.where(np.isfinite(post_values), np.abs(post_values - median[:, None]), -1.0)
    pick = np.argmax(far, axis=1)
    peak = post_values[np.arange(len(window)), pick]
    before = _row_mean(window[:, :onset]) if onset > 0 else np.full(len(window), np.nan)
    tiny = 1e-9
    with np.errstate(invalid="ignore", divide="ignore"):
        z = (post - median) / sigma
        z_all = (window - median[:, None]) / sigma[:, None]
        ratio = np.log(np.maximum(post, tiny) / np.maximum(median, tiny))
    ordered = np.sort(baseline, axis=1) if baseline.shape[1] else np.full((len(baseline), 1), np.nan)
    low = ordered[:, 0]
    high = ordered[np.arange(len(ordered)), np.maximum(baseline_count - 1, 0)]
    return Deviation(
        metric=metric,
        baseline=median,
        sigma=sigma,
        post=post,
        peak=peak,
        z=z,
        z_peak=(peak - median) / sigma,
        z_local=(post - before) / sigma,
        ratio=ratio,
        count=count,
        baseline_count=baseline_count,
        onset=_onsets(z_all, np.sign(np.nan_to_num(z))),
        low=low,
        high=high,
    )


def _onsets(z: Floats, sign: Floats) -> Floats:
    """First step from which the signed deviation is large, for rows that deviate at all; [R]."""
    if z.shape[1] == 0:
        return np.full(len(z), np.nan)
    outside = np.nan_to_num(z * sign[:, None], nan=0.0) > 3.0
    seen = np.isfinite(z)
    # From the right: how many of the samples from here on are outside.
    rest = np.cumsum(outside[:, ::-1], axis=1)[:, ::-1]
    left = np.maximum(np.cumsum(seen[:, ::-1], axis=1)[:, ::-1], 1)
    for_good = outside & (rest > STAYS_OUTSIDE * left)
    first = np.where(for_good.any(axis=1), for_good.argmax(axis=1), outside.argmax(axis=1))
    return np.where(outside.any(axis=1), first, np.nan)


def symptom_onset(panel: Panel) -> int:
    """Column of the window at which the victim's metric left its baseline; `LEAD` when that cannot be told.

    The change point maximises the likelihood gain of one shift that lasts to the end of the window.
    """
    window = panel.window.get(panel.metric)
    if window is None:
        return LEAD
    values = window[panel.victim]
    steps = len(values)
    if panel.onset is not None:
        return int(np.clip(LEAD + round(panel.onset / panel.step), LEAD, max(steps - 1, LEAD)))
    base = panel.baseline.get(panel.metric, np.full((len(window), 0), np.nan))[panel.victim][None, :]
    median, sigma, count, spread = _sorted_stats(base)
    floor = _FLOOR.get(signal_of(panel.metric), 1e-9)
    if count[0] >= 3:
        centre = float(median[0])
        scale = max(float(sigma[0]), 0.3 * float(spread[0]), _RELATIVE_FLOOR * abs(centre), floor)
    else:
        # No history: take the level from the first samples, and the noise from how much neighbours differ.
        known = values[np.isfinite(values)]
        if len(known) < 4:
            return LEAD
        centre = float(np.median(known[: max(3, len(known) // 3)]))
        noise = float(np.median(np.abs(np.diff(known)))) * 1.4826 / np.sqrt(2.0)
        scale = max(noise, _RELATIVE_FLOOR * abs(centre), floor)
    y = _without_spikes(np.clip((values - centre) / scale, -8.0, 8.0))
    best, where = 0.0, LEAD
    for k in range(steps):
        tail = y[k:][np.isfinite(y[k:])]
        if len(tail):
            gain = len(tail) * float(tail.mean()) ** 2
            if gain > best + 1e-12:
                best, where = gain, k
    return where


def _without_spikes(values: Floats) -> Floats:
    """Running median of three: removes single outliers and keeps steps where they are; NaN stays."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 5:
        return values
    inner = values[known]
    padded = np.concatenate([inner[:1], inner, inner[-1:]])
    out = values.copy()
    out[known] = np.median(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0)
    return out


#: Spec R1: what a node of the call-chain graph carries.
R1_NODE = ("log1p_request_rate", "error_ratio", "log1p_p99_seconds")


def r1_node_features(panel: Panel) -> tuple[Floats, Bools]:
    """Spec R1's node features over the incident window: log1p(QPS), error ratio, log1p(P99 in seconds).

    Returns:
        Values [N, 3] in the order of `R1_NODE` (0 where missing), and the mask of what was measured [N, 3]. The network
        is not given these: absolute levels tell nodes apart by size, not by what went wrong.
    """
    blank = np.full(len(panel.graph.nodes), np.nan)

    def level(*names: str) -> Floats:
        for name in names:
            if name in panel.window:
                return _row_mean(panel.window[name][:, LEAD:])
        return blank

    columns = [np.log1p(level("request_rate")), level("error_ratio"), np.log1p(level("latency_p99_seconds", *_TAILS))]
    values = np.stack(columns, axis=1)
    known = np.isfinite(values)
    return np.where(known, values, 0.0), known


def annotated(panel: Panel) -> nx.MultiDiGraph:
    """The call graph as networkx with R1's features on nodes and edges; what was not measured is not there."""
    graph = panel.graph.to_networkx()
    values, known = r1_node_features(panel)
    for row, node in enumerate(panel.graph.nodes):
        graph.nodes[node].update({name: float(values[row, k]) for k, name in enumerate(R1_NODE) if known[row, k]})
    return graph


def _squash(values: Floats) -> Floats:
    """Signed log: keeps the order of large deviations and the sign, tames the scale."""
    out: Floats = np.sign(values) * np.log1p(np.abs(values))
    return out


class _Columns:
    """Collects named feature columns; NaN becomes 0 and a mask column says so."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.names: list[str] = []
        self.columns: list[Floats] = []

    def add(self, name: str, values: Floats | float) -> None:
        self.names.append(name)
        column = np.broadcast_to(np.asarray(values, dtype=np.float64), (self.rows,))
        self.columns.append(np.clip(np.nan_to_num(column, nan=0.0, posinf=12.0, neginf=-12.0), -12.0, 12.0))

    def mask(self, name: str, values: Floats) -> None:
        self.names.append(f"{name}_known")
        self.columns.append(np.isfinite(values).astype(np.float64))

    def matrix(self) -> Floats32:
        return (
            np.stack(self.columns, axis=1).astype(np.float32) if self.columns else np.zeros((self.rows, 0), np.float32)
        )


def extract(panel: Panel) -> Features:
    """Compute all features of ``panel``."""
    graph = panel.graph
    count, edges = len(graph.nodes), len(graph.callers)
    onset = symptom_onset(panel)
    deviations = {
        name: deviate(name, panel.baseline.get(name, np.full((count, 0), np.nan)), values, onset, panel.step)
        for name, values in sorted(panel.window.items())
    }
    edge_deviations = {
        name: deviate(name, panel.edge_baseline.get(name, np.full((edges, 0), np.nan)), values, onset, panel.step)
        for name, values in sorted(panel.edge_window.items())
    }
    centre = _centre_metric(panel, deviations)
    calls, calls_now, calls_known = call_weights(graph, deviations, edge_deviations)
    blank = np.full(count, np.nan)
    change = blank if centre is None else deviations[centre].post - deviations[centre].baseline
    edge_change = _edge_change(graph, centre, change, edge_deviations)
    is_call = (graph.relations == RELATIONS.index(Relation.CALLS)) & ~graph.asynchronous
    own, _ = _own_excess(graph, is_call, calls, change, edge_change)
    error = deviations.get("error_ratio")
    error_change = blank if error is None else error.post - error.baseline
    once = np.minimum(calls, 1.0)
    own_errors, _ = _own_excess(graph, is_call, once, error_change, error_change[graph.callees])
    weight = victim_weights(graph, is_call, calls, panel.victim)
    error_weight = victim_weights(graph, is_call, once, panel.victim)
    node = _node_features(
        panel, onset, deviations, edge_deviations, centre, change, own, own_errors, error_change,
        weight, error_weight, is_call,
    )  # fmt: skip
    edge = _edge_features(
        panel, edge_deviations, deviations, centre, calls, calls_now, calls_known, change, edge_change,
        error_change, weight, is_call,
    )  # fmt: skip
    index = np.concatenate(
        [np.stack([graph.callees, graph.callers]), np.stack([graph.callers, graph.callees])], axis=1
    ).astype(np.int64)
    return Features(
        node=node.matrix(),
        edge=edge,
        edge_index=index,
        onset=onset,
        deviations=deviations,
        edge_deviations=edge_deviations,
        weight=weight,
        error_weight=error_weight,
        own=own,
        own_errors=own_errors,
        calls=calls,
        centre=centre,
    )


def _centre_metric(panel: Panel, deviations: Mapping[str, Deviation]) -> str | None:
    """The latency statistic in which excess time is counted: one that the victim and most nodes have."""
    known = {
        name: np.isfinite(deviations[name].post) & np.isfinite(deviations[name].baseline)
        for name in _CENTRES
        if name in deviations
    }
    if not known:
        return None
    anywhere = np.logical_or.reduce(list(known.values()))
    if not anywhere.any():
        return None

    def preference(name: str) -> tuple[bool, bool, int]:
        enough = known[name].sum() >= 0.5 * anywhere.sum()
        return (not known[name][panel.victim], not enough, _CENTRES.index(name))

    return min(known, key=preference)


def call_weights(
    graph: CallGraph, deviations: Mapping[str, Deviation], edge_deviations: Mapping[str, Deviation]
) -> tuple[Floats, Floats, Bools]:
    """Calls per request of the caller, before and during the incident, and whether they were measured; each [E].

    Without a rate of the edge itself, a callee's requests are shared among its callers by their own rates.
    """
    edges = len(graph.callers)
    rate = deviations.get("request_rate")
    edge_rate = edge_deviations.get("request_rate")
    out = []
    known = np.zeros(edges, dtype=bool)
    called = graph.relations == RELATIONS.index(Relation.CALLS)
    for when in ("baseline", "post"):
        node_rate = np.full(len(graph.nodes), np.nan) if rate is None else getattr(rate, when)
        per_edge = graph.edge_static[:, 0].copy() if when == "baseline" else np.full(edges, np.nan)
        if edge_rate is not None:
            measured = getattr(edge_rate, when)
            per_edge = np.where(np.isfinite(measured), measured, per_edge)
        with np.errstate(invalid="ignore", divide="ignore"):
            direct = per_edge / node_rate[graph.callers]
            total = np.bincount(
                graph.callees[called],
                weights=np.nan_to_num(node_rate[graph.callers[called]]),
                minlength=len(graph.nodes),
            )
            shared = node_rate[graph.callees] / total[graph.callees]
        weight = np.where(np.isfinite(direct), direct, shared)
        if when == "baseline":
            known = np.isfinite(weight)
        out.append(np.where(np.isfinite(weight), weight, np.nan if when == "post" else 1.0))
    before = np.clip(out[0], 0.01, 20.0)
    now = np.clip(np.where(np.isfinite(out[1]), out[1], before), 0.001, 100.0)
    return before, now, known


def _edge_change(
    graph: CallGraph, centre: str | None, change: Floats, edge_deviations: Mapping[str, Deviation]
) -> Floats:
    """Extra seconds per call as the caller saw it, or else the callee's own extra seconds; [E]."""
    fallback = change[graph.callees]
    # Only the same statistic adds up: a change of a p95 cannot be set against a change of a mean.
    measured = edge_deviations.get(centre or "")
    if measured is None:
        return fallback
    seen = measured.post - measured.baseline
    return np.where(np.isfinite(seen), seen, fallback)


def _own_excess(
    graph: CallGraph, is_call: Bools, calls: Floats, change: Floats, edge_change: Floats
) -> tuple[Floats, Floats]:
    """Excess of each node that its callees do not explain, [N], and what each edge explains of its caller's, [E]."""
    carried = np.where(is_call & np.isfinite(edge_change), calls * np.nan_to_num(edge_change), 0.0)
    explained = np.bincount(graph.callers, weights=carried, minlength=len(graph.nodes))
    own = change - explained
    with np.errstate(invalid="ignore", divide="ignore"):
        share = carried / change[graph.callers]
    return own, np.where(is_call & np.isfinite(share), share, np.nan)


def victim_weights(graph: CallGraph, is_call: Bools, calls: Floats, victim: int) -> Floats:
    """How much one unit of excess at each node adds at the victim, along all calls between them; [N].

    Nodes are visited by their longest distance from the victim where the graph is acyclic; an edge that closes a
    cycle is not followed a second time.
    """
    size = len(graph.nodes)
    weight = np.zeros(size)
    weight[victim] = 1.0
    used = np.flatnonzero(is_call)
    callers, callees = graph.callers[used], graph.callees[used]
    reach = hops(victim, callers, callees, size) >= 0
    inside = reach[callers] & reach[callees]
    callers, callees, factor = callers[inside], callees[inside], calls[used][inside]
    out: dict[int, list[tuple[int, float]]] = {}
    waiting = np.bincount(callees, minlength=size)
    for caller, callee, value in zip(callers.tolist(), callees.tolist(), factor.tolist(), strict=True):
        out.setdefault(caller, []).append((callee, value))
    waiting[victim] = 0
    ready = [victim]
    done: set[int] = set()
    pending: list[int] = []
    while ready or pending:
        if not ready:
            # Only cycles are left: enter at the node that was reached first.
            ready.append(pending.pop(0))
        node = ready.pop()
        if node in done:
            continue
        done.add(node)
        for callee, value in out.get(node, ()):
            if callee in done:
                continue
            weight[callee] += weight[node] * value
            waiting[callee] -= 1
            if waiting[callee] <= 0:
                ready.append(callee)
            else:
                pending.append(callee)
        if not ready:
            pending = [p for p in pending if p not in done]
    return np.minimum(weight, 1e6)


def _strongest(deviations: Mapping[str, Deviation], signal: Signal, rows: int) -> tuple[Floats, Floats]:
    """The z with the largest size over the metrics of one signal, and that metric's change; each [R]."""
    z = np.full(rows, np.nan)
    delta = np.full(rows, np.nan)
    for name, item in deviations.items():
        if signal_of(name) is signal and name != "network_gap_mean_seconds":
            better = np.isfinite(item.z) & ~(np.abs(np.nan_to_num(z)) >= np.abs(item.z))
            z = np.where(better, item.z, z)
            delta = np.where(better, item.post - item.baseline, delta)
    return z, delta


def _pick(deviations: Mapping[str, Deviation], names: tuple[str, ...], field: str, rows: int) -> Floats:
    """First of ``names`` that is known, per row."""
    out = np.full(rows, np.nan)
    for name in names:
        if name in deviations:
            values = getattr(deviations[name], field)
            out = np.where(np.isfinite(out), out, values)
    return out


def _rank(values: Floats) -> Floats:
    """Position among the known values in [0, 1], 1 for the largest; NaN stays."""
    out = np.full(len(values), np.nan)
    known = np.flatnonzero(np.isfinite(values))
    if len(known):
        # Ties share their mean rank: the order of the nodes must not matter.
        _, place, counts = np.unique(values[known], return_inverse=True, return_counts=True)
        last = np.cumsum(counts)
        out[known] = (last - (counts - 1) / 2.0)[place] / len(known)
    return out


def _scatter_max(values: Floats, target: Ints, rows: int) -> Floats:
    out = np.full(rows, -np.inf)
    known = np.isfinite(values)
    np.maximum.at(out, target[known], values[known])
    return np.where(np.isfinite(out), out, np.nan)


def _node_features(
    panel: Panel,
    onset: int,
    deviations: Mapping[str, Deviation],
    edge_deviations: Mapping[str, Deviation],
    centre: str | None,
    change: Floats,
    own: Floats,
    own_errors: Floats,
    error_change: Floats,
    weight: Floats,
    error_weight: Floats,
    is_call: Bools,
) -> _Columns:
    graph = panel.graph
    rows = len(graph.nodes)
    victim = panel.victim
    blank = np.full(rows, np.nan)
    columns = _Columns(rows)

    def put(name: str, values: Floats) -> None:
        columns.add(name, _squash(values))

    centre_dev = deviations[centre] if centre else None
    for label, names in (
        ("centre", (centre,) if centre else ()),
        ("p50", ("latency_p50_seconds",)),
        ("tail", _TAILS),
        ("p99", ("latency_p99_seconds",)),
        ("self_time", ("self_time_mean_seconds",)),
    ):
        z = _pick(deviations, names, "z", rows)
        put(f"{label}_z", z)
        columns.mask(label, z)
        if label in ("centre", "tail", "self_time"):
            put(f"{label}_t", z * np.sqrt(_pick(deviations, names, "count", rows)))
            put(f"{label}_z_peak", _pick(deviations, names, "z_peak", rows))
            put(f"{label}_z_local", _pick(deviations, names, "z_local", rows))
            columns.add(f"{label}_ratio", _pick(deviations, names, "ratio", rows))
    error = deviations.get("error_ratio")
    put("error_z", blank if error is None else error.z)
    put("error_z_peak", blank if error is None else error.z_peak)
    put("error_t", _error_significance(deviations, panel.step, rows))
    put("error_z_local", blank if error is None else error.z_local)
    columns.add("error_change", 10.0 * np.sign(error_change) * np.sqrt(np.abs(error_change)))
    columns.mask("error", error_change)
    traffic = deviations.get("request_rate")
    put("traffic_z", blank if traffic is None else traffic.z)
    put("traffic_z_local", blank if traffic is None else traffic.z_local)
    columns.add("traffic_ratio", blank if traffic is None else traffic.ratio)
    columns.mask("traffic", blank if traffic is None else traffic.z)
    for signal in (Signal.CPU, Signal.MEMORY, Signal.GPU, Signal.QUEUE, Signal.NETWORK, Signal.OTHER):
        z, delta = _strongest(deviations, signal, rows)
        put(f"{signal.value}_z", z)
        if signal in (Signal.CPU, Signal.MEMORY, Signal.GPU):
            columns.add(f"{signal.value}_change", 5.0 * delta)
        columns.mask(signal.value, z)
    fragmentation = deviations.get("gpu_fragmentation_ratio")
    put("fragmentation_z", blank if fragmentation is None else fragmentation.z)
    cpu = deviations.get("cpu_utilization_ratio")
    put("cpu_z_local", blank if cpu is None else cpu.z_local)

    # R1's node features relative to the victim's: how much of the traffic and of the time is at stake here.
    p99 = _pick(deviations, ("latency_p99_seconds", *_TAILS), "post", rows)
    rate = blank if traffic is None else np.maximum(traffic.post, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        columns.add("rate_share", np.clip(np.log((rate + 1e-4) / (rate[victim] + 1e-4)), -10.0, 10.0) / 2.0)
        columns.add("p99_share", np.clip(np.log((p99 + 1e-6) / (p99[victim] + 1e-6)), -10.0, 10.0) / 2.0)
    columns.mask("rate_share", rate)
    columns.add("usual_error", blank if error is None else 3.0 * error.baseline)

    # What each node adds by itself, and what of the victim's excess that would explain.
    with np.errstate(invalid="ignore", divide="ignore"):
        own_z = own / centre_dev.sigma if centre_dev is not None else blank
        internal = own / change
        explains = weight * own / change[victim]
        internal_errors = own_errors / error_change
        explains_errors = error_weight * own_errors / error_change[victim]
    self_time = deviations.get("self_time_mean_seconds")
    if self_time is not None:
        measured = self_time.post - self_time.baseline
        with np.errstate(invalid="ignore", divide="ignore"):
            explains_self = weight * measured / change[victim]
    else:
        explains_self = blank
    put("own_z", own_z)
    columns.add("internal_share", np.clip(internal, -2.0, 3.0))
    columns.add("explains", np.clip(explains, -2.0, 3.0))
    columns.mask("explains", explains)
    columns.add("explains_self", np.clip(explains_self, -2.0, 3.0))
    columns.mask("explains_self", explains_self)
    columns.add("own_error_change", 10.0 * np.sign(own_errors) * np.sqrt(np.abs(own_errors)))
    columns.add("internal_error_share", np.clip(internal_errors, -2.0, 3.0))
    columns.add("explains_errors", np.clip(explains_errors, -2.0, 3.0))
    columns.mask("explains_errors", explains_errors)
    columns.add("rank_explains", _rank(explains))
    columns.add("rank_explains_errors", _rank(explains_errors))
    columns.add("rank_own_z", _rank(own_z))
    columns.add("weight", np.log1p(weight))

    # What depends on this node, and what it depends on.
    infrastructure = ~(graph.relations == RELATIONS.index(Relation.CALLS))
    for label, gain in (("explains", explains), ("explains_errors", explains_errors)):
        total = np.bincount(
            graph.callees[infrastructure],
            weights=np.nan_to_num(gain[graph.callers[infrastructure]]).clip(-2.0, 3.0),
            minlength=rows,
        )
        columns.add(f"dependents_{label}", np.clip(total, -3.0, 5.0))
    size = np.abs(np.nan_to_num(own_z))
    residents = np.bincount(graph.callees[infrastructure], minlength=rows)
    loud = np.bincount(
        graph.callees[infrastructure], weights=(size > 3.0)[graph.callers[infrastructure]], minlength=rows
    )
    columns.add("dependents_loud", np.where(residents > 0, loud / np.maximum(residents, 1), 0.0))
    largest = _largest_z(deviations, rows)
    columns.add("rank_largest", _rank(largest))
    put("largest_z", largest)
    put("callees_largest_z", _scatter_max(largest[graph.callees], graph.callers, rows))
    put("callers_largest_z", _scatter_max(largest[graph.callers], graph.callees, rows))
    call_rows = np.flatnonzero(is_call)
    seen_by_others = (
        ("seen", centre or ""),
        ("seen_tail", "latency_p95_seconds"),
        ("seen_gap", "network_gap_mean_seconds"),
        ("seen_error", "error_ratio"),
    )
    for label, name in seen_by_others:
        item = edge_deviations.get(name)
        z = np.full(len(graph.callers), np.nan) if item is None else item.z
        put(f"{label}_by_callers_z", _scatter_max(z[call_rows], graph.callees[call_rows], rows))
        put(f"{label}_at_callees_z", _scatter_max(z[call_rows], graph.callers[call_rows], rows))
        columns.mask(f"{label}_by_callers", _scatter_max(z[call_rows], graph.callees[call_rows], rows))
    gap = edge_deviations.get("network_gap_mean_seconds")
    if gap is not None and centre_dev is not None:
        extra = np.nan_to_num(gap.post - gap.baseline)
        with np.errstate(invalid="ignore", divide="ignore"):
            through = weight[graph.callers] * extra / change[victim]
        through = np.where(is_call, np.nan_to_num(through).clip(-2.0, 3.0), 0.0)
        columns.add("gap_explains_in", np.bincount(graph.callees, weights=through, minlength=rows).clip(-3, 5))
        columns.add("gap_explains_out", np.bincount(graph.callers, weights=through, minlength=rows).clip(-3, 5))
    else:
        columns.add("gap_explains_in", blank)
        columns.add("gap_explains_out", blank)

    # Order in time.
    first = blank
    for item in deviations.values():
        first = np.fmin(first, np.where(np.abs(item.z) > 3.0, item.onset, np.nan))
    columns.add("onset_offset", np.clip((first - onset) / 3.0, -4.0, 4.0))
    columns.mask("onset_offset", first)

    # Place in the graph.
    depth = graph.depths_from(victim).astype(np.float64)
    around = graph.undirected_distance(victim).astype(np.float64)
    columns.add("depth", np.where(depth >= 0, depth, 0.0) / 4.0)
    columns.add("victim_depends", (depth >= 0).astype(np.float64))
    columns.add("distance", np.where(around >= 0, around, 12.0) / 4.0)
    columns.add("connected", (around >= 0).astype(np.float64))
    columns.add("is_victim", (np.arange(rows) == victim).astype(np.float64))
    columns.add("callers", np.log1p(np.bincount(graph.callees, minlength=rows)))
    columns.add("callees", np.log1p(np.bincount(graph.callers, minlength=rows)))
    for k, kind in enumerate(NODE_KINDS):
        columns.add(f"is_{kind.value}", (graph.kinds == k).astype(np.float64))

    # The situation, the same for all nodes.
    signal = signal_of(panel.metric)
    columns.add("victim_latency", float(signal is Signal.LATENCY))
    columns.add("victim_errors", float(signal is Signal.ERRORS))
    at_victim = deviations.get(panel.metric)
    columns.add("victim_z", float(_squash(np.array([np.nan_to_num(at_victim.z[victim])]))[0]) if at_victim else 0.0)
    columns.add("victim_ratio", float(np.nan_to_num(at_victim.ratio[victim])) if at_victim else 0.0)
    window = next(iter(panel.window.values()), np.zeros((1, 1)))
    before = next(iter(panel.baseline.values()), np.zeros((1, 0)))
    columns.add("post_samples", np.log1p(window.shape[1] - onset))
    columns.add("pre_samples", np.log1p(onset))
    columns.add("baseline_samples", np.log1p(before.shape[1]))
    columns.add("step", np.log(panel.step) / 2.0)
    columns.add("size", np.log(rows) / 2.0)
    return columns


def _error_significance(deviations: Mapping[str, Deviation], step: float, rows: int) -> Floats:
    """Change of the error ratio over what so few requests would give by chance (binomial); NaN without a rate; [R]."""
    error, rate = deviations.get("error_ratio"), deviations.get("request_rate")
    if error is None or rate is None:
        return np.full(rows, np.nan)
    requests = np.maximum(rate.post * step * error.count, 1.0)
    usual = np.maximum(error.baseline, 1.0 / np.maximum(rate.baseline * step * error.baseline_count, 10.0))
    return (error.post - error.baseline) / np.sqrt(usual * (1.0 - np.minimum(usual, 0.5)) / requests)


def _largest_z(deviations: Mapping[str, Deviation], rows: int) -> Floats:
    out = np.full(rows, np.nan)
    for item in deviations.values():
        out = np.fmax(out, np.abs(item.z))
    return out


def _edge_features(
    panel: Panel,
    edge_deviations: Mapping[str, Deviation],
    deviations: Mapping[str, Deviation],
    centre: str | None,
    calls: Floats,
    calls_now: Floats,
    calls_known: Bools,
    change: Floats,
    edge_change: Floats,
    error_change: Floats,
    weight: Floats,
    is_call: Bools,
) -> Floats32:
    graph = panel.graph
    rows = len(graph.callers)
    columns = _Columns(rows)
    for k, relation in enumerate(RELATIONS):
        columns.add(f"is_{relation.value}", (graph.relations == k).astype(np.float64))
    columns.add("asynchronous", graph.asynchronous.astype(np.float64))
    columns.add("calls", np.log(calls))
    columns.add("calls_change", np.log(calls_now / calls))
    columns.add("calls_known", calls_known.astype(np.float64))
    tail = ("latency_p95_seconds", "latency_p90_seconds", "latency_p99_seconds")
    for label, names in (
        ("latency", (centre,) if centre else ()),
        ("tail", tail),
        ("gap", ("network_gap_mean_seconds",)),
        ("error", ("error_ratio",)),
        ("rate", ("request_rate",)),
    ):
        z = _pick(edge_deviations, names, "z", rows)
        columns.add(f"{label}_z", _squash(z))
        columns.mask(label, z)
        columns.add(f"{label}_ratio", _pick(edge_deviations, names, "ratio", rows))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = calls * edge_change / change[graph.callers]
        error_share = np.minimum(calls, 1.0) * error_change[graph.callees] / error_change[graph.callers]
        reach = weight[graph.callers] * calls * edge_change / change[panel.victim]
        beyond = (edge_change - change[graph.callees]) / change[graph.callers] * calls
    share = np.where(is_call, share, np.nan)
    columns.add("share", np.clip(share, -1.5, 2.5))
    columns.mask("share", share)
    columns.add("error_share", np.clip(np.where(is_call, error_share, np.nan), -1.5, 2.5))
    columns.add("victim_share", np.clip(np.where(is_call, reach, np.nan), -1.5, 2.5))
    columns.add("beyond_callee", np.clip(np.where(is_call, beyond, np.nan), -1.5, 2.5))
    timeout = graph.edge_static[:, 3]
    p99 = _pick(deviations, ("latency_p99_seconds", *_TAILS), "post", len(graph.nodes))
    with np.errstate(invalid="ignore", divide="ignore"):
        pressure = np.log(p99[graph.callees] / timeout)
    columns.add("timeout_pressure", np.clip(pressure, -6.0, 3.0))
    columns.mask("timeout_pressure", pressure)
    one_way = columns.matrix()
    up = np.concatenate([one_way, np.zeros((rows, 1), np.float32)], axis=1)
    down = np.concatenate([one_way, np.ones((rows, 1), np.float32)], axis=1)
    return np.concatenate([up, down]).astype(np.float32)
