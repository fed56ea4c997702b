"""A Kubernetes API server in miniature: real HTTP on loopback, with the semantics that list and watch rely on.

* One resource version for all resources, which only grows; every object carries that of its last change.
* ``limit`` and ``continue`` page through the state as it was at the first page; an expired token is *410 Expired*.
* Watches send what changed after ``resourceVersion``, with bookmarks on request, until ``timeoutSeconds``; a version
  that history no longer covers gives an ``ERROR`` event with *410 Gone* (or, if so told, the HTTP status).
* Label and field selectors, in watches too: an object that stops to match is ``DELETED``, with its old content.
* Discovery of groups and custom resources, which can be installed and removed at run time.

Faults on demand: refuse a resource, answer the next requests with an error, stall or cut connections, send garbage,
forget history, go away and come back on the same port.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import re
import socket
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

#: What Go takes for true; older clients send Python's spelling.
TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})


@dataclass(frozen=True)
class Resource:
    """A resource that the server has. ``fields`` are the field selectors it supports besides name and namespace."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    fields: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


BUILT_IN = (
    Resource("", "v1", "pods", "Pod", fields=("spec.nodeName", "status.phase", "spec.schedulerName")),
    Resource("", "v1", "nodes", "Node", namespaced=False, fields=("spec.unschedulable",)),
    Resource("", "v1", "events", "Event", fields=("reason", "type", "involvedObject.kind", "involvedObject.uid")),
    Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False),
)
KUEUE = Resource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")
VOLCANO = Resource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")


@dataclass
class Change:
    """One entry of history: what ``key`` was before and is after; None: it was not there."""

    version: int
    plural: str
    key: tuple[str, str]
    before: Object | None
    after: Object | None


@dataclass
class Faults:
    """What goes wrong, by plural name where it is a dictionary."""

    forbidden: set[str] = field(default_factory=set)
    statuses: dict[str, deque[tuple[int, str | None]]] = field(default_factory=lambda: defaultdict(deque))
    slow: dict[str, float] = field(default_factory=dict)
    garbage: dict[str, bytes] = field(default_factory=dict)
    gone_as_status: bool = False
    silent: bool = False
    unauthorized: bool = False


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str, token: str = "") -> None:
        super().__init__(message)
        metadata = {"continue": token} if token else {}
        self.code = code
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": metadata,
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


