"""From a fault to its explanation, with nobody awake: Slurm, exporter, services, metrics, rules, Alertmanager, capture.

Needs root and the packages of scripts/ci_services.sh; skipped without them, except in continuous integration.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rca.errors import SourceUnreachableError
from rca.explain import explain
from rca.explanation import Explanation, Verdict, from_json, to_json
from rca.incident import Incident, read
from rca.store import open_store
from rca.store.database import Store
from rca.store.records import Alert, State
from rca.telemetry.prometheus import CaptureConfig, capture_from
from rca.telemetry.request import CaptureRequest
from tests.support.live_chain import LiveChain, Metrics, live_chain
from tests.support.services import HOST, absent, wait_for
from tests.support.slurm_cluster import missing

pytestmark = pytest.mark.services

#: The acceptance: from the fault to the explanation, with intervals of one second.
MOST_SECONDS = 30.0
BASELINE_SECONDS = 40.0

RULES = """\
groups:
  - name: live-chain
    interval: 1s
    rules:
      - alert: PrioscopePriorityInversion
        expr: >-
          max by (cluster, workload, service, priority_level, violation_type)
          (priority_violation_active_seconds{violation_type="inversion"}) > 0
        labels: { severity: page, rca: capture }
        annotations: { summary: An urgent job waits while a less urgent one has its GPUs }
"""


@dataclass
class Receiver:
    """Takes Alertmanager's webhooks."""

    url: str = ""
    firing: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def first(self, since: float) -> tuple[float, dict[str, Any]] | None:
        """The first firing alert that arrived after ``since``, and when it did."""
        return next((item for item in self.firing if item[0] >= since), None)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.firing += [(time.time(), alert) for alert in body["alerts"] if alert["status"] == "firing"]
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    found.url = f"http://{HOST}:{server.server_address[1]}/"
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@dataclass(frozen=True)
class Played:
    """The incident that was played: the chain it runs on, and what came of it."""

    chain: LiveChain
    culprit: str
    request: CaptureRequest
    config: CaptureConfig
    incident: Incident
    explanation: Explanation
    #: Seconds since the fault, by stage.
    stages: dict[str, float]


def captured_into(store: Store, alert: dict[str, Any], config: CaptureConfig) -> tuple[CaptureRequest, Incident, float]:
    """Store the alert, capture its incident, store that; return what was asked, the incident, and when it was there."""
    received = Alert(
        "group", alert["fingerprint"], datetime.fromisoformat(alert["startsAt"]), None, alert["labels"],
        alert["annotations"], alert["generatorURL"],
    )  # fmt: skip
    store.receive([received], datetime.now(UTC), capacity=10)
    claimed = store.claim("test", datetime.now(UTC), timedelta(minutes=1))
    assert claimed is not None
    request = CaptureRequest(claimed.id, claimed.labels, claimed.annotations, claimed.starts_at)
    incident = capture_from(config)(request)
    with tempfile.TemporaryDirectory(prefix="bundle") as folder:
        bundle = incident.write(Path(folder) / "incident.zip").read_bytes()
    store.update(claimed, {"state": State.CAPTURED}, datetime.now(UTC), bundle=bundle)
    return request, incident, time.time()


def explained_into(store: Store) -> Explanation:
    """Explain the bundle that is in the store, and return the explanation as it is stored then."""
    claimed = store.claim("test", datetime.now(UTC), timedelta(minutes=1))
    assert claimed is not None
    with tempfile.TemporaryDirectory(prefix="bundle") as folder:
        path = Path(folder) / "incident.zip"
        path.write_bytes(store.bundle(claimed.id))
        answer = explain(read(path))
    state = State.EXPLAINED if answer.verdict is Verdict.EXPLAINED else State.INCONCLUSIVE
    store.update(claimed, {"state": state}, datetime.now(UTC), explanation=to_json(answer), trigger="test")
    return from_json(store.explanation(claimed.id))


@pytest.fixture(scope="module", params=list(Metrics), ids=str)
def played(
    request: pytest.FixtureRequest, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Played]:
    """Let the chain run, give its GPUs to a batch job, and follow what happens."""
    if why := missing():
        absent(why)
    with live_chain(RULES, receiver.url, metrics=request.param) as chain:
        time.sleep(BASELINE_SECONDS + 8.0)
        fault = time.time()
        culprit = chain.cluster.submit("train", "batch", "--gres=gpu:4")
        wait_for(lambda: receiver.first(fault), "an alert", chain.log, MOST_SECONDS)
        found = receiver.first(fault)
        assert found is not None
        arrived, alert = found
        began = datetime.fromisoformat(alert["startsAt"])
        config = CaptureConfig(
            chain.store_url, step_seconds=1.0, lead_seconds=15.0, baseline_seconds=BASELINE_SECONDS,
            least_baseline_seconds=20.0, settle_seconds=6.0, history=False,
        )  # fmt: skip
        with open_store(str(tmp_path_factory.mktemp("store") / "incidents.db")) as store:
            asked, incident, captured = captured_into(store, alert, config)
            answer = explained_into(store)
        assert incident.header.onset is not None
        stages = {
            "job waits": incident.header.onset.timestamp() - fault,
            "alert starts": began.timestamp() - fault,
            "webhook arrives": arrived - fault,
            "captured and stored": captured - fault,
            "explained and stored": time.time() - fault,
        }
        yield Played(chain, culprit, asked, config, incident, answer, stages)


