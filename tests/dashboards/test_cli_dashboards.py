"""`rca dashboards`: build, lint, diff, and push to a stand-in of Grafana's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.main import main
from dashboards.build import GENERATED, build
from tests.support.grafana_api import READ_ONLY, TOKEN, GrafanaState, grafana_api
from tests.support.services import free_port


@pytest.fixture
def grafana(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrafanaState]:
    """A stand-in of Grafana, with its address and a token in the environment."""
    with grafana_api() as state:
        monkeypatch.setenv("GRAFANA_URL", state.url)
        monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
        yield state


def test_build_writes_every_board_with_our_addresses(tmp_path: Path) -> None:
    out = tmp_path / "boards"
    assert main(["dashboards", "build", "--out", str(out), "--incident-server", "https://rca.example/"]) == 0
    assert {path.name for path in out.iterdir()} == {path.name for path in GENERATED.glob("*.json")}
    board = json.loads((out / "prioscope-fleet.json").read_text())
    server = next(item for item in board["templating"]["list"] if item["name"] == "incident_server")
    assert server["query"] == server["current"]["value"] == "https://rca.example"


def test_build_check_names_a_file_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "build", "--out", str(tmp_path)]) == 0
    assert main(["dashboards", "build", "--out", str(tmp_path), "--check"]) == 0
    (tmp_path / "prioscope-pod.json").write_text("{}")
    (tmp_path / "old.json").write_text("{}")
    capsys.readouterr()
    assert main(["dashboards", "build", "--out", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().err
    assert "prioscope-pod.json differs" in said
    assert "old.json is none of our boards" in said
    assert (tmp_path / "prioscope-pod.json").read_text() == "{}"


def test_lint_names_rule_board_panel_and_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "lint"]) == 0
    board = json.loads((GENERATED / "prioscope-fleet.json").read_text())
    stat = next(panel for panel in board["panels"] if panel["type"] == "stat")
    stat["targets"][0]["expr"] = "sum(gpu_upp)"
    (tmp_path / "board.json").write_text(json.dumps(board))
    capsys.readouterr()
    assert main(["dashboards", "lint", str(tmp_path / "board.json")]) == 1
    said = capsys.readouterr().out
    assert f"metrics: prioscope-fleet, {stat['title']}: gpu_upp is not a known metric" in said
    assert "cure: correct the name" in said
    assert main(["dashboards", "lint", str(tmp_path), "-o", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [finding["rule"] for finding in document["findings"]] == ["metrics"]


def test_push_puts_every_board_into_the_folder_and_again_changes_nothing(
    grafana: GrafanaState, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboards", "push", "--folder", "On call"]) == 0
    assert set(grafana.boards) == set(build())
    assert list(grafana.folders.values()) == ["On call"]
    assert set(grafana.places.values()) == set(grafana.folders)
    assert capsys.readouterr().out.count("created") == len(build())
    assert main(["dashboards", "push", "--folder", "On call"]) == 0
    assert capsys.readouterr().out.count("unchanged") == len(build())
    assert {board["version"] for board in grafana.boards.values()} == {1}
    assert main(["dashboards", "diff"]) == 0


def test_push_leaves_a_board_alone_that_somebody_edited(
    grafana: GrafanaState, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboards", "push"]) == 0
    # Even one edit that Grafana's own check of versions would not notice.
    grafana.boards["prioscope-fleet"]["title"] = "Fleet, our way"
    capsys.readouterr()
    assert main(["dashboards", "push"]) == 1
    said = capsys.readouterr()
    assert "refused" in said.out
    assert "--overwrite" in said.err
    assert grafana.boards["prioscope-fleet"]["title"] == "Fleet, our way"
    assert main(["dashboards", "diff"]) == 1
    assert '-  "title": "Fleet, our way"' in capsys.readouterr().out
    assert main(["dashboards", "push", "--overwrite"]) == 0
    assert grafana.boards["prioscope-fleet"]["title"] == "Prioscope / Fleet"
    assert grafana.boards["prioscope-fleet"]["version"] == 2


def test_push_says_what_is_wrong_in_one_line(
    grafana: GrafanaState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = tmp_path / "token"
    nobody = f"http://127.0.0.1:{free_port()}"
    for content, options, code, words in (
        ("glsa_wrong", [], 2, "refuses the token (401)"),
        (READ_ONLY, [], 2, "refuses the token (403)"),
        ("", [], 2, "no token given"),
        (TOKEN, ["--url", nobody], 5, "does not answer"),
        (TOKEN, ["--url", "grafana.example"], 2, "is no address of a Grafana"),
        (TOKEN, ["--url", f"{grafana.url}/elsewhere"], 3, "has no Grafana API"),
        (TOKEN, ["--incident-server", "rca.example"], 2, "is no address"),
    ):
        token.write_text(f"{content}\n")
        assert main(["dashboards", "push", "--token-file", str(token), *options]) == code
        said = capsys.readouterr().err
        assert words in said
        assert "Traceback" not in said
        assert TOKEN not in said
    assert grafana.boards == {}
    monkeypatch.delenv("GRAFANA_URL")
    assert main(["dashboards", "push"]) == 2
    assert main(["dashboards", "diff"]) == 2
    assert main(["dashboards", "lint", str(tmp_path / "none.json")]) == 3
