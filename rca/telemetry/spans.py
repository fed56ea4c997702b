"""Spans -> the service graph and its metrics (R1).

Terms: an *entry* is a span with which a service begins to serve a request: its parent is in another service, or it has
none. A *call* is a parent-child link between two services; its *client span* is the caller's own record of the wait.
Spans of one service below its entry are internal operations, never calls.

A span counts in the time bucket in which it *ended*, as a request counter or histogram would count it. Buckets are
aligned to multiples of the step since 1970 and stamped with their start. A captured bucket in which a service ended no
request gets a request rate of 0 and no latency; a bucket without any span at all gets nothing, since nobody looked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rca.errors import InvalidInputError
from rca.incident import EDGES_SCHEMA, METRICS_SCHEMA, Relation, Source, SourceStatus, conform

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]

#: Attribute that marks a parent link which does not make the parent wait (Jaeger's FOLLOWS_FROM).
REFERENCE_ATTRIBUTE: Final = "prioscope.reference"
FOLLOWS_FROM: Final = "follows_from"

#: What names the callee of a client span whose server was not instrumented, best first.
PEER_ATTRIBUTES: Final = ("peer.service", "db.namespace", "db.name", "db.system.name", "db.system")
_PROTOCOL_ATTRIBUTES: Final = ("rpc.system", "messaging.system", "db.system.name", "db.system")
_HTTP_ATTRIBUTES: Final = ("http.request.method", "http.method", "http.url", "http.target")

_UNKNOWN, _INTERNAL, _SERVER, _CLIENT, _PRODUCER, _CONSUMER = range(6)
_KINDS: Final = {
    "internal": _INTERNAL,
    "server": _SERVER,
    "client": _CLIENT,
    "producer": _PRODUCER,
    "consumer": _CONSUMER,
}
#: Longer spans (three years) are damaged, and would overflow when counted in nanoseconds.
_LONGEST_SECONDS: Final = 1e8
#: A callee's span may exceed the caller's by the clocks' resolution; more means that the caller stopped waiting.
_RESOLUTION_NS: Final = 1_000_000

# Kubernetes generates names from these letters: no vowels, none that look alike.
_SAFE = "[bcdfghjklmnpqrstvwxz2456789]"
_POD_SUFFIX: Final = re.compile(
    rf"(?:-{_SAFE}{{1,10}}-{_SAFE}{{5}}"  # Deployment: ReplicaSet hash, pod
    rf"|-[0-9]{{8,10}}-{_SAFE}{{5}}"  # CronJob: scheduled minute, pod
    rf"|-(?=[a-z]*[0-9]){_SAFE}{{5}}"  # DaemonSet, Job; with a digit, since `-https` would match too
    r"|-[0-9]+)$"  # StatefulSet: ordinal
)


@dataclass(frozen=True, slots=True)
class SpanReport:
    """What the spans held, and what was wrong with them. All are counts but ``max_clock_skew_seconds``."""

    spans: int = 0
    traces: int = 0
    services: int = 0
    requests: int = 0
    calls: int = 0
    #: Repeats of a span id, dropped; and how many of them differed from the one kept (the longest).
    duplicates: int = 0
    conflicting_duplicates: int = 0
    #: Spans whose parent is not in the data, and those of them whose role could not be told.
    orphans: int = 0
    ambiguous_orphans: int = 0
    #: Parent links cut because they closed a cycle.
    cycles: int = 0
    #: Spans without a service, merged into their parent's.
    unnamed: int = 0
    #: Spans dropped because their duration is negative, not a number or absurd.
    invalid_durations: int = 0
    #: Calls whose callee lies outside its caller by the clocks.
    clock_skewed: int = 0
    max_clock_skew_seconds: float = 0.0
    asynchronous: int = 0
    retries: int = 0
    #: Calls whose callee ran on after the caller had stopped waiting.
    abandoned: int = 0
    #: Client spans without a callee's span: attributed to a peer named by an attribute, or to nobody.
    uninstrumented: int = 0
    unmatched_clients: int = 0
    without_status: int = 0

    def detail(self) -> str:
        """One line for a person."""
        parts = [
            f"{self.spans:,} spans of {self.traces:,} traces: {self.services:,} services, "
            f"{self.requests:,} requests, {self.calls:,} calls"
        ]
        skew = f"{self.clock_skewed:,} calls with clock skew (up to {self.max_clock_skew_seconds:.3g} s)"
        for count, words in (
            (self.duplicates, f"{self.duplicates:,} repeated spans dropped ({self.conflicting_duplicates:,} differed)"),
            (self.orphans, f"{self.orphans:,} orphans ({self.ambiguous_orphans:,} not counted as requests)"),
            (self.cycles, f"{self.cycles:,} parent cycles cut"),
            (self.unnamed, f"{self.unnamed:,} spans without a service"),
            (self.invalid_durations, f"{self.invalid_durations:,} spans with an invalid duration dropped"),
            (self.clock_skewed, skew),
            (self.asynchronous, f"{self.asynchronous:,} asynchronous calls"),
            (self.retries, f"{self.retries:,} retries"),
            (self.abandoned, f"{self.abandoned:,} calls outlived their caller"),
            (self.uninstrumented, f"{self.uninstrumented:,} calls to uninstrumented peers"),
            (self.unmatched_clients, f"{self.unmatched_clients:,} client spans without a callee"),
            (self.without_status, f"{self.without_status:,} spans without a status"),
        ):
            if count:
                parts.append(words)
        return "; ".join(parts)

    def source(self, name: str, kind: str, notes: Sequence[str] = ()) -> Source:
        """Describe this import for the bundle's header; *partial* when links or spans were lost."""
        lost = self.orphans or self.cycles or self.unnamed or self.invalid_durations or self.conflicting_duplicates
        return Source(
            name=name,
            kind=kind,
            status=SourceStatus.PARTIAL if lost else SourceStatus.OK,
            detail="; ".join((self.detail(), *notes)),
        )


