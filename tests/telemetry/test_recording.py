"""An incident from a recording of a scheduler, with no Prometheus."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

import cli.main
from exporters.catalog import METRICS, MetricType
from exporters.model import Snapshot, ViolationType, read_snapshots, write_snapshots
from exporters.policy import default_policy
from rca.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from rca.explain import explain
from rca.explanation import Verdict
from rca.incident import Incident, read
from rca.simulation import cluster
from rca.simulation.demo import DEMOS
from rca.telemetry.prometheus import CaptureConfig, capture_from
from rca.telemetry.prometheus.answers import QueryError
from rca.telemetry.prometheus.ask import Inquiry
from rca.telemetry.prometheus.capture import captured
from rca.telemetry.recording import Scrapes, capture_recording, overview, scrapes
from rca.telemetry.request import CaptureRequest
from tests.support.history import History, past_prometheus


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording in which urgent inference waits for what a sweep has borrowed."""
    path = tmp_path_factory.mktemp("recordings") / "night.jsonl"
    write_snapshots(path, cluster.recording(0))
    return path


def asked(held: Scrapes, query: str, start: float, end: float) -> dict[tuple[tuple[str, str], ...], list[float]]:
    answer = asyncio.run(held.range(query, start, end, 15.0))
    return {tuple(sorted(series.labels.items())): series.values.tolist() for series in answer.series}


# --- from the recording to the cause


def test_the_worst_violation_is_captured_and_explained(night: Path) -> None:
    incident = capture_recording(night, default_policy())
    assert (incident.header.victim.node, incident.header.victim.metric) == (cluster.VICTIM, "queue_wait_seconds")
    assert incident.header.labels["priority_level"] == "P0"
    assert incident.header.onset == cluster.EPOCH + timedelta(seconds=2700)  # when it was submitted
    answer = explain(incident)
    assert answer.verdict is Verdict.EXPLAINED
    assert answer.causes[0].node == cluster.SWEEP
    assert {source.kind for source in incident.header.sources} == {"recording"}


@pytest.mark.parametrize("seed", range(5))
def test_the_demo_finds_its_sweep_with_any_seed(seed: int, tmp_path: Path) -> None:
    incident = DEMOS["priority-inversion"].make(seed, tmp_path)
    assert explain(incident.replace(truth=None)).causes[0].node == cluster.SWEEP
    assert 'priority_violation_total{basis="held"' in (tmp_path / "priority-inversion.prom").read_text()


def test_what_is_waited_for_is_the_wait_of_the_schedule(night: Path) -> None:
    waits = [
        workload
        for snapshot in read_snapshots(night)
        for workload in snapshot.workloads
        if workload.name == cluster.VICTIM
    ]
    assert waits
    assert {str(workload.state) for workload in waits} == {"pending"}
    found = overview(night, default_policy())
    assert found.step == 15.0
    assert [item.violation.type for item in found.violations] == [
        ViolationType.INVERSION, ViolationType.SCHEDULING_DELAY, ViolationType.PREEMPTION_FAILED,
    ]  # fmt: skip
    assert found.violations[0].seconds == 840.0  # 15 minutes, of which the first was promised
    assert found.violations[0].end is None


