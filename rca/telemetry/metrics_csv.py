"""Metrics and edges from CSV files -> the tables of an incident bundle.

Layouts of metrics that are recognised:

- *tidy*: one sample a row; columns timestamp, node, metric, value, and optionally peer, statistic and unit;
- *wide*: a time column, and one column a series named ``node:metric``, ``node/metric``, ``node|metric`` or
  ``node.metric`` (or ``node_metric`` where every metric is a known one); ``caller->callee:metric`` is a caller's view
  of one callee;
- *wide by node*: a time column, a node column, and one column a metric (one file a pod, for instance);
- *multi-row header*: rows that name node, metric and statistic of each column, as pandas writes a MultiIndex.

Times are described in `rca.telemetry.timestamps`, names and units in `rca.telemetry.naming`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rca.errors import InvalidInputError
from rca.incident import EDGES_SCHEMA, METRICS_SCHEMA, Relation, Source, SourceStatus
from rca.telemetry import naming
from rca.telemetry.csv_table import (
    CsvText,
    as_booleans,
    as_numbers,
    as_times,
    check_unique_header,
    columns,
    find_column,
    is_numeric,
    load,
    require_filled,
)
from rca.telemetry.files import Progress

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float64]]

TIME_NAMES: Final = ("timestamp", "unix_timestamp", "time_stamp", "time", "datetime", "date", "ts", "epoch")
NODE_NAMES: Final = (
    "node",
    "service",
    "microservice",
    "service_name",
    "pod_name",
    "pod",
    "instance",
    "node_name",
    "component",
    "cmdb_id",
)
METRIC_NAMES: Final = ("metric", "metric_name", "kpi", "kpi_name")
VALUE_NAMES: Final = ("value", "metric_value")
STATISTIC_NAMES: Final = ("statistic", "stat", "agg", "aggregation")
PEER_NAMES: Final = ("peer", "callee", "destination")
UNIT_NAMES: Final = ("unit", "units")
_SEPARATORS: Final = (":", "|", "/", ".")


@dataclass(frozen=True)
class MetricsFile:
    """What a metrics CSV gave: the table (schema METRICS_SCHEMA, sorted) and what a reader should know about it."""

    table: pa.Table
    layout: str
    #: Names of the metrics as written.
    series: tuple[str, ...]
    #: Canonical names that are not in the catalogue.
    unknown: tuple[str, ...]
    notes: tuple[str, ...]

    def source(self, name: str) -> Source:
        """Describe this import for the bundle's header."""
        detail = f"{self.layout} CSV, {self.table.num_rows:,} samples"
        if self.unknown:
            detail += f"; kept under their own name: {', '.join(self.unknown)}"
        if self.notes:
            detail += "; " + "; ".join(self.notes)
        return Source(name=name, kind="metrics-csv", status=SourceStatus.OK, detail=detail)


@dataclass(frozen=True)
class _Series:
    """One metric as written: name, statistic and unit."""

    metric: str
    statistic: str | None = None
    unit: str | None = None


@dataclass
class _Samples:
    """Long format, before names and units are made canonical. Codes index the lists beside them."""

    times: _Ints
    node_codes: _Ints
    nodes: list[str]
    peer_codes: _Ints  # -1: no peer
    peers: list[str]
    series_codes: _Ints
    series: list[_Series]
    values: _Floats
    rows: _Ints  # data row of each sample, for errors


