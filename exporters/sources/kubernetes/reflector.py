"""Keeps one store equal to what the API server has: list in pages, then watch, and list anew when history is lost.

The rules are those of the Kubernetes API: resource versions are opaque; a watch goes on from the last version that an
object or a bookmark carried; *410 Gone*, as a status or inside the stream, means to list again; an expired ``continue``
token means to list again without pages. Failures are retried for ever, after exponentially growing
delays with jitter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from exporters.sources.kubernetes.stores import Store

_log = logging.getLogger(__name__)

#: A watch event is one object; etcd takes none above a few MiB.
MAX_LINE_BYTES: Final = 16 * 1024 * 1024

_CHUNK: Final = 64 * 1024
_NOT_FOUND: Final = 404
_GONE: Final = 410


@dataclass(frozen=True, slots=True)
class Timing:
    """Time-outs and delays in seconds.

    ``watch``: how long the server is asked to keep a watch open (times 1 to 2, at random). ``idle``: silence after
    which a watch is taken for dead; bookmarks come about once a minute. ``backoff``, ``max_backoff``: first and
    largest delay after a failure. ``settled``: a watch that lasted this long counts as a success even without events.
    """

    connect: float = 5.0
    read: float = 30.0
    watch: float = 240.0
    idle: float = 150.0
    backoff: float = 0.5
    max_backoff: float = 60.0
    settled: float = 1.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a resource cannot be read. ``status`` is the HTTP status; 0: the server did not answer."""

    status: int
    text: str
    retry_after: float = 0.0


