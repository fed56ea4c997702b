"""Random clusters: call DAGs of services on hosts and GPUs, with batch workloads and queues beside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Topology:
    """A cluster of S services in topological order (callers before callees), E calls and their infrastructure.

    Service arrays have shape [S], call arrays [E]; times are seconds, rates per second.

    Attributes:
        base_time: own processing time of one request, without queueing and callees.
        spread: coefficient of variation of one request's latency.
        busy: utilisation at the base rate; sets the capacity.
        parallel: whether the service waits for its callees at once rather than one after the other.
        calls: calls per request of the caller. ``timeout`` in seconds, inf for none. ``retries`` after a failure.
        fallback: share of failed calls that the caller survives. ``network``: round trip beside the callee's time.
        host, gpu, queue: index of the shared resource of each service, -1 for none.
        workload_gpu, workload_host: where each batch workload runs, -1 for nowhere (it waits).
    """

    names: tuple[str, ...]
    level: Ints
    base_time: Floats
    spread: Floats
    busy: Floats
    parallel: Bools
    base_error: Floats
    entry_rate: Floats
    source: Ints
    target: Ints
    calls: Floats
    asynchronous: Bools
    timeout: Floats
    retries: Ints
    fallback: Floats
    network: Floats
    host: Ints
    gpu: Ints
    queue: Ints
    hosts: tuple[str, ...]
    gpus: tuple[str, ...]
    queues: tuple[str, ...]
    workloads: tuple[str, ...]
    workload_gpu: Ints
    workload_host: Ints

    @property
    def size(self) -> int:
        """Number of services."""
        return len(self.names)

    def base_rates(self) -> Floats:
        """Requests per second of each service with no fault and no retry, shape [S]."""
        rate = self.entry_rate.copy()
        for edge in np.argsort(self.source, kind="stable"):
            rate[self.target[edge]] += rate[self.source[edge]] * self.calls[edge]
        return rate


def random_topology(rng: np.random.Generator, services: int, *, infrastructure: bool = True) -> Topology:
    """Draw a cluster with ``services`` services (10 to 500 in training).

    Call graphs of production systems are shallow, wide, and have a few callees shared by many
    (Luo et al., SoCC'21, on Alibaba's traces): callees attach by preference, depth grows with the logarithm of size.
    """
    depth = int(np.clip(rng.poisson(1.2 * np.log2(max(services, 4))) // 2 + 2, 2, 9))
    entries = int(min(1 + rng.poisson(0.6), max(1, services // 5)))
    level = np.concatenate(
        [np.zeros(entries), 1 + np.floor(depth * rng.beta(1.2, 1.1, services - entries)).clip(0, depth - 1)]
    ).astype(np.int64)
    level = np.sort(level)
    # Levels without a gap: every service finds a caller one level up.
    level = np.unique(level, return_inverse=True)[1].astype(np.int64)
    source, target = _calls(rng, level, services)
    edges = len(source)
    alias = rng.random(services) < rng.choice([0.0, 0.08, 0.25])
    base_time = np.exp(rng.normal(np.log(0.012), 1.1, services)).clip(5e-4, 1.5)
    base_time[alias] = rng.uniform(1e-4, 8e-4, int(alias.sum()))
    calls = np.where(rng.random(edges) < 0.45, 1.0, np.exp(rng.normal(-0.4, 0.8, edges))).clip(0.02, 5.0)
    # Some calls are rare: a token is renewed once an hour, a fallback is hardly ever used.
    rare = rng.random(edges) < rng.choice([0.0, 0.05, 0.2])
    calls[rare] = np.exp(rng.normal(np.log(0.004), 1.2, int(rare.sum()))).clip(1e-4, 0.05)
    entry_rate = np.zeros(services)
    entry_rate[level == 0] = np.exp(rng.normal(np.log(8.0), 1.6, int((level == 0).sum()))).clip(0.2, 500.0)
    hosts = int(max(1, round(services / rng.uniform(3, 12)))) if infrastructure else 0
    gpus = int(rng.integers(0, max(2, services // 6))) if infrastructure and rng.random() < 0.6 else 0
    queues = int(rng.integers(1, 4)) if infrastructure and rng.random() < 0.5 else 0
    workloads = int(rng.integers(1, 2 + hosts + gpus)) if infrastructure and rng.random() < 0.75 else 0
    host = rng.integers(0, hosts, services) if hosts else np.full(services, -1)
    gpu = np.full(services, -1)
    queue = np.full(services, -1)
    if gpus:
        on_gpu = rng.random(services) < rng.uniform(0.1, 0.4)
        gpu[on_gpu] = rng.integers(0, gpus, int(on_gpu.sum()))
        # Model inference takes longer than a web handler.
        base_time[on_gpu] = np.exp(rng.normal(np.log(0.06), 0.8, int(on_gpu.sum()))).clip(5e-3, 2.0)
    if queues:
        queued = rng.random(services) < rng.uniform(0.05, 0.3)
        queue[queued] = rng.integers(0, queues, int(queued.sum()))
    # Some callees have failed for months, and nobody minds.
    chronic = (rng.random(services) < rng.choice([0.0, 0.0, 0.05, 0.12])) & (level > 0)
    base_error = np.where(rng.random(services) < 0.6, 0.0, np.exp(rng.normal(np.log(0.002), 1.3, services)))
    base_error = np.where(chronic, rng.choice([1.0, 1.0, 0.4], services), base_error.clip(0.0, 0.05))
    fallback = np.where(rng.random(edges) < 0.75, 0.0, rng.uniform(0.3, 1.0, edges))
    fallback[chronic[target]] = 1.0
    on_gpu_job = (rng.random(workloads) < 0.7) if gpus else np.zeros(workloads, dtype=bool)
    # Time-outs are set by people who looked at the callee's usual latency, generously.
    latency = _typical_latency(level, source, target, calls, base_time)
    timeout = np.where(
        rng.random(edges) < 0.6, latency[target] * np.exp(rng.normal(np.log(25.0), 0.7, edges)).clip(8.0, 300.0), np.inf
    )
    return Topology(
        names=tuple(f"svc-{i:03d}" for i in range(services)),
        level=level,
        base_time=base_time,
        spread=rng.uniform(0.25, 1.6, services),
        busy=rng.beta(2.0, 5.0, services).clip(0.02, 0.6),
        parallel=rng.random(services) < 0.25,
        base_error=base_error,
        entry_rate=entry_rate,
        source=source,
        target=target,
        calls=calls,
        asynchronous=rng.random(edges) < 0.08,
        timeout=timeout,
        retries=rng.choice([0, 0, 0, 0, 0, 1, 1, 2], edges),
        fallback=fallback,
        network=np.exp(rng.normal(np.log(0.0012), 0.8, edges)),
        host=host,
        gpu=gpu,
        queue=queue,
        hosts=tuple(f"host-{i:02d}" for i in range(hosts)),
        gpus=tuple(f"gpu-{i:02d}" for i in range(gpus)),
        queues=tuple(f"queue-{i:02d}" for i in range(queues)),
        workloads=tuple(f"job-{i:02d}" for i in range(workloads)),
        workload_gpu=np.where(on_gpu_job, rng.integers(0, max(gpus, 1), workloads), -1),
        workload_host=np.where(on_gpu_job, -1, rng.integers(0, max(hosts, 1), workloads)),
    )


def _calls(rng: np.random.Generator, level: Ints, services: int) -> tuple[Ints, Ints]:
    """Edges from each level to deeper ones; each service below the first level has at least one caller."""
    pairs: set[tuple[int, int]] = set()
    popularity = np.ones(services)
    for child in range(services):
        if level[child] == 0:
            continue
        callers = np.flatnonzero(level < level[child])
        close = np.flatnonzero(level == level[child] - 1)
        weight = 1.0 + np.bincount([p[0] for p in pairs], minlength=services)[close]
        pairs.add((int(rng.choice(close, p=weight / weight.sum())), child))
        if rng.random() < 0.25:
            pairs.add((int(rng.choice(callers)), child))
    extra = int(services * rng.uniform(0.1, 0.9))
    for _ in range(extra):
        caller = int(rng.integers(0, services))
        deeper = np.flatnonzero(level > level[caller])
        if len(deeper):
            weight = popularity[deeper]
            child = int(rng.choice(deeper, p=weight / weight.sum()))
            popularity[child] += 1.0
            pairs.add((caller, child))
    ordered = sorted(pairs)
    return (
        np.array([pair[0] for pair in ordered], dtype=np.int64),
        np.array([pair[1] for pair in ordered], dtype=np.int64),
    )


def _typical_latency(level: Ints, source: Ints, target: Ints, calls: Floats, base_time: Floats) -> Floats:
    latency = base_time.copy()
    for edge in np.argsort(-level[source], kind="stable"):
        latency[source[edge]] += calls[edge] * latency[target[edge]]
    return latency
