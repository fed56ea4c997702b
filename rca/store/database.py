"""The store: incidents, bundles, explanations, and who works on what.

Every change of an incident is a compare-and-swap on its version vector (P10): the statement that writes says which
version it was made from, and changes nothing where another one is stored by now. An update that has not seen what is
stored loses; it is kept in ``conflicts`` and reported, never dropped in silence. Where both updates are known to touch
different things (an alert is resolved while its incident is being explained), the later one is made again on top of
the earlier one, and then dominates it.

Leases say who works on an incident. One that ran out is given to the next who asks, so that a killed server loses
nothing; should its owner still live after all, the compare-and-swap turns its late result away.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import socket
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Engine, and_, case, delete, func, literal, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Row
from sqlalchemy.exc import IntegrityError

from rca.errors import InvalidInputError, NotFoundError
from rca.store import migrate, versions
from rca.store.connect import connect, spoken
from rca.store.records import (
    FINAL,
    STEPS,
    Alert,
    BacklogFullError,
    ConflictError,
    ExplanationInfo,
    Filter,
    Page,
    Publication,
    Receipt,
    Retention,
    State,
    StoredConflict,
    StoredIncident,
    incident_id,
)
from rca.store.schema import alerts, bundles, conflicts, explanations, identity, incidents, publications

#: An alert that is first heard of when it has ended is an incident too, unless that was long ago: then the incident was
#: most likely known, and pruned since.
RESOLVED_FRESH: Final = timedelta(hours=1)
#: Candidates looked at in one claim.
_CLAIM: Final = 8
_BATCH: Final = 500
_ACTIVE: Final = tuple(state.value for state in State if state not in FINAL)
_ALL: Final = Filter()
_JSON: Final = ("labels", "annotations", "not_checked")

#: Columns that a list may be ordered by.
SORTS: Final[Mapping[str, Any]] = {
    "start": incidents.c.starts_at,
    "state": incidents.c.state,
    "alertname": incidents.c.alertname,
    "victim": incidents.c.victim,
    "cause": incidents.c.cause,
    "confidence": func.coalesce(incidents.c.confidence, -1.0),
}


class Store:
    """A store that is open. Thread-safe; `close` it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._write = engine.execution_options(write=True)
        # SQLite has one writer; those of this process queue here, in order, and not by asking again and again.
        self._turn = threading.Lock() if engine.dialect.name == "sqlite" else nullcontext()
        with self._reading() as connection:
            own = connection.execute(select(identity.c.id)).scalar_one()
        #: Name of this writer in version vectors: the machine, and the database, so that what was made in two
        #: databases is told apart when one is imported into the other.
        self.writer = f"{socket.gethostname()}/{own}"[:200]

    @classmethod
    def open(cls, url: str, *, must_exist: bool = False, pool: int = 16) -> Store:
        """Open; see `rca.store.open_store`."""
        engine = connect(url, must_exist=must_exist, pool=pool)
        try:
            with spoken(engine):
                migrate.upgrade(engine)
                return cls(engine)
        except BaseException:
            engine.dispose()
            raise

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def kind(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return self._engine.dialect.name

    @property
    def url(self) -> str:
        """The URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with spoken(self._engine), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with spoken(self._engine), self._turn, self._write.begin() as connection:
            yield connection

    # --- alerts come in

    def receive(self, received: Sequence[Alert], now: datetime, capacity: int) -> Receipt:
        """Store alerts, all or none; when this returns they are on disk. Idempotent.

        Raises:
            BacklogFullError: ``capacity`` or more incidents wait. Below it, all new alerts are taken, however many, so
                that a large group is not refused for ever.
        """
        counts = dict.fromkeys(("accepted", "repeated", "resolved", "ignored"), 0)
        found: dict[str, None] = {}
        with self._writing() as connection:
            waiting = self._waiting(connection)
            # Ordered, so that two servers with the same alerts wait for each other in the same order.
            for alert in sorted(received, key=lambda item: (item.fingerprint, item.starts_at)):
                row, outcome = self._incident_of(connection, alert), "repeated"
                if row is None:
                    if alert.ends_at is not None and now - alert.ends_at > RESOLVED_FRESH:
                        counts["ignored"] += 1
                        continue
                    if waiting >= capacity:
                        raise BacklogFullError(waiting, capacity)
                    row, outcome = self._new(connection, alert, now)
                if alert.ends_at is not None and row.ended_at is None:
                    self._end(connection, row, alert.ends_at, now)
                    outcome = "resolved"
                self._count(connection, alert, row.id, now)
                counts[outcome] += 1
                found[row.id] = None
        return Receipt(**counts, incidents=tuple(found))

    def _incident_of(self, connection: Connection, alert: Alert) -> StoredIncident | None:
        c = incidents.c
        same = c.starts_at == alert.starts_at
        if alert.ends_at is None:
            # Where two Prometheus servers send the same alert, Alertmanager moves its start to the earlier one.
            same = or_(same, and_(c.starts_at > alert.starts_at, c.ended_at.is_(None)))
        query = select(incidents).where(c.fingerprint == alert.fingerprint, same).order_by(c.starts_at).limit(1)
        row = connection.execute(query).first()
        return None if row is None else _incident(row)

    def _new(self, connection: Connection, alert: Alert, now: datetime) -> tuple[StoredIncident, str]:
        name = alert.labels.get("alertname", "")
        record = StoredIncident(
            id=incident_id(alert),
            state=State.RECEIVED,
            fingerprint=alert.fingerprint,
            starts_at=alert.starts_at,
            received_at=now,
            updated_at=now,
            ended_at=alert.ends_at,
            title=_title(alert, name),
            alertname=name,
            labels=alert.labels,
            annotations=alert.annotations,
            generator_url=alert.generator_url,
            version=versions.advance({}, self.writer),
        )
        statement = self._insert(incidents).values(_columns(record)).on_conflict_do_nothing()
        if connection.execute(statement.returning(incidents.c.id)).first() is not None:
            return record, "accepted"
        # Another server stored it between our look and our insert.
        other = self._incident_of(connection, alert)
        if other is None:
            raise InvalidInputError(f"incident {record.id} is there already, of another alert", cure="report this")
        return other, "repeated"

    def _end(self, connection: Connection, row: StoredIncident, ended: datetime, now: datetime) -> None:
        while row.ended_at is None:
            if self._swap(connection, row, {"ended_at": ended}, now) is not None:
                return
            row = self._get(connection, row.id)

    def _count(self, connection: Connection, alert: Alert, incident: str, now: datetime) -> None:
        statement = self._insert(alerts).values(
            group_key=hashlib.sha256(alert.group_key.encode()).hexdigest(),
            fingerprint=alert.fingerprint,
            starts_at=alert.starts_at,
            incident_id=incident,
            group_text=_clean(alert.group_key),
            receiver=_clean(alert.receiver),
            ends_at=alert.ends_at,
            first_at=now,
            last_at=now,
            times=1,
        )
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=[alerts.c.group_key, alerts.c.fingerprint, alerts.c.starts_at],
                set_={
                    "last_at": now,
                    "times": alerts.c.times + 1,
                    "ends_at": func.coalesce(statement.excluded.ends_at, alerts.c.ends_at),
                },
            )
        )

    def _insert(self, table: Any) -> Any:
        return postgresql.insert(table) if self.kind == "postgresql" else sqlite.insert(table)

    # --- work

    def claim(self, owner: str, now: datetime, lease: timedelta) -> StoredIncident | None:
        """Take the next incident that is due; None when there is none. Those that are captured come first.

        The incident is in state *capturing* or *explaining* then, and nobody else gets it before ``now + lease``
        unless `renew` moves that on.
        """
        c = incidents.c
        due = or_(
            and_(
                c.state.in_((State.RECEIVED.value, State.CAPTURED.value)),
                or_(c.next_attempt_at.is_(None), c.next_attempt_at <= now),
            ),
            and_(c.state.in_((State.CAPTURING.value, State.EXPLAINING.value)), c.lease_until < now),
        )
        with self._reading() as connection:
            if connection.execute(select(c.id).where(due).limit(1)).first() is None:
                return None
        nearly = case((c.state.in_((State.CAPTURED.value, State.EXPLAINING.value)), 0), else_=1)
        with self._writing() as connection:
            chosen = select(incidents).where(due).order_by(nearly, c.received_at, c.id).limit(_CLAIM)
            for row in connection.execute(chosen.with_for_update(skip_locked=True)).all():
                record = _incident(row)
                capture = record.state in (State.RECEIVED, State.CAPTURING)
                changes = {
                    "state": State.CAPTURING if capture else State.EXPLAINING,
                    "attempts": record.attempts + 1,
                    "next_attempt_at": None,
                    "lease_owner": owner,
                    "lease_until": now + lease,
                }
                taken = self._swap(connection, record, changes, now)
                if taken is not None:
                    return taken
        return None

    def renew(self, identifier: str, owner: str, until: datetime) -> bool:
        """Keep a lease for longer; False when it is another's by now. Not an update: it changes no version."""
        c = incidents.c
        with self._writing() as connection:
            done = connection.execute(
                update(incidents).where(c.id == identifier, c.lease_owner == owner).values(lease_until=until)
            )
            return bool(done.rowcount)

    def update(
        self,
        base: StoredIncident,
        changes: Mapping[str, Any],
        now: datetime,
        *,
        bundle: bytes | None = None,
        explanation: bytes | None = None,
        trigger: str = "",
        targets: Sequence[str] = (),
    ) -> StoredIncident:
        """Apply ``changes`` to the version ``base``, with its new bundle or explanation, in one transaction.

        Where somebody else changed the incident and we still hold its lease, the changes are made on top of theirs.

        Args:
            base: The incident as it was read.
            changes: Fields of `StoredIncident` and their new values.
            bundle: Zip file that replaces the bundle.
            explanation: JSON of a new explanation, which becomes the next revision; the new state is its verdict.
            trigger: Why it was made.
            targets: Whom to tell about it.

        Raises:
            ConflictError: the update has not seen what is stored. Nothing is changed; the update is in `conflicts`.
            NotFoundError: the incident was removed.
        """
        while True:
            with self._writing() as connection:
                record = self._swap(connection, base, self._with(base, changes, bundle, explanation, now), now)
                if record is not None:
                    if bundle is not None:
                        self._put_bundle(connection, record.id, bundle, now)
                    if explanation is not None:
                        self._add_explanation(connection, record, explanation, trigger, targets, now)
                    return record
                stored = self._get(connection, base.id)
                ours = base.lease_owner and stored.lease_owner == base.lease_owner and stored.state is base.state
                if not ours:
                    self._keep_conflict(connection, base, stored, changes, explanation, now)
            if not ours:
                raise ConflictError(
                    f"incident {base.id} was changed by another writer: stored is {_vector(stored)}, "
                    f"the update was made from {_vector(base)}",
                    cure=f"look at it again: rca incidents show {base.id}",
                )
            base = stored

    @staticmethod
    def _with(
        base: StoredIncident,
        changes: Mapping[str, Any],
        bundle: bytes | None,
        explanation: bytes | None,
        now: datetime,
    ) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if bundle is not None:
            more["bundle_bytes"] = len(bundle)
        if explanation is not None:
            more |= {"revision": base.revision + 1, "explained_at": now}
        return {**changes, **more}

    def _swap(
        self, connection: Connection, base: StoredIncident, changes: Mapping[str, Any], now: datetime
    ) -> StoredIncident | None:
        record = msgspec.structs.replace(
            base, **changes, version=versions.advance(base.version, self.writer), updated_at=now
        )
        if record.state not in STEPS[base.state]:
            raise InvalidInputError(
                f"incident {base.id} is {base.state}, which does not lead to {record.state}", cure="look at it again"
            )
        c = incidents.c
        done = connection.execute(
            update(incidents)
            .where(c.id == base.id, c.version == versions.encode(base.version))
            .values(_columns(record))
        )
        return record if done.rowcount else None

    def _put_bundle(self, connection: Connection, identifier: str, data: bytes, now: datetime) -> None:
        values = {
            "captured_at": now,
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "data": data,
        }
        statement = self._insert(bundles).values(incident_id=identifier, **values)
        connection.execute(statement.on_conflict_do_update(index_elements=[bundles.c.incident_id], set_=values))

    def _add_explanation(
        self,
        connection: Connection,
        record: StoredIncident,
        data: bytes,
        trigger: str,
        targets: Sequence[str],
        now: datetime,
    ) -> None:
        packed = zlib.compress(data, 6)
        connection.execute(
            explanations.insert().values(
                incident_id=record.id,
                revision=record.revision,
                created_at=now,
                verdict=record.state.value,
                trigger=trigger,
                sha256=hashlib.sha256(data).hexdigest(),
                size=len(packed),
                data=packed,
            )
        )
        for target in targets:
            connection.execute(
                publications.insert().values(
                    incident_id=record.id,
                    revision=record.revision,
                    target=target,
                    attempts=0,
                    next_attempt_at=now,
                    problem="",
                )
            )

    def _keep_conflict(
        self,
        connection: Connection,
        base: StoredIncident,
        stored: StoredIncident,
        changes: Mapping[str, Any],
        explanation: bytes | None,
        now: datetime,
    ) -> None:
        change: dict[str, Any] = {"changes": dict(changes)}
        if explanation is not None:
            change["explanation"] = msgspec.Raw(explanation)
        connection.execute(
            conflicts.insert().values(
                incident_id=base.id,
                at=now,
                writer=self.writer,
                base=versions.encode(base.version),
                stored=versions.encode(stored.version),
                change=msgspec.json.encode(change).decode(),
            )
        )

    # --- telling others

    def claim_publication(self, now: datetime, lease: timedelta) -> Publication | None:
        """Take the next publication that is due; it comes again after ``lease`` unless `publication_done` is called."""
        c = publications.c
        due = and_(c.done_at.is_(None), c.next_attempt_at <= now)
        with self._reading() as connection:
            if connection.execute(select(c.incident_id).where(due).limit(1)).first() is None:
                return None
        with self._writing() as connection:
            chosen = select(publications).where(due).order_by(c.next_attempt_at).limit(1)
            row = connection.execute(chosen.with_for_update(skip_locked=True)).first()
            if row is None:
                return None
            taken = Publication(row.incident_id, row.revision, row.target, row.attempts + 1)
            connection.execute(
                update(publications)
                .where(*_publication(taken))
                .values(attempts=taken.attempts, next_attempt_at=now + lease)
            )
            return taken

    def publication_done(self, item: Publication, now: datetime, problem: str = "") -> None:
        """Say that a publication needs no further attempt: it was made, or given up (``problem``)."""
        with self._writing() as connection:
            values = {"done_at": now, "problem": _clean(problem)}
            connection.execute(update(publications).where(*_publication(item)).values(values))

    def publication_failed(self, item: Publication, again: datetime, problem: str) -> None:
        """Say that a publication failed and when to try again."""
        with self._writing() as connection:
            values = {"next_attempt_at": again, "problem": _clean(problem)}
            connection.execute(update(publications).where(*_publication(item)).values(values))

    # --- reading

    def get(self, identifier: str) -> StoredIncident:
        """Return the incident with this id.

        Raises:
            NotFoundError: there is none.
        """
        with self._reading() as connection:
            return self._get(connection, identifier)

    @staticmethod
    def _get(connection: Connection, identifier: str) -> StoredIncident:
        row = connection.execute(select(incidents).where(incidents.c.id == _clean(identifier))).first()
        if row is None:
            raise NotFoundError(f"there is no incident {identifier!r}", cure="list them with `rca incidents list`")
        return _incident(row)

    def find(self, reference: str, *, at: datetime | None = None, since: datetime | None = None) -> StoredIncident:
        """Return the incident that ``reference`` names: an id, the beginning of one id, a fingerprint or ``latest``.

        Of several with the same fingerprint, and for ``latest``, it is the one that began last; with ``at``, the last
        that began at or before that time; with ``since``, none that began before.

        Raises:
            NotFoundError: there is none, or the beginning fits several.
        """
        c = incidents.c
        reference = _clean(reference)
        bounds = [] if at is None else [c.starts_at <= at]
        bounds += [] if since is None else [c.starts_at >= since]
        newest = select(incidents).where(*bounds).order_by(c.starts_at.desc(), c.id.desc())
        with self._reading() as connection:
            if reference == "latest":
                row = connection.execute(newest.limit(1)).first()
                if row is None:
                    raise NotFoundError(
                        "the store holds no incident" + (" in that time" if bounds else ""),
                        cure="list them with `rca incidents list`",
                    )
                return _incident(row)
            for condition in (c.id == reference, c.fingerprint == reference):
                row = connection.execute(newest.where(condition).limit(1)).first()
                if row is not None:
                    return _incident(row)
            begins = newest.where(c.id.startswith(reference, autoescape=True)).limit(2)
            rows = connection.execute(begins).all() if reference else []
        if len(rows) == 1:
            return _incident(rows[0])
        if rows:
            raise NotFoundError(f"several incidents begin with {reference!r}", cure="give more of the id")
        raise NotFoundError(
            f"there is no incident {reference!r} in the store", cure="list them with `rca incidents list`"
        )

    def list(
        self,
        wanted: Filter = _ALL,
        *,
        limit: int = 50,
        after: str | None = None,
        sort: str = "start",
        ascending: bool = False,
    ) -> Page:
        """Return a page of incidents; ``after`` is `Page.next` of the page before, made with the same order.

        Raises:
            InvalidInputError: an unknown sort, or ``after`` is none of ours.
        """
        if sort not in SORTS:
            raise InvalidInputError(f"incidents cannot be sorted by {sort!r}", cure=f"use one of {', '.join(SORTS)}")
        c = incidents.c
        column = SORTS[sort]
        query = select(incidents, column.label("sort_key")).where(*_conditions(wanted))
        if after is not None:
            place = tuple_(column, c.id)
            value, identifier = _decode_cursor(after, sort)
            bound = tuple_(literal(value, column.type), literal(identifier, c.id.type))
            query = query.where(place > bound if ascending else place < bound)
        order = (column.asc(), c.id.asc()) if ascending else (column.desc(), c.id.desc())
        with self._reading() as connection:
            rows = connection.execute(query.order_by(*order).limit(limit + 1)).all()
        more = len(rows) > limit
        cursor = _encode_cursor(rows[limit - 1].sort_key, rows[limit - 1].id) if more else None
        return Page(tuple(_incident(row) for row in rows[:limit]), cursor)

    def changed(self, since: datetime, limit: int = 1000) -> tuple[StoredIncident, ...]:
        """Return what was changed at or after ``since``, in the order of change."""
        c = incidents.c
        with self._reading() as connection:
            query = select(incidents).where(c.updated_at >= since).order_by(c.updated_at, c.id).limit(limit)
            return tuple(_incident(row) for row in connection.execute(query))

    def bundle(self, identifier: str) -> bytes:
        """Return the bundle of an incident, a zip file.

        Raises:
            NotFoundError: it has none (yet).
        """
        with self._reading() as connection:
            data = connection.execute(
                select(bundles.c.data).where(bundles.c.incident_id == _clean(identifier))
            ).scalar()
        if data is None:
            raise NotFoundError(
                f"incident {identifier!r} has no bundle", cure="see how far it came: rca incidents show"
            )
        return bytes(data)

    def explanation(self, identifier: str, revision: int | None = None) -> bytes:
        """Return an explanation as JSON, the newest unless ``revision`` says which.

        Raises:
            NotFoundError: there is none (yet).
        """
        c = explanations.c
        query = select(c.data).where(c.incident_id == _clean(identifier)).order_by(c.revision.desc()).limit(1)
        if revision is not None:
            query = query.where(c.revision == revision)
        with self._reading() as connection:
            data = connection.execute(query).scalar()
        if data is None:
            which = "no explanation" if revision is None else f"no explanation {revision}"
            raise NotFoundError(f"incident {identifier!r} has {which}", cure="see how far it came: rca incidents show")
        return zlib.decompress(data)

    def explanations(self, identifier: str) -> tuple[ExplanationInfo, ...]:
        """Return what explanations there are of an incident, oldest first."""
        c = explanations.c
        columns = (c.incident_id, c.revision, c.created_at, c.verdict, c.trigger, c.sha256)
        with self._reading() as connection:
            rows = connection.execute(select(*columns).where(c.incident_id == _clean(identifier)).order_by(c.revision))
            return tuple(ExplanationInfo(*row) for row in rows)

    def alerts(self, identifier: str) -> tuple[Alert, ...]:
        """Return the alerts that an incident belongs to, one for each group that it came in."""
        record = self.get(identifier)
        c = alerts.c
        with self._reading() as connection:
            rows = connection.execute(select(alerts).where(c.incident_id == identifier).order_by(c.first_at)).all()
        return tuple(
            Alert(
                row.group_text,
                row.fingerprint,
                row.starts_at,
                row.ends_at,
                record.labels,
                record.annotations,
                record.generator_url,
                row.receiver,
            )
            for row in rows
        )

    def conflicts(self, identifier: str | None = None, limit: int = 100) -> tuple[StoredConflict, ...]:
        """Return updates that did not win, newest first, of one incident or of all."""
        query = select(conflicts).order_by(conflicts.c.number.desc()).limit(limit)
        if identifier is not None:
            query = query.where(conflicts.c.incident_id == identifier)
        with self._reading() as connection:
            return tuple(
                StoredConflict(
                    row.incident_id,
                    row.at,
                    row.writer,
                    versions.decode(row.base),
                    versions.decode(row.stored),
                    msgspec.json.decode(row.change),
                )
                for row in connection.execute(query)
            )

    def counts(self) -> dict[State, int]:
        """Return how many incidents are in each state."""
        c = incidents.c
        with self._reading() as connection:
            rows = connection.execute(select(c.state, func.count()).group_by(c.state)).all()
        found = {State(state): int(number) for state, number in rows}
        return {state: found.get(state, 0) for state in State}

    def last_explained(self) -> datetime | None:
        """Return when an incident was last explained; None: none is."""
        with self._reading() as connection:
            return connection.execute(select(func.max(incidents.c.explained_at))).scalar()

    def waiting(self) -> int:
        """Return how many incidents are not finished."""
        with self._reading() as connection:
            return self._waiting(connection)

    @staticmethod
    def _waiting(connection: Connection) -> int:
        query = select(func.count()).select_from(incidents).where(incidents.c.state.in_(_ACTIVE))
        return int(connection.execute(query).scalar_one())

    # --- moving and removing

    def add(
        self,
        record: StoredIncident,
        now: datetime,
        *,
        bundle: bytes | None = None,
        found: Sequence[tuple[ExplanationInfo, bytes]] = (),
    ) -> bool:
        """Take in an incident from elsewhere, with its version vector; False when all of it is here already.

        Raises:
            ConflictError: both it and the one here were changed since they were the same. The one here stays, the other
                is kept as a conflict.
        """
        arriving = msgspec.structs.replace(record, lease_owner="", lease_until=None)
        if not arriving.version:
            arriving = msgspec.structs.replace(arriving, version=versions.advance({}, self.writer))
        with self._writing() as connection:
            row = connection.execute(select(incidents).where(incidents.c.id == record.id).with_for_update()).first()
            stored = None if row is None else _incident(row)
            clash = stored is not None and versions.concurrent(arriving.version, stored.version)
            if stored is not None and clash:
                changes = msgspec.to_builtins(arriving)
                self._keep_conflict(connection, arriving, stored, changes, found[-1][1] if found else None, now)
            elif stored is not None and not versions.dominates(arriving.version, stored.version):
                return False
            else:
                self._place(connection, arriving, bundle, found, now)
        if clash:
            raise ConflictError(
                f"incident {record.id} was changed both here and there since they were the same",
                cure=f"the one here stays; see the other with `rca incidents show {record.id}`",
            )
        return True

    def _place(
        self,
        connection: Connection,
        record: StoredIncident,
        bundle: bytes | None,
        found: Sequence[tuple[ExplanationInfo, bytes]],
        now: datetime,
    ) -> None:
        values = _columns(record)
        try:
            statement = self._insert(incidents).values(values)
            connection.execute(statement.on_conflict_do_update(index_elements=[incidents.c.id], set_=values))
        except IntegrityError:
            raise InvalidInputError(
                f"the alert of incident {record.id} is here already, under another id",
                cure=f"find it with `rca incidents show {record.fingerprint}`",
            ) from None
        if bundle is not None:
            self._put_bundle(connection, record.id, bundle, now)
        for info, data in found:
            packed = zlib.compress(data, 6)
            statement = self._insert(explanations).values(
                incident_id=record.id,
                revision=info.revision,
                created_at=info.created_at,
                verdict=info.verdict,
                trigger=info.trigger,
                sha256=hashlib.sha256(data).hexdigest(),
                size=len(packed),
                data=packed,
            )
            connection.execute(statement.on_conflict_do_nothing())

    def prune(self, retention: Retention, now: datetime, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove finished incidents that `retention` does not keep, oldest first.

        Returns:
            How many incidents were removed (or would be, with ``dry_run``), and how many bytes they held.
        """
        doomed = self._doomed(retention, now)
        if not dry_run:
            finals = [state.value for state in FINAL]
            names = list(doomed)
            for start in range(0, len(names), _BATCH):
                with self._writing() as connection:
                    connection.execute(
                        delete(incidents).where(
                            incidents.c.id.in_(names[start : start + _BATCH]), incidents.c.state.in_(finals)
                        )
                    )
            if names and self.kind == "sqlite":
                with spoken(self._engine), self._engine.connect() as connection:
                    raw = connection.connection.driver_connection
                    assert raw is not None  # noqa: S101 - of a connection in use
                    raw.execute("PRAGMA incremental_vacuum").fetchall()
        return len(doomed), sum(doomed.values())

    def _doomed(self, retention: Retention, now: datetime) -> dict[str, int]:
        c, e = incidents.c, explanations.c
        spent = select(func.coalesce(func.sum(e.size), 0)).where(e.incident_id == c.id).scalar_subquery()
        query = select(c.id, c.state, c.starts_at, c.bundle_bytes + spent).order_by(c.starts_at.desc(), c.id.desc())
        doomed: dict[str, int] = {}
        kept, size = 0, 0
        oldest = None if retention.age_seconds is None else now - timedelta(seconds=retention.age_seconds)
        with self._reading() as connection:
            for identifier, state, starts_at, held in connection.execute(query):
                too_old = oldest is not None and starts_at < oldest
                too_many = retention.count is not None and kept >= retention.count
                too_large = retention.size_bytes is not None and size + held > retention.size_bytes
                if State(state) in FINAL and (too_old or too_many or too_large):
                    doomed[identifier] = int(held)
                else:
                    kept += 1
                    size += int(held)
        return doomed


# --- rows and records


def _incident(row: Row[Any]) -> StoredIncident:
    values = {name: row._mapping[name] for name in StoredIncident.__struct_fields__}
    for name in _JSON:
        values[name] = msgspec.json.decode(values[name])
    values["not_checked"] = tuple(values["not_checked"])
    values["version"] = versions.decode(values["version"])
    values["state"] = State(values["state"])
    return StoredIncident(**values)


def _columns(record: StoredIncident) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = _clean(value)
    for name in _JSON:
        values[name] = msgspec.json.encode(values[name]).decode()
    values["version"] = versions.encode(record.version)
    values["state"] = record.state.value
    return values


def _clean(text: str) -> str:
    """PostgreSQL stores no NUL."""
    return text.replace("\0", "\ufffd")


def _title(alert: Alert, name: str) -> str:
    return alert.annotations.get("summary") or name or "alert without a name"


def _vector(record: StoredIncident) -> str:
    return versions.encode(record.version)


def _publication(item: Publication) -> tuple[Any, ...]:
    c = publications.c
    return (c.incident_id == item.incident, c.revision == item.revision, c.target == item.target)


def _conditions(wanted: Filter) -> list[Any]:
    c = incidents.c
    found: list[Any] = []
    if wanted.states:
        found.append(c.state.in_([state.value for state in wanted.states]))
    for column, value in ((c.alertname, wanted.alertname), (c.victim, wanted.victim), (c.cause, wanted.cause)):
        if value is not None:
            found.append(column == _clean(value))
    if wanted.since is not None:
        found.append(c.starts_at >= wanted.since)
    if wanted.until is not None:
        found.append(c.starts_at < wanted.until)
    return found


def _encode_cursor(value: Any, identifier: str) -> str:
    data = msgspec.json.encode([value, identifier])
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode_cursor(text: str, sort: str) -> tuple[Any, str]:
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        if sort == "start":
            moment, identifier = msgspec.json.decode(data, type=tuple[datetime, str])
            if moment.tzinfo is not None:
                return moment, _clean(identifier)
        elif sort == "confidence":
            number, identifier = msgspec.json.decode(data, type=tuple[float, str])
            return number, _clean(identifier)
        else:
            value, identifier = msgspec.json.decode(data, type=tuple[str, str])
            return _clean(value), _clean(identifier)
    except (binascii.Error, msgspec.DecodeError, UnicodeError, ValueError):
        pass
    raise InvalidInputError("the cursor is not one of a page before", cure="start again without it")
