"""The model: recorded snapshots round-trip, ranks are converted at the source, errors name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporters.errors import InvalidInputError, NotFoundError
from exporters.model import (
    Demand,
    Node,
    NodeState,
    Ranking,
    Snapshot,
    Taint,
    Toleration,
    Unread,
    Workload,
    WorkloadState,
    decode,
    dense_ranks,
    encode,
    level_of,
    read_snapshots,
    violation_id,
    write_snapshots,
)


def example(time: float = 1.5) -> Snapshot:
    return Snapshot(
        time=time,
        cluster="c",
        source="slurm",
        workloads=(Workload("1", "train", WorkloadState.PENDING, rank=2, demand=Demand(gpu_milli=500)),),
        nodes=(Node("n1", state=NodeState.DRAINING, taints=(Taint("a"),)),),
        unread=(Unread("devices", "no driver"),),
    )


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz"])
def test_snapshots_round_trip(tmp_path: Path, name: str) -> None:
    stream = [example(1.0), example(2.0)]
    assert write_snapshots(tmp_path / name, stream) == 2
    assert list(read_snapshots(tmp_path / name)) == stream
    assert example().lacks("devices")
    assert not example().lacks("nodes")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not a snapshot"),
        (b'{"time":1,"cluster":"c"}', "missing required field `source`"),
        (b'{"time":1,"cluster":"c","source":"x","workloads":[{"id":"1","name":"a","state":"lost"}]}', "lost"),
        (
            b'{"time":1,"cluster":"c","source":"x","workloads":[{"id":"1","name":"a","state":"pending","rank":-1}]}',
            ">= 0",
        ),
        (b'{"time":1,"cluster":"c","source":"x","schema_version":2}', "schema version 2"),
        (b"\xff", "is not a snapshot"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(encode(example()) + b"\n" + line + b"\n")
    with pytest.raises(InvalidInputError, match=r"s\.jsonl:3") as caught:
        list(read_snapshots(path))
    assert message in str(caught.value)


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        list(read_snapshots(tmp_path / "none"))
    path = tmp_path / "s.jsonl.gz"
    write_snapshots(path, [example()] * 50)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidInputError, match="cannot be read"):
        list(read_snapshots(path))


def test_unknown_fields_of_a_newer_release_are_ignored() -> None:
    assert decode(b'{"time":1,"cluster":"c","source":"x","later":true}').time == 1


def test_ranks() -> None:
    assert dense_ranks([10, 1000, 10, -5]) == {1000: 0, 10: 1, -5: 2}
    assert [level_of(rank) for rank in (0, 3, 7, None)] == ["P0", "P3", "P3", "unknown"]
    ranking = Ranking(classes={"gold": 0}, thresholds=(100, 10))
    assert [ranking.rank(1, "gold"), ranking.rank(100), ranking.rank(10), ranking.rank(9), ranking.rank(None)] == [
        0, 0, 1, 2, None,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="descending"):
        Ranking(thresholds=(1, 2))
    with pytest.raises(ValueError, match="negative"):
        Ranking(classes={"a": -1})


def test_the_wait_that_counts_begins_when_the_workload_became_eligible() -> None:
    job = Workload("1", "a", WorkloadState.PENDING, submitted=10.0, eligible=50.0)
    assert job.waiting_since == 50.0
    assert Workload("1", "a", WorkloadState.PENDING, submitted=10.0).waiting_since == 10.0
    # Slurm reports an eligible time of 0 for some jobs: never before the submission.
    assert Workload("1", "a", WorkloadState.PENDING, submitted=10.0, eligible=0.0).waiting_since == 10.0


def test_free_gpus() -> None:
    assert Node("n", gpu_capacity_milli=4000, gpu_allocated_milli=2500).free_gpus == (1000, 500, 0, 0)
    assert Node("n", gpu_free_milli=(0, 700, 1000)).free_gpus == (1000, 700, 0)
    assert Node("n", gpu_capacity_milli=4000, gpu_allocated_milli=9000).free_gpus == (0, 0, 0, 0)
    assert Node("n", gpu_capacity_milli=4000).free_gpus is None


@pytest.mark.parametrize(
    ("toleration", "tolerates"),
    [
        (Toleration("k", "Equal", "v"), True),
        (Toleration("k", "Equal", "other"), False),
        (Toleration("k", "Exists"), True),
        (Toleration("", "Exists"), True),
        (Toleration("", "Exists", effect="NoExecute"), False),
        (Toleration("other", "Exists"), False),
    ],
)
def test_tolerations(toleration: Toleration, tolerates: bool) -> None:
    assert toleration.tolerates(Taint("k", "v", "NoSchedule")) is tolerates


def test_violation_ids_tell_workloads_types_and_waits_apart() -> None:
    from exporters.model import ViolationType

    base = violation_id("c", "1", ViolationType.INVERSION, 10)
    assert base == violation_id("c", "1", ViolationType.INVERSION, 10.0)
    others = {
        violation_id("d", "1", ViolationType.INVERSION, 10),
        violation_id("c", "2", ViolationType.INVERSION, 10),
        violation_id("c", "1", ViolationType.SCHEDULING_DELAY, 10),
        violation_id("c", "1", ViolationType.INVERSION, 11),
    }
    assert len(others | {base}) == 5
