"""An alert in, an incident out: decides what to ask, and lays the answers out as a bundle."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from rca.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from rca.incident import (
    DEVICES_SCHEMA,
    EDGES_SCHEMA,
    NODES_SCHEMA,
    WORKLOADS_SCHEMA,
    Header,
    Incident,
    NodeKind,
    Relation,
    Source,
    Victim,
    Window,
    metrics_table,
)
from rca.signals import LATENCY_CENTRE, LATENCY_TAIL
from rca.telemetry.prometheus import baseline as baselines
from rca.telemetry.prometheus import calls, cluster
from rca.telemetry.prometheus.answers import Series
from rca.telemetry.prometheus.ask import Inquiry, Query, Span, label_matcher, selector, utc
from rca.telemetry.prometheus.baseline import Choice
from rca.telemetry.prometheus.calls import Edge, Points
from rca.telemetry.prometheus.cluster import ClusterView
from rca.telemetry.prometheus.config import CaptureConfig
from rca.telemetry.request import Capture, CaptureRequest

if TYPE_CHECKING:
    from rca.telemetry.traces_api import Traces

_LOAD, _CALLS, _SCHEDULER = "load before and during the incident", "call graph", "scheduler"
_GPUS, _PODS, _ALERTS, _NEWEST = "GPUs", "Kubernetes pods", "alert", "newest samples"
#: Spans nearer to each other than this many steps are asked for as one.
_BRIDGED_STEPS: Final = 12
#: Samples may take this long to be seen: scrapes, remote write, VictoriaMetrics' ``-search.latencyOffset``.
_LATE_SECONDS: Final = 120.0


def capture_from(config: CaptureConfig) -> Capture:
    """Return a capture that asks what ``config`` names.

    The capture blocks for at most `CaptureConfig.total_timeout_seconds`, and must not be called in a thread that runs
    an event loop. It keeps no state between calls, and may be used by several threads.
    """

    def capture(request: CaptureRequest) -> Incident:
        return asyncio.run(_capture(config, request))

    return capture


@dataclass(frozen=True)
class _Times:
    """Unix seconds, on the grid of the steps. The window is half-open; its last sample lies one step before its end."""

    start: float
    end: float
    onset: float


async def _capture(config: CaptureConfig, request: CaptureRequest) -> Incident:
    deadline = asyncio.get_running_loop().time() + config.total_timeout_seconds
    early = request.onset.timestamp() + config.settle_seconds - time.time()
    if request.end is None and early > 0:
        # What an alert says at once, a few samples later shows.
        await asyncio.sleep(min(early, config.settle_seconds))
    # An HTTP client, which a recording does without.
    from rca.telemetry.prometheus.client import Client

    async with Client(config, deadline) as client:
        return await captured(Inquiry(client, config.step_seconds), config, request, time.time(), deadline)


async def captured(
    inquiry: Inquiry, config: CaptureConfig, request: CaptureRequest, now: float, deadline: float
) -> Incident:
    """Ask, and lay the answers out.

    Args:
        now: the newest time that there is anything to know about, Unix seconds.
        deadline: time of the event loop's clock at which everything must have ended.

    Raises:
        InvalidInputError: the alert names no victim that could be captured, or there is no baseline.
        NotFoundError: nothing is known about the victim.
        SourceUnreachableError: no source answered.
    """
    step = config.step_seconds
    times = window_of(config, request, now)
    names = await inquiry.names(f"{calls.NAMES}|{cluster.NAMES}", Span(times.start - config.baseline_seconds, now))
    times = await _begin_of_wait(inquiry, config, request, names, times)
    spoken = calls.dialect(config, names)
    choice = await _baseline(inquiry, config, request, spoken, times)
    asked = Span(times.start - baselines.GAP_STEPS * step, times.end - step)
    spans = _spans(choice, asked, step)
    points = Points()
    edges, services = await _calls(inquiry, config, names, spoken, spans, choice, points)
    view, scheduler = await _cluster(inquiry, config, request, names, spans, times, points)
    await _pods(inquiry, config, names, view, asked)
    if not inquiry.answered and config.traces_url is None:
        raise unreachable(inquiry)
    traced = await _traces(config, deadline, request, times, choice)
    if not inquiry.answered and (traced is None or traced.spans is None):
        raise unreachable(inquiry)
    return _Draft(
        config, request, inquiry, times, now, choice, points, edges, services, view, scheduler, traced
    ).incident()


def unreachable(inquiry: Inquiry) -> SourceUnreachableError:
    """The error for a capture that got nothing."""
    reason = inquiry.unreachable or next(
        (problem for record in inquiry.records.values() for problem in record.problems), "it did not answer"
    )
    return SourceUnreachableError(
        f"the Prometheus API gave nothing: {reason}",
        cure="check its URL, credentials and load; the capture can be tried again",
    )


def window_of(config: CaptureConfig, request: CaptureRequest, now: float) -> _Times:
    """The incident window: from `lead_seconds` before the onset to the end that is asked for, or as far as it goes.

    Raises:
        InvalidInputError: the alert begins in the future, or ends before it begins.
    """
    step = config.step_seconds
    onset = request.onset.timestamp()
    if onset > now + 300:
        raise InvalidInputError(f"the alert begins in the future, at {utc(onset)}", cure="compare the clocks")
    onset = min(onset, now)
    end = now if request.end is None else min(request.end.timestamp(), now)
    if request.end is not None and request.end <= request.onset:
        raise InvalidInputError(f"the alert ends at {utc(end)}, before it begins", cure="correct the end")
    if request.end is None:
        end = min(end, onset + config.tail_seconds)
    start = np.floor((onset - config.lead_seconds) / step) * step
    # The newest sample is in the window, which is half-open: it is the one that the alert is about.
    last = np.floor(min(end, start + config.most_window_seconds) / step) * step + step
    return _Times(float(start), float(max(last, np.floor(onset / step) * step + step)), onset)


async def _begin_of_wait(
    inquiry: Inquiry, config: CaptureConfig, request: CaptureRequest, names: frozenset[str] | None, times: _Times
) -> _Times:
    """Move the onset to the victim's submission, which an alert with a wait SLO reports long after."""
    metric = "priority_workload_waiting_seconds"
    if names is not None and metric not in names:
        return times
    workload = request.annotations.get(config.labels.victim) or request.labels.get(config.labels.workload, "")
    service = request.labels.get(config.labels.service, "")
    # Of a service, only where the alert is about its jobs: others of its jobs may always wait.
    if not workload and not (service and "violation_type" in request.labels):
        return times
    only = label_matcher("workload", [workload]) if workload else label_matcher("service", [service])
    expression = f"max by (workload) ({selector(metric, only, config.matchers)})"
    found = await inquiry.ask(
        _SCHEDULER, [Query("the victim's wait", expression)], [Span(times.start, times.end - config.step_seconds)]
    )
    begun = [float(np.median(series.times - series.values)) for series in found["the victim's wait"]]
    earliest = times.end - config.most_window_seconds + config.lead_seconds
    onset = min([times.onset, *begun])
    if onset >= times.onset - config.step_seconds / 2:
        return times
    onset = max(onset, earliest)
    start = np.floor((onset - config.lead_seconds) / config.step_seconds) * config.step_seconds
    return _Times(float(start), times.end, onset)


