"""Arrow columns as numpy arrays without a detour.

``to_numpy`` of pyarrow imports pandas where that is installed, which takes longer than most explanations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def flat(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return the column as one array."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def floats(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.float64]:
    """Return a numeric column as float64 with NaN for null; shape [rows]."""
    array = flat(column).cast(pa.float64())
    values: npt.NDArray[np.float64] = _fixed(array, np.dtype(np.float64)).copy()
    if array.null_count:
        values[~valid(array)] = np.nan
    return values


def integers(column: pa.ChunkedArray | pa.Array, missing: int = -1) -> npt.NDArray[np.int64]:
    """Return an integer (or timestamp) column as int64 with ``missing`` for null; shape [rows]."""
    array = flat(column).cast(pa.int64())
    values: npt.NDArray[np.int64] = _fixed(array, np.dtype(np.int64)).copy()
    if array.null_count:
        values[~valid(array)] = missing
    return values


def valid(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.bool_]:
    """Return which rows are not null; shape [rows]."""
    mask = flat(pc.is_valid(column)).cast(pa.uint8())
    out: npt.NDArray[np.bool_] = _fixed(mask, np.dtype(np.uint8)).astype(bool)
    return out


def _fixed(array: pa.Array, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.empty(0, dtype=kind)
    return np.frombuffer(data, dtype=kind, count=len(array), offset=array.offset * kind.itemsize)
