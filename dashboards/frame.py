"""What every board has around its panels: variables, annotations, links to the other boards, time range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from grafanalib import core

from dashboards.modernize import DATASOURCE
from dashboards.panels import RUNBOOKS, Json, Visual, arrange
from exporters.boards import Board

#: Tag of all boards; the links at the top list by it.
TAG: Final = "prioscope"

#: Where `rca serve` answers. One setting for all boards, in the variable that the links use.
INCIDENT_SERVER_URL: Final = "http://localhost:9945"
RUNBOOKS_URL: Final = "https://github.com/prioscope/prioscope/blob/main/alerts/runbooks"

#: Matches every value, and series that lack the label.
_ALL: Final = ".*"

# Selectors that boards put into their queries. With "All" they match series without the label too; those that end in
# ``_OR_NONE`` do so with any choice, for metrics that only a relabelling gives the label.
CLUSTER: Final = 'cluster=~"$cluster"'
CLUSTER_OR_NONE: Final = 'cluster=~"$cluster|"'
QUEUE: Final = 'queue=~"$queue"'
SERVICE: Final = 'service=~"$service"'
PRIORITY: Final = 'priority_level=~"$priority"'
POD: Final = 'workload=~"$pod"'
INCIDENT: Final = 'incident="$incident"'


def variable(
    name: str,
    label: str,
    series: str,
    value: str,
    *,
    multi: bool = True,
    include_all: bool = True,
    newest: bool = False,
) -> core.Template:
    """Return a variable with the values of label ``value`` of ``series``.

    ``newest`` sorts descending and starts with the first one, for things of which one looks at one at a time.
    """
    template = core.Template(
        name=name,
        label=label,
        query=f"label_values({series}, {value})",
        includeAll=include_all,
        multi=multi,
        allValue=_ALL if include_all else None,
        sort=2 if newest else 1,
    )
    template._current = {"selected": True, "text": ["All"], "value": ["$__all"]} if include_all else {}
    return template


def cluster() -> core.Template:
    """Return the variable for the cluster."""
    return variable("cluster", "Cluster", "priority_workloads", "cluster")


def queue() -> core.Template:
    """Return the variable for the Slurm partition, Kueue or Volcano queue, or namespace."""
    return variable("queue", "Queue / namespace", f"priority_workloads{{{CLUSTER}}}", "queue")


def service() -> core.Template:
    """Return the variable for the service, of the workloads that wait, violate or are violated."""
    names = "priority_workload_waiting_seconds|priority_violation_(seconds_total|active_seconds)"
    return variable("service", "Service", f'{{__name__=~"{names}",{CLUSTER},queue=~"$queue|"}}', "service")


def priority() -> core.Template:
    """Return the variable for the priority level."""
    names = "priority_workloads|priority_violation_seconds_total"
    return variable("priority", "Priority", f'{{__name__=~"{names}",{CLUSTER}}}', "priority_level")


def pod() -> core.Template:
    """Return the variable for the pod or job, the `workload` label of the metrics."""
    names = (
        "priority_workload_waiting_seconds|priority_violation_active_seconds"
        "|gpu_process_memory_bytes|gpu_allocator_reserved_bytes"
    )
    selectors = f'{{__name__=~"{names}",{CLUSTER_OR_NONE},queue=~"$queue|",service=~"$service|",workload!=""}}'
    return variable("pod", "Pod / job", selectors, "workload")


def node() -> core.Template:
    """Return the variable for the machine."""
    return variable("node", "Node", f"gpu_up{{{CLUSTER_OR_NONE}}}", "node")


def source() -> core.Template:
    """Return the variable for the exporter's source (gpu, slurm, kubernetes, file)."""
    return variable("source", "Source", "prioscope_source_up", "source")


def incident() -> core.Template:
    """Return the variable for the incident: one at a time."""
    return variable(
        "incident",
        "Incident",
        f"rca_incident_info{{{CLUSTER_OR_NONE}}}",
        "incident",
        multi=False,
        include_all=False,
        newest=True,
    )


