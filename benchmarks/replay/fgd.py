"""FGD's published table (Weng et al., USENIX ATC 2023) on openb: GPU allocation and fragmentation by policy.

The protocol: pods in the order of their names are shuffled with the seed, then the list grows by pods drawn from it
(or shrinks) until 130 % of the cluster's GPUs are asked for. Pods arrive one at a time, never leave, and fail when they
fit nowhere. Typical tasks are the most frequent demands of the original list that cover 95 % of it, without memory.
Scores are rounded down to integers from 0 to 100; among equals the node that comes first in an order shuffled once per
run wins. A column is the mean over the arrivals at which the arrived GPU request rounds to that percentage.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cases import data_root
from benchmarks.replay import openb
from exporters.measures.fragmentation import cluster_fragmentation
from exporters.model import Node, NodeState, Snapshot
from exporters.placement import ClusterView
from rca.replay.engine import replay
from rca.replay.model import Cluster, Options, Result, Trace, Workloads
from rca.replay.policies import placement
from rca.replay.policies.base import Policy
from rca.replay.typical import typical_tasks

RATIO: Final = 1.3
SEEDS: Final = tuple(range(42, 52))
WORKLOADS: Final = ("default", "gpushare100", "multigpu50")
LEVELS: Final = 100
POLICIES: Final[dict[str, Callable[[int], Policy]]] = {
    "01-Random": placement.random,
    "02-DotProd": placement.dot_product,
    "03-GpuClustering": placement.clustering,
    "04-GpuPacking": placement.packing,
    "05-BestFit": placement.best_fit,
    "06-FGD": placement.fgd,
}
TOLERANCE: Final = 0.5


class Cell(msgspec.Struct, frozen=True):
    """One policy on one pod list, means over the seeds; percentages of GPU capacity.

    ``allocated`` and ``fragmented`` at 100 % arrival, ``final`` and ``final_fragmented`` at 130 %; ``seconds`` is the
    processor time of a run.
    """

    workload: str
    policy: str
    allocated: float
    reference: float
    fragmented: float
    reference_fragmented: float
    final: float
    reference_final: float
    final_fragmented: float
    reference_final_fragmented: float
    lowest: float
    highest: float
    seconds: float

    @property
    def held(self) -> bool:
        """Whether the allocation is within half a point of the published one."""
        return abs(self.allocated - self.reference) <= TOLERANCE


def resampled(pods: Workloads, capacity: int, seed: int) -> Workloads:
    """Return the arrivals of one run: one a second, asking for 130 % of ``capacity`` milli-GPU in all."""
    rng = np.random.default_rng([seed, 1])
    rows = rng.permutation(len(pods))
    need = pods.demand_milli
    goal = RATIO * capacity
    total = int(need.sum())
    if total > goal:
        # Pods leave at random until the request no longer exceeds the goal.
        order = rng.permutation(len(rows))
        gone = int(np.searchsorted(np.cumsum(need[rows[order]]), total - goal)) + 1
        rows = np.delete(rows, order[:gone])
    else:
        more: list[int] = []
        while True:
            drawn = int(rng.integers(len(pods)))
            if total + pods.gpu_milli[drawn] > goal:
                break
            total += int(need[drawn])
            more.append(drawn)
        rows = np.concatenate([rows, np.array(more, np.int64)])
    chosen = pods.select(rows)
    size = len(rows)
    return replace(chosen, submit=np.arange(size, dtype=np.float64), uid=np.arange(size, dtype=np.int64))


def shuffled(cluster: Cluster, seed: int) -> Cluster:
    """Return the cluster with its nodes in a random order of preference."""
    return cluster.select(np.random.default_rng([seed, 2]).permutation(len(cluster)))


def run(workload: str, policy: Policy, seed: int) -> Result:
    """One run of the protocol."""
    cluster = openb.nodes()
    pods = openb.pod_list(workload)
    trace = Trace(shuffled(cluster, seed), resampled(pods, cluster.capacity_milli, seed), f"openb {workload}")
    typical = typical_tasks(pods, cover=0.95, memory=False, limit=len(pods))
    return replay(trace, policy, Options(seed=seed, retry=False, fragmentation=True), typical)


def at_arrival(result: Result, percent: int) -> tuple[float, float]:
    """Allocated and fragmented milli-GPU as percentages of capacity when ``percent`` of it had been asked for."""
    capacity = result.trace.cluster.capacity_milli
    rows = np.round(100 * result.series.arrived_milli / capacity) == percent
    return (
        100 * float(result.series.used_milli[rows].mean()) / capacity,
        100 * float(result.series.fragmented[rows].mean()) / capacity,
    )


def measured_fragmentation(result: Result) -> float:
    """F at the end of a run as `exporters.measures.fragmentation` measures it, in percent of capacity."""
    trace = result.trace
    cluster, work = trace.cluster, trace.workloads
    free = [[1000] * int(count) for count in cluster.gpus]
    cpu = cluster.cpu_milli.copy()
    for row in np.flatnonzero(result.node >= 0):
        node = int(result.node[row])
        cpu[node] -= work.cpu_milli[row]
        for device in range(len(free[node])):
            if int(result.devices[row]) >> device & 1:
                free[node][device] -= int(work.gpu_milli[row])
    nodes = tuple(
        Node(
            name=name,
            state=NodeState.UP,
            gpu_free_milli=tuple(free[row]),
            gpu_capacity_milli=1000 * len(free[row]),
            cpu_capacity_milli=int(cluster.cpu_milli[row]),
            cpu_allocated_milli=int(cluster.cpu_milli[row] - cpu[row]),
            memory_capacity_bytes=0,
            memory_allocated_bytes=0,
        )
        for row, name in enumerate(cluster.names)
    )
    pods = openb.pod_list(trace.name.removeprefix("openb "))
    shares = typical_tasks(pods, cover=0.95, memory=False, limit=len(pods)).shares(cluster)
    found = cluster_fragmentation(
        ClusterView(Snapshot(time=0.0, cluster="openb", source="replay", nodes=nodes)), shares
    )
    return 100 * (found.fragmented or 0.0) / found.capacity


def published(kind: str) -> dict[tuple[str, str], dict[str, float]]:
    """Mean over the seeds of every column of a published file (``allo`` or ``frag``), by pod list and policy."""
    path = data_root() / "fgd" / f"experiments_analysis_expected_results_analysis_{kind}_discrete.csv"
    rows: dict[tuple[str, str], list[dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows.setdefault((row["workload"].removeprefix("openb_pod_list_"), row["sc_policy"]), []).append(row)
    return {
        key: {column: fmean(float(row[column]) for row in found) for column in ("100", "130")}
        for key, found in rows.items()
    }


def _one(job: tuple[str, str, int]) -> tuple[float, ...]:
    workload, policy, seed = job
    result = run(workload, POLICIES[policy](LEVELS), seed)
    return (*at_arrival(result, 100), *at_arrival(result, 130), result.seconds)


def table(workloads: Iterable[str] = WORKLOADS, seeds: Iterable[int] = SEEDS, workers: int = 1) -> list[Cell]:
    """Run the whole table."""
    allocated, fragmented = published("allo"), published("frag")
    seeds = tuple(seeds)
    keys = [(workload, policy) for workload in workloads for policy in POLICIES]
    jobs = [(workload, policy, seed) for workload, policy in keys for seed in seeds]
    if workers > 1:
        _one(jobs[0])  # compiled once, so that the workers find the machine code on disk
        with ProcessPoolExecutor(workers) as pool:
            found = list(pool.map(_one, jobs))
    else:
        found = [_one(job) for job in jobs]
    cells = []
    for at, (workload, policy) in enumerate(keys):
        mine = np.array(found[at * len(seeds) : (at + 1) * len(seeds)])
        mean = mine.mean(axis=0)
        reference = allocated[workload, policy]
        cells.append(
            Cell(
                workload=workload,
                policy=policy,
                allocated=float(mean[0]),
                reference=reference["100"],
                fragmented=float(mean[1]),
                reference_fragmented=fragmented[workload, policy]["100"],
                final=float(mean[2]),
                reference_final=reference["130"],
                final_fragmented=float(mean[3]),
                reference_final_fragmented=fragmented[workload, policy]["130"],
                lowest=float(mine[:, 0].min()),
                highest=float(mine[:, 0].max()),
                seconds=float(mean[4]),
            )
        )
    return cells


def same_order(cells: list[Cell]) -> bool:
    """Whether the policies of one pod list rank by allocation as published."""
    ours = [cell.policy for cell in sorted(cells, key=lambda cell: cell.allocated)]
    theirs = [cell.policy for cell in sorted(cells, key=lambda cell: cell.reference)]
    return ours == theirs


def print_table(cells: list[Cell], console: Console) -> None:
    """Print ours beside the published figures."""
    out = Table(title="FGD's protocol on openb, mean of the seeds, % of GPU capacity")
    for heading in ("pod list", "policy", "allocated at 100 %", "published", "difference", "range over seeds"):
        out.add_column(heading, justify="left" if heading in ("pod list", "policy") else "right")
    for heading in ("F at 100 %", "published", "allocated at 130 %", "published", "F at 130 %", "published", "s a run"):
        out.add_column(heading, justify="right")
    for cell in cells:
        row: list[Any] = [cell.workload, cell.policy, f"{cell.allocated:.2f}", f"{cell.reference:.2f}"]
        row += [f"{cell.allocated - cell.reference:+.2f}{'' if cell.held else ' !'}"]
        row += [
            f"{cell.lowest:.2f} to {cell.highest:.2f}",
            f"{cell.fragmented:.2f}",
            f"{cell.reference_fragmented:.2f}",
        ]
        row += [f"{cell.final:.2f}", f"{cell.reference_final:.2f}"]
        row += [f"{cell.final_fragmented:.2f}", f"{cell.reference_final_fragmented:.2f}", f"{cell.seconds:.2f}"]
        out.add_row(*row)
    console.print(out)
    for workload in dict.fromkeys(cell.workload for cell in cells):
        mine = [cell for cell in cells if cell.workload == workload]
        console.print(f"{workload}: order {'as published' if same_order(mine) else 'differs from the published one'}")


def timed(workload: str = "default", seed: int = SEEDS[0]) -> float:
    """Wall-clock seconds of one full FGD run, reading the files included, compilation (once a machine) excluded."""
    started = time.perf_counter()
    run(workload, placement.fgd(LEVELS), seed)
    return time.perf_counter() - started
