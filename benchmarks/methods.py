"""What is compared: our explanation and the baselines, behind one interface."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.baselines import BASELINES, Baseline, dowhy_gcm
from rca.errors import NotFoundError
from rca.incident import Incident

OURS = "prioscope"
PRIORS = ("prior_loo", "prior_in_sample")


@dataclass(frozen=True)
class Answer:
    """What a method said about one case.

    Attributes:
        scores: node -> suspicion; nodes left out rank last, tied.
        named: whether it claims a cause at all.
        level: how strongly it claims that something is wrong; comparable between cases of one method only.
        confidence: stated probability of its first cause, where the method states one.
    """

    scores: Mapping[str, float]
    named: bool
    level: float
    confidence: float | None = None


@dataclass(frozen=True)
class Method:
    """A method by name; ``answer`` may raise `DidNotFinishError` or `rca.errors.PrioscopeError`."""

    name: str
    title: str
    answer: Callable[[Incident], Answer]


def _from_baseline(baseline: Baseline) -> Method:
    def answer(incident: Incident) -> Answer:
        scores = baseline.rank(incident)
        level = max(scores.values(), default=float("-inf"))
        return Answer(scores, baseline.alarm is None or level > baseline.alarm, level)

    return Method(baseline.name, baseline.title, answer)


def _ours() -> Method:
    """Our method; raises ImportError where the explanation is not there yet."""
    from rca.explain import explain
    from rca.explanation import Verdict

    def answer(incident: Incident) -> Answer:
        explanation = explain(incident)
        # What is not listed as a cause follows by its probability in the drawing, below everything listed.
        scores = {node.node: node.cause_probability for node in explanation.nodes}
        below = 1.0 + max(scores.values(), default=0.0)
        scores |= {cause.node: below + 1.0 / cause.rank for cause in explanation.causes}
        return Answer(
            scores,
            named=explanation.verdict is Verdict.EXPLAINED,
            level=1.0 - explanation.no_cause_probability,
            confidence=explanation.causes[0].confidence if explanation.causes else None,
        )

    return Method(OURS, "prioscope", answer)


def names() -> list[str]:
    """Every method that can be asked for."""
    return [OURS, *PRIORS, *BASELINES]


def choose(
    wanted: Sequence[str] | None, *, dowhy_seconds: float = 60.0, dowhy_python: str = sys.executable
) -> tuple[list[Method], list[str], dict[str, str]]:
    """The methods to run, the priors among them, and those skipped with the reason.

    Args:
        wanted: names; None means all but the slow ones.

    Raises:
        NotFoundError: an unknown name.
    """
    asked = list(dict.fromkeys(wanted)) if wanted else [name for name in names() if not _slow(name)]
    methods: list[Method] = []
    skipped: dict[str, str] = {}
    for name in asked:
        if name == OURS:
            try:
                methods.append(_ours())
            except ImportError as error:
                skipped[name] = f"{type(error).__name__}: {error}"
        elif name in BASELINES:
            baseline = BASELINES[name]
            if name == "dowhy":
                bounded = functools.partial(dowhy_gcm.attribute, seconds=dowhy_seconds, python=dowhy_python)
                baseline = replace(baseline, rank=bounded)
            methods.append(_from_baseline(baseline))
        elif name not in PRIORS:
            raise NotFoundError(f"no method {name!r}", cure=f"use some of {', '.join(names())}")
    if not wanted:
        skipped |= {name: "slow; ask for it with --methods" for name in names() if _slow(name)}
    return methods, [name for name in asked if name in PRIORS], skipped


def _slow(name: str) -> bool:
    return name in BASELINES and BASELINES[name].slow
