"""The measurements that a bundle may hold, by canonical name, and the golden signal each belongs to.

Names follow the Prometheus base-unit convention: seconds, ratios in [0, 1], per-second rates. A metric that is not
listed here is kept and used as a generic saturation signal (`Signal.OTHER`), so nothing an importer found is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Signal(StrEnum):
    """What a metric says about a node: the four golden signals, with saturation split by resource."""

    LATENCY = "latency"
    ERRORS = "errors"
    TRAFFIC = "traffic"
    CPU = "cpu"
    MEMORY = "memory"
    GPU = "gpu"
    QUEUE = "queue"
    NETWORK = "network"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Metric:
    """One canonical metric: its unit (for display), its signal, what it measures, and whether it may be negative."""

    name: str
    signal: Signal
    unit: str
    help: str
    signed: bool = False


_METRICS = (
    Metric("latency_mean_seconds", Signal.LATENCY, "s", "Mean time to answer a request"),
    Metric("latency_p50_seconds", Signal.LATENCY, "s", "Median time to answer a request"),
    Metric("latency_p90_seconds", Signal.LATENCY, "s", "90th percentile of the time to answer a request"),
    Metric("latency_p95_seconds", Signal.LATENCY, "s", "95th percentile of the time to answer a request"),
    Metric("latency_p99_seconds", Signal.LATENCY, "s", "99th percentile of the time to answer a request"),
    Metric(
        "self_time_mean_seconds",
        Signal.LATENCY,
        "s",
        "Mean time spent in the node itself, outside its callees",
    ),
    Metric("error_ratio", Signal.ERRORS, "ratio", "Share of requests that failed"),
    Metric("request_rate", Signal.TRAFFIC, "1/s", "Requests per second"),
    Metric("cpu_utilization_ratio", Signal.CPU, "ratio", "CPU in use over CPU allotted"),
    Metric("memory_utilization_ratio", Signal.MEMORY, "ratio", "Memory in use over memory allotted"),
    Metric("gpu_utilization_ratio", Signal.GPU, "ratio", "Share of time a kernel ran on the GPU"),
    Metric("gpu_memory_utilization_ratio", Signal.GPU, "ratio", "GPU memory in use over total"),
    Metric("gpu_fragmentation_ratio", Signal.GPU, "ratio", "1 - largest free block / free GPU memory (M1)"),
    Metric("queue_depth", Signal.QUEUE, "1", "Items waiting"),
    Metric("queue_wait_seconds", Signal.QUEUE, "s", "Time from submission to start"),
    Metric("blocking_gpu_seconds", Signal.QUEUE, "GPU-seconds", "What the peer took while the node waited for it (V1)"),
    Metric("network_receive_bytes_per_second", Signal.NETWORK, "B/s", "Bytes received per second"),
    Metric("network_transmit_bytes_per_second", Signal.NETWORK, "B/s", "Bytes sent per second"),
    Metric(
        "network_gap_mean_seconds",
        Signal.NETWORK,
        "s",
        "Mean time of a call spent between the two nodes: the caller's view minus the callee's",
        signed=True,  # a difference of two clocks' views
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _METRICS}

#: Best summary of the whole latency distribution first: a mean adds up along a call chain, a quantile does not.
LATENCY_CENTRE = ("latency_mean_seconds", "latency_p50_seconds")
#: Best tail statistic first.
LATENCY_TAIL = ("latency_p95_seconds", "latency_p90_seconds", "latency_p99_seconds")


def describe(name: str) -> Metric:
    """Return the catalogue entry of ``name``, or a generic one for a metric we do not know."""
    return METRICS.get(name) or Metric(name, Signal.OTHER, "", name.replace("_", " "))


def signal_of(name: str) -> Signal:
    """Return the golden signal that metric ``name`` belongs to."""
    return describe(name).signal
