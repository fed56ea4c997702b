"""`rca explain` on incidents whose cause is known: what it says, that it says it twice, and at what cost."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import cli.main
from rca.errors import ExitCode, InvalidInputError, NotFoundError
from rca.explain import MAX_DRAWN, MAX_POINTS, NOTABLE, Options, analyse, explain, rank
from rca.explanation import Explanation, Provenance, Verdict, from_json, to_json
from rca.gnn import infer
from rca.incident import Incident, Source, SourceStatus, Victim, read
from rca.panel import from_incident
from rca.provenance import explanation_steps, verify
from rca.simulation.incidents import sample_incident
from rca.simulation.scenarios import SCENARIOS, build


@pytest.fixture(scope="module")
def model() -> infer.Model:
    """The shipped weights (or those that PRIOSCOPE_WEIGHTS names)."""
    try:
        return infer.load()
    except NotFoundError as error:
        pytest.skip(f"{error}: {error.cure}")


@pytest.fixture(scope="module")
def played() -> dict[str, Incident]:
    """Every scenario as a bundle without its truth."""
    return {name: build(name, 0).incident.replace(truth=None) for name in SCENARIOS}


@pytest.fixture(scope="module")
def answers(model: infer.Model, played: dict[str, Incident]) -> dict[str, Explanation]:
    return {name: explain(incident) for name, incident in played.items()}


@pytest.fixture(scope="module")
def bundles(played: dict[str, Incident], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundles")
    for name, incident in played.items():
        incident.write(directory / f"{name}.zip")
    return directory


def without_provenance(explanation: Explanation) -> Explanation:
    """The answer alone: the chain of digests covers the order of rows, the answer does not depend on it."""
    return msgspec.structs.replace(explanation, provenance=Provenance("C", ()))


def rca(*arguments: object) -> int:
    return cli.main.main([str(argument) for argument in arguments])


# --- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_first_cause_of_every_scenario_is_the_injected_one(name: str, answers: dict[str, Explanation]) -> None:
    if infer.weights_directory() != infer._SHIPPED:
        pytest.skip("other weights than the shipped ones make no such promise")
    answer = answers[name]
    assert answer.verdict is Verdict.EXPLAINED
    assert answer.causes[0].node == SCENARIOS[name].at
    assert answer.causes[0].mechanism == SCENARIOS[name].mechanism.value


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_section_is_there_and_fits_together(
    name: str, answers: dict[str, Explanation], played: dict[str, Incident]
) -> None:
    answer, incident = answers[name], played[name]
    impact = answer.impact
    assert (impact.victim.node, impact.victim.metric) == (SCENARIOS[name].victim, SCENARIOS[name].metric)
    assert impact.baseline is not None
    assert impact.incident is not None
    assert impact.peak is not None
    assert impact.incident > impact.baseline
    assert impact.change_ratio == pytest.approx(impact.incident / impact.baseline, rel=1e-4)
    assert impact.onset is not None
    window = incident.header.window
    assert window.start - timedelta(minutes=1) <= impact.onset < window.end
    assert impact.baseline_samples == 120

    assert [cause.rank for cause in answer.causes] == list(range(1, len(answer.causes) + 1))
    confidence = [cause.confidence for cause in answer.causes]
    assert confidence == sorted(confidence, reverse=True)
    assert sum(confidence) + answer.no_cause_probability <= 1.0 + 1e-5
    assert all(cause.summary for cause in answer.causes)
    assert len({cause.node for cause in answer.causes}) == len(answer.causes)

    assert answer.path is not None
    hops = answer.path.hops
    assert hops[0].source == answer.causes[0].node
    assert hops[-1].target == impact.victim.node
    assert all(one.target == other.source for one, other in pairwise(hops))
    assert all(0.0 <= hop.probability <= 1.0 for hop in hops)
    assert answer.path.probability == pytest.approx(np.prod([hop.probability for hop in hops]), abs=1e-4)

    (attribution,) = answer.attribution
    assert attribution.metric == impact.victim.metric
    assert attribution.entries[0].nodes == (answer.causes[0].node,)
    for entry in attribution.entries:
        assert entry.low - 1e-6 <= entry.contribution <= entry.high + 1e-6
        expected = (attribution.factual - entry.counterfactual) / attribution.factual
        assert entry.contribution == pytest.approx(expected, abs=1e-4)

    first = answer.evidence[0]
    assert (first.node, first.metric) == (impact.victim.node, impact.victim.metric)
    assert all(abs(item.z) >= NOTABLE for item in answer.evidence[1:])
    assert all(item.samples > 0 for item in answer.evidence)

    credible = {cause.node for cause in answer.causes if cause.confidence >= 0.05}
    assert not credible & {item.node for item in answer.ruled_out}
    assert all(item.reason for item in answer.ruled_out)
    assert answer.next_steps
    assert all(step.action and step.check for step in answer.next_steps)
    assert answer.series[0].node == impact.victim.node
    assert all(len(s.timestamps) == len(s.values) for s in answer.series)
    assert all(list(s.timestamps) == sorted(set(s.timestamps)) for s in answer.series)
    drawn = {node.node for node in answer.nodes}
    assert {impact.victim.node, *(hop.source for hop in hops)} <= drawn
    assert sum(edge.on_path for edge in answer.edges) == len(hops)
    assert all({edge.caller, edge.callee} <= drawn for edge in answer.edges)
    assert answer.title == incident.header.title


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_json_survives_a_round_trip_and_its_provenance_holds(
    name: str, answers: dict[str, Explanation], played: dict[str, Incident]
) -> None:
    answer = answers[name]
    assert from_json(to_json(answer)) == answer
    assert verify(answer.provenance, explanation_steps(answer, played[name])) == []
    assert json.loads(to_json(answer))["schema_version"] == 1
    assert b"NaN" not in to_json(answer)


def test_two_explanations_of_one_bundle_are_the_same(model: infer.Model, bundles: Path) -> None:
    path = bundles / "gpu-contention.zip"
    assert to_json(explain(read(path))) == to_json(explain(read(path)))


@pytest.mark.parametrize("name", ["gpu-contention", "network-delay", "dependency-outage"])
def test_the_order_of_rows_in_the_bundle_does_not_matter(
    name: str, answers: dict[str, Explanation], played: dict[str, Incident]
) -> None:
    rng = np.random.default_rng(0)
    incident = played[name]
    shuffled = {
        table: rows.take(pa.array(rng.permutation(rows.num_rows)))
        for table, rows in incident.tables.items()
        if rows.num_rows
    }
    answer = explain(incident.replace(**shuffled))
    assert to_json(without_provenance(answer)) == to_json(without_provenance(answers[name]))


def test_the_truth_does_not_leak_into_the_answer(answers: dict[str, Explanation]) -> None:
    with_truth = build("overload", 0).incident
    assert with_truth.truth is not None
    assert to_json(explain(with_truth)) == to_json(answers["overload"])


def test_the_whole_pipeline_can_be_asked_for_the_ranking_alone(
    played: dict[str, Incident], answers: dict[str, Explanation]
) -> None:
    scores = rank(played["slow-release"])
    assert max(scores, key=lambda node: scores[node]) == answers["slow-release"].causes[0].node
    assert 0.0 <= sum(scores.values()) <= 1.0 + 1e-5
    assert set(scores) == set(from_incident(played["slow-release"]).graph.nodes)


# --- the question -----------------------------------------------------------------------------------------------------


def test_top_limits_the_causes_not_the_answer(model: infer.Model, played: dict[str, Incident]) -> None:
    incident = played["gpu-contention"]
    one, many = explain(incident, Options(top=1)), explain(incident, Options(top=5))
    assert len(one.causes) == 1
    assert one.causes[0] == many.causes[0]
    assert one.verdict is many.verdict
    assert one.path == many.path
    assert (one.options["top"], many.options["top"]) == (1, 5)


def test_more_confidence_than_there_is_makes_the_answer_inconclusive(
    model: infer.Model, played: dict[str, Incident]
) -> None:
    answer = explain(played["slow-release"], Options(min_confidence=1.0))
    assert answer.verdict is Verdict.INCONCLUSIVE
    assert len(answer.verdict_reasons) == 1
    assert answer.causes
    assert any("Capture again" in step.action for step in answer.next_steps)
    assert explain(played["slow-release"], Options(min_confidence=0.0)).verdict is Verdict.EXPLAINED


def test_another_victim_can_be_asked_about(model: infer.Model, played: dict[str, Incident]) -> None:
    answer = explain(played["gpu-contention"], Options(victim="chat-api", metric="latency_mean_seconds"))
    assert (answer.impact.victim.node, answer.impact.victim.metric) == ("chat-api", "latency_mean_seconds")
    assert answer.path is None or answer.path.hops[-1].target == "chat-api"
    assert answer.options["victim"] == "chat-api"


def test_a_victim_or_metric_that_is_not_there_is_answered_with_those_that_are(
    model: infer.Model, played: dict[str, Incident]
) -> None:
    with pytest.raises(NotFoundError, match="no node 'edge-gatway'") as missing:
        explain(played["overload"], Options(victim="edge-gatway"))
    assert "edge-gateway" in missing.value.cure
    with pytest.raises(InvalidInputError, match="search-api has no metric 'latency'") as unknown:
        explain(played["overload"], Options(metric="latency"))
    assert "latency_p95_seconds" in unknown.value.cure


# --- honesty ----------------------------------------------------------------------------------------------------------


def reasons(answer: Explanation) -> dict[str, str]:
    return {item.what: item.why for item in answer.not_checked}


def test_what_the_bundle_lacks_is_said(model: infer.Model, played: dict[str, Incident]) -> None:
    incident = played["slow-release"]
    metrics = incident.metrics
    latency_only = metrics.filter(pc.equal(metrics["metric"], "latency_mean_seconds"))
    nodes = incident.nodes.filter(pc.equal(incident.nodes["kind"], "service"))
    edges = incident.edges.filter(pc.equal(incident.edges["relation"], "calls"))
    answer = explain(
        incident.replace(
            metrics=latency_only.filter(pc.is_null(latency_only["peer"])),
            nodes=nodes,
            edges=edges,
            workloads=incident.workloads.slice(0, 0),
            devices=incident.devices.slice(0, 0),
        )
    )
    assert {"errors", "network between services", "single calls", "GPUs and scheduler"} <= set(reasons(answer))
    assert "latency" not in reasons(answer)


def test_a_source_that_did_not_answer_is_said(model: infer.Model, played: dict[str, Incident]) -> None:
    incident = played["slow-release"]
    sources = (
        Source("prometheus", "metrics", SourceStatus.OK),
        Source("slurm", "scheduler", SourceStatus.FAILED, "slurmrestd: connection refused"),
        Source("tempo", "traces", SourceStatus.ABSENT),
    )
    answer = explain(incident.replace(header=msgspec.structs.replace(incident.header, sources=sources)))
    assert reasons(answer)["slurm (scheduler)"] == "slurmrestd: connection refused"
    assert reasons(answer)["tempo (traces)"] == "the source is absent"
    assert "prometheus (metrics)" not in reasons(answer)


def test_a_dependency_without_telemetry_is_said(model: infer.Model, played: dict[str, Incident]) -> None:
    incident = played["slow-release"]
    seen = pc.not_equal(incident.metrics["node"], "postgres")
    answer = explain(incident.replace(metrics=incident.metrics.filter(seen)))
    assert reasons(answer)["postgres"] == "no telemetry in the incident window"
    late = pc.or_(
        pc.not_equal(incident.metrics["node"], "postgres"),
        pc.greater_equal(
            incident.metrics["timestamp"], pa.scalar(incident.header.window.start, pa.timestamp("us", tz="UTC"))
        ),
    )
    answer = explain(incident.replace(metrics=incident.metrics.filter(late)))
    assert reasons(answer)["postgres"] == "no baseline to compare with"


def test_numbers_of_the_answer_are_those_of_the_bundle(
    answers: dict[str, Explanation], played: dict[str, Incident]
) -> None:
    for name, answer in answers.items():
        panel = from_incident(played[name])
        row = panel.victim
        measured = panel.baseline[panel.metric][row]
        assert answer.impact.baseline == pytest.approx(float(np.median(measured[np.isfinite(measured)])), rel=1e-4)
        seen = panel.window[panel.metric][row]
        assert np.isclose(seen, answer.impact.peak, rtol=1e-4).any()
        assert answer.impact.peak is not None
        assert answer.impact.incident is not None
        assert answer.impact.peak >= answer.impact.incident


def test_a_large_graph_is_drawn_in_part_and_long_series_are_thinned(model: infer.Model) -> None:
    simulated = sample_incident(2, nodes=400)
    answer = explain(simulated.incident.replace(truth=None))
    assert len(answer.nodes) <= MAX_DRAWN
    assert {answer.causes[0].node, answer.impact.victim.node} <= {node.node for node in answer.nodes}
    for series in answer.series:
        assert len(series.timestamps) <= MAX_POINTS + 60


def test_simulated_incidents_of_all_kinds_are_explained_or_left_open(model: infer.Model) -> None:
    for seed in range(25):
        answer = explain(sample_incident(seed, nodes=12).incident.replace(truth=None))
        assert from_json(to_json(answer)) == answer
        assert (answer.verdict is Verdict.INCONCLUSIVE) == bool(answer.verdict_reasons)
        assert answer.causes
        if answer.verdict is Verdict.EXPLAINED:
            assert answer.causes[0].confidence >= 0.5


def test_the_analysis_behind_the_words_is_one_step_away(model: infer.Model, played: dict[str, Incident]) -> None:
    found = analyse(from_incident(played["queue-imbalance"]), model)
    assert sorted(found.ranking) == list(range(len(found.panel.graph.nodes)))
    assert found.prediction.cause.sum() + found.prediction.nothing == pytest.approx(1.0, abs=1e-5)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_answer_and_exits_0_or_4(
    model: infer.Model, bundles: Path, answers: dict[str, Explanation], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, answer in answers.items():
        code = rca("explain", bundles / f"{name}.zip", "-o", "json")
        expected = ExitCode.OK if answer.verdict is Verdict.EXPLAINED else ExitCode.INCONCLUSIVE
        assert code == int(expected)
        printed = from_json(capsys.readouterr().out)
        assert without_provenance(printed) == without_provenance(answer)


def test_the_command_exits_4_when_the_answer_is_not_sure_enough(
    model: infer.Model, bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rca("explain", bundles / "slow-release.zip", "--min-confidence", "1.0", "-o", "json") == 4
    assert from_json(capsys.readouterr().out).verdict is Verdict.INCONCLUSIVE


def test_the_command_exits_3_for_what_is_not_there(
    model: infer.Model, bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rca("explain", bundles / "nothing.zip") == 3
    assert rca("explain", bundles / "overload.zip", "--victim", "nobody") == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no node 'nobody'" in shown.err
    assert "cure: " in shown.err


def test_without_weights_the_command_says_how_to_get_some(
    played: dict[str, Incident], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(infer.WEIGHTS_VARIABLE, str(tmp_path))
    bundle = played["overload"].write(tmp_path / "overload.zip")
    assert rca("explain", bundle) == 3
    shown = capsys.readouterr().err
    assert f"no weights in {tmp_path}" in shown
    assert "rca train" in shown


@pytest.mark.parametrize("format", ["text", "json", "markdown", "html"])
def test_the_command_loads_no_heavy_library(model: infer.Model, bundles: Path, format: str) -> None:
    code = (
        "import sys, cli.main; code = cli.main.main(sys.argv[1:]);"
        "heavy = {'torch', 'torch_geometric', 'pandas', 'scipy', 'dowhy', 'matplotlib'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr); sys.exit(9 if heavy else code)"
    )
    arguments = ["explain", str(bundles / "gpu-contention.zip"), "-o", format]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 4), done.stderr
    assert done.stderr.strip() == "[]"
    assert "edge-gateway" in done.stdout


def test_two_processes_print_the_same_bytes(model: infer.Model, bundles: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "explain", str(bundles / "cpu-contention.zip"), "-o", "json"]
    one, two = (subprocess.run(command, capture_output=True, check=False).stdout for _ in range(2))
    assert one == two
    assert from_json(one).incident_id == "demo-cpu-contention-0"


def test_a_bundle_in_memory_and_on_disk_have_one_provenance(
    model: infer.Model, played: dict[str, Incident], bundles: Path
) -> None:
    assert to_json(explain(played["overload"])) == to_json(explain(read(bundles / "overload.zip")))


def test_a_victim_that_did_not_change_has_no_cause(model: infer.Model, played: dict[str, Incident]) -> None:
    incident = played["slow-release"]
    header = msgspec.structs.replace(incident.header, victim=Victim("auth", "memory_utilization_ratio"))
    flat = pc.if_else(
        pc.and_(pc.equal(incident.metrics["node"], "auth"), pc.equal(incident.metrics["metric"], header.victim.metric)),
        pa.scalar(0.5),
        incident.metrics["value"],
    )
    still = incident.replace(header=header, metrics=incident.metrics.set_column(4, "value", flat))
    explanation = explain(still)
    assert explanation.verdict is Verdict.INCONCLUSIVE
    assert any("did not change" in reason for reason in explanation.verdict_reasons)
    assert explanation.attribution == ()
