"""Quality of a model on simulated incidents, and the calibration of its counterfactual intervals. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rca.counterfactual import mechanism
from rca.counterfactual.mechanism import Estimate, IntervalScale
from rca.explain import Analysis, analyse
from rca.gnn.infer import Model
from rca.graph import Floats
from rca.signals import Signal, signal_of
from rca.simulation.incidents import SimulatedIncident, sample_incident

#: Share of the change that enters the unit of the intervals, beside the bootstrap error.
FLOOR = 0.05
#: Intervals are widened to this coverage on the calibration set, so that a test set of 300 stays above 90 %.
TARGET = 0.955


class Quality(msgspec.Struct, frozen=True):
    """Figures on held-out simulated incidents. Ratios; ``calibration_error``: 10 bins of equal width.

    ``path_f1`` is over the directed steps of all incidents together; ``coverage`` is of the true counterfactual by the
    interval of the true cause, where that is among the candidates.
    """

    incidents: int
    quiet: int
    top1: float
    top3: float
    mechanism: float
    named_when_quiet: float
    path_f1: float
    coverage: float
    interval_width: float
    calibration_error: float
    top1_by_mechanism: dict[str, float]


@dataclass(frozen=True)
class Judged:
    """One incident: the analysis beside the truth."""

    drawn: SimulatedIncident
    analysis: Analysis
    #: Estimates for the attributed candidates that matter to calibration, each with the true counterfactual.
    estimates: tuple[tuple[Estimate, float], ...]


def judge(model: Model, seeds: Iterable[int], progress: Callable[[int], None] = lambda _: None) -> list[Judged]:
    """Analyse the simulated incidents of ``seeds``."""
    out = []
    for number, seed in enumerate(seeds, start=1):
        drawn = sample_incident(seed)
        analysis = analyse(drawn.panel, model)
        out.append(Judged(drawn, analysis, _estimates(drawn, analysis)))
        progress(number)
    return out


def _estimates(drawn: SimulatedIncident, analysis: Analysis) -> tuple[tuple[Estimate, float], ...]:
    """The estimate for the true cause, where it is a candidate, with the truth that the rerun gave."""
    known = mechanism.situation(analysis.panel, analysis.features, analysis.prediction.cause)
    if known is None or drawn.cause < 0:
        return ()
    out = []
    for node in analysis.ranking[: mechanism.CANDIDATES]:
        if node == drawn.cause:
            truth = float(np.nanmean(drawn.counterfactual_first[drawn.onset_step :]))
            if np.isfinite(truth):
                out.append((mechanism.estimate(known, (node,), analysis.prediction.cause), truth))
    return tuple(out)


def interval_scales(judged: Sequence[Judged]) -> dict[str, IntervalScale]:
    """Split-conformal quantiles of the error of the counterfactual, for latency and for error metrics."""
    found: dict[str, list[float]] = {"latency": [], "errors": []}
    for case in judged:
        metric = case.analysis.panel.metric
        kind = "errors" if signal_of(metric) is Signal.ERRORS else "latency"
        for item, truth in case.estimates:
            found[kind].append((truth - item.counterfactual) / mechanism.spread_unit(item, FLOOR, metric))
    scales = {}
    for kind, errors in found.items():
        if len(errors) >= 40:
            low, high = conformal_bounds(np.array(errors), TARGET)
            scales[kind] = IntervalScale(low=low, high=high, floor=FLOOR)
    return scales


def conformal_bounds(errors: Floats, coverage: float) -> tuple[float, float]:
    """Bounds that hold ``coverage`` of new errors, with the finite-sample correction (n + 1)."""
    tail = (1.0 - coverage) / 2.0
    ordered = np.sort(errors)
    count = len(ordered)
    low = ordered[max(int(np.floor(tail * (count + 1))) - 1, 0)]
    high = ordered[min(int(np.ceil((1.0 - tail) * (count + 1))) - 1, count - 1)]
    return float(min(low, 0.0)), float(max(high, 0.0))


def calibration_error(confidence: Floats, correct: Floats, bins: int = 10) -> float:
    """Expected calibration error over ``bins`` of equal width (Naeini et al., AAAI'15)."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    total = 0.0
    for b in range(bins):
        inside = place == b
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
    return float(total)


def summarise(judged: Sequence[Judged], scales: Mapping[str, IntervalScale]) -> Quality:
    """Sum up ``judged`` with the given interval calibration."""
    broken = [case for case in judged if case.drawn.cause >= 0]
    quiet = [case for case in judged if case.drawn.cause < 0]
    first = np.array([case.analysis.ranking[0] == case.drawn.cause for case in broken], dtype=float)
    third = np.array([case.drawn.cause in case.analysis.ranking[:3] for case in broken], dtype=float)
    confidence = np.array([case.analysis.prediction.cause[case.analysis.ranking[0]] for case in judged])
    correct = np.array([case.analysis.ranking[0] == case.drawn.cause for case in judged], dtype=float)
    named = np.array(
        [case.analysis.prediction.cause[case.analysis.ranking[0]] >= 0.5 for case in quiet] or [False], dtype=float
    )
    kinds = [
        case.analysis.model.card.mechanisms[int(np.argmax(case.analysis.prediction.mechanism[case.drawn.cause]))]
        == case.drawn.mechanism
        for case in broken
    ]
    shared = stated = true = 0
    covered, widths = [], []
    for case in broken:
        said = {(step.source, step.target) for step in case.analysis.path}
        real = set(case.drawn.path)
        shared, stated, true = shared + len(said & real), stated + len(said), true + len(real)
        metric = case.analysis.panel.metric
        scale = mechanism.scale_of(dict(scales), metric)
        for item, truth in case.estimates:
            low, high = mechanism.interval(item, scale, metric)
            covered.append(low <= truth <= high)
            widths.append((high - low) / abs(item.factual) if item.factual else 0.0)
    by_kind: dict[str, list[float]] = {}
    for case, hit in zip(broken, first, strict=True):
        by_kind.setdefault(str(case.drawn.mechanism), []).append(float(hit))
    return Quality(
        incidents=len(broken),
        quiet=len(quiet),
        top1=_mean(first),
        top3=_mean(third),
        mechanism=_mean(kinds),
        named_when_quiet=_mean(named),
        path_f1=round(2 * shared / max(stated + true, 1), 4),
        coverage=_mean(covered),
        interval_width=round(float(np.median(widths)), 4) if widths else 0.0,
        calibration_error=round(calibration_error(confidence, correct), 4),
        top1_by_mechanism={kind: _mean(hits) for kind, hits in sorted(by_kind.items())},
    )


def _mean(values: Sequence[float] | Sequence[bool] | Floats) -> float:
    return round(float(np.mean(values)), 4) if len(values) else 0.0
