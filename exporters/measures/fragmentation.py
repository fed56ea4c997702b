"""GPU fragmentation of a cluster's free GPUs (M2); for one device's memory see `exporters.measures.contiguity`.

M2 is the fragmentation measure of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
Fragmentation Gradient Descent" (USENIX ATC 2023): with p_m the share of task class m in the observed demand,
F(n) = Σ p_m · f(n, m), where f(n, m) is the free GPU of node n that a task of class m cannot use. If m cannot run on n
(too little GPU, CPU or memory, the wrong model, or it asks for no GPU at all), that is all of it; otherwise it is what
lies on GPUs whose free share is below the one asked for, min(demand, one GPU).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from exporters.model import WHOLE_GPU, Demand, Node, NodeState, Unread, Workload
from exporters.placement import ClusterView

#: Distinct demands kept in the distribution; the rarest past it are left out and the shares rescaled.
MAX_TASK_CLASSES: Final = 200

#: Piece sizes, in whole GPUs, for which stranded GPUs are reported.
SIZES: Final = (1, 2, 4, 8)

Amounts = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class TaskShare:
    """One class of the demand distribution: one piece's demand and its share p_m of all pieces."""

    demand: Demand
    share: float


def demand_distribution(workloads: Iterable[Workload], limit: int = MAX_TASK_CLASSES) -> tuple[TaskShare, ...]:
    """Return the distribution of demand over the pieces of all live workloads, most frequent first; shares add to 1.

    Demands for MIG instances are another resource and left out.
    """
    counts: Counter[Demand] = Counter()
    for workload in workloads:
        demand = workload.demand
        if workload.state.ended or demand.mig_instances:
            continue
        counts[msgspec.structs.replace(demand, pieces=1, distinct_nodes=False, gpu_memory_bytes=None)] += demand.pieces
    kept = counts.most_common(limit)
    total = sum(count for _, count in kept)
    return tuple(TaskShare(demand, count / total) for demand, count in kept)


@dataclass(frozen=True, slots=True)
class NodeFragmentation:
    """Free and fragmented milli-GPU of one node; 0 <= ``fragmented`` <= ``free``."""

    node: str
    free: float
    fragmented: float


