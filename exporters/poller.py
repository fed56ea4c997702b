"""Background polling: read a source on a schedule, keep the last result, say how old it is and what went wrong.

A scrape never waits for the system that is observed (docs/architecture.md): it gets what the last poll gave. Past the
maximum age that is withheld, and `prioscope_source_up`, `prioscope_snapshot_stale` and `prioscope_source_unread` say
why.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final, Protocol

from exporters.catalog import METRICS
from exporters.errors import InvalidInputError, NotFoundError, PrioscopeError, SourceUnreachableError
from exporters.families import Distribution, Family, Labels, capped_top, family
from exporters.model import Snapshot, Unread
from exporters.sources.base import EndOfStreamError, Source

_log = logging.getLogger(__name__)

#: A reason is a label value: long ones would be new series for every small difference.
MAX_REASON: Final = 200

_DURATION: Final = "prioscope_poll_duration_seconds"


class Consumer(Protocol):
    """What turns snapshots into families, such as `exporters.collectors.ClusterCollector`."""

    def update(self, snapshot: Snapshot) -> object:
        """Take in one snapshot."""

    def families(self) -> tuple[Family, ...]:
        """Return the families of the last update, as a value that later updates leave alone."""


class Cause(StrEnum):
    """The `cause` label of failed polls."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    INVALID = "invalid"
    NOT_FOUND = "not_found"
    OS = "os"
    HUNG = "hung"
    """The poll did not come back within the maximum age; it is counted once and still awaited."""
    STATE = "state"
    """The poll went well; what has to survive a restart could not be saved."""
    INTERNAL = "internal"


def cause_of(error: BaseException) -> Cause:
    """Return the label for an exception of a poll."""
    kinds: tuple[tuple[type[BaseException], Cause], ...] = (
        (SourceUnreachableError, Cause.UNREACHABLE),
        (NotFoundError, Cause.NOT_FOUND),
        (InvalidInputError, Cause.INVALID),
        (TimeoutError, Cause.TIMEOUT),
        (OSError, Cause.OS),
    )
    return next((cause for kind, cause in kinds if isinstance(error, kind)), Cause.INTERNAL)


@dataclass(frozen=True, slots=True)
class Status:
    """Where polling stands. Ages are seconds; ``reason`` is why there is no fresh snapshot (empty: there is one)."""

    up: bool
    stale: bool
    age: float | None
    polls: int
    snapshots: int
    hung: bool
    alive: bool
    reason: str

    @property
    def ready(self) -> bool:
        """Whether a scrape would get the source's series."""
        return self.age is not None and not self.stale


