"""Preemptions between two readings of Slurm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from exporters.model import Event, EventKind, Workload, WorkloadState

#: The winner of a preemption starts within so many seconds of its victim's end.
HANDOVER_SECONDS: Final = 90.0


def preemptions(
    running: Mapping[str, Workload], workloads: Sequence[Workload], time: float, known: Sequence[Event] = ()
) -> list[Event]:
    """Return the preemptions between two readings; ``running`` are the workloads that ran in the earlier one.

    Slurm marks a job as preempted only if it is not requeued. One that is, is told apart from other requeues by the
    job that took its place: one that may preempt, and started on its nodes as it stopped.
    """
    starts: dict[str, list[Workload]] = defaultdict(list)
    for workload in workloads:
        if workload.state.holding and workload.started is not None:
            for placement in workload.placements:
                starts[placement.node].append(workload)
    reported = {event.id for event in known}
    found = []
    for workload in workloads:
        marked = workload.state is WorkloadState.PREEMPTED
        before = running.get(workload.id)
        again = before is not None and workload.requeues > before.requeues and before.preemptible is not False
        if not (marked or again):
            continue
        stopped = (workload.ended if marked else workload.submitted) or time
        event_id = f"preempted:{workload.id}:{workload.requeues}:{int(stopped)}"
        if event_id in reported:
            continue
        winners = _winners(before, workload, stopped, starts)
        if not marked and not winners:
            continue
        ranks = {winner.rank for winner in winners}
        one = winners[0] if len(winners) == 1 else None
        found.append(
            Event(
                id=event_id,
                kind=EventKind.PREEMPTED,
                time=stopped,
                workload=workload.id,
                by=one.id if one else "",
                rank=workload.rank if before is None else before.rank,
                by_rank=next(iter(ranks)) if len(ranks) == 1 else None,
                service=workload.display_service,
                by_service=one.display_service if one else "",
                node=before.placements[0].node if before and before.placements else "",
                gpu_milli=(before or workload).demand.total_gpu_milli if before is None else before.held_gpu_milli,
                reason=_why(winners, marked),
            )
        )
    return found


def _winners(
    before: Workload | None, workload: Workload, stopped: float, starts: Mapping[str, Sequence[Workload]]
) -> list[Workload]:
    """Return the jobs that started where ``before`` ran as it stopped and, if told, on its GPUs."""
    if before is None:
        return []
    devices = {name for placement in before.placements for name in placement.devices}
    found: dict[str, Workload] = {}
    for placement in before.placements:
        for other in starts.get(placement.node, ()):
            began = other.started
            if other.id == workload.id or other.may_preempt is False or began is None:
                continue
            # Times are whole seconds.
            if not stopped - 1.0 <= began <= stopped + HANDOVER_SECONDS:
                continue
            theirs = {name for item in other.placements for name in item.devices}
            if devices and theirs and devices.isdisjoint(theirs):
                continue
            found[other.id] = other
    return list(found.values())


def _why(winners: Sequence[Workload], marked: bool) -> str:
    names = ", ".join(winner.id for winner in winners[:5])
    if marked:
        return "Slurm says that it was preempted" + (f"; its place was taken by {names}" if names else "")
    return f"requeued as {names} took its place on its nodes"
