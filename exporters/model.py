"""What a scheduler and its GPUs look like at one moment: frozen, typed, the same for every source.

Conventions, which every source must meet:

* Times are Unix seconds (UTC); ``None`` means that the source does not know, never zero.
* GPUs are counted in milli-GPU (1000 = one whole GPU), CPUs in milli-CPU, memory in bytes.
* ``rank`` 0 is the most urgent. Sources convert with `Ranking` or `dense_ranks`: a larger number is more urgent in
  Slurm and Kubernetes, a smaller one in request headers. ``None`` means that the priority is unknown.
* ``None`` in an optional field means *not known*: a check that needs it is reported as not made.
* What a source could not read goes to `Snapshot.unread`, so that an absent series has a reason.

A snapshot is also the File source's format: one JSON object per line (`encode`, `read_snapshots`, `write_snapshots`).
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO, Final, cast

import msgspec

from exporters.errors import InvalidInputError, NotFoundError

#: Raised when a field of the recorded form is removed or changes meaning; new optional fields do not raise it.
SCHEMA_VERSION: Final = 1

#: One whole GPU.
WHOLE_GPU: Final = 1000

#: The least urgent level that has a name of its own; less urgent ranks share it.
LAST_LEVEL: Final = 3

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class WorkloadState(StrEnum):
    """Where a workload is in its life."""

    PENDING = "pending"
    HELD = "held"
    """Waiting by choice of its user or an administrator (Slurm hold, suspended Kubernetes Job): no wait is counted."""
    RUNNING = "running"
    SUSPENDED = "suspended"
    REQUEUED = "requeued"
    """Ran before, went back to the queue and waits again."""
    COMPLETING = "completing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    PREEMPTED = "preempted"
    UNKNOWN = "unknown"

    @property
    def waiting(self) -> bool:
        """Whether the scheduler could start it now."""
        return self in _WAITING

    @property
    def holding(self) -> bool:
        """Whether it occupies resources. A suspended job does: Slurm keeps its memory and GPUs allocated."""
        return self in _HOLDING

    @property
    def ended(self) -> bool:
        """Whether it will never run again."""
        return self in _ENDED


_WAITING: Final = frozenset({WorkloadState.PENDING, WorkloadState.REQUEUED})
_HOLDING: Final = frozenset({WorkloadState.RUNNING, WorkloadState.SUSPENDED, WorkloadState.COMPLETING})
_ENDED: Final = frozenset(
    {
        WorkloadState.COMPLETED,
        WorkloadState.FAILED,
        WorkloadState.CANCELLED,
        WorkloadState.TIMED_OUT,
        WorkloadState.PREEMPTED,
    }
)


class NodeState(StrEnum):
    """Whether a node takes new work. Only `UP` does; the work on a draining node still holds its resources."""

    UP = "up"
    DRAINING = "draining"
    DOWN = "down"
    UNKNOWN = "unknown"


class QosClass(StrEnum):
    """Kubernetes quality of service, as the API server derives it from requests and limits."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class EventKind(StrEnum):
    """Something that happened between two snapshots."""

    PREEMPTED = "preempted"
    PREEMPTION_FAILED = "preemption_failed"
    """The scheduler said that it tried to preempt and could not."""
    EVICTED = "evicted"
    REQUEUED = "requeued"
    FAILED_SCHEDULING = "failed_scheduling"
    XID = "xid"


class ViolationType(StrEnum):
    """The `violation_type` label (spec V1 to V4, V11)."""

    INVERSION = "inversion"
    SCHEDULING_DELAY = "scheduling_delay"
    FRAGMENTATION_BLOCKED = "fragmentation_blocked"
    PREEMPTION_FAILED = "preemption_failed"
    WRONG_WAY_PREEMPTION = "wrong_way_preemption"
    QOS_MISMATCH = "qos_mismatch"


class Basis(StrEnum):
    """How strong the case for an inversion is; each includes the one before it.

    `HELD`: a less urgent workload held resources that the waiter is eligible for. `STARTED`: it started after the
    waiter was submitted. `DOMINATED`: what it started on would by itself have fitted the waiter's whole demand.
    """

    HELD = "held"
    STARTED = "started"
    DOMINATED = "dominated"


BASES: Final = (Basis.HELD, Basis.STARTED, Basis.DOMINATED)


