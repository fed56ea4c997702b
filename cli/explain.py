"""``rca explain``: from an incident to an explanation that an engineer on call can act on.

A bundle in a file is explained without a database or network library; they are imported for what needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.live import (
    LiveOptions,
    MatchersOption,
    PrometheusOption,
    PrometheusTokenOption,
    StepOption,
    StoreOption,
    TempoOption,
    TracesOption,
)
from rca.report import Format

if TYPE_CHECKING:
    from rca.explain import Options
    from rca.explanation import Explanation
    from rca.incident import Incident
    from rca.store import Alert

_BY_SUFFIX: Final = {
    ".txt": Format.TEXT,
    ".json": Format.JSON,
    ".md": Format.MARKDOWN,
    ".markdown": Format.MARKDOWN,
    ".html": Format.HTML,
    ".htm": Format.HTML,
}

FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--output",
        "-o",
        "--format",
        "-f",
        help="Format of the explanation. Default: text, or what the suffix of --out says.",
        show_default=False,
    ),
]
NoColor = Annotated[bool, typer.Option("--no-color", help="Do not colour the text (NO_COLOR works too).")]


def choose_format(format: Format | None, out: Path | None) -> Format:
    """Return the asked format, else the one of ``out``'s suffix, else text."""
    if format is not None:
        return format
    return _BY_SUFFIX.get(out.suffix.lower(), Format.TEXT) if out is not None else Format.TEXT


def explain(
    incident: Annotated[
        str | None,
        typer.Argument(
            help="A bundle (directory or zip); or of the store: an id, the beginning of one, a fingerprint, `latest`.",
            show_default=False,
            metavar="INCIDENT",
        ),
    ] = None,
    format: FormatOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write to this file instead of stdout.", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many candidate causes to show.")] = 5,
    min_confidence: Annotated[
        float,
        typer.Option("--min-confidence", min=0.0, max=1.0, help="Below this, the answer is inconclusive (exit 4)."),
    ] = 0.5,
    victim: Annotated[
        str | None, typer.Option("--victim", help="Explain this node instead of the bundle's.", show_default=False)
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Explain this metric of the victim.", show_default=False)
    ] = None,
    no_color: NoColor = False,
    store: StoreOption = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            help="With latest or a fingerprint: the last that began by then. With --victim alone: captured live.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="None that began before; or captured live from then on.", show_default=False),
    ] = None,
    from_alertmanager: Annotated[
        str | None,
        typer.Option(
            "--from-alertmanager", help="Capture the newest alert that fires there, live.", show_default=False
        ),
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from-file", help="Capture the first alert of this webhook (JSON), live.", show_default=False),
    ] = None,
    alert: Annotated[
        str | None,
        typer.Option("--alert", help="Of those: the one with this name or fingerprint.", show_default=False),
    ] = None,
    prometheus: PrometheusOption = None,
    prometheus_token_file: PrometheusTokenOption = None,
    step: StepOption = "15s",
    matchers: MatchersOption = "",
    traces: TracesOption = None,
    tempo: TempoOption = None,
) -> None:
    """Explain an incident: likely cause, how it spread, what would have prevented it, and what to do.

    The incident is a bundle, one of the store, or captured live from Prometheus. The explanation goes to stdout,
    everything else to stderr.

    Exit codes: 0 explained, 2 wrong usage or damaged bundle, 3 not found, 4 inconclusive (still printed), 5 Prometheus,
    Alertmanager or the store did not answer.

    Examples:

    \b
    $ rca explain incident.zip
    $ rca explain incident.zip --out report.html
    $ rca explain incident.zip -o json | jq '.causes[0]'
    $ rca explain incident.zip --victim checkout --metric latency_p95_seconds
    $ rca explain latest
    $ rca explain 3f2a9c1b0d4e5f60 --at 2026-01-31T03:10:00Z
    $ rca explain --victim checkout --since 15m --prometheus http://localhost:9090
    $ rca explain --from-alertmanager http://localhost:9093 --prometheus http://localhost:9090
    $ rca explain --from-file webhook.json --prometheus http://localhost:9090
    """
    from cli.output import emit, terminal_width, use_colour
    from rca.errors import ExitCode, InvalidInputError
    from rca.explain import Options
    from rca.explain import explain as run
    from rca.explanation import Verdict
    from rca.report import render

    if sum(source is not None for source in (incident, from_alertmanager, from_file)) > 1:
        raise InvalidInputError("more than one incident is named", cure="give one")
    options = Options(top=top, min_confidence=min_confidence, victim=victim, metric=metric)
    if incident is not None:
        explanation = _known(incident, options, store, at, since)
    else:
        live = LiveOptions(prometheus, prometheus_token_file, step, matchers, traces, tempo)
        if from_alertmanager is not None or from_file is not None:
            if at is not None or since is not None:
                raise InvalidInputError("the alert says when it began", cure="leave --at and --since out")
            captured = _of_alert(_chosen(from_alertmanager, from_file, alert), live, victim, metric)
        elif victim is not None:
            captured = _of_victim(victim, metric, at, since, live)
        else:
            raise InvalidInputError(
                "no incident is named",
                cure="give a bundle, an id, `latest`, --from-alertmanager, --from-file, or --victim with --since",
            )
        # The capture was made for this victim; its names are the bundle's own.
        explanation = run(captured, Options(top=top, min_confidence=min_confidence))
    colour = out is None and use_colour(no_color)
    emit(render(explanation, choose_format(format, out), width=terminal_width(), colour=colour), out)
    if explanation.verdict is Verdict.INCONCLUSIVE:
        raise typer.Exit(int(ExitCode.INCONCLUSIVE))


