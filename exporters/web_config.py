"""TLS, mutual TLS and basic authentication, in the web-config format of Prometheus' exporter-toolkit.

The same file that secures node_exporter secures these exporters. What Python's ssl module cannot do is refused with an
error that names the line, never ignored: asking for client certificates without verifying them, TLS below 1.2, and more
than one curve. HTTP/2 is not offered, whatever ``http2`` says. ``docs/exporters.md`` describes every field.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from exporters.errors import InvalidInputError, NotFoundError

if TYPE_CHECKING:
    import ssl

    from exporters.documents import Document

_log = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 1024 * 1024

#: IANA names, as Go writes them, and OpenSSL's. Suites of TLS 1.3 are always on, as in Go.
CIPHER_SUITES: Final[Mapping[str, str]] = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}
_TLS13_SUITES: Final = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
CURVES: Final[Mapping[str, str]] = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}
HEADERS: Final = (
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
)
_HEADER_VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
}
_VERSIONS: Final = ("TLS12", "TLS13")
_BCRYPT: Final = re.compile(r"\$2[abxy]?\$(\d\d)\$[./A-Za-z0-9]{53}")
#: 2^18 rounds take about half a minute a password.
_MAX_BCRYPT_COST: Final = 18
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|s|m|h)")
_DURATION_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section ``tls_server_config``. `parse_web_config` makes paths, relative to the file's folder, absolute."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: str = ""
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()


class HttpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section ``http_server_config``."""

    http2: bool = True
    headers: dict[str, str] = {}


class RateSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section ``rate_limit``: one request per ``interval``, with bursts of ``burst``."""

    interval: str | int = 0
    burst: int = 0


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tls_server_config: TlsSettings | None = None
    http_server_config: HttpSettings | None = None
    basic_auth_users: dict[str, str] | None = None
    rate_limit: RateSettings | None = None


@dataclass(frozen=True, slots=True)
class WebConfig:
    """A checked web-config file.

    Attributes:
        tls: None: plain HTTP.
        users: bcrypt hashes by user name; empty: no authentication.
        headers: Sent with every response.
        rate: Seconds between requests and burst; None: no limit.
        where: File and line of ``tls_server_config``, for errors.
        files: What it was read from, the certificates included.
    """

    tls: TlsSettings | None = None
    users: Mapping[str, str] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()
    rate: tuple[float, int] | None = None
    where: str = "web config"
    files: tuple[Path, ...] = ()


def load_web_config(path: Path | str) -> WebConfig:
    """Read and check a web-config file. The certificates are read by `ssl_context`.

    Raises:
        NotFoundError: there is no such file.
        InvalidInputError: it is not valid; the message names file and line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"web config {path} does not exist", cure="give --web-config the path of a file") from None
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}", cure="check its permissions") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInputError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes", cure="is it a web-config file?")
    return parse_web_config(data, path)


def parse_web_config(data: bytes | str, path: Path) -> WebConfig:
    """Check the content of a web-config file that is, or would be, at ``path``. Raises as `load_web_config`."""
    from exporters.documents import read_documents

    documents = [document for document in read_documents(data, str(path)) if document.data is not None]
    if not documents:
        return WebConfig(files=(path,), where=str(path))
    if len(documents) > 1:
        raise InvalidInputError(f"{path} holds {len(documents)} documents", cure="keep one of them")
    document = documents[0]

    def wrong(message: str, cure: str, *place: str | int) -> InvalidInputError:
        return InvalidInputError(f"{path}:{document.line(*place)}: {message}", cure=cure)

    content = _convert(document, path)
    users = content.basic_auth_users or {}
    for name, text in users.items():
        match = _BCRYPT.fullmatch(text)
        if match is None or not 4 <= int(match[1]) <= _MAX_BCRYPT_COST:
            raise wrong(
                f"the password of user {name!r} is not a bcrypt hash (of cost 4 to {_MAX_BCRYPT_COST})",
                "make one with `htpasswd -nBC 10 USER`",
                "basic_auth_users",
                name,
            )
        if not name or ":" in name:
            raise wrong(f"user name {name!r} is empty or holds ':'", "rename the user", "basic_auth_users", name)
    tls = content.tls_server_config
    if tls is not None:
        tls = _checked_tls(tls, path, wrong)
    http = content.http_server_config or HttpSettings()
    files = [] if tls is None else [tls.cert_file, tls.key_file, tls.client_ca_file]
    return WebConfig(
        tls=tls,
        users=users,
        headers=_headers(http.headers, wrong),
        rate=_rate(content.rate_limit, wrong),
        where=f"{path}:{document.line('tls_server_config')}",
        files=(path, *(Path(name) for name in files if name)),
    )


