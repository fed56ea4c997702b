"""What Slurm says about jobs, nodes, partitions and QOS, in one form for all of its versions.

JSON comes from slurmrestd (API 0.0.38 to 0.0.44) and from ``squeue --json``, ``sinfo --json`` and
``scontrol --json``, which share their format with the API of their version. Differences that are read here: numbers as
``{"set":…,"infinite":…,"number":…}`` from 0.0.39 on, states as lists from 0.0.40 on, nested partitions from 0.0.39 on.
Times are Unix seconds, memory is MiB as in Slurm; None: not known or not set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from exporters.errors import InvalidInputError, SourceUnreachableError

#: NO_VAL and INFINITE of slurm.h, in 32 and 64 bits.
_UNSET: Final = frozenset({0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF})


class Held(msgspec.Struct, frozen=True, gc=False):
    """What a job holds on one node; ``cpus`` and ``memory`` (MiB) are None when not known."""

    node: str
    cpus: float | None = None
    memory: float | None = None


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """One job, array task or heterogeneous component, or all waiting tasks of an array (``array_tasks``).

    ``states`` are the base state and its flags, in capitals. ``eligible`` is 0 when Slurm says that the job is not
    eligible yet. ``gres`` has one item per node of ``nodes``, in order. ``per_job`` to ``per_task`` are what was asked
    for. ``exclusive``: wants nodes for itself.
    """

    id: int
    name: str = ""
    states: tuple[str, ...] = ()
    reason: str = ""
    partitions: tuple[str, ...] = ()
    priority: float | None = None
    hold: bool | None = None
    qos: str = ""
    account: str = ""
    user: str = ""
    comment: str = ""
    wckey: str = ""
    submit: float | None = None
    eligible: float | None = None
    start: float | None = None
    end: float | None = None
    preempted: float | None = None
    restarts: int = 0
    nodes: str = ""
    gres: tuple[str, ...] = ()
    held: tuple[Held, ...] = ()
    tres_req: str = ""
    tres_alloc: str = ""
    per_job: str = ""
    per_node: str = ""
    per_socket: str = ""
    per_task: str = ""
    node_count: int | None = None
    max_nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    sockets_per_node: int | None = None
    cpus: int | None = None
    cpus_per_task: int | None = None
    memory_per_node: float | None = None
    memory_per_cpu: float | None = None
    memory_per_tres: str = ""
    exclusive: bool = False
    features: str = ""
    required_nodes: str = ""
    excluded_nodes: str = ""
    reservation: str = ""
    licenses: str = ""
    array_job: int = 0
    array_task: int | None = None
    array_tasks: str = ""
    array_limit: int = 0
    het_job: int = 0
    het_offset: int = 0
    origin: str = ""
    siblings: str = ""


class NodeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node. ``states`` are the base state and its flags, in capitals."""

    name: str
    states: tuple[str, ...] = ()
    reason: str = ""
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    gres: str = ""
    gres_used: str | None = None
    tres: str = ""
    tres_used: str = ""
    reservation: str = ""
    cpus: float | None = None
    cpus_allocated: float | None = None
    memory: float | None = None
    memory_allocated: float | None = None


class PartitionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One partition. ``preempt_mode`` is in capitals; empty: not told (slurmrestd from 0.0.39 on)."""

    name: str
    nodes: str = ""
    tier: int = 1
    job_factor: float = 1.0
    preempt_mode: str = ""
    qos: str = ""
    up: bool = True


class QosRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One quality of service. ``preempts`` are the names of those whose jobs its own may preempt."""

    name: str
    priority: float = 0.0
    preempts: tuple[str, ...] = ()
    preempt_mode: str = ""


