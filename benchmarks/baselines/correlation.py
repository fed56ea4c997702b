"""Ranked correlation: among nodes that are anomalous at all, the one that moves most like the victim."""

from __future__ import annotations

import numpy as np

from benchmarks.baselines.common import Floats, largest, named, observe, robust_z, victim_series, with_lead_in
from rca.incident import Incident

#: Deviations (normalised MAD) from which a series counts as anomalous; the PetShop authors' setting.
ANOMALOUS = 5.0


def correlation_with(values: Floats, target: Floats, minimum: int = 3) -> Floats:
    """Pearson correlation of each row [N, T] with ``target`` [T] over the samples both have; NaN if too few or flat."""
    both = np.isfinite(values) & np.isfinite(target)
    count = both.sum(axis=1)
    x, y = np.where(both, values, 0.0), np.where(both, target, 0.0)
    number = np.maximum(count, 1)[:, None]
    x = np.where(both, x - x.sum(axis=1, keepdims=True) / number, 0.0)
    y = np.where(both, y - y.sum(axis=1, keepdims=True) / number, 0.0)
    scale = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    usable = (count >= minimum) & (scale > 0)
    return np.where(usable, (x * y).sum(axis=1) / np.where(usable, scale, 1.0), np.nan)


def ranked_correlation(incident: Incident) -> dict[str, float]:
    """|Pearson correlation| with the victim's series over the window and two samples before it.

    The victim's metric at every node. Nodes that are not anomalous are unscored, and so is the victim itself, which
    correlates with itself whatever happened.
    """
    panel = observe(incident)
    anomalous = largest(np.abs(robust_z(*victim_series(panel), scale="mad"))) > ANOMALOUS
    _, recent = victim_series(with_lead_in(incident))
    score = np.abs(correlation_with(recent, recent[panel.victim]))
    score[panel.victim] = np.nan
    return named(panel, np.where(anomalous, score, np.nan))
