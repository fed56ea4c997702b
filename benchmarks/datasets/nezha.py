"""Nezha Train-Ticket (Yu et al., FSE 2023): injected faults in 46 services, metrics each minute, traces.

Layout, as published: ``nezha*/<date>/{<date>-fault_list.json, metric/<pod>_metric.csv, trace/<HH>_<MM>_trace.csv}``.
Every date that holds a fault list is used.

- Node = service: the pod's name without its hashes; causes are compared at that level.
- Times: ``inject_time`` is read as UTC (that is what agrees with the samples' own time stamps).
- Incident window: four minutes from the injection, which is when the alert is taken to fire. Samples are rates and
  quantiles over the *preceding* minute, so the first one is mostly from before. Traces were kept for three minutes.
- Normal data: samples outside five minutes from any injection. They lie on both sides of an incident; the later ones
  are moved back by whole days, so that the baseline is one interval that ends before the incident. The two minutes
  before the alert stay where they are, as lead-in.
- Traces: a trace is normal if it began outside all fault windows and ended before the next injection, and belongs to an
  incident if it began in the three minutes after the injection; one that straddles an injection is dropped. Normal
  traces were kept only for the moments before each injection, so the derived series have few baseline samples.
- Where both the monitoring and the traces give a series under one name, the monitoring's is used: it has the longer
  baseline.
- ``PodSuccessRate`` and ``SuccessRate`` are 0 throughout: not measured, hence dropped. ``front_service.csv`` repeats
  the gateway's latency. Host metrics are repeated on each pod that the host runs, and kept there.
- Victim: P90 latency of the service at which traces begin (the gateway).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from benchmarks.cases import Case, dataset_folder
from benchmarks.datasets.tables import Floats, evenly_spaced, fold_seconds, long_table, utc
from rca.errors import InvalidInputError, NotFoundError
from rca.incident import (
    EDGES_SCHEMA,
    METRICS_SCHEMA,
    SPANS_SCHEMA,
    Header,
    Incident,
    Source,
    SourceStatus,
    Victim,
    Window,
)
from rca.telemetry.spans import service_graph

STEP_SECONDS = 60.0
#: How long an incident is looked at, and how long traces were kept, from the injection.
WINDOW_SECONDS = 240.0
TRACE_SECONDS = 180.0
#: From an injection until samples count as normal again.
FAULT_SECONDS = 300.0
LEAD_SECONDS = 120.0
#: A minute of which fewer seconds of traces were kept gives no derived sample.
MIN_COVERED_SECONDS = 15.0
VICTIM_METRIC = "latency_p90_seconds"

#: Column of a pod's metric file -> canonical name and factor. Columns not listed are kept under their own name.
_COLUMNS: dict[str, tuple[str, float]] = {
    "CpuUsage(m)": ("cpu_usage_cores", 1e-3),
    "CpuUsageRate(%)": ("cpu_utilization_ratio", 1e-2),
    "MemoryUsage(Mi)": ("memory_usage_bytes", 2.0**20),
    "MemoryUsageRate(%)": ("memory_utilization_ratio", 1e-2),
    "NetworkReceiveBytes": ("network_receive_bytes_per_second", 1.0),
    "NetworkTransmitBytes": ("network_transmit_bytes_per_second", 1.0),
    "PodClientLatencyP90(s)": ("client_latency_p90_seconds", 1.0),
    "PodClientLatencyP95(s)": ("client_latency_p95_seconds", 1.0),
    "PodClientLatencyP99(s)": ("client_latency_p99_seconds", 1.0),
    "PodServerLatencyP90(s)": ("latency_p90_seconds", 1.0),
    "PodServerLatencyP95(s)": ("latency_p95_seconds", 1.0),
    "PodServerLatencyP99(s)": ("latency_p99_seconds", 1.0),
    "PodWorkload(Ops)": ("request_rate", 1.0),
    "NodeCpuUsageRate(%)": ("host_cpu_utilization_ratio", 1e-2),
    "NodeMemoryUsageRate(%)": ("host_memory_utilization_ratio", 1e-2),
    "NodeNetworkReceiveBytes": ("host_network_receive_bytes_per_second", 1.0),
}
_NOT_SERIES = {"Time", "TimeStamp", "PodName"}
_SUCCESS = "PodSuccessRate(%)"
_POD_HASHES = re.compile(r"-[0-9a-f]{5,10}-[0-9a-z]{5}$")


class _Fault(msgspec.Struct, frozen=True):
    inject_time: str
    inject_pod: str
    inject_type: str


@dataclass(frozen=True)
class Fault:
    """One injection: Unix seconds, the service it hit, and its type."""

    time: float
    service: str
    kind: str


def service_of(pod: str) -> str:
    """The service of a pod: ``ts-order-service-5b67c48447-fj8b7`` -> ``ts-order-service``."""
    return _POD_HASHES.sub("", pod)


def read_faults(path: Path) -> list[Fault]:
    """Read a fault list: {hour: [{inject_time, inject_pod, inject_type}]}, in order of time.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: the file is malformed.
    """
    if not path.is_file():
        raise NotFoundError(f"no file {path}", cure="unpack the data set again")
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, list[_Fault]])
        faults = [
            Fault(
                datetime.strptime(item.inject_time, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp(),
                service_of(item.inject_pod),
                item.inject_type,
            )
            for hour in raw.values()
            for item in hour
        ]
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidInputError(f"{path}: {error}", cure="use the file as published") from None
    return sorted(faults, key=lambda fault: fault.time)


def _read_csv(path: Path, required: set[str]) -> pa.Table:
    try:
        table = pv.read_csv(path)
    except pa.ArrowInvalid as error:
        raise InvalidInputError(f"{path}: {error}", cure="use the file as published") from None
    missing = required - set(table.column_names)
    if missing:
        raise InvalidInputError(f"{path} lacks the column {sorted(missing)[0]!r}", cure="use the file as published")
    return table


def read_metrics(folder: Path) -> pa.Table:
    """Read every pod's metric file below ``folder`` as one metrics table.

    Raises:
        NotFoundError: there are none.
        InvalidInputError: a file is malformed.
    """
    files = sorted(folder.glob("*_metric.csv"))
    if not files:
        raise NotFoundError(f"no *_metric.csv below {folder}", cure="unpack the data set again")
    tables = []
    for path in files:
        raw = _read_csv(path, {"TimeStamp", "PodName"})
        if not raw.num_rows:
            continue
        node = service_of(raw.column("PodName")[0].as_py())
        columns, values = [], []
        for name in raw.column_names:
            if name in _NOT_SERIES:
                continue
            try:
                series = raw.column(name).cast(pa.float64()).to_numpy().astype(np.float64)
            except pa.ArrowInvalid as error:
                raise InvalidInputError(f"{path}, column {name!r}: {error}", cure="use the file as published") from None
            if name == _SUCCESS:
                if not np.nanmax(series, initial=0.0) > 0:
                    continue  # not measured
                canonical, series = "error_ratio", np.clip(1.0 - series / 100.0, 0.0, 1.0)
            else:
                canonical, factor = _COLUMNS.get(name, (name.lower(), 1.0))
                series = series * factor
            columns.append((node, canonical))
            values.append(series)
        times = raw.column("TimeStamp").cast(pa.float64()).to_numpy().astype(np.float64)
        tables.append(long_table(times, columns, np.column_stack(values)))
    return pa.concat_tables(tables).combine_chunks()


def read_spans(folder: Path) -> pa.Table:
    """Read every trace file below ``folder`` as one spans table, without the spans that two files repeat.

    The files say neither kind nor status of a span: both are null (not recorded).

    Raises:
        NotFoundError: there are none.
        InvalidInputError: a file is malformed.
    """
    files = sorted(folder.glob("*_trace.csv"))
    if not files:
        raise NotFoundError(f"no *_trace.csv below {folder}", cure="unpack the data set again")
    required = {
        "TraceID", "SpanID", "ParentID", "PodName", "OperationName", "StartTimeUnixNano", "EndTimeUnixNano",
    }  # fmt: skip
    raw = pa.concat_tables([_read_csv(path, required).select(sorted(required)) for path in files])
    raw = raw.group_by(sorted(required), use_threads=False).aggregate([]).combine_chunks()
    pods = pc.dictionary_encode(raw.column("PodName").combine_chunks())
    services = pa.array([service_of(pod) for pod in pods.dictionary.to_pylist()], pa.string()).take(pods.indices)
    parent = raw.column("ParentID").cast(pa.string())
    start = raw.column("StartTimeUnixNano").cast(pa.int64())
    duration = pc.subtract(raw.column("EndTimeUnixNano").cast(pa.int64()), start)
    rows = raw.num_rows
    table = pa.table(
        {
            "trace_id": raw.column("TraceID").cast(pa.string()),
            "span_id": raw.column("SpanID").cast(pa.string()),
            "parent_id": pc.if_else(pc.equal(parent, "root"), pa.scalar(None, pa.string()), parent),
            "service": services,
            "operation": raw.column("OperationName").cast(pa.string()),
            "kind": pa.nulls(rows, pa.string()),
            "start": start.cast(pa.timestamp("ns", tz="UTC")),
            "duration_seconds": pc.divide(duration.cast(pa.float64()), 1e9),
            "error": pa.nulls(rows, pa.bool_()),
            "attributes": pa.nulls(rows, SPANS_SCHEMA.field("attributes").type),
        },
        schema=SPANS_SCHEMA,
    )
    return table.sort_by([("start", "ascending"), ("span_id", "ascending")])


@dataclass(frozen=True)
class _Traces:
    """Spans with, per span, the first start and last end of its trace (Unix seconds)."""

    spans: pa.Table
    first: Floats
    last: Floats

    def select(self, chosen: npt.NDArray[np.bool_]) -> _Traces:
        return _Traces(self.spans.filter(pa.array(chosen)), self.first[chosen], self.last[chosen])


def _with_extent(spans: pa.Table) -> _Traces:
    start = _seconds(spans.column("start"))
    end = start + spans.column("duration_seconds").to_numpy()
    codes = pc.dictionary_encode(spans.column("trace_id").combine_chunks()).indices.to_numpy()
    count = int(codes.max()) + 1 if len(codes) else 0
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first, codes, start)
    np.maximum.at(last, codes, end)
    return _Traces(spans, first[codes], last[codes])


def _seconds(column: pa.ChunkedArray) -> Floats:
    """A nanosecond column as Unix seconds."""
    seconds: Floats = column.cast(pa.int64()).to_numpy().astype(np.float64) / 1e9
    return seconds


def _move(spans: pa.Table, seconds: Floats | float) -> pa.Table:
    """The same spans, later by ``seconds``."""
    nanos = spans.column("start").cast(pa.int64()).to_numpy() + np.round(np.asarray(seconds) * 1e9).astype(np.int64)
    position = spans.schema.get_field_index("start")
    return spans.set_column(position, spans.schema.field("start"), pa.array(nanos).cast(pa.timestamp("ns", tz="UTC")))


def _times(metrics: pa.Table) -> Floats:
    seconds: Floats = metrics.column("timestamp").cast(pa.int64()).to_numpy().astype(np.float64) / 1e6
    return seconds


def _retime(metrics: pa.Table, times: Floats) -> pa.Table:
    position = metrics.schema.get_field_index("timestamp")
    field = metrics.schema.field("timestamp")
    micros = np.round(times * 1e6).astype(np.int64)
    return metrics.set_column(position, field, pa.array(micros).cast(field.type))


@dataclass(frozen=True)
class _Derived:
    """Series derived from spans, and how many seconds of traffic those spans cover."""

    metrics: pa.Table
    seconds: float


def derive(spans: pa.Table, anchor: float) -> _Derived:
    """Series derived from ``spans`` on minutes that begin at ``anchor`` plus or minus whole minutes.

    Of some minutes only a part was kept: rates are per second kept, and a minute with less than `MIN_COVERED_SECONDS`
    gives nothing.
    """
    if not spans.num_rows:
        return _Derived(METRICS_SCHEMA.empty_table(), 0.0)
    offset = anchor % STEP_SECONDS
    metrics = service_graph(_move(spans, -offset), STEP_SECONDS).metrics
    times = _times(metrics) + offset
    ended = _seconds(spans.column("start")) + spans.column("duration_seconds").to_numpy()
    minutes = np.unique(np.floor((ended - anchor) / STEP_SECONDS).astype(np.int64))
    covered = {int(number): STEP_SECONDS for number in minutes}
    # Traces were kept without gaps from the first to the last, so only the outer minutes can be cut.
    covered[int(minutes[0])] -= float(ended.min()) - (anchor + int(minutes[0]) * STEP_SECONDS)
    covered[int(minutes[-1])] -= anchor + (int(minutes[-1]) + 1) * STEP_SECONDS - float(ended.max())
    kept = np.array([covered.get(int(n), 0.0) for n in np.floor((times - anchor) / STEP_SECONDS + 1e-6)])
    if len(minutes) <= 2:  # with more, the service graph sees by itself that the outer ones are cut
        is_rate = pc.equal(metrics.column("metric"), "request_rate").to_numpy()
        values = metrics.column("value").to_numpy()
        rates = values * STEP_SECONDS / np.maximum(kept, 1e-3)
        position = metrics.schema.get_field_index("value")
        metrics = metrics.set_column(
            position, metrics.schema.field("value"), pa.array(np.where(is_rate, rates, values))
        )
    enough = pa.array(kept >= MIN_COVERED_SECONDS)
    return _Derived(_retime(metrics, times).filter(enough), sum(covered.values()))


def _edges(normal: pa.Table, normal_seconds: float, incident: pa.Table) -> pa.Table:
    """Calls seen in normal traffic with their usual rate and latency, and calls seen only during the incident."""
    parts = []
    known: set[tuple[str, str]] = set()
    for spans, seconds in ((normal, normal_seconds), (incident, 0.0)):
        if not spans.num_rows:
            continue
        edges, metrics, _ = service_graph(spans, STEP_SECONDS)
        keys = list(zip(edges.column("caller").to_pylist(), edges.column("callee").to_pylist(), strict=True))
        position = edges.schema.get_field_index("call_rate")
        field = edges.schema.field("call_rate")
        if seconds > 0:
            # The service graph takes each minute with a span for a whole one.
            whole = STEP_SECONDS * pc.count_distinct(metrics.column("timestamp")).as_py()
            edges = edges.set_column(position, field, pc.multiply(edges.column("call_rate"), whole / seconds))
        else:
            edges = edges.set_column(position, field, pa.nulls(len(keys), field.type))
        parts.append(edges.filter(pa.array([key not in known for key in keys], pa.bool_())))
        known.update(keys)
    return pa.concat_tables(parts) if parts else EDGES_SCHEMA.empty_table()


def _without_duplicates(monitoring: pa.Table, derived: pa.Table) -> pa.Table:
    """Append the derived series that the monitoring does not give."""
    known = set(
        zip(
            *(column.to_pylist() for column in monitoring.group_by(["node", "metric"]).aggregate([]).columns),
            strict=True,
        )
    )
    keys = zip(
        derived.column("node").to_pylist(),
        derived.column("peer").to_pylist(),
        derived.column("metric").to_pylist(),
        strict=True,
    )
    keep = [peer is not None or (node, metric) not in known for node, peer, metric in keys]
    return pa.concat_tables([monitoring, derived.filter(pa.array(keep, pa.bool_()))])


class Day:
    """One date of the data set, read once."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.faults = read_faults(folder / f"{folder.name}-fault_list.json")
        self.metrics = read_metrics(folder / "metric")
        self.metric_times = _times(self.metrics)
        spans = read_spans(folder / "trace")
        roots = pc.value_counts(spans.filter(pc.is_null(spans.column("parent_id"))).column("service"))
        if not len(roots):
            raise InvalidInputError(f"{folder}/trace has no root span", cure="use the files as published")
        self.entry: str = max(roots.to_pylist(), key=lambda item: (item["counts"], item["values"]))["values"]
        self.traces = _with_extent(spans)
        self.normal_metrics = self._outside(self.metric_times)
        injections = np.array([fault.time for fault in self.faults])
        following = np.append(injections, np.inf)[np.searchsorted(injections, self.traces.first, side="right")]
        self.normal_traces = self._outside(self.traces.first) & (self.traces.last <= following)

    def _outside(self, times: Floats) -> npt.NDArray[np.bool_]:
        """Which times lie outside all fault windows."""
        outside = np.ones(len(times), dtype=bool)
        for fault in self.faults:
            outside &= (times < fault.time) | (times >= fault.time + FAULT_SECONDS)
        return outside

    @functools.cached_property
    def segments(self) -> list[tuple[_Traces, _Derived]]:
        """Normal traces before each injection, with the series derived from them."""
        found = []
        for fault in self.faults:
            before = self.normal_traces & (self.traces.first < fault.time)
            before &= self.traces.first >= fault.time - FAULT_SECONDS
            if before.any():
                part = self.traces.select(before)
                found.append((part, derive(part.spans, fault.time)))
        return found

    def bundle(self, name: str, alert: float, end: float, trace_end: float) -> Incident:
        """An incident of [alert, end): its samples and traces, and all other normal data as baseline."""
        lead = alert - LEAD_SECONDS
        inside = (self.metric_times >= alert) & (self.metric_times < end)
        recent = self.normal_metrics & (self.metric_times >= lead) & (self.metric_times < alert)
        rest = self.normal_metrics & ~inside & ~recent
        times = self.metric_times[rest]
        fold = fold_seconds(times, lead)
        folded = np.where(times >= lead, times - fold, times)
        monitoring = [
            _retime(self.metrics.filter(pa.array(rest)), folded),
            self.metrics.filter(pa.array(recent | inside)),
        ]
        start = float(folded.min())
        mine = self.traces.select((self.traces.first >= alert) & (self.traces.first < trace_end))
        normal, derived, seconds = [mine.spans.slice(0, 0)], [derive(mine.spans, alert).metrics], 0.0
        for part, series in self.segments:
            kept = (part.last <= alert) | (part.first >= end)
            if not kept.all():
                continue  # the quiet window itself
            shift = -fold if part.first.min() >= lead else 0.0
            times = _times(series.metrics) + shift
            derived.append(_retime(series.metrics, times))
            normal.append(_move(part.spans, shift))
            seconds += series.seconds
            start = min(start, float(times.min(initial=start)))
        usual = pa.concat_tables(normal)
        edges = _edges(usual, seconds, mine.spans)
        header = Header(
            id=name,
            title=f"{VICTIM_METRIC} of {self.entry}",
            window=Window(utc(alert), utc(end)),
            baseline=Window(utc(start), utc(lead)),
            victim=Victim(self.entry, VICTIM_METRIC),
            onset=utc(alert),
            sources=(
                Source("metrics", "csv", SourceStatus.PARTIAL, "success rates were not measured"),
                Source("traces", "csv", SourceStatus.PARTIAL, "kept around injections only; no status, no span kind"),
            ),
        )
        metrics = _without_duplicates(pa.concat_tables(monitoring), pa.concat_tables(derived))
        return Incident.create(header, metrics=metrics, edges=edges, spans=pa.concat_tables([usual, mine.spans]))


