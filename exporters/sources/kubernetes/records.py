"""API objects reduced to what is needed: `parse_pod` and its like turn the JSON of one object into a small record.

Only the fields named in the wire types below are decoded, so that a pod of 20 KiB becomes a record of about one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from sys import intern
from typing import Any, Final, TypeVar

import msgspec

from exporters.model import NodeState, QosClass, Taint, Toleration
from exporters.sources.kubernetes.resources import (
    ALIYUN_COUNT,
    ALIYUN_MEMORY,
    ANNOTATIONS,
    MIB,
    MIG_PREFIX,
    NO_GPU,
    Container,
    GpuRequest,
    amounts,
    effective_requests,
    gpu_request,
    qos_class,
)

#: Pods declare their task class (V11) by this label or annotation.
TASK_CLASS: Final = "prioscope.io/task-class"

#: Labels that name the application, the first one present wins; without any, the owner's name.
SERVICE_LABELS: Final = ("app.kubernetes.io/name", "app", "k8s-app")

#: Labels and annotations that name the queue.
QUEUE_LABELS: Final = (
    "kueue.x-k8s.io/queue-name",
    "kai.scheduler/queue",
    "runai/queue",
    "scheduling.volcano.sh/queue-name",
    "volcano.sh/queue-name",
)

#: Node labels whose value is a GPU model.
MODEL_LABELS: Final = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "alibabacloud.com/gpu-card-model",
    "aliyun.accelerator/nvidia_name",
)

#: Labels that are different on every pod and say nothing.
_DROPPED_LABELS: Final = frozenset(
    {
        "pod-template-hash",
        "controller-revision-hash",
        "controller-uid",
        "batch.kubernetes.io/controller-uid",
        "pod-template-generation",
        "statefulset.kubernetes.io/pod-name",
        "apps.kubernetes.io/pod-index",
    }
)

_GROUP_ANNOTATION: Final = "scheduling.k8s.io/group-name"
_KUEUE_WORKLOAD: Final = "kueue.x-k8s.io/workload"
_KUEUE_POD_GROUP: Final = "kueue.x-k8s.io/pod-group-name"
_KUEUE_BOOST: Final = "kueue.x-k8s.io/priority-boost"
_PREEMPTABLE: Final = "volcano.sh/preemptable"
_MIRROR: Final = "kubernetes.io/config.mirror"
_HAMI_REGISTER: Final = "hami.io/node-nvidia-register"
_MAX_MESSAGE: Final = 300
_QOS: Final = {item.value: item for item in QosClass}
_UID: Final = r"([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})"
_PREEMPTED_BY: Final = re.compile(rf"(?:Preempted by pod {_UID}|\(UID: {_UID})")
_ON_NODE: Final = re.compile(r" on node ([A-Za-z0-9.-]+)")


# --- the API's own shape


class _Wire(msgspec.Struct, rename="camel", gc=False):
    """Base of the wire types. ``gc=False`` is safe: JSON has no cycles."""


class _Owner(_Wire):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class Meta(_Wire):
    """Metadata of any object."""

    name: str = ""
    namespace: str | None = None
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[_Owner] | None = None


class Identity(_Wire):
    """The least that is needed of any object in a list or watch."""

    metadata: Meta

    @property
    def key(self) -> str:
        """The UID; the name where there is none (some aggregated APIs)."""
        return self.metadata.uid or f"{self.metadata.namespace or ''}/{self.metadata.name}"


Quantities = dict[str, str | int | float] | None


class _Resources(_Wire):
    requests: Quantities = None
    limits: Quantities = None


class _Container(_Wire):
    resources: _Resources | None = None
    restart_policy: str | None = None
    ports: list[dict[str, Any]] | None = None


class _Requirement(_Wire):
    key: str = ""
    operator: str = ""
    values: list[str] | None = None


class _Term(_Wire):
    match_expressions: list[_Requirement] | None = None
    match_fields: list[_Requirement] | None = None


class _NodeSelector(_Wire):
    node_selector_terms: list[_Term] | None = None


class _NodeAffinity(_Wire):
    required_during_scheduling_ignored_during_execution: _NodeSelector | None = None


class _PodAffinity(_Wire):
    required_during_scheduling_ignored_during_execution: list[msgspec.Raw] | None = None


class _Affinity(_Wire):
    node_affinity: _NodeAffinity | None = None
    pod_affinity: _PodAffinity | None = None
    pod_anti_affinity: _PodAffinity | None = None


class _Toleration(_Wire):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class _Volume(_Wire):
    persistent_volume_claim: dict[str, Any] | None = None


class _Spread(_Wire):
    when_unsatisfiable: str = ""


class _PodSpec(_Wire):
    node_name: str | None = None
    priority: int | None = None
    priority_class_name: str | None = None
    preemption_policy: str | None = None
    scheduler_name: str | None = None
    restart_policy: str | None = None
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    overhead: Quantities = None
    resources: _Resources | None = None
    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None
    tolerations: list[_Toleration] | None = None
    scheduling_gates: list[dict[str, Any]] | None = None
    topology_spread_constraints: list[_Spread] | None = None
    volumes: list[_Volume] | None = None
    resource_claims: list[msgspec.Raw] | None = None


class Condition(_Wire):
    """A status condition of any object."""

    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None
    last_transition_time: datetime | None = None


class _Terminated(_Wire):
    finished_at: datetime | None = None


class _ContainerState(_Wire):
    terminated: _Terminated | None = None


class _ContainerStatus(_Wire):
    state: _ContainerState | None = None


class _PodStatus(_Wire):
    phase: str | None = None
    reason: str | None = None
    qos_class: str | None = None
    start_time: datetime | None = None
    conditions: list[Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = None


class _Pod(_Wire):
    metadata: Meta
    spec: _PodSpec
    status: _PodStatus | None = None


class _NodeSpec(_Wire):
    unschedulable: bool | None = None
    taints: list[_Toleration] | None = None


class _NodeStatus(_Wire):
    allocatable: Quantities = None
    conditions: list[Condition] | None = None


class _Node(_Wire):
    metadata: Meta
    spec: _NodeSpec | None = None
    status: _NodeStatus | None = None


class _PriorityClass(_Wire):
    metadata: Meta
    value: int
    global_default: bool | None = None
    preemption_policy: str | None = None


class _Reference(_Wire):
    kind: str | None = None
    namespace: str | None = None
    name: str | None = None
    uid: str | None = None


class _Series(_Wire):
    count: int | None = None
    last_observed_time: datetime | None = None


class _Event(_Wire):
    metadata: Meta
    involved_object: _Reference
    related: _Reference | None = None
    reason: str | None = None
    message: str | None = None
    event_time: datetime | None = None
    last_timestamp: datetime | None = None
    first_timestamp: datetime | None = None
    count: int | None = None
    series: _Series | None = None


class _Template(_Wire):
    spec: _PodSpec
    metadata: dict[str, Any] | None = None


class _PodSet(_Wire):
    template: _Template
    name: str = "main"
    count: int = 1


class _PriorityRef(_Wire):
    name: str = ""


class _KueueSpec(_Wire):
    queue_name: str | None = None
    priority: int | None = None
    priority_class_name: str | None = None
    priority_class_ref: _PriorityRef | None = None
    active: bool | None = None
    pod_sets: list[_PodSet] | None = None


class _RequeueState(_Wire):
    count: int | None = None


class _KueueStatus(_Wire):
    conditions: list[Condition] | None = None
    requeue_state: _RequeueState | None = None


class _Kueue(_Wire):
    metadata: Meta
    spec: _KueueSpec
    status: _KueueStatus | None = None


class _GroupSpec(_Wire):
    min_member: int | None = None
    queue: str | None = None
    priority_class_name: str | None = None
    min_resources: Quantities = None


class _GroupStatus(_Wire):
    phase: str | None = None
    conditions: list[Condition] | None = None


class _PodGroup(_Wire):
    metadata: Meta
    spec: _GroupSpec | None = None
    status: _GroupStatus | None = None


# --- what is kept


class Requirement(msgspec.Struct, frozen=True, gc=False):
    """One requirement on a node label, or on the node's name (``key`` ``metadata.name`` among fields)."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def met(self, labels: Mapping[str, str]) -> bool:
        """Whether ``labels`` meet it, by the rules of the Kubernetes API; an operator that is not known is not met."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt" if value is not None and len(self.values) == 1:
                try:
                    number, bound = int(value), int(self.values[0])
                except ValueError:
                    return False
                return number > bound if self.operator == "Gt" else number < bound
        return False


class Term(msgspec.Struct, frozen=True, gc=False):
    """Requirements that must all be met; an empty term matches nothing."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def matches(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether the node called ``name`` with ``labels`` matches."""
        if not self.labels and not self.fields:
            return False
        return all(item.met(labels) for item in self.labels) and all(
            item.met({"metadata.name": name}) for item in self.fields
        )


