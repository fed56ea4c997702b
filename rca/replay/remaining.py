"""How long does what had not ended go on? Durations of a recording by class: Kaplan–Meier with delayed entry.

A workload that had run for a seconds when the recording ended gets total durations drawn from those of its class that
lasted longer than a. Weights of a Bayesian bootstrap (Rubin, 1981) go into every draw, so that few observations give
wide intervals. Past the longest observed duration, the rate of ending is drawn from a gamma distribution with one
pseudo-event in the age that was reached: with no data at all, the remaining time is distributed as age · u/(1 − u).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from rca.replay.model import Floats, Ints
from rca.replay.recorded import Recorded

#: Durations that must have been seen to their end for a class to be used by itself.
ENOUGH: Final = 5
#: Least age and remaining time in seconds, so that a workload that has just started has a tail.
_LEAST: Final = 1.0
#: Longest total duration that is drawn: ten years.
LONGEST: Final = 10 * 365 * 86_400.0


@dataclass(frozen=True)
class Drawn:
    """Total durations of the censored rows. ``totals`` is [draws, rows]; ``basis`` says from what, in words."""

    rows: Ints
    totals: Floats
    basis: str


def draw(recorded: Recorded, draws: int, seed: int) -> Drawn:
    """Draw total durations for all rows of the trace whose end is not known. Pieces of one workload end together."""
    work = recorded.trace.workloads
    rows = np.flatnonzero(work.censored)
    firsts: list[int] = []
    members: dict[int, list[int]] = {}
    for row in rows.tolist():
        first = recorded.rows(work.names[row])[0]
        if first not in members:
            firsts.append(first)
        members.setdefault(first, []).append(row)
    leaders = np.array(sorted({recorded.rows(name)[0] for name in recorded.names}), np.int64)
    ran = leaders[np.isfinite(work.observed_start[leaders]) | recorded.initial[leaders]]
    with np.errstate(invalid="ignore"):
        start = np.where(np.isfinite(work.observed_start), work.observed_start, 0.0)
        ended = np.where(recorded.initial, work.submit, start) + work.duration
        age = np.where(work.censored, recorded.least, ended - start)
    totals = np.zeros((draws, len(rows)))
    place = {row: at for at, row in enumerate(rows.tolist())}
    bases: dict[str, int] = {}
    for first in firsts:
        label, chosen = _class_of(recorded, first, ran)
        events = int((~work.censored[chosen]).sum())
        bases[f"{label} ({events} seen to their end)"] = bases.get(f"{label} ({events} seen to their end)", 0) + 1
        # Draws belong to the workload, so that another workload less changes nobody else's.
        rng = np.random.default_rng([seed, first])
        values = _conditional(
            rng,
            draws,
            age=max(float(recorded.least[first]), _LEAST),
            entry=recorded.entered[chosen],
            leave=age[chosen],
            event=~work.censored[chosen],
        )
        limit = max(float(work.estimate[first]), float(recorded.least[first]) + _LEAST)
        for row in members[first]:
            totals[:, place[row]] = np.minimum(values, limit)
    basis = ", ".join(f"{count} by {label}" for label, count in sorted(bases.items(), key=lambda item: -item[1])[:3])
    return Drawn(rows, totals, basis)


def _class_of(recorded: Recorded, row: int, ran: Ints) -> tuple[str, Ints]:
    """The most special class of ``row`` in which enough workloads were seen to end, and its rows without ``row``."""
    work = recorded.trace.workloads
    others = ran[ran != row]
    for label in recorded.classes[row]:
        chosen = others[[label in recorded.classes[other] for other in others.tolist()]] if len(others) else others
        if label == recorded.classes[row][-1] or int((~work.censored[chosen]).sum()) >= ENOUGH:
            return label, chosen
    raise AssertionError("the last class is common to all")


def _conditional(
    rng: np.random.Generator, draws: int, *, age: float, entry: Floats, leave: Floats, event: np.ndarray
) -> Floats:
    """Draw durations longer than ``age`` from observations [K] under watch from ``entry`` to ``leave``, [draws]."""
    # Equally spaced in probability and shuffled: fewer draws for the same precision.
    uniform = (rng.permutation(draws) + rng.uniform(size=draws)) / draws
    rate = rng.standard_gamma(1.0, size=draws)
    weights = rng.standard_exponential((draws, len(entry)))
    # The workload itself is at risk too; it keeps some probability past all that was observed.
    own = rng.standard_exponential(draws)
    times = np.unique(leave[event & (leave > age)])
    survival = np.ones(draws)
    found = np.full(draws, np.nan)
    for time in times.tolist():
        at_risk = (entry < time) & (leave >= time)
        ending = event & (leave == time)
        survival = survival * (1.0 - weights[:, ending].sum(axis=1) / (weights[:, at_risk].sum(axis=1) + own))
        found = np.where(np.isnan(found) & (survival <= uniform), time, found)
    last = float(times[-1]) if len(times) else age
    beyond = np.maximum(leave - np.maximum(entry, age), 0.0)
    ends = float((event & (leave > age)).sum())
    exposure = last + (weights * beyond).sum(axis=1)
    # A gamma draw of shape 1 + ends; the sum of a unit one and another.
    shape = rate + (rng.standard_gamma(ends, size=draws) if ends else 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        tail = last - np.log(np.maximum(uniform / np.maximum(survival, 1e-300), 1e-300)) * exposure / np.maximum(
            shape, 1e-9
        )
    totals: Floats = np.where(np.isnan(found), tail, found)
    return np.clip(totals, age + 1e-3, LONGEST)


__all__ = ["Drawn", "draw"]