class RequestError(Exception):
    """A request went wrong."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


class _ListMeta(msgspec.Struct, rename={"resource_version": "resourceVersion", "token": "continue"}):
    resource_version: str = ""
    token: str | None = None


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _VersionMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Versioned(msgspec.Struct):
    metadata: _VersionMeta


class _Status(msgspec.Struct):
    code: int | None = None
    reason: str | None = None
    message: str | None = None


_list = msgspec.json.Decoder(_List).decode
_event = msgspec.json.Decoder(_WatchEvent).decode
_versioned = msgspec.json.Decoder(_Versioned).decode
_status = msgspec.json.Decoder(_Status).decode

T = TypeVar("T")

#: A list call of the official client, with its selectors bound.
Call = Callable[..., Any]


class Reflector:
    """Runs list and watch of one resource in a thread of its own.

    Args:
        name: The resource, for messages.
        call: Returns the list call of the client, or None when the server does not have the resource now.
        store: What to keep up to date.
        timing: Time-outs and delays.
        optional: The server may not have this resource: *404 Not Found* then means that there is none.
        page_size: Objects per page of a list.
        absent_seconds: How long to wait before looking again for a resource that the server does not have.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], Call | None],
        store: Store[Any],
        timing: Timing | None = None,
        *,
        optional: bool = False,
        page_size: int = 500,
        absent_seconds: float = 120.0,
    ) -> None:
        self.name = name
        self.store = store
        self.synced = threading.Event()
        """Set once the first list is complete, or the resource is known not to exist."""
        self.settled = threading.Event()
        """Set once the first attempt has ended, well or not."""
        self.lists = 0
        self.watches = 0
        self.failures = 0
        self._call = call
        self._optional = optional
        self._timing = timing or Timing()
        self._page_size = page_size
        self._absent_seconds = absent_seconds
        self._problem: Problem | None = None
        self._absent = False
        self._heard = float("-inf")
        self._version: str | None = None
        self._progress = False
        self._stop = threading.Event()
        self._response: Any = None
        self._thread = threading.Thread(target=self._run, name=f"kubernetes-{name}", daemon=True)

    @property
    def problem(self) -> Problem | None:
        """What is wrong now; None when the last attempt went well."""
        return self._problem

    @property
    def absent(self) -> bool:
        """Whether the server does not have this resource."""
        return self._absent

    @property
    def version(self) -> str | None:
        """The resource version that the store stands at; None before the first list."""
        return self._version

    def age(self) -> float:
        """Seconds since the server last confirmed the store's state; infinite before the first list."""
        return time.monotonic() - self._heard

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, and cut the connection it may be waiting on."""
        self._stop.set()
        response = self._response
        connection = getattr(response, "connection", None) or getattr(response, "_connection", None)
        sock = getattr(connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):  # it may be gone already
                sock.shutdown(socket.SHUT_RDWR)

    def join(self, timeout: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- the loop

    def _run(self) -> None:
        attempt = 0
        while not self._stop.is_set():
            self._progress = False
            delay, missing = 0.0, False
            try:
                call = self._call()
                if call is None:
                    missing = True
                else:
                    self._cycle(call)
            except RequestError as failure:
                if self._stop.is_set():
                    break
                missing = self._optional and failure.problem.status == _NOT_FOUND
                delay = self._failed(failure.problem)
            except Exception as error:  # a bug or an odd answer must not end the watch for good
                _log.exception("%s: unexpected error", self.name)
                delay = self._failed(Problem(0, f"{type(error).__name__}: {error}"))
            attempt = 0 if self._progress else attempt + 1
            if missing:
                self._missing()
                delay = self._absent_seconds
            elif delay or attempt:
                delay = max(delay, self._backoff(max(1, attempt)))
            self.settled.set()
            if delay:
                self._stop.wait(delay)

    def _cycle(self, call: Call) -> None:
        """List if there is no version to go on from, then watch until the watch ends."""
        if self._version is None:
            self._version = self._list(call)
            self._absent = False
            self._confirm()
            self.synced.set()
            self.settled.set()
        self._watch(call, self._version)

    def _confirm(self) -> None:
        self._heard = time.monotonic()
        self._problem = None

    def _missing(self) -> None:
        self._absent = True
        self._version = None
        self._problem = None
        self.store.begin().commit()
        self.synced.set()

    def _failed(self, problem: Problem) -> float:
        """Take note of a failure; return the least delay before the next attempt."""
        if problem.status == _GONE:
            # History is lost, which is normal after a pause; at once, unless it happens again and again.
            self._version = None
            return 0.0
        self.failures += 1
        self._problem = problem
        if problem.status in (401, 403):
            _log.warning("%s cannot be read: %s", self.name, problem.text)
        else:
            _log.info("%s: %s", self.name, problem.text)
        return max(min(problem.retry_after, self._timing.max_backoff), self._timing.backoff / 2)

    def _backoff(self, attempt: int) -> float:
        most = min(self._timing.max_backoff, self._timing.backoff * 2.0 ** min(attempt - 1, 20))
        return random.uniform(most / 2, most)

    # --- list

    def _list(self, call: Call) -> str:
        try:
            return self._pages(call, self._page_size)
        except RequestError as failure:
            if failure.problem.status != _GONE:
                raise
        # Pages took longer than the server keeps history: ask for everything at once.
        return self._pages(call, None)

    def _pages(self, call: Call, size: int | None) -> str:
        listing = self.store.begin()
        token: str | None = None
        while True:
            params: dict[str, Any] = {} if size is None else {"limit": size}
            if token:
                params["_continue"] = token
            response = self._open(call, self._timing.read, **params)
            try:
                page = _list(self._body(response))
                for item in page.items or ():
                    listing.add(item)
            except msgspec.DecodeError as error:
                raise RequestError(Problem(0, f"the list is not understood: {error}")) from None
            token = page.metadata.token
            if self._stop.is_set():
                raise RequestError(Problem(0, "stopped"))
            if not token:
                break
        listing.commit()
        self.lists += 1
        return page.metadata.resource_version

    def _body(self, response: Any) -> bytes:
        from urllib3.exceptions import HTTPError

        try:
            data: bytes = response.read()
        except (HTTPError, OSError) as error:
            raise RequestError(_unreachable(error)) from None
        finally:
            self._release(response)
        return data

    # --- watch

    def _watch(self, call: Call, version: str) -> None:
        began = time.monotonic()
        seconds = max(1, round(self._timing.watch * random.uniform(1.0, 2.0)))
        response = self._open(
            call,
            self._timing.idle,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=seconds,
        )
        self.watches += 1
        self._confirm()
        self.settled.set()
        try:
            for line in _lines(response):
                self._handle(line)
                if self._stop.is_set():
                    return
        except msgspec.DecodeError as error:
            raise RequestError(Problem(0, f"a watch event is not understood: {error}")) from None
        finally:
            self._release(response)
            if time.monotonic() - began >= self._timing.settled:
                self._progress = True

    def _handle(self, line: bytes) -> None:
        event = _event(line)
        match event.type:
            case "ADDED" | "MODIFIED":
                self._version = self.store.put(event.object) or self._version
            case "DELETED":
                self._version = self.store.remove(event.object) or self._version
            case "BOOKMARK":
                self._version = _versioned(event.object).metadata.resource_version or self._version
            case "ERROR":
                status = _status(event.object)
                raise RequestError(Problem(status.code or 0, f"{status.reason or 'error'}: {status.message or ''}"))
            case other:
                # Not knowing what changed, the store can only be made right by a new list.
                raise RequestError(Problem(_GONE, f"watch event of unknown type {other!r}"))
        self._progress = True
        self._confirm()

    # --- requests

    def _open(self, call: Call, read: float, **params: Any) -> Any:
        response = open_response(call, self._timing.connect, read, **params)
        self._response = response
        if self._stop.is_set():
            self._release(response)
            raise RequestError(Problem(0, "stopped"))
        return response

    def _release(self, response: Any) -> None:
        self._response = None
        # Closing, not giving back to the pool: a watch may be in the middle of its stream.
        response.close()


def open_response(call: Call, connect: float, read: float, **params: Any) -> Any:
    """Call the client's ``call`` and return the open urllib3 response; time-outs in seconds.

    Raises:
        RequestError: no answer, or an HTTP error status.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return call(**params, _preload_content=False, _request_timeout=(connect, read))
    except ApiException as error:
        headers = error.headers or {}
        raise RequestError(_refused(error.status or 0, error.body, error.reason, headers.get("Retry-After"))) from None
    except (HTTPError, OSError) as error:
        raise RequestError(_unreachable(error)) from None


