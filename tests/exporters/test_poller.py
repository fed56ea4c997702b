"""Background polling: what is served, how old it may be, and what is said when it goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from exporters.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from exporters.families import Family, family
from exporters.model import Snapshot, Unread
from exporters.poller import Cause, Poller, cause_of
from exporters.sources.base import EndOfStreamError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Script:
    """A source that does what the test says, one item a poll: return, raise or call."""

    def __init__(self, *steps: Snapshot | Exception | Callable[[], Snapshot]) -> None:
        self.steps: Iterator[Snapshot | Exception | Callable[[], Snapshot]] = iter(steps)
        self.closed = 0

    def poll(self) -> Snapshot:
        step = next(self.steps, None)
        if step is None:
            raise EndOfStreamError
        if isinstance(step, Exception):
            raise step
        return step() if callable(step) else step

    def close(self) -> None:
        self.closed += 1


class Recent:
    """A consumer with one series: the time of the last snapshot."""

    def __init__(self) -> None:
        self.last: tuple[Family, ...] = ()

    def update(self, snapshot: Snapshot) -> None:
        self.last = (family("gpu_cluster_free_gpus", {("c",): snapshot.time}),)

    def families(self) -> tuple[Family, ...]:
        return self.last


def snapshot(at: float = 1.0, *unread: Unread) -> Snapshot:
    return Snapshot(at, "c", "test", unread=unread)


def poller(source: Script, clock: Clock, **options: object) -> Poller:
    return Poller("test", lambda: source, Recent(), interval=15.0, max_age=60.0, clock=clock, **options)  # type: ignore[arg-type]


def values(subject: Poller, name: str) -> dict[tuple[str, ...], float]:
    return {labels: value for item in subject.families() if item.metric.name == name for labels, value in item.samples}


def test_before_the_first_snapshot_only_the_exporter_speaks() -> None:
    subject = poller(Script(), Clock())
    assert values(subject, "gpu_cluster_free_gpus") == {}
    assert values(subject, "prioscope_source_up") == {("test",): 0.0}
    assert values(subject, "prioscope_snapshot_stale") == {("test",): 0.0}
    assert values(subject, "prioscope_snapshot_age_seconds") == {}
    assert values(subject, "prioscope_source_unread") == {("test", "snapshot", "the first poll is not complete"): 1.0}
    assert not subject.status().ready
    assert [labels[2] for labels in values(subject, "prioscope_exporter_build_info")] == ["test"]


def test_a_snapshot_is_served_with_its_age() -> None:
    clock = Clock()

    def slow() -> Snapshot:
        clock.now += 2
        return snapshot(42.0)

    subject = poller(Script(slow), clock)
    assert subject.poll_once() is None
    clock.now += 10
    assert values(subject, "gpu_cluster_free_gpus") == {("c",): 42.0}
    assert values(subject, "prioscope_source_up") == {("test",): 1.0}
    assert values(subject, "prioscope_source_unread") == {}
    # From the start of the poll: what it read first may be that old.
    assert values(subject, "prioscope_snapshot_age_seconds") == {("test",): 12.0}
    (durations,) = (item for item in subject.families() if item.metric.name == "prioscope_poll_duration_seconds")
    assert durations.distributions[0][1].sum == 2.0


def test_a_failure_keeps_the_last_snapshot_until_it_is_too_old(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    down = SourceUnreachableError("slurmctld does not answer", cure="start it")
    subject = poller(Script(snapshot(7.0), down, down, down), clock)
    subject.poll_once()
    clock.now += 15
    assert subject.poll_once() is down
    assert values(subject, "gpu_cluster_free_gpus") == {("c",): 7.0}
    assert values(subject, "prioscope_source_up") == {("test",): 0.0}
    assert values(subject, "prioscope_snapshot_stale") == {("test",): 0.0}

    clock.now += 46
    subject.poll_once()
    assert values(subject, "gpu_cluster_free_gpus") == {}
    assert values(subject, "prioscope_snapshot_stale") == {("test",): 1.0}
    assert values(subject, "prioscope_snapshot_age_seconds") == {("test",): 61.0}
    assert values(subject, "prioscope_source_unread") == {("test", "snapshot", "slurmctld does not answer"): 1.0}
    assert values(subject, "prioscope_poll_errors_total")["test", "unreachable"] == 2.0
    assert not subject.status().ready
    assert caplog.text.count("slurmctld does not answer (start it)") == 1, "logged once, not at every poll"


def test_recovery_is_served_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    subject = poller(Script(SourceUnreachableError("away"), snapshot(9.0)), clock)
    subject.poll_once()
    subject.poll_once()
    assert values(subject, "gpu_cluster_free_gpus") == {("c",): 9.0}
    assert values(subject, "prioscope_source_unread") == {}
    assert "polling works again" in caplog.text


def test_what_could_not_be_read_is_said() -> None:
    unread = (Unread("nodes", "no permission"), Unread("nodes", "no permission"), Unread("events", "x" * 500))
    subject = poller(Script(snapshot(1.0, *unread)), Clock())
    subject.poll_once()
    assert values(subject, "prioscope_source_unread") == {
        ("test", "nodes", "no permission"): 2.0,
        ("test", "events", "x" * 200): 1.0,
    }
    assert values(subject, "prioscope_source_up") == {("test",): 1.0}


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SourceUnreachableError("x"), Cause.UNREACHABLE),
        (InvalidInputError("x"), Cause.INVALID),
        (NotFoundError("x"), Cause.NOT_FOUND),
        (TimeoutError(), Cause.TIMEOUT),
        (ConnectionRefusedError(), Cause.OS),
        (ZeroDivisionError(), Cause.INTERNAL),
    ],
)
def test_errors_are_counted_by_cause(error: Exception, cause: Cause) -> None:
    subject = poller(Script(error), Clock())
    subject.poll_once()
    counted = values(subject, "prioscope_poll_errors_total")
    assert cause_of(error) is cause
    assert counted.pop(("test", cause)) == 1.0
    # Every other cause is there with 0, so that a rate over it works from the first failure on.
    assert set(counted.values()) == {0.0}
    assert len(counted) == len(Cause) - 1


def test_a_source_that_cannot_be_opened_is_opened_again() -> None:
    attempts: list[int] = []

    def connect() -> Script:
        attempts.append(1)
        if len(attempts) == 1:
            raise SourceUnreachableError("not yet")
        return Script(snapshot(3.0))

    subject = Poller("test", connect, Recent(), clock=Clock())
    assert isinstance(subject.poll_once(), SourceUnreachableError)
    assert subject.poll_once() is None
    assert values(subject, "gpu_cluster_free_gpus") == {("c",): 3.0}


def test_a_hung_poll_is_noticed_and_counted_once() -> None:
    clock, release, entered = Clock(), threading.Event(), threading.Event()

    def hang() -> Snapshot:
        entered.set()
        release.wait(10)
        return snapshot(8.0)

    subject = poller(Script(snapshot(1.0), hang), clock)
    subject.poll_once()
    stuck = threading.Thread(target=subject.poll_once)
    stuck.start()
    assert entered.wait(5)
    clock.now += 61
    for _ in range(3):
        assert values(subject, "prioscope_source_up") == {("test",): 0.0}
        assert values(subject, "gpu_cluster_free_gpus") == {}
    assert values(subject, "prioscope_source_unread") == {("test", "snapshot", "the poll does not come back"): 1.0}
    assert values(subject, "prioscope_poll_errors_total")["test", "hung"] == 1.0

    release.set()
    stuck.join(5)
    assert values(subject, "prioscope_source_up") == {("test",): 1.0}
    # What it brought was read when it began, which is too long ago.
    assert values(subject, "gpu_cluster_free_gpus") == {}


def test_state_that_cannot_be_saved_does_not_spoil_the_poll(caplog: pytest.LogCaptureFixture) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    subject = poller(Script(snapshot(1.0), snapshot(2.0)), Clock(), after_poll=full)
    assert subject.poll_once() is None
    assert subject.poll_once() is None
    assert values(subject, "gpu_cluster_free_gpus") == {("c",): 2.0}
    assert values(subject, "prioscope_poll_errors_total")["test", "state"] == 2.0
    assert caplog.text.count("No space left") == 1


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_the_thread_polls_on_schedule_and_closes_the_source() -> None:
    source = Script(*(snapshot(float(at)) for at in range(1000)))
    subject = Poller("test", lambda: source, Recent(), interval=0.01, max_age=5.0)
    subject.start()
    assert wait_for(lambda: subject.status().snapshots >= 5)
    assert subject.status().ready
    assert subject.stop()
    assert source.closed == 1
    seen = subject.status().polls
    time.sleep(0.05)
    assert subject.status().polls == seen


def test_the_end_of_a_recording_is_no_error_and_no_death() -> None:
    source = Script(snapshot(5.0))
    subject = Poller("test", lambda: source, Recent(), interval=0.01, max_age=5.0)
    subject.start()
    assert wait_for(lambda: source.closed == 1)
    assert subject.status().alive
    assert subject.status().polls == 1
    assert values(subject, "gpu_cluster_free_gpus") == {("c",): 5.0}
    assert values(subject, "prioscope_source_unread") == {("test", "snapshot", "the source has ended"): 1.0}
    subject.stop()


def test_stopping_does_not_wait_for_a_poll_that_hangs() -> None:
    release, entered = threading.Event(), threading.Event()

    def hang() -> Snapshot:
        entered.set()
        release.wait(10)
        return snapshot()

    subject = Poller("test", lambda: Script(hang), Recent(), interval=0.01, max_age=5.0)
    subject.start()
    assert entered.wait(5)
    began = time.monotonic()
    assert not subject.stop(timeout=0.1)
    assert time.monotonic() - began < 2
    release.set()
    assert subject.stop()


def test_a_consumer_that_fails_is_an_error_of_the_poll(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recent):
        def update(self, snapshot: Snapshot) -> None:
            raise RuntimeError("bug")

    subject = Poller("test", lambda: Script(snapshot()), Broken(), clock=Clock())
    assert isinstance(subject.poll_once(), RuntimeError)
    assert values(subject, "prioscope_poll_errors_total")["test", "internal"] == 1.0
    assert "Traceback" in caplog.text, "a bug is logged with where it happened"
