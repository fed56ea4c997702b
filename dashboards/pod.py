"""Pod / job: what state it is in, who blocks it, what it does with its GPUs, and what else could explain it."""

from __future__ import annotations

from typing import Any

from dashboards import foreign, frame
from dashboards.frame import CLUSTER, CLUSTER_OR_NONE, POD
from dashboards.panels import (
    BLOCKED_SECONDS,
    GREEN,
    LOW_RATIO,
    NEUTRAL,
    ORANGE,
    RED,
    VIOLATIONS,
    YELLOW,
    board_url,
    cell,
    column,
    gauge_column,
    link,
    pod_link,
    priority_column,
    query,
    reason_column,
    rows,
    series_label,
    service_link,
    stat,
    state_timeline,
    table,
    texts,
    timeseries,
)
from exporters.boards import Board
from exporters.model import ViolationType

_OWN = f"{CLUSTER},{POD}"
_GPU = f"{CLUSTER_OR_NONE},{POD}"
#: The GPUs that the pod's processes use.
_ON_ITS_GPUS = f"and on (node, gpu, uuid) gpu_process_memory_bytes{{{_GPU}}}"

#: The numbers of the state timeline.
_RUNS, _WAITS, _VIOLATED = 1, 2, 3
_STATES = {
    str(_RUNS): ("On a GPU", GREEN),
    str(_WAITS): ("Waiting", YELLOW),
    str(_VIOLATED): ("In violation", RED),
}
_STATE = (
    f"max by (workload) (priority_violation_active_seconds{{{_OWN}}} * 0 + {_VIOLATED})"
    f" or max by (workload) (priority_workload_waiting_seconds{{{_OWN}}} * 0 + {_WAITS})"
    f" or max by (workload) (gpu_process_memory_bytes{{{_GPU}}} * 0 + {_RUNS})"
)

#: Violations that last; the others are over at once.
_LASTING = [kind for kind in VIOLATIONS if kind != ViolationType.WRONG_WAY_PREEMPTION]


