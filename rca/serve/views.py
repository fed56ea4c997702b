"""What the JSON API takes and gives, as types; the OpenAPI document is made from them."""

from __future__ import annotations

from datetime import datetime

import msgspec

from rca.store.records import ExplanationInfo, State, StoredConflict, StoredIncident


class AlertsAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a webhook's alerts.

    Attributes:
        accepted: New incidents.
        repeated: Alerts of incidents that are known.
        resolved: Alerts whose end is known now.
        ignored: Alerts that were first heard of long after their end.
        refused: Alerts that make no sense; ``problems`` says why.
        incidents: Ids of the incidents that the alerts belong to.
    """

    accepted: int
    repeated: int
    resolved: int
    ignored: int
    refused: int
    problems: tuple[str, ...]
    incidents: tuple[str, ...]


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An incident, without its bundle and its explanation."""

    id: str
    state: State
    title: str
    alertname: str
    fingerprint: str
    starts_at: datetime
    ended_at: datetime | None
    received_at: datetime
    updated_at: datetime
    explained_at: datetime | None
    labels: dict[str, str]
    annotations: dict[str, str]
    generator_url: str
    victim: str
    victim_metric: str
    cause: str
    mechanism: str
    confidence: float | None
    not_checked: tuple[str, ...]
    problem: str
    attempts: int
    next_attempt_at: datetime | None
    bundle_bytes: int
    revision: int
    version: dict[str, int]


class Incidents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page of incidents; ``next`` is the cursor of the following page, null on the last."""

    items: tuple[Incident, ...]
    next: str | None


class IncidentDetail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An incident with what the store knows about it: its explanations, and updates that did not win."""

    incident: Incident
    explanations: tuple[ExplanationInfo, ...]
    conflicts: tuple[StoredConflict, ...]


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a request was not answered (RFC 9457)."""

    title: str
    status: int
    detail: str
    cure: str = ""


def incident_view(record: StoredIncident) -> Incident:
    """Return what of a stored incident is shown."""
    return Incident(**{name: getattr(record, name) for name in Incident.__struct_fields__})
