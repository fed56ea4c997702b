"""What monitoring would have seen: statistics over few requests, histogram buckets, gaps, and nodes nobody watches."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rca.incident import NodeKind, Relation
from rca.simulation.engine import State
from rca.simulation.faults import Fault
from rca.simulation.topology import Bools, Floats, Ints, Topology

QUANTILES = {
    "latency_p50_seconds": 0.50,
    "latency_p90_seconds": 0.90,
    "latency_p95_seconds": 0.95,
    "latency_p99_seconds": 0.99,
}
#: Default buckets of client libraries and meshes, in seconds: quantiles read from them move in jumps.
BUCKETS = np.array(
    [0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
)


@dataclass(frozen=True)
class Coverage:
    """Which telemetry exists.

    Attributes:
        metrics: metric names measured at services; ``edge_metrics`` at calls; ``infrastructure`` at resources.
        bucketed: quantiles come from histogram buckets.
        sampling: share of the requests that are recorded, in (0, 1].
        hidden: services that are not monitored and not in the graph, shape [S].
        infrastructure_visible: whether hosts, GPUs, queues and workloads are in the graph at all.
        missing_series: chance that one node lacks one metric. ``missing_samples``: chance of a gap in one sample.
    """

    metrics: tuple[str, ...]
    edge_metrics: tuple[str, ...]
    infrastructure: bool
    bucketed: bool
    sampling: float
    hidden: Bools
    missing_series: float
    missing_samples: float
    #: Whether traces pass through hidden services, so that their callers and callees appear joined.
    bridged: bool = True
    #: Calls that also appear as a node of their own: below the caller (a "remote" end), or above the callee (a client).
    shadows: tuple[tuple[int, bool], ...] = ()
    #: Callers of nodes that are in the graph but were never seen at work.
    idle: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nodes:
    """The graph as monitoring knows it: services first, then hosts, GPUs, queues and workloads; then filtered."""

    names: tuple[str, ...]
    kinds: tuple[NodeKind, ...]
    callers: Ints
    callees: Ints
    relations: tuple[Relation, ...]
    #: Index of the simulated call behind each edge, -1 for infrastructure.
    calls: Ints
    #: Index of the simulated call that a shadow node shows, -1 for real nodes.
    shadow_of: Ints


def nodes_of(topology: Topology, coverage: Coverage) -> Nodes:
    """All nodes and edges of ``topology``; `coverage.hidden` services are left out with their calls."""
    names = [*topology.names, *topology.hosts, *topology.gpus, *topology.queues, *topology.workloads]
    kinds = [
        *[NodeKind.SERVICE] * topology.size,
        *[NodeKind.HOST] * len(topology.hosts),
        *[NodeKind.GPU] * len(topology.gpus),
        *[NodeKind.QUEUE] * len(topology.queues),
        *[NodeKind.WORKLOAD] * len(topology.workloads),
    ]
    edges: list[tuple[str, str, Relation, int]] = [
        (topology.names[topology.source[e]], topology.names[topology.target[e]], Relation.CALLS, e)
        for e in range(len(topology.source))
    ]
    if coverage.infrastructure:
        edges += [(caller, callee, relation, -1) for caller, callee, relation in infrastructure_edges(topology)]
    if coverage.bridged:
        edges += [(caller, callee, Relation.CALLS, -1) for caller, callee in _bridges(topology, coverage.hidden)]
    shadow_of: dict[str, int] = {}
    for number, (call, above) in enumerate(coverage.shadows):
        name = f"remote-{number:03d}"
        names.append(name)
        kinds.append(NodeKind.SERVICE)
        shadow_of[name] = call
        caller, callee = topology.names[topology.source[call]], topology.names[topology.target[call]]
        edges.append((name, callee, Relation.CALLS, -1) if above else (caller, name, Relation.CALLS, -1))
    for number, service in enumerate(coverage.idle):
        names.append(f"idle-{number:03d}")
        kinds.append(NodeKind.SERVICE)
        edges.append((topology.names[service], f"idle-{number:03d}", Relation.CALLS, -1))
    gone = {topology.names[i] for i in np.flatnonzero(coverage.hidden)}
    if not coverage.infrastructure:
        gone |= {*topology.hosts, *topology.gpus, *topology.queues, *topology.workloads}
    kept = sorted((name, kind) for name, kind in zip(names, kinds, strict=True) if name not in gone)
    position = {name: i for i, (name, _) in enumerate(kept)}
    left = sorted(edge for edge in edges if edge[0] in position and edge[1] in position)
    return Nodes(
        names=tuple(name for name, _ in kept),
        kinds=tuple(kind for _, kind in kept),
        callers=np.array([position[edge[0]] for edge in left], dtype=np.int64),
        callees=np.array([position[edge[1]] for edge in left], dtype=np.int64),
        relations=tuple(edge[2] for edge in left),
        calls=np.array([edge[3] for edge in left], dtype=np.int64),
        shadow_of=np.array([shadow_of.get(name, -1) for name, _ in kept], dtype=np.int64),
    )


def _bridges(topology: Topology, hidden: Bools) -> list[tuple[str, str]]:
    """Calls that appear between two visible services because all services between them are hidden."""
    direct = set(zip(topology.source.tolist(), topology.target.tolist(), strict=True))
    callees: dict[int, list[int]] = {}
    for caller, callee in direct:
        callees.setdefault(caller, []).append(callee)
    found: set[tuple[int, int]] = set()
    for caller in np.flatnonzero(~hidden).tolist():
        stack, seen = [c for c in callees.get(caller, []) if hidden[c]], set()
        while stack:
            node = stack.pop()
            for callee in callees.get(node, []):
                if hidden[callee] and callee not in seen:
                    seen.add(callee)
                    stack.append(callee)
                elif not hidden[callee] and (caller, callee) not in direct:
                    found.add((caller, callee))
    return [(topology.names[a], topology.names[b]) for a, b in sorted(found)]


def infrastructure_edges(topology: Topology) -> list[tuple[str, str, Relation]]:
    """Dependencies on shared resources and on what else uses them."""
    edges: list[tuple[str, str, Relation]] = []
    for service, name in enumerate(topology.names):
        if topology.host[service] >= 0:
            edges.append((name, topology.hosts[topology.host[service]], Relation.RUNS_ON))
        if topology.gpu[service] >= 0:
            edges.append((name, topology.gpus[topology.gpu[service]], Relation.RUNS_ON))
        if topology.queue[service] >= 0:
            edges.append((name, topology.queues[topology.queue[service]], Relation.QUEUED_BEHIND))
    for job, name in enumerate(topology.workloads):
        for where, resources, residents in (
            (topology.workload_gpu, topology.gpus, topology.gpu),
            (topology.workload_host, topology.hosts, topology.host),
        ):
            if where[job] >= 0:
                edges.append((name, resources[where[job]], Relation.RUNS_ON))
                for service in np.flatnonzero(residents == where[job]).tolist():
                    edges.append((topology.names[service], name, Relation.SHARES_DEVICE))
                    edges.append((name, topology.names[service], Relation.SHARES_DEVICE))
    return edges


def touched_share(topology: Topology, fault: Fault) -> Floats:
    """Share of each service's requests that the fault can reach, shape [S]."""
    share = np.zeros(topology.size)
    share[list(fault.first)] = fault.effects.touched
    for edge in fault.effects.network_add:
        share[topology.source[edge]] = max(share[topology.source[edge]], min(1.0, topology.calls[edge]))
    if fault.effects.calls_scale or fault.effects.demand_scale or fault.effects.demand_add:
        share[:] = 1.0
    for edge in np.argsort(-topology.level[topology.source], kind="stable"):
        reach = min(1.0, topology.calls[edge]) * share[topology.target[edge]]
        caller = topology.source[edge]
        share[caller] = 1.0 - (1.0 - share[caller]) * (1.0 - reach)
    return share


