"""What Slurm's commands print where they cannot write JSON, and accounting tables.

22.05 has no JSON for partitions, configuration and QOS; a Slurm without its JSON plugin, or before 21.08, has none at
all. ``scontrol show`` prints ``Key=Value`` pairs, several a line; free text (names, comments, reasons) takes the rest
of its line, which is why the forms of one line per record are not used for jobs. Times are read as Unix seconds, as
``SLURM_TIME_FORMAT=%s`` gives them, or as local time of ``zone``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Final

from exporters.errors import InvalidInputError
from exporters.sources.slurm.records import (
    Config,
    Held,
    Job,
    NodeRecord,
    Part,
    PartitionRecord,
    QosRecord,
    Reservation,
    number,
    words,
)
from exporters.sources.slurm.tres import amount

_PAIR: Final = re.compile(r"(?:^|(?<=\s))([A-Za-z][\w/:.-]*)=")
_NONE: Final = frozenset(
    {"", "(null)", "N/A", "n/a", "None", "NONE", "none", "Unknown", "UNLIMITED", "INVALID", "None assigned"}
)
_MIB: Final = 1 << 20

#: Keys whose value is free text up to the end of its line.
_FREE: Final = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Extra"}
    | {"SubmitLine", "OS", "Power", "TresBind", "MailUser"}
)
_FREE_NODE: Final = frozenset({"OS", "Comment", "Extra", "Reason"})


def decode(data: bytes) -> str:
    """Decode what a command printed. Names need not be UTF-8: what is not becomes U+FFFD."""
    return data.decode("utf-8", "replace")


def parse_time(text: str, zone: tzinfo | None = None) -> float | None:
    """Parse a time to Unix seconds; None for ``Unknown`` and the like.

    ``zone`` is that of the command that printed a time without one; None: this machine's.

    Raises:
        InvalidInputError: not a time.
    """
    text = text.strip()
    if text in _NONE:
        return None
    if text.isdigit():
        return float(text) or None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(f"{text[:40]!r} is not a time", cure="unset SLURM_TIME_FORMAT") from None
    return (found if found.tzinfo else found.replace(tzinfo=zone)).timestamp()


def _value(text: str | None) -> str:
    return "" if text is None or text.strip() in _NONE else text.strip()


def _pairs(line: str, free: frozenset[str]) -> Iterator[tuple[str, str]]:
    at = 0
    while found := _PAIR.search(line, at):
        key, start = found[1], found.end()
        if key in free:
            yield key, line[start:].rstrip()
            return
        following = _PAIR.search(line, start)
        at = following.start() if following else len(line)
        yield key, line[start:at].strip()


def _blocks(text: str, first: str, free: frozenset[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield the pairs of each record; a record begins with the key ``first`` at the beginning of a line."""
    current: list[tuple[str, str]] = []
    for line in text.split("\n"):
        begins = line.startswith(f"{first}=")
        if begins and current:
            yield current
            current = []
        if begins or current:
            current.extend(_pairs(line, free))
    if current:
        yield current


def parse_partitions(text: str) -> Part:
    """Parse ``scontrol show partition``, with one line per partition or several."""
    found = []
    for pairs in _blocks(text, "PartitionName", frozenset()):
        get = dict(pairs).get
        tier, factor = number(get("PriorityTier")), number(get("PriorityJobFactor"))
        found.append(
            PartitionRecord(
                name=get("PartitionName", ""),
                nodes=_value(get("Nodes")),
                tier=1 if tier is None else int(tier),
                job_factor=1.0 if factor is None else factor,
                preempt_mode=get("PreemptMode", "").upper(),
                qos=_value(get("QoS")),
                up=get("State", "UP").upper().startswith("UP"),
            )
        )
    return Part(tuple(found))


def parse_nodes(text: str) -> Part:
    """Parse ``scontrol show node``, with one line per node or several; ``-d`` adds the GPUs in use."""
    # With one line per node, free text ends where the next key begins.
    one_line = any(line.startswith("NodeName=") and " NodeAddr=" in line for line in text.split("\n"))
    return _convert(_blocks(text, "NodeName", frozenset() if one_line else _FREE_NODE), "node", "NodeName", _node)