def read_metrics(
    path: Path | str,
    *,
    step_seconds: float | None = None,
    units: Mapping[str, str] | None = None,
    time_column: str | None = None,
    node_column: str | None = None,
    ignore_unused_units: bool = False,
    progress: Progress | None = None,
) -> MetricsFile:
    """Read a metrics CSV of any layout above.

    Args:
        step_seconds: length of the interval that counts (such as ``requests`` by ``Sum``) refer to; by default the
            median distance between times in the file.
        units: unit by metric name as written, where the file does not say (``{"latency": "ms"}``).
        time_column, node_column: their names, where they are unusual.
        ignore_unused_units: do not raise for a unit of a metric that the file lacks.
        progress: told of the bytes read.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: the layout is not recognised, or a cell is wrong; the message names line and column.
    """
    text = load(Path(path), progress)
    header = [cell.strip() for cell in text.head[0]]
    units = dict(units or {})
    levels = _header_levels(text)
    if levels:
        layout, header_rows = "multi-row header", levels[1]
        samples, notes = _read_multi_row(text, levels[0], header_rows)
    else:
        header_rows = 1
        check_unique_header(text, header)
        positions = {
            "time": _position(text, header, TIME_NAMES, time_column),
            "node": _position(text, header, NODE_NAMES, node_column),
            "metric": find_column(header, METRIC_NAMES),
            "value": find_column(header, VALUE_NAMES),
        }
        if positions["time"] is None:
            raise InvalidInputError(
                f"{text.path}, line 1 names no time column (it has {_some(header)})",
                cure="name it 'timestamp', or say which it is with --time-column",
            )
        if None not in (positions["node"], positions["metric"], positions["value"]):
            layout = "tidy"
            samples, notes = _read_tidy(text, header, positions)
        elif positions["node"] is not None:
            layout = "wide-by-node"
            samples, notes = _read_by_node(text, header, positions["time"], positions["node"])
        else:
            layout = "wide"
            samples, notes = _read_wide(text, header, positions["time"])
    series = tuple(sorted({item.metric for item in samples.series}))
    _apply_units(text, samples, units, ignore_unused_units)
    table, unknown, more = _to_table(text, samples, step_seconds, header_rows)
    return MetricsFile(table, layout, series, unknown, tuple(notes + more))


def _position(text: CsvText, header: list[str], aliases: tuple[str, ...], name: str | None) -> int | None:
    if name is None:
        return find_column(header, aliases)
    if name not in header:
        raise InvalidInputError(
            f"{text.path} has no column {name!r} (it has {_some(header)})", cure=_closest(name, header)
        )
    return header.index(name)


def _some(names: Sequence[str], count: int = 8) -> str:
    shown = ", ".join(repr(name) for name in names[:count])
    return shown + (f" and {len(names) - count} more" if len(names) > count else "")


def _closest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(repr(item) for item in close)}?" if close else "check the name"


def _header_levels(text: CsvText) -> tuple[dict[str, int], int] | None:
    """Find a multi-row header: which row is which level, and how many rows it has in all."""
    levels: dict[str, int] = {}
    for index, record in enumerate(text.head):
        first = [record[0].strip()]
        for level, aliases in (("node", NODE_NAMES), ("metric", METRIC_NAMES), ("statistic", STATISTIC_NAMES)):
            if find_column(first, aliases) is not None and level not in levels:
                levels[level] = index
                break
        else:
            break
    if len(levels) < 2 or "node" not in levels or "metric" not in levels:
        return None
    rows = len(levels)
    # pandas writes the index's name on a row of its own.
    if len(text.head) > rows and not any(cell.strip() for cell in text.head[rows][1:]):
        rows += 1
    return levels, rows


def _read_multi_row(text: CsvText, levels: Mapping[str, int], header_rows: int) -> tuple[_Samples, list[str]]:
    width = len(text.head[0])
    names = {level: [cell.strip() for cell in text.head[row]] for level, row in levels.items()}
    for level, row in levels.items():
        if len(names[level]) != width:
            raise InvalidInputError(
                f"{text.path}, line {row + 1} ({level}) has {len(names[level])} cells where line 1 has {width}",
                cure="name node, metric and statistic of every column",
            )
    keys: list[tuple[str, str | None, _Series]] = []
    for column in range(1, width):
        node, metric = names["node"][column], names["metric"][column]
        if not node or not metric:
            raise InvalidInputError(
                f"{text.path}, column {column + 1} has no {'node' if not node else 'metric'} in the header",
                cure="pandas leaves repeats empty when merging cells; write every name out",
            )
        keys.append((*_split_peer(node), _Series(metric, names["statistic"][column] if "statistic" in names else None)))
    cells = columns(text, header_rows, width)
    labels = [f"{node}, {series.metric}, {series.statistic or ''}" for node, _, series in keys]
    return _from_columns(text, header_rows, cells[0], "time", keys, cells[1:], labels), []


def _split_peer(node: str) -> tuple[str, str | None]:
    caller, arrow, callee = node.partition("->")
    return (caller.strip(), callee.strip()) if arrow and caller.strip() and callee.strip() else (node, None)


