"""The incident bundle: one self-contained directory or zip with everything an explanation needs.

A bundle is the contract between capture and analysis (docs/architecture.md, decision 1). It can be attached to a
ticket, replayed in a test and explained identically twice. Layout::

    incident.json       identity, windows, victim, labels, sources and what each failed to give
    metrics.parquet     timestamp, node, peer, metric, value     (peer: set for a caller's view of one callee)
    edges.parquet       caller, callee, relation, protocol, call_rate, error_ratio, latency_seconds, ...
    nodes.parquet       node, kind, attributes                   (optional; default kind is `service`)
    workloads.parquet   the scheduler's view                     (optional)
    devices.parquet     the GPUs' view                           (optional)
    spans.parquet       raw spans                                (optional)
    truth.json          the injected cause, for simulated incidents and benchmarks; never read by `explain`

Times are UTC; durations are seconds; ratios are in [0, 1].
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rca import signals
from rca.columns import floats
from rca.errors import InvalidInputError, NotFoundError

_T = TypeVar("_T")

SCHEMA_VERSION: Final = 1

#: Limits on what a bundle from elsewhere may unpack to (zip bombs).
MAX_MEMBER_BYTES: Final = 2 * 1024**3
MAX_COMPRESSION_RATIO: Final = 400
MAX_ROWS: Final = 200_000_000


class NodeKind(StrEnum):
    """What a node of the call graph is."""

    SERVICE = "service"
    WORKLOAD = "workload"
    GPU = "gpu"
    HOST = "host"
    QUEUE = "queue"


class Relation(StrEnum):
    """Why `caller` depends on `callee`. The effect of a fault at the callee reaches the caller."""

    CALLS = "calls"
    RUNS_ON = "runs_on"
    SHARES_DEVICE = "shares_device"
    QUEUED_BEHIND = "queued_behind"


class SourceStatus(StrEnum):
    """How far a source answered."""

    OK = "ok"
    PARTIAL = "partial"
    FAILED = "failed"
    ABSENT = "absent"


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A half-open interval of time ``[start, end)``."""

    start: datetime
    end: datetime

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return (self.end - self.start).total_seconds()

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("end", self.end)):
            if value.tzinfo is None:
                raise ValueError(f"{name} has no time zone: write it as RFC 3339, e.g. 2026-01-31T03:00:00Z")
        if self.end <= self.start:
            raise ValueError("end is not after start")


