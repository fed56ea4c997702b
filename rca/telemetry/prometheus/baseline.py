"""Chooses the time to compare an incident with: outside other incidents, under a load of the same shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rca.telemetry.prometheus.answers import Series
from rca.telemetry.prometheus.ask import Span, utc
from rca.telemetry.prometheus.config import CaptureConfig

DAY = 86_400.0
#: What just happened is under the same releases and settings: an older time must resemble the load by this much more.
FRESHNESS = 0.15
#: Points of a load profile.
PROFILE_POINTS = 60
#: Grid points between baseline and window that show what was normal just before (`rca.panel.LEAD`), and one more.
GAP_STEPS = 4


@dataclass(frozen=True)
class Candidate:
    """A possible baseline, in Unix seconds. ``like``: what it is, in words; ``history``: an earlier day."""

    start: float
    end: float
    like: str
    history: bool = False

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end - self.start


@dataclass(frozen=True)
class Choice:
    """The baseline that was chosen, and why, for the source's detail."""

    candidate: Candidate
    why: str


def candidates(
    config: CaptureConfig, window: tuple[float, float], busy: Sequence[tuple[float, float]], earliest: float = 0.0
) -> list[Candidate]:
    """Times that may serve: the quiet stretch just before, and the same time on the day and the week before."""
    gap = GAP_STEPS * config.step_seconds
    out = []
    before = _quiet(window[0] - gap, config, busy)
    if before is not None:
        late = before[1] < window[0] - gap - 1.0
        words = "the last quiet stretch before the window" if late else "the time just before the window"
        out.append(Candidate(*before, words))
    length = max(config.baseline_seconds, window[1] - window[0])
    for days, words in ((1, "the same time on the day before"), (7, "the same time a week before")):
        if not config.history:
            break
        end = window[1] - days * DAY
        start = end - length
        if start > earliest and end <= window[0] - gap and not any(_touch((start, end), other) for other in busy):
            out.append(Candidate(start, end, words, history=True))
    return out


def _quiet(end: float, config: CaptureConfig, busy: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The latest stretch that touches no other incident and is long enough; the longest one if none is."""
    margin = 2 * config.step_seconds
    horizon = end - 12 * config.baseline_seconds
    best: tuple[float, float] | None = None
    blocked = sorted((start - margin, stop + margin) for start, stop in busy if stop > horizon and start < end)
    stop = end
    for first, last in [*reversed(blocked), (horizon, horizon)]:
        if last < stop:
            free = (max(last, stop - config.baseline_seconds), stop)
            if free[1] - free[0] >= config.least_baseline_seconds:
                return free
            if best is None or free[1] - free[0] > best[1] - best[0]:
                best = free
        stop = min(stop, first)
    return best


def _touch(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def profile_spans(found: Sequence[Candidate], window: tuple[float, float]) -> list[Span]:
    """What to ask for the load: the window, then each candidate."""
    return [Span(*window), *(Span(item.start, item.end) for item in found)]


def profile_step(config: CaptureConfig, window: tuple[float, float]) -> float:
    """Distance of the points of a load profile, in seconds."""
    return float(max(config.step_seconds, round((window[1] - window[0]) / PROFILE_POINTS)))


def choose(
    found: Sequence[Candidate], window: tuple[float, float], load: Sequence[Series], config: CaptureConfig
) -> Choice:
    """Pick the candidate whose request rates are most like those around the incident.

    The distance of two loads is the mean over services, weighted by their requests, of \\|log(rate / rate)\\|. A
    candidate on an earlier day must be closer than the time just before by `FRESHNESS`; one without data is out.

    Args:
        load: requests per second by service, over the window and all candidates.
    """
    if not load:
        why = "no request rates to compare load by" if found else ""
        return Choice(found[0], f"{found[0].like}; {why}")
    now = _levels(load, *window)
    scored = []
    for item in found:
        there = _levels(load, item.start, item.end if not item.history else item.start + item.seconds)
        if item.history:
            # The part at the incident's own time of day is what must be alike.
            there = _levels(load, item.end - (window[1] - window[0]), item.end)
        covered = _covered(load, item, config)
        distance = _distance(now, there)
        if there and covered >= 0.5 and np.isfinite(distance):
            scored.append((distance + (FRESHNESS if item.history else 0.0), distance, item))
    if not scored:
        return Choice(found[0], f"{found[0].like}; its load is not known")
    _, distance, chosen = min(scored, key=lambda entry: entry[0])
    others = ", ".join(f"{item.like}: {np.expm1(d):.0%}" for _, d, item in scored if item is not chosen)
    words = f"{chosen.like}: request rates differ from the incident's by {np.expm1(distance):.0%} on average"
    return Choice(chosen, f"{words} ({others})" if others else words)


def _levels(load: Sequence[Series], start: float, end: float) -> dict[str, float]:
    out: dict[str, float] = {}
    for series in load:
        inside = series.values[(series.times >= start) & (series.times <= end)]
        inside = inside[np.isfinite(inside)]
        if len(inside):
            key = "|".join(f"{name}={value}" for name, value in sorted(series.labels.items()))
            out[key] = float(np.median(inside))
    return out


def _covered(load: Sequence[Series], item: Candidate, config: CaptureConfig) -> float:
    """Share of a candidate for which there are samples, at least of one service."""
    stamps = np.concatenate([series.times for series in load])
    inside = stamps[(stamps >= item.start) & (stamps <= item.end)]
    if not len(inside):
        return 0.0
    needed = max(min(item.seconds, 2 * config.least_baseline_seconds), config.step_seconds)
    return float(inside.max() - inside.min() + config.step_seconds) / needed


def _distance(now: Mapping[str, float], then: Mapping[str, float]) -> float:
    """Mean \\|log ratio\\| of the rates, weighted by the larger of both; NaN when nothing can be compared."""
    names = set(now) | set(then)
    weight = {name: max(now.get(name, 0.0), then.get(name, 0.0)) for name in names}
    total = sum(weight.values())
    if total <= 0:
        return float("nan")
    least = 1e-3 * total / len(names)
    return (
        sum(
            weight[name] * abs(float(np.log((now.get(name, 0.0) + least) / (then.get(name, 0.0) + least))))
            for name in names
        )
        / total
    )


def described(choice: Choice) -> str:
    """The choice in one sentence."""
    return f"{utc(choice.candidate.start)} to {utc(choice.candidate.end)}, {choice.why}"