class ServiceGraph(NamedTuple):
    """Edges (EDGES_SCHEMA), metrics (METRICS_SCHEMA, sorted), and what was noticed on the way."""

    edges: pa.Table
    metrics: pa.Table
    report: SpanReport


def strip_pod_suffix(name: str) -> str:
    """Return the workload of a Kubernetes pod name (``api-6f6cfc45b-d9pnv`` -> ``api``); others stay as they are."""
    return _POD_SUFFIX.sub("", name) or name


@dataclass
class _Spans:
    """The usable spans as arrays of shape (n,). Times are nanoseconds; ``parent`` is a position, -1 for none."""

    start: _Ints
    end: _Ints
    service: _Ints
    operation: _Ints
    kind: _Ints
    error: _Ints  # -1 unknown, 0, 1
    parent: _Ints
    orphan: _Bools
    row: _Ints  # in the table
    names: list[str]

    @property
    def duration(self) -> _Ints:
        return self.end - self.start


@dataclass
class _Calls:
    """Calls as arrays of shape (m,). ``client`` and ``server`` are positions of spans, -1 where there is none."""

    caller: _Ints
    callee: _Ints
    parent: _Ints
    client: _Ints
    server: _Ints
    asynchronous: _Bools


def service_graph(
    spans: pa.Table,
    step_seconds: float = 60.0,
    *,
    service_from_pod: bool = False,
    virtual_peers: bool = True,
) -> ServiceGraph:
    """Derive the service graph and its time series from spans.

    Per service and bucket: ``request_rate``, ``error_ratio``, ``latency_{mean,p50,p90,p95,p99}_seconds`` of its
    entries, and ``self_time_mean_seconds`` (an entry's duration minus the union of its calls to other services).
    Per call (node = caller, peer = callee) and bucket, as the caller saw it: ``request_rate``, ``error_ratio``,
    ``latency_{mean,p90,p95,p99}_seconds``, and ``network_gap_mean_seconds`` (client span minus server span).

    Args:
        spans: table with the columns of SPANS_SCHEMA.
        step_seconds: length of a time bucket.
        service_from_pod: services are pod names; strip the hashes that Kubernetes appends.
        virtual_peers: make a node of a callee that only its callers' attributes name (`PEER_ATTRIBUTES`).

    Raises:
        InvalidInputError: the table is malformed, holds no usable span, or ``step_seconds`` is not positive.
    """
    if not step_seconds > 0 or not np.isfinite(step_seconds):
        raise InvalidInputError(f"step of {step_seconds} s is not positive", cure="use e.g. --step 60s")
    table = conform(spans, "spans")
    counts: dict[str, int | float] = {"spans": table.num_rows}
    tree = _load(table, service_from_pod, counts)
    if not len(tree.start):
        raise InvalidInputError("the input holds no usable span", cure="check that it holds spans with a service name")
    children = np.bincount(tree.parent[tree.parent >= 0], minlength=len(tree.start))
    entry = _entries(tree, counts)
    attributes = table["attributes"].combine_chunks().take(pa.array(tree.row))
    calls, names = _calls(tree, attributes, children, virtual_peers, counts)
    counts["requests"] = int(entry.sum())
    counts["calls"] = len(calls.caller)
    counts["services"] = len(np.unique(tree.service))
    counts["traces"] = pc.count_distinct(table["trace_id"]).as_py()
    counts["without_status"] = int((tree.error < 0).sum())
    clock = _Clock.of(tree.end, step_seconds)
    rows = _Rows(names)
    _service_metrics(tree, entry, calls, clock, rows)
    latency = _call_latency(tree, calls)
    _call_metrics(tree, calls, latency, clock, rows, counts)
    counts["retries"] = _retries(tree, calls)
    edges = _edges(tree, calls, latency, clock, names, _protocols(attributes, calls))
    return ServiceGraph(edges, rows.table(clock), SpanReport(**counts))  # type: ignore[arg-type]


