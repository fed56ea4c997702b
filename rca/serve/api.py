"""The routes: the webhook, the JSON API, pages for people, metrics, health."""

from __future__ import annotations

import asyncio
import gzip
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from exporters.exposition import choose, render
from exporters.server import GZIP_LEVEL, GZIP_MINIMUM, accepts_gzip
from rca.errors import InvalidInputError, NotFoundError, PrioscopeError, SourceUnreachableError
from rca.explanation import from_json
from rca.report.html import render_html
from rca.report.pages import Link, ListQuery, ListRow, render_list, render_status, when
from rca.serve.metrics import IncidentMetrics
from rca.serve.openapi import MAX_LIMIT, document
from rca.serve.stats import Stats
from rca.serve.views import AlertsAnswer, IncidentDetail, Incidents, Problem, incident_view
from rca.serve.webhook import MAX_BODY_BYTES, parse_webhook
from rca.serve.work import Workers
from rca.store.database import Store
from rca.store.records import BacklogFullError, ConflictError, Filter, State, StoredIncident

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

RETRY_AFTER_SECONDS: Final = 5
BODY_SECONDS: Final = 10.0
_FILTERS: Final = ("alertname", "victim", "cause", "since", "until")
_TITLES: Final = {400: "Bad request", 404: "Not found", 409: "Conflict", 503: "Service unavailable"}


@dataclass
class Service:
    """What the routes work on. ``capacity``: waiting incidents past which webhooks are refused for a while."""

    store: Store
    workers: Workers
    stats: Stats
    metrics: IncidentMetrics
    capacity: int
    #: Set when the process is told to stop.
    draining: bool = False

    def __post_init__(self) -> None:
        self.rendering = threading.Lock()


def application(service: Service) -> Starlette:
    """Return the application behind the gate."""
    one = "/api/v1/incidents/{id:path}"
    app = Starlette(
        routes=[
            Route("/api/v1/alerts", _alerts, methods=["POST"]),
            Route("/api/v1/incidents", _list),
            Route(f"{one}/explanation", _explanation),
            Route(f"{one}/bundle", _bundle),
            Route(f"{one}/explain", _explain, methods=["POST"]),
            Route(one, _get),
            Route("/api/v1/openapi.json", _openapi),
            Route("/metrics", _metrics),
            Route("/-/healthy", _healthy),
            Route("/-/ready", _ready),
            Route("/incidents", _list_page),
            Route("/incidents/{id:path}", _page),
            Route("/", _root),
        ],
        exception_handlers={
            HTTPException: _http_problem,
            PrioscopeError: _problem,
            ClientDisconnect: _gone,
            Exception: _defect,
        },
    )
    # A redirect to the path with a slash would lead past proxies' prefixes.
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


# --- problems


def _answer_problem(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(problem), problem.status, dict(headers or {}), media_type="application/problem+json"
    )


def _http_problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
    return _answer_problem(Problem(error.detail, error.status_code, error.detail), error.headers)


def _problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PrioscopeError)  # noqa: S101 - registered for it
    if isinstance(error, BacklogFullError | SourceUnreachableError):
        status = 503
    elif isinstance(error, NotFoundError):
        status = 404
    else:
        status = 409 if isinstance(error, ConflictError) else 400
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else {}
    return _answer_problem(Problem(_TITLES[status], status, str(error), error.cure), headers)


def _gone(_request: Request, _error: Exception) -> Response:
    # Nobody reads it.
    return Response(status_code=400)


def _defect(_request: Request, _error: Exception) -> Response:
    # uvicorn logs the traceback, which holds no header; the client learns no more than that.
    return _answer_problem(Problem("Internal server error", 500, "a defect; see the server's log"))


# --- the webhook


async def _alerts(request: Request) -> Response:
    service = _service(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "Send application/json")
    body = await _body(request)
    answer = await run_in_threadpool(_receive, service, body)
    service.workers.wake()
    return _json(answer, 202)


