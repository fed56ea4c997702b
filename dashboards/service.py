"""Service: which of its workloads are in violation, how, since when, and whom they wait for."""

from __future__ import annotations

from typing import Any

from dashboards import foreign, frame
from dashboards.frame import CLUSTER, PRIORITY, QUEUE, SERVICE
from dashboards.panels import (
    ANY_IS_BAD,
    BLOCKED_SECONDS,
    KEEP,
    NEUTRAL,
    ORANGE,
    SOMEBODY,
    VIOLATIONS,
    board_url,
    cell,
    coloured_column,
    column,
    gauge_column,
    link,
    named,
    pod_link,
    priority_column,
    priority_series,
    query,
    reason_column,
    rows,
    series_label,
    service_link,
    stat,
    table,
    timeseries,
    violation_column,
)
from dashboards.queries import (
    NOTHING_WHEN_UP,
    blocked,
    blocked_by,
    blocked_by_whom,
    blocked_columns,
    blocked_for,
    quantile,
)
from exporters.boards import Board

_OWN = f"{CLUSTER},{SERVICE},{PRIORITY}"
_QUEUES = f"{CLUSTER},{QUEUE},{PRIORITY}"
_WAITS = f"{CLUSTER},{QUEUE},{SERVICE},{PRIORITY}"


