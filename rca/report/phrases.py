"""Sentences and selections that the report formats share, so that they cannot disagree about the content."""

from __future__ import annotations

from rca.explanation import AttributionEntry, Explanation, Hop, Impact, Verdict
from rca.incident import Source
from rca.report import format as fmt

#: Sections in reading order; every format uses these titles.
WHAT_HAPPENED = "What happened"
LIKELY_CAUSE = "Likely cause"
HOW_IT_SPREAD = "How it spread"
PREVENTION = "What would have prevented it"
EVIDENCE = "Evidence"
RULED_OUT = "Ruled out"
NOT_CHECKED = "Not checked"
NEXT_STEPS = "Next steps"
#: Only in reports of live captures.
ASKED = "Asked"
SECTIONS = (
    WHAT_HAPPENED,
    LIKELY_CAUSE,
    HOW_IT_SPREAD,
    PREVENTION,
    EVIDENCE,
    RULED_OUT,
    NOT_CHECKED,
    NEXT_STEPS,
)

EXTRAPOLATION_NOTE = "outside the range seen in the baseline: read it as an extrapolation"
NO_PATH = "No path from a cause to the victim could be established."
NO_ATTRIBUTION = "No counterfactual could be computed; see what was not checked."
NO_EVIDENCE = "No deviation from a baseline was measured."
NO_CAUSE = "No candidate stands out."
NOTHING_RULED_OUT = "Nothing could be ruled out."
EVERYTHING_CHECKED = "Nothing: every source answered and every check was possible."
NO_NEXT_STEPS = "No action can be recommended from this data."


def capitalise(text: str) -> str:
    """Raise the first letter and leave the rest, which may be names, alone."""
    return text[:1].upper() + text[1:]


def title(explanation: Explanation) -> str:
    """The incident's title, or one made from its victim."""
    victim = explanation.impact.victim
    made = capitalise(f"{fmt.metric_label(victim.metric)} of {fmt.printable(victim.node)}")
    return fmt.printable(explanation.title) or made


def verdict(explanation: Explanation) -> str:
    """One line: what was decided, and how sure."""
    if explanation.verdict is Verdict.EXPLAINED and explanation.causes:
        first = explanation.causes[0]
        return f"explained: {fmt.printable(first.node)}, with {fmt.share(first.confidence)} confidence"
    return "inconclusive: no cause can be named with enough confidence"


def asked(source: Source) -> str:
    """One source of a live capture: whether it answered, and what it noted."""
    detail = f": {fmt.printable(source.detail)}" if source.detail else ""
    return f"{source.kind}, {source.status.value}, {fmt.plural(len(source.queries), 'query', 'queries')}{detail}"


def impact_values(impact: Impact) -> str:
    """How the victim metric moved: ``rose from 420 ms to 3.2 s (×7.6), peak 4.1 s``."""
    verb = fmt.direction(impact.baseline, impact.incident)
    now = fmt.quantity(impact.incident, impact.unit)
    if impact.baseline is None or impact.incident is None:
        text = f"was {now} (baseline {fmt.quantity(impact.baseline, impact.unit)})"
    elif verb == "stayed":
        text = f"stayed at {now}"
    else:
        text = f"{verb} from {fmt.quantity(impact.baseline, impact.unit)} to {now}"
        text += f" ({fmt.change(impact.baseline, impact.incident)})"
    if impact.peak is not None:
        # For availability or throughput the worst value is the lowest one.
        word = "lowest" if verb == "fell" else "peak"
        text += f", {word} {fmt.quantity(impact.peak, impact.unit)}"
    return text


def onset(impact: Impact) -> str:
    """When the symptom began."""
    return fmt.moment(impact.onset) if impact.onset is not None else "not known"


def outcome(unit: str, factual: float, entry: AttributionEntry) -> str:
    """What the victim would have seen instead: ``450 ms instead of 3.2 s``."""
    return f"{fmt.quantity(entry.counterfactual, unit)} instead of {fmt.quantity(factual, unit)}"


def hop_reason(explanation: Explanation, hop: Hop) -> tuple[str, str, str]:
    """The dependency behind a hop, as ``(caller, verb, callee)``.

    The anomaly may have crossed the edge either way (a slow callee, or a flood from a caller); the dependency itself
    is the edge of the call graph.
    """
    verb = fmt.relation_verb(hop.relation)
    edges = {(edge.caller, edge.callee) for edge in explanation.edges if edge.relation == hop.relation}
    if (hop.target, hop.source) not in edges and (hop.source, hop.target) in edges:
        return hop.source, verb, hop.target
    return hop.target, verb, hop.source


def policy(explanation: Explanation) -> str:
    """One line on the policy that the incident was judged by, or "" when there was none."""
    judged = explanation.policy
    if judged is None:
        return ""
    answer = {True: "violated", False: "not violated", None: "not judged"}[judged.violated]
    detail = fmt.printable(judged.detail.removeprefix("not judged: "))
    return f"policy {answer}: {detail}; judged by {fmt.printable(judged.policy)}"


def provenance(explanation: Explanation) -> str:
    """One line on how the answer can be traced: model and chain."""
    model = explanation.model
    parts = [f"model {fmt.printable(model.name)} {fmt.printable(model.version)} (sha256 {model.sha256[:12]})"]
    if explanation.provenance.steps:
        last = explanation.provenance.steps[-1].digest
        parts.append(f"provenance grade {fmt.printable(explanation.provenance.grade)}, chain {last[:12]}")
    return "; ".join(parts)
