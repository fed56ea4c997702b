"""The metrics of others that boards read, where they come from, and the panels of the cross-check (spec R8).

A board may only ask for metrics of the catalogue or of `FOREIGN`; the lint refuses any other name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dashboards.frame import CLUSTER_OR_NONE
from dashboards.panels import Steps, Visual, query, timeseries
from dashboards.queries import quantile


@dataclass(frozen=True, slots=True)
class Foreign:
    """A metric that another exporter gives.

    Attributes:
        name: As exposed.
        kind: ``counter``, ``gauge`` or ``histogram`` (by its base name).
        origin: Who exposes it.
    """

    name: str
    kind: str
    origin: str


_SERVICE_GRAPH: Final = "OpenTelemetry Collector's service-graph connector, Grafana Tempo"
_ISTIO: Final = "Istio"
_CADVISOR: Final = "cAdvisor (kubelet)"
_STATE: Final = "kube-state-metrics"
_DCGM: Final = "NVIDIA DCGM exporter"
_PROMETHEUS: Final = "Prometheus itself"

_FOREIGN: Final = (
    Foreign("ALERTS", "gauge", _PROMETHEUS),
    Foreign("up", "gauge", _PROMETHEUS),
    Foreign("traces_service_graph_request_total", "counter", _SERVICE_GRAPH),
    Foreign("traces_service_graph_request_failed_total", "counter", _SERVICE_GRAPH),
    Foreign("traces_service_graph_request_server_seconds", "histogram", _SERVICE_GRAPH),
    Foreign("istio_requests_total", "counter", _ISTIO),
    Foreign("container_cpu_cfs_periods_total", "counter", _CADVISOR),
    Foreign("container_cpu_cfs_throttled_periods_total", "counter", _CADVISOR),
    Foreign("container_fs_reads_bytes_total", "counter", _CADVISOR),
    Foreign("container_fs_writes_bytes_total", "counter", _CADVISOR),
    Foreign("kube_pod_info", "gauge", _STATE),
    Foreign("kube_pod_container_status_restarts_total", "counter", _STATE),
    Foreign("jvm_gc_pause_seconds", "histogram", "Micrometer (Spring Boot and others on the JVM)"),
    Foreign("jvm_gc_collection_seconds", "histogram", "Prometheus Java client, JMX exporter"),
    Foreign("go_gc_duration_seconds", "histogram", "Prometheus Go client"),
    Foreign("python_gc_collections_total", "counter", "Prometheus Python client"),
    Foreign("DCGM_FI_DEV_GPU_UTIL", "gauge", _DCGM),
)

FOREIGN: Final[dict[str, Foreign]] = {metric.name: metric for metric in _FOREIGN}

_FAILING: Final[Steps] = ((None, "transparent"), (0.01, "yellow"), (0.05, "red"))

#: The pods that a workload runs in. Kubernetes workloads are named by the UID of their pod, which kube-state-metrics
#: knows; the GPU exporter knows those that use a GPU. A workload named after its pod is taken as it is.
_PODS: Final = (
    f'(kube_pod_info{{uid=~"$pod",{CLUSTER_OR_NONE}}}'
    f' or gpu_process_memory_bytes{{workload=~"$pod",pod!="",{CLUSTER_OR_NONE}}})'
)


def _of_pods(expr: str) -> str:
    return f"{expr} and on (namespace, pod) {_PODS}"


def _rate(metric: str, selectors: str = CLUSTER_OR_NONE) -> str:
    return f"rate({metric}{{{selectors}}}[$__rate_interval])"


def service_panels() -> list[Visual]:
    """Return what the service's callers see: requests, failures, latency."""
    served = f'server=~"$service",{CLUSTER_OR_NONE}'
    meshed = f'reporter="destination",destination_workload=~"$service",{CLUSTER_OR_NONE}'
    failed = _rate("traces_service_graph_request_failed_total", served)
    total = _rate("traces_service_graph_request_total", served)
    errors = _rate("istio_requests_total", f'{meshed},response_code=~"5.."')
    requests = _rate("istio_requests_total", meshed)
    return [
        timeseries(
            "Requests",
            f"Requests per second that the service serves. From: {_SERVICE_GRAPH}; {_ISTIO}.",
            [
                query(f"sum by (server) ({total})", "{{server}}"),
                query(f"sum by (destination_workload) ({requests})", "{{destination_workload}} (Istio)"),
            ],
            unit="reqps",
            no_value="not reported",
            width=8,
        ),
        timeseries(
            "Failed requests (5xx)",
            f"Share of the requests that failed. From: {_SERVICE_GRAPH}; {_ISTIO}.",
            [
                query(f"sum by (server) ({failed}) / (sum by (server) ({total}) > 0)", "{{server}}"),
                query(
                    f"sum by (destination_workload) ({errors}) / (sum by (destination_workload) ({requests}) > 0)",
                    "{{destination_workload}} (Istio)",
                ),
            ],
            unit="percentunit",
            no_value="not reported",
            width=8,
            steps=_FAILING,
        ),
        timeseries(
            "Latency, 99th percentile",
            f"One request in a hundred takes longer. From: {_SERVICE_GRAPH}.",
            [query(quantile(0.99, "traces_service_graph_request_server_seconds", served, "server"), "{{server}}")],
            unit="s",
            no_value="not reported",
            width=8,
        ),
    ]


