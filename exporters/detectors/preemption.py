"""V4: a preemption that was due did not happen in time, or it stopped the more urgent side."""

from __future__ import annotations

import numpy as np

from exporters.detectors.blocking import Blocking
from exporters.model import (
    Check,
    Culprit,
    Event,
    EventKind,
    Unread,
    Violation,
    ViolationType,
    Workload,
    by_id,
    level_of,
    violation_id,
)
from exporters.policy import Policy


def detect(blocking: Blocking, policy: Policy) -> list[Violation]:
    """Return overdue preemptions, those that the scheduler reported as failed, and wrong-way ones."""
    snapshot = blocking.view.snapshot
    found = [v for w in snapshot.workloads if (v := _overdue(blocking, policy, w)) is not None]
    index = by_id(snapshot.workloads)
    for event in snapshot.events:
        if event.kind is EventKind.PREEMPTED:
            violation = _wrong_way(event, index, snapshot.cluster)
        elif event.kind is EventKind.PREEMPTION_FAILED:
            violation = _reported(event, index, snapshot.cluster)
        else:
            continue
        if violation is not None:
            found.append(violation)
    return found


def ranks_of(event: Event, index: dict[str, Workload]) -> tuple[int | None, int | None]:
    """Return the ranks of the stopped workload and of the winner: as recorded, else as the snapshot has them."""
    victim, winner = index.get(event.workload), index.get(event.by)
    return (
        event.rank if event.rank is not None else (victim.rank if victim else None),
        event.by_rank if event.by_rank is not None else (winner.rank if winner else None),
    )


def _overdue(blocking: Blocking, policy: Policy, waiter: Workload) -> Violation | None:
    snapshot = blocking.view.snapshot
    since = waiter.waiting_since
    if since is None or not waiter.state.waiting or waiter.may_preempt is False:
        return None
    rule = policy.preemption_for(waiter)
    if not rule.allowed or snapshot.time - since <= rule.deadline_seconds:
        return None
    group = blocking.group(waiter)
    if group is None or group.fits_free:
        return None
    chosen = group.useful(group.preemptible, whole_demand=True)
    if not chosen.any():
        return None
    started = group.started[chosen]
    known = started[~np.isnan(started)]
    # The preemption is due once there is someone to preempt: not before the waiter came, nor before the holder did.
    due = max(since, float(known.min())) if len(known) == len(started) else since
    if snapshot.time - due <= rule.deadline_seconds:
        return None
    unchecked = list(group.unchecked)
    if waiter.may_preempt is None:
        unchecked.append(Unread("preemption policy", "not known whether the waiter may preempt"))
    amounts = ((Check.CPU, waiter.demand.cpu_milli), (Check.MEMORY, waiter.demand.memory_bytes))
    return Violation(
        id=violation_id(snapshot.cluster, waiter.id, ViolationType.PREEMPTION_FAILED, since),
        type=ViolationType.PREEMPTION_FAILED,
        cluster=snapshot.cluster,
        victim=waiter.id,
        service=waiter.display_service,
        level=waiter.level,
        rank=waiter.rank,
        queue=waiter.queue,
        tenant=waiter.tenant,
        start=due + rule.deadline_seconds,
        limit_seconds=rule.deadline_seconds,
        culprits=group.culprits(chosen, since, snapshot.time),
        checks=(*group.checks, *(check for check, amount in amounts if amount)),
        unchecked=tuple(unchecked),
        detail=f"{int(chosen.sum())} preemptible less urgent workloads still run",
    )


def _wrong_way(event: Event, index: dict[str, Workload], cluster: str) -> Violation | None:
    rank, by_rank = ranks_of(event, index)
    if rank is None or by_rank is None or rank >= by_rank:
        return None
    victim = index.get(event.workload)
    winner = index.get(event.by)
    return Violation(
        id=violation_id(cluster, event.id, ViolationType.WRONG_WAY_PREEMPTION, event.time),
        type=ViolationType.WRONG_WAY_PREEMPTION,
        cluster=cluster,
        victim=event.workload,
        service=event.service or (victim.display_service if victim else ""),
        level=level_of(rank),
        rank=rank,
        queue=victim.queue if victim else "",
        tenant=victim.tenant if victim else "",
        start=event.time,
        end=event.time,
        culprits=(Culprit(event.by, event.by_service or (winner.display_service if winner else ""), by_rank),),
        detail=f"{level_of(by_rank)} (rank {by_rank}) preempted {level_of(rank)} (rank {rank})",
    )


def _reported(event: Event, index: dict[str, Workload], cluster: str) -> Violation | None:
    waiter = index.get(event.workload)
    rank = event.rank if event.rank is not None else (waiter.rank if waiter else None)
    return Violation(
        id=violation_id(cluster, event.id, ViolationType.PREEMPTION_FAILED, event.time),
        type=ViolationType.PREEMPTION_FAILED,
        cluster=cluster,
        victim=event.workload,
        service=event.service or (waiter.display_service if waiter else ""),
        level=level_of(rank),
        rank=rank,
        queue=waiter.queue if waiter else "",
        tenant=waiter.tenant if waiter else "",
        start=event.time,
        end=event.time,
        detail=event.reason,
    )
