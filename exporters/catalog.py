"""Every metric that the exporters emit, once: name, type, unit, help, labels and the requirement it answers.

Collectors may only build families from `METRICS` (`exporters.families.family` refuses any other name or label set), and
``docs/metrics.md`` is generated from it: ``python -m exporters.catalog > docs/metrics.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class MetricType(StrEnum):
    """Prometheus metric types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: As exposed in the text format (a counter with its ``_total``).
        spec: Requirement ids, such as ``V1``.
        cap: Most label sets that the family may have; the rest is summed into one ``overflow`` label set.
        buckets: Upper bounds of a histogram, without ``+Inf``.
        group: Heading in the documentation.
    """

    name: str
    type: MetricType
    unit: str
    help: str
    labels: tuple[str, ...]
    spec: str
    group: str
    cap: int = 2000
    buckets: tuple[float, ...] = ()


#: Waits span from an idle cluster (seconds) to a week in a queue. Every wait SLO of the defaults and of the shipped
#: policies is a bound, so that burn rates are exact there.
WAIT_BUCKETS: Final = (
    1.0, 5.0, 10.0, 15.0, 30.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 14400.0, 43200.0, 86400.0, 604800.0,
)  # fmt: skip
DURATION_BUCKETS: Final = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)

_C, _G, _H = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM

_VIOLATION = ("cluster", "service", "priority_level", "violation_type")
_QUEUE = ("cluster", "queue", "priority_level")
_DEVICE = ("node", "gpu", "uuid")

_VIOLATIONS = "Priority violations"
_WORKLOADS = "Workloads and queues"
_FRAGMENTATION = "GPU fragmentation"
_DEVICES = "GPUs"
_QUALITY = "Policy quality"
_ADAPTIVE = "Adaptive thresholds"
_INCIDENTS = "Incidents (`rca serve`)"
_SERVER = "The incident server itself"
_SELF = "The exporter itself"

_INCIDENT = ("incident",)

_METRICS: Final = (
    # --- violations
    Metric(
        "priority_violation_total",
        _C,
        "violations",
        "Priority violations that began, each counted once, by the basis it had when first seen (empty: no basis)",
        (*_VIOLATION, "basis"),
        "V1-V4, V11",
        _VIOLATIONS,
    ),
    Metric(
        "priority_violation_duration_seconds",
        _H,
        "seconds",
        "How long priority violations lasted, observed when they end",
        _VIOLATION,
        "V1-V4, V11",
        _VIOLATIONS,
        cap=500,
        buckets=DURATION_BUCKETS,
    ),
    Metric(
        "priority_violation_seconds_total",
        _C,
        "seconds",
        "Time that workloads spent in violation, growing while a violation lasts",
        _VIOLATION,
        "V1-V4, V11",
        _VIOLATIONS,
    ),
    Metric(
        "priority_violations_active",
        _G,
        "violations",
        "Priority violations that last now",
        (*_VIOLATION, "basis"),
        "V1-V4, V11",
        _VIOLATIONS,
    ),
    Metric(
        "priority_violation_active_seconds",
        _G,
        "seconds",
        "How long each of the longest violations has lasted; the workloads past the cap are left out, not summed",
        ("cluster", "workload", "service", "priority_level", "violation_type", "basis"),
        "V1-V4, V11, R8",
        _VIOLATIONS,
        cap=200,
    ),
    Metric(
        "priority_violation_culprit_gpu_seconds",
        _G,
        "GPU-seconds",
        "Who blocks whom: GPU-seconds that a less urgent workload took while the victim waited (largest only)",
        (
            "cluster",
            "workload",
            "service",
            "priority_level",
            "culprit",
            "culprit_service",
            "culprit_priority_level",
            "basis",
        ),
        "V1",
        _VIOLATIONS,
        cap=200,
    ),
    Metric(
        "priority_violation_unchecked",
        _G,
        "violations",
        "Active violations for which an eligibility check could not be made, by check",
        ("cluster", "violation_type", "check"),
        "V1",
        _VIOLATIONS,
        cap=200,
    ),
    # --- workloads
    Metric(
        "priority_workloads",
        _G,
        "workloads",
        "Workloads by state",
        (*_QUEUE, "state"),
        "V2",
        _WORKLOADS,
    ),
    Metric(
        "priority_workload_held_gpus",
        _G,
        "GPUs",
        "GPUs held by running workloads (shares of a GPU count as fractions)",
        _QUEUE,
        "V1",
        _WORKLOADS,
    ),
    Metric(
        "priority_workload_requested_gpus",
        _G,
        "GPUs",
        "GPUs that waiting workloads ask for",
        _QUEUE,
        "V2",
        _WORKLOADS,
    ),
    Metric(
        "priority_workload_wait_seconds",
        _H,
        "seconds",
        "Time from submission (or eligibility) to start, observed once per start",
        _QUEUE,
        "V2",
        _WORKLOADS,
        cap=500,
        buckets=WAIT_BUCKETS,
    ),
    Metric(
        "priority_workload_oldest_wait_seconds",
        _G,
        "seconds",
        "Wait so far of the longest-waiting workload; absent when nothing waits",
        _QUEUE,
        "V2",
        _WORKLOADS,
    ),
    Metric(
        "priority_workload_waiting_seconds",
        _G,
        "seconds",
        "Wait so far of each of the longest-waiting workloads; those past the cap are left out, not summed",
        ("cluster", "workload", "service", "queue", "priority_level"),
        "V2, R8",
        _WORKLOADS,
        cap=200,
    ),
    Metric(
        "priority_queue_entropy",
        _G,
        "bits",
        "Shannon entropy of the priority levels in the scheduling window; absent for an empty window",
        ("cluster", "queue"),
        "M5",
        _WORKLOADS,
    ),
    Metric(
        "priority_preemptions_total",
        _C,
        "preemptions",
        "Preemptions by the priority level of the winner and of the workload that was stopped",
        ("cluster", "winner_priority_level", "victim_priority_level"),
        "V4",
        _WORKLOADS,
        cap=100,
    ),
    # --- fragmentation
    Metric(
        "gpu_allocator_reserved_bytes",
        _G,
        "bytes",
        "Memory that a process's caching allocator holds on a GPU",
        (*_DEVICE, "process", "workload"),
        "M1",
        _FRAGMENTATION,
    ),
    Metric(
        "gpu_allocator_free_bytes",
        _G,
        "bytes",
        "Part of the reserved memory that is in no live allocation",
        (*_DEVICE, "process", "workload"),
        "M1",
        _FRAGMENTATION,
    ),
    Metric(
        "gpu_allocator_largest_free_bytes",
        _G,
        "bytes",
        "Largest contiguous free block in the reserved memory",
        (*_DEVICE, "process", "workload"),
        "M1",
        _FRAGMENTATION,
    ),
    Metric(
        "gpu_fragmentation_index",
        _G,
        "ratio",
        "1 - largest contiguous free / total (published definition); absent when nothing is free",
        (*_DEVICE, "scope"),
        "M1",
        _FRAGMENTATION,
        cap=10000,
    ),
    Metric(
        "gpu_fragmentation_ratio",
        _G,
        "ratio",
        "1 - largest contiguous free / total free (external fragmentation); absent when nothing is free",
        (*_DEVICE, "scope"),
        "M1",
        _FRAGMENTATION,
        cap=10000,
    ),
    Metric(
        "gpu_cluster_capacity_gpus",
        _G,
        "GPUs",
        "GPUs on nodes that take work",
        ("cluster",),
        "M2",
        _FRAGMENTATION,
    ),
    Metric(
        "gpu_cluster_free_gpus",
        _G,
        "GPUs",
        "Unallocated GPUs on nodes that take work (shares count as fractions)",
        ("cluster",),
        "M2",
        _FRAGMENTATION,
    ),
    Metric(
        "gpu_cluster_fragmented_gpus",
        _G,
        "GPUs",
        "Expected free GPUs that a workload drawn from the observed demand cannot use (F of FGD, ATC'23)",
        ("cluster",),
        "M2",
        _FRAGMENTATION,
    ),
    Metric(
        "gpu_cluster_fragmentation_ratio",
        _G,
        "ratio",
        "Fragmented over free GPUs (F / free); absent when nothing is free",
        ("cluster",),
        "M2",
        _FRAGMENTATION,
    ),
    Metric(
        "gpu_cluster_stranded_gpus",
        _G,
        "GPUs",
        "Free GPUs left over when as many pieces of this many whole GPUs as possible are placed",
        ("cluster", "size"),
        "M2",
        _FRAGMENTATION,
        cap=100,
    ),
    Metric(
        "gpu_cluster_unusable_gpus",
        _G,
        "GPUs",
        "Free GPUs that no waiting workload can use; absent when nothing waits for a GPU",
        ("cluster",),
        "M2",
        _FRAGMENTATION,
    ),
    Metric(
        "gpu_fragmentation_wait_seconds",
        _H,
        "seconds",
        "Wait of workloads by the cluster's fragmentation ratio when they started (0.1 wide buckets, lower bound)",
        ("cluster", "fragmentation"),
        "M1",
        _FRAGMENTATION,
        cap=20,
        buckets=WAIT_BUCKETS,
    ),
    Metric(
        "gpu_fragmentation_preemptions_total",
        _C,
        "preemptions",
        "Preemptions that were due, by outcome and the cluster's fragmentation ratio then (0.1 wide, lower bound)",
        ("cluster", "fragmentation", "outcome"),
        "M1",
        _FRAGMENTATION,
        cap=40,
    ),
    # --- devices
    Metric(
        "gpu_up",
        _G,
        "bool",
        "1 when the GPU answers, 0 when it is lost, wedged or unreadable (the reason is in the label)",
        (*_DEVICE, "reason"),
        "M9",
        _DEVICES,
        cap=10000,
    ),
    Metric("gpu_info", _G, "info", "Model of the GPU", (*_DEVICE, "model"), "M9", _DEVICES, cap=10000),
    Metric("gpu_memory_total_bytes", _G, "bytes", "Memory of the GPU", _DEVICE, "M1", _DEVICES, cap=10000),
    Metric("gpu_memory_used_bytes", _G, "bytes", "GPU memory in use", _DEVICE, "M1", _DEVICES, cap=10000),
    Metric(
        "gpu_memory_reserved_bytes", _G, "bytes", "GPU memory kept by the driver", _DEVICE, "M1", _DEVICES, cap=10000
    ),
    Metric(
        "gpu_utilization_ratio",
        _G,
        "ratio",
        "Share of the last sample period in which a kernel ran",
        _DEVICE,
        "V11, M8",
        _DEVICES,
        cap=10000,
    ),
    Metric(
        "gpu_memory_utilization_ratio",
        _G,
        "ratio",
        "Share of the last sample period in which GPU memory was read or written",
        _DEVICE,
        "M8",
        _DEVICES,
        cap=10000,
    ),
    Metric("gpu_power_watts", _G, "watts", "Power draw", _DEVICE, "P7", _DEVICES, cap=10000),
    Metric("gpu_power_limit_watts", _G, "watts", "Enforced power limit", _DEVICE, "P7", _DEVICES, cap=10000),
    Metric(
        "gpu_energy_joules_total", _C, "joules", "Energy since the driver loaded", _DEVICE, "P7", _DEVICES, cap=10000
    ),
    Metric("gpu_temperature_celsius", _G, "celsius", "Core temperature", _DEVICE, "V15", _DEVICES, cap=10000),
    Metric("gpu_sm_clock_hertz", _G, "hertz", "Clock of the multiprocessors", _DEVICE, "M8", _DEVICES, cap=10000),
    Metric("gpu_memory_clock_hertz", _G, "hertz", "Clock of the memory", _DEVICE, "M8", _DEVICES, cap=10000),
    Metric(
        "gpu_ecc_errors_total",
        _C,
        "errors",
        "ECC errors since the driver loaded, corrected or uncorrected",
        (*_DEVICE, "kind"),
        "V15",
        _DEVICES,
        cap=20000,
    ),
    Metric(
        "gpu_throttled",
        _G,
        "bool",
        "1 for each reason that holds the clocks down now; absent when there is none",
        (*_DEVICE, "reason"),
        "V15",
        _DEVICES,
        cap=20000,
    ),
    Metric(
        "gpu_xid_errors_total",
        _C,
        "errors",
        "XID errors since the exporter started",
        (*_DEVICE, "xid"),
        "V15",
        _DEVICES,
        cap=10000,
    ),
    Metric(
        "gpu_allocated_ratio",
        _G,
        "ratio",
        "Part of the GPU that the scheduler gave away",
        _DEVICE,
        "M2",
        _DEVICES,
        cap=10000,
    ),
    Metric(
        "gpu_process_memory_bytes",
        _G,
        "bytes",
        "GPU memory of a process, with the pod or job that it belongs to",
        (*_DEVICE, "pid", "process", "workload", "namespace", "pod", "slurm_job"),
        "V1",
        _DEVICES,
        cap=2000,
    ),
    Metric(
        "gpu_mig_instance_info",
        _G,
        "info",
        "A MIG instance: its profile and where it lies in the memory slices of its GPU",
        (*_DEVICE, "mig_instance", "profile", "start", "size"),
        "M1",
        _DEVICES,
        cap=10000,
    ),
    Metric(
        "gpu_mig_memory_used_bytes",
        _G,
        "bytes",
        "Memory in use in a MIG instance",
        (*_DEVICE, "mig_instance", "profile"),
        "M1",
        _DEVICES,
        cap=10000,
    ),
    Metric(
        "gpu_mig_memory_total_bytes",
        _G,
        "bytes",
        "Memory of a MIG instance",
        (*_DEVICE, "mig_instance", "profile"),
        "M1",
        _DEVICES,
        cap=10000,
    ),
    Metric(
        "gpu_node_up",
        _G,
        "bool",
        "1 when the node takes new work, 0 when it is down or draining (the state is in the label)",
        ("cluster", "node", "state"),
        "V1",
        _DEVICES,
        cap=10000,
    ),
    # --- quality
    Metric(
        "priority_policy_wait_p95_seconds",
        _G,
        "seconds",
        "95th percentile of the waits of workloads started in the window; absent when none started",
        ("cluster", "policy"),
        "M8",
        _QUALITY,
    ),
    Metric(
        "priority_policy_violation_ratio",
        _G,
        "ratio",
        "Share of the workloads seen waiting in the window that were in violation; absent when none waited",
        ("cluster", "policy"),
        "M8",
        _QUALITY,
    ),
    Metric(
        "priority_policy_utilization_swing_ratio",
        _G,
        "ratio",
        "Half the range of mean GPU utilisation in the window over its mean; absent without utilisation",
        ("cluster", "policy"),
        "M8",
        _QUALITY,
    ),
    # --- adaptive thresholds
    Metric(
        "priority_wait_adaptive_threshold_seconds",
        _G,
        "seconds",
        "Adaptive wait threshold: P99 x (1 + 0.3 x std / mean) of recent waits, smoothed; absent before enough waits",
        _QUEUE,
        "P9",
        _ADAPTIVE,
        cap=500,
    ),
    Metric(
        "priority_wait_drift",
        _G,
        "bool",
        "1 while recent waits drift away from those that the threshold was learned on; absent before enough waits",
        _QUEUE,
        "P9",
        _ADAPTIVE,
        cap=500,
    ),
    # --- incidents, published by `rca serve`
    Metric(
        "rca_incident_info",
        _G,
        "info",
        "An incident: its victim, the first cause that was found (empty: none) and how far the explanation came",
        (*_INCIDENT, "cluster", "victim", "victim_metric", "cause", "mechanism", "verdict"),
        "R7",
        _INCIDENTS,
        cap=100,
    ),
    Metric(
        "rca_incident_start_timestamp_seconds",
        _G,
        "seconds",
        "When the incident began, as Unix time",
        _INCIDENT,
        "R7",
        _INCIDENTS,
        cap=100,
    ),
    Metric(
        "rca_incident_confidence_ratio",
        _G,
        "ratio",
        "Calibrated confidence in the first cause",
        _INCIDENT,
        "R2",
        _INCIDENTS,
        cap=100,
    ),
    Metric(
        "rca_incident_risk_ratio",
        _G,
        "ratio",
        "Risk score: 0.4 violation rate + 0.3 resource sensitivity + 0.3 business impact; absent where a part is",
        (*_INCIDENT, "band"),
        "M6",
        _INCIDENTS,
        cap=100,
    ),
    Metric(
        "rca_incident_node_score_ratio",
        _G,
        "ratio",
        "Probability that the node is the root cause (candidates, the path and their neighbours; largest first)",
        (*_INCIDENT, "node", "kind", "role"),
        "R2",
        _INCIDENTS,
        cap=1000,
    ),
    Metric(
        "rca_incident_edge_probability_ratio",
        _G,
        "ratio",
        "Probability that the fault went along this edge, from the node that suffers it to the node that it came from",
        (*_INCIDENT, "source", "target", "relation"),
        "R2",
        _INCIDENTS,
        cap=2000,
    ),
    Metric(
        "rca_incident_attribution_ratio",
        _G,
        "ratio",
        "Share of the victim's value that goes when this cause is taken away, by engine (mechanism, replay)",
        (*_INCIDENT, "cause", "engine"),
        "R4",
        _INCIDENTS,
        cap=500,
    ),
    Metric(
        "rca_incident_attribution_lower_ratio",
        _G,
        "ratio",
        "Lower end of the 95 % interval of the attribution",
        (*_INCIDENT, "cause", "engine"),
        "R4",
        _INCIDENTS,
        cap=500,
    ),
    Metric(
        "rca_incident_attribution_upper_ratio",
        _G,
        "ratio",
        "Upper end of the 95 % interval of the attribution",
        (*_INCIDENT, "cause", "engine"),
        "R4",
        _INCIDENTS,
        cap=500,
    ),
    # --- the incident server itself
    Metric("rca_server_build_info", _G, "info", "Version of the server", ("version", "python", "store"), "M9", _SERVER),
    Metric("rca_server_incidents", _G, "incidents", "Stored incidents by state", ("state",), "P10", _SERVER),
    Metric(
        "rca_server_alerts_total",
        _C,
        "alerts",
        "Alerts received, by outcome (accepted, repeated, resolved, ignored, refused)",
        ("outcome",),
        "P10",
        _SERVER,
    ),
    Metric("rca_server_queue_length", _G, "incidents", "Incidents that wait to be explained", (), "P10", _SERVER),
    Metric(
        "rca_server_queue_capacity",
        _G,
        "incidents",
        "Waiting incidents past which the webhook answers 503, so that Alertmanager tries again",
        (),
        "P10",
        _SERVER,
    ),
    Metric(
        "rca_server_failures_total",
        _C,
        "failures",
        "Attempts that failed, by stage (capture, explain, store, publish)",
        ("stage",),
        "P10",
        _SERVER,
    ),
    Metric(
        "rca_server_stage_duration_seconds",
        _H,
        "seconds",
        "How long a stage (capture, explain, publish) took",
        ("stage",),
        "M9",
        _SERVER,
        buckets=(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
    ),
    Metric(
        "rca_server_explanation_delay_seconds",
        _H,
        "seconds",
        "Time from the start of an alert to its stored explanation",
        (),
        "M9",
        _SERVER,
        buckets=(1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0),
    ),
    Metric(
        "rca_server_last_success_timestamp_seconds",
        _G,
        "seconds",
        "When an incident was last explained, as Unix time; absent before the first",
        (),
        "M9",
        _SERVER,
    ),
    # --- self
    Metric(
        "prioscope_exporter_build_info",
        _G,
        "info",
        "Version of the exporter",
        ("version", "python", "source"),
        "M9",
        _SELF,
    ),
    Metric("prioscope_source_up", _G, "bool", "1 when the last poll gave a snapshot", ("source",), "M9", _SELF),
    Metric(
        "prioscope_snapshot_age_seconds",
        _G,
        "seconds",
        "Age of the snapshot that is served; absent before the first",
        ("source",),
        "M9",
        _SELF,
    ),
    Metric(
        "prioscope_snapshot_stale",
        _G,
        "bool",
        "1 when the snapshot passed its maximum age, so that its series are withheld",
        ("source",),
        "M9",
        _SELF,
    ),
    Metric("prioscope_polls_total", _C, "polls", "Polls of the source", ("source",), "M9", _SELF),
    Metric(
        "prioscope_poll_errors_total",
        _C,
        "errors",
        "Polls that failed, by cause",
        ("source", "cause"),
        "M9",
        _SELF,
        cap=100,
    ),
    Metric(
        "prioscope_poll_duration_seconds",
        _H,
        "seconds",
        "How long a poll took",
        ("source",),
        "M9",
        _SELF,
        buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    ),
    Metric(
        "prioscope_source_unread",
        _G,
        "items",
        "What the source could not read in the last poll, by part and reason",
        ("source", "what", "why"),
        "M9",
        _SELF,
        cap=100,
    ),
    Metric(
        "prioscope_series_overflow_total",
        _C,
        "series",
        "Samples that went to the overflow series, or were left out, because a family reached its cap",
        ("family",),
        "M9",
        _SELF,
        cap=200,
    ),
    Metric(
        "prioscope_scrape_duration_seconds",
        _H,
        "seconds",
        "How long it took to render an exposition",
        (),
        "M9",
        _SELF,
        buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
    ),
)

METRICS: Final[dict[str, Metric]] = {metric.name: metric for metric in _METRICS}

_INTRODUCTION = """\
# Metrics

