"""Who is to blame for a wait, by the scheduler's own account."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rca.blocking import GPU_CONTENTION, METRIC, settle
from rca.gnn.infer import Prediction
from rca.graph import EDGE_STATIC, NODE_KINDS, RELATIONS, CallGraph
from rca.incident import NodeKind, Relation
from rca.panel import LEAD, Panel

NODES = ("batch-1", "batch-2", "queue/urgent", "service", "waiter")
KINDS = (NodeKind.WORKLOAD, NodeKind.WORKLOAD, NodeKind.QUEUE, NodeKind.SERVICE, NodeKind.WORKLOAD)
#: Caller, callee, GPU-seconds that the callee took while the caller waited.
EDGES = (
    ("service", "waiter", np.nan),
    ("waiter", "batch-1", 30.0),
    ("waiter", "batch-2", 10.0),
    ("waiter", "queue/urgent", np.nan),
)
MECHANISMS = ("queue imbalance", GPU_CONTENTION)


def panel(*, account: bool = True) -> Panel:
    values = np.full((len(EDGES), LEAD + 5), np.nan)
    values[:, -1] = [taken for _, _, taken in EDGES]
    graph = CallGraph(
        nodes=NODES,
        kinds=np.array([NODE_KINDS.index(kind) for kind in KINDS]),
        callers=np.array([NODES.index(caller) for caller, _, _ in EDGES]),
        callees=np.array([NODES.index(callee) for _, callee, _ in EDGES]),
        relations=np.full(len(EDGES), RELATIONS.index(Relation.QUEUED_BEHIND)),
        asynchronous=np.zeros(len(EDGES), dtype=bool),
        protocols=("",) * len(EDGES),
        edge_static=np.full((len(EDGES), len(EDGE_STATIC)), np.nan),
    )
    return Panel(
        graph=graph, baseline={}, window={}, edge_baseline={}, edge_window={METRIC: values} if account else {},
        step=1.0, baseline_start=0.0, baseline_step=1.0, window_start=100.0, victim=3, metric="latency_mean_seconds",
    )  # fmt: skip


def prediction(**cause: float) -> Prediction:
    probabilities = np.array([cause.get(name.replace("/", "_"), 0.0) for name in NODES])
    return Prediction(
        cause=probabilities, nothing=1.0 - probabilities.sum(), mechanism=np.tile([1.0, 0.0], (len(NODES), 1)),
        crossed=np.full(2 * len(EDGES), 0.1), attention=np.zeros(2 * len(EDGES)),
    )  # fmt: skip


def causes(found: Prediction) -> dict[str, float]:
    return {name: float(p) for name, p in zip(NODES, found.cause, strict=True) if p}


def test_the_wait_is_laid_to_who_took_the_gpus_by_how_much() -> None:
    found = settle(panel(), prediction(waiter=0.6, queue_urgent=0.2, service=0.1), MECHANISMS)
    # The queue is full because its only waiter is blocked; the service's own share stays.
    assert causes(found) == pytest.approx({"batch-1": 0.6, "batch-2": 0.2, "service": 0.1})
    assert found.mechanism[NODES.index("batch-1")].tolist() == [0.0, 1.0]
    assert found.crossed[:3].tolist() == pytest.approx([0.1, 0.75, 0.25])


def test_without_an_account_the_queue_is_named_and_nobody_in_it() -> None:
    found = settle(panel(account=False), prediction(waiter=0.7, queue_urgent=0.2), MECHANISMS)
    assert causes(found) == pytest.approx({"queue/urgent": 0.9})


def test_two_that_wait_for_each_other_keep_the_blame() -> None:
    where = panel()
    values = np.full((2, LEAD + 5), np.nan)
    values[:, -1] = 5.0
    circle = replace(
        where.graph, callers=np.array([0, 1]), callees=np.array([1, 0]), relations=where.graph.relations[:2],
        asynchronous=np.zeros(2, dtype=bool), protocols=("", ""), edge_static=where.graph.edge_static[:2],
    )  # fmt: skip
    given = replace(prediction(**{"batch-1": 0.8}), crossed=np.full(4, 0.1))
    found = settle(replace(where, graph=circle, edge_window={METRIC: values}), given, MECHANISMS)
    assert sum(causes(found).values()) == pytest.approx(0.8)


def test_where_nothing_queues_nothing_changes() -> None:
    services = replace(panel(account=False).graph, kinds=np.zeros(len(NODES), dtype=np.int64))
    given = prediction(service=0.9)
    assert settle(replace(panel(account=False), graph=services), given, MECHANISMS) is given
