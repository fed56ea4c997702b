"""The Markdown report: CommonMark with pipe tables, fit for a ticket, and readable as plain text in a chat.

Everything that comes from the bundle is escaped: names go into code spans, prose has its punctuation escaped, and an
at sign cannot mention anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rca.explanation import Attribution, Explanation
from rca.report import format as fmt
from rca.report import phrases

_PUNCTUATION = re.compile(r"([\\`*_{}\[\]<>#|~!&])")
_LEADING = re.compile(r"^(\s*)([-+=]|\d+[.)])")
_MENTION = re.compile(r"(?<![\w])@(?=\w)")


def escape(text: str) -> str:
    """Escape ``text`` so that Markdown shows it literally, on one line."""
    shown = _PUNCTUATION.sub(r"\\\1", fmt.printable(text))
    shown = _LEADING.sub(lambda match: f"{match[1]}{match[2][:-1]}\\{match[2][-1]}", shown)
    # U+2060 WORD JOINER is invisible and keeps a name in the data from notifying a person.
    return _MENTION.sub("@\u2060", shown)


def code(text: str, *, cell: bool = False) -> str:
    """Put ``text`` in a code span whose fence is longer than any run of backticks inside; escape pipes in a cell."""
    shown = fmt.printable(text)
    if not shown.strip():
        return "*(empty name)*"
    fence = "`" * (max((len(run) for run in re.findall(r"`+", shown)), default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    span = f"{fence}{pad}{shown}{pad}{fence}"
    return span.replace("|", "\\|") if cell else span


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lay out a pipe table with aligned columns; ``right`` lists the right-aligned ones. Cells are already escaped."""
    body = [list(row) for row in rows]
    widths = [max(3, *(len(row[column]) for row in [list(header), *body])) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (width - 1) + ":" if column in right else "-" * width for column, width in enumerate(widths)]
    return [line(header), line(rule), *(line(row) for row in body)]


def render_markdown(explanation: Explanation) -> str:
    """Return the report as Markdown."""
    e = explanation
    verdict = escape(phrases.capitalise(phrases.verdict(e)))
    lines = [f"# {escape(phrases.title(e))}", "", f"**{verdict}** · incident {code(e.incident_id)}"]
    if e.verdict_reasons:
        lines += ["", *(f"- {escape(reason)}" for reason in e.verdict_reasons)]
    if policy := phrases.policy(e):
        lines += ["", escape(phrases.capitalise(policy))]
    if e.labels:
        lines += ["", " ".join(code(f"{key}={value}") for key, value in sorted(e.labels.items()))]
    sections: tuple[tuple[str, list[str]], ...] = (
        (phrases.WHAT_HAPPENED, _what_happened(e)),
        (phrases.LIKELY_CAUSE, _likely_cause(e)),
        (phrases.HOW_IT_SPREAD, _how_it_spread(e)),
        (phrases.PREVENTION, _prevention(e)),
        (phrases.EVIDENCE, _evidence(e)),
        (
            phrases.RULED_OUT,
            [f"- {code(item.node)}: {escape(item.reason)}" for item in e.ruled_out] or [phrases.NOTHING_RULED_OUT],
        ),
        (
            phrases.NOT_CHECKED,
            [f"- {escape(item.what)}: {escape(item.why)}" for item in e.not_checked] or [phrases.EVERYTHING_CHECKED],
        ),
        (phrases.NEXT_STEPS, _next_steps(e)),
    )
    if e.sources:
        sections = (*sections, (phrases.ASKED, _asked(e)))
    for heading, body in sections:
        lines += ["", f"## {heading}", "", *body]
    lines += ["", "---", "", escape(phrases.provenance(e))]
    return "\n".join(lines) + "\n"


def _asked(e: Explanation) -> list[str]:
    lines = []
    for source in e.sources:
        lines.append(f"- {escape(source.name)}: {escape(phrases.asked(source))}")
        lines += [f"  - {code(query)}" for query in source.queries]
    return lines


def _what_happened(e: Explanation) -> list[str]:
    impact = e.impact
    metric = escape(fmt.metric_label(impact.victim.metric))
    return [
        f"{code(impact.victim.node)}: {metric} {escape(phrases.impact_values(impact))}.",
        "",
        f"- Kind: {escape(fmt.words(impact.kind))}",
        f"- Symptom began: {phrases.onset(impact)}",
        f"- Incident: {fmt.window(impact.window)}, {fmt.plural(impact.incident_samples, 'sample')}",
        f"- Baseline: {fmt.window(impact.baseline_window)}, {fmt.plural(impact.baseline_samples, 'sample')}",
    ]


