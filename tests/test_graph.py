"""The call graph: what becomes a node, what becomes an edge, and what the arrays say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import networkx as nx
import numpy as np
import pyarrow as pa
import pytest

from rca.errors import NotFoundError
from rca.graph import EDGE_STATIC, NODE_KINDS, RELATIONS, CallGraph, build
from rca.incident import DEVICES_SCHEMA, EDGES_SCHEMA, WORKLOADS_SCHEMA, Header, Incident, Victim, Window, metrics_table

ONSET = datetime(2026, 1, 31, 3, 5, tzinfo=UTC)
BASELINE = Window(ONSET - timedelta(minutes=65), ONSET - timedelta(minutes=5))
INCIDENT = Window(ONSET - timedelta(minutes=5), ONSET + timedelta(minutes=15))

Row = dict[str, Any]


def calls(*pairs: str, **more: Any) -> list[Row]:
    """Edge rows from "caller>callee"; ``more`` goes into each."""
    return [{"caller": pair.split(">")[0], "callee": pair.split(">")[1], "relation": "calls", **more} for pair in pairs]


def make(
    edges: list[Row] = [],  # noqa: B006 - never changed
    *,
    victim: str = "web",
    measured: tuple[str, ...] = (),
    nodes: dict[str, str] | None = None,
    workloads: list[Row] | None = None,
    devices: list[Row] | None = None,
) -> Incident:
    """A bundle with the given edges and tables; ``measured`` nodes have one metric value."""
    tables: dict[str, pa.Table] = {}
    if nodes is not None:
        tables["nodes"] = pa.table({"node": list(nodes), "kind": list(nodes.values())})
    if workloads is not None:
        rows = [{"workload": "w", "state": "running", **row} for row in workloads]
        tables["workloads"] = pa.Table.from_pylist(rows, schema=WORKLOADS_SCHEMA)
    if devices is not None:
        tables["devices"] = pa.Table.from_pylist(devices, schema=DEVICES_SCHEMA)
    return Incident.create(
        Header(id="INC-1", window=INCIDENT, baseline=BASELINE, victim=Victim(victim, "error_ratio")),
        metrics=metrics_table(
            np.full(len(measured), INCIDENT.start.timestamp()),
            list(measured),
            ["error_ratio"] * len(measured),
            np.zeros(len(measured)),
        ),
        edges=pa.Table.from_pylist(edges, schema=EDGES_SCHEMA),
        **tables,
    )


def shown(graph: CallGraph) -> set[str]:
    """Edges as "caller relation callee"."""
    return {
        f"{graph.nodes[a]} {RELATIONS[r].value} {graph.nodes[b]}"
        for a, r, b in zip(graph.callers, graph.relations, graph.callees, strict=True)
    }


def kinds(graph: CallGraph) -> dict[str, str]:
    return {name: graph.kind(i).value for i, name in enumerate(graph.nodes)}


def static(graph: CallGraph, edge: int = 0) -> dict[str, float]:
    return dict(zip(EDGE_STATIC, graph.edge_static[edge].tolist(), strict=True))


# --- nodes and edges --------------------------------------------------------------------------------------------------


def test_nodes_come_from_edges_metrics_the_nodes_table_and_the_victim_in_order_of_name() -> None:
    graph = build(make(calls("web>cart", "cart>db"), measured=("mailer",), nodes={"ledger": "service"}, victim="web"))
    assert graph.nodes == ("cart", "db", "ledger", "mailer", "web")
    assert graph.index == {name: i for i, name in enumerate(graph.nodes)}
    assert shown(graph) == {"web calls cart", "cart calls db"}


def test_a_victim_that_nothing_else_mentions_is_no_node() -> None:
    graph = build(make(calls("web>cart"), victim="elsewhere"))
    assert graph.nodes == ("cart", "web")


def test_repeated_edges_are_merged_rates_add_up_and_the_rest_is_weighted_by_rate() -> None:
    graph = build(
        make(
            calls("web>db", call_rate=30.0, error_ratio=0.1, latency_seconds=0.2, timeout_seconds=2.0)
            + calls("web>db", call_rate=10.0, error_ratio=0.5, latency_seconds=0.6, timeout_seconds=2.0)
        )
    )
    assert static(graph) == pytest.approx(
        {"call_rate": 40.0, "error_ratio": 0.2, "latency_seconds": 0.3, "timeout_seconds": 2.0}
    )


def test_repeated_edges_without_rates_count_alike() -> None:
    graph = build(make(calls("web>db", latency_seconds=0.2) + calls("web>db", latency_seconds=0.4)))
    merged = static(graph)
    assert merged["latency_seconds"] == pytest.approx(0.3)
    assert np.isnan(merged["call_rate"])


def test_a_repeated_edge_that_knows_less_takes_nothing_away() -> None:
    graph = build(make(calls("web>db", latency_seconds=0.2, call_rate=5.0, protocol="grpc") + calls("web>db")))
    assert static(graph)["latency_seconds"] == pytest.approx(0.2)
    assert static(graph)["call_rate"] == pytest.approx(5.0)
    assert graph.protocols == ("grpc",)


def test_a_call_that_somebody_waits_for_is_not_asynchronous() -> None:
    assert build(make(calls("web>db", asynchronous=True))).asynchronous.tolist() == [True]
    assert build(make(calls("web>db"))).asynchronous.tolist() == [False]
    both = calls("web>db", asynchronous=True) + calls("web>db", asynchronous=False)
    assert build(make(both)).asynchronous.tolist() == [False]


def test_edges_of_another_relation_stay_apart() -> None:
    rows = [*calls("web>db"), {"caller": "web", "callee": "db", "relation": "shares_device"}]
    assert shown(build(make(rows))) == {"web calls db", "web shares_device db"}


def test_a_self_call_is_dropped_and_its_node_stays() -> None:
    graph = build(make(calls("web>web", "web>db")))
    assert shown(graph) == {"web calls db"}
    assert graph.nodes == ("db", "web")


def test_what_an_edge_does_not_say_is_missing_not_zero() -> None:
    graph = build(make(calls("web>db", call_rate=0.0)))
    assert static(graph)["call_rate"] == 0.0
    assert np.isnan([static(graph)[name] for name in EDGE_STATIC[1:]]).all()
    assert graph.protocols == ("",)


def test_a_graph_without_edges_has_empty_arrays_of_the_right_shape() -> None:
    graph = build(make(measured=("web", "db")))
    assert graph.nodes == ("db", "web")
    assert graph.callers.shape == graph.callees.shape == graph.relations.shape == graph.asynchronous.shape == (0,)
    assert graph.edge_static.shape == (0, 4)
    assert graph.depths_from(1).tolist() == [-1, 0]
    assert not graph.has_cycle()


def test_the_order_of_rows_does_not_matter() -> None:
    rows = calls("web>cart", "cart>db", "web>db", "db>disk", call_rate=1.0)
    forward, backward = build(make(rows)), build(make(rows[::-1]))
    assert forward.nodes == backward.nodes
    for name in ("kinds", "callers", "callees", "relations", "asynchronous", "edge_static"):
        np.testing.assert_array_equal(getattr(forward, name), getattr(backward, name))


# --- infrastructure ---------------------------------------------------------------------------------------------------


def test_a_workload_that_serves_a_service_is_that_service() -> None:
    graph = build(
        make(
            calls("web>chat"),
            workloads=[{"workload": "chat-7f9c", "service": "chat", "devices": ["gpu-0"], "host": "node-a"}],
        )
    )
    assert kinds(graph) == {"chat": "service", "gpu-0": "gpu", "node-a": "host", "web": "service"}
    assert shown(graph) == {"web calls chat", "chat runs_on gpu-0", "chat runs_on node-a"}


def test_all_that_share_a_device_depend_on_each_other() -> None:
    graph = build(
        make(
            calls("web>chat"),
            workloads=[
                {"workload": "chat-0", "service": "chat", "devices": ["gpu-0"]},
                {"workload": "train-812", "devices": ["gpu-0", "gpu-1"]},
                {"workload": "tune-77", "devices": ["gpu-1"]},
            ],
        )
    )
    assert shown(graph) - {"web calls chat"} == {
        "chat runs_on gpu-0",
        "train-812 runs_on gpu-0",
        "train-812 runs_on gpu-1",
        "tune-77 runs_on gpu-1",
        "chat shares_device train-812",
        "train-812 shares_device chat",
        "train-812 shares_device tune-77",
        "tune-77 shares_device train-812",
    }
    assert kinds(graph)["train-812"] == "workload"


def test_two_replicas_of_one_service_on_a_device_do_not_share_it_with_themselves() -> None:
    graph = build(
        make(
            calls("web>chat"),
            workloads=[
                {"workload": "chat-0", "service": "chat", "devices": ["gpu-0"]},
                {"workload": "chat-1", "service": "chat", "devices": ["gpu-0"]},
            ],
        )
    )
    assert shown(graph) == {"web calls chat", "chat runs_on gpu-0"}


def test_a_waiting_workload_is_queued_behind_its_queue_and_those_who_hold_it() -> None:
    graph = build(
        make(
            measured=("web",),
            workloads=[
                {"workload": "infer", "queue": "gpu", "state": "pending", "devices": ["gpu-0"], "host": "node-a"},
                {"workload": "train", "queue": "gpu", "state": "running", "devices": ["gpu-0"]},
                {"workload": "done", "queue": "gpu", "state": "completed"},
            ],
        )
    )
    assert kinds(graph)["gpu"] == "queue"
    assert {"infer queued_behind gpu", "infer queued_behind train"} <= shown(graph)
    # What waits runs nowhere yet.
    assert not any(edge.startswith("infer runs_on") for edge in shown(graph))
    assert "train queued_behind gpu" not in shown(graph)


def test_a_gpu_runs_on_its_host() -> None:
    graph = build(make(measured=("web",), devices=[{"device": "gpu-0", "host": "node-a"}, {"device": "gpu-1"}]))
    assert kinds(graph) == {"gpu-0": "gpu", "gpu-1": "gpu", "node-a": "host", "web": "service"}
    assert shown(graph) == {"gpu-0 runs_on node-a"}


def test_the_nodes_table_decides_what_a_node_is() -> None:
    graph = build(
        make(
            calls("web>db"),
            nodes={"gpu-0": "host", "train": "service"},
            workloads=[{"workload": "train", "devices": ["gpu-0"]}],
        )
    )
    assert kinds(graph)["gpu-0"] == "host"
    assert kinds(graph)["train"] == "service"
    assert NODE_KINDS[graph.kinds[graph.find("db")]].value == "service"


# --- questions to the graph -------------------------------------------------------------------------------------------


def test_distances_follow_dependencies_or_ignore_their_direction() -> None:
    graph = build(make(calls("web>cart", "cart>db", "web>auth", "auth>db", "db>disk", "batch>db"), measured=("lone",)))
    down = dict(zip(graph.nodes, graph.depths_from(graph.find("web")).tolist(), strict=True))
    assert down == {"web": 0, "cart": 1, "auth": 1, "db": 2, "disk": 3, "batch": -1, "lone": -1}
    around = dict(zip(graph.nodes, graph.undirected_distance(graph.find("web")).tolist(), strict=True))
    assert around == {"web": 0, "cart": 1, "auth": 1, "db": 2, "disk": 3, "batch": 3, "lone": -1}


def test_cycles_end_and_are_noticed() -> None:
    graph = build(make(calls("web>cart", "cart>db", "db>web")))
    assert graph.has_cycle()
    assert sorted(graph.depths_from(graph.find("web")).tolist()) == [0, 1, 2]
    assert not build(make(calls("web>cart", "cart>db", "web>db"))).has_cycle()


def test_sharing_a_device_is_no_cycle_of_calls() -> None:
    graph = build(
        make(
            calls("web>chat"),
            workloads=[{"workload": "a", "devices": ["gpu-0"]}, {"workload": "b", "devices": ["gpu-0"]}],
        )
    )
    assert not graph.has_cycle()


def test_an_unknown_node_is_answered_with_the_closest_names() -> None:
    graph = build(make(calls("checkout>payment", "checkout>payment-db"), victim="checkout"))
    assert graph.nodes[graph.find("payment")] == "payment"
    with pytest.raises(NotFoundError, match="no node 'paymnet' in the call graph") as caught:
        graph.find("paymnet")
    assert caught.value.cure.startswith("closest names: payment")
    with pytest.raises(NotFoundError) as caught:
        graph.find("zzz")
    assert "rca incident show" in caught.value.cure


def test_the_networkx_view_holds_the_same_and_only_what_is_known() -> None:
    graph = build(
        make(
            calls("web>db", call_rate=3.0, protocol="sql"),
            workloads=[{"workload": "x", "service": "db", "host": "node-a"}],
        )
    ).to_networkx()
    assert isinstance(graph, nx.MultiDiGraph)
    assert dict(graph.nodes(data="kind")) == {"db": "service", "node-a": "host", "web": "service"}
    assert graph.get_edge_data("web", "db") == {
        0: {"relation": "calls", "protocol": "sql", "asynchronous": False, "call_rate": 3.0}
    }
    assert graph.get_edge_data("db", "node-a")[0]["relation"] == "runs_on"


def test_merged_edges_keep_the_time_out_whatever_their_order() -> None:
    rows = calls("web>db", call_rate=1.0) + calls("web>db", call_rate=1.0, timeout_seconds=2.0)
    assert static(build(make(rows)))["timeout_seconds"] == static(build(make(rows[::-1])))["timeout_seconds"] == 2.0
