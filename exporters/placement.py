"""Where a workload may run, and how many of its pieces fit: the arithmetic under every detector.

Pieces of a workload are equal and each lies on one node, so the most that fit at once is the sum over nodes of what
each can take. The search is exact, not a heuristic: if the sum is short, no placement exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from exporters.model import (
    WHOLE_GPU,
    Check,
    Demand,
    Device,
    Node,
    NodeState,
    Placement,
    Snapshot,
    Unread,
    Workload,
)

#: Stands for "as many as you like": a piece that asks for nothing limited.
UNLIMITED: Final = 1 << 60

_REPELLING: Final = frozenset({"NoSchedule", "NoExecute"})


@dataclass(frozen=True, slots=True)
class Eligibility:
    """The nodes that a workload may run on, ignoring what is free.

    ``nodes`` is None when the snapshot has no nodes. A check that lacked data let the node pass and is in
    ``unchecked``; ``checks`` lists the checks made on every node.
    """

    nodes: tuple[Node, ...] | None
    checks: tuple[Check, ...]
    unchecked: tuple[Unread, ...]


class ClusterView:
    """Look-ups over one snapshot, with eligibility remembered per distinct set of constraints."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.nodes: dict[str, Node] = {node.name: node for node in snapshot.nodes}
        self.devices: dict[str, Device] = {device.id: device for device in snapshot.devices}
        self._eligible: dict[object, Eligibility] = {}

    def eligibility(self, workload: Workload) -> Eligibility:
        """Return the nodes that ``workload`` may run on."""
        key = _key(workload)
        found = self._eligible.get(key)
        if found is None:
            found = self._eligible[key] = self._find(workload)
        return found

    def _find(self, workload: Workload) -> Eligibility:
        wanted = [check for check, applies in _APPLIES.items() if applies(workload)]
        if not self.nodes:
            missing = [Unread(check.value, "the source gives no nodes") for check in wanted]
            return Eligibility(None, (), (*missing, *_inexpressible(workload)))
        blind: dict[Check, str] = {}
        kept = []
        for node in self.nodes.values():
            passes = True
            for check in wanted:
                answer = _passes(check, workload, node)
                if answer is None:
                    blind.setdefault(check, node.name)
                elif not answer:
                    passes = False
                    break
            if passes:
                kept.append(node)
        unchecked = [Unread(check.value, f"not known for node {name}") for check, name in blind.items()]
        checks = tuple(check for check in wanted if check not in blind)
        return Eligibility(tuple(kept), checks, (*unchecked, *_inexpressible(workload)))

    def free_gpus(self, node: Node, demand: Demand) -> Sequence[int] | None:
        """Free milli-GPU of each GPU of ``node`` that ``demand`` could use; None when not known.

        A GPU that is shared and lacks the free memory that is asked for counts as full.
        """
        free = node.free_gpus if node.gpu_free_milli is None else node.gpu_free_milli
        if free is None:
            return None
        need = demand.gpu_memory_bytes
        if need is None or demand.gpu_milli >= WHOLE_GPU or len(node.devices) != len(free) or not node.gpu_free_milli:
            return free
        return [
            milli if _memory_free(self.devices.get(name), need) else 0
            for milli, name in zip(free, node.devices, strict=True)
        ]


def _memory_free(device: Device | None, need: int) -> bool:
    if device is None or device.memory_total_bytes is None or device.memory_used_bytes is None:
        return True
    return device.memory_total_bytes - device.memory_used_bytes >= need


def _key(workload: Workload) -> object:
    limits, demand = workload.constraints, workload.demand
    return (
        limits.partitions,
        tuple(sorted(limits.node_selector.items())),
        limits.features,
        limits.required_nodes,
        limits.excluded_nodes,
        limits.tolerations,
        limits.unchecked,
        demand.gpu_models,
        demand.gpu_memory_bytes,
    )


def _inexpressible(workload: Workload) -> list[Unread]:
    return [Unread(name, "not part of the model") for name in workload.constraints.unchecked]


_APPLIES: Final[Mapping[Check, Callable[[Workload], bool]]] = {
    Check.NODE_STATE: lambda _: True,
    Check.PARTITION: lambda workload: bool(workload.constraints.partitions),
    Check.NODE_SELECTOR: lambda workload: bool(workload.constraints.node_selector or workload.constraints.features),
    Check.NODE_LIST: lambda workload: bool(workload.constraints.required_nodes or workload.constraints.excluded_nodes),
    Check.TAINTS: lambda _: True,
    Check.GPU_MODEL: lambda workload: bool(workload.demand.gpu_models),
    Check.GPU_MEMORY: lambda workload: workload.demand.gpu_memory_bytes is not None,
}


