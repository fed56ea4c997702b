"""What a replay reads and returns: frozen structs of NumPy arrays, one row a node or a workload.

Conventions: times and durations are seconds, ``inf`` means never; GPUs are milli-GPU *per device* (1000 = one whole
GPU), CPUs milli-CPU, memory MiB; rank 0 is the most urgent. Indices of -1 mean "none". Sets of GPU models or pools are
bit masks, so that a cluster can have at most 62 of each; 0 means "any".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rca.errors import InvalidInputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: One whole GPU.
WHOLE: Final = 1000
#: Stands for "not limited" or "not known" in CPU and memory capacities.
UNLIMITED: Final = 1 << 60
#: Device and model sets are bits of a signed 64-bit number.
MAX_BITS: Final = 62


class Status(IntEnum):
    """Where a workload is at the end of the replay."""

    NOT_SUBMITTED = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3
    CANCELLED = 4
    """It left the queue at its `Workloads.cancel` time."""
    FAILED = 5
    """It fitted nowhere when it arrived, and the options say not to retry."""
    UNPLACEABLE = 6
    """It would not even fit the empty cluster."""


class Backfill(StrEnum):
    """What may start while the first in the order does not fit."""

    NONE = "none"
    """Nothing: strict order."""
    EASY = "easy"
    """What does not delay the first one's earliest start, by the durations that users estimated."""
    GREEDY = "greedy"
    """Whatever fits, as Kubernetes does."""


class Engine(StrEnum):
    """How the event loop runs. Both give identical results."""

    AUTO = "auto"
    """Compiled when the trace is large enough to pay for it and numba is installed."""
    COMPILED = "compiled"
    INTERPRETED = "interpreted"


@dataclass(frozen=True)
class MigProfile:
    """A MIG profile: ``size`` memory slices of eight, beginning at one of ``starts``; ``milli`` of a GPU's compute."""

    name: str
    size: int
    starts: tuple[int, ...]
    milli: int


#: Placements that NVML reports for the 7-slice data-centre GPUs (A100, A30's are fewer, H100, H200).
MIG_PROFILES: Final[tuple[MigProfile, ...]] = (
    MigProfile("1g", 1, (0, 1, 2, 3, 4, 5, 6), 142),
    MigProfile("1g+mem", 2, (0, 2, 4, 6), 142),
    MigProfile("2g", 2, (0, 2, 4), 285),
    MigProfile("3g", 4, (0, 4), 428),
    MigProfile("4g", 4, (0,), 571),
    MigProfile("7g", 8, (0,), 1000),
)


