"""Who is let in, what hostile input does, and what leaks: `rca serve` as a process, over HTTP."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import bcrypt
import httpx
import pytest

from rca.store import open_store
from tests.support.services import wait_for
from tests.support.serving import ServeProcess, post, serving, webhook, write_bundle

pytestmark = [pytest.mark.services, pytest.mark.slow]

TOKEN = "correct-horse-battery-staple"  # noqa: S105 - a test's own
PASSWORD = "open-sesame-4711"  # noqa: S105


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A server with a token and one user of a web config, which explains the bundles of a folder."""
    folder = tmp_path_factory.mktemp("secured")
    write_bundle(folder / "bundles")
    (folder / "token").write_text(f"{TOKEN}\n")
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    (folder / "web.yml").write_text(f"basic_auth_users:\n  anna: {hashed}\n")
    options = (
        "--bundles",
        folder / "bundles",
        "--token-file",
        folder / "token",
        "--web.config.file",
        folder / "web.yml",
    )
    with serving(folder, *options, "--log-level", "debug") as running:
        yield running


def ask(
    server: ServeProcess, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    """Return status, headers (lower case) and body of the answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    method = "GET" if body is None else "POST"
    answer = httpx.request(method, server.url + path, content=body, headers=named, timeout=30, trust_env=False)
    return answer.status_code, {name.lower(): value for name, value in answer.headers.items()}, answer.content


BEARER = {"Authorization": f"Bearer {TOKEN}"}
JSON = {"Content_Type": "application/json"}


@pytest.mark.parametrize("path", ["/", "/incidents", "/incidents/x", "/metrics", "/api/v1/incidents", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": TOKEN},
        basic("anna", "wrong"),
        basic("berta", PASSWORD),
        {"Authorization": "Basic %%%"},
    ],
    ids=["nothing", "wrong token", "no token", "no scheme", "wrong password", "unknown user", "not base64"],
)
def test_nothing_is_open_to_strangers(server: ServeProcess, path: str, headers: dict[str, str]) -> None:
    status, _, body = ask(server, path, **headers)
    assert status == 401
    assert json.loads(body)["title"] == "Unauthorized"


@pytest.mark.parametrize("headers", [BEARER, basic("anna", PASSWORD), basic("anyone", TOKEN)])
def test_a_token_a_password_and_a_token_as_password_open(server: ServeProcess, headers: dict[str, str]) -> None:
    assert ask(server, "/api/v1/incidents", **headers)[0] == 200


def test_health_is_open_and_a_webhook_is_not(server: ServeProcess) -> None:
    assert ask(server, "/-/healthy")[0] == ask(server, "/-/ready")[0] == 200
    assert post(server.url, webhook(1))[0] == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"not json", 400),
        (b"\xff\xfe", 400),
        (b"[]", 400),
        (b'{"version": "4"}', 400),
        (b'{"version": "3", "alerts": []}', 400),
        (b'{"version": "4", "alerts": 7}', 400),
        (b'{"version":"4","alerts":' + b"[" * 100_000, 400),
        (b'{"version":"4","alerts":[],"x":' + b'{"a":' * 5000 + b"1" + b"}" * 5001, 400),
    ],
    ids=["empty", "text", "bytes", "list", "no alerts", "version", "number", "deep list", "deep object"],
)
def test_a_malformed_webhook_is_refused(server: ServeProcess, body: bytes, status: int) -> None:
    found, _, answer = ask(server, "/api/v1/alerts", body, **BEARER, **JSON)
    assert found == status
    assert json.loads(answer)["status"] == status


def test_a_webhook_that_is_too_large_is_refused_before_it_is_read(server: ServeProcess) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("POST", "/api/v1/alerts")
    for name, value in {**BEARER, "Content-Type": "application/json", "Content-Length": str(5 * 1024**2)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert answer.getheader("Connection") == "close"
    connection.close()


def test_another_content_type_is_refused(server: ServeProcess) -> None:
    body = json.dumps(webhook(2)).encode()
    assert ask(server, "/api/v1/alerts", body, **BEARER, Content_Type="text/plain")[0] == 415


def test_one_bad_alert_does_not_take_the_others_with_it(server: ServeProcess) -> None:
    both = webhook(3)
    both["alerts"].append({**both["alerts"][0], "startsAt": "1969-01-01T00:00:00Z", "fingerprint": "ab" * 8})
    status, answer = post(server.url, both, TOKEN)
    assert (status, answer["accepted"], answer["refused"]) == (202, 1, 1)
    assert "startsAt" in answer["problems"][0]


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}"


def explained(server: ServeProcess, number: int, **changes: Any) -> str:
    status, answer = post(server.url, webhook(number, **changes), TOKEN)
    assert status == 202
    (name,) = answer["incidents"]

    def done() -> bool:
        return json.loads(ask(server, f"/api/v1/incidents/{name}", **BEARER)[2])["incident"]["revision"] > 0

    wait_for(done, "the explanation", server.log, 60)
    return str(name)


def test_html_in_labels_stays_text(server: ServeProcess) -> None:
    labels = {"alertname": HOSTILE, "service": HOSTILE, HOSTILE: "x"}
    name = explained(server, 4, labels=labels, annotations={"summary": HOSTILE})
    for path in ("/incidents", f"/incidents/{name}"):
        status, headers, body = ask(server, path, **BEARER)
        assert status == 200
        assert b"<script" not in body
        assert b"<img" not in body
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert b"&lt;script&gt;" in ask(server, "/incidents", **BEARER)[2]
    assert ask(server, "/metrics", **BEARER)[0] == 200


def test_no_answer_and_no_log_line_holds_a_secret(server: ServeProcess) -> None:
    generator = "http://operator:hunter2secret@prometheus:9090/graph?g0.expr=up"
    name = explained(server, 5, generatorURL=generator)
    ask(server, "/api/v1/incidents?state=wrong", X_Api_Key="header-secret-77", **BEARER)
    secrets = (TOKEN, PASSWORD, "hunter2secret", "header-secret-77")
    paths = ("/incidents", f"/incidents/{name}", "/metrics", "/api/v1/incidents", f"/api/v1/incidents/{name}")
    more = (f"/api/v1/incidents/{name}/explanation", f"/api/v1/incidents/{name}/bundle", "/api/v1/openapi.json")
    for path in (*paths, *more):
        body = ask(server, path, **BEARER)[2]
        assert not [secret for secret in secrets if secret.encode() in body], path
    log = "".join(path.read_text() for path in server.folder.glob("serve-*.log"))
    assert log
    assert not [secret for secret in secrets if secret in log]
    for file in server.folder.glob("store.db*"):
        assert not [secret for secret in secrets if secret.encode() in file.read_bytes()]


def test_other_machines_are_not_served_without_authentication(tmp_path: Path) -> None:
    import cli.main

    assert (
        cli.main.main(["serve", "--listen", ":0", "--bundles", str(tmp_path), "--store", str(tmp_path / "s.db")]) == 2
    )


def test_prometheus_that_is_down_delays_the_explanation_and_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "--prometheus", "http://127.0.0.1:9") as running:
        assert post(running.url, webhook(6))[0] == 202
        with open_store(running.store) as store:
            wait_for(lambda: store.list().items[0].problem != "", "the first failure", running.log, 60)
            (item,) = store.list().items
        assert not item.final
        assert item.next_attempt_at is not None
        page = ask(running, f"/incidents/{item.id}")[2].decode()
        assert "127.0.0.1:9" in page or "Prometheus" in page
