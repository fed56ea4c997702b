"""Alerts that fire now, from Alertmanager's API (version 2)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import httpx
import msgspec

from rca.errors import InvalidInputError, SourceUnreachableError
from rca.serve.secrets import Secret
from rca.serve.webhook import fingerprint_of, without_credentials
from rca.store.records import Alert

#: What our rules mark for capture.
MARKED: Final = 'rca="capture"'
_TIMEOUT: Final = 10.0


@dataclass(frozen=True)
class AlertmanagerSettings:
    """Where Alertmanager is, the alerts that count (a matcher; empty: all), and a file with its bearer token."""

    url: str
    matcher: str = MARKED
    token_file: Path | None = None


class _Alert(msgspec.Struct, rename="camel"):
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: datetime
    fingerprint: str = ""
    generator_url: str = msgspec.field(name="generatorURL", default="")


def active_alerts(settings: AlertmanagerSettings, now: datetime) -> tuple[Alert, ...]:
    """Return the alerts that fire and are neither silenced nor inhibited, newest first.

    Raises:
        SourceUnreachableError: Alertmanager does not answer.
        InvalidInputError: what answers is no Alertmanager, or it refuses the matcher.
    """
    parameters = {"active": "true", "silenced": "false", "inhibited": "false"}
    if settings.matcher:
        parameters["filter"] = settings.matcher
    headers = {}
    if settings.token_file is not None:
        headers["Authorization"] = f"Bearer {Secret(settings.token_file).read()}"
    try:
        answer = httpx.get(
            f"{settings.url.rstrip('/')}/api/v2/alerts", params=parameters, headers=headers, timeout=_TIMEOUT
        )
    except httpx.InvalidURL:
        raise InvalidInputError("the URL of Alertmanager cannot be read", cure="write http://HOST:9093") from None
    except httpx.HTTPError as error:
        raise SourceUnreachableError(
            f"Alertmanager does not answer: {type(error).__name__}", cure="check its URL and that it runs"
        ) from None
    if answer.status_code == 400:
        raise InvalidInputError(f"Alertmanager refuses the matcher {settings.matcher!r}", cure="correct the matcher")
    if answer.status_code != 200:
        raise SourceUnreachableError(f"Alertmanager answered {answer.status_code}", cure="check its URL, and the token")
    try:
        found = msgspec.json.decode(answer.content, type=list[_Alert])
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"what answers is no Alertmanager: {error}", cure="check its URL") from None
    alerts = [
        Alert(
            group_key="",
            fingerprint=fingerprint_of(item.fingerprint, item.labels),
            starts_at=item.starts_at,
            labels=item.labels,
            annotations=item.annotations,
            generator_url=without_credentials(item.generator_url),
        )
        for item in found
        if item.starts_at.tzinfo is not None and item.starts_at <= now
    ]
    return tuple(sorted(alerts, key=lambda alert: alert.starts_at, reverse=True))
