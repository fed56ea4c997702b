"""The risk score of an incident (M6): 0.4 violation rate + 0.3 resource sensitivity + 0.3 business impact.

The published formula has 1 - violation rate, which contradicts the bands that it is published with: a higher rate must
raise the risk. A score is made only where all three parts are known; a part that is not known is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rca.explanation import Explanation
from rca.incident import NodeKind

#: Annotation of an alert with the share of the promises that are broken, in [0, 1].
VIOLATION_ANNOTATION: Final = "rca_violation_ratio"
#: Label or annotation with the business impact, from 1 (none to speak of) to 5.
IMPACT_LABEL: Final = "business_impact"

_WEIGHTS: Final = (0.4, 0.3, 0.3)
_RESOURCES: Final = frozenset({NodeKind.GPU, NodeKind.HOST, NodeKind.QUEUE, NodeKind.WORKLOAD})


class Band(StrEnum):
    """What the score asks for: look at it, add capacity, or break off what causes it."""

    WATCH = "watch"
    SCALE = "scale"
    BREAK = "break"


@dataclass(frozen=True)
class Risk:
    """A score in [0, 1] and its band."""

    score: float
    band: Band


def risk(violation_rate: float, resource_sensitivity: float, business_impact: float) -> Risk:
    """Return the risk for three parts in [0, 1].

    Raises:
        ValueError: a part lies outside.
    """
    parts = (violation_rate, resource_sensitivity, business_impact)
    if not all(0 <= part <= 1 for part in parts):
        raise ValueError(f"the parts of a risk lie in [0, 1], not {parts}")
    score = math.fsum(weight * part for weight, part in zip(_WEIGHTS, parts, strict=True))
    band = Band.WATCH if score < 0.3 else Band.SCALE if score < 0.7 else Band.BREAK
    return Risk(score, band)


def of_incident(explanation: Explanation, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Risk | None:
    """Return the risk of an explained incident, None where a part is not known.

    The violation rate is the alert's annotation `VIOLATION_ANNOTATION`, else the victim's error ratio where that is
    what the incident is about. Resource sensitivity is how much of the victim's value goes when a GPU, host, queue or
    workload among the causes goes back to normal. Business impact is `IMPACT_LABEL`, 1 to 5.
    """
    rate = _ratio(annotations.get(VIOLATION_ANNOTATION))
    if rate is None and explanation.impact.victim.metric == "error_ratio":
        rate = explanation.impact.incident
    sensitivity = _sensitivity(explanation)
    level = _number(annotations.get(IMPACT_LABEL, labels.get(IMPACT_LABEL)))
    if rate is None or sensitivity is None or level is None or not 1 <= level <= 5 or not 0 <= rate <= 1:
        return None
    return risk(rate, sensitivity, (level - 1) / 4)


def _sensitivity(explanation: Explanation) -> float | None:
    kinds = {cause.node: cause.kind for cause in explanation.causes}
    found = [entry for attribution in explanation.attribution for entry in attribution.entries if len(entry.nodes) == 1]
    if not found:
        return None
    shares = [entry.contribution for entry in found if kinds.get(entry.nodes[0]) in _RESOURCES]
    return min(max(shares, default=0.0), 1.0) if max(shares, default=0.0) > 0 else 0.0


def _ratio(text: str | None) -> float | None:
    value = _number(text)
    return value if value is not None and 0 <= value <= 1 else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