def _from_columns(
    text: CsvText,
    header_rows: int,
    time: pa.Array,
    time_name: str,
    keys: list[tuple[str, str | None, _Series]],
    cells: list[pa.Array],
    labels: list[str],
) -> _Samples:
    """Melt one column a series into long format."""
    times = as_times(text, header_rows, time_name, time)
    count = len(times)
    values = np.empty((len(keys), count))
    for position, (column, label) in enumerate(zip(cells, labels, strict=True)):
        values[position] = as_numbers(text, header_rows, label, column)
    nodes, node_codes = _codes([key[0] for key in keys])
    peers, peer_codes = _codes([key[1] for key in keys])
    series, series_codes = _codes([key[2] for key in keys])
    return _Samples(
        times=np.tile(times, len(keys)),
        node_codes=np.repeat(node_codes, count),
        nodes=nodes,
        peer_codes=np.repeat(peer_codes, count),
        peers=peers,
        series_codes=np.repeat(series_codes, count),
        series=series,
        values=values.ravel(),
        rows=np.tile(np.arange(count), len(keys)),
    )


def _codes(items: Sequence[Any]) -> tuple[list[Any], _Ints]:
    """Number the distinct items in order of appearance; None is -1."""
    seen: dict[Any, int] = {}
    codes = [-1 if item is None else seen.setdefault(item, len(seen)) for item in items]
    return list(seen), np.asarray(codes, dtype=np.int64)


