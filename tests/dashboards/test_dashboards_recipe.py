"""A new board, as docs/dashboards.md tells a newcomer to write it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import dashboards
from dashboards import build as building
from dashboards.lint import lint

ROOT = Path(__file__).parents[2]


def test_the_recipe_of_the_docs_gives_a_clean_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = (ROOT / "docs/dashboards.md").read_text(encoding="utf-8").split("## Add a board")[1]
    module, line = re.findall(r"```(?:python|diff)\n(.*?)```", recipe, re.DOTALL)[:2]
    name = re.search(r"`dashboards/(\w+)\.py`", recipe)
    assert name is not None
    assert line.removeprefix("+").strip() == f'"{name[1]}",'
    (tmp_path / f"{name[1]}.py").write_text(module)
    # As if the file lay in the package.
    monkeypatch.setattr(dashboards, "__path__", [*dashboards.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"dashboards.{name[1]}", raising=False)
    boards = building.build((*building.BOARDS, name[1]))
    assert len(boards) == len(building.BOARDS) + 1
    assert lint(boards) == []
    sys.modules.pop(f"dashboards.{name[1]}")


def test_two_boards_with_one_uid_are_refused() -> None:
    with pytest.raises(ValueError, match="prioscope-fleet"):
        building.build(("fleet", "fleet"))


def test_a_panel_wider_than_the_grid_is_refused() -> None:
    from dashboards.panels import arrange, text

    with pytest.raises(ValueError, match="25 columns"):
        arrange([text("x", width=25)])


def test_provisioning_files_are_what_grafana_reads() -> None:
    import yaml

    folder = ROOT / "dashboards/provisioning"
    providers = yaml.safe_load((folder / "dashboards.yaml").read_text())
    assert providers["apiVersion"] == 1
    assert {provider["type"] for provider in providers["providers"]} == {"file"}
    assert all(provider["options"]["path"].startswith("/") for provider in providers["providers"])
    sources = yaml.safe_load((folder / "datasources.yaml").read_text())
    assert [source["type"] for source in sources["datasources"]] == ["prometheus"]
