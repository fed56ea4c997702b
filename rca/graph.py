"""The call-chain graph (spec R1): services, the resources they share, and the calls between them.

An edge ``caller -> callee`` says that the caller *depends on* the callee: a fault at the callee can reach the caller.
Infrastructure is in the same graph, so that "batch job 812 on gpu-3" can be the cause of a slow service:

- ``service runs_on gpu|host`` and ``workload runs_on gpu|host``
- ``service shares_device workload`` (both ways between workloads of one device)
- ``workload queued_behind workload|queue``
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from exporters.model import WorkloadState
from rca.errors import NotFoundError
from rca.incident import Incident, NodeKind, Relation

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NODE_KINDS: tuple[NodeKind, ...] = tuple(NodeKind)
RELATIONS: tuple[Relation, ...] = tuple(Relation)

#: Above this many workloads on one device (or waiters times holders, squared), they are joined through the resource.
MOST_RESIDENTS = 32

#: Static attributes of an edge, in column order of `CallGraph.edge_static`; NaN where not given.
EDGE_STATIC = ("call_rate", "error_ratio", "latency_seconds", "timeout_seconds")


@dataclass(frozen=True)
class CallGraph:
    """A directed multigraph in arrays, with a networkx view.

    Attributes:
        nodes: names, in a deterministic order; length N.
        kinds: index into `NODE_KINDS`, shape [N].
        callers, callees: node indices, shape [E].
        relations: index into `RELATIONS`, shape [E].
        asynchronous: whether the caller does not wait, shape [E] (unknown counts as waiting).
        protocols: protocol of each edge or "", length E.
        edge_static: `EDGE_STATIC` columns, shape [E, 4], NaN where missing.
    """

    nodes: tuple[str, ...]
    kinds: Ints
    callers: Ints
    callees: Ints
    relations: Ints
    asynchronous: Bools
    protocols: tuple[str, ...]
    edge_static: Floats

    @property
    def index(self) -> dict[str, int]:
        """Node name to position."""
        return {name: i for i, name in enumerate(self.nodes)}

    def kind(self, node: int) -> NodeKind:
        """What node number ``node`` is."""
        return NODE_KINDS[int(self.kinds[node])]

    def find(self, name: str) -> int:
        """Position of node ``name``.

        Raises:
            NotFoundError: no such node; the message lists the closest names.
        """
        position = self.index.get(name)
        if position is not None:
            return position
        import difflib

        close = difflib.get_close_matches(name, self.nodes, n=3, cutoff=0.4)
        hint = f"closest names: {', '.join(close)}" if close else "list the nodes with `rca incident show`"
        raise NotFoundError(f"no node {name!r} in the call graph", cure=hint)

    def to_networkx(self) -> nx.MultiDiGraph:
        """The same graph with attributes `kind` on nodes and `relation`, `protocol`, R1 features on edges."""
        graph = nx.MultiDiGraph()
        graph.add_nodes_from((name, {"kind": self.kind(i).value}) for i, name in enumerate(self.nodes))
        for k in range(len(self.callers)):
            present = {
                name: float(value)
                for name, value in zip(EDGE_STATIC, self.edge_static[k], strict=True)
                if not np.isnan(value)
            }
            graph.add_edge(
                self.nodes[self.callers[k]],
                self.nodes[self.callees[k]],
                relation=RELATIONS[int(self.relations[k])].value,
                protocol=self.protocols[k],
                asynchronous=bool(self.asynchronous[k]),
                **present,
            )
        return graph

    def depths_from(self, node: int) -> Ints:
        """Hops along dependencies from ``node`` to each node it depends on; -1 where there is no way. Shape [N]."""
        return hops(node, self.callers, self.callees, len(self.nodes))

    def undirected_distance(self, node: int) -> Ints:
        """Hops from ``node`` to each node, whatever the direction; -1 where disconnected. Shape [N]."""
        both = np.concatenate([self.callers, self.callees]), np.concatenate([self.callees, self.callers])
        return hops(node, both[0], both[1], len(self.nodes))

    def has_cycle(self) -> bool:
        """Whether some node calls itself through others."""
        graph: nx.DiGraph = nx.DiGraph()
        calls = self.relations == RELATIONS.index(Relation.CALLS)
        graph.add_edges_from(zip(self.callers[calls].tolist(), self.callees[calls].tolist(), strict=True))
        return not nx.is_directed_acyclic_graph(graph)


def hops(start: int, sources: Ints, targets: Ints, size: int) -> Ints:
    """Breadth-first distance over an edge list; one vectorised sweep per level."""
    distance = np.full(size, -1, dtype=np.int64)
    distance[start] = 0
    frontier = np.zeros(size, dtype=bool)
    frontier[start] = True
    level = 0
    while frontier.any():
        level += 1
        reached = targets[frontier[sources]]
        frontier = np.zeros(size, dtype=bool)
        frontier[reached] = True
        frontier &= distance < 0
        distance[frontier] = level
    return distance


def build(incident: Incident) -> CallGraph:
    """Build the graph of an incident from its edges, nodes, workloads and devices tables.

    Repeated edges are merged (rates add up, latencies average by rate); self calls are dropped, since a node's own
    repeated work is part of the node. Node order is sorted by name, so that equal incidents give equal graphs.
    """
    kinds: dict[str, NodeKind] = {
        row["node"]: NodeKind(row["kind"]) for row in incident.nodes.select(["node", "kind"]).to_pylist()
    }
    edges: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in incident.edges.to_pylist():
        _merge(edges, row)
    for caller, callee, relation in _infrastructure(incident, kinds):
        edges.setdefault((caller, callee, relation.value), {})
    names: set[str] = set(kinds) | {incident.header.victim.node} if _known(incident, kinds, edges) else set(kinds)
    for caller, callee, _ in edges:
        names.update((caller, callee))
    names.update(incident.metrics.column("node").unique().to_pylist())
    nodes = tuple(sorted(names))
    position = {name: i for i, name in enumerate(nodes)}
    keys = sorted(edges)
    order = {kind: i for i, kind in enumerate(NODE_KINDS)}
    relation_order = {relation.value: i for i, relation in enumerate(RELATIONS)}
    static = np.full((len(keys), len(EDGE_STATIC)), np.nan)
    for k, key in enumerate(keys):
        for column, name in enumerate(EDGE_STATIC):
            value = edges[key].get(name)
            if value is not None:
                static[k, column] = value
    return CallGraph(
        nodes=nodes,
        kinds=np.array([order[kinds.get(name, NodeKind.SERVICE)] for name in nodes], dtype=np.int64),
        callers=np.array([position[key[0]] for key in keys], dtype=np.int64),
        callees=np.array([position[key[1]] for key in keys], dtype=np.int64),
        relations=np.array([relation_order[key[2]] for key in keys], dtype=np.int64),
        asynchronous=np.array([bool(edges[key].get("asynchronous")) for key in keys], dtype=bool),
        protocols=tuple(edges[key].get("protocol") or "" for key in keys),
        edge_static=static,
    )


def _known(incident: Incident, kinds: dict[str, NodeKind], edges: dict[tuple[str, str, str], Any]) -> bool:
    """Whether the victim appears anywhere but in the header."""
    victim = incident.header.victim.node
    return victim in kinds or any(victim in key[:2] for key in edges)


def _merge(edges: dict[tuple[str, str, str], dict[str, Any]], row: dict[str, Any]) -> None:
    if row["caller"] == row["callee"]:
        return
    key = (row["caller"], row["callee"], row["relation"])
    seen = edges.get(key)
    if seen is None:
        edges[key] = row
        return
    merged = dict(seen)
    old_rate, new_rate = seen.get("call_rate"), row.get("call_rate")
    for name in ("error_ratio", "latency_seconds"):
        old, new = seen.get(name), row.get(name)
        if old is None or new is None:
            merged[name] = new if old is None else old
        elif old_rate and new_rate:
            merged[name] = (old * old_rate + new * new_rate) / (old_rate + new_rate)
        else:
            merged[name] = (old + new) / 2
    rates = [rate for rate in (old_rate, new_rate) if rate is not None]
    merged["call_rate"] = sum(rates) if rates else None
    timeouts = [t for t in (seen.get("timeout_seconds"), row.get("timeout_seconds")) if t is not None]
    merged["timeout_seconds"] = min(timeouts) if timeouts else None
    merged["protocol"] = min((p for p in (seen.get("protocol"), row.get("protocol")) if p), default=None)
    merged["asynchronous"] = bool(seen.get("asynchronous")) and bool(row.get("asynchronous"))
    edges[key] = merged


def _infrastructure(incident: Incident, kinds: dict[str, NodeKind]) -> Iterable[tuple[str, str, Relation]]:
    """Edges that follow from the scheduler's and the GPUs' view; adds the kinds of the nodes they name."""
    for row in incident.devices.select(["device", "host"]).to_pylist():
        kinds.setdefault(row["device"], NodeKind.GPU)
        if row["host"]:
            kinds.setdefault(row["host"], NodeKind.HOST)
            yield row["device"], row["host"], Relation.RUNS_ON
    on_device: dict[str, list[str]] = {}
    in_queue: dict[str, tuple[list[str], list[str]]] = {}
    columns = ["workload", "service", "queue", "state", "devices", "host"]
    for row in incident.workloads.select(columns).to_pylist():
        # What has ended is history, for the replay.
        if WorkloadState(row["state"]).ended:
            continue
        # A workload that serves a service is that service's node: its metrics and calls carry the service's name.
        name = row["service"] or row["workload"]
        kinds.setdefault(name, NodeKind.SERVICE if row["service"] else NodeKind.WORKLOAD)
        running = row["state"] == "running"
        if running:
            for device in filter(None, row["devices"] or []):
                kinds.setdefault(device, NodeKind.GPU)
                yield name, device, Relation.RUNS_ON
                on_device.setdefault(device, []).append(name)
            if row["host"]:
                kinds.setdefault(row["host"], NodeKind.HOST)
                yield name, row["host"], Relation.RUNS_ON
        if row["queue"]:
            waiting, holding = in_queue.setdefault(row["queue"], ([], []))
            (holding if running else waiting).append(name)
    for residents in on_device.values():
        # Each with each, as long as that stays readable; beyond, the device itself joins them.
        if len(residents) <= MOST_RESIDENTS:
            for name in residents:
                for other in residents:
                    if name != other:
                        yield name, other, Relation.SHARES_DEVICE
    for queue, (waiting, holding) in in_queue.items():
        kinds.setdefault(queue, NodeKind.QUEUE)
        for name in waiting:
            yield name, queue, Relation.QUEUED_BEHIND
        if len(waiting) * len(holding) <= MOST_RESIDENTS**2:
            for name in waiting:
                for other in holding:
                    if name != other:
                        yield name, other, Relation.QUEUED_BEHIND
        else:
            for other in holding:
                yield queue, other, Relation.QUEUED_BEHIND
