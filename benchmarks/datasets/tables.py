"""Shared steps of the loaders: wide columns to the long metrics table, evenly spaced windows, folded baselines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rca.incident import METRICS_SCHEMA, metrics_table

Floats = npt.NDArray[np.float64]

DAY = 86400.0


def utc(seconds: float) -> datetime:
    """Unix seconds as an aware UTC time."""
    return datetime.fromtimestamp(seconds, UTC)


def long_table(times: Floats, columns: Sequence[tuple[str, str]], values: Floats) -> pa.Table:
    """Stack aligned columns into the metrics schema; what was not measured (NaN) gives no row.

    Args:
        times: Unix seconds, shape [T].
        columns: (node, canonical metric) of each column, length C.
        values: shape [T, C].
    """
    row, column = np.nonzero(np.isfinite(values))
    if not len(row):
        return METRICS_SCHEMA.empty_table()
    take = pa.array(column)
    return metrics_table(
        times[row],
        pa.array([node for node, _ in columns], pa.string()).take(take),
        pa.array([metric for _, metric in columns], pa.string()).take(take),
        values[row, column],
    )


def fold_seconds(times: Floats, boundary: float) -> float:
    """By how much to move times at or after ``boundary`` back, so that they come before all others: whole days.

    Normal data lies on both sides of an incident, and a bundle's baseline is one interval. Whole days keep the time of
    day. Zero when nothing lies at or after ``boundary``.
    """
    late = times >= boundary
    if not late.any():
        return 0.0
    earliest = boundary if late.all() else float(times[~late].min())
    return DAY * (math.floor((float(times[late].max()) - earliest) / DAY) + 1)


def evenly_spaced(count: int, starts: Sequence[int]) -> list[int]:
    """Choose up to ``count`` of the possible ``starts``, evenly spaced over them, without repeats."""
    if count <= 0 or not starts:
        return []
    positions = np.unique(np.linspace(0, len(starts) - 1, min(count, len(starts))).round().astype(int))
    return [starts[int(position)] for position in positions]
