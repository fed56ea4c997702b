"""What the network sees: deviations, onsets, own excess, and that names and order do not enter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rca.features import (
    Features,
    annotated,
    call_weights,
    deviate,
    extract,
    r1_node_features,
    symptom_onset,
    victim_weights,
)
from rca.graph import EDGE_STATIC, NODE_KINDS, RELATIONS, CallGraph, Floats, Ints
from rca.incident import NodeKind, Relation
from rca.panel import LEAD, Panel
from rca.simulation.incidents import sample_incident

LATENCY, P95, ERRORS, RATE = "latency_mean_seconds", "latency_p95_seconds", "error_ratio", "request_rate"


def graph_of(*edges: str, nodes: str = "", asynchronous: Sequence[str] = ()) -> CallGraph:
    """A graph from "a>b" (calls) and "a~b" (shares_device); one letter a node."""
    names = tuple(sorted({c for edge in edges for c in edge if c.isalpha()} | set(nodes)))
    return CallGraph(
        nodes=names,
        kinds=np.full(len(names), NODE_KINDS.index(NodeKind.SERVICE)),
        callers=np.array([names.index(e[0]) for e in edges], dtype=np.int64),
        callees=np.array([names.index(e[2]) for e in edges], dtype=np.int64),
        relations=np.array(
            [RELATIONS.index(Relation.CALLS if e[1] == ">" else Relation.SHARES_DEVICE) for e in edges], dtype=np.int64
        ),
        asynchronous=np.array([e in asynchronous for e in edges], dtype=bool),
        protocols=("",) * len(edges),
        edge_static=np.full((len(edges), len(EDGE_STATIC)), np.nan),
    )


def panel_of(
    graph: CallGraph,
    before: dict[str, dict[str, float]],
    after: dict[str, dict[str, float]],
    *,
    victim: str = "a",
    metric: str = LATENCY,
    edges_before: dict[str, dict[int, float]] | None = None,
    edges_after: dict[str, dict[int, float]] | None = None,
) -> Panel:
    """A panel whose metrics (metric -> node -> level) jump from one level to another at the start of the incident."""

    def grid(levels: dict[str, float], steps: int) -> Floats:
        values = np.full((len(graph.nodes), steps), np.nan)
        for node, level in levels.items():
            values[graph.find(node)] = level
        return values

    def calls(levels: dict[int, float], steps: int) -> Floats:
        values = np.full((len(graph.callers), steps), np.nan)
        for edge, level in levels.items():
            values[edge] = level
        return values

    quiet = edges_before or {}
    return Panel(
        graph=graph,
        baseline={name: grid(levels, 20) for name, levels in before.items()},
        window={
            name: np.concatenate([grid(before[name], LEAD), grid(levels, 6)], axis=1) for name, levels in after.items()
        },
        edge_baseline={name: calls(levels, 20) for name, levels in quiet.items()},
        edge_window={
            name: np.concatenate([calls(quiet[name], LEAD), calls(levels, 6)], axis=1)
            for name, levels in (edges_after or {}).items()
        },
        step=60.0,
        baseline_start=0.0,
        baseline_step=60.0,
        window_start=1e4,
        victim=graph.find(victim),
        metric=metric,
        onset=0.0,
    )


def by_node(graph: CallGraph, values: Floats) -> dict[str, float]:
    return dict(zip(graph.nodes, values.tolist(), strict=True))


# --- one series -------------------------------------------------------------------------------------------------------


def noisy(level: float, steps: int, seed: int = 0, noise: float = 0.05) -> Floats:
    return (level * np.exp(np.random.default_rng(seed).normal(0.0, noise, steps)))[None, :]


def test_a_deviation_has_the_sign_of_the_change() -> None:
    baseline = noisy(1.0, 60)
    up = deviate(LATENCY, baseline, noisy(2.0, 8, 1), 0, 60.0)
    down = deviate(LATENCY, baseline, noisy(0.5, 8, 1), 0, 60.0)
    same = deviate(LATENCY, baseline, noisy(1.0, 8, 1), 0, 60.0)
    assert up.z[0] > 10
    assert down.z[0] < -5
    assert abs(same.z[0]) < 1
    assert up.ratio[0] == pytest.approx(np.log(2.0), abs=0.05)
    assert down.ratio[0] == pytest.approx(np.log(0.5), abs=0.05)
    assert np.sign([up.z_peak[0], down.z_peak[0]]).tolist() == [1, -1]


def test_the_baseline_is_median_and_spread_whatever_a_few_outliers_say() -> None:
    clean = noisy(1.0, 100)
    dirty = clean.copy()
    dirty[0, ::20] = 50.0
    window = noisy(1.6, 8, 1)
    one, other = deviate(LATENCY, clean, window, 0, 60.0), deviate(LATENCY, dirty, window, 0, 60.0)
    assert other.baseline[0] == pytest.approx(one.baseline[0], rel=0.03)
    # The outliers widen the spread (such values do occur), far less than a plain standard deviation would.
    assert one.sigma[0] <= other.sigma[0] < 0.4 * float(dirty.std())
    assert (one.baseline_count[0], one.count[0]) == (100, 8)


def test_a_constant_baseline_does_not_make_every_flicker_infinite() -> None:
    found = deviate(ERRORS, np.zeros((1, 50)), np.full((1, 6), 0.001), 0, 60.0)
    assert 0 < found.z[0] < 1
    assert deviate(ERRORS, np.zeros((1, 50)), np.full((1, 6), 0.2), 0, 60.0).z[0] > 20


def test_a_count_has_at_least_the_spread_of_chance() -> None:
    # One request a minute on average: 60 s without any is nothing to report.
    rare = deviate(RATE, np.full((1, 50), 1 / 60), np.zeros((1, 3)), 0, 60.0)
    assert abs(rare.z[0]) < 2
    busy = deviate(RATE, np.full((1, 50), 100.0), np.zeros((1, 3)), 0, 60.0)
    assert busy.z[0] < -10


def test_few_baseline_samples_make_a_deviation_less_sure() -> None:
    window = noisy(1.5, 5, 1)
    short = deviate(LATENCY, noisy(1.0, 80)[:, :4], window, 0, 60.0)
    full = deviate(LATENCY, noisy(1.0, 80), window, 0, 60.0)
    assert 0 < short.z[0] < full.z[0] or short.sigma[0] < full.sigma[0]
    constant = [deviate(LATENCY, np.ones((1, n)), window, 0, 60.0).z[0] for n in (2, 5, 100)]
    assert constant == sorted(constant)


def test_missing_is_missing() -> None:
    nothing = np.full((1, 20), np.nan)
    no_baseline = deviate(LATENCY, nothing, noisy(1.0, 5), 0, 60.0)
    assert np.isnan([no_baseline.baseline[0], no_baseline.z[0], no_baseline.onset[0]]).all()
    assert no_baseline.baseline_count[0] == 0
    assert no_baseline.post[0] == pytest.approx(1.0, rel=0.1)
    no_window = deviate(LATENCY, noisy(1.0, 20), nothing[:, :5], 0, 60.0)
    assert np.isnan([no_window.post[0], no_window.peak[0], no_window.z[0], no_window.onset[0]]).all()
    assert no_window.count[0] == 0
    with_gap = noisy(3.0, 6)
    with_gap[0, 2:4] = np.nan
    assert deviate(LATENCY, noisy(1.0, 20), with_gap, 0, 60.0).count[0] == 4
    never = deviate(LATENCY, np.full((1, 0), np.nan), noisy(1.0, 5), 0, 60.0)
    assert np.isnan(never.z[0])


def test_only_what_follows_the_onset_is_the_incident() -> None:
    window = np.array([[1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 9.0, 5.0]])
    found = deviate(LATENCY, noisy(1.0, 40), window, 4, 60.0)
    assert found.post[0] == pytest.approx(6.0)
    assert found.peak[0] == 9.0
    assert found.count[0] == 4
    assert found.onset[0] == 4
    # Against the samples just before, the size of the step is the same here.
    assert found.z_local[0] == pytest.approx((6.0 - 1.0) / found.sigma[0])


def test_the_range_of_the_baseline_is_kept() -> None:
    found = deviate(LATENCY, np.array([[3.0, np.nan, 1.0, 2.0]]), np.ones((1, 3)), 0, 60.0)
    assert (found.low[0], found.high[0]) == (1.0, 3.0)


def test_the_onset_of_a_drop_is_found_as_that_of_a_rise() -> None:
    baseline = noisy(1.0, 40)
    for level in (0.4, 2.5):
        window = np.concatenate([noisy(1.0, 5, 1), noisy(level, 5, 2)], axis=1)
        assert deviate(LATENCY, baseline, window, 5, 60.0).onset[0] == 5
    assert np.isnan(deviate(LATENCY, baseline, np.full((1, 10), 1.02), 5, 60.0).onset[0])


# --- when the symptom began -------------------------------------------------------------------------------------------


def symptom(values: Floats, *, reported: float | None = None, baseline: Floats | None = None) -> int:
    graph = graph_of(nodes="a")
    return symptom_onset(
        Panel(
            graph=graph,
            baseline={} if baseline is not None and not baseline.size else {LATENCY: noisy(1.0, 60)},
            window={LATENCY: values},
            edge_baseline={},
            edge_window={},
            step=60.0,
            baseline_start=0.0,
            baseline_step=60.0,
            window_start=1e4,
            victim=0,
            metric=LATENCY,
            onset=reported,
        )
    )


@given(
    onset=st.integers(LEAD, LEAD + 12),
    level=st.sampled_from([0.3, 0.6, 1.5, 3.0, 40.0]),
    seed=st.integers(0, 1000),
    gap=st.integers(-1, 15),
)
@settings(max_examples=60, deadline=None)
def test_a_step_of_the_victim_is_found_where_it_is(onset: int, level: float, seed: int, gap: int) -> None:
    steps = LEAD + 16
    values = np.concatenate([noisy(1.0, onset, seed, 0.03), noisy(level, steps - onset, seed + 1, 0.03)], axis=1)
    if gap >= 0 and gap not in (onset, onset - 1):
        values[0, gap] = np.nan
    assert symptom(values) == onset


def test_a_reported_onset_is_believed_and_kept_inside_the_window() -> None:
    values = np.concatenate([noisy(1.0, 10), noisy(4.0, 10)], axis=1)
    assert symptom(values) == 10
    assert symptom(values, reported=120.0) == LEAD + 2
    assert symptom(values, reported=1e9) == 19
    assert symptom(values, reported=-1e9) == LEAD


def test_without_a_measurement_the_onset_is_the_start_of_the_incident() -> None:
    assert symptom(np.full((1, 10), np.nan)) == LEAD
    panel = panel_of(graph_of("a>b"), {P95: {"a": 1.0}}, {P95: {"a": 2.0}}, metric=LATENCY)
    assert symptom_onset(panel) == LEAD


# --- what a node adds by itself ---------------------------------------------------------------------------------------


def test_in_a_chain_only_the_slow_node_has_an_excess_of_its_own() -> None:
    # c gains 0.3 s; b calls it twice a request, a calls b once: 0.6 s more at both.
    graph = graph_of("a>b", "b>c")
    panel = panel_of(
        graph,
        {LATENCY: {"a": 0.5, "b": 0.4, "c": 0.1}, RATE: {"a": 10.0, "b": 10.0, "c": 20.0}},
        {LATENCY: {"a": 1.1, "b": 1.0, "c": 0.4}, RATE: {"a": 10.0, "b": 10.0, "c": 20.0}},
    )
    found = extract(panel)
    assert found.centre == LATENCY
    assert found.calls.tolist() == pytest.approx([1.0, 2.0])
    assert by_node(graph, found.own) == pytest.approx({"a": 0.0, "b": 0.0, "c": 0.3}, abs=1e-12)
    assert by_node(graph, found.weight) == pytest.approx({"a": 1.0, "b": 1.0, "c": 2.0})
    # Own excess times weight is what the victim felt.
    assert float((found.own * found.weight).sum()) == pytest.approx(0.6)


def test_several_ways_to_the_victim_add_up() -> None:
    # a calls b twice and c once; both call d once: one second at d is three at a.
    graph = graph_of("a>b", "a>c", "b>d", "c>d")
    weight = victim_weights(graph, np.ones(4, dtype=bool), np.array([2.0, 1.0, 1.0, 1.0]), graph.find("a"))
    assert by_node(graph, weight) == {"a": 1.0, "b": 2.0, "c": 1.0, "d": 3.0}


def test_a_node_reached_late_passes_on_all_that_reached_it() -> None:
    # The short way a>e must not be used before the long way a>b>c>e has arrived.
    graph = graph_of("a>b", "a>e", "b>c", "c>e", "e>f")
    weight = victim_weights(graph, np.ones(5, dtype=bool), np.ones(5), graph.find("a"))
    assert by_node(graph, weight) == {"a": 1.0, "b": 1.0, "c": 1.0, "e": 2.0, "f": 2.0}


def test_what_the_victim_does_not_depend_on_weighs_nothing() -> None:
    graph = graph_of("a>b", "z>a", "z>y")
    weight = victim_weights(graph, np.ones(3, dtype=bool), np.ones(3), graph.find("a"))
    assert by_node(graph, weight) == {"a": 1.0, "b": 1.0, "y": 0.0, "z": 0.0}


def test_a_cycle_is_followed_once_around() -> None:
    graph = graph_of("a>b", "b>c", "c>b", "c>d")
    weight = victim_weights(graph, np.ones(4, dtype=bool), np.array([1.0, 0.5, 0.5, 1.0]), graph.find("a"))
    assert by_node(graph, weight) == {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.5}
    back = graph_of("a>b", "b>a")
    weight = victim_weights(back, np.ones(2, dtype=bool), np.full(2, 3.0), back.find("a"))
    assert by_node(back, weight) == {"a": 1.0, "b": 3.0}


def test_nobody_waits_for_an_asynchronous_call() -> None:
    graph = graph_of("a>b", "a>c", asynchronous=["a>c"])
    panel = panel_of(graph, {LATENCY: {"a": 0.2, "b": 0.1, "c": 0.1}}, {LATENCY: {"a": 0.2, "b": 0.1, "c": 5.0}})
    found = extract(panel)
    assert by_node(graph, found.weight)["c"] == 0.0
    assert by_node(graph, found.own)["a"] == pytest.approx(0.0, abs=1e-12)


def test_what_the_caller_saw_is_believed_over_what_the_callee_says() -> None:
    # The network between a and b got 0.2 s slower: b does not know, a's view of the call does.
    graph = graph_of("a>b")
    panel = panel_of(
        graph,
        {LATENCY: {"a": 0.5, "b": 0.1}},
        {LATENCY: {"a": 0.7, "b": 0.1}},
        edges_before={LATENCY: {0: 0.11}},
        edges_after={LATENCY: {0: 0.31}},
    )
    assert by_node(graph, extract(panel).own) == pytest.approx({"a": 0.0, "b": 0.0}, abs=1e-9)


def test_errors_pass_at_most_once_per_request() -> None:
    # a calls b five times a request; one failure or five, the request fails once.
    graph = graph_of("a>b")
    panel = panel_of(
        graph,
        {ERRORS: {"a": 0.0, "b": 0.0}, RATE: {"a": 10.0, "b": 50.0}},
        {ERRORS: {"a": 0.3, "b": 0.3}, RATE: {"a": 10.0, "b": 50.0}},
        metric=ERRORS,
    )
    found = extract(panel)
    assert found.calls.tolist() == [5.0]
    assert by_node(graph, found.own_errors) == pytest.approx({"a": 0.0, "b": 0.3})
    assert by_node(graph, found.error_weight) == {"a": 1.0, "b": 1.0}


def test_an_excess_that_is_not_measured_is_not_zero() -> None:
    graph = graph_of("a>b", "b>c")
    found = extract(panel_of(graph, {LATENCY: {"a": 0.5, "c": 0.1}}, {LATENCY: {"a": 0.9, "c": 0.1}}))
    own = by_node(graph, found.own)
    assert np.isnan(own["b"])
    assert own["c"] == pytest.approx(0.0)
    # b hides what it adds, so a keeps its whole excess.
    assert own["a"] == pytest.approx(0.4)


def test_calls_per_request_come_from_the_edge_or_are_shared_by_rate() -> None:
    graph = graph_of("a>c", "b>c")
    rates = {RATE: {"a": 10.0, "b": 30.0, "c": 20.0}}
    shared = extract(panel_of(graph, rates, rates))
    # 20 requests at c against 40 at its callers: half a call each.
    assert shared.calls.tolist() == pytest.approx([0.5, 0.5])
    measured = panel_of(
        graph, rates, rates, edges_before={RATE: {0: 15.0, 1: 5.0}}, edges_after={RATE: {0: 15.0, 1: 50.0}}
    )
    found = extract(measured)
    assert found.calls.tolist() == pytest.approx([1.5, 5.0 / 30.0])
    before, now, known = call_weights(graph, found.deviations, found.edge_deviations)
    assert known.all()
    assert (now / before).tolist() == pytest.approx([1.0, 10.0])


def test_calls_per_request_that_nothing_tells_count_as_one_and_as_unknown() -> None:
    graph = graph_of("a>b")
    found = extract(panel_of(graph, {LATENCY: {"a": 1.0}}, {LATENCY: {"a": 1.0}}))
    before, _, known = call_weights(graph, found.deviations, found.edge_deviations)
    assert before.tolist() == [1.0]
    assert not known.any()


def test_seconds_are_counted_in_the_latency_that_the_victim_has() -> None:
    graph = graph_of("a>b")
    levels = {P95: {"a": 1.0, "b": 0.5}, LATENCY: {"b": 0.2}}
    assert extract(panel_of(graph, levels, levels, metric=P95)).centre == P95
    levels = {P95: {"a": 1.0, "b": 0.5}, LATENCY: {"a": 0.3, "b": 0.2}}
    assert extract(panel_of(graph, levels, levels, metric=P95)).centre == LATENCY
    levels = {ERRORS: {"a": 0.0, "b": 0.0}}
    found = extract(panel_of(graph, levels, levels, metric=ERRORS))
    assert found.centre is None
    assert np.isnan(found.own).all()


# --- the matrices -----------------------------------------------------------------------------------------------------


def test_the_matrices_have_two_directions_per_edge_and_no_gaps() -> None:
    for seed in range(4):
        panel = sample_incident(seed, nodes=15).panel
        found = extract(panel)
        edges = len(panel.graph.callers)
        assert found.node.shape[0] == len(panel.graph.nodes)
        assert found.edge.shape[0] == 2 * edges
        assert found.edge_index.shape == (2, 2 * edges)
        np.testing.assert_array_equal(found.edge_index[:, :edges], np.stack([panel.graph.callees, panel.graph.callers]))
        np.testing.assert_array_equal(found.edge_index[:, edges:], found.edge_index[::-1, :edges])
        # The two directions of an edge differ in the column that says which is which.
        np.testing.assert_array_equal(found.edge[:edges, :-1], found.edge[edges:, :-1])
        assert set(found.edge[:edges, -1]) == {0.0}
        assert set(found.edge[edges:, -1]) == {1.0}
        for matrix in (found.node, found.edge):
            assert matrix.dtype == np.float32
            assert np.isfinite(matrix).all()
            assert np.abs(matrix).max() <= 12.0


def test_the_layout_is_the_same_whatever_was_measured() -> None:
    graph = graph_of("a>b")
    nothing = extract(panel_of(graph, {"queue_depth": {"b": 1.0}}, {"queue_depth": {"b": 2.0}}))
    rich = extract(sample_incident(1, nodes=12).panel)
    assert nothing.node.shape[1] == rich.node.shape[1]
    assert nothing.edge.shape[1] == rich.edge.shape[1]


def test_a_graph_of_one_node_has_features() -> None:
    found = extract(panel_of(graph_of(nodes="a"), {LATENCY: {"a": 1.0}}, {LATENCY: {"a": 3.0}}))
    assert found.node.shape[0] == 1
    assert found.edge.shape[0] == 0
    assert found.own.tolist() == pytest.approx([2.0])


def test_measured_and_missing_do_not_look_alike() -> None:
    graph = graph_of("a>b")
    unchanged = {LATENCY: {"a": 1.0, "b": 0.5}}
    known = extract(panel_of(graph, unchanged, unchanged))
    missing = extract(panel_of(graph, {LATENCY: {"a": 1.0}}, {LATENCY: {"a": 1.0}}))
    b = graph.find("b")
    # Both have a deviation of zero; masks tell them apart.
    assert (known.node[b] != missing.node[b]).any()


# --- no identity ------------------------------------------------------------------------------------------------------


def shuffled(panel: Panel, order: Ints, edge_order: Ints) -> Panel:
    """The same incident with nodes and edges listed in another order (that is: with other names)."""
    graph = panel.graph
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return Panel(
        graph=CallGraph(
            nodes=tuple(f"n{i:04d}" for i in range(len(order))),
            kinds=graph.kinds[order],
            callers=place[graph.callers[edge_order]],
            callees=place[graph.callees[edge_order]],
            relations=graph.relations[edge_order],
            asynchronous=graph.asynchronous[edge_order],
            protocols=tuple(graph.protocols[k] for k in edge_order),
            edge_static=graph.edge_static[edge_order],
        ),
        baseline={k: v[order] for k, v in panel.baseline.items()},
        window={k: v[order] for k, v in panel.window.items()},
        edge_baseline={k: v[edge_order] for k, v in panel.edge_baseline.items()},
        edge_window={k: v[edge_order] for k, v in panel.edge_window.items()},
        step=panel.step,
        baseline_start=panel.baseline_start,
        baseline_step=panel.baseline_step,
        window_start=panel.window_start,
        victim=int(place[panel.victim]),
        metric=panel.metric,
        onset=panel.onset,
    )


def distinct(seed: int) -> Panel:
    """A random acyclic cluster, all of it below the victim, every value different."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(3, 10))
    letters = "abcdefghij"[:size]
    edges = [f"{letters[int(rng.integers(0, i))]}>{letters[i]}" for i in range(1, size)]
    edges += [f"{letters[i]}>{letters[j]}" for i in range(size) for j in range(i + 1, size) if rng.random() < 0.25]
    graph = graph_of(*sorted(set(edges)))
    count = len(graph.nodes)
    metrics = (LATENCY, P95, ERRORS, RATE, "cpu_utilization_ratio")
    level = {name: rng.uniform(0.05, 0.4, (count, 1)) for name in metrics}
    seen = {name: level[name] * np.exp(rng.normal(0, 0.1, (count, 30 + LEAD + 8))) for name in metrics}
    for values in seen.values():
        values[:, 30 + LEAD :] *= rng.uniform(0.5, 4.0, (count, 1))
    return Panel(
        graph=graph,
        baseline={name: values[:, :30] for name, values in seen.items()},
        window={name: values[:, 30:] for name, values in seen.items()},
        edge_baseline={LATENCY: rng.uniform(0.1, 0.2, (len(graph.callers), 30))},
        edge_window={LATENCY: rng.uniform(0.2, 0.4, (len(graph.callers), LEAD + 8))},
        step=30.0,
        baseline_start=0.0,
        baseline_step=30.0,
        window_start=2e3,
        victim=0,
        metric=LATENCY,
    )


