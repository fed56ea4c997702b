"""``rca train``: make the weights again, or others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    out: Annotated[Path, typer.Option("--out", help="Directory for weights, model card and intermediate work.")] = Path(
        "weights"
    ),
    incidents: Annotated[int, typer.Option("--incidents", min=64, help="Simulated incidents to train on.")] = 18_000,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, help="Most passes over them; training may stop earlier.")
    ] = 12,
    members: Annotated[int, typer.Option("--members", min=1, max=8, help="Networks to average.")] = 2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the simulation and of the weights.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small validation, calibration and test sets: to try the command out.")
    ] = False,
) -> None:
    """Train on simulated incidents and write prioscope.onnx, model_card.json and MODEL_CARD.md.

    Needs the train extra: pip install 'prioscope[train]'. Interrupted, the same command goes on where it was.
    To explain with the new weights, set PRIOSCOPE_WEIGHTS to the directory.

    Examples:

    \b
    $ rca train --out weights
    $ rca train --out try --incidents 500 --epochs 2 --quick
    $ PRIOSCOPE_WEIGHTS=weights rca explain incident.zip
    """
    from dataclasses import replace

    from cli.output import emit, note
    from rca.errors import InvalidInputError

    try:
        from rca.gnn.recipe import Recipe
        from rca.gnn.train import train as run
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"training needs {error.name}, which is not installed", cure="pip install 'prioscope[train]'"
        ) from None
    import msgspec
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    recipe = Recipe(incidents=incidents, epochs=epochs, members=members, seed=seed)
    if quick:
        recipe = replace(recipe, validation=100, calibration=200, test=100)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        quality = run(recipe, out, progress, note)
    emit(msgspec.json.format(msgspec.json.encode(quality), indent=2).decode() + "\n")
    note(f"weights and model card: {out}")