def test_from_the_fault_to_the_explanation_it_takes_seconds(
    played: Played, record_property: Callable[[str, object], None]
) -> None:
    for stage, seconds in played.stages.items():
        record_property(stage, round(seconds, 2))
    print(", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in played.stages.items()))  # noqa: T201
    assert played.stages["explained and stored"] <= MOST_SECONDS
    assert list(played.stages.values()) == sorted(played.stages.values())


def test_the_batch_job_is_the_cause_and_the_urgent_job_the_victim(played: Played) -> None:
    answer = played.explanation
    victim = played.request.labels["workload"]
    assert played.chain.cluster.command("squeue", "-h", "-j", victim, "-o", "%P %b") == "urgent gres:gpu:4"
    assert played.chain.cluster.state(victim) == "PENDING"
    assert answer.verdict is Verdict.EXPLAINED
    assert answer.causes[0].node == played.culprit
    assert answer.causes[0].mechanism == "GPU contention"
    assert (answer.impact.victim.node, answer.impact.victim.metric) == (victim, "queue_wait_seconds")
    assert answer.path is not None
    assert [(hop.source, hop.target) for hop in answer.path.hops] == [(played.culprit, victim)]
    assert answer.policy is not None
    assert answer.policy.violated
    commands = [step.command for step in answer.next_steps]
    assert f"scontrol requeue {played.culprit}" in commands


def test_the_explanation_cites_what_was_asked_and_what_was_not_there(played: Played) -> None:
    sources = {source.name: source for source in played.explanation.sources}
    assert any("priority_violation_culprit_gpu_seconds" in query for query in sources["scheduler"].queries)
    assert any("traces_service_graph_request_total" in query for query in sources["call graph"].queries)
    assert "baseline: " in sources["load before and during the incident"].detail
    assert any(item.what.startswith("GPUs") for item in played.explanation.not_checked)


def test_users_wait_because_the_job_waits(played: Played) -> None:
    """The same incident from the other end: the entry of the services is slow."""
    labels = {"alertname": "GatewaySlow", "service": "gateway", "cluster": "loopback"}
    asked = replace(played.request, labels=labels, annotations={})
    answer = explain(capture_from(replace(played.config, settle_seconds=15.0))(asked))
    calls = {(edge.caller, edge.callee) for edge in answer.edges if edge.relation == "calls"}
    assert calls == {("gateway", "auth"), ("gateway", "api"), ("api", "store"), ("api", "inference")}
    assert answer.verdict is Verdict.EXPLAINED, answer.verdict_reasons
    assert answer.causes[0].node == played.culprit
    assert answer.path is not None
    assert [hop.source for hop in answer.path.hops][-2:] == ["inference", "api"]


def test_a_slurm_that_does_not_answer_leaves_a_hole_that_is_said(played: Played) -> None:
    cluster = played.chain.cluster
    controller = cluster.processes["slurmctld"]
    controller.terminate()
    controller.wait(10)
    try:
        seen = "min(prioscope_source_up)"
        wait_for(lambda: played.chain.value(seen) == 0.0, "the exporter to say so", played.chain.log, 90)
        time.sleep(2.0)
        asked = replace(played.request, end=datetime.now(UTC))
        answer = explain(capture_from(played.config)(asked))
    finally:
        cluster.start_controller()
    (why,) = [item.why for item in answer.not_checked if item.what.startswith("scheduler")]
    assert "the exporter of slurm could not read it in" in why


def test_a_store_that_hangs_or_is_gone_can_be_asked_again(played: Played) -> None:
    store = played.chain.processes[Metrics.PROMETHEUS if "prometheus" in played.chain.processes else Metrics.VICTORIA]
    hurried = replace(played.config, query_timeout_seconds=1.0, total_timeout_seconds=8.0)
    os.kill(store.pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises(SourceUnreachableError, match="no whole answer within"):
            capture_from(hurried)(played.request)
        assert time.monotonic() - begin < hurried.total_timeout_seconds + 2.0
    finally:
        os.kill(store.pid, signal.SIGCONT)
    # It is back: the same alert gives the incident after all.
    again = explain(capture_from(played.config)(replace(played.request, end=played.incident.header.window.end)))
    assert again.causes[0].node == played.culprit
    store.terminate()
    store.wait(20)
    with pytest.raises(SourceUnreachableError, match="gave nothing"):
        capture_from(hurried)(played.request)