def _same(one: Features, other: Features, order: Ints, edge_order: Ints) -> None:
    both = np.concatenate([edge_order, edge_order + len(edge_order)])
    np.testing.assert_allclose(other.node, one.node[order], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other.edge, one.edge[both], rtol=1e-5, atol=1e-5)
    for name in ("weight", "error_weight", "own", "own_errors"):
        np.testing.assert_allclose(getattr(other, name), getattr(one, name)[order], rtol=1e-9, atol=1e-9)
    assert other.onset == one.onset


@given(seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_other_names_and_another_order_permute_the_features(seed: int, data: st.DataObject) -> None:
    panel = distinct(seed)
    order = np.array(data.draw(st.permutations(range(len(panel.graph.nodes)))))
    edge_order = np.array(data.draw(st.permutations(range(len(panel.graph.callers)))))
    _same(extract(panel), extract(shuffled(panel, order, edge_order)), order, edge_order)


def test_ways_that_nobody_waits_for_do_not_delay_the_others() -> None:
    # x is reached only over a shared device (or an asynchronous call): its call of z never arrives.
    for graph in (
        graph_of("a>b", "a>z", "a~x", "x>z", "z>b"),
        graph_of("a>b", "a>z", "a>x", "x>z", "z>b", asynchronous=["a>x"]),
    ):
        is_call = (graph.relations == 0) & ~graph.asynchronous
        weight = victim_weights(graph, is_call, np.ones(5), graph.find("a"))
        assert by_node(graph, weight) == {"a": 1.0, "b": 2.0, "x": 0.0, "z": 1.0}


def test_only_callers_share_the_requests_of_a_callee() -> None:
    graph = graph_of("a>c", "b~c")
    rates = {RATE: {"a": 10.0, "b": 30.0, "c": 10.0}}
    assert extract(panel_of(graph, rates, rates)).calls[0] == pytest.approx(1.0)


def test_nodes_that_look_the_same_have_the_same_features() -> None:
    # y and z differ in nothing but the name.
    graph = graph_of("a>b", "y>a", "z>a")
    before = {LATENCY: {"a": 1.0, "b": 0.5, "y": 1.0, "z": 1.0}}
    after = {LATENCY: {"a": 2.0, "b": 1.5, "y": 2.0, "z": 2.0}}
    node = extract(panel_of(graph, before, after)).node
    np.testing.assert_array_equal(node[graph.find("y")], node[graph.find("z")])


@pytest.mark.parametrize("seed", range(10))
def test_names_do_not_enter_the_features_of_simulated_incidents(seed: int) -> None:
    panel = sample_incident(seed, nodes=20).panel
    rng = np.random.default_rng(seed)
    order, edge_order = rng.permutation(len(panel.graph.nodes)), rng.permutation(len(panel.graph.callers))
    one, other = extract(panel), extract(shuffled(panel, order, edge_order))
    np.testing.assert_allclose(other.node, one.node[order], rtol=1e-5, atol=1e-5)


def test_the_onset_is_when_a_value_left_its_baseline_for_good() -> None:
    window = np.array([[1, 9, 1, 1, 1, 1, 9, 9, 9.0]])
    assert deviate(LATENCY, noisy(1.0, 40), window, 6, 60.0).onset[0] == 6


@pytest.mark.parametrize("outlier", [3, 4])
def test_one_outlier_before_the_step_moves_the_onset_by_a_sample_at_most(outlier: int) -> None:
    values = noisy(1.0, 23)
    values[0, outlier] *= 5
    values[0, 6:] *= 5
    assert symptom(values) in (5, 6)


def test_without_a_baseline_the_shift_within_the_window_counts() -> None:
    values = np.concatenate([noisy(1.0, 8), noisy(4.0, 4)], axis=1)
    assert symptom(values, baseline=np.empty((1, 0))) == 8


def test_nodes_carry_the_features_of_r1_where_they_were_measured() -> None:
    graph = graph_of("a>b")
    before = {RATE: {"a": 9.0, "b": 9.0}, "latency_p99_seconds": {"a": 1.0, "b": 0.5}}
    after = {RATE: {"a": 9.0, "b": np.nan}, "latency_p99_seconds": {"a": 1.0, "b": 0.5}}
    panel = panel_of(graph, before, after)
    values, known = r1_node_features(panel)
    web, db = graph.find("a"), graph.find("b")
    assert values[web] == pytest.approx([np.log(10.0), 0.0, np.log(2.0)])
    assert known[web].tolist() == [True, False, True]
    assert known[db].tolist() == [False, False, True]
    assert "log1p_request_rate" not in annotated(panel).nodes["b"]
