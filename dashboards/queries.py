"""Queries, and their readable columns, that several boards share."""

from __future__ import annotations

from typing import Final

from exporters.model import ViolationType

#: What pages somebody at night.
URGENT: Final = 'priority_level=~"P[01]"'

#: Counts of violations have no series where there is none. They are 0 only while a scheduler is read; otherwise they
#: are not known.
NOTHING_WHEN_UP: Final = 'or 0 * count(prioscope_source_up{source!="gpu"} == 1)'

_BY = "cluster, workload, service, priority_level, violation_type"
_CULPRIT = "culprit, culprit_service, culprit_priority_level, basis"

#: Violations that hold a workload up, the most telling first: a delay says only that there is one.
_REASONS: Final = (
    ViolationType.INVERSION,
    ViolationType.FRAGMENTATION_BLOCKED,
    ViolationType.PREEMPTION_FAILED,
    ViolationType.SCHEDULING_DELAY,
)
#: Selects the violations that hold a workload up; the others are of workloads that run, or are over at once.
BLOCKING: Final = f'violation_type=~"{"|".join(_REASONS)}"'


def quantile(share: float, metric: str, selectors: str = "", by: str = "") -> str:
    """Return the quantile of a histogram, by label ``by``; no sample where nothing was observed."""
    labels = f"le, {by}" if by else "le"
    chosen = f"{{{selectors}}}" if selectors else ""
    rates = f"rate({metric}_bucket{chosen}[$__rate_interval])"
    # Of no observations Prometheus makes NaN, which is not at least 0.
    return f"histogram_quantile({share:g}, sum by ({labels}) ({rates})) >= 0"


def blocked(own: str) -> str:
    """Return how many workloads are held up, 0 only while a scheduler is read."""
    by = "cluster, workload"
    return f"count(count by ({by}) (priority_violation_active_seconds{{{own},{BLOCKING}}})) {NOTHING_WHEN_UP}"


def blocked_for(own: str) -> str:
    """Return how long the workload that is held up longest has been so, in seconds; 0 only while a scheduler is"
    " read."""
    return f"max(priority_violation_active_seconds{{{own},{BLOCKING}}}) {NOTHING_WHEN_UP}"


def blocked_by(own: str) -> str:
    """Return the service, as ``culprit_service``, whose workloads took most while others waited.

    ``nobody`` only while a scheduler is read.
    """
    worst = f"topk(1, sum by (culprit_service) (priority_violation_culprit_gpu_seconds{{{own}}}))"
    nobody = 'label_replace(0 * count(prioscope_source_up{source!="gpu"} == 1), "culprit_service", "nobody", "", "")'
    return f"{worst} or on () {nobody}"


def blocked_by_whom(own: str) -> str:
    """Return each workload that is held up with the labels of its largest culprit, or without where nobody is to blame.

    One series a workload, with the most telling of its violations; the value is how long that has lasted, in seconds.
    ``own`` are selectors that both metrics have.
    """
    on = "on (cluster, workload)"
    lasting = f" or {on} ".join(
        f'max by ({_BY}) (priority_violation_active_seconds{{{own},violation_type="{reason}"}})' for reason in _REASONS
    )
    blame = f"priority_violation_culprit_gpu_seconds{{{own}}}"
    worst = f"(topk by (cluster, workload) (1, {blame}) * 0 + 1)"
    return f"sort_desc(({lasting}) * {on} group_left ({_CULPRIT}) {worst} or (({lasting}) unless {on} {blame}))"


def blocked_columns() -> dict[str, str]:
    """Return the columns of `blocked_by_whom` that people read, but its value."""
    return {
        "priority_level": "Priority",
        "service": "Service",
        "workload": "Pod or job",
        "violation_type": "Violation",
        "culprit_service": "Blocked by",
        "culprit": "Its pod or job",
        "culprit_priority_level": "Its priority",
        "basis": "Because it",
    }
