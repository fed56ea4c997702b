"""A small GPU cluster with a scheduler, in which a batch sweep takes the GPUs that urgent inference needs.

The schedule is made by `rca.replay` under first come, first served with backfill; a snapshot each 15 s is what an
exporter would have read from such a scheduler. Only the load comes from the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from exporters.model import (
    Constraints,
    Demand,
    Device,
    DeviceProcess,
    Node,
    Placement,
    Snapshot,
    Workload,
    WorkloadState,
)
from rca.incident import Truth
from rca.replay.engine import replay
from rca.replay.model import WHOLE, Backfill, Cluster, Options, Result, Trace, Workloads
from rca.replay.policies import resolve
from rca.simulation.faults import Mechanism

CLUSTER = "demo"
EPOCH = datetime(2026, 1, 5, 2, 0, tzinfo=UTC)
STEP_SECONDS = 15.0
#: Everything that is recorded: what was normal, then the sweep, then the wait.
SECONDS = 3600.0
SWEEP, VICTIM = "sweep-812", "chat-7d9f6c-x8k2p"
_SWEEP_AT, _VICTIM_AT = 2580.0, 2700.0
_MODEL = "NVIDIA H100 80GB HBM3"
_MEMORY = 80 * 1024**3
_GPUS = 4
#: Nodes and the partitions that they belong to; batch work may borrow what inference leaves idle.
_NODES = {
    "gpu-1": ("training",),
    "gpu-2": ("training",),
    "gpu-3": ("inference", "batch"),
    "gpu-4": ("inference", "batch"),
}
_CLASS = {0: "online", 1: "standard", 2: "training", 3: "batch"}


@dataclass(frozen=True)
class _Job:
    """One submission; seconds since the epoch. ``priority``: larger is more urgent, as Slurm counts."""

    name: str
    service: str
    partition: str
    rank: int
    gpus: int
    submit: float
    duration: float


def _jobs(rng: np.random.Generator) -> list[_Job]:
    forever = 100 * SECONDS
    jobs = [
        _Job("llama-train-0", "llama-train", "training", 2, 4, -7200.0, forever),
        _Job("finetune-77", "finetune", "training", 2, 2, -5400.0, forever),
        _Job("chat-7d9f6c-2xk4p", "chat", "inference", 0, 4, -7100.0, forever),
        _Job(SWEEP, "sweep", "batch", 3, 4, _SWEEP_AT, 5400.0),
        _Job(VICTIM, "chat", "inference", 0, 4, _VICTIM_AT, forever),
    ]
    # Short evaluations come and go where there is room.
    at, number = 0.0, 0
    while (at := at + float(rng.exponential(240.0))) < SECONDS:
        number += 1
        lasts = float(rng.uniform(60.0, 240.0))
        # They keep clear of the sweep, so that the scene is the same with every seed.
        queue = "training" if at + lasts > _SWEEP_AT - 60.0 or rng.random() < 0.5 else "inference"
        jobs.append(_Job(f"eval-{4400 + number}", "eval", queue, 1, 1, at, lasts))
    return jobs


def _schedule(jobs: Sequence[_Job]) -> Result:
    pools = tuple(_NODES.values())
    cluster = Cluster.of([_GPUS] * len(_NODES), names=tuple(_NODES), model=[_MODEL] * len(_NODES), pool=pools)
    work = Workloads.of(
        submit=[job.submit for job in jobs],
        duration=[job.duration for job in jobs],
        names=[job.name for job in jobs],
        gpu_count=[job.gpus for job in jobs],
        rank=[job.rank for job in jobs],
        pools=[cluster.pool_mask([job.partition]) for job in jobs],
    )
    return replay(Trace(cluster, work, "demo"), resolve("fcfs"), Options(backfill=Backfill.GREEDY, series=False))


def recording(seed: int = 0) -> Iterator[Snapshot]:
    """Yield what an exporter of the scheduler and of the GPUs would have recorded, each 15 s for an hour."""
    rng = np.random.default_rng([seed, 812])
    jobs = _jobs(rng)
    result = _schedule(jobs)
    for now in np.arange(0.0, SECONDS + 1.0, STEP_SECONDS).tolist():
        yield _snapshot(jobs, result, now, rng)


def truth() -> Truth:
    """What was injected."""
    return Truth(causes=(SWEEP,), kind=Mechanism.GPU_CONTENTION.value, path=((SWEEP, VICTIM),))


def _snapshot(jobs: Sequence[_Job], result: Result, now: float, rng: np.random.Generator) -> Snapshot:
    epoch = EPOCH.timestamp()
    workloads = []
    held: dict[tuple[str, int], str] = {}
    for row, job in enumerate(jobs):
        start, end = float(result.start[row]), float(result.end[row])
        if job.submit > now or end <= now:
            continue
        running = start <= now
        node = result.trace.cluster.names[int(result.node[row])] if running else ""
        devices = [index for index in range(_GPUS) if running and int(result.devices[row]) >> index & 1]
        held |= dict.fromkeys(((node, index) for index in devices), job.name)
        workloads.append(
            Workload(
                id=job.name,
                name=job.name,
                state=WorkloadState.RUNNING if running else WorkloadState.PENDING,
                service=job.service,
                queue=job.partition,
                priority_class=_CLASS[job.rank],
                rank=job.rank,
                submitted=epoch + job.submit,
                started=epoch + start if running else None,
                demand=Demand(gpu_milli=WHOLE * job.gpus),
                placements=(
                    (Placement(node, WHOLE * job.gpus, tuple(_device(node, index) for index in devices)),)
                    if running
                    else ()
                ),
                constraints=Constraints(partitions=(job.partition,)),
                preemptible=job.rank == len(_CLASS) - 1,
                reason="" if running else "Resources",
            )
        )
    return Snapshot(
        time=epoch + now,
        cluster=CLUSTER,
        source="slurm",
        workloads=tuple(workloads),
        nodes=tuple(_node(name, held) for name in _NODES),
        devices=tuple(_gpu(name, index, held.get((name, index), ""), rng) for name in _NODES for index in range(_GPUS)),
    )


def _device(node: str, index: int) -> str:
    return f"GPU-{node}-{index}"


def _node(name: str, held: dict[tuple[str, int], str]) -> Node:
    free = tuple(0 if (name, index) in held else WHOLE for index in range(_GPUS))
    return Node(
        name=name,
        partitions=_NODES[name],
        gpu_models=(_MODEL,),
        gpu_capacity_milli=WHOLE * _GPUS,
        gpu_allocated_milli=WHOLE * _GPUS - sum(free),
        gpu_free_milli=free,
        devices=tuple(_device(name, index) for index in range(_GPUS)),
    )


def _gpu(node: str, index: int, holder: str, rng: np.random.Generator) -> Device:
    used = int(_MEMORY * (float(rng.uniform(0.55, 0.6)) if holder else 0.01))
    return Device(
        id=_device(node, index),
        node=node,
        index=index,
        model=_MODEL,
        memory_total_bytes=_MEMORY,
        memory_used_bytes=used,
        gpu_utilization_ratio=float(rng.uniform(0.7, 0.95)) if holder else 0.0,
        allocated_milli=WHOLE if holder else 0,
        processes=(
            (DeviceProcess(pid=1000 + index, name="python", memory_bytes=used, workload=holder),) if holder else ()
        ),
    )


__all__ = ["CLUSTER", "SWEEP", "VICTIM", "recording", "truth"]
