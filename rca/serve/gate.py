"""Who is let in: the outermost part of the application.

A bearer token, a user of the web config, or a client certificate, where any of them is configured. A browser, which
cannot send a bearer token, may give the token as the password of any user. Nothing but health is open without.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from exporters.server import BasicAuth, TokenBucket
from exporters.web_config import LiveWebConfig
from rca.serve.secrets import Secret
from rca.serve.views import Problem

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

OPEN: Final = ("/-/healthy", "/-/ready")
#: Sent with every answer.
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Token(Protocol):
    """Something that knows the token."""

    def read(self) -> str:
        """Return it."""
        ...


class FixedToken:
    """A token that came in the environment."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return "FixedToken()"

    def read(self) -> str:
        """Return it."""
        return self._text


def token_of(path: Path | None, text: str | None) -> Token | None:
    """Return the token of a file, else of the environment; None: there is none.

    Raises:
        InvalidInputError: the file cannot be read or holds no token.
    """
    if path is not None:
        secret = Secret(path)
        secret.read()
        return secret
    return FixedToken(text.strip()) if text and text.strip() else None


class Gate:
    """The ASGI application around ``inner``.

    Args:
        inner: What answers those who are let in.
        live: The web config: users, headers, rate limit.
        token: The bearer token; None: there is none.
        trusted: Whether whoever can connect may come in: a client certificate was verified, or authentication is not
            wanted.
        local: Whether only this machine can connect, without authentication. Then a page from elsewhere could still
            reach the server through a browser here, under a name of its own, so names other than localhost are refused.
    """

    def __init__(self, inner: _App, live: LiveWebConfig, token: Token | None, *, trusted: bool, local: bool) -> None:
        self._inner = inner
        self._live = live
        self._token = token
        self._trusted = trusted
        self._local = local
        self._users = BasicAuth()
        self._bucket = TokenBucket(time.monotonic)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            raise ValueError(f"no {scope['type']} here")
        self._live.refresh()
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        own = {name.lower(): value for name, value in self._live.current.headers}
        extra = [(name.encode(), value.encode("latin-1")) for name, value in {**HEADERS, **own}.items()]

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                have = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(item for item in extra if item[0] not in have)]
            await send(message)

        if scope["path"] not in OPEN:
            problem = await self._refusal(scope, headers)
            if problem is not None:
                await _refuse(problem, answer)
                return
        await self._inner(scope, receive, answer)

    async def _refusal(self, scope: _Scope, headers: Mapping[bytes, str]) -> Problem | None:
        if not self._bucket.take(self._live.current.rate):
            return Problem("Too many requests", 429, "the rate limit of the web config was reached")
        if not await self._admits(headers.get(b"authorization", "")):
            return Problem("Unauthorized", 401, "a token or a password is needed", cure="send it as Authorization")
        if self._local and not _is_local_name(headers.get(b"host", "")):
            return Problem("Forbidden", 403, "the Host header names another machine", cure="use localhost")
        # A browser sends passwords along with what a page from elsewhere posts, too.
        site = headers.get(b"sec-fetch-site", "none")
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and site not in ("none", "same-origin"):
            return Problem("Forbidden", 403, "the request comes from a page of another site")
        return None

    async def _admits(self, header: str) -> bool:
        users = self._live.current.users
        if self._token is not None and _holds(header, self._token.read()):
            return True
        if users:
            return await self._users.admits(header, users)
        return self._token is None and self._trusted


def _holds(header: str, token: str) -> bool:
    """Whether an ``Authorization`` header carries ``token``; takes the same time wherever it differs."""
    scheme, _, rest = header.partition(" ")
    given = rest.strip()
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.encode(), token.encode())


def _is_local_name(host: str) -> bool:
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    if name.lower() in ("", "localhost") or name.lower().endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


async def _refuse(problem: Problem, send: _Send) -> None:
    body = msgspec.json.encode(problem)
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    if problem.status == 401:
        headers += [
            (b"www-authenticate", b'Bearer realm="Prioscope"'),
            (b"www-authenticate", b'Basic realm="Prioscope", charset="UTF-8"'),
        ]
    if problem.status == 429:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
