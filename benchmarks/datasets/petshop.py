"""PetShop (Hardt et al., 2023): injected faults in a 42-node service graph on AWS, sampled each five minutes.

Layout, as published: ``petshop/<scenario>/`` with ``graph.csv``, ``noissue/metrics.csv`` and
``<split>/issue_<n>/{metrics.csv,target.json}``.
Scenarios and splits are found by looking; nothing is listed here.

Windows. ``target.json`` gives the time of the alert, T. A row is labelled with the *start* of the five minutes that it
sums up: the row in which T falls is already partly disturbed at the victim. So:

- incident window: the rows that start at or after T, to the end of the file: what an on-call engineer would have who
  looks a quarter of an hour after the alert. Three rows in practice, the last one often recovering.
- rows before T stay in the bundle as lead-in, in neither window: the row that holds T is half and half.
- baseline: the whole of ``noissue``, which was recorded four months after the incidents.

Quiet windows mirror an issue file: two rows of lead-in and three of window, cut out of ``noissue``, with all other rows
as baseline. Each is asked for every victim metric that some issue of the scenario alerts on.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from benchmarks.cases import Case, dataset_folder
from benchmarks.datasets.tables import Floats, evenly_spaced, fold_seconds, long_table, utc
from rca.errors import InvalidInputError, NotFoundError
from rca.incident import EDGES_SCHEMA, Header, Incident, Relation, Source, Victim, Window

STEP_SECONDS = 300.0
LEAD_ROWS = 2
WINDOW_ROWS = 3

_LATENCY = {
    "Average": "latency_mean_seconds",
    "p50": "latency_p50_seconds",
    "p90": "latency_p90_seconds",
    "p95": "latency_p95_seconds",
    "p99": "latency_p99_seconds",
}


class _Target(msgspec.Struct, frozen=True):
    node: str
    metric: str
    agg: str
    timestamp: float


class _RootCause(msgspec.Struct, frozen=True):
    node: str


class _Issue(msgspec.Struct, frozen=True):
    target: _Target
    root_cause: _RootCause


@dataclass(frozen=True)
class Sheet:
    """A wide metrics file: ``times`` [T] Unix seconds, ``columns`` (node, canonical metric), ``values`` [T, C]."""

    times: Floats
    columns: tuple[tuple[str, str], ...]
    values: Floats

    def rows(self, chosen: Any) -> Sheet:
        """The same columns with some rows only."""
        return Sheet(self.times[chosen], self.columns, self.values[chosen])

    def table(self) -> pa.Table:
        """As a metrics table."""
        return long_table(self.times, self.columns, self.values)


def canonical(metric: str, statistic: str) -> tuple[str, float, float]:
    """The canonical name of a PetShop column and the scale and offset that turn its values into that unit.

    Latency is in seconds already; availability is the percentage of good requests; requests are counted per row.
    """
    if metric == "latency" and statistic in _LATENCY:
        return _LATENCY[statistic], 1.0, 0.0
    if metric == "availability" and statistic == "Average":
        return "error_ratio", -0.01, 1.0
    if metric == "requests" and statistic == "Sum":
        return "request_rate", 1.0 / STEP_SECONDS, 0.0
    return f"{metric}_{statistic}".lower(), 1.0, 0.0


def read_sheet(path: Path) -> Sheet:
    """Read a PetShop ``metrics.csv``: three header rows (node, metric, statistic), a row of index name, then values.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: the header is not that, or a cell is no number; the message names the line.
    """
    if not path.is_file():
        raise NotFoundError(f"no file {path}", cure="unpack the data set again")
    with path.open(newline="", encoding="utf-8") as stream:
        lines = list(csv.reader(stream))
    if len(lines) < 4 or [line[0] for line in lines[1:4]] != ["metric", "statistic", "unix_timestamp"]:
        raise InvalidInputError(
            f"{path} does not start with the rows microservice, metric, statistic, unix_timestamp",
            cure="use the file as published",
        )
    width = len(lines[0])
    names = [canonical(metric, statistic) for metric, statistic in zip(lines[1][1:], lines[2][1:], strict=True)]
    times = np.empty(len(lines) - 4)
    values = np.full((len(lines) - 4, width - 1), np.nan)
    for number, line in enumerate(lines[4:]):
        if len(line) != width:
            raise InvalidInputError(
                f"{path}, line {number + 5}: {len(line)} cells instead of {width}", cure="use the file as published"
            )
        try:
            times[number] = float(line[0])
            values[number] = [float(cell) if cell else np.nan for cell in line[1:]]
        except ValueError as error:
            raise InvalidInputError(f"{path}, line {number + 5}: {error}", cure="use the file as published") from None
    scale = np.array([scale for _, scale, _ in names])
    offset = np.array([offset for _, _, offset in names])
    scaled = values * scale + offset
    ratio = np.array([name == "error_ratio" for name, _, _ in names])
    if ratio.any():
        # Percentages are sums of floats: 100 may be 100.00000000000001.
        scaled[:, ratio] = np.where(np.abs(scaled[:, ratio]) < 1e-9, 0.0, scaled[:, ratio])
        if np.nanmin(scaled[:, ratio], initial=0.0) < 0 or np.nanmax(scaled[:, ratio], initial=0.0) > 1:
            raise InvalidInputError(
                f"{path}: an availability lies outside 0 to 100", cure="give availability as a percentage"
            )
    columns = tuple((node, name) for node, (name, _, _) in zip(lines[0][1:], names, strict=True))
    return Sheet(times, columns, scaled)


def read_graph(path: Path) -> pa.Table:
    """Read ``graph.csv`` (an adjacency matrix; the row calls the column) as an edges table.

    Raises:
        NotFoundError: no such file.
        InvalidInputError: not a square matrix of 0 and 1.
    """
    if not path.is_file():
        raise NotFoundError(f"no file {path}", cure="unpack the data set again")
    with path.open(newline="", encoding="utf-8") as stream:
        head, *rows = list(csv.reader(stream))
    callers, callees = [], []
    for number, row in enumerate(rows):
        if len(row) != len(head):
            raise InvalidInputError(
                f"{path}, line {number + 2}: {len(row)} cells instead of {len(head)}", cure="use the file as published"
            )
        for callee, cell in zip(head[1:], row[1:], strict=True):
            if cell not in {"0", "1", "0.0", "1.0", ""}:
                raise InvalidInputError(
                    f"{path}, line {number + 2}: {cell!r} is neither 0 nor 1", cure="use the file as published"
                )
            # A loop says nothing about propagation between nodes.
            if cell in {"1", "1.0"} and callee != row[0]:
                callers.append(row[0])
                callees.append(callee)
    return pa.table(
        {
            **{field.name: pa.nulls(len(callers), field.type) for field in EDGES_SCHEMA},
            "caller": pa.array(callers, pa.string()),
            "callee": pa.array(callees, pa.string()),
            "relation": pa.array([Relation.CALLS.value] * len(callers), pa.string()),
        },
        schema=EDGES_SCHEMA,
    )


def scenarios(folder: Path) -> list[Path]:
    """The scenario folders below ``folder``, sorted.

    Raises:
        NotFoundError: there are none.
    """
    found = sorted(path.parent for path in folder.glob("*/graph.csv"))
    if not found:
        raise NotFoundError(f"no scenario (a folder with graph.csv) below {folder}", cure="unpack the data set again")
    return found


def _issues(scenario: Path) -> Iterator[tuple[Path, _Issue]]:
    def order(path: Path) -> tuple[str, int]:
        number = path.parent.name.removeprefix("issue_")
        return path.parent.parent.name, int(number) if number.isdigit() else 0

    for path in sorted(scenario.glob("*/issue_*/target.json"), key=order):
        try:
            yield path.parent, msgspec.json.decode(path.read_bytes(), type=_Issue)
        except msgspec.DecodeError as error:
            raise InvalidInputError(f"{path}: {error}", cure="use the file as published") from None


def _header(name: str, alert: float, end: float, baseline: Window, victim: Victim) -> Header:
    return Header(
        id=name,
        title=f"{victim.metric} of {victim.node}",
        window=Window(utc(alert), utc(end)),
        baseline=baseline,
        victim=victim,
        onset=utc(alert),
        sources=(Source("petshop", "csv", detail="service metrics each 300 s; no traces"),),
    )


def incidents(folder: Path | None = None) -> Iterator[Case]:
    """Yield every issue of every scenario, grouped by the victim's metric.

    Raises:
        NotFoundError: the data is not there.
        InvalidInputError: a file is malformed, or an issue has no row at or after its alert.
    """
    for scenario in scenarios(folder or dataset_folder("petshop")):
        normal = read_sheet(scenario / "noissue" / "metrics.csv")
        edges = read_graph(scenario / "graph.csv")
        normal_table = normal.table()
        baseline = Window(utc(normal.times.min()), utc(normal.times.max() + STEP_SECONDS))
        for path, issue in _issues(scenario):
            sheet = read_sheet(path / "metrics.csv")
            alert = issue.target.timestamp
            if not (sheet.times >= alert).any():
                raise InvalidInputError(
                    f"{path}/metrics.csv has no row at or after the alert", cure="use the file as published"
                )
            name = f"petshop-{scenario.name}-{path.parent.name}-{path.name}"
            header = _header(
                name,
                alert,
                float(sheet.times.max()) + STEP_SECONDS,
                baseline,
                Victim(issue.target.node, canonical(issue.target.metric, issue.target.agg)[0]),
            )
            yield Case(
                name=name,
                dataset="petshop",
                scenario=scenario.name,
                group=issue.target.metric,
                incident=Incident.create(header, metrics=pa.concat_tables([normal_table, sheet.table()]), edges=edges),
                truth=(issue.root_cause.node,),
            )


def quiet(count: int = 50, folder: Path | None = None) -> Iterator[Case]:
    """Yield up to ``count`` quiet windows per scenario and victim metric, evenly spaced over ``noissue``.

    Raises:
        NotFoundError: the data is not there.
        InvalidInputError: a file is malformed.
    """
    for scenario in scenarios(folder or dataset_folder("petshop")):
        normal = read_sheet(scenario / "noissue" / "metrics.csv")
        edges = read_graph(scenario / "graph.csv")
        victims = sorted({(issue.target.metric, issue.target.node, issue.target.agg) for _, issue in _issues(scenario)})
        starts = list(range(LEAD_ROWS, len(normal.times) - WINDOW_ROWS + 1))
        for start in evenly_spaced(count, starts):
            alert = float(normal.times[start])
            lead, end = start - LEAD_ROWS, start + WINDOW_ROWS
            rows = np.arange(len(normal.times))
            rest = normal.rows((rows < lead) | (rows >= end))
            boundary = float(normal.times[lead])
            shift = np.where(rest.times >= boundary, fold_seconds(rest.times, boundary), 0.0)
            folded = Sheet(rest.times - shift, rest.columns, rest.values)
            table = pa.concat_tables([folded.table(), normal.rows(slice(lead, end)).table()])
            baseline = Window(utc(folded.times.min()), utc(boundary))
            for group, node, statistic in victims:
                name = f"petshop-{scenario.name}-quiet-{group}-{int(alert)}"
                header = _header(
                    name,
                    alert,
                    float(normal.times[end - 1]) + STEP_SECONDS,
                    baseline,
                    Victim(node, canonical(group, statistic)[0]),
                )
                yield Case(
                    name=name,
                    dataset="petshop",
                    scenario=scenario.name,
                    group=group,
                    incident=Incident.create(header, metrics=table, edges=edges),
                )
