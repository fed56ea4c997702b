"""The openb benchmark on a trace of a few pods, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exporters.openb import count, read_pods
from exporters.errors import InvalidInputError
from exporters.model import Basis
from exporters.policy import StartedFrom

HEADER = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)


def trace(path: Path, *rows: str) -> Path:
    file = path / "pods.csv"
    file.write_text(HEADER + "".join(f"{row}\n" for row in rows))
    return file


def test_held_started_and_dominated(tmp_path: Path) -> None:
    pods = read_pods(
        trace(
            tmp_path,
            # Waits from 100 to 300; its SLO of 60 s runs out at 160.
            "urgent,8000,100,1,1000,,LS,Running,100,900,300",
            # Never scheduled: waits until it is deleted.
            "lost,8000,100,4,1000,,Guaranteed,Pending,100,500,",
            "quick,8000,100,1,1000,,LS,Running,100,900,120",
            # Held before; another started within the SLO, one after it; one is too small; one is gone by then.
            "before,1,1,1,1000,,BE,Running,0,900,50",
            "early,1,1,1,1000,,BE,Running,0,900,130",
            "late,1,1,1,1000,,BE,Running,0,900,200",
            "small,9000,200,1,500,,BE,Running,0,900,250",
            "gone,9000,200,8,1000,,BE,Running,0,150,90",
            "cpu,9000,200,0,0,,BE,Running,0,900,200",
            "between,9000,200,8,1000,,Burstable,Running,0,900,200",
        )
    )
    assert {pod.workload.id for pod in pods} == {"urgent", "lost", "quick", "before", "early", "late", "small", "gone"}
    found = count(pods, 60, StartedFrom.BREACH)
    assert found.past_slo == 2
    # Only `urgent` has single holders of its size; `late` started after 160 but has less CPU.
    assert [found.at_least(basis) for basis in (Basis.HELD, Basis.STARTED, Basis.DOMINATED)] == [1, 1, 0]
    without_late = [pod for pod in pods if pod.workload.id != "late"]
    assert count(without_late, 60, StartedFrom.BREACH).at_least(Basis.STARTED) == 0
    assert count(without_late, 60, StartedFrom.SUBMISSION).at_least(Basis.STARTED) == 1
    assert count(pods, 250, StartedFrom.BREACH).past_slo == 1


def test_a_start_that_fits_the_whole_demand(tmp_path: Path) -> None:
    pods = read_pods(
        trace(
            tmp_path,
            "urgent,8000,100,2,1000,,LS,Running,100,900,300",
            "late,8000,100,2,1000,,BE,Running,0,900,200",
        )
    )
    assert count(pods, 60, StartedFrom.BREACH).by_basis[Basis.DOMINATED] == 1


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"pods\.csv:2"):
        read_pods(trace(tmp_path, "urgent,8000,100,two,1000,,LS,Running,100,900,300"))
    with pytest.raises(InvalidInputError, match="No such file"):
        read_pods(tmp_path / "none.csv")
