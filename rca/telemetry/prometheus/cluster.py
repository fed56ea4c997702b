"""The scheduler's and the GPUs' view, from our exporters, DCGM and kube-state-metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from rca.telemetry.prometheus.answers import Floats, Series
from rca.telemetry.prometheus.ask import Query, by, label_matcher, selector
from rca.telemetry.prometheus.calls import Points
from rca.telemetry.prometheus.config import CaptureConfig
from rca.telemetry.spans import strip_pod_suffix

#: For the list of metric names.
NAMES: Final = (
    "priority_violation_active_seconds|priority_violation_culprit_gpu_seconds|priority_workload_waiting_seconds"
    "|priority_workload_oldest_wait_seconds|priority_workloads|prioscope_source_up|gpu_up|gpu_info"
    "|gpu_utilization_ratio|gpu_memory_used_bytes|gpu_memory_total_bytes|gpu_fragmentation_ratio"
    "|gpu_allocator_free_bytes|gpu_allocator_largest_free_bytes|gpu_process_memory_bytes"
    "|DCGM_FI_DEV_GPU_UTIL|DCGM_FI_DEV_FB_USED|DCGM_FI_DEV_FB_FREE|kube_pod_info|kube_pod_labels"
)
SCHEDULER: Final = "priority_workloads"
_MIB: Final = 1024.0**2
#: States of `exporters.model.WorkloadState` in which the scheduler could start a workload.
_WAITING: Final = 'state=~"pending|requeued"'


def scheduler_queries(config: CaptureConfig, names: frozenset[str] | None) -> list[Query]:
    """What waits, for how long, who is in the way, and whether the exporter itself could see."""
    m, cluster = config.matchers, config.labels.cluster
    queue = f"{cluster}, queue, priority_level"
    planned = (
        ("waiting", "max", f"{cluster}, workload, service, queue, priority_level", "priority_workload_waiting_seconds"),
        (
            "violations",
            "max",
            f"{cluster}, workload, service, priority_level, violation_type, basis",
            "priority_violation_active_seconds",
        ),
        (
            "culprits",
            "max",
            f"{cluster}, workload, service, priority_level, culprit, culprit_service, culprit_priority_level, basis",
            "priority_violation_culprit_gpu_seconds",
        ),
        ("oldest wait", "max", queue, "priority_workload_oldest_wait_seconds"),
        ("known workloads", "sum", queue, SCHEDULER),
        ("exporters", "min", "source", "prioscope_source_up"),
    )
    out = [Query(what, f"{how} by ({labels}) ({selector(name, m)})") for what, how, labels, name in planned
           if names is None or name in names]  # fmt: skip
    if names is None or SCHEDULER in names:
        out.append(Query("queue depth", f"sum by ({queue}) ({selector(SCHEDULER, _WAITING, m)})"))
    return out


def device_queries(config: CaptureConfig, names: frozenset[str] | None) -> list[Query]:
    """Our GPU exporter's metrics, and DCGM's."""
    m = config.matchers
    ours = f"{config.labels.host}, {config.labels.gpu}, uuid"
    theirs = "Hostname, gpu, UUID, modelName, namespace, pod, exported_namespace, exported_pod"
    holder = f"{ours}, workload, namespace, pod, slurm_job"
    planned = (
        ("GPU utilisation", f"max by ({ours})", "gpu_utilization_ratio"),
        ("GPU memory used", f"max by ({ours})", "gpu_memory_used_bytes"),
        ("GPU memory", f"max by ({ours})", "gpu_memory_total_bytes"),
        ("GPU memory fragmentation", f"max by ({ours})", "gpu_fragmentation_ratio"),
        ("allocator free", f"sum by ({ours})", "gpu_allocator_free_bytes"),
        ("allocator largest free", f"max by ({ours})", "gpu_allocator_largest_free_bytes"),
        ("GPU processes", f"sum by ({holder})", "gpu_process_memory_bytes"),
        ("GPU model", f"max by ({ours}, model)", "gpu_info"),
        ("DCGM utilisation", f"max by ({theirs})", "DCGM_FI_DEV_GPU_UTIL"),
        ("DCGM memory used", f"max by ({theirs})", "DCGM_FI_DEV_FB_USED"),
        ("DCGM memory free", f"max by ({theirs})", "DCGM_FI_DEV_FB_FREE"),
    )
    return [
        Query(what, f"{how} ({selector(name, m)})") for what, how, name in planned if names is None or name in names
    ]


def pod_queries(config: CaptureConfig, names: frozenset[str] | None, pods: Iterable[str]) -> list[Query]:
    """Where pods run, and which application they belong to; of ``pods`` alone where they are known."""
    only = label_matcher("pod", pods)
    planned = (
        ("pods", "namespace, pod, node", "kube_pod_info"),
        ("pod labels", "namespace, pod, label_app_kubernetes_io_name, label_app", "kube_pod_labels"),
    )
    return [
        Query(what, f"max by ({labels}) ({selector(name, only, config.matchers)})")
        for what, labels, name in planned
        if names is None or name in names
    ]


@dataclass(frozen=True)
class Workload:
    """One workload as the metrics show it; times are Unix seconds."""

    name: str
    service: str = ""
    queue: str = ""
    level: str = ""
    state: str = "running"
    submitted: float | None = None
    gpus: float | None = None
    host: str = ""
    devices: tuple[str, ...] = ()

    @property
    def rank(self) -> int | None:
        """0 for P0; None for a level that is not known."""
        return int(self.level[1:]) if self.level[:1] == "P" and self.level[1:].isdigit() else None


@dataclass(frozen=True)
class Blame:
    """The scheduler's account that ``culprit`` held what ``victim`` waits for, and how strong that case is."""

    victim: str
    culprit: str
    basis: str
    gpu_seconds: float