class FakeKubernetes:
    """The server's state, and its life. Use it as a context manager.

    Args:
        custom: Custom resources installed from the start.
        bookmark_seconds: How often watches get a bookmark.
    """

    def __init__(self, *custom: Resource, bookmark_seconds: float = 0.05) -> None:
        self.changed = threading.Condition()
        self.resources = {item.plural: item for item in (*BUILT_IN, *custom)}
        self.objects: dict[str, dict[tuple[str, str], Object]] = defaultdict(dict)
        self.history: deque[Change] = deque()
        self.version = 100
        self.compacted = 100
        self.snapshots: dict[tuple[str, int], list[Object]] = {}
        self.faults = Faults()
        self.bookmark_seconds = bookmark_seconds
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.connections: set[socket.socket] = set()
        self.cuts = 0
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._port = 0

    # --- life

    def start(self) -> FakeKubernetes:
        server = _Server(("127.0.0.1", self._port), _handler(self))
        self._port = server.server_port
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Go away: refuse connections and cut those that are open."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self.cut()
            if self._thread is not None:
                self._thread.join()

    def __enter__(self) -> FakeKubernetes:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._server is not None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # --- state

    def create(self, plural: str, body: Object) -> Object:
        """Add an object; its UID, creation time and resource version are set as the API server does."""
        resource = self.resources[plural]
        new = copy.deepcopy(body)
        meta = new.setdefault("metadata", {})
        if resource.namespaced:
            meta.setdefault("namespace", "default")
        meta.setdefault("uid", str(uuid.uuid4()))
        meta.setdefault("creationTimestamp", "2025-01-01T00:00:00Z")
        key = (meta.get("namespace", ""), meta["name"])
        with self.changed:
            assert key not in self.objects[plural], f"{plural} {key} exists"
            self._store(plural, key, new)
        return new

    def update(self, plural: str, name: str, change: Callable[[Object], None], namespace: str = "default") -> Object:
        """Change an object in place with ``change``."""
        key = (namespace if self.resources[plural].namespaced else "", name)
        with self.changed:
            new = copy.deepcopy(self.objects[plural][key])
            change(new)
            self._store(plural, key, new)
        return new

    def delete(self, plural: str, name: str, namespace: str = "default") -> None:
        """Remove an object."""
        key = (namespace if self.resources[plural].namespaced else "", name)
        with self.changed:
            self._store(plural, key, None)

    def _store(self, plural: str, key: tuple[str, str], after: Object | None) -> None:
        self.version += 1
        before = self.objects[plural].get(key)
        if after is None:
            assert before is not None
            del self.objects[plural][key]
        else:
            after["metadata"]["resourceVersion"] = str(self.version)
            self.objects[plural][key] = after
        self.history.append(Change(self.version, plural, key, before, after))
        self.changed.notify_all()

    def install(self, resource: Resource) -> None:
        """Install a custom resource."""
        with self.changed:
            self.resources[resource.plural] = resource

    def uninstall(self, resource: Resource) -> None:
        """Remove a custom resource with its objects; its watches end."""
        with self.changed:
            del self.resources[resource.plural]
            self.objects.pop(resource.plural, None)
            self.changed.notify_all()

    # --- faults

    def compact(self) -> None:
        """Forget history: watches from an older version, and continue tokens, are gone."""
        with self.changed:
            self.history.clear()
            self.snapshots.clear()
            self.compacted = self.version

    def cut(self) -> None:
        """Cut every connection, wherever it stands."""
        with self.changed:
            self.cuts += 1
            open_now = list(self.connections)
            self.changed.notify_all()
        for connection in open_now:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def fail_next(self, plural: str, *statuses: int, retry_after: str | None = None) -> None:
        """Answer the next requests for ``plural`` with these HTTP statuses."""
        with self.changed:
            self.faults.statuses[plural].extend((status, retry_after) for status in statuses)

    def watches(self, plural: str) -> int:
        """Return how many watches of ``plural`` were asked for."""
        return sum(1 for path, query in list(self.requests) if path.endswith(f"/{plural}") and "watch" in query)

    def lists(self, plural: str) -> int:
        """Return how many list requests (pages) of ``plural`` there were."""
        return sum(1 for path, query in list(self.requests) if path.endswith(f"/{plural}") and "watch" not in query)

    # --- requests

    def discovery(self, path: str) -> Object | None:
        """Return the discovery document at ``path``; None when it is not one."""
        groups: dict[str, dict[str, list[Resource]]] = defaultdict(lambda: defaultdict(list))
        for item in self.resources.values():
            groups[item.group][item.version].append(item)

        def group_of(name: str) -> Object:
            versions = [{"groupVersion": f"{name}/{v}", "version": v} for v in groups[name]]
            return {"name": name, "versions": versions, "preferredVersion": versions[0]}

        parts = path.strip("/").split("/")
        if parts == ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group_of(g) for g in groups if g]}
        if parts[0] == "apis" and len(parts) == 2 and parts[1] in groups:
            return {"kind": "APIGroup", "apiVersion": "v1", **group_of(parts[1])}
        group, version = ("", parts[1]) if parts[0] == "api" and len(parts) == 2 else ("", "")
        if parts[0] == "apis" and len(parts) == 3:
            group, version = parts[1], parts[2]
        if version and version in groups.get(group, {}):
            return {
                "kind": "APIResourceList",
                "groupVersion": f"{group}/{version}" if group else version,
                "resources": [
                    {"name": r.plural, "kind": r.kind, "namespaced": r.namespaced, "verbs": ["get", "list", "watch"]}
                    for r in groups[group][version]
                ],
            }
        return None

    def resolve(self, path: str) -> tuple[Resource, str]:
        """Return the resource and namespace ("" for all) that ``path`` names."""
        for item in list(self.resources.values()):
            if path == f"{item.base}/{item.plural}":
                return item, ""
            found = re.fullmatch(rf"{re.escape(item.base)}/namespaces/([^/]+)/{item.plural}", path)
            if found and item.namespaced:
                return item, found[1]
        raise ApiError(404, "NotFound", "the server could not find the requested resource")

    def list(self, resource: Resource, namespace: str, query: dict[str, str]) -> Object:
        """Answer a list request."""
        match = selector(resource, namespace, query)
        limit = int(query.get("limit", 0))
        with self.changed:
            if "continue" in query:
                version, start = json.loads(base64.urlsafe_b64decode(query["continue"]))
                if (resource.plural, version) not in self.snapshots:
                    message = "The provided continue parameter is too old to display a consistent list result."
                    token = _token(self.version, start)
                    self.snapshots[resource.plural, self.version] = self._sorted(resource)
                    raise ApiError(410, "Expired", message, token)
                items = self.snapshots[resource.plural, version]
            else:
                version, start, items = self.version, ["", ""], self._sorted(resource)
            rest = [item for item in items if _key(item) > start]
            found, token = [], ""
            for position, item in enumerate(rest):
                if match(item):
                    found.append(item)
                # A page is full: a token is given only if something is left.
                if limit and len(found) == limit and position + 1 < len(rest):
                    token = _token(version, _key(item))
                    self.snapshots[resource.plural, version] = items
                    break
            metadata: Object = {"resourceVersion": str(version)}
            if token:
                metadata["continue"] = token
            return {
                "kind": f"{resource.kind}List",
                "apiVersion": resource.api_version,
                "metadata": metadata,
                "items": found,
            }

    def _sorted(self, resource: Resource) -> list[Object]:
        return sorted(self.objects[resource.plural].values(), key=_key)

    def watch(self, resource: Resource, namespace: str, query: dict[str, str]) -> Iterator[bytes]:
        """Return the lines of a watch, any number at a time."""
        match = selector(resource, namespace, query)
        asked = query.get("resourceVersion", "")
        with self.changed:
            if asked in ("", "0"):
                first = [_line("ADDED", item) for item in self._sorted(resource) if match(item)]
                return self._follow(resource, match, query, first, self.version, self.cuts)
            if int(asked) >= self.compacted:
                return self._follow(resource, match, query, [], int(asked), self.cuts)
            error = ApiError(410, "Expired", f"too old resource version: {asked} ({self.compacted})")
            if self.faults.gone_as_status:
                raise error
            return iter([_line("ERROR", error.body)])

    def _follow(
        self,
        resource: Resource,
        match: Callable[[Object], bool],
        query: dict[str, str],
        first: list[bytes],
        seen: int,
        cuts: int,
    ) -> Iterator[bytes]:
        yield from first
        dead = False
        marked = time.monotonic()
        deadline = marked + float(query.get("timeoutSeconds", 1800))
        while time.monotonic() < deadline:
            with self.changed:
                # A watch that lags behind what is forgotten ends, as any does when its resource goes.
                behind = self.compacted > seen
                if behind or self.cuts != cuts or resource.plural not in self.resources or not self.running:
                    return
                lines = [line for change in self._since(seen, resource) if (line := _change(change, match))]
                seen = self.version
                if not lines:
                    self.changed.wait(min(self.bookmark_seconds, max(0.001, deadline - time.monotonic())))
            # A connection that died stays dead: what it swallowed must not be followed by a bookmark.
            dead = dead or self.faults.silent
            if dead:
                continue
            garbage = self.faults.garbage.pop(resource.plural, None)
            if garbage is not None:
                yield garbage
            yield b"".join(lines)
            if query.get("allowWatchBookmarks") in TRUE and time.monotonic() - marked >= self.bookmark_seconds:
                marked = time.monotonic()
                body = {"kind": resource.kind, "apiVersion": resource.api_version}
                yield _line("BOOKMARK", {**body, "metadata": {"resourceVersion": str(seen), "creationTimestamp": None}})

    def _since(self, version: int, resource: Resource) -> list[Change]:
        found = []
        for change in reversed(self.history):
            if change.version <= version:
                break
            if change.plural == resource.plural:
                found.append(change)
        return found[::-1]


