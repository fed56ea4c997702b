"""What pods ask for: quantities, effective requests, QoS class, and GPUs in every documented spelling."""

from __future__ import annotations

from typing import Any

import pytest
from kube_objects import container, pod, raw

from exporters.model import QosClass
from exporters.sources.kubernetes.records import parse_pod
from exporters.sources.kubernetes.resources import Container, GpuRequest, effective_requests, gpu_request, scaled

MIB, GIB = 1024**2, 1024**3


@pytest.mark.parametrize(
    ("text", "scale", "amount"),
    [
        ("100m", 1000, 100),
        ("2", 1000, 2000),
        ("0.1", 1000, 100),
        ("1n", 1000, 1),
        ("64Gi", 1, 64 * GIB),
        ("129M", 1, 129_000_000),
        ("128974848", 1, 128_974_848),
        ("1e3", 1, 1000),
        ("12E6", 1, 12_000_000),
        ("1E", 1, 10**18),
    ],
)
def test_quantities_are_exact_and_rounded_up(text: str, scale: int, amount: int) -> None:
    assert scaled(text, scale) == amount


@pytest.mark.parametrize("text", ["", "abc", "-1", "1e400", "NaN", "Infinity", "1kb"])
def test_malformed_quantities_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|range"):
        scaled(text)


def cpu(amount: int, *, sidecar: bool = False) -> Container:
    return Container({"cpu": amount}, {}, sidecar)


@pytest.mark.parametrize(
    ("containers", "init", "milli"),
    [
        ([cpu(100), cpu(200)], [], 300),
        ([cpu(100)], [cpu(500)], 500),
        ([cpu(700)], [cpu(500), cpu(600)], 700),
        # A sidecar runs beside the containers, and beside the init containers that come after it.
        ([cpu(100)], [cpu(50, sidecar=True)], 150),
        ([cpu(100)], [cpu(50, sidecar=True), cpu(300)], 350),
        ([cpu(100)], [cpu(300), cpu(50, sidecar=True)], 300),
    ],
)
def test_effective_requests_follow_the_phases_of_a_pod(
    containers: list[Container], init: list[Container], milli: int
) -> None:
    assert effective_requests(containers, init)["cpu"] == milli


def test_overhead_and_pod_level_requests_count() -> None:
    level = Container({"cpu": 1000}, {})
    assert effective_requests([cpu(100)], overhead={"cpu": 30}) == {"cpu": 130}
    assert effective_requests([cpu(100)], overhead={"cpu": 30}, pod_level=level) == {"cpu": 1030}


def test_a_limit_without_a_request_is_the_request() -> None:
    assert effective_requests([Container({}, {"nvidia.com/gpu": 2})]) == {"nvidia.com/gpu": 2}


FULL = {"cpu": "1", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([container(FULL, FULL)], QosClass.GUARANTEED),
        ([container(FULL)], QosClass.GUARANTEED),
        ([container(FULL, {"cpu": "500m", "memory": "1Gi"})], QosClass.BURSTABLE),
        ([container(FULL, FULL), container()], QosClass.BURSTABLE),
        ([container({"cpu": "1"})], QosClass.BURSTABLE),
        ([container({}, {"memory": "1Gi"})], QosClass.BURSTABLE),
        ([container()], QosClass.BEST_EFFORT),
        # Zero is nothing, and extended resources do not count.
        ([container({"cpu": "0"}, {"cpu": "0"})], QosClass.BEST_EFFORT),
        ([container({"nvidia.com/gpu": "8"})], QosClass.BEST_EFFORT),
    ],
)
def test_qos_class_is_computed_when_the_server_gives_none(containers: list[dict[str, Any]], expected: QosClass) -> None:
    assert parse_pod(raw(pod(containers=containers))).qos is expected


def test_an_init_container_without_limits_makes_a_pod_burstable() -> None:
    item = pod(containers=[container(FULL, FULL)], initContainers=[container()])
    assert parse_pod(raw(item)).qos is QosClass.BURSTABLE


