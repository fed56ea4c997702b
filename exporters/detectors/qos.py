"""V11 QoS mismatch: what Kubernetes does with a pod contradicts the task class that it declares."""

from __future__ import annotations

from collections.abc import Mapping

from exporters.model import Device, Snapshot, Unread, Violation, ViolationType, Workload, violation_id
from exporters.policy import Policy, TaskClass


def detect(snapshot: Snapshot, policy: Policy) -> list[Violation]:
    """Return a mismatch for each live workload that contradicts its declared task class; all gaps are in ``detail``."""
    devices = {device.id: device for device in snapshot.devices}
    found = []
    for workload in snapshot.workloads:
        if not workload.task_class or workload.state.ended:
            continue
        declared = policy.task_classes.get(workload.task_class)
        since = workload.submitted if workload.submitted is not None else workload.started
        if declared is None or since is None:
            continue
        gaps, unchecked = compare(workload, declared, devices)
        if not gaps:
            continue
        found.append(
            Violation(
                id=violation_id(snapshot.cluster, workload.id, ViolationType.QOS_MISMATCH, since),
                type=ViolationType.QOS_MISMATCH,
                cluster=snapshot.cluster,
                victim=workload.id,
                service=workload.display_service,
                level=workload.level,
                rank=workload.rank,
                queue=workload.queue,
                tenant=workload.tenant,
                start=since,
                unchecked=unchecked,
                detail="; ".join(gaps),
            )
        )
    return found


def compare(
    workload: Workload, declared: TaskClass, devices: Mapping[str, Device]
) -> tuple[list[str], tuple[Unread, ...]]:
    """Return what contradicts the class, in words, and what could not be compared."""
    gaps: list[str] = []
    unchecked: list[Unread] = []
    name = declared.name
    if workload.qos_class is None:
        unchecked.append(Unread("qos class", "the source does not give it"))
    elif workload.qos_class is not declared.qos_class:
        gaps.append(f"{name} should be {declared.qos_class}, is {workload.qos_class}")
    pairs = (
        ("restart policy", declared.retry_policy, workload.restart_policy or None),
        ("may preempt", declared.preemption_allowed, workload.may_preempt),
        ("preemptible", declared.preemptible, workload.preemptible),
    )
    for what, wanted, actual in pairs:
        if wanted is None:
            continue
        if actual is None:
            unchecked.append(Unread(what, "the source does not give it"))
        elif wanted != actual:
            gaps.append(f"{what} should be {_word(wanted)}, is {_word(actual)}")
    if declared.gpu_affinity == "required" and not workload.demand.wants_gpu:
        gaps.append(f"{name} needs a GPU and asks for none")
    models = {model.casefold() for model in declared.gpu_models}
    if models and workload.demand.wants_gpu and not models & {m.casefold() for m in workload.demand.gpu_models}:
        gaps.append(f"GPU model should be one of {', '.join(declared.gpu_models)}")
    if declared.min_gpu_utilization is not None and workload.state.holding:
        use = _utilisation(workload, devices)
        if use is None:
            unchecked.append(Unread("gpu utilisation", "not known for every device that it holds"))
        elif use < declared.min_gpu_utilization:
            gaps.append(f"uses {use:.0%} of its GPUs, under the {declared.min_gpu_utilization:.0%} of its class")
    return gaps, tuple(unchecked)


def _utilisation(workload: Workload, devices: Mapping[str, Device]) -> float | None:
    names = [name for placement in workload.placements for name in placement.devices]
    values = [devices[name].gpu_utilization_ratio if name in devices else None for name in names]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _word(value: str | bool) -> str:
    return value if isinstance(value, str) else ("yes" if value else "no")
