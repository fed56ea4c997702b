"""``rca serve``: the incident server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.exporter import LogLevel
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


def serve(
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT, :PORT (every interface), [IPv6]:PORT or unix:PATH.")
    ] = "127.0.0.1:9945",
    store: StoreOption = None,
    prometheus: PrometheusOption = None,
    prometheus_token_file: PrometheusTokenOption = None,
    step: StepOption = "15s",
    matchers: MatchersOption = "",
    traces: TracesOption = None,
    tempo: TempoOption = None,
    bundles: BundlesOption = None,
    alertmanager: Annotated[
        str | None,
        typer.Option(
            "--alertmanager",
            help="Also look here, each minute, for alerts that fire and whose webhook did not arrive.",
            show_default=False,
        ),
    ] = None,
    alertmanager_matcher: Annotated[
        str, typer.Option("--alertmanager-matcher", help="With --alertmanager: which alerts.")
    ] = 'rca="capture"',
    grafana_url: Annotated[
        str | None, typer.Option("--grafana-url", help="Annotate explanations in this Grafana.", show_default=False)
    ] = None,
    grafana_token_file: Annotated[
        Path | None,
        typer.Option("--grafana-token-file", help="File with a service account token.", show_default=False),
    ] = None,
    external_url: Annotated[
        str,
        typer.Option("--external-url", help="Address of this server for people, in annotations.", show_default=False),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="File with the bearer token that clients must send; read again when it changes. "
            "Default: $PRIOSCOPE_TOKEN.",
            show_default=False,
        ),
    ] = None,
    web_config: Annotated[
        Path | None,
        typer.Option(
            "--web.config.file",
            "--web-config",
            help="TLS, client certificates, users: the format of Prometheus' exporter-toolkit.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without any authentication.")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Incidents at a time.")] = 2,
    queue: Annotated[
        int, typer.Option("--queue", min=1, help="Waiting incidents past which the webhook answers 503.")
    ] = 1000,
    capture_timeout: Annotated[str, typer.Option("--capture-timeout", help="Limit of one capture.")] = "120s",
    explain_timeout: Annotated[str, typer.Option("--explain-timeout", help="Limit of one explanation.")] = "120s",
    give_up: Annotated[
        str, typer.Option("--give-up", help="How long to try again when Prometheus does not answer.")
    ] = "6h",
    lease: Annotated[
        str, typer.Option("--lease", help="After a crash, others take the work over once this has passed.")
    ] = "15s",
    retention: Annotated[
        str, typer.Option("--retention", help="Remove finished incidents that began longer ago; 0: never.")
    ] = "90d",
    retention_count: Annotated[
        int | None, typer.Option("--retention-count", min=1, help="Keep at most this many.", show_default=False)
    ] = None,
    retention_size: Annotated[
        str | None,
        typer.Option("--retention-size", help="Keep at most this much, e.g. 20GB.", show_default=False),
    ] = None,
    log: Annotated[LogLevel, typer.Option("--log-level", help="What to log to stderr.")] = LogLevel.INFO,
) -> None:
    """Receive Alertmanager's webhook, capture and explain each incident, and publish the answer.

    The webhook is /api/v1/alerts; pages for people are at /incidents, metrics at /metrics, the API is described at
    /api/v1/openapi.json. An alert that was answered with 202 is explained in the end, whatever crashes meanwhile.

    \b
    Examples:
      rca serve --prometheus http://localhost:9090
      rca serve --listen :9945 --prometheus http://prometheus:9090 --token-file /etc/prioscope/token
      rca serve --listen :9945 --prometheus https://mimir/prometheus --web.config.file web.yml \\
        --store postgresql://prioscope@db/prioscope --workers 4
      rca serve --bundles rehearsal/
    """
    import logging
    import os
    import time

    from cli.output import note
    from exporters.server import listen as bind
    from exporters.server import url_of
    from exporters.web_config import LiveWebConfig, WebConfig, load_web_config
    from rca.errors import InvalidInputError
    from rca.telemetry.timestamps import parse_duration

    try:
        from rca.serve.alertmanager import AlertmanagerSettings
        from rca.serve.gate import token_of
        from rca.serve.publish import GRAFANA, GrafanaSettings
        from rca.serve.secrets import Secret
        from rca.serve.server import IncidentServer, ServeSettings, check_access, is_local
        from rca.serve.work import WorkSettings
    except ImportError as error:
        raise InvalidInputError(
            f"rca serve needs {error.name}, which is not installed", cure="pip install 'prioscope[serve]'"
        ) from None
    from cli.incidents import parse_retention
    from rca.store import open_store

    logging.basicConfig(level=log.value.upper(), format="%(levelname)s %(name)s: %(message)s", force=True)
    # httpx logs each request with its URL, alembic each step.
    for name in ("httpx", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if (grafana_url is None) != (grafana_token_file is None):
        raise InvalidInputError("--grafana-url and --grafana-token-file belong together", cure="give both, or neither")
    grafana = None
    if grafana_url is not None and grafana_token_file is not None:
        Secret(grafana_token_file).read()
        grafana = GrafanaSettings(grafana_url, grafana_token_file, external_url)
    settings = ServeSettings(
        work=WorkSettings(
            origin=LiveOptions(prometheus, prometheus_token_file, step, matchers, traces, tempo, bundles).origin(),
            workers=workers,
            capture_timeout=parse_duration(capture_timeout, "--capture-timeout"),
            explain_timeout=parse_duration(explain_timeout, "--explain-timeout"),
            lease=parse_duration(lease, "--lease"),
            give_up=parse_duration(give_up, "--give-up"),
            targets=() if grafana is None else (GRAFANA,),
        ),
        capacity=queue,
        retention=parse_retention(retention, retention_count, retention_size),
        grafana=grafana,
        token=token_of(token_file, os.environ.get("PRIOSCOPE_TOKEN")),
        insecure=insecure,
        alertmanager=None if alertmanager is None else AlertmanagerSettings(alertmanager, alertmanager_matcher),
    )
    web = WebConfig() if web_config is None else load_web_config(web_config)
    live = LiveWebConfig(web, time.monotonic)
    listener = bind(listen)
    try:
        check_access(listener, web, settings)
        with open_store(store) as opened:
            server = IncidentServer(opened, live, settings, local=is_local(listener))
            address = url_of(listener, tls=live.context is not None).replace("/metrics", "/incidents")
            note(f"serving {address}, store {opened.url}")
            server.run(listener)
    finally:
        listener.close()
