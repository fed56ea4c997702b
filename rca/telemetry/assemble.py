"""Tables from importers + windows + a victim -> an incident."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rca.errors import InvalidInputError, NotFoundError
from rca.incident import EDGES_SCHEMA, METRICS_SCHEMA, Header, Incident, NodeKind, Source, Victim, Window, conform
from rca.signals import LATENCY_CENTRE, LATENCY_TAIL
from rca.telemetry import naming


def incident_window(
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    at: datetime | None = None,
    margin_seconds: float = 600.0,
) -> Window:
    """Return the incident window [start, end), or [at - margin, at + margin).

    Raises:
        InvalidInputError: neither or both forms are given, or the end is not after the start.
    """
    if at is not None and (start is not None or end is not None):
        raise InvalidInputError("--at excludes --start and --end", cure="give the window one way")
    if at is not None:
        try:
            margin = timedelta(seconds=margin_seconds)
            return Window(start=at - margin, end=at + margin)
        except OverflowError:
            raise InvalidInputError(
                f"a margin of {margin_seconds:g} s reaches beyond the calendar", cure="give a margin of hours or days"
            ) from None
    if start is None or end is None:
        raise InvalidInputError(
            "the incident window is not given", cure="use --start and --end, or --at with an optional --margin"
        )
    return window(start, end, "incident window")


def window(start: datetime, end: datetime, what: str) -> Window:
    """Return [start, end).

    Raises:
        InvalidInputError: a time has no zone, or the end is not after the start.
    """
    try:
        return Window(start=start, end=end)
    except ValueError as error:
        raise InvalidInputError(
            f"{what} {start.isoformat()} to {end.isoformat()}: {error}", cure="exchange or correct the times"
        ) from None


def merge_metrics(tables: Sequence[pa.Table]) -> pa.Table:
    """Put metrics tables together.

    Raises:
        InvalidInputError: two of them measured the same metric of the same node at the same time.
    """
    whole = (
        pa.concat_tables([conform(table, "metrics") for table in tables]) if tables else METRICS_SCHEMA.empty_table()
    )
    if len(tables) < 2:
        return whole
    keys = ["timestamp", "node", "peer", "metric"]
    counts = whole.group_by(keys).aggregate([([], "count_all")])
    repeated = counts.filter(pc.greater(counts["count_all"], 1)).sort_by([(key, "ascending") for key in keys])
    if repeated.num_rows:
        first = repeated.slice(0, 1).to_pylist()[0]
        raise InvalidInputError(
            f"two inputs give {first['metric']} of {first['node']!r} at {first['timestamp'].isoformat()}",
            cure="leave that metric out of one of them",
        )
    return whole.sort_by([(key, "ascending") for key in ("node", "peer", "metric", "timestamp")])


def merge_edges(tables: Sequence[pa.Table]) -> pa.Table:
    """Put edges tables together; of an edge given more than once, the first is kept."""
    whole = pa.concat_tables([conform(table, "edges") for table in tables]) if tables else EDGES_SCHEMA.empty_table()
    seen: set[tuple[str, str, str]] = set()
    rows = []
    for index, key in enumerate(zip(*(whole[name].to_pylist() for name in EDGES_SCHEMA.names[:3]), strict=True)):
        if key not in seen:
            seen.add(key)
            rows.append(index)
    return whole.take(pa.array(rows, pa.int64()))


def assemble(
    *,
    metrics: pa.Table,
    edges: pa.Table,
    window: Window,
    victim_node: str,
    victim_metric: str | None = None,
    baseline: Window | None = None,
    isolated: Sequence[str] = (),
    spans: pa.Table | None = None,
    id: str | None = None,
    title: str = "",
    labels: Mapping[str, str] | None = None,
    onset: datetime | None = None,
    sources: Sequence[Source] = (),
    **tables: pa.Table,
) -> Incident:
    """Build an incident, with checks that a person who made a mistake on the command line needs.

    Args:
        metrics, edges, spans: tables with the columns of the schemas in `rca.incident`.
        window: when it happened.
        victim_node, victim_metric: what it is about; the metric may be written as in an import (``latency``), and is
            by default the node's mean, median or tail latency, whichever exists.
        baseline: normal time; by default everything measured before the window.
        isolated: nodes to list although nothing calls them.
        id: by default made of the window's start, the victim and the metric, so that equal inputs give equal bundles.
        tables: ``nodes``, ``workloads`` or ``devices``.

    Raises:
        NotFoundError: the victim is not among the nodes, or lacks the metric; the cure lists the closest names.
        InvalidInputError: no sample lies in the window or the baseline, or a table is inconsistent.
    """
    metrics = conform(metrics, "metrics")
    edges = conform(edges, "edges")
    if not metrics.num_rows:
        raise InvalidInputError("there is no sample of any metric", cure="check the metrics file")
    metric = _victim_metric(metrics, edges, victim_node, victim_metric)
    times = metrics["timestamp"]
    extent = pc.min_max(times).as_py()
    inside = _count(times, window.start, window.end)
    if not inside:
        raise InvalidInputError(
            f"no sample lies in the incident window {_span(window.start, window.end)}; "
            f"the metrics run from {_stamp(extent['min'])} to {_stamp(extent['max'])}",
            cure="correct --start/--end or --at; times without a zone are UTC",
        )
    if baseline is None:
        if extent["min"] >= window.start:
            raise InvalidInputError(
                f"no sample lies before the incident window, which starts at {_stamp(window.start)}; "
                f"the metrics start at {_stamp(extent['min'])}",
                cure="add earlier data, or name a baseline with --baseline-start and --baseline-end",
            )
        baseline = Window(start=extent["min"], end=window.start)
    elif not _count(times, baseline.start, baseline.end):
        raise InvalidInputError(
            f"no sample lies in the baseline {_span(baseline.start, baseline.end)}; "
            f"the metrics run from {_stamp(extent['min'])} to {_stamp(extent['max'])}",
            cure="correct --baseline-start and --baseline-end",
        )
    if isolated and "nodes" not in tables:
        names = sorted(set(isolated))
        tables["nodes"] = pa.table({"node": names, "kind": [NodeKind.SERVICE.value] * len(names)})
    if spans is not None:
        tables["spans"] = spans
    header = Header(
        id=id or default_id(window, victim_node, metric),
        window=window,
        baseline=baseline,
        victim=Victim(node=victim_node, metric=metric),
        title=title,
        onset=onset,
        labels=dict(labels or {}),
        sources=tuple(sources),
    )
    return Incident.create(header, metrics=metrics, edges=edges, **tables)


def default_id(window: Window, node: str, metric: str) -> str:
    """Return an id that is safe as a file name and the same for the same incident."""
    stamp = window.start.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{node}-{metric}").strip("-.")
    return f"{stamp}-{slug}"[:120]


def _victim_metric(metrics: pa.Table, edges: pa.Table, node: str, wanted: str | None) -> str:
    own = metrics.filter(pc.and_(pc.equal(metrics["node"], node), metrics["peer"].is_null()))
    have = sorted(pc.unique(own["metric"]).to_pylist())
    if not have:
        named: set[Any] = set()
        for column in (metrics["node"], edges["caller"], edges["callee"]):
            named.update(pc.unique(column).to_pylist())
        if node in named:
            raise NotFoundError(f"victim {node!r} has no metric of its own", cure="name a node that was measured")
        raise NotFoundError(f"victim {node!r} is not in the data", cure=_did_you_mean(node, sorted(named)))
    if wanted is None:
        for name in (*LATENCY_CENTRE, *LATENCY_TAIL, "error_ratio"):
            if name in have:
                return name
        raise NotFoundError(
            f"victim {node!r} has neither latency nor errors", cure=f"choose with --metric: {', '.join(have[:10])}"
        )
    for name in (wanted, *_aliases(wanted)):
        if name in have:
            return name
    raise NotFoundError(f"victim {node!r} has no metric {wanted!r}", cure=f"it has {', '.join(have[:12])}")


def _aliases(metric: str) -> list[str]:
    try:
        return [naming.resolve(metric).name, naming.snake_case(metric)]
    except InvalidInputError:
        return []


def _did_you_mean(name: str, names: list[str]) -> str:
    lowered = {item.lower(): item for item in names}
    close = difflib.get_close_matches(name.lower(), list(lowered), n=5, cutoff=0.6)
    if close:
        return f"did you mean {', '.join(lowered[item] for item in close)}?"
    return f"use one of {', '.join(names[:10])}" if names else "the input names no node"


def _count(times: pa.ChunkedArray, start: datetime, end: datetime) -> int:
    kind = times.type
    inside = pc.and_(
        pc.greater_equal(times, pa.scalar(start, kind)),
        pc.less(times, pa.scalar(end, kind)),
    )
    return int(pc.sum(inside).as_py() or 0)


def _stamp(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _span(start: datetime, end: datetime) -> str:
    return f"{_stamp(start)} to {_stamp(end)}"


__all__ = ["assemble", "default_id", "incident_window", "merge_edges", "merge_metrics", "window"]
