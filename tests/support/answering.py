"""An HTTP server on loopback that answers as a test says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.support.services import HOST


@dataclass(frozen=True)
class Request:
    """What a client sent; ``form`` holds the query string's and the body's fields."""

    method: str
    path: str
    form: dict[str, str]
    headers: dict[str, str]


@dataclass(frozen=True)
class Reply:
    """What to answer: an object is sent as JSON, bytes as they are."""

    body: object = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Answering:
    """The running server: its URL, and every request in order."""

    url: str
    requests: list[Request] = field(default_factory=list)


@contextlib.contextmanager
def answering(reply: Callable[[Request], Reply]) -> Iterator[Answering]:
    """Serve ``reply`` for the length of a with statement."""
    found = Answering("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            length = int(self.headers.get("Content-Length", 0))
            sent = f"{url.query}&{self.rfile.read(length).decode()}"
            form = {name: values[-1] for name, values in parse_qs(sent).items()}
            request = Request(self.command, url.path, form, dict(self.headers))
            found.requests.append(request)
            answer = reply(request)
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            with contextlib.suppress(ConnectionError):
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the name that http.server looks for

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    server = Server((HOST, 0), Handler)
    found.url = f"http://{HOST}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
