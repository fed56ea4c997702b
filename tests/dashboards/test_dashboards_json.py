"""The boards as JSON: kept in step, read by Grafana's own SDK without loss, and as Grafana's own types have it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dashboards.build import GENERATED, build, file_name, render
from dashboards.lint import panels

BOARDS = build()
SCHEMA = Path(__file__).parent / "schema"


def test_the_checked_in_boards_are_those_that_are_built() -> None:
    stale = [uid for uid, board in BOARDS.items() if (GENERATED / file_name(uid)).read_text("utf-8") != render(board)]
    assert stale == [], "run `rca dashboards build`"
    assert {path.name for path in GENERATED.glob("*.json")} == {file_name(uid) for uid in BOARDS}


def test_a_board_is_the_same_each_time() -> None:
    assert build() == BOARDS


# The SDK would rather have its users write dashboards of version 2, which provisioning from files does not read yet.
@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")
@pytest.mark.parametrize("uid", BOARDS)
def test_grafanas_sdk_reads_a_board_and_loses_nothing(uid: str) -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board = BOARDS[uid]
    again = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert list(lost(board, again)) == []


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield what is in ``before`` and not, or otherwise, in ``after``."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key, value in before.items():
            if key in after:
                yield from lost(value, after[key], f"{path}.{key}")
            else:
                yield f"{path}.{key} is lost: {value!r}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}[{index}]")
    elif before != after:
        yield f"{path} was {before!r}, is {after!r}"


#: What differs from the types that Grafana publishes, and why that is right.
EXCEPTIONS = {
    r"annotations/list/\d+: .*'expr'": (
        "A Prometheus annotation keeps its query beside the common fields: that is what Grafana's editor writes and its"
        " SDK reads; the published type names only the fields of every data source."
    ),
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """A draft-07 schema of dashboards, made from the types in the npm package @grafana/schema."""
    if not (SCHEMA / "node_modules").is_dir() or shutil.which("npm") is None:
        why = f"needs npm, and `npm ci` in {SCHEMA}"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    made = subprocess.run(["npm", "run", "--silent", "schema"], cwd=SCHEMA, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    found: dict[str, Any] = json.loads(made.stdout)
    assert found["$schema"] == "http://json-schema.org/draft-07/schema#"
    return found


def problems(schema: Mapping[str, Any], board: Mapping[str, Any]) -> list[str]:
    """Return what the schema says about ``board``; of a panel, only against the schema of its own kind."""

    def innermost(error: jsonschema.ValidationError) -> Iterator[jsonschema.ValidationError]:
        branches: dict[Any, list[jsonschema.ValidationError]] = {}
        for inner in error.context or ():
            branches.setdefault(inner.relative_schema_path[0], []).append(inner)
        own = [found for found in branches.values() if all(list(item.relative_path) != ["type"] for item in found)]
        if not own:
            yield error
            return
        for inner in min(own, key=len):
            yield from innermost(inner)

    validator = jsonschema.Draft7Validator(schema)
    found = (inner for error in validator.iter_errors(board) for inner in innermost(error))
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


@pytest.mark.slow
def test_boards_are_as_grafanas_types_have_it(schema: dict[str, Any]) -> None:
    found = {f"{uid}: {text}" for uid, board in BOARDS.items() for text in problems(schema, board)}
    used = {pattern for pattern in EXCEPTIONS if any(re.search(pattern, text) for text in found)}
    assert [text for text in sorted(found) if not any(re.search(pattern, text) for pattern in EXCEPTIONS)] == []
    assert used == set(EXCEPTIONS), "an exception that is not needed any more"


@pytest.mark.slow
def test_the_schema_finds_a_misspelt_option(schema: dict[str, Any]) -> None:
    board = json.loads(json.dumps(BOARDS["prioscope-fleet"]))
    table = next(panel for panel in panels(board) if panel["type"] == "table")
    table["options"]["showHeaders"] = True
    assert any("showHeaders" in text for text in problems(schema, board))
