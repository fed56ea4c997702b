"""Fragmentation: what is free and cannot be used, on which GPU, and what that does to waits and preemptions."""

from __future__ import annotations

from typing import Any

from dashboards import frame
from dashboards.frame import CLUSTER, CLUSTER_OR_NONE
from dashboards.panels import (
    GREEN,
    LOW_RATIO,
    NEUTRAL,
    ORANGE,
    YELLOW,
    cell,
    coloured_column,
    column,
    gauge_column,
    pod_link,
    query,
    rows,
    stat,
    table,
    texts,
    thresholds,
    timeseries,
)
from dashboards.queries import NOTHING_WHEN_UP, quantile
from exporters.boards import Board

_NODE = f'{CLUSTER_OR_NONE},node=~"$node"'
_SCOPES = {"allocator": "Caching allocator", "mig": "MIG slices"}


def _by_bucket(metric: str, selectors: str = "") -> str:
    chosen = f"{CLUSTER},{selectors}" if selectors else CLUSTER
    return f"sum by (fragmentation) (increase({metric}{{{chosen}}}[$__range]))"


def board() -> Any:
    """Return the board."""
    succeeded = _by_bucket("gpu_fragmentation_preemptions_total", 'outcome="succeeded"')
    due = _by_bucket("gpu_fragmentation_preemptions_total")
    waited = _by_bucket("gpu_fragmentation_wait_seconds_sum")
    starts = _by_bucket("gpu_fragmentation_wait_seconds_count")
    return frame.dashboard(
        Board.FRAGMENTATION,
        "Fragmentation",
        "Free GPUs and GPU memory that cannot be used because of where they lie, and what that costs.",
        [
            "Is there room that cannot be used?",
            stat(
                "GPUs free",
                "Unallocated GPUs on nodes that take work; shares of a GPU count as fractions.",
                f"sum(gpu_cluster_free_gpus{{{CLUSTER}}})",
                decimals=1,
            ),
            stat(
                "Of no use to what waits",
                "Free GPUs that no waiting workload can use.",
                f"sum(gpu_cluster_unusable_gpus{{{CLUSTER}}})",
                steps=((None, GREEN), (1, YELLOW), (8, ORANGE)),
                decimals=1,
                no_value="not known",
            ),
            stat(
                "Fragmented",
                "Free GPUs that a workload drawn from the usual demand could not use, in expectation (F of the FGD"
                " paper).",
                f"sum(gpu_cluster_fragmented_gpus{{{CLUSTER}}})",
                steps=((None, GREEN), (1, YELLOW), (8, ORANGE)),
                decimals=1,
            ),
            stat(
                "Share fragmented",
                "Fragmented GPUs over free GPUs, of the cluster where it is worst.",
                f"max(gpu_cluster_fragmentation_ratio{{{CLUSTER}}})",
                unit="percentunit",
                steps=LOW_RATIO,
                no_value="not known",
            ),
            stat(
                "Worst GPU memory",
                "Of the GPU whose free memory is most scattered: the part outside the largest free block.",
                f"max(gpu_fragmentation_ratio{{{_NODE}}})",
                unit="percentunit",
                steps=LOW_RATIO,
            ),
            stat(
                "Blocked by it",
                "Workloads for which enough is free in total, and no placement exists.",
                f'sum(priority_violations_active{{{CLUSTER},violation_type="fragmentation_blocked"}})'
                f" {NOTHING_WHEN_UP}",
                steps=((None, GREEN), (1, ORANGE)),
            ),
            "What it costs",
            table(
                "Preemptions and waits by fragmentation",
                "Over the time range: how many preemptions that were due succeeded, and how long workloads waited, by"
                " how"
                " fragmented the cluster was then. The published reference is 98.7 % success at an index of 0.23 and"
                " 41.2 % at 0.68.",
                [
                    rows(f"{due} > 0"),
                    rows(f"100 * {succeeded} / ({due} > 0)"),
                    rows(f"{starts} > 0"),
                    rows(f"{waited} / ({starts} > 0)"),
                ],
                {
                    "fragmentation": "Fragmentation from",
                    "Value #A": "Preemptions due",
                    "Value #B": "Succeeded",
                    "Value #C": "Starts",
                    "Value #D": "Mean wait",
                },
                width=12,
                sort="Fragmentation from",
                descending=False,
                decimals=0,
                overrides=[
                    column("Fragmentation from", custom__width=165),
                    # No bar: one that is empty looks like 0 %.
                    column(
                        "Succeeded",
                        unit="percent",
                        decimals=1,
                        thresholds=thresholds(((None, "red"), (50, ORANGE), (90, GREEN))),
                        mappings=[
                            {
                                "type": "special",
                                "options": {"match": "null", "result": {"text": "none seen", "color": "text"}},
                            }
                        ],
                        custom__cellOptions={"type": "color-text"},
                    ),
                    column("Mean wait", unit="s", decimals=1),
                ],
            ),
            timeseries(
                "Wait by fragmentation, 95th percentile",
                "One workload in twenty that started at this fragmentation had waited longer.",
                [
                    query(
                        quantile(0.95, "gpu_fragmentation_wait_seconds", CLUSTER, "fragmentation"),
                        "fragmentation from {{fragmentation}}",
                    )
                ],
                unit="s",
                rare=True,
            ),
            timeseries(
                "Free, fragmented, of no use",
                "What is free, what of it a usual workload could not use, and what nothing in the queue can use.",
                [
                    query(f"sum(gpu_cluster_free_gpus{{{CLUSTER}}})", "free"),
                    query(f"sum(gpu_cluster_fragmented_gpus{{{CLUSTER}}})", "fragmented"),
                    query(f"sum(gpu_cluster_unusable_gpus{{{CLUSTER}}})", "of no use to what waits"),
                ],
                unit="suffix: GPUs",
            ),
            timeseries(
                "Left over for jobs of a size",
                "Free GPUs left over when as many pieces of this many GPUs as possible are placed. High for large sizes"
                " and low for small ones: the room is scattered.",
                [
                    query(f"sum by (size) (gpu_cluster_stranded_gpus{{{CLUSTER}}})", "size {{size}}"),
                ],
                unit="suffix: GPUs",
            ),
            "Which GPU",
            table(
                "Memory fragmentation by GPU",
                "Index: 1 - largest free block / all memory that is managed (the published definition; near 1 on every"
                " full device). Of the free part: 1 - largest free block / all that is free. No row: nothing is free,"
                " or"
                " nobody reports it.",
                [
                    rows(f"max by (node, gpu, scope) (gpu_fragmentation_index{{{_NODE}}})"),
                    rows(f"max by (node, gpu, scope) (gpu_fragmentation_ratio{{{_NODE}}})"),
                ],
                {
                    "node": "Node",
                    "gpu": "GPU",
                    "scope": "Memory of",
                    "Value #A": "Index",
                    "Value #B": "Of the free part",
                },
                height=10,
                sort="Of the free part",
                overrides=[
                    column("Memory of", mappings=texts(_SCOPES)),
                    column("GPU", custom__width=70),
                    gauge_column("Index", "percentunit", NEUTRAL, min=0, max=1),
                    gauge_column("Of the free part", "percentunit", LOW_RATIO, min=0, max=1),
                ],
            ),
            table(
                "Allocators",
                "What each process's caching allocator holds, what of it is free, and its largest free block.",
                [
                    rows(f"sum by (node, gpu, workload) (gpu_allocator_reserved_bytes{{{_NODE}}})"),
                    rows(f"sum by (node, gpu, workload) (gpu_allocator_free_bytes{{{_NODE}}})"),
                    rows(
                        f"max by (node, gpu, workload) (gpu_allocator_largest_free_bytes{{{_NODE}}})",
                    ),
                ],
                {
                    "node": "Node",
                    "gpu": "GPU",
                    "workload": "Pod or job",
                    "Value #A": "Held",
                    "Value #B": "Free",
                    "Value #C": "Largest free",
                },
                height=10,
                unit="bytes",
                sort="Free",
                overrides=[
                    column("Node", custom__width=90),
                    column("GPU", custom__width=60),
                    *(column(name, custom__width=95) for name in ("Held", "Free", "Largest free")),
                    column("Pod or job", links=[pod_link(cell("Pod or job"))]),
                ],
            ),
            timeseries(
                "Scattered free memory over time",
                "The ten GPUs whose free memory is most scattered.",
                [query(f"topk(10, max by (node, gpu) (gpu_fragmentation_ratio{{{_NODE}}}))", "{{node}} GPU {{gpu}}")],
                unit="percentunit",
                maximum=1,
                steps=((None, "transparent"), (0.5, "orange"), (0.7, "red")),
            ),
            table(
                "MIG instances",
                "Instances by GPU and where they lie: free slices between them are what a larger profile cannot use.",
                [
                    rows(
                        "max by (node, gpu, mig_instance, profile, start, size)"
                        f" (gpu_mig_instance_info{{{_NODE}}}) * on (node, gpu, mig_instance, profile)"
                        f" group_left () max by (node, gpu, mig_instance, profile)"
                        f" (gpu_mig_memory_used_bytes{{{_NODE}}}"
                        f" / gpu_mig_memory_total_bytes{{{_NODE}}})",
                    )
                ],
                {
                    "node": "Node",
                    "gpu": "GPU",
                    "profile": "Profile",
                    "start": "First slice",
                    "size": "Slices",
                    "Value": "Memory used",
                },
                sort="First slice",
                descending=False,
                overrides=[gauge_column("Memory used", "percentunit", NEUTRAL, min=0, max=1)],
            ),
            timeseries(
                "Given away by node",
                "Part of each node's GPUs that the scheduler has allocated.",
                [query(f"avg by (node) (gpu_allocated_ratio{{{_NODE}}})", "{{node}}")],
                unit="percentunit",
                maximum=1,
            ),
            table(
                "Blocked by fragmentation now",
                "Workloads for which enough is free in total, and no placement exists.",
                [
                    rows(
                        "max by (workload, service, priority_level) (priority_violation_active_seconds"
                        f'{{{CLUSTER},violation_type="fragmentation_blocked"}})',
                    )
                ],
                {"workload": "Pod or job", "service": "Service", "priority_level": "Priority", "Value": "Blocked for"},
                sort="Blocked for",
                no_value="none seen",
                overrides=[
                    coloured_column("Blocked for", "s", ((None, YELLOW), (1800, ORANGE))),
                    column("Pod or job", links=[pod_link(cell("Pod or job"), cell("Service"))]),
                ],
            ),
        ],
        variables=[frame.node()],
    )
