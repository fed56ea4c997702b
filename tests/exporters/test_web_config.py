"""Web-config files: what is accepted, what is refused and at which line, and what happens when files change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trustme

from exporters.errors import InvalidInputError, NotFoundError
from exporters.web_config import LiveWebConfig, WebConfig, allowed_san, load_web_config, parse_web_config, ssl_context

#: bcrypt of "secret" with the smallest cost.
HASH = "$2b$04$Oz1ZGi0vMgypIyGGT2kJvu4jy3VLrBK1XjB5GCH0emkL.aRrSMQ2G"


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def pems(ca: trustme.CA, tmp_path: Path) -> Path:
    """A folder with cert.pem, key.pem and ca.pem."""
    issue(ca, tmp_path)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return tmp_path


def issue(ca: trustme.CA, folder: Path) -> None:
    leaf = ca.issue_cert("localhost")
    leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))


TLS = "tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n"


def test_an_exporter_toolkit_file_is_read_as_it_is(pems: Path) -> None:
    path = pems / "web.yml"
    path.write_text(
        TLS
        + f"""\
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.pem
  client_allowed_sans: [prometheus.example]
  min_version: TLS12
  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, TLS_AES_128_GCM_SHA256]
  curve_preferences: [X25519]
http_server_config:
  http2: true
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Frame-Options: deny
basic_auth_users:
  prometheus: {HASH}
rate_limit:
  interval: 1m30s
  burst: 5
