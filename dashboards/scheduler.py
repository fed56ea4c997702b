"""Scheduler: which queues are crowded, who preempts whom, and how good the policy is."""

from __future__ import annotations

from typing import Any

from dashboards import frame
from dashboards.frame import CLUSTER, PRIORITY, QUEUE
from dashboards.panels import (
    COLUMN_NAME,
    GREEN,
    KEEP,
    ORANGE,
    RED,
    STATES,
    YELLOW,
    board_url,
    column,
    link,
    matrix,
    named,
    priority_column,
    priority_series,
    query,
    rows,
    stat,
    table,
    texts,
    timeseries,
)
from dashboards.queries import NOTHING_WHEN_UP, quantile
from exporters.boards import Board

_QUEUES = f"{CLUSTER},{QUEUE},{PRIORITY}"
_WAITING = 'state=~"pending|requeued"'


def board() -> Any:
    """Return the board."""
    return frame.dashboard(
        Board.SCHEDULER,
        "Scheduler",
        "Queues, preemptions and the quality of the policy: does the scheduler put the urgent first?",
        [
            "Now",
            stat(
                "Waiting",
                "Workloads that wait for the scheduler, without those on hold.",
                f"sum(priority_workloads{{{_QUEUES},{_WAITING}}}) {NOTHING_WHEN_UP}",
            ),
            stat(
                "GPUs asked for",
                "GPUs that waiting workloads ask for.",
                f"sum(priority_workload_requested_gpus{{{_QUEUES}}}) {NOTHING_WHEN_UP}",
                decimals=0,
            ),
            stat(
                "Oldest urgent wait",
                "How long the P0 or P1 workload that waits longest has waited.",
                "max(priority_workload_oldest_wait_seconds"
                f'{{{CLUSTER},{QUEUE},priority_level=~"P[01]"}}) {NOTHING_WHEN_UP}',
                unit="s",
                steps=((None, GREEN), (60, YELLOW), (300, ORANGE), (1800, RED)),
            ),
            stat(
                "P95 wait",
                "95th percentile of the waits of what started in the last hour. Published for three policies: 248 ms"
                " for"
                " static weights, 163 ms with reserved memory, 89 ms for semantics-aware dynamic scheduling.",
                f"max(priority_policy_wait_p95_seconds{{{CLUSTER}}})",
                unit="s",
                no_value="not known",
            ),
            stat(
                "In violation",
                "Share of what waited in the last hour that was in violation. Published for three policies: 37.2 %,"
                " 12.8 %"
                " and 2.1 %.",
                f"max(priority_policy_violation_ratio{{{CLUSTER}}})",
                unit="percentunit",
                steps=((None, GREEN), (0.021, YELLOW), (0.128, ORANGE), (0.372, RED)),
                no_value="not known",
            ),
            stat(
                "Nodes not taking work",
                "Nodes that are down or draining.",
                f"count(gpu_node_up{{{CLUSTER}}} == 0) or 0 * count(gpu_node_up{{{CLUSTER}}})",
                steps=((None, GREEN), (1, YELLOW)),
            ),
            "Queues",
            matrix(
                "Waiting by queue and priority",
                "Workloads that wait in each queue. A queue in which the urgent wait beside many less urgent ones is"
                " out"
                " of balance. Click a cell for the services at that priority.",
                rows(
                    f"sum by (queue, priority_level) (priority_workloads{{{_QUEUES},{_WAITING}}})",
                ),
                "queue",
                "priority_level",
                heading="Queue",
                unit="none",
                steps=((None, GREEN), (1, YELLOW), (10, ORANGE), (50, RED)),
                cells=r"^(P\d|unknown|overflow)",
                links=[
                    link(
                        "Open the services at this priority",
                        board_url(Board.SERVICE, priority=COLUMN_NAME),
                    )
                ],
                height=8,
            ),
            timeseries(
                "Oldest wait by priority",
                "How long the longest-waiting workload has waited. The urgent should be at the bottom.",
                [
                    query(
                        f"max by (priority_level) (priority_workload_oldest_wait_seconds{{{_QUEUES}}})",
                        "{{priority_level}}",
                    )
                ],
                unit="s",
                overrides=priority_series(),
                links=[link("Open the services", board_url(Board.SERVICE, priority=KEEP))],
            ),
            timeseries(
                "Workloads by state",
                "All workloads of the chosen queues.",
                [query(f"sum by (state) (priority_workloads{{{_QUEUES}}})", "{{state}}")],
                unit="none",
                width=8,
                stacked=True,
                overrides=named(STATES),
            ),
            timeseries(
                "GPUs held by priority",
                "GPUs that running workloads hold.",
                [
                    query(
                        f"sum by (priority_level) (priority_workload_held_gpus{{{_QUEUES}}})",
                        "{{priority_level}}",
                    )
                ],
                unit="suffix: GPUs",
                width=8,
                stacked=True,
                overrides=priority_series(),
            ),
            timeseries(
                "GPUs asked for by priority",
                "GPUs that waiting workloads ask for.",
                [
                    query(
                        f"sum by (priority_level) (priority_workload_requested_gpus{{{_QUEUES}}})",
                        "{{priority_level}}",
                    )
                ],
                unit="suffix: GPUs",
                width=8,
                stacked=True,
                overrides=priority_series(),
            ),
            timeseries(
                "Priority mix of the queues",
                "Shannon entropy of the priority levels that wait: under 0.8 bits skewed (more than 15 % jitter is to"
                " be"
                " expected), from 1.5 balanced (less than 5 %).",
                [query(f"max by (queue) (priority_queue_entropy{{{CLUSTER},{QUEUE}}})", "{{queue}}")],
                unit="suffix: bits",
                steps=((None, "red"), (0.8, "yellow"), (1.5, "green")),
                maximum=2.2,
            ),
            timeseries(
                "Wait against the adaptive threshold",
                "95th percentile of the waits of each priority, and the threshold that adapts to what is usual. Above"
                " its"
                " threshold a wait is unusual even where no SLO is set.",
                [
                    query(
                        quantile(0.95, "priority_workload_wait_seconds", _QUEUES, "priority_level"),
                        "{{priority_level}} wait",
                    ),
                    query(
                        f"max by (priority_level) (priority_wait_adaptive_threshold_seconds{{{_QUEUES}}})",
                        "{{priority_level}} threshold",
                    ),
                ],
                unit="s",
                rare=True,
            ),
            "Preemptions",
            matrix(
                "Who preempts whom",
                "Preemptions over the time range: rows are the winners, columns those that were stopped. A winner that"
                " is"
                " less urgent than the one it stopped is the wrong way round.",
                rows(
                    "sum by (winner_priority_level, victim_priority_level)"
                    f" (increase(priority_preemptions_total{{{CLUSTER}}}[$__range]))",
                ),
                "winner_priority_level",
                "victim_priority_level",
                heading="Winner",
                heading_width=100,
                worst_first=False,
                unit="none",
                decimals=0,
                steps=((None, "transparent"), (0.5, "blue")),
                cells=r"^(P\d|unknown|overflow)",
                links=[
                    link(
                        "Open the services that were stopped",
                        board_url(Board.SERVICE, priority=COLUMN_NAME),
                    )
                ],
                width=8,
                height=8,
            ),
            timeseries(
                "Preemptions by class of the one that was stopped",
                "Preemptions per hour.",
                [
                    query(
                        "3600 * sum by (victim_priority_level)"
                        f" (rate(priority_preemptions_total{{{CLUSTER}}}[$__rate_interval]))",
                        "{{victim_priority_level}}",
                    )
                ],
                unit="suffix: /h",
                rare=True,
                width=8,
                overrides=priority_series(),
            ),
            timeseries(
                "Preemptions that failed",
                "Preemptions that were due and did not happen in time, or went the wrong way, per hour.",
                [
                    query(
                        "3600 * sum by (violation_type) (rate(priority_violation_total"
                        f'{{{CLUSTER},violation_type=~"preemption_failed|wrong_way_preemption"}}[$__rate_interval]))',
                        "{{violation_type}}",
                    )
                ],
                unit="suffix: /h",
                least_maximum=1,
                rare=True,
                width=8,
                overrides=named(
                    {
                        "preemption_failed": ("did not happen in time", "yellow"),
                        "wrong_way_preemption": ("wrong way", "red"),
                    }
                ),
                links=[link("Open the services", board_url(Board.SERVICE))],
            ),
            "Quality of the policy",
            timeseries(
                "P95 wait",
                "Over the last hour, by policy.",
                [
                    query(
                        f"max by (cluster, policy) (priority_policy_wait_p95_seconds{{{CLUSTER}}})",
                        "{{cluster}} {{policy}}",
                    )
                ],
                unit="s",
                width=8,
            ),
            timeseries(
                "Share of waiting workloads in violation",
                "Over the last hour, by policy. Lines: published figures of three policies.",
                [
                    query(
                        f"max by (cluster, policy) (priority_policy_violation_ratio{{{CLUSTER}}})",
                        "{{cluster}} {{policy}}",
                    )
                ],
                unit="percentunit",
                maximum=1,
                width=8,
                steps=((None, "transparent"), (0.021, "green"), (0.128, "yellow"), (0.372, "red")),
            ),
            timeseries(
                "Swing of GPU use",
                "Half the range of the mean GPU utilisation of the last hour over its mean: 40 % reads as ± 40 %."
                " Published for three policies: ± 42 %, ± 19 %, ± 7 %.",
                [
                    query(
                        f"max by (cluster, policy) (priority_policy_utilization_swing_ratio{{{CLUSTER}}})",
                        "{{cluster}} {{policy}}",
                    )
                ],
                unit="percentunit",
                width=8,
            ),
            table(
                "Waits that drift",
                "Queues and levels whose recent waits differ from those that the adaptive threshold was learned on"
                " (1), or"
                " do not (0).",
                [rows(f"max by (queue, priority_level) (priority_wait_drift{{{_QUEUES}}})")],
                {"queue": "Queue", "priority_level": "Priority", "Value": "Drift"},
                sort="Drift",
                overrides=[
                    priority_column(),
                    column("Drift", mappings=texts({"0": ("no", GREEN), "1": ("drifts", ORANGE)})),
                ],
            ),
            table(
                "Nodes that take no work",
                "Nodes that are down or draining: their GPUs are not counted as free.",
                [rows(f"max by (cluster, node, state) (gpu_node_up{{{CLUSTER}}} == 0)")],
                {"cluster": "Cluster", "node": "Node", "state": "State"},
                no_value="none seen",
            ),
        ],
        variables=[frame.priority()],
    )
