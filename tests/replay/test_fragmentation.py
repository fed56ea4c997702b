"""F in the replay is the F of `exporters.measures.fragmentation`; FGD's protocol does what its description says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import fgd
from exporters.measures.fragmentation import cluster_fragmentation
from exporters.model import Node, Snapshot
from exporters.placement import ClusterView
from rca.replay import kernel
from rca.replay.engine import replay
from rca.replay.model import Cluster, Options, Trace, Workloads
from rca.replay.policies import placement, resolve
from rca.replay.typical import Typical, typical_tasks

MIB = 1024 * 1024


@settings(max_examples=60, deadline=None)
@given(
    free=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    cpu=st.integers(0, 64_000),
    memory=st.integers(0, 1000),
    demands=st.lists(
        st.tuples(
            st.sampled_from([0, 100, 300, 500, 1000]), st.integers(1, 8), st.integers(0, 64_000), st.integers(0, 1000),
            st.sampled_from([0, 1, 2, 3]),
        ),
        min_size=1, max_size=20,
    ),
)  # fmt: skip
def test_the_kernel_measures_what_the_exporter_measures(
    free: list[int], cpu: int, memory: int, demands: list[tuple[int, int, int, int, int]]
) -> None:
    milli, count, need_cpu, need_memory, models = (np.array(column) for column in zip(*demands, strict=True))
    work = Workloads.of(
        np.zeros(len(demands)), np.ones(len(demands)), gpu_milli=np.maximum(milli, 1),
        gpu_count=np.where(milli == 0, 0, np.where(milli < 1000, 1, count)),
        cpu_milli=need_cpu, memory_mib=need_memory, models=models,
    )  # fmt: skip
    typical = typical_tasks(work)
    cluster = Cluster.of([len(free), 1], model=["A", "B"])
    node = Node(
        name="n", gpu_models=("A",), gpu_free_milli=tuple(free), gpu_capacity_milli=1000 * len(free),
        cpu_capacity_milli=cpu, cpu_allocated_milli=0, memory_capacity_bytes=memory * MIB, memory_allocated_bytes=0,
    )  # fmt: skip
    snapshot = Snapshot(time=0.0, cluster="c", source="test", nodes=(node,))
    expected = cluster_fragmentation(ClusterView(snapshot), typical.shares(cluster)).fragmented
    problem = kernel_problem(cluster, typical)
    found = kernel.node_fragmentation(problem, np.array(free), len(free), cpu, memory, 1)
    assert found == pytest.approx(expected, abs=1e-6)


def kernel_problem(cluster: Cluster, typical: Typical) -> kernel.Problem:
    """A problem without workloads, for the typical tasks in it."""
    from rca.replay.engine import _Run

    trace = Trace(cluster, Workloads.of([], []))
    return _Run(trace, resolve("fcfs"), Options(fragmentation=True), typical).problem


def test_typical_tasks_are_the_most_frequent_ones_up_to_the_cover() -> None:
    work = Workloads.of([0] * 10, [1] * 10, gpu_count=1, gpu_milli=[500] * 6 + [1000] * 3 + [100])
    assert typical_tasks(work).share.tolist() == pytest.approx([0.1, 0.6, 0.3])
    most = typical_tasks(work, cover=0.9)
    assert most.group_milli.tolist() == [500, 1000]
    assert most.share.tolist() == pytest.approx([6 / 9, 3 / 9])


def test_fgd_keeps_a_whole_gpu_whole_when_whole_ones_are_what_is_asked_for() -> None:
    """A share fits beside the other share or on the free node: only the first keeps room for typical tasks."""
    work = Workloads.of([0, 1, 2], [99, 99, 99], gpu_count=1, gpu_milli=[500, 500, 1000])
    trace = Trace(Cluster.of([1, 1]), work)
    assert replay(trace, resolve("fgd")).node.tolist() == [0, 0, 1]
    assert replay(trace, resolve("worst-fit")).start[2] > 2


@pytest.mark.parametrize("name", ["random", "dot-product", "clustering", "packing", "best-fit", "fgd"])
def test_the_published_placements_fill_a_cluster_completely_with_what_divides_it(name: str) -> None:
    work = Workloads.of(np.arange(8.0), np.full(8, np.inf), gpu_count=1, gpu_milli=500)
    result = replay(Trace(Cluster.of([2, 2]), work), resolve(name), Options(retry=False))
    assert result.started.all()
    assert result.series.used_milli[-1] == 4000


def test_resampling_asks_for_130_percent_and_keeps_every_pod_when_it_grows() -> None:
    pods = Workloads.of(np.zeros(50), np.full(50, np.inf), gpu_count=1, gpu_milli=[100, 500] * 25)
    grown = fgd.resampled(pods, capacity=100_000, seed=42)
    assert grown.demand_milli.sum() == pytest.approx(130_000, abs=500)
    assert set(pods.names) <= set(grown.names)
    shrunk = fgd.resampled(pods, capacity=5_000, seed=42)
    assert shrunk.demand_milli.sum() == pytest.approx(6_500, abs=500)
    assert np.all(np.diff(grown.submit) == 1)


def test_a_column_of_the_table_is_the_mean_around_that_arrival() -> None:
    work = Workloads.of(np.arange(4.0), np.full(4, np.inf), gpu_count=1)
    result = replay(Trace(Cluster.of([4]), work), placement.fgd(100), Options(retry=False, fragmentation=True))
    allocated, fragmented = fgd.at_arrival(result, 50)
    assert (allocated, fragmented) == (50, 0)