class Reservation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Nodes that only some jobs may use, between two times. ``cores`` is how many of their cores; flags in capitals."""

    name: str
    nodes: str = ""
    start: float | None = None
    end: float | None = None
    cores: float | None = None
    flags: tuple[str, ...] = ()


class Config(msgspec.Struct, frozen=True, omit_defaults=True):
    """What slurm.conf says about priorities and preemption. Empty and None: not known."""

    cluster: str = ""
    preempt_type: str = ""
    preempt_mode: str = ""
    weight_partition: float | None = None
    weight_qos: float | None = None
    accounting: bool | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Records of one kind, and why others could not be read, by their name."""

    items: tuple[Any, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dump:
    """One reading of a cluster. A part that could not be read is None, and ``unread`` says why.

    ``config`` and ``qos`` may be older than the rest.
    """

    jobs: Part | None = None
    nodes: Part | None = None
    partitions: Part | None = None
    reservations: Part | None = None
    qos: tuple[QosRecord, ...] | None = None
    config: Config = field(default_factory=Config)
    unread: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""


# --- JSON


class _Envelope(msgspec.Struct):
    meta: Any = None
    errors: Any = None
    warnings: Any = None


class _Jobs(msgspec.Struct):
    jobs: list[msgspec.Raw] | None = None


class _Nodes(msgspec.Struct):
    nodes: list[msgspec.Raw] | None = None


class _Partitions(msgspec.Struct):
    partitions: list[msgspec.Raw] | None = None


class _Reservations(msgspec.Struct):
    reservations: list[msgspec.Raw] | None = None


class _Qos(msgspec.Struct):
    qos: list[msgspec.Raw] | None = None
    # The name up to 0.0.38.
    QOS: list[msgspec.Raw] | None = None


class _Job(msgspec.Struct):
    """The fields that are used; anything else, and there are over a hundred, is skipped by the decoder."""

    job_id: Any
    name: Any = None
    job_state: Any = None
    state_reason: Any = None
    partition: Any = None
    priority: Any = None
    hold: Any = None
    qos: Any = None
    account: Any = None
    user_name: Any = None
    user_id: Any = None
    comment: Any = None
    wckey: Any = None
    submit_time: Any = None
    eligible_time: Any = None
    start_time: Any = None
    end_time: Any = None
    preempt_time: Any = None
    restart_cnt: Any = None
    nodes: Any = None
    gres_detail: Any = None
    job_resources: msgspec.Raw = msgspec.Raw(b"null")
    tres_req_str: Any = None
    tres_alloc_str: Any = None
    tres_per_job: Any = None
    tres_per_node: Any = None
    tres_per_socket: Any = None
    tres_per_task: Any = None
    node_count: Any = None
    max_nodes: Any = None
    tasks: Any = None
    tasks_per_node: Any = None
    sockets_per_node: Any = None
    cpus: Any = None
    cpus_per_task: Any = None
    memory_per_node: Any = None
    memory_per_cpu: Any = None
    memory_per_tres: Any = None
    shared: Any = None
    exclusive: Any = None
    features: Any = None
    required_nodes: Any = None
    excluded_nodes: Any = None
    resv_name: Any = None
    licenses: Any = None
    array_job_id: Any = None
    array_task_id: Any = None
    array_task_string: Any = None
    array_max_tasks: Any = None
    het_job_id: Any = None
    het_job_offset: Any = None
    federation_origin: Any = None
    federation_siblings_active: Any = None
    federation_siblings_viable: Any = None


class _Node(msgspec.Struct):
    name: Any
    state: Any = None
    state_flags: Any = None
    reason: Any = None
    partitions: Any = None
    features: Any = None
    active_features: Any = None
    gres: Any = None
    gres_used: Any = None
    tres: Any = None
    tres_used: Any = None
    reservation: Any = None
    cpus: Any = None
    effective_cpus: Any = None
    alloc_cpus: Any = None
    real_memory: Any = None
    specialized_memory: Any = None
    alloc_memory: Any = None


def number(value: object) -> float | None:
    """Return a number in any of Slurm's spellings; None when it is not set, infinite or not a number."""
    if isinstance(value, Mapping):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value in _UNSET or value != value:
        return None
    return value


def _whole(value: object) -> int | None:
    found = number(value)
    return None if found is None or found in (float("inf"), float("-inf")) else int(found)


def _count(value: object) -> int | None:
    """A number for which Slurm writes 0 when it is not set."""
    return _whole(value) or None


def _text(value: object) -> str:
    if value is None or value in ("(null)", "None", "N/A"):
        return ""
    return value if isinstance(value, str) else str(value)


def words(value: object) -> tuple[str, ...]:
    """Return a list, or the items of a text with commas or plus signs, in capitals."""
    items = value if isinstance(value, list) else _text(value).replace("+", ",").split(",")
    return tuple(str(item).strip().upper() for item in items if str(item).strip())


def _names(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else _text(value).split(",")
    return tuple(str(item).strip() for item in items if str(item).strip())


def _flag(value: object, *names: str) -> bool:
    return not {word.lower() for word in words(value)}.isdisjoint(names)


def _job(raw: _Job) -> Job:
    job_id = _whole(raw.job_id)
    if job_id is None:
        raise InvalidInputError("a job has no id")
    gres = raw.gres_detail if isinstance(raw.gres_detail, list) else []
    nodes = _text(raw.nodes)
    siblings = _text(raw.federation_siblings_active) or _text(raw.federation_siblings_viable)
    user = _text(raw.user_name)
    uid = _whole(raw.user_id)
    return Job(
        id=job_id,
        name=_text(raw.name),
        states=words(raw.job_state),
        reason=_text(raw.state_reason),
        partitions=_names(raw.partition),
        priority=number(raw.priority),
        hold=raw.hold if isinstance(raw.hold, bool) else None,
        qos=_text(raw.qos),
        account=_text(raw.account),
        user=user or ("" if uid is None else str(uid)),
        comment=_text(raw.comment),
        wckey=_text(raw.wckey),
        submit=number(raw.submit_time) or None,
        eligible=number(raw.eligible_time),
        start=number(raw.start_time) or None,
        end=number(raw.end_time) or None,
        preempted=number(raw.preempt_time) or None,
        restarts=_whole(raw.restart_cnt) or 0,
        nodes=nodes,
        gres=tuple(map(str, gres)),
        held=_held(raw.job_resources) if nodes else (),
        tres_req=_text(raw.tres_req_str),
        tres_alloc=_text(raw.tres_alloc_str),
        per_job=_text(raw.tres_per_job),
        per_node=_text(raw.tres_per_node),
        per_socket=_text(raw.tres_per_socket),
        per_task=_text(raw.tres_per_task),
        node_count=_count(raw.node_count),
        max_nodes=_count(raw.max_nodes),
        tasks=_count(raw.tasks),
        tasks_per_node=_count(raw.tasks_per_node),
        sockets_per_node=_count(raw.sockets_per_node),
        cpus=_count(raw.cpus),
        cpus_per_task=_count(raw.cpus_per_task),
        memory_per_node=number(raw.memory_per_node) or None,
        memory_per_cpu=number(raw.memory_per_cpu) or None,
        memory_per_tres=_text(raw.memory_per_tres),
        exclusive=_flag(raw.shared, "none") or _flag(raw.exclusive, "true", "exclusive"),
        features=_text(raw.features),
        required_nodes=_text(raw.required_nodes),
        excluded_nodes=_text(raw.excluded_nodes),
        reservation=_text(raw.resv_name),
        licenses=_text(raw.licenses),
        array_job=_whole(raw.array_job_id) or 0,
        array_task=_whole(raw.array_task_id),
        array_tasks=_text(raw.array_task_string),
        array_limit=_whole(raw.array_max_tasks) or 0,
        het_job=_whole(raw.het_job_id) or 0,
        het_offset=_whole(raw.het_job_offset) or 0,
        origin=_text(raw.federation_origin),
        siblings=siblings,
    )


class _Cpus(msgspec.Struct):
    count: Any = None


class _Memory(msgspec.Struct):
    allocated: Any = None


class _AllocatedOld(msgspec.Struct):
    """A node of a job up to 0.0.39: the state of every core, by socket."""

    nodename: str
    sockets: Any = None
    memory_allocated: Any = None


class _AllocatedNew(msgspec.Struct):
    name: str
    cpus: _Cpus = msgspec.field(default_factory=_Cpus)
    memory: _Memory = msgspec.field(default_factory=_Memory)


class _ResourceNodes(msgspec.Struct):
    allocation: list[_AllocatedNew] = []


class _Resources(msgspec.Struct):
    nodes: _ResourceNodes | str | list[Any] | None = None
    allocated_nodes: list[_AllocatedOld] = []


_RESOURCES: Final = msgspec.json.Decoder(_Resources | None)


def _held(raw: msgspec.Raw) -> tuple[Held, ...]:
    try:
        found = _RESOURCES.decode(raw)
    except msgspec.ValidationError:
        # A form that this release does not know: who holds what is then taken from the job's sums.
        return ()
    if found is None:
        return ()
    if isinstance(found.nodes, _ResourceNodes):
        return tuple(Held(n.name, number(n.cpus.count), number(n.memory.allocated)) for n in found.nodes.allocation)
    return tuple(Held(n.nodename, _cores(n.sockets), number(n.memory_allocated)) for n in found.allocated_nodes)


def _cores(sockets: object) -> float | None:
    """Count the cores that are marked as allocated."""
    if not isinstance(sockets, Mapping):
        return None
    cores = [socket.get("cores") for socket in sockets.values() if isinstance(socket, Mapping)]
    states = [state for group in cores if isinstance(group, Mapping) for state in group.values()]
    return float(sum(1 for state in states if str(state).startswith("allocated")))


def _node(raw: _Node) -> NodeRecord:
    name = _text(raw.name)
    if not name:
        raise InvalidInputError("a node has no name")
    memory = number(raw.real_memory)
    reserved = number(raw.specialized_memory)
    cpus = number(raw.effective_cpus)
    return NodeRecord(
        name=name,
        states=(*words(raw.state), *words(raw.state_flags)),
        reason=_text(raw.reason),
        partitions=_names(raw.partitions),
        features=_names(raw.active_features) or _names(raw.features),
        gres=_text(raw.gres),
        gres_used=None if raw.gres_used is None else _text(raw.gres_used),
        tres=_text(raw.tres),
        tres_used=_text(raw.tres_used),
        reservation=_text(raw.reservation),
        cpus=number(raw.cpus) if cpus is None or cpus == 0 else cpus,
        cpus_allocated=number(raw.alloc_cpus),
        memory=memory if memory is None or reserved is None else memory - reserved,
        memory_allocated=number(raw.alloc_memory),
    )


def _partition(raw: Mapping[str, Any]) -> PartitionRecord:
    nodes, priority, state, qos = raw.get("nodes"), raw.get("priority"), raw.get("state"), raw.get("qos")
    nested = raw.get("partition")
    if isinstance(nested, Mapping):
        state = nested.get("state")
    tier = raw.get("priority_tier") if not isinstance(priority, Mapping) else priority.get("tier")
    factor = raw.get("priority_job_factor") if not isinstance(priority, Mapping) else priority.get("job_factor")
    found_tier, found_factor = _whole(tier), number(factor)
    name = _text(raw.get("name"))
    if not name:
        raise InvalidInputError("a partition has no name")
    modes = words(raw.get("preemption_mode"))
    return PartitionRecord(
        name=name,
        nodes=_text(nodes.get("configured") if isinstance(nodes, Mapping) else nodes),
        tier=1 if found_tier is None else found_tier,
        job_factor=1.0 if found_factor is None else found_factor,
        preempt_mode="OFF" if modes == ("DISABLED",) else ",".join(modes),
        qos=_text(qos.get("assigned") if isinstance(qos, Mapping) else qos),
        up="UP" in words(state),
    )


def _reservation(raw: Mapping[str, Any]) -> Reservation:
    name = _text(raw.get("name"))
    if not name:
        raise InvalidInputError("a reservation has no name")
    return Reservation(
        name=name,
        nodes=_text(raw.get("node_list")),
        start=number(raw.get("start_time")),
        end=number(raw.get("end_time")),
        cores=number(raw.get("core_count")),
        flags=words(raw.get("flags")),
    )


def _qos(raw: Mapping[str, Any]) -> QosRecord:
    name = _text(raw.get("name"))
    if not name:
        raise InvalidInputError("a QOS has no name")
    preempt = raw.get("preempt")
    preempt = preempt if isinstance(preempt, Mapping) else {}
    modes = [mode for mode in words(preempt.get("mode")) if mode != "DISABLED"]
    return QosRecord(
        name=name,
        priority=number(raw.get("priority")) or 0.0,
        preempts=_names(
            [item.get("name") if isinstance(item, Mapping) else item for item in preempt.get("list") or ()]
        ),
        preempt_mode=",".join(modes),
    )


T = TypeVar("T")
_JOB: Final = msgspec.json.Decoder(_Job)
_NODE: Final = msgspec.json.Decoder(_Node)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


def clean(data: bytes, where: str) -> bytes:
    """Return ``data`` as JSON that every parser takes: bytes that are not UTF-8 replaced, NaN and Infinity as null.

    Raises:
        InvalidInputError: not JSON; ``where`` names it.
    """
    text = data.decode("utf-8", "replace")
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
        return text.encode()
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return msgspec.json.encode(json.loads(text, strict=False, parse_constant=lambda _: None))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:120]
        raise InvalidInputError(
            f"{where}: not JSON: {reason}", cure="run the command by hand, or ask the address with curl, and look"
        ) from None


def check_envelope(data: bytes, where: str) -> tuple[str, str]:
    """Raise what an answer says went wrong; return Slurm's version and the cluster's name (empty: not told).

    Raises:
        SourceUnreachableError: the answer lists errors.
        InvalidInputError: the answer is not an object.
    """
    envelope = _decode(data, _Envelope, where)
    errors = envelope.errors if isinstance(envelope.errors, list) else []
    if errors:
        raise error_of(errors[0], where)
    meta = envelope.meta if isinstance(envelope.meta, Mapping) else {}
    slurm = meta.get("slurm") or meta.get("Slurm") or {}
    slurm = slurm if isinstance(slurm, Mapping) else {}
    return _text(slurm.get("release")), _text(slurm.get("cluster"))


def error_of(error: object, where: str) -> SourceUnreachableError:
    """Return the exception for one item of ``errors``."""
    parts = [error.get("description"), error.get("error")] if isinstance(error, Mapping) else [error]
    text = "; ".join(dict.fromkeys(str(part) for part in parts if part)) or "it says that it failed, without a reason"
    refused = any(word in text.lower() for word in ("authentication", "access", "permission", "token"))
    return SourceUnreachableError(
        f"{where}: {text}",
        cure="renew the token, and see that its user may read all jobs" if refused else "look into slurmctld's log",
    )


def parse_jobs(data: bytes, where: str = "jobs") -> Part:
    """Parse an answer that holds jobs. Raises as `clean` and `check_envelope`."""
    return _parse(data, where, _Jobs, lambda answer: answer.jobs, lambda raw: _job(_JOB.decode(raw)), "job", "job_id")


def parse_nodes(data: bytes, where: str = "nodes") -> Part:
    """Parse an answer that holds nodes. Raises as `clean` and `check_envelope`."""
    return _parse(
        data, where, _Nodes, lambda answer: answer.nodes, lambda raw: _node(_NODE.decode(raw)), "node", "name"
    )


def parse_partitions(data: bytes, where: str = "partitions") -> Part:
    """Parse an answer that holds partitions. Raises as `clean` and `check_envelope`."""
    return _parse(
        data,
        where,
        _Partitions,
        lambda answer: answer.partitions,
        lambda raw: _partition(_OBJECT.decode(raw)),
        "partition",
        "name",
    )


def parse_reservations(data: bytes, where: str = "reservations") -> Part:
    """Parse an answer that holds reservations. Raises as `clean` and `check_envelope`."""
    return _parse(
        data,
        where,
        _Reservations,
        lambda answer: answer.reservations,
        lambda raw: _reservation(_OBJECT.decode(raw)),
        "reservation",
        "name",
    )


def parse_qos(data: bytes, where: str = "qos") -> Part:
    """Parse an answer that holds QOS. Raises as `clean` and `check_envelope`."""
    return _parse(
        data,
        where,
        _Qos,
        lambda answer: answer.qos if answer.qos is not None else answer.QOS,
        lambda raw: _qos(_OBJECT.decode(raw)),
        "QOS",
        "name",
    )


def parse_accounting(data: bytes, where: str = "accounting") -> Part:
    """Parse jobs of slurmdbd (``slurmdb/…/jobs``, ``sacct --json``). Raises as `clean` and `check_envelope`."""
    return _parse(
        data, where, _Jobs, lambda answer: answer.jobs, lambda raw: _accounted(_OBJECT.decode(raw)), "job", "job_id"
    )


def _accounted(raw: Mapping[str, Any]) -> Job:
    job_id = _whole(raw.get("job_id"))
    if job_id is None:
        raise InvalidInputError("a job has no id")

    def part(name: str) -> Mapping[str, Any]:
        found = raw.get(name)
        return found if isinstance(found, Mapping) else {}

    time, state, array, het, comment = part("time"), part("state"), part("array"), part("het"), part("comment")
    tres, required = part("tres"), part("required")
    nodes = _text(raw.get("nodes"))
    return Job(
        id=job_id,
        name=_text(raw.get("name")),
        states=words(state.get("current")),
        reason=_text(state.get("reason")),
        partitions=_names(raw.get("partition")),
        priority=number(raw.get("priority")),
        qos=_text(raw.get("qos")),
        account=_text(raw.get("account")),
        user=_text(raw.get("user")),
        comment=_text(comment.get("job")),
        submit=number(time.get("submission")) or None,
        eligible=number(time.get("eligible")),
        start=number(time.get("start")) or None,
        end=number(time.get("end")) or None,
        restarts=_whole(raw.get("restart_cnt")) or 0,
        nodes="" if nodes == "None assigned" else nodes,
        tres_req=_tres_list(tres.get("requested")),
        tres_alloc=_tres_list(tres.get("allocated")),
        node_count=_count(raw.get("allocation_nodes")),
        cpus=_count(required.get("CPUs")),
        array_job=_whole(array.get("job_id")) or 0,
        array_task=_whole(array.get("task_id")),
        array_tasks=_text(array.get("task")),
        het_job=_whole(het.get("job_id")) or 0,
        het_offset=_whole(het.get("job_offset")) or 0,
    )


def _tres_list(items: object) -> str:
    """Write a list of trackable resources as the text of other answers; memory in MiB."""
    found = []
    for item in items if isinstance(items, list) else ():
        count = _whole(item.get("count")) if isinstance(item, Mapping) else None
        if count is not None and count >= 0:
            kind, name = _text(item.get("type")), _text(item.get("name"))
            found.append(f"{kind}/{name}={count}" if name else f"{kind}={count}{'M' if kind == 'mem' else ''}")
    return ",".join(found)


def _parse(
    data: bytes,
    where: str,
    kind: type[T],
    items_of: Callable[[T], list[msgspec.Raw] | None],
    convert: Callable[[msgspec.Raw], object],
    what: str,
    key: str,
) -> Part:
    """Parse one answer; a record that does not convert is left out and named, the others stay."""
    data = clean(data, where)
    check_envelope(data, where)
    raws = items_of(_decode(data, kind, where))
    if raws is None:
        raise InvalidInputError(
            f"{where}: the answer holds no list of {what}s", cure="is it the right address? Try another API version"
        )
    found = []
    rejected: dict[str, str] = {}
    for at, raw in enumerate(raws):
        try:
            found.append(convert(raw))
        except (msgspec.ValidationError, InvalidInputError) as error:
            rejected[_name_of(raw, what, key, at)] = str(error)
    return Part(tuple(found), rejected)


def _name_of(raw: msgspec.Raw, what: str, key: str, at: int) -> str:
    value = msgspec.json.decode(raw)
    name = value.get(key) if isinstance(value, dict) else None
    return f"{what} {name if name not in (None, '') else f'number {at + 1}'}"


def _decode(data: bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidInputError(
            f"{where}: not an answer of Slurm: {error}", cure="is it the right address, or command?"
        ) from None