@dataclass(frozen=True)
class Reading:
    """Observed values: `services[metric]` is [S, T], `calls[metric]` [E, T], `resources[(node, metric)]` [T]."""

    services: dict[str, Floats]
    calls: dict[str, Floats]
    resources: dict[tuple[str, str], Floats]


def observe(
    seed: int,
    topology: Topology,
    coverage: Coverage,
    state: State,
    usual: State,
    step: float,
    fault: Fault | None,
    decoys: dict[tuple[str, str], Floats],
) -> Reading:
    """Measure ``state``. The same ``seed`` gives the same measurement noise, with and without the fault.

    Args:
        usual: the run without the fault; the share of touched requests decides which quantiles move.
        fault: None for the counterfactual reading.
        decoys: monitoring noise added to resource readings in both worlds.
    """
    rng = np.random.default_rng(seed)
    share = np.zeros(topology.size) if fault is None else touched_share(topology, fault)
    count = _counts(rng, state.rate * step * coverage.sampling)
    services = _latencies(rng, state.latency, usual.latency, topology.spread, share, count, coverage.bucketed)
    services["self_time_mean_seconds"] = _mean(rng, state.own, usual.own, topology.spread, share, count)
    services["error_ratio"] = _errors(rng, state.error, count)
    services["request_rate"] = count / (step * coverage.sampling)
    usage = rng.uniform(0.3, 1.0, topology.size)[:, None]
    floor = rng.uniform(0.005, 0.05, topology.size)[:, None]
    wobble = np.exp(0.12 * rng.normal(size=count.shape))
    services["cpu_utilization_ratio"] = (floor + usage * state.utilization.clip(0.0, 1.0)) * wobble
    drift = np.cumsum(0.003 * rng.normal(size=count.shape), axis=1)
    services["memory_utilization_ratio"] = (rng.uniform(0.1, 0.8, topology.size)[:, None] + drift).clip(0.01, 1.0)
    for metric in ("network_receive_bytes_per_second", "network_transmit_bytes_per_second"):
        size = np.exp(rng.normal(np.log(2e3), 1.0, topology.size))[:, None]
        noise = np.exp(0.3 * rng.normal(size=count.shape))
        services[metric] = state.rate * size * noise * rng.choice([1.0, 1.0, 1.0, 8.0], size=count.shape)
    for name in services:
        if name not in ("request_rate", "cpu_utilization_ratio", "memory_utilization_ratio"):
            services[name] = np.where(count >= 0.5, services[name], np.nan)
    called = _counts(rng, state.call_rate * step * coverage.sampling)
    spread = topology.spread[topology.target]
    call_share = np.minimum(1.0, np.maximum(share[topology.target], _network_share(topology, fault)))
    calls = {
        name: values
        for name, values in _latencies(
            rng, state.call_latency, usual.call_latency, spread, call_share, called, coverage.bucketed
        ).items()
        if name in ("latency_mean_seconds", "latency_p90_seconds", "latency_p95_seconds", "latency_p99_seconds")
    }
    calls["network_gap_mean_seconds"] = state.network * (
        1.0 + 0.5 * rng.normal(size=called.shape) / np.sqrt(np.maximum(called, 1.0))
    )
    calls["error_ratio"] = _errors(rng, state.call_error, called)
    calls["request_rate"] = called / (step * coverage.sampling)
    for name in calls:
        if name != "request_rate":
            calls[name] = np.where(called >= 0.5, calls[name], np.nan)
    resources = _resources(rng, topology, state, {} if fault is None else fault.signal)
    for position, name in enumerate(topology.names):
        for metric in ("cpu_utilization_ratio", "memory_utilization_ratio"):
            for extra in (decoys.get((name, metric)), None if fault is None else fault.signal.get((name, metric))):
                if extra is not None:
                    services[metric][position] = (services[metric][position] + extra).clip(0.0, 1.5)
    for key, extra in decoys.items():
        if key in resources:
            resources[key] = resources[key] + extra
    return Reading(services, calls, resources)


