"""A small GPU cluster as a function of time, in which everything that the boards show happens.

`snapshot` gives what a scheduler and its GPUs look like at one moment; the real detectors, trackers and collectors do
the rest. `foreign_metrics` and `incident_families` are the metrics of the neighbours: a service mesh, cAdvisor,
kube-state-metrics, language runtimes, and incidents. Same time, same answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from exporters.catalog import METRICS
from exporters.families import Distribution, Family, family
from exporters.model import (
    AllocatorState,
    Constraints,
    Demand,
    Device,
    DeviceProcess,
    Event,
    EventKind,
    MigInstance,
    Node,
    NodeState,
    Placement,
    QosClass,
    Snapshot,
    Unread,
    Workload,
    WorkloadState,
)

CLUSTER = "eu-west-1"
GIB = 1 << 30
GPUS_PER_NODE = 4
MODEL = "NVIDIA A100-SXM4-80GB"

#: Length of the play that repeats: a P0 deployment scales up, is blocked, gets its GPUs, and ends.
CYCLE = 3000.0
#: Where in the cycle the present lies when the demo starts: the P0 workload has been blocked for some minutes.
PRESENT = 1100.0

POLICY = """\
apiVersion: prioscope/v1
kind: TaskPriorityPolicy
metadata: { name: night-shift }
spec:
  levels:
    - { level: P0, minPriority: 1000000, waitSloSeconds: 60 }
    - { level: P1, minPriority: 100000, waitSloSeconds: 300 }
    - { level: P2, minPriority: 1000, waitSloSeconds: 1800 }
  inversion: { heldCounts: any }
  preemption: { allowed: true, deadlineSeconds: 60 }
  rules:
    - { name: everything, weight: 1 }
---
apiVersion: prioscope/v1
kind: TaskClass
metadata: { name: online-inference }
spec:
  qosClass: Guaranteed
  retryPolicy: Always