async def _body(request: Request) -> bytes:
    """Read the body, within a size and a time."""
    length = request.headers.get("content-length", "")
    too_large = HTTPException(413, f"Send at most {MAX_BODY_BYTES:,} bytes", headers={"Connection": "close"})
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise HTTPException(408, "The body took too long to arrive", headers={"Connection": "close"}) from None
    return b"".join(parts)


def _receive(service: Service, body: bytes) -> AlertsAnswer:
    now = datetime.now(UTC)
    received = parse_webhook(body, now)
    for reason in received.refused:
        _log.warning("refused an alert: %s", reason)
    service.stats.alert("refused", len(received.refused))
    if received.refused and not received.alerts:
        raise InvalidInputError(
            f"no alert of the webhook makes sense; {received.refused[0]}",
            cure="send alerts as webhook_configs of Alertmanager does",
        )
    try:
        receipt = service.store.receive(received.alerts, now, service.capacity)
    except SourceUnreachableError:
        service.stats.failure("store")
        raise
    for outcome in ("accepted", "repeated", "resolved", "ignored"):
        service.stats.alert(outcome, getattr(receipt, outcome))
    return AlertsAnswer(
        receipt.accepted,
        receipt.repeated,
        receipt.resolved,
        receipt.ignored,
        len(received.refused),
        received.refused[:20],
        receipt.incidents,
    )


# --- the API


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _list(request: Request) -> Response:
    limit = _parameter(request, "limit", int, 50)
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidInputError(f"limit is {limit}", cure=f"use 1 to {MAX_LIMIT}")
    page = _service(request).store.list(
        _filter(request),
        limit=limit,
        after=request.query_params.get("cursor"),
        sort=request.query_params.get("sort", "start"),
        ascending=_order(request),
    )
    return _json(Incidents(tuple(incident_view(item) for item in page.items), page.next))


def _get(request: Request) -> Response:
    store = _service(request).store
    record = _found(request)
    return _json(IncidentDetail(incident_view(record), store.explanations(record.id), store.conflicts(record.id)))


def _explanation(request: Request) -> Response:
    record = _found(request)
    revision = _revision(request)
    data = _service(request).store.explanation(record.id, revision)
    return Response(data, media_type="application/json")


def _bundle(request: Request) -> Response:
    record = _found(request)
    data = _service(request).store.bundle(record.id)
    disposition = f'attachment; filename="{_file_name(record.id)}.zip"'
    return Response(data, media_type="application/zip", headers={"Content-Disposition": disposition})


def _explain(request: Request) -> Response:
    service = _service(request)
    recapture = _parameter(request, "recapture", bool, False)
    record = _found(request)
    if not record.final:
        raise HTTPException(409, f"The incident is {record.state}; it is being worked on")
    waiting = service.store.waiting()
    if waiting >= service.capacity:
        raise BacklogFullError(waiting, service.capacity)
    again = service.store.update(record, again_changes(record, recapture=recapture), datetime.now(UTC))
    service.workers.wake()
    return _json(incident_view(again), 202)


def again_changes(record: StoredIncident, *, recapture: bool) -> dict[str, Any]:
    """Return the changes that have a finished incident explained again."""
    recapture = recapture or not record.bundle_bytes
    return {
        "state": State.RECEIVED if recapture else State.CAPTURED,
        "recapture": recapture,
        "attempts": 0,
        "partial": 0,
        "problem": "",
        "next_attempt_at": None,
    }


def _openapi(_request: Request) -> Response:
    return Response(document(), media_type="application/json")


def _found(request: Request) -> StoredIncident:
    return _service(request).store.find(request.path_params["id"])


def _revision(request: Request) -> int | None:
    revision = _parameter(request, "revision", int, None)
    if revision is not None and not 1 <= revision < 2**31:
        raise InvalidInputError(f"revision is {revision}", cure="revisions count from 1")
    return revision


def _parameter(request: Request, name: str, kind: Any, default: _T) -> Any | _T:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        raise InvalidInputError(f"{name} is {text[:60]!r}", cure=f"give one {kind.__name__}") from None


