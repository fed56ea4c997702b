"""An incident from a recording of a scheduler, with no Prometheus: what `rca exporter record` wrote goes through the
exporter's own detectors, and the capture asks the metrics that come out what it would ask a Prometheus that had scraped
them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from exporters.catalog import METRICS
from exporters.collectors import ClusterCollector
from exporters.families import Family, Labels, family
from exporters.model import Snapshot, Violation, ViolationType
from exporters.policy import Policy
from exporters.sources.base import EndOfStreamError
from exporters.sources.file import FileSource
from rca.errors import InvalidInputError, NotFoundError
from rca.incident import Incident
from rca.telemetry.prometheus.answers import Answer, Failure, QueryError, Series
from rca.telemetry.prometheus.capture import captured
from rca.telemetry.prometheus.config import CaptureConfig
from rca.telemetry.request import CaptureRequest

#: As long as Prometheus shows the last sample of a series (``--query.lookback-delta``), in seconds.
LOOKBACK_SECONDS: Final = 300.0
_UP: Final = "prioscope_source_up"
_INFINITY: Final = float("inf")
_FOLDS: Final[Mapping[str, Callable[[list[float]], float]]] = {"max": max, "min": min, "sum": sum}


@dataclass
class Scrapes:
    """What a Prometheus would hold that had scraped the exporter at each of ``times``, in memory.

    It evaluates what the capture asks of exporters, ``max|min|sum by (labels) (selector)``, and refuses any other
    expression. A series that is missing from the newest scrape has ended, as in Prometheus.
    """

    times: list[float] = field(default_factory=list)
    #: By name of the metric, then by scrape: label values and value.
    samples: dict[str, dict[int, list[tuple[Labels, float]]]] = field(default_factory=dict)

    def add(self, time: float, families: Iterable[Family]) -> None:
        """Add one scrape; histograms, which no capture asks for, are left out."""
        self.times.append(time)
        for item in families:
            rows = [(labels, float(value)) for labels, value in item.samples]
            if rows:
                self.samples.setdefault(item.metric.name, {})[len(self.times) - 1] = rows

    async def names(self, pattern: str, start: float, end: float) -> frozenset[str]:
        """Names of the metrics that match ``pattern`` and have a sample from ``start`` to ``end``."""
        wanted = re.compile(pattern)
        return frozenset(
            name
            for name, scrapes in self.samples.items()
            if wanted.fullmatch(name) and any(start <= self.times[at] <= end for at in scrapes)
        )

    async def range(self, query: str, start: float, end: float, step: float) -> Answer:
        """Evaluate ``query`` each ``step`` seconds from ``start`` to ``end``.

        Raises:
            QueryError: it is not an aggregation of a plain selector.
        """
        fold, by, name, matches = _plan(query)
        have, labels_of = self.samples.get(name, {}), METRICS[name].labels if name in METRICS else ()
        found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        for index in range(int((end - start) / step + 1e-9) + 1):
            now = start + index * step
            at = bisect_right(self.times, now + 1e-6) - 1
            if at < 0 or now - self.times[at] > LOOKBACK_SECONDS:
                continue
            groups: dict[tuple[str, ...], list[float]] = {}
            for values, value in have.get(at, ()):
                labels = dict(zip(labels_of, values, strict=True))
                if all(match(labels.get(label, "")) for label, match in matches):
                    groups.setdefault(tuple(labels.get(label, "") for label in by), []).append(value)
            for key, numbers in groups.items():
                found.setdefault(key, []).append((now, fold(numbers)))
        return Answer(
            tuple(
                Series({name: value for name, value in zip(by, key, strict=True) if value}, *np.array(points).T)
                for key, points in sorted(found.items())
            )
        )


_Matchers = list[tuple[str, Callable[[str], bool]]]


def _plan(query: str) -> tuple[Callable[[list[float]], float], tuple[str, ...], str, _Matchers]:
    """Take ``fold by (labels) (name{matchers})`` apart."""
    import promql_parser as promql

    try:
        tree = promql.parse(query)
    except ValueError as error:
        raise QueryError(Failure.QUERY, f"{error}") from None
    selector = getattr(tree, "expr", None)
    fold = _FOLDS.get(str(getattr(tree, "op", "")))
    modifier = getattr(tree, "modifier", None)
    if (
        fold is None
        or not isinstance(selector, promql.VectorSelector)
        or selector.name is None
        or selector.offset is not None
        or selector.at is not None
        or (modifier is not None and modifier.type != promql.AggModifierType.By)
    ):
        raise QueryError(Failure.QUERY, "a recording answers only max, min and sum by labels")
    matchers = []
    for matcher in selector.matchers.matchers:
        matchers.append((matcher.name, _test(matcher.op, matcher.value)))
    return fold, tuple(modifier.labels if modifier is not None else ()), selector.name, matchers


def _test(op: object, value: str) -> Callable[[str], bool]:
    import promql_parser as promql

    if op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        return lambda text: (text == value) == (op == promql.MatchOp.Equal)
    pattern = re.compile(value)
    return lambda text: (pattern.fullmatch(text) is not None) == (op == promql.MatchOp.Re)


@dataclass(frozen=True)
class Suspect:
    """One violation of a recording. ``violation`` is as it was last seen; ``end`` is None while it lasted."""

    violation: Violation
    end: float | None
    seconds: float


def snapshots(path: Path) -> Iterator[Snapshot]:
    """Yield the snapshots of a recording, up to where a crash cut it off.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: a whole line is not a snapshot.
    """
    with contextlib.closing(FileSource(path)) as source, contextlib.suppress(EndOfStreamError):
        while True:
            yield source.poll()


@dataclass(frozen=True)
class Overview:
    """What a recording holds: the times of its snapshots (Unix seconds), and every violation, worst first.

    Worst is the most urgent victim, of these an inversion, of these the longest.
    """

    times: tuple[float, ...]
    violations: tuple[Suspect, ...]

    @property
    def step(self) -> float:
        """Seconds between two snapshots, as the median; at least 1."""
        gaps = [later - earlier for earlier, later in pairwise(self.times)]
        return max(1.0, float(round(statistics.median(gaps)))) if gaps else 15.0


def overview(path: Path, policy: Policy) -> Overview:
    """Play a recording through the detectors.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: a line is not a snapshot, or is older than the one before it.
    """
    collector = ClusterCollector(policy)
    times: list[float] = []
    last: dict[str, tuple[Violation, float]] = {}
    lasting: set[str] = set()
    for snapshot in snapshots(path):
        if times and snapshot.time <= times[-1]:
            raise InvalidInputError(
                f"{path}: snapshot {len(times) + 1} is not later than the one before it",
                cure="give one recording at a time, in the order of its times",
            )
        times.append(snapshot.time)
        active = collector.update(snapshot)
        lasting = {violation.id for violation in active}
        last.update((violation.id, (violation, snapshot.time)) for violation in active)
    found = sorted(
        (
            Suspect(violation, None if violation.id in lasting else seen, violation.duration(seen))
            for violation, seen in last.values()
        ),
        key=lambda item: (
            _INFINITY if item.violation.rank is None else item.violation.rank,
            item.violation.type is not ViolationType.INVERSION,
            -item.seconds,
            item.violation.victim,
        ),
    )
    return Overview(tuple(times), tuple(found))


def scrapes(snapshots: Iterable[Snapshot], policy: Policy, since: float = 0.0) -> tuple[Scrapes, tuple[Family, ...]]:
    """Play ``snapshots`` through the exporter; return what was scraped from ``since`` on, and the last scrape.

    Identities and counters run from the first snapshot on, whatever ``since`` is.
    """
    collector, kept = ClusterCollector(policy), Scrapes()
    last: tuple[Family, ...] = ()
    for snapshot in snapshots:
        collector.update(snapshot)
        up: dict[Labels, float] = {(snapshot.source,): 1.0}
        last = (*collector.families(), family(_UP, up))
        if snapshot.time >= since:
            kept.add(snapshot.time, last)
    return kept, last


def capture_recording(
    path: Path,
    policy: Policy,
    *,
    victim: str = "",
    onset: datetime | None = None,
    end: datetime | None = None,
    incident: str = "",
    matchers: str = "",
) -> Incident:
    """Return the incident of ``victim``, or of the worst violation, in a recording.

    Args:
        path: JSON Lines of snapshots, as `rca exporter record` writes them; ``.gz`` is compressed.
        policy: what was promised: which waits are violations.
        victim: id of the workload that waited; "": the most urgent and longest violation.
        onset: when its symptom began; by default when its first violation did.
        end: end of the incident; by default the end of the violation, or of the recording.
        incident: identity of the incident; by default the name of the file and the victim.

    Raises:
        NotFoundError: no such file, or no violation of ``victim`` and no ``onset`` either.
        InvalidInputError: a line is not a snapshot, or the times contradict each other.
    """
    played = overview(path, policy)
    times, step = played.times, played.step
    if len(times) < 2:
        raise InvalidInputError(f"{path} has fewer than two snapshots", cure="record for longer")
    chosen = _chosen(path, played.violations, victim, onset)
    begin = onset.timestamp() if onset is not None else chosen[0].violation.start
    if not times[0] < begin <= times[-1]:
        raise InvalidInputError(
            f"{path} has nothing before and after {datetime.fromtimestamp(begin, UTC):%Y-%m-%d %H:%M:%S} UTC",
            cure=f"choose a time after {datetime.fromtimestamp(times[0], UTC):%Y-%m-%d %H:%M:%S} UTC and up to "
            f"{datetime.fromtimestamp(times[-1], UTC):%Y-%m-%d %H:%M:%S} UTC",
        )
    stop = times[-1] if end is None else end.timestamp()
    if end is None and chosen and all(item.end is not None for item in chosen):
        stop = max(item.end for item in chosen if item.end is not None)
    name = victim or chosen[0].violation.victim
    config = CaptureConfig(
        prometheus_url=None,
        step_seconds=step,
        settle_seconds=0.0,
        history=False,
        matchers=matchers,
        baseline_seconds=max(step, min(3600.0, begin - times[0])),
    )
    held, _ = scrapes(snapshots(path), policy, begin - config.most_window_seconds - config.baseline_seconds)
    request = CaptureRequest(
        id=incident or f"{path.name.split('.')[0]}-{name}",
        labels=_labels(chosen, name),
        annotations={"summary": _summary(chosen, name)},
        onset=datetime.fromtimestamp(begin, UTC),
        end=datetime.fromtimestamp(max(stop, begin + step), UTC),
    )
    return asyncio.run(_captured(held, config, request, times[-1]))


async def _captured(held: Scrapes, config: CaptureConfig, request: CaptureRequest, now: float) -> Incident:
    from rca.telemetry.prometheus.ask import Inquiry

    deadline = asyncio.get_running_loop().time() + config.total_timeout_seconds
    return await captured(Inquiry(held, config.step_seconds, kind="recording"), config, request, now, deadline)


def _chosen(path: Path, found: Sequence[Suspect], victim: str, onset: datetime | None) -> list[Suspect]:
    """The violations of the victim, the one to explain first."""
    wanted = victim or (found[0].violation.victim if found else "")
    mine = [item for item in found if item.violation.victim == wanted]
    if mine or (victim and onset is not None):
        return mine
    if victim and found:
        import difflib

        known = sorted({item.violation.victim for item in found})
        near = difflib.get_close_matches(victim, known, n=3, cutoff=0.4) or known[:3]
        raise NotFoundError(
            f"{path} has no violation of workload {victim!r}",
            cure=f"give the time as well (--at), or one of those that have: {', '.join(near)}",
        )
    raise NotFoundError(
        f"{path} has no violation under this policy",
        cure="give a workload and a time (--victim, --at), or another policy (--policy)",
    )


def _labels(chosen: list[Suspect], name: str) -> dict[str, str]:
    if not chosen:
        return {"workload": name}
    worst = chosen[0].violation
    told = {
        "workload": name,
        "service": worst.service,
        "priority_level": worst.level,
        "violation_type": worst.type.value,
        "queue": worst.queue,
        "cluster": worst.cluster,
    }
    return {label: value for label, value in told.items() if value}


def _summary(chosen: list[Suspect], name: str) -> str:
    if not chosen:
        return f"{name} waited"
    kinds = dict.fromkeys(item.violation.type.value.replace("_", " ") for item in chosen)
    return f"{name} ({chosen[0].violation.level}): {', '.join(kinds)}"


__all__ = [
    "LOOKBACK_SECONDS",
    "Overview",
    "Scrapes",
    "Suspect",
    "capture_recording",
    "overview",
    "scrapes",
    "snapshots",
]
