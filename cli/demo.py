"""``rca demo``: simulate an incident whose cause is known, explain it from its bundle, and compare."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from cli.explain import FormatOption, NoColor

if TYPE_CHECKING:
    from rca.explanation import Explanation
    from rca.incident import Truth


class Outcome(msgspec.Struct, frozen=True):
    """How one scenario went. ``seconds`` is the time of reading and explaining the bundle."""

    scenario: str
    injected: tuple[str, ...]
    first_cause: str | None
    confidence: float | None
    verdict: str
    correct: bool
    seconds: float


def demo(
    scenario: Annotated[
        str | None, typer.Option("--scenario", "-s", help="Name of a scenario; see --list.", show_default=False)
    ] = None,
    list_scenarios: Annotated[bool, typer.Option("--list", help="List the scenarios and exit.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Run every scenario and print a summary.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the simulation.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Keep the bundle in this folder, as SCENARIO.zip, and what led to it.", show_default=False
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Also write the HTML report to this file.", show_default=False)
    ] = None,
    format: FormatOption = None,
    no_color: NoColor = False,
) -> None:
    """Play an incident whose cause is known, write it as a bundle, explain that bundle, and compare with the cause.

    The first scenario is a small cluster with a scheduler: its snapshots are recorded, exported as metrics, and the
    incident is captured from these. The others are simulated call graphs. The explanation is computed from the bundle
    alone: the injected cause is not in what it reads.

    Exit codes: 0 the first cause is the injected one, 1 it is another one, 3 no such scenario, 4 inconclusive.

    Examples:

    \b
    $ rca demo
    $ rca demo --list
    $ rca demo --scenario NAME --seed 7 --report demo.html
    $ rca demo --all
    $ rca demo --out bundles && rca explain bundles/NAME.zip
    """
    from cli.output import emit, note, terminal_width, use_colour
    from rca.errors import ExitCode, InvalidInputError
    from rca.report import Format, render

    if (every or list_scenarios) and format not in (None, Format.TEXT, Format.JSON):
        raise InvalidInputError(f"a summary cannot be written as {format}", cure="use -o text or -o json")
    if list_scenarios:
        emit(_listing(as_json=format is Format.JSON, width=terminal_width()))
        return
    if every and (scenario is not None or report is not None):
        raise InvalidInputError(
            "--all goes with neither --scenario nor --report", cure="leave out --all to run one scenario"
        )
    if every:
        outcomes = _run_all(seed, out)
        if format is Format.JSON:
            emit(msgspec.json.format(msgspec.json.encode(outcomes), indent=2).decode() + "\n")
        else:
            emit(_summary(outcomes, width=terminal_width()))
        if not all(outcome.correct for outcome in outcomes):
            raise typer.Exit(1)
        return

    name = _known(scenario)
    explanation, truth, outcome = _run(name, seed, out)
    chosen = format or Format.TEXT
    emit(render(explanation, chosen, width=terminal_width(), colour=use_colour(no_color)))
    statement = _statement(outcome, truth)
    if chosen is Format.TEXT:
        emit(f"\n{statement}\n")
    else:
        note(statement)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        emit(render(explanation, Format.HTML), report)
        note(f"HTML report: {report}")
    if out is not None:
        note(f"kept: {', '.join(sorted(str(path) for path in out.glob(f'{name}.*')))}")
    if outcome.verdict == "inconclusive":
        raise typer.Exit(int(ExitCode.INCONCLUSIVE))
    if not outcome.correct:
        raise typer.Exit(1)


def _known(scenario: str | None) -> str:
    from rca.errors import NotFoundError
    from rca.simulation.demo import DEMOS

    if scenario is None:
        return next(iter(DEMOS))
    if scenario not in DEMOS:
        raise NotFoundError(f"no scenario {scenario!r}", cure=f"use one of {', '.join(DEMOS)}")
    return scenario


def _run(name: str, seed: int, out: Path | None) -> tuple[Explanation, Truth, Outcome]:
    from rca.explain import Options, explain
    from rca.explanation import Verdict
    from rca.incident import read
    from rca.simulation.demo import DEMOS

    with tempfile.TemporaryDirectory(prefix="rca-demo-") as scratch:
        folder = Path(scratch) if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        incident = DEMOS[name].make(seed, folder)
        truth = incident.truth
        if truth is None:
            raise RuntimeError(f"the scenario {name} does not say what it injected")
        bundle = incident.write(folder / f"{name}.zip")
        started = time.perf_counter()
        explanation = explain(read(bundle), Options())
        seconds = time.perf_counter() - started
    first = explanation.causes[0] if explanation.causes else None
    outcome = Outcome(
        scenario=name,
        injected=truth.causes,
        first_cause=first.node if first else None,
        confidence=first.confidence if first else None,
        verdict=str(explanation.verdict),
        correct=explanation.verdict is Verdict.EXPLAINED and first is not None and first.node in truth.causes,
        seconds=round(seconds, 3),
    )
    return explanation, truth, outcome


def _run_all(seed: int, out: Path | None) -> list[Outcome]:
    from cli.output import note
    from rca.simulation.demo import DEMOS

    outcomes = []
    for number, name in enumerate(DEMOS, start=1):
        note(f"[{number}/{len(DEMOS)}] {name}")
        outcomes.append(_run(name, seed, out)[2])
    return outcomes


def _statement(outcome: Outcome, truth: Truth) -> str:
    injected = " and ".join(outcome.injected)
    kind = f" ({truth.kind.replace('_', ' ')})" if truth.kind else ""
    if outcome.first_cause is None:
        return f"MISSED: the injected cause is {injected}{kind}; no candidate was found."
    if outcome.correct:
        return f"CORRECT: the first cause, {outcome.first_cause}, is the injected one{kind}."
    if outcome.first_cause in outcome.injected:
        return f"INCONCLUSIVE: the first candidate, {outcome.first_cause}, is the injected cause{kind}, but too unsure."
    return f"WRONG: the injected cause is {injected}{kind}; the first cause found is {outcome.first_cause}."


def _listing(*, as_json: bool, width: int) -> str:
    from rca.simulation.demo import DEMOS

    rows = [(scenario.name, scenario.summary) for scenario in DEMOS.values()]
    if as_json:
        listing = [{"name": name, "summary": summary} for name, summary in rows]
        return msgspec.json.format(msgspec.json.encode(listing), indent=2).decode() + "\n"
    return _table(("Scenario", "What happens"), rows, width=width)


def _summary(outcomes: list[Outcome], *, width: int) -> str:
    from rca.report import format as fmt

    rows = [
        (
            outcome.scenario,
            " + ".join(outcome.injected),
            outcome.first_cause or "–",
            "–" if outcome.confidence is None else fmt.share(outcome.confidence),
            f"{outcome.seconds:.2f} s",
            "yes" if outcome.correct else outcome.verdict if outcome.verdict == "inconclusive" else "NO",
        )
        for outcome in outcomes
    ]
    right = sum(outcome.correct for outcome in outcomes)
    table = _table(("Scenario", "Injected", "First cause", "Confidence", "Time", "Correct"), rows, width=width)
    return f"{table}\n{right} of {len(outcomes)} scenarios: the first cause is the injected one.\n"


def _table(header: tuple[str, ...], rows: list[Any], *, width: int) -> str:
    import io

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in header:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, highlight=False, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
