"""From Slurm's records to a snapshot: pure functions, the same for every way to read Slurm."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from exporters.errors import InvalidInputError
from exporters.model import (
    WHOLE_GPU,
    Constraints,
    Demand,
    Event,
    Node,
    NodeState,
    Placement,
    Ranking,
    Snapshot,
    Taint,
    Toleration,
    Unread,
    Workload,
    WorkloadState,
)
from exporters.sources.slurm.classes import Classes
from exporters.sources.slurm.hostlist import expand, task_ids
from exporters.sources.slurm.preemption import HANDOVER_SECONDS, preemptions
from exporters.sources.slurm.records import (
    Dump,
    Job,
    NodeRecord,
    PartitionRecord,
)
from exporters.sources.slurm.tres import Gpus, Gres, gpus_of, gpus_of_tres, parse_gres, parse_tres

MIB: Final = 1 << 20

#: Tasks of one waiting array that get a workload each; the rest is reported as not read.
MAX_ARRAY_TASKS: Final = 1000

#: The taint that stands for a reservation, which only its own jobs may use.
RESERVATION: Final = "reservation"

#: Reasons for which a job could not start even if the whole cluster were free: its user's or an administrator's choice.
_BY_CHOICE: Final = re.compile(
    r"(job)?held|joband?hold|jobhold|begintime|dependency|jobarraytasklimit|reservation|partition(down|inactive)|"
    r"partition(node|time)limit|qos|assoc|max|grp|invalid|badconstraints|account|inactivelimit|deadline|"
    r"userenv|user|burstbuffer|frontenddown|systemfailure|joblaunchfailure|launch",
    re.IGNORECASE,
)

_BASE: Final[Mapping[str, WorkloadState]] = {
    "PENDING": WorkloadState.PENDING,
    "RUNNING": WorkloadState.RUNNING,
    "SUSPENDED": WorkloadState.SUSPENDED,
    "COMPLETED": WorkloadState.COMPLETED,
    "CANCELLED": WorkloadState.CANCELLED,
    "FAILED": WorkloadState.FAILED,
    "TIMEOUT": WorkloadState.TIMED_OUT,
    "DEADLINE": WorkloadState.TIMED_OUT,
    "NODE_FAIL": WorkloadState.FAILED,
    "BOOT_FAIL": WorkloadState.FAILED,
    "OUT_OF_MEMORY": WorkloadState.FAILED,
    "PREEMPTED": WorkloadState.PREEMPTED,
    # Flags that 22.05 gives in place of the base state.
    "CONFIGURING": WorkloadState.RUNNING,
    "RESIZING": WorkloadState.RUNNING,
    "SIGNALING": WorkloadState.RUNNING,
    "STAGE_OUT": WorkloadState.COMPLETING,
    "COMPLETING": WorkloadState.COMPLETING,
    "STOPPED": WorkloadState.SUSPENDED,
    "REQUEUED": WorkloadState.REQUEUED,
    "REQUEUE_FED": WorkloadState.REQUEUED,
    "REQUEUE_HOLD": WorkloadState.HELD,
    "SPECIAL_EXIT": WorkloadState.HELD,
    "RESV_DEL_HOLD": WorkloadState.HELD,
}

_DOWN: Final = frozenset(
    {"DOWN", "ERROR", "NOT_RESPONDING", "POWERING_DOWN", "REBOOT_ISSUED", "REBOOT^", "FAIL", "FAILING", "FUTURE"}
)
_DRAIN: Final = frozenset({"DRAIN", "DRAINING", "DRAINED", "BLOCKED", "INVALID_REG", "INVAL", "INVALID"})
_UP: Final = frozenset({"IDLE", "MIXED", "ALLOCATED", "ALLOC", "MIX", "COMPLETING", "PLANNED", "RESERVED", "MAINT"})


def job_state(job: Job) -> WorkloadState:
    """Return the state of a job. One that could not start whatever is free is held, see `WorkloadState.HELD`."""
    states = job.states
    if not states:
        return WorkloadState.UNKNOWN
    base = _BASE.get(states[0], WorkloadState.UNKNOWN)
    flags = set(states)
    if "COMPLETING" in flags or "STAGE_OUT" in flags:
        # A job that is requeued completes first: it still holds what it had.
        return WorkloadState.COMPLETING
    if base is WorkloadState.RUNNING and "STOPPED" in flags:
        return WorkloadState.SUSPENDED
    if base not in (WorkloadState.PENDING, WorkloadState.REQUEUED):
        return base
    if flags & {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"} or job.hold or job.priority == 0 or job.eligible == 0:
        return WorkloadState.HELD
    if _BY_CHOICE.match(job.reason.strip("()")):
        return WorkloadState.HELD
    return WorkloadState.REQUEUED if job.restarts or base is WorkloadState.REQUEUED else WorkloadState.PENDING


def node_state(states: Sequence[str]) -> NodeState:
    """Return whether a node takes new work. One that is powered down to save energy does: Slurm wakes it up."""
    flags = set(states)
    if flags & _DOWN:
        return NodeState.DOWN
    if flags & _DRAIN:
        return NodeState.DRAINING
    return NodeState.UP if flags & _UP else NodeState.UNKNOWN


# --- jobs


@dataclass
class Notes:
    """What conversion could not do, by what it concerns: how often, and the first case."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, what: str, case: str) -> None:
        """Note one case."""
        count, first = self.found.get(what, (0, case))
        self.found[what] = (count + 1, first)

    def unread(self) -> list[Unread]:
        """Return one entry per kind."""
        return [
            Unread(what, first + (f" (and {count - 1} more)" if count > 1 else ""))
            for what, (count, first) in self.found.items()
        ]