async def _baseline(
    inquiry: Inquiry, config: CaptureConfig, request: CaptureRequest, spoken: calls.Dialect | None, times: _Times
) -> Choice:
    window = (times.start, times.end)
    busy = [(item.start.timestamp(), item.end.timestamp()) for item in request.busy]
    found = baselines.candidates(config, window, busy)
    if not found:
        raise InvalidInputError(
            "other incidents cover all the time before this one: there is no baseline",
            cure="lengthen baseline_seconds, or close incidents that are over",
        )
    load: tuple[Series, ...] = ()
    if spoken is not None:
        step = baselines.profile_step(config, window)
        query = calls.profile_query(spoken, config, step)
        answers = await inquiry.ask(_LOAD, [query], baselines.profile_spans(found, window), step)
        load = answers[query.what]
    choice = baselines.choose(found, window, load, config)
    record = inquiry.record(_LOAD)
    record.notes.setdefault(f"baseline: {baselines.described(choice)}")
    if choice.candidate.seconds < config.least_baseline_seconds:
        record.problems.setdefault(
            f"only {choice.candidate.seconds:.0f} s before the incident are free of other incidents"
        )
    return choice


def _spans(choice: Choice, asked: Span, step: float) -> list[Span]:
    start, end = choice.candidate.start, choice.candidate.end
    start = np.floor(start / step) * step
    if asked.start - end <= _BRIDGED_STEPS * step:
        return [Span(float(start), asked.end)]
    return [Span(float(start), float(np.floor(end / step) * step)), asked]