@dataclass(frozen=True)
class Device:
    """One GPU. Bytes; None where not known."""

    name: str
    host: str = ""
    model: str = ""
    total: float | None = None
    free: float | None = None
    largest_free: float | None = None


@dataclass
class ClusterView:
    """Everything that the metrics say about workloads, queues and GPUs."""

    workloads: dict[str, Workload] = field(default_factory=dict)
    blames: list[Blame] = field(default_factory=list)
    devices: dict[str, Device] = field(default_factory=dict)
    waits: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    violations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: (host, service) of pods that serve.
    pods: dict[str, tuple[str, str]] = field(default_factory=dict)
    schedulers: tuple[str, ...] = ()


def in_cluster(series: Sequence[Series], label: str, cluster: str) -> tuple[Series, ...]:
    """Those of the alert's cluster, where any is marked so; else all, since then the label means something else."""
    mine = tuple(item for item in series if item.labels.get(label) == cluster)
    return mine if cluster and mine else tuple(series)


def read_scheduler(
    answers: Mapping[str, Sequence[Series]], config: CaptureConfig, cluster: str, end: float, points: Points
) -> ClusterView:
    """Read the answers to `scheduler_queries`; adds queue metrics and waits to ``points``.

    Args:
        end: end of the incident window; who waits no longer then is no longer pending.
    """
    label, step = config.labels.cluster, config.step_seconds
    mine = {what: in_cluster(series, label, cluster) for what, series in answers.items()}
    view = ClusterView()
    for series in mine.get("waiting", ()):
        name, service, queue, level = by(series.labels, "workload", "service", "queue", "priority_level")
        if name in ("", "overflow"):
            continue
        # The same workload may change its queue or level: the longest-lasting series tells.
        times, values = series.times, series.values
        if name in view.waits:
            earlier = view.waits[name]
            times, values = _merged(earlier, (times, values))
        view.waits[name] = (times, values)
        still = times[-1] >= end - 3 * step
        view.workloads[name] = Workload(
            name,
            service=service,
            queue=queue,
            level=level,
            state="pending" if still else "unknown",
            submitted=float(np.median(times - values)),
        )
    for series in mine.get("violations", ()):
        name, kind = by(series.labels, "workload", "violation_type")
        if name:
            view.violations[name] = tuple(sorted({*view.violations.get(name, ()), kind}))
            _seen(view, name, *by(series.labels, "service", "priority_level"))
    strongest: dict[tuple[str, str], Blame] = {}
    for series in sorted(mine.get("culprits", ()), key=lambda item: float(item.times[-1])):
        victim, culprit, basis = by(series.labels, "workload", "culprit", "basis")
        if not victim or not culprit:
            continue
        _seen(view, victim, *by(series.labels, "service", "priority_level"))
        service, level = by(series.labels, "culprit_service", "culprit_priority_level")
        _seen(view, culprit, service, level)
        if view.workloads[culprit].state == "unknown":
            view.workloads[culprit] = replace(view.workloads[culprit], state="running")
        gpus = _slope(series.times, series.values)
        if gpus is not None:
            view.workloads[culprit] = replace(view.workloads[culprit], gpus=gpus)
        strongest[(victim, culprit)] = Blame(victim, culprit, basis, float(series.values[-1]))
        points.add(victim, "blocking_gpu_seconds", series.times, series.values, culprit)
    view.blames = list(strongest.values())
    _queues(mine, points)
    view.schedulers = tuple(
        sorted({series.labels.get("source", "") for series in answers.get("exporters", ())} & {"slurm", "kubernetes"})
    )
    return view


