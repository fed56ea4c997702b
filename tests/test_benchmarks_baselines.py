"""Each baseline on a handmade incident whose answer is known."""

import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.baselines import correlation, deviation, dowhy_gcm, prior, residuals, walks
from benchmarks.methods import choose
from rca.errors import NotFoundError
from rca.incident import Header, Incident, Victim, Window, metrics_table

START = datetime(2026, 1, 5, tzinfo=UTC)
STEP = 60.0
BASELINE, WINDOW = 40, 5
LATENCY = "latency_mean_seconds"


def noise(seed, rows=1):
    return np.random.default_rng(seed).normal(0.0, 1.0, size=(rows, BASELINE + WINDOW))


def incident(series, calls, victim="web", metric=LATENCY):
    """An incident from {(node, metric): values over baseline then window}; NaN is not measured."""
    parts = []
    for (node, name), values in series.items():
        times = START.timestamp() + STEP * np.arange(BASELINE + WINDOW)
        seen = np.isfinite(values)
        count = int(seen.sum())
        parts.append(metrics_table(times[seen], [node] * count, [name] * count, np.asarray(values)[seen]))
    middle = START + timedelta(seconds=STEP * BASELINE)
    header = Header(
        id="handmade",
        baseline=Window(START, middle),
        window=Window(middle, middle + timedelta(seconds=STEP * WINDOW)),
        victim=Victim(victim, metric),
    )
    edges = pa.table(
        {
            "caller": pa.array([a for a, _ in calls], pa.string()),
            "callee": pa.array([b for _, b in calls], pa.string()),
            "relation": pa.array(["calls"] * len(calls), pa.string()),
        }
    )
    return Incident.create(header, metrics=pa.concat_tables(parts), edges=edges)


@pytest.fixture
def chain():
    """web -> api -> db; db slows down by 10 of its sigmas, and each caller passes it on. A side service is calm."""
    shape = np.r_[np.zeros(BASELINE), [10, 12, 9, 11, 13]]
    unit = noise(1, 4)
    db = 1.0 + 0.01 * (unit[0] + shape)
    api = 1.0 + db + 0.01 * unit[1]
    web = 1.0 + api + 0.01 * unit[2]
    side = 1.0 + 0.01 * unit[3]
    series = {("web", LATENCY): web, ("api", LATENCY): api, ("db", LATENCY): db, ("side", LATENCY): side}
    return incident(series, [("web", "api"), ("api", "db"), ("web", "side")])


def first(scores):
    return max(scores, key=scores.get)


def test_max_z_is_the_largest_two_sided_deviation(chain):
    scores = deviation.max_abs_z(chain)
    db = chain.metrics.filter(pa.compute.equal(chain.metrics["node"], "db"))["value"].to_numpy()
    expected = np.abs((db[BASELINE:] - db[:BASELINE].mean()) / db[:BASELINE].std()).max()
    assert scores["db"] == pytest.approx(expected)
    assert scores["side"] < 4


def test_a_drop_counts_for_max_z_but_not_for_the_signed_scorers():
    unit = noise(2, 2)
    fall = np.r_[np.zeros(BASELINE), [-30.0] * WINDOW]
    case = incident({("web", LATENCY): 50 + unit[0], ("cache", LATENCY): 50 + unit[1] + fall}, [("web", "cache")])
    assert first(deviation.max_abs_z(case)) == "cache"
    assert first(deviation.n_sigma(case)) == "web"
    assert first(deviation.baro(case)) == "web"


