"""Fragmentation worked by hand for each branch, entropy, queues and policy quality."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.measures import queues
from exporters.measures.contiguity import allocator_contiguity, mig_contiguity
from exporters.measures.entropy import Band, band_of, priority_entropy
from exporters.measures.fragmentation import (
    TaskShare,
    cluster_fragmentation,
    demand_distribution,
    unusable_by,
)
from exporters.measures.quality import QualityWindow
from exporters.model import (
    AllocatorState,
    Constraints,
    Demand,
    Device,
    MigInstance,
    Node,
    NodeState,
    Snapshot,
    Violation,
    ViolationType,
    Workload,
    WorkloadState,
)
from exporters.placement import ClusterView
from exporters.tracker import Start

GIB = 2**30

# Two GPUs wholly free, one 60 % free, one 20 % free: 2800 milli-GPU; 16 free CPUs; 64 GiB.
PARTLY = Node(
    "n",
    gpu_models=("A100",),
    gpu_capacity_milli=4000,
    gpu_free_milli=(1000, 600, 200, 1000),
    cpu_capacity_milli=32_000,
    cpu_allocated_milli=16_000,
    memory_capacity_bytes=128 * GIB,
    memory_allocated_bytes=64 * GIB,
)


@pytest.mark.parametrize(
    ("branch", "demand", "expected"),
    [
        ("fits, a share: what lies on GPUs with less is lost", Demand(gpu_milli=500, cpu_milli=4000), 200),
        ("fits, every GPU has enough", Demand(gpu_milli=200), 0),
        ("fits, whole GPUs: the two shared ones are lost", Demand(gpu_milli=2000, cpu_milli=16_000), 800),
        ("lacks GPU: three whole ones are not there", Demand(gpu_milli=3000), 2800),
        ("lacks CPU", Demand(gpu_milli=500, cpu_milli=16_001), 2800),
        ("lacks memory", Demand(gpu_milli=500, memory_bytes=65 * GIB), 2800),
        ("wrong model", Demand(gpu_milli=500, gpu_models=("H100", "V100")), 2800),
        ("right model, in another case", Demand(gpu_milli=500, gpu_models=("h100", "a100")), 200),
        ("asks for no GPU", Demand(cpu_milli=1000), 2800),
        ("asks for no GPU and lacks CPU", Demand(cpu_milli=64_000), 2800),
    ],
)
def test_what_one_task_cannot_use(branch: str, demand: Demand, expected: float) -> None:
    assert unusable_by(PARTLY, demand) == expected, branch


def test_a_share_too_large_for_any_gpu_loses_all() -> None:
    node = Node("n", gpu_capacity_milli=2000, gpu_free_milli=(300, 400))
    assert unusable_by(node, Demand(gpu_milli=500)) == 700


def view(*nodes: Node, workloads: tuple[Workload, ...] = ()) -> ClusterView:
    return ClusterView(Snapshot(time=1000.0, cluster="c", source="test", nodes=nodes, workloads=workloads))


def test_f_is_the_mean_over_the_observed_demand() -> None:
    shares = (
        TaskShare(Demand(gpu_milli=500), 0.5),
        TaskShare(Demand(gpu_milli=3000), 0.3),
        TaskShare(Demand(), 0.2),
    )
    found = cluster_fragmentation(view(PARTLY), shares)
    assert found.fragmented == pytest.approx(0.5 * 200 + 0.3 * 2800 + 0.2 * 2800)
    assert found.ratio == pytest.approx(1500 / 2800)
    assert (found.capacity, found.free) == (4000, 2800)
    # Two whole GPUs: all of it but 2 (size 1, 2), or nothing, can be used.
    assert found.stranded == {1: 800, 2: 800, 4: 2800, 8: 2800}


def test_the_distribution_counts_pieces_of_live_workloads() -> None:
    live = job("a", demand=Demand(gpu_milli=1000, pieces=3))
    other = job("b", demand=Demand(gpu_milli=500))
    ended = job("c", state=WorkloadState.COMPLETED, demand=Demand(gpu_milli=8000))
    mig = job("d", demand=Demand(mig_profile="1g.10gb", mig_instances=1))
    shares = demand_distribution((live, other, ended, mig))
    assert [(item.demand.gpu_milli, item.share) for item in shares] == [(1000, 0.75), (500, 0.25)]
    assert demand_distribution(()) == ()
    assert demand_distribution((live, other), limit=1)[0].share == 1.0


def test_nodes_that_take_no_work_or_are_not_known_are_left_out() -> None:
    drained = Node("d", state=NodeState.DRAINING, gpu_capacity_milli=8000, gpu_allocated_milli=0)
    unknown = Node("u")
    found = cluster_fragmentation(view(drained, unknown, PARTLY), (TaskShare(Demand(gpu_milli=500), 1.0),))
    assert (found.free, found.fragmented) == (2800, 200)
    assert [item.what for item in found.unread] == ["nodes: u free GPUs"]
    nothing = cluster_fragmentation(view(), ())
    assert (nothing.free, nothing.fragmented, nothing.ratio, nothing.unusable) == (0, None, None, None)


def test_unusable_gpus_are_those_that_no_waiting_workload_may_take() -> None:
    apart = Node("x", partitions=("other",), gpu_capacity_milli=2000, gpu_allocated_milli=0)
    here = Node("h", partitions=("gpu",), gpu_capacity_milli=2000, gpu_free_milli=(1000, 300))
    waiting = job("w", demand=Demand(gpu_milli=1000), constraints=Constraints(partitions=("gpu",)))
    assert cluster_fragmentation(view(apart, here, workloads=(waiting,))).unusable == 2300
    small = job("s", demand=Demand(gpu_milli=300), constraints=Constraints(partitions=("gpu",)))
    assert cluster_fragmentation(view(apart, here, workloads=(waiting, small))).unusable == 2000


amounts = st.integers(0, 1000)
demands = st.builds(
    Demand,
    gpu_milli=st.one_of(st.integers(0, 999), st.sampled_from([1000, 2000, 4000, 8000])),
    cpu_milli=st.one_of(st.none(), st.integers(0, 64_000)),
    memory_bytes=st.one_of(st.none(), st.integers(0, 2**40)),
    gpu_models=st.sampled_from([(), ("A",), ("B",), ("A", "B")]),
)


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    free = tuple(draw(st.lists(amounts, max_size=8)))
    known = draw(st.booleans())
    return Node(
        draw(st.text(min_size=1, max_size=4)),
        gpu_models=draw(st.sampled_from([(), ("A",), ("B",)])),
        gpu_capacity_milli=1000 * len(free),
        gpu_free_milli=free,
        cpu_capacity_milli=64_000 if known else None,
        cpu_allocated_milli=draw(st.integers(0, 80_000)) if known else None,
    )


def reference(node: Node, demand: Demand) -> float:
    """f(n, m) word for word from its definition, one GPU at a time."""
    gpus = node.gpu_free_milli or ()
    whole = demand.gpu_milli >= 1000
    enough_gpu = (
        sum(g >= 1000 for g in gpus) >= demand.gpu_milli // 1000 if whole else any(g >= demand.gpu_milli for g in gpus)
    )
    enough_cpu = node.cpu_free_milli is None or node.cpu_free_milli >= (demand.cpu_milli or 0)
    model = not demand.gpu_models or bool(set(demand.gpu_models) & set(node.gpu_models))
    if demand.gpu_milli == 0 or not (enough_gpu and enough_cpu and model):
        return sum(gpus)
    return sum(g for g in gpus if g < min(demand.gpu_milli, 1000))


@given(st.lists(nodes(), max_size=5), st.lists(st.tuples(demands, st.integers(1, 9)), min_size=1, max_size=6))
def test_f_stays_between_nothing_and_what_is_free(found: list[Node], classes: list[tuple[Demand, int]]) -> None:
    unique = tuple({node.name: node for node in found}.values())
    total = sum(count for _, count in classes)
    shares = tuple(TaskShare(demand, count / total) for demand, count in classes)
    result = cluster_fragmentation(view(*unique), shares)
    by_name = {node.name: node for node in unique}
    for item in result.nodes:
        node = by_name[item.node]
        assert 0 <= item.fragmented <= item.free == sum(node.gpu_free_milli or ())
        expected = sum(share.share * reference(node, share.demand) for share in shares)
        assert item.fragmented == pytest.approx(expected)
    assert result.fragmented is not None
    assert 0 <= result.fragmented <= result.free + 1e-9
    assert result.ratio is None or 0 <= result.ratio <= 1


# --- M1


def test_both_indices_of_an_allocator() -> None:
    states = (
        AllocatorState("1", reserved_bytes=600, free_bytes=200, largest_free_bytes=150),
        AllocatorState("2", reserved_bytes=400, free_bytes=100, largest_free_bytes=50),
    )
    found = allocator_contiguity(states)
    assert found is not None
    assert found.index == pytest.approx(1 - 150 / 1000)
    assert found.ratio == pytest.approx(1 - 150 / 300)


def test_neither_index_without_free_memory() -> None:
    assert allocator_contiguity((AllocatorState("1", reserved_bytes=600, free_bytes=0, largest_free_bytes=0),)) is None
    assert allocator_contiguity(()) is None


def test_mig_slices() -> None:
    instances = (MigInstance("a", "2g.20gb", start=2, size=2), MigInstance("b", "1g.10gb", start=6, size=1))
    device = Device("g", "n", mig_enabled=True, mig_slices=8, mig_instances=instances)
    found = mig_contiguity(device)
    assert found is not None
    # Free: 0 1, 4 5, 7.
    assert (found.largest, found.free, found.total) == (2, 5, 8)
    unknown = Device("g", "n", mig_enabled=True, mig_slices=8, mig_instances=(MigInstance("a", "1g.10gb"),))
    assert mig_contiguity(unknown) is None
    assert mig_contiguity(Device("g", "n")) is None
    full = Device(
        "g", "n", mig_enabled=True, mig_slices=8, mig_instances=(MigInstance("a", "7g.80gb", start=0, size=8),)
    )
    assert mig_contiguity(full) is None


# --- M5 and queues


@pytest.mark.parametrize(
    ("ranks", "bits", "band"),
    [([0, 0, 0], 0.0, Band.SKEWED), ([0, 1], 1.0, Band.UNEVEN), ([0, 1, 2, 3], 2.0, Band.BALANCED)],
)
def test_entropy(ranks: list[int], bits: float, band: Band) -> None:
    assert priority_entropy(ranks) == pytest.approx(bits)
    assert band_of(bits) is band


def test_an_empty_window_has_no_entropy_and_band_edges_are_as_published() -> None:
    assert priority_entropy([]) is None
    assert [band_of(h) for h in (0.79, 0.8, 1.49, 1.5)] == [Band.SKEWED, Band.UNEVEN, Band.UNEVEN, Band.BALANCED]


def job(identity: str, *, state: WorkloadState = WorkloadState.PENDING, **fields: Any) -> Workload:
    defaults: dict[str, Any] = {"queue": "gpu", "rank": 0, "submitted": 900.0}
    return Workload(id=identity, name=identity, state=state, **(defaults | fields))


def test_queues() -> None:
    found = queues.measure(
        Snapshot(
            time=1000.0,
            cluster="c",
            source="test",
            workloads=(
                job("a", demand=Demand(gpu_milli=1000, pieces=2)),
                job("b", submitted=950.0, rank=1, service="web"),
                job("c", submitted=None),
                job("d", state=WorkloadState.RUNNING, demand=Demand(gpu_milli=500)),
                job("e", state=WorkloadState.HELD),
            ),
        )
    )
    assert found.states[("gpu", "P0", "pending")] == 2
    assert found.held == {("gpu", "P0"): 500}
    assert found.requested == {("gpu", "P0"): 2000, ("gpu", "P1"): 0}
    assert found.oldest == {("gpu", "P0"): 100.0, ("gpu", "P1"): 50.0}
    assert found.waits[("b", "web", "gpu", "P1")] == 50.0
    assert ("c", "c", "gpu", "P0") not in found.waits
    assert found.entropy["gpu"] == pytest.approx(0.918, abs=1e-3)


# --- M8


def test_policy_quality_over_a_window() -> None:
    window = QualityWindow(seconds=100)

    def poll(time: float, use: float | None, waits: tuple[float, ...], violating: tuple[str, ...]) -> Any:
        snap = Snapshot(
            time=time,
            cluster="c",
            source="test",
            workloads=(job("a"), job("b")),
            devices=(Device("g", "n", gpu_utilization_ratio=use),),
        )
        found = [Violation(v, ViolationType.INVERSION, "c", v, "", "P0", 0.0) for v in violating]
        return window.update(snap, [Start(job("s"), wait) for wait in waits], found)

    empty = poll(0, None, (), ())
    assert (empty.wait_p95_seconds, empty.violation_ratio, empty.utilization_swing) == (None, 0.0, None)
    poll(10, 0.2, tuple(float(n) for n in range(101)), ("a",))
    found = poll(20, 0.6, (), ())
    assert found.wait_p95_seconds == pytest.approx(95)
    assert found.violation_ratio == 0.5
    # Use between 0.2 and 0.6: 0.4 ± 50 %.
    assert found.utilization_swing == pytest.approx(0.5)
    later = poll(500, 0.5, (), ())
    assert (later.wait_p95_seconds, later.violation_ratio, later.utilization_swing) == (None, 0.0, 0.0)
