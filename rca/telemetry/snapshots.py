"""Recorded snapshots of a scheduler (`rca exporter record`) as an incident bundle.

The bundle holds what a replay of the schedule needs: every workload with its times, demand and nodes, and every node
with its capacity, as attributes of the nodes table (docs/replay.md).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from exporters.detectors import detect
from exporters.model import Device, Node, NodeState, Snapshot, ViolationType, Workload, WorkloadState
from exporters.placement import ClusterView
from exporters.policy import Policy, default_policy
from rca.errors import InvalidInputError, NotFoundError
from rca.incident import (
    DEVICES_SCHEMA,
    EDGES_SCHEMA,
    NODES_SCHEMA,
    WORKLOADS_SCHEMA,
    Header,
    Incident,
    NodeKind,
    Relation,
    Source,
    SourceStatus,
    Victim,
    Window,
    metrics_table,
)

METRIC: Final = "queue_wait_seconds"
#: Of the waiting workloads beside the victim, so many get a series of their own, the longest first.
MOST_WAITS: Final = 200


def incident_of(
    snapshots: Iterable[Snapshot],
    *,
    victim: str | None = None,
    until: datetime | None = None,
    policy: Policy | None = None,
    id: str | None = None,
    title: str = "",
) -> Incident:
    """Build the incident of a workload that waits in ``snapshots`` of one cluster, in the order of their times.

    Args:
        victim: id or service of the workload; by default the one whose violation is the longest, else whose wait is.
        until: leave out what came later.
        policy: by which violations are judged.

    Raises:
        InvalidInputError: there are fewer than two snapshots, or they are of several clusters, or nothing waits.
        NotFoundError: ``victim`` is not among the workloads, or never waits.
    """
    seen = sorted(
        (item for item in snapshots if until is None or item.time <= until.timestamp()), key=lambda item: item.time
    )
    seen = [item for item in seen if not item.lacks("workloads")]
    if len(seen) < 2:
        raise InvalidInputError(
            f"{len(seen)} snapshots with workloads; an incident needs two", cure="record for longer, or check --until"
        )
    clusters = sorted({item.cluster for item in seen})
    if len(clusters) > 1:
        raise InvalidInputError(
            f"snapshots of {len(clusters)} clusters: {', '.join(clusters)}", cure="give those of one"
        )
    return _Recording(seen, policy or default_policy()).incident(victim, id, title)


class _Recording:
    def __init__(self, seen: Sequence[Snapshot], policy: Policy) -> None:
        self.seen, self.policy = seen, policy
        self.last = seen[-1]
        self.workloads: dict[str, Workload] = {}
        self.first_seen: dict[str, int] = {}
        self.last_seen: dict[str, int] = {}
        for number, snapshot in enumerate(seen):
            for workload in snapshot.workloads:
                known = self.workloads.get(workload.id)
                if known is not None and workload.state.ended and not workload.placements and known.placements:
                    # Where it ran is forgotten once it has ended.
                    workload = _with_placements(workload, known)
                self.workloads[workload.id] = workload
                self.first_seen.setdefault(workload.id, number)
                self.last_seen[workload.id] = number

    def incident(self, wanted: str | None, id: str | None, title: str) -> Incident:
        victim = self._victim(wanted)
        since = victim.waiting_since
        assert since is not None  # noqa: S101 - a victim waits
        waits = [item.time for item in self.seen if _waits(item, victim.id)]
        end = min(self.last.time, waits[-1] + 60.0) + 1.0
        begin = min(since, waits[0])
        first = self.seen[0].time
        baseline = first if first < begin - 1.0 else begin - max(60.0, end - begin)
        header = Header(
            id=id or f"wait-{victim.id}-{int(since)}",
            window=Window(_moment(begin), _moment(end)),
            baseline=Window(_moment(baseline), _moment(begin)),
            victim=Victim(victim.id, METRIC),
            title=title or f"{victim.display_service} ({victim.level}) waits for its turn",
            onset=_moment(since) if since >= begin - (end - begin) else None,
            labels={"cluster": self.last.cluster, "scheduler": self.last.source},
            sources=self._sources(),
        )
        metrics, edges = self._metrics(victim)
        return Incident.create(
            header,
            metrics=metrics,
            edges=edges,
            nodes=self._nodes(),
            workloads=self._table(),
            devices=self._devices(),
        )

    def _victim(self, wanted: str | None) -> Workload:
        waiting: dict[str, Workload] = {}
        for snapshot in self.seen:
            for workload in snapshot.workloads:
                if workload.state.waiting and workload.waiting_since is not None:
                    waiting[workload.id] = workload
        if wanted is not None:
            if wanted in waiting:
                return waiting[wanted]
            mine = [item for item in waiting.values() if wanted in (item.name, item.service)]
            if mine:
                return min(mine, key=lambda item: (item.waiting_since, item.id))
            if wanted in self.workloads:
                raise NotFoundError(f"{wanted!r} never waits in these snapshots", cure="name a workload that does")
            near = ", ".join(difflib.get_close_matches(wanted, sorted(self.workloads), n=3, cutoff=0.6))
            raise NotFoundError(
                f"no workload {wanted!r}", cure=f"did you mean {near}?" if near else "give an id or a service"
            )
        if not waiting:
            raise InvalidInputError("nothing waits in these snapshots", cure="record while something waits")
        broken: dict[str, float] = {}
        for violation in detect(self.last, self.policy):
            if violation.victim in waiting and violation.type is not ViolationType.QOS_MISMATCH:
                broken[violation.victim] = max(broken.get(violation.victim, 0.0), violation.duration(self.last.time))
        chosen = max(broken, key=lambda name: (broken[name], name), default=None)
        if chosen is not None:
            return waiting[chosen]
        return max(waiting.values(), key=lambda item: (self._wait_of(item), item.id))

    def _wait_of(self, item: Workload) -> float:
        since = item.waiting_since
        return self.seen[self.last_seen[item.id]].time - since if since is not None else 0.0

    def _metrics(self, victim: Workload) -> tuple[pa.Table, pa.Table]:
        rows: list[tuple[float, str, str | None, str, float]] = []
        blamed: set[str] = set()
        longest = sorted(self.workloads.values(), key=lambda item: (-self._wait_of(item), item.id))
        kept = {item.id for item in longest[:MOST_WAITS]} | {victim.id}
        for snapshot in self.seen:
            now = snapshot.time
            waits = [item for item in snapshot.workloads if item.state.waiting and item.waiting_since is not None]
            wait = {item.id: max(0.0, now - (item.waiting_since or now)) for item in waits}
            rows += [(now, name, None, METRIC, value) for name, value in wait.items() if name in kept]
            if victim.id not in wait and now < (victim.waiting_since or now):
                # Before it was submitted: how long those of its queue and level waited.
                peers = [wait[i.id] for i in waits if (i.queue, i.level) == (victim.queue, victim.level)]
                rows.append((now, victim.id, None, METRIC, max(peers, default=0.0)))
            depth: dict[str, list[float]] = {queue: [] for queue in self._queues}
            for item in waits:
                if item.queue:
                    depth[item.queue].append(wait[item.id])
            for queue, values in sorted(depth.items()):
                rows.append((now, f"queue/{queue}", None, "queue_depth", float(len(values))))
                rows.append((now, f"queue/{queue}", None, METRIC, max(values, default=0.0)))
            if victim.id in wait:
                for name, seconds in self._blame(snapshot, victim.id):
                    blamed.add(name)
                    rows.append((now, victim.id, name, "blocking_gpu_seconds", seconds))
            rows += [row for device in snapshot.devices for row in _device_rows(now, device)]
        edges = [
            {"caller": victim.id, "callee": name, "relation": Relation.QUEUED_BEHIND.value} for name in sorted(blamed)
        ]
        rows.sort(key=lambda row: (row[1], row[2] or "", row[3], row[0]))
        table = metrics_table(
            np.array([row[0] for row in rows]),
            [row[1] for row in rows],
            [row[3] for row in rows],
            np.array([row[4] for row in rows]),
            [row[2] for row in rows],
        )
        return table, pa.Table.from_pylist(edges, schema=EDGES_SCHEMA)

    def _blame(self, snapshot: Snapshot, victim: str) -> list[tuple[str, float]]:
        taken: dict[str, float] = {}
        for violation in detect(snapshot, self.policy):
            if violation.victim == victim and violation.type is ViolationType.INVERSION:
                for culprit in violation.culprits:
                    taken[culprit.workload] = max(taken.get(culprit.workload, 0.0), culprit.gpu_seconds)
        return sorted(taken.items())

    @property
    def _queues(self) -> list[str]:
        return sorted({item.queue for item in self.workloads.values() if item.queue})

    def _table(self) -> pa.Table:
        rows = []
        for name, workload in sorted(self.workloads.items()):
            state, ended = self._end(workload)
            rank = workload.rank
            rows.append(
                {
                    "workload": name,
                    "service": None,
                    "queue": f"queue/{workload.queue}" if workload.queue else None,
                    "tenant": workload.tenant or workload.account or workload.namespace or None,
                    "priority_class": None if rank is None else workload.level,
                    "priority_rank": rank,
                    "state": state.value,
                    "submitted": _moment(workload.submitted),
                    "started": _moment(workload.started),
                    "ended": _moment(ended),
                    "gpus": _gpus(workload),
                    "preemptible": workload.preemptible,
                    "host": workload.placements[0].node if len(workload.placements) == 1 else None,
                    "devices": [d for item in workload.placements for d in item.devices] or None,
                }
            )
        return pa.Table.from_pylist(rows, schema=WORKLOADS_SCHEMA)

    def _end(self, workload: Workload) -> tuple[WorkloadState, float | None]:
        """State at the end of the recording. One that vanished has ended between two snapshots: half way."""
        number = self.last_seen[workload.id]
        if workload.state.ended or number == len(self.seen) - 1:
            return workload.state, workload.ended
        ended = (self.seen[number].time + self.seen[number + 1].time) / 2
        return (WorkloadState.COMPLETED if workload.state.holding else WorkloadState.CANCELLED), ended

    def _nodes(self) -> pa.Table:
        rows: dict[str, dict[str, Any]] = {}

        def add(name: str, kind: NodeKind, about: dict[str, str]) -> None:
            told = [(key, value) for key, value in about.items() if value]
            rows.setdefault(name, {"node": name, "kind": kind.value, "attributes": told})

        nodes = {node.name: node for item in self.seen for node in item.nodes}
        up = tuple(msgspec.structs.replace(node, state=NodeState.UP) for node in nodes.values())
        view = ClusterView(msgspec.structs.replace(self.last, nodes=up))
        for node in nodes.values():
            add(
                node.name,
                NodeKind.HOST,
                {
                    "gpus": "" if node.gpu_capacity_milli is None else str(node.gpu_capacity_milli // 1000),
                    "gpu_model": node.gpu_models[0] if len(node.gpu_models) == 1 else "",
                    "partitions": ",".join(node.partitions),
                    "state": "" if node.state in (NodeState.UP, NodeState.UNKNOWN) else node.state.value,
                    "cpu_milli": "" if node.cpu_capacity_milli is None else str(node.cpu_capacity_milli),
                    "memory_bytes": "" if node.memory_capacity_bytes is None else str(node.memory_capacity_bytes),
                },
            )
        for name, workload in sorted(self.workloads.items()):
            demand = workload.demand
            eligible = workload.eligible
            may = view.eligibility(workload).nodes
            add(
                name,
                NodeKind.WORKLOAD,
                {
                    "service": workload.display_service,
                    "pieces": str(demand.pieces),
                    "distinct_nodes": "true" if demand.distinct_nodes else "",
                    "hosts": ",".join(item.node for item in workload.placements),
                    "gpu_models": ",".join(demand.gpu_models),
                    "allowed_hosts": ""
                    if may is None or len(may) == len(up)
                    else ",".join(i.name for i in may) or "none",
                    "cpu_milli": "" if demand.cpu_milli is None else str(demand.cpu_milli),
                    "memory_bytes": "" if demand.memory_bytes is None else str(demand.memory_bytes),
                    "eligible": "" if eligible is None else repr(eligible),
                    "unchecked": ",".join(item.what for item in view.eligibility(workload).unchecked),
                },
            )
        for queue in self._queues:
            add(f"queue/{queue}", NodeKind.QUEUE, {})
        return pa.Table.from_pylist([rows[name] for name in sorted(rows)], schema=NODES_SCHEMA)

    def _devices(self) -> pa.Table:
        rows = [
            {
                "device": device.id,
                "host": device.node or None,
                "model": device.model or None,
                "memory_total_bytes": device.memory_total_bytes,
                "memory_free_bytes": None
                if device.memory_total_bytes is None or device.memory_used_bytes is None
                else max(0, device.memory_total_bytes - device.memory_used_bytes),
                "largest_free_block_bytes": None,
            }
            for _, device in sorted({device.id: device for item in self.seen for device in item.devices}.items())
        ]
        return pa.Table.from_pylist(rows, schema=DEVICES_SCHEMA)

    def _sources(self) -> tuple[Source, ...]:
        unread = sorted({f"{item.what}: {item.why}" for snapshot in self.seen for item in snapshot.unread})
        return (
            Source(
                name="recorded snapshots",
                kind=self.last.source,
                status=SourceStatus.PARTIAL if unread else SourceStatus.OK,
                detail="; ".join(unread[:5]),
            ),
        )


def _with_placements(workload: Workload, known: Workload) -> Workload:
    return msgspec.structs.replace(workload, placements=known.placements)


def _listed(nodes: Sequence[Node]) -> str:
    return ",".join(node.name for node in nodes) or "none"


def _waits(snapshot: Snapshot, name: str) -> bool:
    return any(item.id == name and item.state.waiting for item in snapshot.workloads)


def _gpus(workload: Workload) -> float | None:
    """GPUs asked for; None for MIG instances, which are no GPUs."""
    if workload.demand.mig_instances:
        return None
    asked = workload.demand.total_gpu_milli
    return (asked or sum(item.gpu_milli for item in workload.placements)) / 1000.0


def _device_rows(now: float, device: Device) -> list[tuple[float, str, str | None, str, float]]:
    rows: list[tuple[float, str, str | None, str, float]] = []
    if device.gpu_utilization_ratio is not None:
        rows.append((now, device.id, None, "gpu_utilization_ratio", device.gpu_utilization_ratio))
    if device.memory_total_bytes and device.memory_used_bytes is not None:
        share = device.memory_used_bytes / device.memory_total_bytes
        rows.append((now, device.id, None, "gpu_memory_utilization_ratio", share))
    return rows


def _moment(seconds: float | None) -> Any:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


__all__ = ["incident_of"]