_Wrong = Callable[..., InvalidInputError]


def _convert(document: Document, path: Path) -> _Content:
    try:
        return msgspec.convert(document.data, _Content)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        keys: list[str | int] = [
            int(index) if index else name for name, index in re.findall(r"\.([^.\[`]+)|\[(\d+)\]", place)
        ]
        unknown = re.search(r"unknown field `(.+)`", text)
        if unknown:
            keys.append(unknown[1])
            text = f"there is no field {unknown[1]!r} here"
        elif keys:
            text = f"{'.'.join(map(str, keys))}: {text[:1].lower()}{text[1:]}"
        raise InvalidInputError(
            f"{path}:{document.line(*keys)}: {text}", cure="docs/exporters.md describes every field"
        ) from None


def _checked_tls(tls: TlsSettings, path: Path, wrong: _Wrong) -> TlsSettings | None:
    section = "tls_server_config"
    if not any(
        (tls.cert, tls.cert_file, tls.key, tls.key_file, tls.client_ca, tls.client_ca_file, tls.client_auth_type)
    ):
        return None
    for one, other in (("cert", "cert_file"), ("key", "key_file"), ("client_ca", "client_ca_file")):
        if getattr(tls, one) and getattr(tls, other):
            raise wrong(f"{one} and {other} are both given", "keep one of them", section, other)
        if one != "client_ca" and not (getattr(tls, one) or getattr(tls, other)):
            raise wrong(f"{other} is missing", "TLS needs a certificate and its key", section)
    has_ca = bool(tls.client_ca or tls.client_ca_file)
    kind = tls.client_auth_type or "NoClientCert"
    if kind in ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert"):
        raise wrong(
            f"client_auth_type {kind} takes certificates without verifying them, which is not supported",
            "use RequireAndVerifyClientCert and client_ca_file",
            section,
            "client_auth_type",
        )
    if kind not in ("NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"):
        raise wrong(
            f"client_auth_type is {kind!r}",
            "use NoClientCert, VerifyClientCertIfGiven or RequireAndVerifyClientCert",
            section,
            "client_auth_type",
        )
    if has_ca and kind == "NoClientCert":
        raise wrong(
            "client_ca_file is given, but no client has to show a certificate",
            "add client_auth_type: RequireAndVerifyClientCert",
            section,
            "client_ca_file",
        )
    if not has_ca and kind != "NoClientCert":
        # With the system's CAs, as in Go, anybody with a public certificate would be let in.
        raise wrong(
            f"client_auth_type {kind} needs client_ca_file", "name the CA of the clients", section, "client_auth_type"
        )
    if tls.client_allowed_sans and kind != "RequireAndVerifyClientCert":
        raise wrong(
            "client_allowed_sans needs client_auth_type RequireAndVerifyClientCert",
            "set it, or leave client_allowed_sans out",
            section,
            "client_allowed_sans",
        )
    for name in ("min_version", "max_version"):
        if getattr(tls, name) not in _VERSIONS:
            raise wrong(f"{name} is {getattr(tls, name)!r}", f"use {' or '.join(_VERSIONS)}", section, name)
    if tls.min_version > tls.max_version:
        raise wrong("min_version is above max_version", "swap the two", section, "min_version")
    for index, name in enumerate(tls.cipher_suites):
        if name not in CIPHER_SUITES and name not in _TLS13_SUITES:
            raise wrong(
                f"cipher suite {name!r} is unknown or insecure",
                f"use one of {', '.join(CIPHER_SUITES)}",
                section,
                "cipher_suites",
                index,
            )
    for index, name in enumerate(tls.curve_preferences):
        if name not in CURVES:
            raise wrong(
                f"curve {name!r} is unknown", f"use one of {', '.join(CURVES)}", section, "curve_preferences", index
            )
    if len(tls.curve_preferences) > 1:
        raise wrong(
            "more than one curve is not supported",
            "keep one, or leave curve_preferences out for OpenSSL's order, which begins with X25519",
            section,
            "curve_preferences",
        )

    def absolute(name: str) -> str:
        return str(path.parent / name) if name else ""

    return msgspec.structs.replace(
        tls,
        client_auth_type=kind,
        cert_file=absolute(tls.cert_file),
        key_file=absolute(tls.key_file),
        client_ca_file=absolute(tls.client_ca_file),
    )


