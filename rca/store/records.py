"""What the store holds, as typed data, and the errors that it raises. No database library is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from rca.errors import ExitCode, PrioscopeError


class State(StrEnum):
    """How far an incident has come."""

    RECEIVED = "received"
    CAPTURING = "capturing"
    CAPTURED = "captured"
    EXPLAINING = "explaining"
    EXPLAINED = "explained"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"


#: States in which nothing more happens by itself.
FINAL: Final = frozenset({State.EXPLAINED, State.INCONCLUSIVE, State.FAILED})

#: Steps that may be taken. A step to the same state is a second attempt, after a crash or a failure.
STEPS: Final[Mapping[State, frozenset[State]]] = {
    State.RECEIVED: frozenset({State.RECEIVED, State.CAPTURING, State.FAILED}),
    State.CAPTURING: frozenset({State.RECEIVED, State.CAPTURING, State.CAPTURED, State.FAILED}),
    State.CAPTURED: frozenset({State.RECEIVED, State.CAPTURED, State.EXPLAINING, State.FAILED}),
    State.EXPLAINING: frozenset(
        {State.CAPTURED, State.EXPLAINING, State.EXPLAINED, State.INCONCLUSIVE, State.FAILED},
    ),
    # A person asks for another explanation, of the same bundle or of a new one.
    State.EXPLAINED: frozenset({State.EXPLAINED, State.CAPTURED, State.RECEIVED}),
    State.INCONCLUSIVE: frozenset({State.INCONCLUSIVE, State.CAPTURED, State.RECEIVED}),
    State.FAILED: frozenset({State.FAILED, State.CAPTURED, State.RECEIVED}),
}


class Alert(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One alert as Alertmanager sent it.

    Attributes:
        group_key: Alertmanager's key of the group that the alert came in.
        fingerprint: Alertmanager's hash of the labels.
        starts_at: When it began.
        ends_at: When it ended; None while it fires.
        generator_url: Where the alert was made, without credentials.
    """

    group_key: str
    fingerprint: str
    starts_at: datetime
    ends_at: datetime | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    generator_url: str = ""
    receiver: str = ""


def incident_id(alert: Alert) -> str:
    """Return the id of the incident of ``alert``: fit for a file name and an address, and the same each time."""
    stamp = alert.starts_at.astimezone(UTC)
    return f"{stamp:%Y%m%dT%H%M%S}.{stamp.microsecond // 1000:03d}Z-{alert.fingerprint}"


class StoredIncident(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An incident in the store, without its bundle and its explanations.

    Attributes:
        id: Also the id of the bundle.
        starts_at, ended_at: When the alert began, and when it was resolved.
        attempts: How often the present step was tried.
        next_attempt_at: Not to be tried before; None: at once.
        problem: Why the last attempt failed, or what is missing; empty when all is well.
        partial: How often the capture was repeated because a source did not answer in full.
        recapture: The next capture replaces the bundle whatever it holds.
        revision: Number of the newest explanation; 0 before the first.
        confidence: Calibrated confidence in ``cause``, in [0, 1].
        not_checked: What the newest explanation could not examine.
        version: Version vector (see `rca.store.versions`).
        lease_owner, lease_until: Who works on it, and until when nobody else may.
    """

    id: str
    state: State
    fingerprint: str
    starts_at: datetime
    received_at: datetime
    updated_at: datetime
    ended_at: datetime | None = None
    title: str = ""
    alertname: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    generator_url: str = ""
    attempts: int = 0
    next_attempt_at: datetime | None = None
    problem: str = ""
    partial: int = 0
    recapture: bool = False
    bundle_bytes: int = 0
    revision: int = 0
    explained_at: datetime | None = None
    victim: str = ""
    victim_metric: str = ""
    cause: str = ""
    mechanism: str = ""
    confidence: float | None = None
    not_checked: tuple[str, ...] = ()
    version: dict[str, int] = {}
    lease_owner: str = ""
    lease_until: datetime | None = None

    @property
    def final(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.state in FINAL


class ExplanationInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One explanation in the store, without its content. ``sha256`` is of the JSON; ``trigger`` says who asked."""

    incident: str
    revision: int
    created_at: datetime
    verdict: str
    trigger: str
    sha256: str


class StoredConflict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An update that did not win: kept whole, so that nothing is lost."""

    incident: str
    at: datetime
    writer: str
    base: dict[str, int]
    stored: dict[str, int]
    update: dict[str, Any]


class Publication(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An explanation that is to be told to another system (``target``)."""

    incident: str
    revision: int
    target: str
    attempts: int


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of the alerts of one webhook: counts by outcome, and the incidents that they belong to."""

    accepted: int = 0
    repeated: int = 0
    resolved: int = 0
    ignored: int = 0
    incidents: tuple[str, ...] = ()


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which incidents to list; None: all. ``since`` and ``until`` bound the start of the alert, as [since, until)."""

    states: tuple[State, ...] = ()
    alertname: str | None = None
    victim: str | None = None
    cause: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class Page(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page of a list; ``next`` is where the following one begins, None after the last."""

    items: tuple[StoredIncident, ...]
    next: str | None = None


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much to keep; None: without limit. Incidents that are not finished are always kept.

    Attributes:
        age_seconds: Oldest start of an alert.
        count: Most incidents.
        size_bytes: Most bytes of bundles and explanations.
    """

    age_seconds: float | None = None
    count: int | None = None
    size_bytes: int | None = None


class BacklogFullError(PrioscopeError):
    """More incidents wait than may. Nothing of the webhook was stored; it is to be sent again."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, waiting: int, capacity: int) -> None:
        super().__init__(
            f"{waiting:,} incidents wait already, of at most {capacity:,}", cure="send the webhook again later"
        )


class ConflictError(PrioscopeError):
    """Another writer changed the record first. The update was not applied; the store keeps it as a conflict."""

    exit_code = ExitCode.USAGE
