"""How many waits on Alibaba's openb trace are priority inversions: it depends on the definition, a hundredfold.

The trace has 8,152 pods with QoS, GPU demand and the times of creation, scheduling and deletion, but not on which node
a pod ran. So eligibility is GPU demand alone: a culprit must hold at least the GPUs that the waiter asks for. Urgent
are latency-sensitive (LS) and Guaranteed pods, less urgent best-effort (BE) ones; Burstable pods take no part. A pod
that was never scheduled waits until it is deleted.

Run with ``PRIOSCOPE_DATA=<folder> python -m benchmarks.exporters.openb``; the folder holds ``openb/``.
"""

from __future__ import annotations

import bisect
import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.cases import data_root
from exporters.detectors import inversion
from exporters.detectors.blocking import Blocking
from exporters.errors import InvalidInputError, PrioscopeError
from exporters.model import BASES, Basis, Demand, Snapshot, Workload, WorkloadState
from exporters.placement import ClusterView
from exporters.policy import HeldCounts, StartedFrom, uniform_policy

SLOS: Final = (0, 60, 300, 600, 3600)

_RANKS: Final = {"LS": 0, "Guaranteed": 0, "BE": 3}
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of the trace. Times are seconds."""

    workload: Workload
    created: int
    scheduled: int | None
    deleted: int

    @property
    def left(self) -> int:
        """When it stopped waiting: scheduled, or deleted unscheduled."""
        return self.deleted if self.scheduled is None else self.scheduled

    def waiting(self) -> Workload:
        """The pod as a snapshot before it was scheduled shows it."""
        return self.workload

    def running(self) -> Workload:
        """The pod as a snapshot after it was scheduled shows it."""
        started = None if self.scheduled is None else float(self.scheduled)
        return msgspec.structs.replace(self.workload, state=WorkloadState.RUNNING, started=started)


@dataclass(frozen=True, slots=True)
class Counts:
    """Inverted waits by the strongest basis reached, and how many waits passed the SLO."""

    slo: int
    past_slo: int
    by_basis: dict[Basis, int]

    def at_least(self, basis: Basis) -> int:
        """Waits whose basis is ``basis`` or stronger."""
        return sum(self.by_basis[item] for item in BASES[BASES.index(basis) :])


def read_pods(path: Path) -> list[Pod]:
    """Read the pods that ask for GPUs and have a rank.

    Raises:
        InvalidInputError: the file is missing, or a line is malformed; names file and line.
    """
    pods = []
    try:
        with path.open(newline="") as stream:
            for line, row in enumerate(csv.DictReader(stream), start=2):
                try:
                    pod = _pod(row)
                except (KeyError, ValueError, TypeError) as error:
                    raise InvalidInputError(f"{path}:{line}: {error}", cure="download the trace again") from None
                if pod is not None:
                    pods.append(pod)
    except OSError as error:
        raise InvalidInputError(f"{path}: {error.strerror}", cure="download the openb trace") from None
    return pods


def _pod(row: dict[str, str]) -> Pod | None:
    gpus = int(row["num_gpu"]) * int(row["gpu_milli"])
    rank = _RANKS.get(row["qos"])
    if rank is None or not gpus:
        return None
    created, deleted = int(row["creation_time"]), int(row["deletion_time"])
    return Pod(
        Workload(
            id=row["name"],
            name=row["name"],
            state=WorkloadState.PENDING,
            rank=rank,
            submitted=float(created),
            demand=Demand(gpu_milli=gpus, cpu_milli=int(row["cpu_milli"]), memory_bytes=int(row["memory_mib"]) * _MIB),
            preemptible=rank == 3,
        ),
        created,
        int(float(row["scheduled_time"])) if row["scheduled_time"] else None,
        deleted,
    )


def count(pods: Sequence[Pod], slo: int, started_from: StartedFrom) -> Counts:
    """Play the trace and count inverted waits.

    A snapshot is taken half a second after each moment at which the answer can change: an SLO runs out, or a
    best-effort pod starts while one has run out. Times are whole seconds, so that nothing happens in between.
    """
    late = [pod for pod in pods if pod.workload.rank == 0 and pod.left - pod.created > slo]
    holders = [pod for pod in pods if pod.workload.rank == 3 and pod.scheduled is not None]
    starts = sorted({pod.scheduled for pod in holders if pod.scheduled is not None})
    moments = set()
    for pod in late:
        breach = pod.created + slo
        moments.add(breach)
        moments.update(starts[bisect.bisect_left(starts, breach) : bisect.bisect_left(starts, pod.left)])
    policy = uniform_policy(slo, started_from=started_from, held_counts=HeldCounts.ANY)
    strongest: dict[str, int] = {}
    for moment in sorted(moments):
        now = moment + 0.5
        waiting = [pod.waiting() for pod in late if pod.created + slo < now < pod.left]
        running = [p.running() for p in holders if p.scheduled is not None and p.scheduled < now < p.deleted]
        snapshot = Snapshot(time=now, cluster="openb", source="trace", workloads=(*waiting, *running))
        for found in inversion.detect(Blocking(ClusterView(snapshot)), policy):
            if found.basis is not None:
                strongest[found.victim] = max(strongest.get(found.victim, 0), BASES.index(found.basis))
    by_basis = {basis: sum(1 for at in strongest.values() if at == index) for index, basis in enumerate(BASES)}
    return Counts(slo, len(late), by_basis)


def main() -> int:
    """Print the counts by SLO and basis, for both meanings of *started*."""
    console = Console(soft_wrap=True)
    try:
        pods = read_pods(data_root() / "openb" / "openb_pod_list_default.csv")
    except PrioscopeError as error:
        console.print(f"error: {error}\n  {error.cure}", highlight=False)
        return int(error.exit_code)
    table = Table(title="openb: inverted waits, LS and Guaranteed against BE (each basis includes the next)")
    for name in (
        "wait SLO s",
        "past SLO",
        "held",
        "started past SLO",
        "and fits whole",
        "started in wait",
        "and fits whole",
    ):
        table.add_column(name, justify="right")
    for slo in SLOS:
        breach = count(pods, slo, StartedFrom.BREACH)
        wait = count(pods, slo, StartedFrom.SUBMISSION)
        table.add_row(
            *map(
                str,
                (
                    slo,
                    breach.past_slo,
                    breach.at_least(Basis.HELD),
                    breach.at_least(Basis.STARTED),
                    breach.at_least(Basis.DOMINATED),
                    wait.at_least(Basis.STARTED),
                    wait.at_least(Basis.DOMINATED),
                ),
            )
        )
    console.print(table)
    console.print(
        "held: a BE pod held at least the GPUs asked for at some moment past the SLO.\n"
        "started past SLO: it started after the SLO ran out (policy `startedFrom: breach`).\n"
        "started in wait: it started after the waiter was created and held past the SLO (`submission`, default).\n"
        "fits whole: with the waiter's CPU and memory too.",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
