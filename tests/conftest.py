"""Explanations written by hand, as rich as the real ones, for tests of everything that shows them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import msgspec
import numpy as np
import pytest

from rca.explanation import (
    Attribution,
    AttributionEntry,
    Cause,
    Evidence,
    Explanation,
    GraphEdge,
    GraphNode,
    Hop,
    Impact,
    Model,
    NextStep,
    NotChecked,
    Path,
    Provenance,
    ProvenanceStep,
    RuledOut,
    Series,
    Verdict,
)
from rca.incident import Header, Incident, Source, SourceStatus, Victim, Window, metrics_table

ONSET = datetime(2026, 1, 31, 3, 5, tzinfo=UTC)
BASELINE = Window(ONSET - timedelta(minutes=65), ONSET - timedelta(minutes=5))
INCIDENT = Window(ONSET - timedelta(minutes=5), ONSET + timedelta(minutes=15))

JOB, GPU, LLM, GATEWAY, CHECKOUT = "train/llama-812", "gpu-node-3/gpu-0", "llm-inference", "api-gateway", "checkout"


def series(node: str, metric: str, unit: str, low: float, high: float, lag_seconds: float, seed: int) -> Series:
    """A noisy step from ``low`` to ``high``, ``lag_seconds`` after the symptom, one sample each 30 s, with a gap."""
    rng = np.random.default_rng(seed)
    start = BASELINE.start.timestamp()
    times = np.arange(start, INCIDENT.end.timestamp(), 30.0)
    level = np.where(times >= ONSET.timestamp() + lag_seconds, high, low)
    values: list[float | None] = [float(v) for v in level * rng.lognormal(0.0, 0.07, len(times))]
    values[40:44] = [None] * 4
    return Series(node, metric, unit, tuple(float(t) for t in times), tuple(values))


@pytest.fixture
def explained() -> Explanation:
    """A low-priority training job takes the GPU from P0 inference, and the shop's checkout slows down."""
    others = [
        ("payment", "service", 0.01, 2.1),
        ("catalog", "service", 0.004, 1.2),
        ("cart", "service", 0.006, 1.9),
        ("redis-cart", "service", 0.003, 0.8),
        ("embedder", "service", 0.03, 5.4),
        ("gpu-node-3", "host", 0.02, 4.2),
        ("gpu-node-3/gpu-1", "gpu", 0.002, 0.9),
        ("queue/batch", "queue", 0.015, None),
        ("fraud", "service", 0.004, 2.3),
        ("ledger", "service", 0.002, 1.1),
    ]
    nodes = (
        GraphNode(JOB, "workload", 0.87, 31.0),
        GraphNode(GPU, "gpu", 0.06, 24.0),
        GraphNode(LLM, "service", 0.02, 22.0),
        GraphNode(GATEWAY, "service", 0.01, 17.0),
        GraphNode(CHECKOUT, "service", 0.003, 19.5),
        *(GraphNode(*other) for other in others),
    )
    edges = (
        GraphEdge(GPU, JOB, "shares_device", 0.96, True),
        GraphEdge(LLM, GPU, "runs_on", 0.95, True),
        GraphEdge(GATEWAY, LLM, "calls", 0.93, True),
        GraphEdge(CHECKOUT, GATEWAY, "calls", 0.97, True),
        GraphEdge(CHECKOUT, "payment", "calls", 0.04, False),
        GraphEdge(CHECKOUT, "cart", "calls", 0.03, False),
        GraphEdge("cart", "redis-cart", "calls", 0.01, False),
        GraphEdge(GATEWAY, "catalog", "calls", 0.02, False),
        GraphEdge(GATEWAY, "embedder", "calls", 0.2, False),
        GraphEdge("embedder", GPU, "runs_on", 0.3, False),
        GraphEdge(GPU, "gpu-node-3", "runs_on", 0.1, False),
        GraphEdge("gpu-node-3/gpu-1", "gpu-node-3", "runs_on", 0.01, False),
        GraphEdge(JOB, "queue/batch", "queued_behind", 0.02, False),
        GraphEdge("payment", "fraud", "calls", 0.02, False),
        GraphEdge("payment", "ledger", "calls", 0.02, False),
    )
    return Explanation(
        incident_id="INC-4711",
        title="Checkout answers slowly",
        labels={"cluster": "eu-west-1", "severity": "page"},
        verdict=Verdict.EXPLAINED,
        verdict_reasons=("The first cause is 14 times as probable as the second",),
        impact=Impact(
            victim=Victim(CHECKOUT, "latency_p95_seconds"),
            kind="latency",
            unit="s",
            window=INCIDENT,
            baseline_window=BASELINE,
            baseline=0.42,
            incident=3.2,
            peak=4.13,
            change_ratio=3.2 / 0.42,
            onset=ONSET,
            baseline_samples=120,
            incident_samples=40,
        ),
        causes=(
            Cause(
                1,
                JOB,
                "workload",
                "gpu_contention",
                0.91,
                0.87,
                "Started on gpu-node-3/gpu-0 while P0 inference was serving; GPU utilisation rose from 46 % to 99 %.",
                -35.0,
            ),
            Cause(2, GPU, "gpu", "gpu_fragmentation", 0.55, 0.06, "Largest free block shrank to 1.2 GiB.", -20.0),
            Cause(3, "embedder", "service", "latency", 0.4, 0.03, "Slowed down after the symptom.", 25.0),
        ),
        no_cause_probability=0.04,
        path=Path(
            (
                Hop(JOB, GPU, "shares_device", "callee_to_caller", 0.96),
                Hop(GPU, LLM, "runs_on", "callee_to_caller", 0.95),
                Hop(LLM, GATEWAY, "calls", "callee_to_caller", 0.93),
                Hop(GATEWAY, CHECKOUT, "calls", "callee_to_caller", 0.97),
            ),
            0.82,
        ),
        attribution=(
            Attribution(
                "mechanism",
                "latency_p95_seconds",
                "s",
                3.2,
                (
                    AttributionEntry((JOB,), 0.45, 0.86, 0.81, 0.90, 0.79),
                    AttributionEntry((GPU,), 2.61, 0.18, 0.09, 0.29, 0.16),
                    AttributionEntry(("embedder",), 3.16, 0.012, -0.03, 0.05, 0.05),
                    AttributionEntry((JOB, GPU), 0.41, 0.87, 0.82, 0.92, None, True),
                ),
                ("Intervals are from 200 bootstrap samples.",),
            ),
        ),
        evidence=(
            Evidence(JOB, None, "gpu_utilization_ratio", "ratio", 0.0, 0.97, None, 31.0, 40, 120, -35.0, INCIDENT),
            Evidence(GPU, None, "gpu_utilization_ratio", "ratio", 0.46, 0.99, 2.15, 24.0, 40, 120, -30.0, INCIDENT),
            Evidence(LLM, None, "latency_mean_seconds", "s", 0.21, 2.4, 11.4, 22.0, 40, 120, -10.0, INCIDENT),
            Evidence(GATEWAY, LLM, "latency_mean_seconds", "s", 0.23, 2.52, 10.9, 17.0, 40, 120, -5.0, INCIDENT),
            Evidence(CHECKOUT, None, "request_rate", "1/s", 1210.0, 1180.0, 0.975, -0.6, 40, 120, None, INCIDENT),
        ),
        ruled_out=(
            RuledOut("payment", "its latency stayed within 2.1 standard deviations of the baseline"),
            RuledOut("embedder", "it slowed down 25 s after the symptom began"),
        ),
        not_checked=(
            NotChecked("queue/batch", "no queue metrics in the bundle"),
            NotChecked("kernel and driver logs", "no source for them was configured"),
        ),
        next_steps=(
            NextStep(
                "Move train/llama-812 off gpu-node-3, or make it preemptible",
                "latency p95 of checkout falls below 0.5 s within 5 minutes",
                "scontrol requeue 812",
            ),
            NextStep("Give P0 inference a GPU quota of its own", "no shared device in the next `rca explain`"),
        ),
        nodes=nodes,
        edges=edges,
        series=(
            series(CHECKOUT, "latency_p95_seconds", "s", 0.42, 3.2, 0, 1),
            series(JOB, "gpu_utilization_ratio", "ratio", 0.02, 0.97, -35, 2),
            series(GPU, "gpu_utilization_ratio", "ratio", 0.46, 0.99, -30, 3),
            series(LLM, "latency_mean_seconds", "s", 0.21, 2.4, -10, 4),
        ),
        model=Model("prioscope-gat", "1", "c0ffee" * 10 + "beef"),
        provenance=Provenance(
            "C",
            (
                ProvenanceStep("header", "ab" * 32, "cd" * 32),
                ProvenanceStep("explanation", "ef" * 32, "0123456789abcdef" * 4),
            ),
        ),
        sources=(
            Source("scheduler", "prometheus", queries=("max by (workload) (priority_workload_waiting_seconds)",)),
            Source("kernel logs", "loki", SourceStatus.ABSENT, "no source for them was configured"),
        ),
    )


