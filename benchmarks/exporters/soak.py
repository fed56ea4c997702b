"""Soak: a thousand polls with churn. Memory must stay flat and the series must come back to where they began.

Every poll replaces a tenth of 500 workloads by new ones, whose services come and go, with violations, starts and
preemptions among them. After the churn the quiet cluster of the beginning returns. Run with
``python -m benchmarks.exporters.soak``.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console

from exporters.collectors import ClusterCollector
from exporters.exposition import render
from exporters.families import series
from exporters.model import Demand, Event, EventKind, Node, Placement, Snapshot, Workload, WorkloadState
from exporters.policy import default_policy
from exporters.tracker import Tracker

POLLS: Final = 1000
WARM_UP: Final = 200
SIZE: Final = 500
CHURN: Final = 50
PERIOD: Final = 15.0
#: Short, so that the series of services that are gone expire within the run.
RETENTION: Final = 600.0
GROWTH_LIMIT: Final = 0.05
OVERFLOWED: Final = "prioscope_series_overflow_total"


def workload(number: int, now: float, draw: random.Random) -> Workload:
    """Return a new workload: two in five run, the others wait for longer than their SLO allows, or shorter."""
    runs = number % 5 < 2
    return Workload(
        id=f"job-{number}",
        name=f"job-{number}",
        state=WorkloadState.RUNNING if runs else WorkloadState.PENDING,
        service=f"service-{number // 100}",
        queue=f"queue-{number % 4}",
        rank=3 if runs else draw.randrange(4),
        submitted=now - draw.randrange(2000),
        started=now - 5 if runs else None,
        demand=Demand(gpu_milli=1000),
        placements=(Placement(f"node-{number % 25}", 1000),) if runs else (),
        preemptible=runs,
    )


def resident() -> int:
    """Resident memory of this process in bytes, from Linux's /proc."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Run the polls; 1 when memory grew by 5 % or more after the warm-up, or the series did not come back."""
    console = Console(soft_wrap=True, highlight=False)
    draw = random.Random(1)
    collector = ClusterCollector(
        default_policy(), Tracker(retention_seconds=RETENTION), quality_window_seconds=RETENTION
    )
    nodes = tuple(Node(f"node-{at}", gpu_capacity_milli=8000, gpu_allocated_milli=8000) for at in range(25))
    now, number = 1_000_000.0, 0

    def poll(workloads: list[Workload], events: tuple[Event, ...] = ()) -> int:
        collector.update(Snapshot(now, "soak", "benchmark", tuple(workloads), nodes, (), events))
        render(collector.families())
        # That something once overflowed is remembered for the life of the process; everything else has to go.
        return series(item for item in collector.families() if item.metric.name != OVERFLOWED)

    quiet = [
        Workload("first", "first", WorkloadState.RUNNING, service="s", queue="q", rank=0, started=now, submitted=now)
    ]
    base = poll(quiet)
    current: list[Workload] = []
    most = after_warm_up = 0
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state.json"
        for turn in range(POLLS):
            now += PERIOD
            fresh = [workload(number + at, now, draw) for at in range(SIZE if not current else CHURN)]
            number += len(fresh)
            current = (current + fresh)[-SIZE:]
            event = Event(f"e{turn}", EventKind.PREEMPTED, now, rank=turn % 4, by_rank=(turn + 1) % 4)
            most = max(most, poll(current, (event,)))
            collector.tracker.save_state(state)
            if turn == WARM_UP:
                gc.collect()
                after_warm_up = resident()
        gc.collect()
        end = resident()
        size = state.stat().st_size
    for _ in range(int(2 * RETENTION / PERIOD)):
        now += PERIOD
        last = poll(quiet)
    growth = end / after_warm_up - 1
    console.print(f"{POLLS} polls of {SIZE} workloads, {number:,} different ones; state file {size / 1024:.0f} KiB")
    console.print(
        f"resident memory after {WARM_UP} polls {after_warm_up / 2**20:.2f} MiB, "
        f"at the end {end / 2**20:.2f} MiB: {growth:+.1%}"
    )
    console.print(f"series: {base} at first, {most} at most, {last} once it was quiet again")
    return 0 if growth < GROWTH_LIMIT and last <= base else 1


if __name__ == "__main__":
    sys.exit(main())
