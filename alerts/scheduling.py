"""Alerts on broken promises and on queues: V1 to V4, V11, M1, M2, M5, M8, P9."""

from __future__ import annotations

from typing import Final

from alerts.model import Alert, Group, Scope, Severity, grown, matching, other_than
from exporters.boards import Board
from exporters.measures.entropy import Band
from exporters.model import ViolationType, WorkloadState

#: States in which the scheduler could start a workload.
WAITING: Final = matching("state", *(state.value for state in WorkloadState if state.waiting))

_ONE: Final = ("cluster", "service", "priority_level")
_VICTIM: Final = ("cluster", "workload", "service", "priority_level")
_POD: Final = {"cluster": "cluster", "service": "service", "pod": "workload"}
_SERVICE: Final = {"cluster": "cluster", "service": "service", "priority": "priority_level"}
_WAIT: Final = "queue_wait_seconds"
_WHO: Final = "{{ $labels.workload }} of {{ $labels.service }} ({{ $labels.priority_level }}, {{ $labels.cluster }})"

#: From here on a difference to the learned waits is worth a look; below, any wait is short.
ADAPTIVE_FLOOR_SECONDS: Final = 60


def violations(scope: Scope) -> Group:
    """Return the alerts on priority violations. Each names the service's longest-suffering workload as the victim."""
    return Group(
        "prioscope-violations",
        (
            Alert(
                "PrioscopeUrgentPriorityInversion",
                _longest(scope, ViolationType.INVERSION, "basis", matching("priority_level", "P0")) + " > 0",
                Severity.CRITICAL,
                (*_VICTIM, "basis"),
                "Work of the most urgent level waits while less urgent work holds its resources",
                f"{_WHO} has been past its wait SLO for {{{{ $value | humanizeDuration }}}} while less urgent"
                " work holds what"
                " it needs (basis: {{ $labels.basis }}).",
                Board.POD,
                _POD,
                "V1",
                capture=True,
                metric=_WAIT,
            ),
            Alert(
                "PrioscopePriorityInversion",
                _longest(scope, ViolationType.INVERSION, "basis", other_than("priority_level", "P0")) + " > 0",
                Severity.WARNING,
                (*_VICTIM, "basis"),
                "A workload waits while less urgent work holds its resources",
                f"{_WHO} has been past its wait SLO for {{{{ $value | humanizeDuration }}}} while less urgent"
                " work holds what"
                " it needs (basis: {{ $labels.basis }}).",
                Board.POD,
                _POD,
                "V1",
                hold="1m",
                capture=True,
                metric=_WAIT,
            ),
            Alert(
                "PrioscopeSchedulingDelay",
                _longest(scope, ViolationType.SCHEDULING_DELAY) + " > 0",
                Severity.WARNING,
                _VICTIM,
                "A workload waits longer than its wait SLO",
                f"{_WHO} has been past its wait SLO for {{{{ $value | humanizeDuration }}}}.",
                Board.POD,
                _POD,
                "V2",
                hold="5m",
                capture=True,
                metric=_WAIT,
            ),
            Alert(
                "PrioscopeFragmentationBlocked",
                _longest(scope, ViolationType.FRAGMENTATION_BLOCKED) + " > 0",
                Severity.WARNING,
                _VICTIM,
                "Enough GPUs are free in total, but no placement fits a workload that waits",
                f"{_WHO} has been past its wait SLO for {{{{ $value | humanizeDuration }}}}; what is free would"
                " be enough for"
                " it, and is scattered.",
                Board.FRAGMENTATION,
                {"cluster": "cluster"},
                "V3",
                hold="2m",
                capture=True,
                metric=_WAIT,
            ),
            Alert(
                "PrioscopePreemptionFailed",
                _longest(scope, ViolationType.PREEMPTION_FAILED) + " > 0",
                Severity.WARNING,
                _VICTIM,
                "A preemption was due and did not happen in time",
                f"{_WHO} should have preempted less urgent work: the deadline passed"
                " {{ $value | humanizeDuration }} ago.",
                Board.POD,
                _POD,
                "V4",
                capture=True,
                metric=_WAIT,
            ),
            Alert(
                "PrioscopeWrongWayPreemption",
                f"sum by ({', '.join(_ONE)}) ("
                + grown(
                    scope,
                    "priority_violation_total",
                    "15m",
                    "prioscope_snapshot_age_seconds",
                    violation_type=ViolationType.WRONG_WAY_PREEMPTION.value,
                )
                + ") > 0",
                Severity.WARNING,
                _ONE,
                "Less urgent work preempted more urgent work",
                "{{ $labels.service }} ({{ $labels.priority_level }}, {{ $labels.cluster }}) was preempted by"
                " less urgent"
                " work (count in 15 minutes: {{ $value | humanize }}).",
                Board.SERVICE,
                _SERVICE,
                "V4",
                capture=True,
            ),
            Alert(
                "PrioscopeQosMismatch",
                f"sum by ({', '.join(_ONE)}) ("
                + scope("priority_violations_active", violation_type=ViolationType.QOS_MISMATCH.value)
                + ") > 0",
                Severity.INFO,
                _ONE,
                "Workloads contradict the task class that they declare",
                "{{ $value }} workloads of {{ $labels.service }} ({{ $labels.priority_level }}, {{ $labels.cluster }})"
                " contradict their declared task class.",
                Board.SERVICE,
                _SERVICE,
                "V11",
                hold="15m",
            ),
        ),
    )