class Request(msgspec.Struct, frozen=True, gc=False):
    """What one pod reserves: milli-CPU, bytes of memory, GPUs."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu: GpuRequest = NO_GPU


class Scheduling(msgspec.Struct, frozen=True, gc=False):
    """Where a pod may run. ``affinity`` None: no node affinity; its terms are alternatives."""

    node_selector: dict[str, str] = {}
    affinity: tuple[Term, ...] | None = None
    tolerations: tuple[Toleration, ...] = ()
    unchecked: tuple[str, ...] = ()


class PodRecord(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a pod. Times are Unix seconds.

    ``node`` is empty while it is not scheduled; ``scheduled`` is when it was. ``gated`` holds it back from the
    scheduler; ``ungated`` is when that was seen to end. ``finished`` is when it ran to its end, ``disrupted`` the
    reason of its DisruptionTarget condition. ``group`` is its Volcano PodGroup, ``kueue`` its Kueue Workload by name.
    """

    uid: str
    name: str
    namespace: str
    labels: dict[str, str]
    phase: str
    request: Request
    scheduling: Scheduling
    qos: QosClass
    service: str
    queue: str = ""
    task_class: str = ""
    priority: int | None = None
    priority_class: str = ""
    may_preempt: bool | None = None
    preemptible: bool | None = None
    restart_policy: str = ""
    created: float | None = None
    deleted: float | None = None
    node: str = ""
    scheduled: float | None = None
    gated: bool = False
    ungated: float | None = None
    finished: float | None = None
    reason: str = ""
    disrupted: str = ""
    owner: str = ""
    group: str = ""
    kueue: str = ""

    @property
    def ended(self) -> bool:
        """Whether it will never run again."""
        return self.phase in ("Succeeded", "Failed")


