"""Command line of the benchmarks: ``python -m benchmarks rca|simulated|startup|replay``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rca.errors import NotFoundError, PrioscopeError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Format(StrEnum):
    """What goes to stdout."""

    TEXT = "text"
    JSON = "json"


_OUTPUT = Annotated[Format, typer.Option("--output", "-o", help="Form of the result on stdout.")]
_SAVE = Annotated[Path | None, typer.Option(help="Also write the result as JSON to this file.")]


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _console() -> Console:
    # A pipe has no width; the tables should not be cut to 80 columns there.
    return Console() if sys.stdout.isatty() else Console(width=200)


def _emit(payload: bytes, save: Path | None, output: Format) -> bool:
    """Write JSON where asked; returns whether text is wanted."""
    if save is not None:
        save.write_bytes(payload)
    if output is Format.JSON:
        sys.stdout.buffer.write(payload)
    return output is Format.TEXT


@app.command()
def rca(
    data: Annotated[str, typer.Option(help="Data sets, by commas: petshop, nezha, simulated.")] = "petshop,nezha",
    methods: Annotated[str, typer.Option(help="Methods, by commas; default all but the slow ones.")] = "",
    quiet: Annotated[int, typer.Option(min=0, help="Quiet windows per group, for specificity.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    dowhy_seconds: Annotated[float, typer.Option(min=1, help="Time limit of dowhy per case.")] = 60.0,
    dowhy_python: Annotated[str, typer.Option(help="Interpreter that has dowhy.")] = sys.executable,
    output: _OUTPUT = Format.TEXT,
    save: _SAVE = None,
) -> None:
    """Root-cause accuracy of our method and of the baselines on public and simulated incidents."""
    from benchmarks import methods as chosen
    from benchmarks import run

    selected, priors, skipped = chosen.choose(
        _split(methods) or None, dowhy_seconds=dowhy_seconds, dowhy_python=dowhy_python
    )
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}", file=sys.stderr)
    report = run.run(_split(data), selected, priors, quiet=quiet, skipped=skipped, seed=seed)
    if _emit(run.to_json(report), save, output):
        run.print_report(report, _console())


@app.command()
def simulated(
    count: Annotated[int, typer.Option(min=1, help="Held-out incidents.")] = 300,
    normal: Annotated[float, typer.Option(min=0, max=1, help="Share in which nothing broke.")] = 0.1,
    output: _OUTPUT = Format.TEXT,
    save: _SAVE = None,
) -> None:
    """Accuracy, path, counterfactual coverage and calibration on held-out simulated incidents."""
    from benchmarks import simulated as quality

    try:
        from rca.explain import explain
    except ImportError as error:
        raise NotFoundError(f"rca.explain cannot be imported: {error}", cure="install prioscope") from None
    found = quality.evaluate(explain, count=count, normal=normal, console=Console(stderr=True))
    if _emit(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n", save, output):
        quality.print_quality(found, _console())


@app.command()
def startup(
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each command.")] = 7,
    output: _OUTPUT = Format.TEXT,
    save: _SAVE = None,
) -> None:
    """Whole-process time of `rca explain` against importing torch, and on 10,000 against 1,000 nodes."""
    from benchmarks import startup as timing

    found = timing.measure(runs=runs, console=Console(stderr=True))
    if _emit(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n", save, output):
        timing.print_timings(found, _console())


@app.command()
def replay(
    what: Annotated[str, typer.Argument(help="By commas: fgd, orderings, speed, incidents.")] = "fgd,orderings,speed",
    pods: Annotated[str, typer.Option(help="FGD's pod lists, by commas.")] = "default,gpushare100,multigpu50",
    seeds: Annotated[int, typer.Option(min=1, max=10, help="How many of FGD's ten seeds.")] = 10,
    workers: Annotated[int, typer.Option(min=1, help="Processes for FGD's table.")] = 1,
    count: Annotated[int, typer.Option(min=1, help="How many simulated incidents.")] = 300,
    output: _OUTPUT = Format.TEXT,
    save: _SAVE = None,
) -> None:
    """Replay: FGD's published table, published orderings, speed; incidents with a known cause."""
    from benchmarks.replay import fgd, incidents, orderings, speed

    chosen = _split(what)
    names = ("fgd", "orderings", "speed", "incidents")
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise NotFoundError(f"no replay benchmark {unknown[0]!r}", cure=f"choose from {', '.join(names)}")
    found: dict[str, object] = {}
    console = _console()
    if "fgd" in chosen:
        found["fgd"] = cells = fgd.table(_split(pods), fgd.SEEDS[:seeds], workers)
        if output is Format.TEXT:
            fgd.print_table(cells, console)
    if "orderings" in chosen:
        found["orderings"] = blocks = orderings.run()
        if output is Format.TEXT:
            orderings.print_blocks(blocks, console)
    if "speed" in chosen:
        found["speed"] = speeds = speed.measure()
        if output is Format.TEXT:
            speed.print_speed(speeds, console)
    if "incidents" in chosen:
        found["incidents"] = summary = incidents.measure(count)
        if output is Format.TEXT:
            incidents.print_summary(summary, console)
    _emit(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n", save, output)


def main() -> None:
    """Run a command; an error is one line and its cure, with the exit code that belongs to it."""
    try:
        app()
    except PrioscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.cure:
            print(f"cure: {error.cure}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None


if __name__ == "__main__":
    main()
