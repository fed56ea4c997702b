"""``rca incidents``: what is in the store. Bundles in files are the business of ``rca incident``."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.live import (
    BundlesOption,
    LiveOptions,
    MatchersOption,
    PrometheusOption,
    PrometheusTokenOption,
    StepOption,
    StoreOption,
    TempoOption,
    TracesOption,
)

if TYPE_CHECKING:
    from datetime import datetime

    from rca.store import Retention, StoredIncident

app = typer.Typer(
    help="List, show, capture, move and remove incidents of the store.", no_args_is_help=True, rich_markup_mode=None
)


class Output(StrEnum):
    """How to print."""

    TEXT = "text"
    JSON = "json"


_Format = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]
_Reference = Annotated[
    str,
    typer.Argument(help="Id, the beginning of one, fingerprint, or `latest`.", show_default=False, metavar="INCIDENT"),
]
_Since = Annotated[
    str | None,
    typer.Option("--since", help="Began at or after: a time, or how long ago (2h, 7d).", show_default=False),
]

_SIZES: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES_BINARY: Final = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@app.command("list")
def list_incidents(
    store: StoreOption = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Only this state; may be repeated.", show_default=False)
    ] = None,
    alertname: Annotated[str | None, typer.Option("--alertname", show_default=False)] = None,
    victim: Annotated[str | None, typer.Option("--victim", show_default=False)] = None,
    cause: Annotated[str | None, typer.Option("--cause", show_default=False)] = None,
    since: _Since = None,
    until: Annotated[
        str | None, typer.Option("--until", help="Began before: a time, or how long ago.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many, newest first.")] = 50,
    output: _Format = Output.TEXT,
) -> None:
    """List incidents, newest first.

    \b
    Examples:
      rca incidents list
      rca incidents list --state failed --state inconclusive --since 7d
      rca incidents list -o json | jq -r '.incidents[] | [.id, .cause] | @tsv'
    """
    import sys

    import msgspec

    from cli.output import terminal_width
    from rca.errors import InvalidInputError
    from rca.report import format as fmt
    from rca.serve.views import incident_view
    from rca.store import Filter, State, open_store

    unknown = sorted(set(state or ()) - set(State))
    if unknown:
        raise InvalidInputError(f"there is no state {unknown[0]!r}", cure=f"use {', '.join(State)}")
    wanted = Filter(
        states=tuple(State(name) for name in state or ()),
        alertname=alertname,
        victim=victim,
        cause=cause,
        since=moment_or_ago(since, "--since") if since else None,
        until=moment_or_ago(until, "--until") if until else None,
    )
    with open_store(store, must_exist=True) as opened:
        found: list[StoredIncident] = []
        after = None
        while len(found) < limit:
            page = opened.list(wanted, limit=min(limit - len(found), 500), after=after)
            found += page.items
            after = page.next
            if after is None:
                break
    if output is Output.JSON:
        _print_json({"schema_version": 1, "incidents": [msgspec.to_builtins(incident_view(item)) for item in found]})
        return
    if not found:
        from cli.output import note

        note("no incident")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("Incident", "Began", "State", "Victim", "First cause", box=None, pad_edge=False)
    table.add_column("Confidence", justify="right")
    for item in found:
        cells = (item.id, fmt.moment(item.starts_at), item.state.value, item.victim or item.alertname, item.cause)
        share = "–" if item.confidence is None else fmt.share(item.confidence)
        table.add_row(*(Text(fmt.printable(cell) or "–") for cell in cells), share)
    width = terminal_width() if sys.stdout.isatty() else 200
    Console(highlight=False, width=width).print(table)


@app.command()
def show(incident: _Reference, store: StoreOption = None, output: _Format = Output.TEXT) -> None:
    """Show an incident: its alert, how far it came, its explanations, updates that did not win.

    The explanation itself: `rca explain INCIDENT`.

    \b
    Examples:
      rca incidents show latest
      rca incidents show 20260131T031500 -o json | jq .incident.problem
    """
    import msgspec

    from rca.serve.views import IncidentDetail, incident_view
    from rca.store import open_store

    with open_store(store, must_exist=True) as opened:
        record = opened.find(incident)
        detail = IncidentDetail(incident_view(record), opened.explanations(record.id), opened.conflicts(record.id))
    if output is Output.JSON:
        _print_json({"schema_version": 1, **msgspec.to_builtins(detail)})
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rca.report import format as fmt

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")

    def fact(name: str, value: str) -> None:
        if value:
            facts.add_row(name, Text(fmt.printable(value)))

    def time(value: datetime | None) -> str:
        return "" if value is None else fmt.moment(value)

    fact("Incident", record.id)
    fact("Title", record.title)
    fact("State", record.state.value)
    fact("Problem", record.problem)
    fact("Next attempt", time(record.next_attempt_at))
    fact("Victim", f"{record.victim} · {record.victim_metric}" if record.victim else "")
    confidence = "" if record.confidence is None else f" ({fmt.share(record.confidence)})"
    fact("First cause", f"{record.cause}{confidence}" if record.cause else "")
    fact("Began", time(record.starts_at))
    fact("Ended", time(record.ended_at))
    fact("Received", time(record.received_at))
    fact("Labels", ", ".join(f"{key}={value}" for key, value in record.labels.items()))
    fact("Bundle", f"{record.bundle_bytes:,} bytes" if record.bundle_bytes else "none")
    for info in detail.explanations:
        fact(f"Explanation {info.revision}", f"{info.verdict}, {fmt.moment(info.created_at)}, by {info.trigger}")
    for item in record.not_checked:
        fact("Not checked", item)
    for conflict in detail.conflicts:
        fact("Conflict", f"{fmt.moment(conflict.at)}: an update by {conflict.writer} did not win; it is kept")
    Console(highlight=False, soft_wrap=True).print(facts)


@app.command()
def capture(
    victim: Annotated[str, typer.Option("--victim", help="Node that shows the symptom.", show_default=False)],
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="Its metric; by default what fits its kind.", show_default=False),
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", help="When the symptom began: a time, or how long ago.", show_default=False)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="The same as --at, up to now, e.g. 10m.", show_default=False),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", help="End of the incident; by default as far as there is.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a bundle instead of storing it.", show_default=False)
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", help="name=value; may be repeated.", show_default=False)
    ] = None,
    store: StoreOption = None,
    prometheus: PrometheusOption = None,
    prometheus_token_file: PrometheusTokenOption = None,
    step: StepOption = "15s",
    matchers: MatchersOption = "",
    traces: TracesOption = None,
    tempo: TempoOption = None,
    bundles: BundlesOption = None,
) -> None:
    """Capture an incident now, without an alert.

    Prints the id of the incident (or the path of the bundle). `rca explain ID` explains it, and so does a running
    `rca serve`.

    \b
    Examples:
      rca incidents capture --prometheus http://localhost:9090 --victim checkout --since 15m
      rca incidents capture --victim chat --metric latency_p99_seconds --at 2026-01-31T03:10:00Z \\
        --until 2026-01-31T03:40:00Z --out incident.zip
    """
    from datetime import UTC, datetime

    from cli.incident import parse_pairs
    from cli.output import note
    from rca.serve.jobs import capture as run
    from rca.store import open_store

    origin = LiveOptions(prometheus, prometheus_token_file, step, matchers, traces, tempo, bundles).origin()
    record = asked_incident(victim, metric, at, since, until, parse_pairs(label, "--label"))
    from rca.serve.capturing import request_of

    found = run(origin, request_of(record))
    for missing in found.missing:
        note(f"not checked: {missing}")
    if out is not None:
        out.write_bytes(found.bundle)
        typer.echo(str(out))
        return
    import msgspec

    record = msgspec.structs.replace(
        record, victim=found.victim, victim_metric=found.metric, title=found.title or record.title,
        problem="; ".join(found.missing), bundle_bytes=len(found.bundle),
    )  # fmt: skip
    with open_store(store) as opened:
        opened.add(record, datetime.now(UTC), bundle=found.bundle)
    typer.echo(record.id)


@app.command()
def export(
    incident: _Reference,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; by default INCIDENT.zip.", show_default=False),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Write an incident with its bundle and explanations to one zip file.

    The file is a bundle, too: `rca explain FILE` and `rca incident show FILE` read it.

    \b
    Examples:
      rca incidents export latest
      rca incidents export 20260131T031500 --out ticket-4711.zip
    """
    from rca.store import open_store
    from rca.store.transfer import export_incident

    with open_store(store, must_exist=True) as opened:
        record = opened.find(incident)
        data = export_incident(opened, record)
    target = out or Path(f"{record.id}.zip")
    partial = target.with_name(f".{target.name}.partial")
    partial.write_bytes(data)
    partial.replace(target)
    typer.echo(str(target))