def blind_times(answers: Mapping[str, Sequence[Series]]) -> list[str]:
    """Exporters that could not see their source at some time, in words."""
    return [
        f"the exporter of {series.labels.get('source') or 'a source'} could not read it in "
        f"{int((series.values < 1).sum())} of {len(series.values)} samples"
        for series in answers.get("exporters", ())
        if (series.values < 1).any()
    ]


def _seen(view: ClusterView, name: str, service: str, level: str) -> None:
    if name not in view.workloads:
        view.workloads[name] = Workload(name, service=service, level=level, state="unknown")


def _merged(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    times, place = np.unique(np.concatenate([first[0], second[0]]), return_index=True)
    return times, np.concatenate([first[1], second[1]])[place]


def _slope(times: Floats, values: Floats) -> float | None:
    """GPUs that were held while GPU-seconds grew; None when that cannot be told."""
    if len(times) < 3 or times[-1] <= times[0]:
        return None
    found = float(values[-1] - values[0]) / float(times[-1] - times[0])
    return round(found, 2) if found > 0 else None


def queue_node(queue: str) -> str:
    """Node of a queue: its own name may be that of a service or of a host."""
    return f"queue/{queue}"


def _queues(answers: Mapping[str, Sequence[Series]], points: Points) -> None:
    """Depth and oldest wait of each queue; where nothing waits, the wait is 0, because the exporter says so."""
    depth: dict[str, dict[float, float]] = {}
    for what in ("known workloads", "queue depth"):
        for series in answers.get(what, ()):
            grid = depth.setdefault(series.labels.get("queue", ""), {})
            for time, value in zip(series.times.tolist(), series.values.tolist(), strict=True):
                # A queue that has workloads, none of them waiting, has a depth of 0.
                grid[time] = grid.get(time, 0.0) + (value if what == "queue depth" else 0.0)
    oldest: dict[str, dict[float, float]] = {}
    for series in answers.get("oldest wait", ()):
        grid = oldest.setdefault(series.labels.get("queue", ""), {})
        for time, value in zip(series.times.tolist(), series.values.tolist(), strict=True):
            grid[time] = max(value, grid.get(time, 0.0))
    for queue, grid in depth.items():
        if queue in ("", "overflow"):
            continue
        times = np.array(sorted(grid))
        values = np.array([grid[t] for t in times.tolist()])
        points.add(queue_node(queue), "queue_depth", times, values)
        waits = oldest.get(queue, {})
        known = [(t, waits.get(t, 0.0 if grid[t] == 0 else np.nan)) for t in times.tolist()]
        points.add(queue_node(queue), "queue_wait_seconds", times, np.array([value for _, value in known]))


def wait_of(
    name: str, view: ClusterView, answers: Mapping[str, Sequence[Series]], config: CaptureConfig, cluster: str
) -> tuple[Floats, Floats]:
    """How long workload ``name`` waited; before it was submitted, how long others of its queue and level did.

    What waited longest of that queue and level stands for its usual wait; where the exporter counted none waiting, that
    is 0. Times at which the exporter said nothing have no value.
    """
    workload = view.workloads[name]
    times, values = view.waits.get(name, (np.zeros(0), np.zeros(0)))
    begin = float(times[0]) if len(times) else np.inf
    label = config.labels.cluster

    def mine(what: str) -> tuple[Series, ...]:
        key = (workload.queue, workload.level)
        return tuple(
            series
            for series in in_cluster(answers.get(what, ()), label, cluster)
            if by(series.labels, "queue", "priority_level") == key
        )

    before: dict[float, float] = {}
    looked = sorted(
        {t for what in ("known workloads", "exporters") for s in answers.get(what, ()) for t in _healthy(what, s)}
    )
    waiting = {t: v for s in mine("queue depth") for t, v in zip(s.times.tolist(), s.values.tolist(), strict=True)}
    for t in looked:
        if t < begin and waiting.get(t, 0.0) == 0.0:
            before[t] = 0.0
    for series in mine("oldest wait"):
        for t, value in zip(series.times.tolist(), series.values.tolist(), strict=True):
            before |= {t: value} if t < begin else {}
    stamps = np.array(sorted(before))
    return np.concatenate([stamps, times]), np.concatenate([[before[t] for t in stamps.tolist()], values])


def _healthy(what: str, series: Series) -> list[float]:
    """Times at which the scheduler was looked at: its workloads are listed, or its exporter could read it."""
    if what == "exporters":
        if series.labels.get("source") not in ("slurm", "kubernetes", "file"):
            return []
        return [float(t) for t in series.times[series.values >= 1]]
    return [float(t) for t in series.times]


def read_devices(
    answers: Mapping[str, Sequence[Series]], config: CaptureConfig, view: ClusterView, points: Points
) -> None:
    """Read the answers to `device_queries` into ``view`` and ``points``; our exporter's word goes before DCGM's."""
    names: dict[str, str] = {}

    def ours(series: Series) -> str:
        host, gpu, uuid = by(series.labels, config.labels.host, config.labels.gpu, "uuid")
        return _device(view, names, host, gpu, uuid)

    latest: dict[tuple[str, str], float] = {}
    grids: dict[tuple[str, str], dict[float, float]] = {}
    for what in (
        "GPU utilisation", "GPU memory used", "GPU memory", "GPU memory fragmentation", "allocator free",
        "allocator largest free", "GPU model",
    ):  # fmt: skip
        for series in answers.get(what, ()):
            name = ours(series)
            latest[(name, what)] = float(series.values[-1])
            grids[(name, what)] = dict(zip(series.times.tolist(), series.values.tolist(), strict=True))
            if what == "GPU model":
                view.devices[name] = replace(view.devices[name], model=series.labels.get("model", ""))
    known = {name for name, _ in grids}
    for what, ours_is in (
        ("DCGM utilisation", "GPU utilisation"), ("DCGM memory used", "GPU memory used"),
        ("DCGM memory free", "DCGM memory free"),
    ):  # fmt: skip
        for series in answers.get(what, ()):
            host, gpu, uuid, model = by(series.labels, "Hostname", "gpu", "UUID", "modelName")
            name = names.get(uuid) or _device(view, names, host, gpu, uuid)
            if model and not view.devices[name].model:
                view.devices[name] = replace(view.devices[name], model=model)
            _holder_of(view, name, *_dcgm_pod(series.labels))
            if name in known and (name, ours_is) in grids:
                continue
            scale = 0.01 if what == "DCGM utilisation" else _MIB
            latest[(name, ours_is)] = float(series.values[-1]) * scale
            grids[(name, ours_is)] = dict(zip(series.times.tolist(), (series.values * scale).tolist(), strict=True))
    _device_points(view, grids, latest, points)
    _processes(answers.get("GPU processes", ()), ours, view, grids, points)


def _device(view: ClusterView, names: dict[str, str], host: str, gpu: str, uuid: str) -> str:
    name = names.get(uuid) or (f"{host}/gpu-{gpu}" if host and gpu else uuid or f"gpu-{gpu}")
    if uuid:
        names[uuid] = name
    view.devices.setdefault(name, Device(name, host))
    return name


def _device_points(
    view: ClusterView,
    grids: Mapping[tuple[str, str], dict[float, float]],
    latest: Mapping[tuple[str, str], float],
    points: Points,
) -> None:
    for name, device in list(view.devices.items()):
        used, total = grids.get((name, "GPU memory used"), {}), grids.get((name, "GPU memory"), {})
        free = grids.get((name, "DCGM memory free"), {})
        for what, metric in (
            ("GPU utilisation", "gpu_utilization_ratio"),
            ("GPU memory fragmentation", "gpu_fragmentation_ratio"),
        ):
            grid = grids.get((name, what), {})
            times = sorted(grid)
            points.add(name, metric, np.array(times), np.array([grid[t] for t in times]))
        share = {t: used[t] / whole for t in used if (whole := total.get(t) or used[t] + free.get(t, np.nan)) > 0}
        points.add(
            name, "gpu_memory_utilization_ratio", np.array(sorted(share)), np.array([share[t] for t in sorted(share)])
        )
        whole_bytes, used_bytes = latest.get((name, "GPU memory")), latest.get((name, "GPU memory used"))
        free_bytes = latest.get((name, "DCGM memory free"))
        if free_bytes is None and whole_bytes is not None and used_bytes is not None:
            free_bytes = max(0.0, whole_bytes - used_bytes)
        if whole_bytes is None and free_bytes is not None and used_bytes is not None:
            whole_bytes = free_bytes + used_bytes
        # The allocator's free memory is what its process can use; the device's free memory, what a new one could.
        if (inside := latest.get((name, "allocator free"))) is not None:
            free_bytes = inside
        view.devices[name] = replace(
            device, total=whole_bytes, free=free_bytes, largest_free=latest.get((name, "allocator largest free"))
        )


def _processes(
    answers: Sequence[Series],
    name_of: Callable[[Series], str],
    view: ClusterView,
    grids: Mapping[tuple[str, str], dict[float, float]],
    points: Points,
) -> None:
    """Who has memory on which GPU: the workloads' devices, and their own share of each."""
    residents: dict[str, set[str]] = {}
    memory: dict[str, dict[float, float]] = {}
    totals: dict[str, dict[float, float]] = {}
    for series in answers:
        device = name_of(series)
        workload, namespace, pod, job = by(series.labels, "workload", "namespace", "pod", "slurm_job")
        holder = _holder_of(view, device, namespace, pod, workload or job)
        if not holder:
            continue
        residents.setdefault(device, set()).add(holder)
        mine, whole = memory.setdefault(holder, {}), totals.setdefault(holder, {})
        size = grids.get((device, "GPU memory"), {})
        for time, value in zip(series.times.tolist(), series.values.tolist(), strict=True):
            if time in size:
                mine[time] = mine.get(time, 0.0) + value
                whole[time] = whole.get(time, 0.0) + size[time]
    for holder, grid in memory.items():
        times = sorted(grid)
        share = np.array([grid[t] / totals[holder][t] for t in times])
        points.add(holder, "gpu_memory_utilization_ratio", np.array(times), share)
    for device, holders in residents.items():
        if len(holders) == 1:
            # Alone on it, a workload is what keeps the device busy.
            (holder,) = holders
            busy = grids.get((device, "GPU utilisation"), {})
            times = sorted(set(busy) & set(memory.get(holder, {})))
            if len(view.workloads[holder].devices) == 1:
                points.add(holder, "gpu_utilization_ratio", np.array(times), np.array([busy[t] for t in times]))


def _dcgm_pod(labels: Mapping[str, str]) -> tuple[str, str]:
    # Prometheus renames labels that collide with those of the scrape target.
    return (
        labels.get("exported_namespace") or labels.get("namespace", ""),
        labels.get("exported_pod") or labels.get("pod", ""),
    )


def _holder_of(view: ClusterView, device: str, namespace: str, pod: str, workload: str = "") -> str:
    """Note that a workload has ``device``; return its name, "" when nobody is named."""
    name = workload or (f"{namespace}/{pod}" if namespace and pod else pod)
    if not name:
        return ""
    have = view.workloads.get(name) or Workload(name, service="")
    service = have.service or (strip_pod_suffix(pod) if pod else "")
    # Whoever has memory on a GPU runs, whatever the scheduler's view last said.
    state = have.state if have.state == "pending" else "running"
    devices = tuple(sorted({*have.devices, device}))
    view.workloads[name] = replace(
        have, service=service, state=state, devices=devices, host=have.host or view.devices[device].host
    )
    if pod:
        view.pods.setdefault(pod, (view.devices[device].host, service))
    return name


def read_pods(answers: Mapping[str, Sequence[Series]], view: ClusterView) -> None:
    """Read the answers to `pod_queries`: hosts, and services by application label or by the pod's name."""
    applications = {}
    for series in answers.get("pod labels", ()):
        pod, name, app = by(series.labels, "pod", "label_app_kubernetes_io_name", "label_app")
        if name or app:
            applications[pod] = name or app
    for series in answers.get("pods", ()):
        namespace, pod, host = by(series.labels, "namespace", "pod", "node")
        service = applications.get(pod) or view.pods.get(pod, ("", ""))[1] or strip_pod_suffix(pod)
        view.pods[pod] = (host, service)
        name = f"{namespace}/{pod}"
        if name in view.workloads:
            view.workloads[name] = replace(
                view.workloads[name], service=service, host=host or view.workloads[name].host
            )
