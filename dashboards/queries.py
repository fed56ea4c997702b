"""Queries, and their readable columns, that several boards share."""

from __future__ import annotations

from typing import Final

#: What pages somebody at night.
URGENT: Final = 'priority_level=~"P[01]"'

#: Counts of violations have no series where there is none. They are 0 only while a scheduler is read; otherwise they
#: are not known.
NOTHING_WHEN_UP: Final = 'or 0 * count(prioscope_source_up{source!="gpu"} == 1)'

_BY = "cluster, workload, service, priority_level, violation_type"
_CULPRIT = "culprit, culprit_service, culprit_priority_level, basis"


def blocked_by_whom(own: str) -> str:
    """Return each active violation with the labels of its largest culprit, or without where nobody is to blame.

    The value is how long it has lasted, in seconds. ``own`` are selectors that both metrics have.
    """
    lasting = f"max by ({_BY}) (priority_violation_active_seconds{{{own}}})"
    blame = f"priority_violation_culprit_gpu_seconds{{{own}}}"
    worst = f"(topk by (cluster, workload) (1, {blame}) * 0 + 1)"
    on = "on (cluster, workload)"
    return f"{lasting} * {on} group_left ({_CULPRIT}) {worst} or ({lasting} unless {on} {blame})"


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
