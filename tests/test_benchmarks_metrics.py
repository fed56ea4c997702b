"""Figures of merit: ties are averaged over every order, intervals are seeded and never empty of doubt."""

import itertools

import pytest

from benchmarks.metrics import (
    average_at,
    expected_calibration_error,
    hit_probability,
    interval,
    separation,
)


def by_enumeration(scores, truth, candidates, k):
    """The same by trying every order of the candidates that the scores allow."""
    orders = [
        order
        for order in itertools.permutations(candidates)
        if all(scores.get(a, float("-inf")) >= scores.get(b, float("-inf")) for a, b in itertools.pairwise(order))
    ]
    return sum(bool(set(order[:k]) & set(truth)) for order in orders) / len(orders)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("scores", "truth"),
    [
        ({"a": 3, "b": 2, "c": 1}, ["a"]),
        ({"a": 1, "b": 1, "c": 1}, ["b"]),
        ({"a": 2, "b": 2, "c": 2, "d": 1}, ["c", "d"]),
        ({"a": 2, "b": 1, "c": 1}, ["b", "c"]),
        ({"a": 1}, ["e"]),
        ({}, ["a"]),
    ],
)
def test_closed_form_agrees_with_enumerating_the_orders(scores, truth, k):
    candidates = ["a", "b", "c", "d", "e"]
    expected = by_enumeration(scores, truth, candidates, k)
    assert hit_probability(scores, truth, candidates, k) == pytest.approx(expected)


def test_a_tie_of_four_gives_a_quarter_at_top_1():
    tied = dict.fromkeys("abcd", 1.0)
    assert hit_probability(tied, ["c"], "abcd", 1) == pytest.approx(0.25)
    assert average_at(tied, ["c"], "abcd", k=5) == pytest.approx((0.25 + 0.5 + 0.75 + 1 + 1) / 5)


def test_a_score_that_is_not_a_number_ranks_last():
    assert hit_probability({"a": float("nan"), "b": -5.0}, ["b"], "ab", 1) == 1.0


def test_a_cause_that_no_method_could_name_is_a_miss():
    assert hit_probability({"a": 1.0}, ["elsewhere"], "ab", 5) == 0.0


def test_rank_depth_must_be_positive():
    with pytest.raises(ValueError, match="at least 1"):
        hit_probability({}, ["a"], "ab", 0)


def test_interval_is_the_same_for_the_same_seed_and_contains_the_mean():
    values = [1.0, 0.0, 0.5, 1.0, 1.0, 0.0]
    first, again = interval(values, seed=7), interval(values, seed=7)
    assert first == again
    assert first.count == 6
    assert first.value == pytest.approx(3.5 / 6)
    assert first.low < first.value < first.high


def test_interval_covers_the_true_share_about_as_often_as_it_says():
    import numpy as np

    random = np.random.default_rng(3)
    draws = (random.random((200, 40)) < 0.7).astype(float)
    covered = [est.low <= 0.7 <= est.high for row in draws if (est := interval(row.tolist()))]
    assert 0.88 <= sum(covered) / len(covered) <= 1.0


def test_all_right_is_not_certain():
    # Clopper-Pearson: 10 of 10 right leaves 0.025 ** (1 / 10) possible.
    estimate = interval([1.0] * 10)
    assert (estimate.value, estimate.high) == (1.0, 1.0)
    assert estimate.low == pytest.approx(0.6915, abs=1e-4)
    none = interval([0.0] * 10)
    assert (none.low, none.high) == (0.0, pytest.approx(0.3085, abs=1e-4))


def test_no_cases_no_figure():
    assert interval([]) is None
    assert separation([], [1.0]) is None


def test_separation_counts_ties_half():
    assert separation([3.0, 2.0], [1.0, 2.0]) == pytest.approx((1 + 1 + 1 + 0.5) / 4)


def test_calibration_error_of_a_boaster():
    confidence, correct = [0.9] * 10, [1.0] * 5 + [0.0] * 5
    assert expected_calibration_error(confidence, correct, bins=10, equal_mass=False) == pytest.approx(0.4)
    honest = [0.5] * 10
    assert expected_calibration_error(honest, correct, bins=10, equal_mass=False) == pytest.approx(0.0)


def test_calibration_error_with_equal_mass_sees_what_equal_width_hides():
    # Within one wide bin, over- and understatement cancel; two bins of equal mass show both.
    confidence, correct = [0.51, 0.51, 0.59, 0.59], [1.0, 1.0, 0.0, 0.0]
    wide = expected_calibration_error(confidence, correct, bins=10, equal_mass=False)
    mass = expected_calibration_error(confidence, correct, bins=2, equal_mass=True)
    assert wide == pytest.approx(0.05)
    assert mass == pytest.approx((0.49 + 0.59) / 2)
    with pytest.raises(ValueError, match="same, positive length"):
        expected_calibration_error([], [], bins=5, equal_mass=True)
