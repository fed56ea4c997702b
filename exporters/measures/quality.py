"""M8 policy quality over a sliding window: P95 wait, share of waiters in violation, swing of GPU utilisation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from exporters.model import Snapshot, Violation
from exporters.tracker import Start


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of a policy in the window; None where nothing was seen to judge by.

    ``utilization_swing`` is half the range of the mean GPU utilisation over its mean: 0.42 reads as ±42 %.
    """

    wait_p95_seconds: float | None
    violation_ratio: float | None
    utilization_swing: float | None


@dataclass(slots=True)
class QualityWindow:
    """Collects what the last ``seconds`` showed. ``limit`` bounds the waits kept, oldest first out."""

    seconds: float = 3600.0
    limit: int = 100_000
    _waits: deque[tuple[float, float]] = field(default_factory=deque)
    _use: deque[tuple[float, float]] = field(default_factory=deque)
    _waiting: dict[str, float] = field(default_factory=dict)
    _violating: dict[str, float] = field(default_factory=dict)

    def update(self, snapshot: Snapshot, starts: Iterable[Start], violations: Iterable[Violation]) -> Quality:
        """Take in one snapshot with the starts and violations that it showed, and judge the window."""
        now = snapshot.time
        self._waits.extend((now, start.wait_seconds) for start in starts)
        waiting = (workload.id for workload in snapshot.workloads if workload.state.waiting)
        self._waiting.update(dict.fromkeys(waiting, now))
        self._violating.update(dict.fromkeys((violation.victim for violation in violations), now))
        use = [d.gpu_utilization_ratio for d in snapshot.devices if d.up and d.gpu_utilization_ratio is not None]
        if use:
            self._use.append((now, sum(use) / len(use)))
        self._forget(now - self.seconds)
        judged = [identity for identity in self._waiting if identity in self._violating]
        return Quality(
            wait_p95_seconds=float(np.percentile([wait for _, wait in self._waits], 95)) if self._waits else None,
            violation_ratio=len(judged) / len(self._waiting) if self._waiting else None,
            utilization_swing=_swing([value for _, value in self._use]),
        )

    def _forget(self, limit: float) -> None:
        for queue in (self._waits, self._use):
            while queue and (queue[0][0] < limit or len(queue) > self.limit):
                queue.popleft()
        self._waiting = {identity: seen for identity, seen in self._waiting.items() if seen >= limit}
        self._violating = {identity: seen for identity, seen in self._violating.items() if seen >= limit}


def _swing(values: list[float]) -> float | None:
    mean = sum(values) / len(values) if values else 0.0
    return (max(values) - min(values)) / 2 / mean if mean > 0 else None
