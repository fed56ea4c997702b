"""CIRCA-style residuals (Li et al., KDD 2022): what does a node do that its callees do not account for?"""

from __future__ import annotations

import networkx as nx
import numpy as np

from benchmarks.baselines.common import (
    MIN_BASELINE,
    Floats,
    call_graph,
    largest,
    named,
    observe,
    plain_z,
    victim_series,
)
from rca.incident import Incident

ANOMALOUS = 3.0


def measured_callees(graph: nx.DiGraph, node: int, measured: Floats) -> list[int]:
    """Callees of ``node``; one that was not measured is replaced by its own callees."""
    found, waiting, seen = [], list(graph.successors(node)), {node}
    while waiting:
        callee = waiting.pop()
        if callee in seen:
            continue
        seen.add(callee)
        if measured[callee]:
            found.append(callee)
        else:
            waiting.extend(graph.successors(callee))
    return sorted(found)


def residual_z(baseline: Floats, window: Floats, node: int, parents: list[int]) -> float:
    """Largest |z| over the window of the part of ``node`` that a linear model of ``parents`` leaves unexplained.

    Samples that some series lacks are filled with its baseline mean, as CIRCA's published use on this data does; a
    sample that the node itself lacks is not used. NaN when nothing is left.
    """
    own, own_window = baseline[node], window[node]
    rows, columns = np.isfinite(own), np.isfinite(own_window)
    if rows.sum() < MIN_BASELINE or not columns.any():
        return float("nan")
    usable = [parent for parent in parents if rows.sum() > len(parents) + 2 and np.isfinite(window[parent]).any()]
    mean = np.array([np.nanmean(baseline[parent]) for parent in usable])

    def design(part: Floats, chosen: Floats) -> Floats:
        filled = np.where(np.isfinite(part[usable]), part[usable], mean[:, None]) if usable else part[:0]
        return np.column_stack([np.ones(int(chosen.sum())), *(row[chosen] for row in filled)])

    x, y = design(baseline, rows), own[rows]
    weights = np.linalg.lstsq(x, y, rcond=None)[0]
    residual = y - x @ weights
    observed = own_window[columns] - design(window, columns) @ weights
    z = plain_z(residual[None, :], observed[None, :])
    return float(largest(np.abs(z))[0])


def circa(incident: Incident) -> dict[str, float]:
    """Residual z of the victim's metric, with CIRCA's descendant adjustment.

    Causal parents of a node are its callees. An anomalous node adds the largest score among the anomalous nodes that
    it can disturb, so that a cause outranks the symptoms it explains. Cycles of the call graph share one turn.
    """
    panel = observe(incident)
    baseline, window = victim_series(panel)
    graph = call_graph(panel)
    measured = (np.isfinite(baseline).sum(axis=1) >= MIN_BASELINE) & np.isfinite(window).any(axis=1)
    size = len(panel.graph.nodes)
    score = np.full(size, np.nan)
    for node in range(size):
        if measured[node]:
            score[node] = residual_z(baseline, window, node, measured_callees(graph, node, measured))
    # Callers first: what a node disturbs must be final before the node itself.
    order = nx.condensation(graph)
    adjusted = score.copy()
    for place in nx.topological_sort(order):
        members = order.nodes[place]["members"]
        outside = {caller for node in members for caller in graph.predecessors(node)} - members
        for node in sorted(members):
            if not score[node] >= ANOMALOUS:
                continue
            disturbed = [
                adjusted[caller] for caller in outside & set(graph.predecessors(node)) if score[caller] >= ANOMALOUS
            ]
            adjusted[node] = score[node] + max(disturbed, default=0.0)
    return named(panel, adjusted)
