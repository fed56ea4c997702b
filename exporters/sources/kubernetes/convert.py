"""Records of the API become the model's workloads, nodes and events: pure functions of the stores' contents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from exporters.model import (
    WHOLE_GPU,
    Constraints,
    Demand,
    Event,
    EventKind,
    Node,
    Placement,
    Ranking,
    Unread,
    Workload,
    WorkloadState,
)
from exporters.sources.kubernetes.records import (
    ClassRecord,
    EventRecord,
    GroupRecord,
    KueueRecord,
    NodeRecord,
    PodRecord,
    Request,
    Scheduling,
    Term,
)
from exporters.sources.kubernetes.resources import (
    ALIBABA_COUNT,
    ALIYUN_COUNT,
    MIG_PREFIX,
    SHARED_GPU_RESOURCE,
    WHOLE_GPU_RESOURCES,
    GpuRequest,
)
from exporters.sources.kubernetes.stores import Ended

#: Priorities above this are the system's own (Kubernetes' HighestUserDefinablePriority).
HIGHEST_USER_PRIORITY: Final = 1_000_000_000

#: In `Constraints.required_nodes` where a node affinity matches no node: no node is called this.
NOWHERE: Final = "(no node matches the node affinity)"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Kubernetes priorities as ranks: 0 is the most urgent.

    With a ``ranking`` (from a policy file) that decides. Otherwise the cluster's PriorityClasses do: the distinct
    values of the user's classes, and 0 for pods without a class, are ranked densely; the system's own classes share
    rank 0. A priority between two values has the rank of the next smaller one. Where no class is defined, or classes
    could not be read, ``fallback`` decides.
    """

    ranking: Ranking | None
    fallback: Ranking
    values: tuple[int, ...] = ()
    classes: Mapping[str, ClassRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, classes: Iterable[ClassRecord] | None, ranking: Ranking | None, fallback: Ranking) -> Ranks:
        """Return the ranks that these PriorityClasses (None: not read) give."""
        by_name = {item.name: item for item in classes or ()}
        user = {item.value for item in by_name.values() if item.value <= HIGHEST_USER_PRIORITY}
        values: tuple[int, ...] = ()
        if user:
            if not any(item.default for item in by_name.values()):
                user.add(0)
            values = tuple(sorted(user, reverse=True))
        return cls(ranking, fallback, values, by_name)

    def rank(self, priority: int | None, name: str) -> int | None:
        """Return the rank of a pod with this priority and PriorityClass; None when neither says."""
        if priority is None and name in self.classes:
            priority = self.classes[name].value
        if self.ranking is not None:
            return self.ranking.rank(priority, name)
        if not self.values:
            return self.fallback.rank(priority, name)
        if priority is None:
            return None
        return sum(1 for value in self.values if value > priority)

    def may_preempt(self, record: PodRecord) -> bool | None:
        """Whether a pod may preempt others: by its own policy, else that of its class, else the API's default."""
        if record.may_preempt is not None:
            return record.may_preempt
        item = self.classes.get(record.priority_class)
        return item.may_preempt if item else True


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """How large the GPUs of a node, or of the whole cluster where all agree, are; None or 0: not known.

    ``memory_bytes`` and ``units`` (of Alibaba's ``gpu-mem``) are of one GPU; ``replicas`` time slices make one.
    ``certain`` is False when nodes differ, and the smallest GPU was taken.
    """

    memory_bytes: int | None = None
    units: int = 0
    replicas: int = 1
    certain: bool = True


def sizes_of(nodes: Iterable[NodeRecord]) -> GpuSizes:
    """Return the sizes that hold for all ``nodes`` with GPUs; where they differ, the smallest."""
    memories, units, replicas = set(), set(), set()
    for node in nodes:
        if not gpu_count(node):
            continue
        if node.gpu_memory_bytes:
            memories.add(node.gpu_memory_bytes)
        if node.units_per_gpu:
            units.add(node.units_per_gpu)
        replicas.add(node.replicas)
    return GpuSizes(
        min(memories, default=None),
        min(units, default=0),
        min(replicas, default=1),
        certain=max(len(memories), len(units), len(replicas)) <= 1,
    )


