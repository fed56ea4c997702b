"""The families of a snapshot: violations, waits, queues, adaptive thresholds, fragmentation, policy quality, GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from exporters.collectors._families import FamilyBuilder
from exporters.collectors.devices import device_families
from exporters.detectors import detect
from exporters.exposition import TextCache
from exporters.families import Family, Labels
from exporters.measures import queues
from exporters.measures.adaptive import AdaptiveState, AdaptiveWaits
from exporters.measures.fragmentation import ClusterFragmentation, cluster_fragmentation
from exporters.measures.quality import Quality, QualityWindow
from exporters.model import WHOLE_GPU, NodeState, Snapshot, Violation, level_of
from exporters.placement import ClusterView
from exporters.policy import Policy
from exporters.tracker import Tracker


class ClusterCollector:
    """Turns the successive snapshots of one source into families.

    Call `update` for each snapshot, from one thread; `families` returns what the last one gave, as an immutable tuple
    that another thread may render while the next update runs.

    Args:
        policy: What was promised.
        tracker: Carries identities and counters; a new one when not given.
        caps: Most label sets by family, where it should differ from the catalogue.
        quality_window_seconds: Length of the window of M8.
    """

    def __init__(
        self,
        policy: Policy,
        tracker: Tracker | None = None,
        *,
        caps: Mapping[str, int] | None = None,
        quality_window_seconds: float = 3600.0,
    ) -> None:
        self.policy = policy
        self.tracker = Tracker(caps=caps) if tracker is None else tracker
        self._caps = caps
        self._quality = QualityWindow(quality_window_seconds)
        self._adaptive = AdaptiveWaits()
        self._families: tuple[Family, ...] = ()
        self._dropped: Counter[str] = Counter()
        self._texts = TextCache()

    def update(self, snapshot: Snapshot) -> tuple[Violation, ...]:
        """Take in a snapshot and return the violations that last, longest first."""
        view = ClusterView(snapshot)
        fragmentation = cluster_fragmentation(view) if snapshot.nodes else None
        found = [] if snapshot.lacks("workloads") else detect(snapshot, self.policy)
        starts = self.tracker.update(snapshot, found, fragmentation.ratio if fragmentation else None)
        quality = self._quality.update(snapshot, starts, (violation for violation in found if violation.end is None))
        active = self.tracker.active
        builder = FamilyBuilder(self._caps)
        _violations(builder, active, snapshot.time)
        if not snapshot.lacks("workloads"):
            figures = queues.measure(snapshot)
            _queues(builder, snapshot.cluster, figures)
            waits = (((queue, level), wait) for (_, _, queue, level), wait in figures.waits.items())
            begun = (((start.workload.queue, start.workload.level), start.wait_seconds) for start in starts)
            _adaptive(builder, snapshot.cluster, self._adaptive.update(snapshot.time, begun, waits))
        if fragmentation is not None:
            _fragmentation(builder, snapshot.cluster, fragmentation)
        _nodes(builder, snapshot)
        _quality(builder, snapshot.cluster, self.policy.name, quality)
        devices, dropped = device_families(snapshot.devices, self._caps)
        self._dropped.update(builder.dropped)
        self._dropped.update(dropped)
        overflow = self._dropped + Counter(self.tracker.overflowed)
        builder.plain("prioscope_series_overflow_total", {(name,): float(n) for name, n in overflow.items()})
        counted = (item for item in self.tracker.families() if len(item))
        self._families = self._texts.prepare((*counted, *builder.families, *devices))
        return tuple(active)

    def families(self) -> tuple[Family, ...]:
        """Return the families of the last update; empty before the first."""
        return self._families

    def clear(self) -> None:
        """Withhold all families until the next update, as when the snapshot is too old to serve."""
        self._families = ()


def _violations(builder: FamilyBuilder, active: Sequence[Violation], now: float) -> None:
    counts: dict[Labels, float] = defaultdict(float)
    lasting: dict[Labels, float] = {}
    blame: dict[Labels, float] = {}
    unchecked: dict[Labels, float] = defaultdict(float)
    for item in active:
        basis = item.basis or ""
        kind = item.type.value
        counts[(item.cluster, item.service, item.level, kind, basis)] += 1
        lasting[(item.cluster, item.victim, item.service, item.level, kind, basis)] = item.duration(now)
        for what in {missing.what for missing in item.unchecked}:
            unchecked[(item.cluster, kind, what)] += 1
        for culprit in item.culprits:
            if culprit.basis is not None:
                labels = (
                    item.cluster,
                    item.victim,
                    item.service,
                    item.level,
                    culprit.workload,
                    culprit.service,
                    level_of(culprit.rank),
                    culprit.basis.value,
                )
                blame[labels] = culprit.gpu_seconds
    builder.sum("priority_violations_active", counts)
    builder.top("priority_violation_active_seconds", lasting)
    builder.top("priority_violation_culprit_gpu_seconds", blame)
    builder.sum("priority_violation_unchecked", unchecked)


def _queues(builder: FamilyBuilder, cluster: str, figures: queues.Queues) -> None:
    builder.sum("priority_workloads", {(cluster, *key): float(n) for key, n in figures.states.items()})
    builder.sum("priority_workload_held_gpus", {(cluster, *key): n / WHOLE_GPU for key, n in figures.held.items()})
    builder.sum(
        "priority_workload_requested_gpus", {(cluster, *key): n / WHOLE_GPU for key, n in figures.requested.items()}
    )
    builder.top("priority_workload_oldest_wait_seconds", {(cluster, *key): s for key, s in figures.oldest.items()})
    builder.top("priority_workload_waiting_seconds", {(cluster, *key): s for key, s in figures.waits.items()})
    builder.top("priority_queue_entropy", {(cluster, queue): bits for queue, bits in figures.entropy.items()})


def _adaptive(builder: FamilyBuilder, cluster: str, states: Mapping[queues.Key, AdaptiveState]) -> None:
    known = {(cluster, *key): state for key, state in states.items()}
    builder.top(
        "priority_wait_adaptive_threshold_seconds",
        {key: state.threshold_seconds for key, state in known.items() if state.threshold_seconds is not None},
    )
    builder.top(
        "priority_wait_drift",
        {key: float(state.drifting) for key, state in known.items() if state.drifting is not None},
    )


def _fragmentation(builder: FamilyBuilder, cluster: str, found: ClusterFragmentation) -> None:
    builder.plain("gpu_cluster_capacity_gpus", {(cluster,): found.capacity / WHOLE_GPU})
    builder.plain("gpu_cluster_free_gpus", {(cluster,): found.free / WHOLE_GPU})
    if found.fragmented is not None:
        builder.plain("gpu_cluster_fragmented_gpus", {(cluster,): found.fragmented / WHOLE_GPU})
    if found.ratio is not None:
        builder.plain("gpu_cluster_fragmentation_ratio", {(cluster,): found.ratio})
    builder.plain(
        "gpu_cluster_stranded_gpus",
        {(cluster, str(size)): milli / WHOLE_GPU for size, milli in found.stranded.items()},
    )
    if found.unusable is not None:
        builder.plain("gpu_cluster_unusable_gpus", {(cluster,): found.unusable / WHOLE_GPU})


def _nodes(builder: FamilyBuilder, snapshot: Snapshot) -> None:
    builder.top(
        "gpu_node_up",
        {(snapshot.cluster, n.name, n.state.value): float(n.state is NodeState.UP) for n in snapshot.nodes},
    )


def _quality(builder: FamilyBuilder, cluster: str, policy: str, quality: Quality) -> None:
    for name, value in (
        ("priority_policy_wait_p95_seconds", quality.wait_p95_seconds),
        ("priority_policy_violation_ratio", quality.violation_ratio),
        ("priority_policy_utilization_swing_ratio", quality.utilization_swing),
    ):
        if value is not None:
            builder.plain(name, {(cluster, policy): value})
