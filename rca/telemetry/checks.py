"""What is wrong or doubtful about a bundle, all at once (`rca incident validate`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rca.errors import PrioscopeError
from rca.incident import Incident, Window, examine
from rca.signals import METRICS


def check_bundle(path: Path | str) -> tuple[Incident | None, tuple[PrioscopeError, ...], tuple[str, ...]]:
    """Read the bundle at ``path`` as far as it goes.

    Returns:
        The incident (None if it cannot be used), every problem, and every warning.

    Raises:
        NotFoundError: nothing is at ``path``.
    """
    incident, problems = examine(path)
    return incident, problems, () if incident is None else tuple(warnings(incident))


def warnings(incident: Incident) -> list[str]:
    """List what lets an explanation be drawn from ``incident`` only in part, or not at all."""
    header = incident.header
    victim = header.victim
    metrics = incident.metrics
    found: list[str] = []
    if not metrics.num_rows:
        found.append("there are no metrics at all")
    for name, span in (("baseline", header.baseline), ("incident window", header.window)):
        if metrics.num_rows and not _within(metrics, span).num_rows:
            found.append(f"the {name} holds no sample ({_extent(metrics)})")
    own = metrics.filter(
        pc.and_(
            pc.and_(pc.equal(metrics["node"], victim.node), pc.equal(metrics["metric"], victim.metric)),
            metrics["peer"].is_null(),
        )
    )
    graph = set(incident.edges["caller"].to_pylist()) | set(incident.edges["callee"].to_pylist())
    measured = set(pc.unique(metrics["node"]).to_pylist())
    if victim.node not in graph | measured | set(incident.nodes["node"].to_pylist()):
        found.append(f"the victim {victim.node!r} is not in the bundle")
    elif not own.num_rows:
        found.append(f"the victim {victim.node!r} has no metric {victim.metric!r}")
    else:
        for name, span in (("baseline", header.baseline), ("incident window", header.window)):
            count = _known(_within(own, span))
            if count == 0:
                found.append(f"the victim's {victim.metric} has no value in the {name}")
            elif count < 3:
                found.append(f"the victim's {victim.metric} has only {count} sample{'s' * (count > 1)} in the {name}")
    if victim.node not in graph:
        found.append(f"the victim {victim.node!r} is disconnected: no edge leads to or from it")
    cycle = _cycle(incident.edges)
    if cycle:
        found.append(f"the graph has a cycle: {' -> '.join(cycle)}")
    found.extend(_series_warnings(metrics))
    unmeasured = sorted(graph - measured)
    if unmeasured:
        found.append(f"{len(unmeasured)} of {len(graph)} nodes of the graph have no metrics: {_some(unmeasured)}")
    outside = sorted(measured - graph) if graph else []
    if outside:
        found.append(f"{len(outside)} measured nodes have no edge: {_some(outside)}")
    unknown = sorted(set(pc.unique(metrics["metric"]).to_pylist()) - set(METRICS))
    if unknown:
        found.append(f"{len(unknown)} metrics are not in the catalogue, and serve as generic signals: {_some(unknown)}")
    for source in header.sources:
        if source.status != "ok":
            found.append(f"source {source.name!r} is {source.status}: {source.detail}")
    return found


def _series_warnings(metrics: pa.Table) -> list[str]:
    if not metrics.num_rows:
        return []
    found = []
    values = metrics["value"].to_numpy()
    infinite = int(np.isinf(values).sum())
    if infinite:
        found.append(f"{infinite:,} values are infinite, and count as missing")
    known = pa.chunked_array([pa.array(np.isfinite(values))])
    keys = ["node", "peer", "metric"]
    series = metrics.append_column("known", known).group_by(keys).aggregate([("known", "sum")])
    counts = series["known_sum"].to_numpy()
    for least, most, words in ((0, 0, "hold no value"), (1, 1, "hold one sample")):
        which = np.flatnonzero((counts >= least) & (counts <= most))
        if len(which):
            names = sorted(_series_name(row) for row in series.take(pa.array(which)).to_pylist())
            found.append(f"{len(which)} of {len(counts)} series {words}: {_some(names)}")
    distinct = metrics.group_by(["timestamp", *keys]).aggregate([]).num_rows
    if distinct != metrics.num_rows:
        found.append(f"{metrics.num_rows - distinct:,} samples repeat a time of their series")
    return found


def _series_name(row: dict[str, str | None]) -> str:
    peer = f" -> {row['peer']}" if row["peer"] else ""
    return f"{row['node']}{peer} {row['metric']}"


def _within(metrics: pa.Table, span: Window) -> pa.Table:
    times = metrics["timestamp"]
    return metrics.filter(
        pc.and_(
            pc.greater_equal(times, pa.scalar(span.start, times.type)), pc.less(times, pa.scalar(span.end, times.type))
        )
    )


def _known(metrics: pa.Table) -> int:
    return int(np.isfinite(metrics["value"].to_numpy()).sum())


def _extent(metrics: pa.Table) -> str:
    ends = pc.min_max(metrics["timestamp"]).as_py()
    return f"the metrics run from {ends['min']:%Y-%m-%dT%H:%M:%SZ} to {ends['max']:%Y-%m-%dT%H:%M:%SZ}"


def _cycle(edges: pa.Table) -> list[str]:
    """Return the nodes of one cycle of calls, the first repeated at the end; empty if there is none."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_edges_from(sorted(zip(edges["caller"].to_pylist(), edges["callee"].to_pylist(), strict=True)))
    try:
        found = [edge[0] for edge in nx.find_cycle(graph)]
    except nx.NetworkXNoCycle:
        return []
    return [*found, found[0]]


def _some(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


__all__ = ["check_bundle", "warnings"]
