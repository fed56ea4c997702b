"""The families of a scrape: the newest incidents, and the server itself."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from exporters.collectors._families import FamilyBuilder
from exporters.families import Family, Labels
from exporters.poller import version
from rca import risk
from rca.explanation import Explanation, from_json
from rca.serve.stats import Stats
from rca.store.database import Store
from rca.store.records import StoredIncident

#: Incidents that are published; older ones are in the store.
RECENT: Final = 50

_INFO: Final = "rca_incident_info"
_SCORE: Final = "rca_incident_node_score_ratio"
_EDGE: Final = "rca_incident_edge_probability_ratio"
_SHARE: Final = "rca_incident_attribution_ratio"


@dataclass(frozen=True)
class _Published:
    """The samples of one explained incident, made once."""

    revision: int
    samples: Mapping[str, Mapping[Labels, float]]


class IncidentMetrics:
    """Builds the families of a scrape. Not thread-safe: scrapes are rendered one at a time.

    Args:
        store: Where the incidents are.
        stats: The server's own counters.
        capacity: Of the queue.
        recent: How many incidents to publish.
    """

    def __init__(self, store: Store, stats: Stats, capacity: int, recent: int = RECENT) -> None:
        self._store = store
        self._stats = stats
        self._capacity = capacity
        self._recent = recent
        self._known: dict[str, _Published] = {}

    def families(self) -> list[Family]:
        """Return all families.

        Raises:
            SourceUnreachableError: the store does not answer.
        """
        samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        known: dict[str, _Published] = {}
        for record in self._store.list(limit=self._recent).items:
            samples[_INFO][_info(record)] = 1.0
            samples["rca_incident_start_timestamp_seconds"][(record.id,)] = record.starts_at.timestamp()
            if not record.revision:
                continue
            found = self._known.get(record.id)
            if found is None or found.revision != record.revision:
                explanation = from_json(self._store.explanation(record.id, record.revision))
                found = _Published(record.revision, _explained(record, explanation))
            known[record.id] = found
            for name, values in found.samples.items():
                samples[name].update(values)
        self._known = known
        builder = FamilyBuilder()
        for name, values in samples.items():
            builder.top(name, values)
        self._server(builder)
        builder.plain("prioscope_series_overflow_total", {(name,): float(n) for name, n in builder.dropped.items()})
        return [*builder.families, *self._stats.families()]

    def _server(self, builder: FamilyBuilder) -> None:
        build = (version(), platform.python_version(), self._store.kind)
        builder.plain("rca_server_build_info", {build: 1.0})
        counts = self._store.counts()
        builder.plain("rca_server_incidents", {(state.value,): float(number) for state, number in counts.items()})
        builder.plain("rca_server_queue_length", {(): float(self._store.waiting())})
        builder.plain("rca_server_queue_capacity", {(): float(self._capacity)})
        last = self._store.last_explained()
        if last is not None:
            builder.plain("rca_server_last_success_timestamp_seconds", {(): last.timestamp()})


def _info(record: StoredIncident) -> Labels:
    cluster = record.labels.get("cluster", "")
    verdict = record.state.value
    return (record.id, cluster, record.victim, record.victim_metric, record.cause, record.mechanism, verdict)


def _explained(record: StoredIncident, e: Explanation) -> Mapping[str, Mapping[Labels, float]]:
    samples: dict[str, dict[Labels, float]] = defaultdict(dict)
    if record.confidence is not None:
        samples["rca_incident_confidence_ratio"][(record.id,)] = record.confidence
    found = risk.of_incident(e, record.labels, record.annotations)
    if found is not None:
        samples["rca_incident_risk_ratio"][(record.id, found.band.value)] = found.score
    roles = _roles(e)
    edges = [edge for edge in e.edges if edge.caller in roles or edge.callee in roles]
    near = {*roles, *(edge.caller for edge in edges), *(edge.callee for edge in edges)}
    for node in e.nodes:
        if node.node in near:
            role = roles.get(node.node, "neighbour")
            samples[_SCORE][(record.id, node.node, node.kind, role)] = node.cause_probability
    for edge in edges:
        samples[_EDGE][(record.id, edge.caller, edge.callee, edge.relation)] = edge.probability
    for attribution in e.attribution:
        for entry in attribution.entries:
            labels = (record.id, " + ".join(entry.nodes), attribution.engine)
            samples["rca_incident_attribution_lower_ratio"][labels] = entry.low
            samples[_SHARE][labels] = entry.contribution
            samples["rca_incident_attribution_upper_ratio"][labels] = entry.high
    return samples


def _roles(e: Explanation) -> dict[str, str]:
    """What each node is to the incident; the first role that fits."""
    path: Iterable[str] = () if e.path is None else (name for hop in e.path.hops for name in (hop.source, hop.target))
    roles = {e.impact.victim.node: "victim"}
    if e.causes:
        roles.setdefault(e.causes[0].node, "cause")
    for name in path:
        roles.setdefault(name, "path")
    for cause in e.causes[1:]:
        roles.setdefault(cause.node, "candidate")
    return roles
