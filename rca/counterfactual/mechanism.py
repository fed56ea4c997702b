"""The *mechanism* engine: put one node's own noise back to normal, propagate, compare at the victim.

Each node's excess is split into what its callees explain and what is its own (`rca.features`); the calls between node
and victim say how much of it arrives. Setting a cause's own excess to zero removes that part from the victim, which can
at best return to what it was before. Two readings of the evidence are averaged by their probability: with probability
p the candidate is *the* cause (then its removal restores the victim), otherwise it adds what its mechanism explains.

Uncertainty: a block bootstrap over samples gives a standard error; how far that falls short of the real error was
measured on simulated incidents with a known counterfactual (split conformal prediction, Vovk et al., 2005), separately
for latency and error metrics, and is stored in the model card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec
import numpy as np

from rca.counterfactual.shapley import shapley
from rca.explanation import Attribution, AttributionEntry
from rca.features import Features
from rca.graph import RELATIONS, CallGraph, Floats
from rca.incident import Relation
from rca.panel import LEAD, Panel
from rca.signals import Signal, describe, signal_of

#: Bootstrap resamples; the seed is fixed so that two runs give the same interval.
RESAMPLES = 400
CANDIDATES = 4


class IntervalScale(msgspec.Struct, frozen=True):
    """How to turn a standard error into a 95 % interval of the counterfactual, learned on simulated incidents.

    ``low`` and ``high`` are the 2.5 % and 97.5 % quantiles of (truth - estimate) / (standard error + floor * change).
    """

    low: float = -3.0
    high: float = 3.0
    floor: float = 0.1


@dataclass(frozen=True)
class Estimate:
    """The victim's metric with a set of causes removed, before calibration of the interval.

    Attributes:
        factual: mean after the onset. ``normal``: what is expected with nothing broken.
        share: part of (factual - normal) that the removal takes away, in [0, 1].
        error: bootstrap standard error of the counterfactual.
    """

    nodes: tuple[int, ...]
    factual: float
    normal: float
    share: float
    error: float

    @property
    def counterfactual(self) -> float:
        """Estimated value of the victim's metric."""
        return self.factual - self.share * (self.factual - self.normal)


@dataclass(frozen=True)
class Situation:
    """What is known about the victim: bootstrap samples of its factual and its normal level."""

    factual: float
    normal: float
    factual_draws: Floats
    normal_draws: Floats
    explains: Floats
    extrapolates: bool


def situation(panel: Panel, features: Features, probability: Floats) -> Situation | None:
    """Levels of the victim and what each node explains of its change; None when either level is unknown.

    Args:
        probability: of each node being the cause, [N].
    """
    values = panel.window.get(panel.metric)
    if values is None:
        return None
    start = max(features.onset, LEAD)
    post = values[panel.victim, start:]
    post = post[np.isfinite(post)]
    baseline = panel.baseline.get(panel.metric, np.full((len(values), 0), np.nan))[panel.victim]
    baseline = baseline[np.isfinite(baseline)]
    before = values[panel.victim, : min(features.onset, values.shape[1])]
    before = before[np.isfinite(before)]
    if not len(post) or len(baseline) + len(before) < 2:
        return None
    rng = np.random.default_rng(0)
    factual_draws = _resample(rng, post)
    normal_draws = _normal_level(rng, baseline, before)
    rate = features.deviations.get("request_rate")
    extrapolates = len(baseline) < 5
    if rate is not None and np.isfinite(rate.post[panel.victim]) and rate.baseline_count[panel.victim] >= 5:
        slack = 0.1 * abs(rate.high[panel.victim] - rate.low[panel.victim])
        seen = rate.post[panel.victim]
        extrapolates |= bool(not rate.low[panel.victim] - slack <= seen <= rate.high[panel.victim] + slack)
    return Situation(
        factual=float(post.mean()),
        normal=float(normal_draws.mean()),
        factual_draws=factual_draws,
        normal_draws=normal_draws,
        explains=_without_shared(panel.graph, explained_share(panel, features), probability),
        extrapolates=extrapolates,
    )


