"""Asks a Prometheus-compatible HTTP API (Prometheus, Thanos, Mimir, Cortex, VictoriaMetrics), within limits.

API: https://prometheus.io/docs/prometheus/latest/querying/api/. Partial answers: Thanos puts them in ``warnings``,
VictoriaMetrics' cluster version in ``isPartial``.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import numpy as np

from rca.errors import InvalidInputError, NotFoundError
from rca.telemetry.prometheus.answers import Answer, Failure, QueryError, Series
from rca.telemetry.prometheus.config import CaptureConfig

#: Prometheus refuses a range query with more points a series (web/api/v1: "exceeded maximum resolution of 11,000").
MOST_POINTS: Final = 11_000
#: Most bytes of one answer, unpacked.
MOST_BYTES: Final = 256 * 1024**2
#: Answers after which asking once more makes sense.
_TRANSIENT: Final = frozenset({429, 502, 503, 504})
_PAUSE_SECONDS: Final = 0.2


class _Result(msgspec.Struct):
    metric: dict[str, str] = {}
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct, rename="camel"):
    result_type: str = ""
    result: list[_Result] = []


class _Reply(msgspec.Struct, rename="camel"):
    status: str
    error: str = ""
    error_type: str = ""
    warnings: list[str] = []
    infos: list[str] = []
    is_partial: bool = False
    data: msgspec.Raw = msgspec.Raw(b"null")


@dataclass
class Client:
    """One capture's conversation with the API: counts its requests, limits them, and remembers nothing else.

    Use it as an asynchronous context manager.

    Args:
        deadline: Time of the event loop's clock at which everything must have ended.
    """

    config: CaptureConfig
    deadline: float
    sent: int = 0
    _gate: asyncio.Semaphore = field(init=False)
    _http: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        if self.config.prometheus_url is None:
            raise InvalidInputError("no Prometheus is given", cure="give its base URL")
        self._gate = asyncio.Semaphore(self.config.concurrency)
        self._http = open_http(
            self.config,
            self.config.prometheus_url,
            headers=self.config.headers,
            token_file=self.config.bearer_token_file,
        )

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def names(self, pattern: str, start: float, end: float) -> frozenset[str] | None:
        """Names of the metrics that match the regular expression; None when the server cannot list them.

        Raises:
            QueryError: it did not answer.
        """
        selector = f'{{__name__=~"{pattern}"{", " + self.config.matchers if self.config.matchers else ""}}}'
        form = {"match[]": selector, "start": _stamp(start), "end": _stamp(end)}
        try:
            reply = await self._ask("/api/v1/label/__name__/values", form, get=True)
        except QueryError as error:
            if error.kind is Failure.QUERY:
                return None
            raise
        try:
            return frozenset(msgspec.json.decode(reply.data, type=list[str] | None) or ())
        except msgspec.DecodeError as error:
            raise QueryError(Failure.INVALID, f"list of metric names: {error}") from None

    async def range(self, query: str, start: float, end: float, step: float) -> Answer:
        """Evaluate ``query`` each ``step`` seconds from ``start`` to ``end``, in as many requests as that takes.

        Raises:
            QueryError: a request failed.
        """
        return joined([await self._range(query, *part, step) for part in chunks(start, end, step)])

    async def _range(self, query: str, start: float, end: float, step: float) -> Answer:
        left = max(self.deadline - asyncio.get_running_loop().time(), 0.0)
        form = {
            "query": query,
            "start": _stamp(start),
            "end": _stamp(end),
            "step": f"{step:g}",
            "timeout": f"{max(1, round(1000 * min(self.config.query_timeout_seconds, left)))}ms",
            # VictoriaMetrics alone reads these: by default it repeats the last value over the newest 30 s.
            "nocache": "1",
            "latency_offset": "1ms",
        }
        reply = await self._ask("/api/v1/query_range", form)
        try:
            data = msgspec.json.decode(reply.data, type=_Data, strict=False)
        except msgspec.DecodeError as error:
            raise QueryError(Failure.INVALID, f"{error} in the answer") from None
        if data.result_type != "matrix":
            raise QueryError(Failure.INVALID, f"the answer is a {data.result_type or 'nothing'}, not a matrix")
        notes = (*reply.warnings, *reply.infos)
        partial = reply.is_partial or any(_is_partial(text) for text in reply.warnings)
        return Answer(tuple(_series(item) for item in data.result if item.values), notes, partial)

    async def _ask(self, path: str, form: dict[str, str], *, get: bool = False) -> _Reply:
        for last in (False, True):
            try:
                return await self._once(path, form, get)
            except QueryError as error:
                again = error.kind is Failure.UNREACHABLE and not last
                if not again or self.deadline - asyncio.get_running_loop().time() < 2 * _PAUSE_SECONDS:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)
        raise AssertionError

    async def _once(self, path: str, form: dict[str, str], get: bool) -> _Reply:
        async with self._gate:
            clock = asyncio.get_running_loop()
            left = self.deadline - clock.time()
            if left <= 0:
                raise QueryError(Failure.BUDGET, f"the capture's {self.config.total_timeout_seconds:g} s are over")
            if self.sent >= self.config.query_budget:
                raise QueryError(Failure.BUDGET, f"the budget of {self.config.query_budget} requests is spent")
            self.sent += 1
            # A little more than the server was given, so that its own words arrive.
            limit = min(self.config.query_timeout_seconds + 0.5, left)
            status, body = await fetch(self._http, path, form, limit, get=get)
        try:
            reply = msgspec.json.decode(body, type=_Reply)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _refusal(status, "") from None
        if status != 200 or reply.status != "success":
            raise _refusal(status, reply.error, reply.error_type)
        return reply


def open_http(
    config: CaptureConfig, url: str, *, headers: Mapping[str, str], token_file: Path | None, plain: bool = True
) -> httpx.AsyncClient:
    """Open an HTTP client for ``url`` with the configured identity and trust.

    Redirects are not followed: they would carry the credentials elsewhere. ``plain``: this is the system that the user
    name and the client certificate are for.

    Raises:
        NotFoundError, InvalidInputError: a file of a secret or certificate is missing or unusable.
    """
    sent = {"Accept": "application/json", "User-Agent": "prioscope", **headers}
    if token_file is not None:
        sent["Authorization"] = f"Bearer {_secret(token_file)}"
    auth = None
    if plain and config.username and config.password_file is not None:
        auth = httpx.BasicAuth(config.username, _secret(config.password_file))
    try:
        trust = ssl.create_default_context(cafile=None if config.tls_ca is None else str(config.tls_ca))
        if plain and config.tls_cert is not None and config.tls_key is not None:
            trust.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(path) for path in (config.tls_ca, config.tls_cert, config.tls_key) if path)
        raise InvalidInputError(
            f"cannot use the certificates {files}: {error}", cure="give PEM files that this user may read"
        ) from None
    try:
        return httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers=sent,
            auth=auth,
            verify=trust,
            # Each request has a limit of its own, from its first byte to its last; this one is for each single step.
            timeout=config.query_timeout_seconds + 1.0,
            limits=httpx.Limits(max_connections=config.concurrency),
        )
    except (ValueError, UnicodeError):
        raise InvalidInputError("a header or token holds characters that HTTP does not allow") from None


async def fetch(
    http: httpx.AsyncClient, path: str, form: Mapping[str, str], limit: float, *, get: bool = False
) -> tuple[int, bytes]:
    """Send one request; return status and body, whole, within ``limit`` seconds.

    Raises:
        QueryError: no whole answer came, or too long a one.
    """
    try:
        async with asyncio.timeout(limit):
            request = (
                http.build_request("GET", path, params=dict(form))
                if get
                else http.build_request("POST", path, data=dict(form))
            )
            answer = await http.send(request, stream=True)
            try:
                body = bytearray()
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise QueryError(
                            Failure.INVALID, f"the answer is longer than {MOST_BYTES // 1024**2} MiB: ask for less"
                        )
            finally:
                await answer.aclose()
    except (TimeoutError, httpx.TimeoutException):
        raise QueryError(Failure.TIMEOUT, f"no whole answer within {limit:.1f} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise QueryError(Failure.UNREACHABLE, f"{_host(http)}: {error or type(error).__name__}") from None
    if answer.is_redirect:
        raise QueryError(Failure.REFUSED, f"{_host(http)} redirects, which is not followed: name the final URL")
    return answer.status_code, bytes(body)


def _refusal(status: int, error: str, kind: str = "") -> QueryError:
    said = " ".join(error.split())[:300] or f"HTTP status {status} without a Prometheus answer"
    if status in (401, 403):
        return QueryError(Failure.REFUSED, f"HTTP status {status}: wrong or missing credentials")
    if kind == "timeout" or "timed out" in error or "query timeout" in error:
        return QueryError(Failure.TIMEOUT, said)
    if status in _TRANSIENT:
        return QueryError(Failure.UNREACHABLE, said)
    return QueryError(Failure.QUERY if status in (400, 404, 405, 422) else Failure.UNREACHABLE, said)


def _host(http: httpx.AsyncClient) -> str:
    url = http.base_url
    return f"{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}"


def _is_partial(warning: str) -> bool:
    text = warning.lower()
    return "partial" in text or "fetch series for" in text or "no store matched" in text


def _secret(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise NotFoundError(f"no file at {path}", cure="create the file with the secret, or correct its path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read {path}: {error}", cure="let this user read it") from None
    if not text:
        raise InvalidInputError(f"{path} is empty", cure="put the secret into it")
    return text


def _stamp(seconds: float) -> str:
    return f"{seconds:.3f}"


def chunks(start: float, end: float, step: float, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Cut the points ``start, start + step, … <= end`` into stretches of at most ``most`` points each."""
    points = math.floor((end - start) / step + 1e-9) + 1
    return [
        (start + first * step, start + (min(first + most, points) - 1) * step)
        for first in range(0, max(points, 0), most)
    ]


def _series(item: _Result) -> Series:
    pairs = np.array([(time, float(value)) for time, value in item.values], dtype=np.float64)
    return Series(item.metric, pairs[:, 0], pairs[:, 1])


def joined(answers: Sequence[Answer]) -> Answer:
    """Put the answers for successive stretches together."""
    if len(answers) == 1:
        return answers[0]
    parts: dict[tuple[tuple[str, str], ...], list[Series]] = {}
    for answer in answers:
        for series in answer.series:
            parts.setdefault(tuple(sorted(series.labels.items())), []).append(series)
    whole = tuple(
        Series(found[0].labels, np.concatenate([s.times for s in found]), np.concatenate([s.values for s in found]))
        for found in parts.values()
    )
    notes: dict[str, Any] = dict.fromkeys(note for answer in answers for note in answer.notes)
    return Answer(whole, tuple(notes), any(answer.partial for answer in answers))
