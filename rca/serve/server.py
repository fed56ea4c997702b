"""Puts the server together, and runs it until SIGTERM."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from exporters.web_config import LiveWebConfig, WebConfig, allowed_san
from rca.errors import InvalidInputError, PrioscopeError
from rca.serve.alertmanager import AlertmanagerSettings, active_alerts
from rca.serve.api import Service, application
from rca.serve.gate import Gate, Token
from rca.serve.metrics import IncidentMetrics
from rca.serve.publish import GrafanaSettings, Publisher
from rca.serve.stats import Stats
from rca.serve.work import Workers, WorkSettings
from rca.store.database import Store
from rca.store.records import Retention

_log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS: Final = 75
#: For the headers of a request to arrive, from the first byte or from the connection being made.
REQUEST_SECONDS: Final = 10.0
DRAIN_SECONDS: Final = 10
MAX_CONNECTIONS: Final = 256
PRUNE_SECONDS: Final = 600.0
CATCH_UP_SECONDS: Final = 60.0

_KEEP_ALL: Final = Retention()


@dataclass(frozen=True)
class ServeSettings:
    """How to serve.

    Attributes:
        work: How to work.
        capacity: Waiting incidents past which webhooks are refused for a while.
        retention: What to keep.
        grafana: Whom to tell; None: nobody.
        token: The bearer token; None: there is none.
        insecure: Serve other machines without any authentication.
        recent: Incidents among the metrics.
        alertmanager: Where to look for alerts whose webhook did not arrive; None: nowhere.
    """

    work: WorkSettings
    capacity: int = 1000
    retention: Retention = _KEEP_ALL
    grafana: GrafanaSettings | None = None
    token: Token | None = None
    insecure: bool = False
    recent: int = 50
    alertmanager: AlertmanagerSettings | None = None


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can reach what listens there."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def check_access(listener: socket.socket, web: WebConfig, settings: ServeSettings) -> None:
    """Refuse to serve other machines without authentication.

    Raises:
        InvalidInputError: anybody who reaches the address could read incidents and post alerts.
    """
    if settings.token is None and not web.users and not _certified(web) and not is_local(listener):
        if settings.insecure:
            _log.warning("anybody who reaches this server may read incidents and post alerts (--insecure)")
            return
        raise InvalidInputError(
            "other machines could reach this server without authentication",
            cure="give --token-file, users or client certificates in --web.config.file, --listen 127.0.0.1:9945, or "
            "--insecure",
        )


def _certified(web: WebConfig) -> bool:
    return web.tls is not None and web.tls.client_auth_type == "RequireAndVerifyClientCert"


class IncidentServer:
    """The parts of a server, and their order. `start` them, `run` the HTTP server, `stop` them."""

    def __init__(self, store: Store, live: LiveWebConfig, settings: ServeSettings, *, local: bool) -> None:
        self.stats = Stats()
        self.workers = Workers(store, settings.work, self.stats)
        self.service = Service(
            store,
            self.workers,
            self.stats,
            IncidentMetrics(store, self.stats, settings.capacity, settings.recent),
            settings.capacity,
        )
        certified = _certified(live.current)
        alone = settings.token is None and not live.current.users and not certified
        self.app = Gate(
            application(self.service),
            live,
            settings.token,
            trusted=certified or local or settings.insecure,
            local=alone and local,
        )
        self._publisher = None if settings.grafana is None else Publisher(store, settings.grafana, self.stats)
        self._store = store
        self._settings = settings
        self._live = live
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._prune, name="janitor", daemon=True)]
        if settings.alertmanager is not None:
            self._threads.append(
                threading.Thread(target=self._catch_up, args=(settings.alertmanager,), name="catch-up", daemon=True)
            )

    def start(self) -> None:
        """Start what works in the background."""
        self.workers.start()
        for thread in self._threads:
            thread.start()
        if self._publisher is not None:
            self._publisher.start()

    def stop(self) -> None:
        """Finish what is under way."""
        self._stopping.set()
        self.workers.stop(DRAIN_SECONDS)
        if self._publisher is not None:
            self._publisher.stop()
        for thread in self._threads:
            thread.join(5.0)

    def run(self, listener: socket.socket) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Call from the main thread."""
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        server = self.http()
        path = Path(listener.getsockname()) if listener.family == socket.AF_UNIX else None
        # uvicorn raises the signal again once it has drained; the rest of the shutdown is still to come then.
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.start()
            server.run(sockets=[listener])
        finally:
            self.stop()
            for number, handler in before.items():
                signal.signal(number, handler)
            listener.close()
            if path is not None:
                path.unlink(missing_ok=True)

    def http(self) -> uvicorn.Server:
        """Return the HTTP server; give its ``serve`` the sockets."""
        # Renewed in place when the certificate's files change.
        context = self._live.context
        config = uvicorn.Config(
            self.app,
            http=_protocol(self._live),
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
        service = self.service

        class Server(uvicorn.Server):
            """uvicorn's server, which tells the application that it drains."""

            def handle_exit(self, sig: int, frame: Any) -> None:
                service.draining = True
                _log.info("%s: finishing what is under way", signal.Signals(sig).name)
                super().handle_exit(sig, frame)

        return Server(config)

    def _prune(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                count, size = self._store.prune(self._settings.retention, datetime.now(UTC))
                if count:
                    _log.info("removed %d old incidents (%d bytes)", count, size)
            except PrioscopeError as error:
                self.stats.failure("store")
                _log.warning("old incidents were not removed: %s", error)
            except Exception:
                self.stats.failure("store")
                _log.exception("old incidents were not removed")
            self._stopping.wait(max(PRUNE_SECONDS - (time.monotonic() - began), 1.0))

    def _catch_up(self, settings: AlertmanagerSettings) -> None:
        """Store alerts that fire but whose webhook did not arrive, as while this server was away."""
        while not self._stopping.is_set():
            try:
                now = datetime.now(UTC)
                receipt = self._store.receive(active_alerts(settings, now), now, self._settings.capacity)
                self.stats.alert("accepted", receipt.accepted)
                if receipt.accepted:
                    _log.info("took %d alerts that fire in Alertmanager and were not sent", receipt.accepted)
                    self.workers.wake()
            except PrioscopeError as error:
                _log.warning("%s", error)
            except Exception:
                _log.exception("Alertmanager was not looked at")
            self._stopping.wait(CATCH_UP_SECONDS)


def _protocol(live: LiveWebConfig) -> type[H11Protocol]:
    allowed = live.current.tls.client_allowed_sans if live.current.tls else ()

    class Protocol(H11Protocol):
        """uvicorn's HTTP/1.1 with a check of client names and a limit to how long headers may take to arrive."""

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
            if self.cycle is not None and not self.cycle.response_complete:
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

    return Protocol