def pod_panels() -> list[Visual]:
    """Return the cross-check of a pod: collector pauses, throttling, disk, restarts."""
    throttled = _rate("container_cpu_cfs_throttled_periods_total")
    periods = _rate("container_cpu_cfs_periods_total")
    return [
        timeseries(
            "Garbage collector pauses",
            "Share of time that the pod stood still for its garbage collector. Python does not report pauses: its curve"
            " counts collections per second. From: Micrometer, the Prometheus clients for Java, Go and Python.",
            [
                query(f"sum by (pod) ({_of_pods(_rate('jvm_gc_pause_seconds_sum'))})", "{{pod}} JVM"),
                query(f"sum by (pod) ({_of_pods(_rate('jvm_gc_collection_seconds_sum'))})", "{{pod}} JVM (client)"),
                query(f"sum by (pod) ({_of_pods(_rate('go_gc_duration_seconds_sum'))})", "{{pod}} Go"),
                query(
                    f"sum by (pod) ({_of_pods(_rate('python_gc_collections_total'))})", "{{pod}} Python (collections)"
                ),
            ],
            unit="percentunit",
            no_value="not reported",
            width=8,
        ),
        timeseries(
            "CPU throttled",
            f"Share of scheduling periods in which the pod had used up its CPU limit. From: {_CADVISOR}.",
            [query(f"sum by (pod) ({_of_pods(throttled)}) / (sum by (pod) ({_of_pods(periods)}) > 0)", "{{pod}}")],
            unit="percentunit",
            no_value="not reported",
            width=8,
            steps=((None, "transparent"), (0.25, "orange")),
        ),
        timeseries(
            "Disk",
            f"Bytes per second read from, and written to, file systems. From: {_CADVISOR}.",
            [
                query(f"sum by (pod) ({_of_pods(_rate('container_fs_reads_bytes_total'))})", "{{pod}} read"),
                query(f"sum by (pod) ({_of_pods(_rate('container_fs_writes_bytes_total'))})", "{{pod}} written"),
            ],
            unit="Bps",
            no_value="not reported",
            width=8,
        ),
        timeseries(
            "Restarts",
            f"Restarts of the pod's containers per hour. From: {_STATE}.",
            [query(f"3600 * sum by (pod) ({_of_pods(_rate('kube_pod_container_status_restarts_total'))})", "{{pod}}")],
            unit="suffix: /h",
            least_maximum=1,
            no_value="not reported",
            width=12,
            rare=True,
        ),
        timeseries(
            "GPU use as DCGM sees it",
            f"Share of time in which a kernel ran: a second opinion on the use of its GPUs. From: {_DCGM}.",
            [
                query(
                    f"max by (pod, gpu) ({_of_pods(f'DCGM_FI_DEV_GPU_UTIL{{{CLUSTER_OR_NONE}}}')}) / 100",
                    "{{pod}} GPU {{gpu}}",
                )
            ],
            unit="percentunit",
            no_value="not reported",
            maximum=1,
            width=12,
        ),
    ]
