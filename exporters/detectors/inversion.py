"""V1 inversion: a workload waits past its SLO while less urgent ones hold what it could use."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from exporters.detectors.blocking import MAX_CULPRITS, Blocking, Breach, breach_of
from exporters.model import BASES, Basis, Check, Unread, Violation, ViolationType, Workload, violation_id
from exporters.policy import HeldCounts, Policy, StartedFrom


def inversions(blocking: Blocking, policy: Policy, waiters: Iterable[tuple[Workload, Breach]]) -> list[Violation]:
    """Return an inversion for each waiter in breach that less urgent workloads keep from running.

    A culprit is less urgent, holds resources on a node that the waiter is eligible for, and either started after the
    waiter began to wait (or after its SLO ran out, if the policy says ``startedFrom: breach``) or may be preempted
    (any holder, if the policy says ``heldCounts: any``). The culprits' GPUs, together with what is free, must fit the
    waiter; where nodes are not known, each culprit must hold as many GPUs as the waiter asks for.
    """
    found = []
    for waiter, breach in waiters:
        violation = _inspect(blocking, policy, waiter, breach)
        if violation is not None:
            found.append(violation)
    return found


def detect(blocking: Blocking, policy: Policy) -> list[Violation]:
    """Return the inversions among all waiters of the snapshot."""
    snapshot = blocking.view.snapshot
    waiters = ((w, b) for w in snapshot.workloads if (b := breach_of(w, policy, snapshot.time)) is not None)
    return inversions(blocking, policy, waiters)


def _inspect(blocking: Blocking, policy: Policy, waiter: Workload, breach: Breach) -> Violation | None:
    group = blocking.group(waiter)
    if group is None or not group.holders:
        return None
    with np.errstate(invalid="ignore"):
        if policy.started_from is StartedFrom.BREACH:
            started = group.started >= breach.start
        else:
            started = group.started > breach.since
    counts = started | (group.preemptible if policy.held_counts is HeldCounts.PREEMPTIBLE else True)
    chosen = group.useful(counts)
    if not chosen.any():
        return None
    snapshot = blocking.view.snapshot
    dominating = started & group.dominates
    levels = np.where(dominating, 2, np.where(started, 1, 0))
    basis = BASES[int(levels[chosen].max())]
    first = group.started[chosen]
    known = first[~np.isnan(first)]
    start = breach.start if not len(known) or len(known) < len(first) else max(breach.start, float(known.min()))
    number = int(chosen.sum())
    unchecked = list(group.unchecked)
    if np.isnan(first).any():
        unchecked.append(Unread("start time", "not known for a culprit: GPU-seconds count from the wait's beginning"))
    checks = [*group.checks]
    if basis is Basis.DOMINATED:
        checks += [
            c
            for c, asked in ((Check.CPU, waiter.demand.cpu_milli), (Check.MEMORY, waiter.demand.memory_bytes))
            if asked
        ]
    return Violation(
        id=violation_id(snapshot.cluster, waiter.id, ViolationType.INVERSION, breach.since),
        type=ViolationType.INVERSION,
        cluster=snapshot.cluster,
        victim=waiter.id,
        service=waiter.display_service,
        level=waiter.level,
        rank=waiter.rank,
        queue=waiter.queue,
        tenant=waiter.tenant,
        start=start,
        limit_seconds=breach.slo,
        culprits=group.culprits(chosen, breach.since, snapshot.time, levels),
        basis=basis,
        checks=tuple(checks),
        unchecked=tuple(unchecked),
        detail=f"{number} less urgent workloads hold eligible resources"
        + (f"; the {MAX_CULPRITS} that took most are named" if number > MAX_CULPRITS else ""),
    )