<!-- Generated by `python -m exporters.catalog > docs/metrics.md`. Do not edit. -->

`priority_level` is `P0` (most urgent) to `P3`, or `unknown` when the source gives no priority. `violation_type` is one
of {types}. `basis` says how strong the case for an inversion is: `held` (a less urgent workload held what the victim
is eligible for), `started` (it started after the victim began to wait), `dominated` (what it got would by itself have
fitted the victim's whole demand); other violation types leave it empty.

A family has at most its *cap* of label sets. Counters, histograms and sums past it go to one series whose labels are
`overflow`; per-workload gauges keep the largest values and leave the rest out. Both are counted in
`prioscope_series_overflow_total`. A value that is not known is absent, never 0.

A recorded snapshot stream (the File source) is JSON Lines: one `exporters.model.Snapshot` per line, fields at their
default left out, times in Unix seconds, GPUs and CPUs in thousandths, memory in bytes.
"""


def markdown() -> str:
    """Return the content of ``docs/metrics.md``."""
    from exporters.model import ViolationType

    types = ", ".join(f"`{kind}`" for kind in ViolationType)
    parts = [_INTRODUCTION.format(types=types)]
    for group in dict.fromkeys(metric.group for metric in _METRICS):
        parts.append(
            f"\n## {group}\n\n| metric | type | unit | labels | cap | spec | meaning |\n|---|---|---|---|---|---|---|\n"
        )
        for metric in _METRICS:
            if metric.group == group:
                labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
                parts.append(
                    f"| `{metric.name}` | {metric.type} | {metric.unit} | {labels} | {metric.cap:,} "
                    f"| {metric.spec} | {metric.help} |\n"
                )
    histograms = [metric for metric in _METRICS if metric.type is MetricType.HISTOGRAM]
    parts.append("\n## Histogram buckets\n\n| metric | upper bounds |\n|---|---|\n")
    parts.extend(f"| `{m.name}` | {', '.join(f'{bound:g}' for bound in m.buckets)}, +Inf |\n" for m in histograms)
    return "".join(parts)


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