@dataclass(frozen=True, slots=True)
class ClusterFragmentation:
    """Fragmentation of a cluster, in milli-GPU over nodes that take work.

    ``fragmented`` is None when no demand was observed. ``stranded`` maps a piece size in GPUs to what is left over.
    ``unusable`` is what no waiting workload can use; None when none waits for a GPU.
    """

    capacity: float
    free: float
    fragmented: float | None
    stranded: dict[int, float] = field(default_factory=dict)
    unusable: float | None = None
    nodes: tuple[NodeFragmentation, ...] = ()
    unread: tuple[Unread, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Fragmented over free; None when nothing is free or no demand was observed."""
        return None if self.fragmented is None or self.free <= 0 else min(1.0, self.fragmented / self.free)


class _Nodes:
    """The free amounts of nodes as arrays: ``gpus`` is nodes x GPUs, padded with 0; unknown CPU or memory: infinite."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        frees = [node.free_gpus or () for node in nodes]
        self.nodes = nodes
        self.gpus: Amounts = np.zeros((len(nodes), max((len(free) for free in frees), default=0)))
        for row, free in enumerate(frees):
            self.gpus[row, : len(free)] = free
        self.cpu = _amounts([node.cpu_free_milli for node in nodes])
        self.memory = _amounts([node.memory_free_bytes for node in nodes])
        self.free: Amounts = self.gpus.sum(axis=1)
        self.whole: Amounts = (self.gpus >= WHOLE_GPU).sum(axis=1).astype(np.float64)
        self._models = [{model.casefold() for model in node.gpu_models} for node in nodes]

    def runs(self, demand: Demand) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which nodes one piece of ``demand`` (which asks for GPU) could run on now."""
        if demand.gpu_milli < WHOLE_GPU:
            fits = (self.gpus >= demand.gpu_milli).any(axis=1)
        else:
            fits = self.whole >= -(-demand.gpu_milli // WHOLE_GPU)
        fits &= self.cpu >= (demand.cpu_milli or 0)
        fits &= self.memory >= (demand.memory_bytes or 0)
        if demand.gpu_models:
            wanted = {model.casefold() for model in demand.gpu_models}
            fits &= np.fromiter((bool(wanted & models) for models in self._models), bool, len(self._models))
        return fits

    def unusable(self, demand: Demand) -> Amounts:
        """f(n, m) for every node, in milli-GPU."""
        if demand.gpu_milli == 0:
            return self.free
        least = min(demand.gpu_milli, WHOLE_GPU)
        left = np.where(self.gpus < least, self.gpus, 0.0).sum(axis=1)
        result: Amounts = np.where(self.runs(demand), left, self.free)
        return result


def _amounts(values: Sequence[int | None]) -> Amounts:
    return np.array([np.inf if value is None else value for value in values], dtype=np.float64)


def unusable_by(node: Node, demand: Demand) -> float:
    """f(n, m): the free milli-GPU of ``node`` that one piece of ``demand`` cannot use.

    Raises:
        ValueError: the node's free GPUs are not known.
    """
    if node.free_gpus is None:
        raise ValueError(f"free GPUs of node {node.name} are not known")
    return float(_Nodes([node]).unusable(demand)[0])


def cluster_fragmentation(view: ClusterView, distribution: Sequence[TaskShare] | None = None) -> ClusterFragmentation:
    """Measure the fragmentation of the nodes that take work.

    ``distribution`` defaults to that of the snapshot's own workloads. A node whose free GPUs are not known is left out
    and named in ``unread``.
    """
    snapshot = view.snapshot
    candidates = [node for node in snapshot.nodes if node.state is NodeState.UP and node.gpu_capacity_milli != 0]
    nodes = [node for node in candidates if node.free_gpus is not None]
    unread = tuple(
        Unread(f"nodes: {node.name} free GPUs", "the source does not give capacity and allocation")
        for node in candidates
        if node.free_gpus is None
    )
    shares = demand_distribution(snapshot.workloads) if distribution is None else distribution
    arrays = _Nodes(nodes)
    fragmented = np.zeros(len(nodes))
    for item in shares:
        fragmented += item.share * arrays.unusable(item.demand)
    # Rounding in the sum of shares may pass the bound by an ulp.
    fragmented = np.minimum(fragmented, arrays.free)
    capacity = sum(
        node.gpu_capacity_milli if node.gpu_capacity_milli is not None else WHOLE_GPU * len(node.free_gpus or ())
        for node in nodes
    )
    return ClusterFragmentation(
        capacity=float(capacity),
        free=float(arrays.free.sum()),
        fragmented=float(fragmented.sum()) if shares else None,
        stranded={
            size: float((arrays.free - np.floor(arrays.whole / size) * size * WHOLE_GPU).sum()) for size in SIZES
        },
        unusable=_unusable_by_waiting(view, arrays),
        nodes=tuple(
            NodeFragmentation(node.name, float(free), float(lost))
            for node, free, lost in zip(nodes, arrays.free, fragmented, strict=True)
        )
        if shares
        else (),
        unread=unread,
    )


def _unusable_by_waiting(view: ClusterView, arrays: _Nodes) -> float | None:
    """Free milli-GPU on GPUs that not one waiting workload could use where it is allowed to run."""
    row = {node.name: at for at, node in enumerate(arrays.nodes)}
    usable = np.zeros(arrays.gpus.shape, dtype=bool)
    shapes: dict[tuple[int, Demand], Workload] = {}
    for workload in view.snapshot.workloads:
        if workload.state.waiting and workload.demand.gpu_milli:
            demand = msgspec.structs.replace(workload.demand, pieces=1, distinct_nodes=False)
            shapes.setdefault((id(view.eligibility(workload)), demand), workload)
    if not shapes:
        return None
    for (_, demand), workload in shapes.items():
        eligible = view.eligibility(workload).nodes
        allowed = np.zeros(len(arrays.nodes), dtype=bool)
        allowed[[row[node.name] for node in eligible or () if node.name in row]] = True
        runs = arrays.runs(demand) & allowed
        usable |= runs[:, None] & (arrays.gpus >= min(demand.gpu_milli, WHOLE_GPU))
    return float(arrays.gpus[~usable].sum())
