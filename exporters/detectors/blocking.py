"""Who stands in a waiter's way: the less urgent workloads whose resources, once free, the waiter could use.

Waiters with the same constraints, demand and rank share one `Group`, so that a queue of ten thousand equal jobs costs
one search over the nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exporters.model import BASES, Check, Culprit, Demand, Node, Placement, Unread, Workload
from exporters.placement import UNLIMITED, ClusterView, as_gpus, pieces_that_fit, released_gpus
from exporters.policy import Policy

#: Culprits named per violation; the number of all is in its detail.
MAX_CULPRITS = 25

#: Answers remembered per group; past it they are worked out anew.
MAX_REMEMBERED = 256

Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Breach:
    """A wait past its SLO: waiting since, allowed seconds, and when the SLO ran out (Unix seconds)."""

    since: float
    slo: float

    @property
    def start(self) -> float:
        """When the SLO ran out."""
        return self.since + self.slo


def breach_of(workload: Workload, policy: Policy, now: float) -> Breach | None:
    """Return the breach of ``workload``'s wait SLO at ``now``; None when there is none, or no SLO."""
    since = workload.waiting_since
    if since is None or not workload.state.waiting:
        return None
    slo = policy.wait_slo(workload)
    return None if slo is None or now - since <= slo else Breach(since, slo)


@dataclass(slots=True)
class _NodeUse:
    """One node where the waiter could run if all less urgent work on it were gone."""

    node: Node
    held: list[tuple[int, Placement]]
    others: bool
    """Someone at least as urgent is on the node too."""
    free_pieces: int = 0
    """Pieces that fit in what is free on it already."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The holdings of a group as arrays: one entry per placement, with its holder and its node.

    Per node: how many entries it has, the pieces that fit when all or none of them are gone.
    """

    holder: np.ndarray[Any, np.dtype[np.intp]]
    use: np.ndarray[Any, np.dtype[np.intp]]
    full: np.ndarray[Any, np.dtype[np.intp]]
    fits_all: np.ndarray[Any, np.dtype[np.int64]]
    fits_free: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Group:
    """The less urgent holders that matter to a set of equal waiters.

    ``holders`` are the candidates; ``started`` and ``held_milli`` align with them: Unix seconds (NaN when not known)
    and the milli-GPU that each holds where the waiter may run. ``alone`` lists candidates whose node is not known, and
    that hold at least the waiter's whole demand.
    """

    demand: Demand
    exclusive: bool
    holders: list[Workload]
    started: np.ndarray[Any, np.dtype[np.float64]]
    held_milli: np.ndarray[Any, np.dtype[np.float64]]
    preemptible: Mask
    dominates: Mask
    fits_free: bool | None
    """Whether the waiter fits in what is free already; None when not known."""
    checks: tuple[Check, ...]
    unchecked: tuple[Unread, ...]
    _view: ClusterView
    _uses: list[_NodeUse] = field(default_factory=list)
    _base_pieces: int = 0
    _alone: Mask = field(default_factory=lambda: np.zeros(0, bool))
    _useful: dict[tuple[bool, bytes], Mask] = field(default_factory=dict)
    _layouts: dict[bool, _Layout] = field(default_factory=dict)

    def useful(self, chosen: Mask, *, whole_demand: bool = False) -> Mask:
        """Return which of the ``chosen`` holders would make room: all False when the waiter would not fit even then.

        ``whole_demand`` also asks for CPU and memory, where they are known; otherwise GPUs decide.
        """
        # Waiters of one group mostly choose the same holders: all of them, when all may be preempted.
        key = (whole_demand, chosen.tobytes())
        known = self._useful.get(key)
        if known is None:
            if len(self._useful) >= MAX_REMEMBERED:
                self._useful.clear()
            known = self._useful[key] = self._search(chosen, whole_demand)
        return known

    def _search(self, chosen: Mask, whole_demand: bool) -> Mask:
        result = chosen & self._alone
        if not self._uses:
            return result
        layout = self._layout(whole_demand)
        taken = chosen[layout.holder]
        counts = np.bincount(layout.use[taken], minlength=len(self._uses))
        fits = np.where(counts == layout.full, layout.fits_all, layout.fits_free)
        for at in np.flatnonzero((counts > 0) & (counts < layout.full)):
            use = self._uses[at]
            mine = [(index, placement) for index, placement in use.held if chosen[index]]
            fits[at] = _pieces(self._view, self.demand, self.exclusive, use, mine, whole_demand) or 0
        if self._base_pieces + int(fits.sum()) >= self.demand.pieces:
            result[layout.holder[taken & ((fits > 0) & (counts > 0))[layout.use]]] = True
        return result

    def _layout(self, whole_demand: bool) -> _Layout:
        found = self._layouts.get(whole_demand)
        if found is None:
            found = self._layouts[whole_demand] = _Layout(
                holder=np.array([index for use in self._uses for index, _ in use.held], dtype=np.intp),
                use=np.array([at for at, use in enumerate(self._uses) for _ in use.held], dtype=np.intp),
                full=np.array([len(use.held) for use in self._uses], dtype=np.intp),
                fits_all=np.array(
                    [
                        _pieces(self._view, self.demand, self.exclusive, use, use.held, whole_demand) or 0
                        for use in self._uses
                    ],
                    dtype=np.int64,
                ),
                fits_free=np.array([use.free_pieces for use in self._uses], dtype=np.int64),
            )
        return found

    def culprits(
        self, chosen: Mask, since: float, now: float, levels: np.ndarray[Any, np.dtype[np.int64]] | None = None
    ) -> tuple[Culprit, ...]:
        """Return the ``chosen`` holders with the most GPU-seconds taken between ``since`` and ``now``, at most 25.

        ``levels`` gives the index into `BASES` of each holder; without it culprits have no basis.
        """
        indices = np.flatnonzero(chosen)
        began = np.fmax(self.started[indices], since)
        seconds = np.maximum(0.0, now - began) * self.held_milli[indices] / 1000.0
        if len(indices) > MAX_CULPRITS:
            least = np.partition(seconds, -MAX_CULPRITS)[-MAX_CULPRITS]
            largest = seconds >= least
            indices, seconds = indices[largest], seconds[largest]
        pairs = sorted(
            zip(seconds.tolist(), indices.tolist(), strict=True), key=lambda pair: (-pair[0], self.holders[pair[1]].id)
        )
        found = []
        for taken, at in pairs[:MAX_CULPRITS]:
            holder = self.holders[at]
            found.append(
                Culprit(
                    workload=holder.id,
                    service=holder.display_service,
                    rank=holder.rank,
                    gpu_seconds=round(taken, 3),
                    basis=None if levels is None else BASES[int(levels[at])],
                )
            )
        return tuple(found)


