"""The tracker: one count per violation, over polls, gaps and restarts; counters that never go down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.errors import InvalidInputError
from exporters.families import Labels
from exporters.model import (
    Basis,
    Culprit,
    Event,
    EventKind,
    Snapshot,
    Unread,
    Violation,
    ViolationType,
    Workload,
    WorkloadState,
)
from exporters.tracker import Tracker, bucket_of


def violation(identity: str = "v", *, start: float = 90.0, **fields: Any) -> Violation:
    defaults: dict[str, Any] = {"type": ViolationType.INVERSION, "basis": Basis.STARTED, "victim": "w"}
    return Violation(id=identity, cluster="c", service="api", level="P0", start=start, **(defaults | fields))


def workload(state: WorkloadState = WorkloadState.PENDING, identity: str = "w", **fields: Any) -> Workload:
    return Workload(id=identity, name=identity, state=state, rank=0, queue="q", submitted=30.0, **fields)


def snapshot(time: float, *workloads: Workload, **fields: Any) -> Snapshot:
    return Snapshot(time=time, cluster="c", source="test", workloads=workloads or (workload(),), **fields)


def counters(tracker: Tracker) -> dict[tuple[str, Labels], float]:
    found = {}
    for item in tracker.families():
        for labels, value in item.samples:
            found[(item.metric.name, labels)] = value
        for labels, data in item.distributions:
            found[(f"{item.metric.name}_count", labels)] = float(data.count)
            found[(f"{item.metric.name}_sum", labels)] = data.sum
    return found


KEY = ("c", "api", "P0", "inversion")
TOTAL = ("priority_violation_total", (*KEY, "started"))
SECONDS = ("priority_violation_seconds_total", KEY)
ENDED = ("priority_violation_duration_seconds_count", KEY)
DURATION = ("priority_violation_duration_seconds_sum", KEY)
WAITS = ("priority_workload_wait_seconds_count", ("c", "q", "P0"))


def test_a_violation_is_counted_once_and_its_seconds_grow() -> None:
    tracker = Tracker()
    tracker.update(snapshot(100), [violation()])
    assert (counters(tracker)[TOTAL], counters(tracker)[SECONDS]) == (1, 10)
    tracker.update(snapshot(115), [violation()])
    tracker.update(snapshot(130), [violation()])
    assert (counters(tracker)[TOTAL], counters(tracker)[SECONDS]) == (1, 40)
    assert ENDED not in counters(tracker)
    assert [v.end for v in tracker.active] == [None]


def test_it_ends_when_its_victim_started() -> None:
    tracker = Tracker()
    tracker.update(snapshot(100), [violation()])
    tracker.update(snapshot(115, workload(WorkloadState.RUNNING, started=107.0)), [])
    assert tracker.active == []
    assert counters(tracker)[SECONDS] == counters(tracker)[DURATION] == 17
    assert counters(tracker)[WAITS] == 1


def test_a_gap_shorter_than_the_grace_is_no_end_and_a_longer_one_is_counted_once() -> None:
    tracker = Tracker(grace_seconds=30)
    tracker.update(snapshot(100), [violation()])
    tracker.update(snapshot(115), [])
    assert len(tracker.active) == 1
    tracker.update(snapshot(130), [violation()])
    assert (counters(tracker)[TOTAL], counters(tracker)[SECONDS]) == (1, 40)
    tracker.update(snapshot(145), [])
    tracker.update(snapshot(175), [])
    assert tracker.active == []
    # It was last seen at 130 and first missed at 145: the end is when it was first missed.
    assert counters(tracker)[DURATION] == 55
    tracker.update(snapshot(190), [violation()])
    tracker.update(snapshot(200), [violation()])
    assert (counters(tracker)[TOTAL], counters(tracker)[ENDED]) == (1, 1)
    assert counters(tracker)[SECONDS] == 65


def test_the_strongest_basis_and_every_culprit_are_kept() -> None:
    tracker = Tracker()
    first = violation(culprits=(Culprit("a", gpu_seconds=5), Culprit("b", gpu_seconds=9)))
    second = violation(basis=Basis.HELD, culprits=(Culprit("a", gpu_seconds=20),))
    tracker.update(snapshot(100), [first])
    tracker.update(snapshot(115), [second])
    (active,) = tracker.active
    assert active.basis is Basis.STARTED
    assert [(c.workload, c.gpu_seconds) for c in active.culprits] == [("a", 20), ("b", 9)]


def test_a_poll_that_could_not_read_the_workloads_ends_nothing() -> None:
    tracker = Tracker(grace_seconds=0)
    tracker.update(snapshot(100), [violation()])
    broken = Snapshot(time=115, cluster="c", source="test", unread=(Unread("workloads", "timed out"),))
    tracker.update(broken, [])
    assert len(tracker.active) == 1
    tracker.update(snapshot(130), [violation()])
    assert counters(tracker)[SECONDS] == 40


def test_a_snapshot_from_the_past_changes_nothing() -> None:
    tracker = Tracker()
    tracker.update(snapshot(100), [violation()])
    before = counters(tracker)
    tracker.update(snapshot(50), [violation("other")])
    assert counters(tracker) == before


def test_a_restart_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    tracker = Tracker()
    assert tracker.load_state(path) is False
    event = Event("e", EventKind.PREEMPTED, 100.5, workload="x", by="w", rank=2, by_rank=0)
    running = workload(WorkloadState.RUNNING, "r", started=101.0)
    tracker.update(snapshot(100), [violation()])
    tracker.update(snapshot(110, workload(), running, events=(event,)), [violation()])
    tracker.save_state(path)
    again = Tracker()
    assert again.load_state(path) is True
    assert counters(again) == counters(tracker)
    again.update(snapshot(120, workload(), running, events=(event,)), [violation()])
    assert counters(again)[TOTAL] == 1
    assert counters(again)[SECONDS] == 30
    assert counters(again)[WAITS] == 1
    assert counters(again)[("priority_preemptions_total", ("c", "P0", "P2"))] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_broken_state_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("{")
    with pytest.raises(InvalidInputError, match=r"state\.json is not an exporter state"):
        Tracker().load_state(path)
    tracker = Tracker()
    tracker.update(snapshot(100), [])
    tracker.save_state(path)
    path.write_text(path.read_text().replace('"version":1', '"version":99'))
    with pytest.raises(InvalidInputError, match="version 99"):
        Tracker().load_state(path)


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    tracker = Tracker()
    tracker.update(snapshot(100), [violation()])
    tracker.save_state(path)
    good = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("exporters.tracker.os.fsync", full)
    tracker.update(snapshot(110), [violation()])
    with pytest.raises(OSError, match="No space"):
        tracker.save_state(path)
    assert path.read_bytes() == good
    assert len(list(tmp_path.iterdir())) == 1


def test_starts_and_preemptions_from_before_the_exporter_ran_are_not_counted() -> None:
    old = workload(WorkloadState.RUNNING, started=40.0)
    event = Event("e", EventKind.PREEMPTED, 40.0, workload="x", by="w", rank=2, by_rank=0)
    tracker = Tracker()
    assert tracker.update(snapshot(100, old, events=(event,)), []) == []
    assert counters(tracker) == {}
    history = Tracker(count_history=True)
    assert len(history.update(snapshot(100, old, events=(event,)), [])) == 1
    assert counters(history)[WAITS] == 1
    assert counters(history)[("priority_preemptions_total", ("c", "P0", "P2"))] == 1


def test_an_instant_violation_is_counted_once() -> None:
    wrong = violation("e", start=105.0, end=105.0, type=ViolationType.WRONG_WAY_PREEMPTION, basis=None)
    tracker = Tracker()
    tracker.update(snapshot(100), [])
    for time in (110, 120, 130):
        tracker.update(snapshot(time), [wrong])
    assert counters(tracker)[("priority_violation_total", ("c", "api", "P0", "wrong_way_preemption", ""))] == 1
    assert tracker.active == []


def test_waits_and_preemptions_are_filed_by_fragmentation() -> None:
    tracker = Tracker()
    tracker.update(snapshot(100), [], 0.2)
    event = Event("e", EventKind.PREEMPTED, 105.0, workload="x", by="w", rank=2, by_rank=0)
    failed = violation("p", type=ViolationType.PREEMPTION_FAILED, basis=None)
    running = workload(WorkloadState.RUNNING, "r", started=110.0)
    tracker.update(snapshot(110, workload(), running, events=(event,)), [failed], 0.68)
    found = counters(tracker)
    assert found[("gpu_fragmentation_wait_seconds_sum", ("c", "0.6"))] == 80
    assert found[("gpu_fragmentation_preemptions_total", ("c", "0.6", "succeeded"))] == 1
    assert found[("gpu_fragmentation_preemptions_total", ("c", "0.6", "failed"))] == 1


@pytest.mark.parametrize(("ratio", "bucket"), [(0.0, "0.0"), (0.3, "0.3"), (0.6999, "0.6"), (0.7, "0.7"), (1.0, "0.9")])
def test_fragmentation_buckets(ratio: float, bucket: str) -> None:
    assert bucket_of(ratio) == bucket


def test_label_sets_past_the_cap_go_to_the_overflow_series() -> None:
    tracker = Tracker(caps={"priority_violation_total": 3})
    many = [violation(str(index), start=90, culprits=()) for index in range(10)]
    named = [Violation(v.id, v.type, "c", "w", f"service-{v.id}", "P0", v.start, basis=v.basis) for v in many]
    tracker.update(snapshot(100), named)
    totals = {labels: value for (name, labels), value in counters(tracker).items() if name == TOTAL[0]}
    assert len(totals) == 4
    assert totals[("overflow",) * 5] == 7
    assert tracker.overflowed["priority_violation_total"] == 7


def test_series_that_have_not_grown_for_long_are_dropped_unless_a_violation_lasts() -> None:
    tracker = Tracker(grace_seconds=0, retention_seconds=100)
    gone = violation("gone", victim="x", queue="", type=ViolationType.SCHEDULING_DELAY, basis=None)
    tracker.update(snapshot(100), [violation(), gone])
    for time in range(110, 400, 10):
        tracker.update(snapshot(time), [violation()])
    names = {labels for _, labels in counters(tracker)}
    assert names == {KEY, (*KEY, "started")}


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.floats(0.5, 40),
            st.sets(st.sampled_from("abcd")),
            st.sampled_from(["ok", "ok", "ok", "unread", "restart"]),
            st.booleans(),
        ),
        max_size=25,
    )
)
def test_counters_never_go_down_and_count_each_violation_once(
    polls: list[tuple[float, set[str], str, bool]],
) -> None:
    tracker, time = Tracker(grace_seconds=20), 100.0
    before: dict[tuple[str, Labels], float] = {}
    seen: set[str] = set()
    for gap, present, what, starts in polls:
        time += gap
        if what == "restart":
            state = tracker.state()
            tracker = Tracker(grace_seconds=20)
            if state.last_time > 0:
                tracker.restore(state)
        unread = (Unread("workloads", "no answer"),) if what == "unread" else ()
        victims = tuple(workload(identity=name) for name in "abcd")
        extra = (workload(WorkloadState.RUNNING, f"r{time}", started=time - gap / 2),) if starts else ()
        snap = snapshot(time, *victims, *extra, unread=unread)
        tracker.update(snap, [violation(name, victim=name) for name in sorted(present)])
        if what != "unread":
            seen |= present
        after = counters(tracker)
        for key, value in before.items():
            assert after[key] >= value - 1e-9, key
        before = after
        assert after.get(TOTAL, 0) == len(seen)
        # Time in violation is at most the age of every violation seen.
        assert after.get(SECONDS, 0) <= len(seen) * (time - 90) + 1e-6
        assert after.get(ENDED, 0) + len(tracker.active) >= 0
        assert after.get(ENDED, 0) <= len(seen)