def board() -> Any:
    """Return the board."""
    return frame.dashboard(
        Board.SERVICE,
        "Service",
        "One service or several: their violations, the waits of their queues, who blocks them, and which pods suffer"
        " most.",
        [
            "Now: $service, $priority",
            stat(
                "Blocked",
                "Workloads of the service that wait longer than they were promised.",
                blocked(_OWN),
                steps=ANY_IS_BAD,
                links=[link("Open the pods", board_url(Board.POD, service=KEEP))],
            ),
            stat(
                "Blocked for",
                "How long the workload that is blocked longest has been so.",
                blocked_for(_OWN),
                unit="s",
                steps=BLOCKED_SECONDS,
            ),
            stat(
                "Mostly by",
                "The service whose workloads took the most GPU time while this one waited.",
                blocked_by(_OWN),
                legend="{{culprit_service}}",
                show="name",
                steps=SOMEBODY,
                no_value="not known",
                links=[link("Open the service", board_url(Board.SERVICE, service=series_label("culprit_service")))],
            ),
            stat(
                "Waiting",
                "Workloads of the service that wait for the scheduler (the longest-waiting of the cluster only, if"
                " many).",
                f"count(priority_workload_waiting_seconds{{{_WAITS}}}) {NOTHING_WHEN_UP}",
                steps=NEUTRAL,
            ),
            stat(
                "Oldest wait",
                "How long the workload of the service that waits longest has waited.",
                f"max(priority_workload_waiting_seconds{{{_WAITS}}}) {NOTHING_WHEN_UP}",
                unit="s",
                steps=NEUTRAL,
            ),
            stat(
                "Not fully checked",
                "Active violations, of the whole cluster, for which some eligibility check could not be made: read"
                " those"
                " with care.",
                f"sum(priority_violation_unchecked{{{CLUSTER}}}) {NOTHING_WHEN_UP}",
                steps=((None, "green"), (1, "yellow")),
            ),
            "Violations",
            timeseries(
                "Time in violation by type",
                "Minutes in violation per hour, added up over the workloads: 60 means that one was in violation all the"
                " time.",
                [
                    query(
                        "60 * sum by (violation_type)"
                        f" (rate(priority_violation_seconds_total{{{_OWN}}}[$__rate_interval]))",
                        "{{violation_type}}",
                    )
                ],
                unit="suffix: min/h",
                stacked=True,
                overrides=named(VIOLATIONS),
            ),
            table(
                "Pods and jobs with the longest violations",
                "The ten workloads whose violation has lasted longest. Click one for what happened to it.",
                [
                    rows(
                        "sort_desc(topk(10, max by (workload, service, priority_level, violation_type)"
                        f" (priority_violation_active_seconds{{{_OWN}}})))",
                    )
                ],
                {
                    "workload": "Pod or job",
                    "service": "Service",
                    "priority_level": "Priority",
                    "violation_type": "Violation",
                    "Value": "Lasts for",
                },
                sort="Lasts for",
                overrides=[
                    priority_column(),
                    violation_column(),
                    coloured_column("Lasts for", "s", BLOCKED_SECONDS, custom__width=105),
                    column("Service", custom__width=130),
                    column("Pod or job", links=[pod_link(cell("Pod or job"), cell("Service"))]),
                ],
            ),
            table(
                "Who blocks whom",
                "Each violation with the less urgent workload that took the most GPU time from it, and how strong the"
                " case is.",
                [rows(blocked_by_whom(_OWN))],
                blocked_columns() | {"Value": "Blocked for"},
                width=24,
                sort="Priority",
                descending=False,
                then="Blocked for",
                overrides=[
                    priority_column(),
                    violation_column(),
                    priority_column("Its priority"),
                    reason_column(),
                    coloured_column("Blocked for", "s", BLOCKED_SECONDS, custom__width=110),
                    column("Pod or job", links=[pod_link(cell("Pod or job"), cell("Service"))]),
                    column("Blocked by", links=[service_link(cell("Blocked by"))]),
                    column("Its pod or job", links=[pod_link(cell("Its pod or job"))]),
                ],
            ),
            table(
                "GPU time taken by others",
                "GPU-hours that less urgent services took while this one waited, over the violations that last now.",
                [
                    rows(
                        "sort_desc(topk(10, sum by (service, culprit_service, culprit_priority_level)"
                        f" (priority_violation_culprit_gpu_seconds{{{_OWN}}})) / 3600)",
                    )
                ],
                {
                    "service": "Service",
                    "culprit_service": "Blocked by",
                    "culprit_priority_level": "Its priority",
                    "Value": "GPU-hours taken",
                },
                sort="GPU-hours taken",
                overrides=[
                    priority_column("Its priority"),
                    gauge_column("GPU-hours taken", "suffix: GPU·h", ((None, ORANGE),), decimals=2, min=0),
                    column("Blocked by", links=[service_link(cell("Blocked by"))]),
                ],
            ),
            timeseries(
                "How long violations last",
                "Median and 95th percentile of the violations that ended, all types.",
                [
                    query(quantile(share, "priority_violation_duration_seconds", _OWN), name)
                    for share, name in ((0.5, "median"), (0.95, "95th percentile"))
                ],
                unit="s",
                rare=True,
            ),
            "Waits of its queues",
            timeseries(
                "Median wait by priority",
                "Half of the workloads that started had waited no longer. By queue: the exporter does not split waits"
                " by"
                " service.",
                [
                    query(
                        quantile(0.5, "priority_workload_wait_seconds", _QUEUES, "priority_level"), "{{priority_level}}"
                    )
                ],
                unit="s",
                rare=True,
                width=8,
                overrides=priority_series(),
            ),
            timeseries(
                "95th percentile of the wait by priority",
                "One workload in twenty that started had waited longer. By queue.",
                [
                    query(
                        quantile(0.95, "priority_workload_wait_seconds", _QUEUES, "priority_level"),
                        "{{priority_level}}",
                    )
                ],
                unit="s",
                rare=True,
                width=8,
                overrides=priority_series(),
            ),
            timeseries(
                "Wait so far, by pod or job",
                "The five workloads of the service that wait longest at the end of the time range.",
                [
                    query(
                        # The same five at every moment.
                        f"{_wait()} and topk(5, {_wait(' @ end()')})",
                        "{{priority_level}} {{workload}}",
                    )
                ],
                unit="s",
                no_value="nothing waits",
                width=8,
                links=[pod_link(series_label("workload"), series_label("service"))],
            ),
            "Does the service feel it?",
            *foreign.service_panels(),
        ],
        variables=[frame.service(), frame.priority()],
    )


def _wait(at: str = "") -> str:
    return f"max by (workload, service, priority_level) (priority_workload_waiting_seconds{{{_WAITS}}}{at})"
