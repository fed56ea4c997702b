"""``rca explain``: from an incident bundle to an explanation that an engineer on call can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from rca.report import Format

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
    bundle: Annotated[
        Path, typer.Argument(help="The incident: a bundle directory or zip.", show_default=False, metavar="BUNDLE")
    ],
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
) -> None:
    """Explain an incident: likely cause, how it spread, what would have prevented it, and what to do.

    The explanation goes to stdout, everything else to stderr.

    Exit codes: 0 explained, 2 wrong usage or damaged bundle, 3 not found, 4 inconclusive (still printed).

    Examples:

    \b
    $ rca explain incident.zip
    $ rca explain incident.zip --out report.html
    $ rca explain incident.zip -o json | jq '.causes[0]'
    $ rca explain incident.zip -o markdown --top 3 >> ticket.md
    $ rca explain incident.zip --victim checkout --metric latency_p95_seconds
    """
    from cli.output import emit, terminal_width, use_colour
    from rca.errors import ExitCode
    from rca.explain import Options
    from rca.explain import explain as run
    from rca.explanation import Verdict
    from rca.incident import read
    from rca.report import render

    incident = read(bundle)
    options = Options(top=top, min_confidence=min_confidence, victim=victim, metric=metric)
    explanation = run(incident, options)
    colour = out is None and use_colour(no_color)
    emit(render(explanation, choose_format(format, out), width=terminal_width(), colour=colour), out)
    if explanation.verdict is Verdict.INCONCLUSIVE:
        raise typer.Exit(int(ExitCode.INCONCLUSIVE))
