"""Draw whole incidents: a cluster, its usual life, a fault, what monitoring saw of it, and the truth about it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa

from rca.graph import EDGE_STATIC, NODE_KINDS, RELATIONS, CallGraph
from rca.incident import EDGES_SCHEMA, NODES_SCHEMA, Header, Incident, Truth, Victim, Window, metrics_table
from rca.panel import LEAD, Panel
from rca.signals import Signal, signal_of
from rca.simulation import engine, faults, telemetry
from rca.simulation.faults import Fault, Mechanism
from rca.simulation.topology import Bools, Floats, Topology, random_topology

#: All simulated time starts here; only differences matter.
EPOCH = datetime(2026, 1, 5, tzinfo=UTC)

LATENCY_METRICS = (
    "latency_mean_seconds",
    "latency_p50_seconds",
    "latency_p90_seconds",
    "latency_p95_seconds",
    "latency_p99_seconds",
)


@dataclass(frozen=True)
class SimulatedIncident:
    """An incident and everything that is known about it because we made it.

    Attributes:
        panel: what monitoring saw, on the grid of the bundle.
        cause: node index in ``panel.graph``, or -1 when nothing broke.
        path: propagation steps (source node, target node) from cause to victim.
        flow: share of each edge's caller's deviation that came through the edge, [E]; label of the edge head.
        counterfactual: victim's metric over the incident window without the fault, [Ti].
        counterfactual_first: the same with only the first of two faults removed (equal to the above for one).
    """

    id: str
    panel: Panel
    mechanism: Mechanism | None
    cause: int
    second_cause: int
    path: tuple[tuple[int, int], ...]
    flow: Floats
    counterfactual: Floats
    counterfactual_first: Floats
    onset_step: int
    hidden_cause: bool
    title: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    #: The scheduler's and the GPUs' view, for scenarios that have one.
    tables: Mapping[str, pa.Table] = field(default_factory=dict)

    @property
    def incident(self) -> Incident:
        """The bundle, with its truth."""
        return to_incident(self)


@dataclass(frozen=True)
class Plan:
    """The shape of one incident; drawn by `draw_plan`, or set by hand for a scenario.

    The run is ``baseline_steps`` of baseline, `LEAD` steps of lead-in and ``window_steps`` of incident; the fault
    starts ``onset_step`` steps into the window.
    """

    step: float
    baseline_steps: int
    window_steps: int
    onset_step: int
    drift: float
    amplitude: float
    noise: float
    bursts: float

    @property
    def steps(self) -> int:
        """Length of the whole run."""
        return self.baseline_steps + LEAD + self.window_steps

    @property
    def start(self) -> int:
        """First step of the incident window."""
        return self.baseline_steps + LEAD

    @property
    def onset(self) -> int:
        """Step of the run at which the fault starts."""
        return self.start + self.onset_step


def draw_plan(rng: np.random.Generator) -> Plan:
    """Sampling from 1 s to 5 min, windows from 3 to 40 samples, onset inside the window (alerts lag)."""
    step = float(rng.choice([1.0, 5.0, 10.0, 15.0, 30.0, 60.0, 60.0, 300.0, 300.0]))
    short = step >= 60.0 and rng.random() < 0.6
    window = int(rng.integers(3, 8)) if short else int(rng.integers(6, 41))
    return Plan(
        step=step,
        baseline_steps=int(rng.integers(20, 160)),
        window_steps=window,
        onset_step=int(rng.integers(0, max(1, round(0.45 * window)) + 1)) if rng.random() < 0.85 else 0,
        drift=float(rng.choice([0.0, 0.0, 0.05, 0.2])),
        amplitude=float(rng.uniform(0.0, 0.6)),
        noise=float(np.exp(rng.normal(np.log(0.06), 0.6))),
        bursts=float(rng.choice([0.0, 0.0, 0.01, 0.04])),
    )


def draw_drivers(rng: np.random.Generator, topology: Topology, plan: Plan) -> engine.Drivers:
    """The usual life of the cluster: daily load with heavy-tailed bursts, correlated noise, drift between windows."""
    steps = plan.steps
    services = topology.size
    clock = np.arange(steps) * plan.step
    clock[plan.baseline_steps :] += rng.uniform(0.0, 86400.0) * (plan.drift > 0)
    day = 1.0 + plan.amplitude * np.sin(2 * np.pi * clock / 86400.0 + rng.uniform(0, 2 * np.pi))
    burst = 1.0 + (rng.random((services, steps)) < plan.bursts) * rng.pareto(2.5, (services, steps)).clip(0.0, 3.0)
    demand = day * burst * np.exp(_ar(rng, services, steps, rng.uniform(0.02, 0.2), 0.7))
    own = np.exp(_ar(rng, services, steps, plan.noise, 0.5) * rng.uniform(0.4, 2.0, services)[:, None])
    own *= 1.0 + (rng.random((services, steps)) < 0.004) * rng.uniform(0.5, 6.0, (services, steps))
    error = np.exp(_ar(rng, services, steps, 0.4, 0.5))
    if plan.drift:
        before = slice(0, plan.baseline_steps)
        own[:, before] *= np.exp(rng.normal(0.0, plan.drift, services))[:, None]
        error[:, before] *= np.exp(rng.normal(0.0, 4 * plan.drift, services))[:, None]
        demand[:, before] *= np.exp(rng.normal(0.0, 2 * plan.drift))
    return engine.Drivers(
        demand=demand,
        own=own,
        error=error,
        host=0.05 * np.abs(_ar(rng, len(topology.hosts), steps, 1.0, 0.8)),
        gpu=0.05 * np.abs(_ar(rng, len(topology.gpus), steps, 1.0, 0.8)),
        queue_wait=np.exp(
            rng.normal(np.log(0.01), 1.0, len(topology.queues))[:, None]
            + _ar(rng, len(topology.queues), steps, 0.4, 0.6)
        ),
    )


def _ar(rng: np.random.Generator, rows: int, steps: int, sigma: float, memory: float) -> Floats:
    """Stationary AR(1) noise with standard deviation ``sigma``, shape [rows, steps]."""
    white = rng.normal(size=(rows, steps))
    out = np.empty((rows, steps))
    if steps:
        out[:, 0] = white[:, 0]
    scale = np.sqrt(1.0 - memory**2)
    for t in range(1, steps):
        out[:, t] = memory * out[:, t - 1] + scale * white[:, t]
    return out * sigma


def draw_coverage(rng: np.random.Generator, topology: Topology) -> telemetry.Coverage:
    """Four kinds of monitoring that exist in the field, each with its gaps."""
    kind = rng.choice(["aggregate", "tracing", "mesh", "cluster"], p=[0.3, 0.3, 0.2, 0.2])
    latency: list[str] = list(LATENCY_METRICS)
    edges: list[str] = []
    more: list[str] = ["request_rate"]
    if kind == "aggregate":
        more += ["error_ratio"]
    elif kind == "tracing":
        latency = ["latency_p90_seconds", "latency_p95_seconds", "latency_p99_seconds"]
        more += ["cpu_utilization_ratio", "memory_utilization_ratio"]
        more += ["network_receive_bytes_per_second", "network_transmit_bytes_per_second"]
        if rng.random() < 0.75:
            latency += ["latency_mean_seconds", "self_time_mean_seconds", "latency_p50_seconds"]
            edges = ["latency_mean_seconds", "latency_p90_seconds", "latency_p95_seconds", "request_rate"]
            edges += ["network_gap_mean_seconds", "error_ratio"]
        if rng.random() < 0.5:
            more += ["error_ratio"]
    elif kind == "mesh":
        more += ["error_ratio"]
        edges = ["latency_mean_seconds", "latency_p95_seconds", "request_rate", "error_ratio"]
    else:
        more += ["error_ratio", "cpu_utilization_ratio", "memory_utilization_ratio"]
        edges = ["latency_mean_seconds", "latency_p95_seconds", "request_rate", "error_ratio"]
    dropped = {name for name in (*latency, *more) if rng.random() < 0.12}
    metrics = [name for name in (*latency, *more) if name not in dropped]
    if not any(name in LATENCY_METRICS for name in metrics):
        metrics.append(str(rng.choice(LATENCY_METRICS)))
    hidden = rng.random(topology.size) < rng.choice([0.0, 0.0, 0.0, 0.0, 0.05, 0.1])
    return telemetry.Coverage(
        metrics=tuple(sorted(metrics)),
        edge_metrics=tuple(sorted(name for name in edges if rng.random() > 0.12)),
        infrastructure=bool(kind == "cluster" or rng.random() < 0.35),
        bucketed=bool(rng.random() < (0.6 if kind != "aggregate" else 0.15)),
        sampling=float(rng.choice([1.0, 1.0, 0.3, 0.05])),
        hidden=hidden,
        missing_series=float(rng.choice([0.0, 0.02, 0.08])),
        missing_samples=float(rng.choice([0.0, 0.02, 0.2])),
        bridged=bool(rng.random() < 0.7),
        shadows=_shadows(rng, topology) if rng.random() < (0.5 if kind == "aggregate" else 0.15) else (),
        idle=tuple(rng.integers(0, topology.size, int(rng.integers(1, 2 + topology.size // 4))).tolist())
        if rng.random() < 0.4
        else (),
    )


def _shadows(rng: np.random.Generator, topology: Topology) -> tuple[tuple[int, bool], ...]:
    """Some tracers draw the far end of a call, or its client, as one more node."""
    count = int(rng.integers(1, 2 + len(topology.source) // 4))
    calls = rng.choice(len(topology.source), size=min(count, len(topology.source)), replace=False)
    return tuple((int(call), bool(rng.random() < 0.3)) for call in calls)


def sample_incident(
    seed: int, *, nodes: int | None = None, mechanism: Mechanism | None = None, normal: float = 0.1
) -> SimulatedIncident:
    """Draw one incident; the same seed gives the same incident.

    Args:
        nodes: number of services; drawn from 10 to 500, mostly below 100, when None.
        mechanism: kind of fault; drawn when None.
        normal: probability of a window in which nothing broke.
    """
    for attempt in range(50):
        rng = np.random.default_rng([seed, attempt])
        drawn = _try_incident(rng, seed, nodes, mechanism, normal)
        if drawn is not None:
            return drawn
    raise RuntimeError(f"no fault could be felt in 50 tries (seed {seed})")


def _try_incident(
    rng: np.random.Generator, seed: int, nodes: int | None, mechanism: Mechanism | None, normal: float
) -> SimulatedIncident | None:
    if nodes is None:
        nodes = int(np.clip(np.exp(rng.normal(np.log(32.0), 0.75)), 10, 500))
    topology = random_topology(rng, nodes)
    plan = draw_plan(rng)
    coverage = draw_coverage(rng, topology)
    drivers = draw_drivers(rng, topology, plan)
    steps, onset = plan.steps, plan.onset
    life = engine.run(topology, drivers)
    if not _healthy(topology, life):
        return None
    usual_latency = life.latency[:, : plan.baseline_steps].mean(axis=1)
    chosen: list[Fault] = []
    quiet = mechanism is None and rng.random() < normal
    if not quiet:
        kinds = faults.possible(topology)
        if mechanism is not None and mechanism not in kinds:
            return None
        kind = mechanism if mechanism is not None else Mechanism(str(rng.choice([k.value for k in kinds])))
        if kind in faults.INFRASTRUCTURE and not coverage.infrastructure and rng.random() < 0.75:
            # Whoever runs shared GPUs and queues mostly monitors them.
            coverage = replace(coverage, infrastructure=True)
        strength = float(rng.choice([0.5, 1.0, 1.0, 3.0]))
        chosen.append(
            faults.draw(rng, topology, kind, faults.profile(rng, steps, onset), usual_latency, strength=strength)
        )
        if rng.random() < 0.08:
            other = Mechanism(str(rng.choice([Mechanism.LATENCY, Mechanism.ERRORS])))
            chosen.append(
                faults.draw(rng, topology, other, faults.profile(rng, steps, onset), usual_latency, strength=strength)
            )
    background = _background(rng, topology, plan, usual_latency)
    decoys = _decoys(rng, topology, plan)
    return assemble(rng, f"sim-{seed}", topology, plan, coverage, drivers, chosen, background=background, decoys=decoys)


def _healthy(topology: Topology, state: engine.State) -> bool:
    """Whether the cluster works when nothing breaks: people repair what is broken every day."""
    typical = np.median(state.error, axis=1)
    busiest = np.quantile(state.utilization, 0.95, axis=1)
    return bool(np.quantile(typical[topology.base_error <= 0.1], 0.98) < 0.1 and np.quantile(busiest, 0.98) < 0.85)


def _background(rng: np.random.Generator, topology: Topology, plan: Plan, latency: Floats) -> engine.Effects:
    """A change elsewhere that happens with and without the fault: loud, and not the cause."""
    effects = engine.Effects()
    if rng.random() < 0.4:
        for _ in range(int(rng.integers(1, 4))):
            node = int(rng.integers(0, topology.size))
            start = int(rng.integers(plan.baseline_steps - 2, plan.steps))
            shape = faults.profile(rng, plan.steps, start)
            if rng.random() < 0.7:
                effects.own_add[node] = shape * latency[node] * rng.uniform(0.3, 3.0)
            else:
                effects.error_add[node] = shape * rng.uniform(0.005, 0.1)
    return effects


def _decoys(rng: np.random.Generator, topology: Topology, plan: Plan) -> dict[tuple[str, str], Floats]:
    """Resource readings that jump for reasons of their own."""
    out: dict[tuple[str, str], Floats] = {}
    names = [*topology.names, *topology.hosts, *topology.gpus, *topology.workloads]
    for _ in range(int(rng.poisson(0.8))):
        name = str(rng.choice(names))
        if name.startswith(("gpu", "job")):
            metric = str(rng.choice(["gpu_utilization_ratio", "gpu_memory_utilization_ratio"]))
        else:
            metric = str(rng.choice(["cpu_utilization_ratio", "memory_utilization_ratio"]))
        start = int(rng.integers(plan.baseline_steps - 3, plan.steps))
        shape = faults.profile(rng, plan.steps, start)
        out[(name, metric)] = shape * rng.uniform(0.1, 0.8)
    return out


def _merge(parts: list[engine.Effects]) -> engine.Effects:
    merged = engine.Effects()
    for part in parts:
        for name in vars(merged):
            if name == "touched":
                continue
            into = getattr(merged, name)
            scale = name.endswith("_scale")
            for key, values in getattr(part, name).items():
                into[key] = values if key not in into else (into[key] * values if scale else into[key] + values)
        merged.touched = max(merged.touched if merged.touched < 1.0 else 0.0, part.touched)
    return merged


def assemble(
    rng: np.random.Generator,
    name: str,
    topology: Topology,
    plan: Plan,
    coverage: telemetry.Coverage,
    drivers: engine.Drivers,
    chosen: list[Fault],
    *,
    background: engine.Effects | None = None,
    decoys: dict[tuple[str, str], Floats] | None = None,
    victim: str | None = None,
    metric: str | None = None,
) -> SimulatedIncident | None:
    """Run both worlds, measure both, pick a victim that feels it, and write down the truth.

    Returns None when no monitored service feels the fault.
    """
    background = background or engine.Effects()
    decoys = decoys or {}
    usual = engine.run(topology, drivers, background)
    state = engine.run(topology, drivers, _merge([background, *(f.effects for f in chosen)])) if chosen else usual
    seed = int(rng.integers(0, 2**63))
    combined = (
        replace(chosen[0], effects=_merge([f.effects for f in chosen]), signal=_signals(chosen),
                first=tuple(dict.fromkeys(i for f in chosen for i in f.first)))
        if chosen
        else None
    )  # fmt: skip
    seen = telemetry.observe(seed, topology, coverage, state, usual, plan.step, combined, decoys)
    without = telemetry.observe(seed, topology, coverage, usual, usual, plan.step, None, decoys)
    picked = _pick_victim(rng, topology, plan, coverage, seen, without, chosen, victim, metric)
    if picked is None:
        return None
    victim_service, victim_metric = picked
    # An incident that its own victim causes is the easy case; most pages come from further away.
    if victim is None and any(topology.names[victim_service] == f.cause for f in chosen) and rng.random() < 0.65:
        return None
    if chosen and not _dominates(plan, seen, without, victim_service, victim_metric, pinned=victim is not None):
        return None
    without_first = without
    if len(chosen) > 1:
        rest = engine.run(topology, drivers, _merge([background, *(f.effects for f in chosen[1:])]))
        without_first = telemetry.observe(seed, topology, coverage, rest, usual, plan.step, chosen[1], decoys)
        # The second fault must matter less to this victim, or it would be the one to name.
        window = slice(plan.start, None)
        factual = seen.services[victim_metric][victim_service, window]
        first = np.nanmean(factual - without_first.services[victim_metric][victim_service, window])
        whole = np.nanmean(factual - without.services[victim_metric][victim_service, window])
        if not first > 0.6 * whole:
            return None
    return _finish(
        rng, name, topology, plan, coverage, chosen, state, usual, seen, without, without_first,
        victim_service, victim_metric,
    )  # fmt: skip


def _signals(chosen: list[Fault]) -> dict[tuple[str, str], Floats]:
    out: dict[tuple[str, str], Floats] = {}
    for fault in chosen:
        for key, values in fault.signal.items():
            out[key] = out[key] + values if key in out else values
    return out


def _pick_victim(
    rng: np.random.Generator,
    topology: Topology,
    plan: Plan,
    coverage: telemetry.Coverage,
    seen: telemetry.Reading,
    without: telemetry.Reading,
    chosen: list[Fault],
    victim: str | None,
    metric: str | None,
) -> tuple[int, str] | None:
    """A monitored service and metric on which the fault shows; mostly where users are: at the entries."""
    usable = [m for m in coverage.metrics if signal_of(m) in (Signal.LATENCY, Signal.ERRORS) and "self_time" not in m]
    visible = np.flatnonzero(~coverage.hidden)
    if victim is not None and metric is not None:
        return topology.names.index(victim), metric
    if not len(visible):
        return None
    if not chosen:
        entries = visible[topology.level[visible] == 0]
        pool = entries if len(entries) and rng.random() < 0.8 else visible
        return int(rng.choice(pool)), str(rng.choice(usable))
    base, window = slice(0, plan.baseline_steps), slice(plan.onset, None)
    felt: list[tuple[int, str]] = []
    for name in usable:
        values, other = seen.services[name], without.services[name]
        with np.errstate(invalid="ignore"):
            centre = _nanmedian(values[:, base])
            sigma = 1.4826 * _nanmedian(np.abs(values[:, base] - centre[:, None]))
            change = _nanmean(values[:, window]) - _nanmean(other[:, window])
        floor = 0.003 if name == "error_ratio" else 0.03 * centre
        strong = change > 2.0 * np.maximum(sigma, floor)
        if name != "error_ratio":
            strong &= change > 0.06 * centre
        felt += [(int(i), name) for i in visible[strong[visible]]]
    if not felt:
        return None
    causes = {fault.cause for fault in chosen}
    roll = rng.random()
    entries_felt = [item for item in felt if topology.level[item[0]] == 0 and topology.names[item[0]] not in causes]
    others = [item for item in felt if topology.names[item[0]] not in causes]
    pool_felt = entries_felt if entries_felt and roll < 0.75 else others if others and roll < 0.93 else felt
    return pool_felt[int(rng.integers(0, len(pool_felt)))]


def _dominates(
    plan: Plan,
    seen: telemetry.Reading,
    without: telemetry.Reading,
    victim: int,
    metric: str,
    *,
    pinned: bool,
) -> bool:
    """Whether the fault, and not the background, is most of what the victim felt."""
    base, window = slice(0, plan.baseline_steps), slice(plan.onset, None)
    values, other = seen.services[metric][victim], without.services[metric][victim]
    if not (np.isfinite(values[base]).sum() >= 5 and np.isfinite(values[window]).any()):
        return False
    change = np.nanmean(values[window]) - np.nanmean(other[window])
    total = np.nanmean(values[window]) - np.nanmedian(values[base])
    return pinned or bool(change > 0.7 * abs(total))


def _nanmean(values: Floats) -> Floats:
    count = np.isfinite(values).sum(axis=1)
    out: Floats = np.where(count > 0, np.nansum(values, axis=1) / np.maximum(count, 1), np.nan)
    return out


def _nanmedian(values: Floats) -> Floats:
    out = np.full(len(values), np.nan)
    some = np.isfinite(values).any(axis=1)
    out[some] = np.nanmedian(values[some], axis=1)
    return out


def _finish(
    rng: np.random.Generator,
    name: str,
    topology: Topology,
    plan: Plan,
    coverage: telemetry.Coverage,
    chosen: list[Fault],
    state: engine.State,
    usual: engine.State,
    seen: telemetry.Reading,
    without: telemetry.Reading,
    without_first: telemetry.Reading,
    victim: int,
    metric: str,
) -> SimulatedIncident | None:
    view = telemetry.nodes_of(topology, coverage)
    position = {node: i for i, node in enumerate(view.names)}
    service_rows = np.array([position.get(node, -1) for node in topology.names])
    window = slice(plan.start, None)
    active = slice(plan.onset, None)
    errors = signal_of(metric) is Signal.ERRORS
    now, before = (state.error_share, usual.error_share) if errors else (state.time_share, usual.time_share)
    carried = (now[:, active] - before[:, active]).mean(axis=1)
    felt = (state.error - usual.error if errors else state.latency - usual.latency)[:, active].mean(axis=1)
    steps = _true_path(topology, chosen[0], victim, carried, state, usual, active) if chosen else ()
    if chosen and not steps and victim not in chosen[0].first:
        # A side effect of a side effect (a retry storm elsewhere): there is no one path to teach.
        return None
    blind = _blind(topology, coverage, chosen, steps)
    named = [chosen[0].cause, *(topology.names[target] for _, target in steps)] if chosen else []
    if chosen and chosen[0].cause not in topology.names:
        named = [chosen[0].cause, *([topology.names[steps[0][0]]] if steps else [topology.names[victim]]), *named[1:]]
    shown = [node for node in dict.fromkeys(named[1:] if blind else named) if node in position]
    hidden_cause = bool(chosen) and (not shown or shown[0] != chosen[0].cause)
    if hidden_cause and shown and shown[0] == topology.names[victim] and rng.random() < 0.65:
        return None
    cause = position[shown[0]] if shown else -1
    if chosen and not shown:
        return None
    edge_of = {(int(a), int(b)): k for k, (a, b) in enumerate(zip(view.callers, view.callees, strict=True))}
    path = []
    for a, b in itertools.pairwise(shown):
        i, j = position[a], position[b]
        if (j, i) in edge_of or (i, j) in edge_of:
            path.append((i, j))
        else:
            # A hidden service lies between: the graph does not show how the two are joined.
            path = []
            break
    flow = np.zeros(len(view.callers))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(felt[topology.source] > 0, carried / felt[topology.source], 0.0)
    real = view.calls >= 0
    if chosen:
        flow[real] = np.nan_to_num(share[view.calls[real]]).clip(0.0, 1.0)
        for k in np.flatnonzero(~real):
            if view.names[view.callees[k]] == chosen[0].cause:
                flow[k] = 1.0 if view.names[view.callers[k]] in {topology.names[i] for i in chosen[0].first} else 0.0
    involved = np.isin(np.arange(len(view.names)), [position[node] for node in shown])
    panel = _panel(
        rng, topology, plan, coverage, view, service_rows, seen, position[topology.names[victim]], metric, involved
    )
    if (
        metric not in panel.window
        or not np.isfinite(panel.window[metric][panel.victim, LEAD + plan.onset_step :]).any()
    ):
        return None
    second = chosen[1].cause if len(chosen) > 1 else None
    return SimulatedIncident(
        id=name,
        panel=panel,
        mechanism=chosen[0].mechanism if chosen else None,
        cause=cause,
        second_cause=position.get(second, -1) if second else -1,
        path=tuple(path),
        flow=flow,
        counterfactual=without.services[metric][victim, window],
        counterfactual_first=without_first.services[metric][victim, window],
        onset_step=plan.onset_step,
        hidden_cause=hidden_cause,
    )


def _blind(
    topology: Topology, coverage: telemetry.Coverage, chosen: list[Fault], steps: tuple[tuple[int, int], ...]
) -> bool:
    """Whether the cause leaves no trace of its own: a slow link that no one measures looks like a slow caller.

    Then the truth that monitoring can support is the caller, as with a service that is not monitored at all.
    """
    if not chosen or chosen[0].mechanism is not Mechanism.NETWORK_DELAY or not steps:
        return False
    measured = any(name in coverage.edge_metrics for name in (*LATENCY_METRICS, "network_gap_mean_seconds"))
    callers = {int(topology.source[edge]) for edge in chosen[0].effects.network_add} - {chosen[0].first[0]}
    return not measured and not chosen[0].effects.own_add and len(callers) < 2


def _reaches(topology: Topology, goals: set[int]) -> Bools:
    """Services that depend on one of ``goals``, themselves included; shape [S]."""
    out = np.zeros(topology.size, dtype=bool)
    out[list(goals)] = True
    for edge in np.argsort(-topology.level[topology.source], kind="stable"):
        out[topology.source[edge]] |= out[topology.target[edge]]
    return out


def _descend(topology: Topology, start: int, goals: set[int], weight: Floats) -> list[int]:
    """Services from ``start`` down to one of ``goals``, by the heaviest edge at each step that can still get there."""
    reach = _reaches(topology, goals)
    at, walk = start, [start]
    while at not in goals:
        out = np.flatnonzero((topology.source == at) & reach[topology.target])
        if not len(out):
            return []
        at = int(topology.target[out[np.argmax(weight[out])]])
        walk.append(at)
    return walk


def _true_path(
    topology: Topology,
    fault: Fault,
    victim: int,
    carried: Floats,
    state: engine.State,
    usual: engine.State,
    active: slice,
) -> tuple[tuple[int, int], ...]:
    """The way the effect took, as (source, target) services from the first one that the fault touched to the victim."""
    if fault.mechanism is not Mechanism.OVERLOAD:
        down = _descend(topology, victim, set(fault.first), carried)
        return tuple(zip(down[:0:-1], down[-2::-1], strict=True)) if len(down) > 1 else ()
    cause = fault.first[0]
    # Load goes down from the caller to the service that it overwhelms; latency comes up from there.
    burden = (state.own - usual.own)[:, active].mean(axis=1) + (state.error - usual.error)[:, active].mean(axis=1)
    below = np.zeros(topology.size, dtype=bool)
    below[cause] = True
    above = np.zeros(topology.size, dtype=bool)
    above[victim] = True
    for edge in np.argsort(topology.level[topology.source], kind="stable"):
        below[topology.target[edge]] |= below[topology.source[edge]]
        above[topology.target[edge]] |= above[topology.source[edge]]
    both = np.flatnonzero(below & above)
    if not len(both):
        return ()
    hurt = int(both[np.argmax(burden[both])])
    extra = (state.call_rate - usual.call_rate)[:, active].mean(axis=1)
    load = _descend(topology, cause, {hurt}, extra)
    effect = _descend(topology, victim, {hurt}, carried)
    walk = [*load, *effect[-2::-1]]
    # Where the way up passes a service that the way down passed, the loop between is not part of the way.
    short: list[int] = []
    for node in walk:
        if node in short:
            del short[short.index(node) + 1 :]
        else:
            short.append(node)
    return tuple(itertools.pairwise(short))


def _panel(
    rng: np.random.Generator,
    topology: Topology,
    plan: Plan,
    coverage: telemetry.Coverage,
    view: telemetry.Nodes,
    service_rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    seen: telemetry.Reading,
    victim: int,
    metric: str,
    involved: Bools,
) -> Panel:
    """Keep what is monitored, punch the gaps, and lay it out by node and edge."""
    count, steps = len(view.names), plan.steps
    nodes: dict[str, Floats] = {}
    lead_known = bool(rng.random() < 0.85)
    shown = service_rows >= 0
    for name in coverage.metrics:
        nodes[name] = np.full((count, steps), np.nan)
        nodes[name][service_rows[shown]] = seen.services[name][shown]
    if coverage.infrastructure:
        position = {node: i for i, node in enumerate(view.names)}
        for (node, name), values in seen.resources.items():
            nodes.setdefault(name, np.full((count, steps), np.nan))[position[node]] = values
    shadows = np.flatnonzero(view.shadow_of >= 0)
    for name in set(coverage.metrics) & set(seen.calls):
        nodes[name][shadows] = seen.calls[name][view.shadow_of[shadows]]
    if plan.drift and rng.random() < 0.5:
        # Between an old baseline and the incident, nodes come and go.
        fate = rng.random(count)
        fate[victim] = 1.0
        for values in nodes.values():
            values[fate < 0.05, : plan.baseline_steps] = np.nan
            values[(fate >= 0.05) & (fate < 0.08) & ~involved, plan.baseline_steps :] = np.nan
    if not lead_known:
        for values in nodes.values():
            values[:, plan.baseline_steps : plan.start] = np.nan
    for name, values in nodes.items():
        lost = rng.random(count) < coverage.missing_series
        if name == metric:
            lost[victim] = False
        values[lost] = np.nan
        values[rng.random(values.shape) < coverage.missing_samples] = np.nan
    edges: dict[str, Floats] = {}
    real = view.calls >= 0
    lead = slice(plan.baseline_steps, plan.start)
    for name in coverage.edge_metrics:
        edges[name] = np.full((len(view.callers), steps), np.nan)
        edges[name][real] = seen.calls[name][view.calls[real]]
        edges[name][rng.random(len(view.callers)) < coverage.missing_series] = np.nan
        edges[name][rng.random(edges[name].shape) < coverage.missing_samples] = np.nan
        if not lead_known:
            edges[name][:, lead] = np.nan
    base, window = slice(0, plan.baseline_steps), slice(plan.baseline_steps, None)
    static = np.full((len(view.callers), len(EDGE_STATIC)), np.nan)
    if real.any():
        calls = view.calls[real]
        if "request_rate" in edges:
            static[real, 0] = _nanmean(edges["request_rate"][real][:, base])
        static[real, 3] = np.where(np.isfinite(topology.timeout[calls]), topology.timeout[calls], np.nan)
    asynchronous = np.zeros(len(view.callers), dtype=bool)
    asynchronous[real] = topology.asynchronous[view.calls[real]]
    graph = CallGraph(
        nodes=view.names,
        kinds=np.array([NODE_KINDS.index(kind) for kind in view.kinds], dtype=np.int64),
        callers=view.callers,
        callees=view.callees,
        relations=np.array([RELATIONS.index(relation) for relation in view.relations], dtype=np.int64),
        asynchronous=asynchronous,
        protocols=tuple("http" if call >= 0 else "" for call in view.calls),
        edge_static=static,
    )
    start = EPOCH.timestamp()
    return Panel(
        graph=graph,
        baseline={k: v[:, base] for k, v in nodes.items() if np.isfinite(v[:, base]).any()},
        window={k: v[:, window] for k, v in nodes.items() if np.isfinite(v[:, plan.start :]).any()},
        edge_baseline={k: v[:, base] for k, v in edges.items() if np.isfinite(v[:, base]).any()},
        edge_window={k: v[:, window] for k, v in edges.items() if np.isfinite(v[:, plan.start :]).any()},
        step=plan.step,
        baseline_start=start,
        baseline_step=plan.step,
        window_start=start + plan.start * plan.step,
        victim=victim,
        metric=metric,
        # An alert tells when the symptom began, a little late.
        onset=min(plan.onset_step + float(rng.choice([0.0, 0.0, 1.0])), plan.window_steps - 1.0) * plan.step
        if rng.random() < 0.4
        else None,
    )


def to_incident(simulated: SimulatedIncident) -> Incident:
    """Write a simulated incident as a bundle, with its truth beside it."""
    panel = simulated.panel
    graph = panel.graph
    start = datetime.fromtimestamp(panel.baseline_start, UTC)
    middle = datetime.fromtimestamp(panel.window_start, UTC)
    window_steps = next(iter(panel.window.values())).shape[1] - LEAD
    end = middle + timedelta(seconds=window_steps * panel.step)
    parts: list[pa.Table] = []
    nodes = np.array(graph.nodes, dtype=object)
    for begin, tables, edge_tables in (
        (panel.baseline_start, panel.baseline, panel.edge_baseline),
        (panel.window_start - LEAD * panel.step, panel.window, panel.edge_window),
    ):
        for owner, peers, group in (
            (nodes, None, tables),
            (nodes[graph.callers], nodes[graph.callees], edge_tables),
        ):
            for name, values in group.items():
                rows, columns = np.nonzero(np.isfinite(values))
                parts.append(
                    metrics_table(
                        begin + columns * panel.step,
                        owner[rows].tolist(),
                        [name] * len(rows),
                        values[rows, columns],
                        None if peers is None else peers[rows].tolist(),
                    )
                )
    static = {
        name: pa.array([None if np.isnan(v) else float(v) for v in graph.edge_static[:, k]], pa.float64())
        for k, name in enumerate(EDGE_STATIC)
    }
    edges = pa.table(
        {
            "caller": pa.array(nodes[graph.callers].tolist(), pa.string()),
            "callee": pa.array(nodes[graph.callees].tolist(), pa.string()),
            "relation": pa.array([RELATIONS[r].value for r in graph.relations], pa.string()),
            "protocol": pa.array([p or None for p in graph.protocols], pa.string()),
            "asynchronous": pa.array(graph.asynchronous),
            **static,
        },
        schema=EDGES_SCHEMA,
    )
    kinds = pa.table(
        {
            "node": pa.array(list(graph.nodes), pa.string()),
            "kind": pa.array([graph.kind(i).value for i in range(len(graph.nodes))], pa.string()),
            "attributes": pa.nulls(len(graph.nodes), NODES_SCHEMA.field("attributes").type),
        },
        schema=NODES_SCHEMA,
    )
    header = Header(
        id=simulated.id,
        title=simulated.title or f"Simulated incident {simulated.id}",
        window=Window(middle, end),
        baseline=Window(start, middle - timedelta(seconds=LEAD * panel.step)),
        victim=Victim(graph.nodes[panel.victim], panel.metric),
        onset=None if panel.onset is None else middle + timedelta(seconds=panel.onset),
        labels={"origin": "simulation", **simulated.labels},
    )
    truth = Truth(
        causes=() if simulated.cause < 0 else (graph.nodes[simulated.cause],),
        kind="" if simulated.mechanism is None else simulated.mechanism.value,
        path=tuple((graph.nodes[a], graph.nodes[b]) for a, b in simulated.path),
        counterfactual=float(np.nanmean(simulated.counterfactual[simulated.onset_step :])),
    )
    return Incident.create(
        header, truth=truth, metrics=pa.concat_tables(parts), edges=edges, nodes=kinds, **simulated.tables
    )


__all__ = [
    "EPOCH",
    "Plan",
    "SimulatedIncident",
    "assemble",
    "draw_coverage",
    "draw_drivers",
    "draw_plan",
    "sample_incident",
    "to_incident",
]
