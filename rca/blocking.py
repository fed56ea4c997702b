"""What the scheduler's own account settles: a workload that waits is not the cause of its wait; who is in the way is.

The network was trained on services that slow down. Of a workload in a queue it sees that the wait is unusual, there and
in the queue, and takes these for the place of the fault. Where the bundle holds the scheduler's account of who held
what the waiter was eligible for (``blocking_gpu_seconds``, spec V1), the probability goes to those, by the GPU-seconds
that each took; without an account it goes to the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rca.gnn.infer import Prediction
from rca.graph import NODE_KINDS, RELATIONS, Floats
from rca.incident import NodeKind, Relation
from rca.panel import LEAD, Panel

METRIC = "blocking_gpu_seconds"
#: As `rca.simulation.faults.Mechanism` names it.
GPU_CONTENTION = "GPU contention"


def blocking(panel: Panel) -> Floats:
    """GPU-seconds that the callee of each edge took while its caller waited for them, 0 where none are told; [E]."""
    values = panel.edge_window.get(METRIC)
    if values is None:
        return np.zeros(len(panel.graph.callers))
    told = np.where(np.isfinite(values[:, LEAD:]), values[:, LEAD:], 0.0)
    # The account only grows while a wait lasts.
    taken: Floats = told.max(axis=1, initial=0.0)
    return taken


def settle(panel: Panel, prediction: Prediction, mechanisms: Sequence[str]) -> Prediction:
    """Return ``prediction`` with the probability of waiters and of their queues given to who is in the way.

    Args:
        mechanisms: names of the columns of `Prediction.mechanism`. What was taken is GPUs, so that is the mechanism.
    """
    graph = panel.graph
    size = len(graph.nodes)
    kind = np.array([NODE_KINDS.index(k) for k in (NodeKind.WORKLOAD, NodeKind.QUEUE)])
    queued = graph.relations == RELATIONS.index(Relation.QUEUED_BEHIND)
    taken = blocking(panel)
    total = np.bincount(graph.callers, weights=taken, minlength=size)
    blocked = total > 0
    to_queue = queued & (graph.kinds[graph.callers] == kind[0]) & (graph.kinds[graph.callees] == kind[1])
    if not blocked.any() and not to_queue.any():
        return prediction
    cause = prediction.cause.copy()
    # Waiters without an account: what is known is that their queue does not move.
    for edge in np.flatnonzero(to_queue & ~blocked[graph.callers]).tolist():
        waiter, queue = int(graph.callers[edge]), int(graph.callees[edge])
        cause[queue] += cause[waiter]
        cause[waiter] = 0.0
    # A queue in which every waiter is blocked by somebody is not to blame either.
    share: Floats = np.where(taken > 0, taken / np.maximum(total[graph.callers], 1e-12), 0.0)
    for queue in np.unique(graph.callees[queued & (graph.kinds[graph.callees] == kind[1])]).tolist():
        waiters = graph.callers[queued & (graph.callees == queue)]
        if blocked[waiters].all():
            cause[waiters] += cause[queue] * total[waiters] / total[waiters].sum()
            cause[queue] = 0.0
    # Who is in the way may itself wait behind another; a few rounds, since a circle would not end.
    for _ in range(4):
        moved = np.where(blocked, cause, 0.0)
        if moved.sum() < 1e-9:
            break
        cause = cause - moved + np.bincount(graph.callees, weights=moved[graph.callers] * share, minlength=size)
    mechanism = prediction.mechanism.copy()
    culprits = np.unique(graph.callees[taken > 0])
    mechanism[culprits] = [float(name == GPU_CONTENTION) for name in mechanisms]
    crossed = prediction.crossed.copy()
    crossed[: len(share)] = np.maximum(crossed[: len(share)], share)
    return replace(prediction, cause=cause, mechanism=mechanism, crossed=crossed)