def _longest(scope: Scope, kind: ViolationType, extra: str = "", *matchers: str) -> str:
    """Return the violation that has lasted longest, of each service and level: one alert, not one a workload."""
    labels = ", ".join((*_VICTIM, extra) if extra else _VICTIM)
    selector = scope("priority_violation_active_seconds", *matchers, violation_type=kind.value)
    return f"topk by ({', '.join(_ONE)}) (1, max by ({labels}) ({selector}))"


def queues(scope: Scope) -> Group:
    """Return the alerts on queues, fragmentation of the cluster, adaptive thresholds and the policy's quality."""
    queue = "cluster, queue, priority_level"
    waiting = scope("priority_workloads", WAITING)
    preempted = scope("gpu_fragmentation_preemptions_total", window="1h")
    failed = scope("gpu_fragmentation_preemptions_total", window="1h", outcome="failed")
    threshold = f"max by ({queue}) ({scope('priority_wait_adaptive_threshold_seconds')})"
    waits = f"max by (cluster, workload, service, queue, priority_level) ({scope('priority_workload_waiting_seconds')})"
    return Group(
        "prioscope-queues",
        (
            Alert(
                "PrioscopeWaitAboveAdaptiveThreshold",
                f"topk by ({queue}) (1, {waits} > on ({queue}) group_left () {threshold}) > {ADAPTIVE_FLOOR_SECONDS}",
                Severity.WARNING,
                ("cluster", "workload", "service", "queue", "priority_level"),
                "A workload waits longer than waits of its queue and level lately were",
                "{{ $labels.workload }} of {{ $labels.service }} waits {{ $value | humanizeDuration }} in queue"
                " {{ $labels.queue }} ({{ $labels.priority_level }}, {{ $labels.cluster }}), above the adaptive"
                " threshold.",
                Board.SCHEDULER,
                {"cluster": "cluster", "queue": "queue", "priority": "priority_level"},
                "P9",
                hold="2m",
                capture=True,
                metric=_WAIT,
            ),
            Alert(
                "PrioscopeWaitDrift",
                f"max by ({queue}) ({scope('priority_wait_drift')}) == 1",
                Severity.INFO,
                ("cluster", "queue", "priority_level"),
                "Waits drift away from those that the adaptive threshold was learned on",
                "Waits in queue {{ $labels.queue }} ({{ $labels.priority_level }}, {{ $labels.cluster }}) have a"
                " new level;"
                " the adaptive threshold follows.",
                Board.SCHEDULER,
                {"cluster": "cluster", "queue": "queue", "priority": "priority_level"},
                "P9",
                hold="5m",
            ),
            Alert(
                "PrioscopePriorityEntropySkewed",
                f"max by (cluster, queue) ({scope('priority_queue_entropy')}) < 0.8"
                f" and on (cluster, queue) sum by (cluster, queue) ({waiting}) >= 10"
                f" and on (cluster, queue) count by (cluster, queue) (sum by ({queue}) ({waiting}) > 0) >= 2",
                Severity.INFO,
                ("cluster", "queue"),
                f"Nearly all that waits in a queue has one priority level (band {Band.SKEWED.value})",
                "The priority entropy of queue {{ $labels.queue }} ({{ $labels.cluster }}) is"
                ' {{ $value | printf "%.2f" }} bits.',
                Board.SCHEDULER,
                {"cluster": "cluster", "queue": "queue"},
                "M5",
                hold="30m",
            ),
            Alert(
                "PrioscopePreemptionStorm",
                f"sum by (cluster) (increase({scope('priority_preemptions_total', window='15m')})) >= 10"
                f" and on (cluster) sum by (cluster) (increase({scope('priority_preemptions_total', window='15m')}))"
                f" > 0.1 * sum by (cluster) ({scope('priority_workloads', state='running')})",
                Severity.WARNING,
                ("cluster",),
                "Work is preempted so often that it hardly runs",
                "{{ $value | humanize }} preemptions in 15 minutes in {{ $labels.cluster }}, more than a tenth of what"
                " runs.",
                Board.SCHEDULER,
                {"cluster": "cluster"},
                "V4",
                hold="5m",
            ),
            Alert(
                "PrioscopePreemptionsMostlyFail",
                f"sum by (cluster) (increase({failed})) / sum by (cluster) (increase({preempted})) > 0.5"
                f" and on (cluster) sum by (cluster) (increase({preempted})) >= 5",
                Severity.WARNING,
                ("cluster",),
                "More than half of the preemptions that were due failed",
                "{{ $value | humanizePercentage }} of the preemptions that were due in the last hour failed in"
                " {{ $labels.cluster }}.",
                Board.FRAGMENTATION,
                {"cluster": "cluster"},
                "M1, V4",
                hold="5m",
            ),
            Alert(
                "PrioscopeGpusStranded",
                f"max by (cluster) ({scope('gpu_cluster_unusable_gpus')}) >= 1"
                f" and on (cluster) max by (cluster) ({scope('gpu_cluster_unusable_gpus')})"
                f" > 0.5 * max by (cluster) ({scope('gpu_cluster_free_gpus')})",
                Severity.WARNING,
                ("cluster",),
                "Most of the free GPUs fit nothing that waits",
                "{{ $value | humanize }} free GPUs of {{ $labels.cluster }}, more than half, can be used by"
                " nothing that"
                " waits.",
                Board.FRAGMENTATION,
                {"cluster": "cluster"},
                "M2",
                hold="15m",
            ),
            Alert(
                "PrioscopeClusterFragmented",
                f"max by (cluster) ({scope('gpu_cluster_fragmentation_ratio')}) > 0.5"
                f" and on (cluster) max by (cluster) ({scope('gpu_cluster_free_gpus')}) >= 4",
                Severity.INFO,
                ("cluster",),
                "A workload like those seen before could use less than half of the free GPUs",
                "The fragmentation ratio of {{ $labels.cluster }} is {{ $value | humanizePercentage }}.",
                Board.FRAGMENTATION,
                {"cluster": "cluster"},
                "M2",
                hold="30m",
            ),
            Alert(
                "PrioscopePolicyViolationRatioHigh",
                f"max by (cluster, policy) ({scope('priority_policy_violation_ratio')}) > 0.128",
                Severity.WARNING,
                ("cluster", "policy"),
                "The policy is violated for more of the waiting work than memory reservation would allow",
                "{{ $value | humanizePercentage }} of the work seen waiting in {{ $labels.cluster }} was in"
                " violation of"
                " policy {{ $labels.policy }}.",
                Board.FLEET,
                {"cluster": "cluster"},
                "M8",
                hold="30m",
            ),
            Alert(
                "PrioscopeUtilizationSwing",
                f"max by (cluster, policy) ({scope('priority_policy_utilization_swing_ratio')}) > 0.42",
                Severity.INFO,
                ("cluster", "policy"),
                "GPU utilisation swings as widely as under static weights",
                "GPU utilisation of {{ $labels.cluster }} swings by ±{{ $value | humanizePercentage }} under policy"
                " {{ $labels.policy }}.",
                Board.FLEET,
                {"cluster": "cluster"},
                "M8",
                hold="1h",
            ),
        ),
    )
