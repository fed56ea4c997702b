"""Built-in scenarios: one named inference platform, and the ways in which it breaks.

They are for the demo and for tests. The platform is fixed; load, noise and the strength of the fault come from the
seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa

from rca.incident import DEVICES_SCHEMA, WORKLOADS_SCHEMA
from rca.simulation import faults
from rca.simulation.engine import Effects
from rca.simulation.faults import Fault, Mechanism
from rca.simulation.incidents import EPOCH, LATENCY_METRICS, Plan, SimulatedIncident, assemble, draw_drivers
from rca.simulation.telemetry import Coverage
from rca.simulation.topology import Topology

#: Service, own milliseconds, utilisation, host, GPU, queue; callers come before callees.
_SERVICES = (
    ("edge-gateway", 0, 2.0, 0.25, "node-a", "", ""),
    ("chat-api", 1, 6.0, 0.30, "node-a", "", ""),
    ("search-api", 1, 5.0, 0.25, "node-b", "", ""),
    ("batch-api", 1, 4.0, 0.20, "node-b", "", ""),
    ("auth", 2, 3.0, 0.20, "node-a", "", ""),
    ("session-cache", 3, 0.8, 0.15, "node-c", "", ""),
    ("chat-inference", 2, 140.0, 0.45, "node-d", "gpu-0", ""),
    ("embedding-inference", 2, 35.0, 0.40, "node-d", "gpu-1", ""),
    ("ranking-inference", 2, 45.0, 0.40, "node-e", "gpu-2", "inference-queue"),
    ("tokenizer", 3, 1.5, 0.20, "node-b", "", ""),
    ("vector-store", 3, 12.0, 0.35, "node-c", "", ""),
    ("feature-store", 3, 8.0, 0.30, "node-c", "", ""),
    ("model-registry", 3, 5.0, 0.15, "node-b", "", ""),
    ("postgres", 4, 4.0, 0.30, "node-c", "", ""),
    ("object-store", 4, 15.0, 0.25, "node-b", "", ""),
)
#: Caller, callee, calls per request.
_CALLS = (
    ("edge-gateway", "chat-api", 0.5),
    ("edge-gateway", "search-api", 0.4),
    ("edge-gateway", "batch-api", 0.1),
    ("edge-gateway", "auth", 1.0),
    ("chat-api", "chat-inference", 1.0),
    ("chat-api", "session-cache", 2.0),
    ("chat-api", "vector-store", 0.6),
    ("search-api", "embedding-inference", 1.0),
    ("search-api", "ranking-inference", 1.0),
    ("search-api", "vector-store", 1.0),
    ("batch-api", "embedding-inference", 3.0),
    ("batch-api", "object-store", 1.0),
    ("auth", "session-cache", 1.0),
    ("auth", "postgres", 0.3),
    ("chat-inference", "tokenizer", 1.0),
    ("chat-inference", "model-registry", 0.05),
    ("embedding-inference", "tokenizer", 1.0),
    ("ranking-inference", "feature-store", 2.0),
    ("feature-store", "postgres", 0.5),
    ("vector-store", "object-store", 0.1),
    ("model-registry", "object-store", 0.2),
)
#: Workload, tenant, priority class, rank, GPUs, GPU, host.
_JOBS = (
    ("train-llm-812", "research", "P3", 3, 1.0, "gpu-0", ""),
    ("finetune-77", "research", "P2", 2, 1.0, "gpu-1", ""),
    ("etl-nightly", "data", "P3", 3, 0.0, "", "node-c"),
)
_SERVING_PRIORITY = {"chat-inference": ("P0", 0), "embedding-inference": ("P1", 1), "ranking-inference": ("P1", 1)}
_MODEL = "NVIDIA H100 80GB HBM3"
_MEMORY_BYTES = 80.0 * 1024**3


@dataclass(frozen=True)
class Scenario:
    """One way to break the platform.

    Attributes:
        at: the service, job, GPU or queue that breaks. ``victim``, ``metric``: what pages.
    """

    name: str
    summary: str
    mechanism: Mechanism
    at: str
    victim: str
    metric: str


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "gpu-contention",
            "A P3 training job starts on the GPU that serves P0 chat inference; users wait.",
            Mechanism.GPU_CONTENTION,
            "train-llm-812",
            "edge-gateway",
            "latency_p95_seconds",
        ),
        Scenario(
            "gpu-fragmentation",
            "GPU memory of the embedding model is fragmented: allocations are retried, some fail.",
            Mechanism.GPU_FRAGMENTATION,
            "gpu-1",
            "search-api",
            "latency_p95_seconds",
        ),
        Scenario(
            "cpu-contention",
            "A nightly ETL job takes the CPU of the node with the vector and feature stores.",
            Mechanism.CPU_CONTENTION,
            "etl-nightly",
            "search-api",
            "latency_p95_seconds",
        ),
        Scenario(
            "network-delay",
            "The network of the feature store slows every call into it and out of it.",
            Mechanism.NETWORK_DELAY,
            "feature-store",
            "search-api",
            "latency_mean_seconds",
        ),
        Scenario(
            "dependency-outage",
            "Postgres goes down; sign-in fails.",
            Mechanism.OUTAGE,
            "postgres",
            "edge-gateway",
            "error_ratio",
        ),
        Scenario(
            "overload",
            "The batch API sends many times its usual calls; what it shares with search is overwhelmed.",
            Mechanism.OVERLOAD,
            "batch-api",
            "search-api",
            "latency_p95_seconds",
        ),
        Scenario(
            "queue-imbalance",
            "The ranking model's queue backs up while its workers idle elsewhere.",
            Mechanism.QUEUE_IMBALANCE,
            "inference-queue",
            "edge-gateway",
            "latency_mean_seconds",
        ),
        Scenario(
            "slow-release",
            "A release makes the vector store slow.",
            Mechanism.LATENCY,
            "vector-store",
            "edge-gateway",
            "latency_mean_seconds",
        ),
        Scenario(
            "failing-fast",
            "The tokenizer answers at once, with errors: its callers look faster and fail.",
            Mechanism.FAIL_FAST,
            "tokenizer",
            "edge-gateway",
            "error_ratio",
        ),
    )
}


def platform() -> Topology:
    """The named platform."""
    names = tuple(row[0] for row in _SERVICES)
    index = {name: i for i, name in enumerate(names)}
    hosts = tuple(sorted({row[4] for row in _SERVICES}))
    gpus = tuple(sorted({row[5] for row in _SERVICES if row[5]}))
    queues = tuple(sorted({row[6] for row in _SERVICES if row[6]}))
    source = np.array([index[row[0]] for row in _CALLS], dtype=np.int64)
    target = np.array([index[row[1]] for row in _CALLS], dtype=np.int64)
    count = len(_SERVICES)

    def place(values: tuple[str, ...], column: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([values.index(row[column]) if row[column] else -1 for row in _SERVICES], dtype=np.int64)

    entry = np.zeros(count)
    entry[0] = 40.0
    return Topology(
        names=names,
        level=np.array([row[1] for row in _SERVICES], dtype=np.int64),
        base_time=np.array([row[2] for row in _SERVICES]) / 1e3,
        spread=np.full(count, 0.6),
        busy=np.array([row[3] for row in _SERVICES]),
        parallel=np.zeros(count, dtype=bool),
        base_error=np.full(count, 2e-4),
        entry_rate=entry,
        source=source,
        target=target,
        calls=np.array([row[2] for row in _CALLS]),
        asynchronous=np.zeros(len(_CALLS), dtype=bool),
        timeout=np.full(len(_CALLS), 10.0),
        retries=np.zeros(len(_CALLS), dtype=np.int64),
        fallback=np.zeros(len(_CALLS)),
        network=np.full(len(_CALLS), 8e-4),
        host=place(hosts, 4),
        gpu=place(gpus, 5),
        queue=place(queues, 6),
        hosts=hosts,
        gpus=gpus,
        queues=queues,
        workloads=tuple(row[0] for row in _JOBS),
        workload_gpu=np.array([gpus.index(row[5]) if row[5] else -1 for row in _JOBS], dtype=np.int64),
        workload_host=np.array([hosts.index(row[6]) if row[6] else -1 for row in _JOBS], dtype=np.int64),
    )


def build(name: str, seed: int = 0) -> SimulatedIncident:
    """Play scenario ``name`` with the chance of ``seed``.

    Raises:
        KeyError: no such scenario.
        RuntimeError: the victim did not feel the fault with this seed.
    """
    scenario = SCENARIOS[name]
    topology = platform()
    rng = np.random.default_rng([seed, *scenario.name.encode()])
    plan = Plan(
        step=15.0,
        baseline_steps=120,
        window_steps=24,
        onset_step=int(rng.integers(3, 7)),
        drift=0.0,
        amplitude=0.2,
        noise=0.05,
        bursts=0.0,
    )
    coverage = Coverage(
        metrics=tuple(sorted([*LATENCY_METRICS, "self_time_mean_seconds", "error_ratio", "request_rate",
                              "cpu_utilization_ratio", "memory_utilization_ratio"])),
        edge_metrics=("error_ratio", "latency_mean_seconds", "latency_p95_seconds", "network_gap_mean_seconds",
                      "request_rate"),
        infrastructure=True,
        bucketed=False,
        sampling=1.0,
        hidden=np.zeros(topology.size, dtype=bool),
        missing_series=0.0,
        missing_samples=0.0,
    )  # fmt: skip
    drivers = draw_drivers(rng, topology, plan)
    shape = np.zeros(plan.steps)
    shape[plan.onset :] = 1.0
    fault = _fault(rng, topology, scenario, shape)
    played = assemble(
        rng, f"demo-{name}-{seed}", topology, plan, coverage, drivers, [fault],
        victim=scenario.victim, metric=scenario.metric,
    )  # fmt: skip
    if played is None:
        raise RuntimeError(f"the victim of {name} does not feel the fault with seed {seed}")
    start = EPOCH + timedelta(seconds=plan.onset * plan.step)
    return replace(
        played,
        title=scenario.summary,
        labels={"cluster": "demo", "scheduler": "slurm"},
        tables={"workloads": _workloads(start, scenario), "devices": _devices(topology, scenario)},
    )


def _fault(
    rng: np.random.Generator,
    topology: Topology,
    scenario: Scenario,
    shape: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> Fault:
    """The fault of the scenario, at its place, large enough to page."""
    places: Mapping[Mechanism, tuple[str, ...]] = {
        Mechanism.GPU_CONTENTION: topology.workloads,
        Mechanism.GPU_FRAGMENTATION: topology.gpus,
        Mechanism.QUEUE_IMBALANCE: topology.queues,
    }
    shape = shape * rng.uniform(0.9, 1.2)
    effects = Effects()
    signal = {}
    if scenario.mechanism is Mechanism.CPU_CONTENTION:
        host = int(topology.workload_host[topology.workloads.index(scenario.at)])
        effects.host_add[host] = 2.5 * shape
        signal[(scenario.at, "cpu_utilization_ratio")] = 0.7 * shape
        signal[(topology.hosts[host], "cpu_utilization_ratio")] = 0.6 * shape
        residents = np.flatnonzero(topology.host == host)
        first = tuple(int(i) for i in residents[np.argsort(-topology.base_time[residents], kind="stable")])
        return Fault(scenario.mechanism, scenario.at, effects, first, signal)
    if scenario.mechanism is Mechanism.NETWORK_DELAY:
        at = topology.names.index(scenario.at)
        for link in np.flatnonzero((topology.target == at) | (topology.source == at)).tolist():
            effects.network_add[link] = 0.12 * shape
        return Fault(scenario.mechanism, scenario.at, effects, (at,), signal)
    if scenario.mechanism is Mechanism.OVERLOAD:
        at = topology.names.index(scenario.at)
        edge = int(np.flatnonzero((topology.source == at) & (topology.calls > 1.0))[0])
        effects.calls_scale[edge] = 1.0 + 4.0 * shape
        return Fault(scenario.mechanism, scenario.at, effects, (at,), signal)
    at = places.get(scenario.mechanism, topology.names).index(scenario.at)
    latency = topology.base_time * 1.5
    for strength in (1.0, 1.5, 2.0, 3.0):
        fault = faults.draw(rng, topology, scenario.mechanism, shape, latency, at=at, strength=strength)
        if _size(fault) >= 0.15:
            return fault
    return fault


def _size(fault: Fault) -> float:
    """Rough size of a fault: extra seconds, extra contention or extra errors, whichever is largest."""
    effects = fault.effects
    groups = (effects.own_add, effects.gpu_add, effects.queue_add, effects.error_add)
    return max((float(values.max()) for group in groups for values in group.values()), default=0.0)


def _workloads(started: datetime, scenario: Scenario) -> pa.Table:
    """The scheduler's view: what serves, and what shares its devices."""
    long_ago = datetime(2026, 1, 1, tzinfo=UTC)
    rows = []
    for name, _, _, _, host, gpu, queue in _SERVICES:
        if gpu:
            priority, rank = _SERVING_PRIORITY[name]
            rows.append(
                {
                    "workload": f"{name}-0", "service": name, "queue": None, "tenant": "serving",
                    "priority_class": priority, "priority_rank": rank, "state": "running", "submitted": long_ago,
                    "started": long_ago, "ended": None, "gpus": 1.0, "preemptible": False, "host": host,
                    "devices": [gpu],
                }
            )  # fmt: skip
        del queue
    for job, tenant, priority, rank, gpus, gpu, host in _JOBS:
        at = started if job == scenario.at else long_ago
        rows.append(
            {
                "workload": job, "service": None, "queue": None, "tenant": tenant, "priority_class": priority,
                "priority_rank": rank, "state": "running", "submitted": at, "started": at, "ended": None, "gpus": gpus,
                "preemptible": True, "host": host or None, "devices": [gpu] if gpu else [],
            }
        )  # fmt: skip
    return pa.Table.from_pylist(rows, schema=WORKLOADS_SCHEMA)


def _devices(topology: Topology, scenario: Scenario) -> pa.Table:
    hosts = {row[5]: row[4] for row in _SERVICES if row[5]}
    rows = []
    for gpu in topology.gpus:
        free = 0.3 * _MEMORY_BYTES
        broken = scenario.mechanism is Mechanism.GPU_FRAGMENTATION and gpu == scenario.at
        rows.append(
            {
                "device": gpu, "host": hosts[gpu], "model": _MODEL, "memory_total_bytes": _MEMORY_BYTES,
                "memory_free_bytes": free, "largest_free_block_bytes": free * (0.25 if broken else 0.9),
            }
        )  # fmt: skip
    return pa.Table.from_pylist(rows, schema=DEVICES_SCHEMA)
