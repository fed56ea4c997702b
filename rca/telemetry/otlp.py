"""OTLP JSON traces -> the spans table.

Reads what the collector's file exporter and OTLP/HTTP clients write: one export request, or one a line; ids in hex (the
OTLP rule) or base64 (protobuf's default JSON); 64-bit numbers as strings or numbers; enums as numbers or names.
Fields follow https://opentelemetry.io/docs/specs/otlp/ and opentelemetry-proto v1; unknown ones are ignored.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from rca.errors import InvalidInputError
from rca.telemetry.files import Progress, json_documents
from rca.telemetry.span_table import SpanTable

_KINDS: Final = (None, "internal", "server", "client", "producer", "consumer")
_KIND_NAMES: Final[Mapping[str, str | None]] = {
    "SPAN_KIND_UNSPECIFIED": None,
    **{f"SPAN_KIND_{kind.upper()}": kind for kind in _KINDS if kind},
}
_ERROR: Final = (2, "STATUS_CODE_ERROR")
_HEX: Final = re.compile(r"[0-9a-fA-F]+")
_CURE: Final = "export OTLP JSON, e.g. with the collector's file exporter"


#: Stands for a field that was not there; `Raw` cannot be part of a union.
_ABSENT: Final = msgspec.Raw()


class _Struct(msgspec.Struct, rename="camel", frozen=True):
    """Base of the messages below; fields that are not named are skipped."""


class _AnyValue(_Struct, frozen=True):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | str | None = None
    double_value: float | str | None = None
    array_value: _ArrayValue | None = None
    kvlist_value: _KeyValueList | None = None
    bytes_value: str | None = None


class _KeyValue(_Struct, frozen=True):
    key: str = ""
    value: _AnyValue | None = None


class _ArrayValue(_Struct, frozen=True):
    values: list[_AnyValue] = []


class _KeyValueList(_Struct, frozen=True):
    values: list[_KeyValue] = []


class _Status(_Struct, frozen=True):
    code: int | str = 0


class _Span(_Struct, frozen=True):
    trace_id: str
    span_id: str
    parent_span_id: str | None = None
    name: str = ""
    kind: int | str = 0
    start_time_unix_nano: int | str = 0
    end_time_unix_nano: int | str = 0
    attributes: list[_KeyValue] = []
    status: _Status | None = None


class _ScopeSpans(_Struct, frozen=True):
    spans: list[_Span] = []


class _Resource(_Struct, frozen=True):
    attributes: list[_KeyValue] = []


class _ResourceSpans(_Struct, frozen=True):
    resource: _Resource | None = None
    scope_spans: list[_ScopeSpans] = []
    # The name before opentelemetry-proto 0.15.
    instrumentation_library_spans: list[_ScopeSpans] = []


class _Request(_Struct, frozen=True):
    resource_spans: list[_ResourceSpans] | None = None
    # Present in files that hold other signals, or were written with protobuf's own field names.
    resource_metrics: msgspec.Raw = _ABSENT
    resource_logs: msgspec.Raw = _ABSENT


class _SnakeCase(msgspec.Struct):
    resource_spans: msgspec.Raw = _ABSENT


def read_spans(
    path: Path | str, *, service_attribute: str = "service.name", progress: Progress | None = None
) -> tuple[pa.Table, tuple[str, ...]]:
    """Read the spans of an OTLP JSON file, plain or gzip.

    Args:
        service_attribute: resource attribute that names the node, e.g. ``k8s.pod.name`` for one node a pod.

    Returns:
        The spans (SPANS_SCHEMA) in file order, and notes for the user.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: the file is damaged or not OTLP; the message names the line and the path in the JSON.
    """
    source = Path(path)
    decoder = msgspec.json.Decoder(_Request)
    spans = SpanTable()
    unfinished = others = 0
    for where, raw in json_documents(source, progress):
        try:
            request = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInputError(f"{where}: {error}", cure=_CURE) from None
        if request.resource_spans is None:
            if request.resource_metrics is not _ABSENT or request.resource_logs is not _ABSENT:
                others += 1
                continue
            raise InvalidInputError(f"{where} {_other_format(raw)}", cure=_CURE)
        for number, resource in enumerate(request.resource_spans):
            unfinished += _add_resource(spans, resource, service_attribute, f"{where}: in `$.resourceSpans[{number}]")
    if not len(spans):
        raise InvalidInputError(f"{source} holds no finished span", cure=_CURE)
    notes = []
    if unfinished:
        notes.append(f"{unfinished:,} unfinished spans left out")
    if others:
        notes.append(f"{others:,} requests with metrics or logs left out")
    return spans.table(), tuple(notes)


def _other_format(raw: bytes) -> str:
    try:
        if msgspec.json.decode(raw, type=_SnakeCase).resource_spans is not _ABSENT:
            return "has protobuf field names (resource_spans), not OTLP JSON's (resourceSpans)"
        if isinstance(document := msgspec.json.decode(raw), dict) and "data" in document:
            return "looks like Jaeger JSON, not OTLP: use `rca incident import jaeger`"
    except msgspec.DecodeError:
        pass
    return "has no resourceSpans, so it is not an OTLP trace export"


def _add_resource(spans: SpanTable, resource: _ResourceSpans, service_attribute: str, where: str) -> int:
    """Add all spans of one resource; return how many had not ended."""
    common = {} if resource.resource is None else _attributes(resource.resource.attributes)
    service = common.get(service_attribute, "")
    unfinished = 0
    for field, scopes in (
        ("scopeSpans", resource.scope_spans),
        ("instrumentationLibrarySpans", resource.instrumentation_library_spans),
    ):
        for scope_number, scope in enumerate(scopes):
            for number, span in enumerate(scope.spans):
                try:
                    unfinished += not _add_span(spans, span, service)
                except ValueError as error:
                    raise InvalidInputError(
                        f"{where}.{field}[{scope_number}].spans[{number}]`: {error}", cure=_CURE
                    ) from None
    return unfinished


def _add_span(spans: SpanTable, span: _Span, service: str) -> bool:
    """Add one span, unless it has not ended; return whether it was added."""
    start = _integer(span.start_time_unix_nano, "startTimeUnixNano")
    end = _integer(span.end_time_unix_nano, "endTimeUnixNano")
    trace = _identifier(span.trace_id, 16, "traceId")
    own = _identifier(span.span_id, 8, "spanId")
    if trace is None or own is None:
        raise ValueError("traceId or spanId is empty or zero")
    if start <= 0 or start > 2**62:
        raise ValueError(f"startTimeUnixNano {start} is not a time")
    if end <= 0:
        return False
    spans.add(
        trace_id=trace,
        span_id=own,
        parent_id=_identifier(span.parent_span_id or "", 8, "parentSpanId"),
        service=service,
        operation=span.name,
        kind=_kind(span.kind),
        start_ns=start,
        duration_ns=end - start,
        # An unset status means that nothing failed (OpenTelemetry trace API, "Set Status").
        error=span.status is not None and span.status.code in _ERROR,
        attributes=_attributes(span.attributes),
    )
    return True


def _integer(value: int | str, name: str) -> int:
    if isinstance(value, int):
        return value
    try:
        return int(value or "0")
    except ValueError:
        raise ValueError(f"{name} {value!r} is not a whole number") from None


def _identifier(text: str, size: int, name: str) -> str | None:
    """Return an id of ``size`` bytes as lower-case hex, None for an empty or zero one."""
    if not text:
        return None
    if len(text) == 2 * size and _HEX.fullmatch(text):
        found = text.lower()
    else:
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != size:
            raise ValueError(f"{name} {text!r} is neither {2 * size} hex digits nor base64 of {size} bytes")
        found = raw.hex()
    return found if found.strip("0") else None


def _kind(value: int | str) -> str | None:
    if isinstance(value, int):
        # A kind of a later version of OTLP is treated as unspecified.
        return _KINDS[value] if 0 <= value < len(_KINDS) else None
    if value.isdigit():
        return _kind(int(value))
    return _KIND_NAMES.get(value.upper())


def _attributes(pairs: list[_KeyValue]) -> dict[str, str]:
    return {pair.key: _text(pair.value) for pair in pairs if pair.value is not None}


def _text(value: _AnyValue) -> str:
    if value.string_value is not None:
        return value.string_value
    plain = _plain(value)
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def _plain(value: _AnyValue | None) -> Any:
    """Return the value as plain Python data; whole numbers of any size, bytes as their base64."""
    if value is None:
        return None
    if value.int_value is not None:
        return int(value.int_value) if re.fullmatch(r"-?\d+", str(value.int_value)) else str(value.int_value)
    if value.double_value is not None:
        return value.double_value
    if value.array_value is not None:
        return [_plain(item) for item in value.array_value.values]
    if value.kvlist_value is not None:
        return {pair.key: _plain(pair.value) for pair in value.kvlist_value.values}
    for simple in (value.string_value, value.bool_value, value.bytes_value):
        if simple is not None:
            return simple
    return ""


__all__ = ["read_spans"]
