"""What the baselines share: robust and plain z-scores that treat missing data as missing, and the call graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import networkx as nx
import numpy as np
import numpy.typing as npt

from rca import panel as panels
from rca.incident import Incident, Window
from rca.panel import Panel

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

#: Fewer baseline samples than this do not say what is normal.
MIN_BASELINE = 10
#: A normal distribution's standard deviation over its median absolute deviation.
MAD_SCALE = 1.4826
#: Stands for a spread of zero where any move is extreme; keeps the scores finite and in order.
NO_SPREAD = 1e-9


def plain_z(baseline: Floats, window: Floats) -> Floats:
    """(x - mean) / standard deviation of the baseline, shape of ``window`` [N, T]; NaN where not measured.

    A series without spread is scaled by 1, as scikit-learn's scalers do.
    """
    enough = np.isfinite(baseline).sum(axis=1) >= MIN_BASELINE
    data = np.where(enough[:, None], baseline, 0.0)
    mean = np.nanmean(data, axis=1, keepdims=True)
    spread = np.nanstd(data, axis=1, keepdims=True)
    return np.where(enough[:, None], (window - mean) / _or_one(spread, mean), np.nan)


def robust_z(baseline: Floats, window: Floats, *, scale: str) -> Floats:
    """(x - median) / scale of the baseline, shape of ``window`` [N, T]; NaN where not measured.

    Args:
        scale: ``iqr`` (as BARO; no spread counts as 1) or ``mad`` (normalised to a standard deviation). A series that
            usually does not move at all, such as an error ratio, has no spread by ``mad``: there any move is
            extreme, as in the PetShop authors' scorer, which divides by zero.
    """
    enough = np.isfinite(baseline).sum(axis=1) >= MIN_BASELINE
    data = np.where(enough[:, None], baseline, 0.0)
    median = np.nanmedian(data, axis=1, keepdims=True)
    if scale == "iqr":
        low, high = np.nanquantile(data, [0.25, 0.75], axis=1)
        spread = _or_one((high - low)[:, None], median)
    else:
        spread = MAD_SCALE * np.nanmedian(np.abs(data - median), axis=1, keepdims=True)
        spread = np.maximum(spread, NO_SPREAD)
    return np.where(enough[:, None], (window - median) / spread, np.nan)


def _or_one(spread: Floats, centre: Floats) -> Floats:
    """Replace a spread that is nothing but rounding by 1."""
    rounding = 10 * np.finfo(np.float64).eps * np.abs(centre)
    return np.where(spread <= rounding, 1.0, spread)


def largest(values: Floats) -> Floats:
    """Largest measured value per row [N, T] -> [N]; NaN where nothing was measured."""
    filled = np.where(np.isfinite(values), values, -np.inf).max(axis=1, initial=-np.inf)
    return np.where(np.isfinite(filled), filled, np.nan)


def named(panel: Panel, scores: Floats) -> dict[str, float]:
    """Scores [N] by node name, without those that are NaN."""
    return {node: float(score) for node, score in zip(panel.graph.nodes, scores, strict=True) if np.isfinite(score)}


def best_over_metrics(scores: Iterable[Floats], size: int) -> Floats:
    """Per node the largest of several score vectors [N]; NaN where none has a value."""
    stacked = [np.full(size, np.nan), *scores]
    return np.asarray(np.fmax.reduce(stacked))


def victim_series(panel: Panel) -> tuple[Floats, Floats]:
    """Baseline [N, Tb] and window [N, Ti] of the victim's metric at every node; all NaN where nobody has it."""
    size = len(panel.graph.nodes)

    def of(series: Mapping[str, Floats]) -> Floats:
        found = series.get(panel.metric)
        if found is not None:
            return found
        length = next((values.shape[1] for values in series.values()), 1)
        return np.full((size, length), np.nan)

    return of(panel.baseline), of(panel.window)


def call_graph(panel: Panel) -> nx.DiGraph:
    """Nodes by position, an edge from each caller to each callee it depends on, loops left out."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(range(len(panel.graph.nodes)))
    pairs = zip(panel.graph.callers.tolist(), panel.graph.callees.tolist(), strict=True)
    graph.add_edges_from((caller, callee) for caller, callee in pairs if caller != callee)
    return graph


def observe(incident: Incident) -> Panel:
    """The incident on a grid, its window holding the samples of the incident alone.

    `rca.panel` may put samples from before the alert in front of a window; the published methods do not look at those.
    """
    panel = panels.from_incident(incident)
    return replace(
        panel,
        window={name: values[:, panels.LEAD :] for name, values in panel.window.items()},
        edge_window={name: values[:, panels.LEAD :] for name, values in panel.edge_window.items()},
    )


def with_lead_in(incident: Incident, steps: int = 2) -> Panel:
    """The panel with the window lengthened by ``steps`` samples before the alert, for methods that need the change."""
    plain = observe(incident)
    window, baseline = incident.header.window, incident.header.baseline
    start = window.start.timestamp() - steps * plain.step
    earlier = datetime.fromtimestamp(start, UTC)
    if baseline.start < window.start and baseline.end > earlier:
        if baseline.start >= earlier:
            return plain
        baseline = Window(baseline.start, earlier)
    header = msgspec.structs.replace(incident.header, window=Window(earlier, window.end), baseline=baseline)
    return observe(incident.replace(header=header))
