"""What every replay must keep to, whatever the trace and the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rca.errors import InvalidInputError
from rca.replay.engine import replay
from rca.replay.model import Backfill, Cluster, Engine, Failure, Options, Result, Status, Trace, Workloads
from rca.replay.policies import NAMES, resolve
from rca.replay.typical import typical_tasks

SMALL = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def traces(draw: st.DrawFn, largest: int = 25, gangs: bool = True) -> Trace:
    """Small clusters with some of everything: shares, whole GPUs, models, MIG, gangs, SLOs."""
    nodes = draw(st.integers(1, 4))
    cluster = Cluster.of(
        draw(st.lists(st.integers(0, 4), min_size=nodes, max_size=nodes)),
        cpu_milli=[8000] * nodes,
        memory_mib=[4096] * nodes,
        model=draw(st.lists(st.sampled_from(["A", "B"]), min_size=nodes, max_size=nodes)),
        mig=draw(st.lists(st.sampled_from([False, False, False, True]), min_size=nodes, max_size=nodes)),
    )
    size = draw(st.integers(1, largest))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=size, max_size=size))

    count = np.array(column(st.integers(0, 4)))
    mig = np.array(column(st.sampled_from([-1, -1, -1, -1, 0, 3])))
    rank = np.array(column(st.integers(0, 3)))
    return Trace(
        cluster,
        Workloads.of(
            np.array(column(st.integers(0, 60)), float),
            np.array(column(st.integers(1, 40)), float),
            gpu_count=count,
            gpu_milli=np.where(count == 1, column(st.sampled_from([200, 500, 700, 1000])), 1000),
            mig=mig,
            cpu_milli=column(st.integers(0, 5000)),
            memory_mib=column(st.integers(0, 2048)),
            models=column(st.sampled_from([0, 0, 1, 2])),
            rank=rank,
            preemptible=column(st.booleans()),
            wait_slo=np.array([10.0, 30.0, 100.0, np.inf])[rank],
            gang=column(st.sampled_from([-1, -1, -1, 0, 1])) if gangs else -1,
            tenant=column(st.sampled_from(["red", "blue"])),
            service=column(st.sampled_from(["web", "train"])),
        ),
    )


policies = st.sampled_from(sorted(NAMES))
backfills = st.sampled_from(list(Backfill))


def held_at(result: Result, moment: float) -> np.ndarray:
    """Rows whose last run covers ``moment`` (runs are closed at the start, open at the end)."""
    ended = np.where(np.isfinite(result.end), result.end, np.inf)
    return np.flatnonzero((result.node >= 0) & (result.start <= moment) & (moment < ended))


def moments(result: Result) -> list[float]:
    return sorted(set(result.start[np.isfinite(result.start)].tolist()))


def assert_nothing_over_committed(result: Result) -> None:
    cluster, work = result.trace.cluster, result.trace.workloads
    for moment in moments(result):
        rows = held_at(result, moment)
        for node in range(len(cluster)):
            here = rows[result.node[rows] == node]
            assert work.cpu_milli[here].sum() <= cluster.cpu_milli[node]
            assert work.memory_mib[here].sum() <= cluster.memory_mib[node]
            for device in range(int(cluster.gpus[node])):
                on = here[(result.devices[here] >> device & 1) == 1]
                assert work.gpu_milli[on].sum() <= 1000
    assert np.all(
        np.bitwise_count(result.devices[result.node >= 0].astype(np.uint64)) == work.gpu_count[result.node >= 0]
    )
    assert result.series.used_milli.max(initial=0) <= cluster.capacity_milli


@SMALL
@given(traces(), policies, backfills, st.booleans())
def test_nothing_is_over_committed_and_constraints_hold(
    trace: Trace, policy: str, backfill: Backfill, preemption: bool
) -> None:
    result = replay(trace, resolve(policy), Options(backfill=backfill, preemption=preemption))
    assert_nothing_over_committed(result)
    work, cluster = trace.workloads, trace.cluster
    ran = np.flatnonzero(result.node >= 0)
    named = ran[work.models[ran] != 0]
    assert np.all(1 << cluster.model[result.node[named]] & work.models[named])
    assert np.all(cluster.mig[result.node[ran]] | (work.mig[ran] < 0))
    assert np.all(result.first_start[ran] >= work.submit[ran])


@SMALL
@given(traces(), policies, backfills, st.sampled_from([0.0, 7.0, np.inf]))
def test_work_is_conserved(trace: Trace, policy: str, backfill: Backfill, checkpoint: float) -> None:
    """GPU-seconds held are the work plus what interruptions cost, to the last second."""
    options = Options(backfill=backfill, preemption=True, checkpoint_seconds=checkpoint, restart_seconds=3.0)
    result = replay(trace, resolve(policy), options)
    done = result.status == Status.FINISHED
    work = trace.workloads
    if not np.all(done | (result.status == Status.UNPLACEABLE) | (result.status == Status.WAITING)):
        pytest.fail(f"unexpected states {result.status}")
    if (result.status == Status.WAITING).any() and result.preemptions[result.status == Status.WAITING].any():
        return  # a gang that was stopped and cannot come back keeps what it did: nothing to balance
    held = float((np.diff(result.series.time) * result.series.used_milli[:-1]).sum())
    assert held == pytest.approx(float(((work.duration + result.lost_seconds) * work.demand_milli)[done].sum()))


@SMALL
@given(traces(gangs=False), st.sampled_from(["fcfs", "best-fit", "fgd", "packing", "sjf", "priority"]))
def test_nothing_waits_beside_resources_that_would_fit_it(trace: Trace, policy: str) -> None:
    """Greedy backfill leaves no waiting workload that would fit a node as it is."""
    result = replay(trace, resolve(policy), Options(backfill=Backfill.GREEDY))
    cluster, work = trace.cluster, trace.workloads
    for moment in moments(result):
        rows = held_at(result, moment)
        free = [[1000] * int(gpus) for gpus in cluster.gpus]
        cpu, memory = cluster.cpu_milli.copy(), cluster.memory_mib.copy()
        for row in rows:
            node = int(result.node[row])
            cpu[node] -= work.cpu_milli[row]
            memory[node] -= work.memory_mib[row]
            for device in range(len(free[node])):
                if int(result.devices[row]) >> device & 1:
                    free[node][device] -= int(work.gpu_milli[row])
        waiting = (work.submit <= moment) & (result.start > moment) & (work.mig < 0)
        for row in np.flatnonzero(waiting):
            for node in np.flatnonzero(~cluster.mig):
                fits = (
                    cpu[node] >= work.cpu_milli[row]
                    and memory[node] >= work.memory_mib[row]
                    and sum(left >= work.gpu_milli[row] for left in free[node]) >= work.gpu_count[row]
                    and (not work.models[row] or 1 << int(cluster.model[node]) & int(work.models[row]))
                )
                assert not fits, f"{work.names[row]} would fit node {node} at {moment}"


FAIR = ["fcfs", "static-wrr", "memory-reservation", "edf", "edf-compensated", "urgency-weight", "tchebycheff", "random"]


@SMALL
@given(traces(gangs=False), st.sampled_from(FAIR), backfills)
def test_nobody_starves_under_a_fair_policy(trace: Trace, policy: str, backfill: Backfill) -> None:
    result = replay(trace, resolve(policy), Options(backfill=backfill))
    assert np.all((result.status == Status.FINISHED) | (result.status == Status.UNPLACEABLE))


@SMALL
@given(traces(gangs=False))
def test_fcfs_starts_in_the_order_of_submission(trace: Trace) -> None:
    result = replay(trace, resolve("fcfs"))
    ran = np.flatnonzero(result.started)
    order = ran[np.lexsort((trace.workloads.uid[ran], trace.workloads.submit[ran]))]
    assert np.all(np.diff(result.first_start[order]) >= 0)


@SMALL
@given(traces(), policies, backfills, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(trace: Trace, policy: str, backfill: Backfill, random: Any) -> None:
    options = Options(backfill=backfill, preemption=True, seed=3)
    rows = list(range(len(trace.workloads)))
    random.shuffle(rows)
    work = trace.workloads
    if len({(gang, submit) for gang, submit in zip(work.gang, work.submit, strict=True) if gang >= 0}) != np.sum(
        work.gang >= 0
    ):
        work = replace(work, gang=np.full(len(work), -1))  # members of a gang are placed in the order of their rows
        trace = replace(trace, workloads=work)
    if (work.gang >= 0).any():
        return
    first = replay(trace, resolve(policy), options)
    second = replay(replace(trace, workloads=work.select(np.array(rows))), resolve(policy), options)
    np.testing.assert_array_equal(first.start[rows], second.start)
    np.testing.assert_array_equal(first.node[rows], second.node)


@SMALL
@given(traces(), policies, st.integers(0, 5))
def test_the_same_seed_gives_the_same_result(trace: Trace, policy: str, seed: int) -> None:
    options = Options(backfill=Backfill.GREEDY, preemption=True, seed=seed)
    first, second = (replay(trace, resolve(policy), options) for _ in range(2))
    for name in ("status", "start", "end", "node", "devices", "preemptions"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@SMALL
@given(traces(gangs=False), policies)
def test_a_change_touches_only_what_comes_after_it(trace: Trace, policy: str) -> None:
    """Without the workload that arrives last, everything that started before its arrival started the same."""
    work = trace.workloads
    last = int(np.lexsort((work.uid, work.submit))[-1])
    options = Options(backfill=Backfill.GREEDY, seed=1)
    typical = typical_tasks(work)
    whole = replay(trace, resolve(policy), options, typical)
    less = replay(trace.without([last]), resolve(policy), options, typical)
    kept = np.delete(np.arange(len(work)), last)
    early = whole.first_start[kept] < work.submit[last]
    np.testing.assert_array_equal(whole.first_start[kept][early], less.first_start[early])
    early &= (whole.preemptions[kept] == 0) & (less.preemptions == 0)  # `node` is that of the last run
    np.testing.assert_array_equal(whole.node[kept][early], less.node[early])


@pytest.mark.slow
def test_compiled_and_interpreted_results_are_identical() -> None:
    pytest.importorskip("numba")

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(traces(), policies, backfills, st.booleans(), st.booleans())
    def same(trace: Trace, policy: str, backfill: Backfill, preemption: bool, compaction: bool) -> None:
        options = Options(
            backfill=backfill, preemption=preemption, compaction=compaction, fragmentation=True,
            failures=(Failure(0, 20.0, 30.0),), quotas={"red": 3000} if "red" in trace.workloads.tenant_names else {},
        )  # fmt: skip
        found = [replay(trace, resolve(policy), replace(options, engine=engine)) for engine in list(Engine)[1:]]
        for name in ("status", "start", "first_start", "end", "node", "devices", "preemptions", "lost_seconds"):
            np.testing.assert_array_equal(getattr(found[0], name), getattr(found[1], name), err_msg=name)
        np.testing.assert_allclose(found[0].series.fragmented, found[1].series.fragmented, atol=1e-6)

    same()


# --- examples --------------------------------------------------------------------------------------------------------


def test_easy_backfill_fills_the_gap_without_delaying_the_head() -> None:
    """One GPU is busy until 10; the head needs both. A short one ends before that, a long one would delay the head."""
    trace = Trace(
        Cluster.of([2]),
        Workloads.of([0, 1, 2, 3], [10, 5, 20, 6], gpu_count=[1, 2, 1, 1], names=["running", "head", "long", "short"]),
    )
    strict = replay(trace, resolve("fcfs"), Options(backfill=Backfill.NONE))
    easy = replay(trace, resolve("fcfs"), Options(backfill=Backfill.EASY))
    greedy = replay(trace, resolve("fcfs"), Options(backfill=Backfill.GREEDY))
    assert strict.start.tolist() == [0, 10, 15, 15]
    assert easy.start.tolist() == [0, 10, 15, 3]
    assert greedy.start.tolist() == [0, 22, 2, 10]


def test_preemption_stops_the_least_loss_and_costs_what_was_not_saved() -> None:
    """Two preemptible trainings of 100 s; the younger has lost 1 s since its checkpoint. Restarting takes 5 s."""
    trace = Trace(
        Cluster.of([1, 1]),
        Workloads.of(
            [0, 4, 25], [100, 100, 10], gpu_count=1, rank=[2, 2, 0], preemptible=[True, True, False],
            names=["old", "young", "urgent"],
        ),
    )  # fmt: skip
    result = replay(trace, resolve("fcfs"), Options(preemption=True, checkpoint_seconds=10.0, restart_seconds=5.0))
    assert result.wait.tolist() == [0, 0, 0]
    assert result.preemptions.tolist() == [0, 1, 0]
    assert result.preempted_by[1] == 2
    assert result.lost_seconds[1] == 1 + 5
    assert result.end[1] == 35 + (100 - 21) + 6


def test_a_gang_starts_together_or_not_at_all() -> None:
    """A gang of three waits for its third GPU; the single that came later overtakes it only with backfill."""
    trace = Trace(
        Cluster.of([1, 1, 1]),
        Workloads.of([0, 1, 1, 1, 2], [10, 5, 5, 5, 3], gpu_count=1, gang=[-1, 7, 7, 7, -1]),
    )
    strict = replay(trace, resolve("fcfs"))
    assert strict.start.tolist() == [0, 10, 10, 10, 15]
    greedy = replay(trace, resolve("fcfs"), Options(backfill=Backfill.GREEDY))
    assert greedy.start.tolist() == [0, 10, 10, 10, 2]


def test_distinct_members_of_a_gang_take_different_nodes() -> None:
    work = Workloads.of([0, 0], [5, 5], gpu_count=1, gang=0, distinct=True)
    assert sorted(replay(Trace(Cluster.of([4, 4]), work), resolve("fcfs")).node.tolist()) == [0, 1]
    alone = replay(Trace(Cluster.of([4]), work), resolve("fcfs"))
    assert alone.status.tolist() == [Status.UNPLACEABLE] * 2


def test_a_failed_node_sends_its_work_back_to_the_queue() -> None:
    trace = Trace(Cluster.of([1]), Workloads.of([0], [100], gpu_count=1))
    options = Options(failures=(Failure(0, 30.0, 50.0),), restart_seconds=0.0)
    result = replay(trace, resolve("fcfs"), options)
    assert (result.preemptions[0], result.preempted_by[0], result.start[0], result.end[0]) == (1, -1, 50, 150)


def test_a_quota_limits_its_tenant_and_nobody_else() -> None:
    trace = Trace(Cluster.of([4]), Workloads.of([0, 1, 2], [10, 10, 10], gpu_count=1, tenant=["red", "red", "blue"]))
    result = replay(trace, resolve("fcfs"), Options(quotas={"red": 1000}))
    assert result.start.tolist() == [0, 10, 2]


def test_a_quota_for_nobody_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="quota for grene"):
        replay(
            Trace(Cluster.of([1]), Workloads.of([0], [1], tenant=["green"])),
            resolve("fcfs"),
            Options(quotas={"grene": 1}),
        )


def test_mig_slices_are_placed_where_the_hardware_allows() -> None:
    """3g fits at slices 0 and 4 only: a 1g at slice 0 leaves room for one 3g, not two."""
    cluster = Cluster.of([1], mig=[True])
    result = replay(Trace(cluster, Workloads.of([0, 1, 2], [9, 9, 9], mig=[0, 3, 3])), resolve("fcfs"))
    assert result.start.tolist() == [0, 1, 9]


def test_compaction_moves_shares_so_that_a_larger_one_fits() -> None:
    """Worst fit puts shares of 400 on two GPUs. Moved to one of them, they leave room for 700."""
    trace = Trace(Cluster.of([2]), Workloads.of([0, 0, 1], [50, 50, 5], gpu_count=1, gpu_milli=[400, 400, 700]))
    assert replay(trace, resolve("worst-fit")).start[2] == 50
    assert replay(trace, resolve("worst-fit"), Options(compaction=True)).start[2] == 1


def test_workloads_leave_when_they_are_cancelled_and_fail_without_retry() -> None:
    work = Workloads.of([0, 1], [10, 10], gpu_count=1, cancel=[np.inf, 5.0])
    result = replay(Trace(Cluster.of([1]), work), resolve("fcfs"))
    assert result.status.tolist() == [Status.FINISHED, Status.CANCELLED]
    assert result.end[1] == 5
    failing = replay(Trace(Cluster.of([1]), work), resolve("fcfs"), Options(retry=False))
    assert failing.status.tolist() == [Status.FINISHED, Status.FAILED]


def test_what_fits_no_empty_node_is_said_to_be_unplaceable() -> None:
    result = replay(Trace(Cluster.of([2]), Workloads.of([0, 1], [1, 1], gpu_count=[3, 1])), resolve("fcfs"))
    assert result.status.tolist() == [Status.UNPLACEABLE, Status.FINISHED]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration": [np.nan]}, "duration nan"),
        ({"gpu_milli": 1500, "gpu_count": 1}, "gpu_milli 1500"),
        ({"pinned": 9}, "pinned 9"),
    ],
)
def test_impossible_values_are_named(change: dict[str, Any], message: str) -> None:
    columns: dict[str, Any] = {"submit": [0.0], "duration": [1.0], **change}
    with pytest.raises(InvalidInputError, match=message):
        replay(
            Trace(Cluster.of([1]), Workloads.of(columns.pop("submit"), columns.pop("duration"), **columns)),
            resolve("fcfs"),
        )
