"""``rca verify``: whether an explanation and an incident are the ones that belong together, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rca.explanation import Explanation

#: The check was made and failed. Distinct from 2, where it could not be made.
MISMATCH = 1


def verify(
    explanation: Annotated[
        Path, typer.Argument(help="What `rca explain -o json` wrote.", show_default=False, metavar="EXPLANATION.json")
    ],
    incident: Annotated[
        Path, typer.Option("--incident", help="The bundle that it explains.", show_default=False, metavar="BUNDLE")
    ],
) -> None:
    """Recompute the hash chain of an explanation from its incident (provenance grade C).

    The chain covers the bundle's content, the digest of the model's weights, the options and the explanation itself.
    It finds changes; it cannot show who made the explanation, or when.

    Exit codes: 0 the chain holds, 1 it does not (each difference is named), 2 unreadable input, 3 not found.

    Examples:

    \b
    $ rca explain incident.zip --out explanation.json
    $ rca verify explanation.json --incident incident.zip
    """
    from cli.output import emit, note
    from rca.incident import read
    from rca.provenance import explanation_steps
    from rca.provenance import verify as check
    from rca.report.format import printable

    stated = _load(explanation)
    problems = check(stated.provenance, explanation_steps(stated, read(incident)))
    for problem in problems:
        note(f"error: {printable(problem)}")
    if problems:
        note("cure: use the unchanged explanation and the bundle that it was made from, or explain the bundle again")
        raise typer.Exit(MISMATCH)
    last = stated.provenance.steps[-1].digest
    emit(f"ok: {len(stated.provenance.steps)} steps, grade {stated.provenance.grade}, chain {last}\n")


def _load(path: Path) -> Explanation:
    import msgspec

    from rca.errors import InvalidInputError, NotFoundError
    from rca.explanation import SCHEMA_VERSION, from_json

    class _Version(msgspec.Struct):
        schema_version: int

    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"no explanation at {path}", cure="write one with `rca explain -o json`") from None
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}", cure="name a JSON file") from None
    try:
        version = msgspec.json.decode(raw, type=_Version).schema_version
        if version > SCHEMA_VERSION:
            raise InvalidInputError(
                f"{path} has schema version {version}; this prioscope reads up to {SCHEMA_VERSION}",
                cure="upgrade prioscope: pip install -U prioscope",
            )
        return from_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(
            f"{path} is not an explanation: {error}", cure="name what `rca explain -o json` wrote"
        ) from None
