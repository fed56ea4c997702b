"""The workers: take incidents from the store, capture and explain them, and store what comes of it."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rca.errors import InvalidInputError, NotFoundError, PrioscopeError, SourceUnreachableError
from rca.incident import Window
from rca.serve import jobs
from rca.serve.capturing import Origin, request_of
from rca.serve.jobs import Child, JobCrashedError
from rca.serve.stats import Stats
from rca.store.database import Store
from rca.store.records import ConflictError, Filter, State, StoredIncident

_log = logging.getLogger(__name__)

#: Captures that are repeated because a source did not answer in full, before what there is gets explained.
PARTIAL_RETRIES: Final = 2
#: Attempts at what cannot be expected to go better by itself: no such victim (yet), a crash.
FEW_ATTEMPTS: Final = 3
FIRST_DELAY: Final = 1.0
LONGEST_DELAY: Final = 300.0
#: How long a worker sleeps when there is nothing to do: other servers' work and due retries are found by looking.
POLL_SECONDS: Final = 1.0
#: How far around an alert others are looked for, whose time cannot serve as its baseline.
_BUSY: Final = timedelta(days=8)
_BUSY_COUNT: Final = 200
#: Assumed length of an incident that has not ended.
_BUSY_LENGTH: Final = timedelta(minutes=30)


@dataclass(frozen=True)
class WorkSettings:
    """How to work. Times in seconds.

    Attributes:
        origin: What makes a capture.
        workers: Incidents that are worked on at a time; each has a process.
        capture_timeout, explain_timeout: After these, the process is killed and the attempt has failed.
        lease: After a crash, others wait this long before they take the work over.
        give_up: How long to try an incident whose source does not answer.
        targets: Whom to tell about explanations.
    """

    origin: Origin
    workers: int = 2
    capture_timeout: float = 120.0
    explain_timeout: float = 120.0
    lease: float = 15.0
    give_up: float = 6 * 3600.0
    targets: tuple[str, ...] = ()


def backoff(attempt: int, draw: float) -> float:
    """Return how long to wait after failed attempt number ``attempt`` (from 1): exponential, with jitter.

    Args:
        draw: A random number in [0, 1); the delay is 50 to 150 % of the exponential one.
    """
    return float(min(FIRST_DELAY * 2.0 ** min(attempt - 1, 30), LONGEST_DELAY) * (0.5 + draw))


class Workers:
    """Worker threads over one store. `start`, then `stop`."""

    def __init__(self, store: Store, settings: WorkSettings, stats: Stats) -> None:
        self._store = store
        self._settings = settings
        self._stats = stats
        self._stopping = threading.Event()
        self._news = threading.Condition()
        self._lock = threading.Lock()
        #: What each owner works on now.
        self._held: dict[str, str] = {}
        self._children: dict[str, Child] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._settings.workers):
            owner = f"{socket.gethostname()}:{os.getpid()}:{number}"[:200]
            self._spawn(self._work, f"worker-{number}", owner)
        self._spawn(self._renew, "leases")

    def _spawn(self, target: Any, name: str, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    @property
    def alive(self) -> bool:
        """Whether all threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def wake(self) -> None:
        """Say that there may be work."""
        with self._news:
            self._news.notify_all()

    def stop(self, seconds: float) -> None:
        """Take no more work, wait for what is under way, and give back what is not done within ``seconds``."""
        self._stopping.set()
        self.wake()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            children = list(self._children.values())
        for child in children:
            child.kill()
        for thread in self._threads:
            thread.join(5.0)

    # --- one worker

    def _work(self, owner: str) -> None:
        child = Child()
        with self._lock:
            self._children[owner] = child
        troubles = 0
        while not self._stopping.is_set():
            try:
                now = datetime.now(UTC)
                record = self._store.claim(owner, now, timedelta(seconds=self._settings.lease))
                if record is None:
                    self._pause(POLL_SECONDS)
                else:
                    self._one(record, owner, child)
                troubles = 0
            except PrioscopeError as error:
                # The store is away: what was claimed comes back when its lease has run out.
                troubles += 1
                self._stats.failure("store")
                _log.warning("%s", error)
                self._pause(min(backoff(troubles, random.random()), 10.0))
            except Exception:
                troubles += 1
                self._stats.failure("store")
                _log.exception("a worker met a defect; the incident is tried again")
                self._pause(min(backoff(troubles, random.random()), 10.0))
        child.close()

    def _pause(self, seconds: float) -> None:
        with self._news:
            if not self._stopping.is_set():
                self._news.wait(seconds)

    def _one(self, record: StoredIncident, owner: str, child: Child) -> None:
        with self._lock:
            self._held[owner] = record.id
        try:
            if record.state is State.CAPTURING:
                self._capture(record, child)
            else:
                self._explain(record, child)
        except ConflictError as error:
            self._stats.failure("store")
            _log.warning("%s; kept as a conflict", error)
        except NotFoundError as error:
            _log.warning("%s; it was removed meanwhile", error)
        finally:
            with self._lock:
                self._held.pop(owner, None)

    def _renew(self) -> None:
        """Keep the leases of what is being worked on."""
        while not self._stopping.wait(self._settings.lease / 3):
            with self._lock:
                held = list(self._held.items())
            for owner, identifier in held:
                until = datetime.now(UTC) + timedelta(seconds=self._settings.lease)
                try:
                    self._store.renew(identifier, owner, until)
                except PrioscopeError as error:
                    _log.warning("the lease of %s was not renewed: %s", identifier, error)

    # --- stages

    def _capture(self, record: StoredIncident, child: Child) -> None:
        began = time.monotonic()
        try:
            request = request_of(record, self._busy(record))
            found = child.run(jobs.capture, self._settings.origin, request, timeout=self._settings.capture_timeout)
        except (SourceUnreachableError, InvalidInputError, NotFoundError, JobCrashedError) as error:
            self._failed(record, "capture", error)
            return
        finally:
            self._stats.took("capture", time.monotonic() - began)
        now = datetime.now(UTC)
        changes: dict[str, Any] = {
            **_RELEASED,
            "problem": "; ".join(found.missing),
            "victim": found.victim,
            "victim_metric": found.metric,
            "title": found.title or record.title,
        }
        if found.missing and record.partial < PARTIAL_RETRIES:
            self._stats.failure("capture")
            delay = backoff(record.partial + 1, random.random())
            _log.warning("%s: captured in part, again in %.1f s: %s", record.id, delay, changes["problem"])
            changes |= {
                "state": State.RECEIVED,
                "partial": record.partial + 1,
                "next_attempt_at": now + timedelta(seconds=delay),
            }
        else:
            changes |= {"state": State.CAPTURED, "attempts": 0, "recapture": False}
        self._store.update(record, changes, now, bundle=found.bundle)

    def _explain(self, record: StoredIncident, child: Child) -> None:
        began = time.monotonic()
        try:
            bundle = self._store.bundle(record.id)
            found = child.run(jobs.explain, bundle, timeout=self._settings.explain_timeout)
        except (SourceUnreachableError, InvalidInputError, NotFoundError, JobCrashedError) as error:
            self._failed(record, "explain", error)
            return
        finally:
            self._stats.took("explain", time.monotonic() - began)
        now = datetime.now(UTC)
        changes = {
            **_RELEASED,
            "state": State.EXPLAINED if found.conclusive else State.INCONCLUSIVE,
            "attempts": 0,
            "victim": found.victim,
            "victim_metric": found.metric,
            "cause": found.cause,
            "mechanism": found.mechanism,
            "confidence": found.confidence,
            "not_checked": found.not_checked,
        }
        trigger = "alert" if record.revision == 0 else "request"
        self._store.update(
            record, changes, now, explanation=found.json, trigger=trigger, targets=self._settings.targets
        )
        self._stats.explained(record.starts_at, now)
        _log.info("%s: %s, %s", record.id, changes["state"], found.cause or "no cause")

    def _failed(self, record: StoredIncident, stage: str, error: PrioscopeError) -> None:
        now = datetime.now(UTC)
        back = State.RECEIVED if stage == "capture" else State.CAPTURED
        changes: dict[str, Any] = {**_RELEASED, "problem": str(error)}
        if self._stopping.is_set() and isinstance(error, JobCrashedError):
            # We killed it to stop in time; the next server goes on at once.
            self._store.update(record, {**_RELEASED, "state": back, "attempts": record.attempts - 1}, now)
            return
        self._stats.failure(stage)
        away = isinstance(error, SourceUnreachableError)
        if away and stage == "capture" and record.bundle_bytes and not record.recapture:
            # There is a bundle already, captured in part: better explain that than wait.
            changes |= {"state": State.CAPTURED, "attempts": 0}
        elif (away and now - record.received_at < timedelta(seconds=self._settings.give_up)) or (
            not away and record.attempts < FEW_ATTEMPTS
        ):
            delay = backoff(record.attempts, random.random())
            changes |= {"state": back, "next_attempt_at": now + timedelta(seconds=delay)}
            _log.warning("%s: %s failed, again in %.1f s: %s", record.id, stage, delay, error)
        else:
            changes |= {"state": State.FAILED}
            _log.error("%s: %s failed for good: %s", record.id, stage, error)
        self._store.update(record, changes, now)

    def _busy(self, record: StoredIncident) -> tuple[Window, ...]:
        around = Filter(since=record.starts_at - _BUSY, until=record.starts_at + timedelta(hours=1))
        others = self._store.list(around, limit=_BUSY_COUNT).items
        return busy_windows([item for item in others if item.id != record.id])


_RELEASED: Final = {"lease_owner": "", "lease_until": None, "next_attempt_at": None}


def busy_windows(others: Sequence[StoredIncident]) -> tuple[Window, ...]:
    """Return when other incidents were."""
    found = []
    for item in others:
        end = item.ended_at or item.starts_at + _BUSY_LENGTH
        if end > item.starts_at:
            found.append(Window(item.starts_at, end))
    return tuple(found)
