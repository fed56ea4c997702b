"""Write the recording that deploy/compose.yaml plays: calm, then a batch job takes all GPUs and an urgent one waits.

python scripts/demo_recording.py > deploy/demo/inversion.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from exporters.model import Demand, Node, Placement, Snapshot, Workload, WorkloadState, encode

BEGIN = 1_767_225_600.0
STEP = 15.0
CALM, IN_ALL = 20, 60
NODES = ("gpu-1", "gpu-2")
GPUS = 4


def snapshots() -> Iterator[Snapshot]:
    """Yield five minutes without a problem and ten with one, a snapshot each 15 s."""
    for number in range(IN_ALL):
        now = BEGIN + number * STEP
        workloads = [_served(index, now) for index in range(0, min(number, CALM) + 1, 2)]
        if number >= CALM:
            taken = BEGIN + CALM * STEP
            held = tuple(Placement(name, gpu_milli=1000 * GPUS) for name in NODES)
            workloads.append(
                Workload(
                    "812",
                    "train-llm",
                    WorkloadState.RUNNING,
                    service="train-llm",
                    queue="gpu",
                    rank=3,
                    submitted=taken - 5,
                    started=taken,
                    demand=Demand(gpu_milli=1000 * GPUS, pieces=len(NODES), distinct_nodes=True),
                    placements=held,
                    preemptible=True,
                )
            )
            if number > CALM:
                workloads.append(
                    Workload(
                        "813",
                        "chat-inference",
                        WorkloadState.PENDING,
                        service="chat-inference",
                        queue="gpu",
                        rank=0,
                        submitted=taken + STEP,
                        demand=Demand(gpu_milli=1000),
                        reason="Resources",
                    )
                )
        full = 1000 * GPUS if number >= CALM else 0
        nodes = tuple(Node(name, gpu_capacity_milli=1000 * GPUS, gpu_allocated_milli=full) for name in NODES)
        yield Snapshot(now, "demo", "file", workloads=tuple(workloads), nodes=nodes)


def _served(index: int, now: float) -> Workload:
    """An urgent job of a few seconds, which started at once."""
    begun = BEGIN + index * STEP
    return Workload(
        f"{700 + index}",
        "chat-inference",
        WorkloadState.COMPLETED,
        service="chat-inference",
        queue="gpu",
        rank=0,
        submitted=begun - 2 - index % 3,
        started=begun,
        ended=min(begun + 10, now),
        demand=Demand(gpu_milli=1000),
    )


if __name__ == "__main__":
    for snapshot in snapshots():
        sys.stdout.buffer.write(encode(snapshot))