def _counts(rng: np.random.Generator, expected: Floats) -> Floats:
    """Whole numbers of requests with the spread of chance, from one normal draw each: the same draw in both worlds."""
    normal = rng.normal(size=expected.shape)
    uniform = rng.uniform(size=expected.shape)
    many = np.maximum(expected + np.sqrt(expected) * normal, 0.0)
    # Where less than a few are expected, none is a common answer.
    few = np.floor(expected + uniform)
    return np.where(expected < 3.0, few, np.round(many))


def _network_share(topology: Topology, fault: Fault | None) -> Floats:
    share = np.zeros(len(topology.source))
    if fault is not None:
        share[list(fault.effects.network_add)] = 1.0
    return share


def _mean(rng: np.random.Generator, now: Floats, usual: Floats, spread: Floats, share: Floats, count: Floats) -> Floats:
    """Sample mean of ``count`` requests, of which ``share`` carry all of the excess over usual."""
    change = now - usual
    touched = np.clip(share, 0.02, 1.0)[:, None]
    patchy = np.abs(change) * np.sqrt((1.0 - touched) / touched)
    sigma = np.sqrt((usual * spread[:, None]) ** 2 + patchy**2) / np.sqrt(np.maximum(count, 1.0))
    noise = rng.standard_t(4.0, size=now.shape) / np.sqrt(2.0)
    out: Floats = np.maximum(now + sigma * noise, 0.05 * now)
    return out


