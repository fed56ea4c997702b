"""``rca dashboards``: build, check, compare and push the Grafana boards."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dashboards.grafana import Grafana

app = typer.Typer(
    help="Build, check, compare and push the Grafana boards.", no_args_is_help=True, rich_markup_mode=None
)


class Output(StrEnum):
    """How to print."""

    TEXT = "text"
    JSON = "json"


_Url = Annotated[
    str | None,
    typer.Option("--url", envvar="GRAFANA_URL", help="Address of Grafana.", show_default=False),
]
_TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File that holds a service account token. Default: the environment variable GRAFANA_TOKEN.",
        show_default=False,
    ),
]
_Format = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]


@app.command()
def build(
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the JSON files.", show_default=False)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 when a file in --out differs.")
    ] = False,
    incident_server: Annotated[
        str | None,
        typer.Option("--incident-server", help="Address of `rca serve` as browsers reach it.", show_default=False),
    ] = None,
    runbooks: Annotated[
        str | None, typer.Option("--runbooks", help="Address of the runbooks' folder.", show_default=False)
    ] = None,
) -> None:
    """Write every board as a JSON file, for import or provisioning.

    \b
    Examples:
      rca dashboards build --out /etc/grafana/prioscope --incident-server https://rca.example
      rca dashboards build --check
    """
    from cli.output import note
    from dashboards.build import GENERATED, file_name, render
    from rca.errors import InvalidInputError

    folder = GENERATED if out is None else out
    boards = _boards(incident_server, runbooks)
    texts = {file_name(uid): render(board) for uid, board in boards.items()}
    if check:
        stale = [name for name, text in texts.items() if _read(folder / name) != text]
        extra = sorted(path.name for path in folder.glob("*.json") if path.name not in texts)
        for name in stale:
            note(f"{folder / name} differs from what would be built")
        for name in extra:
            note(f"{folder / name} is none of our boards")
        if stale or extra:
            note(f"cure: rca dashboards build --out {folder}")
            raise typer.Exit(1)
        note(f"{len(texts)} boards in {folder} are up to date")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot make {folder}: {error.strerror}", cure="choose another --out") from None
    from cli.output import emit

    for name, text in texts.items():
        emit(text, folder / name)
    note(f"{len(texts)} boards: {folder}")


@app.command()
def lint(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="JSON files or folders. Default: the boards of this release.", show_default=False),
    ] = None,
    output: _Format = Output.TEXT,
) -> None:
    """Check boards: titles, units, links, variables, queries, metrics. Exit code 1 when something is wrong.

    \b
    Examples:
      rca dashboards lint
      rca dashboards lint my-board.json -o json
    """
    import msgspec

    from cli.output import emit, note
    from dashboards.lint import ALLOWED
    from dashboards.lint import lint as check

    ours = _boards()
    given = _load(files) if files else ours
    # Boards of others may link to ours.
    found = [finding for finding in check({**ours, **given}) if finding.board in given]
    if output is Output.JSON:
        document = {"schema_version": 1, "boards": sorted(given), "findings": found, "allowed": ALLOWED}
        emit(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
    else:
        for item in found:
            where = f"{item.board}, {item.panel}" if item.panel else item.board
            emit(f"{item.rule}: {where}: {item.message}\n    cure: {item.cure}\n")
        note(f"{len(given)} boards, {len(found)} findings, {len(ALLOWED)} exceptions")
    if found:
        raise typer.Exit(1)


@app.command()
def diff(
    against: Annotated[
        Path | None, typer.Option("--against", help="Folder with JSON files to compare with.", show_default=False)
    ] = None,
    url: _Url = None,
    token_file: _TokenFile = None,
) -> None:
    """Show how the boards of this release differ from a folder, or from a Grafana. Exit code 1 when they do.

    \b
    Examples:
      rca dashboards diff --against /etc/grafana/prioscope
      rca dashboards diff --url https://grafana.example --token-file token
    """
    import difflib

    from cli.output import emit, note
    from dashboards.build import file_name, render
    from dashboards.grafana import comparable
    from rca.errors import InvalidInputError

    if against is None and url is None:
        raise InvalidInputError("nothing to compare with", cure="give either --against FOLDER or --url GRAFANA")
    if against is not None:
        place, there = str(against), _load([against])
    else:
        grafana = _grafana(url, token_file)
        place = grafana.url
        there = {uid: found for uid in _boards() if (found := grafana.board(uid)) is not None}
    differing = 0
    for uid, board in _boards().items():
        old = render(comparable(there[uid])) if uid in there else ""
        new = render(comparable(board))
        if old == new:
            continue
        differing += 1
        lines = difflib.unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            f"{place}/{file_name(uid)}" if old else "/dev/null",
            file_name(uid),
        )
        emit("".join(lines))
    note(f"{differing} boards differ" if differing else "no difference")
    if differing:
        raise typer.Exit(1)


@app.command()
def push(
    url: _Url = None,
    token_file: _TokenFile = None,
    folder: Annotated[str, typer.Option("--folder", help="Title of the folder in Grafana.")] = "Prioscope",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace boards that are there with another content.")
    ] = False,
    incident_server: Annotated[
        str | None,
        typer.Option("--incident-server", help="Address of `rca serve` as browsers reach it.", show_default=False),
    ] = None,
    runbooks: Annotated[
        str | None, typer.Option("--runbooks", help="Address of the runbooks' folder.", show_default=False)
    ] = None,
) -> None:
    """Put the boards into a Grafana. A board that somebody changed there stays as it is, unless --overwrite is given.

    Exit code 1 when a board was not replaced for that reason.

    \b
    Examples:
      GRAFANA_TOKEN=glsa_... rca dashboards push --url https://grafana.example
      rca dashboards push --url https://grafana.example --token-file token --folder "On call" --overwrite
    """
    from importlib.metadata import version

    from cli.output import emit, note
    from dashboards.grafana import Outcome

    grafana = _grafana(url, token_file)
    refused = 0
    message = f"prioscope {version('prioscope')}"
    boards = _boards(incident_server, runbooks)
    for item in grafana.push(boards, folder, overwrite=overwrite, message=message):
        refused += item.outcome is Outcome.REFUSED
        emit(f"{item.outcome.value:9}  {item.uid}{f'  {grafana.url}{item.url}' if item.url else ''}\n")
    if refused:
        note(f"{refused} boards are there with another content and were left alone")
        note("cure: look at `rca dashboards diff`, then push with --overwrite")
        raise typer.Exit(1)


def _boards(incident_server: str | None = None, runbooks: str | None = None) -> dict[str, dict[str, Any]]:
    from rca.errors import InvalidInputError

    try:
        from dashboards.build import addressed
        from dashboards.build import build as make
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"the boards need {error.name}, which is not installed", cure="pip install 'prioscope[dashboards]'"
        ) from None
    addresses = {"incident_server": incident_server, "runbooks": runbooks}
    given = {name: url.rstrip("/") for name, url in addresses.items() if url is not None}
    for name, url in given.items():
        if not url.startswith(("http://", "https://")):
            option = name.replace("_", "-")
            raise InvalidInputError(f"--{option} {url!r} is no address", cure="it begins with http:// or https://")
    return {uid: addressed(board, given) for uid, board in make().items()}


def _load(files: list[Path]) -> Mapping[str, dict[str, Any]]:
    import json

    from rca.errors import InvalidInputError, NotFoundError

    boards: dict[str, dict[str, Any]] = {}
    for path in files:
        if not path.exists():
            raise NotFoundError(f"{path} does not exist", cure="give a JSON file of a board, or a folder of them")
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            try:
                board = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise InvalidInputError(f"{file} is not JSON: {error}", cure="export the board again") from None
            if not isinstance(board, dict) or not isinstance(board.get("panels"), list):
                raise InvalidInputError(f"{file} is no board", cure="export it in Grafana as classic JSON")
            boards[str(board.get("uid") or file.stem)] = board
    return boards


def _grafana(url: str | None, token_file: Path | None) -> Grafana:
    import os

    from rca.errors import InvalidInputError

    if url is None:
        raise InvalidInputError("no Grafana given", cure="give --url, or set GRAFANA_URL")
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"cannot read --token-file {token_file}: {error}", cure="check the file") from None
    else:
        token = os.environ.get("GRAFANA_TOKEN", "").strip()
    if not token:
        raise InvalidInputError("no token given", cure="give --token-file, or set GRAFANA_TOKEN")
    try:
        from dashboards.grafana import Grafana as Client

        return Client(url, token)
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"pushing needs {error.name}, which is not installed", cure="pip install 'prioscope[dashboards]'"
        ) from None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


__all__ = ["app"]
