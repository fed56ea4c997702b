"""Checks of rule and Alertmanager files by the tools of Prometheus, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporters.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Check:
    """What a tool said of a file. ``passed`` is None where the tool is not installed: not checked."""

    file: str
    tool: str
    passed: bool | None
    detail: str = ""


def check(paths: Iterable[Path]) -> list[Check]:
    """Check rule files, PrometheusRule manifests and Alertmanager configurations; which it is, the content says.

    Raises:
        InvalidInputError: a file cannot be read, is not YAML, or is none of the three.
    """
    return [_one(path) for path in paths]


def _one(path: Path) -> Check:
    content = _load(path)
    if isinstance(content, dict) and content.get("kind") == "PrometheusRule":
        groups = content.get("spec")
        if not isinstance(groups, dict) or "groups" not in groups:
            raise InvalidInputError(f"{path} has no spec.groups", cure="write it with `rca alerts build --format crd`")
        return _rules(path, {"groups": groups["groups"]})
    if isinstance(content, dict) and "groups" in content:
        return _rules(path, content)
    if isinstance(content, dict) and "route" in content:
        return _run(path, ["amtool", "check-config", str(path)])
    raise InvalidInputError(
        f"{path} holds neither rules nor an Alertmanager configuration",
        cure="name a file that `rca alerts build` wrote",
    )


def _load(path: Path) -> Any:
    from alerts.build import load_yaml

    yaml = load_yaml()
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}", cure="check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is not YAML: {' '.join(str(error).split())}", cure="correct it") from None


def _rules(path: Path, content: dict[str, Any]) -> Check:
    from alerts.build import dump

    with tempfile.TemporaryDirectory(prefix="prioscope-") as folder:
        file = Path(folder) / path.name
        file.write_text(dump(content), encoding="utf-8")
        return _run(path, ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(file)])


def _run(path: Path, command: list[str]) -> Check:
    program = shutil.which(command[0])
    if program is None:
        return Check(str(path), command[0], None, f"{command[0]} is not installed")
    try:
        done = subprocess.run(  # noqa: S603 - the program that was found, on a path, without a shell
            [program, *command[1:]], check=False, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return Check(str(path), command[0], False, f"{command[0]} did not come back within 60 s")
    text = (done.stdout + done.stderr).strip()
    return Check(str(path), command[0], done.returncode == 0, "" if done.returncode == 0 else text)