def gpu_count(node: NodeRecord) -> int:
    """Return how many GPUs ``node`` has, as its scheduler counts them; MIG devices are not among them."""
    if node.hami_gpus:
        return len(node.hami_gpus)
    got = node.extended
    if got.get(ALIBABA_COUNT):
        return got[ALIBABA_COUNT]
    if got.get(ALIYUN_COUNT):
        return got[ALIYUN_COUNT]
    slices = got.get(SHARED_GPU_RESOURCE, 0)
    whole = sum(got.get(name, 0) for name in WHOLE_GPU_RESOURCES)
    return -(-(slices or whole) // node.replicas) if node.replicas > 1 else whole + slices


def milli_per_gpu(gpu: GpuRequest, sizes: GpuSizes) -> int:
    """Return the milli-GPU that ``gpu`` takes of each of its GPUs; a share of unknown size is at least 1."""
    shares = [gpu.milli or 0]
    if gpu.units is not None and sizes.units:
        shares.append(-(-gpu.units * WHOLE_GPU // sizes.units))
    elif gpu.memory_bytes is not None and sizes.memory_bytes:
        shares.append(-(-gpu.memory_bytes * WHOLE_GPU // sizes.memory_bytes))
    return min(WHOLE_GPU, max(1, *shares)) if gpu.shares else WHOLE_GPU


def demand_of(request: Request, sizes: GpuSizes, pieces: int = 1) -> tuple[Demand, tuple[str, ...]]:
    """Return the demand of ``pieces`` equal pods, and what of it the model cannot express."""
    gpu = request.gpu
    unchecked: list[str] = []
    milli, parts = 0, 1
    if gpu.shares and gpu.count:
        milli, parts = milli_per_gpu(gpu, sizes), gpu.count
        if gpu.milli is None and not ((sizes.units if gpu.units else sizes.memory_bytes) and sizes.certain):
            unchecked.append("size of the GPU that is shared")
    elif gpu.slices or (gpu.count and sizes.replicas > 1):
        milli, parts = max(1, WHOLE_GPU // sizes.replicas), gpu.slices or gpu.count
        if not sizes.certain:
            unchecked.append("size of the GPU that is shared")
    else:
        milli = gpu.count * WHOLE_GPU
    if parts > 1:
        unchecked.append("GPU shares on one node")
    if len(gpu.mig) > 1:
        unchecked.append("several MIG profiles")
    if milli and gpu.mig:
        unchecked.append("MIG instances and GPUs together")
    profile, instances = gpu.mig[0] if gpu.mig else (None, 0)
    return (
        Demand(
            gpu_milli=0 if instances else milli,
            pieces=pieces * parts,
            gpu_models=gpu.models,
            gpu_memory_bytes=gpu.memory_bytes if gpu.wanted else None,
            mig_profile=profile,
            mig_instances=instances,
            cpu_milli=-(-request.cpu_milli // parts),
            memory_bytes=-(-request.memory_bytes // parts),
        ),
        tuple(unchecked),
    )


class Places:
    """Which nodes a node affinity allows; remembered per distinct affinity."""

    def __init__(self, nodes: Sequence[NodeRecord] | None) -> None:
        self._nodes = nodes
        self._known: dict[tuple[Term, ...], tuple[str, ...] | None] = {}

    def allowed(self, terms: tuple[Term, ...]) -> tuple[str, ...] | None:
        """Return the names of the nodes that match any of ``terms``; None when it takes nodes and none were read."""
        direct = _by_name(terms)
        if direct is not None:
            # A DaemonSet's pod: the name says it, and every pod has its own.
            return direct
        if self._nodes is None:
            return None
        if terms not in self._known:
            self._known[terms] = tuple(
                sorted(node.name for node in self._nodes if any(t.matches(node.name, node.labels) for t in terms))
            ) or (NOWHERE,)
        return self._known[terms]


def _by_name(terms: tuple[Term, ...]) -> tuple[str, ...] | None:
    if len(terms) != 1 or terms[0].labels or len(terms[0].fields) != 1:
        return None
    only = terms[0].fields[0]
    return only.values if only.operator == "In" and only.key == "metadata.name" and only.values else None


def constraints_of(scheduling: Scheduling, places: Places, unchecked: Iterable[str] = ()) -> Constraints:
    """Return where a pod may run."""
    extra = [*scheduling.unchecked, *unchecked]
    required: tuple[str, ...] = ()
    if scheduling.affinity is not None:
        allowed = places.allowed(scheduling.affinity)
        if allowed is None:
            extra.append("node affinity")
        else:
            required = allowed
    return Constraints(
        node_selector=scheduling.node_selector,
        required_nodes=required,
        tolerations=scheduling.tolerations,
        unchecked=tuple(extra),
    )


class Links:
    """Which Kueue Workload and which Volcano PodGroup a pod belongs to."""

    def __init__(self, kueue: Iterable[KueueRecord], groups: Iterable[GroupRecord]) -> None:
        self._kueue_names: dict[tuple[str, str], KueueRecord] = {}
        self._kueue_owners: dict[str, KueueRecord] = {}
        for item in kueue:
            self._kueue_names[item.namespace, item.name] = item
            for owner in item.owners:
                self._kueue_owners[owner] = item
        self._groups = {(item.namespace, item.name): item for item in groups}

    def kueue(self, pod: PodRecord) -> KueueRecord | None:
        """Return the Kueue Workload of ``pod``: by the name it carries, by its owner, or because it is the owner."""
        if not self._kueue_owners and not self._kueue_names:
            return None
        return (
            self._kueue_names.get((pod.namespace, pod.kueue))
            or self._kueue_owners.get(pod.owner)
            or self._kueue_owners.get(pod.uid)
        )

    def group(self, pod: PodRecord) -> GroupRecord | None:
        """Return the PodGroup of ``pod``."""
        return self._groups.get((pod.namespace, pod.group)) if pod.group else None


@dataclass(slots=True)
class Context:
    """What a pod's conversion depends on besides the pod. ``sizes`` are by node name; "" is the cluster's."""

    ranks: Ranks
    sizes: Mapping[str, GpuSizes]
    places: Places
    links: Links


def pod_state(pod: PodRecord) -> WorkloadState:
    """Return the state of a pod that is still there. One that is scheduled holds its resources, started or not."""
    if pod.ended:
        return WorkloadState.COMPLETED if pod.phase == "Succeeded" else _stopped(pod, WorkloadState.FAILED)
    if not pod.node:
        if pod.deleted is not None:
            return WorkloadState.CANCELLED
        return WorkloadState.HELD if pod.gated else WorkloadState.PENDING
    return WorkloadState.COMPLETING if pod.deleted is not None else WorkloadState.RUNNING


def _stopped(pod: PodRecord, otherwise: WorkloadState) -> WorkloadState:
    return WorkloadState.PREEMPTED if pod.disrupted == "PreemptionByScheduler" else otherwise


def pod_workload(pod: PodRecord, context: Context, kueue: KueueRecord | None = None) -> Workload:
    """Return the workload of one pod; ``kueue`` is the Kueue Workload that it belongs to.

    A pod that Kueue admitted has Kueue's effective priority, and once it is scheduled its wait began in Kueue's queue.
    """
    sizes = context.sizes.get(pod.node) or context.sizes[""]
    demand, unchecked = demand_of(pod.request, sizes)
    group = context.links.group(pod)
    priority, priority_class, submitted = pod.priority, pod.priority_class, pod.created
    if kueue is not None:
        if kueue.priority is not None:
            priority, priority_class = kueue.priority, kueue.priority_class or priority_class
        queued = kueue.evicted if kueue.evicted is not None else kueue.created
        if pod.node and queued is not None and submitted is not None:
            submitted = min(submitted, queued)
    return Workload(
        id=pod.uid,
        name=pod.name,
        state=pod_state(pod),
        service=pod.service,
        namespace=pod.namespace,
        queue=(kueue.queue if kueue else "") or (group.queue if group else "") or pod.queue,
        tenant=pod.namespace,
        priority_class=priority_class,
        priority=priority,
        rank=context.ranks.rank(priority, priority_class),
        submitted=submitted,
        eligible=pod.ungated,
        started=pod.scheduled if pod.node else None,
        demand=demand,
        placements=(placement_of(pod, sizes),) if pod.node else (),
        constraints=constraints_of(pod.scheduling, context.places, unchecked),
        preemptible=pod.preemptible,
        may_preempt=context.ranks.may_preempt(pod),
        qos_class=pod.qos,
        task_class=pod.task_class or (kueue.task_class if kueue else "") or (group.task_class if group else ""),
        restart_policy=pod.restart_policy,
        labels=pod.labels,
        reason=pod.reason,
        requeues=kueue.requeues if kueue else 0,
    )


def placement_of(pod: PodRecord, sizes: GpuSizes) -> Placement:
    """Return what a scheduled pod holds on its node."""
    return Placement(
        node=pod.node,
        gpu_milli=held_milli(pod.request.gpu, sizes),
        cpu_milli=pod.request.cpu_milli,
        memory_bytes=pod.request.memory_bytes,
    )


def held_milli(gpu: GpuRequest, sizes: GpuSizes) -> int:
    """Return the milli-GPU that a scheduled pod holds."""
    if gpu.shares:
        return milli_per_gpu(gpu, sizes) * gpu.count
    if gpu.slices or sizes.replicas > 1:
        return max(1, WHOLE_GPU // sizes.replicas) * (gpu.slices + gpu.count)
    return gpu.count * WHOLE_GPU


def ended_workload(ended: Ended, context: Context) -> Workload:
    """Return the workload of a pod that is gone."""
    pod = ended.pod
    state = pod_state(pod) if pod.ended else _stopped(pod, WorkloadState.CANCELLED)
    workload = pod_workload(pod, context, context.links.kueue(pod))
    return msgspec.structs.replace(workload, state=state, ended=ended.time)


def kueue_workloads(item: KueueRecord, context: Context) -> list[Workload]:
    """Return what waits in Kueue's queue: one workload per set of equal pods that asks for GPUs (else the first set).

    A Workload that was admitted is its pods, and one that has finished is gone: both give nothing.
    """
    if item.admitted or item.finished:
        return []
    sets = [part for part in item.pod_sets if part.request.gpu.wanted] or list(item.pod_sets[:1])
    if not item.active:
        state = WorkloadState.HELD
    else:
        state = WorkloadState.REQUEUED if item.evicted is not None else WorkloadState.PENDING
    found = []
    for part in sets:
        demand, unchecked = demand_of(part.request, context.sizes[""], max(1, part.count))
        found.append(
            Workload(
                id=item.uid if len(sets) == 1 else f"{item.uid}/{part.name}",
                name=item.name if len(sets) == 1 else f"{item.name}/{part.name}",
                state=state,
                service=item.service,
                namespace=item.namespace,
                queue=item.queue,
                tenant=item.namespace,
                priority_class=item.priority_class,
                priority=item.priority,
                rank=context.ranks.rank(item.priority, item.priority_class),
                submitted=item.created,
                eligible=item.evicted,
                demand=demand,
                constraints=constraints_of(part.scheduling, context.places, ("quota", *unchecked)),
                task_class=item.task_class,
                labels=item.labels,
                reason=item.reason,
                requeues=item.requeues,
                het_job_id=item.uid if len(sets) > 1 else "",
            )
        )
    return found


def gang_workloads(
    group: GroupRecord, waiting: Sequence[tuple[PodRecord, Workload]], running: int, context: Context
) -> list[Workload] | None:
    """Return the workload of a gang that waits; None when its pods stand for themselves.

    ``waiting`` are its pods that wait and ``running`` counts those that hold resources. A gang starts when
    ``min_member`` pods can: until then the missing ones are one workload. A gang without pods yet is known from its
    ``minResources``; unequal pods cannot be one workload and stay apart, marked as not fully checked.
    """
    missing = group.min_member - running
    if group.phase in ("Completed", "Running") or missing <= 0:
        return None
    common = Workload(
        id=group.uid,
        name=group.name,
        state=WorkloadState.PENDING,
        service=group.service,
        namespace=group.namespace,
        queue=group.queue,
        tenant=group.namespace,
        priority_class=group.priority_class,
        submitted=group.created,
        task_class=group.task_class,
        labels=group.labels,
        reason=group.reason,
    )
    if not waiting:
        if running or group.request is None:
            return None
        item = context.ranks.classes.get(group.priority_class)
        value = item.value if item else None
        demand, unchecked = demand_of(group.request, context.sizes[""], missing)
        return [
            msgspec.structs.replace(
                common,
                priority=value,
                rank=context.ranks.rank(value, group.priority_class),
                demand=demand,
                constraints=Constraints(unchecked=("placement of pods that do not exist yet", *unchecked)),
            )
        ]
    kinds = {(pod.request, workload.rank) for pod, workload in waiting}
    if len(kinds) > 1:
        return [
            msgspec.structs.replace(
                workload,
                constraints=msgspec.structs.replace(
                    workload.constraints, unchecked=(*workload.constraints.unchecked, "gang of unequal pods")
                ),
            )
            for _, workload in waiting
        ]
    pod, first = waiting[0]
    demand, _ = demand_of(pod.request, context.sizes[""], missing)
    return [
        msgspec.structs.replace(
            first,
            id=common.id,
            name=common.name,
            service=common.service or first.service,
            queue=common.queue or first.queue,
            submitted=common.submitted if common.submitted is not None else first.submitted,
            demand=demand,
            labels={**first.labels, **common.labels},
            task_class=first.task_class or common.task_class,
            reason=first.reason or common.reason,
        )
    ]


def node_of(record: NodeRecord, held: Sequence[PodRecord] | None, sizes: GpuSizes) -> tuple[Node, str]:
    """Return the node, and a word on what of its GPUs is not known ("" when all is).

    ``held`` are the pods that hold resources on it; None when pods could not be read.
    """
    count = gpu_count(record)
    mig = {
        name.removeprefix(MIG_PREFIX): amount for name, amount in record.extended.items() if name.startswith(MIG_PREFIX)
    }
    common = Node(
        name=record.name,
        state=record.state,
        reason=record.reason,
        labels=record.labels,
        taints=record.taints,
        gpu_models=record.models,
        gpu_memory_bytes=record.gpu_memory_bytes,
        gpu_capacity_milli=count * WHOLE_GPU,
        cpu_capacity_milli=record.cpu_milli,
        memory_capacity_bytes=record.memory_bytes,
    )
    if held is None:
        return common, ""
    for pod in held:
        for profile, instances in pod.request.gpu.mig:
            mig[profile] = mig.get(profile, 0) - instances
    free, problem = _free_gpus(count, held, sizes)
    return (
        msgspec.structs.replace(
            common,
            gpu_allocated_milli=None if problem else sum(held_milli(pod.request.gpu, sizes) for pod in held),
            gpu_free_milli=free,
            mig_free={profile: max(0, amount) for profile, amount in sorted(mig.items())},
            cpu_allocated_milli=sum(pod.request.cpu_milli for pod in held),
            memory_allocated_bytes=sum(pod.request.memory_bytes for pod in held),
        ),
        problem,
    )


def _free_gpus(count: int, held: Sequence[PodRecord], sizes: GpuSizes) -> tuple[tuple[int, ...] | None, str]:
    """Return the free milli-GPU of each GPU, where pods share GPUs and it is recorded which.

    None without a problem: nobody shares, or all slices are equal, so that the sum says it all.
    """
    used: dict[str, int] = defaultdict(int)
    whole, shared = 0, False
    for pod in held:
        gpu = pod.request.gpu
        if not gpu.shares:
            whole += gpu.count
            continue
        shared = True
        if len(gpu.groups) != gpu.count:
            return None, "which GPU a share lies on"
        for group in gpu.groups:
            used[group] += milli_per_gpu(gpu, sizes)
    if not shared:
        return None, ""
    if len(used) + whole > count:
        return None, "which GPU a share lies on"
    free = [max(0, WHOLE_GPU - amount) for amount in used.values()]
    return tuple(sorted([*free, *[WHOLE_GPU] * (count - whole - len(used)), *[0] * whole], reverse=True)), ""


def preemption(
    record: EventRecord, pods: Mapping[str, PodRecord], kueue: Mapping[str, KueueRecord], context: Context
) -> Event:
    """Return a preemption. ``pods`` and ``kueue`` are by UID and include those that are gone and remembered."""
    rank, service, gpu = _participant(record.victim, pods, kueue, context)
    by_rank, by_service, _ = _participant(record.winner, pods, kueue, context)
    victim = pods.get(record.victim)
    return Event(
        id=record.id,
        kind=EventKind.PREEMPTED,
        time=record.time,
        workload=record.victim,
        by=record.winner,
        rank=rank,
        by_rank=by_rank,
        service=service or record.victim_name,
        by_service=by_service or record.winner_name,
        node=record.node or (victim.node if victim else ""),
        gpu_milli=gpu,
        reason=record.message,
    )


def _participant(
    uid: str, pods: Mapping[str, PodRecord], kueue: Mapping[str, KueueRecord], context: Context
) -> tuple[int | None, str, int | None]:
    pod = pods.get(uid)
    if pod is not None:
        item = context.links.kueue(pod)
        workload = pod_workload(pod, context, item)
        return workload.rank, workload.display_service, workload.demand.total_gpu_milli
    queued = kueue.get(uid)
    if queued is not None:
        total = sum(
            demand_of(part.request, context.sizes[""], max(1, part.count))[0].total_gpu_milli
            for part in queued.pod_sets
        )
        return context.ranks.rank(queued.priority, queued.priority_class), queued.service, total
    return None, "", None


def unread_objects(what: str, rejected: Mapping[str, str]) -> list[Unread]:
    """Return one entry that names the first of the objects that could not be understood."""
    if not rejected:
        return []
    first = min(rejected.values())
    more = f" (and {len(rejected) - 1} more)" if len(rejected) > 1 else ""
    return [Unread(f"{what}: {first.split(':')[0]}", first.split(": ", 1)[-1] + more)]