def _node(pairs: Sequence[tuple[str, str]]) -> NodeRecord:
    get = dict(pairs).get
    states = words(
        get("State", "").replace("*", "+NOT_RESPONDING").replace("~", "+POWERED_DOWN").replace("$", "+MAINT")
    )
    reason = re.sub(r"\s*\[[^\[\]]*@[^\[\]]*\]\Z", "", _value(get("Reason")))
    cpus = number(get("CPUEfctv"))
    memory, reserved = number(get("RealMemory")), number(get("MemSpecLimit")) or 0.0
    return NodeRecord(
        name=get("NodeName", ""),
        states=states,
        reason=reason,
        partitions=tuple(filter(None, _value(get("Partitions")).split(","))),
        features=tuple(filter(None, (_value(get("ActiveFeatures")) or _value(get("AvailableFeatures"))).split(","))),
        gres=_value(get("Gres")),
        gres_used=None if get("GresUsed") is None else _value(get("GresUsed")),
        tres=_value(get("CfgTRES")),
        tres_used=_value(get("AllocTRES")),
        reservation=_value(get("ReservationName")),
        cpus=number(get("CPUTot")) if cpus is None else cpus,
        cpus_allocated=number(get("CPUAlloc")),
        memory=None if memory is None else memory - reserved,
        memory_allocated=number(get("AllocMem")),
    )


def parse_jobs(text: str, zone: tzinfo | None = None) -> Part:
    """Parse ``scontrol -d show job`` in its form of several lines per job."""
    return _convert(_blocks(text, "JobId", _FREE), "job", "JobId", lambda pairs: _job(pairs, zone))


def _job(pairs: Sequence[tuple[str, str]], zone: tzinfo | None) -> Job:
    # ``-d`` gives one group of Nodes, CPU_IDs, Mem and GRES per set of equal nodes.
    get = dict(pairs).get
    job_id = number(get("JobId"))
    if job_id is None:
        raise InvalidInputError("a job has no id")
    gres, held = _detail(pairs)
    task = get("ArrayTaskId", "")
    tasks = _range_start(get("NumTasks"))
    tasks_per_node = _range_start(get("NtasksPerN:B:S:C", "").split(":")[0])
    features = _value(get("Features"))
    return Job(
        id=int(job_id),
        name=get("JobName", ""),
        states=words(get("JobState")),
        # ``ReqNodeNotAvail,_UnavailableNodes:gpu2``: JSON has only the word.
        reason=_value(get("Reason")).split(",")[0],
        partitions=tuple(filter(None, _value(get("Partition")).split(","))),
        priority=number(get("Priority")),
        qos=_value(get("QOS")),
        account=_value(get("Account")),
        user=re.sub(r"\(\d+\)\Z", "", get("UserId", "")),
        comment=_value(get("Comment")),
        wckey=_value(get("WCKey")),
        submit=parse_time(get("SubmitTime", ""), zone),
        eligible=parse_time(get("EligibleTime", ""), zone) or 0.0,
        start=parse_time(get("StartTime", ""), zone),
        end=parse_time(get("EndTime", ""), zone),
        preempted=parse_time(get("PreemptTime", ""), zone),
        restarts=int(number(get("Restarts")) or 0),
        nodes=_value(get("NodeList")),
        gres=gres,
        held=held,
        tres_req=_value(get("ReqTRES")) or _value(get("TRES")),
        tres_alloc=_value(get("AllocTRES")) or (_value(get("TRES")) if _value(get("NodeList")) else ""),
        per_job=_value(get("TresPerJob")),
        per_node=_value(get("TresPerNode")),
        per_socket=_value(get("TresPerSocket")),
        per_task=_value(get("TresPerTask")),
        node_count=_range_start(get("NumNodes")),
        max_nodes=_range_end(get("NumNodes")),
        tasks=tasks,
        tasks_per_node=tasks_per_node or None,
        sockets_per_node=_range_start(get("Socks/Node")),
        cpus=_range_start(get("NumCPUs")),
        cpus_per_task=_range_start(get("CPUs/Task")),
        memory_per_node=_mib(get("MinMemoryNode")),
        memory_per_cpu=_mib(get("MinMemoryCPU")),
        memory_per_tres=_value(get("MemPerTres")),
        exclusive=get("OverSubscribe", "").upper() in ("NO", "EXCLUSIVE"),
        features=features,
        required_nodes=_value(get("ReqNodeList")),
        excluded_nodes=_value(get("ExcNodeList")),
        reservation=_value(get("Reservation")),
        licenses=_value(get("Licenses")),
        array_job=int(number(get("ArrayJobId")) or 0),
        array_task=int(task) if task.isdigit() else None,
        array_tasks="" if task.isdigit() else _value(task),
        array_limit=int(number(get("ArrayTaskThrottle")) or 0),
        het_job=int(number(get("HetJobId")) or 0),
        het_offset=int(number(get("HetJobOffset")) or 0),
        origin=_value(get("FedOrigin")),
        siblings=_value(get("FedSiblings")) or _value(get("FedActiveSiblings")),
    )