def objective() -> core.Template:
    """Return the variable for the service level objective: the share of waiting workloads without a violation."""
    return core.Template(
        name="objective", label="Objective", type="custom", query="0.9,0.95,0.99,0.999", default="0.99"
    )


def _datasource() -> core.Template:
    template = core.Template(name="datasource", label="Data source", type="datasource", query="prometheus", refresh=1)
    template._current = {}
    return template


def _address(name: str, label: str, url: str) -> core.Template:
    template = core.Template(name=name, label=label, type="textbox", query=url, hide=2)
    template.options = [{"selected": True, "text": url, "value": url}]
    template._current = {"selected": True, "text": url, "value": url}
    return template


def _annotations() -> core.Annotations:
    builtin = {
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)",
        "name": "Annotations & Alerts",
        "type": "dashboard",
    }
    alerts = {
        "datasource": dict(DATASOURCE),
        "enable": True,
        "expr": f'ALERTS{{alertstate="firing",{CLUSTER_OR_NONE}}}',
        "iconColor": "red",
        "name": "Firing alerts",
        "step": "60s",
        "tagKeys": "severity,service,priority_level",
        "titleFormat": "{{alertname}}",
        "textFormat": "{{service}} {{priority_level}}",
    }
    incidents = {
        "datasource": dict(DATASOURCE),
        "enable": True,
        "expr": (
            "1000 * rca_incident_start_timestamp_seconds"
            f" * on (incident) group_left (victim, cause) rca_incident_info{{{CLUSTER_OR_NONE}}}"
        ),
        "iconColor": "purple",
        "name": "Incidents",
        "step": "60s",
        "tagKeys": "incident",
        "titleFormat": "Incident {{incident}}",
        "textFormat": "{{victim}}, first cause: {{cause}}",
        # The value is the time, in milliseconds: the mark is where the incident began.
        "useValueForTime": True,
    }
    return core.Annotations(list=[builtin, alerts, incidents])


def _links() -> list[Any]:
    boards = core.DashboardLink(title="Boards", tags=[TAG], asDropdown=True, includeVars=True, keepTime=True)
    runbooks = core.DashboardLink(
        title="Runbooks",
        type="link",
        icon="doc",
        uri=RUNBOOKS,
        targetBlank=True,
        tooltip="What to do for each alert",
        keepTime=False,
    )
    incidents = core.DashboardLink(
        title="Incidents",
        type="link",
        icon="bolt",
        uri="${incident_server}/incidents",
        targetBlank=True,
        tooltip="All incidents, with their reports",
        keepTime=False,
    )
    return [boards, runbooks, incidents]


def dashboard(
    uid: Board | str,
    title: str,
    description: str,
    items: Iterable[str | Visual],
    *,
    variables: Sequence[core.Template] = (),
    hours: int = 1,
    refresh: str = "30s",
    links: Sequence[Json] = (),
) -> core.Dashboard:
    """Return a board with the variables that every link passes on (data source, cluster, queue) and ``variables``.

    Args:
        uid: Stable; at most 40 characters.
        items: Panels in reading order; a string begins a row with that heading.
        hours: Time range that it opens with.
    """
    return core.Dashboard(
        uid=str(uid),
        title=f"Prioscope / {title}",
        description=description,
        tags=[TAG],
        editable=True,
        graphTooltip=1,
        refresh=refresh,
        timezone="",
        time=core.Time(f"now-{hours}h", "now"),
        templating=core.Templating(
            list=[
                _datasource(),
                cluster(),
                queue(),
                *variables,
                _address("incident_server", "Incident server", INCIDENT_SERVER_URL),
                _address("runbooks", "Runbooks", RUNBOOKS_URL),
            ]
        ),
        annotations=_annotations(),
        links=[*_links(), *links],
        panels=arrange(items),
        version=1,
    )
