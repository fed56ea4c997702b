"""The harness: every method sees the same case, failures are reported, rows are never pooled alone."""

import json
import zlib
from datetime import UTC, datetime, timedelta

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from benchmarks import datasets, methods, run, simulated, startup
from benchmarks.__main__ import main
from benchmarks.baselines.dowhy_gcm import DidNotFinishError
from benchmarks.cases import Case
from benchmarks.methods import Answer, Method
from rca.errors import InvalidInputError, NotFoundError
from rca.incident import Header, Incident, Truth, Victim, Window, metrics_table

START = datetime(2026, 1, 5, tzinfo=UTC)


def case(name, truth=("db",), group="latency", scenario="low", level=9.0):
    """Thirty calm minutes, then five; `level` is how far db moves."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    parts = []
    for node, jump in (("web", level / 2), ("db", level), ("cache", 0.0)):
        values = 10 + random.normal(0, 0.5, 35) + np.r_[np.zeros(30), [jump] * 5]
        times = START.timestamp() + 60.0 * np.arange(35)
        parts.append(metrics_table(times, [node] * 35, ["latency_mean_seconds"] * 35, values))
    middle = START + timedelta(minutes=30)
    header = Header(
        id=name,
        baseline=Window(START, middle),
        window=Window(middle, middle + timedelta(minutes=5)),
        victim=Victim("web", "latency_mean_seconds"),
    )
    edges = pa.table({"caller": ["web", "web"], "callee": ["db", "cache"], "relation": ["calls", "calls"]})
    incident = Incident.create(header, metrics=pa.concat_tables(parts), edges=edges)
    return Case(name, "shop", scenario, group, incident, tuple(truth))


class Shop:
    """A data set of three incidents in two groups and two quiet windows."""

    def incidents(self):
        yield case("one")
        yield case("two")
        yield case("three", truth=("cache",), group="errors")

    def quiet(self, count=50):
        yield case("calm", truth=(), level=0.0)
        yield case("blip", truth=(), level=8.0)


@pytest.fixture
def shop(monkeypatch):
    monkeypatch.setattr(datasets, "load", lambda name: Shop())


def silent():
    return Console(stderr=True, quiet=True)


def test_rows_per_group_and_over_all(shop):
    chosen, priors, _ = methods.choose(["traversal", "max_z", "prior_loo", "prior_in_sample"])
    report = run.run(["shop"], chosen, priors, console=silent())
    rows = {(row.group, row.method): row for row in report.rows}
    assert {group for group, _ in rows} == {"latency", "errors", "all"}
    assert rows["latency", "traversal"].top1.value == 1.0
    assert rows["errors", "traversal"].top1.value == 0.0
    assert rows["all", "traversal"].top1.value == pytest.approx(2 / 3)
    assert rows["all", "traversal"].top1.count == 3
    # One of two quiet windows has a blip that looks like an incident.
    assert rows["all", "traversal"].specificity.value == 0.5
    assert rows["latency", "traversal"].median_seconds > 0


def test_constant_prior_knows_labels_but_not_its_own_when_left_out(shop):
    report = run.run(["shop"], [], ["prior_loo", "prior_in_sample"], console=silent())
    hits = {(item.method, item.case): item.hits["1"] for item in report.outcomes}
    assert hits["prior_in_sample", "one"] == 1.0
    assert hits["prior_loo", "one"] == 0.5, "of the others, one blames db and one cache"
    assert hits["prior_loo", "three"] == 0.0
    assert not [item for item in report.outcomes if item.quiet]


def test_a_method_that_does_not_finish_counts_as_a_miss_and_is_named(shop):
    def answer(incident):
        if incident.header.id == "two":
            raise DidNotFinishError("no answer in 1 s")
        if incident.header.id == "calm":
            raise InvalidInputError("no such series")
        return Answer({"db": 1.0}, True, 1.0)

    report = run.run(["shop"], [Method("slow", "slow one", answer)], [], console=silent())
    row = next(row for row in report.rows if row.group == "latency")
    assert row.top1.value == 0.5
    assert (row.unfinished, row.first_problem) == (2, "no answer in 1 s")
    assert row.specificity.count == 1, "a window without an answer says nothing about false alarms"


def test_a_bug_in_a_method_is_not_hidden(shop):
    def answer(incident):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.run(["shop"], [Method("broken", "broken", answer)], [], console=silent())


def test_several_scenarios_get_a_row_of_their_own_and_one_over_all():
    outcomes = [
        run.judge(case(name, scenario=scenario), ("web", "db", "cache"), "m", Answer({"db": 1.0}, True, 1.0), 0.1)
        for name, scenario in (("a", "low"), ("b", "high"))
    ]
    rows = run.summarise(outcomes, {"m": "method"})
    assert [(row.scenario, row.group) for row in rows] == [
        ("low", "latency"), ("low", "all"), ("high", "latency"), ("high", "all"), ("all", "all"),
    ]  # fmt: skip


def test_report_is_json_and_prints(shop, capsys):
    chosen, priors, _ = methods.choose(["traversal", "prior_loo"])
    report = run.run(["shop"], chosen, priors, console=silent(), skipped={"dowhy": "slow"})
    parsed = json.loads(run.to_json(report))
    assert parsed["rows"][0]["top1"]["low"] <= parsed["rows"][0]["top1"]["value"]
    assert msgspec.json.decode(run.to_json(report), type=run.Report) == report
    run.print_report(report, Console(width=200))
    printed = capsys.readouterr().out
    assert "shop / low / latency: 2 incidents" in printed
    assert "deepest anomalous" in printed
    assert "skipped dowhy: slow" in printed


def test_command_line_prints_one_line_and_a_cure(monkeypatch, capsys):
    monkeypatch.delenv("PRIOSCOPE_DATA", raising=False)
    monkeypatch.setattr("sys.argv", ["benchmarks", "rca", "--data", "petshop", "--methods", "max_z"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 3
    error = capsys.readouterr().err
    assert "error: PRIOSCOPE_DATA is not set" in error
    assert "cure: " in error


# --- simulated incidents ------------------------------------------------------------------------------------------


def test_held_out_incidents_hide_their_truth_and_quiet_ones_have_none():
    from itertools import islice

    loader = datasets.load("simulated")
    for item in islice(loader.incidents(), 2):
        assert item.truth
        assert item.incident.truth is None
        assert item.name != next(loader.quiet(1)).name
    assert next(loader.quiet(1)).truth == ()


def judged(**changes):
    usual = simulated.Judged("sim", "latency", 1.0, 0.9, 1.0, 2, 2, 2, True)
    return msgspec.structs.replace(usual, **changes)


def test_simulated_quality_sums_up():
    found = simulated.summarise(
        [
            judged(),
            judged(top1=0.0, correct=0.0, edges_stated=3, edges_shared=1, covered=False, mechanism="errors"),
            judged(top1=None, correct=0.0, confidence=0.2, edges_true=0, edges_stated=0, edges_shared=0, covered=None),
        ]
    )
    assert (found.incidents, found.quiet) == (2, 1)
    assert found.top1.value == 0.5
    assert {name: item.value for name, item in found.by_mechanism.items()} == {"errors": 0.0, "latency": 1.0}
    assert (found.path_precision, found.path_recall) == (pytest.approx(3 / 5), pytest.approx(3 / 4))
    assert found.path_f1 == pytest.approx(2 * 0.6 * 0.75 / 1.35)
    assert found.coverage.value == 0.5
    assert found.ece_equal_width_10 == pytest.approx((2 * 0.4 + 0.2) / 3)


def test_an_interval_covers_the_true_contribution_or_not():
    truth = Truth(causes=("db",), counterfactual=0.2)

    class Entry:
        nodes, low, high = ("db",), 0.7, 0.9

    class Attribution:
        factual, entries = 1.0, (Entry,)

    class Explanation:
        attribution = (Attribution,)

    assert simulated._covered(truth, Explanation) is True
    assert simulated._covered(Truth(causes=("db",), counterfactual=0.5), Explanation) is False
    assert simulated._covered(Truth(causes=("web",), counterfactual=0.2), Explanation) is None
    assert simulated._covered(Truth(causes=()), Explanation) is None


# --- start-up -----------------------------------------------------------------------------------------------------


def test_commands_are_timed_in_turns(monkeypatch):
    order = []

    def fake(command, allowed):
        order.append(command[0])
        return {"fast": 1.0, "slow": 4.0}[command[0]]

    monkeypatch.setattr(startup, "_seconds", fake)
    timing = startup.paired(["fast"], ["slow"], names=("a", "b"), runs=3, warm_up=1)
    assert order == ["fast", "slow"] * 4
    assert timing.ratio == 0.25
    assert len(timing.first_seconds) == 3


def test_a_failing_command_is_not_a_fast_one():
    import sys

    command = [sys.executable, "-c", "raise SystemExit('no such bundle')"]
    with pytest.raises(InvalidInputError, match="no such bundle"):
        startup.paired(command, command, names=("a", "b"), runs=1)


def test_start_up_bundle_has_the_number_of_nodes_asked_for(tmp_path):
    from rca.graph import build
    from rca.incident import read

    bundle = startup.write_bundle(tmp_path, 20, seed=1)
    incident = read(bundle, with_truth=True)
    assert incident.truth is None
    assert 15 <= len(build(incident).nodes) <= 30


def test_a_grown_graph_hangs_together_and_keeps_every_series(tmp_path):
    from rca.graph import build
    from rca.incident import read

    small = read(startup.write_bundle(tmp_path, 50, seed=1))
    large = read(startup.write_bundle(tmp_path, 500, seed=1))
    before, after = build(small), build(large)
    copies = round(500 / len(before.nodes))
    assert len(after.nodes) == copies * len(before.nodes)
    assert large.metrics.num_rows == copies * small.metrics.num_rows
    reached = (after.depths_from(after.find(large.header.victim.node)) >= 0).sum()
    assert reached == copies * (before.depths_from(before.find(small.header.victim.node)) >= 0).sum()


def test_unknown_methods_and_unavailable_ones_differ():
    with pytest.raises(NotFoundError):
        methods.choose(["prioscop"])
    methods_found, _, skipped = methods.choose(["prioscope"])
    assert bool(methods_found) != ("prioscope" in skipped)