def _encode(column: pa.Array) -> tuple[list[str], _Ints]:
    """Dictionary-encode strings; null and empty are -1."""
    encoded = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column).dictionary_encode()
    codes = pc.fill_null(encoded.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    return encoded.dictionary.to_pylist(), codes


def _read_tidy(text: CsvText, header: list[str], positions: Mapping[str, int | None]) -> tuple[_Samples, list[str]]:
    cells = columns(text, 1, len(header))
    named = {name: cells[at] for name, at in positions.items() if at is not None}
    for name in ("node", "metric"):
        require_filled(text, 1, header[positions[name] or 0], named[name])
    times = as_times(text, 1, header[positions["time"] or 0], named["time"])
    values = as_numbers(text, 1, header[positions["value"] or 0], named["value"])
    nodes, node_codes = _encode(named["node"])
    taken = set(positions.values())
    optional: dict[str, int] = {}
    for name, aliases in (("peer", PEER_NAMES), ("statistic", STATISTIC_NAMES), ("unit", UNIT_NAMES)):
        at = find_column(header, aliases)
        if at is not None and at not in taken:
            optional[name] = at
    peers: list[str] = []
    peer_codes = np.full(len(times), -1, np.int64)
    if "peer" in optional:
        peers, peer_codes = _encode(cells[optional["peer"]])
    # Metric, statistic and unit together name a series.
    metrics, metric_codes = _encode(named["metric"])
    parts: list[tuple[list[str], _Ints]] = []
    for name in ("statistic", "unit"):
        parts.append(_encode(cells[optional[name]]) if name in optional else ([], np.full(len(times), -1, np.int64)))
    (stats, stat_codes), (units, unit_codes) = parts
    combined = (metric_codes * (len(stats) + 1) + stat_codes + 1) * (len(units) + 1) + unit_codes + 1
    distinct, first, series_codes = np.unique(combined, return_index=True, return_inverse=True)
    series = [
        _Series(
            metrics[metric_codes[row]],
            stats[stat_codes[row]] if stat_codes[row] >= 0 else None,
            units[unit_codes[row]] if unit_codes[row] >= 0 else None,
        )
        for row in first
    ]
    assert len(series) == len(distinct)  # noqa: S101
    ignored = [name for at, name in enumerate(header) if at not in taken and at not in optional.values()]
    notes = [f"ignored columns: {', '.join(ignored)}"] if ignored else []
    samples = _Samples(
        times,
        node_codes,
        nodes,
        peer_codes,
        peers,
        series_codes,
        series,
        values,
        np.arange(len(times)),
    )
    return samples, notes


def _read_by_node(text: CsvText, header: list[str], time: int, node: int) -> tuple[_Samples, list[str]]:
    cells = columns(text, 1, len(header))
    require_filled(text, 1, header[node], cells[node])
    times = as_times(text, 1, header[time], cells[time])
    nodes, node_codes = _encode(cells[node])
    metrics: list[int] = []
    ignored: list[str] = []
    for at, name in enumerate(header):
        if at in (time, node):
            continue
        if not name or (not naming.is_known(name) and not is_numeric(cells[at])):
            ignored.append(name or f"(column {at + 1})")
        else:
            metrics.append(at)
    if not metrics:
        raise InvalidInputError(
            f"{text.path} has no column of numbers beside {header[time]!r} and {header[node]!r}",
            cure="add one column a metric, or use the tidy layout: timestamp,node,metric,value",
        )
    count = len(times)
    values = np.concatenate([as_numbers(text, 1, header[at], cells[at]) for at in metrics])
    samples = _Samples(
        times=np.tile(times, len(metrics)),
        node_codes=np.tile(node_codes, len(metrics)),
        nodes=nodes,
        peer_codes=np.full(count * len(metrics), -1, np.int64),
        peers=[],
        series_codes=np.repeat(np.arange(len(metrics)), count),
        series=[_Series(header[at]) for at in metrics],
        values=values,
        rows=np.tile(np.arange(count), len(metrics)),
    )
    return samples, [f"ignored columns: {', '.join(ignored)}"] if ignored else []


def _read_wide(text: CsvText, header: list[str], time: int) -> tuple[_Samples, list[str]]:
    others = [at for at in range(len(header)) if at != time]
    # Other ways to write the time are no series.
    also_time = [at for at in others if find_column([header[at]], TIME_NAMES) is not None]
    others = [at for at in others if at not in also_time]
    names = [header[at] for at in others]
    if not names:
        raise InvalidInputError(f"{text.path} has no column beside the time", cure="add one column a series")
    keys = split_series_names(text.path, names)
    cells = columns(text, 1, len(header))
    samples = _from_columns(text, 1, cells[time], header[time], keys, [cells[at] for at in others], names)
    ignored = [header[at] for at in also_time]
    return samples, [f"ignored columns: {', '.join(ignored)}"] if ignored else []


def split_series_names(path: Path, names: Sequence[str]) -> list[tuple[str, str | None, _Series]]:
    """Split each column name into (node, peer, series).

    One separator serves for the whole file: the first of ``: | / .`` that is in every name, or ``_`` where every name
    ends in a known metric. A name is split at its last separator, or earlier where that gives a known metric.

    Raises:
        InvalidInputError: a name has no separator, or its node or metric is empty.
    """
    for separator in (*_SEPARATORS, "_"):
        if not all(separator in name for name in names):
            continue
        found: list[tuple[str, str | None, _Series]] = []
        for name in names:
            split = _split_name(name, separator)
            if separator == "_" and not (split and naming.is_known(split[1])):
                break
            if split is None:
                raise InvalidInputError(
                    f"{path}, line 1: column {name!r} lacks the node or the metric", cure="name it node:metric"
                )
            found.append((*_split_peer(split[0]), _Series(split[1])))
        else:
            return found
    odd = next((name for name in names if ":" not in name), names[0])
    raise InvalidInputError(
        f"{path}, line 1: cannot tell node and metric of column {odd!r}",
        cure="name columns node:metric, or use the tidy layout: timestamp,node,metric,value",
    )


def _split_name(name: str, separator: str) -> tuple[str, str] | None:
    pieces = name.split(separator)
    choices = [
        (separator.join(pieces[:at]).strip(), separator.join(pieces[at:]).strip()) for at in range(1, len(pieces))
    ]
    choices = [(node, metric) for node, metric in choices if node and metric]
    for node, metric in choices:
        if naming.is_known(metric):
            return node, metric
    return choices[-1] if choices and choices[-1][1] == pieces[-1].strip() else None


def _apply_units(text: CsvText, samples: _Samples, units: Mapping[str, str], ignore_unused: bool) -> None:
    unused = set(units)
    for position, series in enumerate(samples.series):
        if series.metric in units:
            samples.series[position] = _Series(series.metric, series.statistic, units[series.metric])
            unused.discard(series.metric)
    if unused and not ignore_unused:
        name = sorted(unused)[0]
        have = sorted({series.metric for series in samples.series})
        raise InvalidInputError(
            f"--unit names the metric {name!r}, which {text.path} lacks (it has {_some(have)})",
            cure=_closest(name, have),
        )


def _to_table(
    text: CsvText, samples: _Samples, step_seconds: float | None, header_rows: int
) -> tuple[pa.Table, tuple[str, ...], list[str]]:
    """Make names and units canonical, check duplicates, and sort."""
    notes: list[str] = []
    count = len(samples.series)
    largest = np.full(count, -np.inf)
    real = ~np.isnan(samples.values)
    np.maximum.at(largest, samples.series_codes[real], samples.values[real])
    names: list[str] = []
    scales, offsets = np.ones(count), np.zeros(count)
    unknown: set[str] = set()
    step: float | None = step_seconds
    for code, series in enumerate(samples.series):
        try:
            resolution = naming.resolve(series.metric, series.statistic, series.unit)
        except InvalidInputError as error:
            raise InvalidInputError(f"{text.path}, metric {series.metric!r}: {error}", cure=error.cure) from None
        resolution, note = naming.settle(resolution, series.metric, float(largest[code]))
        if note:
            notes.append(note)
        scale = 1.0 if resolution.scale is None else resolution.scale
        if resolution.per_step:
            step = step or _median_step(text, samples.times, series.metric)
            scale /= step
        names.append(resolution.name)
        scales[code], offsets[code] = scale, resolution.offset
        if not resolution.known:
            unknown.add(resolution.name)
    values = samples.values * scales[samples.series_codes] + offsets[samples.series_codes]
    metrics, metric_of_series = _codes(names)
    metric_codes = metric_of_series[samples.series_codes]
    node_rank, peer_rank, metric_rank = _ranks(samples.nodes), _ranks(samples.peers), _ranks(metrics)
    micros = samples.times // 1000
    ranks = (
        node_rank[samples.node_codes],
        np.where(samples.peer_codes < 0, -1, peer_rank[samples.peer_codes]) if samples.peers else samples.peer_codes,
        metric_rank[metric_codes],
        micros,
    )
    # Missing values last within equal keys, so that a real value wins over an empty cell.
    order = np.lexsort((samples.rows, np.isnan(values), *reversed(ranks)))
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for rank in ranks:
        sorted_rank = rank[order]
        same &= sorted_rank[1:] == sorted_rank[:-1]
    keep = np.ones(len(order), dtype=bool)
    if same.any():
        keep[1:] = ~same
        _check_conflicts(text, samples, values, order, keep, header_rows)
        notes.append(f"dropped {int((~keep).sum()):,} repeated samples")
    chosen = order[keep]
    missing = int(np.isnan(values[chosen]).sum())
    if missing:
        notes.append(f"{missing:,} of {len(chosen):,} samples have no value")
    table = pa.table(
        {
            "timestamp": pa.array(micros[chosen]).cast(METRICS_SCHEMA.field("timestamp").type),
            "node": _decode(samples.nodes, samples.node_codes[chosen]),
            "peer": _decode(samples.peers, samples.peer_codes[chosen]),
            "metric": _decode(metrics, metric_codes[chosen]),
            "value": pa.array(values[chosen], from_pandas=True),
        },
        schema=METRICS_SCHEMA,
    )
    return table, tuple(sorted(unknown)), notes


def _median_step(text: CsvText, times: _Ints, metric: str) -> float:
    distinct = np.unique(times)
    if len(distinct) < 2:
        raise InvalidInputError(
            f"{text.path}: {metric!r} counts events in an interval whose length one time cannot tell",
            cure="give it with --step, e.g. --step 60s",
        )
    return float(np.median(np.diff(distinct))) / 1e9


def _ranks(names: Sequence[str]) -> _Ints:
    ranks = np.empty(len(names), np.int64)
    ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    return ranks


def _decode(names: Sequence[str], codes: _Ints) -> pa.Array:
    if not names:
        return pa.nulls(len(codes), pa.string())
    indices = pa.array(codes, mask=codes < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names, pa.string())).cast(pa.string())