def _likely_cause(e: Explanation) -> list[str]:
    lines = []
    for cause in e.causes:
        onset = fmt.offset(cause.onset_offset_seconds)
        detail = f"{onset}" if cause.onset_offset_seconds is None else f"began {onset}"
        if cause.mechanism:
            mechanism = escape(fmt.words(cause.mechanism))
            detail = f"{mechanism} ({fmt.share(cause.mechanism_probability)}); {detail}"
        lines.append(
            f"{cause.rank}. **{fmt.share(cause.confidence)}** {code(cause.node)} ({escape(fmt.words(cause.kind))}): "
            f"{detail}"
        )
        if cause.summary:
            lines.append(f"   {escape(cause.summary)}")
    if not lines:
        lines.append(phrases.NO_CAUSE)
    return [*lines, "", f"None of the observed nodes: {fmt.share(e.no_cause_probability)}"]


def _how_it_spread(e: Explanation) -> list[str]:
    if e.path is None or not e.path.hops:
        return [phrases.NO_PATH]
    lines = [f"1. {code(e.path.hops[0].source)}"]
    for index, hop in enumerate(e.path.hops, start=2):
        caller, verb, callee = phrases.hop_reason(e, hop)
        lines.append(
            f"{index}. {code(hop.target)}, {fmt.share(hop.probability)}: {code(caller)} {escape(verb)} {code(callee)}"
        )
    return [*lines, "", f"Whole path: {fmt.share(e.path.probability)}"]


def _prevention(e: Explanation) -> list[str]:
    lines: list[str] = []
    for attribution in e.attribution:
        if lines:
            lines.append("")
        lines += _attribution(attribution)
    return lines if any(a.entries for a in e.attribution) else [phrases.NO_ATTRIBUTION, "", *lines]


def _attribution(a: Attribution) -> list[str]:
    lines = []
    if a.entries:
        lines = [
            f"{escape(fmt.metric_label(a.metric))} was {fmt.quantity(a.factual, a.unit)}; with these nodes back to "
            f"normal it would have been (engine: {escape(fmt.words(a.engine))}):",
            "",
            *table(
                ("Back to normal", "Victim would see", "Contribution", "95 % interval", "Shapley share"),
                [
                    (
                        " + ".join(code(node, cell=True) for node in entry.nodes)
                        + (" (extrapolated)" if entry.extrapolates else ""),
                        fmt.quantity(entry.counterfactual, a.unit),
                        fmt.share(entry.contribution),
                        fmt.interval(entry.low, entry.high),
                        "–" if entry.shapley is None else fmt.share(entry.shapley),
                    )
                    for entry in a.entries
                ],
                right=(1, 2, 3, 4),
            ),
        ]
        if any(entry.extrapolates for entry in a.entries):
            lines += ["", f"Extrapolated: {phrases.EXTRAPOLATION_NOTE}."]
    if a.notes:
        lines += ["", *(f"- {escape(note)}" for note in a.notes)]
    return lines


def _evidence(e: Explanation) -> list[str]:
    if not e.evidence:
        return [phrases.NO_EVIDENCE]
    rows = [
        (
            code(item.node, cell=True) + (f" → {code(item.peer, cell=True)}" if item.peer else ""),
            escape(fmt.metric_label(item.metric)),
            fmt.quantity(item.baseline, item.unit),
            fmt.quantity(item.incident, item.unit),
            fmt.change(item.baseline, item.incident),
            fmt.number(item.z),
            fmt.offset_short(item.onset_offset_seconds),
            f"{item.samples:,}",
        )
        for item in e.evidence
    ]
    header = ("Node", "Metric", "Baseline", "Incident", "Change", "z", "Onset", "Samples")
    return [
        *table(header, rows, right=(2, 3, 4, 5, 6, 7)),
        "",
        "Onset is relative to the symptom; z is in robust standard deviations.",
    ]


def _next_steps(e: Explanation) -> list[str]:
    lines = []
    for index, step in enumerate(e.next_steps, start=1):
        lines.append(f"{index}. {escape(step.action)}")
        if step.command:
            lines.append(f"   - Run: {code(step.command)}")
        if step.check:
            lines.append(f"   - Check: {escape(step.check)}")
    return lines or [phrases.NO_NEXT_STEPS]
