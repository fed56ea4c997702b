"""What a rule is, before it is text: alerts, recording rules, groups, and the options they are built for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from exporters.boards import Board
from exporters.catalog import METRICS, MetricType
from exporters.errors import InvalidInputError
from exporters.policy import Policy, default_policy

PREFIX: Final = "Prioscope"

#: Job of `rca serve` in the shipped scrape configurations; the exporters' are ``prioscope-gpu`` and so on.
SERVE_JOB: Final = "prioscope-serve"
JOBS: Final = "prioscope-.+"

#: Share of workloads that are to start within the wait SLO of their level.
OBJECTIVE: Final = 0.99

RUNBOOK_URL: Final = "https://github.com/prioscope/prioscope/blob/main/alerts/runbooks"
GRAFANA_URL: Final = "http://localhost:3000"

#: Metrics that are not ours, and whose: those of Prometheus itself, of node_exporter and of blackbox_exporter.
FOREIGN: Final[Mapping[str, str]] = {
    "up": "Prometheus",
    "node_cpu_seconds_total": "node_exporter",
    "probe_icmp_duration_seconds": "blackbox_exporter",
}

#: Labels that the scrape adds to every series.
_TARGET_LABELS: Final = frozenset({"job", "instance"})
_LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


class Severity(StrEnum):
    """How soon somebody has to look: at once, in working hours, when looking anyway."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording rule; ``record`` is named ``level:metric:operation``."""

    record: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule.

    Attributes:
        name: In PascalCase, with `PREFIX`.
        labels: The labels that ``expr`` gives its alerts: all of them, since every expression aggregates.
        summary: Constant text.
        description: Template with the values.
        hold: ``for``; empty: at once.
        capture: Whether `rca serve` captures it; then ``workload`` or ``service`` is among the labels, or ``victim``.
        board, variables: Where the dashboard link leads; variables by name, from the label that gives the value.
        victim, metric: Templates of the annotations ``rca_victim`` and ``rca_metric``.
        spec: Requirement ids.
    """

    name: str
    expr: str
    severity: Severity
    labels: tuple[str, ...]
    summary: str
    description: str
    board: Board
    variables: Mapping[str, str]
    spec: str
    hold: str = ""
    capture: bool = False
    victim: str = ""
    metric: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together, in order."""

    name: str
    rules: tuple[Recording | Alert, ...]
    interval: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """What rules are built for.

    Attributes:
        policy: Gives the wait SLO of each priority level.
        objective: Share of workloads that are to start within it.
        runbook_url: Folder of the runbook pages.
        grafana_url: Base URL of Grafana.
        cluster: Only this cluster's series, of the metrics that have a ``cluster`` label themselves.
        selectors: Matched by every series, such as labels that the scrape configuration adds.

    Raises:
        InvalidInputError: a URL, label name or objective that gives rules which do not work.
    """

    policy: Policy = field(default_factory=default_policy)
    objective: float = OBJECTIVE
    runbook_url: str = RUNBOOK_URL
    grafana_url: str = GRAFANA_URL
    cluster: str = ""
    selectors: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = 1 - 1 / 14.4
        if not least < self.objective < 1:
            raise InvalidInputError(
                f"the objective is {self.objective:g}",
                cure=f"give a share above {least:.3f} and below 1: at less, a burn rate of 14.4 cannot be reached",
            )
        for name, url in (("runbook URL", self.runbook_url), ("Grafana URL", self.grafana_url)):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s{}\"]", url):
                raise InvalidInputError(
                    f"the {name} {url!r} is not an HTTP URL", cure="write it like https://host/path"
                )
        for label in self.selectors:
            if not _LABEL_NAME.match(label):
                raise InvalidInputError(f"{label!r} is not a label name", cure="write the selector as LABEL=VALUE")


def quote(value: str) -> str:
    """Return ``value`` as a PromQL string."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def matching(label: str, *values: str) -> str:
    """Return a matcher for any of the regular expressions ``values``."""
    return f"{label}=~{quote('|'.join(values))}"


def other_than(label: str, value: str) -> str:
    """Return a matcher for every value but ``value``."""
    return f"{label}!={quote(value)}"


@dataclass(frozen=True, slots=True)
class Scope:
    """Writes selectors of series for the given options, from the catalogue only."""

    options: Options

    def __call__(self, metric: str, *matchers: str, window: str = "", **labels: str) -> str:
        """Return a selector of ``metric``; ``window`` makes it a range.

        Raises:
            KeyError: the catalogue has no such metric, or the metric has no such label.
        """
        own, has_cluster = _labels_of(metric)
        parts = []
        for name, value in labels.items():
            if own is not None and name not in own and name not in _TARGET_LABELS:
                raise KeyError(f"{metric} has no label {name}")
            parts.append(f"{name}={quote(value)}")
        for matcher in matchers:
            name = re.split(r"[=!]", matcher, maxsplit=1)[0]
            if own is not None and name not in own and name not in _TARGET_LABELS:
                raise KeyError(f"{metric} has no label {name}")
            parts.append(matcher)
        if self.options.cluster and has_cluster:
            parts.append(f"cluster={quote(self.options.cluster)}")
        parts.extend(f"{name}={quote(value)}" for name, value in self.options.selectors.items())
        inner = "{" + ",".join(parts) + "}" if parts else ""
        return f"{metric}{inner}[{window}]" if window else f"{metric}{inner}"

    def recorded(self, name: str, *matchers: str) -> str:
        """Return a selector of a recorded series: those of this scope have its labels where they kept them."""
        cluster = (f"cluster={quote(self.options.cluster)}",) if self.options.cluster else ()
        inner = ",".join((*matchers, *cluster))
        return f"{name}{{{inner}}}" if inner else name


def _labels_of(metric: str) -> tuple[frozenset[str] | None, bool]:
    """Return the labels that the catalogue gives ``metric`` (None: not ours), and whether ``cluster`` is one."""
    if metric in FOREIGN:
        return None, False
    for suffix in ("", "_bucket", "_count", "_sum"):
        known = METRICS.get(metric.removesuffix(suffix)) if suffix else METRICS.get(metric)
        if known is not None and (not suffix or known.type is MetricType.HISTOGRAM):
            names = frozenset((*known.labels, "le")) if suffix == "_bucket" else frozenset(known.labels)
            return names, "cluster" in names
    raise KeyError(f"the catalogue has no {metric}")


def grown(scope: Scope, metric: str, window: str, presence: str, *matchers: str, **labels: str) -> str:
    """Return the growth of a counter over ``window``, with series that were born in it counted from 0.

    A counter whose labels name what happened (an XID, a stage) appears with its first event, so that ``increase`` alone
    would miss exactly that one. ``presence`` is a series that the exporter always has: born counts only where it was
    already scraped a window ago, or a new exporter's old counts would look like news.
    """
    now = scope(metric, *matchers, **labels)
    return (
        f"({now} unless {now} offset {window} and on (job, instance) {scope(presence)} offset {window}"
        f" or increase({scope(metric, *matchers, window=window, **labels)}))"
    )
