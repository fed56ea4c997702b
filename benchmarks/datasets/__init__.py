"""Loaders of incidents, by name: each module gives ``incidents()`` and, apart, ``quiet(count)`` for specificity.

Both yield one case at a time, because a case may be large.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol, cast

from benchmarks.cases import Case
from rca.errors import NotFoundError

NAMES = ("petshop", "nezha", "simulated")


class Dataset(Protocol):
    """What a loader module offers."""

    def incidents(self) -> Iterator[Case]:
        """Cases with a known cause."""

    def quiet(self, count: int = 50) -> Iterator[Case]:
        """Windows in which nothing was injected."""


def load(name: str) -> Dataset:
    """The loader called ``name``.

    Raises:
        NotFoundError: there is none.
    """
    if name not in NAMES:
        raise NotFoundError(f"no data set {name!r}", cure=f"use one of {', '.join(NAMES)}")
    return cast(Dataset, importlib.import_module(f"benchmarks.datasets.{name}"))
