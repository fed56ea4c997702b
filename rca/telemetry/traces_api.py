"""Traces of an incident from the HTTP API of Jaeger's query service or of Grafana Tempo.

Jaeger: ``GET /api/services`` and ``/api/traces?service=…``, the API of its UI. Tempo: ``GET /api/search`` with TraceQL,
then ``/api/traces/ID`` in OTLP JSON (https://grafana.com/docs/tempo/latest/api_docs/).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import pyarrow as pa

from rca.errors import InvalidInputError
from rca.incident import Source, SourceStatus
from rca.telemetry import jaeger, otlp
from rca.telemetry.prometheus.answers import Failure, QueryError
from rca.telemetry.prometheus.client import fetch, open_http
from rca.telemetry.prometheus.config import CaptureConfig, TracesKind
from rca.telemetry.spans import ServiceGraph, service_graph

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class Traces:
    """What the trace store gave: spans, what they say about services, and the record for the header."""

    spans: pa.Table | None = None
    graph: ServiceGraph | None = None
    source: Source | None = None


class _Found(msgspec.Struct, rename="camel"):
    trace_id: str = msgspec.field(name="traceID")


class _Search(msgspec.Struct):
    traces: list[_Found] = []


class _Services(msgspec.Struct):
    data: list[str] | None = None


async def fetch_traces(
    config: CaptureConfig, service: str, spans: Sequence[tuple[float, float]], deadline: float
) -> Traces:
    """Fetch up to `CaptureConfig.most_traces` traces for each of ``spans`` (Unix seconds).

    Args:
        service: the victim's service; "" or one that the store does not know: every service, one after the other.
        deadline: time of the event loop's clock by which it must end.

    Returns:
        What was found; the source says what failed. Never raises for a store that does not answer.
    """
    assert config.traces_url is not None  # noqa: S101 - the caller asks only when there is one
    kind, name = config.traces_kind, "traces"
    queries: dict[str, None] = {}
    problems: dict[str, None] = {}
    documents: list[bytes] = []
    http = open_http(
        config, config.traces_url, headers=config.traces_headers, token_file=config.traces_token_file, plain=False
    )
    async with http:
        for start, end in spans:
            try:
                read = _jaeger if kind is TracesKind.JAEGER else _tempo
                documents += await read(http, config, service, (start, end), deadline, queries)
            except QueryError as error:
                problems.setdefault(f"{error.kind.value}: {error}")
    if not documents:
        status = SourceStatus.FAILED if problems else SourceStatus.ABSENT
        detail = "; ".join(problems) or "the store holds no trace of that time"
        return Traces(source=Source(name, kind.value, status, detail, tuple(queries)))
    try:
        found, notes = await asyncio.to_thread(_read, kind, documents)
        graph = await asyncio.to_thread(service_graph, found, config.step_seconds)
    except InvalidInputError as error:
        return Traces(source=Source(name, kind.value, SourceStatus.FAILED, str(error), tuple(queries)))
    source = graph.report.source(name, kind.value, (*notes, *problems))
    source = msgspec.structs.replace(source, queries=tuple(queries))
    if problems:
        source = msgspec.structs.replace(source, status=SourceStatus.PARTIAL)
    return Traces(found, graph, source)


def _read(kind: TracesKind, documents: Sequence[bytes]) -> tuple[pa.Table, tuple[str, ...]]:
    """Read answers with the importers, which read files: one document a line."""
    with tempfile.TemporaryDirectory(prefix="prioscope-traces-") as folder:
        path = Path(folder) / f"{kind.value}-api.jsonl"
        path.write_bytes(b"\n".join(msgspec.json.encode(msgspec.json.decode(item)) for item in documents))
        return jaeger.read_spans(path) if kind is TracesKind.JAEGER else otlp.read_spans(path)


async def _jaeger(
    http: httpx.AsyncClient,
    config: CaptureConfig,
    service: str,
    span: tuple[float, float],
    deadline: float,
    queries: dict[str, None],
) -> list[bytes]:
    listed = await _get(http, config, "/api/services", {}, deadline, queries)
    known = _decode(listed, _Services).data or []
    # Whoever calls the victim begins its traces; where it is not traced, any service will do.
    chosen = [service] if service in known else sorted(known)
    out: list[bytes] = []
    left = config.most_traces
    for index, name in enumerate(chosen):
        share = max(1, left // (len(chosen) - index))
        form = {
            "service": name,
            "start": str(round(span[0] * 1e6)),
            "end": str(round(span[1] * 1e6)),
            "limit": str(share),
        }
        out.append(await _get(http, config, "/api/traces", form, deadline, queries))
        left -= share
        if left <= 0:
            break
    return [body for body in out if _decode(body, dict[str, Any]).get("data")]


async def _tempo(
    http: httpx.AsyncClient,
    config: CaptureConfig,
    service: str,
    span: tuple[float, float],
    deadline: float,
    queries: dict[str, None],
) -> list[bytes]:
    wanted = service.replace("\\", "\\\\").replace('"', '\\"')
    form = {
        "q": f'{{ resource.service.name = "{wanted}" }}' if service else "{ }",
        "start": str(int(span[0])),
        "end": str(int(span[1]) + 1),
        "limit": str(config.most_traces),
    }
    found = _decode(await _get(http, config, "/api/search", form, deadline, queries), _Search)
    bodies = await asyncio.gather(
        *(
            _get(http, config, f"/api/traces/{quote(item.trace_id, safe='')}", {}, deadline, None)
            for item in found.traces[: config.most_traces]
        )
    )
    out = []
    for body in bodies:
        document = _decode(body, dict[str, Any])
        # Tempo calls the resource spans "batches" where OTLP says "resourceSpans".
        batches = (
            document.get("batches") or document.get("resourceSpans") or document.get("trace", {}).get("resourceSpans")
        )
        if batches:
            out.append(msgspec.json.encode({"resourceSpans": batches}))
    return out


async def _get(
    http: httpx.AsyncClient,
    config: CaptureConfig,
    path: str,
    form: dict[str, str],
    deadline: float,
    queries: dict[str, None] | None,
) -> bytes:
    if queries is not None:
        queries.setdefault(f"GET {path}{'?' if form else ''}{'&'.join(f'{k}={v}' for k, v in form.items())}")
    left = deadline - asyncio.get_running_loop().time()
    if left <= 0:
        raise QueryError(Failure.BUDGET, f"the capture's {config.total_timeout_seconds:g} s are over")
    status, body = await fetch(http, path, form, min(config.query_timeout_seconds, left), get=True)
    if status != 200:
        raise QueryError(
            Failure.REFUSED if status in (401, 403) else Failure.UNREACHABLE, f"{path}: HTTP status {status}"
        )
    return body


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise QueryError(Failure.INVALID, f"not the answer of a trace store: {error}") from None


__all__ = ["Traces", "fetch_traces"]
