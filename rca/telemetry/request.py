"""What is asked of a live capture: the alert that fired, and the time around it. The contract between the incident
server, which receives alerts, and the capture, which turns one into an `Incident`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from rca.incident import Incident, Window


@dataclass(frozen=True)
class CaptureRequest:
    """One alert to capture.

    Attributes:
        id: Identity of the incident to build (`Header.id`).
        labels: The alert's labels. ``workload`` or ``service`` names the victim, unless the annotations do.
        annotations: The alert's annotations; ``rca_victim`` and ``rca_metric`` name the victim outright.
        onset: When the alert began (``startsAt``), with a time zone.
        end: End of the incident window; None: as much after the onset as there is, up to the capture's limit.
        busy: Windows of other incidents, which the baseline must not touch.
        fingerprint: Alertmanager's fingerprint of the alert, if there is one.
        generator_url: The alert's ``generatorURL``, if there is one.
    """

    id: str
    labels: dict[str, str]
    annotations: dict[str, str]
    onset: datetime
    end: datetime | None = None
    busy: tuple[Window, ...] = ()
    fingerprint: str = ""
    generator_url: str = ""


class Capture(Protocol):
    """Captures an incident.

    Raises:
        rca.errors.SourceUnreachableError: no source answered at all, so that trying again later makes sense.
        rca.errors.InvalidInputError: the alert names no victim that could be captured.
    """

    def __call__(self, request: CaptureRequest) -> Incident: ...