@dataclass(frozen=True)
class Cluster:
    """N nodes with up to G devices each.

    Attributes:
        names: of the nodes, [N].
        gpus: devices, [N].
        cpu_milli, memory_mib: capacities, [N]; `UNLIMITED` when not known.
        model: index into ``models``, -1 when the node has no GPU or its model is not known, [N].
        pool: bit mask of the pools (partitions, node groups) that the node belongs to, [N].
        mig: whether the node's GPUs are partitioned (MIG on), [N]; such a node takes MIG demands only.
        models, pools: names behind the indices and bits.
        uid: identity of the nodes for random draws, [N]; kept by selections.
    """

    names: tuple[str, ...]
    gpus: Ints
    cpu_milli: Ints
    memory_mib: Ints
    model: Ints
    pool: Ints
    mig: Bools
    models: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    uid: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(
        cls,
        gpus: Sequence[int] | Ints,
        *,
        names: Sequence[str] | None = None,
        cpu_milli: Sequence[int] | Ints | None = None,
        memory_mib: Sequence[int] | Ints | None = None,
        model: Sequence[str] | None = None,
        pool: Sequence[Sequence[str]] | None = None,
        mig: Sequence[bool] | Bools | None = None,
    ) -> Cluster:
        """Return a cluster from plain columns; what is left out is unlimited or absent."""
        counts = np.asarray(gpus, np.int64)
        size = len(counts)
        models, model_index = _index(model or [""] * size)
        pools, masks = _masks(pool or [()] * size)
        return cls(
            names=tuple(names) if names is not None else tuple(f"node-{at}" for at in range(size)),
            gpus=counts,
            cpu_milli=_ints(cpu_milli, size, UNLIMITED),
            memory_mib=_ints(memory_mib, size, UNLIMITED),
            model=model_index,
            pool=masks,
            mig=np.zeros(size, bool) if mig is None else np.asarray(mig, bool),
            models=models,
            pools=pools,
            uid=np.arange(size, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.names)

    def select(self, rows: Bools | Ints) -> Cluster:
        """Return the nodes that ``rows`` (mask, or indices in the new order of preference) names."""
        kept = np.flatnonzero(rows) if np.asarray(rows).dtype == np.bool_ else np.asarray(rows, np.int64)
        columns: dict[str, Any] = {
            item.name: value[kept] for item in fields(self) if isinstance(value := getattr(self, item.name), np.ndarray)
        }
        return replace(self, names=tuple(self.names[row] for row in kept), **columns)

    @property
    def capacity_milli(self) -> int:
        """Milli-GPU of the whole cluster."""
        return int(self.gpus.sum()) * WHOLE

    def model_mask(self, models: Sequence[str]) -> int:
        """Return the bit mask of GPU models by name; a model that no node has sets a bit that nothing matches."""
        mask = 0
        for name in models:
            mask |= 1 << (self.models.index(name) if name in self.models else MAX_BITS - 1)
        return mask

    def pool_mask(self, pools: Sequence[str]) -> int:
        """Return the bit mask of pools by name; an unknown pool sets a bit that nothing matches."""
        mask = 0
        for name in pools:
            mask |= 1 << (self.pools.index(name) if name in self.pools else MAX_BITS - 1)
        return mask


@dataclass(frozen=True)
class Workloads:
    """W workloads. A gang (a multi-node job, a pod group) is several rows with one gang id.

    Attributes:
        names: [W].
        submit: when it may start, [W]. Need not be sorted.
        duration: its work in seconds when nothing interrupts it, [W]; inf: never ends.
        censored: whether ``duration`` is only a lower bound (it had not ended when the recording did), [W].
        estimate: the duration that users promised, which policies and backfill may see, [W].
        cpu_milli, memory_mib: demand, [W].
        gpu_count, gpu_milli: devices, all on one node, and the demand from each of them, [W].
        mig: index into `MIG_PROFILES`, -1 for none, [W]; then ``gpu_count`` is 1 and ``gpu_milli`` the profile's.
        models, pools: bit masks of what it may run on; 0: any, [W].
        pinned: the node that it must run on, -1 for any, [W].
        rank: 0 is the most urgent, [W].
        qos, tenant, queue, service: indices into the names below, -1 for none, [W].
        wait_slo: seconds that it may wait, inf for no promise, [W].
        deadline: absolute time by which it should end, inf for none, [W].
        business: importance from 1 to 5, [W].
        gang: rows with the same id >= 0 start together or not at all, [W]; ``distinct``: on different nodes, [W].
        preemptible: whether it may be stopped for a more urgent one, [W].
        cancel: when it leaves the queue if it has not started, inf for never, [W].
        uid: identity for random draws and ties, [W]; kept by selections, so that removing one workload changes no
            other's draws.
        observed_start, observed_node: what the recording says, NaN and -1 when it does not, [W].
    """

    names: tuple[str, ...]
    submit: Floats
    duration: Floats
    censored: Bools
    estimate: Floats
    cpu_milli: Ints
    memory_mib: Ints
    gpu_count: Ints
    gpu_milli: Ints
    mig: Ints
    models: Ints
    pools: Ints
    pinned: Ints
    rank: Ints
    qos: Ints
    tenant: Ints
    queue: Ints
    service: Ints
    wait_slo: Floats
    deadline: Floats
    business: Floats
    gang: Ints
    distinct: Bools
    preemptible: Bools
    cancel: Floats
    uid: Ints
    observed_start: Floats
    observed_node: Ints
    qos_names: tuple[str, ...] = ()
    tenant_names: tuple[str, ...] = ()
    queue_names: tuple[str, ...] = ()
    service_names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        submit: Sequence[float] | Floats,
        duration: Sequence[float] | Floats,
        *,
        names: Sequence[str] | None = None,
        qos: Sequence[str] | None = None,
        tenant: Sequence[str] | None = None,
        queue: Sequence[str] | None = None,
        service: Sequence[str] | None = None,
        **columns: Any,
    ) -> Workloads:
        """Return workloads from plain columns, scalars or sequences; what is left out takes its neutral value.

        ``estimate`` defaults to ``duration``, ``gpu_milli`` to whole GPUs, ``business`` to 1.
        """
        times = np.asarray(submit, np.float64)
        size = len(times)
        given: dict[str, Any] = {"submit": times, "duration": _column(duration, size, np.float64)}
        for name, (kind, default) in _COLUMNS.items():
            given[name] = _column(columns.pop(name, default), size, kind)
        if columns:
            raise TypeError(f"unknown columns: {', '.join(sorted(columns))}")
        given["estimate"] = np.where(np.isnan(given["estimate"]), given["duration"], given["estimate"])
        given["gpu_milli"] = np.where(given["gpu_count"] > 0, given["gpu_milli"], 0)
        profiles = np.array([profile.milli for profile in MIG_PROFILES], np.int64)
        given["gpu_milli"] = np.where(given["mig"] >= 0, profiles[given["mig"]], given["gpu_milli"])
        given["gpu_count"] = np.where(given["mig"] >= 0, 1, given["gpu_count"])
        if given["uid"].max(initial=-1) < 0:
            given["uid"] = np.arange(size, dtype=np.int64)
        for name, values in (("qos", qos), ("tenant", tenant), ("queue", queue), ("service", service)):
            labels, index = _index(values if values is not None else [""] * size)
            given[name], given[f"{name}_names"] = index, labels
        given["names"] = tuple(names) if names is not None else tuple(f"workload-{at}" for at in range(size))
        return cls(**given)

    def __len__(self) -> int:
        return len(self.submit)

    @property
    def demand_milli(self) -> Ints:
        """Milli-GPU over all devices of each workload, [W]."""
        return self.gpu_count * self.gpu_milli

    def select(self, keep: Bools | Ints) -> Workloads:
        """Return the rows that ``keep`` (mask or indices) names, with their identities."""
        rows = np.flatnonzero(keep) if np.asarray(keep).dtype == np.bool_ else np.asarray(keep, np.int64)
        changed: dict[str, Any] = {
            item.name: value[rows] for item in fields(self) if isinstance(value := getattr(self, item.name), np.ndarray)
        }
        return replace(self, names=tuple(self.names[row] for row in rows), **changed)