def read_json(call: Call, kind: type[T], timing: Timing, **params: Any) -> T:
    """Return the answer to one request, decoded as ``kind``.

    Raises:
        RequestError: no answer, an HTTP error status, or an answer of another shape.
    """
    from urllib3.exceptions import HTTPError

    response = open_response(call, timing.connect, timing.read, **params)
    try:
        return msgspec.json.decode(response.read(), type=kind)
    except msgspec.DecodeError as error:
        raise RequestError(Problem(0, f"the answer is not understood: {error}")) from None
    except (HTTPError, OSError) as error:
        raise RequestError(_unreachable(error)) from None
    finally:
        response.close()


def _lines(response: Any) -> Iterator[bytes]:
    """Yield the lines of a watch as they arrive; return when the server ends it, or is silent for too long.

    Raises:
        RequestError: the connection broke, or a line is too long.
    """
    from urllib3.exceptions import HTTPError, ReadTimeoutError

    buffer = bytearray()
    try:
        for chunk in response.stream(_CHUNK):
            buffer += chunk
            if b"\n" not in chunk:
                if len(buffer) > MAX_LINE_BYTES:
                    raise RequestError(Problem(_GONE, "a watch event is too long"))
                continue
            *lines, rest = bytes(buffer).split(b"\n")
            buffer = bytearray(rest)
            yield from (line for line in lines if line.strip())
    except ReadTimeoutError:
        return  # a dead connection looks the same as a quiet one: open a new one from where it stood
    except (HTTPError, OSError) as error:
        raise RequestError(_unreachable(error)) from None
    # What is left is the beginning of an event that was cut off; the next watch sends it again.


def _refused(status: int, body: Any, reason: str | None, retry_after: str | None) -> Problem:
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or "")
    try:
        message = json.loads(text).get("message") or reason
    except (ValueError, AttributeError):
        message = reason
    if not status:
        # The client reports TLS failures this way.
        return Problem(0, f"TLS: {' '.join((reason or 'failed').split())}"[:300])
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else 0.0
    return Problem(status, f"HTTP {status}: {message or 'no reason given'}"[:300], seconds)


def _unreachable(error: Exception) -> Problem:
    """Say in one line why there was no answer, without addresses of objects and the like."""
    from urllib3.exceptions import (
        ConnectTimeoutError,
        MaxRetryError,
        NameResolutionError,
        NewConnectionError,
        ReadTimeoutError,
        SSLError,
    )

    if isinstance(error, MaxRetryError) and error.reason is not None:
        error = error.reason
    match error:
        case NameResolutionError():
            text = "its name does not resolve"
        case NewConnectionError():  # before ConnectTimeoutError, of which it is a kind in some releases
            text = getattr(error.__cause__, "strerror", None) or "no connection could be made"
        case ConnectTimeoutError():
            text = "the connection timed out"
        case ReadTimeoutError():
            text = "it did not answer in time"
        case SSLError():
            text = f"TLS: {error}"
        case _:
            text = "the connection broke"
    return Problem(0, text[:300])
