"""Tells Grafana about explanations: an annotation for each, on the boards of its time range.

What is to be told is in the store, written with the explanation, so that neither a crash nor a Grafana that is away
loses any. Before a second attempt, Grafana is asked whether the first arrived after all.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx

from rca.errors import NotFoundError, PrioscopeError
from rca.explanation import Explanation, from_json
from rca.report import phrases
from rca.report.format import printable, shorten
from rca.serve.secrets import Secret
from rca.serve.stats import Stats
from rca.serve.work import backoff
from rca.store.database import Store
from rca.store.records import Publication, StoredIncident

_log = logging.getLogger(__name__)

GRAFANA: Final = "grafana"
#: After a day, nobody looks at the annotation any more.
GIVE_UP: Final = timedelta(days=1)
_TIMEOUT: Final = 10.0
_LEASE: Final = timedelta(seconds=60)
_TEXT: Final = 500


@dataclass(frozen=True)
class GrafanaSettings:
    """Where Grafana is. ``token_file`` holds a service account token; ``link`` is this server's address for people."""

    url: str
    token_file: Path
    link: str = ""


class Publisher:
    """A thread that makes what publications are due."""

    def __init__(self, store: Store, settings: GrafanaSettings, stats: Stats) -> None:
        self._store = store
        self._settings = settings
        self._stats = stats
        self._token = Secret(settings.token_file)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after what is under way."""
        self._stopping.set()
        self._thread.join(_TIMEOUT + 1)

    def _run(self) -> None:
        with httpx.Client(base_url=self._settings.url.rstrip("/"), timeout=_TIMEOUT) as client:
            while not self._stopping.is_set():
                try:
                    busy = self._next(client)
                except PrioscopeError as error:
                    self._stats.failure("store")
                    _log.warning("%s", error)
                    busy = False
                except Exception:
                    self._stats.failure("publish")
                    _log.exception("the publisher met a defect")
                    busy = False
                if not busy:
                    self._stopping.wait(1.0)

    def _next(self, client: httpx.Client) -> bool:
        item = self._store.claim_publication(datetime.now(UTC), _LEASE)
        if item is None:
            return False
        began = time.monotonic()
        try:
            record = self._store.get(item.incident)
            explanation = from_json(self._store.explanation(item.incident, item.revision))
            self._tell(client, item, record, explanation)
        except NotFoundError:
            self._store.publication_done(item, datetime.now(UTC), "the incident was removed")
        except (httpx.HTTPError, OSError, PrioscopeError, ValueError) as error:
            self._again(item, record, _reason(error))
        else:
            self._store.publication_done(item, datetime.now(UTC))
        self._stats.took("publish", time.monotonic() - began)
        return True

    def _again(self, item: Publication, record: StoredIncident, reason: str) -> None:
        self._stats.failure("publish")
        now = datetime.now(UTC)
        if now - (record.explained_at or record.received_at) > GIVE_UP:
            self._store.publication_done(item, now, reason)
            return
        delay = backoff(item.attempts, random.random())
        _log.warning("%s: Grafana was not told, again in %.0f s: %s", item.incident, delay, reason)
        self._store.publication_failed(item, now + timedelta(seconds=delay), reason)

    def _tell(self, client: httpx.Client, item: Publication, record: StoredIncident, explanation: Explanation) -> None:
        headers = {"Authorization": f"Bearer {self._token.read()}"}
        name = f"incident:{item.incident}:{item.revision}"
        if item.attempts > 1:
            found = client.get("/api/annotations", params={"tags": name, "limit": 1}, headers=headers)
            found.raise_for_status()
            if found.json():
                return
        body = annotation(record, explanation, self._settings.link)
        body["tags"].append(name)
        client.post("/api/annotations", json=body, headers=headers).raise_for_status()


def annotation(record: StoredIncident, explanation: Explanation, link: str = "") -> dict[str, Any]:
    """Return the body of ``POST /api/annotations``. Grafana shows its text as HTML, so nothing in it may be markup."""
    import html

    text = html.escape(shorten(printable(f"{phrases.title(explanation)}: {phrases.verdict(explanation)}"), _TEXT))
    if link:
        text += f'\n<a href="{html.escape(link.rstrip("/"))}/incidents/{record.id}">Report</a>'
    body: dict[str, Any] = {
        "time": int(record.starts_at.timestamp() * 1000),
        "tags": ["prioscope", record.state.value],
        "text": text,
    }
    if record.ended_at is not None and record.ended_at > record.starts_at:
        body["timeEnd"] = int(record.ended_at.timestamp() * 1000)
    return body


def _reason(error: Exception) -> str:
    # Of a request, only what it came to: its text could repeat headers.
    if isinstance(error, httpx.HTTPStatusError):
        return f"Grafana answered {error.response.status_code}"
    if isinstance(error, httpx.HTTPError):
        return f"{type(error).__name__}: Grafana does not answer"
    return str(error)