"""
    )
    config = load_web_config(path)
    context = ssl_context(config)

    assert config.tls is not None
    assert config.tls.cert_file == str(pems / "cert.pem")
    assert config.users == {"prometheus": HASH}
    assert config.headers == (("Strict-Transport-Security", "max-age=31536000"), ("X-Frame-Options", "deny"))
    assert config.rate == (90.0, 5)
    assert context is not None
    assert context.verify_mode.name == "CERT_REQUIRED"
    suites = {item["name"] for item in context.get_ciphers()}
    assert "ECDHE-RSA-AES256-GCM-SHA384" in suites
    assert "ECDHE-RSA-AES128-GCM-SHA256" not in suites


def test_certificates_may_be_given_inline(pems: Path) -> None:
    def block(name: str) -> str:
        return "|\n" + "".join(f"    {line}\n" for line in (pems / name).read_text().splitlines())

    config = parse_web_config(
        f"tls_server_config:\n  cert: {block('cert.pem')}  key: {block('key.pem')}", pems / "web.yml"
    )
    context = ssl_context(config)
    assert context is not None
    assert config.files == (pems / "web.yml",)


@pytest.mark.parametrize("content", ["", "# nothing\n", "tls_server_config:\n", "tls_server_config: {}\n"])
def test_an_empty_file_means_plain_http(content: str, tmp_path: Path) -> None:
    config = parse_web_config(content, tmp_path / "web.yml")
    assert ssl_context(config) is None
    assert not config.users


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("basic_auth_user:\n  a: b\n", 1, "there is no field 'basic_auth_user' here"),
        (TLS + "  certfile: x\n", 4, "there is no field 'certfile' here"),
        ("tls_server_config:\n  key_file: k\n", 1, "cert_file is missing"),
        ("tls_server_config:\n  cert_file: c\n", 1, "key_file is missing"),
        (TLS + "  cert: inline\n", 2, "cert and cert_file are both given"),
        (TLS + "  client_auth_type: RequireAnyClientCert\n", 4, "without verifying"),
        (TLS + "  client_auth_type: Sometimes\n", 4, "client_auth_type is 'Sometimes'"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n", 4, "needs client_ca_file"),
        (TLS + "  client_ca_file: ca.pem\n", 4, "no client has to show a certificate"),
        (TLS + "  client_allowed_sans: [a]\n", 4, "client_allowed_sans needs"),
        (TLS + "  min_version: TLS10\n", 4, "min_version is 'TLS10'"),
        (TLS + "  max_version: TLS12\n  min_version: TLS13\n", 5, "min_version is above max_version"),
        (TLS + "  cipher_suites:\n    - TLS_RSA_WITH_RC4_128_SHA\n", 5, "unknown or insecure"),
        (TLS + "  curve_preferences: [P-256]\n", 4, "curve 'P-256' is unknown"),
        (TLS + "  curve_preferences: [X25519, CurveP256]\n", 4, "more than one curve"),
        ("http_server_config:\n  headers:\n    Server: x\n", 3, "header 'Server' cannot be set"),
        ("http_server_config:\n  headers:\n    X-Frame-Options: maybe\n", 3, "X-Frame-Options is 'maybe'"),
        ('http_server_config:\n  headers:\n    X-XSS-Protection: "a\\r\\nb"\n', 3, "may not have"),
        ("http_server_config:\n  http2: sometimes\n", 2, "http_server_config.http2: expected `bool`"),
        ("basic_auth_users:\n  alice: secret\n", 2, "password of user 'alice' is not a bcrypt hash"),
        (f"basic_auth_users:\n  alice: {HASH.replace('$04$', '$31$')}\n", 2, "of cost 4 to 18"),
        (f'basic_auth_users:\n  "a:b": {HASH}\n', 2, "holds ':'"),
        ("rate_limit:\n  interval: often\n  burst: 1\n", 2, "interval 'often' is not a duration"),
        ("rate_limit:\n  interval: 1s\n", 1, "burst is below 1"),
        ("a: [\n", 2, "not valid YAML"),
        ("a: 1\na: 2\n", 2, "given twice"),
    ],
)
def test_a_mistake_names_its_line(content: str, line: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    with pytest.raises(InvalidInputError) as caught:
        parse_web_config(content, path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)
    assert caught.value.cure
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        load_web_config(tmp_path / "web.yml")


def test_bad_certificates_are_named(ca: trustme.CA, pems: Path) -> None:
    path = pems / "web.yml"

    def error(content: str) -> str:
        with pytest.raises(InvalidInputError) as caught:
            ssl_context(parse_web_config(content, path))
        return str(caught.value)

    assert f"{pems / 'gone.pem'} cannot be read: No such file" in error(TLS.replace("cert.pem", "gone.pem"))
    (pems / "text.pem").write_text("hello\n")
    assert "are not a certificate and its key" in error(TLS.replace("cert.pem", "text.pem"))
    ca.issue_cert("other").private_key_pem.write_to_path(str(pems / "other.pem"))
    assert "key values mismatch" in error(TLS.replace("key.pem", "other.pem"))
    mutual = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: text.pem\n"
    assert f"{path}:1: {pems / 'text.pem'} holds no CA certificate" in error(mutual)


def test_an_encrypted_key_is_an_error_and_asks_nobody(pems: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((pems / "key.pem").read_bytes(), None)
    (pems / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    with pytest.raises(InvalidInputError, match="not a certificate and its key") as caught:
        ssl_context(parse_web_config(TLS, pems / "web.yml"))
    assert "unencrypted" in caught.value.cure


def test_names_of_clients() -> None:
    certificate = {"subjectAltName": (("DNS", "prom"), ("IP Address", "10.0.0.1"), ("URI", "spiffe://c/prom"))}
    assert allowed_san(certificate, ("spiffe://c/prom",))
    assert allowed_san(certificate, ())
    assert not allowed_san(certificate, ("other",))
    assert not allowed_san(None, ("prom",))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def touch(path: Path, content: str) -> None:
    path.write_text(content)
    # Two writes within a tick of the file system's clock, of the same size, would look like one.
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def test_users_and_certificates_are_followed(ca: trustme.CA, pems: Path) -> None:
    path, clock = pems / "web.yml", Clock()
    path.write_text(TLS + f"basic_auth_users:\n  alice: {HASH}\n")
    live = LiveWebConfig(load_web_config(path), clock)
    context = live.context

    touch(path, TLS + f"basic_auth_users:\n  bob: {HASH}\n")
    live.refresh()
    assert set(live.current.users) == {"alice"}, "not looked at more than once a second"
    clock.now += 1.5
    live.refresh()
    assert set(live.current.users) == {"bob"}
    assert live.context is context, "the server goes on with the context that it has"


def test_a_broken_file_changes_nothing(pems: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = pems / "web.yml", Clock()
    path.write_text(f"basic_auth_users:\n  alice: {HASH}\n")
    live = LiveWebConfig(load_web_config(path), clock)
    touch(path, "basic_auth_users:\n  alice: oops\n")
    for _ in range(3):
        clock.now += 2
        live.refresh()
    assert set(live.current.users) == {"alice"}
    assert caplog.text.count("kept as it was") == 1


def test_turning_tls_off_waits_for_a_restart(pems: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = pems / "web.yml", Clock()
    path.write_text(TLS)
    live = LiveWebConfig(load_web_config(path), clock)
    touch(path, f"basic_auth_users:\n  alice: {HASH}\n")
    clock.now += 2
    live.refresh()
    assert "needs a restart" in caplog.text
    assert live.current.tls is not None
    assert set(live.current.users) == {"alice"}


def test_another_client_ca_waits_for_a_restart(pems: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = pems / "web.yml", Clock()
    path.write_text(TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n")
    live = LiveWebConfig(load_web_config(path), clock)
    trustme.CA().cert_pem.write_to_path(str(pems / "ca.pem"))
    clock.now += 2
    live.refresh()
    assert "needs a restart" in caplog.text


def test_without_a_file_there_is_nothing_to_follow() -> None:
    clock = Clock()
    live = LiveWebConfig(WebConfig(), clock)
    clock.now += 10
    live.refresh()
    assert live.current == WebConfig()
