"""A `TaskPriorityPolicy` file as a policy of the replay: what the organisation declared, applied to the trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from exporters.model import Workload, WorkloadState
from exporters.policy import Policy as Declaration
from exporters.policy import Rule
from rca.replay.model import Floats, Trace, Workloads
from rca.replay.policies.base import Policy


def as_seen(work: Workloads, row: int) -> Workload:
    """One row as the rules of a policy file see it: queue, tenant as namespace and label, QoS as priority class.

    ``matchLabels`` can name ``app`` and ``service`` (the service), ``queue`` and ``tenant``.
    """

    def name(names: tuple[str, ...], index: int) -> str:
        return names[index] if index >= 0 else ""

    service = name(work.service_names, int(work.service[row]))
    queue = name(work.queue_names, int(work.queue[row]))
    tenant = name(work.tenant_names, int(work.tenant[row]))
    labels = {"app": service, "service": service, "queue": queue, "tenant": tenant}
    return Workload(
        id=work.names[row],
        name=work.names[row],
        state=WorkloadState.PENDING,
        service=service,
        queue=queue,
        tenant=tenant,
        namespace=tenant,
        priority_class=name(work.qos_names, int(work.qos[row])),
        rank=int(work.rank[row]),
        labels={key: value for key, value in labels.items() if value},
    )


class Declared(Policy):
    """The larger weight of the first matching rule goes first; then the more urgent rank; then the submission.

    Guarantees in GPUs (or shares of GPU memory) belong to the ranks that their rules match. Preemption is as declared.
    """

    def __init__(self, declaration: Declaration) -> None:
        self.name = declaration.name
        self.declaration = declaration
        self.preempts = declaration.preemption.allowed

    def rules(self, work: Workloads) -> list[Rule | None]:
        """The first matching rule of each workload; equal ones are looked up once."""
        columns = np.stack([work.queue, work.tenant, work.qos, work.service, work.rank], axis=1)
        known: dict[tuple[int, ...], Rule | None] = {}
        found = []
        for row, key in enumerate(map(tuple, columns.tolist())):
            if key not in known:
                known[key] = self.declaration.rule_for(as_seen(work, row))
            found.append(known[key])
        return found

    def keys(self, trace: Trace) -> Floats:
        """Return positions in the order of weight and rank; also takes the guarantees from the rules."""
        work = trace.workloads
        rules = self.rules(work)
        weight = np.array([rule.weight if rule is not None and rule.weight is not None else 0.0 for rule in rules])
        self.guarantees = self._guarantees(trace, rules)
        pairs = np.stack([-weight, work.rank.astype(np.float64)], axis=1)
        if len(pairs) == 0:
            return np.zeros(0)
        return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.float64)

    def _guarantees(self, trace: Trace, rules: list[Rule | None]) -> tuple[float, ...]:
        capacity = max(1, trace.cluster.capacity_milli)
        shares = np.zeros(int(trace.workloads.rank.max(initial=0)) + 1)
        seen: set[str] = set()
        for row, rule in enumerate(rules):
            if rule is None or rule.name in seen or rule.resource_guarantee is None:
                continue
            seen.add(rule.name)
            promised = rule.resource_guarantee
            share = max(1000 * (promised.gpus or 0.0) / capacity, promised.gpu_memory_ratio or 0.0)
            shares[trace.workloads.rank[row]] += share
        if not shares.any():
            return ()
        return tuple((shares / max(1.0, shares.sum())).tolist())


def with_promises(trace: Trace, declaration: Declaration) -> Trace:
    """Return the trace with the wait SLOs that the policy file promises; rows without one keep theirs."""
    work = trace.workloads
    slo = np.array([declaration.wait_slo(as_seen(work, row)) or np.nan for row in range(len(work))], np.float64)
    return replace(trace, workloads=replace(work, wait_slo=np.where(np.isnan(slo), work.wait_slo, slo)))
