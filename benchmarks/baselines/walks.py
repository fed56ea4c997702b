"""Baselines that walk the call graph from the victim."""

from __future__ import annotations

import networkx as nx
import numpy as np

from benchmarks.baselines.common import call_graph, largest, named, observe, robust_z, victim_series, with_lead_in
from benchmarks.baselines.correlation import ANOMALOUS, correlation_with
from rca.incident import Incident

#: MonitorRank's chance to go back to a caller, and the chance to start again.
BACKWARD = 0.1
RESTART = 0.15


def deepest_anomalous(incident: Incident) -> dict[str, float]:
    """Walk from the victim along anomalous callees; the ends, which have no anomalous callee, are the causes.

    The victim's metric at every node; anomalous beyond five normalised MADs at some sample. Ends rank first, then
    nodes on the way, each by its own deviation. Callees that were not measured end the walk. Nodes on one cycle count
    as one place. Nothing is named when neither the victim nor a callee is anomalous.
    """
    panel = observe(incident)
    deviation = largest(np.abs(robust_z(*victim_series(panel), scale="mad")))
    anomalous = deviation > ANOMALOUS
    graph = call_graph(panel)
    walked = graph.subgraph([node for node in graph if anomalous[node] or node == panel.victim])
    reached = {panel.victim} | nx.descendants(walked, panel.victim)
    if not anomalous[panel.victim] and len(reached) == 1:
        return {}
    part = nx.condensation(walked.subgraph(reached))
    scores = np.full(len(deviation), np.nan)
    for place in part:
        for node in part.nodes[place]["members"]:
            # The tier is whole, the deviation within it is squeezed below 1, so a tier is never jumped.
            tier = 1.0 if part.out_degree(place) == 0 else 0.0
            own = deviation[node] if np.isfinite(deviation[node]) else 0.0
            scores[node] = tier + own / (1.0 + own)
    return named(panel, scores)


def random_walk(incident: Incident) -> dict[str, float]:
    """MonitorRank (Kim et al., SIGMETRICS 2013): how often a walk led by similarity to the victim visits a node.

    Similarity is |correlation| with the victim's series over the window and two samples before. Nodes without one
    are not visited on purpose, and unscored.
    """
    panel = with_lead_in(incident)
    _, recent = victim_series(panel)
    similarity = np.abs(correlation_with(recent, recent[panel.victim]))
    known = np.isfinite(similarity)
    strength = np.where(known, similarity, 0.0)
    size = len(strength)
    callers, callees = panel.graph.callers, panel.graph.callees
    move = np.zeros((size, size))
    move[callers, callees] = strength[callees]
    back = np.zeros((size, size))
    back[callees, callers] = BACKWARD * strength[callers]
    move = np.maximum(move, np.where(move > 0, 0.0, back))
    np.fill_diagonal(move, 0.0)
    best_callee = np.zeros(size)
    np.maximum.at(best_callee, callers, strength[callees])
    np.fill_diagonal(move, np.maximum(strength - best_callee, 0.0))
    start = strength / strength.sum() if strength.sum() > 0 else np.full(size, 1.0 / size)
    total = move.sum(axis=1, keepdims=True)
    chance = np.where(total > 0, move / np.where(total > 0, total, 1.0), start[None, :])
    visits = start.copy()
    for _ in range(200):
        following = RESTART * start + (1.0 - RESTART) * visits @ chance
        if np.abs(following - visits).sum() < 1e-10:
            break
        visits = following
    return named(panel, np.where(known, visits, np.nan))
