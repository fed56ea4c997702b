"""From long tables to grids: where a sample lands, and what happens where there is none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from rca.errors import InvalidInputError, NotFoundError
from rca.graph import Floats
from rca.incident import Header, Incident, Victim, Window, metrics_table
from rca.panel import LEAD, MAX_STEPS, Panel, from_incident
from rca.simulation.incidents import sample_incident
from rca.simulation.scenarios import build

START = datetime(2026, 1, 31, 3, 0, tzinfo=UTC)
T0 = START.timestamp()
#: Ten minutes of baseline, three of lead-in, five of incident, one sample a minute.
BASELINE = Window(START, START + timedelta(minutes=10))
INCIDENT = Window(START + timedelta(minutes=13), START + timedelta(minutes=18))
LATENCY, ERRORS = "latency_mean_seconds", "error_ratio"

Sample = tuple[float, str, str | None, str, float]


def make(
    samples: list[Sample],
    *,
    window: Window = INCIDENT,
    baseline: Window = BASELINE,
    edges: tuple[tuple[str, str, str], ...] = (("web", "db", "calls"),),
    onset: datetime | None = None,
) -> Incident:
    """A bundle from samples of (minutes after START, node, peer, metric, value)."""
    return Incident.create(
        Header(id="INC-1", window=window, baseline=baseline, victim=Victim("web", LATENCY), onset=onset),
        metrics=metrics_table(
            np.array([T0 + 60.0 * sample[0] for sample in samples]),
            [sample[1] for sample in samples],
            [sample[3] for sample in samples],
            np.array([sample[4] for sample in samples]),
            [sample[2] for sample in samples],
        ),
        edges=pa.table(
            {"caller": [e[0] for e in edges], "callee": [e[1] for e in edges], "relation": [e[2] for e in edges]}
        ),
    )


def regular(node: str = "web", peer: str | None = None, metric: str = LATENCY) -> list[Sample]:
    """One sample a minute; the value is the minute."""
    return [(float(minute), node, peer, metric, float(minute)) for minute in range(18)]


def of(panel: Panel, group: str, node: str, metric: str = LATENCY) -> list[float]:
    values: Floats = getattr(panel, group)[metric][panel.graph.find(node)]
    return values.tolist()


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_baseline_lead_in_and_incident_lie_on_one_grid_of_the_usual_distance() -> None:
    panel = from_incident(make(regular()))
    assert panel.step == panel.baseline_step == 60.0
    assert (panel.baseline_start, panel.window_start) == (T0, T0 + 13 * 60)
    assert of(panel, "baseline", "web") == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    # Three grid points of lead-in go with the incident.
    assert LEAD == 3
    assert of(panel, "window", "web") == [10, 11, 12, 13, 14, 15, 16, 17]


def test_a_node_without_samples_is_missing_not_zero() -> None:
    panel = from_incident(make(regular()))
    assert np.isnan(of(panel, "window", "db")).all()
    assert ERRORS not in panel.window


def test_gaps_stay_gaps() -> None:
    panel = from_incident(make([s for s in regular() if s[0] not in (4.0, 15.0)]))
    assert np.isnan(of(panel, "baseline", "web")).nonzero()[0].tolist() == [4]
    assert np.isnan(of(panel, "window", "web")).nonzero()[0].tolist() == [LEAD + 2]


def test_the_end_of_a_window_is_not_part_of_it() -> None:
    panel = from_incident(make([*regular(), (18.0, "web", None, LATENCY, 1e6)]))
    assert of(panel, "window", "web")[-1] == 17.0


def test_samples_that_share_a_cell_are_averaged() -> None:
    samples = [*regular(), (14.2, "web", None, LATENCY, 20.0)]
    assert of(from_incident(make(samples)), "window", "web")[LEAD + 1] == pytest.approx((14.0 + 20.0) / 2)


def test_irregular_times_land_in_the_cell_that_holds_them() -> None:
    rng = np.random.default_rng(3)
    samples = [(minute + float(rng.uniform(0.05, 0.45)), n, p, m, v) for minute, n, p, m, v in regular()]
    panel = from_incident(make(samples))
    # The median distance is near a minute, so each cell of the incident still holds its own sample.
    assert panel.step == pytest.approx(60.0, rel=0.2)
    inside = [value for value in of(panel, "window", "web")[LEAD:] if np.isfinite(value)]
    assert sum(inside) / len(inside) == pytest.approx(15.0, abs=0.6)


def test_one_series_sampled_more_often_does_not_change_the_step_of_the_others() -> None:
    dense = [(m / 6.0, "db", None, LATENCY, 1.0) for m in range(60)]
    many = [s for node in ("web", "a", "b", "c", "d", "e") for s in regular(node)]
    assert from_incident(make(many + dense)).step == 60.0


def test_a_baseline_of_long_ago_has_its_own_grid() -> None:
    last_month = Window(START - timedelta(days=31), START - timedelta(days=31) + timedelta(minutes=10))
    shift = -31 * 24 * 60
    samples = [*regular(), *[(minute + shift, n, p, m, 7.0) for minute, n, p, m, _ in regular()]]
    panel = from_incident(make(samples, baseline=last_month))
    assert of(panel, "baseline", "web") == [7.0] * 10
    # What lies just before the incident is its lead-in.
    assert of(panel, "window", "web")[:LEAD] == [10, 11, 12]
    assert panel.baseline_start == last_month.start.timestamp()


def test_the_lead_in_is_missing_when_nothing_was_captured_there() -> None:
    panel = from_incident(make([s for s in regular() if s[0] < 10 or s[0] >= 13]))
    assert np.isnan(of(panel, "window", "web")[:LEAD]).all()


def test_a_long_window_is_averaged_into_fewer_cells() -> None:
    day = Window(START + timedelta(hours=2), START + timedelta(hours=26))
    minutes = np.arange(120.0, 26 * 60, 0.25)
    panel = from_incident(make([*regular(), *[(m, "web", None, LATENCY, m) for m in minutes.tolist()]], window=day))
    values = panel.window[LATENCY][panel.graph.find("web")]
    assert len(values) == LEAD + MAX_STEPS
    assert panel.step == 120.0
    assert values[LEAD] == pytest.approx(np.mean([120.0 + k / 4 for k in range(8)]))


def test_a_single_sample_fills_a_single_cell() -> None:
    panel = from_incident(make([(15.0, "web", None, LATENCY, 5.0)]))
    assert panel.window[LATENCY].shape[1] == LEAD + 1
    assert of(panel, "window", "web")[LEAD] == 5.0
    assert LATENCY not in panel.baseline


def test_three_rare_samples_have_three_cells() -> None:
    window = Window(START + timedelta(minutes=15), START + timedelta(minutes=30))
    minutes = [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]
    panel = from_incident(make([(m, "web", None, LATENCY, m) for m in minutes], window=window))
    assert panel.step == 300.0
    assert of(panel, "window", "web")[LEAD:] == [15.0, 20.0, 25.0]


# --- calls ------------------------------------------------------------------------------------------------------------


def test_what_a_caller_saw_of_a_callee_belongs_to_the_call() -> None:
    panel = from_incident(make([*regular(), *regular("web", "db"), *regular("web", "db", ERRORS)]))
    assert panel.edge_window[LATENCY][0].tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert set(panel.edge_baseline) == {LATENCY, ERRORS}
    # It is not a measurement of the caller itself.
    assert ERRORS not in panel.window


def test_of_several_relations_between_two_nodes_the_call_is_measured() -> None:
    edges = (("web", "db", "shares_device"), ("web", "db", "calls"), ("db", "web", "shares_device"))
    panel = from_incident(make([*regular(), *regular("web", "db")], edges=edges))
    measured = np.isfinite(panel.edge_window[LATENCY]).any(axis=1)
    relation = ["calls" if r == 0 else "other" for r in panel.graph.relations]
    assert [name for name, known in zip(relation, measured, strict=True) if known] == ["calls"]


def test_a_measured_call_without_an_edge_goes_nowhere() -> None:
    panel = from_incident(make([*regular(), *regular("db", "web"), *regular("web", "nobody")]))
    assert panel.edge_window == {}


# --- the question -----------------------------------------------------------------------------------------------------


def test_the_question_can_be_about_another_victim_and_metric() -> None:
    incident = make([*regular(), *regular("db", None, ERRORS)])
    panel = from_incident(incident)
    assert (panel.graph.nodes[panel.victim], panel.metric) == ("web", LATENCY)
    panel = from_incident(incident, victim="db", metric=ERRORS)
    assert (panel.graph.nodes[panel.victim], panel.metric) == ("db", ERRORS)


def test_the_reported_onset_is_kept_in_seconds_from_the_window() -> None:
    assert from_incident(make(regular())).onset is None
    assert from_incident(make(regular(), onset=INCIDENT.start + timedelta(seconds=90))).onset == 90.0


def test_an_unknown_victim_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="no node 'wbe'") as caught:
        from_incident(make(regular()), victim="wbe")
    assert "web" in caught.value.cure


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([], id="no rows"),
        pytest.param([s for s in regular() if s[0] < 13], id="nothing in the window"),
        pytest.param([(s[0], *s[1:4], float("nan")) for s in regular()], id="only NaN"),
        pytest.param([(s[0], *s[1:4], float("inf")) for s in regular()], id="only infinite"),
        pytest.param([(s[0] + 60 * 24 * 365, *s[1:]) for s in regular()], id="a year late"),
    ],
)
def test_nothing_in_the_incident_window_is_an_error(samples: list[Sample]) -> None:
    with pytest.raises(InvalidInputError, match="INC-1: no metric value lies in the incident window 2026-01-31T03:13"):
        from_incident(make(samples))


# --- bundles of the simulation ----------------------------------------------------------------------------------------


def _same_up_to_nan(one: Panel, other: Panel, group: str) -> None:
    """Equal values; a metric that is absent equals one that is NaN throughout."""
    first, second = getattr(one, group), getattr(other, group)
    for name in set(first) | set(second):
        empty = np.full_like(next(iter((first or second).values())), np.nan)
        np.testing.assert_allclose(first.get(name, empty), second.get(name, empty), rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("seed", range(12))
def test_a_simulated_bundle_gives_back_the_panel_that_it_was_made_from(seed: int) -> None:
    simulated = sample_incident(seed, nodes=14)
    made, back = simulated.panel, from_incident(simulated.incident)
    assert back.graph.nodes == made.graph.nodes
    for name in ("kinds", "callers", "callees", "relations", "asynchronous", "edge_static"):
        np.testing.assert_array_equal(getattr(back.graph, name), getattr(made.graph, name), err_msg=name)
    assert (back.victim, back.metric, back.step, back.onset) == (made.victim, made.metric, made.step, made.onset)
    for group in ("baseline", "window", "edge_baseline", "edge_window"):
        _same_up_to_nan(made, back, group)


def test_a_scenario_gains_the_edges_of_its_scheduler() -> None:
    simulated = build("gpu-contention", 0)
    panel = from_incident(simulated.incident)
    assert set(simulated.panel.graph.nodes) <= set(panel.graph.nodes)
    assert len(panel.graph.callers) >= len(simulated.panel.graph.callers)
    _same_up_to_nan(simulated.panel, panel, "window")
