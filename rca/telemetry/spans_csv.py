"""Spans from CSV.

Columns, by name (case, spaces, underscores and hyphens do not matter):

=============  ==================================================  ========================================
what           names                                               notes
=============  ==================================================  ========================================
trace          trace_id                                            required
span           span_id                                             required
parent         parent_id, parent_span_id                           required; empty, ``root`` or zeros: none
service        service, service_name, pod_name, pod, cmdb_id       required
start          start_time_unix_nano, start_time, start, timestamp  required; see `rca.telemetry.timestamps`
end            end_time_unix_nano, end_time, end                   this or a duration
duration       duration_seconds, _ms, _us or _ns                   used where there is no end
operation      operation_name, operation, name, span_name
kind           kind, span_kind                                     server, client, internal, ...
error          error, is_error                                     true or false; absent: not known
=============  ==================================================  ========================================
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rca.errors import InvalidInputError
from rca.incident import SPANS_SCHEMA
from rca.telemetry.csv_table import (
    as_booleans,
    as_numbers,
    as_times,
    check_unique_header,
    columns,
    find_column,
    load,
    require_filled,
)
from rca.telemetry.files import Progress

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "trace": ("trace_id",),
    "span": ("span_id",),
    "parent": ("parent_id", "parent_span_id"),
    "service": ("service", "service_name", "pod_name", "pod", "cmdb_id"),
    "start": ("start_time_unix_nano", "start_time", "start", "timestamp"),
}
_END: Final = ("end_time_unix_nano", "end_time", "end")
_DURATIONS: Final[Mapping[str, float]] = {
    "duration_seconds": 1.0,
    "duration_s": 1.0,
    "duration_ms": 1e-3,
    "duration_us": 1e-6,
    "duration_ns": 1e-9,
    "duration_nano": 1e-9,
}
_NO_PARENT: Final = ("", "root", "none", "null", "0", "-1", "0000000000000000")


def read_spans(path: Path | str, *, progress: Progress | None = None) -> tuple[pa.Table, tuple[str, ...]]:
    """Read spans from a CSV file with the columns above.

    Returns:
        The spans (SPANS_SCHEMA), and notes for the user.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: a column is missing, or a cell is wrong; the message names line and column.
    """
    text = load(Path(path), progress)
    header = [cell.strip() for cell in text.head[0]]
    check_unique_header(text, header)
    at: dict[str, int] = {}
    for what, aliases in _NAMES.items():
        position = find_column(header, aliases)
        if position is None:
            raise InvalidInputError(
                f"{text.path}, line 1 has no {what} column (it has {', '.join(header[:12])})",
                cure=f"name it {aliases[0]!r}",
            )
        at[what] = position
    end = find_column(header, _END)
    unit, duration = next(
        ((name, found) for name in _DURATIONS if (found := find_column(header, (name,))) is not None), ("", None)
    )
    if end is None and duration is None:
        raise InvalidInputError(
            f"{text.path}, line 1 has neither an end time nor a duration with its unit",
            cure="name it 'end_time', or 'duration_ms', 'duration_us', 'duration_ns' or 'duration_seconds'",
        )
    cells = columns(text, 1, len(header))
    for what in ("trace", "span", "start"):
        require_filled(text, 1, header[at[what]], cells[at[what]])
    start = as_times(text, 1, header[at["start"]], cells[at["start"]])
    if end is not None:
        seconds = (as_times(text, 1, header[end], cells[end]) - start) / 1e9
    else:
        assert duration is not None  # noqa: S101
        seconds = as_numbers(text, 1, header[duration], cells[duration]) * _DURATIONS[unit]
        # The table cannot hold an unknown duration; the analysis drops and counts these.
        seconds = np.where(np.isnan(seconds), -1.0, seconds)
    parent = cells[at["parent"]]
    lowered = pc.utf8_lower(parent)
    parent = pc.if_else(pc.is_in(lowered, pa.array(_NO_PARENT)), pa.scalar(None, pa.string()), parent)
    operation, kind, error = (
        find_column(header, aliases)
        for aliases in (
            ("operation_name", "operation", "name", "span_name"),
            ("kind", "span_kind"),
            ("error", "is_error"),
        )
    )
    count = len(start)
    data = {
        "trace_id": cells[at["trace"]],
        "span_id": cells[at["span"]],
        "parent_id": parent,
        "service": pc.fill_null(cells[at["service"]], ""),
        "operation": pa.nulls(count, pa.string()) if operation is None else cells[operation],
        "kind": pa.nulls(count, pa.string()) if kind is None else _kinds(cells[kind]),
        "start": pa.array(start).cast(SPANS_SCHEMA.field("start").type),
        "duration_seconds": pa.array(seconds),
        "error": pa.nulls(count, pa.bool_()) if error is None else as_booleans(text, 1, header[error], cells[error]),
        "attributes": pa.nulls(count, SPANS_SCHEMA.field("attributes").type),
    }
    notes = () if error is not None else ("no error column, so error ratios are not known",)
    return pa.table(data, schema=SPANS_SCHEMA), notes


def _kinds(column: pa.Array) -> pa.Array:
    """Return kinds in lower case without OTLP's prefix."""
    return pc.replace_substring_regex(pc.utf8_lower(column), "^span_kind_", "")


__all__ = ["read_spans"]
