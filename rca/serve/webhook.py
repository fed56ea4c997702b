"""Alertmanager's webhook (version 4) -> alerts.

A body that is no webhook is refused as a whole. A single alert that makes no sense is not, or it would take the others
of its group with it: Alertmanager does not send a refused webhook again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rca.errors import InvalidInputError
from rca.store.records import Alert

VERSION: Final = "4"
#: A webhook with a thousand usual alerts has about one MiB.
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
#: Levels of brackets; a webhook has four.
MAX_DEPTH: Final = 32
#: Names and values of the labels and annotations of one alert.
MAX_ALERT_CHARACTERS: Final = 65_536
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{8,64}")
_EARLIEST: Final = datetime(2000, 1, 1, tzinfo=UTC)
_AHEAD: Final = timedelta(minutes=5)

#: No `format`, since an alert whose time cannot be read is refused without its webhook.
_Time = Annotated[str, msgspec.Meta(description="RFC 3339", examples=["2026-01-31T03:05:00Z"])]


class WebhookAlert(msgspec.Struct, frozen=True, rename="camel"):
    """One alert of a webhook."""

    labels: dict[str, str]
    starts_at: _Time
    status: str = "firing"
    annotations: dict[str, str] = {}
    ends_at: _Time = ""
    generator_url: str = msgspec.field(name="generatorURL", default="")
    fingerprint: str = ""


class Webhook(msgspec.Struct, frozen=True, rename="camel"):
    """What Alertmanager posts; fields that are not used here are allowed and ignored."""

    version: Annotated[str, msgspec.Meta(extra_json_schema={"const": VERSION})]
    alerts: list[WebhookAlert]
    group_key: str = ""
    receiver: str = ""


@dataclass(frozen=True)
class Received:
    """The alerts of one webhook, and why others were refused."""

    alerts: tuple[Alert, ...]
    refused: tuple[str, ...] = ()


def parse_webhook(body: bytes, now: datetime) -> Received:
    """Read a webhook.

    Raises:
        InvalidInputError: it is no webhook of version 4.
    """
    _check_depth(body)
    try:
        webhook = msgspec.json.decode(body, type=Webhook)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(
            f"this is no webhook of Alertmanager: {error}", cure="send JSON as webhook_configs of Alertmanager does"
        ) from None
    if webhook.version != VERSION:
        raise InvalidInputError(
            f"the webhook has version {webhook.version[:20]!r}, not {VERSION!r}", cure="use Alertmanager 0.16 or later"
        )
    alerts, refused = [], []
    for index, item in enumerate(webhook.alerts):
        try:
            alerts.append(_alert(item, webhook, now))
        except (InvalidInputError, msgspec.ValidationError) as error:
            refused.append(f"alert {index + 1}: {error}")
    return Received(tuple(alerts), tuple(refused))


def _alert(item: WebhookAlert, webhook: Webhook, now: datetime) -> Alert:
    size = sum(len(key) + len(value) for pairs in (item.labels, item.annotations) for key, value in pairs.items())
    if size > MAX_ALERT_CHARACTERS:
        raise InvalidInputError(f"its labels and annotations have {size:,} characters")
    starts = _time(item.starts_at, "startsAt")
    if not _EARLIEST <= starts <= now + _AHEAD:
        raise InvalidInputError(f"startsAt is {starts.isoformat()}, which is not in the past")
    ends = None
    if item.status == "resolved":
        # Alertmanager writes year 1 where it knows no end.
        said = _time(item.ends_at, "endsAt") if item.ends_at else now
        ends = min(max(said, starts), now + _AHEAD)
    return Alert(
        group_key=webhook.group_key,
        fingerprint=fingerprint_of(item.fingerprint, item.labels),
        starts_at=starts,
        ends_at=ends,
        labels=dict(sorted(item.labels.items())),
        annotations=dict(sorted(item.annotations.items())),
        generator_url=without_credentials(item.generator_url),
        receiver=webhook.receiver,
    )


def _time(text: str, name: str) -> datetime:
    found = msgspec.convert(text, datetime)
    if found.tzinfo is None:
        raise InvalidInputError(f"{name} has no time zone")
    return found


def fingerprint_of(given: str, labels: Mapping[str, str]) -> str:
    """Return Alertmanager's fingerprint, or one of our own where there is none that could be one."""
    if _FINGERPRINT.fullmatch(given):
        return given
    return hashlib.sha256(msgspec.json.encode(sorted(labels.items()))).hexdigest()[:16]


def without_credentials(url: str) -> str:
    """Return ``url`` without user and password; empty where it cannot be read or is not HTTP."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https"):
        return ""
    return urlunsplit((parts.scheme, host, parts.path, parts.query, parts.fragment))


_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)


def _check_depth(body: bytes) -> None:
    """Refuse deep nesting before anything is built from it."""
    depth = 0
    for byte in re.findall(rb"[\[\]{}]", _STRING.sub(b"", body)):
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise InvalidInputError(
                f"the JSON is nested more than {MAX_DEPTH} levels deep", cure="send what Alertmanager sends"
            )
