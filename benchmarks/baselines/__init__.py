"""Baseline rankers, by name. Each maps an incident to {node: score}, higher meaning more suspicious.

A node that a method cannot score (nothing measured, too few samples) is left out: it ranks last, tied with the other
unscored ones. It is never given a score of zero for being unobserved.

Each has an ``alarm``: the conventional level of its largest score from which it claims that something is wrong. A
method without one always names a cause, so its specificity is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.baselines import correlation, deviation, dowhy_gcm, residuals, walks
from rca.incident import Incident

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Baseline:
    """A ranker: its name in the table, what it is, the function, and its alarm level (None: it never abstains)."""

    name: str
    title: str
    rank: Callable[[Incident], Scores]
    alarm: float | None = None
    slow: bool = False


BASELINES: dict[str, Baseline] = {
    item.name: item
    for item in (
        Baseline("max_z", "max|z|, all metrics", deviation.max_abs_z, 3.0),
        Baseline("max_z_victim", "max|z|, victim's metric", deviation.max_abs_z_victim_metric, 3.0),
        Baseline("nsigma", "N-sigma", deviation.n_sigma, 3.0),
        Baseline("baro", "BARO scorer", deviation.baro),
        Baseline("traversal", "deepest anomalous", walks.deepest_anomalous, 0.0),
        Baseline("correlation", "ranked correlation", correlation.ranked_correlation, 0.0),
        Baseline("circa", "CIRCA-style residuals", residuals.circa, 3.0),
        Baseline("random_walk", "random walk", walks.random_walk),
        Baseline("dowhy", "dowhy.gcm attribution", dowhy_gcm.attribute, slow=True),
    )
}