@dataclass(frozen=True, slots=True)
class Reserved:
    """An active reservation. ``flexible``: its jobs may use other nodes too."""

    nodes: frozenset[str]
    flexible: bool


def demand_of(job: Job) -> tuple[Demand, tuple[str, ...]]:
    """Return what a job asks for, and the names of what a `Demand` cannot express.

    Raises:
        InvalidInputError: its resources cannot be parsed.
    """
    nodes = job.node_count or 1
    tasks = job.tasks or nodes
    one_node = job.max_nodes == 1
    pieces, distinct, share = nodes, nodes > 1, 1
    unchecked: list[str] = []
    if job.per_node:
        gpus = _parsed(job.per_node)
    elif job.per_socket:
        gpus, share = _parsed(job.per_socket), job.sockets_per_node or 1
    elif job.per_task:
        gpus = _parsed(job.per_task)
        if job.tasks_per_node or one_node:
            share = job.tasks_per_node or tasks
        else:
            pieces, distinct = tasks, False
    else:
        gpus = _parsed(job.per_job)
        if not job.per_job:
            # Only the sum is known, as from accounting: taken as the same on each node.
            found = gpus_of_tres(parse_tres(job.tres_req)) or Gpus()
            each, rest = divmod(found.count, nodes)
            if rest:
                unchecked.append("gpus per node")
            gpus = replace(found, count=each + (rest > 0), mig=tuple((name, -(-n // nodes)) for name, n in found.mig))
        total = gpus.count + sum(count for _, count in gpus.mig)
        if one_node:
            pieces, distinct = 1, False
        elif job.per_job and total > 1 and not gpus.mig:
            # Slurm spreads them over nodes as it likes.
            if nodes > 1:
                unchecked.append("node count")
            pieces, distinct, gpus = total, False, replace(gpus, count=1)
        elif total == 0 and job.tasks_per_node is None and tasks > nodes:
            pieces, distinct = tasks, False
    if len(gpus.models) > 1:
        unchecked.append("several GPU types")
    if len(gpus.mig) > 1 or (gpus.mig and gpus.count):
        unchecked.append("several MIG profiles")
    unchecked += [f"gres {name}" for name in gpus.others]
    profile, instances = gpus.mig[0] if gpus.mig else (None, 0)
    cpu, memory = _cpu_and_memory(job, pieces, gpus.count * share)
    return (
        Demand(
            gpu_milli=0 if profile else gpus.count * share * WHOLE_GPU,
            pieces=pieces,
            distinct_nodes=distinct,
            gpu_models=() if profile else gpus.models,
            mig_profile=profile,
            mig_instances=instances * share,
            cpu_milli=cpu,
            memory_bytes=memory,
        ),
        tuple(unchecked),
    )


def _parsed(text: str) -> Gpus:
    items = [item for item in parse_gres(text) if item.name not in ("cpu", "mem", "billing", "node", "energy")]
    return gpus_of(items)


def _cpu_and_memory(job: Job, pieces: int, gpus: int) -> tuple[int | None, int | None]:
    """Return milli-CPU and bytes per piece."""
    tres = parse_tres(job.tres_req)
    cpus = job.cpus if job.cpus is not None else tres.get("cpu")
    cpu = None if cpus is None else cpus * 1000 // pieces
    per_gpu = next((item.count for item in parse_gres(job.memory_per_tres) if item.name == "gpu"), 0)
    if per_gpu:
        return cpu, per_gpu * MIB * gpus
    if job.memory_per_node and pieces == (job.node_count or 1):
        return cpu, round(job.memory_per_node * MIB)
    if job.memory_per_cpu and cpu is not None:
        return cpu, round(job.memory_per_cpu * MIB * cpu / 1000)
    return cpu, tres["mem"] // pieces if tres.get("mem") else None


def placements_of(job: Job, notes: Notes) -> tuple[Placement, ...]:
    """Return what a job holds on each of its nodes.

    Raises:
        InvalidInputError: its nodes or resources cannot be parsed.
    """
    hosts = expand(job.nodes)
    if not hosts:
        return ()
    detail = {item.node: item for item in job.held}
    per_node = _gpus_per_node(job, hosts, notes)
    tres = parse_tres(job.tres_alloc)
    cpus = tres.get("cpu", job.cpus)
    # The detail counts cores; where that is not the number of CPUs, hardware threads are allocated.
    known = [detail[host].cpus for host in hosts if host in detail]
    total = sum(value for value in known if value is not None)
    scale = cpus / total if cpus and total and len(known) == len(hosts) and None not in known else None
    found = []
    for host, items in zip(hosts, per_node, strict=True):
        cpu: float | None = None
        memory: float | None = None
        if len(hosts) == 1:
            cpu, memory = cpus, (tres["mem"] / MIB if "mem" in tres else None)
        if host in detail:
            item = detail[host]
            cpu = item.cpus * scale if item.cpus is not None and scale is not None else cpu
            memory = item.memory if item.memory is not None else memory
        gpus = gpus_of(items)
        devices = [device_name(host, at) for item in items if _whole_gpu(item) for at in item.indices or ()]
        found.append(
            Placement(
                node=host,
                gpu_milli=gpus.count * WHOLE_GPU,
                devices=tuple(devices) if len(devices) == gpus.count else (),
                cpu_milli=None if cpu is None else round(cpu * 1000),
                memory_bytes=None if memory is None else round(memory * MIB),
            )
        )
    return tuple(found)


def device_name(node: str, index: int) -> str:
    """Return the id of the GPU that Slurm counts as ``index`` on ``node``."""
    return f"{node}/gpu{index}"


def _whole_gpu(item: Gres) -> bool:
    return item.name == "gpu" and not item.mig_profile


def _gpus_per_node(job: Job, hosts: Sequence[str], notes: Notes) -> list[tuple[Gres, ...]]:
    """Return the generic resources that a job holds on each host."""
    if len(job.gres) == len(hosts):
        return [parse_gres(item) for item in job.gres]
    if job.per_node:
        return [parse_gres(job.per_node)] * len(hosts)
    found = gpus_of_tres(parse_tres(job.tres_alloc))
    demand, _ = demand_of(job)
    total = found.count if found is not None else demand.total_gpu_milli // WHOLE_GPU
    model = "" if found is None or len(found.models) != 1 else found.models[0]
    share, rest = divmod(total, len(hosts))
    if rest or (share and len(hosts) > 1):
        notes.add("workloads: gpus per node", f"job {job.id}: Slurm gives only their sum, taken as spread evenly")
    return [(Gres("gpu", model, share + (at < rest)),) for at in range(len(hosts))]


def constraints_of(job: Job, unchecked: Iterable[str], reserved: Mapping[str, Reserved]) -> Constraints:
    """Return where a job may run. One that asks for a reservation runs on its nodes, and only such a one does.

    Raises:
        InvalidInputError: a host list cannot be parsed.
    """
    missing = list(unchecked)
    features: list[str] = []
    if job.features:
        if re.search(r"[|\[\]()*!]", job.features):
            missing.append(f"features {job.features}")
        else:
            features = [item for item in re.split(r"[&,]", job.features) if item]
    if job.licenses:
        missing.append("licenses")
    if job.het_job:
        missing.append("heterogeneous job")
    if "," in job.siblings:
        missing.append("federation")
    required = tuple(expand(job.required_nodes))
    found = [reserved[name] for name in job.reservation.split(",") if name in reserved]
    if found and not required and not any(item.flexible for item in found):
        required = tuple(sorted({node for item in found for node in item.nodes}))
    elif job.reservation and (not found or any(item.flexible for item in found)):
        missing.append("reservation")
    return Constraints(
        partitions=job.partitions,
        features=tuple(features),
        required_nodes=required,
        excluded_nodes=tuple(expand(job.excluded_nodes)),
        tolerations=(Toleration(RESERVATION, "Exists"),) if job.reservation else (),
        exclusive=job.exclusive,
        unchecked=tuple(missing),
    )


def labels_of(job: Job) -> dict[str, str]:
    """Return ``key=value`` pairs of the job's comment, which is where sites put what Slurm has no field for."""
    pairs = (item.partition("=") for item in re.split(r"[;,]", job.comment))
    labels = {key.strip(): value.strip() for key, equals, value in pairs if equals and key.strip().isidentifier()}
    return {**labels, "wckey": job.wckey} if job.wckey else labels


def job_id(job: Job, task: int | None = None) -> str:
    """Return the id of a job's workload: ``812``, or ``812_3`` for a task, before and after its start.

    Job ids begin anew after 67 million jobs; those of a federation hold the cluster's number.
    """
    number = job.array_task if task is None else task
    return f"{job.array_job}_{number}" if job.array_job and number is not None else str(job.id)


def workloads_of(
    job: Job,
    classes: Classes,
    notes: Notes,
    room: int | None = None,
    reserved: Mapping[str, Reserved] | None = None,
) -> list[Workload]:
    """Return the workload of a job; of waiting tasks of an array one each, of which ``room`` may start now.

    Raises:
        InvalidInputError: a field of the job cannot be parsed.
    """
    state = job_state(job)
    demand, unchecked = demand_of(job)
    placements = placements_of(job, notes) if state.holding or state.ended else ()
    began = bool(placements) and job.start is not None
    labels = labels_of(job)
    workload = Workload(
        id=job_id(job),
        name=job.name,
        state=state,
        service=labels.get("service", ""),
        queue=classes.queue(job),
        tenant=job.account,
        user=job.user,
        account=job.account,
        priority_class=job.qos,
        priority=job.priority,
        rank=classes.rank(job),
        submitted=job.submit,
        eligible=job.eligible or None,
        started=job.start if began else None,
        ended=job.end if state.ended else None,
        demand=demand,
        placements=placements if state.holding else (),
        constraints=constraints_of(job, unchecked, reserved or {}),
        preemptible=classes.preemptible(job),
        may_preempt=classes.may_preempt(job),
        labels=labels,
        reason=job.reason,
        array_job_id=str(job.array_job) if job.array_job else "",
        het_job_id=str(job.het_job) if job.het_job else "",
        requeues=job.restarts,
    )
    if not job.array_tasks or job.array_task is not None:
        return [workload]
    ranges, limit, cut = task_ids(job.array_tasks)
    tasks = [task for part in ranges for task in part[: MAX_ARRAY_TASKS + 1]]
    total = sum(map(len, ranges))
    if cut:
        notes.add("workloads: array tasks", f"job {job.id}: Slurm cut the list off at {job.array_tasks[-20:]!r}")
    if total > MAX_ARRAY_TASKS:
        notes.add(
            "workloads: array tasks", f"job {job.id}: {total - MAX_ARRAY_TASKS:,} more tasks than one workload each"
        )
    free = room if limit or job.array_limit else None
    found = []
    for at, task in enumerate(tasks[:MAX_ARRAY_TASKS]):
        waits = state.waiting and free is not None and at >= free
        found.append(
            msgspec.structs.replace(
                workload,
                id=job_id(job, task),
                state=WorkloadState.HELD if waits else state,
                reason="JobArrayTaskLimit" if waits else workload.reason,
            )
        )
    return found


def _rooms(jobs: Iterable[Job]) -> dict[int, int]:
    """Return how many more tasks of each limited array may run."""
    limits: dict[int, int] = {}
    active: Counter[int] = Counter()
    for job in jobs:
        if not job.array_job:
            continue
        _, _, text = job.array_tasks.partition("%")
        limit = job.array_limit or (int(text.strip("]")) if text.strip("]").isdigit() else 0)
        if limit:
            limits[job.array_job] = limit
        if job.array_task is not None and job_state(job).holding:
            active[job.array_job] += 1
    return {array: max(0, limit - active[array]) for array, limit in limits.items()}


# --- nodes


def node_of(
    record: NodeRecord,
    partitions: Sequence[str],
    held: Sequence[Placement] | None,
    notes: Notes,
    reserved: Mapping[str, Reserved] | None = None,
) -> Node:
    """Return a node. ``held`` is what jobs hold on it; None when jobs could not be read.

    Raises:
        InvalidInputError: its resources cannot be parsed.
    """
    configured = parse_gres(record.gres)
    gpus = gpus_of(configured)
    used = None if record.gres_used is None else parse_gres(record.gres_used)
    if len(gpus.models) > 1:
        notes.add("nodes: gpu models", f"{record.name} has several; a free GPU counts for a request of any of them")
    allocated, free = _use(record, gpus, used, held, notes)
    mig = dict(gpus.mig)
    for profile, count in gpus_of(used or ()).mig:
        mig[profile] = max(0, mig.get(profile, 0) - count)
    # The node's own flag comes late, and with 22.05 not at all.
    holder = next((name for name, item in (reserved or {}).items() if record.name in item.nodes), record.reservation)
    is_reserved = holder or {"RESERVED", "MAINT", "MAINTENANCE"} & set(record.states)
    return Node(
        name=record.name,
        state=node_state(record.states),
        reason=record.reason,
        partitions=tuple(partitions) or record.partitions,
        features=record.features,
        taints=(Taint(RESERVATION, holder),) if is_reserved else (),
        gpu_models=gpus.models,
        gpu_capacity_milli=gpus.count * WHOLE_GPU,
        gpu_allocated_milli=allocated,
        gpu_free_milli=free,
        mig_free=None if used is None and mig else mig,
        cpu_capacity_milli=None if record.cpus is None else round(record.cpus * 1000),
        cpu_allocated_milli=None if record.cpus_allocated is None else round(record.cpus_allocated * 1000),
        memory_capacity_bytes=None if record.memory is None else round(record.memory * MIB),
        memory_allocated_bytes=None if record.memory_allocated is None else round(record.memory_allocated * MIB),
        devices=tuple(device_name(record.name, at) for at in range(gpus.count)) if free is not None else (),
    )


def _use(
    record: NodeRecord, gpus: Gpus, used: Sequence[Gres] | None, held: Sequence[Placement] | None, notes: Notes
) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the milli-GPU in use on a node, and what is free of each GPU; None: not known."""
    shared = [item.name for item in used or () if item.name in ("shard", "mps") and item.count]
    if shared:
        notes.add("nodes: gpu allocation", f"{record.name}: GPUs are shared by {shared[0]}, which ones is not told")
        return None, None
    if gpus.count == 0:
        return 0, None
    mine = [item for item in used or () if _whole_gpu(item)]
    if mine:
        count = sum(item.count for item in mine)
        taken = {at for item in mine for at in item.indices or ()}
        if len(taken) != count:
            # GPUs without a type are only counted; the jobs know theirs.
            names = {name for placement in held or () for name in placement.devices}
            taken = {at for at in range(gpus.count) if device_name(record.name, at) in names}
        exact = not gpus.mig and len(taken) == count and all(at < gpus.count for at in taken)
        free = tuple(0 if at in taken else WHOLE_GPU for at in range(gpus.count)) if exact else None
        return count * WHOLE_GPU, free
    tracked = gpus_of_tres(parse_tres(record.tres))
    if tracked is not None:
        return parse_tres(record.tres_used).get("gres/gpu", 0) * WHOLE_GPU, None
    if held is not None:
        return sum(placement.gpu_milli for placement in held), None
    notes.add("nodes: gpu allocation", f"{record.name}: neither Slurm nor the jobs tell")
    return None, None


# --- the whole


@dataclass(frozen=True)
class Seen:
    """What is remembered from one poll to the next: what each job held when it last ran, and preemptions found."""

    running: Mapping[str, Workload] = field(default_factory=dict)
    events: tuple[Event, ...] = ()


def snapshot_of(
    dump: Dump, time: float, cluster: str, ranking: Ranking | None = None, seen: Seen | None = None
) -> tuple[Snapshot, Seen]:
    """Return the snapshot of one reading, and what the next one needs to know."""
    notes = Notes()
    unread = [Unread(what, why) for what, why in dump.unread.items()]
    for part in (dump.jobs, dump.nodes, dump.partitions, dump.reservations):
        for name, why in (part.rejected if part else {}).items():
            notes.add(f"{name.split(' ')[0]}s", f"{name}: {why}")
    partitions = {item.name: item for item in (dump.partitions.items if dump.partitions else ())}
    classes = Classes(partitions, {item.name: item for item in dump.qos or ()}, dump.config, ranking)
    if partitions and classes.single:
        notes.add(
            "priority classes",
            "all partitions and QOS have one priority: name levels in a policy file to tell them apart",
        )
    reserved = _reserved(dump, time, notes)
    workloads = _workloads(dump.jobs.items, classes, notes, reserved) if dump.jobs else []
    nodes = _nodes(dump, partitions, workloads, notes, reserved)
    before = seen or Seen()
    events = before.events
    running = dict(before.running)
    if dump.jobs:
        events = (*events, *preemptions(before.running, workloads, time, events))
        running = {
            item.id: item for item in workloads if item.state in (WorkloadState.RUNNING, WorkloadState.SUSPENDED)
        }
        # A job that is being stopped is not there any more once it has been: what it held is still needed then.
        stopping = {item.id for item in workloads if item.state is WorkloadState.COMPLETING}
        # So it is as long as the job that takes its place may be about to start.
        stopping |= {
            item.id
            for item in workloads
            if item.requeues and item.submitted is not None and time - item.submitted < HANDOVER_SECONDS
        }
        running = {name: item for name, item in before.running.items() if name in stopping} | running
    events = tuple(event for event in events if event.time > time - EVENT_SECONDS)
    found = Snapshot(
        time=time,
        cluster=cluster,
        source="slurm",
        workloads=tuple(workloads),
        nodes=tuple(nodes),
        events=events,
        unread=(*unread, *notes.unread()),
    )
    return found, Seen(running, events)


#: Preemptions are reported for this long.
EVENT_SECONDS: Final = 3600.0


def _reserved(dump: Dump, time: float, notes: Notes) -> dict[str, Reserved]:
    """Return the reservations that are active now. Those of some cores of their nodes leave the rest to others."""
    cpus = {record.name: record.cpus or 0.0 for record in (dump.nodes.items if dump.nodes else ())}
    found = {}
    for item in dump.reservations.items if dump.reservations else ():
        if not (item.start or 0.0) <= time < (item.end or float("inf")):
            continue
        try:
            nodes = frozenset(expand(item.nodes))
        except InvalidInputError as error:
            notes.add("reservations", f"{item.name}: {error}")
            continue
        # A core has one CPU or two.
        total = sum(cpus.get(node, 0.0) for node in nodes)
        if item.cores is not None and total and item.cores * 2 < total:
            notes.add("reservations", f"{item.name} is of some cores of its nodes, which are taken as free for all")
            continue
        found[item.name] = Reserved(nodes, "FLEX" in item.flags)
    return found


def _workloads(jobs: Sequence[Job], classes: Classes, notes: Notes, reserved: Mapping[str, Reserved]) -> list[Workload]:
    rooms = _rooms(jobs)
    found = []
    for job in jobs:
        if "REVOKED" in job.states:
            # The copy of a federated job that runs in another cluster.
            continue
        try:
            found.extend(workloads_of(job, classes, notes, rooms.get(job.array_job), reserved))
        except InvalidInputError as error:
            notes.add("jobs", f"job {job.id}: {error}")
    return found


def _nodes(
    dump: Dump,
    partitions: Mapping[str, PartitionRecord],
    workloads: Sequence[Workload],
    notes: Notes,
    reserved: Mapping[str, Reserved],
) -> list[Node]:
    members: dict[str, list[str]] = defaultdict(list)
    for partition in partitions.values():
        try:
            for host in expand(partition.nodes):
                members[host].append(partition.name)
        except InvalidInputError as error:
            notes.add("partitions", f"{partition.name}: {error}")
    held: dict[str, list[Placement]] = defaultdict(list)
    for workload in workloads:
        for placement in workload.placements:
            held[placement.node].append(placement)
    found = []
    for record in dump.nodes.items if dump.nodes else ():
        if "FUTURE" in record.states:
            continue
        # The node's own list wins: a partition may name a node set.
        names = record.partitions or members[record.name]
        try:
            found.append(node_of(record, names, held[record.name] if dump.jobs else None, notes, reserved))
        except InvalidInputError as error:
            notes.add("nodes", f"node {record.name}: {error}")
    return found


__all__ = [
    "Notes",
    "Seen",
    "demand_of",
    "job_state",
    "node_of",
    "node_state",
    "placements_of",
    "snapshot_of",
    "workloads_of",
]
