"""The constant ranker: always the same order of nodes, whatever was measured. The bar that any method must clear.

It is the only baseline that sees labels. In sample, it is the best constant order for the benchmark at hand; leaving
one out, an incident's own label does not count, so it is what an operator with the other incidents' labels could do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def in_sample(truths: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    """Scores for each incident: how many of all incidents (its own included) each node caused."""
    counts = _counts(truths)
    return [{node: float(count) for node, count in counts.items()} for _ in truths]


def leave_one_out(truths: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    """Scores for each incident: how many of the other incidents each node caused; never seen: unscored."""
    counts = _counts(truths)
    return [{node: float(count) for node, count in (counts - Counter(dict.fromkeys(own, 1))).items()} for own in truths]


def _counts(truths: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(node for truth in truths for node in dict.fromkeys(truth))
