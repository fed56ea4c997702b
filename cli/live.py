"""Options that several commands share: the store, and where a live capture asks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from rca.serve.capturing import Origin

PROMETHEUS_VARIABLE: Final = "PRIOSCOPE_PROMETHEUS"

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="sqlite:///PATH, a path, or postgresql://USER@HOST/DB (password: $PGPASSWORD or ~/.pgpass). "
        "Default: $PRIOSCOPE_STORE, else a file under /var/lib or ~/.local/share.",
        show_default=False,
    ),
]
PrometheusOption = Annotated[
    str | None,
    typer.Option(
        "--prometheus",
        envvar=PROMETHEUS_VARIABLE,
        help="Base URL of Prometheus, Thanos, Mimir or VictoriaMetrics, without /api/v1.",
        show_default=False,
    ),
]
PrometheusTokenOption = Annotated[
    Path | None,
    typer.Option("--prometheus-token-file", help="File with its bearer token.", show_default=False),
]
StepOption = Annotated[
    str, typer.Option("--step", help="Distance of the samples: at least the scrape interval, e.g. 15s.")
]
MatchersOption = Annotated[
    str, typer.Option("--matchers", help='PromQL label matchers for every query, e.g. cluster="a".', show_default=False)
]
TracesOption = Annotated[
    str | None, typer.Option("--traces", help="Base URL of a Jaeger query service.", show_default=False)
]
TempoOption = Annotated[str | None, typer.Option("--tempo", help="Base URL of Tempo.", show_default=False)]
BundlesOption = Annotated[
    Path | None,
    typer.Option(
        "--bundles",
        help="Rehearsal: answer every alert with a bundle of this folder, instead of asking Prometheus.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Where a capture asks, as given on the command line."""

    prometheus: str | None
    token_file: Path | None = None
    step: str = "15s"
    matchers: str = ""
    traces: str | None = None
    tempo: str | None = None
    bundles: Path | None = None

    def origin(self) -> Origin:
        """Return what makes the capture.

        Raises:
            InvalidInputError: there is nothing to ask, two things exclude each other, or a URL or file is unusable.
        """
        from rca.errors import InvalidInputError, NotFoundError
        from rca.serve.capturing import Rehearsal
        from rca.telemetry.prometheus import CaptureConfig, TracesKind
        from rca.telemetry.timestamps import parse_duration

        if self.bundles is not None:
            if not self.bundles.is_dir():
                raise NotFoundError(f"there is no folder {self.bundles}", cure="give --bundles a folder of bundles")
            return Rehearsal(self.bundles)
        if self.prometheus is None:
            raise InvalidInputError(
                "nothing was named to capture from", cure=f"give --prometheus URL, or set {PROMETHEUS_VARIABLE}"
            )
        if self.traces and self.tempo:
            raise InvalidInputError("--traces and --tempo are both given", cure="give the one that holds the traces")
        if self.token_file is not None and not self.token_file.is_file():
            raise NotFoundError(f"there is no file {self.token_file}", cure="give --prometheus-token-file a file")
        return CaptureConfig(
            prometheus_url=self.prometheus,
            bearer_token_file=self.token_file,
            step_seconds=parse_duration(self.step, "--step"),
            matchers=self.matchers,
            traces_url=self.traces or self.tempo,
            traces_kind=TracesKind.TEMPO if self.tempo else TracesKind.JAEGER,
        )
