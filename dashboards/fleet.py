"""Fleet: is anything urgent blocked, by whom, for how long; and where the violations are."""

from __future__ import annotations

from typing import Any

from dashboards import frame
from dashboards.frame import CLUSTER, CLUSTER_OR_NONE, QUEUE, SERVICE
from dashboards.panels import (
    ANY_IS_BAD,
    BLOCKED_SECONDS,
    COLUMN_NAME,
    GREEN,
    KEEP,
    ORANGE,
    RED,
    RUNBOOKS,
    SOMEBODY,
    VIOLATIONS,
    YELLOW,
    board_url,
    cell,
    coloured_column,
    column,
    gauge_column,
    incident_links,
    link,
    matrix,
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
from dashboards.queries import URGENT, blocked, blocked_by, blocked_by_whom, blocked_columns, blocked_for
from exporters.boards import Board

_OWN = f"{CLUSTER},{SERVICE}"
_URGENT = f"{_OWN},{URGENT}"


def board() -> Any:
    """Return the board."""
    return frame.dashboard(
        Board.FLEET,
        "Fleet",
        "Start here: is anything urgent blocked, by whom, for how long; which service and priority level violates"
        " most.",
        [
            "Is anything urgent blocked?",
            stat(
                "Urgent ones blocked",
                "P0 and P1 workloads that wait longer than they were promised. 0 is only shown while a scheduler is"
                " read.",
                blocked(_URGENT),
                steps=ANY_IS_BAD,
                links=[link("Who is it", board_url(Board.SERVICE, service=KEEP))],
            ),
            stat(
                "Blocked for",
                "How long the P0 or P1 workload that is blocked longest has been so.",
                blocked_for(_URGENT),
                unit="s",
                steps=BLOCKED_SECONDS,
            ),
            stat(
                "Mostly by",
                "The service whose less urgent workloads took the most GPU time while P0 and P1 workloads waited.",
                blocked_by(_URGENT),
                legend="{{culprit_service}}",
                show="name",
                steps=SOMEBODY,
                no_value="not known",
                links=[link("Open the service", board_url(Board.SERVICE, service=series_label("culprit_service")))],
            ),
            stat(
                "Alerts firing",
                "Alerts that fire now, of all severities. Details are in the table below.",
                f'count(ALERTS{{alertstate="firing",{CLUSTER_OR_NONE}}}) or 0 * count(up)',
                steps=((None, GREEN), (1, ORANGE)),
            ),
            stat(
                "GPUs free but of no use",
                "Free GPUs that no waiting workload can use, because they lie scattered or are of the wrong kind. Not"
                " known while"
                " nothing waits for a GPU.",
                f"sum(gpu_cluster_unusable_gpus{{{CLUSTER}}})",
                steps=((None, GREEN), (1, YELLOW), (8, ORANGE)),
                decimals=0,
                no_value="not known",
                links=[link("Open fragmentation", board_url(Board.FRAGMENTATION))],
            ),
            stat(
                "Sources that answer",
                "Share of schedulers and GPU nodes whose exporter could read them. Below 100 % this board is"
                " incomplete.",
                "sum(prioscope_source_up) / count(prioscope_source_up)",
                unit="percentunit",
                steps=((None, RED), (0.999, GREEN)),
                no_value="no exporter",
                links=[link("Open exporter health", board_url(Board.EXPORTERS))],
            ),
            table(
                "Blocked now, and by whom",
                "P0 and P1 workloads in violation, longest first, with the less urgent workload that took the most GPU"
                " time from each. An empty culprit means that nobody less urgent is to blame, such as a plain lack of"
                " GPUs.",
                [rows(blocked_by_whom(_URGENT))],
                blocked_columns() | {"Value": "Blocked for"},
                width=24,
                height=7,
                sort="Priority",
                descending=False,
                then="Blocked for",
                no_value="none seen (if the sources above answer)",
                overrides=[
                    priority_column(),
                    violation_column(),
                    reason_column(),
                    priority_column("Its priority"),
                    coloured_column("Blocked for", "s", BLOCKED_SECONDS, custom__width=110),
                    column("Service", links=[service_link(cell("Service"))]),
                    column("Pod or job", links=[pod_link(cell("Pod or job"), cell("Service"))]),
                    column("Blocked by", links=[service_link(cell("Blocked by"))]),
                    column("Its pod or job", links=[pod_link(cell("Its pod or job"))]),
                ],
            ),
            "Where do violations happen?",
            matrix(
                "Time in violation by service and priority",
                "Minutes in violation per hour over the time range shown, added up over the workloads: 60 means that"
                " one"
                " workload was in violation all the time. Click a cell for the service at that priority.",
                rows(
                    "60 * sum by (service, priority_level)"
                    f" (rate(priority_violation_seconds_total{{{_OWN}}}[$__range]))",
                ),
                "service",
                "priority_level",
                heading="Service",
                unit="suffix: min/h",
                decimals=1,
                steps=((None, GREEN), (1, YELLOW), (15, ORANGE), (60, RED)),
                cells=r"^(P\d|unknown|overflow)",
                links=[
                    link(
                        "Open the service at this priority",
                        board_url(Board.SERVICE, service=cell("Service"), priority=COLUMN_NAME),
                    )
                ],
                row_links=[service_link(cell("Service"))],
            ),
            timeseries(
                "Violations by type",
                "Workloads in violation at each moment, by type.",
                [query(f"sum by (violation_type) (priority_violations_active{{{_OWN}}})", "{{violation_type}}")],
                unit="none",
                stacked=True,
                height=10,
                overrides=named(VIOLATIONS),
                links=[link("Open the services", board_url(Board.SERVICE, service=KEEP))],
            ),
            table(
                "Top culprits",
                "Services whose workloads took GPU time while more urgent ones waited, over the violations that last"
                " now.",
                [
                    rows(
                        "sort_desc(topk(10, sum by (culprit_service, culprit_priority_level)"
                        f" (priority_violation_culprit_gpu_seconds{{{_OWN}}})) / 3600)",
                    )
                ],
                {"culprit_service": "Service", "culprit_priority_level": "Priority", "Value": "GPU-hours taken"},
                sort="GPU-hours taken",
                overrides=[
                    priority_column(),
                    gauge_column("GPU-hours taken", "suffix: GPU·h", ((None, ORANGE),), decimals=2, min=0),
                    column("Service", links=[service_link(cell("Service"))]),
                ],
            ),
            timeseries(
                "Burn of the error budget",
                "Share of waiting workloads in violation, over the share that the objective allows: above 1 the budget"
                " of"
                " the period does not last. The exporter's window is one hour; the six-hour average shows what"
                " persists.",
                [
                    query(
                        f"max by (cluster, policy) (priority_policy_violation_ratio{{{CLUSTER}}}) / (1 - $objective)",
                        "{{cluster}} {{policy}}, 1 h",
                    ),
                    query(
                        "max by (cluster, policy)"
                        f" (avg_over_time(priority_policy_violation_ratio{{{CLUSTER}}}[6h])) / (1 - $objective)",
                        "{{cluster}} {{policy}}, 6 h",
                    ),
                ],
                unit="suffix: ×",
                steps=((None, "transparent"), (1, "orange"), (14.4, "red")),
            ),
            "Are the GPUs well used?",
            timeseries(
                "GPUs: free, and free but fragmented",
                "Free GPUs, those that a typical workload could not use because of where they lie (F of the FGD paper),"
                " and those that nothing in the queue can use now.",
                [
                    query(f"sum(gpu_cluster_free_gpus{{{CLUSTER}}})", "free"),
                    query(f"sum(gpu_cluster_fragmented_gpus{{{CLUSTER}}})", "fragmented"),
                    query(f"sum(gpu_cluster_unusable_gpus{{{CLUSTER}}})", "of no use to what waits"),
                ],
                unit="suffix: GPUs",
                width=8,
                links=[link("Open fragmentation", board_url(Board.FRAGMENTATION))],
            ),
            timeseries(
                "Priority mix of the queues",
                "Shannon entropy of the priority levels that wait. Under 0.8 bits one level crowds out the others and"
                " more than 15 % jitter is to be expected; from 1.5 the mix is balanced.",
                [query(f"max by (queue) (priority_queue_entropy{{{CLUSTER},{QUEUE}}})", "{{queue}}")],
                unit="suffix: bits",
                width=8,
                steps=((None, "red"), (0.8, "yellow"), (1.5, "green")),
                maximum=2.2,
                links=[link("Open the scheduler", board_url(Board.SCHEDULER))],
            ),
            timeseries(
                "Waiting workloads by priority",
                "Workloads that wait for the scheduler, without those on hold.",
                [
                    query(
                        f'sum by (priority_level) (priority_workloads{{{CLUSTER},{QUEUE},state=~"pending|requeued"}})',
                        "{{priority_level}}",
                    )
                ],
                unit="none",
                width=8,
                stacked=True,
                overrides=priority_series(),
                links=[link("Open the scheduler", board_url(Board.SCHEDULER))],
            ),
            "Alerts and incidents",
            table(
                "Firing alerts",
                "Alerts that fire now. The name opens the runbook.",
                [
                    rows(
                        "count by (alertname, severity, service, priority_level)"
                        f' (ALERTS{{alertstate="firing",{CLUSTER_OR_NONE}}})',
                    )
                ],
                {
                    "alertname": "Alert",
                    "severity": "Severity",
                    "service": "Service",
                    "priority_level": "Priority",
                    "Value": "Instances",
                },
                overrides=[
                    priority_column(),
                    column("Severity", custom__width=85),
                    column("Instances", custom__width=90),
                    column("Alert", links=[link("Open the runbook", f"{RUNBOOKS}/{cell('Alert')}.md", new_tab=True)]),
                    column("Service", links=[service_link(cell("Service"))]),
                ],
            ),
            table(
                "Incidents",
                "Incidents that were captured and explained, newest first, with the first cause that was found.",
                [
                    rows(
                        "1000 * rca_incident_start_timestamp_seconds * on (incident)"
                        " group_left (victim, cause, mechanism, verdict)"
                        f" rca_incident_info{{{CLUSTER_OR_NONE}}}",
                    )
                ],
                {
                    "Value": "Began",
                    "incident": "Incident",
                    "victim": "Victim",
                    "cause": "First cause",
                    "verdict": "Verdict",
                },
                sort="Began",
                overrides=[
                    column("Began", unit="dateTimeAsLocal", custom__width=190),
                    column("Incident", links=incident_links(cell("Incident"))),
                    column("Victim", links=[service_link(cell("Victim"))]),
                ],
            ),
        ],
        variables=[frame.service(), frame.objective()],
    )
