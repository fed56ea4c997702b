"""Detectors: pure functions from a snapshot and a policy to violations (spec V1 to V4, V11)."""

from __future__ import annotations

from exporters.detectors import delay, fragmentation, inversion, preemption, qos
from exporters.detectors.blocking import Blocking
from exporters.model import Snapshot, Violation
from exporters.placement import ClusterView
from exporters.policy import Policy


def detect(snapshot: Snapshot, policy: Policy) -> list[Violation]:
    """Return every violation that the snapshot shows, each with the identity it has in every other snapshot."""
    view = ClusterView(snapshot)
    blocking = Blocking(view)
    return [
        *inversion.detect(blocking, policy),
        *delay.detect(snapshot, policy),
        *fragmentation.detect(view, policy),
        *preemption.detect(blocking, policy),
        *qos.detect(snapshot, policy),
    ]


__all__ = ["detect"]