"""

RUNNING, PENDING, REQUEUED, HELD = (
    WorkloadState.RUNNING,
    WorkloadState.PENDING,
    WorkloadState.REQUEUED,
    WorkloadState.HELD,
)


@dataclass(frozen=True)
class Play:
    """The cluster's story around ``origin`` (Unix seconds), the present when the demo starts."""

    origin: float

    def cycle(self, now: float) -> tuple[float, float]:
        """Return when the cycle at ``now`` began, and the seconds since then."""
        into = (now - self.origin + PRESENT) % CYCLE
        return now - into, into

    def snapshot(self, now: float) -> Snapshot:
        """Return what the scheduler and the GPUs look like at ``now``."""
        began, into = self.cycle(now)
        known = (*self._steady(), *self._contenders(began, into), *self._small(now))
        workloads = [workload for workload in known if workload.submitted is None or workload.submitted <= now]
        placed = [workload for workload in workloads if workload.state.holding]
        return Snapshot(
            time=now,
            cluster=CLUSTER,
            source="file",
            workloads=tuple(workloads),
            nodes=tuple(_nodes(placed)),
            devices=tuple(self._devices(now, placed)),
            events=tuple(self._events(began, into)),
            unread=(Unread("nodes: gpu-7 memory", "the node agent did not answer"),),
        )

    def _steady(self) -> Iterator[Workload]:
        long_ago = self.origin - 5 * 3600
        yield _running("llama-train-0", "llama-train", "training", 2, long_ago, _on("gpu-1", 0, 1, 2, 3))
        yield _running("llama-train-1", "llama-train", "training", 2, long_ago, _on("gpu-2", 0, 1, 2, 3))
        yield _running("embed-index-6c4d9-mwx2p", "embed-index", "inference", 1, long_ago, _on("gpu-4", 0, 1))
        yield _running("bulk-classify-44817", "bulk-classify", "batch", 3, long_ago, _on("gpu-5", 0))
        chat = _running("chat-7d9f6c-2xk4p", "chat", "inference", 0, long_ago, _on("gpu-6", 1, 2))
        yield chat
        yield replace(
            _running("search-59b8d-qk7zl", "search", "inference", 0, long_ago, _on("gpu-6", 3)),
            task_class="online-inference",
            qos_class=QosClass.BEST_EFFORT,
            restart_policy="Always",
        )
        # Batch work holds what this one is eligible for.
        yield _waiting(
            "fraud-score-84f4c-9hzvd", "fraud-score", "inference", 1, self.origin - 2400, 2, nodes=("gpu-5",)
        )
        # One GPU is free on each of two nodes, two on none.
        halves = ("gpu-4", "gpu-5")
        yield _waiting("vision-eval-44790", "vision-eval", "training", 2, self.origin - 7200, 2, nodes=halves)
        # Nothing is eligible for this one.
        yield _waiting("notebook-3", "notebook", "batch", None, self.origin - 900, 1, model="H100")
        yield replace(_waiting("ablation-44702", "ablation", "batch", 3, self.origin - 9000, 8), state=HELD)

    def _contenders(self, began: float, into: float) -> Iterator[Workload]:
        """A P0 deployment that scales up, and the P3 sweep that holds the GPUs it needs."""
        asked, got, done = 600.0, 2000.0, 2700.0
        name = f"chat-7d9f6c-{int(began) % 100000:05d}"
        sweep = _running("sweep-44910", "sweep", "batch", 3, began + 60, _on("gpu-3", 0, 1, 2, 3), preemptible=True)
        if into < asked:
            yield sweep
        elif into < got:
            yield sweep
            waiting = _waiting(name, "chat", "inference", 0, began + asked, 4, nodes=("gpu-3",))
            constraints = replace(waiting.constraints, unchecked=("pod affinity",))
            yield replace(waiting, constraints=constraints)
        elif into < done:
            where = _on("gpu-3", 0, 1, 2, 3)
            started = _running(name, "chat", "inference", 0, began + got, where)
            yield replace(started, submitted=began + asked)
            waiting = _waiting("sweep-44910", "sweep", "batch", 3, began + got, 4, nodes=("gpu-3",))
            yield replace(waiting, state=REQUEUED, requeues=1)
        else:
            yield replace(sweep, started=began + done)

    def _small(self, now: float) -> Iterator[Workload]:
        """Short work on shares of a GPU, so that there are waits to count."""
        kinds = (
            # service, queue, rank, seconds between, longest wait, run time
            ("autocomplete", "inference", 0, 50, 110, 240),
            ("rerank", "inference", 1, 70, 200, 300),
            ("finetune", "training", 2, 110, 900, 400),
            ("lint-ci", "batch", 3, 60, 500, 200),
        )
        for index, (service, queue, rank, every, longest, runs) in enumerate(kinds):
            first = int((now - longest - runs) // every)
            for number in range(first, int(now // every) + 1):
                submitted = number * every
                draw = random.Random(f"{service}-{number}")
                started = submitted + 2 + longest * draw.random() ** 3
                name = f"{service}-{number % 10000:04d}"
                if submitted > now or started + runs < now:
                    continue
                if started > now:
                    yield _waiting(name, service, queue, rank, submitted, 0.1)
                else:
                    where = (Placement("gpu-5", 100, (f"GPU-gpu-5-{2 if index % 2 else 3}",)),)
                    running = _running(name, service, queue, rank, started, where)
                    yield replace(running, submitted=submitted, demand=Demand(gpu_milli=100))

    def _events(self, began: float, into: float) -> Iterator[Event]:
        name = f"chat-7d9f6c-{int(began) % 100000:05d}"
        for at, identity, stopped, rank, by, by_rank, service, by_service in (
            (2000.0, "due", "sweep-44910", 3, name, 0, "sweep", "chat"),
            (400.0, "wrong", "rerank-gone", 1, "lint-ci-0007", 3, "rerank", "lint-ci"),
            (800.0, "train", "finetune-gone", 2, "embed-index-6c4d9-mwx2p", 1, "finetune", "embed-index"),
            (1000.0, "batch", "lint-ci-gone", 3, "finetune-0007", 2, "lint-ci", "finetune"),
        ):
            if at <= into < at + 120:
                yield Event(
                    id=f"{identity}-{began:.0f}",
                    kind=EventKind.PREEMPTED,
                    time=began + at,
                    workload=stopped,
                    by=by,
                    rank=rank,
                    by_rank=by_rank,
                    service=service,
                    by_service=by_service,
                )

    def _devices(self, now: float, placed: list[Workload]) -> Iterator[Device]:
        users: dict[str, list[Workload]] = {}
        for workload in placed:
            for placement in workload.placements:
                for device in placement.devices:
                    users.setdefault(device, []).append(workload)
        for node in range(1, 7):
            for index in range(GPUS_PER_NODE):
                yield self._device(now, f"gpu-{node}", index, users.get(f"GPU-gpu-{node}-{index}", []))

    def _device(self, now: float, node: str, index: int, users: list[Workload]) -> Device:
        identity = f"GPU-{node}-{index}"
        phase = hash_of(identity)
        since = now - (self.origin - 86400)
        if identity == "GPU-gpu-4-3":
            return Device(id=identity, node=node, index=index, model=MODEL, up=False, reason="fallen off the bus")
        base = 0.03 if not users else 0.35 + 0.6 * phase
        use = min(1.0, max(0.0, base + 0.06 * math.sin(now / 170 + 6 * phase)))
        total = 80 * GIB
        used = int(total * (0.01 if not users else 0.45 + 0.4 * phase))
        hot = identity in {"GPU-gpu-2-0", "GPU-gpu-3-1"}
        device = Device(
            id=identity,
            node=node,
            index=index,
            model=MODEL,
            memory_total_bytes=total,
            memory_used_bytes=used,
            memory_reserved_bytes=600 << 20,
            gpu_utilization_ratio=round(use, 3),
            memory_utilization_ratio=round(use * 0.6, 3),
            power_watts=round(70 + 310 * use, 1),
            power_limit_watts=400.0,
            energy_joules=round(since * (70 + 310 * base), 0),
            temperature_celsius=round(34 + 42 * use + (9 if hot else 0), 0),
            sm_clock_hertz=1.41e9 if not hot else 1.09e9,
            memory_clock_hertz=1.593e9,
            ecc_corrected=int(since // 7200) if phase > 0.8 else 0,
            ecc_uncorrected=0,
            throttle_reasons=("sw_thermal_slowdown",) if hot else (),
            xid_errors={"63": 1 + int(since // 40000)} if identity == "GPU-gpu-3-2" else {},
            allocated_milli=min(1000, sum(_share(workload, identity) for workload in users)),
            processes=tuple(
                DeviceProcess(
                    pid=2000 + 17 * number + index,
                    name="python",
                    memory_bytes=used // max(1, len(users)),
                    workload=workload.id,
                    namespace=workload.queue,
                    pod=workload.id,
                )
                for number, workload in enumerate(users)
            ),
            allocators=tuple(_allocator(now, workload.id, used, phase) for workload in users[:1]),
        )
        if identity == "GPU-gpu-6-0":
            return replace(
                device, mig_enabled=True, mig_slices=8, mig_instances=tuple(_mig(now)), allocators=(), processes=()
            )
        return device


def hash_of(text: str) -> float:
    """Return a number in [0, 1) that depends on ``text`` only."""
    return random.Random(text).random()


def _on(node: str, *gpus: int) -> tuple[Placement, ...]:
    return (Placement(node, 1000 * len(gpus), tuple(f"GPU-{node}-{gpu}" for gpu in gpus)),)


def _share(workload: Workload, device: str) -> int:
    for placement in workload.placements:
        if device in placement.devices:
            return placement.gpu_milli // len(placement.devices)
    return 0


def _running(
    name: str,
    service: str,
    queue: str,
    rank: int,
    started: float,
    where: tuple[Placement, ...],
    *,
    preemptible: bool = False,
) -> Workload:
    return Workload(
        id=name,
        name=name,
        service=service,
        namespace=queue,
        queue=queue,
        state=RUNNING,
        rank=rank,
        submitted=started - 20,
        started=started,
        demand=Demand(gpu_milli=sum(placement.gpu_milli for placement in where)),
        placements=where,
        preemptible=preemptible,
        may_preempt=True,
    )


def _waiting(
    name: str,
    service: str,
    queue: str,
    rank: int | None,
    since: float,
    gpus: float,
    *,
    nodes: tuple[str, ...] = (),
    model: str = "",
) -> Workload:
    others = tuple(f"gpu-{number}" for number in range(1, 8) if nodes and f"gpu-{number}" not in nodes)
    return Workload(
        id=name,
        name=name,
        service=service,
        namespace=queue,
        queue=queue,
        state=PENDING,
        rank=rank,
        submitted=since,
        demand=Demand(gpu_milli=int(1000 * gpus), gpu_models=(model,) if model else ()),
        constraints=Constraints(excluded_nodes=others),
        reason="Resources",
        preemptible=True,
        may_preempt=True,
    )


def _nodes(placed: list[Workload]) -> Iterator[Node]:
    for number in range(1, 8):
        name = f"gpu-{number}"
        if number == 7:
            yield Node(name=name, state=NodeState.DRAINING, reason="kernel upgrade", gpu_capacity_milli=4000)
            continue
        taken = dict.fromkeys(range(GPUS_PER_NODE), 0)
        for workload in placed:
            for placement in workload.placements:
                for device in placement.devices:
                    if placement.node == name:
                        taken[int(device.rsplit("-", 1)[1])] += placement.gpu_milli // len(placement.devices)
        # One GPU is cut into MIG instances, and one is lost: neither is there for whole-GPU work.
        taken |= {6: {0: 1000}, 4: {3: 1000}}.get(number, {})
        free = tuple(max(0, 1000 - taken[gpu]) for gpu in range(GPUS_PER_NODE))
        yield Node(
            name=name,
            gpu_models=("A100",),
            gpu_memory_bytes=80 * GIB,
            gpu_capacity_milli=1000 * GPUS_PER_NODE,
            gpu_allocated_milli=1000 * GPUS_PER_NODE - sum(free),
            gpu_free_milli=free,
            mig_free={"1g.10gb": 2} if number == 6 else None,
            devices=tuple(f"GPU-{name}-{gpu}" for gpu in range(GPUS_PER_NODE)),
        )


def _allocator(now: float, workload: str, used: int, phase: float) -> AllocatorState:
    free = int(used * (0.18 + 0.1 * math.sin(now / 400 + 6 * phase) ** 2))
    scattered = 0.15 + 0.6 * phase + 0.15 * math.sin(now / 300 + 3 * phase)
    return AllocatorState(
        process="python",
        reserved_bytes=used,
        free_bytes=free,
        largest_free_bytes=int(free * (1 - min(0.95, max(0.05, scattered)))),
        free_blocks=40,
        workload=workload,
    )


def _mig(now: float) -> Iterator[MigInstance]:
    for number, (profile, start, size) in enumerate((("2g.20gb", 0, 2), ("1g.10gb", 3, 1), ("2g.20gb", 5, 2))):
        total = size * 10 * GIB
        used = int(total * (0.4 + 0.2 * math.sin(now / 200 + number)))
        yield MigInstance(
            id=f"MIG-gpu-6-{number}",
            profile=profile,
            start=start,
            size=size,
            memory_total_bytes=total,
            memory_used_bytes=used,
            allocated=True,
        )


# --- what others expose

_SERVICES = ("chat", "search", "embed-index", "fraud-score", "autocomplete", "rerank")
_PODS = ("chat-7d9f6c-2xk4p", "embed-index-6c4d9-mwx2p", "search-59b8d-qk7zl", "bulk-classify-44817")
_LATENCY_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def foreign_metrics(play: Play, now: float) -> str:
    """Return an exposition of the metrics that `dashboards.foreign.FOREIGN` lists, as others would give it at ``now``.

    Counters grow with rates that the story changes, so that each step of time is worth what happened in it.
    """
    since = now - (play.origin - 86400)
    lines: list[str] = []

    def put(name: str, value: float, **labels: str) -> None:
        text = ",".join(f'{key}="{shown}"' for key, shown in labels.items())
        lines.append(f"{name}{{{text}}} {value:.6g}")

    for service in _SERVICES:
        phase = hash_of(service)
        requests = since * (20 + 200 * phase)
        failing = 0.03 if service == "chat" else 0.002
        put("traces_service_graph_request_total", requests, client="gateway", server=service)
        put("traces_service_graph_request_failed_total", requests * failing, client="gateway", server=service)
        for code, share in (("200", 1 - failing), ("503", failing)):
            labels = {"reporter": "destination", "destination_workload": service, "response_code": code}
            put("istio_requests_total", requests * share, **labels)
        scale = 4.0 if service == "chat" else 0.4 + phase / 2
        for bound in (*_LATENCY_BOUNDS, math.inf):
            reached = 1.0 - math.exp(-bound / (scale / 4))
            edge = "+Inf" if bound == math.inf else f"{bound:g}"
            name = "traces_service_graph_request_server_seconds_bucket"
            put(name, requests * reached, client="gateway", server=service, le=edge)
        put("traces_service_graph_request_server_seconds_count", requests, client="gateway", server=service)
        put("traces_service_graph_request_server_seconds_sum", requests * scale / 4, client="gateway", server=service)
    for pod in _PODS:
        phase = hash_of(pod)
        where = {"namespace": "batch" if pod.startswith("bulk") else "inference", "pod": pod}
        put("kube_pod_info", 1, **where, uid=pod, node="gpu-6")
        put("kube_pod_container_status_restarts_total", 1 + since // 20000, **where, container="main")
        periods = since * 10
        put("container_cpu_cfs_periods_total", periods, **where, container="main")
        put("container_cpu_cfs_throttled_periods_total", periods * (0.05 + 0.3 * phase), **where, container="main")
        put("container_fs_reads_bytes_total", since * 4e6 * phase, **where, device="nvme0n1")
        put("container_fs_writes_bytes_total", since * 1.5e6 * (1 - phase), **where, device="nvme0n1")
        put("jvm_gc_pause_seconds_sum", since * 0.012 * phase, **where, action="end of minor GC")
        put("jvm_gc_collection_seconds_sum", since * 0.009 * phase, **where, gc="G1 Young Generation")
        put("go_gc_duration_seconds_sum", since * 0.001 * phase, **where)
        put("DCGM_FI_DEV_GPU_UTIL", round(100 * phase), **where, gpu="1", Hostname="gpu-6", UUID="GPU-gpu-6-1")
        put("python_gc_collections_total", since * 0.4 * phase, **where, generation="0")
    return "\n".join(lines) + "\n"


def incident_families(play: Play, now: float) -> tuple[Family, ...]:
    """Return the families of one explained incident and one without a cause, and of the server that explained them."""
    name, other = "INC-4711", "INC-4698"
    seconds = now - (play.origin - 86400)
    job, gpu = "sweep-44910", "gpu-3/gpu-0"
    info = (name, CLUSTER, "chat", "latency_p99_seconds", job, "gpu_contention", "explained")
    nothing = (other, CLUSTER, "search", "error_ratio", "", "", "inconclusive")
    scores = {
        (job, "workload", "cause"): 0.87,
        (gpu, "gpu", "path"): 0.06,
        ("chat", "service", "path"): 0.02,
        ("api-gateway", "service", "path"): 0.01,
        ("checkout", "service", "victim"): 0.003,
        ("embed-index", "service", "neighbour"): 0.03,
        ("queue/batch", "queue", "neighbour"): 0.015,
    }
    edges = {
        (gpu, job, "shares_device"): 0.96,
        ("chat", gpu, "runs_on"): 0.95,
        ("api-gateway", "chat", "calls"): 0.93,
        ("checkout", "api-gateway", "calls"): 0.97,
        ("api-gateway", "embed-index", "calls"): 0.2,
        (job, "queue/batch", "queued_behind"): 0.02,
    }
    shares = {
        (job, "mechanism"): (0.81, 0.86, 0.90),
        (gpu, "mechanism"): (0.09, 0.18, 0.29),
        (job, "replay"): (0.7, 0.78, 0.85),
    }

    def of(values: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
        return {(name, *key): value for key, value in values.items()}

    return (
        family("rca_incident_info", {info: 1.0, nothing: 1.0}),
        family("rca_incident_start_timestamp_seconds", {(name,): play.origin - 420.0, (other,): play.origin - 2600.0}),
        family("rca_incident_confidence_ratio", {(name,): 0.91, (other,): 0.21}),
        family("rca_incident_risk_ratio", {(name, "high"): 0.72}),
        family("rca_incident_node_score_ratio", of(scores)),
        family("rca_incident_edge_probability_ratio", of(edges)),
        family("rca_incident_attribution_lower_ratio", of({key: low for key, (low, _, _) in shares.items()})),
        family("rca_incident_attribution_ratio", of({key: mid for key, (_, mid, _) in shares.items()})),
        family("rca_incident_attribution_upper_ratio", of({key: high for key, (_, _, high) in shares.items()})),
        family("rca_server_build_info", {("0.1.0", "3.11.9", "sqlite"): 1.0}),
        family("rca_server_incidents", {("explained",): 1.0, ("inconclusive",): 1.0}),
        family("rca_server_alerts_total", {("accepted",): seconds // 1800, ("repeated",): seconds // 300}),
        family("rca_server_queue_length", {(): 0.0}),
        family("rca_server_queue_capacity", {(): 100.0}),
        family("rca_server_failures_total", {("capture",): seconds // 4000}),
        family("rca_server_last_success_timestamp_seconds", {(): play.origin - 400.0}),
        *(
            family(name, distributions={labels: _spread(name, int(seconds // 600), typical)})
            for name, labels, typical in (
                ("rca_server_stage_duration_seconds", ("explain",), 1.2),
                ("rca_server_explanation_delay_seconds", (), 18.0),
            )
        ),
        # As an exporter counts them whose cluster has more waiting workloads than the cap.
        family("prioscope_series_overflow_total", {("priority_workload_waiting_seconds",): seconds // 20}),
    )


def _spread(name: str, count: int, typical: float) -> Distribution:
    """Return ``count`` observations around ``typical``."""
    bounds = METRICS[name].buckets
    found = Distribution.empty(bounds)
    for number in range(count):
        found = found.observe(bounds, typical * (0.5 + hash_of(f"{name}-{number}")))
    return found
