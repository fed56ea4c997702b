"""From snapshots to the exposition: what a Prometheus server would read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from exporters.collectors import ClientCollector, ClusterCollector, device_families
from exporters.exposition import render
from exporters.families import Family
from exporters.model import (
    AllocatorState,
    Demand,
    Device,
    DeviceProcess,
    MigInstance,
    Node,
    Placement,
    Snapshot,
    Unread,
    Workload,
    WorkloadState,
)
from exporters.policy import uniform_policy


def parse(families: Sequence[Family]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = render(families).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def inverted(time: float = 1000.0, count: int = 1) -> Snapshot:
    waiting = tuple(
        Workload(
            f"u{index}", f"u{index}", WorkloadState.PENDING, service="api", queue="gpu", rank=0, submitted=800.0,
            demand=Demand(gpu_milli=1000),
        )
        for index in range(count)
    )  # fmt: skip
    batch = Workload(
        "b", "b", WorkloadState.RUNNING, service="train", queue="gpu", rank=3, submitted=100.0, started=900.0,
        demand=Demand(gpu_milli=2000), placements=(Placement("n1", gpu_milli=2000),),
    )  # fmt: skip
    nodes = (Node("n1", gpu_capacity_milli=4000, gpu_allocated_milli=4000),)
    return Snapshot(time=time, cluster="c", source="test", workloads=(*waiting, batch), nodes=nodes)


def test_an_inversion_shows_and_its_series_end_with_it() -> None:
    collector = ClusterCollector(uniform_policy(60))
    collector.update(inverted())
    found = parse(collector.families())
    violation = {"cluster": "c", "service": "api", "priority_level": "P0", "violation_type": "inversion"}
    assert found[key("priority_violation_total", **violation, basis="dominated")] == 1
    assert found[key("priority_violations_active", **violation, basis="dominated")] == 1
    assert found[key("priority_violation_active_seconds", **violation, basis="dominated", workload="u0")] == 100
    blame = {
        "cluster": "c", "workload": "u0", "service": "api", "priority_level": "P0", "culprit": "b",
        "culprit_service": "train", "culprit_priority_level": "P3", "basis": "dominated",
    }  # fmt: skip
    assert found[key("priority_violation_culprit_gpu_seconds", **blame)] == 200
    assert found[key("gpu_cluster_free_gpus", cluster="c")] == 0
    assert not any(name == "gpu_cluster_fragmentation_ratio" for name, _ in found)

    snap = inverted(1010.0)
    started = msgspec.structs.replace(snap.workloads[0], state=WorkloadState.RUNNING, started=1005.0)
    collector.update(msgspec.structs.replace(snap, workloads=(started, snap.workloads[1])))
    found = parse(collector.families())
    assert not any("active" in name or "culprit" in name for name, _ in found)
    assert found[key("priority_violation_total", **violation, basis="dominated")] == 1
    assert found[key("priority_violation_duration_seconds_sum", **violation)] == 105
    assert found[key("priority_workload_wait_seconds_count", cluster="c", queue="gpu", priority_level="P0")] == 1


def test_workloads_that_could_not_be_read_give_no_queue_figures_and_keep_violations() -> None:
    collector = ClusterCollector(uniform_policy(60))
    collector.update(inverted())
    collector.update(Snapshot(time=1010.0, cluster="c", source="test", unread=(Unread("workloads", "no answer"),)))
    names = {name for name, _ in parse(collector.families())}
    assert "priority_violations_active" in names
    assert "priority_workloads" not in names
    collector.clear()
    assert collector.families() == ()


def test_a_hundred_thousand_names_cannot_flood_the_store() -> None:
    collector = ClusterCollector(
        uniform_policy(60), caps={"priority_violations_active": 50, "priority_violation_total": 50}
    )
    snap = inverted(count=3000)
    named = tuple(
        msgspec.structs.replace(w, service=f"s{w.id}", queue=f"q{w.id}") if w.id != "b" else w for w in snap.workloads
    )
    collector.update(msgspec.structs.replace(snap, workloads=named))
    families = {item.metric.name: item for item in collector.families()}
    for item in families.values():
        assert len(item) <= item.metric.cap + 1
    active = families["priority_violations_active"]
    assert len(active) == 51
    # Each waiter is inverted and late.
    assert sum(value for _, value in active.samples) == 6000
    overflow = dict(families["prioscope_series_overflow_total"].samples)
    assert overflow[("priority_violations_active",)] == 5950
    assert overflow[("priority_violation_total",)] == 5950
    assert overflow[("priority_workload_waiting_seconds",)] == 2800


def test_the_clients_registry_gives_the_same_samples() -> None:
    collector = ClusterCollector(uniform_policy(60))
    collector.update(inverted())
    registry = CollectorRegistry()
    registry.register(ClientCollector(collector.families))
    text = generate_latest(registry).decode()
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }
    assert found == parse(collector.families())


def device(**fields: Any) -> Device:
    return Device("GPU-1", "n1", index=0, **fields)


def test_devices_show_what_is_known_and_nothing_else() -> None:
    families, dropped = device_families(
        [
            device(
                model="H100",
                memory_total_bytes=100,
                memory_used_bytes=0,
                gpu_utilization_ratio=0.0,
                ecc_uncorrected=2,
                throttle_reasons=("sw_power_cap",),
                xid_errors={"79": 1},
                allocated_milli=500,
                mig_enabled=True,
                mig_slices=8,
                mig_instances=(MigInstance("MIG-1", "1g.10gb", start=0, size=1, memory_used_bytes=5),),
                allocators=(AllocatorState("42", reserved_bytes=80, free_bytes=40, largest_free_bytes=10),),
                processes=(DeviceProcess(42, "python", memory_bytes=90, pod="p", namespace="ml"),),
            ),
            Device("GPU-2", "n1", index=1, up=False, reason="lost"),
        ]
    )
    assert dropped == {}
    found = parse(families)
    one = {"node": "n1", "gpu": "0", "uuid": "GPU-1"}
    two = {"node": "n1", "gpu": "1", "uuid": "GPU-2"}
    assert found[key("gpu_up", **one, reason="")] == 1
    assert found[key("gpu_up", **two, reason="lost")] == 0
    assert found[key("gpu_memory_used_bytes", **one)] == 0
    assert found[key("gpu_utilization_ratio", **one)] == 0
    assert found[key("gpu_allocated_ratio", **one)] == 0.5
    assert found[key("gpu_ecc_errors_total", **one, kind="uncorrected")] == 2
    assert found[key("gpu_throttled", **one, reason="sw_power_cap")] == 1
    assert found[key("gpu_xid_errors_total", **one, xid="79")] == 1
    assert found[key("gpu_fragmentation_ratio", **one, scope="allocator")] == 0.75
    assert found[key("gpu_fragmentation_index", **one, scope="allocator")] == 0.875
    assert found[key("gpu_fragmentation_ratio", **one, scope="mig")] == 0
    assert found[key("gpu_mig_memory_used_bytes", **one, mig_instance="MIG-1", profile="1g.10gb")] == 5
    process = {"pid": "42", "process": "python", "workload": "", "namespace": "ml", "pod": "p", "slurm_job": ""}
    assert found[key("gpu_process_memory_bytes", **one, **process)] == 90
    # What is not known is absent, and the lost GPU has nothing but its state.
    assert not any(name == "gpu_power_watts" for name, _ in found)
    assert [name for name, labels in found if ("uuid", "GPU-2") in labels] == ["gpu_up"]
