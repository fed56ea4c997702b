"""The Kubernetes source: watches the API server in the background and makes snapshots from what it has seen."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from exporters.errors import SourceUnreachableError
from exporters.model import Event, Node, Ranking, Snapshot, Unread, Workload, WorkloadState
from exporters.sources.kubernetes.client import connect
from exporters.sources.kubernetes.convert import (
    Context,
    GpuSizes,
    Links,
    Places,
    Ranks,
    ended_workload,
    gang_workloads,
    kueue_workloads,
    node_of,
    pod_state,
    pod_workload,
    preemption,
    sizes_of,
    unread_objects,
)
from exporters.sources.kubernetes.records import (
    ClassRecord,
    GroupRecord,
    KueueRecord,
    NodeRecord,
    PodRecord,
    parse_event,
    parse_kueue,
    parse_node,
    parse_pod,
    parse_pod_group,
    parse_priority_class,
)
from exporters.sources.kubernetes.reflector import Call, Problem, Reflector, RequestError, Timing, read_json
from exporters.sources.kubernetes.stores import EventStore, PodStore, Store

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

#: Custom resources that are read when the server has them: group, versions that are understood, plural.
KUEUE: Final = ("kueue.x-k8s.io", ("v1beta2", "v1beta1"), "workloads")
VOLCANO: Final = ("scheduling.volcano.sh", ("v1beta1",), "podgroups")

#: Events older than this are not reported again.
EVENT_SECONDS: Final = 3600.0


class _GroupVersion(msgspec.Struct):
    version: str


class _ApiGroup(msgspec.Struct):
    versions: list[_GroupVersion] = []


class _ApiResource(msgspec.Struct):
    name: str


class _ApiResources(msgspec.Struct):
    resources: list[_ApiResource] | None = None


@dataclass(frozen=True, slots=True)
class _Converted:
    """A pod's workload and what it was made from, to be used again while that is the same."""

    pod: PodRecord
    kueue: KueueRecord | None
    group: GroupRecord | None
    workload: Workload


