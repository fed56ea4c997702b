"""A server of `exporters.server` in a thread, and a client of the standard library that speaks to it."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from exporters.server import Application, listen, make_server
from exporters.web_config import LiveWebConfig


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Server:
    """Where a server listens; ``tls`` is the client's context."""

    port: int
    tls: ssl.SSLContext | None = None

    def connection(self) -> http.client.HTTPConnection:
        if self.tls is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        return http.client.HTTPSConnection("localhost", self.port, timeout=10, context=self.tls)

    def ask(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Answer:
        connection = self.connection()
        try:
            connection.request(method, path, headers=dict(headers or {}))
            response = connection.getresponse()
            return Answer(
                response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
            )
        finally:
            connection.close()


@contextmanager
def running(application: Application, live: LiveWebConfig, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Serve on a free port of the loopback interface while the block runs."""
    sock = listen("127.0.0.1:0")
    port = sock.getsockname()[1]
    server = make_server(application, live)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        yield Server(port, tls)
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive()