# --- loading -------------------------------------------------------------------------------------------------------


def _load(table: pa.Table, service_from_pod: bool, counts: dict[str, int | float]) -> _Spans:
    table = table.combine_chunks()
    seconds = table["duration_seconds"].to_numpy()
    start = table["start"].cast(pa.int64()).to_numpy()
    valid = np.isfinite(seconds) & (seconds >= 0) & (seconds <= _LONGEST_SECONDS)
    duration = np.round(np.where(valid, seconds, 0.0) * 1e9).astype(np.int64)
    names, service = _services(table["service"], service_from_pod)
    operation = _codes(table["operation"])[1]
    kinds, kind_codes = _codes(table["kind"])
    kind_of = np.array([_KINDS.get(name.lower(), _UNKNOWN) for name in kinds] + [_UNKNOWN], np.int64)
    kind = kind_of[kind_codes]
    error = pc.fill_null(table["error"].cast(pa.int8()), -1).to_numpy().astype(np.int64)
    keys = _keys(table["trace_id"], table["span_id"])
    distinct = pc.unique(keys)
    key = pc.index_in(keys, value_set=distinct).to_numpy(zero_copy_only=False).astype(np.int64)
    parent_ids = table["parent_id"].combine_chunks()
    parent_ids = pc.if_else(pc.equal(parent_ids, ""), pa.scalar(None, pa.string()), parent_ids)
    has_parent = parent_ids.is_valid().to_numpy(zero_copy_only=False)
    parent_key = pc.index_in(_keys(table["trace_id"], parent_ids), value_set=distinct)
    parent_key = pc.fill_null(parent_key.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    parent_key = np.where(has_parent, parent_key, -1)

    # Zipkin's model: client and server share one span id. They are two spans, the server's below the client's.
    serving = (kind == _SERVER) | (kind == _CONSUMER)
    calling = (kind == _CLIENT) | (kind == _PRODUCER)
    total = len(distinct)
    has_server, has_client = np.zeros(total, bool), np.zeros(total, bool)
    has_server[key[serving & valid]] = True
    has_client[key[calling & valid]] = True
    shared = has_server & has_client
    side = (serving & shared[key]).astype(np.int64)
    member = key * 2 + side
    order = np.lexsort((start, -duration, ~valid, member))
    order = order[valid[order]]
    first = np.ones(len(order), bool)
    first[1:] = member[order][1:] != member[order][:-1]
    kept_at = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))] if len(order) else order
    repeats = order[~first]
    originals = kept_at[~first]
    differs = np.zeros(len(repeats), bool)
    for column in (start, duration, service, operation, kind, error, parent_key):
        differs |= column[repeats] != column[originals]
    counts["duplicates"] = len(repeats)
    counts["conflicting_duplicates"] = int(differs.sum())
    counts["invalid_durations"] = int((~valid).sum())
    rows = np.sort(order[first])

    position = np.full(total * 2, -1, np.int64)
    position[member[rows]] = np.arange(len(rows))
    parent = np.full(len(rows), -1, np.int64)
    linked = parent_key[rows] >= 0
    mine = service[rows]
    plain, server = position[parent_key[rows] * 2], position[parent_key[rows] * 2 + 1]
    # Of a shared id, the child belongs to the half in its own service.
    to_plain = (server < 0) | ((plain >= 0) & (mine == mine[plain]) & (mine != mine[server]))
    parent[linked] = np.where(to_plain, plain, server)[linked]
    below = side[rows] == 1
    parent[below] = position[key[rows][below] * 2]
    orphan = has_parent[rows] & (parent < 0)

    spans = _Spans(
        start=start[rows],
        end=(start + duration)[rows],
        service=mine,
        operation=operation[rows],
        kind=kind[rows],
        error=error[rows],
        parent=parent,
        orphan=orphan,
        row=rows,
        names=names,
    )
    spans.parent, counts["cycles"] = _cut_cycles(spans.parent, spans.start)
    counts["orphans"] = int(orphan.sum())
    return _merge_unnamed(spans, counts)


