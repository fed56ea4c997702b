"""Reads Slurm through slurmrestd: API 0.0.38 to 0.0.44, over a unix socket or TCP, with a JSON Web Token or without."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from exporters.errors import InvalidInputError, SourceUnreachableError
from exporters.sources.slurm import records
from exporters.sources.slurm.reader import Reading, Remembered
from exporters.sources.slurm.records import Config, Dump, Part, QosRecord

if TYPE_CHECKING:
    import httpx

#: The versions of the API that are understood, newest first.
VERSIONS: Final = tuple(range(44, 37, -1))

#: More than the jobs of any cluster take; it keeps a wrong address from filling the memory.
MAX_ANSWER_BYTES: Final = 1 << 30


class RestReader:
    """Reads one cluster through its slurmrestd.

    Args:
        address: ``http://host:6820``, ``https://…``, or ``unix:/run/slurmrestd/slurmrestd.socket``.
        user: For whom the token is (``X-SLURM-USER-NAME``); empty: the token says.
        token: A JSON Web Token, as ``scontrol token`` prints it, with or without ``SLURM_JWT=``.
        token_file: A file with one, read again for each poll, since tokens expire.
        version: The API version, such as 41; None: the newest that both sides know.
        timeout: Seconds for one answer, from the first byte sent to the last received.
        preempt_type: ``PreemptType`` of slurm.conf (``none``, ``partition_prio``, ``qos``), which slurmrestd does not
            tell. Empty: whether jobs may be preempted is not known.

    Raises:
        InvalidInputError: the address or the token cannot be one.
    """

    def __init__(
        self,
        address: str,
        *,
        user: str = "",
        token: str = "",
        token_file: Path | None = None,
        version: int | None = None,
        timeout: float = 30.0,
        preempt_type: str = "",
    ) -> None:
        import httpx

        self.address = address
        self._user = user
        self._token = _one_line(token, "the token")
        self._token_file = token_file
        self._timeout = timeout
        self._fixed = version
        self._version: int | None = None
        self._cluster = ""
        self._paths: dict[str, str] = {}
        self._config = Config(preempt_type=preempt_type.removeprefix("preempt/"))
        self._qos: Remembered[tuple[QosRecord, ...]] = Remembered(self._read_qos)
        self._socket: Path | None = None
        transport = None
        base = address
        if address.startswith("unix:"):
            self._socket = Path(address.removeprefix("unix:").removeprefix("//"))
            transport = httpx.HTTPTransport(uds=str(self._socket))
            base = "http://localhost"
        elif not re.match(r"https?://[^/\s]+", address):
            raise InvalidInputError(
                f"{address!r} is not the address of a slurmrestd", cure="write http://HOST:6820 or unix:/PATH/TO/SOCKET"
            )
        # Redirects and proxies have no place between an exporter and the cluster that it is on.
        self._client = httpx.Client(
            base_url=base, transport=transport, timeout=timeout, follow_redirects=False, trust_env=False
        )

    def read(self) -> Dump:
        """Read jobs, nodes and partitions, and QOS when they are due; see `Reader.read`."""
        version = self._discover()
        reading = Reading({})
        jobs = reading.part("workloads", lambda: records.parse_jobs(self._get("jobs"), self._where("jobs")))
        nodes = reading.part("nodes", lambda: records.parse_nodes(self._get("nodes"), self._where("nodes")))
        try:
            reading.check(jobs, nodes)
        except SourceUnreachableError:
            # It may come back as another version.
            self._version = None
            raise
        partitions = reading.part(
            "partitions", lambda: records.parse_partitions(self._get("partitions"), self._where("partitions"))
        )
        reservations = reading.part(
            "reservations", lambda: records.parse_reservations(self._get("reservations"), self._where("reservations"))
        )
        qos: tuple[QosRecord, ...] | None = None
        try:
            qos = self._qos.get()
        except (SourceUnreachableError, InvalidInputError) as error:
            # Without accounting there are no QOS. Where jobs have one, it is missed.
            if any(job.qos for job in (jobs.items if jobs else ())):
                reading.unread["qos"] = str(error)
        if not self._config.preempt_type:
            reading.unread["configuration"] = (
                f"slurmrestd (API 0.0.{version}) does not give PreemptType: whether jobs may be preempted is not known"
            )
        return Dump(jobs, nodes, partitions, reservations, qos, self._config, reading.unread, self._cluster)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    # --- requests

    def _discover(self) -> int:
        """Return the API version to use; the server is asked once, and again after it was away."""
        if self._version is not None:
            return self._version
        offered = self._offered()
        usable = [self._fixed] if self._fixed is not None else VERSIONS
        found = next((version for version in usable if version in offered), None)
        if found is None:
            has = ", ".join(f"0.0.{version}" for version in sorted(offered)) or "none"
            raise SourceUnreachableError(
                f"{self.address} offers API versions {has}; needed is "
                + (
                    f"0.0.{self._fixed}"
                    if self._fixed is not None
                    else f"one of 0.0.{VERSIONS[-1]} to 0.0.{VERSIONS[0]}"
                ),
                cure="start slurmrestd with -s openapi/slurmctld or -s openapi/v0.0.38, or name a version that it has",
            )
        self._version = found
        return found

    def _offered(self) -> set[int]:
        """Return the versions in the server's own description; if it gives none, those that answer a ping."""
        paths: dict[str, Any] = {}
        with contextlib.suppress(msgspec.DecodeError, _StatusError):
            paths = msgspec.json.decode(self._request("/openapi/v3"), type=_OpenApi).paths
        found: set[int] = set()
        for path in paths:
            match = re.fullmatch(r"(/slurm(?:db)?)/v0\.0\.(\d+)/(jobs|nodes|partitions|reservations|qos)(/?)", path)
            if match:
                self._paths[f"{match[1]}/{match[2]}/{match[3]}"] = path
                if match[3] == "jobs" and match[1] == "/slurm":
                    found.add(int(match[2]))
        if not found:
            for version in [self._fixed] if self._fixed is not None else VERSIONS:
                try:
                    self._request(f"/slurm/v0.0.{version}/ping")
                except _StatusError:
                    continue
                return {version}
        return found

    def _path(self, group: str, what: str) -> str:
        plain = f"/{group}/v0.0.{self._version}/{what}"
        return self._paths.get(f"/{group}/{self._version}/{what}", plain)

    def _where(self, what: str) -> str:
        return f"{self.address} {what}"

    def _get(self, what: str, group: str = "slurm") -> bytes:
        answer = self._request(self._path(group, what))
        if not self._cluster and group == "slurm":
            self._cluster = records.check_envelope(records.clean(answer, self._where(what)), self._where(what))[1]
        return answer

    def _read_qos(self) -> tuple[QosRecord, ...]:
        part: Part = records.parse_qos(self._get("qos", "slurmdb"), self._where("qos"))
        return part.items

    def _headers(self) -> dict[str, str]:
        token = self._token
        if self._token_file is not None:
            try:
                token = _one_line(self._token_file.read_text(encoding="ascii"), f"the token in {self._token_file}")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text"
                raise SourceUnreachableError(
                    f"token file {self._token_file} cannot be read: {reason}",
                    cure="write it with `scontrol token lifespan=… > FILE`, readable by the exporter",
                ) from None
        headers = {"Accept": "application/json"}
        if token:
            headers["X-SLURM-USER-TOKEN"] = token
        if self._user:
            headers["X-SLURM-USER-NAME"] = self._user
        return headers

    def _request(self, path: str) -> bytes:
        """Return the body of an answer, read within the time-out as a whole."""
        import httpx

        deadline = time.monotonic() + self._timeout
        where = f"{self.address}{path}"
        if self._socket is not None and not self._socket.exists():
            raise SourceUnreachableError(
                f"{self.address} does not exist", cure="is slurmrestd running, and on this machine?"
            )
        body = bytearray()
        try:
            with self._client.stream("GET", path, headers=self._headers()) as answer:
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise SourceUnreachableError(f"{where} sends more than {MAX_ANSWER_BYTES:,} bytes")
                    if time.monotonic() > deadline:
                        raise _too_slow(where, self._timeout)
                self._check(answer, bytes(body), where)
        except httpx.TimeoutException:
            raise _too_slow(where, self._timeout) from None
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise SourceUnreachableError(
                f"{where}: {reason}", cure="is slurmrestd running, and may the exporter reach it?"
            ) from None
        return bytes(body)

    def _check(self, answer: httpx.Response, body: bytes, where: str) -> None:
        if answer.status_code == 200:
            return
        detail = _reason(body)
        if answer.status_code in (401, 403) or "uthentication" in detail:
            token = "the token" if self._token or self._token_file else "a request without a token"
            raise SourceUnreachableError(
                f"{where}: slurmrestd refuses {token} ({answer.status_code}{detail})",
                cure="renew it: `scontrol token lifespan=…`, for a user that may read all jobs",
            )
        raise _StatusError(f"{where}: status {answer.status_code}{detail}", cure="look into slurmrestd's log")


