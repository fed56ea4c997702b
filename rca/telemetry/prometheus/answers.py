"""What a capture asks with and what it gets: the same from a Prometheus and from a recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Failure(StrEnum):
    """Why a query gave nothing."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    QUERY = "query"
    INVALID = "invalid"
    BUDGET = "budget"


class QueryError(Exception):
    """A query that failed; ``kind`` says how, ``str()`` says it in words without any credential."""

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Series:
    """One time series: its labels, Unix seconds and values."""

    labels: Mapping[str, str]
    times: Floats
    values: Floats


@dataclass(frozen=True)
class Answer:
    """What a query gave. ``notes`` are the server's warnings; ``partial``: it did not reach all of its data."""

    series: tuple[Series, ...] = ()
    notes: tuple[str, ...] = ()
    partial: bool = False


class Api(Protocol):
    """What answers the questions of a capture."""

    async def names(self, pattern: str, start: float, end: float) -> frozenset[str] | None:
        """Names of the metrics that match the regular expression; None when they cannot be listed.

        Raises:
            QueryError: it did not answer.
        """

    async def range(self, query: str, start: float, end: float, step: float) -> Answer:
        """Evaluate ``query`` each ``step`` seconds from ``start`` to ``end``, Unix seconds.

        Raises:
            QueryError: it did not answer, or cannot evaluate such a query.
        """
