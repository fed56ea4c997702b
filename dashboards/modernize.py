"""From what grafanalib writes (the JSON of 2016) to the JSON that Grafana 13 writes (schema version 42).

One pass over plain data. It removes what Grafana no longer reads and what is only a default of grafanalib, and turns
the rest into its present form: data sources as ``{type, uid}``, thresholds that start at null, queries without the
fields of other data sources. What is unknown passes through, so that an attrs subclass may add anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from grafanalib._gen import DashboardEncoder

#: Raised by Grafana with each change of format; 42 is what 12.1 to 13 write.
SCHEMA_VERSION: Final = 42

#: The `datasource` variable makes one file work for import and for provisioning.
DATASOURCE: Final[Mapping[str, str]] = {"type": "prometheus", "uid": "${datasource}"}

#: Fields of a dashboard that Grafana dropped, and the id, which each Grafana gives itself.
_DASHBOARD: Final = ("__inputs", "id", "gnetId", "hideControls", "rows", "sharedCrosshair", "style")
#: Fields of a panel that Grafana dropped.
_PANEL: Final = ("cacheTimeout", "editable", "error", "height", "minSpan", "span")
#: Panel fields that say nothing when they have this value.
_PANEL_DEFAULTS: Final[Mapping[str, Any]] = {
    "hideTimeOverride": False,
    "interval": None,
    "links": [],
    "maxDataPoints": None,
    "maxPerRow": None,
    "repeat": None,
    "repeatDirection": None,
    "timeFrom": None,
    "timeShift": None,
    "transformations": [],
    "transparent": False,
}
#: Fields of queries to other data sources, or of editors that are gone.
_TARGET: Final = ("intervalFactor", "metric", "query", "step", "target")
#: Fields of variables that Grafana dropped, or that only an interval has.
_VARIABLE: Final = ("auto", "auto_count", "auto_min", "tagValuesQuery", "tagsQuery", "useTags")

_QUERY_VARIABLE: Final = "query"
#: Again when the time range changes: a service that was there yesterday should be found yesterday.
_ON_TIME_RANGE: Final = 2


def modernize(dashboard: Any) -> dict[str, Any]:
    """Return ``dashboard`` (a `grafanalib.core.Dashboard`) as Grafana 13 would save it, as plain data."""
    data: dict[str, Any] = json.loads(json.dumps(dashboard, cls=DashboardEncoder))
    for name in _DASHBOARD:
        data.pop(name, None)
    data["schemaVersion"] = SCHEMA_VERSION
    data["fiscalYearStartMonth"] = 0
    data["timepicker"] = {}
    data["panels"] = [_panel(panel) for panel in data["panels"]]
    data["templating"]["list"] = [_variable(variable) for variable in data["templating"]["list"]]
    data["annotations"]["list"] = [_source(annotation) for annotation in data["annotations"]["list"]]
    return data


def _panel(panel: dict[str, Any]) -> dict[str, Any]:
    for name in _PANEL:
        panel.pop(name, None)
    for name, default in _PANEL_DEFAULTS.items():
        if name in panel and panel[name] == default:
            del panel[name]
    if panel["type"] == "row":
        for name in ("datasource", "description", "fieldConfig", "maxDataPoints", "targets"):
            panel.pop(name, None)
        panel["panels"] = [_panel(inner) for inner in panel["panels"]]
        return panel
    config = panel["fieldConfig"]
    config.setdefault("overrides", [])
    defaults = {name: value for name, value in config["defaults"].items() if value not in (None, "", [])}
    thresholds = defaults.get("thresholds")
    if thresholds is not None and not thresholds["steps"]:
        thresholds["steps"] = [{"color": "green", "value": None}]
    config["defaults"] = defaults
    targets = panel["targets"]
    if not targets:
        # A panel that asks nothing, such as a text, has no data source either.
        del panel["targets"]
        panel.pop("datasource", None)
        return panel
    panel["targets"] = [_target(target) for target in targets]
    return _source(panel)


def _target(target: dict[str, Any]) -> dict[str, Any]:
    for name in _TARGET:
        target.pop(name, None)
    for name in ("hide", "interval", "legendFormat"):
        if not target.get(name):
            target.pop(name, None)
    return _source(target)


def _variable(variable: dict[str, Any]) -> dict[str, Any]:
    for name in _VARIABLE:
        variable.pop(name, None)
    if variable["type"] == _QUERY_VARIABLE:
        variable = _source(variable)
        variable["query"] = {
            "qryType": 1,
            "query": variable["query"],
            "refId": "PrometheusVariableQueryEditor-VariableQuery",
        }
        variable["refresh"] = _ON_TIME_RANGE
    else:
        variable.pop("datasource", None)
    for name in ("allValue", "current", "label", "regex"):
        if not variable.get(name):
            variable.pop(name, None)
    return variable


def _source(owner: dict[str, Any]) -> dict[str, Any]:
    if owner.get("datasource") is None:
        owner["datasource"] = dict(DATASOURCE)
    elif isinstance(owner["datasource"], str):
        owner["datasource"] = {"type": "datasource", "uid": owner["datasource"]}
    return owner
