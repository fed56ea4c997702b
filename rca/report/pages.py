"""Pages that the incident server shows beside the reports: the list, and an incident that is not explained yet.

As the reports: no script, nothing to load, and everything from outside escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

from rca.report import format as fmt
from rca.report.html import environment, stylesheet

#: States that a reader may ask for, in the order of their links.
STATES: Final = ("received", "capturing", "captured", "explaining", "explained", "inconclusive", "failed")
_COLUMNS: Final = (
    ("start", "Began"),
    ("state", "State"),
    ("alertname", "Alert"),
    ("victim", "Victim"),
    ("cause", "First cause"),
    ("confidence", "Confidence"),
)


@dataclass(frozen=True)
class Link:
    """A link of a page; ``href`` is relative, so that a proxy may serve the pages under any path."""

    text: str
    href: str
    current: bool = False


@dataclass(frozen=True)
class ListRow:
    """One incident of the list. ``confidence`` in [0, 1]; None: not known."""

    href: str
    started: datetime
    ended: datetime | None
    state: str
    alertname: str
    title: str
    victim: str
    cause: str
    confidence: float | None
    problem: str


@dataclass(frozen=True)
class ListQuery:
    """What a list shows, as in its address."""

    states: tuple[str, ...] = ()
    sort: str = "start"
    ascending: bool = False
    filters: Mapping[str, str] | None = None

    def href(self, **changes: object) -> str:
        """Return the address of the list with some parts changed; a page's cursor is not kept."""
        parts: dict[str, object] = {
            **(self.filters or {}),
            "state": self.states,
            "sort": self.sort,
            "order": "asc" if self.ascending else "desc",
            **changes,
        }
        defaults = {"sort": "start", "order": "desc", "state": ()}
        kept = {key: value for key, value in parts.items() if value and value != defaults.get(key)}
        return "incidents" + (f"?{urlencode(kept, doseq=True)}" if kept else "")


def render_list(rows: Sequence[ListRow], query: ListQuery, counts: Mapping[str, int], following: str | None) -> str:
    """Return the list of incidents; ``following`` is the cursor of the next page."""
    total = sum(counts.values())
    states = [Link(f"all {total:,}", query.href(state=()), not query.states)]
    states += [
        Link(f"{state} {counts.get(state, 0):,}", query.href(state=(state,)), query.states == (state,))
        for state in STATES
        if counts.get(state) or state in query.states
    ]
    columns = []
    for key, text in _COLUMNS:
        chosen = query.sort == key
        ascending = not query.ascending if chosen else key != "start"
        arrow = (" ↑" if query.ascending else " ↓") if chosen else ""
        columns.append(Link(text + arrow, query.href(sort=key, order="asc" if ascending else "desc"), chosen))
    return (
        environment()
        .get_template("incidents.html.j2")
        .render(
            rows=rows,
            states=states,
            columns=columns,
            filters=dict(query.filters or {}),
            unfiltered=ListQuery(query.states, query.sort, query.ascending).href(),
            following=query.href(cursor=following) if following else "",
            style=stylesheet(),
        )
    )


def render_status(
    identifier: str,
    title: str,
    state: str,
    problem: str,
    facts: Sequence[tuple[str, str]],
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    links: Sequence[Link],
    *,
    refresh: bool,
) -> str:
    """Return the page of an incident without an explanation; with ``refresh`` it loads itself again."""
    return (
        environment()
        .get_template("status.html.j2")
        .render(
            identifier=identifier,
            title=title,
            state=state,
            problem=problem,
            facts=facts,
            labels=labels,
            annotations=annotations,
            links=links,
            refresh=refresh,
            style=stylesheet(),
        )
    )


def when(moment: datetime | None) -> str:
    """Write a time, or a dash."""
    return "–" if moment is None else fmt.moment(moment)