def _check_conflicts(
    text: CsvText,
    samples: _Samples,
    values: _Floats,
    order: _Ints,
    keep: np.ndarray[Any, np.dtype[np.bool_]],
    header_rows: int,
) -> None:
    """Raise if a repeated sample has another value than the first of its key; empty cells agree with anything."""
    first = np.maximum.accumulate(np.where(keep, np.arange(len(order)), 0))
    mine, theirs = values[order], values[order[first]]
    conflict = ~keep & ~np.isnan(mine) & (mine != theirs)
    if not conflict.any():
        return
    # The earliest in the file, so that the message does not depend on the sort.
    at = np.flatnonzero(conflict)
    position = int(at[np.argmin(samples.rows[order[at]])])
    one, other = int(order[first[position]]), int(order[position])
    series = samples.series[samples.series_codes[other]]
    rival = samples.series[samples.series_codes[one]]
    lines = [text.line_of(int(samples.rows[index]), header_rows) for index in (one, other)]
    what = f"{series.metric!r} of {samples.nodes[samples.node_codes[other]]!r}"
    if rival != series:
        raise InvalidInputError(
            f"{text.path}, line {lines[1]}: {what} and {rival.metric!r} are the same metric but differ "
            f"({samples.values[one]:g} and {samples.values[other]:g})",
            cure="keep one of the two columns",
        )
    raise InvalidInputError(
        f"{text.path}, lines {lines[0]} and {lines[1]}: {what} has two values at one time "
        f"({samples.values[one]:g} and {samples.values[other]:g})",
        cure="keep one, or give replicas names of their own",
    )


