"""Multi-objective scheduling (P7): throughput, fairness and energy, joined by the weighted Tchebycheff distance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rca.replay.model import WHOLE, Floats, Ints
from rca.replay.policies.base import Placement, Policy, View


@dataclass(frozen=True)
class Weights:
    """What matters how much; they need not add to 1."""

    throughput: float = 1.0
    fairness: float = 1.0
    energy: float = 1.0

    def __post_init__(self) -> None:
        if min(self.throughput, self.fairness, self.energy) < 0 or self.throughput + self.fairness + self.energy <= 0:
            raise ValueError(f"weights must not be negative, nor all 0: {self}")


class Tchebycheff(Policy):
    """The next workload is the one whose worst weighted distance from the ideal is smallest.

    Distances in [0, 1] from the ideal of each objective among those that wait: throughput by the GPU-time that a
    workload needs before it is done, fairness by what its tenant holds already, energy by the GPU that its last,
    partly used device would leave idle. A twentieth of the sum breaks ties between equal worsts (the augmented form),
    so that no solution is dominated. A sweep over the weights gives the Pareto front.
    """

    name = "tchebycheff"
    interval = 10.0
    placement = Placement.PACKING

    def __init__(self, weights: Weights | None = None) -> None:
        self.weights = weights or Weights()

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the augmented distances."""
        work = view.trace.workloads
        demand = work.demand_milli
        running = view.running
        held = np.zeros(max(1, len(work.tenant_names)))
        named = running[work.tenant[running] >= 0]
        np.add.at(held, work.tenant[named], demand[named])
        cost = np.minimum(work.estimate[rows], 1e12) * np.maximum(demand[rows], 1)
        tenant = work.tenant[rows]
        owned = np.where(tenant >= 0, held[np.maximum(tenant, 0)], 0.0)
        idle = (WHOLE - work.gpu_milli[rows] % WHOLE) % WHOLE * (work.gpu_count[rows] > 0)
        distances = np.stack(
            [
                self.weights.throughput * _scaled(np.log1p(cost)),
                self.weights.fairness * _scaled(owned),
                self.weights.energy * _scaled(idle.astype(np.float64)),
            ]
        )
        joined: Floats = distances.max(axis=0) + 0.05 * distances.sum(axis=0)
        return joined


def _scaled(values: Floats) -> Floats:
    """Scale to [0, 1] between the least and the largest; all 0 where they are equal."""
    if len(values) == 0:
        return values
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros(len(values))