def _keys(trace: pa.ChunkedArray, span: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(span, pa.ChunkedArray):
        span = span.combine_chunks()
    return pc.binary_join_element_wise(trace.combine_chunks(), span, "\x1f")


def _codes(column: pa.ChunkedArray) -> tuple[list[str], _Ints]:
    """Dictionary-encode; null is -1."""
    encoded = column.combine_chunks().dictionary_encode()
    codes = pc.fill_null(encoded.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    return encoded.dictionary.to_pylist(), codes


def _services(column: pa.ChunkedArray, from_pod: bool) -> tuple[list[str], _Ints]:
    """Return the sorted service names, and each span's position among them (-1 for an empty name)."""
    raw, codes = _codes(column)
    cleaned = [strip_pod_suffix(name.strip()) if from_pod else name.strip() for name in raw]
    names = sorted(set(cleaned) - {""})
    position = {name: at for at, name in enumerate(names)}
    return names, np.array([position.get(name, -1) for name in cleaned] + [-1], np.int64)[codes]


def _cut_cycles(parent: _Ints, start: _Ints) -> tuple[_Ints, int]:
    """Make the earliest span of every cycle of parents a root; return the new parents and how many were cut."""
    count = len(parent)
    jump = np.append(np.where(parent < 0, count, parent), count)
    for _ in range(max(count, 1).bit_length()):
        jump = jump[jump]
    # After at least `count` steps, whoever has not passed a root is on a cycle, and every span of one is reached.
    on_cycle = np.unique(jump[jump < count])
    if not len(on_cycle):
        return parent, 0
    parent = parent.copy()
    waiting = set(on_cycle.tolist())
    cuts = 0
    while waiting:
        at = first = waiting.pop()
        cycle = [first]
        while (at := int(parent[at])) != first:
            waiting.discard(at)
            cycle.append(at)
        parent[min(cycle, key=lambda span: (start[span], span))] = -1
        cuts += 1
    return parent, cuts


def _merge_unnamed(spans: _Spans, counts: dict[str, int | float]) -> _Spans:
    """Drop spans without a service; their children hang on their nearest named ancestor."""
    unnamed = spans.service < 0
    counts["unnamed"] = int(unnamed.sum())
    if not unnamed.any():
        return spans
    parent, orphan = spans.parent.copy(), spans.orphan.copy()
    while (through := (parent >= 0) & unnamed[parent]).any():
        orphan[through] |= orphan[parent[through]]
        parent[through] = parent[parent[through]]
    keep = np.flatnonzero(~unnamed)
    moved = np.full(len(unnamed) + 1, -1, np.int64)
    moved[keep] = np.arange(len(keep))
    return _Spans(
        start=spans.start[keep],
        end=spans.end[keep],
        service=spans.service[keep],
        operation=spans.operation[keep],
        kind=spans.kind[keep],
        error=spans.error[keep],
        parent=moved[parent[keep]],
        orphan=orphan[keep],
        row=spans.row[keep],
        names=spans.names,
    )


# --- requests and calls --------------------------------------------------------------------------------------------


def _is_client(kind: _Ints) -> _Bools:
    return np.asarray((kind == _CLIENT) | (kind == _PRODUCER))


def _entries(tree: _Spans, counts: dict[str, int | float]) -> _Bools:
    """Which spans are requests to their service."""
    client = _is_client(tree.kind)
    serving = (tree.kind == _SERVER) | (tree.kind == _CONSUMER)
    rooted = tree.parent < 0
    from_other = ~rooted & (tree.service != tree.service[tree.parent])
    entry = ~client & (from_other | (rooted & ~tree.orphan) | (tree.orphan & serving))
    # The role of an orphan without a kind is known if the same operation serves requests elsewhere in the data.
    unsure = tree.orphan & ~client & ~serving
    if unsure.any():
        width = int(tree.operation.max()) + 2
        pair = tree.service * width + tree.operation + 1
        sure = unsure & (tree.operation >= 0) & np.isin(pair, np.unique(pair[entry & ~tree.orphan]))
        entry |= sure
        counts["ambiguous_orphans"] = int((unsure & ~sure).sum())
    # A service that only calls (a browser, a load generator) is its own user: what it waits for is its latency.
    serves = np.zeros(len(tree.names), bool)
    serves[tree.service[entry]] = True
    return np.asarray(entry | (client & rooted & ~tree.orphan & ~serves[tree.service]))


def _calls(
    tree: _Spans,
    attributes: pa.Array,
    children: _Ints,
    virtual_peers: bool,
    counts: dict[str, int | float],
) -> tuple[_Calls, list[str]]:
    """Find the calls, and the names of services and peers together."""
    service, parent, kind = tree.service, tree.parent, tree.kind
    linked = np.flatnonzero(parent >= 0)
    child = linked[service[linked] != service[parent[linked]]]
    above = parent[child]
    crossing = np.bincount(above, minlength=len(service))
    # Without a kind, a span inside a service that does nothing but one call is that call's client span.
    inside = (parent >= 0) & (service == service[parent])
    only_calls = (kind == _UNKNOWN) & (children == 1) & inside
    is_client = (_is_client(kind) | only_calls) & (crossing == 1)
    explicit = (kind[above] == _CLIENT) & (kind[child] == _SERVER)
    asynchronous = (
        (kind[child] == _CONSUMER)
        | (kind[above] == _PRODUCER)
        | ((tree.start[child] >= tree.end[above]) & (tree.duration[above] > 0) & ~explicit)
        | _follows(attributes)[child]
    )
    before = tree.start[above] - tree.start[child]
    after = np.where(
        explicit & (tree.duration[child] <= tree.duration[above]), tree.end[child] - tree.end[above], np.int64(0)
    )
    skew = np.maximum(before, after)
    counts["clock_skewed"] = int((skew > 0).sum())
    counts["max_clock_skew_seconds"] = float(max(skew.max(initial=0), 0)) / 1e9
    counts["asynchronous"] = int(asynchronous.sum())

    calls = _Calls(
        caller=service[above],
        callee=service[child],
        parent=above,
        client=np.where(is_client[above], above, -1),
        server=child,
        asynchronous=np.asarray(asynchronous),
    )
    names = list(tree.names)
    # An outer client span (an SDK's) around an inner one (HTTP) is the same call.
    wraps = np.zeros(len(service), bool)
    wraps[parent[linked][_is_client(kind[linked])]] = True
    open_ended = np.flatnonzero(_is_client(kind) & (crossing == 0) & ~wraps)
    peers = _attribute(attributes.take(pa.array(open_ended)), PEER_ATTRIBUTES) if virtual_peers else None
    if peers is not None and len(open_ended):
        peer_names, peer_codes = _codes(pa.chunked_array([peers]))
        position = {name: at for at, name in enumerate(names)}
        for name in sorted(set(peer_names) - set(names)):
            position[name] = len(names)
            names.append(name)
        callee = np.array([position[name] for name in peer_names] + [-1], np.int64)[peer_codes]
        named = (callee >= 0) & (callee != service[open_ended])
        span = open_ended[named]
        counts["uninstrumented"] = len(span)
        calls = _Calls(
            caller=np.concatenate((calls.caller, service[span])),
            callee=np.concatenate((calls.callee, callee[named])),
            parent=np.concatenate((calls.parent, span)),
            client=np.concatenate((calls.client, span)),
            server=np.concatenate((calls.server, np.full(len(span), -1, np.int64))),
            asynchronous=np.concatenate((calls.asynchronous, kind[span] == _PRODUCER)),
        )
        counts["unmatched_clients"] = len(open_ended) - len(span)
    else:
        counts["unmatched_clients"] = len(open_ended)
    return calls, names


def _attribute(attributes: pa.Array, keys: Sequence[str]) -> pa.Array:
    """Return the first non-empty of ``keys`` for each span, null where there is none."""
    found = pa.nulls(len(attributes), pa.string())
    if attributes.null_count == len(attributes):
        return found
    for key in keys:
        value = pc.map_lookup(attributes, pa.scalar(key), "first")
        found = pc.coalesce(found, pc.if_else(pc.equal(value, ""), pa.scalar(None, pa.string()), value))
    return found


def _follows(attributes: pa.Array) -> _Bools:
    marked = pc.equal(_attribute(attributes, (REFERENCE_ATTRIBUTE,)), FOLLOWS_FROM)
    return np.asarray(pc.fill_null(marked, False).to_numpy(zero_copy_only=False))


def _protocols(attributes: pa.Array, calls: _Calls) -> pa.Array:
    """Return the protocol of each call, from its client span or else its server span; null if unknown."""
    http = pc.if_else(_attribute(attributes, _HTTP_ATTRIBUTES).is_valid(), "http", pa.scalar(None, pa.string()))
    protocol = pc.coalesce(_attribute(attributes, _PROTOCOL_ATTRIBUTES), http)
    sides = [protocol.take(pa.array(side, mask=side < 0)) for side in (calls.client, calls.server)]
    return pc.coalesce(*sides)


def _call_latency(tree: _Spans, calls: _Calls) -> _Floats:
    """Seconds that the caller waited, NaN where nobody measured it."""
    server_side = (calls.server >= 0) & ~calls.asynchronous & ~_is_client(tree.kind[calls.server])
    own = np.where(server_side, tree.duration[calls.server] / 1e9, np.nan)
    return np.where(calls.client >= 0, tree.duration[calls.client] / 1e9, own)


def _retries(tree: _Spans, calls: _Calls) -> int:
    """Count calls that repeat a failed one: same span above, same callee, begun after the failure."""
    if not len(calls.caller):
        return 0
    span = np.where(calls.client >= 0, calls.client, calls.server)
    # Attempts are siblings: below the client span's parent, or below the calling span itself.
    context = np.where(calls.client >= 0, tree.parent[calls.client], calls.parent)
    order = np.lexsort((tree.start[span], calls.callee, context))
    before, after = order[:-1], order[1:]
    same = (context[before] == context[after]) & (calls.callee[before] == calls.callee[after]) & (context[after] >= 0)
    same &= tree.operation[span[before]] == tree.operation[span[after]]
    failed = (
        np.maximum(tree.error[span[before]], np.where(calls.server >= 0, tree.error[calls.server], -1)[before]) == 1
    )
    return int((same & failed & (tree.end[span[before]] <= tree.start[span[after]])).sum())


# --- time series ---------------------------------------------------------------------------------------------------


@dataclass
class _Clock:
    """Time buckets: ``ids`` of those captured, and the seconds of each that the data covers (NaN: too few)."""

    step_ns: int
    ids: _Ints
    covered: _Floats

    @classmethod
    def of(cls, end: _Ints, step_seconds: float) -> _Clock:
        """Find the buckets; the first and the last may be cut by the capture.

        With at least one bucket between them, they count for the part that lies within the capture, and not at all
        (no request rate) when that is less than half.
        """
        step = max(round(step_seconds * 1e9), 1)
        ids = np.unique(end // step)
        covered = np.full(len(ids), step / 1e9)
        if len(ids) > 2:
            parts = ((ids[0] + 1) * step - int(end.min()), int(end.max()) + 1 - ids[-1] * step)
            for at, part in zip((0, -1), parts, strict=True):
                covered[at] = part / 1e9 if part * 2 >= step else np.nan
        return cls(step, ids, covered)

    def bucket(self, end: _Ints) -> _Ints:
        return np.asarray(np.searchsorted(self.ids, end // self.step_ns))


class _Rows:
    """Collects samples, column by column."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._metrics: list[str] = []
        self._parts: list[tuple[_Ints, _Ints, _Ints, _Ints, _Floats]] = []

    def add(self, metric: str, node: _Ints, peer: _Ints | None, bucket: _Ints, value: _Floats) -> None:
        known = ~np.isnan(value)
        if metric not in self._metrics:
            self._metrics.append(metric)
        code = np.full(int(known.sum()), self._metrics.index(metric), np.int64)
        peers = np.full(len(code), -1, np.int64) if peer is None else peer[known]
        self._parts.append((node[known], peers, code, bucket[known], value[known]))

    def table(self, clock: _Clock) -> pa.Table:
        if not self._parts:
            return METRICS_SCHEMA.empty_table()
        node, peer, metric, bucket, value = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        rank = np.argsort(np.argsort(self._names))
        metric_rank = np.argsort(np.argsort(self._metrics))
        peer_rank = np.where(peer < 0, -1, rank[peer])
        order = np.lexsort((bucket, metric_rank[metric], peer_rank, rank[node]))
        times = clock.ids[bucket[order]] * clock.step_ns // 1000
        return pa.table(
            {
                "timestamp": pa.array(times).cast(METRICS_SCHEMA.field("timestamp").type),
                "node": _decode(self._names, node[order]),
                "peer": _decode(self._names, peer[order]),
                "metric": _decode(self._metrics, metric[order]),
                "value": pa.array(value[order]),
            },
            schema=METRICS_SCHEMA,
        )


def _decode(names: Sequence[str], codes: _Ints) -> pa.Array:
    indices = pa.array(codes, mask=codes < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names, pa.string())).cast(pa.string())


def _group_means(group: _Ints, values: _Floats, count: int) -> _Floats:
    """Mean of the known values of each group, shape (count,); NaN for a group without any."""
    known = ~np.isnan(values)
    sizes = np.bincount(group[known], minlength=count)
    sums = np.bincount(group[known], weights=values[known], minlength=count)
    means: _Floats = np.full(count, np.nan)
    np.divide(sums, sizes, out=means, where=sizes > 0)
    return means


def _group_quantiles(group: _Ints, values: _Floats, count: int, quantiles: Sequence[float]) -> list[_Floats]:
    """Quantiles (linear between order statistics) of the known values of each group, NaN for an empty one."""
    known = ~np.isnan(values)
    group, values = group[known], values[known]
    order = np.lexsort((values, group))
    values = values[order]
    sizes = np.bincount(group, minlength=count)
    first = np.cumsum(sizes) - sizes
    filled = np.flatnonzero(sizes)
    found = []
    for quantile in quantiles:
        result = np.full(count, np.nan)
        at = quantile * (sizes[filled] - 1)
        low = np.floor(at).astype(np.int64)
        high = np.minimum(low + 1, sizes[filled] - 1)
        lower, upper = values[first[filled] + low], values[first[filled] + high]
        result[filled] = lower + (upper - lower) * (at - low)
        found.append(result)
    return found


def _rates(owner: _Ints, bucket: _Ints, owners: int, clock: _Clock) -> tuple[_Ints, _Ints, _Floats]:
    """Requests per second of every owner in every captured bucket, zeros included."""
    width = len(clock.ids)
    counts = np.bincount(owner * width + bucket, minlength=owners * width).reshape(owners, width)
    rates = counts / clock.covered
    return np.repeat(np.arange(owners), width), np.tile(np.arange(width), owners), rates.ravel()


def _failures(error: _Ints) -> _Floats:
    return np.where(error < 0, np.nan, error.astype(np.float64))


def _service_metrics(tree: _Spans, entry: _Bools, calls: _Calls, clock: _Clock, rows: _Rows) -> None:
    span = np.flatnonzero(entry)
    if not len(span):
        return
    services, owner = np.unique(tree.service[span], return_inverse=True)
    bucket = clock.bucket(tree.end[span])
    who, when, rate = _rates(owner, bucket, len(services), clock)
    rows.add("request_rate", services[who], None, when, rate)
    width = len(clock.ids)
    groups, group = np.unique(owner * width + bucket, return_inverse=True)
    node, at, count = services[groups // width], groups % width, len(groups)
    seconds = tree.duration[span] / 1e9
    rows.add("error_ratio", node, None, at, _group_means(group, _failures(tree.error[span]), count))
    rows.add("latency_mean_seconds", node, None, at, _group_means(group, seconds, count))
    names = ("p50", "p90", "p95", "p99")
    for name, values in zip(names, _group_quantiles(group, seconds, count, (0.5, 0.9, 0.95, 0.99)), strict=True):
        rows.add(f"latency_{name}_seconds", node, None, at, values)
    waiting = _waiting_seconds(tree, calls)[span]
    rows.add("self_time_mean_seconds", node, None, at, _group_means(group, seconds - waiting, count))


def _waiting_seconds(tree: _Spans, calls: _Calls) -> _Floats:
    """Seconds in which each top span of a service had a call under way: the union of the calls' intervals."""
    waiting = np.zeros(len(tree.start))
    top = np.where(
        (tree.parent >= 0) & (tree.service == tree.service[tree.parent]), tree.parent, np.arange(len(waiting))
    )
    while (higher := top[top]).tobytes() != top.tobytes():
        top = higher
    # The client span tells when the caller waited. Without one, the callee's span does, unless nobody waited for it.
    use = np.flatnonzero((calls.client >= 0) | ~calls.asynchronous)
    if not len(use):
        return waiting
    has_client = calls.client[use] >= 0
    span = np.where(has_client, calls.client[use], calls.server[use])
    start, end, above = tree.start[span], tree.end[span], calls.parent[use]
    # By the callee's clock it began before its caller did: put it in the middle of the caller.
    shift = np.where(
        ~has_client & (start < tree.start[above]),
        tree.start[above] + np.maximum(tree.duration[above] - (end - start), 0) // 2 - start,
        np.int64(0),
    )
    owner = top[above]
    start = np.clip(start + shift, tree.start[owner], tree.end[owner])
    end = np.clip(end + shift, tree.start[owner], tree.end[owner])
    order = np.lexsort((end, start, owner))
    owner, start, end = owner[order], start[order], end[order]
    # Running maximum of `end` within each owner. Ranks instead of times keep (owner, end) within 64 bits.
    by_end = np.argsort(end, kind="stable")
    rank = np.empty(len(end), np.int64)
    rank[by_end] = np.arange(len(end))
    group = np.cumsum(np.append(0, owner[1:] != owner[:-1]))
    running = np.maximum.accumulate(group * len(end) + rank) - group * len(end)
    reached = end[by_end[running]]
    covered = start.copy()
    inner = group[1:] == group[:-1]
    covered[1:][inner] = np.maximum(start[1:], reached[:-1])[inner]
    np.add.at(waiting, owner, np.maximum(end - covered, 0) / 1e9)
    return waiting


def _call_metrics(
    tree: _Spans, calls: _Calls, latency: _Floats, clock: _Clock, rows: _Rows, counts: dict[str, int | float]
) -> None:
    if not len(calls.caller):
        return
    pairs, owner = _pairs(calls)
    span = np.where(calls.client >= 0, calls.client, calls.server)
    bucket = clock.bucket(tree.end[span])
    who, when, rate = _rates(owner, bucket, len(pairs), clock)
    rows.add("request_rate", pairs[who, 0], pairs[who, 1], when, rate)
    width = len(clock.ids)
    groups, group = np.unique(owner * width + bucket, return_inverse=True)
    pair, at, count = pairs[groups // width], groups % width, len(groups)
    caller, callee = pair[:, 0], pair[:, 1]
    rows.add("error_ratio", caller, callee, at, _group_means(group, _failures(_call_errors(tree, calls)), count))
    rows.add("latency_mean_seconds", caller, callee, at, _group_means(group, latency, count))
    names = ("p90", "p95", "p99")
    for name, values in zip(names, _group_quantiles(group, latency, count, (0.9, 0.95, 0.99)), strict=True):
        rows.add(f"latency_{name}_seconds", caller, callee, at, values)
    both = (calls.client >= 0) & (calls.server >= 0) & ~calls.asynchronous & ~_is_client(tree.kind[calls.server])
    gap = np.where(both, tree.duration[calls.client] - tree.duration[calls.server], 0)
    outlived = both & (gap < -_RESOLUTION_NS)
    counts["abandoned"] = int(outlived.sum())
    seconds = np.where(both & ~outlived, np.maximum(gap, 0) / 1e9, np.nan)
    rows.add("network_gap_mean_seconds", caller, callee, at, _group_means(group, seconds, count))


def _pairs(calls: _Calls) -> tuple[_Ints, _Ints]:
    """Return the distinct (caller, callee), shape (edges, 2), and the edge of each call."""
    base = int(max(calls.caller.max(), calls.callee.max())) + 1
    keys, owner = np.unique(calls.caller * base + calls.callee, return_inverse=True)
    return np.stack((keys // base, keys % base), axis=1), owner


def _call_errors(tree: _Spans, calls: _Calls) -> _Ints:
    """Whether each call failed in its caller's view, or else in its callee's; -1 if neither says."""
    server = np.where(calls.server >= 0, tree.error[calls.server], -1)
    client = np.where(calls.client >= 0, tree.error[calls.client], -1)
    return np.where(client >= 0, client, server)


def _edges(
    tree: _Spans, calls: _Calls, latency: _Floats, clock: _Clock, names: list[str], protocol: pa.Array
) -> pa.Table:
    if not len(calls.caller):
        return EDGES_SCHEMA.empty_table()
    pairs, owner = _pairs(calls)
    count = len(pairs)
    sizes = np.bincount(owner, minlength=count)
    later = np.bincount(owner, weights=calls.asynchronous, minlength=count)
    # Partly covered first and last buckets are a small error in a rate over the whole capture.
    seconds = np.nansum(np.where(np.isnan(clock.covered), clock.step_ns / 1e9, clock.covered))
    kinds, kind_codes = _codes(pa.chunked_array([protocol]))
    votes = np.zeros((count, len(kinds)), np.int64)
    np.add.at(votes, (owner[kind_codes >= 0], kind_codes[kind_codes >= 0]), 1)
    winner = np.where(votes.any(axis=1), votes.argmax(axis=1), -1) if kinds else np.full(count, -1, np.int64)
    table = pa.table(
        {
            "caller": _decode(names, pairs[:, 0]),
            "callee": _decode(names, pairs[:, 1]),
            "relation": pa.array([Relation.CALLS.value] * count),
            "protocol": _decode(kinds, winner) if kinds else pa.nulls(count, pa.string()),
            "asynchronous": pa.array(later * 2 > sizes),
            "call_rate": pa.array(sizes / seconds),
            "error_ratio": pa.array(_group_means(owner, _failures(_call_errors(tree, calls)), count), from_pandas=True),
            "latency_seconds": pa.array(_group_means(owner, latency, count), from_pandas=True),
            "timeout_seconds": pa.nulls(count, pa.float64()),
        },
        schema=EDGES_SCHEMA,
    )
    return table.sort_by([("caller", "ascending"), ("callee", "ascending")])


__all__ = ["PEER_ATTRIBUTES", "ServiceGraph", "SpanReport", "service_graph", "strip_pod_suffix"]
