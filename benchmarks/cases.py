"""A benchmark case, and where the public data lies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rca.errors import NotFoundError
from rca.incident import Incident

#: Environment variable that names the folder with the public data sets.
DATA_VARIABLE = "PRIOSCOPE_DATA"


@dataclass(frozen=True)
class Case:
    """One incident (or one quiet window) with the answer kept apart from the evidence.

    Attributes:
        name: unique within the benchmark.
        dataset, scenario, group: the rows of the result table, from coarse to fine.
        incident: what a method may see; it carries no label.
        truth: node names that count as right; empty for a quiet window, in which nothing was injected.
    """

    name: str
    dataset: str
    scenario: str
    group: str
    incident: Incident
    truth: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        """Whether nothing was injected, so that the right answer is to name no cause."""
        return not self.truth


def data_root() -> Path:
    """The folder that `PRIOSCOPE_DATA` names.

    Raises:
        NotFoundError: the variable is unset, or names no folder.
    """
    value = os.environ.get(DATA_VARIABLE, "")
    if not value:
        raise NotFoundError(
            f"{DATA_VARIABLE} is not set",
            cure=f"export {DATA_VARIABLE}=<folder with petshop/ and nezha-train-ticket/>; docs/benchmarks.md says "
            "where to get them",
        )
    root = Path(value)
    if not root.is_dir():
        raise NotFoundError(f"{DATA_VARIABLE}={value} is not a folder", cure="correct the path")
    return root


def dataset_folder(pattern: str, root: Path | None = None) -> Path:
    """The one folder below ``root`` (default `data_root`) whose name matches ``pattern``.

    Raises:
        NotFoundError: no such folder.
    """
    base = root or data_root()
    found = sorted(path for path in base.glob(pattern) if path.is_dir())
    if not found:
        raise NotFoundError(
            f"no folder {pattern} below {base}",
            cure="docs/benchmarks.md says where to get the data and how to lay it out",
        )
    return found[0]
