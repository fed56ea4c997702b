"""The scheduler's view in an incident as the input of a replay: `trace_of`, and what could not be taken from it.

Everything that ran when the recording begins is taken as it was; what was submitted or started later is decided anew by
the replay. Times are seconds since the beginning of the recording. What a bundle must hold is in docs/replay.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import numpy as np

from exporters.model import WorkloadState
from rca.errors import InvalidInputError
from rca.incident import Incident, NodeKind
from rca.replay.model import (
    MAX_BITS,
    UNLIMITED,
    WHOLE,
    Bools,
    Cluster,
    Failure,
    Floats,
    Ints,
    Trace,
    Workloads,
)
from rca.replay.policies.base import Placement, Policy, View

_MIB: Final = 1024 * 1024
#: Initial workloads are submitted one after the other, this many seconds apart, before the recording begins.
_APART: Final = 1e-6
#: Rank of a workload whose priority is not known: after all that have one.
_UNRANKED: Final = 1000
#: A GPU demand within this of a whole number is that number.
_WHOLE_WITHIN: Final = 0.05


class NotRecordedError(InvalidInputError):
    """The bundle lacks what a replay needs; the message says what."""


@dataclass(frozen=True)
class LeftOut:
    """Something that the recording shows and the replay does not."""

    name: str
    why: str


@dataclass(frozen=True)
class Recorded:
    """What an incident recorded of a schedule. W rows are pieces of workloads, in the rows of ``trace.workloads``.

    Attributes:
        trace: times are seconds since ``since``; what had not ended has an infinite duration and is ``censored``.
        since: Unix seconds at which the recording begins; ``until``: seconds later, when it ends.
        asked: when it was submitted, before 0 for what waited or ran already when the recording began, [W].
        initial: whether it ran already when the recording began, [W].
        entered: age in seconds at which the recording first shows it running; 0 if it started later, [W].
        least: seconds that it had run when the recording ended, 0 when it had not started, [W].
        classes: labels by which durations are compared, most special first, for each row.
        failures: when nodes were down.
        scheduler: as the bundle names it, or "".
        left_out: what was left out of the trace, and why.
        assumed: what had to be assumed, in words.
        preempted: whether the recording shows preemptions.
        limits: whether time limits are known.
    """

    trace: Trace
    since: float
    until: float
    asked: Floats
    initial: Bools
    entered: Floats
    least: Floats
    classes: tuple[tuple[str, ...], ...]
    failures: tuple[Failure, ...] = ()
    scheduler: str = ""
    left_out: tuple[LeftOut, ...] = ()
    assumed: tuple[str, ...] = ()
    preempted: bool = False
    limits: bool = False
    _rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def rows(self, name: str) -> tuple[int, ...]:
        """Rows of workload ``name``; empty when it is not in the trace."""
        return self._rows.get(name, ())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the workloads in the trace, each once."""
        return tuple(self._rows)

    def why_left_out(self, name: str) -> str:
        """Why ``name`` is not in the trace; "" when it is, or when the recording does not know it."""
        return next((item.why for item in self.left_out if item.name == name), "")


