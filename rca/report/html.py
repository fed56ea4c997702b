"""The HTML report: one file that works from a ticket, offline, with nothing to load and no script to run.

Jinja escapes every value. Behind that stands a Content-Security-Policy that forbids scripts and all loading, so a
hostile name would stay text even if an escape were missed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rca.explanation import Explanation, Verdict
from rca.report import drawing, phrases
from rca.report import format as fmt

_TEMPLATES = Path(__file__).parent / "templates"


def tie(text: str) -> str:
    """Keep a number and the unit after it on one line, with a no-break space."""
    return re.sub(r"(?<=\d) (?=[%\w])", "\u00a0", text)


@cache
def environment() -> Environment:
    """Return the environment of all templates: it escapes every value and knows how reports write figures."""
    found = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters["tie"] = tie
    found.globals.update(fmt=fmt, phrases=phrases, drawing=drawing)
    return found


@cache
def stylesheet() -> str:
    """Return the style of all pages."""
    return (_TEMPLATES / "report.css").read_text(encoding="utf-8")


def render_html(explanation: Explanation, links: Sequence[tuple[str, str]] = ()) -> str:
    """Return the report as one self-contained HTML document; ``links`` (text, address) lead to where it is served."""
    charts, charts_left_out = drawing.draw_charts(explanation)
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            e=explanation,
            explained=explanation.verdict is Verdict.EXPLAINED,
            graph=drawing.draw_graph(explanation),
            charts=charts,
            charts_left_out=charts_left_out,
            attributions=[drawing.draw_bars(attribution) for attribution in explanation.attribution],
            links=links,
            style=stylesheet(),
        )
    )
