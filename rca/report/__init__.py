"""Renders an `Explanation` for people and programs: text, JSON, Markdown and self-contained HTML.

Every format shows the same sections; none computes anything that is not in the explanation.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rca.explanation import Explanation


class Format(StrEnum):
    """An output format of `render`."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"


def render(
    explanation: Explanation, format: Format | str = Format.TEXT, *, width: int = 100, colour: bool = False
) -> str:
    """Return ``explanation`` in ``format``, ending in a newline.

    Args:
        width: columns of the terminal; only ``text`` uses it.
        colour: whether to emit ANSI colours; only ``text`` uses it.

    Raises:
        ValueError: ``format`` is not one of `Format`.
    """
    # Each renderer is imported when used: on call, `text` must not pay for jinja2, nor `json` for rich,
    # nor shell completion for pyarrow.
    match Format(format):
        case Format.TEXT:
            from rca.report.text import render_text

            return render_text(explanation, width=width, colour=colour)
        case Format.JSON:
            from rca.explanation import to_json

            return to_json(explanation).decode()
        case Format.MARKDOWN:
            from rca.report.markdown import render_markdown

            return render_markdown(explanation)
        case Format.HTML:
            from rca.report.html import render_html

            return render_html(explanation)


__all__ = ["Format", "render"]