@app.command("import")
def import_incident(
    files: Annotated[
        list[Path], typer.Argument(help="What `rca incidents export` wrote, or bundles.", show_default=False)
    ],
    store: StoreOption = None,
) -> None:
    """Put exported incidents or bundles into the store.

    An incident that is there already is updated if the file has seen all that happened to it here. If both were
    changed side by side, the one here stays and the other is kept as a conflict (exit code 1).

    \b
    Examples:
      rca incidents import ticket-4711.zip
      rca incidents import bundles/*.zip --store postgresql://prioscope@db/prioscope
    """
    from datetime import UTC, datetime

    from cli.output import note
    from rca.store import ConflictError, open_store
    from rca.store.transfer import read_export

    clashes = 0
    arriving = [read_export(path) for path in files]
    with open_store(store) as opened:
        for item in arriving:
            try:
                new = opened.add(item.record, datetime.now(UTC), bundle=item.bundle, found=item.explanations)
            except ConflictError as error:
                clashes += 1
                note(f"conflict: {error}")
                continue
            if not new:
                note(f"{item.record.id} is there already")
            typer.echo(item.record.id)
    if clashes:
        raise typer.Exit(1)


@app.command()
def prune(
    store: StoreOption = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Began longer ago than this, e.g. 90d.", show_default=False)
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, help="Keep this many, the newest.", show_default=False)
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", help="Keep this much, the newest, e.g. 20GB.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove finished incidents. Those that are still being worked on stay.

    \b
    Examples:
      rca incidents prune --older-than 90d --dry-run
      rca incidents prune --keep 1000 --size 20GB
    """
    from datetime import UTC, datetime

    from rca.errors import InvalidInputError
    from rca.report.format import plural
    from rca.store import open_store

    if older_than is None and keep is None and size is None:
        raise InvalidInputError("nothing says what to remove", cure="give --older-than, --keep or --size")
    retention = parse_retention(older_than or "0", keep, size)
    with open_store(store, must_exist=True) as opened:
        count, held = opened.prune(retention, datetime.now(UTC), dry_run=dry_run)
    would = "would remove" if dry_run else "removed"
    typer.echo(f"{would} {plural(count, 'incident')}, {held:,} bytes")


# --- shared with other commands


def moment_or_ago(text: str, option: str) -> datetime:
    """Read a time, or a duration as that long ago.

    Raises:
        InvalidInputError: it is neither.
    """
    from datetime import UTC, datetime, timedelta

    from rca.errors import InvalidInputError
    from rca.telemetry.timestamps import parse_duration, parse_time

    if re.fullmatch(r"(\d+(\.\d+)?(ms|s|m|h|d))+", text.strip()):
        try:
            return datetime.now(UTC) - timedelta(seconds=parse_duration(text, option))
        except OverflowError:
            raise InvalidInputError(f"{option}: {text!r} is too long ago", cure="give hours or days") from None
    return parse_time(text, option)


def parse_retention(age: str, count: int | None, size: str | None) -> Retention:
    """Read what to keep; an age of ``0`` is none.

    Raises:
        InvalidInputError: the age is no duration, or the size none.
    """
    from rca.errors import InvalidInputError
    from rca.store import Retention
    from rca.telemetry.timestamps import parse_duration

    size_bytes = None
    if size is not None:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)", size.strip().upper())
        units = {**_SIZES, **_SIZES_BINARY, "B": 1}
        if found is None or found[2] not in units:
            raise InvalidInputError(f"{size!r} is not a size", cure="write it as 500MB or 20GiB")
        size_bytes = int(float(found[1]) * units[found[2]])
    seconds = None if age == "0" else parse_duration(age, "the age to keep")
    return Retention(seconds, count, size_bytes)


def asked_incident(
    victim: str, metric: str | None, at: str | None, since: str | None, until: str | None, labels: dict[str, str]
) -> StoredIncident:
    """Return the incident that a person asks to have captured, as if an alert had fired.

    Raises:
        InvalidInputError: neither or both of ``at`` and ``since`` are given, or the times make no sense.
    """
    from datetime import UTC, datetime

    from rca.errors import InvalidInputError
    from rca.store import State, StoredIncident
    from rca.telemetry.assemble import default_id, window
    from rca.telemetry.timestamps import parse_duration

    if (at is None) == (since is None):
        raise InvalidInputError(
            "when the symptom began is not given, or given twice", cure="give --at TIME or --since 10m"
        )
    if since is not None:
        parse_duration(since, "--since")
    onset = moment_or_ago(at or since or "", "--at" if at else "--since")
    now = datetime.now(UTC)
    end = moment_or_ago(until, "--until") if until else None
    identifier = default_id(window(onset, end or max(now, onset), "incident"), victim, metric or "symptom")
    annotations = {"rca_victim": victim, **({"rca_metric": metric} if metric else {})}
    return StoredIncident(
        id=identifier,
        state=State.CAPTURED,
        fingerprint=_fingerprint(identifier),
        starts_at=onset,
        ended_at=end,
        received_at=now,
        updated_at=now,
        title=f"{victim}, captured by hand",
        labels=labels,
        annotations=annotations,
    )


def _fingerprint(identifier: str) -> str:
    from rca.store.transfer import own_fingerprint

    return own_fingerprint(identifier)


def _print_json(data: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())


__all__ = ["app"]
