"""The fleet views' recording rules, and burn-rate alerts for the wait SLO of each priority level.

The indicator is the share of workloads that started after a wait longer than their level's SLO, from the histogram
`priority_workload_wait_seconds`. An SLO that is one of the histogram's bounds is judged exactly. One that lies between
two is judged at the next *larger* bound: no alert is raised for a wait within the SLO, and waits between the SLO and
the bound go unnoticed here (`PrioscopeSchedulingDelay` judges each by its exact SLO). An SLO above the last bound has
no indicator. `judged` says which is which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from alerts.model import Alert, Group, Recording, Scope, Severity, grown, matching
from alerts.scheduling import WAITING
from exporters.boards import Board
from exporters.catalog import WAIT_BUCKETS
from exporters.policy import Policy

_MISSES: Final = "cluster_priority_level:priority_workload_wait_slo_misses:ratio_rate"
_STARTS: Final = "cluster_priority_level:priority_workload_starts:increase"
_LEVEL: Final = "cluster, priority_level"

#: With fewer starts in the long window, one late workload would be a page; its own alert is there for that.
LEAST_STARTS: Final = 5


@dataclass(frozen=True, slots=True)
class Burn:
    """A pair of windows and the burn rate that both have to show (Google SRE workbook, chapter 5)."""

    name: str
    long: str
    short: str
    rate: float
    hold: str
    severity: Severity


BURNS: Final = (
    Burn("PrioscopeWaitSloBurnFast", "1h", "5m", 14.4, "2m", Severity.CRITICAL),
    Burn("PrioscopeWaitSloBurnMedium", "6h", "30m", 6.0, "15m", Severity.CRITICAL),
    Burn("PrioscopeWaitSloBurnSlow", "1d", "2h", 3.0, "1h", Severity.WARNING),
    Burn("PrioscopeWaitSloBurnTrickle", "3d", "6h", 1.0, "3h", Severity.WARNING),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """A level's SLO in seconds and the histogram's bound that it is judged at; None: above them all."""

    level: str
    slo_seconds: float
    bound: float | None

    @property
    def exact(self) -> bool:
        """Whether the bound is the SLO."""
        return self.bound == self.slo_seconds

    @property
    def note(self) -> str:
        """One sentence for people."""
        if self.bound is None:
            return f"{self.level}: {self.slo_seconds:g} s is above the last bound of the histogram: no burn-rate alert"
        if self.exact:
            return f"{self.level}: {self.slo_seconds:g} s"
        return f"{self.level}: {self.slo_seconds:g} s is judged at {self.bound:g} s, the next bound of the histogram"


def judged(policy: Policy) -> list[Judged]:
    """Return how the SLO of each level that has one is judged, most urgent first."""
    return [
        Judged(f"P{rank}", slo, next((bound for bound in WAIT_BUCKETS if bound >= slo), None))
        for rank, slo in sorted(policy.level_wait_slo.items())
    ]


def recordings(scope: Scope) -> Group:
    """Return the recording rules of the fleet views."""
    cell = "cluster, service, priority_level, violation_type"
    name = "cluster_service_priority_level_violation_type"
    waits = scope("priority_workload_wait_seconds_bucket", window="1h")
    born = grown(scope, "priority_violation_total", "1h", "prioscope_snapshot_age_seconds")
    return Group(
        "prioscope-fleet",
        (
            # On average so many workloads were in violation: unlike a rate of beginnings, right for the first one too.
            Recording(
                f"{name}:priority_violation_seconds:rate5m",
                f"sum by ({cell}) (rate({scope('priority_violation_seconds_total', window='5m')}))",
            ),
            Recording(f"{name}:priority_violation:increase1h", f"sum by ({cell}) {born}"),
            Recording(
                "cluster_priority_level:priority_violations_active:sum",
                f"sum by ({_LEVEL}) ({scope('priority_violations_active')})",
            ),
            Recording(
                "cluster_priority_level:priority_workloads_waiting:sum",
                f"sum by ({_LEVEL}) ({scope('priority_workloads', WAITING)})",
            ),
            Recording(
                "cluster_priority_level:priority_workload_wait_seconds:p99_1h",
                f"histogram_quantile(0.99, sum by ({_LEVEL}, le) (rate({waits})))",
            ),
            Recording(
                "cluster:gpu_cluster_free:ratio",
                f"sum by (cluster) ({scope('gpu_cluster_free_gpus')})"
                f" / sum by (cluster) ({scope('gpu_cluster_capacity_gpus')})",
            ),
        ),
    )


def indicators(scope: Scope) -> Group:
    """Return the recording rules of the wait SLO: the share of late starts, over every window that an alert needs."""
    found = [item for item in judged(scope.options.policy) if item.bound is not None]
    rules: list[Recording | Alert] = []
    for window in _windows():
        # One rule for all levels, since each has a bound of its own and a record may be written once.
        rules.append(Recording(f"{_MISSES}{window}", " or ".join(_misses(scope, item, window) for item in found)))
    levels = matching("priority_level", *(item.level for item in found))
    for window in dict.fromkeys(burn.long for burn in BURNS):
        starts = scope("priority_workload_wait_seconds_count", levels, window=window)
        rules.append(Recording(f"{_STARTS}{window}", f"sum by ({_LEVEL}) (increase({starts}))"))
    return Group("prioscope-wait-slo", tuple(rules) if found else ())


def _windows() -> Iterator[str]:
    yield from dict.fromkeys(window for burn in BURNS for window in (burn.short, burn.long))


def _misses(scope: Scope, item: Judged, window: str) -> str:
    # Exporters write 60.0, others may write 60.
    bound = matching("le", rf"{item.bound:g}(\.0)?")
    good = scope("priority_workload_wait_seconds_bucket", bound, window=window, priority_level=item.level)
    every = scope("priority_workload_wait_seconds_count", window=window, priority_level=item.level)
    return f"1 - sum by ({_LEVEL}) (rate({good})) / (sum by ({_LEVEL}) (rate({every})) > 0)"


def burn_rates(scope: Scope) -> Group:
    """Return the alerts: fast, medium, slow and trickle, for every level with an indicator."""
    if not indicators(scope).rules:
        return Group("prioscope-wait-slo-burn", ())
    return Group("prioscope-wait-slo-burn", tuple(_alert(scope, burn) for burn in BURNS))


def _alert(scope: Scope, burn: Burn) -> Alert:
    limit = f"{burn.rate:g} * {1 - scope.options.objective:.6g}"
    return Alert(
        burn.name,
        f"{scope.recorded(_MISSES + burn.long)} > {limit}"
        f" and {scope.recorded(_MISSES + burn.short)} > {limit}"
        f" and {scope.recorded(_STARTS + burn.long)} >= {LEAST_STARTS}",
        burn.severity,
        ("cluster", "priority_level"),
        f"The wait SLO's error budget burns at {burn.rate:g} times the rate that it allows",
        "{{ $value | humanizePercentage }} of the {{ $labels.priority_level }} work that started in the last "
        f"{burn.long} in {{{{ $labels.cluster }}}} had waited longer than its SLO;"
        f" {100 * (1 - scope.options.objective):.3g}% may.",
        Board.SCHEDULER,
        {"cluster": "cluster", "priority": "priority_level"},
        "V2",
        hold=burn.hold,
    )
