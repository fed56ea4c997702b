"""The call graph and its golden signals from service-graph metrics or from Istio's.

Service graph: the OpenTelemetry service graph connector, Tempo's metrics generator and Grafana Alloy name their metrics
``traces_service_graph_request_*``, with labels ``client`` and ``server``. Istio: ``istio_requests_total`` and
``istio_request_duration_milliseconds``, each reported by the caller's and by the callee's proxy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rca.telemetry.prometheus.answers import Floats, Series
from rca.telemetry.prometheus.ask import Query, by, selector
from rca.telemetry.prometheus.config import CaptureConfig

#: OpenTelemetry's name for whoever calls an entry service from outside; a node that nobody can repair.
OUTSIDE: Final = frozenset({"user", "unknown", ""})
QUANTILES: Final = {"latency_p50_seconds": 0.5, "latency_p95_seconds": 0.95, "latency_p99_seconds": 0.99}


@dataclass(frozen=True)
class Dialect:
    """How one kind of telemetry names calls.

    Attributes:
        total, failed: counters; ``failed`` may be an expression over rates of ``total``.
        served, called: histograms of the callee's and of the caller's view, without a suffix.
        client, server: labels. ``kind``: label that tells messaging from calls.
        scale: seconds per unit of the histograms.
        always_counts_failures: failures are a label of ``total``, so that none seen means none happened.
    """

    name: str
    total: str
    failed: tuple[str, ...]
    served: str
    called: str
    client: str
    server: str
    kind: str = ""
    scale: float = 1.0
    served_matcher: str = ""
    called_matcher: str = ""
    failed_matchers: tuple[str, ...] = ("",)
    always_counts_failures: bool = False


def service_graph(config: CaptureConfig) -> Dialect:
    """OpenTelemetry's and Tempo's service graph metrics."""
    return Dialect(
        name="service graph metrics",
        total="traces_service_graph_request_total",
        failed=("traces_service_graph_request_failed_total",),
        served="traces_service_graph_request_server_seconds",
        called="traces_service_graph_request_client_seconds",
        client=config.labels.client,
        server=config.labels.server,
        kind="connection_type",
    )


#: Statuses of gRPC that say that the server failed (https://grpc.io/docs/guides/status-codes/).
_GRPC_FAILED: Final = "2|4|8|13|14|15"
ISTIO: Final = Dialect(
    name="Istio metrics",
    total="istio_requests_total",
    failed=("istio_requests_total", "istio_requests_total"),
    served="istio_request_duration_milliseconds",
    called="istio_request_duration_milliseconds",
    client="source_canonical_service",
    server="destination_canonical_service",
    kind="request_protocol",
    scale=1e-3,
    served_matcher='reporter="destination"',
    called_matcher='reporter="source"',
    failed_matchers=('response_code=~"5..|0"', f'response_code="200", grpc_response_status=~"{_GRPC_FAILED}"'),
    always_counts_failures=True,
)

#: For the list of metric names.
NAMES: Final = "traces_service_graph_request_.+|istio_requests_total|istio_request_duration_milliseconds.*"


def dialect(config: CaptureConfig, names: frozenset[str] | None) -> Dialect | None:
    """Which telemetry there is; with an unknown list of names, the service graph is tried."""
    first = service_graph(config)
    if names is None or first.total in names:
        return first
    return ISTIO if ISTIO.total in names else None


def queries(spoken: Dialect, config: CaptureConfig, names: frozenset[str] | None) -> list[Query]:
    """Everything to ask about calls."""
    d, over = spoken, f"[{_duration(config.rate_range)}]"
    pair = f"{d.client}, {d.server}"

    def rate(name: str, *matchers: str) -> str:
        return f"rate({selector(name, *matchers, config.matchers)}{over})"

    failures = [rate(name, m, d.served_matcher) for name, m in zip(d.failed, d.failed_matchers, strict=True)]
    kinds = f"{pair}, {d.kind}" if d.kind else pair
    out = [Query("calls", f"sum by ({kinds}) ({rate(d.total, d.served_matcher)})")]
    if names is None or set(d.failed) <= names:
        out.append(Query("failed calls", f"sum by ({pair}) ({' or '.join(failures)})"))
    for what, base, matcher in (("served", d.served, d.served_matcher), ("called", d.called, d.called_matcher)):
        native = names is not None and base in names and f"{base}_bucket" not in names
        if names is not None and not native and f"{base}_count" not in names:
            continue
        for part in ("sum", "count"):
            plain = f"sum by ({pair}) ({rate(f'{base}_{part}', matcher)})"
            whole = f"histogram_{part}(sum by ({pair}) ({rate(base, matcher)}))"
            out.append(Query(f"{what} {part}", whole if native else plain))
        if names is not None and not native and f"{base}_bucket" not in names:
            continue

        def quantile(q: float, labels: str, base: str = base, matcher: str = matcher, native: bool = native) -> str:
            inner = rate(base if native else f"{base}_bucket", matcher)
            return f"histogram_quantile({q:g}, sum by ({labels}{'' if native else ', le'}) ({inner}))"

        if what == "served":
            out += [Query(f"served {name}", quantile(q, d.server)) for name, q in QUANTILES.items()]
        else:
            out.append(Query("called latency_p95_seconds", quantile(0.95, pair)))
    return out


def profile_query(spoken: Dialect, config: CaptureConfig, step: float) -> Query:
    """Requests per second of each service: what load looked like."""
    rate = f"rate({selector(spoken.total, spoken.served_matcher, config.matchers)}[{_duration(max(step, 1.0) * 2)}])"
    return Query("load", f"sum by ({spoken.server}) ({rate})")


@dataclass
class Points:
    """Rows of a metrics table in the making."""

    times: list[Floats] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    peers: list[str | None] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, node: str, metric: str, times: Floats, values: Floats, peer: str | None = None) -> None:
        """Add a series; values that are not finite are left out."""
        known = np.isfinite(values)
        if known.any():
            self.times.append(times[known])
            self.values.append(values[known])
            self.nodes.append(node)
            self.peers.append(peer)
            self.metrics.append(metric)
            self.counts.append(int(known.sum()))


@dataclass(frozen=True)
class Edge:
    """One row of the edges table; the numbers are averages over the baseline."""

    caller: str
    callee: str
    relation: str
    protocol: str | None = None
    asynchronous: bool = False
    call_rate: float | None = None
    error_ratio: float | None = None
    latency_seconds: float | None = None


Grid = dict[float, float]
_Pair = tuple[str, str]


class _Sums:
    """Series added up by key: time to value."""

    def __init__(self) -> None:
        self.values: dict[_Pair, Grid] = {}

    def add(self, key: _Pair, series: Series, scale: float = 1.0) -> None:
        grid = self.values.setdefault(key, {})
        for time, value in zip(series.times.tolist(), series.values.tolist(), strict=True):
            if np.isfinite(value):
                grid[time] = grid.get(time, 0.0) + value * scale

    def grouped(self, key: Callable[[_Pair], _Pair]) -> dict[_Pair, Grid]:
        out: dict[_Pair, Grid] = {}
        for pair, grid in self.values.items():
            into = out.setdefault(key(pair), {})
            for time, value in grid.items():
                into[time] = into.get(time, 0.0) + value
        return out


def _ratio(top: Grid, bottom: Grid, zero: bool = False) -> tuple[Floats, Floats]:
    """``top / bottom`` at the times of ``bottom``, where it is above 0; a missing ``top`` is 0 with ``zero``."""
    times = [t for t, value in sorted(bottom.items()) if value > 0 and (zero or t in top)]
    return np.array(times), np.array([top.get(t, 0.0) / bottom[t] for t in times])


def tables(
    spoken: Dialect, answers: Mapping[str, Sequence[Series]], baseline: tuple[float, float], points: Points
) -> tuple[list[Edge], set[str]]:
    """Add the golden signals of services and calls to ``points``.

    Args:
        answers: series by `Query.what`. ``baseline``: Unix seconds, for the averages of the edges.

    Returns:
        The calls, and all services.
    """
    total, failed = _Sums(), _Sums()
    protocols: dict[_Pair, str] = {}
    for series in answers.get("calls", ()):
        pair = _pair(spoken, series)
        total.add(pair, series)
        if kind := series.labels.get(spoken.kind, ""):
            protocols[pair] = kind
    for series in answers.get("failed calls", ()):
        failed.add(_pair(spoken, series), series)
    sums = {}
    for what in ("served sum", "served count", "called sum", "called count"):
        sums[what] = _Sums()
        for series in answers.get(what, ()):
            sums[what].add(_pair(spoken, series), series, spoken.scale if what.endswith("sum") else 1.0)
    counted = spoken.always_counts_failures or bool(answers.get("failed calls"))
    services = _node_points(total, failed, sums, counted, points)
    for name in QUANTILES:
        for series in answers.get(f"served {name}", ()):
            (server,) = by(series.labels, spoken.server)
            if server not in OUTSIDE:
                points.add(server, name, series.times, series.values * spoken.scale)
    edges = []
    for pair, rate in sorted(total.values.items()):
        client, server = pair
        if client in OUTSIDE or server in OUTSIDE or client == server:
            continue
        services.update(pair)
        errors = _ratio(failed.values.get(pair, {}), rate, zero=True) if counted else (np.zeros(0), np.zeros(0))
        seen = _ratio(sums["called sum"].values.get(pair, {}), sums["called count"].values.get(pair, {}))
        served = _ratio(sums["served sum"].values.get(pair, {}), sums["served count"].values.get(pair, {}))
        times, rates = _arrays(rate)
        points.add(client, "request_rate", times, rates, server)
        points.add(client, "error_ratio", *errors, server)
        points.add(client, "latency_mean_seconds", *seen, server)
        both, at_client, at_server = np.intersect1d(seen[0], served[0], return_indices=True)
        points.add(client, "network_gap_mean_seconds", both, seen[1][at_client] - served[1][at_server], server)
        protocol = protocols.get(pair)
        latency = seen if len(seen[0]) else served
        edges.append(
            Edge(
                client,
                server,
                "calls",
                protocol=protocol or None,
                asynchronous=protocol == "messaging_system",
                call_rate=_mean(times, rates, baseline),
                error_ratio=_mean(*errors, baseline),
                latency_seconds=_mean(*latency, baseline),
            )
        )
    for series in answers.get("called latency_p95_seconds", ()):
        client, server = _pair(spoken, series)
        if client not in OUTSIDE and server not in OUTSIDE and client != server:
            points.add(client, "latency_p95_seconds", series.times, series.values * spoken.scale, server)
    return edges, services


def _node_points(total: _Sums, failed: _Sums, sums: Mapping[str, _Sums], counted: bool, points: Points) -> set[str]:
    """Each service as its own server side saw it, whoever called."""

    def own(pair: _Pair) -> _Pair:
        return (pair[1], "")

    failures = failed.grouped(own)
    times_served, time_served = sums["served count"].grouped(own), sums["served sum"].grouped(own)
    services = set()
    for key, rate in sorted(total.grouped(own).items()):
        node = key[0]
        if node in OUTSIDE:
            continue
        services.add(node)
        points.add(node, "request_rate", *_arrays(rate))
        if counted:
            points.add(node, "error_ratio", *_ratio(failures.get(key, {}), rate, zero=True))
        points.add(node, "latency_mean_seconds", *_ratio(time_served.get(key, {}), times_served.get(key, {})))
    return services


def _pair(spoken: Dialect, series: Series) -> _Pair:
    return (series.labels.get(spoken.client, ""), series.labels.get(spoken.server, ""))


def _arrays(grid: Grid) -> tuple[Floats, Floats]:
    times = sorted(grid)
    return np.array(times), np.array([grid[t] for t in times])


def _mean(times: Floats, values: Floats, span: tuple[float, float]) -> float | None:
    inside = (times >= span[0]) & (times < span[1])
    return float(values[inside].mean()) if inside.any() else None


def neighbourhood(edges: Iterable[Edge], services: Iterable[str], centre: str, most: int) -> set[str]:
    """The ``most`` services nearest to ``centre`` along calls in either direction."""
    around: dict[str, set[str]] = {}
    for edge in edges:
        around.setdefault(edge.caller, set()).add(edge.callee)
        around.setdefault(edge.callee, set()).add(edge.caller)
    kept: dict[str, None] = {centre: None} if centre in around else {}
    frontier = list(kept)
    while frontier and len(kept) < most:
        reached = sorted({other for node in frontier for other in around.get(node, ())} - kept.keys())
        frontier = reached[: most - len(kept)]
        kept.update(dict.fromkeys(frontier))
    for service in sorted(services):
        if len(kept) >= most:
            break
        kept.setdefault(service)
    return set(kept)


def _duration(seconds: float) -> str:
    """PromQL duration, in whole milliseconds."""
    return f"{round(seconds)}s" if abs(seconds - round(seconds)) < 1e-9 else f"{round(seconds * 1000)}ms"