def board() -> Any:
    """Return the board."""
    return frame.dashboard(
        Board.POD,
        "Pod / job",
        "One pod or Slurm job, or several: state over time, who blocks it, its GPUs and memory, and other"
        " explanations.",
        [
            "Now: $pod",
            stat(
                "State",
                "Waiting and violations are from the scheduler, running from the processes on the GPUs. A workload that"
                " runs without a GPU is not seen.",
                f"max({_STATE})",
                mappings=texts(_STATES),
                steps=((None, GREEN), (_WAITS, YELLOW), (_VIOLATED, RED)),
                no_value="not seen",
            ),
            stat(
                "In violation for",
                "How long the longest violation of the workload has lasted.",
                f"max(priority_violation_active_seconds{{{_OWN}}})",
                unit="s",
                steps=BLOCKED_SECONDS,
                no_value="none seen",
            ),
            stat(
                "Waits for",
                "How long the workload has waited for the scheduler.",
                f"max(priority_workload_waiting_seconds{{{_OWN}}})",
                unit="s",
                steps=NEUTRAL,
                no_value="no wait seen",
            ),
            stat(
                "Blocked by",
                "The workload that took the most GPU time while this one waited.",
                f"topk(1, max by (culprit, culprit_service) (priority_violation_culprit_gpu_seconds{{{_OWN}}}))",
                legend="{{culprit_service}} {{culprit}}",
                show="name",
                steps=((None, ORANGE),),
                no_value="nobody seen",
                links=[pod_link(series_label("culprit"))],
            ),
            stat(
                "GPU memory",
                "Memory that its processes hold on GPUs.",
                f"sum(gpu_process_memory_bytes{{{_GPU}}})",
                unit="bytes",
                steps=NEUTRAL,
                no_value="none seen",
            ),
            stat(
                "Memory fragmentation",
                "Of the memory that its allocator holds and does not use: the part that is not in the largest free"
                " block.",
                f"max(1 - gpu_allocator_largest_free_bytes{{{_GPU}}} / (gpu_allocator_free_bytes{{{_GPU}}} > 0))",
                unit="percentunit",
                steps=LOW_RATIO,
                no_value="not reported",
                links=[link("Open fragmentation", board_url(Board.FRAGMENTATION))],
            ),
            state_timeline(
                "What happened",
                "State of each workload over time. A gap means that neither the scheduler nor a GPU knew it.",
                [query(_STATE, "{{workload}}")],
                texts(_STATES),
                height=6,
                links=[pod_link(series_label("workload"))],
            ),
            "Who blocks it",
            timeseries(
                "Violations so far",
                "How long each violation had lasted at each moment.",
                [
                    query(
                        f'max by (workload) (priority_violation_active_seconds{{{_OWN},violation_type="{kind}"}})',
                        f"{{{{workload}}}}: {VIOLATIONS[kind][0].lower()}",
                    )
                    for kind in _LASTING
                ],
                unit="s",
                width=8,
            ),
            table(
                "Blocked by",
                "Less urgent workloads that took GPU time while this one waited, and how strong the case is.",
                [
                    rows(
                        "topk(20, max by (workload, service, culprit, culprit_service, culprit_priority_level, basis)"
                        f" (priority_violation_culprit_gpu_seconds{{{_OWN}}})) / 3600",
                    )
                ],
                {
                    "workload": "Pod or job",
                    "culprit_service": "Blocked by",
                    "culprit": "Its pod or job",
                    "culprit_priority_level": "Its priority",
                    "basis": "Because it",
                    "Value": "GPU-hours taken",
                },
                width=16,
                sort="GPU-hours taken",
                overrides=[
                    priority_column("Its priority"),
                    reason_column(),
                    gauge_column("GPU-hours taken", "suffix: GPU·h", ((None, ORANGE),), decimals=2, min=0),
                    column("Blocked by", links=[service_link(cell("Blocked by"))]),
                    column("Its pod or job", links=[pod_link(cell("Its pod or job"))]),
                ],
            ),
            "Its GPUs",
            timeseries(
                "GPU memory held",
                "Memory of the workload's processes, by GPU; the ten largest.",
                [
                    query(
                        f"topk(10, sum by (workload, node, gpu) (gpu_process_memory_bytes{{{_GPU}}}))",
                        "{{workload}} on {{node}} GPU {{gpu}}",
                    )
                ],
                unit="bytes",
                no_value="not on a GPU, or not reported",
                width=8,
            ),
            timeseries(
                "Use of its GPUs",
                "Share of time in which a kernel ran on the GPUs that it uses, by whichever process.",
                [
                    query(
                        f"max by (node, gpu) (gpu_utilization_ratio{{{CLUSTER_OR_NONE}}} {_ON_ITS_GPUS})",
                        "{{node}} GPU {{gpu}}",
                    )
                ],
                unit="percentunit",
                no_value="not on a GPU, or not reported",
                maximum=1,
                width=8,
            ),
            timeseries(
                "Clocks held down",
                "Reasons that hold down the clocks of the GPUs that it uses; nothing is drawn when there is none.",
                [
                    query(
                        f"max by (node, gpu, reason) (gpu_throttled{{{CLUSTER_OR_NONE}}} {_ON_ITS_GPUS})",
                        "{{node}} GPU {{gpu}}: {{reason}}",
                    )
                ],
                unit="none",
                maximum=1,
                width=8,
                steady=True,
            ),
            timeseries(
                "Allocator: held, free, largest free block",
                "Memory that the caching allocator took from the driver, what of it is free, and the largest block that"
                " is free in one piece: the largest tensor that fits without asking for more.",
                [
                    query(f"topk(5, sum by (workload) (gpu_allocator_reserved_bytes{{{_GPU}}}))", "{{workload}} held"),
                    query(f"topk(5, sum by (workload) (gpu_allocator_free_bytes{{{_GPU}}}))", "{{workload}} free"),
                    query(
                        f"topk(5, max by (workload) (gpu_allocator_largest_free_bytes{{{_GPU}}}))",
                        "{{workload}} largest free",
                    ),
                ],
                unit="bytes",
                no_value="not on a GPU, or not reported",
                width=16,
            ),
            timeseries(
                "Allocator fragmentation",
                "Share of the free memory that is outside the largest free block. Over 50 %, large allocations fail or"
                " stall although there is room.",
                [
                    query(
                        "max by (workload, node, gpu)"
                        f" (1 - gpu_allocator_largest_free_bytes{{{_GPU}}} / (gpu_allocator_free_bytes{{{_GPU}}} > 0))",
                        "{{workload}} on {{node}} GPU {{gpu}}",
                    )
                ],
                unit="percentunit",
                no_value="not on a GPU, or not reported",
                maximum=1,
                width=8,
                steps=((None, "transparent"), (0.5, "orange"), (0.7, "red")),
            ),
            "What else could explain it",
            *foreign.pod_panels(),
            *foreign.service_panels(),
        ],
        variables=[frame.service(), frame.pod()],
    )