def test_the_servers_qos_class_wins() -> None:
    item = pod(containers=[container()])
    item["status"]["qosClass"] = "Guaranteed"
    assert parse_pod(raw(item)).qos is QosClass.GUARANTEED


@pytest.mark.parametrize(
    ("requests", "annotations", "labels", "expected"),
    [
        ({"nvidia.com/gpu": 2}, {}, {}, GpuRequest(count=2)),
        ({"amd.com/gpu": 1}, {}, {}, GpuRequest(count=1)),
        ({"nvidia.com/gpu.shared": 1}, {}, {}, GpuRequest(slices=1)),
        ({"nvidia.com/mig-1g.5gb": 3}, {}, {}, GpuRequest(mig=(("1g.5gb", 3),))),
        ({"nvidia.com/mig-1g.10gb.me": 1}, {}, {}, GpuRequest(mig=(("1g.10gb.me", 1),))),
        # HAMi
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, {}, {}, GpuRequest(1, memory_bytes=3000 * MIB)),
        ({"nvidia.com/gpu": 2, "nvidia.com/gpumem-percentage": 50}, {}, {}, GpuRequest(2, milli=500)),
        (
            {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30},
            {"hami.io/vgpu-devices-allocated": "GPU-03f69c50-207a,NVIDIA,3000,30:;"},
            {},
            GpuRequest(1, milli=300, memory_bytes=3000 * MIB, groups=("GPU-03f69c50-207a",)),
        ),
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 100}, {}, {}, GpuRequest(1)),
        # Alibaba: GPU memory of the scheduler extender, and the milli-GPU of open GPU share
        (
            {"aliyun.com/gpu-mem": 3},
            {"ALIYUN_COM_GPU_MEM_IDX": "1"},
            {},
            GpuRequest(1, memory_bytes=3 * GIB, units=3, groups=("1",)),
        ),
        (
            {"aliyun.com/gpu-mem": 3},
            {"ALIYUN_COM_GPU_MEM_IDX": "-1"},
            {},
            GpuRequest(1, memory_bytes=3 * GIB, units=3),
        ),
        (
            {},
            {
                "alibabacloud.com/gpu-milli": "460",
                "alibabacloud.com/gpu-count": "1",
                "alibabacloud.com/gpu-index": "2",
                "alibabacloud.com/gpu-card-model": "V100M16|V100M32",
            },
            {},
            GpuRequest(1, milli=460, models=("V100M16", "V100M32"), groups=("2",)),
        ),
        (
            {},
            {
                "alibabacloud.com/gpu-milli": "1000",
                "alibabacloud.com/gpu-count": "2",
                "alibabacloud.com/gpu-index": "2-3",
            },
            {},
            GpuRequest(2, groups=("2", "3")),
        ),
        # run:ai and KAI
        ({}, {"gpu-fraction": "0.5"}, {"runai-gpu-group": "g1"}, GpuRequest(1, milli=500, groups=("g1",))),
        ({}, {"gpu-memory": "2500"}, {}, GpuRequest(1, memory_bytes=2500 * MIB)),
        ({}, {"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"}, {}, GpuRequest(2, milli=250)),
        ({}, {"gpu-fraction": "1"}, {}, GpuRequest(1)),
        ({"cpu": 100}, {}, {}, GpuRequest()),
    ],
)
def test_gpu_requests_in_every_spelling(
    requests: dict[str, int], annotations: dict[str, str], labels: dict[str, str], expected: GpuRequest
) -> None:
    assert gpu_request(requests, annotations, labels) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu-fraction", "half"),
        ("gpu-fraction", "0"),
        ("gpu-fraction", "1.5"),
        ("gpu-fraction", "nan"),
        ("gpu-memory", "2GiB"),
        ("alibabacloud.com/gpu-milli", "-1"),
        ("alibabacloud.com/gpu-milli", "1" * 40),
    ],
)
def test_an_annotation_that_cannot_be_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"annotation {name}"):
        gpu_request({}, {name: value})