class Blocking:
    """Finds the `Group` of any waiter of one snapshot."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self._on_node: dict[str, list[tuple[Workload, Placement]]] = defaultdict(list)
        self._elsewhere: list[Workload] = []
        self._groups: dict[object, Group] = {}
        for workload in view.snapshot.workloads:
            if not workload.state.holding:
                continue
            known = [placement for placement in workload.placements if placement.node in view.nodes]
            for placement in known:
                self._on_node[placement.node].append((workload, placement))
            if not known:
                self._elsewhere.append(workload)

    def group(self, waiter: Workload) -> Group | None:
        """Return the less urgent holders that matter to ``waiter``; None when its rank is not known."""
        if waiter.rank is None:
            return None
        eligibility = self.view.eligibility(waiter)
        # Equal constraints share one Eligibility object, which the view keeps alive.
        key = (id(eligibility), waiter.demand, waiter.rank, waiter.constraints.exclusive)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self._build(waiter, waiter.rank)
        return found

    def _build(self, waiter: Workload, rank: int) -> Group:
        eligibility = self.view.eligibility(waiter)
        demand, exclusive = waiter.demand, waiter.constraints.exclusive
        holders: list[Workload] = []
        index: dict[str, int] = {}
        held: list[float] = []
        uses: list[_NodeUse] = []
        base = 0
        free_pieces: int | None = 0
        for node in eligibility.nodes or ():
            present = self._on_node.get(node.name, [])
            lower = [(w, p) for w, p in present if w.rank is not None and w.rank > rank and _relevant(p, w, demand)]
            use = _NodeUse(node, [], others=len(lower) < len(present))
            free_here = _pieces(self.view, demand, exclusive, use, [], whole_demand=True, held_by=bool(present))
            free_pieces = None if free_here is None or free_pieces is None else free_pieces + free_here
            trial = [(at, placement) for at, (_, placement) in enumerate(lower)]
            if not lower or not _pieces(self.view, demand, exclusive, use, trial, whole_demand=False):
                base += free_here or 0
                continue
            for workload, placement in lower:
                at = index.setdefault(workload.id, len(holders))
                if at == len(holders):
                    holders.append(workload)
                    held.append(0.0)
                held[at] += placement.gpu_milli
                use.held.append((at, placement))
            use.free_pieces = free_here or 0
            uses.append(use)
        alone = []
        for workload in self._elsewhere:
            if workload.rank is not None and workload.rank > rank and _covers(workload, demand):
                alone.append(len(holders))
                holders.append(workload)
                held.append(float(workload.held_gpu_milli))
        mask = np.zeros(len(holders), bool)
        mask[alone] = True
        unchecked = list(eligibility.unchecked)
        checks = [*eligibility.checks, Check.MIG_PROFILE if demand.mig_instances else Check.GPU_COUNT]
        if alone and eligibility.nodes is not None:
            unchecked.append(Unread("placement", f"not known where {holders[alone[0]].id} runs"))
        return Group(
            demand=demand,
            exclusive=exclusive,
            holders=holders,
            started=np.array([np.nan if w.started is None else w.started for w in holders], dtype=np.float64),
            held_milli=np.array(held, dtype=np.float64),
            preemptible=np.array([w.preemptible is True for w in holders], dtype=bool),
            dominates=np.array([_dominates(w, demand) for w in holders], dtype=bool),
            fits_free=None if free_pieces is None or not eligibility.nodes else free_pieces >= demand.pieces,
            checks=tuple(checks),
            unchecked=tuple(unchecked),
            _view=self.view,
            _uses=uses,
            _base_pieces=base,
            _alone=mask,
        )


def _relevant(placement: Placement, holder: Workload, demand: Demand) -> bool:
    """Whether a placement holds anything of the kind that is asked for."""
    if demand.gpu_milli:
        return placement.gpu_milli > 0
    if demand.mig_instances:
        return bool(placement.mig_instances)
    return (placement.cpu_milli or 0) > 0 or holder.demand.cpu_milli is not None


def _pieces(
    view: ClusterView,
    demand: Demand,
    exclusive: bool,
    use: _NodeUse,
    released: Iterable[tuple[int, Placement]],
    whole_demand: bool,
    held_by: bool = False,
) -> int | None:
    """Pieces that fit on the node once ``released`` is gone; None when what is free is not known."""
    placements = [placement for _, placement in released]
    if exclusive and (use.others or held_by or len(placements) < len(use.held)):
        return 0
    node = use.node
    gpus = released_gpus(node, view.free_gpus(node, demand), placements)
    mig = node.mig_free
    if mig is not None and demand.mig_profile and placements:
        names = {name for placement in placements for name in placement.mig_instances}
        back = sum(
            1
            for name in node.devices
            if (device := view.devices.get(name)) is not None
            for instance in device.mig_instances
            if instance.id in names and instance.profile == demand.mig_profile
        )
        mig = {**mig, demand.mig_profile: mig.get(demand.mig_profile, 0) + back}
    if whole_demand or not demand.wants_gpu:
        cpu = _sum(node.cpu_free_milli, [placement.cpu_milli for placement in placements])
        memory = _sum(node.memory_free_bytes, [placement.memory_bytes for placement in placements])
    else:
        cpu = memory = None
    fit = pieces_that_fit(demand, gpus, cpu, memory, mig)
    return fit if fit is None or fit < UNLIMITED else demand.pieces


def _sum(free: int | None, parts: list[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return None if free is None or len(known) < len(parts) else free + sum(known)


def _covers(holder: Workload, demand: Demand) -> bool:
    """Whether one holder, whose node is not known, holds as many GPUs (or as much CPU) as the waiter asks for."""
    if demand.gpu_milli:
        return holder.held_gpu_milli >= demand.total_gpu_milli
    if demand.mig_instances:
        theirs = holder.demand
        return (
            theirs.mig_profile == demand.mig_profile
            and theirs.mig_instances * theirs.pieces >= demand.mig_instances * demand.pieces
        )
    if not demand.cpu_milli:
        return False
    return (holder.demand.cpu_milli or 0) * holder.demand.pieces >= demand.cpu_milli * demand.pieces


def _dominates(holder: Workload, demand: Demand) -> bool:
    """Whether what ``holder`` holds would by itself fit the whole demand, CPU and memory included.

    An amount that the waiter needs and the holder's record lacks cannot be shown to fit, so it does not.
    """
    theirs = holder.demand
    parts = [
        (
            as_gpus(placement.gpu_milli),
            placement.cpu_milli if placement.cpu_milli is not None else theirs.cpu_milli,
            placement.memory_bytes if placement.memory_bytes is not None else theirs.memory_bytes,
        )
        for placement in holder.placements
    ] or [(as_gpus(theirs.gpu_milli), theirs.cpu_milli, theirs.memory_bytes)] * theirs.pieces
    if demand.mig_instances:
        return False
    fit = 0
    for gpus, cpu, memory in parts:
        if (demand.cpu_milli and cpu is None) or (demand.memory_bytes and memory is None):
            return False
        fit += pieces_that_fit(demand, gpus, cpu, memory) or 0
    return fit >= demand.pieces