def days(folder: Path) -> list[Path]:
    """The dates below ``folder`` that have a fault list, sorted.

    Raises:
        NotFoundError: there are none.
    """
    found = sorted(path.parent for path in folder.glob("*/*-fault_list.json") if path.name.startswith(path.parent.name))
    if not found:
        raise NotFoundError(f"no <date>/<date>-fault_list.json below {folder}", cure="unpack the data set again")
    return found


def incidents(folder: Path | None = None) -> Iterator[Case]:
    """Yield every injection of every date, grouped by fault type.

    Raises:
        NotFoundError: the data is not there.
        InvalidInputError: a file is malformed.
    """
    for path in days(folder or dataset_folder("nezha*")):
        day = Day(path)
        for fault in day.faults:
            name = f"nezha-{day.name}-{utc(fault.time):%H%M%S}"
            incident = day.bundle(name, fault.time, fault.time + WINDOW_SECONDS, fault.time + TRACE_SECONDS)
            yield Case(name, "nezha", day.name, fault.kind, incident, (fault.service,))


def quiet(count: int = 50, folder: Path | None = None) -> Iterator[Case]:
    """Yield quiet windows: up to ``count`` per date with metrics alone, and one with traces before each injection.

    The former have the length of an incident's window and lie outside all fault windows. The latter are the last
    minute before an injection, because normal traces were kept only there.

    Raises:
        NotFoundError: the data is not there.
        InvalidInputError: a file is malformed.
    """
    for path in days(folder or dataset_folder("nezha*")):
        day = Day(path)
        minutes = np.unique(np.floor(day.metric_times / STEP_SECONDS)) * STEP_SECONDS
        last = float(day.metric_times.max())
        free = [
            int(minute)
            for minute in minutes[2:]
            if minute + WINDOW_SECONDS <= last
            and all(
                minute + WINDOW_SECONDS <= fault.time or minute - LEAD_SECONDS >= fault.time + FAULT_SECONDS
                for fault in day.faults
            )
        ]
        for minute in evenly_spaced(count, free):
            alert = float(minute)
            name = f"nezha-{day.name}-quiet-{utc(alert):%H%M%S}"
            yield Case(name, "nezha", day.name, "metrics only", day.bundle(name, alert, alert + WINDOW_SECONDS, alert))
        for part, _ in day.segments:
            injection = float(min(fault.time for fault in day.faults if fault.time >= part.first.max()))
            alert = injection - STEP_SECONDS
            covered = injection - max(alert, float(part.first.min()))
            if covered < STEP_SECONDS / 2:
                continue
            name = f"nezha-{day.name}-quiet-traces-{utc(alert):%H%M%S}"
            yield Case(name, "nezha", day.name, "with traces", day.bundle(name, alert, injection, injection))
