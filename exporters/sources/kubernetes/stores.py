"""What the watches filled: one store per resource, small and bounded, written by one thread and read by another."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from exporters.sources.kubernetes.records import (
    EventRecord,
    GroupRecord,
    Identity,
    KueueRecord,
    NodeRecord,
    PodRecord,
)

#: Pods remembered after they are gone, so that a late event still finds their priority.
MAX_TOMBSTONES: Final = 10_000

#: Events kept; the API server itself forgets them after an hour.
MAX_EVENTS: Final = 20_000

#: Objects that could not be understood and are named in the report.
MAX_REJECTED: Final = 1_000

T = TypeVar("T")
Parse = Callable[[msgspec.Raw | bytes], T]
_identity = msgspec.json.Decoder(Identity).decode


class Store(Generic[T]):
    """Records of one resource by key (UID).

    An object that cannot be parsed is not kept, and is named in `rejected` until it changes or goes away.

    Args:
        parse: Turns the JSON of one object into its record; raises ValueError.
        clock: Unix seconds.
    """

    def __init__(self, parse: Parse[T], clock: Callable[[], float] = time.time) -> None:
        self._parse = parse
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[str, T] = {}
        self._rejected: dict[str, str] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def generation(self) -> int:
        """Grows whenever a record changes."""
        return self._generation

    @property
    def rejected(self) -> dict[str, str]:
        """Why objects could not be understood, by their name."""
        with self._lock:
            return dict(self._rejected)

    def records(self) -> list[T]:
        """Return the records as they are now."""
        with self._lock:
            return list(self._live.values())

    def put(self, raw: msgspec.Raw | bytes) -> str:
        """Take in an object that is new or changed and return its resource version.

        Raises:
            ValueError: not even its identity can be read.
        """
        key, version, record = self._read(raw)
        with self._lock:
            if record is None:
                self._drop(key, None)
            else:
                self._put(key, record)
        return version

    def remove(self, raw: msgspec.Raw | bytes) -> str:
        """Take in the last state of an object that is gone and return its resource version. Raises as `put`."""
        key, version, record = self._read(raw)
        with self._lock:
            self._rejected.pop(key, None)
            self._drop(key, record)
        return version

    def begin(self) -> Listing[T]:
        """Start a new listing; what it does not contain is gone once it is committed."""
        return Listing(self)

    def _read(self, raw: msgspec.Raw | bytes) -> tuple[str, str, T | None]:
        identity = _identity(raw)
        key, meta = identity.key, identity.metadata
        try:
            record = self._parse(raw)
        except (ValueError, OverflowError) as error:
            with self._lock:
                if len(self._rejected) < MAX_REJECTED:
                    self._rejected[key] = f"{meta.namespace or ''}/{meta.name}".lstrip("/") + f": {error}"
            return key, meta.resource_version, None
        if self._rejected:
            with self._lock:
                self._rejected.pop(key, None)
        return key, meta.resource_version, record

    def _put(self, key: str, record: T) -> None:
        if self._live.get(key) != record:
            self._live[key] = record
            self._generation += 1

    def _drop(self, key: str, last: T | None) -> None:  # noqa: ARG002 (for subclasses)
        if self._live.pop(key, None) is not None:
            self._generation += 1

    def _commit(self, seen: Mapping[str, T], rejected: set[str]) -> None:
        with self._lock:
            for key in [key for key in self._live if key not in seen]:
                self._drop(key, None)
            for key, record in seen.items():
                self._put(key, record)
            self._rejected = {key: why for key, why in self._rejected.items() if key in rejected}


class Listing(Generic[T]):
    """A listing in progress, page by page. The store shows the old state until `commit`."""

    def __init__(self, store: Store[T]) -> None:
        self._store = store
        self._seen: dict[str, T] = {}
        self._rejected: set[str] = set()

    def add(self, raw: msgspec.Raw | bytes) -> None:
        """Take in one object. Raises as `Store.put`."""
        key, _, record = self._store._read(raw)
        if record is None:
            self._rejected.add(key)
        else:
            self._seen[key] = record

    def commit(self) -> None:
        """Make this the state of the store."""
        self._store._commit(self._seen, self._rejected)


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A pod that is gone from the store: its last record, and when it ended (Unix seconds)."""

    pod: PodRecord
    time: float


class PodStore(Store[PodRecord]):
    """Pods that may still run. Those that end are kept a while in `departed`, and a little of them in `tombstones`.

    Args:
        keep_seconds: How long an ended pod stays in `departed`.
    """

    def __init__(
        self, parse: Parse[PodRecord], keep_seconds: float = 120.0, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(parse, clock)
        self._keep = keep_seconds
        self._began: float | None = None
        self._departed: OrderedDict[str, tuple[Ended, float]] = OrderedDict()
        self._tombstones: OrderedDict[str, PodRecord] = OrderedDict()

    def departed(self) -> list[Ended]:
        """Return the pods that ended within the last ``keep_seconds``."""
        with self._lock:
            self._prune()
            return [ended for ended, _ in self._departed.values()]

    def find(self, uid: str) -> PodRecord | None:
        """Return the pod, gone ones included as long as they are remembered."""
        return self._live.get(uid) or self._tombstones.get(uid)

    def tombstones(self) -> list[PodRecord]:
        """Return the pods that are gone and remembered."""
        with self._lock:
            return list(self._tombstones.values())

    def _prune(self) -> None:
        limit = self._clock() - self._keep
        while self._departed:
            uid, (_, seen) = next(iter(self._departed.items()))
            if seen >= limit and len(self._departed) <= MAX_TOMBSTONES:
                break
            del self._departed[uid]

    def _put(self, key: str, record: PodRecord) -> None:
        old = self._live.get(key)
        if record.ended:
            # One that was never seen alive counts only if it came and went while the watch was away.
            recent = self._began is not None and (record.scheduled or 0.0) >= self._began
            if old is not None or (recent and key not in self._tombstones):
                self._depart(key, record, self._clock() if record.finished is None else record.finished)
            self._live.pop(key, None)
            self._generation += 1
            return
        if old is not None and not record.gated:
            ungated = self._clock() if old.gated else old.ungated
            if ungated is not None:
                record = msgspec.structs.replace(record, ungated=ungated)
        self._departed.pop(key, None)
        super()._put(key, record)

    def _drop(self, key: str, last: PodRecord | None) -> None:
        old = self._live.pop(key, None)
        if old is None:
            return
        self._generation += 1
        if last is None:
            # Gone while nobody watched, or no longer understood: how it ended is not known.
            self._bury(key, old)
            return
        now = self._clock()
        self._depart(key, last, now if last.deleted is None else min(now, last.deleted))

    def _depart(self, key: str, record: PodRecord, when: float) -> None:
        self._departed[key] = (Ended(record, when), self._clock())
        self._bury(key, record)
        self._prune()

    def _bury(self, key: str, record: PodRecord) -> None:
        self._tombstones[key] = record
        self._tombstones.move_to_end(key)
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _commit(self, seen: Mapping[str, PodRecord], rejected: set[str]) -> None:
        super()._commit(seen, rejected)
        if self._began is None:
            self._began = self._clock()


class EventStore(Store[EventRecord]):
    """Events, the newest `MAX_EVENTS` of them, each with what was known of its pods when it came."""

    def _put(self, key: str, record: EventRecord) -> None:
        super()._put(key, record)
        while len(self._live) > MAX_EVENTS:
            del self._live[next(iter(self._live))]


NodeStore = Store[NodeRecord]
KueueStore = Store[KueueRecord]
GroupStore = Store[GroupRecord]
