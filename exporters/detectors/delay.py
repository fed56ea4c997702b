"""V2 scheduling delay: a workload waits past its SLO, whatever the reason."""

from __future__ import annotations

from exporters.detectors.blocking import breach_of
from exporters.model import Snapshot, Violation, ViolationType, violation_id
from exporters.policy import Policy


def detect(snapshot: Snapshot, policy: Policy) -> list[Violation]:
    """Return a delay for each waiter past its SLO; it began when the SLO ran out."""
    found = []
    for waiter in snapshot.workloads:
        breach = breach_of(waiter, policy, snapshot.time)
        if breach is None:
            continue
        found.append(
            Violation(
                id=violation_id(snapshot.cluster, waiter.id, ViolationType.SCHEDULING_DELAY, breach.since),
                type=ViolationType.SCHEDULING_DELAY,
                cluster=snapshot.cluster,
                victim=waiter.id,
                service=waiter.display_service,
                level=waiter.level,
                rank=waiter.rank,
                queue=waiter.queue,
                tenant=waiter.tenant,
                start=breach.start,
                limit_seconds=breach.slo,
                detail=waiter.reason,
            )
        )
    return found
