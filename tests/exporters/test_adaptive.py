"""P9: the adaptive wait threshold and its drift test, on waits that are known."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from exporters.collectors import ClusterCollector
from exporters.measures.adaptive import AdaptiveState, AdaptiveWaits, Drift, threshold, update
from exporters.model import Demand, Snapshot, Workload, WorkloadState
from exporters.policy import default_policy


def test_the_threshold_is_the_published_formula() -> None:
    waits = [float(value) for value in range(1, 102)]
    expected = 100.0 * (1 + 0.3 * statistics.pstdev(waits) / 51.0)
    assert threshold(waits) == pytest.approx(expected)
    assert threshold([7.0] * 30) == 7.0, "no spread, no margin"
    assert threshold([0.0] * 30) == 0.0


def fed(minutes: int, waits: Callable[[int], list[float]], state: AdaptiveState | None = None) -> AdaptiveState:
    """One poll a minute; ``waits(minute)`` are the waits of those that started in it."""
    offset = 0.0 if state is None else state.opened
    for minute in range(1, minutes + 1):
        state = update(state, offset + 60.0 * minute, waits(minute), ())
    assert state is not None
    return state


def test_too_few_samples_give_no_threshold() -> None:
    assert fed(19, lambda _: [10.0]).threshold_seconds is None
    assert fed(19, lambda _: [10.0]).drifting is None
    assert fed(20, lambda _: [10.0]).threshold_seconds == 10.0


def test_a_window_moves_the_threshold_by_a_twentieth() -> None:
    before = fed(30, lambda _: [10.0] * 20)
    after = fed(1, lambda _: [110.0] * 20, before)
    assert before.threshold_seconds == 10.0
    assert after.threshold_seconds == pytest.approx(0.95 * 10 + 0.05 * 110)


def test_a_queue_that_stands_still_is_sampled_by_those_who_wait() -> None:
    state = fed(30, lambda _: [10.0] * 5)
    calm = state.threshold_seconds
    for minute in range(1, 11):
        state = update(state, state.opened + 60.0, (), (60.0 * minute, 30.0))
    assert calm is not None
    assert state.threshold_seconds is not None
    assert calm < state.threshold_seconds < 600.0, "it rises, and stays below what waits"


def test_an_idle_queue_keeps_its_threshold_for_an_hour() -> None:
    state = fed(30, lambda _: [10.0] * 5)
    for _ in range(59):
        state = update(state, state.opened + 60.0, (), ())
    assert state.threshold_seconds == 10.0
    state = update(update(state, state.opened + 60.0, (), ()), state.opened + 120.0, (), ())
    assert state.threshold_seconds is None


def test_the_interval_of_polls_does_not_matter() -> None:
    slow = fed(40, lambda _: [5.0, 15.0, 10.0, 5.0])
    fast: AdaptiveState | None = None
    for step in range(1, 161):
        fast = update(fast, 15.0 * step + 45.0, [(5.0, 15.0, 10.0, 5.0)[step % 4]], ())
    assert fast is not None
    assert fast.threshold_seconds == pytest.approx(slow.threshold_seconds, rel=0.01)


def test_drift_is_seen_both_ways_and_ends_when_the_new_level_is_known() -> None:
    for after in (150.0, 3.0):
        rng = random.Random(7)
        state = Drift()
        for _ in range(300):
            state = state.feed(rng.lognormvariate(3.0, 0.5))
            assert not state.drifting
        samples = 0
        while not state.drifting:
            state = state.feed(after * rng.lognormvariate(0.0, 0.5))
            samples += 1
        assert samples <= 10
        for _ in range(21):
            state = state.feed(after * rng.lognormvariate(0.0, 0.5))
        assert not state.drifting


def test_fewer_false_alarms_than_a_fixed_threshold_and_real_shifts_are_caught() -> None:
    """The shape of the published claim: load that swings by the hour, and six real shifts to eight times the wait."""
    rng = random.Random(3)
    minutes = 48 * 60
    shifts = [(start, start + 20) for start in range(400, minutes, 450)]
    in_shift = {minute for begin, end in shifts for minute in range(begin, end)}
    quiet = [rng.lognormvariate(2.3, 0.4) for _ in range(600)]
    fixed = threshold(quiet)
    state: AdaptiveState | None = None
    alarms: dict[str, set[int]] = {"fixed": set(), "adaptive": set()}
    for minute in range(minutes):
        # A slow swing of a factor of four over twelve hours: no fault, only the time of day.
        level = 4.0 ** abs(((minute / 360.0) % 2) - 1) * (8.0 if minute in in_shift else 1.0)
        waits = [level * rng.lognormvariate(2.3, 0.4) for _ in range(10)]
        worst = max(waits)
        learned = None if state is None else state.threshold_seconds
        if worst > fixed:
            alarms["fixed"].add(minute)
        if learned is not None and worst > learned:
            alarms["adaptive"].add(minute)
        state = update(state, 60.0 * minute, waits, ())
    false = {name: len(found - in_shift) for name, found in alarms.items()}
    assert false["adaptive"] < false["fixed"] / 4, false
    for begin, end in shifts:
        assert alarms["adaptive"] & set(range(begin, min(begin + 3, end))), f"the shift at {begin} was missed"


def test_queues_are_kept_apart_forgotten_and_bounded() -> None:
    waits = AdaptiveWaits(limit=2)
    batch, urgent, extra = ("gpu", "P3"), ("gpu", "P0"), ("cpu", "P1")
    for minute in range(25):
        known = waits.update(60.0 * minute, [(batch, 100.0), (urgent, 1.0), (extra, 5.0)], [])
    assert {key: state.threshold_seconds for key, state in known.items()} == {batch: 100.0, urgent: 1.0}
    for minute in range(25, 90):
        known = waits.update(60.0 * minute, [], [])
    assert known == {}
    for minute in range(90, 115):
        known = waits.update(60.0 * minute, [(extra, 5.0)], [])
    assert list(known) == [extra], "there is room again"


def test_the_collector_exports_both_metrics() -> None:
    collector = ClusterCollector(default_policy())
    jobs = tuple(
        Workload(
            f"j{number}", "train", WorkloadState.RUNNING, queue="gpu", rank=1, demand=Demand(gpu_milli=1000),
            submitted=1000.0 + 60.0 * number - 30.0, started=1000.0 + 60.0 * number,
        )
        for number in range(30)
    )  # fmt: skip
    for number in range(1, 30):
        snapshot = Snapshot(time=1001.0 + 60.0 * number, cluster="c", source="test", workloads=jobs[: number + 1])
        collector.update(snapshot)
        found = {item.metric.name: item.samples for item in collector.families()}
        if number < 20:
            assert "priority_wait_adaptive_threshold_seconds" not in found
    key = ("c", "gpu", "P1")
    assert list(found["priority_wait_adaptive_threshold_seconds"]) == [(key, 30.0)]
    assert list(found["priority_wait_drift"]) == [(key, 0.0)]
