"""Captures from a real Prometheus that holds a made-up past."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow.compute as pc
import pytest

from rca.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from rca.explain import explain
from rca.explanation import Verdict
from rca.incident import Incident, Window
from rca.report import Format, render
from rca.telemetry.prometheus import CaptureConfig, calls, capture_from, cluster
from rca.telemetry.prometheus.ask import Inquiry, Span
from rca.telemetry.prometheus.client import Client
from rca.telemetry.request import CaptureRequest
from tests.support.answering import Reply, Request, answering
from tests.support.history import History, past_prometheus
from tests.support.services import free_port

pytestmark = pytest.mark.services

STEP = 15.0
#: The incident was some days ago, so that a slow test machine does not move it. On the grid of the steps.
ONSET = float(int(time.time() - 3 * 86_400) // 60 * 60)
HOUR = 3600.0
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WAITED = ONSET - 30.0


def after(low: float, high: float, at: float = ONSET) -> Callable[[float], float]:
    return lambda t: high if t >= at else low


def write_services(past: History) -> None:
    """``user -> gateway -> llm -> store`` as the service graph connector says it; llm slows down."""
    for client, server, low, high, rate in (
        ("user", "gateway", 0.10, 1.3, 20.0), ("gateway", "llm", 0.08, 1.2, 20.0), ("llm", "store", 0.01, 0.01, 40.0),
    ):  # fmt: skip
        labels = {"client": client, "server": server, "connection_type": "virtual_node" if client == "user" else ""}

        def load(t: float, rate: float = rate) -> float:
            # The day before was busier; a week before was alike.
            return (
                rate
                * (3.0 if ONSET - 86_400 - 2 * HOUR < t < ONSET - 86_400 + 2 * HOUR else 1.0)
                * (1.0 + 0.05 * np.sin(t / 47.0))
            )

        past.counter("traces_service_graph_request_total", labels, load)
        past.counter(
            "traces_service_graph_request_failed_total", labels,
            lambda t, load=load, client=client: load(t) * (0.02 if client == "gateway" and t >= ONSET else 0.0),
        )  # fmt: skip
        for side, more in (("server", 0.0), ("client", 0.002)):
            past.histogram(
                f"traces_service_graph_request_{side}_seconds", labels, load,
                lambda t, low=low, high=high, more=more: more + (high if t >= ONSET else low), BOUNDS,
            )  # fmt: skip


def write_scheduler(past: History) -> None:
    """Job 812, of no urgency, has the GPUs; 77, urgent, waits for it since `WAITED`."""
    live = after(0.0, 1.0, WAITED)
    past.gauge("prioscope_source_up", {"source": "slurm"}, lambda _: 1.0)
    urgent = {"cluster": "c1", "queue": "urgent", "priority_level": "P0"}
    past.gauge("priority_workloads", {**urgent, "state": "pending"}, live)
    past.gauge(
        "priority_workloads", {**urgent, "queue": "batch", "priority_level": "P3", "state": "running"}, lambda _: 1.0
    )
    waits = {**urgent, "workload": "77", "service": "llm"}
    past.gauge("priority_workload_waiting_seconds", waits, lambda t: t - WAITED if t >= WAITED else None)
    past.gauge("priority_workload_oldest_wait_seconds", urgent, lambda t: t - WAITED if t >= WAITED else None)
    victim = {"cluster": "c1", "workload": "77", "service": "llm", "priority_level": "P0"}
    past.gauge(
        "priority_violation_active_seconds", {**victim, "violation_type": "inversion", "basis": "started"},
        lambda t: t - ONSET if t >= ONSET else None,
    )  # fmt: skip
    blame = {**victim, "culprit": "812", "culprit_service": "train", "culprit_priority_level": "P3", "basis": "started"}
    past.gauge("priority_violation_culprit_gpu_seconds", blame, lambda t: 2.0 * (t - WAITED) if t >= ONSET else None)


def write_gpus(past: History) -> None:
    """Two GPUs of our exporter with 812 on them, and one that only DCGM knows, with a pod of llm."""
    for index in ("0", "1"):
        gpu = {"node": "n1", "gpu": index, "uuid": f"GPU-{index}"}
        past.gauge("gpu_utilization_ratio", gpu, after(0.1, 0.97, WAITED - 30))
        past.gauge("gpu_memory_total_bytes", gpu, lambda _: 80e9)
        past.gauge("gpu_memory_used_bytes", gpu, after(10e9, 70e9, WAITED - 30))
        past.gauge("gpu_fragmentation_ratio", {**gpu, "scope": "allocator"}, lambda _: 0.2)
        past.gauge("gpu_info", {**gpu, "model": "H100"}, lambda _: 1.0)
        past.gauge(
            "gpu_process_memory_bytes",
            {**gpu, "pid": "9", "process": "python", "workload": "", "namespace": "", "pod": "", "slurm_job": "812"},
            lambda t: 60e9 if t >= WAITED - 30 else None,
        )
    dcgm = {"Hostname": "n2", "gpu": "0", "UUID": "GPU-9", "modelName": "A100", "exported_namespace": "prod"}
    dcgm["exported_pod"] = "llm-6f6cfc45b-d9pnv"
    past.gauge("DCGM_FI_DEV_GPU_UTIL", dcgm, lambda _: 40.0)
    past.gauge("DCGM_FI_DEV_FB_USED", dcgm, lambda _: 10_240.0)
    past.gauge("DCGM_FI_DEV_FB_FREE", dcgm, lambda _: 30_720.0)
    past.gauge("kube_pod_info", {"namespace": "prod", "pod": "llm-6f6cfc45b-d9pnv", "node": "n2"}, lambda _: 1.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    day = 86_400.0
    spans = [(ONSET - back - 2 * HOUR, ONSET - back + 0.5 * HOUR) for back in (7 * day, day, 0.0)]
    past = History(spans)
    write_services(past)
    write_scheduler(past)
    write_gpus(past)
    with past_prometheus(past) as found:
        yield found


@pytest.fixture
def config(url: str) -> CaptureConfig:
    return CaptureConfig(url)


def request(
    annotations: dict[str, str] | None = None, /, busy: tuple[Window, ...] = (), **labels: str
) -> CaptureRequest:
    onset = datetime.fromtimestamp(ONSET, UTC)
    return CaptureRequest(
        "inc-1", {"alertname": "Test", **labels}, annotations or {}, onset, onset + timedelta(minutes=15), busy
    )


def value(incident: Incident, node: str, metric: str, span: Window, peer: str | None = None) -> float:
    """Mean of one series in ``span``."""
    table = incident.metrics
    mine = pc.and_(pc.equal(table["node"], node), pc.equal(table["metric"], metric))
    mine = pc.and_(mine, table["peer"].is_null() if peer is None else pc.equal(table["peer"], peer))
    rows = table.filter(mine)
    stamps = rows["timestamp"].to_pylist()
    found = [v for t, v in zip(stamps, rows["value"].to_pylist(), strict=True) if span.start <= t < span.end]
    assert found, (node, metric, peer)
    return float(np.mean(found))


def test_a_slow_service_is_captured_with_its_calls_queues_and_gpus(config: CaptureConfig) -> None:
    incident = capture_from(config)(request(service="gateway", cluster="c1"))
    header = incident.header
    assert (header.victim.node, header.victim.metric) == ("gateway", "latency_mean_seconds")
    assert header.labels["scheduler"] == "slurm"
    edges = {(row["caller"], row["callee"], row["relation"]): row for row in incident.edges.to_pylist()}
    assert {key for key in edges if key[2] == "calls"} == {("gateway", "llm", "calls"), ("llm", "store", "calls")}
    assert ("77", "812", "queued_behind") in edges
    assert ("llm", "77", "queued_behind") in edges
    assert edges["gateway", "llm", "calls"]["call_rate"] == pytest.approx(20.0, rel=0.05)
    assert edges["gateway", "llm", "calls"]["latency_seconds"] == pytest.approx(0.082, rel=0.01)
    late = Window(datetime.fromtimestamp(ONSET + 120, UTC), header.window.end)
    assert value(incident, "gateway", "latency_mean_seconds", header.baseline) == pytest.approx(0.1, rel=0.01)
    assert value(incident, "gateway", "latency_mean_seconds", late) == pytest.approx(1.3, rel=0.01)
    assert value(incident, "gateway", "latency_mean_seconds", late, peer="llm") == pytest.approx(1.202, rel=0.01)
    assert value(incident, "gateway", "network_gap_mean_seconds", late, peer="llm") == pytest.approx(0.002, abs=1e-4)
    assert value(incident, "gateway", "error_ratio", late, peer="llm") == pytest.approx(0.02, rel=0.01)
    assert value(incident, "store", "error_ratio", late) == 0.0
    # Of an exponential distribution, within the width of its bucket.
    assert 2.5 < value(incident, "gateway", "latency_p95_seconds", late) < 5.0
    assert value(incident, "n1/gpu-0", "gpu_utilization_ratio", late) == pytest.approx(0.97)
    assert value(incident, "n2/gpu-0", "gpu_memory_utilization_ratio", late) == pytest.approx(0.25)
    workloads = {row["workload"]: row for row in incident.workloads.to_pylist()}
    assert workloads["77"]["state"] == "pending"
    assert workloads["77"]["submitted"] == datetime.fromtimestamp(WAITED, UTC)
    assert (workloads["812"]["state"], workloads["812"]["priority_rank"], workloads["812"]["gpus"]) == (
        "running",
        3,
        2.0,
    )
    assert workloads["812"]["devices"] == ["n1/gpu-0", "n1/gpu-1"]
    # A pod that serves is its service's node.
    assert workloads["prod/llm-6f6cfc45b-d9pnv"]["service"] == "llm"
    assert ("llm", "n2", "runs_on") in edges
    devices = {row["device"]: row for row in incident.devices.to_pylist()}
    assert devices["n1/gpu-1"]["model"] == "H100"
    assert devices["n2/gpu-0"]["memory_free_bytes"] == 30_720 * 1024**2
    assert {source.status.value for source in header.sources} == {"ok"}


def test_the_job_in_the_way_is_named_with_the_queries_that_showed_it(config: CaptureConfig) -> None:
    incident = capture_from(config)(request(workload="77", cluster="c1", service="llm"))
    assert (incident.header.victim.node, incident.header.victim.metric) == ("77", "queue_wait_seconds")
    # The wait began before the alert, and its baseline is what such jobs waited before: nothing.
    assert incident.header.onset == datetime.fromtimestamp(WAITED, UTC)
    assert value(incident, "77", "queue_wait_seconds", incident.header.baseline) == 0.0
    answer = explain(incident)
    assert answer.verdict is Verdict.EXPLAINED
    assert (answer.causes[0].node, answer.causes[0].mechanism) == ("812", "GPU contention")
    assert "(basis: started)" in answer.causes[0].summary
    assert answer.policy is not None
    assert answer.policy.violated
    asked = [query for source in answer.sources for query in source.queries]
    assert any("priority_violation_culprit_gpu_seconds" in query for query in asked)
    for format in (Format.MARKDOWN, Format.HTML):
        assert "priority_violation_culprit_gpu_seconds" in render(answer, format)


def test_users_wait_because_a_job_waits(config: CaptureConfig) -> None:
    answer = explain(capture_from(config)(request(service="gateway", cluster="c1")))
    assert answer.causes[0].node == "812"
    assert answer.path is not None
    assert [hop.source for hop in answer.path.hops] == ["812", "77", "llm"]


def test_the_baseline_has_the_load_of_the_incident(config: CaptureConfig) -> None:
    def baseline(*busy: tuple[float, float]) -> tuple[Window, str]:
        windows = tuple(Window(datetime.fromtimestamp(a, UTC), datetime.fromtimestamp(b, UTC)) for a, b in busy)
        header = capture_from(config)(request(service="gateway", busy=windows)).header
        (load,) = [source for source in header.sources if "load" in source.name]
        return header.baseline, load.detail

    span, why = baseline()
    assert datetime.fromtimestamp(ONSET - 500, UTC) < span.end < datetime.fromtimestamp(ONSET - 300, UTC)
    assert "the time just before the window" in why
    # Another incident just before: the stretch before that one.
    span, why = baseline((ONSET - 1800, ONSET - 300))
    assert span.end <= datetime.fromtimestamp(ONSET - 1800, UTC)
    assert "the last quiet stretch" in why
    # All of the day is taken: a week before the load was the same, yesterday it was three times as high.
    span, why = baseline((ONSET - 40 * HOUR / 24 - 12 * HOUR, ONSET - 300))
    assert datetime.fromtimestamp(ONSET - 7 * 86_400 - HOUR, UTC) <= span.start
    assert span.end <= datetime.fromtimestamp(ONSET - 6.9 * 86_400, UTC)
    assert "a week before" in why
    assert re.search(r"the day before: (19\d|20\d)%", why)


@pytest.mark.parametrize(
    ("given", "victim", "metric"),
    [
        (request({"rca_victim": "store", "rca_metric": "latency_p95_seconds"}), "store", "latency_p95_seconds"),
        (request(service="llm", alertname="HighErrorRate"), "llm", "error_ratio"),
        (request(priority_level="P0", queue="urgent"), "77", "queue_wait_seconds"),
        (request(violation_type="inversion", priority_level="P0"), "77", "queue_wait_seconds"),
        (request(node="n1", gpu="0", uuid="GPU-0"), "n1/gpu-0", "gpu_fragmentation_ratio"),
    ],
    ids=["annotations", "errors", "queue", "violation", "GPU"],
)
def test_the_alert_says_who_suffers(config: CaptureConfig, given: CaptureRequest, victim: str, metric: str) -> None:
    header = capture_from(config)(given).header
    assert (header.victim.node, header.victim.metric) == (victim, metric)


def test_an_alert_about_nobody_is_refused(config: CaptureConfig) -> None:
    with pytest.raises(InvalidInputError, match=r"names no victim .*alertname=Test"):
        capture_from(config)(request())


def test_a_service_that_nobody_measured_is_not_found(config: CaptureConfig) -> None:
    with pytest.raises(NotFoundError, match="gatewya") as error:
        capture_from(config)(request(service="gatewya"))
    assert "gateway" in error.value.cure


def test_nobody_there_can_be_tried_again() -> None:
    with pytest.raises(SourceUnreachableError, match="gave nothing"):
        capture_from(CaptureConfig(f"http://127.0.0.1:{free_port()}"))(request(service="gateway"))


def test_when_the_budget_ends_what_is_missing_is_said(config: CaptureConfig) -> None:
    incident = capture_from(replace(config, query_budget=14, concurrency=1))(request(service="gateway"))
    missing = {item.what: item.why for item in explain(incident).not_checked}
    assert "the budget of 14 requests is spent" in missing["scheduler (prometheus)"]


def test_a_mesh_tells_the_same_in_its_own_words() -> None:
    past = History([(ONSET - 2 * HOUR, ONSET + 0.5 * HOUR)])
    for source, target, low, high in (("unknown", "shop", 100.0, 900.0), ("shop", "pay", 60.0, 850.0)):
        pair = {"source_canonical_service": source, "destination_canonical_service": target}
        for reporter, more in (("destination", 0.0), ("source", 5.0)):
            labels = {**pair, "reporter": reporter, "request_protocol": "http"}
            past.counter("istio_requests_total", {**labels, "response_code": "200"}, lambda _: 9.0)
            past.counter("istio_requests_total", {**labels, "response_code": "503"}, after(0.0, 1.0))
            past.histogram(
                "istio_request_duration_milliseconds", labels, after(9.0, 10.0),
                lambda t, low=low, high=high, more=more: more + (high if t >= ONSET else low),
                tuple(1000 * bound for bound in BOUNDS),
            )  # fmt: skip
    with past_prometheus(past) as url:
        incident = capture_from(CaptureConfig(url))(request(service="shop"))
    late = Window(datetime.fromtimestamp(ONSET + 120, UTC), incident.header.window.end)
    assert incident.edges.select(["caller", "callee", "protocol"]).to_pylist() == [
        {"caller": "shop", "callee": "pay", "protocol": "http"}
    ]
    assert value(incident, "shop", "latency_mean_seconds", late) == pytest.approx(0.9, rel=0.01)
    assert value(incident, "shop", "error_ratio", late) == pytest.approx(0.1, rel=0.01)
    assert value(incident, "shop", "network_gap_mean_seconds", late, peer="pay") == pytest.approx(0.005, rel=0.05)
    missing = {source.name: source.detail for source in incident.header.sources if source.status.value == "absent"}
    assert "waiting jobs" in missing["scheduler"]
    assert "GPUs" in missing


def test_every_query_is_one_that_prometheus_understands(url: str) -> None:
    """Also those for native histograms, of which this Prometheus has none."""
    config = CaptureConfig(url, matchers='job="x"', step_seconds=0.5)
    spoken = calls.service_graph(config)
    native = frozenset({spoken.total, *spoken.failed, spoken.served, spoken.called})
    planned = [
        *calls.queries(spoken, config, native),
        *calls.queries(spoken, config, None),
        *calls.queries(calls.ISTIO, config, None),
        calls.profile_query(calls.ISTIO, config, 15.0),
        *cluster.scheduler_queries(config, None),
        *cluster.device_queries(config, None),
        *cluster.pod_queries(config, None, ["a.b", 'c"d']),
    ]
    assert any("histogram_sum" in query.promql for query in planned)

    async def ask() -> Inquiry:
        async with Client(config, asyncio.get_running_loop().time() + 30.0) as client:
            inquiry = Inquiry(client, config.step_seconds)
            await inquiry.ask("everything", planned, [Span(ONSET, ONSET + 1.0)])
            return inquiry

    (source,) = asyncio.run(ask()).sources()
    assert (source.status.value, source.detail) == ("ok", "")
    assert len(source.queries) == len({query.promql for query in planned})


def test_a_capture_that_hangs_ends_in_time() -> None:
    def hang(_: Request) -> Reply:
        time.sleep(2.0)
        return Reply(b"")

    with answering(hang) as server:
        config = CaptureConfig(server.url, query_timeout_seconds=0.5, total_timeout_seconds=20.0, settle_seconds=0.0)
        begin = time.monotonic()
        with pytest.raises(SourceUnreachableError):
            capture_from(config)(request(service="gateway"))
    assert time.monotonic() - begin < 10.0
    # Where nothing answers, asking for everything would only take longer.
    assert len(server.requests) <= 5
