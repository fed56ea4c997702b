"""The terminal report. Built from rich `Text` objects, never from markup: names are data, not formatting."""

from __future__ import annotations

import io
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rca.explanation import Attribution, Explanation, Verdict
from rca.report import format as fmt
from rca.report import phrases

#: Below this width tables become lists.
_NARROW: Final = 84
_BAR_CELLS: Final = 12

_TITLE: Final = "bold"
_NAME: Final = "bold cyan"
_MUTED: Final = "dim"
_CAUSE: Final = "bold yellow"
_HEADING: Final = "bold underline"


def render_text(explanation: Explanation, *, width: int = 100, colour: bool = False) -> str:
    """Return the report as text of ``width`` columns, with ANSI colours when ``colour``."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(width, 32),
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    console.print(_Report(explanation))
    # rich pads table rows to the full width; pasted text should not carry that.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


class _Report:
    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        e = self.explanation
        narrow = options.max_width < _NARROW
        yield from _head(e)
        sections: tuple[tuple[str, RenderableType], ...] = (
            (phrases.WHAT_HAPPENED, _what_happened(e)),
            (phrases.LIKELY_CAUSE, _likely_cause(e)),
            (phrases.HOW_IT_SPREAD, _how_it_spread(e)),
            (phrases.PREVENTION, _prevention(e, narrow)),
            (phrases.EVIDENCE, _evidence(e, narrow)),
            (
                phrases.RULED_OUT,
                _bullets([(r.node, r.reason) for r in e.ruled_out], phrases.NOTHING_RULED_OUT),
            ),
            (
                phrases.NOT_CHECKED,
                _bullets([(n.what, n.why) for n in e.not_checked], phrases.EVERYTHING_CHECKED),
            ),
            (phrases.NEXT_STEPS, _next_steps(e)),
        )
        if e.sources:
            asked = _bullets([(source.name, phrases.asked(source)) for source in e.sources], "")
            sections = (*sections, (phrases.ASKED, asked))
        for heading, body in sections:
            yield Text()
            yield Text(heading, style=_HEADING)
            yield Padding(body, (0, 0, 0, 2))
        yield Text()
        yield Text(phrases.provenance(e), style=_MUTED)


def _name(text: str, style: str = _NAME) -> Text:
    return Text(fmt.printable(text), style=style)


def _head(e: Explanation) -> RenderResult:
    yield Text.assemble((fmt.printable(e.incident_id), _MUTED), "  ", (phrases.title(e), _TITLE))
    yield Text(phrases.capitalise(phrases.verdict(e)), style=_CAUSE)
    for reason in e.verdict_reasons:
        yield Padding(Text(fmt.printable(reason)), (0, 0, 0, 2))
    if policy := phrases.policy(e):
        yield Text(phrases.capitalise(policy), style=_MUTED)
    if e.labels:
        labels = "  ".join(f"{fmt.printable(key)}={fmt.printable(value)}" for key, value in sorted(e.labels.items()))
        yield Text(labels, style=_MUTED)


def _what_happened(e: Explanation) -> RenderableType:
    impact = e.impact
    sentence = Text.assemble(
        _name(impact.victim.node),
        f": {fmt.metric_label(impact.victim.metric)} {phrases.impact_values(impact)}",
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style=_MUTED, no_wrap=True)
    facts.add_column()
    facts.add_row("Kind", fmt.words(impact.kind))
    facts.add_row("Symptom began", phrases.onset(impact))
    facts.add_row("Incident", f"{fmt.window(impact.window)}, {fmt.plural(impact.incident_samples, 'sample')}")
    facts.add_row("Baseline", f"{fmt.window(impact.baseline_window)}, {fmt.plural(impact.baseline_samples, 'sample')}")
    return Group(sentence, facts)


def _bar(value: float) -> str:
    filled = round(max(0.0, min(1.0, value)) * _BAR_CELLS)
    return "█" * filled + "░" * (_BAR_CELLS - filled)


def _likely_cause(e: Explanation) -> RenderableType:
    parts: list[RenderableType] = []
    if not e.causes:
        parts.append(Text(phrases.NO_CAUSE))
    for cause in e.causes:
        style = _CAUSE if cause.rank == 1 and e.verdict is Verdict.EXPLAINED else _NAME
        parts.append(
            Text.assemble(
                (f"{cause.rank}. ", _MUTED),
                _name(cause.node, style),
                f" ({fmt.words(cause.kind)})  ",
                (_bar(cause.confidence), style),
                f" {fmt.share(cause.confidence)}",
            )
        )
        detail = [
            f"{fmt.words(cause.mechanism)} ({fmt.share(cause.mechanism_probability)})" if cause.mechanism else "",
            f"began {fmt.offset(cause.onset_offset_seconds)}"
            if cause.onset_offset_seconds is not None
            else "onset not known",
        ]
        parts.append(Padding(Text("; ".join(part for part in detail if part), style=_MUTED), (0, 0, 0, 3)))
        if cause.summary:
            parts.append(Padding(Text(fmt.printable(cause.summary)), (0, 0, 0, 3)))
    parts.append(Text(f"None of the observed nodes: {fmt.share(e.no_cause_probability)}", style=_MUTED))
    return Group(*parts)


def _how_it_spread(e: Explanation) -> RenderableType:
    if e.path is None or not e.path.hops:
        return Text(phrases.NO_PATH)
    parts: list[RenderableType] = [_name(e.path.hops[0].source, _CAUSE)]
    for hop in e.path.hops:
        caller, verb, callee = phrases.hop_reason(e, hop)
        parts.append(
            Text.assemble(
                ("↓ ", _CAUSE),
                f"{fmt.share(hop.probability)}  ",
                (f"{fmt.printable(caller)} {verb} {fmt.printable(callee)}", _MUTED),
            )
        )
        parts.append(_name(hop.target))
    parts.append(Text(f"Whole path: {fmt.share(e.path.probability)}", style=_MUTED))
    return Group(*parts)


def _prevention(e: Explanation, narrow: bool) -> RenderableType:
    if not any(attribution.entries for attribution in e.attribution):
        notes = [note for attribution in e.attribution for note in attribution.notes]
        return Group(Text(phrases.NO_ATTRIBUTION), *(Text(fmt.printable(note), style=_MUTED) for note in notes))
    return Group(*(_attribution(attribution, narrow) for attribution in e.attribution))


def _attribution(a: Attribution, narrow: bool) -> RenderableType:
    lead = (
        f"{fmt.metric_label(a.metric)} was {fmt.quantity(a.factual, a.unit)}; with these nodes back to normal it would "
        f"have been (engine: {fmt.words(a.engine)}):"
    )
    parts: list[RenderableType] = [Text(lead)]
    if narrow:
        for entry in a.entries:
            parts.append(_name(fmt.names(entry.nodes) + (" *" if entry.extrapolates else "")))
            line = (
                f"{fmt.quantity(entry.counterfactual, a.unit)}, contribution {fmt.share(entry.contribution)} "
                f"[{fmt.interval(entry.low, entry.high)}]"
            )
            if entry.shapley is not None:
                line += f", Shapley {fmt.share(entry.shapley)}"
            parts.append(Padding(Text(line), (0, 0, 0, 2)))
    else:
        table = _table()
        table.add_column("Back to normal", overflow="fold", ratio=3)
        table.add_column("Victim would see", justify="right")
        table.add_column("Contribution", justify="right")
        table.add_column("95 % interval", justify="right")
        table.add_column("Shapley share", justify="right")
        for entry in a.entries:
            table.add_row(
                _name(fmt.names(entry.nodes) + (" *" if entry.extrapolates else "")),
                fmt.quantity(entry.counterfactual, a.unit),
                fmt.share(entry.contribution),
                fmt.interval(entry.low, entry.high),
                "–" if entry.shapley is None else fmt.share(entry.shapley),
            )
        parts.append(table)
    if any(entry.extrapolates for entry in a.entries):
        parts.append(Text(f"* {phrases.EXTRAPOLATION_NOTE}", style=_MUTED))
    parts.extend(Text(fmt.printable(note), style=_MUTED) for note in a.notes)
    return Group(*parts)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False, header_style=_MUTED, show_edge=False)


def _evidence(e: Explanation, narrow: bool) -> RenderableType:
    if not e.evidence:
        return Text(phrases.NO_EVIDENCE)
    if narrow:
        parts: list[RenderableType] = []
        for item in e.evidence:
            parts.append(Text.assemble(_name(_where(item.node, item.peer)), f"  {fmt.metric_label(item.metric)}"))
            line = (
                f"{fmt.quantity(item.baseline, item.unit)} → {fmt.quantity(item.incident, item.unit)} "
                f"({fmt.change(item.baseline, item.incident)}), z {fmt.number(item.z)}, "
                f"{fmt.offset(item.onset_offset_seconds)}, {fmt.plural(item.samples, 'sample')}"
            )
            parts.append(Padding(Text(line), (0, 0, 0, 2)))
        return Group(*parts)
    table = _table()
    table.add_column("Node", overflow="fold", ratio=3)
    table.add_column("Metric", overflow="fold", ratio=2)
    table.add_column("Baseline", justify="right")
    table.add_column("Incident", justify="right")
    table.add_column("Change", justify="right")
    table.add_column("z", justify="right")
    table.add_column("Onset", justify="right")
    table.add_column("Samples", justify="right")
    for item in e.evidence:
        table.add_row(
            _name(_where(item.node, item.peer)),
            fmt.metric_label(item.metric),
            fmt.quantity(item.baseline, item.unit),
            fmt.quantity(item.incident, item.unit),
            fmt.change(item.baseline, item.incident),
            fmt.number(item.z),
            fmt.offset_short(item.onset_offset_seconds),
            f"{item.samples:,}",
        )
    return Group(table, Text("Onset is relative to the symptom; z is in robust standard deviations.", style=_MUTED))


def _where(node: str, peer: str | None) -> str:
    return f"{node} → {peer}" if peer else node


def _bullets(items: list[tuple[str, str]], nothing: str) -> RenderableType:
    if not items:
        return Text(nothing)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, reason in items:
        grid.add_row("•", Text.assemble(_name(name), f": {fmt.printable(reason)}"))
    return grid


def _next_steps(e: Explanation) -> RenderableType:
    if not e.next_steps:
        return Text(phrases.NO_NEXT_STEPS)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style=_MUTED)
    grid.add_column(overflow="fold")
    for index, step in enumerate(e.next_steps, start=1):
        body: list[RenderableType] = [Text(fmt.printable(step.action))]
        if step.command:
            body.append(Text(f"$ {fmt.printable(step.command)}", style="green"))
        if step.check:
            body.append(Text(f"Check: {fmt.printable(step.check)}", style=_MUTED))
        grid.add_row(f"{index}.", Group(*body))
    return grid