def _known(reference: str, options: Options, store: str | None, at: str | None, since: str | None) -> Explanation:
    """Explain a bundle, or an incident of the store."""
    from rca.errors import InvalidInputError, NotFoundError
    from rca.explain import explain as run
    from rca.incident import read

    path = Path(reference)
    if path.exists() or _looks_like_path(reference):
        if at is not None or since is not None:
            raise InvalidInputError("--at and --since choose in the store", cure="leave them out for a bundle")
        return run(read(path), options)
    import tempfile

    from cli.incidents import moment_or_ago
    from cli.output import note
    from rca.store import open_store

    try:
        opened = open_store(store, must_exist=True)
    except NotFoundError as error:
        raise NotFoundError(f"no bundle at {reference}, and {error}", cure=error.cure) from None
    with opened:
        record = opened.find(
            reference,
            at=moment_or_ago(at, "--at") if at else None,
            since=moment_or_ago(since, "--since") if since else None,
        )
        if record.problem:
            note(f"{record.id} is {record.state}: {record.problem}")
        data = opened.bundle(record.id)
    # Explained anew and not read back: equal bundles give equal explanations, and the options may differ.
    with tempfile.TemporaryDirectory(prefix="prioscope-") as folder:
        bundle = Path(folder) / f"{record.id}.zip"
        bundle.write_bytes(data)
        return run(read(bundle), options)


def _looks_like_path(text: str) -> bool:
    return "/" in text or text.endswith(".zip")


def _of_victim(victim: str, metric: str | None, at: str | None, since: str | None, live: LiveOptions) -> Incident:
    from cli.incidents import asked_incident
    from rca.serve.capturing import capture_of, request_of

    return capture_of(live.origin())(request_of(asked_incident(victim, metric, at, since, None, {})))


def _chosen(alertmanager: str | None, file: Path | None, wanted: str | None) -> Alert:
    """Return the alert to explain: the newest that fires in Alertmanager, or the first of a webhook."""
    from datetime import UTC, datetime

    from rca.errors import NotFoundError

    now = datetime.now(UTC)
    found: tuple[Alert, ...]
    if alertmanager is not None:
        from rca.serve.alertmanager import AlertmanagerSettings, active_alerts

        found = active_alerts(AlertmanagerSettings(alertmanager, ""), now)
        where = "in Alertmanager"
    else:
        from cli.output import note
        from rca.serve.webhook import parse_webhook

        assert file is not None  # noqa: S101 - one of the two is given
        received = parse_webhook(file.read_bytes(), now)
        for reason in received.refused:
            note(f"left out: {reason}")
        found, where = received.alerts, f"in {file}"
    names = sorted({item.labels.get("alertname", item.fingerprint) for item in found})
    if wanted is not None:
        found = tuple(item for item in found if wanted in (item.fingerprint, item.labels.get("alertname")))
    if not found:
        cure = f"choose with --alert: {', '.join(names[:10])}" if names else "none fires"
        raise NotFoundError(f"there is no alert {wanted + ' ' if wanted else ''}{where}", cure=cure)
    return found[0]


def _of_alert(alert: Alert, live: LiveOptions, victim: str | None, metric: str | None) -> Incident:
    from rca.serve.capturing import capture_of
    from rca.store import incident_id
    from rca.telemetry.request import CaptureRequest

    named = {key: value for key, value in (("rca_victim", victim), ("rca_metric", metric)) if value is not None}
    ended = alert.ends_at
    return capture_of(live.origin())(
        CaptureRequest(
            id=incident_id(alert),
            labels=alert.labels,
            annotations={**alert.annotations, **named},
            onset=alert.starts_at,
            end=ended if ended is not None and ended > alert.starts_at else None,
            fingerprint=alert.fingerprint,
            generator_url=alert.generator_url,
        )
    )
