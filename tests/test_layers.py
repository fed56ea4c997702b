"""Layers point one way: cli -> dashboards, alerts, rca -> exporters."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "exporters": {"exporters"},
    "rca": {"rca", "exporters"},
    "alerts": {"alerts", "exporters"},
    "dashboards": {"dashboards", "exporters"},
    "cli": {"cli", "alerts", "dashboards", "rca", "exporters"},
}
PACKAGES = {"exporters", "rca", "dashboards", "alerts", "cli", "benchmarks", "tests"}


def imported(file: Path) -> set[str]:
    """Top-level packages of this project that ``file`` imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found & PACKAGES


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    upward = {
        str(file.relative_to(ROOT)): sorted(imported(file) - ALLOWED[package])
        for file in sorted((ROOT / package).rglob("*.py"))
        if imported(file) - ALLOWED[package]
    }
    assert upward == {}