def _detail(pairs: Sequence[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[Held, ...]]:
    """Return the GRES and the CPUs and memory of each node of a job, in order, from the groups of ``-d``."""
    from exporters.sources.slurm.hostlist import expand, task_ids

    groups: list[dict[str, str]] = []
    for key, value in pairs:
        if key == "Nodes":
            groups.append({})
        if groups and key in ("Nodes", "CPU_IDs", "Mem", "GRES"):
            groups[-1].setdefault(key, value)
    gres: list[str] = []
    held: list[Held] = []
    for group in groups:
        cpus = sum(len(part) for part in task_ids(group["CPU_IDs"])[0]) if "CPU_IDs" in group else None
        for node in expand(_value(group["Nodes"])):
            gres.append(_value(group.get("GRES")))
            held.append(Held(node, cpus, _mib(group.get("Mem"))))
    return tuple(gres), tuple(held)


def _mib(text: str | None) -> float | None:
    value = _value(text)
    if not value or value == "0":
        return None
    return number(value) if value[-1].isdigit() else amount(value) / _MIB


def _range_start(text: str | None) -> int | None:
    """The first number of ``2`` or ``2-4``; None for ``*``, ``N/A`` and 0."""
    value = number(_value(text).split("-")[0])
    return int(value) if value else None


def _range_end(text: str | None) -> int | None:
    first, dash, last = _value(text).partition("-")
    value = number(last) if dash else None
    return int(value) if first and value else None


def _convert(
    blocks: Iterable[list[tuple[str, str]]],
    what: str,
    key: str,
    convert: Callable[[Sequence[tuple[str, str]]], object],
) -> Part:
    found = []
    rejected: dict[str, str] = {}
    for pairs in blocks:
        try:
            found.append(convert(pairs))
        except (InvalidInputError, ValueError) as error:
            rejected[f"{what} {dict(pairs).get(key, '')}"] = str(error)
    return Part(tuple(found), rejected)


def parse_reservations(text: str, zone: tzinfo | None = None) -> Part:
    """Parse ``scontrol show reservation``."""
    found = []
    for pairs in _blocks(text, "ReservationName", frozenset()):
        get = dict(pairs).get
        found.append(
            Reservation(
                name=get("ReservationName", ""),
                nodes=_value(get("Nodes")),
                start=parse_time(get("StartTime", ""), zone),
                end=parse_time(get("EndTime", ""), zone),
                cores=number(get("CoreCnt")),
                flags=words(get("Flags", "")),
            )
        )
    return Part(tuple(found))


def parse_config(text: str) -> Config:
    """Parse ``scontrol show config``."""
    pairs = {}
    for line in text.split("\n"):
        key, equals, value = line.partition("=")
        if equals:
            pairs[key.strip()] = value.strip()
    get = pairs.get
    basic = get("PriorityType", "").endswith("/basic")
    storage = get("AccountingStorageType", "")
    return Config(
        cluster=_value(get("ClusterName")),
        preempt_type=get("PreemptType", "").removeprefix("preempt/"),
        preempt_mode=get("PreemptMode", "").upper(),
        weight_partition=0.0 if basic else number(get("PriorityWeightPartition")),
        weight_qos=0.0 if basic else number(get("PriorityWeightQOS")),
        accounting=None if not storage else not storage.endswith(("/none", "(null)")),
    )


# --- tables


def parse_table(text: str, columns: Sequence[str] = (), separator: str = "|") -> list[dict[str, str]]:
    """Parse lines of columns (``sacct -P``, ``sacctmgr -P``, ``sinfo -o``); without ``columns`` the first line names
    them. Surplus columns at the end of a line, as a closing separator makes, are left out.

    Raises:
        InvalidInputError: a line has too few columns; names the line.
    """
    rows: list[tuple[int, list[str]]] = []
    names = list(columns)
    for at, line in enumerate(text.split("\n"), start=1):
        if rows and len(rows[-1][1]) < len(names):
            # A value with line breaks in it, such as a submit line.
            first, *others = line.split(separator)
            rows[-1][1][-1] += f"\n{first}"
            rows[-1][1].extend(others)
        elif line.strip() and not names:
            names = [name.strip() for name in line.split(separator)]
            while names and not names[-1]:
                names.pop()
        elif line.strip():
            rows.append((at, line.split(separator)))
    if rows and len(rows[-1][1]) < len(names):
        at, values = rows[-1]
        raise InvalidInputError(
            f"line {at} has {len(values)} columns, not {len(names)}", cure="was the output cut off?"
        )
    return [{name: value.strip() for name, value in zip(names, values, strict=False)} for _, values in rows]


def parse_qos(text: str) -> Part:
    """Parse ``sacctmgr -P show qos`` with at least Name and Priority."""
    found = []
    for row in parse_table(text):
        if not row.get("Name"):
            raise InvalidInputError("a QOS has no name", cure="run sacctmgr -P show qos by hand and look")
        mode = row.get("PreemptMode", "").upper()
        found.append(
            QosRecord(
                name=row["Name"],
                priority=number(row.get("Priority")) or 0.0,
                preempts=tuple(filter(None, row.get("Preempt", "").split(","))),
                preempt_mode="" if mode == "CLUSTER" else mode,
            )
        )
    return Part(tuple(found))


#: Names of the columns of squeue and sacct by what they hold.
_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "id": ("JOBID", "JobID", "JOBARRAYID", "JobIDRaw"),
    "raw": ("JOBID_RAW", "JobIDRaw", "JOBID", "JobID"),
    "name": ("NAME", "JobName"),
    "state": ("STATE", "State"),
    "reason": ("REASON", "Reason"),
    "partition": ("PARTITION", "Partition"),
    "priority": ("PRIORITY", "Priority", "PRIORITYLONG"),
    "qos": ("QOS",),
    "account": ("ACCOUNT", "Account"),
    "user": ("USER", "User"),
    "submit": ("SUBMIT_TIME", "Submit"),
    "eligible": ("ELIGIBLE_TIME", "Eligible"),
    "start": ("START_TIME", "Start"),
    "end": ("END_TIME", "End"),
    "nodes": ("NODELIST", "NodeList"),
    "node_count": ("NODES", "NNodes", "ReqNodes"),
    "cpus": ("CPUS", "ReqCPUS"),
    "tres_alloc": ("TRES_ALLOC", "AllocTRES"),
    "tres_req": ("TRES_REQ", "ReqTRES"),
    "per_node": ("TRES_PER_NODE", "ReqGRES"),
    "dependency": ("DEPENDENCY",),
    "requeue": ("RESTARTCNT",),
}