@pytest.fixture
def inconclusive(explained: Explanation) -> Explanation:
    """The same symptom with nothing to blame: no path, no attribution, three samples, most series missing."""
    return msgspec.structs.replace(
        explained,
        incident_id="INC-4712",
        title="",
        labels={},
        verdict=Verdict.INCONCLUSIVE,
        verdict_reasons=("The most probable cause has 21 % confidence; 50 % is needed",),
        impact=msgspec.structs.replace(
            explained.impact, baseline=None, peak=None, onset=None, baseline_samples=0, incident_samples=3
        ),
        causes=(msgspec.structs.replace(explained.causes[0], confidence=0.21, onset_offset_seconds=None),),
        no_cause_probability=0.71,
        path=None,
        attribution=(),
        evidence=(),
        ruled_out=(),
        next_steps=(),
        series=(Series(CHECKOUT, "latency_p95_seconds", "s", (ONSET.timestamp(),), (None,)),),
        provenance=Provenance("C", ()),
    )


#: Names that try to become markup in each format.
HOSTILE = "<script>alert(1)</script>'\"><img src=x onerror=alert(2)>|`*_[x](http://evil.example)\x1b[31m\u202e"


@pytest.fixture
def hostile(explained: Explanation) -> Explanation:
    """The explained incident with every name and every sentence replaced by `HOSTILE`."""
    names = {JOB, GPU, LLM, GATEWAY, CHECKOUT, *(node.node for node in explained.nodes)}
    # Each name must stay distinct, or the graph would collapse.
    renamed = {name: f"{index}{HOSTILE}" for index, name in enumerate(sorted(names))}

    def change(value: object, key: str = "") -> object:
        if isinstance(value, str):
            if key in {
                "relation",
                "verdict",
                "kind",
                "unit",
                "metric",
                "start",
                "end",
                "onset",
                "sha256",
                "digest",
                "status",
            }:
                return value
            return renamed.get(value, HOSTILE)
        if isinstance(value, dict):
            return {(HOSTILE if key == "labels" else k): change(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [change(item, key) for item in value]
        return value

    tree = change(msgspec.to_builtins(explained))
    return msgspec.convert(tree, Explanation)


@pytest.fixture
def incident() -> Incident:
    """A small valid bundle in memory: three services, latency that trebles at one of them."""
    times = np.arange(BASELINE.start.timestamp(), INCIDENT.end.timestamp(), 60.0)
    nodes = ["checkout", "payment", "db"]
    rows = [(t, node) for node in nodes for t in times]
    rng = np.random.default_rng(0)
    values = [
        (0.3 if node == "db" and t >= ONSET.timestamp() else 0.1) * math.exp(rng.normal(0, 0.05)) for t, node in rows
    ]
    import pyarrow as pa

    return Incident.create(
        Header(
            id="INC-1",
            window=INCIDENT,
            baseline=BASELINE,
            victim=Victim("checkout", "latency_mean_seconds"),
            labels={"cluster": "test", "team": "shop"},
        ),
        metrics=metrics_table(
            np.array([t for t, _ in rows]),
            [node for _, node in rows],
            ["latency_mean_seconds"] * len(rows),
            np.array(values),
        ),
        edges=pa.table(
            {"caller": ["checkout", "payment"], "callee": ["payment", "db"], "relation": ["calls", "calls"]}
        ),
    )
