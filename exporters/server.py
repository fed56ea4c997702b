"""Serves expositions over HTTP: ``/metrics``, health, readiness and a landing page, with TLS and authentication.

uvicorn does HTTP and TLS: it is widely deployed, handshakes and slow readers do not hold up its event loop, and it
drains on SIGTERM. Four fixed paths need no web framework on top, which would cost several MiB of memory on every node.
Rendering and compressing run in worker threads, one at a time, so that probes are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import gzip
import hashlib
import html
import logging
import os
import secrets
import signal
import socket
import stat
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from exporters.catalog import METRICS
from exporters.errors import InvalidInputError
from exporters.exposition import choose, render
from exporters.families import Distribution, Family, family
from exporters.poller import Status, version
from exporters.web_config import LiveWebConfig, allowed_san

if TYPE_CHECKING:
    import uvicorn

_log = logging.getLogger(__name__)

_SCRAPE: Final = "prioscope_scrape_duration_seconds"

#: Text with few distinct words: level 1 makes it a tenth of its size, and 9 takes five times as long for a little less.
GZIP_LEVEL: Final = 1
#: Smaller answers are not worth it.
GZIP_MINIMUM: Final = 1024

#: Longer than any usual scrape interval, so that Prometheus keeps its connection and its TLS session.
KEEP_ALIVE_SECONDS: Final = 75
#: For a whole request to arrive, from the first byte or from the connection being made.
REQUEST_SECONDS: Final = 10.0
DRAIN_SECONDS: Final = 10
MAX_CONNECTIONS: Final = 256

_Message = Mapping[str, Any]
_Send = Callable[[dict[str, Any]], Awaitable[None]]
_Receive = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class Application:
    """The ASGI application.

    Args:
        families: What to expose; called in a worker thread for each scrape.
        status: Where polling stands.
        live: Authentication, headers and rate limit.
        title: Shown on the landing page.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        families: Callable[[], Iterable[Family]],
        status: Callable[[], Status],
        live: LiveWebConfig,
        *,
        title: str = "Prioscope exporter",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._families = families
        self._status = status
        self._live = live
        self._title = title
        self._clock = clock
        self._guard = BasicAuth()
        self._bucket = TokenBucket(clock)
        self._rendering = asyncio.Lock()
        self._scrapes = Distribution.empty(METRICS[_SCRAPE].buckets)
        #: Set when the process is told to stop: not ready any more, whatever the source says.
        self.draining = False

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:  # noqa: ARG002
        """Answer one request (ASGI 3, HTTP only)."""
        if scope["type"] != "http":
            raise ValueError(f"no {scope['type']} here")
        method, path = scope["method"], scope["path"]
        request = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        response = await self._respond(method, path, request)
        headers = [
            ("content-type", response.content_type),
            ("content-length", str(len(response.body))),
            *self._live.current.headers,
            *response.headers,
        ]
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
            }
        )
        await send({"type": "http.response.body", "body": b"" if method == "HEAD" else response.body})

    async def _respond(self, method: str, path: str, request: Mapping[bytes, str]) -> _Response:
        self._live.refresh()
        # Probes of a kubelet carry no password, and learn nothing but whether to restart or to wait.
        if path in ("/-/healthy", "/-/ready"):
            return _only(method, self._healthy() if path == "/-/healthy" else self._ready())
        config = self._live.current
        if not self._bucket.take(config.rate):
            return _Response(429, b"Too many requests\n")
        if config.users and not await self._guard.admits(request.get(b"authorization", ""), config.users):
            return _Response(401, b"Unauthorized\n", headers=(("www-authenticate", 'Basic realm="Prioscope"'),))
        if path == "/metrics":
            if method not in ("GET", "HEAD"):
                return _only(method, _Response(200, b""))
            return await self._metrics(request)
        if path == "/":
            return _only(method, self._landing())
        return _Response(404, b"Not found; the metrics are at /metrics\n")

    def _healthy(self) -> _Response:
        # A wedged driver or a scheduler that is away is no reason to restart the exporter; a dead thread is.
        if self._status().alive:
            return _Response(200, b"Healthy\n")
        return _Response(503, b"The polling thread has died\n")

    def _ready(self) -> _Response:
        status = self._status()
        if self.draining:
            return _Response(503, b"Draining\n")
        if status.ready:
            return _Response(200, b"Ready\n")
        return _Response(503, b"The snapshot is too old\n" if status.stale else b"No snapshot yet\n")

    async def _metrics(self, request: Mapping[bytes, str]) -> _Response:
        content_type = choose(request.get(b"accept", ""))
        compress = accepts_gzip(request.get(b"accept-encoding", ""))
        # One at a time: an exposition is large, and several at once would take as long and more memory.
        async with self._rendering:
            started = self._clock()
            body, compressed = await asyncio.to_thread(self._render, content_type, compress)
            taken = self._clock() - started
            self._scrapes = self._scrapes.observe(METRICS[_SCRAPE].buckets, taken)
        headers = [("vary", "accept, accept-encoding"), ("cache-control", "no-store")]
        if compressed:
            headers.append(("content-encoding", "gzip"))
        return _Response(200, body, content_type, tuple(headers))

    def _render(self, content_type: str, compress: bool) -> tuple[bytes, bool]:
        scrapes = family(_SCRAPE, distributions={(): self._scrapes})
        body = render((*self._families(), scrapes), content_type)
        if not compress or len(body) < GZIP_MINIMUM:
            return body, False
        return gzip.compress(body, GZIP_LEVEL, mtime=0), True

    def _landing(self) -> _Response:
        status = self._status()
        if status.age is None:
            state = "no snapshot yet"
        else:
            state = f"snapshot of {status.age:.1f} s ago{', too old to be served' if status.stale else ''}"
        rows = {
            "Version": version(),
            "State": state,
            "Polls": f"{status.polls:,}, of which {status.snapshots:,} gave a snapshot",
            "Problem": status.reason or "none",
        }
        table = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows.items()
        )
        page = _PAGE.format(title=html.escape(self._title), table=table)
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        headers = (("content-security-policy", policy), ("x-content-type-options", "nosniff"))
        given = {name.lower() for name, _ in self._live.current.headers}
        return _Response(
            200, page.encode(), "text/html; charset=utf-8", tuple(item for item in headers if item[0] not in given)
        )


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 45rem; margin: 3rem auto; padding: 0 1rem; }}
th {{ text-align: left; vertical-align: top; padding-right: 1.5rem; font-weight: 600; }}
</style></head>
<body><h1>{title}</h1>
<table>{table}</table>
<ul>
<li><a href="metrics">Metrics</a></li>
<li><a href="-/ready">Ready</a></li>
<li><a href="-/healthy">Healthy</a></li>
</ul></body></html>
"""


def _only(method: str, response: _Response) -> _Response:
    if method in ("GET", "HEAD"):
        return response
    return _Response(405, b"Method not allowed\n", headers=(("allow", "GET, HEAD"),))


def accepts_gzip(header: str) -> bool:
    """Whether an ``Accept-Encoding`` header admits gzip (RFC 9110: a quality of 0 refuses, ``*`` stands for others)."""
    found: dict[str, bool] = {}
    for part in header.split(","):
        coding, *parameters = (piece.strip().lower() for piece in part.split(";"))
        refused = False
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                with suppress(ValueError):
                    refused = float(value) == 0
        if coding:
            found[coding] = not refused
    return found.get("gzip", found.get("x-gzip", found.get("*", False)))


class TokenBucket:
    """The rate limit of the web config; without one everything is let through."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens = float("inf")
        self._at = clock()

    def take(self, rate: tuple[float, int] | None) -> bool:
        """Whether one more request may pass at ``rate`` (seconds between two, burst)."""
        if rate is None:
            self._tokens = float("inf")
            return True
        interval, burst = rate
        now = self._clock()
        self._tokens = min(float(burst), self._tokens + (now - self._at) / interval)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class BasicAuth:
    """Checks basic authentication against bcrypt hashes.

    A hash is slow by design, so outcomes are remembered, under a key that changes with the process. An unknown user
    costs as much time as a known one.
    """

    MAX_CACHED: Final = 100

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._lock = asyncio.Lock()

    async def admits(self, header: str, users: Mapping[str, str]) -> bool:
        """Whether an ``Authorization`` header names one of ``users`` with the right password."""
        scheme, _, rest = header.partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            name, colon, password = base64.b64decode(rest.strip(), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return False
        if not colon:
            return False
        hashed = users.get(name)
        key = hashlib.blake2b(repr((name, hashed, password)).encode(), key=self._secret).digest()
        # One hash at a time, or a flood of wrong passwords would take every core.
        async with self._lock:
            known = self._known.get(key)
            if known is None:
                stand_in = next(iter(users.values()))
                matches = await asyncio.to_thread(_check_password, password, hashed or stand_in)
                known = matches and hashed is not None
                self._known[key] = known
                if len(self._known) > self.MAX_CACHED:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
        return known


def _check_password(password: str, hashed: str) -> bool:
    import bcrypt

    try:
        # bcrypt looks at 72 bytes; newer versions of the library refuse more instead of cutting them off.
        return bcrypt.checkpw(password.encode()[:72], hashed.encode())
    except ValueError:
        return False


# --- sockets


def listen(address: str) -> socket.socket:
    """Return a listening socket for ``HOST:PORT``, ``[IPv6]:PORT``, ``:PORT`` (every interface) or ``unix:PATH``.

    Port 0 takes a free one.

    Raises:
        InvalidInputError: the address is malformed, in use, not of this machine or not allowed.
    """
    if address.startswith("unix:"):
        return _listen_unix(Path(address.removeprefix("unix:")))
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not address.startswith("[")):
        raise InvalidInputError(
            f"{address!r} is not an address to listen on", cure="write it as HOST:PORT, :PORT, [IPv6]:PORT or unix:PATH"
        )
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("::", int(port)), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        found = socket.getaddrinfo(host or "0.0.0.0", int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # noqa: S104
        kind, place = found[0][0], found[0][4]
        return socket.create_server(place[:2], family=kind, backlog=128)
    except socket.gaierror as error:
        raise InvalidInputError(
            f"cannot listen on {address}: {error.strerror}", cure="use an address of this machine"
        ) from None
    except OSError as error:
        raise InvalidInputError(
            f"cannot listen on {address}: {(os.strerror(error.errno) if error.errno else str(error)).lower()}",
            cure=_LISTEN_CURES.get(error.errno or 0, "choose another address with --listen"),
        ) from None


_LISTEN_CURES: Final = {
    errno.EADDRINUSE: "stop the other process, or choose another port with --listen",
    errno.EACCES: "use a port above 1023, or run with CAP_NET_BIND_SERVICE",
    errno.EADDRNOTAVAIL: "use an address of this machine, or :PORT for every interface",
}


def _listen_unix(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                # Left behind by a process that was killed.
                path.unlink()
            else:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            finally:
                probe.close()
        server.bind(str(path))
        server.listen(128)
    except OSError as error:
        server.close()
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise InvalidInputError(
            f"cannot listen on unix:{path}: {reason}", cure="choose a path in a writable folder that is not in use"
        ) from None
    return server


def url_of(server: socket.socket, *, tls: bool) -> str:
    """Return where a client finds ``/metrics`` of this socket."""
    name = server.getsockname()
    if server.family == socket.AF_UNIX:
        return f"unix:{name} (/metrics)"
    host, port = name[:2]
    if host in ("::", "0.0.0.0"):  # noqa: S104
        host = socket.gethostname()
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/metrics"


# --- the server


def make_server(application: Application, live: LiveWebConfig) -> uvicorn.Server:
    """Return a uvicorn server for ``application``; give its ``serve`` the sockets of `listen`."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    allowed = live.current.tls.client_allowed_sans if live.current.tls else ()

    class Protocol(H11Protocol):
        """uvicorn's HTTP/1.1 with a check of client names and a limit to how long a request may take to arrive."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            tls = transport.get_extra_info("ssl_object")
            if allowed and not allowed_san(tls.getpeercert() if tls else None, allowed):
                _log.warning("refused a client from %s: none of its names is allowed", self.client)
                transport.abort()
                return
            self._await_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering:
                self._disarm()
            elif self._deadline is None:
                self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _await_request(self) -> None:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    context = live.context
    config = uvicorn.Config(
        application,
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        limit_concurrency=MAX_CONNECTIONS,
        ssl_context_factory=None if context is None else lambda _config, _default: context,
    )

    class Server(uvicorn.Server):
        """uvicorn's server, which tells the application that it drains."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            application.draining = True
            _log.info("%s: finishing what is under way", signal.Signals(sig).name)
            super().handle_exit(sig, frame)

    return Server(config)


def serve(application: Application, live: LiveWebConfig, server_socket: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests under way and return. Call from the main thread."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = make_server(application, live)
    path = Path(server_socket.getsockname()) if server_socket.family == socket.AF_UNIX else None
    # uvicorn raises the signal again once it has drained; the rest of the shutdown is still to come then.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[server_socket])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server_socket.close()
        if path is not None:
            path.unlink(missing_ok=True)


__all__ = ["Application", "BasicAuth", "TokenBucket", "accepts_gzip", "listen", "make_server", "serve", "url_of"]