#: The short states of ``squeue -t``.
_SHORT: Final[Mapping[str, str]] = {
    "PD": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "ST": "STOPPED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "CD": "COMPLETED",
    "CA": "CANCELLED",
    "F": "FAILED",
    "TO": "TIMEOUT",
    "NF": "NODE_FAIL",
    "BF": "BOOT_FAIL",
    "DL": "DEADLINE",
    "OOM": "OUT_OF_MEMORY",
    "PR": "PREEMPTED",
    "RQ": "REQUEUED",
    "RH": "REQUEUE_HOLD",
    "RV": "REVOKED",
    "SE": "SPECIAL_EXIT",
}


def jobs_of_rows(rows: Iterable[Mapping[str, str]], zone: tzinfo | None = UTC) -> Part:
    """Return the jobs of a table of squeue or sacct; steps of jobs (``812.batch``) are left out."""
    found = []
    rejected: dict[str, str] = {}
    for row in rows:

        def get(what: str, row: Mapping[str, str] = row) -> str:
            return next((_value(row[name]) for name in _COLUMNS[what] if name in row and _value(row[name])), "")

        label = get("id")
        if "." in label:
            continue
        try:
            found.append(_row(get, label, zone))
        except (InvalidInputError, ValueError) as error:
            rejected[f"job {label}"] = str(error)
    return Part(tuple(found), rejected)


