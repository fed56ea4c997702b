"""The three published dynamic weightings (P5). A larger weight goes first; at equal weight, the earlier submission."""

from __future__ import annotations

import numpy as np

from rca.replay.model import UNLIMITED, Floats, Ints
from rca.replay.policies.base import Policy, View
from rca.replay.policies.ordering import wait_budget


class HealthWeight(Policy):
    """0.6 · latency + 0.3 · error + 0.1 · CPU by service, each in [0, 1] and 1 at its best, every second.

    latency = max(0, 1 − p95 / scale) over the waits of the service's recently finished workloads; error = 1 − the share
    of them that missed their wait SLO; CPU = 1 − the cluster's CPU use. ``scale`` is 200 ms as published; batch
    clusters need a larger one. The weight follows health: it favours services that do well, as published.
    """

    name = "health-weight"
    interval = 1.0

    def __init__(self, scale_seconds: float = 0.2) -> None:
        self.scale = scale_seconds

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the negative weights; a service of which nothing finished counts as healthy."""
        work = view.trace.workloads
        service = work.service[view.finished]
        wait = view.first_start[view.finished] - work.submit[view.finished]
        missed = wait > work.wait_slo[view.finished]
        weights = np.empty(len(rows))
        for name in np.unique(work.service[rows]):
            own = service == name
            latency = max(0.0, 1.0 - float(np.percentile(wait[own], 95)) / self.scale) if own.any() else 1.0
            error = 1.0 - float(missed[own].mean()) if own.any() else 1.0
            weights[work.service[rows] == name] = 0.6 * latency + 0.3 * error + 0.1 * (1.0 - view.cpu_use)
        return -weights


class UrgencyWeight(Policy):
    """0.4 · (1 + 0.2 · cpu) + 0.35 · max(0.8, 1 − remaining / 300 s) + 0.25 · business (1 to 5), every 10 s.

    cpu is the workload's demand as a share of the largest node, remaining the SLA time that it has left; without an
    SLA the second term is at its floor.
    """

    name = "urgency-weight"
    interval = 10.0

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the negative weights."""
        work = view.trace.workloads
        largest = max(1, int(view.trace.cluster.cpu_milli.max()))
        cpu = np.minimum(1.0, work.cpu_milli[rows] / largest)
        remaining = np.maximum(0.0, work.submit[rows] + wait_budget(work, rows) - view.now)
        pressing = np.maximum(0.8, 1.0 - remaining / 300.0)
        business = np.clip(work.business[rows], 1.0, 5.0)
        weights: Floats = 0.4 * (1.0 + 0.2 * cpu) + 0.35 * pressing + 0.25 * business
        return -weights


class MemoryPressureWeight(Policy):
    """base · max(0.1, 1 − memory pressure % / 100); base alone where the pressure cannot be read.

    The base falls with the rank; the pressure is that of the nodes in the workload's pools. Every 10 s.
    """

    name = "memory-pressure-weight"
    interval = 10.0

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the negative weights."""
        work, cluster = view.trace.workloads, view.trace.cluster
        weights: Floats = 1.0 / (1.0 + work.rank[rows].astype(np.float64))
        known = cluster.memory_mib < UNLIMITED
        for pools in np.unique(work.pools[rows]):
            nodes = known & ((cluster.pool & pools) != 0) if pools else known
            capacity = float(cluster.memory_mib[nodes].sum())
            if capacity > 0:
                pressure = 1.0 - float(view.free_memory[nodes].sum()) / capacity
                weights[work.pools[rows] == pools] *= max(0.1, 1.0 - pressure)
        return -weights
