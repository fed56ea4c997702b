"""``rca watch``: follow what happens in the store, one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.incidents import Output
from cli.live import StoreOption

if TYPE_CHECKING:
    from rca.store import StoredIncident


def watch(
    store: StoreOption = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Begin with what changed then: a time, or how long ago.", show_default=False),
    ] = None,
    steps: Annotated[
        bool, typer.Option("--steps", help="A line for every step, not only when an incident is finished.")
    ] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between looks.")] = 1.0,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Stop after this many lines.", show_default=False)
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="text, or json: one object a line.")] = Output.TEXT,
) -> None:
    """Follow new incidents until Ctrl-C: a line when one is explained, inconclusive or failed.

    A store that does not answer for a while is waited for.

    \b
    Examples:
      rca watch
      rca watch --since 1h --steps
      rca watch -o json | jq -r 'select(.state == "explained") | .cause'
    """
    import time
    from datetime import UTC, datetime, timedelta

    import msgspec

    from cli.incidents import moment_or_ago
    from cli.output import note
    from rca.errors import SourceUnreachableError
    from rca.serve.views import incident_view
    from rca.store import open_store

    # Clocks of several servers differ a little, and a change shows only once it is committed.
    overlap = timedelta(seconds=10)
    begin = moment_or_ago(since, "--since") if since else datetime.now(UTC)
    seen: dict[str, tuple[str, int]] = {}
    lines = 0
    away = False
    look = begin
    with open_store(store, must_exist=True) as opened:
        if not since:
            # What is finished before we start is no news.
            seen = {item.id: _step(item) for item in opened.changed(begin - overlap)}
        while True:
            try:
                changed = opened.changed(look)
                if away:
                    note("the store answers again")
                away = False
            except SourceUnreachableError as error:
                if not away:
                    note(f"waiting: {error}")
                away, changed = True, ()
            for item in changed:
                look = max(look, item.updated_at - overlap)
                if seen.get(item.id) == _step(item):
                    continue
                seen[item.id] = _step(item)
                if not (item.final or steps):
                    continue
                text = msgspec.json.encode(incident_view(item)).decode() if output is Output.JSON else _line(item)
                typer.echo(text)
                lines += 1
                if count is not None and lines >= count:
                    return
            time.sleep(interval)


def _step(item: StoredIncident) -> tuple[str, int]:
    return item.state.value, item.revision


def _line(item: StoredIncident) -> str:
    from rca.report import format as fmt

    parts = [fmt.moment(item.updated_at), item.id, item.state.value]
    if item.victim:
        parts.append(f"victim {item.victim}")
    if item.cause:
        share = "" if item.confidence is None else f" ({fmt.share(item.confidence)})"
        parts.append(f"cause {item.cause}{share}")
    if item.problem:
        parts.append(item.problem)
    return fmt.printable("  ".join(parts))
