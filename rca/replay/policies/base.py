"""The policy interface: in which order, where, and at whose expense.

A policy is any object with the attributes of `Policy`; deriving from it and overriding what differs is the short way.
The engine asks three questions:

* **order**: which waiting workload is next? Either once, by a key per workload (`Policy.keys`, the fast way), or again
  every `Policy.interval` seconds from what the cluster looks like then (`Policy.order`). Smaller goes first; ties go to
  the earlier submission, then to the smaller identity.
* **place**: on which node and devices? One of the engine's own rules (`Policy.placement`), or `Policy.place`.
* **preempt**: whom to stop for a workload that fits nowhere? The engine's own rule, or `Policy.preempt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from rca.replay.model import Bools, Floats, Ints, Options, Trace


class Placement(IntEnum):
    """The engine's own rules for choosing a node (and the devices on it)."""

    FIRST = 0
    """The first node that fits."""
    BEST_FIT = 1
    """Least left over, CPU and GPU weighing the same."""
    DOT_PRODUCT = 2
    """Demand and what is free least aligned (the published simulator's variant of Tetris)."""
    PACKING = 3
    """Shared GPUs first, then free GPUs of used nodes, then free nodes."""
    CLUSTERING = 4
    """Workloads of one size class together."""
    RANDOM = 5
    FGD = 6
    """Where expected fragmentation F rises least (Fragmentation Gradient Descent, ATC 2023)."""
    WORST_FIT = 7
    """Most left over."""
    CUSTOM = 8
    """`Policy.place` says."""


@dataclass(frozen=True)
class View:
    """The cluster at the moment of a decision. Arrays are the engine's own: read them, never write or keep them.

    Workload arrays have shape [W], node arrays [N] or [N, G]; ``free_gpu`` is milli-GPU per device.
    ``waiting`` and ``running`` are indices; ``waiting`` is in the queue's present order. ``finished`` are the indices
    of the last ended workloads, oldest first (at most `View.WINDOW`).
    """

    now: float
    trace: Trace
    options: Options
    waiting: Ints
    running: Ints
    finished: Ints
    status: Ints
    start: Floats
    first_start: Floats
    end: Floats
    node: Ints
    preemptions: Ints
    free_gpu: Ints
    free_cpu: Ints
    free_memory: Ints

    @property
    def gpu_use(self) -> float:
        """Share of the cluster's milli-GPU that is allocated, 0 without GPUs."""
        capacity = self.trace.cluster.capacity_milli
        return 1.0 - float(self.free_gpu.sum()) / capacity if capacity else 0.0

    @property
    def cpu_use(self) -> float:
        """Share of the known CPU capacity that is allocated."""
        capacity = self.trace.cluster.cpu_milli
        known = capacity < (1 << 59)
        total = float(capacity[known].sum())
        return 1.0 - float(self.free_cpu[known].sum()) / total if total else 0.0

    @property
    def memory_use(self) -> float:
        """Share of the known memory that is allocated."""
        capacity = self.trace.cluster.memory_mib
        known = capacity < (1 << 59)
        total = float(capacity[known].sum())
        return 1.0 - float(self.free_memory[known].sum()) / total if total else 0.0


class Policy:
    """Base of all policies: first come, first served on the first node that fits."""

    name: str = "fcfs"
    #: The engine's placement rule, or `Placement.CUSTOM`.
    placement: Placement = Placement.FIRST
    #: Levels to which placement scores are rounded down before ties are broken; 0: exact scores.
    levels: int = 0
    #: None: `keys` once. Otherwise `order` is asked anew when this many seconds have passed (0: at every event).
    interval: float | None = None
    #: Share of the cluster's milli-GPU that is kept for each rank as long as that rank does not use it.
    guarantees: tuple[float, ...] = ()
    #: Weighted round robin over ranks: workloads of each rank that start per round; empty for none.
    rounds: tuple[int, ...] = ()
    #: Whether the policy stops less urgent workloads even when the options do not ask for preemption.
    preempts: bool = False
    #: Whether `preempt` replaces the engine's own choice of victims.
    chooses_victims: bool = False

    def keys(self, trace: Trace) -> Floats:
        """Return the static order, [W]; smaller first."""
        return trace.workloads.submit

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the order of the given workloads (waiting, or about to arrive) now, one key a row; smaller first."""
        return self.keys(view.trace)[rows]

    def place(self, view: View, workload: int, feasible: Bools) -> Floats:  # noqa: ARG002
        """Return a score a node, [N]; the largest of the feasible ones wins. Asked with `Placement.CUSTOM` only."""
        return np.zeros(len(feasible))

    def preempt(self, view: View, workload: int) -> Ints:  # noqa: ARG002
        """Return the running workloads to stop so that ``workload`` fits; empty for none."""
        return np.zeros(0, np.int64)

    def leave_at(self, view: View, rows: Ints) -> Floats | None:  # noqa: ARG002
        """Return when the given workloads give up waiting (inf: never), one time a row; None: as the trace says.

        Asked whenever `order` is; a time that has passed lets the workload leave unless it starts at once.
        """
        return None

    def open_nodes(self, view: View) -> Bools | None:  # noqa: ARG002
        """Return which nodes take new work, [N] (an elastic pool); None: all. Asked whenever `order` is."""
        return None


class Fcfs(Policy):
    """First come, first served (P3)."""