def _resample(rng: np.random.Generator, values: Floats) -> Floats:
    """Bootstrap means of a short series in blocks of two, because neighbouring samples are alike; [RESAMPLES]."""
    count = len(values)
    if count == 1:
        return np.full(RESAMPLES, values[0])
    blocks = rng.integers(0, count, (RESAMPLES, (count + 1) // 2))
    index = np.stack([blocks, (blocks + 1) % count], axis=2).reshape(RESAMPLES, -1)[:, :count]
    out: Floats = values[index].mean(axis=1)
    return out


def _normal_level(rng: np.random.Generator, baseline: Floats, before: Floats) -> Floats:
    """Bootstrap draws of the level without the fault: the baseline, corrected by what was seen just before."""
    if not len(baseline):
        return _resample(rng, before)
    recent = baseline[-200:]
    # A rare outlier in the baseline is no reason to expect one now.
    low, high = np.quantile(recent, [0.02, 0.98])
    draws = _resample(rng, np.clip(recent, low, high))
    if not len(before):
        return draws
    lead = _resample(rng, before)
    spread = float(recent.std()) / np.sqrt(len(before)) + 1e-12
    gap = float(before.mean() - recent.mean())
    # The further the level just before lies from the baseline, the more the baseline is out of date.
    trust = gap**2 / (gap**2 + 4.0 * spread**2)
    level: Floats = draws + trust * (lead - draws)
    return level


def explained_share(panel: Panel, features: Features) -> Floats:
    """Part of the victim's change that each node's own excess explains, in [0, 1]; NaN where not measured; [N].

    A shared resource is given what its dependents add by themselves.
    """
    graph = panel.graph
    rows = len(graph.nodes)
    errors = signal_of(panel.metric) is Signal.ERRORS
    if errors:
        item = features.deviations.get("error_ratio")
        change = np.full(rows, np.nan) if item is None else item.post - item.baseline
        own, weight = features.own_errors, features.error_weight
    else:
        item = features.deviations.get(features.centre or "")
        change = np.full(rows, np.nan) if item is None else item.post - item.baseline
        own, weight = features.own, features.weight
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.clip(weight * own / change[panel.victim], 0.0, 1.0)
    infrastructure = graph.relations != RELATIONS.index(Relation.CALLS)
    held = np.bincount(
        graph.callees[infrastructure],
        weights=np.nan_to_num(share[graph.callers[infrastructure]]),
        minlength=rows,
    )
    is_service = graph.kinds == 0
    return np.where(is_service, share, np.where(held > 0, np.clip(held, 0.0, 1.0), np.nan))


def _without_shared(graph: CallGraph, share: Floats, probability: Floats) -> Floats:
    """Take from each node's share what another node beside it more likely adds; [N].

    A service that a training job slows has no excess of its own, and the GPU between them adds nothing by itself.
    """
    infrastructure = np.flatnonzero(graph.relations != RELATIONS.index(Relation.CALLS))
    on: dict[int, set[int]] = {}
    for caller, callee in zip(
        graph.callers[infrastructure].tolist(), graph.callees[infrastructure].tolist(), strict=True
    ):
        on.setdefault(caller, set()).add(callee)
    discount = np.zeros(len(share))
    likely = {int(i) for i in np.flatnonzero(probability > 0.01) if graph.kinds[i] != 0}
    for node in range(len(share)):
        if np.isfinite(share[node]) and share[node] > 0 and likely:
            beside = set(on.get(node, ()))
            if graph.kinds[node] != 0:
                for residents in on.values():
                    if node in residents:
                        beside |= residents
            discount[node] = min(1.0, sum(probability[other] for other in sorted((beside & likely) - {node})))
    return share * (1.0 - discount)


def estimate(known: Situation, nodes: Sequence[int], probability: Floats) -> Estimate:
    """Remove ``nodes`` together. ``probability``: of each node being the cause, [N]."""
    chosen = list(nodes)
    p = float(min(1.0, probability[chosen].sum()))
    mechanism = float(min(1.0, np.nansum(known.explains[chosen])))
    share = p + (1.0 - p) * mechanism
    draws = known.factual_draws - share * (known.factual_draws - known.normal_draws)
    return Estimate(tuple(chosen), known.factual, known.normal, share, float(draws.std()))


def scale_of(scales: dict[str, IntervalScale], metric: str) -> IntervalScale:
    """The calibration for ``metric``."""
    return scales.get("errors" if signal_of(metric) is Signal.ERRORS else "latency", IntervalScale())


def interval(item: Estimate, scale: IntervalScale, metric: str) -> tuple[float, float]:
    """95 % bounds of the counterfactual value; a ratio stays in [0, 1], a time is not negative."""
    unit = spread_unit(item, scale.floor, metric)
    low, high = item.counterfactual + scale.low * unit, item.counterfactual + scale.high * unit
    # Bounds of the quantity hold only where the data keep to them: a utilisation may exceed 1.
    if item.factual >= 0.0 and item.counterfactual >= 0.0:
        low = max(low, 0.0)
    if describe(metric).unit == "ratio" and max(item.factual, item.counterfactual) <= 1.0:
        high = min(high, 1.0)
    return low, high


def spread_unit(item: Estimate, floor: float, metric: str) -> float:
    """What errors are measured in: the bootstrap error and a part of the change, never zero."""
    least = 1e-4 if describe(metric).unit == "ratio" else 1e-3 * abs(item.normal) + 1e-6
    return item.error + floor * abs(item.factual - item.normal) + least


def attribute(
    panel: Panel,
    features: Features,
    probability: Floats,
    candidates: Sequence[int],
    scales: dict[str, IntervalScale],
) -> Attribution | None:
    """Attribution of the victim's change to ``candidates`` (node indices, most likely first): singles and pairs.

    Returns None when the victim's level before or after the onset is unknown.
    """
    known = situation(panel, features, probability)
    if known is None or known.factual == 0.0:
        return None
    names = panel.graph.nodes
    chosen = list(candidates)[:CANDIDATES]
    scale = scale_of(scales, panel.metric)

    def removed(members: frozenset[int]) -> float:
        if not members:
            return 0.0
        return known.factual - estimate(known, [chosen[m] for m in sorted(members)], probability).counterfactual

    shares = shapley(len(chosen), removed)
    total = sum(shares)
    entries = []
    sets = [(k,) for k in range(len(chosen))] + list(combinations(range(min(len(chosen), 3)), 2))
    for members in sets:
        item = estimate(known, [chosen[m] for m in members], probability)
        low, high = interval(item, scale, panel.metric)
        single = len(members) == 1
        bounds = sorted(((known.factual - high) / known.factual, (known.factual - low) / known.factual))
        entries.append(
            AttributionEntry(
                nodes=tuple(names[chosen[m]] for m in members),
                counterfactual=_tidy(item.counterfactual),
                contribution=_tidy((known.factual - item.counterfactual) / known.factual),
                low=_tidy(bounds[0]),
                high=_tidy(bounds[1]),
                shapley=_tidy(shares[members[0]] / total) if single and total else None,
                extrapolates=known.extrapolates or not np.isfinite(known.explains[[chosen[m] for m in members]]).all(),
            )
        )
    notes = [
        "counterfactual: the victim's mean after the onset, had the named nodes behaved as before; "
        "contribution: the part of that mean which would go away"
    ]
    if known.extrapolates:
        notes.append("the victim's load or history lies outside what the baseline covers: read this as extrapolation")
    if not np.isfinite(known.explains[chosen]).all():
        blind = [names[c] for c in chosen if not np.isfinite(known.explains[c])]
        notes.append(f"no measurement of what {', '.join(blind[:3])} adds; its entry rests on its probability alone")
    return Attribution(
        engine="mechanism",
        metric=panel.metric,
        unit=describe(panel.metric).unit,
        factual=_tidy(known.factual),
        entries=tuple(entries),
        notes=tuple(notes),
    )


def _tidy(value: float) -> float:
    """Six significant digits: more would be noise, and would differ between processors."""
    return float(f"{value:.6g}") + 0.0