class Poller:
    """Polls one source in a thread of its own.

    Args:
        name: The `source` label.
        open_source: Connects. Called in the thread, again after a failure to connect, so that an exporter may start
            before the system that it observes.
        consumer: Turns each snapshot into families, in the thread.
        interval: Seconds from the start of one poll to the start of the next; a slow poll is not overtaken.
        max_age: Seconds after which a snapshot is no longer served.
        after_poll: Called in the thread after each snapshot, such as to save state.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        open_source: Callable[[], Source],
        consumer: Consumer,
        *,
        interval: float = 15.0,
        max_age: float = 60.0,
        after_poll: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._open = open_source
        self._consumer = consumer
        self._interval = interval
        self._max_age = max_age
        self._after_poll = after_poll
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"poll-{name}", daemon=True)
        self._save_failure = ""
        # Everything below is shared with the threads that ask for `status` and `families`.
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._served: tuple[Family, ...] = ()
        self._unread: tuple[Unread, ...] = ()
        self._read_at: float | None = None
        self._polling_since: float | None = None
        self._hung_counted = False
        self._reason = "the first poll is not complete"
        self._failed = False
        self._finished = False
        self._polls = 0
        self._snapshots = 0
        self._errors: Counter[str] = Counter(dict.fromkeys(map(str, Cause), 0))
        self._durations = Distribution.empty(METRICS[_DURATION].buckets)

    # --- control

    def start(self) -> None:
        """Begin to poll; the first poll is at once."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """Stop polling and close the source; return whether the thread ended within ``timeout`` seconds.

        A poll that hangs cannot be interrupted. Its thread does not keep the process from exiting.
        """
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def poll_once(self) -> Exception | None:
        """Poll in the calling thread; return what went wrong, which is counted and logged too, None for a snapshot.

        Raises:
            EndOfStreamError: the source has nothing more to give.
        """
        started = self._clock()
        with self._lock:
            self._polling_since, self._hung_counted = started, False
            self._polls += 1
        error: Exception | None = None
        try:
            self._poll(started)
        except EndOfStreamError:
            with self._lock:
                self._polls -= 1
            raise
        except Exception as failure:
            error = failure
        finally:
            with self._lock:
                self._polling_since = None
        taken = self._clock() - started
        with self._lock:
            self._durations = self._durations.observe(METRICS[_DURATION].buckets, taken)
        self._note(error)
        return error

    def close(self) -> None:
        """Close the source. Only for callers of `poll_once`: the thread closes its own."""
        source, self._source = self._source, None
        if source is None:
            return
        try:
            source.close()
        except Exception:
            _log.exception("%s: the source did not close cleanly", self.name)

    # --- what a scrape asks

    def status(self) -> Status:
        """Return where polling stands now."""
        now = self._clock()
        with self._lock:
            since = self._polling_since
            hung = since is not None and now - since > self._max_age
            if hung and not self._hung_counted:
                self._hung_counted = True
                self._errors[Cause.HUNG] += 1
            age = None if self._read_at is None else now - self._read_at
            reason = self._reason
            if hung and since is not None:
                reason = "the poll does not come back"
            stale = age is not None and age > self._max_age
            if stale and not reason:
                reason = "polling has stopped"
            return Status(
                up=age is not None and not self._failed and not hung,
                stale=stale,
                age=age,
                polls=self._polls,
                snapshots=self._snapshots,
                hung=hung,
                alive=self._thread.ident is None or self._thread.is_alive() or self._finished,
                reason=reason,
            )

    def families(self) -> tuple[Family, ...]:
        """Return the source's families, unless they are too old, and the exporter's own about the source."""
        status = self.status()
        with self._lock:
            served = self._served if status.ready else ()
            unread = Counter((item.what, item.why[:MAX_REASON]) for item in self._unread)
            errors = dict(self._errors)
            durations = self._durations
        if status.reason:
            unread["snapshot", status.reason[:MAX_REASON]] += 1
        own: Labels = (self.name,)
        missing: dict[Labels, float] = {(self.name, *key): float(count) for key, count in unread.items()}
        causes: dict[Labels, float] = {(self.name, cause): float(count) for cause, count in errors.items()}
        families = [
            build_info(self.name),
            family("prioscope_source_up", {own: float(status.up)}),
            family("prioscope_snapshot_stale", {own: float(status.stale)}),
            family("prioscope_polls_total", {own: float(status.polls)}),
            family("prioscope_poll_errors_total", causes),
            family(_DURATION, distributions={own: durations}),
            capped_top("prioscope_source_unread", missing)[0],
        ]
        if status.age is not None:
            families.append(family("prioscope_snapshot_age_seconds", {own: round(status.age, 3)}))
        return (*served, *(item for item in families if len(item)))

    # --- the thread

    def _run(self) -> None:
        try:
            due = self._clock()
            while not self._stop.is_set():
                try:
                    self.poll_once()
                except EndOfStreamError:
                    _log.info("%s: the source has ended; its last snapshot is served until it is too old", self.name)
                    with self._lock:
                        self._finished = True
                        self._reason = "the source has ended"
                    break
                # A poll that took longer than the interval is followed at once, without a queue of missed ones.
                due = max(due + self._interval, self._clock())
                self._stop.wait(due - self._clock())
        finally:
            self.close()

    def _poll(self, started: float) -> None:
        if self._source is None:
            self._source = self._open()
        snapshot = self._source.poll()
        self._consumer.update(snapshot)
        families = self._consumer.families()
        with self._lock:
            self._served = families
            self._unread = snapshot.unread
            # From the start of the poll: what it read may be as old as that.
            self._read_at = started
            self._snapshots += 1
        if self._after_poll is not None:
            self._save(self._after_poll)

    def _save(self, save: Callable[[], None]) -> None:
        try:
            save()
        except Exception as failure:
            with self._lock:
                self._errors[Cause.STATE] += 1
            if _text(failure) != self._save_failure:
                self._save_failure = _text(failure)
                _log.error("%s: the state cannot be saved: %s", self.name, failure)
        else:
            self._save_failure = ""

    def _note(self, error: Exception | None) -> None:
        """Remember how the poll went; log what differs from the poll before."""
        reason = "" if error is None else _text(error)
        with self._lock:
            before, recovered = self._reason, self._failed and error is None
            self._reason, self._failed = reason, error is not None
            if error is not None:
                self._errors[cause_of(error)] += 1
        if recovered:
            _log.info("%s: polling works again", self.name)
        if error is None or reason == before:
            return
        if isinstance(error, PrioscopeError):
            cure = f" ({error.cure})" if error.cure else ""
            _log.error("%s: %s%s", self.name, error, cure)
        else:
            _log.error("%s: the poll failed: %s", self.name, reason, exc_info=error)


def _text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PrioscopeError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def build_info(source: str) -> Family:
    """Return `prioscope_exporter_build_info` for an exporter of ``source``."""
    labels: Labels = (version(), platform.python_version(), source)
    return family("prioscope_exporter_build_info", {labels: 1.0})


@cache
def version() -> str:
    """Return the installed version of the package, or ``unknown`` when it runs from a bare source tree."""
    from importlib import metadata

    try:
        return metadata.version("prioscope")
    except metadata.PackageNotFoundError:
        return "unknown"


__all__ = ["Cause", "Consumer", "Poller", "Status", "build_info", "cause_of", "version"]
