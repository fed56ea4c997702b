"""Baselines that look at each node alone: how far did its own metrics move?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.baselines.common import (
    Floats,
    best_over_metrics,
    largest,
    named,
    observe,
    plain_z,
    robust_z,
    victim_series,
)
from rca.incident import Incident
from rca.panel import Panel


def max_abs_z(incident: Incident) -> dict[str, float]:
    """Largest two-sided z over the node's metrics and the window's samples (mean and standard deviation)."""
    panel = observe(incident)
    return named(panel, _over_metrics(panel, lambda base, window: largest(np.abs(plain_z(base, window)))))


def max_abs_z_victim_metric(incident: Incident) -> dict[str, float]:
    """The same on the victim's metric only."""
    panel = observe(incident)
    return named(panel, largest(np.abs(plain_z(*victim_series(panel)))))


def n_sigma(incident: Incident) -> dict[str, float]:
    """RCAEval's N-sigma: largest signed z over metrics and samples; constant series are dropped."""
    panel = observe(incident)
    return named(panel, _over_metrics(panel, lambda base, window: _varying(base, window, plain_z(base, window))))


def baro(incident: Incident) -> dict[str, float]:
    """BARO's scorer (Pham et al., FSE 2024): as N-sigma with median and interquartile range."""
    panel = observe(incident)
    return named(
        panel, _over_metrics(panel, lambda base, window: _varying(base, window, robust_z(base, window, scale="iqr")))
    )


def _over_metrics(panel: Panel, score: Callable[[Floats, Floats], Floats]) -> Floats:
    shared = [name for name in panel.window if name in panel.baseline]
    return best_over_metrics(
        (score(panel.baseline[name], panel.window[name]) for name in shared), len(panel.graph.nodes)
    )


def _varying(baseline: Floats, window: Floats, z: Floats) -> Floats:
    """Largest z per node, unscored where baseline or window is constant (RCAEval's preprocessing drops both).

    A window of one sample cannot vary, so there only the baseline is asked.
    """
    varies = np.ones(len(z), dtype=bool)
    for part in (baseline, window) if window.shape[1] > 1 else (baseline,):
        finite = np.isfinite(part)
        low = np.where(finite, part, np.inf).min(axis=1, initial=np.inf)
        high = np.where(finite, part, -np.inf).max(axis=1, initial=-np.inf)
        varies &= high > low
    return np.where(varies, largest(z), np.nan)