class _StatusError(SourceUnreachableError):
    """The server answered, and not with what was asked for."""


def _too_slow(where: str, timeout: float) -> SourceUnreachableError:
    return SourceUnreachableError(
        f"{where} does not answer within {timeout:g} s", cure="is slurmctld overloaded? Raise --timeout"
    )


class _OpenApi(msgspec.Struct):
    paths: dict[str, Any] = {}


def _reason(body: bytes) -> str:
    """Return what an error answer says, with a colon before it; empty when it says nothing."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = " ".join(body[:200].decode("utf-8", "replace").split())
        return f": {text}" if text and "<" not in text else ""
    errors = content.get("errors") if isinstance(content, Mapping) else None
    if not isinstance(errors, list) or not errors:
        return ""
    first = errors[0]
    parts = [first.get("description"), first.get("error")] if isinstance(first, Mapping) else [first]
    text = "; ".join(dict.fromkeys(str(part) for part in parts if part))
    return f": {text[:300]}" if text else ""


def _one_line(token: str, what: str) -> str:
    token = token.strip().removeprefix("SLURM_JWT=")
    if re.search(r"[^\x21-\x7e]", token):
        raise InvalidInputError(f"{what} is not one word", cure="take what `scontrol token` prints")
    return token


def environment_token() -> str:
    """Return the token in ``SLURM_JWT``; empty when there is none."""
    return os.environ.get("SLURM_JWT", "")
