"""Spans to service graph: worked examples with the numbers done by hand, and an independent check on random traces."""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rca.errors import InvalidInputError, NotFoundError
from rca.incident import SPANS_SCHEMA, SourceStatus
from rca.telemetry import jaeger, otlp, spans_csv
from rca.telemetry.spans import ServiceGraph, service_graph, strip_pod_suffix

FIXTURES = Path(__file__).parent / "fixtures" / "import"
#: 2026-01-31T03:00:00Z, the start of a minute.
T0 = 1_769_828_400_000


def span(
    id: str,
    parent: str | None,
    service: str,
    start: float,
    end: float,
    *,
    kind: str | None = None,
    error: bool | None = False,
    trace: str = "t",
    name: str = "op",
    attributes: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A span; ``start`` and ``end`` are milliseconds after T0."""
    return {
        "trace_id": trace,
        "span_id": id,
        "parent_id": parent,
        "service": service,
        "operation": name,
        "kind": kind,
        "start": round((T0 + start) * 1_000_000),
        "duration_seconds": (end - start) / 1000,
        "error": error,
        "attributes": None if attributes is None else list(attributes.items()),
    }


def table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    arrays = {
        f.name: pa.array([row[f.name] for row in rows], pa.int64()).cast(f.type)
        if f.name == "start"
        else pa.array([row[f.name] for row in rows], f.type)
        for f in SPANS_SCHEMA
    }
    return pa.table(arrays, schema=SPANS_SCHEMA)


def graph(*rows: dict[str, Any], **options: Any) -> ServiceGraph:
    return service_graph(table(rows), **options)


def value(found: ServiceGraph, node: str, metric: str, peer: str | None = None) -> float | None:
    """The metric in the first bucket that has it, None where nobody measured it."""
    for row in found.metrics.to_pylist():
        if (row["node"], row["peer"], row["metric"]) == (node, peer, metric):
            return float(row["value"])
    return None


def edges(found: ServiceGraph) -> list[tuple[str, str]]:
    return list(zip(found.edges["caller"].to_pylist(), found.edges["callee"].to_pylist(), strict=True))


# --- the graph -----------------------------------------------------------------------------------------------------


def test_a_call_with_spans_on_both_sides() -> None:
    found = graph(
        span("1", None, "web", 0, 100, kind="server"),
        span("2", "1", "web", 10, 80, kind="client", attributes={"rpc.system": "grpc"}),
        span("3", "2", "cart", 15, 75, kind="server", error=True),
    )
    assert edges(found) == [("web", "cart")]
    assert value(found, "web", "latency_mean_seconds") == pytest.approx(0.100)
    assert value(found, "web", "self_time_mean_seconds") == pytest.approx(0.030)
    assert value(found, "cart", "self_time_mean_seconds") == pytest.approx(0.060)
    # As the caller saw it: its own span, and its own status.
    assert value(found, "web", "latency_mean_seconds", "cart") == pytest.approx(0.070)
    assert value(found, "web", "network_gap_mean_seconds", "cart") == pytest.approx(0.010)
    assert value(found, "web", "error_ratio", "cart") == 0.0
    assert value(found, "cart", "error_ratio") == 1.0
    edge = found.edges.to_pylist()[0]
    assert (edge["relation"], edge["protocol"], edge["asynchronous"]) == ("calls", "grpc", False)
    assert edge["latency_seconds"] == pytest.approx(0.070)
    assert (found.report.requests, found.report.calls, found.report.services) == (2, 1, 2)
    assert found.report.source("t", "otlp").status is SourceStatus.OK


def test_without_client_spans_the_callees_span_stands_in_and_the_gap_is_not_known() -> None:
    found = graph(span("1", None, "web", 0, 100, kind="server"), span("3", "1", "cart", 15, 75, kind="server"))
    assert value(found, "web", "latency_mean_seconds", "cart") == pytest.approx(0.060)
    assert value(found, "web", "network_gap_mean_seconds", "cart") is None
    assert value(found, "web", "self_time_mean_seconds") == pytest.approx(0.040)


def test_internal_spans_are_not_calls_and_count_as_the_services_own_time() -> None:
    found = graph(
        span("1", None, "web", 0, 100),
        span("2", "1", "web", 5, 95, name="handler"),
        span("3", "2", "web", 10, 50, name="HTTP GET"),
        span("4", "3", "cart", 12, 48),
        span("5", "2", "web", 60, 90, name="render"),
    )
    assert edges(found) == [("web", "cart")]
    assert found.report.requests == 2
    # Without kinds, a span that only wraps one call is that call's client span.
    assert value(found, "web", "self_time_mean_seconds") == pytest.approx(0.060)
    assert value(found, "web", "network_gap_mean_seconds", "cart") == pytest.approx(0.004)


def test_parallel_calls_are_not_subtracted_twice() -> None:
    found = graph(
        span("1", None, "web", 0, 100, kind="server"),
        span("2", "1", "a", 10, 60, kind="server"),
        span("3", "1", "b", 20, 50, kind="server"),
        span("4", "1", "c", 55, 80, kind="server"),
    )
    assert value(found, "web", "self_time_mean_seconds") == pytest.approx(0.030)


def test_children_are_clipped_to_their_parent() -> None:
    found = graph(span("1", None, "web", 0, 100), span("2", "1", "log", 90, 500))
    assert value(found, "web", "self_time_mean_seconds") == pytest.approx(0.090)


def test_asynchronous_calls_are_edges_that_nobody_waits_for() -> None:
    found = graph(
        span("1", None, "shop", 0, 50, kind="server"),
        span("2", "1", "shop", 40, 45, kind="producer", attributes={"messaging.system": "kafka"}),
        span("3", "2", "mail", 900, 2900, kind="consumer", error=True),
    )
    edge = found.edges.to_pylist()[0]
    assert (edge["caller"], edge["callee"], edge["protocol"], edge["asynchronous"]) == ("shop", "mail", "kafka", True)
    assert value(found, "shop", "latency_mean_seconds", "mail") == pytest.approx(0.005)
    assert value(found, "shop", "network_gap_mean_seconds", "mail") is None
    assert value(found, "shop", "self_time_mean_seconds") == pytest.approx(0.045)
    assert found.report.asynchronous == 1


def test_a_database_that_only_its_client_names_becomes_a_node() -> None:
    rows = (
        span("1", None, "cart", 0, 100, kind="server"),
        span(
            "2", "1", "cart", 10, 40, kind="client", error=True, attributes={"db.system": "redis", "peer.service": ""}
        ),
        span("3", "1", "cart", 50, 60, kind="client"),
    )
    found = graph(*rows)
    assert edges(found) == [("cart", "redis")]
    assert value(found, "cart", "error_ratio", "redis") == 1.0
    assert value(found, "cart", "self_time_mean_seconds") == pytest.approx(0.070)
    assert value(found, "redis", "request_rate") is None, "nobody measured it on its own side"
    assert (found.report.uninstrumented, found.report.unmatched_clients) == (1, 1)
    assert edges(graph(*rows, virtual_peers=False)) == []


def test_an_sdks_span_around_an_http_span_is_one_call() -> None:
    found = graph(
        span("1", None, "cart", 0, 100, kind="server"),
        span("2", "1", "cart", 10, 40, kind="client", attributes={"peer.service": "s3"}),
        span("3", "2", "cart", 12, 38, kind="client", attributes={"peer.service": "s3"}),
    )
    assert found.report.calls == 1


def test_a_load_generators_own_waiting_is_its_latency() -> None:
    found = graph(span("1", None, "users", 0, 100, kind="client"), span("2", "1", "web", 10, 90, kind="server"))
    assert value(found, "users", "latency_mean_seconds") == pytest.approx(0.100)
    # Of a service that also serves, background calls are no requests.
    found = graph(
        span("1", None, "web", 0, 100, kind="client"),
        span("2", None, "web", 0, 10, kind="server", trace="u"),
    )
    assert value(found, "web", "latency_mean_seconds") == pytest.approx(0.010)


def test_retries_are_counted() -> None:
    found = graph(
        span("1", None, "web", 0, 100, kind="server"),
        *(
            row
            for attempt in range(3)
            for row in (
                span(f"c{attempt}", "1", "web", 30 * attempt, 30 * attempt + 20, kind="client", error=attempt < 2),
                span(f"s{attempt}", f"c{attempt}", "cart", 30 * attempt + 5, 30 * attempt + 15, kind="server"),
            )
        ),
    )
    assert found.report.retries == 2
    assert found.report.calls == 3
    assert value(found, "web", "error_ratio", "cart") == pytest.approx(2 / 3)


def test_a_callee_that_outlives_a_timed_out_caller_is_no_negative_network_time() -> None:
    found = graph(
        span("1", None, "web", 0, 100, kind="server"),
        span("2", "1", "web", 10, 60, kind="client", error=True),
        span("3", "2", "cart", 12, 900, kind="server"),
    )
    assert value(found, "web", "network_gap_mean_seconds", "cart") is None
    assert found.report.abandoned == 1


# --- imperfect data ------------------------------------------------------------------------------------------------


def test_clock_skew_is_counted_and_does_not_distort_durations() -> None:
    found = graph(
        span("1", None, "web", 0, 100, kind="server"),
        span("2", "1", "cart", -500, -460, kind="server"),
    )
    assert value(found, "web", "self_time_mean_seconds") == pytest.approx(0.060)
    assert found.report.clock_skewed == 1
    assert found.report.max_clock_skew_seconds == pytest.approx(0.5)


def test_repeated_spans_count_once() -> None:
    one = span("1", None, "web", 0, 100)
    found = graph(one, one, {**one, "duration_seconds": 0.2})
    assert (found.report.duplicates, found.report.conflicting_duplicates) == (2, 2)
    assert value(found, "web", "latency_mean_seconds") == pytest.approx(0.2)
    assert graph(one, one).report.conflicting_duplicates == 0


def test_zipkins_shared_span_ids_are_two_spans() -> None:
    found = graph(
        span("1", None, "web", 0, 100, kind="server"),
        span("2", "1", "web", 10, 80, kind="client"),
        span("2", "1", "cart", 15, 75, kind="server"),
        span("3", "2", "cart", 20, 70, kind="client"),
        span("4", "3", "db", 25, 65, kind="server"),
    )
    assert edges(found) == [("cart", "db"), ("web", "cart")]
    assert value(found, "web", "network_gap_mean_seconds", "cart") == pytest.approx(0.010)
    assert found.report.duplicates == 0


def test_orphans_count_as_requests_only_where_their_role_is_known() -> None:
    rows = [
        span("1", None, "web", 0, 100),
        span("2", "1", "cart", 10, 50, name="/items"),
        span("3", "lost", "cart", 200, 230, name="/items", trace="u"),
        span("4", "lost", "cart", 200, 204, name="SELECT", trace="v"),
        span("5", "lost", "cart", 200, 260, name="POST", kind="server", trace="w"),
    ]
    found = graph(*rows)
    assert (found.report.orphans, found.report.ambiguous_orphans) == (3, 1)
    assert value(found, "cart", "latency_mean_seconds") == pytest.approx((0.040 + 0.030 + 0.060) / 3)
    assert found.report.source("t", "otlp").status is SourceStatus.PARTIAL


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_cycles_of_parents_are_cut_at_the_earliest_span(length: int) -> None:
    ring = [span(str(n), str((n + 1) % length), f"s{n}", 10 * n, 100) for n in range(length)]
    found = graph(*ring, span("leaf", "0", "leaf", 0, 1))
    assert found.report.cycles == 1
    # s0 began first: it lost its parent, the others kept theirs.
    assert edges(found) == sorted([(f"s{(n + 1) % length}", f"s{n}") for n in range(1, length)] + [("s0", "leaf")])


def test_spans_without_a_service_belong_to_the_one_above() -> None:
    found = graph(
        span("1", None, "web", 0, 100, kind="server"),
        span("2", "1", " ", 5, 95),
        span("3", "2", "", 8, 90),
        span("4", "3", "cart", 10, 60, kind="server"),
        span("5", None, "", 0, 100, trace="u"),
    )
    assert edges(found) == [("web", "cart")]
    assert found.report.unnamed == 3


@pytest.mark.parametrize("duration", [-0.1, float("nan"), float("inf"), 1e12])
def test_impossible_durations_are_dropped_and_counted(duration: float) -> None:
    found = graph(span("1", None, "web", 0, 100), {**span("2", "1", "cart", 0, 1), "duration_seconds": duration})
    assert found.report.invalid_durations == 1
    assert edges(found) == []


def test_an_unknown_status_is_not_a_success() -> None:
    found = graph(span("1", None, "web", 0, 100, error=None), span("2", "1", "cart", 0, 50, error=None))
    assert value(found, "web", "error_ratio") is None
    assert value(found, "web", "error_ratio", "cart") is None
    assert found.edges["error_ratio"].to_pylist() == [None]
    assert found.report.without_status == 2


def test_no_usable_span_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match="no usable span"):
        graph(span("1", None, "", 0, 100))
    with pytest.raises(InvalidInputError, match="not positive"):
        graph(span("1", None, "web", 0, 100), step_seconds=0)


def test_pod_names() -> None:
    assert [
        strip_pod_suffix(name) for name in ("api-6f6cfc45b-d9pnv", "db-0", "job-28372980-abcde", "agent-x7k2p")
    ] == [
        "api",
        "db",
        "job-28372980-abcde",  # `a` and `e` never occur in generated names
        "agent",
    ]
    for name in ("front-https", "service-v2", "frontend", "ts-travel2-service"):
        assert strip_pod_suffix(name) == name
    found = graph(
        span("1", None, "web-6f6cfc45b-d9pnv", 0, 100),
        span("2", None, "web-6f6cfc45b-x7k2p", 0, 100, trace="u"),
        service_from_pod=True,
    )
    assert set(found.metrics["node"].to_pylist()) == {"web"}
    assert value(found, "web", "request_rate") == pytest.approx(2 / 60)


# --- time series ---------------------------------------------------------------------------------------------------


def test_buckets_are_aligned_and_a_span_counts_where_it_ended() -> None:
    found = graph(
        span("1", None, "web", 0, 1_000, trace="a"),
        span("1", None, "web", 59_000, 61_000, trace="b"),
    )
    rows = [row for row in found.metrics.to_pylist() if row["metric"] == "latency_mean_seconds"]
    assert [(row["timestamp"].minute, row["value"]) for row in rows] == [(0, 1.0), (1, 2.0)]
    assert rows[0]["timestamp"] == datetime(2026, 1, 31, 3, 0, tzinfo=UTC)


def test_silence_is_zero_requests_where_others_were_seen_and_nothing_where_nobody_was() -> None:
    minutes = [0, 1, 2, 5]
    rows = [span("1", None, "web", 60_000 * m, 60_000 * m + 30_000, trace=f"w{m}") for m in minutes]
    rows.append(span("1", None, "cart", 60_000, 70_000, trace="c"))
    found = graph(*rows)
    rates = {
        (row["node"], row["timestamp"].minute): row["value"]
        for row in found.metrics.to_pylist()
        if row["metric"] == "request_rate"
    }
    # The first bucket has data from its second half only, the last up to its middle: both count for that part.
    assert rates == {
        ("web", 0): pytest.approx(1 / 30),
        ("web", 1): pytest.approx(1 / 60),
        ("web", 2): pytest.approx(1 / 60),
        ("web", 5): pytest.approx(1 / 30),
        ("cart", 0): 0.0,
        ("cart", 1): pytest.approx(1 / 60),
        ("cart", 2): 0.0,
        ("cart", 5): 0.0,
    }
    latencies = [row for row in found.metrics.to_pylist() if row["metric"] == "latency_mean_seconds"]
    assert [row["node"] for row in latencies] == ["cart", "web", "web", "web", "web"]


def test_a_capture_cut_short_is_no_drop_in_traffic() -> None:
    ends = np.arange(0, 130_000, 1_000)  # one request a second for 2 min 10 s
    found = graph(*(span("1", None, "web", end - 10, end, trace=str(end)) for end in ends))
    rates = [row["value"] for row in found.metrics.to_pylist() if row["metric"] == "request_rate"]
    assert rates == pytest.approx([1.0, 1.0], rel=0.02), "the last 10 s are too little to tell a rate"


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_quantiles_are_those_of_numpy(count: int) -> None:
    durations = np.random.default_rng(count).lognormal(3, 1, count).round(3)
    found = graph(*(span("1", None, "web", 0, float(ms), trace=str(n)) for n, ms in enumerate(durations)))
    for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        assert value(found, "web", f"latency_{name}_seconds") == pytest.approx(np.quantile(durations, quantile) / 1000)


_tree = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 3), st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=25
)


@settings(max_examples=200, deadline=None)
@given(_tree)
def test_self_time_agrees_with_a_millisecond_by_millisecond_count(tree: list[tuple[int, int, int, int]]) -> None:
    """Mark every millisecond in which an entry had a call under way, and count the others."""
    rows: list[dict[str, Any]] = []
    kept: list[tuple[int, int, int, int]] = []  # parent, service, start, end
    for number, (above, service, first, length) in enumerate(tree):
        parent = above % number if number else -1
        start = first if parent < 0 else max(first, kept[parent][2])
        if parent >= 0 and start >= kept[parent][3] > kept[parent][2]:
            start = kept[parent][2]  # later than its parent would make it asynchronous
        kept.append((parent, service, start, start + length))
        rows.append(
            span(
                str(number), None if parent < 0 else str(parent), f"s{service}", start, start + length, kind="internal"
            )
        )
    found = graph(*rows, step_seconds=3600)
    own: dict[int, list[float]] = {}
    for number, (parent, service, start, end) in enumerate(kept):
        if parent >= 0 and kept[parent][1] == service:
            continue
        busy = np.zeros(max(end - start, 0), bool)
        for other, (above, callee, begin, finish) in enumerate(kept):
            top = above
            while top >= 0 and kept[top][0] >= 0 and kept[kept[top][0]][1] == kept[top][1]:
                top = kept[top][0]
            waited = above >= 0 and not (begin >= kept[above][3] > kept[above][2])
            if other and waited and callee != kept[above][1] and top == number:
                busy[max(begin - start, 0) : max(finish - start, 0)] = True
        own.setdefault(service, []).append(float((~busy).sum()))
    for service, times in own.items():
        assert value(found, f"s{service}", "self_time_mean_seconds") == pytest.approx(np.mean(times) / 1000, abs=1e-9)


def test_the_order_of_the_input_does_not_matter() -> None:
    spans, _ = otlp.read_spans(FIXTURES / "otlp.jsonl")
    order = np.random.default_rng(7).permutation(spans.num_rows)
    one, other = service_graph(spans), service_graph(spans.take(pa.array(order)))
    assert one.metrics.equals(other.metrics)
    assert one.edges.equals(other.edges)
    assert one.report == other.report


def test_a_hundred_thousand_spans_take_seconds() -> None:
    count, width = 100_000, 10
    number = np.arange(count)
    start = T0 * 1_000_000 + (number // width) * 5_000_000 + (number % width) * 100_000
    spans = pa.table(
        {
            "trace_id": pa.array([f"{n // width:032x}" for n in number]),
            "span_id": pa.array([f"{n:016x}" for n in number]),
            "parent_id": pa.array([None if n % width == 0 else f"{n - 1:016x}" for n in number]),
            "service": pa.array([f"s{n % width // 2}" for n in number]),
            "kind": pa.array([("server", "client")[n % 2] for n in number]),
            "start": pa.array(start).cast(pa.timestamp("ns", tz="UTC")),
            "duration_seconds": pa.array((width - number % width) / 1000),
            "error": pa.array(number % 97 == 0),
        }
    )
    before = time.process_time()
    found = service_graph(spans, 10)
    assert time.process_time() - before < 2
    assert found.report.calls == count // width * (width // 2 - 1)


# --- OTLP ----------------------------------------------------------------------------------------------------------


def test_otlp_from_the_collectors_file_exporter() -> None:
    spans, notes = otlp.read_spans(FIXTURES / "otlp.jsonl")
    assert (spans.num_rows, notes) == (16, ())
    first = spans.to_pylist()[0]
    assert (first["service"], first["kind"], first["parent_id"], first["error"]) == ("frontend", "server", None, False)
    assert dict(first["attributes"])["http.response.status_code"] == "200"
    assert dict(spans.to_pylist()[2]["attributes"])["tags"] == '["a",1]'
    assert dict(spans.to_pylist()[2]["attributes"])["deep"] == '{"ok":true}'
    found = service_graph(spans)
    assert edges(found) == [("cart", "redis"), ("frontend", "cart")]
    assert value(found, "frontend", "error_ratio") == 0.25
    assert value(found, "frontend", "network_gap_mean_seconds", "cart") == pytest.approx(0.010)
    assert value(found, "cart", "self_time_mean_seconds") == pytest.approx(0.040)


def otlp_file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "traces.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_otlp_in_one_document_gzipped_with_base64_ids_and_plain_numbers(tmp_path: Path) -> None:
    lines = (FIXTURES / "otlp.jsonl").read_text().splitlines()
    merged = {"resourceSpans": [item for line in lines for item in json.loads(line)["resourceSpans"]]}
    for resource in merged["resourceSpans"]:
        for one in resource["scopeSpans"][0]["spans"]:
            for key in ("traceId", "spanId", "parentSpanId"):
                one[key] = base64.b64encode(bytes.fromhex(one[key])).decode()
            for key in ("startTimeUnixNano", "endTimeUnixNano"):
                one[key] = int(one[key])
    path = otlp_file(tmp_path, gzip.compress(json.dumps(merged, indent=2).encode()))
    assert otlp.read_spans(path)[0].equals(otlp.read_spans(FIXTURES / "otlp.jsonl")[0])


def test_otlp_nodes_can_be_pods(tmp_path: Path) -> None:
    spans, _ = otlp.read_spans(FIXTURES / "otlp.jsonl", service_attribute="k8s.pod.name")
    assert edges(service_graph(spans, service_from_pod=True)) == [("cart", "redis"), ("frontend", "cart")]
    assert edges(service_graph(spans))[1] == ("frontend-6f6cfc45b-d9pnv", "cart-7d97b69596-gfnbr")


def test_unfinished_spans_and_other_signals_are_left_out_and_said(tmp_path: Path) -> None:
    line = json.loads((FIXTURES / "otlp.jsonl").read_text().splitlines()[0])
    line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["endTimeUnixNano"] = "0"
    path = otlp_file(tmp_path, json.dumps(line) + '\n\n{"resourceMetrics":[]}\n')
    spans, notes = otlp.read_spans(path)
    assert spans.num_rows == 3
    assert notes == ("1 unfinished spans left out", "1 requests with metrics or logs left out")


SPAN = {
    "traceId": "1" * 32,
    "spanId": "2" * 16,
    "startTimeUnixNano": "1769828400000000000",
    "endTimeUnixNano": "1769828401000000000",
}


def request(**changes: Any) -> str:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{**SPAN, **changes}]}]}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "Input data was truncated"),
        ("hello", "malformed"),
        ("{}", "has no resourceSpans"),
        ('{"resourceSpans":[]}', "holds no finished span"),
        ('{"resource_spans":[]}', "protobuf field names"),
        ('{"data":[]}', "looks like Jaeger JSON"),
        (
            request() + "\n" + request(traceId=7),
            r"line 2: Expected `str`, got `int` - at `\$\.resourceSpans\[0\]\.scopeSpans\[0\]\.spans\[0\]\.traceId`",
        ),
        (request(spanId="xyz"), r"in `\$\.resourceSpans\[0\]\.scopeSpans\[0\]\.spans\[0\]`: spanId 'xyz' is neither"),
        (request(spanId="0" * 16), "traceId or spanId is empty or zero"),
        (request(startTimeUnixNano="soon"), "startTimeUnixNano 'soon' is not a whole number"),
        (request(startTimeUnixNano=0), "startTimeUnixNano 0 is not a time"),
        (request() + "\n" + request()[:-5], "line 2: Input data was truncated"),
    ],
)
def test_wrong_otlp_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        otlp.read_spans(otlp_file(tmp_path, text))
    assert "traces.json" in str(caught.value)
    assert caught.value.cure


def test_a_truncated_gzip_is_explained(tmp_path: Path) -> None:
    packed = gzip.compress((FIXTURES / "otlp.jsonl").read_bytes())
    with pytest.raises(InvalidInputError, match="damaged or truncated gzip"):
        otlp.read_spans(otlp_file(tmp_path, packed[: len(packed) // 2]))
    with pytest.raises(NotFoundError):
        otlp.read_spans(tmp_path / "absent")


# --- Jaeger --------------------------------------------------------------------------------------------------------


def test_jaeger_gives_the_same_graph_as_otlp() -> None:
    spans, notes = jaeger.read_spans(FIXTURES / "jaeger.json")
    assert (spans.num_rows, notes) == (8, ())
    found = service_graph(spans)
    assert edges(found) == [("cart", "redis"), ("frontend", "cart")]
    assert value(found, "frontend", "error_ratio") == 0.5
    assert value(found, "cart", "self_time_mean_seconds") == pytest.approx(0.040)
    by_pod, _ = jaeger.read_spans(FIXTURES / "jaeger.json", service_attribute="hostname")
    assert set(by_pod["service"].to_pylist()) == {"frontend-6f6cfc45b-d9pnv", "cart-7d97b69596-gfnbr"}


def test_jaeger_one_trace_a_line_or_in_a_list(tmp_path: Path) -> None:
    traces = json.loads((FIXTURES / "jaeger.json").read_text())["data"]
    expected = jaeger.read_spans(FIXTURES / "jaeger.json")[0]
    for text in ("\n".join(json.dumps(trace) for trace in traces), json.dumps(traces), json.dumps(traces, indent=1)):
        assert jaeger.read_spans(otlp_file(tmp_path, text))[0].equals(expected)


def test_jaeger_follows_from_is_asynchronous(tmp_path: Path) -> None:
    base = {"traceID": "1", "startTime": 1769828400000000, "duration": 1000, "operationName": "x"}
    trace = {
        "traceID": "1",
        "processes": {"a": {"serviceName": "shop"}, "b": {"serviceName": "mail"}},
        "spans": [
            {**base, "spanID": "1", "processID": "a"},
            {
                **base,
                "spanID": "2",
                "processID": "b",
                "references": [
                    {"refType": "FOLLOWS_FROM", "traceID": "1", "spanID": "1"},
                    {"refType": "CHILD_OF", "traceID": "other", "spanID": "9"},
                ],
            },
        ],
    }
    spans, notes = jaeger.read_spans(otlp_file(tmp_path, json.dumps(trace)))
    found = service_graph(spans)
    assert found.edges["asynchronous"].to_pylist() == [True]
    assert value(found, "shop", "self_time_mean_seconds") == pytest.approx(0.001)
    assert notes == ("1 references to other traces not followed",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"data":[]}', "holds no span"),
        ('{"resourceSpans":[]}', "looks like OTLP JSON"),
        ('{"a":1}', "neither data nor spans"),
        (
            '{"data":[{"traceID":"1","spans":[{"spanID":"1"}]}]}',
            r"missing required field `startTime` - at `\$\.data\[0\]\.spans\[0\]`",
        ),
        (
            '{"data":[{"traceID":"1","spans":[{"spanID":"1","startTime":1769828400000000,"duration":1,"processID":"p"}]}]}',
            r"`\$\.data\[0\]\.spans\[0\]`: processID 'p' is not among",
        ),
        ('{"data":[{"traceID":"1","spans":[{"spanID":"1","startTime":0,"duration":1}]}]}', "startTime 0 is not a time"),
        ("[1]", r"Expected `object`, got `int` - at `\$\[0\]`"),
        ("7", "Expected `object`, got `int`"),
    ],
)
def test_wrong_jaeger_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        jaeger.read_spans(otlp_file(tmp_path, text))


# --- CSV -----------------------------------------------------------------------------------------------------------


def test_spans_csv() -> None:
    spans, notes = spans_csv.read_spans(FIXTURES / "spans.csv")
    assert notes == ("no error column, so error ratios are not known",)
    found = service_graph(spans, service_from_pod=True)
    assert edges(found) == [("gateway", "cart")]
    assert found.report.requests == 3
    assert value(found, "gateway", "network_gap_mean_seconds", "cart") == pytest.approx(0.020)
    assert value(found, "gateway", "error_ratio") is None


def test_spans_csv_with_duration_kind_and_error(tmp_path: Path) -> None:
    path = tmp_path / "spans.csv"
    path.write_text(
        "trace_id,span_id,parent_id,service,start_time,duration_ms,kind,error\n"
        "t,1,,web,2026-01-31 03:00:00,100,SPAN_KIND_SERVER,true\n"
        "t,2,1,cart,2026-01-31 03:00:00.01,,server,\n"
    )
    spans, notes = spans_csv.read_spans(path)
    assert notes == ()
    assert spans["kind"].to_pylist() == ["server", "server"]
    assert spans["error"].to_pylist() == [True, None]
    found = service_graph(spans)
    assert value(found, "web", "latency_mean_seconds") == pytest.approx(0.1)
    assert found.report.invalid_durations == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trace_id,span_id,service,start\n", "has no parent column"),
        ("trace_id,span_id,parent_id,service,start,duration\nt,1,,web,1769828400,5\n", "nor a duration with its unit"),
        (
            "trace_id,span_id,parent_id,service,start,end\nt,,,web,1769828400,1769828401\n",
            "line 2, column 'span_id' is empty",
        ),
        ("trace_id,span_id,parent_id,service,start,end\nt,1,,web,1769828400,late\n", "line 2, column 'end': 'late'"),
    ],
)
def test_wrong_spans_csv_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "spans.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        spans_csv.read_spans(path)