# --- edges ---------------------------------------------------------------------------------------------------------

CALLER_NAMES: Final = ("caller", "source", "src", "from", "client", "parent", "upstream")
CALLEE_NAMES: Final = ("callee", "target", "destination", "dst", "to", "server", "child", "downstream")
_NUMBERS: Final = ("call_rate", "error_ratio", "latency_seconds", "timeout_seconds")


@dataclass(frozen=True)
class EdgesFile:
    """What an edge CSV gave: the table (schema EDGES_SCHEMA, sorted), and nodes that it names without any edge."""

    table: pa.Table
    layout: str
    isolated: tuple[str, ...]
    notes: tuple[str, ...]

    def source(self, name: str) -> Source:
        """Describe this import for the bundle's header."""
        detail = "; ".join((f"{self.layout} CSV, {self.table.num_rows:,} edges", *self.notes))
        return Source(name=name, kind="edges-csv", status=SourceStatus.OK, detail=detail)


def read_edges(path: Path | str, *, reverse: bool = False, progress: Progress | None = None) -> EdgesFile:
    """Read an edge list (caller, callee, and any column of EDGES_SCHEMA) or an adjacency matrix (rows call columns).

    Args:
        reverse: the file gives causal direction (callee first; columns call rows).

    Raises:
        NotFoundError: no such file.
        InvalidInputError: the layout is not recognised, a node is listed twice, or two rows for one edge differ.
    """
    text = load(Path(path), progress)
    header = [cell.strip() for cell in text.head[0]]
    caller, callee = find_column(header, CALLER_NAMES), find_column(header, CALLEE_NAMES)
    if caller is not None and callee is not None and caller != callee and len(header) < 40:
        return _read_edge_list(text, header, caller, callee, reverse)
    if len(header) > 1 and len(text.head) > 1:
        return _read_adjacency(text, header, reverse)
    raise InvalidInputError(
        f"{text.path} is neither an edge list nor an adjacency matrix (line 1 has {_some(header)})",
        cure="write one row an edge with the columns caller,callee",
    )


def _read_edge_list(text: CsvText, header: list[str], caller: int, callee: int, reverse: bool) -> EdgesFile:
    check_unique_header(text, header)
    cells = columns(text, 1, len(header))
    ends = [cells[caller], cells[callee]]
    for at in (caller, callee):
        require_filled(text, 1, header[at], cells[at])
    if reverse:
        ends.reverse()
    count = len(ends[0])
    data: dict[str, pa.Array] = {"caller": ends[0], "callee": ends[1]}
    used = {caller, callee}
    for field in EDGES_SCHEMA:
        position = find_column(header, (field.name,))
        if field.name in data or position is None or position in used:
            continue
        at = position
        used.add(at)
        if field.name in _NUMBERS:
            values = as_numbers(text, 1, header[at], cells[at])
            negative = np.flatnonzero(values < 0)
            if len(negative):
                raise InvalidInputError(
                    f"{text.path}, line {text.line_of(int(negative[0]), 1)}, column {header[at]!r}: "
                    f"{values[negative[0]]:g} is negative",
                    cure="rates, ratios and durations are 0 or more; leave unknown ones empty",
                )
            data[field.name] = pa.array(values, from_pandas=True)
        elif field.name == "asynchronous":
            data[field.name] = as_booleans(text, 1, header[at], cells[at])
        else:
            data[field.name] = cells[at]
    relation = data.get("relation", pa.nulls(count, pa.string()))
    data["relation"] = pc.fill_null(pc.if_else(pc.equal(relation, ""), None, relation), Relation.CALLS.value)
    allowed = pa.array([kind.value for kind in Relation])
    odd = pc.index(pc.is_in(data["relation"], allowed), False).as_py()
    if odd >= 0:
        raise InvalidInputError(
            f"{text.path}, line {text.line_of(odd, 1)}: relation {data['relation'][odd].as_py()!r} is unknown",
            cure=f"use one of {', '.join(allowed.to_pylist())}",
        )
    notes = []
    ignored = [name for at, name in enumerate(header) if at not in used]
    if ignored:
        notes.append(f"ignored columns: {', '.join(ignored)}")
    table = pa.table({f.name: data.get(f.name, pa.nulls(count, f.type)) for f in EDGES_SCHEMA}, schema=EDGES_SCHEMA)
    return _finish_edges(text, table, np.arange(count), "edge list", notes, set())


