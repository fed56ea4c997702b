"""What the server counts about itself. Counters start at zero with the process, as Prometheus expects."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import datetime
from typing import Final

from exporters.catalog import METRICS
from exporters.families import Distribution, Family, family

OUTCOMES: Final = ("accepted", "repeated", "resolved", "ignored", "refused")
STAGES: Final = ("capture", "explain", "store", "publish")
_STAGE: Final = "rca_server_stage_duration_seconds"
_DELAY: Final = "rca_server_explanation_delay_seconds"


class Stats:
    """Counters and histograms. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alerts = Counter(dict.fromkeys(OUTCOMES, 0))
        self._failures = Counter(dict.fromkeys(STAGES, 0))
        self._stages = {stage: Distribution.empty(METRICS[_STAGE].buckets) for stage in STAGES if stage != "store"}
        self._delay = Distribution.empty(METRICS[_DELAY].buckets)

    def alert(self, outcome: str, count: int = 1) -> None:
        """Count alerts that were received, with what became of them."""
        with self._lock:
            self._alerts[outcome] += count

    def failure(self, stage: str) -> None:
        """Count an attempt that failed."""
        with self._lock:
            self._failures[stage] += 1

    def took(self, stage: str, seconds: float) -> None:
        """Note how long a stage took."""
        with self._lock:
            self._stages[stage] = self._stages[stage].observe(METRICS[_STAGE].buckets, seconds)

    def explained(self, began: datetime, now: datetime) -> None:
        """Note an explanation of an alert that began then."""
        with self._lock:
            self._delay = self._delay.observe(METRICS[_DELAY].buckets, max((now - began).total_seconds(), 0.0))

    def families(self) -> list[Family]:
        """Return the families of the counters."""
        with self._lock:
            return [
                family("rca_server_alerts_total", [((name,), float(n)) for name, n in self._alerts.items()]),
                family("rca_server_failures_total", [((name,), float(n)) for name, n in self._failures.items()]),
                family(_STAGE, distributions={(stage,): found for stage, found in self._stages.items()}),
                family(_DELAY, distributions={(): self._delay}),
            ]
