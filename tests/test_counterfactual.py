"""What the victim would have seen: Shapley shares, and the mechanism engine on chains worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rca.counterfactual import mechanism
from rca.counterfactual.mechanism import CANDIDATES, Estimate, IntervalScale, attribute, explained_share, interval
from rca.counterfactual.shapley import shapley
from rca.explanation import Attribution, AttributionEntry
from rca.features import extract
from rca.graph import EDGE_STATIC, NODE_KINDS, RELATIONS, CallGraph, Floats
from rca.incident import NodeKind, Relation
from rca.panel import LEAD, Panel

LATENCY, ERRORS, RATE = "latency_mean_seconds", "error_ratio", "request_rate"

# --- Shapley ----------------------------------------------------------------------------------------------------------


def by_permutations(players: int, worth: Callable[[frozenset[int]], float]) -> list[float]:
    """The definition: the mean of what a player adds, over all orders in which players may arrive."""
    shares = [0.0] * players
    for order in permutations(range(players)):
        for position, player in enumerate(order):
            before = frozenset(order[:position])
            shares[player] += worth(before | {player}) - worth(before)
    return [share / math.factorial(players) for share in shares]


def game(players: int, values: list[float]) -> Callable[[frozenset[int]], float]:
    """The game whose coalition with binary number i is worth ``values[i]``."""
    assert len(values) == 2**players
    return lambda coalition: values[sum(2**player for player in coalition)]


@st.composite
def games(draw: st.DrawFn) -> tuple[int, Callable[[frozenset[int]], float]]:
    players = draw(st.integers(0, 4))
    values = draw(st.lists(st.floats(-10, 10), min_size=2**players, max_size=2**players))
    return players, game(players, values)


@given(games())
@settings(max_examples=150, deadline=None)
def test_shares_are_the_mean_over_all_orders_and_add_up(drawn: tuple[int, Callable[[frozenset[int]], float]]) -> None:
    players, worth = drawn
    shares = shapley(players, worth)
    assert shares == pytest.approx(by_permutations(players, worth), abs=1e-9)
    everyone = frozenset(range(players))
    assert sum(shares) == pytest.approx(worth(everyone) - worth(frozenset()), abs=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_players_that_add_the_same_get_the_same_and_one_that_adds_nothing_gets_nothing(values: list[float]) -> None:
    # Worth depends on how many of players 0, 1 and 2 are there; player 3 never matters.
    shares = shapley(4, lambda coalition: values[len(coalition - {3})])
    assert shares[0] == pytest.approx(shares[1], abs=1e-9)
    assert shares[1] == pytest.approx(shares[2], abs=1e-9)
    assert shares[3] == pytest.approx(0.0, abs=1e-9)


def test_a_joint_effect_is_split_between_those_who_make_it() -> None:
    # Alone 2 and 4, together 12: the extra 6 is halved.
    assert shapley(2, game(2, [0.0, 2.0, 4.0, 12.0])) == [5.0, 7.0]
    assert shapley(1, game(1, [1.0, 4.0])) == [3.0]
    assert shapley(0, lambda _: 0.0) == []


def test_each_coalition_is_valued_once() -> None:
    asked: list[frozenset[int]] = []

    def worth(coalition: frozenset[int]) -> float:
        asked.append(coalition)
        return float(len(coalition))

    assert shapley(4, worth) == [1.0] * 4
    assert len(asked) == len(set(asked)) == 16


# --- panels worked out by hand ----------------------------------------------------------------------------------------


def chain(
    levels: dict[str, dict[str, tuple[float, float]]],
    edges: tuple[str, ...] = ("a>b", "b>c"),
    *,
    kinds: dict[str, NodeKind] | None = None,
    metric: str = LATENCY,
    baseline_steps: int = 30,
    noise: float = 0.0,
) -> Panel:
    """A panel whose levels (metric -> node -> before, after) jump at the start of the incident; the victim is a."""
    names = tuple(sorted({edge[0] for edge in edges} | {edge[2] for edge in edges}))
    rng = np.random.default_rng(1)

    def grid(name: str, when: int, steps: int) -> Floats:
        values = np.full((len(names), steps), np.nan)
        for node, pair in levels[name].items():
            values[names.index(node)] = pair[when]
        return values * np.exp(rng.normal(0.0, noise, values.shape))

    relation = {">": Relation.CALLS, "~": Relation.SHARES_DEVICE, "@": Relation.RUNS_ON}
    graph = CallGraph(
        nodes=names,
        kinds=np.array([NODE_KINDS.index((kinds or {}).get(n, NodeKind.SERVICE)) for n in names], dtype=np.int64),
        callers=np.array([names.index(e[0]) for e in edges], dtype=np.int64),
        callees=np.array([names.index(e[2]) for e in edges], dtype=np.int64),
        relations=np.array([RELATIONS.index(relation[e[1]]) for e in edges], dtype=np.int64),
        asynchronous=np.zeros(len(edges), dtype=bool),
        protocols=("",) * len(edges),
        edge_static=np.full((len(edges), len(EDGE_STATIC)), np.nan),
    )
    return Panel(
        graph=graph,
        baseline={name: grid(name, 0, baseline_steps) for name in levels} if baseline_steps else {},
        window={name: np.concatenate([grid(name, 0, LEAD), grid(name, 1, 8)], axis=1) for name in levels},
        edge_baseline={},
        edge_window={},
        step=60.0,
        baseline_start=0.0,
        baseline_step=60.0,
        window_start=1e4,
        victim=names.index("a"),
        metric=metric,
        onset=0.0,
    )


#: c gets 0.3 s slower and is called twice a request; b adds 0.2 s of its own; a nothing. The victim: 0.4 -> 1.2 s.
SLOW = {
    LATENCY: {"a": (0.4, 1.2), "b": (0.3, 1.1), "c": (0.1, 0.4)},
    RATE: {"a": (10.0, 10.0), "b": (10.0, 10.0), "c": (20.0, 20.0)},
}


def attribution(
    panel: Panel, probability: list[float], candidates: tuple[int, ...] = (2, 1, 0), **scales: IntervalScale
) -> Attribution:
    found = attribute(panel, extract(panel), np.array(probability), candidates, scales)
    assert found is not None
    return found


def entry(found: Attribution, *nodes: str) -> AttributionEntry:
    return next(e for e in found.entries if set(e.nodes) == set(nodes))


def test_each_node_explains_what_it_adds_times_its_calls() -> None:
    panel = chain(SLOW)
    share = explained_share(panel, extract(panel))
    # 0.8 s more at the victim: 2 x 0.3 s from c, 0.2 s from b.
    assert share.tolist() == pytest.approx([0.0, 0.25, 0.75], abs=1e-9)


def test_removing_a_cause_takes_away_its_part_down_to_the_normal_level() -> None:
    found = attribution(chain(SLOW), [0.0, 0.0, 0.0])
    assert found.engine == "mechanism"
    assert (found.metric, found.unit) == (LATENCY, "s")
    assert found.factual == pytest.approx(1.2)
    assert entry(found, "c").counterfactual == pytest.approx(1.2 - 0.6)
    assert entry(found, "c").contribution == pytest.approx(0.6 / 1.2)
    assert entry(found, "b").counterfactual == pytest.approx(1.0)
    assert entry(found, "a").contribution == pytest.approx(0.0, abs=1e-9)
    # The pair gives back all that was added; the victim does not get faster than it was.
    assert entry(found, "b", "c").counterfactual == pytest.approx(0.4)


def test_the_sure_cause_restores_the_victim_whatever_its_mechanism_explains() -> None:
    found = attribution(chain(SLOW), [0.0, 0.0, 1.0])
    assert entry(found, "c").counterfactual == pytest.approx(0.4)
    half = attribution(chain(SLOW), [0.0, 0.0, 0.5])
    # Half of the time it is the cause (all 0.8 s), half of the time it adds its 0.6 s.
    assert entry(half, "c").counterfactual == pytest.approx(1.2 - (0.5 * 0.8 + 0.5 * 0.6))


def test_the_shapley_shares_of_the_candidates_add_up_to_one() -> None:
    found = attribution(chain(SLOW), [0.1, 0.2, 0.6])
    singles = [e for e in found.entries if len(e.nodes) == 1]
    assert sum(e.shapley or 0.0 for e in singles) == pytest.approx(1.0, abs=1e-5)
    assert all(e.shapley is None for e in found.entries if len(e.nodes) > 1)
    additive = attribution(chain(SLOW), [0.0, 0.0, 0.0])
    assert [entry(additive, n).shapley for n in "abc"] == pytest.approx([0.0, 0.25, 0.75], abs=1e-6)


def test_singles_come_first_then_the_pairs_of_the_first_three() -> None:
    # Five services in a row, and four candidates: four singles and three pairs.
    names = "abcde"
    levels = {LATENCY: dict.fromkeys(names, (0.1, 0.2))}
    panel = chain(levels, tuple(f"{x}>{y}" for x, y in pairwise(names)))
    found = attribution(panel, [0.1] * 5, (4, 3, 2, 1, 0))
    assert [e.nodes for e in found.entries[:CANDIDATES]] == [("e",), ("d",), ("c",), ("b",)]
    assert [e.nodes for e in found.entries[CANDIDATES:]] == [("e", "d"), ("e", "c"), ("d", "c")]
    alone = attribution(panel, [0.1] * 5, (4,))
    assert [(e.nodes, e.shapley) for e in alone.entries] == [(("e",), 1.0)]


@given(
    p=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    noise=st.sampled_from([0.0, 0.05, 0.4]),
    low=st.floats(-8, 0),
    high=st.floats(0, 8),
    steps=st.sampled_from([0, 1, 2, 30]),
)
@settings(max_examples=60, deadline=None)
def test_the_interval_holds_the_estimate_and_stays_possible(
    p: list[float], noise: float, low: float, high: float, steps: int
) -> None:
    panel = chain(SLOW, noise=noise, baseline_steps=steps)
    found = attribution(panel, p, latency=IntervalScale(low=low, high=high, floor=0.05))
    for item in found.entries:
        assert item.low <= item.contribution + 1e-6
        assert item.contribution <= item.high + 1e-6
        # A time is not negative: no more than all of it can go.
        assert item.high <= 1.0
        assert item.counterfactual >= 0.0


def test_an_error_ratio_stays_between_nothing_and_all() -> None:
    levels = {ERRORS: {"a": (0.001, 0.9), "b": (0.001, 0.9)}}
    panel = chain(levels, ("a>b",), metric=ERRORS)
    found = attribution(panel, [0.0, 0.1], (1, 0), errors=IntervalScale(low=-50.0, high=50.0, floor=0.1))
    for item in found.entries:
        assert found.factual * (1 - item.low) <= 1.0 + 1e-6
        assert found.factual * (1 - item.high) >= -1e-6
    assert entry(found, "b").counterfactual == pytest.approx(0.001, abs=1e-3)
    assert found.unit == "ratio"


def test_more_noise_and_fewer_samples_widen_the_interval() -> None:
    def width(noise: float, steps: int) -> float:
        item = entry(attribution(chain(SLOW, noise=noise, baseline_steps=steps), [0.0, 0.0, 0.3]), "c")
        return item.high - item.low

    assert width(0.0, 30) < width(0.2, 30) < width(0.8, 30)


def test_latency_and_errors_are_calibrated_apart() -> None:
    scales = {"latency": IntervalScale(-1.0, 1.0, 0.1), "errors": IntervalScale(-2.0, 2.0, 0.1)}
    assert mechanism.scale_of(scales, LATENCY).high == 1.0
    assert mechanism.scale_of(scales, ERRORS).high == 2.0
    assert mechanism.scale_of({}, LATENCY) == IntervalScale()
    item = Estimate((0,), factual=1.0, normal=0.5, share=0.5, error=0.1)
    assert item.counterfactual == 0.75
    low, high = interval(item, IntervalScale(-2.0, 1.0, 0.2), LATENCY)
    # One unit: the bootstrap error, a fifth of the change, and a thousandth of the normal level.
    unit = 0.1 + 0.2 * 0.5 + 1e-3 * 0.5 + 1e-6
    assert (low, high) == pytest.approx((0.75 - 2 * unit, 0.75 + unit))


def test_a_load_never_seen_before_is_extrapolation() -> None:
    busy = {**SLOW, RATE: {"a": (10.0, 100.0), "b": (10.0, 100.0), "c": (20.0, 200.0)}}
    usual, outside = attribution(chain(SLOW), [0.0, 0.0, 1.0]), attribution(chain(busy), [0.0, 0.0, 1.0])
    assert not any(e.extrapolates for e in usual.entries)
    assert all(e.extrapolates for e in outside.entries)
    assert "extrapolation" in " ".join(outside.notes)
    assert "extrapolation" not in " ".join(usual.notes)


def test_a_history_of_a_few_samples_is_extrapolation() -> None:
    assert all(e.extrapolates for e in attribution(chain(SLOW, baseline_steps=4), [0.0, 0.0, 1.0]).entries)


def test_a_candidate_that_nothing_measures_rests_on_its_probability_and_says_so() -> None:
    blind = {LATENCY: {"a": (0.4, 1.2), "b": (0.3, 1.1)}}
    found = attribution(chain(blind), [0.0, 0.0, 0.5])
    assert entry(found, "c").counterfactual == pytest.approx(0.8)
    assert entry(found, "c").extrapolates
    assert not entry(found, "b").extrapolates
    assert entry(found, "b", "c").extrapolates
    assert "no measurement of what c adds" in " ".join(found.notes)


def test_infrastructure_is_given_what_its_dependents_add() -> None:
    # b and c run on gpu g, and job j shares it with b: both are given what b (and c) add by themselves.
    edges = ("a>b", "a>c", "b@g", "c@g", "b~j")
    levels = {LATENCY: {"a": (0.4, 1.0), "b": (0.1, 0.5), "c": (0.1, 0.2)}}
    kinds = {"g": NodeKind.GPU, "j": NodeKind.WORKLOAD}
    panel = chain(levels, edges, kinds=kinds)
    share = dict(zip(panel.graph.nodes, explained_share(panel, extract(panel)).tolist(), strict=True))
    # 0.6 s more at a: 0.4 from b, 0.1 from c, 0.1 its own.
    assert share == pytest.approx({"a": 1 / 6, "b": 4 / 6, "c": 1 / 6, "g": 5 / 6, "j": 4 / 6})


def test_a_resource_that_nobody_felt_is_unknown_not_zero() -> None:
    panel = chain(SLOW, ("a>b", "b>c", "a@g"), kinds={"g": NodeKind.GPU})
    share = dict(zip(panel.graph.nodes, explained_share(panel, extract(panel)).tolist(), strict=True))
    assert np.isnan(share["g"])


def test_a_rise_of_errors_is_explained_by_errors() -> None:
    levels = {
        ERRORS: {"a": (0.0, 0.4), "b": (0.0, 0.3), "c": (0.0, 0.0)},
        LATENCY: {"a": (0.1, 0.1), "b": (0.1, 0.1), "c": (0.1, 9.0)},
    }
    panel = chain(levels, ("a>b", "b>c"), metric=ERRORS)
    assert explained_share(panel, extract(panel)).tolist() == pytest.approx([0.25, 0.75, 0.0], abs=1e-9)


def test_without_any_level_of_the_victim_there_is_no_attribution() -> None:
    blind = {LATENCY: {"b": (0.3, 1.1), "c": (0.1, 0.4)}}
    for levels, metric in ((blind, LATENCY), (SLOW, ERRORS)):
        panel = chain(levels, metric=metric)
        assert attribute(panel, extract(panel), np.zeros(3), (2, 1), {}) is None
    once = chain(SLOW, baseline_steps=0)
    once.window[LATENCY][:, :LEAD] = np.nan
    assert attribute(once, extract(once), np.zeros(3), (2, 1), {}) is None


def test_the_level_just_before_replaces_a_baseline_that_is_out_of_date() -> None:
    fresh, stale = chain(SLOW, noise=0.02), chain(SLOW, noise=0.02)
    # Last month the victim took a tenth of the time; just before the incident it took 0.4 s.
    stale.baseline[LATENCY][:] *= 0.1
    one = entry(attribution(fresh, [0.0, 0.0, 1.0]), "c").counterfactual
    other = entry(attribution(stale, [0.0, 0.0, 1.0]), "c").counterfactual
    assert one == pytest.approx(0.4, rel=0.05)
    assert other == pytest.approx(0.4, rel=0.1)


def test_a_rare_outlier_in_the_baseline_is_not_expected_again() -> None:
    panel = chain(SLOW, noise=0.02, baseline_steps=200)
    panel.baseline[LATENCY][:, 50] = 100.0
    assert entry(attribution(panel, [0.0, 0.0, 1.0]), "c").counterfactual == pytest.approx(0.4, rel=0.1)


def test_two_runs_give_the_same_figures() -> None:
    panel = chain(SLOW, noise=0.3)
    assert attribution(panel, [0.1, 0.2, 0.5]) == attribution(panel, [0.1, 0.2, 0.5])


@pytest.mark.parametrize(
    "levels", [("cpu_utilization_ratio", 0.5, 1.4), ("score", -1.0, -5.0), ("error_ratio", 1.0, 40.0)]
)
def test_the_interval_holds_the_estimate_of_any_metric(levels: tuple[str, float, float]) -> None:
    metric, before, after = levels
    panel = chain({metric: {"a": (before, after), "b": (before, after)}}, ("a>b",), metric=metric)
    for item in attribution(panel, [0.0, 0.5], (1, 0)).entries:
        assert item.low - 1e-6 <= item.contribution <= item.high + 1e-6