class Check(StrEnum):
    """What was compared to decide whether the waiter could have used a culprit's or a node's resources."""

    GPU_COUNT = "gpu_count"
    GPU_MODEL = "gpu_model"
    GPU_MEMORY = "gpu_memory"
    MIG_PROFILE = "mig_profile"
    CPU = "cpu"
    MEMORY = "memory"
    PARTITION = "partition"
    NODE_SELECTOR = "node_selector"
    NODE_LIST = "node_list"
    NODE_STATE = "node_state"
    TAINTS = "taints"


class Unread(msgspec.Struct, frozen=True):
    """Something that a source could not read, and why.

    A whole part of a snapshot that is missing is named ``workloads``, ``nodes``, ``devices`` or ``events``; smaller
    things have a name of their own, such as ``nodes: gpu-7 memory``.
    """

    what: str
    why: str


class Demand(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a workload asks for, as ``pieces`` equal parts, each of which must fit on one node.

    One Kubernetes pod is one piece; a gang of pods is several; a Slurm job on four nodes is four pieces on
    ``distinct_nodes``; ``--gpus=8`` without a node count is eight pieces of one GPU that may share nodes.
    All amounts are per piece.

    ``gpu_milli`` under 1000 is a share of one GPU; more is that many whole GPUs. ``gpu_models`` lists the models that
    will do (empty: any). ``gpu_memory_bytes`` is needed on every GPU. A demand for MIG has ``mig_profile`` (such as
    ``1g.10gb``) and ``mig_instances``, and then ``gpu_milli`` is 0.
    """

    gpu_milli: NonNegative = 0
    pieces: Positive = 1
    distinct_nodes: bool = False
    gpu_models: tuple[str, ...] = ()
    gpu_memory_bytes: NonNegative | None = None
    mig_profile: str | None = None
    mig_instances: NonNegative = 0
    cpu_milli: NonNegative | None = None
    memory_bytes: NonNegative | None = None

    @property
    def total_gpu_milli(self) -> int:
        """Milli-GPU over all pieces."""
        return self.gpu_milli * self.pieces

    @property
    def wants_gpu(self) -> bool:
        """Whether it asks for any GPU or MIG instance."""
        return self.gpu_milli > 0 or self.mig_instances > 0


class Placement(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a running workload holds on one node. ``devices`` are `Device.id` (empty: not known which)."""

    node: str
    gpu_milli: NonNegative = 0
    devices: tuple[str, ...] = ()
    mig_instances: tuple[str, ...] = ()
    cpu_milli: NonNegative | None = None
    memory_bytes: NonNegative | None = None


class Taint(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A Kubernetes node taint; only ``NoSchedule`` and ``NoExecute`` keep pods away."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


class Toleration(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A Kubernetes toleration. An empty key with operator ``Exists`` tolerates everything; empty effect: any."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Whether this toleration matches ``taint``, by the rules of the Kubernetes API."""
        if self.effect and self.effect != taint.effect:
            return False
        if self.operator == "Exists":
            return not self.key or self.key == taint.key
        return self.key == taint.key and self.value == taint.value


class Constraints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a workload may run.

    ``partitions``: any of them will do (empty: not restricted). ``node_selector``: every label must match.
    ``features``: the node must have all of them. ``required_nodes``: the workload must run on these, when given.
    ``exclusive``: needs nodes that nobody else uses. ``unchecked`` names constraints that the source saw and this
    model cannot express (``pod affinity``, ``constraint a|b``): eligibility is then reported as not fully checked.
    """

    partitions: tuple[str, ...] = ()
    node_selector: dict[str, str] = {}
    features: tuple[str, ...] = ()
    required_nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()
    tolerations: tuple[Toleration, ...] | None = None
    exclusive: bool = False
    unchecked: tuple[str, ...] = ()


class Workload(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Slurm job (or array task, or heterogeneous component), a pod, a Kueue Workload or a Volcano PodGroup.

    ``id`` is unique in the cluster and never reused: a UID, or job id and submit time where ids wrap. ``service`` is
    the application it belongs to, the `service` label of the metrics. ``queue`` is the Slurm partition that it waits
    in, the Kueue LocalQueue or Volcano queue. ``priority`` is the source's own number; ``rank`` is derived from it.
    ``preemptible``: whether the scheduler may stop it for a more urgent one (None: not known).
    ``may_preempt``: whether it may itself preempt others (Kubernetes ``preemptionPolicy``; None: not known).
    """

    id: str
    name: str
    state: WorkloadState
    service: str = ""
    namespace: str = ""
    queue: str = ""
    tenant: str = ""
    user: str = ""
    account: str = ""
    priority_class: str = ""
    priority: float | None = None
    rank: NonNegative | None = None
    submitted: float | None = None
    eligible: float | None = None
    started: float | None = None
    ended: float | None = None
    demand: Demand = Demand()
    placements: tuple[Placement, ...] = ()
    constraints: Constraints = Constraints()
    preemptible: bool | None = None
    may_preempt: bool | None = None
    qos_class: QosClass | None = None
    task_class: str = ""
    restart_policy: str = ""
    labels: dict[str, str] = {}
    reason: str = ""
    array_job_id: str = ""
    het_job_id: str = ""
    requeues: NonNegative = 0

    @property
    def waiting_since(self) -> float | None:
        """When the wait that counts began: eligible time (no hold, no dependency), else submit time."""
        if self.eligible is not None and (self.submitted is None or self.eligible >= self.submitted):
            return self.eligible
        return self.submitted

    @property
    def level(self) -> str:
        """The `priority_level` label: P0 to P3, or ``unknown``."""
        return level_of(self.rank)

    @property
    def display_service(self) -> str:
        """The `service` label: the service, else the name."""
        return self.service or self.name

    @property
    def held_gpu_milli(self) -> int:
        """Milli-GPU that it holds now (0 when it is not running)."""
        if not self.state.holding:
            return 0
        if self.placements:
            return sum(placement.gpu_milli for placement in self.placements)
        return self.demand.total_gpu_milli


class MigInstance(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One MIG GPU instance. ``start`` and ``size`` are its placement in memory slices of the parent."""

    id: str
    profile: str
    start: NonNegative | None = None
    size: NonNegative | None = None
    gpu_instance_id: NonNegative | None = None
    compute_instance_id: NonNegative | None = None
    memory_total_bytes: NonNegative | None = None
    memory_used_bytes: NonNegative | None = None
    allocated: bool | None = None


class AllocatorState(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A caching allocator's view of its memory on one device, for one process.

    ``reserved_bytes`` is what the process took from the driver; ``free_bytes`` of it is in no live allocation;
    ``largest_free_bytes`` is the largest contiguous block of that.
    """

    process: str
    reserved_bytes: NonNegative
    free_bytes: NonNegative
    largest_free_bytes: NonNegative
    free_blocks: NonNegative = 0
    workload: str = ""


class DeviceProcess(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A process that uses a device; ``workload`` is the `Workload.id` it belongs to, when known."""

    pid: NonNegative
    name: str = ""
    memory_bytes: NonNegative | None = None
    workload: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    job: str = ""
    user: str = ""
    mig_instance: str = ""


class Device(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU. Ratios are in [0, 1]; ``energy_joules`` counts since the driver was loaded.

    ``up`` is False when the GPU is lost, wedged or unreadable, and ``reason`` says why. ``allocated_milli`` is what the
    scheduler gave away of it (None: not known). ``mig_slices`` is the number of memory slices that MIG placements are
    counted in (8 on A100 and H100). ``xid_errors`` counts by XID since the exporter started.
    """

    id: str
    node: str
    index: NonNegative | None = None
    model: str = ""
    up: bool = True
    reason: str = ""
    minor_number: NonNegative | None = None
    pci_bus_id: str = ""
    memory_total_bytes: NonNegative | None = None
    memory_used_bytes: NonNegative | None = None
    memory_reserved_bytes: NonNegative | None = None
    gpu_utilization_ratio: float | None = None
    memory_utilization_ratio: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    ecc_corrected: NonNegative | None = None
    ecc_uncorrected: NonNegative | None = None
    throttle_reasons: tuple[str, ...] | None = None
    xid_errors: dict[str, int] = {}
    allocated_milli: NonNegative | None = None
    mig_enabled: bool | None = None
    mig_slices: NonNegative | None = None
    mig_instances: tuple[MigInstance, ...] = ()
    allocators: tuple[AllocatorState, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()
    unread: tuple[Unread, ...] = ()


class Node(msgspec.Struct, frozen=True, omit_defaults=True):
    """One machine. Capacities and allocations are as the scheduler counts them; None: not known.

    ``gpu_models`` are the models of its GPUs, as workloads ask for them. ``gpu_free_milli`` gives the free milli-GPU of
    every GPU, in the order of ``devices`` when those are given, where the scheduler tracks single GPUs; otherwise the
    free GPUs are whole ones: capacity less allocation.
    """

    name: str
    state: NodeState = NodeState.UP
    reason: str = ""
    partitions: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    features: tuple[str, ...] = ()
    taints: tuple[Taint, ...] | None = None
    gpu_models: tuple[str, ...] = ()
    gpu_memory_bytes: NonNegative | None = None
    gpu_capacity_milli: NonNegative | None = None
    gpu_allocated_milli: NonNegative | None = None
    gpu_free_milli: tuple[int, ...] | None = None
    mig_free: dict[str, int] | None = None
    """Free MIG instances by profile; None: not known."""
    cpu_capacity_milli: NonNegative | None = None
    cpu_allocated_milli: NonNegative | None = None
    memory_capacity_bytes: NonNegative | None = None
    memory_allocated_bytes: NonNegative | None = None
    devices: tuple[str, ...] = ()

    @property
    def cpu_free_milli(self) -> int | None:
        """Free milli-CPU, at least 0 (schedulers over-commit); None when not known."""
        return _free(self.cpu_capacity_milli, self.cpu_allocated_milli)

    @property
    def memory_free_bytes(self) -> int | None:
        """Free bytes of memory, at least 0; None when not known."""
        return _free(self.memory_capacity_bytes, self.memory_allocated_bytes)

    @property
    def free_gpus(self) -> tuple[int, ...] | None:
        """Free milli-GPU of each GPU, largest first; None when not known."""
        if self.gpu_free_milli is not None:
            return tuple(sorted((max(0, milli) for milli in self.gpu_free_milli), reverse=True))
        free = _free(self.gpu_capacity_milli, self.gpu_allocated_milli)
        if free is None or self.gpu_capacity_milli is None:
            return None
        whole, rest = divmod(free, WHOLE_GPU)
        count = -(-self.gpu_capacity_milli // WHOLE_GPU)
        gpus = [WHOLE_GPU] * whole + ([rest] if rest else [])
        return tuple(gpus + [0] * (count - len(gpus)))


def _free(capacity: int | None, allocated: int | None) -> int | None:
    if capacity is None or allocated is None:
        return None
    return max(0, capacity - allocated)


class Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Something that happened to ``workload`` (or to ``device``). ``id`` is the same each time it is reported.

    For `EventKind.PREEMPTED`, ``workload`` is the one that was stopped, ``by`` the one that took its place; the ranks
    are as they were then, since either may be gone from the snapshot.
    """

    id: str
    kind: EventKind
    time: float
    workload: str = ""
    by: str = ""
    rank: NonNegative | None = None
    by_rank: NonNegative | None = None
    service: str = ""
    by_service: str = ""
    node: str = ""
    device: str = ""
    gpu_milli: NonNegative | None = None
    reason: str = ""


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that one source saw at ``time``. ``cluster`` names the system, ``source`` the kind of reader."""

    time: float
    cluster: str
    source: str
    workloads: tuple[Workload, ...] = ()
    nodes: tuple[Node, ...] = ()
    devices: tuple[Device, ...] = ()
    events: tuple[Event, ...] = ()
    unread: tuple[Unread, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def lacks(self, part: str) -> bool:
        """Whether ``part`` (``workloads``, ``nodes``, ``devices``, ``events``) could not be read at all."""
        return any(item.what == part for item in self.unread)


class Culprit(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A workload that held what the victim waited for, and the GPU-seconds it took during the wait."""

    workload: str
    service: str = ""
    rank: int | None = None
    gpu_seconds: float = 0.0
    basis: Basis | None = None


class Violation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A broken promise. ``end`` is None while it lasts; times are Unix seconds.

    ``id`` is the same in every poll and after a restart. ``limit_seconds`` is the SLO or deadline that was passed.
    ``checks`` lists the eligibility checks that were made, ``unchecked`` those that could not be, and why.
    """

    id: str
    type: ViolationType
    cluster: str
    victim: str
    service: str
    level: str
    start: float
    end: float | None = None
    rank: int | None = None
    queue: str = ""
    tenant: str = ""
    limit_seconds: float | None = None
    culprits: tuple[Culprit, ...] = ()
    basis: Basis | None = None
    checks: tuple[Check, ...] = ()
    unchecked: tuple[Unread, ...] = ()
    detail: str = ""

    def duration(self, now: float) -> float:
        """Seconds that it has lasted at ``now``, or lasted in all when it has ended."""
        return max(0.0, (now if self.end is None else self.end) - self.start)


def level_of(rank: int | None) -> str:
    """Return the priority level ``P0`` to ``P3`` of ``rank``; ranks past 3 share ``P3``; None is ``unknown``."""
    return "unknown" if rank is None else f"P{min(rank, LAST_LEVEL)}"


def violation_id(cluster: str, workload: str, kind: ViolationType, since: float) -> str:
    """Return the identity of a violation: a hash of the cluster, the workload, the type and when its wait began."""
    text = "\0".join((cluster, workload, kind.value, repr(float(since))))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def dense_ranks(priorities: Iterable[float]) -> dict[float, int]:
    """Rank distinct priorities of a source where larger is more urgent: the largest gets 0, the next 1, and so on.

    Give it the *configured* priorities (PriorityClasses, QOS) rather than those of the waiting jobs, so that ranks do
    not move when a job arrives.
    """
    return {value: rank for rank, value in enumerate(sorted(set(priorities), reverse=True))}


class Ranking(msgspec.Struct, frozen=True):
    """How a source's priorities become ranks, where larger numbers are more urgent.

    ``classes`` maps a priority class, QOS or partition name to its rank and wins over ``thresholds``: a priority of at
    least ``thresholds[i]`` (descending) has rank i, a smaller one than all has rank ``len(thresholds)``.
    """

    classes: Mapping[str, int] = {}
    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if list(self.thresholds) != sorted(set(self.thresholds), reverse=True):
            raise ValueError("thresholds are not strictly descending")
        if any(rank < 0 for rank in self.classes.values()):
            raise ValueError("a rank is negative: 0 is the most urgent")

    def rank(self, priority: float | None, *names: str) -> int | None:
        """Return the rank of a workload with ``priority`` whose class, QOS, partition are ``names``; None: unknown."""
        for name in names:
            if name in self.classes:
                return self.classes[name]
        if priority is None or not self.thresholds:
            return None
        return next((rank for rank, least in enumerate(self.thresholds) if priority >= least), len(self.thresholds))


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Snapshot)


def encode(snapshot: Snapshot) -> bytes:
    """Encode ``snapshot`` as one line of JSON, with its newline. Fields at their default are left out."""
    return _ENCODER.encode(snapshot) + b"\n"


def decode(line: bytes, where: str = "snapshot") -> Snapshot:
    """Decode one line that `encode` wrote.

    Raises:
        InvalidInputError: the line is not a snapshot, or of a newer schema version. ``where`` names it in the message.
    """
    try:
        snapshot = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{where} is not a snapshot: {error}",
            cure="record it with `rca exporter record`; the format is described in docs/metrics.md",
        ) from None
    if snapshot.schema_version > SCHEMA_VERSION:
        raise InvalidInputError(
            f"{where} has schema version {snapshot.schema_version}; this release reads up to {SCHEMA_VERSION}",
            cure="upgrade prioscope, or record it again",
        )
    return snapshot


def read_snapshots(path: Path | str) -> Iterator[Snapshot]:
    """Yield the snapshots of a JSON Lines file (``.gz`` too), one at a time; empty lines are skipped.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: the file cannot be read, or a line is not a snapshot; the message names file and line.
    """
    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"{path} does not exist", cure="record one with `rca exporter record`")
    try:
        with _open(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield decode(line, f"{path}:{number}")
    except (OSError, EOFError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}", cure="check the file and its permissions") from None


def write_snapshots(path: Path | str, snapshots: Iterable[Snapshot]) -> int:
    """Write ``snapshots`` as JSON Lines (gzip when the name ends in ``.gz``) and return how many there were."""
    count = 0
    with _open(Path(path), "wb") as stream:
        for count, snapshot in enumerate(snapshots, start=1):  # noqa: B007
            stream.write(encode(snapshot))
    return count


def _open(path: Path, mode: str) -> BinaryIO:
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, mode))
    return cast("BinaryIO", path.open(mode))


def by_id(workloads: Sequence[Workload]) -> dict[str, Workload]:
    """Index ``workloads`` by id; a duplicate id keeps the last."""
    return {workload.id: workload for workload in workloads}
