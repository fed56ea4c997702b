"""The exporter over real HTTP on loopback: formats, compression, health, TLS, mutual TLS, passwords, limits."""

from __future__ import annotations

import base64
import gzip
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from http_helpers import Server, running
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import exporters.server
from exporters.errors import InvalidInputError
from exporters.families import Family, family
from exporters.poller import Status
from exporters.server import Application, BasicAuth, TokenBucket, accepts_gzip, listen, url_of
from exporters.web_config import LiveWebConfig, WebConfig, parse_web_config

#: bcrypt of "secret" with the smallest cost.
HASH = "$2b$04$Oz1ZGi0vMgypIyGGT2kJvu4jy3VLrBK1XjB5GCH0emkL.aRrSMQ2G"
UP = Status(up=True, stale=False, age=1.5, polls=3, snapshots=3, hung=False, alive=True, reason="")


def demo() -> tuple[Family, ...]:
    waits = {("c", f"queue-{at}", "P0"): float(at) for at in range(100)}
    return (
        family("priority_workload_oldest_wait_seconds", waits),
        family("priority_violation_total", {("c", 'a"b\\c\nd', "P0", "inversion", "held"): 2.0}),
    )


class Stage:
    """An application whose status a test may change."""

    def __init__(self, config: WebConfig | None = None) -> None:
        self.status = UP
        self.live = LiveWebConfig(config or WebConfig(), time.monotonic)
        self.application = Application(demo, lambda: self.status, self.live, title="Prioscope <test> exporter")


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def server(stage: Stage) -> Iterator[Server]:
    with running(stage.application, stage.live) as found:
        yield found


def names(text: str, *, openmetrics: bool = False) -> set[str]:
    return {item.name for item in (parse_openmetrics if openmetrics else parse_text)(text)}


# --- what is served