def _key(item: Object) -> list[str]:
    return [item["metadata"].get("namespace", ""), item["metadata"]["name"]]


def _token(version: int, start: list[str]) -> str:
    return base64.urlsafe_b64encode(json.dumps([version, start]).encode()).decode()


def _line(kind: str, item: Object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def _change(change: Change, match: Callable[[Object], bool]) -> bytes | None:
    before = change.before is not None and match(change.before)
    after = change.after is not None and match(change.after)
    if after:
        return _line("MODIFIED" if before else "ADDED", change.after or {})
    if not before:
        return None
    gone = copy.deepcopy(change.before or {})
    gone["metadata"]["resourceVersion"] = str(change.version)
    return _line("DELETED", gone)


def selector(resource: Resource, namespace: str, query: dict[str, str]) -> Callable[[Object], bool]:
    """Return whether an object is in ``namespace`` and matches the selectors of ``query``."""
    fields = _field_terms(resource, query.get("fieldSelector", ""))
    labels = _label_terms(query.get("labelSelector", ""))

    def match(item: Object) -> bool:
        if namespace and item["metadata"].get("namespace") != namespace:
            return False
        own = item["metadata"].get("labels") or {}
        return all(test(item) for test in fields) and all(test(own) for test in labels)

    return match


def _field_terms(resource: Resource, text: str) -> list[Callable[[Object], bool]]:
    tests = []
    for term in filter(None, text.split(",")):
        found = re.fullmatch(r"([\w.]+)(==|!=|=)(.*)", term)
        if not found:
            raise ApiError(400, "BadRequest", f"invalid field selector {term!r}")
        path, operator, wanted = found.groups()
        if path not in ("metadata.name", "metadata.namespace", *resource.fields):
            raise ApiError(400, "BadRequest", f'field label not supported: "{path}"')
        tests.append(_field_test(path.split("."), operator == "!=", wanted))
    return tests


def _field_test(path: list[str], negate: bool, wanted: str) -> Callable[[Object], bool]:
    def test(item: Any) -> bool:
        for part in path:
            item = (item or {}).get(part)
        text = str(item).lower() if isinstance(item, bool) else str("" if item is None else item)
        return (text == wanted) != negate

    return test


def _label_terms(text: str) -> list[Callable[[dict[str, str]], bool]]:
    tests: list[Callable[[dict[str, str]], bool]] = []
    for term in filter(None, re.split(r",(?![^(]*\))", text)):
        term = term.strip()
        if found := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", term):
            key, operator, values = found[1], found[2], {v.strip() for v in found[3].split(",")}
            tests.append(lambda own, k=key, o=operator, v=values: (own.get(k) in v) == (o == "in"))
        elif found := re.fullmatch(r"([^=!\s]+)\s*(==|!=|=)\s*(\S*)", term):
            key, equal, value = found[1], found[2] != "!=", found[3]
            tests.append(lambda own, k=key, e=equal, v=value: (own.get(k) == v) == e)
        elif term.startswith("!"):
            tests.append(lambda own, k=term[1:]: k not in own)
        else:
            tests.append(lambda own, k=term: k in own)
    return tests


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Cut connections are the purpose of this server, not errors."""


def _handler(api: FakeKubernetes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with api.changed:
                api.connections.add(self.connection)

        def finish(self) -> None:
            with api.changed:
                api.connections.discard(self.connection)
            with contextlib.suppress(OSError):
                super().finish()

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            api.requests.append((parts.path, query))
            try:
                self._answer(parts.path, query)
            except ApiError as error:
                self._send(error.code, error.body)
            except OSError:
                self.close_connection = True

        def _answer(self, path: str, query: dict[str, str]) -> None:
            if api.faults.unauthorized:
                raise ApiError(401, "Unauthorized", "Unauthorized")
            if path in ("/version", "/healthz"):
                return self._send(200, {"major": "1", "minor": "31"})
            document = api.discovery(path)
            if document is not None:
                return self._send(200, document)
            resource, namespace = api.resolve(path)
            plural = resource.plural
            time.sleep(api.faults.slow.get(plural, 0.0))
            if plural in api.faults.forbidden:
                user = 'User "system:serviceaccount:monitoring:prioscope"'
                where = f'in API group "{resource.group}" at the cluster scope'
                message = f'{plural} is forbidden: {user} cannot list resource "{plural}" {where}'
                raise ApiError(403, "Forbidden", message)
            if api.faults.statuses[plural]:
                status, retry_after = api.faults.statuses[plural].popleft()
                error = ApiError(status, "Fault", f"injected {status}")
                return self._send(status, error.body, retry_after)
            if query.get("watch") not in TRUE:
                return self._send(200, api.list(resource, namespace, query))
            return self._stream(api.watch(resource, namespace, query))

        def _send(self, status: int, body: Object, retry_after: str | None = None) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if retry_after:
                self.send_header("Retry-After", retry_after)
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, lines: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines:
                self._chunk(line)
            self.wfile.write(b"0\r\n\r\n")

        def _chunk(self, data: bytes) -> None:
            # Events arrive in pieces and several at once: the reader must not take a chunk for a line.
            middle = len(data) // 2
            for part in (data[:middle], data[middle:]):
                if part:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

    return Handler