class AsRecorded(Policy):
    """The order of ``base``, on the nodes that the recording shows; elsewhere where least is left over."""

    placement = Placement.CUSTOM

    def __init__(self, base: Policy, *, observed: bool = True) -> None:
        self.base, self.observed = base, observed
        self.name = base.name
        self.interval = base.interval
        self.guarantees, self.rounds = base.guarantees, base.rounds
        self.preempts, self.chooses_victims = base.preempts, base.chooses_victims

    def keys(self, trace: Trace) -> Floats:
        """Return the order of the base policy."""
        keys = self.base.keys(trace)
        self.guarantees = self.base.guarantees
        return keys

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the order of the base policy."""
        return self.base.order(view, rows)

    def place(self, view: View, workload: int, feasible: Bools) -> Floats:  # noqa: ARG002
        """Return 1 for the node where it ran, and less the more a node leaves free."""
        capacity = max(1, int(view.trace.cluster.gpus.max(initial=1))) * WHOLE
        scores: Floats = -view.free_gpu.sum(axis=1) / capacity
        node = int(view.trace.workloads.observed_node[workload])
        if self.observed and node >= 0:
            scores[node] = 1.0
        return scores


@dataclass
class _Row:
    """One workload of the bundle, in plain values; times are Unix seconds."""

    name: str
    state: WorkloadState
    submitted: float | None
    started: float | None
    ended: float | None
    rank: int
    gpus: float
    pieces: int
    distinct: bool
    hosts: tuple[str, ...]
    models: tuple[str, ...]
    allowed: frozenset[str] | None
    cpu: int
    memory: int
    limit: float
    preemptible: bool
    tenant: str
    service: str
    queue: str
    qos: str
    running: bool = False


def trace_of(incident: Incident, since: float | None = None) -> Recorded:
    """Return the schedule that ``incident`` recorded.

    Args:
        since: Unix seconds from which the schedule is decided anew; the start of the baseline by default. A later
            time needs less of the past to be complete.

    Raises:
        NotRecordedError: there are no workloads, no nodes with known GPUs, or nothing can be placed on them.
    """
    header = incident.header
    begin = header.baseline.start.timestamp() if since is None else since
    end = header.window.end.timestamp()
    if incident.workloads.num_rows == 0:
        raise NotRecordedError("the bundle holds no workloads")
    about = {str(row["node"]): (str(row["kind"]), dict(row["attributes"] or ())) for row in incident.nodes.to_pylist()}
    device_hosts = {row["device"]: (row["host"], row["model"]) for row in incident.devices.to_pylist() if row["host"]}
    cluster, closed, notes = _cluster(about, device_hosts)
    builder = _Builder(cluster, begin, end, device_hosts)
    for row in sorted(incident.workloads.to_pylist(), key=lambda row: str(row["workload"])):
        kind, attributes = about.get(row["workload"], ("", {}))
        builder.add(row, attributes if kind == NodeKind.WORKLOAD.value else {})
    builder.assumed += notes
    return builder.build(header.labels.get("scheduler", "").lower(), closed, header.id)


def _number(text: Any, most: float = 1e15) -> float | None:
    """A number of 0 to ``most`` from an attribute; None for anything else."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if 0.0 <= value <= most else None


def _words(text: Any) -> tuple[str, ...]:
    return tuple(part.strip() for part in str(text or "").split(",") if part.strip())


def _seconds(value: datetime | None) -> float | None:
    return None if value is None else value.timestamp()


