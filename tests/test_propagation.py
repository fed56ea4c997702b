"""The most probable way from a cause to the victim, against trying every way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rca.graph import EDGE_STATIC, RELATIONS, CallGraph, Floats
from rca.incident import Relation
from rca.propagation import Step, most_probable_path, relation_of


def graph_of(size: int, edges: list[tuple[int, int]], relation: Relation = Relation.CALLS) -> CallGraph:
    """Nodes 0 to size - 1 and edges (caller, callee)."""
    return CallGraph(
        nodes=tuple(f"n{i}" for i in range(size)),
        kinds=np.zeros(size, dtype=np.int64),
        callers=np.array([a for a, _ in edges], dtype=np.int64),
        callees=np.array([b for _, b in edges], dtype=np.int64),
        relations=np.full(len(edges), RELATIONS.index(relation), dtype=np.int64),
        asynchronous=np.zeros(len(edges), dtype=bool),
        protocols=("",) * len(edges),
        edge_static=np.full((len(edges), len(EDGE_STATIC)), np.nan),
    )


def every_way(graph: CallGraph, crossed: Floats, cause: int, victim: int) -> list[tuple[float, int]]:
    """(probability, hops) of every way without a loop, effect and load, by trying them all."""
    count = len(graph.callers)
    found: list[tuple[float, int]] = []

    def walk(node: int, seen: frozenset[int], probability: float) -> None:
        if node == victim:
            found.append((probability, len(seen) - 1))
            return
        for k in range(count):
            for source, target, p in (
                (int(graph.callees[k]), int(graph.callers[k]), crossed[k]),
                (int(graph.callers[k]), int(graph.callees[k]), crossed[count + k]),
            ):
                if source == node and target not in seen:
                    walk(target, seen | {target}, probability * max(float(p), 1e-6))

    walk(cause, frozenset({cause}), 1.0)
    return found


def product(steps: tuple[Step, ...]) -> float:
    return float(np.prod([max(step.probability, 1e-6) for step in steps]))


@st.composite
def problems(draw: st.DrawFn, probabilities: st.SearchStrategy[float]) -> tuple[CallGraph, Floats, int, int]:
    size = draw(st.integers(2, 6))
    pair = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda p: p[0] != p[1])
    edges = draw(st.lists(pair, max_size=9))
    crossed = draw(st.lists(probabilities, min_size=2 * len(edges), max_size=2 * len(edges)))
    return graph_of(size, edges), np.array(crossed), draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))


def is_a_way(graph: CallGraph, crossed: Floats, steps: tuple[Step, ...], cause: int, victim: int) -> None:
    """Each step goes over the edge that it names, in the direction that it names, and one follows the other."""
    count = len(graph.callers)
    for step in steps:
        ends = (graph.callees[step.edge], graph.callers[step.edge])
        assert (step.source, step.target) == (ends if step.upward else ends[::-1])
        assert step.probability == crossed[step.edge if step.upward else count + step.edge]
    assert steps[0].source == cause
    assert steps[-1].target == victim
    assert all(one.target == other.source for one, other in pairwise(steps))
    visited = [cause, *(step.target for step in steps)]
    assert len(set(visited)) == len(visited)


@given(problems(st.floats(0.0, 1.0)))
@settings(max_examples=200, deadline=None)
def test_no_way_is_more_probable_than_the_one_found(problem: tuple[CallGraph, Floats, int, int]) -> None:
    graph, crossed, cause, victim = problem
    steps = most_probable_path(graph, crossed, cause, victim)
    if cause == victim:
        assert steps == ()
        return
    ways = every_way(graph, crossed, cause, victim)
    assert bool(steps) == bool(ways)
    if ways:
        is_a_way(graph, crossed, steps, cause, victim)
        assert product(steps) == pytest.approx(max(p for p, _ in ways), rel=1e-9)


@given(problems(st.sampled_from([0.25, 0.5, 1.0])))
@settings(max_examples=200, deadline=None)
def test_of_equally_probable_ways_the_shortest_is_taken(problem: tuple[CallGraph, Floats, int, int]) -> None:
    graph, crossed, cause, victim = problem
    steps = most_probable_path(graph, crossed, cause, victim)
    ways = every_way(graph, crossed, cause, victim) if cause != victim else []
    if ways:
        best = max(p for p, _ in ways)
        assert product(steps) == best
        assert len(steps) == min(hops for p, hops in ways if p == best)


def test_the_effect_goes_up_from_callee_to_caller() -> None:
    # web > cart > db: the database is the cause.
    graph = graph_of(3, [(0, 1), (1, 2)])
    steps = most_probable_path(graph, np.array([0.9, 0.8, 0.1, 0.1]), 2, 0)
    assert steps == (Step(2, 1, 1, True, 0.8), Step(1, 0, 0, True, 0.9))
    assert [relation_of(graph, step) for step in steps] == ["calls", "calls"]


def test_load_goes_down_and_its_effect_comes_up_another_way() -> None:
    # batch > db and web > db: batch overloads db, and web feels it.
    graph = graph_of(3, [(1, 2), (0, 2)])
    steps = most_probable_path(graph, np.array([0.1, 0.9, 0.7, 0.1]), 1, 0)
    assert steps == (Step(1, 2, 0, False, 0.7), Step(2, 0, 1, True, 0.9))


def test_a_long_way_of_sure_steps_beats_a_short_unsure_one() -> None:
    graph = graph_of(4, [(0, 3), (0, 1), (1, 2), (2, 3)])
    steps = most_probable_path(graph, np.array([0.5, 0.9, 0.9, 0.9, 0, 0, 0, 0.0]), 3, 0)
    assert [step.source for step in steps] == [3, 2, 1]


def test_of_two_equal_ways_the_lower_numbers_win_whatever_the_order_of_edges() -> None:
    # A diamond: 0 > 1 > 3 and 0 > 2 > 3.
    for edges in ([(0, 1), (1, 3), (0, 2), (2, 3)], [(0, 2), (2, 3), (0, 1), (1, 3)]):
        steps = most_probable_path(graph_of(4, edges), np.full(8, 0.5), 3, 0)
        assert [step.target for step in steps] == [1, 0]


def test_of_two_relations_between_the_same_nodes_the_likelier_is_named() -> None:
    base = graph_of(2, [(0, 1), (0, 1)])
    both = replace(base, relations=np.array([0, RELATIONS.index(Relation.SHARES_DEVICE)]))
    (step,) = most_probable_path(both, np.array([0.4, 0.9, 0.0, 0.0]), 1, 0)
    assert relation_of(both, step) == "shares_device"


def test_an_edge_of_probability_zero_is_the_last_resort() -> None:
    graph = graph_of(3, [(0, 2), (0, 1), (1, 2)])
    steps = most_probable_path(graph, np.array([0.0, 0.01, 0.01, 0, 0, 0]), 2, 0)
    assert [step.source for step in steps] == [2, 1]
    assert most_probable_path(graph_of(2, [(0, 1)]), np.zeros(2), 1, 0) == (Step(1, 0, 0, True, 0.0),)


def test_no_way_means_no_steps() -> None:
    graph = graph_of(4, [(0, 1), (2, 3)])
    assert most_probable_path(graph, np.full(4, 0.9), 3, 0) == ()
    assert most_probable_path(graph, np.full(4, 0.9), 0, 0) == ()
    assert most_probable_path(graph_of(2, []), np.empty(0), 1, 0) == ()


def test_cycles_end() -> None:
    graph = graph_of(3, [(0, 1), (1, 2), (2, 0)])
    assert len(most_probable_path(graph, np.full(6, 0.9), 1, 0)) == 1