def _read_adjacency(text: CsvText, header: list[str], reverse: bool) -> EdgesFile:
    targets = header[1:]
    cells = columns(text, 1, len(header))
    require_filled(text, 1, header[0] or "first", cells[0])
    sources = cells[0].to_pylist()
    for what, names in (("column", targets), ("row", sources)):
        seen: set[str] = set()
        for position, name in enumerate(names):
            if not name:
                raise InvalidInputError(f"{text.path}, line 1: column {position + 2} has no name", cure="name the node")
            if name in seen:
                where = "line 1" if what == "column" else f"line {text.line_of(position, 1)}"
                raise InvalidInputError(
                    f"{text.path}, {where}: node {name!r} has more than one {what}", cure="merge them or rename one"
                )
            seen.add(name)
    if not set(targets) & set(sources):
        raise InvalidInputError(
            f"{text.path} is neither an edge list nor an adjacency matrix: no node is both a row and a column",
            cure="write one row an edge with the columns caller,callee",
        )
    weights = np.stack([as_numbers(text, 1, targets[at], cells[at + 1]) for at in range(len(targets))], axis=1)
    rows, cols = np.nonzero(np.nan_to_num(weights))
    notes = []
    if len(rows) and not (weights[rows, cols] == 1).all():
        notes.append("weights of the matrix were not used: their meaning is unknown")
    ends = [[sources[row] for row in rows], [targets[col] for col in cols]]
    if reverse:
        ends.reverse()
    data = {"caller": ends[0], "callee": ends[1], "relation": [Relation.CALLS.value] * len(rows)}
    table = pa.table(
        {f.name: pa.array(data[f.name]) if f.name in data else pa.nulls(len(rows), f.type) for f in EDGES_SCHEMA}
        if len(rows)
        else {f.name: pa.nulls(0, f.type) for f in EDGES_SCHEMA},
        schema=EDGES_SCHEMA,
    )
    return _finish_edges(text, table, rows, "adjacency matrix", notes, set(targets) | set(sources))


def _finish_edges(
    text: CsvText, table: pa.Table, rows: _Ints, layout: str, notes: list[str], named: set[str]
) -> EdgesFile:
    loops = pc.equal(table["caller"], table["callee"]).to_numpy() if table.num_rows else np.zeros(0, bool)
    if loops.any():
        notes.append(f"dropped {int(loops.sum())} edges from a node to itself")
        named |= set(table.filter(pa.array(loops))["caller"].to_pylist())
    seen: dict[tuple[str, str, str], tuple[int, dict[str, Any]]] = {}
    repeats = 0
    for index, row in enumerate(table.to_pylist()):
        if loops[index]:
            continue
        key = (row["caller"], row["callee"], row["relation"])
        if key not in seen:
            seen[key] = (index, row)
        elif seen[key][1] == row:
            repeats += 1
        else:
            lines = [text.line_of(int(rows[at]), 1) for at in (seen[key][0], index)]
            raise InvalidInputError(
                f"{text.path}, lines {lines[0]} and {lines[1]}: the edge {key[0]!r} -> {key[1]!r} "
                f"({key[2]}) is given twice with different values",
                cure="keep one of the two rows",
            )
    if repeats:
        notes.append(f"dropped {repeats} repeated edges")
    kept = table.take(pa.array([seen[key][0] for key in sorted(seen)], pa.int64()))
    ends = {name for key in seen for name in key[:2]}
    return EdgesFile(kept, layout, tuple(sorted(named - ends)), tuple(notes))


__all__ = ["EdgesFile", "MetricsFile", "read_edges", "read_metrics", "split_series_names"]