class Victim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The node and metric that the incident is about."""

    node: str
    metric: str


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A system that was asked for data, and what it failed to give."""

    name: str
    kind: str
    status: SourceStatus = SourceStatus.OK
    detail: str = ""
    queries: tuple[str, ...] = ()


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Content of ``incident.json``."""

    id: str
    window: Window
    baseline: Window
    victim: Victim
    schema_version: int = SCHEMA_VERSION
    title: str = ""
    onset: datetime | None = None
    labels: dict[str, str] = {}
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        if self.onset is not None and self.onset.tzinfo is None:
            raise ValueError("onset has no time zone: write it as RFC 3339, e.g. 2026-01-31T03:00:00Z")


class Truth(msgspec.Struct, frozen=True, omit_defaults=True):
    """What really happened (simulation, benchmark). Kept apart so that an explanation cannot peek."""

    causes: tuple[str, ...]
    kind: str = ""
    path: tuple[tuple[str, str], ...] = ()
    counterfactual: float | None = None
    notes: dict[str, str] = {}


_TIME: Final = pa.timestamp("us", tz="UTC")

METRICS_SCHEMA: Final = pa.schema(
    [
        pa.field("timestamp", _TIME, nullable=False),
        pa.field("node", pa.string(), nullable=False),
        pa.field("peer", pa.string()),
        pa.field("metric", pa.string(), nullable=False),
        pa.field("value", pa.float64()),
    ]
)
EDGES_SCHEMA: Final = pa.schema(
    [
        pa.field("caller", pa.string(), nullable=False),
        pa.field("callee", pa.string(), nullable=False),
        pa.field("relation", pa.string(), nullable=False),
        pa.field("protocol", pa.string()),
        pa.field("asynchronous", pa.bool_()),
        pa.field("call_rate", pa.float64()),
        pa.field("error_ratio", pa.float64()),
        pa.field("latency_seconds", pa.float64()),
        pa.field("timeout_seconds", pa.float64()),
    ]
)
NODES_SCHEMA: Final = pa.schema(
    [
        pa.field("node", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("attributes", pa.map_(pa.string(), pa.string())),
    ]
)
WORKLOADS_SCHEMA: Final = pa.schema(
    [
        pa.field("workload", pa.string(), nullable=False),
        pa.field("service", pa.string()),
        pa.field("queue", pa.string()),
        pa.field("tenant", pa.string()),
        pa.field("priority_class", pa.string()),
        pa.field("priority_rank", pa.int32()),
        pa.field("state", pa.string(), nullable=False),
        pa.field("submitted", _TIME),
        pa.field("started", _TIME),
        pa.field("ended", _TIME),
        pa.field("gpus", pa.float64()),
        pa.field("preemptible", pa.bool_()),
        pa.field("host", pa.string()),
        pa.field("devices", pa.list_(pa.string())),
    ]
)
DEVICES_SCHEMA: Final = pa.schema(
    [
        pa.field("device", pa.string(), nullable=False),
        pa.field("host", pa.string()),
        pa.field("model", pa.string()),
        pa.field("memory_total_bytes", pa.float64()),
        pa.field("memory_free_bytes", pa.float64()),
        pa.field("largest_free_block_bytes", pa.float64()),
    ]
)
SPANS_SCHEMA: Final = pa.schema(
    [
        pa.field("trace_id", pa.string(), nullable=False),
        pa.field("span_id", pa.string(), nullable=False),
        pa.field("parent_id", pa.string()),
        pa.field("service", pa.string(), nullable=False),
        pa.field("operation", pa.string()),
        pa.field("kind", pa.string()),
        pa.field("start", pa.timestamp("ns", tz="UTC"), nullable=False),
        pa.field("duration_seconds", pa.float64(), nullable=False),
        pa.field("error", pa.bool_()),
        pa.field("attributes", pa.map_(pa.string(), pa.string())),
    ]
)

SCHEMAS: Final[Mapping[str, pa.Schema]] = {
    "metrics": METRICS_SCHEMA,
    "edges": EDGES_SCHEMA,
    "nodes": NODES_SCHEMA,
    "workloads": WORKLOADS_SCHEMA,
    "devices": DEVICES_SCHEMA,
    "spans": SPANS_SCHEMA,
}
REQUIRED_TABLES: Final = ("metrics", "edges")
_MEMBERS: Final = ("incident.json", *(f"{name}.parquet" for name in SCHEMAS), "truth.json")
_LATEST_MICROS: Final = int(datetime(2261, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000


def _empty(name: str) -> pa.Table:
    # Not `Schema.empty_table`: that imports pandas where it is installed, which takes longer than the analysis.
    return pa.Table.from_batches([], schema=SCHEMAS[name])


@dataclass(frozen=True, eq=False)
class Incident:
    """An incident in memory: the header and its tables, each with the schema of `SCHEMAS`.

    Build one with `Incident.create`, which validates; `read` and `write` move it to and from disk.
    """

    header: Header
    metrics: pa.Table
    edges: pa.Table
    nodes: pa.Table = field(default_factory=lambda: _empty("nodes"))
    workloads: pa.Table = field(default_factory=lambda: _empty("workloads"))
    devices: pa.Table = field(default_factory=lambda: _empty("devices"))
    spans: pa.Table = field(default_factory=lambda: _empty("spans"))
    truth: Truth | None = None

    @classmethod
    def create(cls, header: Header, *, truth: Truth | None = None, **tables: pa.Table) -> Incident:
        """Build and validate an incident; missing columns that may be null are filled with nulls.

        Raises:
            InvalidInputError: a table has the wrong columns or types, or the content is inconsistent.
        """
        unknown = set(tables) - set(SCHEMAS)
        if unknown:
            raise InvalidInputError(f"unknown table {sorted(unknown)[0]!r}", cure=f"use one of {', '.join(SCHEMAS)}")
        cast = {name: conform(table, name) for name, table in tables.items()}
        for name in REQUIRED_TABLES:
            cast.setdefault(name, _empty(name))
        incident = cls(header=header, truth=truth, **cast)
        problems = incident.problems()
        if problems:
            raise InvalidInputError(problems[0], cure="run `rca incident validate` to list every problem")
        return incident

    @property
    def tables(self) -> dict[str, pa.Table]:
        """All tables by name."""
        return {name: getattr(self, name) for name in SCHEMAS}

    def equals(self, other: Incident) -> bool:
        """Whether both hold the same header, truth and rows."""
        return (
            self.header == other.header
            and self.truth == other.truth
            and all(table.equals(other.tables[name]) for name, table in self.tables.items())
        )

    def replace(self, **changes: Any) -> Incident:
        """Return a validated copy with some fields changed."""
        changed = replace(self, **changes)
        return Incident.create(changed.header, truth=changed.truth, **changed.tables)

    def problems(self) -> list[str]:
        """Everything that makes the content unusable, most important first; empty when valid."""
        found: list[str] = []
        header = self.header
        if not header.id or not header.id.isprintable() or "/" in header.id:
            found.append(f"incident id {header.id!r} is empty or holds unprintable characters or '/'")
        if header.baseline.start < header.window.end and header.window.start < header.baseline.end:
            found.append("baseline window overlaps the incident window")
        # A symptom may begin before the window that was cut out around its alert, but not a window's length before.
        window = header.window
        earliest = window.start - (window.end - window.start)
        if header.onset is not None and not earliest <= header.onset < window.end:
            found.append(f"the onset {header.onset.isoformat()} lies outside the incident window")
        for name in ("nodes", "workloads", "devices"):
            table = self.tables[name]
            key = table.column(0)
            if len(key) != pc.count_distinct(key).as_py():
                counts = pc.value_counts(key)
                repeated = next(item["values"] for item in counts.to_pylist() if item["counts"] > 1)
                found.append(f"{name} table lists {table.schema.names[0]} {repeated!r} more than once")
        for table_name, column, allowed in (("nodes", "kind", NodeKind), ("edges", "relation", Relation)):
            for value in pc.unique(self.tables[table_name].column(column)).to_pylist():
                if value not in set(allowed):
                    found.append(
                        f"{table_name} table has {column} {value!r}, which is none of {', '.join(sorted(allowed))}"
                    )
        times = pc.min_max(self.metrics.column("timestamp").cast(pa.int64()))
        for end in ("min", "max"):
            micros = times[end].as_py()
            if micros is not None and not 0 <= micros <= _LATEST_MICROS:
                found.append(f"metrics table has a time outside of 1970 to 2261 ({micros:,} us since 1970)")
        for column in ("call_rate", "error_ratio", "latency_seconds", "timeout_seconds"):
            lowest = pc.min(self.edges.column(column)).as_py()
            if lowest is not None and lowest < 0:
                found.append(f"edges table has a negative {column} ({lowest:g})")
        # A clock that ran backwards, or a subtraction gone wrong.
        negative = np.flatnonzero(floats(self.metrics.column("value")) < 0)
        if negative.size:
            names = self.metrics.column("metric")
            seen: set[str] = set()
            for row in negative.tolist():
                name = names[row].as_py()
                if name in signals.METRICS and not signals.METRICS[name].signed and name not in seen:
                    seen.add(name)
                    first = self.metrics.slice(row, 1).to_pylist()[0]
                    found.append(
                        f"metrics table has a negative {name} ({first['value']:g}, node {first['node']!r} at "
                        f"{first['timestamp'].isoformat()})"
                    )
        if self.workloads.num_rows:
            from exporters.model import WorkloadState

            for value in pc.unique(self.workloads.column("state")).to_pylist():
                if value not in set(WorkloadState):
                    found.append(f"workloads table has state {value!r}, which is none of {', '.join(WorkloadState)}")
        return found

    def write(self, path: Path | str) -> Path:
        """Write the bundle to ``path`` (a ``.zip`` file, or else a directory), atomically.

        A crash leaves either the old bundle or the new one (for a directory, perhaps under a hidden name beside it).
        Equal incidents give equal bytes.

        Raises:
            InvalidInputError: ``path`` cannot be written, or is a directory that holds anything but a bundle.
        """
        target = Path(path)
        try:
            return self._write(target)
        except OSError as error:
            raise InvalidInputError(
                f"cannot write {target}: {error.strerror or error}", cure="choose another path, or make room there"
            ) from None

    def _write(self, target: Path) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix.lower() == ".zip":
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as out:
                try:
                    with zipfile.ZipFile(out, "w") as archive:
                        for name, payload in self._members():
                            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
                            info.external_attr = 0o644 << 16
                            # Parquet is compressed already.
                            info.compress_type = (
                                zipfile.ZIP_STORED if name.endswith(".parquet") else zipfile.ZIP_DEFLATED
                            )
                            archive.writestr(info, payload)
                    out.flush()
                    os.fsync(out.fileno())
                    Path(out.name).chmod(0o644)
                    Path(out.name).replace(target)
                except BaseException:
                    Path(out.name).unlink(missing_ok=True)
                    raise
            return target
        if target.exists() and not target.is_dir():
            raise InvalidInputError(f"{target} exists and is not a directory", cure="choose another path, or add .zip")
        # Writing replaces the directory, so anything else in it would be lost.
        if target.is_dir() and any(entry.name not in _MEMBERS for entry in target.iterdir()):
            raise InvalidInputError(
                f"{target} is a directory with other files in it", cure="choose an empty or a new directory"
            )
        staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            for name, payload in self._members():
                (staging / name).write_bytes(payload)
            staging.chmod(0o755)
            if target.exists():
                retired = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
                target.rename(retired / "bundle")
                try:
                    staging.rename(target)
                except BaseException:
                    (retired / "bundle").rename(target)
                    raise
                finally:
                    shutil.rmtree(retired)
            else:
                staging.rename(target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return target

    def _members(self) -> Iterator[tuple[str, bytes]]:
        yield "incident.json", msgspec.json.format(msgspec.json.encode(self.header), indent=2) + b"\n"
        for name, table in self.tables.items():
            if name in REQUIRED_TABLES or table.num_rows:
                buffer = io.BytesIO()
                pq.write_table(table.combine_chunks(), buffer, compression="zstd", write_page_checksum=True)
                yield f"{name}.parquet", buffer.getvalue()
        if self.truth is not None:
            yield "truth.json", msgspec.json.format(msgspec.json.encode(self.truth), indent=2) + b"\n"


def conform(table: pa.Table, name: str) -> pa.Table:
    """Return ``table`` with exactly the columns and types of table ``name``; NaN becomes null, which means missing.

    Raises:
        InvalidInputError: a required column is absent, given twice or holds nulls, or a value does not fit its type.
    """
    schema = SCHEMAS[name]
    columns = []
    for expected in schema:
        if table.column_names.count(expected.name) > 1:
            raise InvalidInputError(
                f"{name} table has the column {expected.name!r} more than once", cure="keep one of them"
            )
        if expected.name not in table.column_names:
            if not expected.nullable:
                raise InvalidInputError(
                    f"{name} table lacks the column {expected.name!r}",
                    cure=f"columns: {', '.join(schema.names)}",
                )
            columns.append(pa.nulls(table.num_rows, expected.type))
            continue
        column = table.column(expected.name)
        if column.type != expected.type:
            if pa.types.is_timestamp(expected.type) and pa.types.is_timestamp(column.type) and column.type.tz is None:
                raise InvalidInputError(
                    f"{name} table: column {expected.name!r} has times without a time zone",
                    cure="store them as UTC",
                )
            try:
                column = column.cast(expected.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise InvalidInputError(
                    f"{name} table: column {expected.name!r} is {column.type}, not {expected.type}: {error}",
                    cure=f"store it as {expected.type}",
                ) from None
        if not expected.nullable and column.null_count:
            raise InvalidInputError(
                f"{name} table: column {expected.name!r} holds {column.null_count} empty values",
                cure="drop those rows or fill them in",
            )
        if expected.nullable and pa.types.is_floating(expected.type) and pc.any(pc.is_nan(column)).as_py():
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, expected.type), column)
        columns.append(column)
    return pa.table(columns, schema=schema).combine_chunks()


def read(path: Path | str, *, with_truth: bool = False) -> Incident:
    """Read and validate the bundle at ``path`` (directory or zip).

    Args:
        with_truth: also load ``truth.json``; off by default so that an explanation cannot depend on it.

    Raises:
        NotFoundError: nothing is at ``path``.
        InvalidInputError: the bundle is damaged, unsafe, too new, or inconsistent.
    """
    incident, problems = examine(path, with_truth=with_truth)
    if incident is None:
        raise problems[0]
    return incident


def examine(path: Path | str, *, with_truth: bool = True) -> tuple[Incident | None, tuple[InvalidInputError, ...]]:
    """Read the bundle at ``path`` as far as it goes.

    Returns:
        The incident and no problem, or None and every problem found.

    Raises:
        NotFoundError: nothing is at ``path``.
    """
    source = Path(path)
    if not source.exists():
        raise NotFoundError(
            f"no incident bundle at {source}", cure="check the path, or list some with `rca demo --list`"
        )
    problems: list[InvalidInputError] = []
    header: Header | None = None
    truth: Truth | None = None
    tables: dict[str, pa.Table] = {}
    try:
        with _open_members(source) as members:
            try:
                header = _read_header(source, members)
            except InvalidInputError as error:
                problems.append(error)
            for name in SCHEMAS:
                try:
                    payload = members.get(f"{name}.parquet")
                    if payload is not None:
                        tables[name] = _read_table(f"{source}/{name}.parquet", payload, name)
                    elif name in REQUIRED_TABLES:
                        raise InvalidInputError(
                            f"{source} lacks {name}.parquet", cure="capture or export the incident again"
                        )
                except InvalidInputError as error:
                    problems.append(error)
            if with_truth and (raw := members.get("truth.json")) is not None:
                try:
                    truth = _decode(f"{source}/truth.json", raw.read(), Truth)
                except InvalidInputError as error:
                    problems.append(error)
    except InvalidInputError as error:
        problems.append(error)
    if header is None or problems:
        return None, tuple(problems)
    incident = Incident(header=header, truth=truth, **tables)
    found = [
        InvalidInputError(f"{source}: {problem}", cure="run `rca incident validate` to list every problem")
        for problem in incident.problems()
    ]
    return (None, tuple(found)) if found else (incident, ())


class _Member:
    """A readable part of a bundle: a file, or a checked entry of a zip."""

    def __init__(self, path: Path | None = None, data: bytes | None = None) -> None:
        self._path, self._data = path, data

    def read(self) -> bytes:
        if self._data is not None:
            return self._data
        assert self._path is not None  # noqa: S101
        try:
            return self._path.read_bytes()
        except OSError as error:
            raise InvalidInputError(
                f"cannot read {self._path}: {error.strerror or error}", cure="check its permissions"
            ) from None

    def source(self) -> Any:
        return pa.BufferReader(self._data) if self._data is not None else str(self._path)


@contextlib.contextmanager
def _open_members(source: Path) -> Iterator[dict[str, _Member]]:
    if source.is_dir():
        yield {name: _Member(path=source / name) for name in _MEMBERS if (source / name).is_file()}
        return
    if not zipfile.is_zipfile(source):
        raise InvalidInputError(
            f"{source} is neither a directory nor a zip file",
            cure="name a bundle; `rca incident import` makes one from CSV or spans",
        )
    try:
        with zipfile.ZipFile(source) as archive:
            yield {
                name: _Member(data=_extract(source, archive, info))
                for name, info in _safe_entries(source, archive).items()
                if name in _MEMBERS
            }
    except (zipfile.BadZipFile, EOFError, RuntimeError, OSError, zlib.error, lzma.LZMAError) as error:
        raise InvalidInputError(
            f"{source} is a damaged or encrypted zip: {error}", cure="export the bundle again"
        ) from None


def _safe_entries(source: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Check every entry before any is read; an optional single top folder is accepted."""
    infos = [info for info in archive.infolist() if not info.is_dir()]
    for info in infos:
        parts = info.filename.replace("\\", "/").split("/")
        if info.filename.startswith("/") or ".." in parts or ":" in parts[0]:
            raise InvalidInputError(
                f"{source} holds the unsafe path {info.filename!r}",
                cure="do not trust this file; ask for a new export",
            )
        if stat.S_ISLNK(info.external_attr >> 16):
            raise InvalidInputError(
                f"{source} holds the symbolic link {info.filename!r}",
                cure="zip the bundle's files, not links to them",
            )
        if info.file_size > MAX_MEMBER_BYTES or info.file_size > MAX_COMPRESSION_RATIO * max(info.compress_size, 1024):
            raise InvalidInputError(
                f"{source}: {info.filename!r} would unpack to {info.file_size:,} bytes from {info.compress_size:,}",
                cure="this looks like a zip bomb; ask for a new export",
            )
    tops = {info.filename.split("/")[0] for info in infos if "/" in info.filename}
    prefix = f"{tops.pop()}/" if len(tops) == 1 and all("/" in info.filename for info in infos) else ""
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename.removeprefix(prefix)
        if name in entries:
            raise InvalidInputError(f"{source} holds {name!r} twice", cure="export the bundle again")
        entries[name] = info
    return entries