def _row(get: Callable[[str], str], label: str, zone: tzinfo | None) -> Job:
    array, underscore, task = label.partition("_")
    component, plus, offset = label.partition("+")
    raw = get("raw")
    job_id = raw if raw.isdigit() else (component if plus else array)
    if not job_id.isdigit():
        raise InvalidInputError(f"{label[:40]!r} is not a job id")
    tres = get("tres_alloc")
    state = get("state").split(" ")[0].upper()
    state = _SHORT.get(state, state)
    pending = state == "PENDING"
    return Job(
        id=int(job_id),
        name=get("name"),
        states=words(state),
        reason=get("reason").strip("()"),
        partitions=tuple(filter(None, get("partition").split(","))),
        priority=number(get("priority")),
        qos=get("qos"),
        account=get("account"),
        user=get("user"),
        submit=parse_time(get("submit"), zone),
        eligible=parse_time(get("eligible"), zone),
        start=None if pending else parse_time(get("start"), zone),
        end=parse_time(get("end"), zone),
        restarts=int(number(get("requeue")) or 0),
        nodes="" if pending else get("nodes"),
        tres_req=get("tres_req") or tres,
        tres_alloc="" if pending else tres,
        per_node=get("per_node"),
        node_count=_range_start(get("node_count")),
        cpus=_range_start(get("cpus")),
        array_job=int(array) if underscore else 0,
        array_task=int(task) if task.isdigit() else None,
        array_tasks="" if not underscore or task.isdigit() else task,
        het_job=int(component) if plus else 0,
        het_offset=int(offset) if plus and offset.isdigit() else 0,
    )


def nodes_of_rows(rows: Iterable[Mapping[str, str]]) -> Part:
    """Return the nodes of a table of ``sinfo -N``; the partitions of a node that has several lines are joined."""
    found: dict[str, NodeRecord] = {}
    for row in rows:
        name = row.get("HOSTNAMES") or row.get("NODELIST", "")
        if not name:
            raise InvalidInputError("a line of sinfo has no node", cure="run sinfo -N by hand and look")
        cpus = re.match(r"(\d+)/(\d+)/(\d+)/(\d+)\Z", row.get("CPUS(A/I/O/T)", ""))
        state = row.get("STATE", "")
        suffix = {"*": "+NOT_RESPONDING", "~": "+POWERED_DOWN", "$": "+MAINT"}.get(state[-1:], "")
        before = found[name].partitions if name in found else ()
        found[name] = NodeRecord(
            name=name,
            states=words(state.rstrip("*~#!%$@^-+") + suffix),
            reason=_value(row.get("REASON")),
            partitions=tuple(dict.fromkeys((*before, row.get("PARTITION", "").removesuffix("*")))),
            features=tuple(filter(None, _value(row.get("ACTIVE_FEATURES")).split(","))),
            gres=_value(row.get("GRES")),
            gres_used=row.get("GRES_USED"),
            cpus=float(cpus[4]) if cpus else None,
            cpus_allocated=float(cpus[1]) if cpus else None,
            memory=number(row.get("MEMORY")),
            memory_allocated=number(row.get("ALLOCMEM")),
        )
    return Part(tuple(found.values()))


__all__ = [
    "decode",
    "jobs_of_rows",
    "nodes_of_rows",
    "parse_config",
    "parse_jobs",
    "parse_nodes",
    "parse_partitions",
    "parse_qos",
    "parse_reservations",
    "parse_table",
    "parse_time",
]