_COLUMNS: Final[Mapping[str, tuple[type, Any]]] = {
    "censored": (np.bool_, False),
    "estimate": (np.float64, np.nan),
    "cpu_milli": (np.int64, 0),
    "memory_mib": (np.int64, 0),
    "gpu_count": (np.int64, 0),
    "gpu_milli": (np.int64, WHOLE),
    "mig": (np.int64, -1),
    "models": (np.int64, 0),
    "pools": (np.int64, 0),
    "pinned": (np.int64, -1),
    "rank": (np.int64, 0),
    "wait_slo": (np.float64, np.inf),
    "deadline": (np.float64, np.inf),
    "business": (np.float64, 1.0),
    "gang": (np.int64, -1),
    "distinct": (np.bool_, False),
    "preemptible": (np.bool_, False),
    "cancel": (np.float64, np.inf),
    "uid": (np.int64, -1),
    "observed_start": (np.float64, np.nan),
    "observed_node": (np.int64, -1),
}


def _column(values: Any, size: int, kind: type) -> npt.NDArray[Any]:
    return np.array(np.broadcast_to(np.asarray(values, kind), (size,)))


def _ints(values: Sequence[int] | Ints | None, size: int, default: int) -> Ints:
    return _column(default if values is None else values, size, np.int64)


def _index(labels: Sequence[str]) -> tuple[tuple[str, ...], Ints]:
    """Names in order of appearance, and the index of each label; empty labels are -1."""
    seen: dict[str, int] = {}
    index = [seen.setdefault(label, len(seen)) if label else -1 for label in labels]
    return tuple(seen), np.array(index, np.int64)


def _masks(sets: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], Ints]:
    names = tuple(dict.fromkeys(name for members in sets for name in members))
    if len(names) >= MAX_BITS:
        raise InvalidInputError(f"{len(names)} pools; at most {MAX_BITS - 1} are possible", cure="merge some of them")
    bit = {name: 1 << at for at, name in enumerate(names)}
    return names, np.array([sum({bit[name] for name in members}) for members in sets], np.int64)


