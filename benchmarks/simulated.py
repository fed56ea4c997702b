"""Quality on held-out simulated incidents, where cause, path and counterfactual are known because we made them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.progress import track

from benchmarks.datasets.simulated import draw
from benchmarks.metrics import Estimate, expected_calibration_error, hit_probability, interval
from rca.explanation import Explanation
from rca.graph import build
from rca.incident import Incident, Truth


class Judged(msgspec.Struct, frozen=True):
    """One incident. None: does not apply (nothing broke, or the explanation does not say).

    Attributes:
        edges_*: undirected steps of the true and the stated path, and how many they share.
        covered: whether the stated interval of the true cause's contribution holds the true contribution.
    """

    case: str
    mechanism: str
    top1: float | None
    confidence: float | None
    correct: float
    edges_true: int
    edges_stated: int
    edges_shared: int
    covered: bool | None


class Quality(msgspec.Struct, frozen=True):
    """Figures over all incidents; ``by_mechanism`` holds top-1 per kind of fault."""

    incidents: int
    quiet: int
    top1: Estimate | None
    by_mechanism: dict[str, Estimate]
    path_precision: float | None
    path_recall: float | None
    path_f1: float | None
    coverage: Estimate | None
    ece_equal_mass_15: float | None
    ece_equal_width_10: float | None
    cases: list[Judged]


def judge(incident: Incident, truth: Truth, explanation: Explanation) -> Judged:
    """Compare an explanation with what was simulated."""
    scores = {cause.node: 1.0 / cause.rank for cause in explanation.causes}
    first = explanation.causes[0] if explanation.causes else None
    top1 = hit_probability(scores, truth.causes, build(incident).nodes, 1) if truth.causes else None
    right = {frozenset(step) for step in truth.path}
    hops = explanation.path.hops if explanation.path is not None else ()
    stated = {frozenset((hop.source, hop.target)) for hop in hops}
    return Judged(
        case=explanation.incident_id,
        mechanism=truth.kind or "none",
        top1=top1,
        confidence=None if first is None else first.confidence,
        correct=float(first is not None and first.node in truth.causes),
        edges_true=len(right),
        edges_stated=len(stated) if truth.causes else 0,
        edges_shared=len(right & stated),
        covered=_covered(truth, explanation),
    )


def _covered(truth: Truth, explanation: Explanation) -> bool | None:
    """Whether the interval around the true cause's contribution (R4) holds the true one."""
    if truth.counterfactual is None or not truth.causes:
        return None
    for attribution in explanation.attribution:
        for entry in attribution.entries:
            if entry.nodes == truth.causes[:1] and attribution.factual:
                contribution = (attribution.factual - truth.counterfactual) / attribution.factual
                return entry.low <= contribution <= entry.high
    return None


def summarise(cases: list[Judged], *, seed: int = 0) -> Quality:
    """Sum up; path figures are micro-averaged over steps."""
    hits = [case.top1 for case in cases if case.top1 is not None]
    mechanisms = sorted({case.mechanism for case in cases if case.top1 is not None})
    shared = sum(case.edges_shared for case in cases)
    true, stated = sum(case.edges_true for case in cases), sum(case.edges_stated for case in cases)
    sure = [(case.confidence, case.correct) for case in cases if case.confidence is not None]
    confidence, correct = [pair[0] for pair in sure], [pair[1] for pair in sure]
    return Quality(
        incidents=len(hits),
        quiet=len(cases) - len(hits),
        top1=interval(hits, seed=seed),
        by_mechanism={
            name: estimate
            for name in mechanisms
            if (
                estimate := interval(
                    [case.top1 for case in cases if case.mechanism == name and case.top1 is not None], seed=seed
                )
            )
        },
        path_precision=shared / stated if stated else None,
        path_recall=shared / true if true else None,
        path_f1=2 * shared / (true + stated) if true + stated else None,
        coverage=interval([float(case.covered) for case in cases if case.covered is not None], seed=seed),
        ece_equal_mass_15=expected_calibration_error(confidence, correct, bins=15, equal_mass=True) if sure else None,
        ece_equal_width_10=expected_calibration_error(confidence, correct, bins=10, equal_mass=False) if sure else None,
        cases=cases,
    )


def evaluate(
    explain: Callable[[Incident], Explanation], *, count: int = 300, normal: float = 0.1, console: Console
) -> Quality:
    """Explain ``count`` held-out incidents, a share ``normal`` of them with nothing broken."""
    judged = []
    for drawn in track(draw(count, normal=normal), total=count, description="simulated incidents", console=console):
        bundle = drawn.incident
        assert bundle.truth is not None
        judged.append(judge(bundle, bundle.truth, explain(bundle.replace(truth=None))))
    return summarise(judged)


def print_quality(quality: Quality, console: Console) -> None:
    """Print the figures, each with its 95 % interval where it has one."""

    def number(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.3f}"

    def estimate(value: Estimate | None) -> str:
        if value is None:
            return "not measured"
        return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}] (n = {value.count})"

    console.print(f"{quality.incidents} incidents and {quality.quiet} quiet windows, held out")
    console.print(f"top-1                        {estimate(quality.top1)}")
    for name, value in quality.by_mechanism.items():
        console.print(f"  {name:<26} {estimate(value)}")
    console.print(
        f"path steps                   F1 {number(quality.path_f1)}, precision {number(quality.path_precision)}, "
        f"recall {number(quality.path_recall)}"
    )
    console.print(f"counterfactual 95 % coverage {estimate(quality.coverage)}")
    console.print(
        f"calibration error            {number(quality.ece_equal_mass_15)} (15 bins of equal mass), "
        f"{number(quality.ece_equal_width_10)} (10 of equal width)"
    )
