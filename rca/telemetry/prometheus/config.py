"""Settings of a live capture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from rca.errors import InvalidInputError

_MAY_BE_ZERO = frozenset({"settle_seconds", "lead_seconds", "tail_seconds"})


class TracesKind(StrEnum):
    """Which HTTP API serves traces."""

    JAEGER = "jaeger"
    TEMPO = "tempo"


@dataclass(frozen=True)
class LabelNames:
    """Names of labels that differ between installations.

    Attributes:
        client, server: caller and callee in the service-graph metrics.
        cluster: label that tells clusters apart, in our exporters' metrics and in alerts.
        service, workload: labels of an alert that name its victim.
        host, gpu: node and device number on GPU metrics of our exporters.
        victim, metric: annotations of an alert that name its victim and the victim's metric outright.
    """

    client: str = "client"
    server: str = "server"
    cluster: str = "cluster"
    service: str = "service"
    workload: str = "workload"
    host: str = "node"
    gpu: str = "gpu"
    victim: str = "rca_victim"
    metric: str = "rca_metric"


@dataclass(frozen=True)
class CaptureConfig:
    """What to ask, and how much of it. All durations are seconds.

    Secrets are read from files at each capture, so that they can be rotated, and never appear in ``repr``.

    Attributes:
        prometheus_url: Base URL of a Prometheus-compatible API, with the path prefix but without ``/api/v1``;
            None: what is captured is a recording.
        headers: Further headers of each request, such as ``X-Scope-OrgID`` for Mimir.
        bearer_token_file: File with the bearer token.
        username, password_file: Basic authentication.
        tls_ca: Certificates to trust instead of the system's. ``tls_cert``, ``tls_key``: our own, for mutual TLS.
        query_timeout_seconds: Limit of one query. ``total_timeout_seconds``: limit of the whole capture.
        query_budget: Most HTTP requests that one capture may send.
        concurrency: Most requests at a time.
        step_seconds: Distance of the samples; at least the scrape interval.
        rate_seconds: Range of ``rate()``; by default four steps, so that one missed scrape leaves no hole.
        lead_seconds: How far before the onset the window starts.
        tail_seconds: How far after the onset the window may end, where the request gives no end.
        settle_seconds: Wait at least this long after the onset before asking, where the request gives no end, so that
            there are samples of the incident. It counts into the total time-out.
        most_window_seconds: Longest incident window.
        baseline_seconds: Length of the baseline.
        least_baseline_seconds: Shortest baseline that is worth comparing with.
        history: Also consider the same time yesterday and a week ago as baselines.
        most_nodes: Most services, and most workloads, that are kept (the victim's neighbourhood and what waits first).
        matchers: PromQL label matchers for every query, such as ``cluster="a"``.
        labels: Names of labels.
        traces_url: Base URL of a Jaeger query service or of Tempo; None: no traces. ``traces_kind``: which of them.
        traces_headers, traces_token_file: As for Prometheus.
        most_traces: Most traces to fetch for each of window and baseline.
    """

    prometheus_url: str | None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    bearer_token_file: Path | None = None
    username: str = ""
    password_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    query_timeout_seconds: float = 10.0
    total_timeout_seconds: float = 60.0
    query_budget: int = 300
    concurrency: int = 4
    step_seconds: float = 15.0
    rate_seconds: float | None = None
    lead_seconds: float = 300.0
    tail_seconds: float = 1800.0
    settle_seconds: float = 30.0
    most_window_seconds: float = 6 * 3600.0
    baseline_seconds: float = 3600.0
    least_baseline_seconds: float = 60.0
    history: bool = True
    most_nodes: int = 500
    matchers: str = ""
    labels: LabelNames = field(default_factory=LabelNames)
    traces_url: str | None = None
    traces_kind: TracesKind = TracesKind.JAEGER
    traces_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    traces_token_file: Path | None = None
    most_traces: int = 200

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            InvalidInputError: a URL is not HTTP, a number is not positive, or a pair of settings is incomplete.
        """
        for name in ("prometheus_url", "traces_url"):
            url = getattr(self, name)
            if url is not None:
                _check_url(name, url)
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and item.name not in _MAY_BE_ZERO):
                raise InvalidInputError(f"{item.name} is {value:g}", cure="give a number above 0")
        if self.settle_seconds >= self.total_timeout_seconds:
            raise InvalidInputError(
                f"settle_seconds ({self.settle_seconds:g}) leaves nothing of total_timeout_seconds "
                f"({self.total_timeout_seconds:g})",
                cure="lengthen the total time-out",
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidInputError("a client certificate needs its key", cure="give both tls_cert and tls_key")
        if bool(self.username) != (self.password_file is not None):
            raise InvalidInputError("basic authentication is incomplete", cure="give both username and password_file")
        if self.username and self.bearer_token_file:
            raise InvalidInputError("two ways to authenticate are given", cure="give a token or a user, not both")

    @property
    def rate_range(self) -> float:
        """Range of ``rate()`` in seconds."""
        return self.rate_seconds or 4 * self.step_seconds


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        usable = False
        parts = urlsplit("")
    if not usable:
        # The URL may hold a password, so it is not repeated here.
        raise InvalidInputError(f"{name} is not an HTTP URL", cure="write it like http://prometheus:9090")
    if parts.username or parts.password:
        raise InvalidInputError(
            f"{name} holds a user name or password", cure="use username and password_file, or bearer_token_file"
        )
    if parts.query or parts.fragment:
        raise InvalidInputError(
            f"{name} holds a query or fragment", cure="give the base URL only, such as https://mimir/prometheus"
        )
