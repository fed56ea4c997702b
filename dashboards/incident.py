"""Incident: how the fault went through the call graph, what caused how much of it, and where the evidence is."""

from __future__ import annotations

from typing import Any

from dashboards import frame
from dashboards.frame import CLUSTER_OR_NONE, INCIDENT
from dashboards.panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    VIOLATIONS,
    YELLOW,
    board_url,
    cell,
    chosen,
    column,
    gauge_column,
    incident_links,
    link,
    named,
    node_graph,
    query,
    rows,
    series_label,
    service_link,
    stat,
    table,
    texts,
    timeseries,
)
from exporters.boards import Board

_INFO = f"rca_incident_info{{{INCIDENT},{CLUSTER_OR_NONE}}}"
_NODES = f"max by (node, kind, role) (rca_incident_node_score_ratio{{{INCIDENT}}})"
_EDGES = f"max by (source, target, relation) (rca_incident_edge_probability_ratio{{{INCIDENT}}})"
_ROLES = {
    "cause": ("first cause", RED),
    "candidate": ("candidate", ORANGE),
    # Plain yellow cannot be read on white.
    "path": ("on the path", "dark-yellow"),
    "victim": ("victim", BLUE),
    "neighbour": ("neighbour", "text"),
}
_VERDICTS = {
    "explained": ("Explained", GREEN),
    "inconclusive": ("Inconclusive", ORANGE),
    "unchanged": ("Nothing changed", BLUE),
}


def _graph() -> list[dict[str, Any]]:
    """Return the transformations that turn two tables into the nodes and edges that Grafana's node graph reads.

    It looks for fields by their names, which a renaming leaves as they are: labels must have those names already, and
    what is not a label is calculated under its name.
    """
    nodes, edges = {"id": "byRefId", "options": "nodes"}, {"id": "byRefId", "options": "edges"}
    score, probability = "Value #nodes", "Value #edges"

    def calculated(frame: dict[str, Any], name: str, left: str, operator: str, right: str) -> dict[str, Any]:
        return {
            "id": "calculateField",
            "filter": frame,
            "options": {
                "alias": name,
                "mode": "binary",
                "binary": {"left": _operand(left), "operator": operator, "right": _operand(right)},
                "replaceFields": False,
            },
        }

    return [
        calculated(nodes, "mainstat", score, "*", "1"),
        # The circle around a node: red for the part that it is the cause, green for the rest.
        calculated(nodes, "arc__cause", score, "*", "1"),
        calculated(nodes, "arc__other", "1", "-", score),
        calculated(edges, "mainstat", probability, "*", "1"),
        _only("id", "title", "subtitle", "detail__role", "mainstat", "arc__cause", "arc__other") | {"filter": nodes},
        _only("id", "source", "target", "secondarystat", "mainstat") | {"filter": edges},
    ]


def _only(*names: str) -> dict[str, Any]:
    return chosen({name: name for name in names})


def _also(expr: str, **labels: str) -> str:
    """Return ``expr`` with labels that are copies of others: ``name="of which"``."""
    for name, source in labels.items():
        expr = f'label_replace({expr}, "{name}", "$1", "{source}", "(.*)")'
    return expr


def _operand(value: str) -> dict[str, Any]:
    return {"fixed": value} if value == "1" else {"matcher": {"id": "byName", "options": value}}