@dataclass(frozen=True)
class Trace:
    """A cluster and what was submitted to it."""

    cluster: Cluster
    workloads: Workloads
    name: str = "trace"

    def without(self, rows: Sequence[int] | Ints) -> Trace:
        """Return the trace as if the given workloads had never been submitted."""
        keep = np.ones(len(self.workloads), bool)
        keep[np.asarray(rows, np.int64)] = False
        return replace(self, workloads=self.workloads.select(keep))

    def check(self) -> None:
        """Raise `InvalidInputError` for the first value that no replay can make sense of."""
        work, cluster = self.workloads, self.cluster
        if len(cluster) == 0:
            raise InvalidInputError(f"{self.name} has no nodes", cure="give the cluster that the workloads ran on")
        if cluster.gpus.max(initial=0) > MAX_BITS:
            row = int(cluster.gpus.argmax())
            raise InvalidInputError(f"node {cluster.names[row]} has {cluster.gpus[row]} GPUs; at most {MAX_BITS}")
        for column, bad, why in (
            ("submit", ~np.isfinite(work.submit), "not a time"),
            ("duration", ~(work.duration >= 0), "negative or not a number"),
            ("estimate", ~(work.estimate >= 0), "negative or not a number"),
            ("gpu_milli", (work.gpu_milli > WHOLE) | (work.gpu_milli < 0), "not within one GPU"),
            ("gpu_milli", (work.gpu_count > 0) & (work.gpu_milli == 0), "0 although it asks for GPUs"),
            ("gpu_count", work.gpu_count < 0, "negative"),
            ("cpu_milli", work.cpu_milli < 0, "negative"),
            ("memory_mib", work.memory_mib < 0, "negative"),
            ("pinned", work.pinned >= len(cluster), "no node of the cluster"),
            ("rank", work.rank < 0, "negative"),
            ("mig", work.mig >= len(MIG_PROFILES), "no known profile"),
        ):
            if bad.any():
                row = int(np.flatnonzero(bad)[0])
                value = getattr(work, column)[row]
                raise InvalidInputError(f"workload {work.names[row]}: {column} {value} is {why}")


@dataclass(frozen=True)
class Failure:
    """Node ``node`` (an index) is down from ``start`` until ``end``; what ran on it goes back to the queue."""

    node: int
    start: float
    end: float


@dataclass(frozen=True)
class Options:
    """How to replay, beside the policy.

    Attributes:
        seed: of every random draw. Draws belong to a workload's and a node's identity, not to their order.
        backfill: see `Backfill`.
        preemption: whether more urgent workloads may stop less urgent, preemptible ones.
        restart_seconds: what a stopped workload does again to get going, added to its remaining work.
        checkpoint_seconds: interval at which running workloads save their progress: inf loses all, 0 loses nothing.
        retry: whether a workload that fits nowhere waits; otherwise it fails at once (FGD's protocol).
        quotas: milli-GPU that a tenant may hold at once, by name.
        failures: of nodes.
        compaction: whether shares may be moved between the GPUs of a node to make room (at no cost).
        horizon: the replay stops at this time.
        series: whether to record the per-event series; ``fragmentation``: whether F is part of it.
        engine: see `Engine`.
    """

    seed: int = 0
    backfill: Backfill = Backfill.NONE
    preemption: bool = False
    restart_seconds: float = 30.0
    checkpoint_seconds: float = np.inf
    retry: bool = True
    quotas: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    compaction: bool = False
    horizon: float = np.inf
    series: bool = True
    fragmentation: bool = False
    engine: Engine = Engine.AUTO


@dataclass(frozen=True)
class Series:
    """The cluster after each moment at which something happened, [E] each; left-closed steps.

    ``used_milli`` is milli-GPU, ``used_cpu_milli`` milli-CPU, ``waiting`` workloads in the queue, ``arrived_milli`` the
    milli-GPU submitted so far, ``fragmented`` F in milli-GPU (NaN unless asked for).
    """

    time: Floats
    used_milli: Floats
    used_cpu_milli: Floats
    waiting: Floats
    arrived_milli: Floats
    fragmented: Floats


@dataclass(frozen=True)
class Result:
    """What happened, in the rows of ``trace.workloads``.

    Attributes:
        status: `Status` values, [W].
        start: of the last run, NaN if it never started, [W]. ``first_start``: of the first run.
        end: NaN if it did not end, [W].
        node: of the last run, -1 for none; ``devices``: bit mask of the devices on it, [W].
        preemptions: times that it was stopped (by preemption or a failed node), [W].
        lost_seconds: work done again or spent on restarts, [W].
        preempted_by: the workload that last stopped it, -1 for none or a failure, [W].
        series: see `Series`. ``events``: how many submissions, starts, ends, stops and failures were processed.
        seconds: processor time of the replay itself, without compilation. ``engine``: what ran it.
    """

    trace: Trace
    policy: str
    status: Ints
    start: Floats
    first_start: Floats
    end: Floats
    node: Ints
    devices: Ints
    preemptions: Ints
    lost_seconds: Floats
    preempted_by: Ints
    series: Series
    events: int
    seconds: float
    engine: Engine

    @property
    def wait(self) -> Floats:
        """Seconds from submission to the first start, [W]; NaN if it never started."""
        return self.first_start - self.trace.workloads.submit

    @property
    def started(self) -> Bools:
        """Which workloads ran at all, [W]."""
        return np.isfinite(self.first_start)
