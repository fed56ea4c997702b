"""``rca demo``: what it says when the first cause is, and is not, the injected one."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

import cli.main
from rca.explanation import Cause, Explanation
from rca.incident import Incident, Truth, read
from rca.simulation.demo import Demo

JOB = "train/llama-812"


class Simulation(ModuleType):
    """Stands in for `rca.simulation.demo` with two scenarios that differ in the injected cause."""

    def __init__(self, incident: Incident) -> None:
        super().__init__("rca.simulation.demo")
        self.DEMOS = {
            name: Demo(name, f"Summary of {name}", partial(self.make, incident, name, cause))
            for name, cause in {"gpu-taken": JOB, "slow-disk": "db"}.items()
        }

    @staticmethod
    def make(incident: Incident, name: str, cause: str, seed: int, _folder: Path) -> Incident:
        header = msgspec.structs.replace(incident.header, id=f"{name}-{seed}")
        return incident.replace(header=header, truth=Truth(causes=(cause,), kind="gpu_contention"))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, incident: Incident, explained: Explanation) -> dict[str, Explanation]:
    """The explanation per incident id; a test may replace one."""
    engine = ModuleType("rca.explain")
    table = dict.fromkeys(("gpu-taken-0", "gpu-taken-7", "slow-disk-0"), explained)
    engine.Options = SimpleNamespace  # type: ignore[attr-defined]

    def explain(read_back: Incident, options: object) -> Explanation:
        assert read_back.truth is None, "the explanation could peek"
        return table[read_back.header.id]

    engine.explain = explain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rca.explain", engine)
    simulation = Simulation(incident)
    monkeypatch.setitem(sys.modules, "rca.simulation.demo", simulation)
    return table


def rca_demo(*arguments: object) -> int:
    return cli.main.main(["demo", *map(str, arguments)])


def test_the_default_scenario_is_the_first_and_is_correct(
    answers: dict[str, Explanation], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rca_demo() == 0
    out = capsys.readouterr().out
    assert "Likely cause" in out
    assert out.endswith(f"\nCORRECT: the first cause, {JOB}, is the injected one (gpu contention).\n")


def test_a_wrong_cause_is_said_and_exits_1(answers: dict[str, Explanation], capsys: pytest.CaptureFixture[str]) -> None:
    assert rca_demo("--scenario", "slow-disk") == 1
    assert (
        f"WRONG: the injected cause is db (gpu contention); the first cause found is {JOB}." in capsys.readouterr().out
    )


def test_an_inconclusive_answer_exits_4(
    answers: dict[str, Explanation], inconclusive: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    answers["gpu-taken-0"] = inconclusive
    assert rca_demo() == 4
    assert "INCONCLUSIVE: the first candidate" in capsys.readouterr().out
    answers["gpu-taken-0"] = msgspec.structs.replace(inconclusive, causes=())
    assert rca_demo() == 4
    assert "MISSED: the injected cause is" in capsys.readouterr().out


def test_machine_output_stays_clean(answers: dict[str, Explanation], capsys: pytest.CaptureFixture[str]) -> None:
    assert rca_demo("-o", "json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["incident_id"] == "INC-4711"
    assert err.startswith("CORRECT")


def test_the_bundle_and_the_report_can_be_kept(answers: dict[str, Explanation], tmp_path: Path) -> None:
    assert rca_demo("--seed", 7, "--out", tmp_path / "b", "--report", tmp_path / "r" / "demo.html") == 0
    assert read(tmp_path / "b" / "gpu-taken.zip").header.id == "gpu-taken-7"
    assert (tmp_path / "r" / "demo.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_list(answers: dict[str, Explanation], capsys: pytest.CaptureFixture[str]) -> None:
    assert rca_demo("--list") == 0
    out = capsys.readouterr().out
    assert "gpu-taken" in out
    assert "Summary of slow-disk" in out
    assert rca_demo("--list", "-o", "json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["gpu-taken", "slow-disk"]


def test_all_fails_when_one_is_wrong(
    answers: dict[str, Explanation], explained: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rca_demo("--all") == 1
    assert "1 of 2 scenarios" in capsys.readouterr().out
    first: Cause = msgspec.structs.replace(explained.causes[0], node="db")
    answers["slow-disk-0"] = msgspec.structs.replace(explained, causes=(first,))
    assert rca_demo("--all", "-o", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["scenario"], row["first_cause"], row["correct"]) for row in rows] == [
        ("gpu-taken", JOB, True),
        ("slow-disk", "db", True),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--scenario", "nope"], 3, "use one of gpu-taken, slow-disk"),
        (["--all", "--scenario", "slow-disk"], 2, "leave out --all"),
        (["--all", "-o", "html"], 2, "cannot be written as html"),
        (["--seed", "-1"], 2, "--seed"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    code: int,
    message: str,
    answers: dict[str, Explanation],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert rca_demo(*arguments) == code
    assert message in capsys.readouterr().err