def test_text_is_the_default(server: Server) -> None:
    answer = server.ask("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "content-encoding" not in answer.headers
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert "priority_workload_oldest_wait_seconds" in names(answer.text)


def test_openmetrics_when_asked_for_as_prometheus_does(server: Server) -> None:
    accept = (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
        "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,*/*;q=0.1"
    )
    answer = server.ask("/metrics", {"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    assert "priority_violation" in names(answer.text, openmetrics=True)


def test_gzip_is_smaller_and_the_same(server: Server) -> None:
    plain = server.ask("/metrics").text
    answer = server.ask("/metrics", {"Accept-Encoding": "gzip, deflate;q=0.5"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["vary"] == "accept, accept-encoding"
    assert len(answer.body) < len(plain) / 3
    # All but the exporter's own clock is the same.
    assert gzip.decompress(answer.body).decode().split("# HELP prioscope")[0] == plain.split("# HELP prioscope")[0]


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("GZIP;q=0.2", True),
        ("deflate, x-gzip", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip;q=0.0, *", False),
        ("*;q=0", False),
        ("identity", False),
        ("", False),
        ("br;q=x, gzip", True),
    ],
)
def test_who_accepts_gzip(header: str, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted


def test_the_exporter_measures_its_own_scrapes(server: Server) -> None:
    for _ in range(3):
        server.ask("/metrics")
    found = {item.name: item for item in parse_text(server.ask("/metrics").text)}
    samples = {sample.name: sample.value for sample in found["prioscope_scrape_duration_seconds"].samples}
    assert samples["prioscope_scrape_duration_seconds_count"] == 3
    assert 0 < samples["prioscope_scrape_duration_seconds_sum"] < 5


def test_head_has_the_headers_only(server: Server) -> None:
    answer = server.ask("/metrics", method="HEAD")
    assert answer.status == 200
    assert int(answer.headers["content-length"]) > 1000
    assert answer.body == b""


@pytest.mark.parametrize("path", ["/", "/metrics", "/-/healthy", "/-/ready"])
def test_other_methods_are_refused(server: Server, path: str) -> None:
    answer = server.ask(path, method="POST")
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"


def test_an_unknown_path(server: Server) -> None:
    answer = server.ask("/metric")
    assert answer.status == 404
    assert "/metrics" in answer.text


def test_the_landing_page_links_and_escapes(server: Server, stage: Stage) -> None:
    stage.status = Status(True, True, 99.25, 1200, 7, False, True, "<b>down</b>")
    page = server.ask("/").text
    assert 'href="metrics"' in page
    assert "Prioscope &lt;test&gt; exporter" in page
    assert "&lt;b&gt;down&lt;/b&gt;" in page
    assert "snapshot of 99.2 s ago, too old to be served" in page
    assert "1,200, of which 7 gave a snapshot" in page


def test_requests_share_a_connection(server: Server) -> None:
    connection = server.connection()
    for _ in range(3):
        connection.request("GET", "/-/healthy")
        response = connection.getresponse()
        assert response.read() == b"Healthy\n"
        assert response.getheader("connection") != "close"
    connection.close()


# --- health


def test_readiness_follows_the_snapshot(server: Server, stage: Stage) -> None:
    assert server.ask("/-/ready").status == 200
    stage.status = Status(False, False, None, 1, 0, False, True, "no answer from 10.1.2.3")
    answer = server.ask("/-/ready")
    assert (answer.status, answer.text) == (503, "No snapshot yet\n")
    stage.status = Status(False, True, 100.0, 9, 1, False, True, "no answer")
    answer = server.ask("/-/ready")
    assert (answer.status, answer.text) == (503, "The snapshot is too old\n")
    assert server.ask("/-/healthy").status == 200, "a source that is away is no reason for a restart"


def test_health_is_lost_with_the_polling_thread(server: Server, stage: Stage) -> None:
    stage.status = Status(False, True, 100.0, 9, 1, False, False, "")
    assert server.ask("/-/healthy").status == 503


def test_draining_is_not_ready(server: Server, stage: Stage) -> None:
    stage.application.draining = True
    assert server.ask("/-/ready").text == "Draining\n"
    assert server.ask("/metrics").status == 200


# --- authentication


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_passwords() -> None:
    stage = Stage(WebConfig(users={"prom": HASH}, headers=(("X-Frame-Options", "deny"),)))
    with running(stage.application, stage.live) as server:
        refused = server.ask("/metrics")
        assert refused.status == 401
        assert refused.headers["www-authenticate"] == 'Basic realm="Prioscope"'
        assert "priority" not in refused.text
        assert server.ask("/").status == 401
        assert server.ask("/nowhere").status == 401
        for _ in range(2):
            assert server.ask("/metrics", basic("prom", "secret")).status == 200
            assert server.ask("/metrics", basic("prom", "wrong")).status == 401
            assert server.ask("/metrics", basic("root", "secret")).status == 401
        for junk in ("Basic", "Basic ???", "Basic " + base64.b64encode(b"nocolon").decode(), "Bearer x", "Basic /w=="):
            assert server.ask("/metrics", {"Authorization": junk}).status == 401
        # Probes of a kubelet have no password.
        assert server.ask("/-/ready").status == 200
        assert server.ask("/-/healthy").status == 200
        assert server.ask("/metrics", basic("prom", "secret")).headers["x-frame-options"] == "deny"


def test_a_password_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    hashed: list[str] = []

    def check(password: str, _: str) -> bool:
        hashed.append(password)
        return password in ("secret",)

    monkeypatch.setattr(exporters.server, "_check_password", check)

    async def play() -> list[bool]:
        guard, users = BasicAuth(), {"prom": HASH}
        attempts = [("prom", "secret"), ("prom", "secret"), ("prom", "no"), ("prom", "no"), ("nobody", "secret")]
        return [await guard.admits(basic(*attempt)["Authorization"], users) for attempt in attempts]

    assert asyncio.run(play()) == [True, True, False, False, False]
    # An unknown user costs a hash too, so that answers take as long.
    assert hashed == ["secret", "no", "secret"]


def test_the_memory_of_passwords_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(exporters.server, "_check_password", lambda *_: False)

    async def play() -> int:
        guard = BasicAuth()
        for number in range(500):
            await guard.admits(basic("prom", f"guess {number}")["Authorization"], {"prom": HASH})
        return len(guard._known)

    assert asyncio.run(play()) == BasicAuth.MAX_CACHED


def test_the_rate_limit() -> None:
    stage = Stage(WebConfig(rate=(3600.0, 2)))
    with running(stage.application, stage.live) as server:
        assert [server.ask("/metrics").status for _ in range(4)] == [200, 200, 429, 429]
        assert server.ask("/-/healthy").status == 200


def test_a_bucket_fills_again() -> None:
    now = [0.0]
    bucket = TokenBucket(lambda: now[0])
    assert [bucket.take((2.0, 1)), bucket.take((2.0, 1))] == [True, False]
    now[0] = 2.0
    assert [bucket.take((2.0, 1)), bucket.take((2.0, 1))] == [True, False]
    assert bucket.take(None)
    assert math.isinf(bucket._tokens)


# --- TLS


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def tls_stage(ca: trustme.CA, folder: Path, more: str = "") -> Stage:
    leaf = ca.issue_cert("localhost")
    leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(leaf.cert_chain_pems[0].bytes())
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    path = folder / "web.yml"
    path.write_text(f"tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n{more}")
    return Stage(parse_web_config(path.read_text(), path))


def client(ca: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if names:
        ca.issue_cert(*names).configure_cert(context)
    return context


REFUSED = (ssl.SSLError, ConnectionError, OSError)


def test_tls(ca: trustme.CA, tmp_path: Path) -> None:
    stage = tls_stage(ca, tmp_path)
    with running(stage.application, stage.live, client(ca)) as server:
        assert server.ask("/metrics").status == 200
        # Plain HTTP and clients that know another CA get nothing.
        with pytest.raises(OSError, match=r"."):
            Server(server.port).ask("/metrics")
        with pytest.raises(ssl.SSLCertVerificationError):
            Server(server.port, client(trustme.CA())).ask("/metrics")
        assert server.ask("/metrics").status == 200


def test_old_versions_of_tls_are_refused(ca: trustme.CA, tmp_path: Path) -> None:
    stage = tls_stage(ca, tmp_path, "  min_version: TLS13\n")
    old = client(ca)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with running(stage.application, stage.live, client(ca)) as server:
        with pytest.raises(ssl.SSLError):
            Server(server.port, old).ask("/metrics")
        assert server.ask("/metrics").status == 200


MUTUAL = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"


def test_mutual_tls(ca: trustme.CA, tmp_path: Path) -> None:
    stage = tls_stage(ca, tmp_path, MUTUAL)
    with running(stage.application, stage.live, client(ca, "prometheus.example")) as server:
        assert server.ask("/metrics").status == 200
        with pytest.raises(REFUSED):
            Server(server.port, client(ca)).ask("/metrics")
        stranger = client(ca)
        trustme.CA().issue_cert("prometheus.example").configure_cert(stranger)
        with pytest.raises(REFUSED):
            Server(server.port, stranger).ask("/metrics")


def test_only_clients_with_an_allowed_name(ca: trustme.CA, tmp_path: Path) -> None:
    stage = tls_stage(ca, tmp_path, MUTUAL + "  client_allowed_sans: [prometheus.example]\n")
    with running(stage.application, stage.live, client(ca, "prometheus.example")) as server:
        assert server.ask("/metrics").status == 200
        with pytest.raises(REFUSED):
            Server(server.port, client(ca, "grafana.example")).ask("/metrics")


def test_a_renewed_certificate_is_used_without_a_restart(ca: trustme.CA, tmp_path: Path) -> None:
    stage = tls_stage(ca, tmp_path)

    def serial(server: Server) -> str:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw,
            client(ca).wrap_socket(raw, server_hostname="localhost") as wrapped,
        ):
            certificate = wrapped.getpeercert()
            assert certificate is not None
            return str(certificate["serialNumber"])

    with running(stage.application, stage.live, client(ca)) as server:
        first = serial(server)
        tls_stage(ca, tmp_path)
        deadline = time.monotonic() + 10
        while serial(server) == first and time.monotonic() < deadline:
            server.ask("/-/healthy")
            time.sleep(0.1)
        assert serial(server) != first


# --- clients that behave badly


def test_a_request_that_does_not_arrive_is_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters.server, "REQUEST_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
        slow.sendall(b"GET /metrics HT")
        began = time.monotonic()
        assert slow.recv(100) == b"", "closed, without an answer"
        assert 0.2 < time.monotonic() - began < 3
    assert server.ask("/-/healthy").status == 200


def test_silent_clients_do_not_keep_others_out(ca: trustme.CA, tmp_path: Path) -> None:
    stage = tls_stage(ca, tmp_path)
    with running(stage.application, stage.live, client(ca)) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        began = time.monotonic()
        assert server.ask("/metrics").status == 200
        assert time.monotonic() - began < 2, "a handshake that does not come must not hold up the others"
        for connection in silent:
            connection.close()


@pytest.mark.parametrize(
    "request_bytes",
    [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"],
)
def test_nonsense_gets_an_error(server: Server, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(request_bytes)
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert server.ask("/-/healthy").status == 200


def test_a_huge_header_is_refused(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 4")


def test_many_scrapes_at_once_are_all_answered(server: Server) -> None:
    found: list[int] = []

    def scrape() -> None:
        found.append(server.ask("/metrics", {"Accept-Encoding": "gzip"}).status)

    threads = [threading.Thread(target=scrape) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [200] * 20


# --- addresses


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1:0") as taken, pytest.raises(InvalidInputError, match="address already in use") as caught:
        listen(f"127.0.0.1:{taken.getsockname()[1]}")
    assert "--listen" in caught.value.cure


@pytest.mark.parametrize("address", ["9941", "localhost", "::1:80", "host:port", "host:99999", "", "a:b:c"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(InvalidInputError, match="not an address"):
        listen(address)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(InvalidInputError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listen("192.0.2.1:0")


def test_every_interface() -> None:
    with listen(":0") as server, socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=5):
        assert socket.gethostname() in url_of(server, tls=True)
        assert url_of(server, tls=True).startswith("https://")


def test_a_unix_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    with listen(f"unix:{path}") as first:
        with pytest.raises(InvalidInputError, match="address already in use"):
            listen(f"unix:{path}")
        assert url_of(first, tls=False) == f"unix:{path} (/metrics)"
    assert path.exists(), "as after a kill"
    listen(f"unix:{path}").close()
