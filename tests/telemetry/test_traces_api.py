"""Traces from a trace store's HTTP API. The answers are made up, in the form that Jaeger 1.5x and Tempo 2.x give."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from rca.errors import InvalidInputError
from rca.telemetry.prometheus import CaptureConfig, TracesKind, capture_from
from rca.telemetry.request import CaptureRequest
from rca.telemetry.traces_api import Traces, fetch_traces
from tests.support.answering import Reply, Request, answering
from tests.support.services import free_port

START = 1_700_000_000.0
SPANS = [(START, START + 60), (START + 60, START + 120)]


def jaeger_trace(number: int, at: float) -> dict[str, object]:
    """One request: shop calls pay."""
    begin = round(at * 1e6)
    trace = f"{number:032x}"

    def span(own: int, parent: int, process: str, kind: str, start: int, duration: int) -> dict[str, object]:
        references = [{"refType": "CHILD_OF", "traceID": trace, "spanID": f"{parent:016x}"}] if parent else []
        return {
            "traceID": trace, "spanID": f"{own:016x}", "operationName": "GET /", "references": references,
            "startTime": begin + start, "duration": duration, "processID": process,
            "tags": [{"key": "span.kind", "type": "string", "value": kind}],
        }  # fmt: skip

    spans = [span(1, 0, "p1", "server", 0, 50_000), span(2, 1, "p1", "client", 5_000, 40_000)]
    spans.append(span(3, 2, "p2", "server", 6_000, 38_000))
    return {
        "traceID": trace,
        "spans": spans,
        "processes": {"p1": {"serviceName": "shop", "tags": []}, "p2": {"serviceName": "pay", "tags": []}},
    }


def jaeger(request: Request) -> Reply:
    if request.path == "/api/services":
        return Reply({"data": ["jaeger-all-in-one", "pay", "shop"], "total": 3})
    if request.path == "/api/traces" and request.form["service"] == "shop":
        at = float(request.form["start"]) / 1e6
        return Reply({"data": [jaeger_trace(int(at) + i, at + i) for i in range(10)]})
    return Reply({"data": []})


def tempo(request: Request) -> Reply:
    if request.path == "/api/search":
        assert request.form["q"] == '{ resource.service.name = "shop" }'
        start = int(request.form["start"])
        return Reply({"traces": [{"traceID": f"{start + i:032x}", "rootServiceName": "shop"} for i in range(10)]})
    trace = request.path.rsplit("/", 1)[1]
    begin = int(trace, 16) * 10**9

    def resource(service: str, own: int, parent: int, kind: int, start: int, duration: int) -> dict[str, object]:
        span = {
            "traceId": trace, "spanId": f"{own:016x}", "parentSpanId": f"{parent:016x}" if parent else "",
            "name": "GET /", "kind": kind, "startTimeUnixNano": str(begin + start * 1000),
            "endTimeUnixNano": str(begin + (start + duration) * 1000), "status": {},
        }  # fmt: skip
        name = {"key": "service.name", "value": {"stringValue": service}}
        return {"resource": {"attributes": [name]}, "scopeSpans": [{"spans": [span]}]}

    batches = [resource("shop", 1, 0, 2, 0, 50_000), resource("shop", 2, 1, 3, 5_000, 40_000)]
    batches.append(resource("pay", 3, 2, 2, 6_000, 38_000))
    return Reply({"batches": batches})


def fetched(config: CaptureConfig, service: str = "shop") -> Traces:
    async def run() -> Traces:
        return await fetch_traces(config, service, SPANS, asyncio.get_running_loop().time() + 5)

    return asyncio.run(run())


@pytest.mark.parametrize(("kind", "reply"), [(TracesKind.JAEGER, jaeger), (TracesKind.TEMPO, tempo)])
def test_spans_become_the_call_graph(kind: TracesKind, reply: object) -> None:
    with answering(reply) as server:  # type: ignore[arg-type]
        found = fetched(CaptureConfig("http://127.0.0.1:1", traces_url=server.url, traces_kind=kind, step_seconds=15))
    assert found.graph is not None
    assert found.spans is not None
    assert found.spans.num_rows == 60
    edges = found.graph.edges.to_pylist()
    assert [(edge["caller"], edge["callee"], edge["relation"]) for edge in edges] == [("shop", "pay", "calls")]
    assert found.source is not None
    assert (found.source.kind, found.source.status.value) == (kind.value, "ok")
    assert any("shop" in query for query in found.source.queries)


def test_a_service_that_the_store_does_not_know_is_looked_for_in_all_traces() -> None:
    with answering(jaeger) as server:
        found = fetched(CaptureConfig("http://127.0.0.1:1", traces_url=server.url), service="812")
    assert found.graph is not None


@pytest.mark.parametrize(
    ("reply", "status", "detail"),
    [
        (Reply(b"no", 500), "failed", "HTTP status 500"),
        (Reply(b"no", 401), "failed", "refused"),
        (Reply(b"<html>"), "failed", "not the answer of a trace store"),
        (Reply({"data": None}), "absent", "no trace"),
    ],
)
def test_what_a_store_does_not_give_is_said(reply: Reply, status: str, detail: str) -> None:
    with answering(lambda _: reply) as server:
        found = fetched(CaptureConfig("http://127.0.0.1:1", traces_url=server.url))
    assert found.graph is None
    assert found.source is not None
    assert found.source.status.value == status
    assert detail in found.source.detail


def test_traces_alone_make_an_incident_where_prometheus_is_away() -> None:
    onset = datetime.fromtimestamp(START, UTC)
    asked = CaptureRequest("inc-1", {"service": "shop"}, {}, onset, onset + timedelta(minutes=2))
    with answering(jaeger) as server:
        config = CaptureConfig(f"http://127.0.0.1:{free_port()}", traces_url=server.url, lead_seconds=60)
        incident = capture_from(config)(asked)
    status = {source.name: source.status.value for source in incident.header.sources}
    assert status["traces"] == "ok"
    assert status["call graph"] == "failed"
    assert incident.spans.num_rows


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="traces_url"):
        CaptureConfig("http://127.0.0.1:1", traces_url="tempo:3200")
