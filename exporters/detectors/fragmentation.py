"""V3 fragmentation: in total enough is free, and yet no placement exists. Shown by search, not by a threshold."""

from __future__ import annotations

from dataclasses import dataclass

from exporters.detectors.blocking import breach_of
from exporters.model import Check, Demand, Node, Unread, Violation, ViolationType, Workload, violation_id
from exporters.placement import UNLIMITED, ClusterView, pieces_that_fit
from exporters.policy import Policy


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of the search for a placement.

    ``blocked``: the totals suffice and the pieces that fit at once are fewer than those asked for. ``free_milli`` is
    the free milli-GPU over ``nodes`` eligible nodes.
    """

    blocked: bool
    free_milli: int
    nodes: int
    pieces: int
    unchecked: tuple[Unread, ...] = ()


def prove(view: ClusterView, waiter: Workload) -> Proof | None:
    """Search every placement of ``waiter`` on its eligible nodes; None when the data do not allow a proof.

    No proof is possible without nodes, or when the free GPUs of an eligible node are not known. Unknown CPU or memory
    is taken as enough and reported in ``unchecked``.
    """
    eligibility = view.eligibility(waiter)
    demand = waiter.demand
    if not demand.wants_gpu or not eligibility.nodes:
        return None
    totals = _Totals()
    pieces = 0
    for node in eligibility.nodes:
        gpus = view.free_gpus(node, demand)
        cpu, memory = node.cpu_free_milli, node.memory_free_bytes
        if node.gpu_capacity_milli == 0 and not node.gpu_free_milli:
            continue
        fit = pieces_that_fit(demand, gpus, cpu, memory, node.mig_free)
        if fit is None:
            return None
        if waiter.constraints.exclusive and _in_use(node) is not False:
            fit = 0
        pieces += fit if fit < UNLIMITED else demand.pieces
        totals.add(node, sum(gpus or ()), demand)
    unchecked = [*eligibility.unchecked]
    if demand.cpu_milli and totals.cpu is None:
        unchecked.append(Unread(Check.CPU.value, "free CPU is not known for every node: taken as enough"))
    if demand.memory_bytes and totals.memory is None:
        unchecked.append(Unread(Check.MEMORY.value, "free memory is not known for every node: taken as enough"))
    return Proof(
        blocked=pieces < demand.pieces and totals.suffice(demand),
        free_milli=totals.gpu,
        nodes=len(eligibility.nodes),
        pieces=pieces,
        unchecked=tuple(unchecked),
    )


@dataclass(slots=True)
class _Totals:
    gpu: int = 0
    mig: int = 0
    cpu: int | None = 0
    memory: int | None = 0

    def add(self, node: Node, gpu_milli: int, demand: Demand) -> None:
        self.gpu += gpu_milli
        self.mig += (node.mig_free or {}).get(demand.mig_profile or "", 0)
        cpu, memory = node.cpu_free_milli, node.memory_free_bytes
        self.cpu = None if self.cpu is None or cpu is None else self.cpu + cpu
        self.memory = None if self.memory is None or memory is None else self.memory + memory

    def suffice(self, demand: Demand) -> bool:
        """Whether the sum over nodes covers the demand; what is short in total is scarce, not fragmented."""
        return (
            self.gpu >= demand.total_gpu_milli
            and self.mig >= demand.mig_instances * demand.pieces
            and (self.cpu is None or self.cpu >= (demand.cpu_milli or 0) * demand.pieces)
            and (self.memory is None or self.memory >= (demand.memory_bytes or 0) * demand.pieces)
        )


def _in_use(node: Node) -> bool | None:
    amounts = (node.gpu_allocated_milli, node.cpu_allocated_milli)
    if any(amounts):
        return True
    return None if amounts == (None, None) else False


def detect(view: ClusterView, policy: Policy) -> list[Violation]:
    """Return a violation for each waiter past its SLO whose demand fits the totals and no placement."""
    snapshot = view.snapshot
    proofs: dict[object, Proof | None] = {}
    found = []
    for waiter in snapshot.workloads:
        breach = breach_of(waiter, policy, snapshot.time)
        if breach is None:
            continue
        # Equal waiters share the search; the view keeps each Eligibility alive, so its id is a stable key.
        key = (id(view.eligibility(waiter)), waiter.demand, waiter.constraints.exclusive)
        if key not in proofs:
            proofs[key] = prove(view, waiter)
        proof = proofs[key]
        if proof is None or not proof.blocked:
            continue
        demand = waiter.demand
        asked = (
            f"{demand.pieces} x {demand.mig_instances} {demand.mig_profile}"
            if demand.mig_instances
            else f"{demand.pieces} x {demand.gpu_milli / 1000:g} GPU"
        )
        eligibility = view.eligibility(waiter)
        checks = [*eligibility.checks, Check.MIG_PROFILE if demand.mig_instances else Check.GPU_COUNT]
        missing = {item.what for item in proof.unchecked}
        checks += [
            check
            for check, amount in ((Check.CPU, demand.cpu_milli), (Check.MEMORY, demand.memory_bytes))
            if amount and check.value not in missing
        ]
        found.append(
            Violation(
                id=violation_id(snapshot.cluster, waiter.id, ViolationType.FRAGMENTATION_BLOCKED, breach.since),
                type=ViolationType.FRAGMENTATION_BLOCKED,
                cluster=snapshot.cluster,
                victim=waiter.id,
                service=waiter.display_service,
                level=waiter.level,
                rank=waiter.rank,
                queue=waiter.queue,
                tenant=waiter.tenant,
                start=breach.start,
                limit_seconds=breach.slo,
                checks=tuple(checks),
                unchecked=proof.unchecked,
                detail=f"asks for {asked}; {proof.free_milli / 1000:g} GPU free on {proof.nodes} eligible nodes, "
                f"where {proof.pieces} of {demand.pieces} pieces fit",
            )
        )
    return found
