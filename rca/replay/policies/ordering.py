"""Policies that differ by whom they serve first (P3, P4, P6); all take the first node that fits."""

from __future__ import annotations

from typing import Final

import numpy as np

from rca.replay.model import Floats, Ints, Trace, Workloads
from rca.replay.policies.base import Policy, View

#: How much of the spread of recent latencies a compensated deadline is extended by (V8).
COMPENSATION: Final = 0.15


class Sjf(Policy):
    """Shortest job first, by the estimated duration (P3). Long jobs may starve."""

    name = "sjf"

    def keys(self, trace: Trace) -> Floats:
        """Return the estimates."""
        return trace.workloads.estimate


class Priority(Policy):
    """Strict priority: the more urgent rank first, within it first come, first served."""

    name = "priority"

    def keys(self, trace: Trace) -> Floats:
        """Return the ranks."""
        return trace.workloads.rank.astype(np.float64)


class PreemptivePriority(Priority):
    """Strict priority that stops less urgent, preemptible workloads."""

    name = "preemptive-priority"
    preempts = True


class StaticRoundRobin(Policy):
    """Static weighted round robin (P4): in each round, ``weights[r]`` workloads of rank r, in order of submission.

    A rank whose next workload does not fit does not hold up the others. Ranks past the last weight share it.
    """

    name = "static-wrr"

    def __init__(self, weights: tuple[int, ...] = (4, 3, 2, 1)) -> None:
        if not weights or min(weights) < 1:
            raise ValueError(f"weights must be positive, got {weights}")
        self.rounds = weights


class MemoryReservation(Policy):
    """A share of the GPUs is kept for each rank as long as that rank does not use it (P4).

    Within a rank first come, first served; a rank that must wait does not hold up the others.
    """

    name = "memory-reservation"

    def __init__(self, shares: tuple[float, ...] = (0.3, 0.1)) -> None:
        if min(shares, default=0.0) < 0 or sum(shares) > 1:
            raise ValueError(f"shares must be within [0, 1] together, got {shares}")
        self.guarantees = shares


def wait_budget(work: Workloads, rows: Ints) -> Floats:
    """Seconds that each row may wait: its SLO, or what its deadline leaves beside the estimate, whichever is less."""
    by_deadline = (
        work.deadline[rows] - work.submit[rows] - np.where(np.isfinite(work.deadline[rows]), work.estimate[rows], 0.0)
    )
    return np.minimum(work.wait_slo[rows], by_deadline)


class DynamicPriority(Policy):
    """Priority queue with a dynamic weight (P4): CPU saturation lowers it, little SLA time left raises it.

    weight = base · (1 − saturation · CPU share asked for) + urgency, where base falls with the rank, saturation is the
    cluster's CPU use beyond 80 %, and urgency grows from 0 to 1 as the SLA time runs out.
    """

    name = "dynamic-priority"
    interval = 10.0

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the negative weights."""
        work = view.trace.workloads
        base = 1.0 / (1.0 + work.rank[rows])
        saturation = max(0.0, view.cpu_use - 0.8) / 0.2
        largest = max(1, int(view.trace.cluster.cpu_milli.max()))
        asked = np.minimum(1.0, work.cpu_milli[rows] / largest)
        return -(base * (1.0 - saturation * asked) + urgency(view, rows))


def urgency(view: View, rows: Ints) -> Floats:
    """How much of its SLA time each row has used, in [0, 1]; 0 without an SLA."""
    work = view.trace.workloads
    budget = wait_budget(work, rows)
    waited = np.maximum(0.0, view.now - work.submit[rows])
    with np.errstate(divide="ignore", invalid="ignore"):
        used = np.where(budget > 0, waited / budget, 1.0)
    return np.clip(np.where(np.isfinite(budget), used, 0.0), 0.0, 1.0)


class SemanticDynamic(Policy):
    """Semantics-aware dynamic scheduling (M8): what must not wait goes first, and what may be stopped gives way.

    The class of a workload (rank, SLA, preemptible or not) decides together with the time that is left: within a rank
    the least time left to its SLA first; a workload that is past half its SLA time moves up one rank, so that nobody
    with an SLA starves; only preemptible work of a less urgent rank is stopped.
    """

    name = "semantic-dynamic"
    interval = 1.0
    preempts = True

    def order(self, view: View, rows: Ints) -> Floats:
        """Return rank, less one when half of the SLA time has gone, and the share of SLA time left as a fraction."""
        used = urgency(view, rows)
        rank = view.trace.workloads.rank[rows] - (used >= 0.5)
        return rank + 0.999 * (1.0 - used)


class Edf(Policy):
    """Earliest deadline first (P6). A workload without a deadline gets one from its wait SLO, or comes last.

    With ``firm`` deadlines a workload leaves the queue when, by its estimate, it can no longer meet its own.
    """

    name = "edf"
    interval = 0.0

    def __init__(self, *, firm: bool = False) -> None:
        self.firm = firm

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the deadlines."""
        return self.deadline(view, rows)

    def leave_at(self, view: View, rows: Ints) -> Floats | None:
        """Return the latest promising starts, if deadlines are firm."""
        if not self.firm:
            return None
        work = view.trace.workloads
        return np.minimum(self.deadline(view, rows) - work.estimate[rows], work.cancel[rows])

    def deadline(self, view: View, rows: Ints) -> Floats:
        """Return the absolute deadlines of ``rows`` as the policy sees them now."""
        return deadlines(view.trace.workloads)[rows]


def deadlines(work: Workloads) -> Floats:
    """Absolute deadlines, [W]: as given, otherwise submission + wait SLO + estimate; inf for none."""
    derived = work.submit + work.wait_slo + work.estimate
    return np.where(np.isfinite(work.deadline), work.deadline, derived)


class CompensatedEdf(Edf):
    """EDF whose deadlines move with the spread of recent latencies (V8).

    When a workload is first seen, its deadline is extended by 0.15 · (p95 − mean) of the last 64 latencies.
    ``extension`` holds what was added in the last replay, [W]; NaN for what was never seen.
    """

    name = "edf-compensated"

    def __init__(self, *, firm: bool = False) -> None:
        super().__init__(firm=firm)
        self.extension: Floats = np.zeros(0)

    def keys(self, trace: Trace) -> Floats:
        """Start a replay: nothing is extended yet."""
        self.extension = np.full(len(trace.workloads), np.nan)
        return deadlines(trace.workloads)

    def deadline(self, view: View, rows: Ints) -> Floats:
        """Return the extended deadlines."""
        new = rows[np.isnan(self.extension[rows])]
        if len(new):
            latency = view.end[view.finished] - view.trace.workloads.submit[view.finished]
            spread = float(np.percentile(latency, 95) - latency.mean()) if len(latency) else 0.0
            self.extension[new] = COMPENSATION * max(0.0, spread)
        return super().deadline(view, rows) + self.extension[rows]