def board() -> Any:
    """Return the board."""
    return frame.dashboard(
        Board.INCIDENT,
        "Incident",
        "One incident: its victim, the cause that was found and how sure that is, the way of the fault, and the"
        " evidence.",
        [
            "$incident",
            stat(
                "Verdict",
                "How far the explanation came. Inconclusive: no cause is named, because the evidence does not suffice.",
                f"count by (verdict) ({_INFO})",
                legend="{{verdict}}",
                show="name",
                no_value="not explained yet",
                links=incident_links("${incident}")[1:],
            ),
            stat(
                "Victim",
                "The service whose symptom raised the alert.",
                f"count by (victim) ({_INFO})",
                legend="{{victim}}",
                show="name",
                no_value="not known",
                links=[service_link(series_label("victim"))],
            ),
            stat(
                "First cause",
                "The most probable root cause; nothing where the explanation is inconclusive.",
                f'count by (cause) (rca_incident_info{{{INCIDENT},{CLUSTER_OR_NONE},cause!=""}})',
                legend="{{cause}}",
                show="name",
                steps=((None, ORANGE),),
                no_value="none found",
                links=incident_links("${incident}")[1:],
            ),
            stat(
                "Confidence",
                "Calibrated: of the incidents explained with this confidence, that share had this cause.",
                f"max(rca_incident_confidence_ratio{{{INCIDENT}}})",
                unit="percentunit",
                steps=((None, RED), (0.5, YELLOW), (0.8, GREEN)),
            ),
            stat(
                "Risk",
                "0.4 violation rate + 0.3 resource sensitivity + 0.3 business impact.",
                f"max(rca_incident_risk_ratio{{{INCIDENT}}})",
                unit="percentunit",
                steps=((None, GREEN), (0.3, YELLOW), (0.6, ORANGE), (0.8, RED)),
            ),
            stat(
                "Began",
                "When the symptom began.",
                f"1000 * max(rca_incident_start_timestamp_seconds{{{INCIDENT}}})",
                unit="dateTimeAsLocal",
                links=incident_links("${incident}")[1:],
            ),
            "How the fault went",
            node_graph(
                "Call graph",
                "Services, workloads, GPUs and queues; the number is the probability that it is the root cause. An"
                " edge goes"
                " from the one that suffers to the one that it depends on, with the probability that the fault came"
                " along"
                " it.",
                rows(_also(_NODES, id="node", title="node", subtitle="kind", detail__role="role"), ref="nodes"),
                # An edge to a node that is not there would make the panel an error.
                rows(
                    _also(
                        f"label_join({_EDGES} and on (source) {_also(_NODES, source='node')}"
                        f' and on (target) {_also(_NODES, target="node")}, "id", " to ", "source", "target")',
                        secondarystat="relation",
                    ),
                    ref="edges",
                ),
                _graph(),
                width=14,
                height=15,
            ),
            table(
                "Suspects",
                "How probable it is that each one is the root cause. The link opens the board of a service.",
                [rows(f"sort_desc({_NODES})")],
                {"node": "Node", "kind": "Kind", "role": "Role", "Value": "Root cause"},
                width=10,
                height=8,
                sort="Root cause",
                overrides=[
                    gauge_column("Root cause", "percentunit", ((None, YELLOW), (0.5, RED)), min=0, max=1),
                    column("Role", mappings=texts(_ROLES), custom__cellOptions={"type": "color-text"}),
                    column("Node", links=[service_link(cell("Node"))]),
                ],
            ),
            table(
                "The way of the fault",
                "Dependencies and the probability that the fault came along each.",
                [rows(f"sort_desc({_EDGES})")],
                {"source": "Suffers", "relation": "Depends by", "target": "Came from", "Value": "Probability"},
                width=10,
                height=7,
                sort="Probability",
                overrides=[
                    gauge_column("Probability", "percentunit", ((None, BLUE), (0.5, RED)), min=0, max=1),
                    column("Depends by", mappings=texts(_RELATIONS)),
                ],
            ),
            "What would have been without it",
            table(
                "Attribution",
                "Share of the victim's value that goes when this cause is taken away, with the ends of its 95 %"
                " interval."
                " Mechanism: fitted to normal data. Replay: the recorded schedule run again without it.",
                [
                    rows(f"max by (cause, engine) (rca_incident_attribution_ratio{{{INCIDENT}}})"),
                    rows(
                        f"max by (cause, engine) (rca_incident_attribution_lower_ratio{{{INCIDENT}}})",
                    ),
                    rows(
                        f"max by (cause, engine) (rca_incident_attribution_upper_ratio{{{INCIDENT}}})",
                    ),
                ],
                {
                    "cause": "Without",
                    "engine": "Engine",
                    "Value #A": "Improves by",
                    "Value #B": "At least",
                    "Value #C": "At most",
                },
                unit="percentunit",
                decimals=1,
                sort="Improves by",
                no_value="not computed",
                overrides=[gauge_column("Improves by", "percentunit", ((None, BLUE),), min=0, max=1)],
            ),
            timeseries(
                "Violations around it",
                "Workloads in violation at each moment, by type; the mark shows where the incident began.",
                [
                    query(
                        f"sum by (violation_type) (priority_violations_active{{{frame.CLUSTER}}})",
                        "{{violation_type}}",
                    )
                ],
                unit="none",
                stacked=True,
                overrides=named(VIOLATIONS),
                links=[link("Open the fleet", board_url(Board.FLEET))],
            ),
            "All incidents",
            table(
                "Incidents",
                "Newest first. The number opens this board for it, or its report with all the evidence.",
                [
                    rows(
                        "1000 * rca_incident_start_timestamp_seconds * on (incident)"
                        " group_left (victim, victim_metric, cause, mechanism, verdict)"
                        f" rca_incident_info{{{CLUSTER_OR_NONE}}}",
                    )
                ],
                {
                    "Value": "Began",
                    "incident": "Incident",
                    "victim": "Victim",
                    "victim_metric": "Symptom",
                    "cause": "First cause",
                    "mechanism": "How",
                    "verdict": "Verdict",
                },
                width=24,
                sort="Began",
                no_value="no incident was captured",
                overrides=[
                    column("Began", unit="dateTimeAsLocal", custom__width=180),
                    column("Incident", links=incident_links(cell("Incident"))),
                    column("Victim", links=[service_link(cell("Victim"))]),
                    column("Verdict", mappings=texts(_VERDICTS), custom__cellOptions={"type": "color-text"}),
                ],
            ),
        ],
        variables=[frame.incident()],
        hours=3,
    )


_RELATIONS = {
    "calls": "calls",
    "runs_on": "runs on",
    "shares_device": "shares a GPU",
    "queued_behind": "waits behind",
}
