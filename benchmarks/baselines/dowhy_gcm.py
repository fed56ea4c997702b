"""Anomaly attribution with dowhy.gcm (Budhathoki et al., ICML 2022), each case in its own process with a time limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import networkx as nx
import numpy as np

from benchmarks.baselines.common import MIN_BASELINE, call_graph, observe, victim_series
from benchmarks.baselines.residuals import measured_callees
from rca.incident import Incident

WORKER = Path(__file__).with_name("dowhy_worker.py")


class DidNotFinishError(Exception):
    """A method gave no answer within its time, or could not run; the message says which."""


def attribute(incident: Incident, *, seconds: float = 60.0, python: str = sys.executable) -> dict[str, float]:
    """Share of each node's noise in the victim's anomaly, averaged over the window's samples.

    The victim's metric at the victim and at what it depends on; unmeasured nodes are bridged, calls that close a cycle
    are dropped, and missing samples are filled with the baseline's mean, because a structural model needs all values.

    Args:
        seconds: time limit of the whole process.
        python: interpreter that has dowhy.

    Raises:
        DidNotFinishError: no answer within ``seconds``, or dowhy failed or is not installed.
    """
    panel = observe(incident)
    baseline, window = victim_series(panel)
    measured = (np.isfinite(baseline).sum(axis=1) >= MIN_BASELINE) & np.isfinite(window).any(axis=1)
    if not measured[panel.victim]:
        return {}
    graph = call_graph(panel)
    bridged: nx.DiGraph = nx.DiGraph()
    bridged.add_node(panel.victim)
    for node in np.flatnonzero(measured).tolist():
        bridged.add_edges_from((node, callee) for callee in measured_callees(graph, node, measured))
    kept = sorted({panel.victim} | nx.descendants(bridged, panel.victim))
    position = {node: k for k, node in enumerate(kept)}
    mean = np.array([np.nanmean(baseline[node]) for node in kept])[:, None]
    rows = np.isfinite(baseline[panel.victim])
    columns = np.isfinite(window[panel.victim])
    request = {
        "target": position[panel.victim],
        "edges": [[position[callee], position[caller]] for caller, callee in _acyclic(bridged, panel.victim)],
        "baseline": np.where(np.isfinite(baseline[kept]), baseline[kept], mean)[:, rows].tolist(),
        "window": np.where(np.isfinite(window[kept]), window[kept], mean)[:, columns].tolist(),
    }
    try:
        done = subprocess.run(
            [python, str(WORKER)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DidNotFinishError(f"no answer in {seconds:g} s") from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise DidNotFinishError(reason)
    scores = json.loads(done.stdout.strip().splitlines()[-1])
    return {panel.graph.nodes[kept[k]]: float(value) for k, value in enumerate(scores) if np.isfinite(value)}


def _acyclic(graph: nx.DiGraph, start: int) -> list[tuple[int, int]]:
    """Edges reachable from ``start`` without those that lead back to a node on the way to them."""
    kept = []
    for source, target, kind in nx.dfs_labeled_edges(graph, start):
        if source == target or kind == "reverse":
            continue
        kept.append((source, target))
    acyclic: nx.DiGraph = nx.DiGraph()
    acyclic.add_node(start)
    for source, target in kept:
        if not (acyclic.has_node(target) and acyclic.has_node(source) and nx.has_path(acyclic, target, source)):
            acyclic.add_edge(source, target)
    return list(acyclic.edges)