class KubernetesSource:
    """Reads pods, nodes, PriorityClasses, ``Preempted`` events, Kueue Workloads and Volcano PodGroups of one cluster.

    Each resource is listed and watched by a thread of its own, so that one that may not be read (RBAC) or is slow does
    not hold up the others. `poll` makes a snapshot of what the watches have brought and never waits for the server.

    Args:
        client: A client of the official package; see `connect`.
        cluster: Name of the cluster in the snapshots.
        ranking: How priorities become ranks (from a policy file). None: by the cluster's PriorityClasses, see `Ranks`.
        gpu_only: Report only workloads that ask for GPUs or declare a task class. Others always count as use of nodes.
        max_age_seconds: What the server has not confirmed for this long is reported as not read.
        keep_ended_seconds: How long pods that ended stay in the snapshots.
        timing: Time-outs and delays of requests.
        page_size: Objects per page of a list.
        rediscover_seconds: How often to look for Kueue and Volcano while they are not installed.
        clock: Unix seconds.
    """

    name = "kubernetes"

    def __init__(
        self,
        client: ApiClient,
        *,
        cluster: str = "kubernetes",
        ranking: Ranking | None = None,
        gpu_only: bool = False,
        max_age_seconds: float = 300.0,
        keep_ended_seconds: float = 120.0,
        timing: Timing | None = None,
        page_size: int = 500,
        rediscover_seconds: float = 120.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        from kubernetes.client import CoreV1Api, CustomObjectsApi, SchedulingV1Api

        from exporters.policy import default_policy

        self.cluster = cluster
        self._client = client
        self._custom = CustomObjectsApi(client)
        self._ranking = ranking
        self._fallback = default_policy().ranking
        self._gpu_only = gpu_only
        self._max_age = max_age_seconds
        self._timing = timing or Timing()
        self._clock = clock
        self._closed = False
        self._converted: dict[str, _Converted] = {}
        self._converted_for: object = None

        core, scheduling = CoreV1Api(client), SchedulingV1Api(client)
        self.pods = PodStore(parse_pod, keep_ended_seconds, clock)
        self.nodes: Store[NodeRecord] = Store(parse_node, clock)
        self.classes: Store[ClassRecord] = Store(parse_priority_class, clock)
        self.events = EventStore(parse_event, clock)
        self.kueue: Store[KueueRecord] = Store(parse_kueue, clock)
        self.groups: Store[GroupRecord] = Store(parse_pod_group, clock)

        def reflector(name: str, call: Callable[[], Call | None], store: Store[Any]) -> Reflector:
            return Reflector(
                name,
                call,
                store,
                self._timing,
                optional="." in name,
                page_size=page_size,
                absent_seconds=rediscover_seconds,
            )

        preempted = _bound(core.list_event_for_all_namespaces, field_selector="reason=Preempted")
        self.reflectors: dict[str, Reflector] = {
            "pods": reflector("pods", lambda: core.list_pod_for_all_namespaces, self.pods),
            "nodes": reflector("nodes", lambda: core.list_node, self.nodes),
            "priorityclasses": reflector("priorityclasses", lambda: scheduling.list_priority_class, self.classes),
            "events": reflector("events", lambda: preempted, self.events),
            "workloads": reflector("workloads.kueue.x-k8s.io", lambda: self._discover(KUEUE), self.kueue),
            "podgroups": reflector("podgroups.scheduling.volcano.sh", lambda: self._discover(VOLCANO), self.groups),
        }
        for item in self.reflectors.values():
            item.start()

    def ready(self, timeout_seconds: float = 0.0) -> bool:
        """Wait until everything has been listed once or has failed; return whether that was in time."""
        deadline = time.monotonic() + timeout_seconds
        return all(item.settled.wait(max(0.0, deadline - time.monotonic())) for item in self.reflectors.values())

    def poll(self) -> Snapshot:
        """Return the cluster as the watches have it. Never waits for the server.

        Raises:
            SourceUnreachableError: the server does not answer or refuses everything, or the source was closed.
        """
        if self._closed:
            raise SourceUnreachableError("the Kubernetes source is closed", cure="make a new one")
        now = self._clock()
        problems = {name: self._problem(item) for name, item in self.reflectors.items()}
        if problems["pods"] is not None and problems["nodes"] is not None:
            self._give_up()
        pods = None if problems["pods"] else self.pods.records()
        nodes = None if problems["nodes"] else self.nodes.records()
        kueue = self.kueue.records()
        groups = self.groups.records()
        context = self._context(nodes, kueue, groups, classes=problems["priorityclasses"] is None)
        unread = [Unread(what, why) for name, what in _PARTS.items() if (why := problems[name]) is not None]
        for name, what in _OBJECTS.items():
            unread += unread_objects(what, self.reflectors[name].store.rejected)
        found_nodes, found_unread = self._nodes(nodes, pods, context)
        return Snapshot(
            time=now,
            cluster=self.cluster,
            source=self.name,
            workloads=() if pods is None else self._workloads(pods, kueue, groups, context),
            nodes=found_nodes,
            events=() if problems["events"] else self._events(now, kueue, context),
            unread=(*unread, *found_unread),
        )

    def close(self) -> None:
        """Stop the watches and close the connections."""
        self._closed = True
        for item in self.reflectors.values():
            item.stop()
        deadline = time.monotonic() + 5.0
        for item in self.reflectors.values():
            item.join(max(0.0, deadline - time.monotonic()))
        self._client.rest_client.pool_manager.clear()

    def __enter__(self) -> KubernetesSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- parts of a poll

    def _problem(self, item: Reflector) -> str | None:
        """Why what ``item`` reads is not to be used now; None when it is."""
        problem = item.problem
        if item.absent or (item.synced.is_set() and item.age() <= self._max_age):
            # A short break is no reason to forget what was known; a refusal is.
            return _why(problem) if problem is not None and problem.status in (401, 403) else None
        if problem is not None:
            return _why(problem)
        return "the first list is not complete" if not item.synced.is_set() else "the server has been silent"

    def _give_up(self) -> None:
        """Raise when there is nothing to report; return while the first lists are still on their way."""
        problems = [self.reflectors[name].problem for name in ("pods", "nodes")]
        first = next((item for item in problems if item is not None), None)
        if first is None or any(item is None for item in problems):
            return
        host = self._client.configuration.host
        if first.status in (401, 403):
            raise SourceUnreachableError(
                f"the API server {host} refuses to list pods and nodes: {first.text}",
                cure="grant the ClusterRole in deploy/ to the service account, or renew the credentials",
            )
        raise SourceUnreachableError(
            f"the API server {host} cannot be read: {first.text}", cure="check the address, the network and the server"
        )

    def _context(
        self, nodes: list[NodeRecord] | None, kueue: list[KueueRecord], groups: list[GroupRecord], *, classes: bool
    ) -> Context:
        ranks = Ranks.of(self.classes.records() if classes else None, self._ranking, self._fallback)
        sizes: dict[str, GpuSizes] = {"": sizes_of(nodes or ())}
        for node in nodes or ():
            sizes[node.name] = GpuSizes(node.gpu_memory_bytes, node.units_per_gpu, node.replicas)
        key = (ranks, self.nodes.generation, nodes is None)
        if key != self._converted_for:
            self._converted, self._converted_for = {}, key
        return Context(ranks, sizes, Places(nodes), Links(kueue, groups))

    def _workloads(
        self, pods: list[PodRecord], kueue: list[KueueRecord], groups: list[GroupRecord], context: Context
    ) -> tuple[Workload, ...]:
        converted: dict[str, _Converted] = {}
        found: list[Workload] = []
        waiting: dict[str, list[tuple[PodRecord, Workload]]] = defaultdict(list)
        running: dict[str, int] = defaultdict(int)
        for pod in pods:
            if self._gpu_only and not (pod.request.gpu.wanted or pod.task_class):
                continue
            item, group = context.links.kueue(pod), context.links.group(pod)
            if item is not None and not item.admitted and pod.gated:
                # Kueue's Workload stands for it.
                continue
            known = self._converted.get(pod.uid)
            if known is None or known.pod is not pod or known.kueue is not item or known.group is not group:
                known = _Converted(pod, item, group, pod_workload(pod, context, item))
            converted[pod.uid] = known
            state = known.workload.state
            if group is not None and state is WorkloadState.PENDING:
                waiting[group.uid].append((pod, known.workload))
                continue
            if group is not None and state.holding:
                running[group.uid] += 1
            found.append(known.workload)
        self._converted = converted
        for group in groups:
            gang = gang_workloads(group, waiting[group.uid], running[group.uid], context)
            found += [workload for _, workload in waiting[group.uid]] if gang is None else gang
        for queued in kueue:
            found += kueue_workloads(queued, context)
        live = {workload.id for workload in found}
        for ended in self.pods.departed():
            if ended.pod.uid not in live:
                found.append(ended_workload(ended, context))
        if self._gpu_only:
            found = [workload for workload in found if workload.demand.wants_gpu or workload.task_class]
        return tuple(found)

    def _nodes(
        self, nodes: list[NodeRecord] | None, pods: list[PodRecord] | None, context: Context
    ) -> tuple[tuple[Node, ...], list[Unread]]:
        if nodes is None:
            return (), []
        held: dict[str, list[PodRecord]] = defaultdict(list)
        for pod in pods or ():
            if pod_state(pod).holding:
                held[pod.node].append(pod)
        found: list[Node] = []
        unclear: dict[str, str] = {}
        for record in nodes:
            node, problem = node_of(record, None if pods is None else held[record.name], context.sizes[record.name])
            found.append(node)
            if problem:
                unclear.setdefault(problem, record.name)
        return tuple(found), [
            Unread(f"nodes: {problem}", f"not recorded, on {name} for one") for problem, name in unclear.items()
        ]

    def _events(self, now: float, kueue: list[KueueRecord], context: Context) -> tuple[Event, ...]:
        recent = [item for item in self.events.records() if item.time > now - EVENT_SECONDS]
        if not recent:
            return ()
        wanted = {uid for item in recent for uid in (item.victim, item.winner) if uid}
        pods = {uid: pod for uid in wanted if (pod := self.pods.find(uid)) is not None}
        queued = {item.uid: item for item in kueue if item.uid in wanted}
        return tuple(preemption(item, pods, queued, context) for item in recent)

    # --- discovery

    def _discover(self, resource: tuple[str, tuple[str, ...], str]) -> Call | None:
        """Return the list call of a custom resource in the newest version both sides know; None: not installed.

        Raises:
            RequestError: discovery itself went wrong.
        """
        group, understood, plural = resource
        for version in understood:
            try:
                content = read_json(
                    _bound(self._custom.get_api_resources, group=group, version=version), _ApiResources, self._timing
                )
            except RequestError as failure:
                if failure.problem.status == 404:
                    continue
                raise
            if any(item.name == plural for item in content.resources or ()):
                return _bound(self._custom.list_cluster_custom_object, group=group, version=version, plural=plural)
        return None


#: What a resource that cannot be read is called in `Snapshot.unread`.
_PARTS: Final[Mapping[str, str]] = {
    "pods": "workloads",
    "nodes": "nodes",
    "events": "events",
    "priorityclasses": "priority classes",
    "workloads": "kueue workloads",
    "podgroups": "volcano pod groups",
}

_OBJECTS: Final[Mapping[str, str]] = {
    "pods": "pod",
    "nodes": "node",
    "events": "event",
    "priorityclasses": "priority class",
    "workloads": "kueue workload",
    "podgroups": "volcano pod group",
}


def _why(problem: Problem) -> str:
    if problem.status == 0:
        return f"the API server cannot be read: {problem.text}"
    return problem.text


def _bound(call: Call, **fixed: Any) -> Call:
    def bound(**params: Any) -> Any:
        return call(**fixed, **params)

    return bound


def open_source(kubeconfig: Path | str | None = None, context: str | None = None, **options: Any) -> KubernetesSource:
    """Connect (as `connect`, which says what it raises) and return the source, made with ``options``."""
    return KubernetesSource(connect(kubeconfig, context), **options)


__all__ = ["KubernetesSource", "open_source"]