def _filter(request: Request) -> Filter:
    given = request.query_params
    states = []
    for text in given.getlist("state"):
        if text not in set(State):
            raise InvalidInputError(f"state is {text[:60]!r}", cure=f"use one of {', '.join(State)}")
        states.append(State(text))
    times: dict[str, Any] = {}
    for name in ("since", "until"):
        times[name] = _parameter(request, name, datetime, None)
        if times[name] is not None and times[name].tzinfo is None:
            raise InvalidInputError(f"{name} has no time zone", cure="write it as 2026-01-31T03:00:00Z")
    return Filter(tuple(states), given.get("alertname"), given.get("victim"), given.get("cause"), **times)


def _order(request: Request) -> bool:
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidInputError(f"order is {order[:60]!r}", cure="use asc or desc")
    return order == "asc"


def _file_name(identifier: str) -> str:
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in identifier)


# --- pages


def _root(_request: Request) -> Response:
    return RedirectResponse("incidents", 307)


def _list_page(request: Request) -> Response:
    store = _service(request).store
    wanted = _filter(request)
    query = ListQuery(
        tuple(state.value for state in wanted.states),
        request.query_params.get("sort", "start"),
        _order(request),
        {name: request.query_params[name] for name in _FILTERS if name in request.query_params},
    )
    page = store.list(
        wanted,
        limit=50,
        after=request.query_params.get("cursor"),
        sort=query.sort,
        ascending=query.ascending,
    )
    rows = [
        ListRow(
            f"incidents/{item.id}",
            item.starts_at,
            item.ended_at,
            item.state.value,
            item.alertname,
            item.title,
            item.victim,
            item.cause,
            item.confidence,
            item.problem,
        )
        for item in page.items
    ]
    counts = {state.value: number for state, number in store.counts().items()}
    return HTMLResponse(render_list(rows, query, counts, page.next))


def _page(request: Request) -> Response:
    store = _service(request).store
    record = _found(request)
    revision = _revision(request)
    links = [Link("All incidents", "../incidents"), Link("JSON", f"../api/v1/incidents/{record.id}")]
    if record.bundle_bytes:
        links.append(Link("Bundle", f"../api/v1/incidents/{record.id}/bundle"))
    if not record.revision:
        facts = [("Began", when(record.starts_at)), ("Ended", when(record.ended_at))]
        facts.append(("Received", when(record.received_at)))
        if record.victim:
            facts.append(("Victim", f"{record.victim} · {record.victim_metric}"))
        if record.next_attempt_at is not None:
            facts.append(("Next attempt", when(record.next_attempt_at)))
        return HTMLResponse(
            render_status(
                record.id,
                record.title,
                record.state.value,
                record.problem,
                facts,
                record.labels,
                record.annotations,
                links,
                refresh=not record.final,
            )
        )
    explanation = from_json(store.explanation(record.id, revision))
    links.append(Link("Explanation (JSON)", f"../api/v1/incidents/{record.id}/explanation"))
    others = [
        Link(f"Revision {info.revision}", f"{record.id}?revision={info.revision}")
        for info in store.explanations(record.id)
        if record.revision > 1
    ]
    return HTMLResponse(render_html(explanation, [(link.text, link.href) for link in (*links, *others)]))


# --- metrics and health


def _metrics(request: Request) -> Response:
    service = _service(request)
    content_type = choose(request.headers.get("accept", ""))
    headers = {"Vary": "accept, accept-encoding"}
    with service.rendering:
        body = render(service.metrics.families(), content_type)
    if len(body) >= GZIP_MINIMUM and accepts_gzip(request.headers.get("accept-encoding", "")):
        body = gzip.compress(body, GZIP_LEVEL, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type=content_type, headers=headers)


def _healthy(request: Request) -> Response:
    service = _service(request)
    if service.workers.alive or service.draining:
        return _text("Healthy\n")
    return _text("A worker has died\n", 503)


def _ready(request: Request) -> Response:
    service = _service(request)
    if service.draining:
        return _text("Draining\n", 503)
    began = time.monotonic()
    try:
        service.store.waiting()
    except SourceUnreachableError:
        _log.warning("not ready: the store did not answer (%.1f s)", time.monotonic() - began)
        return _text("The store does not answer\n", 503)
    return _text("Ready\n")


def _text(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="text/plain")
