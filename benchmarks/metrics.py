"""Figures of merit. Ties are averaged over every order that they allow, in closed form; intervals are seeded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval over ``count`` cases."""

    value: float
    low: float
    high: float
    count: int


def hit_probability(scores: Mapping[str, float], truth: Collection[str], candidates: Collection[str], k: int) -> float:
    """Probability that one of ``truth`` is among the first ``k`` of ``candidates``, ties broken at random.

    Candidates without a finite score come last, tied. With b candidates above the best right one, m tied with it
    (itself included) and a right ones among the m, the chance is 1 - C(m - a, k - b) / C(m, k - b).

    Args:
        scores: higher is more suspicious.
        truth: names that count as right; those that are no candidate cannot be hit.
        candidates: every name that could be ranked.
        k: at least 1.
    """
    if k < 1:
        raise ValueError("k must be at least 1")
    names = list(dict.fromkeys(candidates))
    values = np.array([scores.get(name, -np.inf) for name in names], dtype=np.float64)
    values[np.isnan(values)] = -np.inf
    right = np.array([name in truth for name in names], dtype=bool)
    if not right.any():
        return 0.0
    best = values[right].max()
    above = int((values > best).sum())
    tied = values == best
    slots = k - above
    if slots <= 0:
        return 0.0
    size, good = int(tied.sum()), int((tied & right).sum())
    if slots > size - good:
        return 1.0
    return 1.0 - comb(size - good, slots) / comb(size, slots)


def average_at(scores: Mapping[str, float], truth: Collection[str], candidates: Collection[str], k: int = 5) -> float:
    """Avg@k: the mean of the hit probabilities at 1 to ``k``."""
    return float(np.mean([hit_probability(scores, truth, candidates, n) for n in range(1, k + 1)]))


def interval(
    values: Sequence[float],
    *,
    seed: int = 0,
    statistic: Callable[[Floats], Floats] | None = None,
) -> Estimate | None:
    """Mean of ``values`` (each in [0, 1]) with a 95 % percentile-bootstrap interval over cases; None for no values.

    Where all cases agree on 0 or on 1, resampling shows no spread, which says nothing about the next case: the
    Clopper-Pearson limit stands instead.

    Args:
        statistic: reduces resampled values [R, n] to [R]; default the mean.
    """
    data = np.asarray(values, dtype=np.float64)
    count = len(data)
    if not count:
        return None
    reduce = statistic or (lambda drawn: np.asarray(drawn.mean(axis=-1)))
    value = float(reduce(data[None, :])[0])
    tail = (1.0 - LEVEL) / 2.0
    if statistic is None and np.all(data == 1.0):
        return Estimate(value, float(tail ** (1.0 / count)), 1.0, count)
    if statistic is None and np.all(data == 0.0):
        return Estimate(value, 0.0, float(1.0 - tail ** (1.0 / count)), count)
    random = np.random.default_rng(seed)
    drawn = data[random.integers(0, count, size=(RESAMPLES, count))]
    low, high = np.quantile(reduce(drawn), [tail, 1.0 - tail])
    return Estimate(value, float(low), float(high), count)


def separation(incident_levels: Sequence[float], quiet_levels: Sequence[float]) -> float | None:
    """Probability that an incident's alarm level exceeds a quiet window's (area under the ROC curve).

    Unlike specificity it needs no threshold. None when either side is empty.
    """
    if not incident_levels or not quiet_levels:
        return None
    high = np.asarray(incident_levels, dtype=np.float64)[:, None]
    low = np.asarray(quiet_levels, dtype=np.float64)[None, :]
    return float(np.mean((high > low) + 0.5 * (high == low)))


def expected_calibration_error(
    confidence: Sequence[float], correct: Sequence[float], *, bins: int, equal_mass: bool
) -> float:
    """Mean gap between stated confidence and share correct, weighted by the bins' sizes.

    Args:
        confidence: stated probability per case, in [0, 1].
        correct: 1 where right (or the probability of being right), same length.
        bins: how many.
        equal_mass: bins with equally many cases, else of equal width.

    Raises:
        ValueError: the lengths differ, or there are no cases.
    """
    stated, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if stated.shape != right.shape or not len(stated):
        raise ValueError("confidence and correct must have the same, positive length")
    if equal_mass:
        parts = np.array_split(np.argsort(stated, kind="stable"), min(bins, len(stated)))
    else:
        number = np.minimum((stated * bins).astype(int), bins - 1)
        parts = [np.flatnonzero(number == n) for n in range(bins)]
    return float(
        sum(len(part) * abs(stated[part].mean() - right[part].mean()) for part in parts if len(part)) / len(stated)
    )