def _headers(headers: Mapping[str, str], wrong: _Wrong) -> tuple[tuple[str, str], ...]:
    place = ("http_server_config", "headers")
    for name, value in headers.items():
        if name not in HEADERS:
            raise wrong(f"header {name!r} cannot be set", f"use {', '.join(HEADERS)}", *place, name)
        allowed = _HEADER_VALUES.get(name)
        if allowed is not None and value and value.lower() not in allowed:
            raise wrong(f"{name} is {value!r}", f"use {' or '.join(allowed)}", *place, name)
        if not value.isascii() or not value.isprintable():
            raise wrong(f"{name} holds a character that a header may not have", "use plain ASCII", *place, name)
    return tuple((name, value) for name, value in headers.items() if value)


def _rate(settings: RateSettings | None, wrong: _Wrong) -> tuple[float, int] | None:
    if settings is None or settings.interval in (0, "0", ""):
        return None
    text = settings.interval
    parts = _DURATION.findall(text) if isinstance(text, str) else []
    if isinstance(text, int) or "".join(amount + unit for amount, unit in parts) != text:
        raise wrong(f"interval {text!r} is not a duration", "write it as 500ms or 1s", "rate_limit", "interval")
    if settings.burst < 1:
        raise wrong("burst is below 1, so that nothing would be let through", "set burst: 1", "rate_limit")
    return sum(float(amount) * _DURATION_SECONDS[unit] for amount, unit in parts), settings.burst


# --- TLS


def ssl_context(config: WebConfig) -> ssl.SSLContext | None:
    """Return the server's context with its certificates; None for plain HTTP.

    Raises:
        InvalidInputError: a certificate or key is missing, unreadable, encrypted or does not belong to the other.
    """
    tls = config.tls
    if tls is None:
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    versions = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
    context.minimum_version, context.maximum_version = versions[tls.min_version], versions[tls.max_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if tls.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    suites = [CIPHER_SUITES[name] for name in tls.cipher_suites if name in CIPHER_SUITES]
    if suites:
        context.set_ciphers(":".join(suites))
    if tls.curve_preferences:
        context.set_ecdh_curve(CURVES[tls.curve_preferences[0]])
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, config)
    if tls.client_auth_type != "NoClientCert":
        required = tls.client_auth_type == "RequireAndVerifyClientCert"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        text = tls.client_ca or _read(tls.client_ca_file, config.where)
        try:
            context.load_verify_locations(cadata=text)
        except ssl.SSLError as error:
            name = tls.client_ca_file or "client_ca"
            raise InvalidInputError(
                f"{config.where}: {name} holds no CA certificate: {_reason(error)}", cure="give it in PEM format"
            ) from None
    return context