def test_baro_uses_median_and_interquartile_range():
    values = np.r_[np.tile([1.0, 2.0, 3.0, 4.0], BASELINE // 4), [2.0, 3.0, 10.0, 4.0, 5.0]]
    case = incident({("web", LATENCY): values}, [])
    assert deviation.baro(case)["web"] == pytest.approx((10.0 - 2.5) / 1.5)


def test_baro_agrees_with_the_authors_package():
    baro = pytest.importorskip("RCAEval.e2e.baro", exc_type=ImportError).baro
    import pandas as pd

    names = [f"node-{n}" for n in range(12)]
    data = 20 + noise(5, 12) * np.linspace(0.2, 4.0, 12)[:, None]
    data[3, BASELINE:] += 15
    case = incident({(node, LATENCY): row for node, row in zip(names, data, strict=True)}, [], victim="node-0")
    frame = pd.DataFrame({"time": np.arange(BASELINE + WINDOW), **dict(zip(names, data, strict=True))})
    theirs = [name for name in baro(frame, inject_time=BASELINE)["ranks"] if name != "time"]
    ours = deviation.baro(case)
    assert sorted(ours, key=ours.get, reverse=True) == theirs


def test_what_was_not_measured_is_not_scored():
    unit = noise(3, 2)
    gone = np.full(BASELINE + WINDOW, np.nan)
    rare = gone.copy()
    rare[[0, 1, BASELINE]] = [1.0, 1.1, 9.0]  # two baseline samples do not say what is normal
    blind = np.r_[5 + unit[1][:BASELINE], np.full(WINDOW, np.nan)]
    series = {("web", LATENCY): 5 + unit[0], ("rare", LATENCY): rare, ("blind", LATENCY): blind}
    case = incident(series, [("web", "rare"), ("web", "blind"), ("web", "unseen")])
    for rank in (deviation.max_abs_z, deviation.n_sigma, deviation.baro, residuals.circa):
        assert set(rank(case)) == {"web"}, rank.__name__


def test_traversal_stops_at_the_deepest_anomalous_callee(chain):
    scores = walks.deepest_anomalous(chain)
    assert first(scores) == "db"
    assert set(scores) == {"web", "api", "db"}
    assert scores["db"] > 1 > max(scores["web"], scores["api"])


def test_traversal_does_not_reach_a_loud_neighbour():
    unit = noise(4, 3)
    jump = np.r_[np.zeros(BASELINE), [50.0] * WINDOW]
    series = {
        ("web", LATENCY): 9 + unit[0] + jump,
        ("db", LATENCY): 9 + unit[1] + jump / 2,
        ("batch", LATENCY): 9 + unit[2] + 10 * jump,
    }
    scores = walks.deepest_anomalous(incident(series, [("web", "db")]))
    assert first(scores) == "db"
    assert "batch" not in scores


def test_traversal_treats_a_cycle_as_one_place():
    unit = noise(6, 3)
    jump = np.r_[np.zeros(BASELINE), [50.0] * WINDOW]
    series = {(node, LATENCY): 9 + row + jump for node, row in zip(("web", "a", "b"), unit, strict=True)}
    scores = walks.deepest_anomalous(incident(series, [("web", "a"), ("a", "b"), ("b", "a")]))
    assert min(scores["a"], scores["b"]) > 1 > scores["web"]


def test_traversal_abstains_when_nothing_is_wrong():
    unit = noise(7, 2)
    calm = {("web", LATENCY): 9 + 0.1 * unit[0], ("db", LATENCY): 9 + 0.1 * unit[1]}
    assert walks.deepest_anomalous(incident(calm, [("web", "db")])) == {}


def test_an_error_ratio_that_never_moved_is_anomalous_once_it_does():
    errors = np.r_[np.zeros(BASELINE), [0.0, 0.02, 0.01, 0.02, 0.03]]
    series = {("web", "error_ratio"): errors / 2, ("db", "error_ratio"): errors}
    assert first(walks.deepest_anomalous(incident(series, [("web", "db")], metric="error_ratio"))) == "db"


def test_correlation_prefers_the_node_that_moves_like_the_victim():
    unit = noise(8, 3) * 0.1
    web = np.r_[np.zeros(BASELINE), [5.0, 20.0, 10.0, 30.0, 15.0]]
    other = np.r_[np.zeros(BASELINE), [30.0, 5.0, 25.0, 10.0, 20.0]]
    series = {
        ("web", LATENCY): 5 + unit[0] + web,
        ("db", LATENCY): 5 + unit[1] + web,
        ("busy", LATENCY): 5 + unit[2] + other,
    }
    scores = correlation.ranked_correlation(incident(series, [("web", "db"), ("web", "busy")]))
    assert set(scores) == {"db", "busy"}, "the victim correlates with itself whatever happened"
    assert scores["db"] > 0.99 > scores["busy"]


def test_correlation_uses_only_samples_that_both_have():
    values = np.array([[1.0, np.nan, 3.0, 4.0], [np.nan, np.nan, 1.0, 2.0]])
    result = correlation.correlation_with(values, np.array([2.0, 9.0, 6.0, 8.0]))
    assert result[0] == pytest.approx(1.0)
    assert np.isnan(result[1]), "two common samples correlate always"


def test_residuals_blame_the_node_whose_callees_do_not_account_for_it(chain):
    scores = residuals.circa(chain)
    assert first(scores) == "db"
    assert scores["api"] < 4, "api is only as slow as db makes it"


def test_residuals_look_through_a_callee_that_was_not_measured():
    unit = noise(9, 2) * 0.01
    db = 1 + unit[0] + np.r_[np.zeros(BASELINE), [1.0] * WINDOW]
    web = 2 * db + unit[1]
    case = incident({("web", LATENCY): web, ("db", LATENCY): db}, [("web", "api"), ("api", "db")])
    scores = residuals.circa(case)
    assert first(scores) == "db"
    assert scores["web"] < 10


def test_descendant_adjustment_lifts_the_cause_over_a_louder_symptom():
    unit = noise(10, 2)
    jump = np.r_[np.zeros(BASELINE), [8.0] * WINDOW]
    # The symptom saturates: its own residual is larger than the cause's.
    series = {("web", LATENCY): 9 + unit[0] + 2 * jump, ("db", LATENCY): 9 + unit[1] + jump}
    scores = residuals.circa(incident(series, [("web", "db")]))
    assert first(scores) == "db"


def test_random_walk_visits_what_moves_with_the_victim():
    unit = noise(11, 3) * 0.1
    web = np.r_[np.zeros(BASELINE), [5.0, 20.0, 10.0, 30.0, 15.0]]
    series = {
        ("web", LATENCY): 5 + unit[0] + web,
        ("db", LATENCY): 5 + unit[1] + web,
        ("side", LATENCY): 5 + unit[2],
    }
    scores = walks.random_walk(incident(series, [("web", "db"), ("web", "side")]))
    assert first(scores) == "db"
    assert sum(scores.values()) == pytest.approx(1.0, abs=1e-6)


def test_constant_prior_counts_the_other_incidents_when_one_is_left_out():
    truths = [("db",), ("db",), ("cache",)]
    assert prior.in_sample(truths)[2] == {"db": 2.0, "cache": 1.0}
    assert prior.leave_one_out(truths) == [{"db": 1.0, "cache": 1.0}, {"db": 1.0, "cache": 1.0}, {"db": 2.0}]


def test_dowhy_that_cannot_run_says_why(chain):
    with pytest.raises(dowhy_gcm.DidNotFinishError, match="no answer in"):
        dowhy_gcm.attribute(chain, seconds=0.01)


@pytest.mark.slow
def test_dowhy_attributes_the_anomaly_to_the_cause(chain):
    pytest.importorskip("dowhy")
    assert first(dowhy_gcm.attribute(chain, seconds=300, python=sys.executable)) == "db"


def test_dowhy_gets_an_acyclic_graph():
    import networkx as nx

    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (2, 3), (1, 3), (1, 1)])
    kept = nx.DiGraph(dowhy_gcm._acyclic(graph, 0))
    assert nx.is_directed_acyclic_graph(kept)
    assert set(kept) == {0, 1, 2, 3}


def test_an_unknown_method_is_named_with_the_known_ones():
    with pytest.raises(NotFoundError, match="guess") as caught:
        choose(["guess"])
    assert "traversal" in caught.value.cure


def test_slow_methods_run_only_on_request():
    methods, priors, skipped = choose(None)
    assert "dowhy" not in {method.name for method in methods}
    assert "dowhy" in skipped
    assert priors == ["prior_loo", "prior_in_sample"]
    assert [method.name for method in choose(["dowhy"])[0]] == ["dowhy"]