class NodeRecord(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a node. Heartbeats are not, so that an unchanged node compares equal.

    ``gpu_memory_bytes`` is of one GPU. ``replicas`` is how many time slices stand for one GPU. ``hami_gpus`` are the
    GPUs of a HAMi node, whose allocatable count is of virtual ones.
    """

    uid: str
    name: str
    labels: dict[str, str]
    state: NodeState
    reason: str
    taints: tuple[Taint, ...]
    cpu_milli: int | None
    memory_bytes: int | None
    extended: dict[str, int]
    models: tuple[str, ...] = ()
    gpu_memory_bytes: int | None = None
    replicas: int = 1
    hami_gpus: tuple[str, ...] = ()

    @property
    def units_per_gpu(self) -> int:
        """Units of Alibaba's ``gpu-mem`` on one GPU; 0 when the node has none."""
        return self.extended.get(ALIYUN_MEMORY, 0) // max(1, self.extended.get(ALIYUN_COUNT, 1))


class ClassRecord(msgspec.Struct, frozen=True, gc=False):
    """A PriorityClass."""

    name: str
    value: int
    default: bool = False
    may_preempt: bool = True


class EventRecord(msgspec.Struct, frozen=True, gc=False):
    """A ``Preempted`` event: ``victim`` and ``winner`` are UIDs, empty when the event does not give them."""

    id: str
    time: float
    victim: str
    victim_name: str
    victim_namespace: str
    winner: str
    winner_name: str
    node: str
    message: str


class PodSetRecord(msgspec.Struct, frozen=True, gc=False):
    """Equal pods of a Kueue Workload."""

    name: str
    count: int
    request: Request
    scheduling: Scheduling


class KueueRecord(msgspec.Struct, frozen=True, gc=False):
    """A Kueue Workload. ``priority`` is the effective one: ``base_priority`` and the boost of its annotation."""

    uid: str
    name: str
    namespace: str
    labels: dict[str, str]
    service: str
    queue: str
    task_class: str
    priority: int | None
    base_priority: int | None
    priority_class: str
    created: float | None
    active: bool
    admitted: bool
    finished: bool
    evicted: float | None
    reason: str
    requeues: int
    pod_sets: tuple[PodSetRecord, ...]
    owners: tuple[str, ...]


class GroupRecord(msgspec.Struct, frozen=True, gc=False):
    """A Volcano PodGroup. ``request`` is of one of its ``min_member`` pods, from ``minResources``."""

    uid: str
    name: str
    namespace: str
    labels: dict[str, str]
    service: str
    queue: str
    task_class: str
    priority_class: str
    min_member: int
    phase: str
    reason: str
    created: float | None
    request: Request | None


W = TypeVar("W", bound=_Wire)


def _reader(kind: type[W]) -> Callable[[msgspec.Raw | bytes], W]:
    return msgspec.json.Decoder(kind).decode


_read_pod = _reader(_Pod)
_read_node = _reader(_Node)
_read_class = _reader(_PriorityClass)
_read_event = _reader(_Event)
_read_kueue = _reader(_Kueue)
_read_group = _reader(_PodGroup)


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


def _labels(meta: Meta) -> dict[str, str]:
    return {intern(k): intern(v) for k, v in (meta.labels or {}).items() if k not in _DROPPED_LABELS}


def _controller(meta: Meta) -> _Owner | None:
    return next((owner for owner in meta.owner_references or () if owner.controller), None)


def _service(meta: Meta) -> str:
    labels = meta.labels or {}
    for name in SERVICE_LABELS:
        if labels.get(name):
            return intern(labels[name])
    owner = _controller(meta)
    if owner is None:
        return meta.name
    # A ReplicaSet is called after its Deployment and the hash of the pod template.
    suffix = f"-{labels.get('pod-template-hash', '')}"
    return intern(owner.name.removesuffix(suffix) if owner.kind == "ReplicaSet" and len(suffix) > 1 else owner.name)


def _first(names: tuple[str, ...], *sources: Mapping[str, str] | None) -> str:
    return intern(next((source[n] for source in sources if source for n in names if source.get(n)), ""))


def _container(container: _Container) -> Container:
    resources = container.resources or _Resources()
    return Container(
        amounts(resources.requests), amounts(resources.limits), sidecar=container.restart_policy == "Always"
    )


def _request(
    spec: _PodSpec, annotations: Mapping[str, str] | None, labels: Mapping[str, str] | None
) -> tuple[Request, QosClass]:
    containers = [_container(item) for item in spec.containers or ()]
    init = [_container(item) for item in spec.init_containers or ()]
    level = _container(_Container(resources=spec.resources)) if spec.resources else None
    total = effective_requests(containers, init, amounts(spec.overhead), level)
    gpu = gpu_request(total, {k: v for k, v in (annotations or {}).items() if k in ANNOTATIONS}, labels)
    if not gpu.models:
        scheduling = _scheduling(spec)
        gpu = msgspec.structs.replace(gpu, models=_models(scheduling)) if gpu.wanted else NO_GPU
    return Request(total.get("cpu", 0), total.get("memory", 0), gpu), qos_class([*containers, *init], level)


def _models(scheduling: Scheduling) -> tuple[str, ...]:
    """Return the GPU models that the selector, or a node affinity without alternatives, asks for."""
    for label in MODEL_LABELS:
        if label in scheduling.node_selector:
            return (scheduling.node_selector[label],)
    if scheduling.affinity is not None and len(scheduling.affinity) == 1:
        for item in scheduling.affinity[0].labels:
            if item.key in MODEL_LABELS and item.operator == "In":
                return item.values
    return ()


def _requirements(items: list[_Requirement] | None) -> tuple[Requirement, ...]:
    return tuple(Requirement(intern(i.key), intern(i.operator), tuple(i.values or ())) for i in items or ())


def _tolerations(items: list[_Toleration] | None) -> tuple[Toleration, ...]:
    return tuple(
        Toleration(intern(i.key or ""), intern(i.operator or "Equal"), intern(i.value or ""), intern(i.effect or ""))
        for i in items or ()
    )


def _scheduling(spec: _PodSpec) -> Scheduling:
    affinity = spec.affinity or _Affinity()
    terms: tuple[Term, ...] | None = None
    wanted = affinity.node_affinity and affinity.node_affinity.required_during_scheduling_ignored_during_execution
    if wanted:
        terms = tuple(
            Term(_requirements(term.match_expressions), _requirements(term.match_fields))
            for term in wanted.node_selector_terms or ()
        )
    unchecked = []
    for name, pods in (("pod affinity", affinity.pod_affinity), ("pod anti-affinity", affinity.pod_anti_affinity)):
        if pods is not None and pods.required_during_scheduling_ignored_during_execution:
            unchecked.append(name)
    if any(item.when_unsatisfiable == "DoNotSchedule" for item in spec.topology_spread_constraints or ()):
        unchecked.append("topology spread")
    if any(item.persistent_volume_claim is not None for item in spec.volumes or ()):
        unchecked.append("volumes")
    if spec.resource_claims:
        unchecked.append("resource claims")
    if any(port.get("hostPort") for item in spec.containers or () for port in item.ports or ()):
        unchecked.append("host ports")
    return Scheduling(
        {intern(k): intern(v) for k, v in (spec.node_selector or {}).items()},
        terms,
        _tolerations(spec.tolerations),
        tuple(unchecked),
    )


def _clip(text: str | None) -> str:
    return (text or "").strip()[:_MAX_MESSAGE]


def parse_pod(raw: msgspec.Raw | bytes) -> PodRecord:
    """Return the record of a pod.

    Raises:
        ValueError: the object does not have the shape of a pod, or an amount in it is malformed.
    """
    pod = _read_pod(raw)
    meta, spec, status = pod.metadata, pod.spec, pod.status or _PodStatus()
    conditions = {item.type: item for item in status.conditions or ()}
    placed = conditions.get("PodScheduled", Condition())
    disrupted = conditions.get("DisruptionTarget", Condition())
    request, qos = _request(spec, meta.annotations, meta.labels)
    annotations = meta.annotations or {}
    owner = _controller(meta)
    scheduled = _seconds(placed.last_transition_time) if placed.status == "True" else None
    if spec.node_name and scheduled is None:
        # Static and directly bound pods may lack the condition; the kubelet's acknowledgement comes next.
        scheduled = _seconds(status.start_time)
    ends = [
        item.state.terminated.finished_at
        for item in status.container_statuses or ()
        if item.state and item.state.terminated and item.state.terminated.finished_at
    ]
    reason = f"{placed.reason or ''}: {placed.message or ''}".strip(": ") if placed.status == "False" else ""
    return PodRecord(
        uid=meta.uid,
        name=meta.name,
        namespace=intern(meta.namespace or ""),
        labels=_labels(meta),
        phase=intern(status.phase or "Pending"),
        request=request,
        scheduling=_scheduling(spec),
        qos=_QOS.get(status.qos_class or "", qos),
        service=_service(meta),
        queue=_first(QUEUE_LABELS, meta.labels, annotations),
        task_class=_first((TASK_CLASS,), meta.labels, annotations),
        priority=spec.priority,
        priority_class=intern(spec.priority_class_name or ""),
        may_preempt=spec.preemption_policy != "Never" if spec.preemption_policy else None,
        preemptible=_preemptible(spec, meta),
        restart_policy=intern(spec.restart_policy or ""),
        created=_seconds(meta.creation_timestamp),
        deleted=_seconds(meta.deletion_timestamp),
        node=intern(spec.node_name or ""),
        scheduled=scheduled,
        gated=bool(spec.scheduling_gates) or (not spec.node_name and placed.reason == "SchedulingGated"),
        finished=max((end.timestamp() for end in ends), default=None),
        reason=_clip(reason or status.reason),
        disrupted=intern(disrupted.reason or "") if disrupted.status == "True" else "",
        owner=owner.uid if owner else "",
        group=annotations.get(_GROUP_ANNOTATION, ""),
        kueue=annotations.get(_KUEUE_WORKLOAD) or (meta.labels or {}).get(_KUEUE_POD_GROUP, ""),
    )


def _preemptible(spec: _PodSpec, meta: Meta) -> bool | None:
    if _MIRROR in (meta.annotations or {}):
        return False
    declared = (meta.annotations or {}).get(_PREEMPTABLE) or (meta.labels or {}).get(_PREEMPTABLE)
    if declared is not None:
        return declared.strip().lower() == "true"
    # The default scheduler preempts any pod of lower priority; what another one does is not known.
    return True if (spec.scheduler_name or "default-scheduler") == "default-scheduler" else None


def parse_node(raw: msgspec.Raw | bytes) -> NodeRecord:
    """Return the record of a node. Raises ValueError as `parse_pod`."""
    node = _read_node(raw)
    meta, spec, status = node.metadata, node.spec or _NodeSpec(), node.status or _NodeStatus()
    labels = {intern(k): intern(v) for k, v in (meta.labels or {}).items()}
    ready = next((item for item in status.conditions or () if item.type == "Ready"), None)
    if ready is None:
        state, reason = NodeState.UNKNOWN, "no Ready condition"
    elif ready.status != "True":
        state, reason = NodeState.DOWN, _clip(f"{ready.reason or 'NotReady'}: {ready.message or ''}".strip(": "))
    elif spec.unschedulable or meta.deletion_timestamp is not None:
        state, reason = NodeState.DRAINING, "cordoned" if spec.unschedulable else "being deleted"
    else:
        state, reason = NodeState.UP, ""
    # The cordon's own taint is the state already; a pod that tolerates it is a rarity.
    taints = tuple(
        Taint(intern(item.key or ""), intern(item.value or ""), intern(item.effect or ""))
        for item in spec.taints or ()
        if item.key != "node.kubernetes.io/unschedulable"
    )
    allocatable = amounts(status.allocatable)
    known = status.allocatable is not None
    hami, hami_memory, hami_models = _hami_devices((meta.annotations or {}).get(_HAMI_REGISTER, ""))
    memory = labels.get("nvidia.com/gpu.memory", "")
    replicas = labels.get("nvidia.com/gpu.replicas", "")
    return NodeRecord(
        uid=meta.uid,
        name=intern(meta.name),
        labels=labels,
        state=state,
        reason=reason,
        taints=taints,
        cpu_milli=allocatable.get("cpu") if known else None,
        memory_bytes=allocatable.get("memory") if known else None,
        extended={
            intern(k): v for k, v in allocatable.items() if "/" in k and ("gpu" in k or k.startswith(MIG_PREFIX))
        },
        models=tuple(dict.fromkeys([*(labels[label] for label in MODEL_LABELS if labels.get(label)), *hami_models])),
        gpu_memory_bytes=int(memory) * MIB if memory.isdigit() and len(memory) < 12 else hami_memory,
        replicas=int(replicas) if replicas.isdigit() and int(replicas[:6]) > 0 else 1,
        hami_gpus=hami,
    )


def _hami_devices(text: str) -> tuple[tuple[str, ...], int | None, tuple[str, ...]]:
    """Return GPU ids, memory of one (bytes; None when they differ) and models of HAMi's node annotation.

    It is a JSON list in new releases; in old ones devices end in ``:`` and their fields (id, split count, MiB, cores,
    type, …) are commas. An annotation in neither form gives nothing.
    """
    rows: list[tuple[str, int, str]] = []
    try:
        if text.lstrip().startswith("["):
            rows = [(str(d["id"]), int(d["devmem"]), str(d.get("type", ""))) for d in json.loads(text)]
        else:
            for device in text.split(":"):
                fields = device.split(",")
                if len(fields) >= 5:
                    rows.append((fields[0], int(fields[2]), fields[4]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return (), None, ()
    sizes = {size for _, size, _ in rows}
    models = tuple(dict.fromkeys(kind.removeprefix("NVIDIA-") for _, _, kind in rows if kind))
    memory = sizes.pop() * MIB if len(sizes) == 1 and min(sizes) > 0 else None
    return tuple(identity for identity, _, _ in rows), memory, models


def parse_priority_class(raw: msgspec.Raw | bytes) -> ClassRecord:
    """Return the record of a PriorityClass. Raises ValueError as `parse_pod`."""
    item = _read_class(raw)
    return ClassRecord(
        item.metadata.name, item.value, bool(item.global_default), (item.preemption_policy or "") != "Never"
    )


def parse_event(raw: msgspec.Raw | bytes) -> EventRecord:
    """Return the record of a ``Preempted`` event. Raises ValueError as `parse_pod`, and when it has no time.

    kube-scheduler writes the winner to ``related`` and its UID into the message; Kueue only into the message.
    """
    event = _read_event(raw)
    meta, victim, related = event.metadata, event.involved_object, event.related or _Reference()
    series = event.series or _Series()
    times = (
        series.last_observed_time,
        event.last_timestamp,
        event.event_time,
        event.first_timestamp,
        meta.creation_timestamp,
    )
    time = next((item for item in times if item is not None), None)
    if time is None:
        raise ValueError("the event has no time")
    message = event.message or ""
    named = _PREEMPTED_BY.search(message)
    where = _ON_NODE.search(message)
    count = series.count or event.count or 1
    return EventRecord(
        # An event that is repeated keeps its UID and counts up.
        id=meta.uid if count <= 1 else f"{meta.uid}#{count}",
        time=time.timestamp(),
        victim=victim.uid or "",
        victim_name=victim.name or "",
        victim_namespace=victim.namespace or meta.namespace or "",
        winner=related.uid or (next(filter(None, named.groups()), "") if named else ""),
        winner_name=related.name or "",
        node=where[1].rstrip(".") if where else "",
        message=_clip(message),
    )


def parse_kueue(raw: msgspec.Raw | bytes) -> KueueRecord:
    """Return the record of a Kueue Workload (v1beta1 or v1beta2). Raises ValueError as `parse_pod`."""
    item = _read_kueue(raw)
    meta, spec, status = item.metadata, item.spec, item.status or _KueueStatus()
    conditions = {c.type: c for c in status.conditions or ()}

    def holds(name: str) -> bool:
        return name in conditions and conditions[name].status == "True"

    boost = (meta.annotations or {}).get(_KUEUE_BOOST, "0").strip()
    if not re.fullmatch(r"[+-]?\d{1,10}", boost):
        raise ValueError(f"annotation {_KUEUE_BOOST} is {boost[:40]!r}, not a whole number")
    quota = conditions.get("QuotaReserved", Condition())
    evicted = conditions.get("Evicted", Condition())
    pod_sets = []
    for part in spec.pod_sets or ():
        wanted = part.template.metadata or {}
        request, _ = _request(part.template.spec, wanted.get("annotations"), wanted.get("labels"))
        pod_sets.append(PodSetRecord(part.name, part.count, request, _scheduling(part.template.spec)))
    return KueueRecord(
        uid=meta.uid,
        name=meta.name,
        namespace=intern(meta.namespace or ""),
        labels=_labels(meta),
        service=_service(meta),
        queue=intern(spec.queue_name or ""),
        task_class=_first((TASK_CLASS,), meta.labels, meta.annotations),
        priority=None if spec.priority is None else spec.priority + int(boost),
        base_priority=spec.priority,
        priority_class=intern(spec.priority_class_name or (spec.priority_class_ref or _PriorityRef()).name),
        created=_seconds(meta.creation_timestamp),
        active=spec.active is not False,
        admitted=holds("Admitted"),
        finished=holds("Finished"),
        evicted=_seconds(evicted.last_transition_time) if evicted.status == "True" else None,
        reason="" if holds("QuotaReserved") else _clip(f"{quota.reason or ''}: {quota.message or ''}".strip(": ")),
        requeues=max(0, (status.requeue_state or _RequeueState()).count or 0),
        pod_sets=tuple(pod_sets),
        owners=tuple(owner.uid for owner in meta.owner_references or () if owner.uid),
    )


def parse_pod_group(raw: msgspec.Raw | bytes) -> GroupRecord:
    """Return the record of a Volcano PodGroup. Raises ValueError as `parse_pod`."""
    item = _read_group(raw)
    meta, spec, status = item.metadata, item.spec or _GroupSpec(), item.status or _GroupStatus()
    members = max(1, spec.min_member or 1)
    request = None
    if spec.min_resources:
        each = {name: -(-amount // members) for name, amount in amounts(spec.min_resources).items()}
        request = Request(each.get("cpu", 0), each.get("memory", 0), gpu_request(each))
    blocked = next(
        (c for c in status.conditions or () if c.type == "Unschedulable" and c.status == "True"), Condition()
    )
    return GroupRecord(
        uid=meta.uid,
        name=meta.name,
        namespace=intern(meta.namespace or ""),
        labels=_labels(meta),
        service=_service(meta),
        queue=intern(spec.queue or ""),
        task_class=_first((TASK_CLASS,), meta.labels, meta.annotations),
        priority_class=intern(spec.priority_class_name or ""),
        min_member=members,
        phase=intern(status.phase or "Pending"),
        reason=_clip(f"{blocked.reason or ''}: {blocked.message or ''}".strip(": ")),
        created=_seconds(meta.creation_timestamp),
        request=request,
    )
