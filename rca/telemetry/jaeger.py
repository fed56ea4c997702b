"""Jaeger JSON traces -> the spans table.

Reads the answer of Jaeger's query API (``{"data": [trace, ...]}``), a single trace, a list of traces, or one of these a
line. Times are microseconds. A span's parent is its ``CHILD_OF`` reference within the trace, else ``FOLLOWS_FROM``,
which is marked since the parent does not wait for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from rca.errors import InvalidInputError
from rca.telemetry.files import Progress, json_documents
from rca.telemetry.span_table import SpanTable
from rca.telemetry.spans import FOLLOWS_FROM, REFERENCE_ATTRIBUTE

_CURE: Final = "export Jaeger JSON, e.g. from /api/traces or the UI's 'Trace JSON'"


class _Struct(msgspec.Struct, rename="camel", frozen=True):
    """Base of the messages below; fields that are not named are skipped."""


class _Tag(_Struct, frozen=True):
    key: str
    value: Any = None


class _Reference(_Struct, frozen=True):
    ref_type: str = "CHILD_OF"
    trace_id: str = msgspec.field(name="traceID", default="")
    span_id: str = msgspec.field(name="spanID", default="")


class _Process(_Struct, frozen=True):
    service_name: str = ""
    tags: list[_Tag] | None = None


class _Span(_Struct, frozen=True):
    span_id: str = msgspec.field(name="spanID")
    start_time: int
    duration: int
    trace_id: str = msgspec.field(name="traceID", default="")
    operation_name: str = ""
    parent_span_id: str = msgspec.field(name="parentSpanID", default="")
    references: list[_Reference] | None = None
    tags: list[_Tag] | None = None
    process_id: str = msgspec.field(name="processID", default="")
    process: _Process | None = None


class _Trace(_Struct, frozen=True):
    spans: list[_Span]
    trace_id: str = msgspec.field(name="traceID", default="")
    processes: dict[str, _Process] = {}


class _Answer(_Struct, frozen=True):
    data: list[_Trace] | None = None


def read_spans(
    path: Path | str, *, service_attribute: str = "", progress: Progress | None = None
) -> tuple[pa.Table, tuple[str, ...]]:
    """Read the spans of a Jaeger JSON file, plain or gzip.

    Args:
        service_attribute: process tag that names the node, e.g. ``hostname``; by default the process's service name.

    Returns:
        The spans (SPANS_SCHEMA) in file order, and notes for the user.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: the file is damaged or not Jaeger's; the message names the line and the path in the JSON.
    """
    source = Path(path)
    spans = SpanTable()
    foreign = 0
    for where, raw in json_documents(source, progress):
        for prefix, trace in _traces(where, raw):
            for number, span in enumerate(trace.spans):
                try:
                    foreign += _add_span(spans, trace, span, service_attribute)
                except ValueError as error:
                    raise InvalidInputError(f"{where}: in `{prefix}.spans[{number}]`: {error}", cure=_CURE) from None
    if not len(spans):
        raise InvalidInputError(f"{source} holds no span", cure=_CURE)
    notes = (f"{foreign:,} references to other traces not followed",) if foreign else ()
    return spans.table(), notes


def _traces(where: str, raw: bytes) -> list[tuple[str, _Trace]]:
    """Decode one document; each trace comes with its path in the JSON."""
    try:
        if raw.startswith(b"["):
            listed = msgspec.json.decode(raw, type=list[_Trace])
            return [(f"$[{number}]", trace) for number, trace in enumerate(listed)]
        answer = msgspec.json.decode(raw, type=_Answer)
        if answer.data is not None:
            return [(f"$.data[{number}]", trace) for number, trace in enumerate(answer.data)]
        document = msgspec.json.decode(raw)
        if "resourceSpans" in document:
            raise InvalidInputError(
                f"{where} looks like OTLP JSON, not Jaeger's: use `rca incident import otlp`", cure=_CURE
            )
        if "spans" not in document:
            raise InvalidInputError(f"{where} has neither data nor spans, so it is not a Jaeger export", cure=_CURE)
        return [("$", msgspec.json.decode(raw, type=_Trace))]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(f"{where}: {error}", cure=_CURE) from None


def _add_span(spans: SpanTable, trace: _Trace, span: _Span, service_attribute: str) -> int:
    """Add one span; return the number of its references to other traces."""
    trace_id = span.trace_id or trace.trace_id
    if not trace_id or not span.span_id:
        raise ValueError("traceID or spanID is empty")
    if not 0 < span.start_time < 2**62 // 1000:
        raise ValueError(f"startTime {span.start_time} is not a time in microseconds")
    process = span.process or trace.processes.get(span.process_id)
    if process is None:
        raise ValueError(f"processID {span.process_id!r} is not among the trace's processes")
    attributes = _attributes(span.tags)
    parent, follows, foreign = _parent(span, trace_id)
    if follows:
        attributes[REFERENCE_ATTRIBUTE] = FOLLOWS_FROM
    service = _attributes(process.tags).get(service_attribute, "") if service_attribute else process.service_name
    spans.add(
        trace_id=trace_id,
        span_id=span.span_id,
        parent_id=parent,
        service=service,
        operation=span.operation_name,
        kind=attributes.get("span.kind", "").lower() or None,
        start_ns=span.start_time * 1000,
        duration_ns=span.duration * 1000,
        error=attributes.get("error", "").lower() in ("true", "1")
        or attributes.get("otel.status_code", "").upper() == "ERROR",
        attributes=attributes,
    )
    return foreign


def _parent(span: _Span, trace_id: str) -> tuple[str | None, bool, int]:
    """Return the parent's id, whether it is only followed, and how many references lead to other traces."""
    found: tuple[str | None, bool] = (span.parent_span_id or None, False)
    foreign = 0
    for reference in reversed(span.references or []):
        if reference.trace_id and reference.trace_id != trace_id:
            foreign += 1
            continue
        follows = reference.ref_type.upper() == "FOLLOWS_FROM"
        if not follows or found[0] is None or found[1]:
            found = (reference.span_id or None, follows)
    return (*found, foreign)


def _attributes(tags: list[_Tag] | None) -> dict[str, str]:
    return {
        tag.key: tag.value if isinstance(tag.value, str) else msgspec.json.encode(tag.value).decode()
        for tag in tags or []
        if tag.value is not None
    }


__all__ = ["read_spans"]
