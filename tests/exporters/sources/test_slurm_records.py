"""Answers of Slurm: JSON of every version and the text of its commands, from a real 22.05 and by hand."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exporters.errors import InvalidInputError, SourceUnreachableError
from exporters.model import Snapshot
from exporters.sources.slurm import records, text
from exporters.sources.slurm.convert import snapshot_of
from exporters.sources.slurm.records import Dump, Job

CAPTURE = Path(__file__).parents[1] / "fixtures" / "slurm" / "22.05"
NOW = float((CAPTURE / "now").read_text())


def read(name: str) -> str:
    return text.decode((CAPTURE / name).read_bytes())


def as_json() -> Dump:
    return Dump(
        jobs=records.parse_jobs((CAPTURE / "squeue.json").read_bytes()),
        nodes=records.parse_nodes((CAPTURE / "sinfo.json").read_bytes()),
        partitions=records.parse_partitions((CAPTURE / "partitions.json").read_bytes()),
        reservations=records.parse_reservations((CAPTURE / "reservations.json").read_bytes()),
        config=text.parse_config(read("config.txt")),
    )


def as_text() -> Dump:
    return Dump(
        jobs=text.parse_jobs(read("jobs.txt")),
        nodes=text.parse_nodes(read("nodes.txt")),
        partitions=text.parse_partitions(read("partitions.txt")),
        reservations=text.parse_reservations(read("reservations.txt")),
        config=text.parse_config(read("config.txt")),
    )


def snapshot(dump: Dump) -> Snapshot:
    return snapshot_of(dump, NOW, "loopback")[0]


def test_text_and_json_of_one_slurm_give_one_snapshot() -> None:
    by_json, by_text = snapshot(as_json()), snapshot(as_text())
    assert len(by_json.workloads) == 24
    assert len(by_json.nodes) == 6
    assert {w.id: w for w in by_text.workloads} == {w.id: w for w in by_json.workloads}
    assert by_text.nodes == by_json.nodes
    assert by_text.unread == by_json.unread


def test_what_the_real_slurm_said() -> None:
    found = snapshot(as_json())
    by_name: dict[str, list[Any]] = {}
    for workload in found.workloads:
        by_name.setdefault(workload.name, []).append(workload)
    states = {name: sorted({item.state.value for item in items}) for name, items in by_name.items()}
    assert states == {
        "ended": ["completed"],
        "victim": ["held"],
        "winner": ["running"],
        "suspended": ["suspended"],
        "array": ["held", "running"],
        "untyped": ["running"],
        "wide": ["running"],
        "mixed": ["pending"],
        'caf� "x" \\ UserId=eve(7)': ["pending"],
        "node": ["pending"],
        "either": ["pending"],
        "tasks": ["pending"],
        "socket": ["pending"],
        "types": ["pending"],
        "alone": ["pending"],
        "later": ["held"],
        "held": ["held"],
        "dependent": ["held"],
    }
    assert [item.id for item in by_name["array"]] == ["5_1", "5_2", "5_3", "5_4", "5_5", "5_6"]
    (wide,) = by_name["wide"]
    assert [(p.node, p.gpu_milli, p.devices) for p in wide.placements] == [
        ("gpu1", 1000, ("gpu1/gpu3",)),
        ("gpu3", 1000, ("gpu3/gpu3",)),
    ]
    (victim,) = by_name["victim"]
    assert (victim.service, victim.labels["team"], victim.requeues) == ("train", "vision", 1)
    (winner,) = by_name["winner"]
    assert winner.demand.gpu_milli == 3000
    assert winner.placements[0].cpu_milli == 2000
    assert winner.placements[0].memory_bytes == 4 << 30
    assert (victim.rank, winner.rank) == (1, 0)
    assert (victim.preemptible, winner.preemptible, winner.may_preempt) == (True, False, True)
    (either,) = by_name["either"]
    assert either.queue == "high"
    assert either.constraints.partitions == ("high", "low")
    assert either.constraints.unchecked == ("features ib|roce",)
    assert (either.demand.pieces, either.demand.gpu_milli) == (4, 1000)
    (alone,) = by_name["alone"]
    assert alone.constraints.exclusive
    assert {item.het_job_id for item in by_name["mixed"]} == {"10"}
    assert by_name["mixed"][0].constraints.unchecked == ("heterogeneous job",)
    (name,) = by_name['caf� "x" \\ UserId=eve(7)']
    assert name.user == "root"

    nodes = {node.name: node for node in found.nodes}
    assert {name: node.state.value for name, node in nodes.items()} == {
        "cpu1": "up",
        "gpu1": "up",
        "gpu2": "draining",
        "gpu3": "up",
        "gpu4": "up",
        "gpu5": "down",
    }
    assert nodes["gpu2"].reason == "ECC error"
    assert nodes["gpu1"].features == ("ib", "nvlink")
    assert nodes["gpu3"].gpu_free_milli == (0, 0, 0, 0)
    assert [taint.value for taint in nodes["gpu4"].taints or ()] == ["maintenance"]
    assert nodes["gpu1"].partitions == ("low", "high")
    assert nodes["gpu5"].partitions == ("low",)


# --- versions of the format


def number(value: float) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value}


UNSET = {"set": False, "infinite": False, "number": 0}

#: One running job as three versions of the API write it.
OLD = {
    "job_id": 812,
    "name": "train",
    "job_state": "RUNNING",
    "partition": "gpu",
    "priority": 4294881265,
    "submit_time": 1000,
    "eligible_time": 1000,
    "start_time": 1060,
    "end_time": 6091072457,
    "nodes": "n[1-2]",
    "node_count": 2,
    "cpus": 4,
    "tasks": 2,
    "max_nodes": 0,
    "array_job_id": 0,
    "array_task_id": None,
    "tres_per_node": "gres:gpu:a100:2",
    "gres_detail": ["gpu:a100:2(IDX:0-1)", "gpu:a100:2(IDX:2-3)"],
    "tres_alloc_str": "cpu=4,mem=2000M,node=2",
    "shared": None,
    "job_resources": {
        "nodes": "n[1-2]",
        "allocated_nodes": [
            {
                "nodename": name,
                "memory_allocated": 1000,
                "sockets": {"0": {"cores": {"0": "allocated", "1": "allocated", "2": "unassigned"}}},
            }
            for name in ("n1", "n2")
        ],
    },
}
MIDDLE = OLD | {
    "priority": number(4294881265),
    "submit_time": number(1000),
    "eligible_time": number(1000),
    "start_time": number(1060),
    "node_count": number(2),
    "cpus": number(4),
    "tasks": number(2),
    "max_nodes": number(0),
    "array_job_id": number(0),
    "array_task_id": UNSET,
    "end_time": number(6091072457),
}
NEW = MIDDLE | {
    "job_state": ["RUNNING", "CONFIGURING"],
    "tres_per_node": "gres/gpu:a100:2",
    "hold": False,
    "shared": [],
    "job_resources": {
        "select_type": ["CORE"],
        "nodes": {
            "count": 2,
            "list": "n[1-2]",
            "allocation": [
                {"name": name, "cpus": {"count": 2, "used": 0}, "memory": {"used": 0, "allocated": 1000}}
                for name in ("n1", "n2")
            ],
        },
        "cpus": 4,
    },
}


def parsed(job: dict[str, Any]) -> Job:
    part = records.parse_jobs(json.dumps({"jobs": [job], "errors": [], "meta": {}}).encode())
    assert not part.rejected
    found: Job = part.items[0]
    return found


def test_three_versions_of_the_api_give_one_job() -> None:
    old, middle, new = parsed(OLD), parsed(MIDDLE), parsed(NEW)
    assert middle == old
    assert msgspec.structs.replace(new, states=("RUNNING",), hold=None, per_node="gres:gpu:a100:2") == old
    assert old.max_nodes is None
    assert [(item.node, item.cpus, item.memory) for item in new.held] == [("n1", 2, 1000), ("n2", 2, 1000)]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, None),
        (7, 7),
        ("7", 7),
        (0, 0),
        (number(7.5), 7.5),
        (UNSET, None),
        ({"set": False, "infinite": True, "number": 0}, None),
        ({"set": True, "infinite": True, "number": 9}, None),
        ({"infinite": False, "number": 9}, 9),
        (4294967294, None),
        (18446744073709551614, None),
        ("unlimited", None),
        (True, None),
        ([], None),
    ],
)
def test_numbers(value: object, found: float | None) -> None:
    assert records.number(value) == found


def test_names_need_not_be_utf8_nor_numbers_finite() -> None:
    data = b'{"jobs": [{"job_id": 1, "name": "caf\xe9", "billable_tres": NaN, "priority": Infinity}], "errors": []}'
    (job,) = records.parse_jobs(data).items
    assert job.name == "caf�"
    assert job.priority is None


def test_a_bad_record_does_not_hide_the_others() -> None:
    data = json.dumps({"jobs": [{"job_id": 1}, {"name": "no id"}, {"job_id": None}, "text", {"job_id": 5}]}).encode()
    part = records.parse_jobs(data)
    assert [job.id for job in part.items] == [1, 5]
    assert list(part.rejected) == ["job number 2", "job number 3", "job number 4"]
    found, _ = snapshot_of(Dump(jobs=part), NOW, "c")
    (unread,) = found.unread
    assert unread.what == "jobs"
    assert "(and 2 more)" in unread.why


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "jobs: not JSON"),
        (b"<html>", "jobs: not JSON"),
        (b'{"jobs": [{"job_id": 1', "jobs: not JSON"),
        (b"[]", "jobs: not an answer of Slurm"),
        (b'{"nodes": []}', "jobs: the answer holds no list of jobs"),
        (b'{"jobs": 7}', "jobs: not an answer of Slurm"),
        (b"[" * 100_000, "jobs: not JSON"),
    ],
)
def test_what_is_not_an_answer(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        records.parse_jobs(data)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.cure


def test_an_answer_that_tells_of_an_error() -> None:
    error = {"description": "Unable to query jobs", "error_number": 1007, "error": "Protocol authentication error"}
    with pytest.raises(SourceUnreachableError, match="Unable to query jobs; Protocol authentication error") as caught:
        records.parse_jobs(json.dumps({"jobs": [], "errors": [error]}).encode())
    assert "token" in caught.value.cure


def test_nodes_of_both_forms() -> None:
    old = {"name": "n1", "state": "idle", "state_flags": ["DRAIN"], "features": "a,b", "cpus": 8, "real_memory": 1000}
    new = {"name": "n1", "state": ["IDLE", "DRAIN"], "features": ["a", "b"], "cpus": 8, "effective_cpus": 6}
    part = records.parse_nodes(
        json.dumps({"nodes": [old, new | {"real_memory": 1000, "specialized_memory": 100}]}).encode()
    )
    first, second = part.items
    assert first.states == second.states == ("IDLE", "DRAIN")
    assert first.features == second.features == ("a", "b")
    assert (first.cpus, second.cpus) == (8, 6)
    assert (first.memory, second.memory) == (1000, 900)


def test_qos_of_both_forms() -> None:
    old = {"QOS": [{"name": "high", "priority": 100, "preempt": {"list": ["low"], "mode": ["REQUEUE"]}}]}
    new = {"qos": [{"name": "high", "priority": number(100), "preempt": {"list": ["low"], "mode": ["REQUEUE"]}}]}
    first, second = (records.parse_qos(json.dumps(item).encode()).items[0] for item in (old, new))
    assert first == second
    assert first.preempts == ("low",)


# --- text


def test_times_do_not_depend_on_the_zone() -> None:
    summer = timezone(timedelta(hours=2))
    expected = datetime(2026, 7, 1, 10, 0, tzinfo=UTC).timestamp()
    assert text.parse_time("2026-07-01T12:00:00", summer) == expected
    assert text.parse_time(str(int(expected))) == expected
    assert text.parse_time("Unknown") is None
    with pytest.raises(InvalidInputError, match="is not a time"):
        text.parse_time("Tomorr 12:00")


def test_a_job_name_cannot_pose_as_other_fields() -> None:
    block = (
        "JobId=1 JobName=x Priority=99999 JobState=RUNNING\u2028JobId=2\n"
        "   UserId=ann(1000) GroupId=ann(1000)\n   Priority=5 Account=lab QOS=normal\n"
        "   JobState=PENDING Reason=Priority Dependency=(null)\n   Comment=JobState=RUNNING Priority=1\n"
    )
    (job,) = text.parse_jobs(block).items
    assert job.name == "x Priority=99999 JobState=RUNNING\u2028JobId=2"
    assert (job.states, job.priority, job.user) == (("PENDING",), 5, "ann")
    assert job.comment == "JobState=RUNNING Priority=1"


def test_nodes_in_one_line_each_are_the_same() -> None:
    several = read("nodes.txt")
    lines = [re.sub(r"\s*\n\s+", " ", block) for block in several.strip().split("\n\n")]
    assert text.parse_nodes("\n".join(lines)).items == text.parse_nodes(several).items


@pytest.mark.parametrize(
    ("state", "states"),
    [
        ("IDLE", ("IDLE",)),
        ("MIXED+DRAIN", ("MIXED", "DRAIN")),
        ("DOWN*", ("DOWN", "NOT_RESPONDING")),
        ("IDLE*+DRAIN", ("IDLE", "NOT_RESPONDING", "DRAIN")),
        ("IDLE+CLOUD+POWERED_DOWN", ("IDLE", "CLOUD", "POWERED_DOWN")),
    ],
)
def test_node_states_in_text(state: str, states: tuple[str, ...]) -> None:
    (node,) = text.parse_nodes(f"NodeName=n1 CPUTot=4\n   State={state} ThreadsPerCore=1\n").items
    assert node.states == states


def test_a_table_with_line_breaks_and_one_that_was_cut_off() -> None:
    rows = text.parse_table("JobID|SubmitLine|State\n1|srun\n  -n 4|COMPLETED\n2|srun|FAILED\n")
    assert [row["State"] for row in rows] == ["COMPLETED", "FAILED"]
    assert rows[0]["SubmitLine"] == "srun\n  -n 4"
    with pytest.raises(InvalidInputError, match="line 3 has 2 columns, not 3"):
        text.parse_table("A|B|C\n1|2|3\n4|5")


def test_rows_of_squeue_and_sacct() -> None:
    table = (
        "JobID|JobName|State|Partition|Submit|Start|End|NNodes|NodeList|ReqTRES|AllocTRES|Priority\n"
        "7|a|CANCELLED by 1000|p|2026-01-01T00:00:00|Unknown|2026-01-01T00:01:00|2|None assigned|gres/gpu=8,node=2||5\n"
        "7.batch|batch|COMPLETED|||||||||\n"
        "8_[1-3%1]|b|PENDING|p|2026-01-01T00:00:00|Unknown|Unknown|1||gres/gpu=1||5\n"
        "9+1|c|RUNNING|p|2026-01-01T00:00:00|2026-01-01T00:00:30|Unknown|1|n1|gres/gpu=1|gres/gpu=1|5\n"
    )
    part = text.jobs_of_rows(text.parse_table(table))
    first, array, component = part.items
    assert not part.rejected
    assert first.states == ("CANCELLED",)
    assert first.nodes == ""
    assert (array.array_job, array.array_tasks) == (8, "[1-3%1]")
    assert (component.id, component.het_job, component.het_offset) == (9, 9, 1)
    assert component.start == datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC).timestamp()


def test_configuration() -> None:
    config = text.parse_config(read("config.txt"))
    assert config.cluster == "loopback"
    assert (config.preempt_type, config.preempt_mode) == ("partition_prio", "REQUEUE")
    assert config.weight_partition == 10000
    assert config.accounting is False
