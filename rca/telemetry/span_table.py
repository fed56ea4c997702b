"""Building the spans table row by row, for readers of span formats."""

from __future__ import annotations

import pyarrow as pa

from rca.incident import SPANS_SCHEMA


class SpanTable:
    """Collects spans and makes a table with SPANS_SCHEMA of them."""

    def __init__(self) -> None:
        self._columns: dict[str, list[object]] = {
            name: [] for name in SPANS_SCHEMA.names if name not in ("attributes",)
        }
        self._offsets = [0]
        self._keys: list[str] = []
        self._values: list[str] = []

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def add(
        self,
        *,
        trace_id: str,
        span_id: str,
        parent_id: str | None,
        service: str,
        operation: str,
        kind: str | None,
        start_ns: int,
        duration_ns: int,
        error: bool | None,
        attributes: dict[str, str],
    ) -> None:
        """Add one span; ``start_ns`` counts from 1970 UTC."""
        row = (trace_id, span_id, parent_id, service, operation, kind, start_ns, duration_ns / 1e9, error)
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)
        self._keys.extend(attributes)
        self._values.extend(attributes.values())
        self._offsets.append(len(self._keys))

    def table(self) -> pa.Table:
        """Return what was added, in that order."""
        arrays = [
            pa.array(values, pa.int64()).cast(SPANS_SCHEMA.field(name).type)
            if name == "start"
            else pa.array(values, SPANS_SCHEMA.field(name).type)
            for name, values in self._columns.items()
        ]
        attributes = pa.MapArray.from_arrays(
            pa.array(self._offsets, pa.int32()), pa.array(self._keys, pa.string()), pa.array(self._values, pa.string())
        )
        return pa.table([*arrays, attributes.cast(SPANS_SCHEMA.field("attributes").type)], schema=SPANS_SCHEMA)