def _load_certificate(context: ssl.SSLContext, config: WebConfig) -> None:
    import ssl

    tls = config.tls
    assert tls is not None  # noqa: S101 - the callers checked
    for name in (tls.cert_file, tls.key_file):
        if name:
            # OpenSSL's own error does not say which of the two it could not open.
            _read(name, config.where)
    with contextlib.ExitStack() as stack:
        cert = tls.cert_file or stack.enter_context(_private_file(tls.cert))
        key = tls.key_file or stack.enter_context(_private_file(tls.key))
        try:
            # Without the callback, an encrypted key would ask for its password on the terminal.
            context.load_cert_chain(cert, key, password=lambda: "")
        except (ssl.SSLError, ValueError) as error:
            names = f"{tls.cert_file or 'cert'} and {tls.key_file or 'key'}"
            raise InvalidInputError(
                f"{config.where}: {names} are not a certificate and its key: {_reason(error)}",
                cure="give both in PEM format, the key unencrypted, and check that they belong together",
            ) from None


def _read(name: str, where: str) -> str:
    try:
        return Path(name).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise InvalidInputError(
            f"{where}: {name} cannot be read: {error.strerror}", cure="check the path and its permissions"
        ) from None


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error).replace("_", " ").lower()


@contextlib.contextmanager
def _private_file(text: str) -> Any:
    handle, name = tempfile.mkstemp(suffix=".pem")  # Readable by the owner only.
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        yield name
    finally:
        Path(name).unlink()


def allowed_san(certificate: Mapping[str, Any] | None, allowed: tuple[str, ...]) -> bool:
    """Whether a verified client certificate (of ``SSLSocket.getpeercert``) has one of the ``allowed`` names."""
    if not allowed:
        return True
    names = (certificate or {}).get("subjectAltName", ())
    return any(value in allowed for kind, value in names if kind in ("DNS", "email", "IP Address", "URI"))


class LiveWebConfig:
    """A web config that follows its files, as exporter-toolkit does: users, headers, limits, certificate and key.

    Whether TLS is on and which clients it admits is fixed at the start; a change to it is logged and waits for a
    restart. A broken file is logged once and changes nothing. Not thread-safe: it belongs to the server's thread.

    Args:
        config: What was loaded at the start.
        clock: Monotonic seconds.

    Raises:
        InvalidInputError: as `ssl_context`.
    """

    #: Seconds between looks at the files.
    PERIOD: Final = 1.0

    def __init__(self, config: WebConfig, clock: Callable[[], float]) -> None:
        self.current = config
        self.context = ssl_context(config)
        self._admission = _admission(config)
        self._clock = clock
        self._seen = _signature(config.files)
        self._looked = clock()

    def refresh(self) -> None:
        """Look at the files, at most once a `PERIOD`, and take over what changed."""
        if not self.current.files or self._clock() - self._looked < self.PERIOD:
            return
        self._looked = self._clock()
        seen = _signature(self.current.files)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            changed = load_web_config(self.current.files[0])
            ssl_context(changed)
        except (InvalidInputError, NotFoundError) as error:
            _log.error("the web config is kept as it was: %s", error)
            return
        before = self.current
        if _admission(changed) != self._admission:
            _log.warning("%s: a change of TLS or of client certificates needs a restart", changed.where)
            changed = WebConfig(before.tls, changed.users, changed.headers, changed.rate, changed.where, before.files)
        elif self.context is not None:
            # Checked above on a context of its own: a failure here could leave a certificate without its key.
            _load_certificate(self.context, changed)
        self.current = changed
        self._seen = _signature(changed.files)
        _log.info("the web config was read anew")


def _signature(files: tuple[Path, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    found: list[tuple[int, int, int] | None] = []
    for path in files:
        try:
            stat = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


def _admission(config: WebConfig) -> object:
    """What cannot be changed in a context that is in use."""
    tls = config.tls
    if tls is None:
        return None
    settings = msgspec.structs.replace(tls, cert="", key="", cert_file="", key_file="")
    if not tls.client_ca_file:
        return settings
    try:
        return settings, Path(tls.client_ca_file).read_bytes()
    except OSError:
        return settings, b""


__all__ = [
    "LiveWebConfig",
    "TlsSettings",
    "WebConfig",
    "allowed_san",
    "load_web_config",
    "parse_web_config",
    "ssl_context",
]
