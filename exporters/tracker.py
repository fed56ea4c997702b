"""What a stateless detector cannot know: when a violation began and ended, and what was counted already.

A `Tracker` turns the violations of successive snapshots into counters that never go down and never count anything
twice, across polls and, with `save_state` and `load_state`, across restarts.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from exporters.catalog import METRICS
from exporters.detectors.preemption import ranks_of
from exporters.errors import InvalidInputError
from exporters.families import Distribution, Family, Labels, family, overflow_labels
from exporters.model import EventKind, Snapshot, Violation, ViolationType, Workload, by_id, level_of

STATE_VERSION: Final = 1

#: Starts and events are reported late and with whole seconds; this much of the past is compared id by id.
START_SLACK_SECONDS: Final = 300.0
EVENT_SLACK_SECONDS: Final = 3600.0

_TOTAL: Final = "priority_violation_total"
_SECONDS: Final = "priority_violation_seconds_total"
_DURATION: Final = "priority_violation_duration_seconds"
_WAIT: Final = "priority_workload_wait_seconds"
_PREEMPTIONS: Final = "priority_preemptions_total"
_CURVE_WAIT: Final = "gpu_fragmentation_wait_seconds"
_CURVE_PREEMPTIONS: Final = "gpu_fragmentation_preemptions_total"
_COUNTERS: Final = (_TOTAL, _SECONDS, _PREEMPTIONS, _CURVE_PREEMPTIONS)
_HISTOGRAMS: Final = (_DURATION, _WAIT, _CURVE_WAIT)


class OpenViolation(msgspec.Struct):
    """A violation that is followed: how much of its time is in the counters, and whether it was gone lately."""

    violation: Violation
    counted_until: float
    counted_as: tuple[str, ...] = ()
    missing_since: float | None = None
    observed: bool = False


class Row(msgspec.Struct, array_like=True):
    """One series of a counter: label values, value, when it last grew."""

    labels: tuple[str, ...]
    value: float
    touched: float


class HistogramRow(msgspec.Struct, array_like=True):
    """One series of a histogram."""

    labels: tuple[str, ...]
    counts: tuple[int, ...]
    sum: float
    touched: float


class State(msgspec.Struct):
    """What survives a restart."""

    version: int
    began: float
    last_time: float
    open: list[OpenViolation]
    done: dict[str, tuple[str, float]]
    instants: dict[str, float]
    starts: dict[str, float]
    events: dict[str, float]
    counters: dict[str, list[Row]]
    histograms: dict[str, list[HistogramRow]]
    overflowed: dict[str, int]


@dataclass(slots=True)
class _Counter:
    value: float
    touched: float


@dataclass(slots=True)
class _Histogram:
    data: Distribution
    touched: float


@dataclass(frozen=True, slots=True)
class Start:
    """A workload that started since the update before: its wait in seconds, and its labels."""

    workload: Workload
    wait_seconds: float


class Tracker:
    """Follows violations, starts and preemptions over snapshots of one cluster.

    Args:
        grace_seconds: A violation that a poll misses is kept open this long; if it comes back it never ended. One whose
            victim started or ended closes at once.
        retention_seconds: A series that has not grown for this long is dropped, so that services that are gone do not
            fill the store. Prometheus takes its return as a counter reset.
        count_history: Count starts and events from before the first snapshot too (for recorded snapshots).
        caps: Most label sets by family, where it should differ from the catalogue.
    """

    def __init__(
        self,
        *,
        grace_seconds: float = 60.0,
        retention_seconds: float = 6 * 3600.0,
        count_history: bool = False,
        caps: Mapping[str, int] | None = None,
    ) -> None:
        self._grace = grace_seconds
        self._retention = retention_seconds
        self._history = count_history
        self._caps = dict(caps or {})
        self._began: float | None = None
        self._last = float("-inf")
        self._open: dict[str, OpenViolation] = {}
        self._done: dict[str, tuple[str, float]] = {}
        self._instants: dict[str, float] = {}
        self._starts: dict[str, float] = {}
        self._events: dict[str, float] = {}
        self._counters: dict[str, dict[Labels, _Counter]] = {name: {} for name in _COUNTERS}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {name: {} for name in _HISTOGRAMS}
        self._overflowed: dict[str, int] = {}

    @property
    def active(self) -> list[Violation]:
        """Violations that last, longest first; ``end`` is None. One missing within the grace time is still here."""
        return sorted((item.violation for item in self._open.values()), key=lambda v: (v.start, v.id))

    @property
    def overflowed(self) -> dict[str, int]:
        """How often an increment went to the overflow series, by family."""
        return dict(self._overflowed)

    def update(
        self, snapshot: Snapshot, violations: Iterable[Violation], fragmentation: float | None = None
    ) -> list[Start]:
        """Take in one snapshot and what the detectors found in it; return the starts that it shows for the first time.

        ``fragmentation`` is the cluster's fragmentation ratio now (M2), under which starts and preemptions are filed;
        None when it is not known. A snapshot whose workloads could not be read ends nothing and starts nothing. One
        that is older than the last is ignored.
        """
        now = snapshot.time
        if now < self._last:
            return []
        if self._began is None:
            self._began = float("-inf") if self._history else now
        started: list[Start] = []
        if not snapshot.lacks("workloads"):
            workloads = by_id(snapshot.workloads)
            self._violations(violations, workloads, now, fragmentation)
            started = self._observe_starts(snapshot, fragmentation)
        self._observe_events(snapshot, fragmentation)
        self._last = now
        self._expire(now)
        return started

    def families(self) -> list[Family]:
        """Return the counters and histograms."""
        simple = [
            family(name, [(labels, item.value) for labels, item in rows.items()])
            for name, rows in self._counters.items()
        ]
        return simple + [
            family(name, distributions={labels: item.data for labels, item in rows.items()})
            for name, rows in self._histograms.items()
        ]

    # --- violations

    def _violations(
        self,
        violations: Iterable[Violation],
        workloads: Mapping[str, Workload],
        now: float,
        fragmentation: float | None,
    ) -> None:
        seen: set[str] = set()
        for violation in violations:
            if violation.end is not None:
                self._instant(violation, now, fragmentation)
                continue
            seen.add(violation.id)
            known = self._open.get(violation.id)
            if known is None:
                self._begin(violation, now, fragmentation)
            else:
                known.missing_since = None
                self._grow(known, now)
                known.violation = _merge(known.violation, violation)
        for identity in [identity for identity in self._open if identity not in seen]:
            item = self._open[identity]
            end = _end_of(item.violation, workloads.get(item.violation.victim), now)
            if end is None:
                if item.missing_since is None:
                    item.missing_since = now
                if now - item.missing_since < self._grace:
                    continue
                end = item.missing_since
            self._finish(identity, end, now)
        waiting = {workload.id for workload in workloads.values() if not workload.state.ended}
        self._done = {
            identity: (victim, when)
            for identity, (victim, when) in self._done.items()
            if victim in waiting or now - when < self._grace
        }

    def _begin(self, violation: Violation, now: float, fragmentation: float | None) -> None:
        if violation.id in self._done:
            # The same wait was in violation before: it goes on, and was counted.
            del self._done[violation.id]
            self._open[violation.id] = OpenViolation(violation, counted_until=now, observed=True)
            return
        labels = (*_labels(violation), violation.basis or "")
        item = OpenViolation(violation, counted_until=min(violation.start, now), counted_as=labels)
        self._open[violation.id] = item
        self._count(_TOTAL, labels, 1.0, now)
        self._grow(item, now)
        if violation.type is ViolationType.PREEMPTION_FAILED:
            self._curve("failed", violation.cluster, fragmentation, now)

    def _grow(self, item: OpenViolation, until: float) -> None:
        grown = until - item.counted_until
        if grown > 0:
            self._count(_SECONDS, _labels(item.violation), grown, until)
            item.counted_until = until
        # While it lasts, the series that counted it must not expire.
        row = self._counters[_TOTAL].get(item.counted_as)
        if row is not None:
            row.touched = until

    def _finish(self, identity: str, end: float, now: float) -> None:
        item = self._open.pop(identity)
        violation = item.violation
        end = min(max(end, violation.start), now)
        self._grow(item, end)
        if not item.observed:
            self._observe(_DURATION, _labels(violation), end - violation.start, now)
        self._done[identity] = (violation.victim, now)

    def _instant(self, violation: Violation, now: float, fragmentation: float | None) -> None:
        end = violation.end if violation.end is not None else now
        if violation.id in self._instants or not self._recent(end, EVENT_SLACK_SECONDS):
            return
        self._instants[violation.id] = end
        self._count(_TOTAL, (*_labels(violation), violation.basis or ""), 1.0, now)
        if violation.type is ViolationType.PREEMPTION_FAILED:
            self._curve("failed", violation.cluster, fragmentation, now)

    # --- starts and events

    def _observe_starts(self, snapshot: Snapshot, fragmentation: float | None) -> list[Start]:
        found = []
        for workload in snapshot.workloads:
            began, since = workload.started, workload.waiting_since
            if began is None or since is None or not self._recent(began, START_SLACK_SECONDS):
                continue
            key = f"{workload.id}\0{began!r}"
            if key in self._starts:
                continue
            self._starts[key] = began
            wait = max(0.0, began - since)
            labels = (snapshot.cluster, workload.queue, workload.level)
            self._observe(_WAIT, labels, wait, snapshot.time)
            if fragmentation is not None:
                self._observe(_CURVE_WAIT, (snapshot.cluster, bucket_of(fragmentation)), wait, snapshot.time)
            found.append(Start(workload, wait))
        return found

    def _observe_events(self, snapshot: Snapshot, fragmentation: float | None) -> None:
        workloads: dict[str, Workload] | None = None
        for event in snapshot.events:
            if event.kind is not EventKind.PREEMPTED or event.id in self._events:
                continue
            if not self._recent(event.time, EVENT_SLACK_SECONDS):
                continue
            self._events[event.id] = event.time
            workloads = by_id(snapshot.workloads) if workloads is None else workloads
            rank, by_rank = ranks_of(event, workloads)
            labels = (snapshot.cluster, level_of(by_rank), level_of(rank))
            self._count(_PREEMPTIONS, labels, 1.0, snapshot.time)
            self._curve("succeeded", snapshot.cluster, fragmentation, snapshot.time)

    def _recent(self, time: float, slack: float) -> bool:
        """Whether something at ``time`` may still be uncounted."""
        began = self._began if self._began is not None else time
        return time >= began and (self._history or time > self._last - slack)

    def _curve(self, outcome: str, cluster: str, fragmentation: float | None, now: float) -> None:
        if fragmentation is not None:
            self._count(_CURVE_PREEMPTIONS, (cluster, bucket_of(fragmentation), outcome), 1.0, now)

    # --- series

    def _count(self, name: str, labels: Labels, amount: float, now: float) -> None:
        rows = self._counters[name]
        row = rows.get(labels)
        if row is None:
            labels = self._admit(name, labels, len(rows))
            row = rows.setdefault(labels, _Counter(0.0, now))
        row.value += amount
        row.touched = now

    def _observe(self, name: str, labels: Labels, value: float, now: float) -> None:
        rows = self._histograms[name]
        bounds = METRICS[name].buckets
        row = rows.get(labels)
        if row is None:
            labels = self._admit(name, labels, len(rows))
            row = rows.setdefault(labels, _Histogram(Distribution.empty(bounds), now))
        row.data = row.data.observe(bounds, value)
        row.touched = now

    def _admit(self, name: str, labels: Labels, size: int) -> Labels:
        metric = METRICS[name]
        if size < self._caps.get(name, metric.cap):
            return labels
        self._overflowed[name] = self._overflowed.get(name, 0) + 1
        return overflow_labels(metric)

    def _expire(self, now: float) -> None:
        limit = now - self._retention
        for rows in self._counters.values():
            for labels in [labels for labels, row in rows.items() if row.touched < limit]:
                del rows[labels]
        for histograms in self._histograms.values():
            for labels in [labels for labels, data in histograms.items() if data.touched < limit]:
                del histograms[labels]
        if not self._history:
            self._starts = {k: at for k, at in self._starts.items() if at > self._last - START_SLACK_SECONDS}
            self._events = {k: at for k, at in self._events.items() if at > self._last - EVENT_SLACK_SECONDS}
            self._instants = {k: at for k, at in self._instants.items() if at > self._last - EVENT_SLACK_SECONDS}

    # --- persistence

    def state(self) -> State:
        """Return what `restore` needs to go on from here, with the `MAX_SAVED_CULPRITS` worst of each violation.

        The detectors find those that still run anew, with all that they took.
        """
        return State(
            version=STATE_VERSION,
            began=self._began if self._began is not None else 0.0,
            last_time=self._last,
            open=[_trimmed(item) for item in self._open.values()],
            done=dict(self._done),
            instants=dict(self._instants),
            starts=dict(self._starts),
            events=dict(self._events),
            counters={
                name: [Row(labels, row.value, row.touched) for labels, row in rows.items()]
                for name, rows in self._counters.items()
            },
            histograms={
                name: [HistogramRow(labels, row.data.counts, row.data.sum, row.touched) for labels, row in rows.items()]
                for name, rows in self._histograms.items()
            },
            overflowed=dict(self._overflowed),
        )

    def restore(self, state: State) -> None:
        """Go on from ``state``. Series that the catalogue no longer has, or has with other labels, are dropped."""
        self._began, self._last = state.began, state.last_time
        self._open = {item.violation.id: item for item in state.open}
        self._done, self._instants = dict(state.done), dict(state.instants)
        self._starts, self._events = dict(state.starts), dict(state.events)
        for name, rows in self._counters.items():
            width = len(METRICS[name].labels)
            rows.clear()
            for row in state.counters.get(name, ()):
                if len(row.labels) == width:
                    rows[row.labels] = _Counter(row.value, row.touched)
        for name, histograms in self._histograms.items():
            metric = METRICS[name]
            histograms.clear()
            for line in state.histograms.get(name, ()):
                if len(line.labels) == len(metric.labels) and len(line.counts) == len(metric.buckets) + 1:
                    histograms[line.labels] = _Histogram(Distribution(line.counts, line.sum), line.touched)
        self._overflowed = dict(state.overflowed)

    def save_state(self, path: Path | str) -> None:
        """Write the state to ``path``: all of it or, on any failure, none, and the old file stays.

        Raises:
            OSError: the folder cannot be written to.
        """
        path = Path(path)
        if self._began is None:
            return
        data = msgspec.json.encode(_finite(self.state()))
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise

    def load_state(self, path: Path | str) -> bool:
        """Restore the state from ``path``; return False when there is no such file.

        Raises:
            InvalidInputError: the file is not a state, or of another version.
        """
        path = Path(path)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise InvalidInputError(f"{path} cannot be read: {error.strerror}", cure="check its permissions") from None
        try:
            state = msgspec.json.decode(data, type=State)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInputError(
                f"{path} is not an exporter state: {error}", cure="delete it to begin to count anew"
            ) from None
        if state.version != STATE_VERSION:
            raise InvalidInputError(
                f"{path} has state version {state.version}, not {STATE_VERSION}",
                cure="delete it to begin to count anew",
            )
        self.restore(state)
        return True


def _finite(state: State) -> State:
    """JSON has no infinities: a tracker that counts history began at the beginning of time."""
    state.began = max(state.began, -1e18)
    return state


def bucket_of(fragmentation: float) -> str:
    """Return the lower bound of the 0.1 wide bucket of a fragmentation ratio in [0, 1]: ``0.0`` to ``0.9``."""
    return f"{min(9, max(0, int(fragmentation * 10 + 1e-9))) / 10:.1f}"


def _labels(violation: Violation) -> Labels:
    return (violation.cluster, violation.service, violation.level, violation.type.value)


def _merge(old: Violation, new: Violation) -> Violation:
    """Join two sightings: the first start, the strongest basis, and every culprit with the most that it took."""
    culprits = {culprit.workload: culprit for culprit in old.culprits}
    for culprit in new.culprits:
        before = culprits.get(culprit.workload)
        if before is None or culprit.gpu_seconds >= before.gpu_seconds:
            culprits[culprit.workload] = culprit
    ordered = sorted(culprits.values(), key=lambda culprit: (-culprit.gpu_seconds, culprit.workload))
    basis = max((b for b in (old.basis, new.basis) if b is not None), key=_STRENGTH.__getitem__, default=None)
    return msgspec.structs.replace(new, start=old.start, culprits=tuple(ordered[:MAX_KEPT_CULPRITS]), basis=basis)


def _trimmed(item: OpenViolation) -> OpenViolation:
    violation = item.violation
    if len(violation.culprits) <= MAX_SAVED_CULPRITS:
        return item
    kept = msgspec.structs.replace(violation, culprits=violation.culprits[:MAX_SAVED_CULPRITS])
    return msgspec.structs.replace(item, violation=kept)


#: Culprits written to the state file, per violation.
MAX_SAVED_CULPRITS: Final = 10

#: Culprits remembered over the life of one violation.
MAX_KEPT_CULPRITS: Final = 100

_STRENGTH: Final = {basis: strength for strength, basis in enumerate(("held", "started", "dominated"))}


def _end_of(violation: Violation, victim: Workload | None, now: float) -> float | None:
    """When the violation ended for certain: its victim started or ended. None when only the detector lost it."""
    if victim is None:
        return None if violation.type is ViolationType.QOS_MISMATCH else now
    if violation.type is ViolationType.QOS_MISMATCH:
        return victim.ended if victim.state.ended else None
    if victim.state.ended:
        return victim.ended if victim.ended is not None else now
    if victim.state.holding and victim.started is not None and victim.started >= violation.start:
        return victim.started
    return None
