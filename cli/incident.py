"""`rca incident`: validate, show and import incident bundles."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

    from rca.incident import Incident, Source, Window

app = typer.Typer(help="Validate, show and import incident bundles.", no_args_is_help=True, rich_markup_mode=None)
import_app = typer.Typer(
    help="Make an incident bundle from CSV files, traces or a recording of a scheduler.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(import_app, name="import")


class Output(StrEnum):
    """How to print."""

    TEXT = "text"
    JSON = "json"


_Bundle = Annotated[Path, typer.Argument(help="Bundle: a directory or a zip file.", show_default=False)]
_Format = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]


@app.command()
def validate(bundle: _Bundle, output: _Format = Output.TEXT) -> None:
    """List every problem of a bundle, and what limits an explanation of it.

    Exit code 0 when the bundle is valid (warnings or not), 2 when it is not, 3 when nothing is there.

    \b
    Examples:
      rca incident validate incident.zip
      rca incident validate incident.zip -o json | jq .warnings
    """
    from rca.telemetry.checks import check_bundle

    incident, problems, warnings = check_bundle(bundle)
    valid = incident is not None
    if output is Output.JSON:
        _print_json(
            {
                "schema_version": 1,
                "bundle": str(bundle),
                "valid": valid,
                "problems": [{"message": str(problem), "cure": problem.cure} for problem in problems],
                "warnings": list(warnings),
            }
        )
    else:
        for problem in problems:
            typer.echo(f"problem: {problem}")
            typer.echo(f"   cure: {problem.cure}")
        for warning in warnings:
            typer.echo(f"warning: {warning}")
        verdict = "valid" if valid else "invalid"
        typer.echo(f"{bundle}: {verdict}, {_count(problems, 'problem')}, {_count(warnings, 'warning')}")
    if not valid:
        raise typer.Exit(2)


def _count(items: Sequence[object], what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"


@app.command()
def show(bundle: _Bundle, output: _Format = Output.TEXT) -> None:
    """Show what a bundle holds: windows, victim, tables, graph, metrics and sources.

    \b
    Examples:
      rca incident show incident.zip
      rca incident show incident.zip -o json | jq .metrics
    """
    from rca.incident import read

    summary = _summary(read(bundle))
    if output is Output.JSON:
        _print_json(summary)
    else:
        _print_summary(summary)


def _summary(incident: Incident) -> dict[str, Any]:
    """Collect what `show` prints, as plain JSON data."""
    from collections import Counter

    import pyarrow.compute as pc

    from rca.signals import describe

    header = incident.header
    kinds = dict(zip(incident.nodes["node"].to_pylist(), incident.nodes["kind"].to_pylist(), strict=True))
    nodes = set(kinds)
    for column in (incident.edges["caller"], incident.edges["callee"], incident.metrics["node"]):
        nodes.update(pc.unique(column).to_pylist())
    metrics = []
    grouped = incident.metrics.group_by("metric").aggregate(
        [("node", "count_distinct"), ("value", "count"), ([], "count_all")]
    )
    for row in sorted(grouped.to_pylist(), key=lambda item: str(item["metric"])):
        described = describe(row["metric"])
        metrics.append(
            {
                "metric": row["metric"],
                "signal": described.signal.value,
                "unit": described.unit,
                "nodes": row["node_count_distinct"],
                "samples": row["count_all"],
                "missing": row["count_all"] - row["value_count"],
            }
        )

    def window(span: Window) -> dict[str, Any]:
        return {"start": span.start.isoformat(), "end": span.end.isoformat(), "seconds": span.seconds}

    return {
        "schema_version": 1,
        "id": header.id,
        "title": header.title,
        "bundle_schema_version": header.schema_version,
        "window": window(header.window),
        "baseline": window(header.baseline),
        "onset": header.onset.isoformat() if header.onset else None,
        "victim": {"node": header.victim.node, "metric": header.victim.metric},
        "labels": header.labels,
        "tables": {name: table.num_rows for name, table in incident.tables.items()},
        "nodes": dict(sorted(Counter(kinds.get(node, "service") for node in nodes).items())),
        "edges": dict(sorted(Counter(incident.edges["relation"].to_pylist()).items())),
        "metrics": metrics,
        "sources": [
            {"name": source.name, "kind": source.kind, "status": source.status.value, "detail": source.detail}
            for source in header.sources
        ],
    }


def _print_json(data: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())


def _print_summary(summary: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from cli.output import console
    from rca.report.format import printable

    out = console()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")

    def fact(name: str, value: str) -> None:
        # Text, not markup: names from elsewhere may hold brackets.
        facts.add_row(name, Text(printable(value)))

    fact("Incident", summary["id"])
    if summary["title"]:
        fact("Title", summary["title"])
    fact("Victim", f"{summary['victim']['node']} · {summary['victim']['metric']}")
    for key, name in (("window", "Window"), ("baseline", "Baseline")):
        span = summary[key]
        fact(name, f"{span['start']} to {span['end']} ({span['seconds']:,.0f} s)")
    if summary["onset"]:
        fact("Onset", summary["onset"])
    for key in ("labels", "nodes", "edges"):
        if summary[key]:
            fact(key.capitalize(), ", ".join(f"{name}={value}" for name, value in summary[key].items()))
    fact("Rows", ", ".join(f"{name} {rows:,}" for name, rows in summary["tables"].items() if rows))
    out.print(facts)
    metrics = Table("Metric", "Signal", "Unit", box=None, pad_edge=False, title="\nMetrics", title_justify="left")
    for name in ("Nodes", "Samples", "Missing"):
        metrics.add_column(name, justify="right")
    for row in summary["metrics"]:
        metrics.add_row(
            Text(printable(row["metric"])),
            row["signal"],
            row["unit"],
            *(f"{row[key]:,}" for key in ("nodes", "samples", "missing")),
        )
    out.print(metrics)
    if summary["sources"]:
        sources = Table("Source", "Kind", "Status", box=None, pad_edge=False, title="\nSources", title_justify="left")
        sources.add_column("Detail", overflow="fold")
        for row in summary["sources"]:
            sources.add_row(*(Text(printable(row[key])) for key in ("name", "kind", "status", "detail")))
        out.print(sources)


# --- import --------------------------------------------------------------------------------------------------------

_Out = Annotated[
    Path, typer.Option("--out", "-o", help="Bundle to write: a .zip file or a directory.", show_default=False)
]
_VictimOption = Annotated[str, typer.Option("--victim", help="Node that shows the symptom.", show_default=False)]
_MetricOption = Annotated[
    str | None,
    typer.Option("--metric", help="Its metric; by default its mean, median or tail latency.", show_default=False),
]
_Time = "RFC 3339, 'YYYY-mm-dd HH:MM:SS' (UTC), or Unix s, ms, us or ns."
_StartOption = Annotated[str | None, typer.Option("--start", help=f"Start of the incident: {_Time}")]
_EndOption = Annotated[str | None, typer.Option("--end", help="End of the incident (excluded).")]
_AtOption = Annotated[str | None, typer.Option("--at", help="Time of the alert, instead of --start and --end.")]
_MarginOption = Annotated[str, typer.Option("--margin", help="With --at: the window is this long before and after.")]
_BaselineStart = Annotated[str | None, typer.Option("--baseline-start", help="Normal time; by default all before.")]
_BaselineEnd = Annotated[str | None, typer.Option("--baseline-end", help="End of normal time (excluded).")]
_Title = Annotated[str, typer.Option("--title", help="One line for people.")]
_Id = Annotated[str | None, typer.Option("--id", help="Incident id; by default made of time, victim and metric.")]
_Labels = Annotated[list[str] | None, typer.Option("--label", help="name=value; may be repeated.")]
_Step = Annotated[str | None, typer.Option("--step", help="Length of one sample interval, e.g. 60s.")]
_Units = Annotated[
    list[str] | None, typer.Option("--unit", help="metric=unit where the file does not say; may be repeated.")
]
_MoreMetrics = Annotated[
    list[Path] | None, typer.Option("--metrics", help="Metrics CSV to add to those of the spans; may be repeated.")
]
_MoreEdges = Annotated[
    list[Path] | None, typer.Option("--edges", help="Edge list or adjacency matrix CSV; may be repeated.")
]
_SpanFiles = Annotated[list[Path], typer.Argument(help="Files with spans, plain or gzip.", show_default=False)]
_FromPod = Annotated[
    bool, typer.Option("--service-from-pod", help="Services are pod names: strip what Kubernetes appends.")
]
_Peers = Annotated[
    bool, typer.Option("--peers/--no-peers", help="Make nodes of uninstrumented callees (databases, ...).")
]
_KeepSpans = Annotated[bool, typer.Option("--keep-spans/--drop-spans", help="Store the spans in the bundle too.")]


class _Inputs:
    """What the importers read so far."""

    def __init__(self) -> None:
        self.metrics: list[pa.Table] = []
        self.edges: list[pa.Table] = []
        self.isolated: list[str] = []
        self.sources: list[Source] = []
        self.spans: pa.Table | None = None

    def add_csv(
        self, metrics: Sequence[Path], edges: Sequence[Path], progress: Callable[[int], None], **options: Any
    ) -> None:
        from rca.telemetry.metrics_csv import read_edges, read_metrics

        reverse = options.pop("reverse", False)
        units = parse_pairs(options.pop("units", None), "--unit")
        unused = dict(units)
        for path in metrics:
            # A unit may concern one of several files; none may concern no file.
            found = read_metrics(path, units=units, ignore_unused_units=True, progress=progress, **options)
            for name in found.series:
                unused.pop(name, None)
            self.metrics.append(found.table)
            self.sources.append(found.source(path.name))
        if unused:
            from rca.errors import InvalidInputError

            name = sorted(unused)[0]
            raise InvalidInputError(
                f"--unit names the metric {name!r}, which no input has", cure="write it as the file's header does"
            )
        for path in edges:
            graph = read_edges(path, reverse=reverse, progress=progress)
            self.edges.append(graph.table)
            self.isolated.extend(graph.isolated)
            self.sources.append(graph.source(path.name))


@import_app.command("csv")
def import_csv(
    metrics: Annotated[list[Path], typer.Argument(help="Metrics CSV, wide or tidy; plain or gzip.")],
    out: _Out,
    victim: _VictimOption,
    edges: _MoreEdges = None,
    metric: _MetricOption = None,
    start: _StartOption = None,
    end: _EndOption = None,
    at: _AtOption = None,
    margin: _MarginOption = "10m",
    baseline_start: _BaselineStart = None,
    baseline_end: _BaselineEnd = None,
    step: _Step = None,
    unit: _Units = None,
    time_column: Annotated[str | None, typer.Option(help="Name of the time column, if unusual.")] = None,
    node_column: Annotated[str | None, typer.Option(help="Name of the node column, if unusual.")] = None,
    reverse_edges: Annotated[bool, typer.Option(help="Edges run from callee to caller.")] = False,
    title: _Title = "",
    id: _Id = None,
    label: _Labels = None,
) -> None:
    """Make a bundle from metrics and edges in CSV files.

    \b
    Metrics, told apart by the header:
      timestamp,node,metric,value[,peer,statistic,unit]   tidy
      timestamp,cart:latency_ms,cart:cpu,...              wide (also / | . and _)
      timestamp,pod,latency_p99_ms,cpu,...                one column a metric
      rows for node, metric and statistic                 pandas MultiIndex
    Edges: caller,callee[,relation,protocol,...], or a matrix whose rows call its columns.

    \b
    Examples:
      rca incident import csv metrics.csv --edges graph.csv --victim frontend \\
        --at 2026-01-31T03:10:00Z -o incident.zip
      rca incident import csv baseline.csv fault.csv --edges graph.csv --victim frontend \\
        --metric latency --start '2026-01-31 03:00:00' --end '2026-01-31 03:25:00' -o incident.zip
    """
    inputs = _Inputs()
    with _progress([*metrics, *(edges or [])]) as progress:
        inputs.add_csv(
            metrics,
            edges or [],
            progress,
            step_seconds=_seconds(step),
            units=unit,
            time_column=time_column,
            node_column=node_column,
            reverse=reverse_edges,
        )
    _write(inputs, out, victim, metric, (start, end, at, margin), (baseline_start, baseline_end), title, id, label)


@import_app.command("otlp")
def import_otlp(
    files: _SpanFiles,
    out: _Out,
    victim: _VictimOption,
    metric: _MetricOption = None,
    start: _StartOption = None,
    end: _EndOption = None,
    at: _AtOption = None,
    margin: _MarginOption = "10m",
    baseline_start: _BaselineStart = None,
    baseline_end: _BaselineEnd = None,
    step: _Step = None,
    service_attribute: Annotated[
        str, typer.Option(help="Resource attribute that names the node, e.g. k8s.pod.name.")
    ] = "service.name",
    service_from_pod: _FromPod = False,
    peers: _Peers = True,
    metrics: _MoreMetrics = None,
    edges: _MoreEdges = None,
    unit: _Units = None,
    keep_spans: _KeepSpans = False,
    title: _Title = "",
    id: _Id = None,
    label: _Labels = None,
) -> None:
    """Make a bundle from OTLP JSON traces, as the OpenTelemetry collector's file exporter writes them.

    \b
    Examples:
      rca incident import otlp traces.json --victim checkout --at 2026-01-31T03:10:00Z -o incident.zip
      rca incident import otlp traces-*.jsonl.gz --metrics gpu.csv --step 30s --victim checkout \\
        --start 2026-01-31T03:00:00Z --end 2026-01-31T03:20:00Z -o incident.zip
    """
    from rca.telemetry.otlp import read_spans

    _import_spans(
        "otlp",
        lambda path, progress: read_spans(path, service_attribute=service_attribute, progress=progress),
        files,
        (metrics or [], edges or [], unit),
        (step, service_from_pod, peers, keep_spans),
        (out, victim, metric, (start, end, at, margin), (baseline_start, baseline_end), title, id, label),
    )


@import_app.command("jaeger")
def import_jaeger(
    files: _SpanFiles,
    out: _Out,
    victim: _VictimOption,
    metric: _MetricOption = None,
    start: _StartOption = None,
    end: _EndOption = None,
    at: _AtOption = None,
    margin: _MarginOption = "10m",
    baseline_start: _BaselineStart = None,
    baseline_end: _BaselineEnd = None,
    step: _Step = None,
    service_attribute: Annotated[
        str, typer.Option(help="Process tag that names the node; by default the service name.")
    ] = "",
    service_from_pod: _FromPod = False,
    peers: _Peers = True,
    metrics: _MoreMetrics = None,
    edges: _MoreEdges = None,
    unit: _Units = None,
    keep_spans: _KeepSpans = False,
    title: _Title = "",
    id: _Id = None,
    label: _Labels = None,
) -> None:
    """Make a bundle from Jaeger JSON traces.

    \b
    Examples:
      curl -s 'http://jaeger:16686/api/traces?service=checkout&limit=5000' > traces.json
      rca incident import jaeger traces.json --victim checkout --at 2026-01-31T03:10:00Z -o incident.zip
    """
    from rca.telemetry.jaeger import read_spans

    _import_spans(
        "jaeger",
        lambda path, progress: read_spans(path, service_attribute=service_attribute, progress=progress),
        files,
        (metrics or [], edges or [], unit),
        (step, service_from_pod, peers, keep_spans),
        (out, victim, metric, (start, end, at, margin), (baseline_start, baseline_end), title, id, label),
    )


@import_app.command("spans-csv")
def import_spans_csv(
    files: _SpanFiles,
    out: _Out,
    victim: _VictimOption,
    metric: _MetricOption = None,
    start: _StartOption = None,
    end: _EndOption = None,
    at: _AtOption = None,
    margin: _MarginOption = "10m",
    baseline_start: _BaselineStart = None,
    baseline_end: _BaselineEnd = None,
    step: _Step = None,
    service_from_pod: _FromPod = False,
    metrics: _MoreMetrics = None,
    edges: _MoreEdges = None,
    unit: _Units = None,
    keep_spans: _KeepSpans = False,
    title: _Title = "",
    id: _Id = None,
    label: _Labels = None,
) -> None:
    """Make a bundle from spans in CSV files.

    \b
    Columns (case, spaces and underscores do not matter):
      trace_id, span_id, parent_id (empty or 'root' for none)
      service or pod_name
      start_time, and end_time or duration_seconds, _ms, _us or _ns
      optional: operation_name, kind, error

    \b
    Examples:
      rca incident import spans-csv spans.csv --victim checkout --at 2026-01-31T03:10:00Z -o incident.zip
      rca incident import spans-csv trace/*.csv --service-from-pod --victim ts-gateway-service \\
        --start '2023-01-30 11:51:46' --end '2023-01-30 11:54:46' -o incident.zip
    """
    from rca.telemetry.spans_csv import read_spans

    _import_spans(
        "spans-csv",
        lambda path, progress: read_spans(path, progress=progress),
        files,
        (metrics or [], edges or [], unit),
        (step, service_from_pod, True, keep_spans),
        (out, victim, metric, (start, end, at, margin), (baseline_start, baseline_end), title, id, label),
    )


def _import_spans(
    kind: str,
    read: Callable[[Path, Callable[[int], None]], tuple[pa.Table, tuple[str, ...]]],
    files: Sequence[Path],
    more: tuple[Sequence[Path], Sequence[Path], Sequence[str] | None],
    options: tuple[str | None, bool, bool, bool],
    target: tuple[Any, ...],
) -> None:
    from collections import Counter

    import pyarrow as pa

    from rca.telemetry.spans import service_graph

    metrics, edges, units = more
    step, from_pod, peers, keep_spans = options
    inputs = _Inputs()
    with _progress([*files, *metrics, *edges]) as progress:
        tables: list[pa.Table] = []
        notes: list[str] = []
        for path in files:
            table, said = read(path, progress)
            tables.append(table)
            notes.extend(said)
        spans = pa.concat_tables(tables)
        graph = service_graph(spans, _seconds(step) or 60.0, service_from_pod=from_pod, virtual_peers=peers)
        inputs.metrics.append(graph.metrics)
        inputs.edges.append(graph.edges)
        name = files[0].name if len(files) == 1 else f"{len(files)} files"
        counted = Counter(notes).items()
        said_once = [note if len(files) == 1 else f"{note} ({times} of {len(files)} files)" for note, times in counted]
        inputs.sources.append(graph.report.source(name, kind, said_once))
        if keep_spans:
            inputs.spans = spans
        inputs.add_csv(metrics, edges, progress, step_seconds=_seconds(step), units=units)
    _write(inputs, *target)


@import_app.command("recording")
def import_recording(
    recording: Annotated[Path, typer.Argument(help="What `rca exporter record` wrote; plain or gzip.")],
    out: _Out,
    victim: Annotated[str, typer.Option("--victim", help="Workload that waited; by default the worst violation.")] = "",
    at: Annotated[str | None, typer.Option("--at", help=f"When its wait became a symptom: {_Time}")] = None,
    end: _EndOption = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Policy file or profile: what was promised.")] = None,
    title: _Title = "",
    id: _Id = None,
    label: _Labels = None,
) -> None:
    """Make a bundle from a recording of a scheduler: who blocked whom, with no Prometheus.

    The recording goes through the exporter's own detectors. Without --victim the incident is that of the most urgent
    workload that was blocked, of these the longest.

    \b
    Examples:
      rca exporter record slurm --interval 15 --out night.jsonl.gz
      rca incident import recording night.jsonl.gz -o incident.zip && rca explain incident.zip
      rca incident import recording night.jsonl.gz --victim 4711 --at '2026-01-31 03:10:00' -o incident.zip
    """
    import msgspec

    from exporters.policy import default_policy, load_policy
    from rca.telemetry.recording import capture_recording
    from rca.telemetry.timestamps import parse_time

    incident = capture_recording(
        recording,
        default_policy() if policy is None else load_policy(policy),
        victim=victim,
        onset=parse_time(at, "--at") if at else None,
        end=parse_time(end, "--end") if end else None,
        incident=id or "",
    )
    header = incident.header
    changed = msgspec.structs.replace(
        header, title=title or header.title, labels={**header.labels, **parse_pairs(label, "--label")}
    )
    _report(dataclasses.replace(incident, header=changed), out)


def _write(
    inputs: _Inputs,
    out: Path,
    victim: str,
    metric: str | None,
    window: tuple[str | None, str | None, str | None, str],
    baseline: tuple[str | None, str | None],
    title: str,
    id: str | None,
    labels: Sequence[str] | None,
) -> None:
    from rca.errors import InvalidInputError
    from rca.telemetry import assemble
    from rca.telemetry.timestamps import parse_duration, parse_time

    start, end, at, margin = window
    span = assemble.incident_window(
        start=parse_time(start, "--start") if start else None,
        end=parse_time(end, "--end") if end else None,
        at=parse_time(at, "--at") if at else None,
        margin_seconds=parse_duration(margin, "--margin"),
    )
    normal = None
    if baseline[0] and baseline[1]:
        normal = assemble.window(
            parse_time(baseline[0], "--baseline-start"), parse_time(baseline[1], "--baseline-end"), "baseline"
        )
    elif any(baseline):
        raise InvalidInputError(
            "--baseline-start and --baseline-end belong together", cure="give both, or neither for all before"
        )
    incident = assemble.assemble(
        metrics=assemble.merge_metrics(inputs.metrics),
        edges=assemble.merge_edges(inputs.edges),
        window=span,
        baseline=normal,
        victim_node=victim,
        victim_metric=metric,
        isolated=inputs.isolated,
        spans=inputs.spans,
        id=id,
        title=title,
        labels=parse_pairs(labels, "--label"),
        sources=inputs.sources,
    )
    _report(incident, out)


def _report(incident: Incident, out: Path) -> None:
    """Write the bundle, and say what its sources gave and what limits an explanation."""
    from rca.telemetry.checks import warnings

    written = incident.write(out)
    for source in incident.header.sources:
        typer.echo(f"{source.name}: {source.detail or source.status.value}", err=True)
    for warning in warnings(incident):
        if not warning.startswith("source "):
            typer.echo(f"warning: {warning}", err=True)
    typer.echo(str(written))


def _seconds(step: str | None) -> float | None:
    from rca.telemetry.timestamps import parse_duration

    return parse_duration(step, "--step") if step else None


def parse_pairs(items: Sequence[str] | None, option: str) -> dict[str, str]:
    """Read ``name=value`` options.

    Raises:
        InvalidInputError: one is written differently.
    """
    from rca.errors import InvalidInputError

    pairs: dict[str, str] = {}
    for item in items or ():
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise InvalidInputError(f"{option} {item!r} is not name=value", cure=f"write it as {option} name=value")
        pairs[name] = value
    return pairs


@contextlib.contextmanager
def _progress(files: Sequence[Path]) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, if that is a terminal, for inputs that take longer than a moment."""
    import sys

    total = sum(path.stat().st_size for path in files if path.is_file())
    if total < 8_000_000 or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda count: bar.advance(task, count)


__all__ = ["app", "parse_pairs"]