def _extract(source: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Read one entry, and stop if it is longer than its header promised."""
    with archive.open(info) as stream:
        data = stream.read(info.file_size + 1)
    if len(data) > info.file_size:
        raise InvalidInputError(
            f"{source}: {info.filename!r} is longer than it declares", cure="this looks like a zip bomb"
        )
    return data


def _read_header(source: Path, members: Mapping[str, _Member]) -> Header:
    if "incident.json" not in members:
        raise InvalidInputError(
            f"{source} lacks incident.json",
            cure="name a bundle; `rca incident import` makes one from CSV or spans",
        )
    raw = members["incident.json"].read()
    where = f"{source}/incident.json"

    class _Version(msgspec.Struct):
        schema_version: int = SCHEMA_VERSION

    version = _decode(where, raw, _Version).schema_version
    if version > SCHEMA_VERSION:
        raise InvalidInputError(
            f"{where} has schema version {version}; this prioscope reads up to {SCHEMA_VERSION}",
            cure="upgrade prioscope: pip install -U prioscope",
        )
    if version < 1:
        raise InvalidInputError(f"{where} has schema version {version}", cure="export the bundle again")
    return _decode(where, raw, Header)


def _decode(where: str, raw: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(f"{where}: {error}", cure="correct that field, or export the bundle again") from None


def _read_table(where: str, member: _Member, name: str) -> pa.Table:
    schema = SCHEMAS[name]
    try:
        file = pq.ParquetFile(member.source(), page_checksum_verification=True)
        rows = file.metadata.num_rows
        if rows > MAX_ROWS:
            raise InvalidInputError(
                f"{where} holds {rows:,} rows; the limit is {MAX_ROWS:,}", cure="capture fewer series"
            )
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        if size > MAX_MEMBER_BYTES:
            raise InvalidInputError(
                f"{where} would take {size:,} bytes in memory",
                cure="capture a shorter window or fewer series",
            )
        # The size above is of encoded values: repeated long strings unpack to far more, so count while reading.
        have = file.schema_arrow.names
        columns = [column for column in schema.names if column in have]
        if repeated := next((column for column in columns if have.count(column) > 1), None):
            raise InvalidInputError(f"{where} has the column {repeated!r} twice", cure="export the bundle again")
        batches, used = [], 0
        for batch in file.iter_batches(batch_size=131_072, columns=columns):
            batch.validate(full=True)  # text that is not UTF-8 would fail far from here
            used += batch.nbytes
            if used > MAX_MEMBER_BYTES:
                raise InvalidInputError(
                    f"{where} takes more than {MAX_MEMBER_BYTES:,} bytes in memory",
                    cure="capture a shorter window or fewer series",
                )
            batches.append(batch)
        table = pa.Table.from_batches(batches, pa.schema([file.schema_arrow.field(column) for column in columns]))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{where} is not a readable Parquet file: {str(error).splitlines()[0]}",
            cure="export the bundle again",
        ) from None
    return conform(table, name)


def metrics_table(
    timestamps: np.ndarray[Any, Any],
    nodes: list[str] | pa.Array,
    metrics: list[str] | pa.Array,
    values: np.ndarray[Any, Any],
    peers: list[str | None] | pa.Array | None = None,
) -> pa.Table:
    """Build a metrics table from columns; ``timestamps`` are Unix seconds (float64)."""
    micros = np.round(np.asarray(timestamps, dtype=np.float64) * 1e6).astype(np.int64)
    return pa.table(
        {
            "timestamp": pa.array(micros, pa.int64()).cast(_TIME),
            "node": pa.array(nodes, pa.string()) if isinstance(nodes, list) else nodes,
            "peer": pa.nulls(len(values), pa.string()) if peers is None else pa.array(peers, pa.string()),
            "metric": pa.array(metrics, pa.string()) if isinstance(metrics, list) else metrics,
            "value": pa.array(np.asarray(values, dtype=np.float64)),
        },
        schema=METRICS_SCHEMA,
    )