def _cluster(
    about: Mapping[str, tuple[str, Mapping[str, str]]],
    device_hosts: Mapping[str, tuple[str, str | None]],
) -> tuple[Cluster, dict[str, str], list[str]]:
    """Nodes and their GPUs, from the hosts' attributes, else from the devices; closed nodes; what was assumed."""
    devices = Counter(host for host, _ in device_hosts.values())
    models: dict[str, str] = {}
    for host, model in device_hosts.values():
        models.setdefault(host, model or "")
    hosts: dict[str, dict[str, Any]] = {}
    notes = []
    for name, (kind, attributes) in about.items():
        if kind == NodeKind.HOST.value:
            gpus = _number(attributes.get("gpus"), MAX_BITS)
            if gpus is None and name in devices:
                gpus = float(devices[name])
            if gpus is not None:
                hosts[name] = {**attributes, "gpus": int(gpus)}
    for name in devices:
        hosts.setdefault(name, {"gpus": devices[name]})
    if not hosts:
        raise NotRecordedError("the bundle does not say which nodes there are and how many GPUs they have")
    if not any("gpus" in about.get(name, ("", {}))[1] for name in hosts):
        notes.append("the cluster is the nodes whose GPUs were measured")
    if (most := max(host["gpus"] for host in hosts.values())) > MAX_BITS:
        raise NotRecordedError(f"a node has {most} GPUs; the replay takes up to {MAX_BITS}")
    names = sorted(hosts)
    pools = [_words(hosts[name].get("partitions")) for name in names]
    distinct_models = {hosts[name].get("gpu_model") or models.get(name, "") for name in names}
    if len(set().union(*pools)) >= MAX_BITS or len(distinct_models) >= MAX_BITS:
        raise NotRecordedError(f"more than {MAX_BITS} partitions or GPU models")
    cpu = [_number(hosts[name].get("cpu_milli")) for name in names]
    memory = [_number(hosts[name].get("memory_bytes"), 1e18) for name in names]
    cluster = Cluster.of(
        [hosts[name]["gpus"] for name in names],
        names=names,
        cpu_milli=[UNLIMITED if value is None else int(value) for value in cpu],
        memory_mib=[UNLIMITED if value is None else int(value) // _MIB for value in memory],
        model=[hosts[name].get("gpu_model") or models.get(name, "") for name in names],
        pool=pools,
    )
    closed = {
        name: str(hosts[name]["state"]) for name in names if hosts[name].get("state", "up") in ("down", "draining")
    }
    return cluster, closed, notes


class _Builder:
    """Collects the rows of a trace."""

    def __init__(
        self, cluster: Cluster, begin: float, end: float, device_hosts: Mapping[str, tuple[str, str | None]]
    ) -> None:
        self.cluster, self.begin, self.end = cluster, begin, end
        self.device_hosts = device_hosts
        self.index = {name: at for at, name in enumerate(cluster.names)}
        self.largest = int(cluster.gpus.max(initial=0))
        self.rows: list[_Row] = []
        self.left_out: list[LeftOut] = []
        self.assumed: list[str] = []
        self.unranked = 0
        self.undated = 0
        self.preempted = False

    def add(self, row: Mapping[str, Any], attributes: Mapping[str, str]) -> None:
        """Take in one row of the workloads table, or say why not."""
        name = str(row["workload"])
        state = WorkloadState(row["state"])
        started, ended = _seconds(row["started"]), _seconds(row["ended"])
        submitted = _seconds(row["submitted"])
        eligible = _number(attributes.get("eligible"))
        if eligible is not None and (submitted is None or eligible > submitted):
            submitted = eligible
        if state is WorkloadState.PREEMPTED or state is WorkloadState.REQUEUED:
            self.preempted = True
        if state is WorkloadState.HELD:
            return self._skip(name, "it was held by its user")
        if state.waiting:
            # What it did before it went back to the queue is over.
            started = ended = None
        if state is WorkloadState.UNKNOWN and started is None:
            return self._skip(name, "whether it waited, ran or had ended is not recorded")
        if state.ended and ended is None:
            return self._skip(name, "when it ended is not recorded")
        if ended is not None and ended <= self.begin:
            return None
        if started is not None and started >= self.end:
            started = None
        running = state.holding or started is not None
        if not running and submitted is None:
            return self._skip(name, "when it was submitted is not recorded")
        if submitted is not None and submitted >= self.end:
            return None
        if started is not None and ended is not None and ended < started:
            return self._skip(name, "it ended before it started")
        if started is not None and submitted is not None and started < submitted:
            submitted = started
        found = self._demand(row, attributes, running)
        if isinstance(found, str):
            return self._skip(name, found)
        gpus, pieces, hosts = found
        if running and hosts and not all(host in self.index for host in hosts):
            unknown = next(host for host in hosts if host not in self.index)
            return self._skip(name, f"it runs on {unknown}, of which nothing else is recorded")
        if running and started is None:
            self.undated += 1
            started = -math.inf
        rank = row["priority_rank"]
        self.unranked += rank is None
        queue = str(row["queue"] or "").removeprefix("queue/")
        allowed = self._allowed(attributes, queue)
        if allowed is not None and not allowed:
            return self._skip(name, "no node of the recording is one that it may run on")
        limit = _number(attributes.get("limit_seconds"))
        self.rows.append(
            _Row(
                name=name,
                state=state,
                submitted=submitted,
                started=started,
                ended=ended,
                rank=_UNRANKED if rank is None or rank < 0 else min(int(rank), _UNRANKED),
                gpus=gpus,
                pieces=pieces,
                distinct=attributes.get("distinct_nodes") == "true" or (pieces > 1 and "pieces" not in attributes),
                hosts=hosts,
                models=_words(attributes.get("gpu_models")),
                allowed=allowed,
                cpu=int(_number(attributes.get("cpu_milli")) or 0),
                memory=int((_number(attributes.get("memory_bytes"), 1e18) or 0) // _MIB),
                limit=math.inf if limit is None else limit,
                preemptible=row["preemptible"] is not False,
                tenant=str(row["tenant"] or ""),
                service=str(row["service"] or attributes.get("service", "") or ""),
                queue=queue,
                qos=str(row["priority_class"] or ""),
                running=running,
            )
        )
        return None

    def _allowed(self, attributes: Mapping[str, str], queue: str) -> frozenset[str] | None:
        """Nodes that a workload may run on; None for all."""
        cluster = self.cluster
        pools = _words(attributes.get("partitions")) or ((queue,) if queue in cluster.pools else ())
        mask = cluster.pool_mask(pools)
        inside = [
            name for name, pool in zip(cluster.names, cluster.pool.tolist(), strict=True) if not mask or pool & mask
        ]
        named = _words(attributes.get("allowed_hosts"))
        found = frozenset(inside) & frozenset(named) if named else frozenset(inside)
        return None if len(found) == len(cluster) else found

    def _skip(self, name: str, why: str) -> None:
        self.left_out.append(LeftOut(name, why))

    def _demand(
        self, row: Mapping[str, Any], attributes: Mapping[str, str], running: bool
    ) -> tuple[float, int, tuple[str, ...]] | str:
        """GPUs of each piece, pieces, and the hosts of the pieces (empty: not known); or why that is not known."""
        devices = [str(item) for item in row["devices"] or ()]
        hosts = _words(attributes.get("hosts")) or ((str(row["host"]),) if row["host"] else ())
        gpus = row["gpus"]
        if gpus is None or not math.isfinite(gpus) or gpus < 0:
            if not devices:
                return "how many GPUs it asks for is not recorded"
            gpus = float(len(devices))
        if abs(gpus - round(gpus)) <= _WHOLE_WITHIN and round(gpus) > 0:
            gpus = float(round(gpus))
        if gpus == 0 and not attributes.get("cpu_milli"):
            return "it asks for no GPU, and its CPUs are not recorded"
        on = [self.device_hosts[item][0] for item in devices if item in self.device_hosts]
        if running and not hosts and on:
            hosts = tuple(dict.fromkeys(on))
        pieces = int(_number(attributes.get("pieces"), 4096) or 0)
        if not pieces:
            pieces = max(1, math.ceil(gpus / self.largest)) if self.largest else 1
            if running and len(hosts) > 1:
                pieces = len(hosts)
        if len(hosts) == 1 and pieces > 1:
            if running and gpus / pieces * pieces <= self.largest:
                hosts = hosts * pieces
            elif running:
                return "it runs on several nodes, of which one is recorded"
        if running and hosts and len(hosts) != pieces:
            return f"it has {pieces} parts on {len(hosts)} nodes, and which is where is not recorded"
        each = gpus / pieces
        if each > 1 and abs(each - round(each)) > _WHOLE_WITHIN:
            return f"it asks for {gpus:g} GPUs in {pieces} parts, which is no whole number each"
        return (float(round(each)) if each > 1 else each), pieces, hosts if running else ()

    def build(self, scheduler: str, closed: Mapping[str, str], name: str) -> Recorded:
        """Return the trace of all rows that were taken in."""
        kept = self._consistent()
        if not kept:
            why = f": {self.left_out[0].name}: {self.left_out[0].why}" if self.left_out else ""
            raise NotRecordedError(f"none of the workloads can be replayed{why}")
        if self.unranked:
            self.assumed.append(f"the priority of {self.unranked} workloads is not recorded: they come last")
        if self.undated:
            self.assumed.append(
                f"when {self.undated} running workloads started is not recorded: taken as before the recording"
            )
        initial = [row for row in kept if self._is_initial(row)]
        later = [row for row in kept if not self._is_initial(row)]
        ordered = sorted(initial, key=lambda row: (row.started or 0.0, row.name)) + sorted(
            later, key=lambda row: (row.submitted if row.submitted is not None else row.started or 0.0, row.name)
        )
        pieces = [row for row in ordered for _ in range(row.pieces)]
        return self._arrays(pieces, ordered, len(initial), scheduler, closed, name)

    def _is_initial(self, row: _Row) -> bool:
        return row.running and row.started is not None and row.started <= self.begin

    def _consistent(self) -> list[_Row]:
        """Rows without those that would use more of a node than it has, among what ran when the recording began."""
        used = np.zeros(len(self.cluster))
        kept = []
        for row in sorted(self.rows, key=lambda row: (not self._is_initial(row), row.started or 0.0, row.name)):
            if self._is_initial(row) and row.hosts:
                trial = used.copy()
                for host in row.hosts:
                    trial[self.index[host]] += row.gpus
                if (trial > self.cluster.gpus + 1e-6).any():
                    self._skip(row.name, f"{row.hosts[0]} has fewer GPUs than the recording says are in use")
                    continue
                used = trial
            kept.append(row)
        return kept

    def _arrays(
        self,
        pieces: Sequence[_Row],
        ordered: Sequence[_Row],
        initial_count: int,
        scheduler: str,
        closed: Mapping[str, str],
        name: str,
    ) -> Recorded:
        size = len(pieces)
        until = self.end - self.begin
        initial = np.array([self._is_initial(row) for row in pieces], bool)
        number = {row.name: at for at, row in enumerate(ordered)}
        rows: dict[str, tuple[int, ...]] = {}
        for at, row in enumerate(pieces):
            rows[row.name] = (*rows.get(row.name, ()), at)
        order = np.array([number[row.name] for row in pieces], np.float64)

        def relative(value: float | None) -> float:
            return math.nan if value is None else value - self.begin

        started = np.array([relative(row.started) for row in pieces])
        ended = np.array([relative(row.ended) for row in pieces])
        asked = np.array([relative(row.submitted if row.submitted is not None else row.started) for row in pieces])
        first = (order - initial_count) * _APART
        submit = np.where(initial, first, np.maximum(np.where(np.isfinite(asked), asked, 0.0), 0.0))
        with np.errstate(invalid="ignore"):
            duration = np.where(np.isfinite(ended), ended - np.where(initial, submit, started), np.inf)
        never = ~np.isfinite(started) & ~initial
        duration[never] = np.inf
        cancel = np.where(never & np.isfinite(ended), np.maximum(ended, submit), np.inf)
        limit = np.array([row.limit for row in pieces])
        node = np.full(size, -1, np.int64)
        for members in rows.values():
            for place, at in enumerate(members):
                hosts = pieces[at].hosts
                node[at] = self.index[hosts[place]] if place < len(hosts) else -1
        gpu_milli = np.array([self._milli(row.gpus) for row in pieces], np.int64)
        sets = list(dict.fromkeys(row.allowed for row in pieces if row.allowed is not None))
        if len(sets) >= MAX_BITS:
            raise NotRecordedError(f"workloads are bound to {len(sets)} different sets of nodes; up to {MAX_BITS - 1}")
        cluster = self._fitting(pieces, node, initial, sets)
        work = Workloads.of(
            submit,
            duration,
            names=[row.name for row in pieces],
            qos=[row.qos for row in pieces],
            tenant=[row.tenant for row in pieces],
            queue=[row.queue for row in pieces],
            service=[row.service for row in pieces],
            censored=~np.isfinite(duration) & ~np.isfinite(cancel),
            estimate=limit,
            cpu_milli=np.array([row.cpu for row in pieces], np.int64),
            memory_mib=np.array([row.memory for row in pieces], np.int64),
            gpu_count=np.array([math.ceil(row.gpus) for row in pieces], np.int64),
            gpu_milli=np.where(gpu_milli > 0, gpu_milli, WHOLE),
            models=np.array([cluster.model_mask(row.models) for row in pieces], np.int64),
            pools=np.array([0 if row.allowed is None else 1 << sets.index(row.allowed) for row in pieces], np.int64),
            pinned=np.where(initial, node, -1),
            rank=np.array([row.rank for row in pieces], np.int64),
            gang=np.array([number[row.name] if row.pieces > 1 else -1 for row in pieces], np.int64),
            distinct=np.array([row.distinct for row in pieces], bool),
            preemptible=np.array([row.preemptible for row in pieces], bool),
            cancel=cancel,
            uid=np.arange(size, dtype=np.int64),
            observed_start=np.where(np.isneginf(started), np.nan, started),
            observed_node=node,
        )
        with np.errstate(invalid="ignore"):
            entered = np.where(initial, np.maximum(0.0, np.where(np.isfinite(started), -started, 0.0)), 0.0)
            least = np.where(np.isfinite(started), until - started, np.where(initial, until, 0.0))
        return Recorded(
            trace=Trace(cluster, work, name),
            since=self.begin,
            until=until,
            asked=np.where(np.isfinite(asked), asked, submit),
            initial=initial,
            entered=entered,
            least=np.maximum(least, 0.0),
            classes=tuple(_classes(row) for row in pieces),
            scheduler=scheduler,
            left_out=tuple(sorted(self.left_out, key=lambda item: item.name)),
            assumed=tuple(self.assumed),
            preempted=self.preempted,
            limits=bool(np.isfinite(limit).any()),
            failures=self._failures(closed, node, ended),
            _rows=rows,
        )

    def _milli(self, gpus: float) -> int:
        return WHOLE if gpus >= 1 else max(1, round(gpus * WHOLE)) if gpus > 0 else 0

    def _fitting(self, pieces: Sequence[_Row], node: Ints, initial: Bools, sets: Sequence[frozenset[str]]) -> Cluster:
        """The cluster with CPUs and memory of at least what was in use (schedulers over-commit them).

        Its pools are the sets of nodes that workloads may run on.
        """
        cpu, memory = self.cluster.cpu_milli.copy(), self.cluster.memory_mib.copy()
        for capacity, column in ((cpu, "cpu"), (memory, "memory")):
            used = np.zeros(len(capacity), np.int64)
            for at in np.flatnonzero(initial & (node >= 0)).tolist():
                used[node[at]] += getattr(pieces[at], column)
            np.maximum(capacity, used, out=capacity)
        pool = np.array(
            [sum(1 << at for at, members in enumerate(sets) if name in members) for name in self.cluster.names],
            np.int64,
        )
        pools = tuple(f"set {at}" for at in range(len(sets)))
        return replace(self.cluster, cpu_milli=cpu, memory_mib=memory, pool=pool, pools=pools)

    def _failures(self, closed: Mapping[str, str], node: Ints, ended: Floats) -> tuple[Failure, ...]:
        """When closed nodes stop to take work: once the last of what ran there has ended."""
        out = []
        for name, state in sorted(closed.items()):
            at = self.index[name]
            on = np.flatnonzero(node == at)
            last = 0.0 if not len(on) else float(np.max(np.where(np.isfinite(ended[on]), ended[on], np.inf)))
            if math.isfinite(last):
                out.append(Failure(at, max(last, 0.0), math.inf))
                self.assumed.append(f"{name} was {state}: it takes no work after {last:.0f} s")
            else:
                self.assumed.append(f"{name} was {state} with work still on it: what becomes free there counts")
        return tuple(out)


def _classes(row: _Row) -> tuple[str, ...]:
    """Labels by which durations are compared, most special first; the last is common to all."""
    rank = f"rank {row.rank}"
    size = f"{rank}, {row.gpus * row.pieces:g} GPUs"
    labels = [f"service {row.service}"] if row.service else []
    labels += [f"queue {row.queue}, {size}"] if row.queue else []
    return (*labels, size, rank, "all")


__all__ = ["AsRecorded", "LeftOut", "NotRecordedError", "Recorded", "trace_of"]