def _passes(check: Check, workload: Workload, node: Node) -> bool | None:
    """Whether ``node`` passes ``check``; None when the snapshot does not say."""
    limits, demand = workload.constraints, workload.demand
    match check:
        case Check.NODE_STATE:
            return None if node.state is NodeState.UNKNOWN else node.state is NodeState.UP
        case Check.PARTITION:
            return not set(limits.partitions).isdisjoint(node.partitions)
        case Check.NODE_SELECTOR:
            labels = node.labels
            return all(labels.get(key) == value for key, value in limits.node_selector.items()) and set(
                limits.features
            ) <= set(node.features)
        case Check.NODE_LIST:
            wanted = not limits.required_nodes or node.name in limits.required_nodes
            return wanted and node.name not in limits.excluded_nodes
        case Check.TAINTS:
            return _tolerated(workload, node)
        case Check.GPU_MODEL:
            if not node.gpu_models:
                return None if node.gpu_capacity_milli is None or node.gpu_capacity_milli else False
            models = {model.casefold() for model in node.gpu_models}
            return any(model.casefold() in models for model in demand.gpu_models)
        case Check.GPU_MEMORY:
            need = demand.gpu_memory_bytes
            return None if node.gpu_memory_bytes is None or need is None else node.gpu_memory_bytes >= need
    raise AssertionError(check)


def _tolerated(workload: Workload, node: Node) -> bool | None:
    if node.taints is None:
        # Schedulers without taints leave both out: nothing to check, and nothing missed.
        return True if workload.constraints.tolerations is None else None
    taints = [taint for taint in node.taints if taint.effect in _REPELLING]
    if not taints:
        return True
    if workload.constraints.tolerations is None:
        return None
    return all(any(item.tolerates(taint) for item in workload.constraints.tolerations) for taint in taints)


def pieces_that_fit(
    demand: Demand,
    gpus: Sequence[int] | None,
    cpu_milli: int | None = None,
    memory_bytes: int | None = None,
    mig_free: Mapping[str, int] | None = None,
) -> int | None:
    """Return how many pieces of ``demand`` fit into these free amounts at once, on one node.

    ``gpus`` are the free milli-GPU of each GPU. A share of a GPU must lie on one GPU; whole GPUs must be wholly free.
    None for ``cpu_milli`` or ``memory_bytes`` means *do not check*. Returns None when the GPU side is needed and not
    known, `UNLIMITED` when the demand asks for nothing that is limited.
    """
    most = UNLIMITED
    if demand.gpu_milli:
        if gpus is None:
            return None
        most = gpu_pieces(demand.gpu_milli, gpus)
    if demand.mig_instances:
        if mig_free is None:
            return None
        most = min(most, mig_free.get(demand.mig_profile or "", 0) // demand.mig_instances)
    if demand.cpu_milli and cpu_milli is not None:
        most = min(most, cpu_milli // demand.cpu_milli)
    if demand.memory_bytes and memory_bytes is not None:
        most = min(most, memory_bytes // demand.memory_bytes)
    return min(most, 1) if demand.distinct_nodes else most


def gpu_pieces(gpu_milli: int, gpus: Iterable[int]) -> int:
    """Return how many pieces of ``gpu_milli`` the free GPUs hold; shares do not span GPUs."""
    if gpu_milli < WHOLE_GPU:
        return sum(free // gpu_milli for free in gpus)
    return sum(1 for free in gpus if free >= WHOLE_GPU) // -(-gpu_milli // WHOLE_GPU)


def released_gpus(node: Node, free: Sequence[int] | None, placements: Iterable[Placement]) -> list[int] | None:
    """Return the free milli-GPU of each GPU if the workloads with these ``placements`` on ``node`` were gone.

    Where devices are not known, whole GPUs are added as whole and a share as a piece of its own, which never claims
    more than is certain.
    """
    if free is None:
        return None
    gpus = list(free)
    position = {name: index for index, name in enumerate(node.devices)} if len(node.devices) == len(gpus) else {}
    exact = node.gpu_free_milli is not None and bool(position)
    for placement in placements:
        if exact and placement.devices and all(name in position for name in placement.devices):
            share = placement.gpu_milli // len(placement.devices)
            for name in placement.devices:
                gpus[position[name]] = min(WHOLE_GPU, gpus[position[name]] + share)
        else:
            whole, rest = divmod(placement.gpu_milli, WHOLE_GPU)
            gpus.extend([WHOLE_GPU] * whole)
            if rest:
                gpus.append(rest)
    return gpus


def as_gpus(milli: int) -> list[int]:
    """Return ``milli`` as a list of GPUs: whole ones, then a share."""
    whole, rest = divmod(milli, WHOLE_GPU)
    return [WHOLE_GPU] * whole + ([rest] if rest else [])
