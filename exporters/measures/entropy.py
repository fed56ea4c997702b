"""M5 priority entropy: how evenly the priorities of a scheduling window are spread."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum


class Band(StrEnum):
    """What the entropy says about the window (published bands)."""

    SKEWED = "skewed"
    """Under 0.8 bits: jitter risk over 15 %."""
    UNEVEN = "uneven"
    """0.8 to under 1.5 bits: jitter risk 5 to 15 %."""
    BALANCED = "balanced"
    """From 1.5 bits: jitter risk under 5 %."""


def priority_entropy(ranks: Iterable[int]) -> float | None:
    """Return H = -Σ p·log2 p in bits over the ranks in the window; None for an empty window."""
    counts = Counter(ranks)
    total = counts.total()
    if not total:
        return None
    # Adding 0.0 turns the -0.0 of a single class into 0.0.
    return -math.fsum(n / total * math.log2(n / total) for n in counts.values()) + 0.0


def band_of(entropy: float) -> Band:
    """Return the published band of an entropy in bits."""
    if entropy < 0.8:
        return Band.SKEWED
    return Band.UNEVEN if entropy < 1.5 else Band.BALANCED