async def _calls(
    inquiry: Inquiry,
    config: CaptureConfig,
    names: frozenset[str] | None,
    spoken: calls.Dialect | None,
    spans: Sequence[Span],
    choice: Choice,
    points: Points,
) -> tuple[list[Edge], set[str]]:
    record = inquiry.record(_CALLS)
    if spoken is None:
        record.queries.setdefault(f'{{__name__=~"{calls.NAMES}"}}')
        record.absent = "neither service graph metrics nor Istio metrics are there: calls between services are unknown"
        return [], set()
    planned = calls.queries(spoken, config, names)
    answers = await inquiry.ask(_CALLS, planned, spans)
    if not answers.get("calls") and not record.failed:
        record.absent = f"{spoken.total} has no series in the time asked for: calls between services are unknown"
        return [], set()
    record.notes.setdefault(f"from {spoken.name}")
    asked = {query.what for query in planned}
    for part, words in (
        ("failed calls", "no counter of failed calls: error ratios are unknown"),
        ("served count", "no histogram of the callees' view: latency of services is unknown"),
        ("called count", "no histogram of the callers' view: network between services is unknown"),
    ):
        if part not in asked:
            record.problems.setdefault(words)
    return calls.tables(spoken, answers, (choice.candidate.start, choice.candidate.end), points)


async def _cluster(
    inquiry: Inquiry,
    config: CaptureConfig,
    request: CaptureRequest,
    names: frozenset[str] | None,
    spans: Sequence[Span],
    times: _Times,
    points: Points,
) -> tuple[ClusterView, Mapping[str, Sequence[Series]]]:
    planned = cluster.scheduler_queries(config, names)
    answers: Mapping[str, Sequence[Series]] = {}
    view = ClusterView()
    record = inquiry.record(_SCHEDULER)
    if names is not None and cluster.SCHEDULER not in names:
        record.queries.setdefault(cluster.SCHEDULER)
        record.absent = "no metrics of a scheduler exporter: waiting jobs, queues and who blocks whom are unknown"
    if not record.absent or planned:
        answers = await inquiry.ask(_SCHEDULER, planned, spans)
        mine = request.labels.get(config.labels.cluster, "")
        view = cluster.read_scheduler(answers, config, mine, times.end, points)
        for words in cluster.blind_times(answers):
            record.problems.setdefault(words)
    devices = cluster.device_queries(config, names)
    gpus = inquiry.record(_GPUS)
    if not devices:
        gpus.queries.setdefault("gpu_up or DCGM_FI_DEV_GPU_UTIL")
        gpus.absent = "no metrics of GPUs, of our exporter or of DCGM: utilisation and memory of GPUs are unknown"
        return view, answers
    found = await inquiry.ask(_GPUS, devices, spans)
    cluster.read_devices(found, config, view, points)
    if not view.devices and not gpus.failed:
        gpus.absent = "no GPU has a series in the time asked for"
    return view, answers


async def _pods(
    inquiry: Inquiry, config: CaptureConfig, names: frozenset[str] | None, view: ClusterView, asked: Span
) -> None:
    expected = bool(view.pods) or "kubernetes" in view.schedulers
    if names is not None and not names & {"kube_pod_info", "kube_pod_labels"}:
        if expected:
            record = inquiry.record(_PODS)
            record.queries.setdefault("kube_pod_info")
            record.absent = "no metrics of kube-state-metrics: which pod runs where is unknown"
        return
    if names is None and not expected:
        return
    planned = cluster.pod_queries(config, names, view.pods)
    cluster.read_pods(await inquiry.ask(_PODS, planned, [Span(asked.end, asked.end)]), view)