def test_on_the_command_line(night: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "incident.zip"
    assert cli.main.main(["incident", "import", "recording", str(night), "-o", str(out), "--label", "team=ml"]) == 0
    incident = read(out)
    assert incident.header.labels["team"] == "ml"
    assert incident.header.id == f"night-{cluster.VICTIM}"
    assert "scheduler: ok" in capsys.readouterr().err


def test_a_workload_that_broke_no_promise_needs_a_time(night: Path) -> None:
    with pytest.raises(NotFoundError, match="no violation of workload 'eval-4401'") as caught:
        capture_recording(night, default_policy(), victim="eval-4401")
    assert cluster.VICTIM in caught.value.cure
    at = datetime(2026, 1, 5, 2, 10, tzinfo=UTC)
    assert capture_recording(night, default_policy(), victim="llama-train-0", onset=at).header.victim.node


def test_a_time_outside_the_recording_is_refused(night: Path) -> None:
    with pytest.raises(InvalidInputError, match="nothing before and after 2020-01-01"):
        capture_recording(night, default_policy(), onset=datetime(2020, 1, 1, tzinfo=UTC))


def test_a_calm_recording_has_nothing_to_explain(night: Path, tmp_path: Path) -> None:
    calm = tmp_path / "calm.jsonl"
    write_snapshots(calm, [s for s in read_snapshots(night) if s.time < cluster.EPOCH.timestamp() + 2600])
    with pytest.raises(NotFoundError, match="no violation under this policy"):
        capture_recording(calm, default_policy())


def test_a_recording_that_a_crash_cut_off_is_used_up_to_there(night: Path, tmp_path: Path) -> None:
    whole = night.read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(whole[:-100])
    assert len(overview(tmp_path / "cut.jsonl", default_policy()).times) == whole.count(b"\n") - 1
    with gzip.open(tmp_path / "night.jsonl.gz", "wb") as stream:
        stream.write(whole)
    assert capture_recording(tmp_path / "night.jsonl.gz", default_policy()).header.id == f"night-{cluster.VICTIM}"


def test_two_recordings_glued_together_are_refused(night: Path, tmp_path: Path) -> None:
    (tmp_path / "glued.jsonl").write_bytes(night.read_bytes() * 2)
    with pytest.raises(InvalidInputError, match="snapshot 242 is not later than the one before it"):
        overview(tmp_path / "glued.jsonl", default_policy())


@pytest.mark.parametrize("lines", [0, 1])
def test_too_short_a_recording_is_refused(lines: int, night: Path, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_bytes(b"".join(night.read_bytes().splitlines(keepends=True)[:lines]))
    with pytest.raises(InvalidInputError, match="fewer than two snapshots"):
        capture_recording(tmp_path / "short.jsonl", default_policy())


def test_a_wait_that_ended_ends_the_incident(night: Path, tmp_path: Path) -> None:
    end = cluster.EPOCH.timestamp() + 3300

    def released(snapshot: Snapshot) -> Snapshot:
        if snapshot.time < end:
            return snapshot
        left = tuple(workload for workload in snapshot.workloads if workload.name != cluster.VICTIM)
        return msgspec.structs.replace(snapshot, workloads=left)

    write_snapshots(tmp_path / "ended.jsonl", map(released, read_snapshots(night)))
    window = capture_recording(tmp_path / "ended.jsonl", default_policy()).header.window
    assert window.end.timestamp() == end


# --- the questions that it answers


def test_a_series_ends_with_the_scrape_that_lacks_it(night: Path) -> None:
    held, _ = scrapes(read_snapshots(night), default_policy())
    start = cluster.EPOCH.timestamp()
    series = asked(held, "sum by (state) (priority_workloads)", start, start + 3600)
    assert set(series) == {(("state", "running"),), (("state", "pending"),)}
    waiting = asked(
        held, 'max by (workload) (priority_workload_waiting_seconds{workload=~"chat.*"})', start, start + 3600
    )
    assert waiting == {(("workload", cluster.VICTIM),): [15.0 * n for n in range(61)]}


@pytest.mark.parametrize(
    "query",
    [
        "rate(priority_violation_total[1m])",
        "priority_workloads",
        "max by (queue) (priority_workloads offset 5m)",
        "avg by (queue) (priority_workloads)",
        "max without (queue) (priority_workloads)",
        "max by (queue) (priority_workloads",
    ],
)
def test_what_it_cannot_evaluate_is_refused(query: str, night: Path) -> None:
    held, _ = scrapes(read_snapshots(night), default_policy())
    with pytest.raises(QueryError):
        asyncio.run(held.range(query, 0.0, 60.0, 15.0))


@pytest.mark.services
def test_it_gives_the_incident_that_a_real_prometheus_would_have_given(night: Path) -> None:
    """The same scrapes in a real Prometheus, asked by the same capture: the same tables."""
    held, _ = scrapes(read_snapshots(night), default_policy())
    past = History([])
    for name, found in held.samples.items():
        kind, labels_of = METRICS[name].type, METRICS[name].labels
        past.families[name.removesuffix("_total")] = "counter" if kind is MetricType.COUNTER else "gauge"
        for at, rows in found.items():
            for values, value in rows:
                labels = ",".join(f'{label}="{text}"' for label, text in zip(labels_of, values, strict=True))
                past.lines.append(f"{name}{{{labels}}} {value!r} {held.times[at]:.3f}")
    incident = capture_recording(night, default_policy())
    request = CaptureRequest(
        incident.header.id, incident.header.labels, {"summary": incident.header.title},
        onset=cluster.EPOCH + timedelta(seconds=2760), end=cluster.EPOCH + timedelta(seconds=3600),
    )  # fmt: skip
    # Blocks made by promtool have no staleness markers: a look back shorter than a step ends series instead.
    with past_prometheus(past, "--query.lookback-delta=14s") as url:
        config = CaptureConfig(prometheus_url=url, history=False, baseline_seconds=2760.0)
        real = capture_from(config)(request)
    assert real.header.window == incident.header.window
    assert real.header.baseline == incident.header.baseline
    for name in ("edges", "nodes", "workloads", "devices"):
        assert real.tables[name].to_pylist() == incident.tables[name].to_pylist(), name
    assert rows_of(real) == rows_of(incident)


def rows_of(incident: Incident) -> list[tuple[object, ...]]:
    rows = incident.metrics.to_pylist()
    return sorted(tuple(str(row[key]) for key in ("node", "metric", "peer", "timestamp", "value")) for row in rows)


def test_silence_is_not_an_answer() -> None:
    """Without a single scrape nothing is known, and that is said."""
    request = CaptureRequest("i", {"workload": "w"}, {}, onset=cluster.EPOCH)

    async def go() -> Incident:
        config = replace(CaptureConfig(prometheus_url=None), history=False)
        return await captured(Inquiry(Scrapes(), 15.0), config, request, cluster.EPOCH.timestamp() + 60, 1e12)

    with pytest.raises(SourceUnreachableError, match="no sample"):
        asyncio.run(go())