def _latencies(
    rng: np.random.Generator,
    now: Floats,
    usual: Floats,
    spread: Floats,
    share: Floats,
    count: Floats,
    bucketed: bool,
) -> dict[str, Floats]:
    out = {"latency_mean_seconds": _mean(rng, now, usual, spread, share, count)}
    sigma = np.sqrt(np.log1p(spread**2))[:, None]
    change = now - usual
    touched = np.clip(share, 0.02, 1.0)[:, None]
    normal = NormalDist()
    for name, p in QUANTILES.items():
        z = normal.inv_cdf(p)
        base = usual * np.exp(sigma * z - sigma**2 / 2)
        # A quantile moves only when more than 1 - p of the requests are touched.
        reached = np.clip((touched - (1.0 - p)) / np.minimum(touched, 0.5), 0.0, 1.0)
        value = np.where(change >= 0, base + reached * change / touched, base * np.maximum(now / usual, 0.02))
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
        error = sigma * np.sqrt(p * (1 - p)) / (density * np.sqrt(np.maximum(count, 1.0)))
        value = value * np.exp(np.clip(error, 0.0, 0.8) * rng.normal(size=now.shape))
        if bucketed:
            place = np.clip(np.searchsorted(BUCKETS, value, side="right") - 1, 0, len(BUCKETS) - 2)
            low, high = BUCKETS[place], BUCKETS[place + 1]
            jitter = np.clip(p + 0.08 * rng.normal(size=now.shape) / np.sqrt(np.maximum(count, 1.0) / 10), 0.02, 1.0)
            value = low + (high - low) * jitter
        else:
            rng.normal(size=now.shape)
        out[name] = value
    return out


def _errors(rng: np.random.Generator, ratio: Floats, count: Floats) -> Floats:
    n = np.maximum(np.round(count), 1.0)
    wanted = n * ratio + np.sqrt(n * ratio * (1.0 - ratio)) * rng.normal(size=ratio.shape)
    failed = np.floor(np.maximum(wanted, 0.0) + rng.uniform(size=ratio.shape))
    return np.minimum(failed, n) / n


def _resources(
    rng: np.random.Generator, topology: Topology, state: State, signal: dict[tuple[str, str], Floats]
) -> dict[tuple[str, str], Floats]:
    steps = state.rate.shape[1]
    out: dict[tuple[str, str], Floats] = {}

    def put(node: str, metric: str, base: Floats | float, noise: float, high: float = 1.0) -> None:
        value = base + noise * rng.normal(size=steps) + signal.get((node, metric), 0.0)
        out[(node, metric)] = np.clip(value, 0.0, high)

    for h, name in enumerate(topology.hosts):
        load = state.utilization[topology.host == h].clip(0.0, 1.0)
        put(name, "cpu_utilization_ratio", 0.1 + (0.6 * load.mean(axis=0) if len(load) else 0.0), 0.03)
        put(name, "memory_utilization_ratio", rng.uniform(0.2, 0.8) + np.cumsum(0.002 * rng.normal(size=steps)), 0.002)
    for g, name in enumerate(topology.gpus):
        load = state.utilization[topology.gpu == g].clip(0.0, 1.0)
        put(name, "gpu_utilization_ratio", 0.05 + (0.7 * load.mean(axis=0) if len(load) else 0.0), 0.04)
        put(name, "gpu_memory_utilization_ratio", rng.uniform(0.2, 0.8), 0.01)
        put(name, "gpu_fragmentation_ratio", rng.uniform(0.02, 0.3), 0.02)
    for q, name in enumerate(topology.queues):
        wait = state.queue_wait[q]
        rate = state.rate[topology.queue == q].sum(axis=0)
        put(name, "queue_wait_seconds", wait * np.exp(0.15 * rng.normal(size=steps)), 0.0, np.inf)
        put(name, "queue_depth", wait * rate * np.exp(0.15 * rng.normal(size=steps)), 0.0, np.inf)
    for w, name in enumerate(topology.workloads):
        quiet = rng.uniform(0.0, 0.4)
        if topology.workload_gpu[w] >= 0:
            put(name, "gpu_utilization_ratio", quiet, 0.04)
            put(name, "gpu_memory_utilization_ratio", rng.uniform(0.05, 0.5), 0.01)
        else:
            put(name, "cpu_utilization_ratio", quiet, 0.04)
    return out