async def _traces(
    config: CaptureConfig, deadline: float, request: CaptureRequest, times: _Times, choice: Choice
) -> Traces | None:
    if config.traces_url is None:
        return None
    from rca.telemetry import traces_api

    service = request.annotations.get(config.labels.victim) or request.labels.get(config.labels.service, "")
    spans = [(choice.candidate.start, choice.candidate.end), (times.start, times.end)]
    return await traces_api.fetch_traces(config, service, spans, deadline)


@dataclass
class _Draft:
    """Everything that was found, before it is laid out."""

    config: CaptureConfig
    request: CaptureRequest
    inquiry: Inquiry
    times: _Times
    now: float
    choice: Choice
    points: Points
    edges: list[Edge]
    services: set[str]
    view: ClusterView
    scheduler: Mapping[str, Sequence[Series]]
    traced: Traces | None

    def incident(self) -> Incident:
        """Resolve the victim and build the bundle.

        Raises:
            InvalidInputError: the alert names no victim, or one that no metric knows.
            SourceUnreachableError: what would have told about the victim did not answer.
        """
        extra = self._from_traces()
        node, metric = self._victim()
        kept = self._kept(node)
        self._waits(node, kept)
        times = self.times
        metrics = self._metrics(kept, extra)
        self._note_age()
        # The victim's samples decide: without one in the window there is nothing to explain.
        self._check(metrics, node, metric)
        scheduler = {"scheduler": self.view.schedulers[0]} if len(self.view.schedulers) == 1 else {}
        known_onset = node in self.view.workloads and node not in self.services
        header = Header(
            id=self.request.id,
            window=Window(_moment(times.start), _moment(times.end)),
            baseline=Window(_moment(self.choice.candidate.start), _moment(self.choice.candidate.end)),
            victim=Victim(node, metric),
            title=self.request.annotations.get("summary") or self.request.labels.get("alertname", ""),
            # When a wait began is known exactly; of other symptoms an alert tells late, and the samples tell better.
            onset=_moment(times.onset) if known_onset else None,
            labels={**scheduler, **self.request.labels},
            sources=self._sources(),
        )
        return Incident.create(
            header,
            metrics=metrics,
            edges=self._edges_table(kept),
            nodes=self._nodes_table(kept),
            workloads=self._workloads_table(kept),
            devices=self._devices_table(),
            **({} if self.traced is None or self.traced.spans is None else {"spans": self.traced.spans}),
        )

    # --- the victim

    def _victim(self) -> tuple[str, str]:
        labels, annotations, names = self.request.labels, self.request.annotations, self.config.labels
        wanted = annotations.get(names.metric, "")
        named = annotations.get(names.victim, "") or labels.get(names.workload, "")
        if named:
            return named, wanted or self._metric_of(named)
        service = labels.get(names.service, "")
        if service and service in self.services:
            return service, wanted or self._metric_of(service)
        host, gpu, uuid = labels.get(names.host, ""), labels.get(names.gpu, ""), labels.get("uuid", "")
        for device in self.view.devices:
            if device in (uuid, f"{host}/gpu-{gpu}") and (uuid or gpu):
                return device, wanted or self._metric_of(device)
        waiter = self._waiter(service, labels)
        if waiter:
            self.inquiry.record(_ALERTS).kind = "alert"
            self.inquiry.record(_ALERTS).notes.setdefault(
                f"the alert names no workload; {waiter} of those it is about has waited longest"
            )
            return waiter, wanted or self._metric_of(waiter)
        if service:
            return service, wanted or self._metric_of(service)
        shown = ", ".join(f"{name}={value}" for name, value in sorted(labels.items())) or "none"
        raise InvalidInputError(
            f"the alert names no victim that could be captured (labels: {shown[:300]})",
            cure=f"give it the label {names.workload} or {names.service}, or the annotation {names.victim}",
        )

    def _waiter(self, service: str, labels: Mapping[str, str]) -> str:
        """The workload that waits longest among those that the alert is about; "" if none is."""
        about = {
            name: workload
            for name, workload in self.view.workloads.items()
            if name in self.view.waits
            and (not service or workload.service == service)
            and labels.get("queue") in (None, "", workload.queue)
            and labels.get("priority_level") in (None, "", workload.level)
            and labels.get("violation_type") in (None, "", *self.view.violations.get(name, ()))
        }
        if not (service or labels.get("queue") or labels.get("priority_level")):
            return ""
        return min(about, key=lambda name: (about[name].submitted or np.inf, name), default="")

    def _metric_of(self, node: str) -> str:
        """The metric that the alert is most likely about."""
        if node in self.view.waits and node not in self.services:
            return "queue_wait_seconds"
        have = {
            metric
            for name, peer, metric in zip(self.points.nodes, self.points.peers, self.points.metrics, strict=True)
            if name == node and peer is None
        }
        about = " ".join((self.request.labels.get("alertname", ""), self.request.annotations.get("summary", "")))
        if re.search("error|fail|availab|5xx", about, re.IGNORECASE) and "error_ratio" in have:
            return "error_ratio"
        tail = re.search(r"p9\d|tail", about, re.IGNORECASE)
        order = (*LATENCY_TAIL, *LATENCY_CENTRE) if tail else (*LATENCY_CENTRE, *LATENCY_TAIL)
        for name in (*order, "error_ratio", "gpu_fragmentation_ratio", "gpu_utilization_ratio"):
            if name in have:
                return name
        return min(have, default=LATENCY_CENTRE[0])

    def _check(self, metrics: pa.Table, node: str, metric: str) -> None:
        import pyarrow.compute as pc

        own = metrics.filter(
            pc.and_(
                pc.and_(pc.equal(metrics["node"], node), pc.equal(metrics["metric"], metric)),
                metrics["peer"].is_null(),
            )
        )
        stamps = own["timestamp"].cast(pa.int64()).to_numpy() / 1e6
        if ((stamps >= self.times.start) & (stamps < self.times.end)).any():
            return
        about = f"{metric} of {node!r} has no sample from {utc(self.times.start)} to {utc(self.times.end)}"
        failed = [problem for record in self.inquiry.records.values() if record.failed for problem in record.problems]
        if failed or self.inquiry.unreachable:
            raise SourceUnreachableError(
                f"{about}; {(failed or [self.inquiry.unreachable])[0]}", cure="the capture can be tried again"
            )
        if self.now - self.times.end < _LATE_SECONDS:
            raise SourceUnreachableError(f"{about} yet", cure="the capture can be tried again when it has arrived")
        near = _close(node, {*self.services, *self.view.workloads, *self.view.devices})
        raise NotFoundError(about, cure=f"did you mean {near}?" if near else "check that its metrics are scraped")

    def _note_age(self) -> None:
        """Say so when the newest samples are missing, as where a store shows them late."""
        newest = max((float(times[-1]) for times in self.points.times), default=None)
        if newest is not None and self.times.end - newest > 4 * self.config.step_seconds:
            self.inquiry.record(_NEWEST).problems.setdefault(
                f"the newest sample is {self.times.end - newest:.0f} s older than the end of the window"
            )

    # --- what goes in

    def _kept(self, victim: str) -> set[str]:
        """Nodes to keep: of a large installation, what is near the victim."""
        view, most = self.view, self.config.most_nodes
        around = victim
        if victim in view.workloads and view.workloads[victim].service in self.services:
            around = view.workloads[victim].service
        services = calls.neighbourhood(self.edges, self.services, around, most)
        first = [victim] if victim in view.workloads else []
        involved = [name for blame in view.blames if blame.victim == victim for name in (blame.victim, blame.culprit)]
        involved += [name for blame in view.blames for name in (blame.victim, blame.culprit)]
        resident = [name for name, workload in view.workloads.items() if workload.devices]
        longest = sorted(view.waits, key=lambda name: (view.workloads[name].submitted or np.inf, name))
        ordered = dict.fromkeys([*first, *involved, *resident, *longest, *sorted(view.workloads)])
        workloads = list(ordered)[:most]
        dropped = len(ordered) - len(workloads) + len(self.services) - len(services & self.services)
        if dropped > 0:
            self.inquiry.record(_CALLS).problems.setdefault(
                f"{dropped:,} services or workloads far from the victim were left out (most_nodes={most})"
            )
        return {*services, *workloads, victim}

    def _from_traces(self) -> list[pa.Table]:
        """Metrics and edges that traces alone tell."""
        if self.traced is None or self.traced.graph is None:
            return []
        graph = self.traced.graph
        known = {(edge.caller, edge.callee) for edge in self.edges}
        for row in graph.edges.to_pylist():
            if (row["caller"], row["callee"]) not in known:
                self.edges.append(
                    Edge(
                        row["caller"], row["callee"], row["relation"], row["protocol"], bool(row["asynchronous"]),
                        row["call_rate"], row["error_ratio"], row["latency_seconds"],
                    )
                )  # fmt: skip
        have = set(zip(self.points.nodes, self.points.peers, self.points.metrics, strict=True))
        seen = list(zip(*(graph.metrics[name].to_pylist() for name in ("node", "peer", "metric")), strict=True))
        self.services.update(node for node, _, _ in seen)
        # Of what both measured, the metrics count every request, traces a sample.
        rows = [index for index, key in enumerate(seen) if key not in have]
        return [graph.metrics.take(pa.array(rows, pa.int64()))]

    def _waits(self, victim: str, kept: set[str]) -> None:
        for name in sorted(self.view.waits):
            if name == victim:
                mine = self.request.labels.get(self.config.labels.cluster, "")
                stamps, values = cluster.wait_of(name, self.view, self.scheduler, self.config, mine)
            else:
                stamps, values = self.view.waits[name]
            if name in kept and name not in self.services:
                self.points.add(name, "queue_wait_seconds", stamps, values)

    def _metrics(self, kept: set[str], extra: Sequence[pa.Table]) -> pa.Table:
        infrastructure = {cluster.queue_node(w.queue) for w in self.view.workloads.values() if w.queue}
        infrastructure |= set(self.view.devices) | {node for node in self.points.nodes if node.startswith("queue/")}
        merged = self._merged()
        rows = [
            index
            for index, (node, peer) in enumerate(zip(self.points.nodes, self.points.peers, strict=True))
            if (node in kept or node in infrastructure) and (peer is None or peer in kept)
        ]
        if not rows and not extra:
            return metrics_table(np.zeros(0), [], [], np.zeros(0))
        repeat = [self.points.counts[index] for index in rows]

        def column(values: Sequence[str | None]) -> pa.Array:
            return pa.array(np.repeat(np.array([values[i] for i in rows], dtype=object), repeat), pa.string())

        parts = []
        if rows:
            parts.append(
                metrics_table(
                    np.concatenate([self.points.times[i] for i in rows]),
                    column([merged.get(node, node) for node in self.points.nodes]),
                    column(self.points.metrics),
                    np.concatenate([self.points.values[i] for i in rows]),
                    column([merged.get(peer, peer) if peer else None for peer in self.points.peers]),
                )
            )
        return pa.concat_tables([*parts, *extra])

    def _merged(self) -> dict[str, str]:
        """Running workloads that serve a service of the call graph: their metrics go to that service's node."""
        return {
            name: workload.service
            for name, workload in self.view.workloads.items()
            if workload.state == "running" and workload.service in self.services
        }

    def _edges_table(self, kept: set[str]) -> pa.Table:
        rows = [
            {
                "caller": edge.caller, "callee": edge.callee, "relation": edge.relation, "protocol": edge.protocol,
                "asynchronous": edge.asynchronous, "call_rate": edge.call_rate, "error_ratio": edge.error_ratio,
                "latency_seconds": edge.latency_seconds,
            }
            for edge in self.edges
            if edge.caller in kept and edge.callee in kept
        ]  # fmt: skip
        merged = self._merged()
        for blame in self.view.blames:
            if blame.victim in kept and blame.culprit in kept:
                ends = merged.get(blame.victim, blame.victim), merged.get(blame.culprit, blame.culprit)
                rows.append({"caller": ends[0], "callee": ends[1], "relation": Relation.QUEUED_BEHIND.value})
        for name, workload in sorted(self.view.workloads.items()):
            # A service whose job waits for its turn waits with it.
            if name in kept and name in self.view.waits and name not in merged and workload.service in self.services:
                rows.append({"caller": workload.service, "callee": name, "relation": Relation.QUEUED_BEHIND.value})
        placed = {(service, host) for host, service in self.view.pods.values() if host and service in kept}
        rows += [
            {"caller": service, "callee": host, "relation": Relation.RUNS_ON.value} for service, host in sorted(placed)
        ]
        return pa.Table.from_pylist(rows, schema=EDGES_SCHEMA)

    def _nodes_table(self, kept: set[str]) -> pa.Table:
        merged = self._merged()
        rows: dict[str, dict[str, object]] = {}

        def add(node: str, kind: NodeKind, attributes: Mapping[str, str] | None = None) -> None:
            rows.setdefault(node, {"node": node, "kind": kind.value, "attributes": list((attributes or {}).items())})

        for service in sorted(self.services & kept):
            add(service, NodeKind.SERVICE)
        basis = {blame.culprit: blame.basis for blame in self.view.blames}
        for name, workload in sorted(self.view.workloads.items()):
            if name in kept and name not in merged:
                told = {"service": workload.service, "inversion_basis": basis.get(name, "")}
                add(name, NodeKind.WORKLOAD, {key: value for key, value in told.items() if value})
            if name in kept and workload.queue:
                add(cluster.queue_node(workload.queue), NodeKind.QUEUE)
        for device in sorted(self.view.devices.values(), key=lambda item: item.name):
            add(device.name, NodeKind.GPU)
            if device.host:
                add(device.host, NodeKind.HOST)
        for host, service in sorted(self.view.pods.values()):
            if host and service in kept:
                add(host, NodeKind.HOST)
        for node in self.points.nodes:
            if node.startswith("queue/"):
                add(node, NodeKind.QUEUE)
        return pa.Table.from_pylist([rows[name] for name in sorted(rows)], schema=NODES_SCHEMA)

    def _workloads_table(self, kept: set[str]) -> pa.Table:
        merged = self._merged()
        rows = [
            {
                "workload": name,
                "service": merged.get(name),
                "queue": cluster.queue_node(workload.queue) if workload.queue else None,
                "priority_class": workload.level if workload.rank is not None else None,
                "priority_rank": workload.rank,
                "state": workload.state,
                "submitted": None if workload.submitted is None else _moment(workload.submitted),
                "gpus": workload.gpus,
                "host": workload.host or None,
                "devices": list(workload.devices) or None,
            }
            for name, workload in sorted(self.view.workloads.items())
            if name in kept
        ]
        return pa.Table.from_pylist(rows, schema=WORKLOADS_SCHEMA)

    def _devices_table(self) -> pa.Table:
        rows = [
            {
                "device": item.name, "host": item.host or None, "model": item.model or None,
                "memory_total_bytes": item.total, "memory_free_bytes": item.free,
                "largest_free_block_bytes": item.largest_free,
            }
            for item in sorted(self.view.devices.values(), key=lambda item: item.name)
        ]  # fmt: skip
        return pa.Table.from_pylist(rows, schema=DEVICES_SCHEMA)

    def _sources(self) -> tuple[Source, ...]:
        found = self.inquiry.sources()
        return found if self.traced is None or self.traced.source is None else (*found, self.traced.source)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(round(seconds, 3), UTC)


def _close(name: str, names: set[str]) -> str:
    import difflib

    return ", ".join(difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.6))


__all__ = ["capture_from", "captured"]
