"""The cluster as a structural model over time: the same drivers with and without a fault give the counterfactual.

Every array is [entity, time step]. Nothing here draws random numbers: all chance is in `Drivers`, so that a rerun
without the fault differs by the fault alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rca.simulation.topology import Floats, Ints, Topology

#: Passes between load (flowing down), and latency and errors (flowing up): retries couple the two.
PASSES = 3
#: Utilisation at which a service starts to shed load rather than queue without end.
MAX_LOAD = 0.93


@dataclass(frozen=True)
class Drivers:
    """The exogenous chance of one run.

    Attributes:
        demand: multiplier of each entry's rate, shape [S, T] (only entry rows matter).
        own: multiplier of each service's own time, shape [S, T].
        error: multiplier of each service's own error ratio, shape [S, T].
        host, gpu: background contention added to the own time of residents, as a fraction, [H, T] and [G, T].
        queue_wait: seconds spent in each queue, [Q, T].
    """

    demand: Floats
    own: Floats
    error: Floats
    host: Floats
    gpu: Floats
    queue_wait: Floats


@dataclass
class Effects:
    """What a fault does to the structural model; each is a sparse map from an entity to values over time, [T]."""

    own_add: dict[int, Floats] = field(default_factory=dict)
    own_scale: dict[int, Floats] = field(default_factory=dict)
    error_add: dict[int, Floats] = field(default_factory=dict)
    fail_fast: dict[int, Floats] = field(default_factory=dict)
    network_add: dict[int, Floats] = field(default_factory=dict)
    calls_scale: dict[int, Floats] = field(default_factory=dict)
    demand_scale: dict[int, Floats] = field(default_factory=dict)
    demand_add: dict[int, Floats] = field(default_factory=dict)
    host_add: dict[int, Floats] = field(default_factory=dict)
    gpu_add: dict[int, Floats] = field(default_factory=dict)
    gpu_error: dict[int, Floats] = field(default_factory=dict)
    queue_add: dict[int, Floats] = field(default_factory=dict)
    #: Share of the requests that the fault touches at the service where it acts, in (0, 1].
    touched: float = 1.0


@dataclass(frozen=True)
class State:
    """What the cluster did. Services: [S, T]; calls: [E, T].

    Attributes:
        rate: requests per second. ``own``: own time with queueing. ``latency``: whole mean latency of one request.
        error: share of failed requests. ``utilization``: of the service's capacity.
        call_latency: mean latency of one call as the caller sees it, including network, time-out and retries.
        call_error: share of calls that failed for the caller. ``call_rate``: attempts per second.
        time_share, error_share: what the call adds to its caller's latency (seconds) and error ratio.
        queue_wait: seconds in each queue, [Q, T]. ``network``: round trip of each call beside the callee's time.
    """

    rate: Floats
    own: Floats
    latency: Floats
    error: Floats
    utilization: Floats
    call_latency: Floats
    call_error: Floats
    call_rate: Floats
    time_share: Floats
    error_share: Floats
    queue_wait: Floats
    network: Floats


def _apply(base: Floats, changes: dict[int, Floats], *, multiply: bool = False) -> Floats:
    if not changes:
        return base
    out = base.copy()
    for row, values in changes.items():
        out[row] = out[row] * values if multiply else out[row] + values
    return out


def _resident(values: Floats, where: Ints, steps: int) -> Floats | float:
    """Value of the resource that each service sits on, 0 where it sits on none; shape [S, T]."""
    if not len(values):
        return 0.0
    gathered = values[np.maximum(where, 0)]
    gathered[where < 0] = 0.0
    return np.broadcast_to(gathered, (len(where), steps))


def run(topology: Topology, drivers: Drivers, effects: Effects | None = None) -> State:
    """Simulate. Steady state in each step: load flows down the DAG, latency and failures flow up."""
    effects = effects or Effects()
    services, steps = drivers.own.shape
    source, target = topology.source, topology.target
    host = _apply(drivers.host, effects.host_add)
    gpu = _apply(drivers.gpu, effects.gpu_add)
    queue_wait = _apply(drivers.queue_wait, effects.queue_add)
    work = topology.base_time[:, None] * drivers.own
    work = work * (1.0 + _resident(host, topology.host, steps)) * (1.0 + _resident(gpu, topology.gpu, steps))
    work = _apply(work, effects.own_scale, multiply=True)
    added = _apply(np.zeros((services, steps)), effects.own_add)
    added = added + _resident(queue_wait, topology.queue, steps)
    own_error = topology.base_error[:, None] * drivers.error
    own_error = _apply(own_error, effects.error_add)
    gpu_error = _apply(np.zeros((len(topology.gpus), steps)), effects.gpu_error)
    own_error = (own_error + _resident(gpu_error, topology.gpu, steps)).clip(0.0, 1.0)
    network = _apply(np.broadcast_to(topology.network[:, None], (len(source), steps)), effects.network_add)
    calls = _apply(np.broadcast_to(topology.calls[:, None], (len(source), steps)), effects.calls_scale, multiply=True)
    demand = _apply(topology.entry_rate[:, None] * drivers.demand, effects.demand_scale, multiply=True)
    demand = _apply(demand, effects.demand_add)
    fast = _apply(np.zeros((services, steps)), effects.fail_fast)
    capacity = (topology.base_rates() * topology.base_time / topology.busy)[:, None]
    waits = (~topology.asynchronous).astype(np.float64)[:, None]
    timeout = topology.timeout[:, None]
    retries = topology.retries[:, None]
    levels = [np.flatnonzero(topology.level[source] == value) for value in range(int(topology.level.max()) + 1)]
    attempts = np.ones((len(source), steps))
    state: State | None = None
    for _ in range(PASSES):
        rate = demand.copy()
        for edges in levels:
            flow = rate[source[edges]] * calls[edges] * attempts[edges]
            np.add.at(rate, target[edges], flow)
        offered = rate * work / capacity
        load = offered.clip(0.0, MAX_LOAD)
        own = work * (1.0 + load**2 / (1.0 - load)) + added
        # Past its capacity a service sheds what it cannot serve.
        shed = 1.0 - MAX_LOAD / np.maximum(offered, MAX_LOAD)
        failing = 1.0 - (1.0 - own_error) * (1.0 - shed)
        latency = own.copy()
        survive = 1.0 - failing
        widest = np.zeros_like(own)
        call_latency = np.zeros((len(source), steps))
        call_error = np.zeros((len(source), steps))
        time_share = np.zeros((len(source), steps))
        error_share = np.zeros((len(source), steps))
        error = failing.copy()
        # Deepest callers first: each level is complete before the level above reads it.
        for depth in range(len(levels) - 1, -1, -1):
            edges = levels[depth]
            if len(edges):
                callee, caller = target[edges], source[edges]
                one = network[edges] + latency[callee]
                late = _late(one, timeout[edges])
                spent = np.where(np.isfinite(timeout[edges]), (1.0 - late) * one + late * _finite(timeout[edges]), one)
                fail = 1.0 - (1.0 - error[callee]) * (1.0 - late)
                tries = _tries(fail, retries[edges])
                attempts[edges] = tries
                call_latency[edges] = spent
                call_error[edges] = fail ** (retries[edges] + 1)
                whole = calls[edges] * spent * tries * waits[edges]
                time_share[edges] = whole
                hurt = np.minimum(calls[edges], 1.0) * call_error[edges] * waits[edges]
                error_share[edges] = hurt * (1.0 - topology.fallback[edges][:, None])
                side = topology.parallel[caller]
                np.add.at(latency, caller[~side], whole[~side])
                np.maximum.at(widest, caller[side], whole[side])
                np.multiply.at(survive, caller, 1.0 - error_share[edges])
            rows = np.flatnonzero(topology.level == depth)
            wide = rows[topology.parallel[rows]]
            latency[wide] += widest[wide]
            error[rows] = 1.0 - survive[rows]
            # A request that fails at once takes a fraction of the usual time.
            latency[rows] *= 1.0 - 0.9 * fast[rows] * failing[rows]
        state = State(
            rate=rate,
            own=own,
            latency=latency,
            error=error,
            utilization=offered,
            call_latency=call_latency,
            call_error=call_error,
            call_rate=rate[source] * calls * attempts,
            time_share=time_share,
            error_share=error_share,
            queue_wait=queue_wait,
            network=network,
        )
    assert state is not None  # noqa: S101
    return state


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, 0.0)


def _late(latency: Floats, timeout: Floats) -> Floats:
    """Share of calls slower than their time-out, for log-logistic latencies around the mean."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratio = np.log(timeout / latency)
        late = 1.0 / (1.0 + np.exp(ratio / 0.25))
    return np.where(np.isfinite(timeout), late, 0.0)


def _tries(fail: Floats, retries: Ints) -> Floats:
    """Expected attempts of a call that is repeated up to ``retries`` times."""
    tries = np.ones_like(fail)
    for k in range(1, int(retries.max(initial=0)) + 1):
        tries = tries + np.where(retries >= k, fail**k, 0.0)
    return tries
