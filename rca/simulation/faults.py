"""Faults: what breaks, where, and what that does to the structural model of `engine`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rca.simulation.engine import Effects
from rca.simulation.topology import Floats, Topology


class Mechanism(StrEnum):
    """The kinds of fault that the simulation plays and the network tells apart."""

    LATENCY = "added latency"
    ERRORS = "errors"
    CPU_CONTENTION = "CPU contention"
    GPU_CONTENTION = "GPU contention"
    GPU_FRAGMENTATION = "GPU memory fragmentation"
    NETWORK_DELAY = "network delay"
    OVERLOAD = "overload"
    QUEUE_IMBALANCE = "queue imbalance"
    OUTAGE = "dependency outage"
    FAIL_FAST = "failing fast"


MECHANISMS: tuple[Mechanism, ...] = tuple(Mechanism)


#: Faults whose cause is a shared resource or a workload on it.
INFRASTRUCTURE = frozenset({Mechanism.GPU_CONTENTION, Mechanism.GPU_FRAGMENTATION, Mechanism.QUEUE_IMBALANCE})


@dataclass(frozen=True)
class Fault:
    """One injected fault.

    Attributes:
        cause: name of the node that is to blame.
        effects: change of the structural model; zero before the onset.
        first: services on which it acts directly (indices), in order of strength; the path starts there.
        signal: extra own-resource readings over time at infrastructure nodes, `{(node, metric): [T]}`, added.
    """

    mechanism: Mechanism
    cause: str
    effects: Effects
    first: tuple[int, ...]
    signal: dict[tuple[str, str], Floats]


def profile(rng: np.random.Generator, steps: int, onset: int) -> Floats:
    """Strength over time in [0, 1], zero before ``onset``: a step, a ramp, or flapping. Shape [T]."""
    shape = np.zeros(steps)
    active = steps - onset
    kind = rng.choice(["step", "step", "step", "ramp", "flap"])
    if kind == "ramp" and active > 3:
        rise = int(rng.integers(2, max(3, active // 2)))
        shape[onset:] = np.minimum(1.0, (np.arange(active) + 1) / rise)
    elif kind == "flap" and active > 5:
        period = int(rng.integers(2, 5))
        shape[onset:] = np.where((np.arange(active) // period) % 2 == 0, 1.0, rng.uniform(0.0, 0.4))
    else:
        shape[onset:] = 1.0
    wobble: Floats = np.where(shape > 0, np.exp(rng.normal(0.0, 0.1, steps)), 0.0).clip(0.0, 1.5)
    return shape * wobble


def possible(topology: Topology) -> list[Mechanism]:
    """The mechanisms that can be played on ``topology``."""
    kinds = [
        Mechanism.LATENCY,
        Mechanism.ERRORS,
        Mechanism.CPU_CONTENTION,
        Mechanism.NETWORK_DELAY,
        Mechanism.OVERLOAD,
        Mechanism.OUTAGE,
        Mechanism.FAIL_FAST,
    ]
    if (topology.gpu >= 0).any():
        kinds += [Mechanism.GPU_FRAGMENTATION]
        used = set(topology.gpu[topology.gpu >= 0].tolist())
        if used & set(topology.workload_gpu.tolist()):
            kinds += [Mechanism.GPU_CONTENTION, Mechanism.GPU_CONTENTION]
    if (topology.queue >= 0).any():
        kinds += [Mechanism.QUEUE_IMBALANCE]
    return kinds


def draw(
    rng: np.random.Generator,
    topology: Topology,
    mechanism: Mechanism,
    shape: Floats,
    latency: Floats,
    *,
    at: int | None = None,
    strength: float = 1.0,
) -> Fault:
    """Draw a fault of kind ``mechanism`` with strength over time ``shape`` ([T], from `profile`).

    Args:
        latency: usual latency of each service, shape [S]: sizes the fault so that callers can feel it.
        at: index of the service (or of the resource, for resource faults) to break; drawn when None.
        strength: scales the size of the fault.
    """
    effects = Effects()
    signal: dict[tuple[str, str], Floats] = {}
    service = int(rng.integers(0, topology.size)) if at is None else at
    size = strength * float(np.exp(rng.normal(0.0, 0.7)))
    if mechanism is Mechanism.LATENCY:
        # A share of the requests is slow: means move, medians may not.
        effects.touched = float(rng.choice([1.0, 1.0, rng.uniform(0.03, 0.6)]))
        extra = size * max(latency[service] * rng.uniform(1.0, 8.0), rng.uniform(0.005, 0.6))
        effects.own_add[service] = shape * extra * effects.touched
        return Fault(mechanism, topology.names[service], effects, (service,), signal)
    if mechanism is Mechanism.ERRORS:
        effects.error_add[service] = shape * min(0.95, size * float(rng.choice([0.015, 0.03, 0.1, 0.3, 0.8])))
        return Fault(mechanism, topology.names[service], effects, (service,), signal)
    if mechanism is Mechanism.FAIL_FAST:
        effects.error_add[service] = shape * min(0.98, size * rng.uniform(0.1, 0.9))
        effects.fail_fast[service] = (shape > 0).astype(np.float64)
        return Fault(mechanism, topology.names[service], effects, (service,), signal)
    if mechanism is Mechanism.OUTAGE:
        called = np.unique(topology.target)
        service = int(rng.choice(called)) if at is None else at
        effects.error_add[service] = shape * rng.uniform(0.6, 1.0)
        if rng.random() < 0.5:
            effects.own_add[service] = shape * rng.uniform(1.0, 20.0) * max(latency[service], 0.05)
        return Fault(mechanism, topology.names[service], effects, (service,), signal)
    if mechanism is Mechanism.NETWORK_DELAY:
        return _network(rng, topology, service, shape, size, latency, pinned=at is not None)
    if mechanism is Mechanism.OVERLOAD:
        return _overload(rng, topology, service, shape, size, pinned=at is not None)
    if mechanism is Mechanism.CPU_CONTENTION:
        return _cpu(rng, topology, service, shape, size, pinned=at is not None)
    if mechanism is Mechanism.GPU_CONTENTION:
        candidates = [w for w in range(len(topology.workloads)) if topology.workload_gpu[w] in topology.gpu]
        candidates = [w for w in candidates if topology.workload_gpu[w] >= 0]
        job = int(rng.choice(candidates)) if at is None else at
        gpu = int(topology.workload_gpu[job])
        effects.gpu_add[gpu] = shape * size * rng.uniform(0.6, 6.0)
        signal[(topology.workloads[job], "gpu_utilization_ratio")] = shape * rng.uniform(0.3, 0.9)
        signal[(topology.workloads[job], "gpu_memory_utilization_ratio")] = shape * rng.uniform(0.0, 0.5)
        signal[(topology.gpus[gpu], "gpu_utilization_ratio")] = shape * rng.uniform(0.2, 0.7)
        signal[(topology.gpus[gpu], "gpu_memory_utilization_ratio")] = shape * rng.uniform(0.0, 0.4)
        residents = np.flatnonzero(topology.gpu == gpu)
        return Fault(mechanism, topology.workloads[job], effects, _by_time(topology, residents), signal)
    if mechanism is Mechanism.GPU_FRAGMENTATION:
        gpu = int(rng.choice(topology.gpu[topology.gpu >= 0])) if at is None else at
        # Allocations that do not fit are retried after a cache flush; some fail (out of memory).
        effects.gpu_add[gpu] = shape * size * rng.uniform(0.5, 4.0)
        effects.gpu_error[gpu] = shape * rng.choice([0.0, rng.uniform(0.01, 0.3)])
        effects.touched = float(rng.choice([1.0, rng.uniform(0.1, 0.7)]))
        signal[(topology.gpus[gpu], "gpu_fragmentation_ratio")] = shape * rng.uniform(0.25, 0.7)
        residents = np.flatnonzero(topology.gpu == gpu)
        return Fault(mechanism, topology.gpus[gpu], effects, _by_time(topology, residents), signal)
    queue = int(rng.choice(topology.queue[topology.queue >= 0])) if at is None else at
    wait = size * rng.uniform(0.05, 1.5)
    effects.queue_add[queue] = shape * wait
    signal[(topology.queues[queue], "queue_depth")] = shape * wait * rng.uniform(20.0, 400.0)
    residents = np.flatnonzero(topology.queue == queue)
    return Fault(mechanism, topology.queues[queue], effects, _by_time(topology, residents), signal)


def _by_time(topology: Topology, services: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[int, ...]:
    return tuple(int(i) for i in services[np.argsort(-topology.base_time[services], kind="stable")])


def _network(
    rng: np.random.Generator,
    topology: Topology,
    service: int,
    shape: Floats,
    size: float,
    latency: Floats,
    *,
    pinned: bool,
) -> Fault:
    """Delay on the network of one node: every call into it and out of it; or between two nodes only."""
    effects = Effects()
    if not pinned:
        service = int(rng.choice(topology.target))
    into = np.flatnonzero(topology.target == service)
    out = np.flatnonzero(topology.source == service)
    link_only = len(into) > 0 and rng.random() < 0.3
    edges = np.array([int(rng.choice(into))]) if link_only else np.concatenate([into, out])
    delay = size * max(0.3 * float(latency[service]), rng.uniform(0.01, 0.8))
    for edge in edges:
        effects.network_add[int(edge)] = shape * delay
    if not link_only and rng.random() < 0.6:
        # Calls that nobody traces (a database driver, a registry) go through the same network.
        effects.own_add[service] = shape * delay * rng.uniform(0.5, 3.0)
    signal: dict[tuple[str, str], Floats] = {}
    return Fault(Mechanism.NETWORK_DELAY, topology.names[service], effects, (service,), signal)


def _overload(
    rng: np.random.Generator, topology: Topology, service: int, shape: Floats, size: float, *, pinned: bool
) -> Fault:
    """A caller sends far more than usual: one that turned chatty, or a burst at an entry."""
    effects = Effects()
    entries = np.flatnonzero(topology.level == 0)
    if not pinned and rng.random() < 0.3:
        service = int(rng.choice(entries))
    elif not pinned:
        service = int(rng.choice(topology.source))
    if not pinned and rng.random() < 0.25:
        # Someone outside the graph hammers an inner service: all that can be named is where the load enters.
        service = int(rng.integers(0, topology.size))
        capacity = topology.base_rates()[service] / topology.busy[service]
        effects.demand_add[service] = shape * capacity * rng.uniform(0.6, 2.5)
        return Fault(Mechanism.OVERLOAD, topology.names[service], effects, (service,), {})
    factor = 1.0 + shape * min(20.0, size * rng.uniform(1.0, 6.0) / float(topology.busy.max()))
    out = np.flatnonzero(topology.source == service)
    if topology.level[service] == 0 and (not len(out) or rng.random() < 0.6):
        effects.demand_scale[service] = factor
    else:
        chosen = out if rng.random() < 0.5 else np.array([int(rng.choice(out))])
        for edge in chosen:
            effects.calls_scale[int(edge)] = factor
    return Fault(Mechanism.OVERLOAD, topology.names[service], effects, (service,), {})


def _cpu(
    rng: np.random.Generator, topology: Topology, service: int, shape: Floats, size: float, *, pinned: bool
) -> Fault:
    """CPU taken by a batch workload on the host, or by something inside the service's own container."""
    effects = Effects()
    signal: dict[tuple[str, str], Floats] = {}
    slow = shape * size * rng.uniform(0.5, 5.0)
    jobs = [w for w in range(len(topology.workloads)) if topology.workload_host[w] in set(topology.host.tolist())]
    jobs = [w for w in jobs if topology.workload_host[w] >= 0]
    if jobs and not pinned and rng.random() < 0.6:
        job = int(rng.choice(jobs))
        host = int(topology.workload_host[job])
        effects.host_add[host] = slow
        taken = shape * rng.uniform(0.3, 0.9)
        signal[(topology.workloads[job], "cpu_utilization_ratio")] = taken
        signal[(topology.hosts[host], "cpu_utilization_ratio")] = taken * rng.uniform(0.6, 1.0)
        residents = np.flatnonzero(topology.host == host)
        return Fault(Mechanism.CPU_CONTENTION, topology.workloads[job], effects, _by_time(topology, residents), signal)
    effects.own_scale[service] = 1.0 + slow
    signal[(topology.names[service], "cpu_utilization_ratio")] = shape * rng.uniform(0.05, 0.8)
    return Fault(Mechanism.CPU_CONTENTION, topology.names[service], effects, (service,), signal)
