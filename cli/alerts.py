"""``rca alerts``: write alerting rules and Alertmanager's configuration, check them, read runbooks."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from alerts.model import Options

app = typer.Typer(
    help="Write alerting rules and Alertmanager's configuration, check them, read runbooks.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

#: A check was made and failed; 2 is where it could not be made.
FAILED = 1


class RuleFormat(StrEnum):
    """What `build` writes (`alerts.build.Format`, which is not imported for --help)."""

    PROMETHEUS = "prometheus"
    CRD = "crd"


class Output(StrEnum):
    """How `list` and `check` answer."""

    TEXT = "text"
    JSON = "json"


_Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="Policy file or profile that gives the wait SLOs. Default: 60 s, 5 and 30 min for P0, P1 and P2.",
        show_default=False,
    ),
]
_Output = Annotated[Output, typer.Option("--output", "-o", help="text or json.")]


@app.command("build")
def build(
    out: Annotated[Path, typer.Option("--out", help="Folder to write to; it is made if need be.", show_default=False)],
    format_: Annotated[
        RuleFormat, typer.Option("--format", help="Rule files for Prometheus, or a PrometheusRule for its operator.")
    ] = RuleFormat.PROMETHEUS,
    policy: _Policy = None,
    objective: Annotated[
        float, typer.Option("--objective", help="Share of workloads that are to start within their wait SLO.")
    ] = 0.99,
    runbook_url: Annotated[
        str | None,
        typer.Option("--runbook-url", help="Folder of the runbook pages. Default: on GitHub.", show_default=False),
    ] = None,
    grafana_url: Annotated[str, typer.Option("--grafana-url", help="Grafana, for links.")] = "http://localhost:3000",
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", help="Only this cluster's series, of metrics that have the label.", show_default=False
        ),
    ] = "",
    selector: Annotated[
        list[str] | None,
        typer.Option(
            "--selector",
            help="LABEL=VALUE that every series must have, such as a label of the scrape. Repeatable.",
            show_default=False,
        ),
    ] = None,
    serve_url: Annotated[
        str, typer.Option("--serve-url", help="`rca serve`, to which Alertmanager sends what is to be captured.")
    ] = "http://localhost:9945",
    token_file: Annotated[
        str, typer.Option("--token-file", help="Where Alertmanager finds the bearer token of `rca serve`.")
    ] = "/etc/alertmanager/rca-token",  # noqa: S107 - where it is, not what
) -> None:
    """Write the rules, and with --format prometheus alertmanager.yml too.

    \b
    Examples:
      rca alerts build --out /etc/prometheus/rules
      rca alerts build --out rules --policy policy.yaml --grafana-url https://grafana.example
      rca alerts build --out manifests --format crd --selector env=prod
    """
    from alerts import routing, slo
    from alerts.build import Format, files
    from alerts.model import RUNBOOK_URL, Options
    from cli.output import emit, note
    from exporters.policy import default_policy, load_policy
    from rca.errors import InvalidInputError

    rules = default_policy() if policy is None else load_policy(policy)
    options = Options(
        policy=rules,
        objective=objective,
        runbook_url=RUNBOOK_URL if runbook_url is None else runbook_url,
        grafana_url=grafana_url,
        cluster=cluster,
        selectors=_selectors(selector or []),
    )
    texts = files(options, Format(format_))
    if format_ is RuleFormat.PROMETHEUS:
        texts["alertmanager.yml"] = routing.text(serve_url, token_file)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot make {out}: {error.strerror}", cure="choose another folder") from None
    for name, text in texts.items():
        emit(text, out / name)
        note(f"wrote {out / name}")
    for item in slo.judged(rules):
        if not item.exact:
            note(f"note: {item.note}")


def _selectors(given: list[str]) -> dict[str, str]:
    from rca.errors import InvalidInputError

    found: dict[str, str] = {}
    for item in given:
        name, sign, value = item.partition("=")
        if not sign or not name or not value:
            raise InvalidInputError(f"{item!r} is not a selector", cure="write it as LABEL=VALUE")
        if name in found:
            raise InvalidInputError(f"label {name!r} is selected twice", cure="keep one of them")
        found[name] = value
    return found


@app.command("check")
def check(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Files, or folders with .yaml and .yml files.", show_default=False, metavar="PATH..."),
    ],
    output: _Output = Output.TEXT,
) -> None:
    """Check rule files with promtool, and Alertmanager configurations with amtool.

    \b
    Exit codes: 0 all passed, 1 a check failed, 2 unreadable input, 3 no such file, 4 a tool is not installed.

    \b
    Examples:
      rca alerts check /etc/prometheus/rules
      rca alerts check prometheusrule.yaml alertmanager.yml -o json
    """
    from alerts.check import check as run
    from cli.output import emit
    from rca.errors import ExitCode

    found = run(_files(paths))
    if output is Output.JSON:
        import dataclasses
        import json

        emit(json.dumps([dataclasses.asdict(item) for item in found], indent=2) + "\n")
    else:
        words = {True: "passed", False: "FAILED", None: "not checked"}
        lines = [f"{words[item.passed]}  {item.file} ({item.tool})" for item in found]
        details = [f"\n{item.file}:\n{item.detail}" for item in found if item.detail]
        emit("\n".join([*lines, *details]) + "\n")
    if any(item.passed is False for item in found):
        raise typer.Exit(FAILED)
    if any(item.passed is None for item in found):
        raise typer.Exit(int(ExitCode.INCONCLUSIVE))


def _files(paths: list[Path]) -> list[Path]:
    from rca.errors import NotFoundError

    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise NotFoundError(f"{path} does not exist", cure="write it with `rca alerts build --out FOLDER`")
        inside = (
            sorted(item for item in path.iterdir() if item.suffix in (".yaml", ".yml")) if path.is_dir() else [path]
        )
        if not inside:
            raise NotFoundError(f"{path} holds no YAML file", cure="name the folder that `rca alerts build` wrote to")
        found.extend(inside)
    return found


@app.command("list")
def list_(policy: _Policy = None, output: _Output = Output.TEXT) -> None:
    """List every alert: severity, whether it is captured, requirement, what it says.

    \b
    Examples:
      rca alerts list
      rca alerts list -o json | jq '.[] | select(.severity == "critical").name'
    """
    from alerts.build import alerts, rule_groups
    from cli.output import emit

    found = alerts(rule_groups(_options(policy)))
    if output is Output.JSON:
        import json

        rows = [
            {
                "name": item.name,
                "severity": item.severity.value,
                "captured": item.capture,
                "for": item.hold or "0s",
                "spec": item.spec,
                "labels": list(item.labels),
                "summary": item.summary,
                "expr": item.expr,
            }
            for item in found
        ]
        emit(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return
    width = max(len(item.name) for item in found)
    emit(
        "".join(
            f"{item.name:{width}}  {item.severity.value:8}  {'captured' if item.capture else '':8}  {item.summary}\n"
            for item in found
        )
    )


def _options(policy: str | None) -> Options:
    from alerts.model import Options
    from exporters.policy import default_policy, load_policy

    return Options(policy=default_policy() if policy is None else load_policy(policy))


@app.command("runbook")
def runbook(
    name: Annotated[str, typer.Argument(help="The alert; its prefix may be left out.", show_default=False)],
) -> None:
    """Print the runbook page of an alert.

    \b
    Examples:
      rca alerts runbook PrioscopeGpuLost
      rca alerts runbook gpulost
    """
    from alerts.pages import page
    from cli.output import emit

    emit(page(name))
