"""Detectors on small clusters, each case worked out by hand; inversions also against a brute-force search."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.detectors import delay, detect, fragmentation, inversion, preemption, qos
from exporters.detectors.blocking import Blocking
from exporters.model import (
    Basis,
    Check,
    Constraints,
    Demand,
    Device,
    Event,
    EventKind,
    Node,
    NodeState,
    Placement,
    QosClass,
    Snapshot,
    Taint,
    Toleration,
    Violation,
    ViolationType,
    Workload,
    WorkloadState,
)
from exporters.placement import ClusterView
from exporters.policy import HeldCounts, StartedFrom, TaskClass, default_policy, load_policy, uniform_policy

NOW = 1_000.0
POLICY = uniform_policy(60)


def waiter(identity: str = "urgent", *, rank: int | None = 0, submitted: float = 800.0, **fields: Any) -> Workload:
    fields.setdefault("demand", Demand(gpu_milli=2000))
    return Workload(id=identity, name=identity, state=WorkloadState.PENDING, rank=rank, submitted=submitted, **fields)


def runner(identity: str = "batch", *, rank: int = 3, started: float | None = 850.0, **fields: Any) -> Workload:
    fields.setdefault("demand", Demand(gpu_milli=2000))
    fields.setdefault("placements", (Placement("n1", gpu_milli=2000),))
    return Workload(id=identity, name=identity, state=WorkloadState.RUNNING, rank=rank, started=started, **fields)


def node(name: str = "n1", gpus: int = 2, used: int = 2000, **fields: Any) -> Node:
    return Node(name=name, gpu_capacity_milli=gpus * 1000, gpu_allocated_milli=used, **fields)


def snapshot(*workloads: Workload, nodes: tuple[Node, ...] = (), **fields: Any) -> Snapshot:
    return Snapshot(time=NOW, cluster="c", source="test", workloads=workloads, nodes=nodes, **fields)


def invert(snap: Snapshot, policy: Any = POLICY) -> list[Violation]:
    return inversion.detect(Blocking(ClusterView(snap)), policy)


# --- V1


def test_an_inversion_names_victim_culprit_basis_and_gpu_seconds() -> None:
    (found,) = invert(snapshot(waiter(service="api"), runner(service="train"), nodes=(node(),)))
    assert (found.victim, found.service, found.level, found.basis) == ("urgent", "api", "P0", Basis.DOMINATED)
    (culprit,) = found.culprits
    assert (culprit.workload, culprit.service, culprit.rank) == ("batch", "train", 3)
    # Two GPUs from its start at 850 to 1000.
    assert culprit.gpu_seconds == pytest.approx(2 * 150)
    # The SLO of a wait since 800 ran out at 860.
    assert (found.start, found.limit_seconds, found.duration(NOW)) == (860.0, 60.0, 140.0)
    assert Check.GPU_COUNT in found.checks


def test_identity_is_the_same_in_the_next_poll() -> None:
    snap = snapshot(waiter(), runner(), nodes=(node(),))
    later = msgspec.structs.replace(snap, time=NOW + 15)
    assert [v.id for v in invert(snap)] == [v.id for v in invert(later)]


@pytest.mark.parametrize(
    ("why", "workload"),
    [
        ("within its SLO", waiter(submitted=950.0)),
        ("rank not known", waiter(rank=None)),
        ("no more urgent", waiter(rank=3)),
        ("submit time not known", waiter(submitted=None)),  # type: ignore[arg-type]
        ("held by its user", msgspec.structs.replace(waiter(), state=WorkloadState.HELD)),
        ("not eligible before now", waiter(eligible=990.0)),
        ("another partition", waiter(constraints=Constraints(partitions=("gpu",)))),
        ("another node label", waiter(constraints=Constraints(node_selector={"zone": "b"}))),
        ("a feature the node lacks", waiter(constraints=Constraints(features=("nvlink",)))),
        ("excludes the node", waiter(constraints=Constraints(excluded_nodes=("n1",)))),
        ("requires another node", waiter(constraints=Constraints(required_nodes=("n2",)))),
        ("another GPU model", waiter(demand=Demand(gpu_milli=1000, gpu_models=("H100",)))),
        ("more GPU memory", waiter(demand=Demand(gpu_milli=1000, gpu_memory_bytes=80 * 2**30))),
        ("more GPUs than the node has", waiter(demand=Demand(gpu_milli=4000))),
    ],
)
def test_no_inversion(why: str, workload: Workload) -> None:
    where = node(partitions=("cpu",), labels={"zone": "a"}, gpu_models=("A100",), gpu_memory_bytes=40 * 2**30)
    assert invert(snapshot(workload, runner(), nodes=(where,))) == [], why


def test_a_holder_from_before_counts_only_when_preemptible() -> None:
    before = runner(started=100.0)
    assert invert(snapshot(waiter(), before, nodes=(node(),))) == []
    preemptible = msgspec.structs.replace(before, preemptible=True)
    (found,) = invert(snapshot(waiter(), preemptible, nodes=(node(),)))
    assert found.basis is Basis.HELD
    # It is charged for the wait only, not for what it used before.
    assert found.culprits[0].gpu_seconds == pytest.approx(2 * 200)
    anyone = uniform_policy(60, held_counts=HeldCounts.ANY)
    assert len(invert(snapshot(waiter(), before, nodes=(node(),)), anyone)) == 1


def test_a_start_within_the_slo_can_be_left_out_by_policy() -> None:
    snap = snapshot(waiter(), runner(started=850.0), nodes=(node(),))
    assert invert(snap, uniform_policy(60, started_from=StartedFrom.BREACH)) == []
    late = snapshot(waiter(), runner(started=900.0), nodes=(node(),))
    assert len(invert(late, uniform_policy(60, started_from=StartedFrom.BREACH))) == 1


def test_started_without_the_whole_demand_is_not_dominated() -> None:
    needs = waiter(demand=Demand(gpu_milli=2000, cpu_milli=64_000))
    holds = runner(placements=(Placement("n1", gpu_milli=2000, cpu_milli=8_000),))
    (found,) = invert(snapshot(needs, holds, nodes=(node(),)))
    assert found.basis is Basis.STARTED
    unknown = runner(demand=Demand(gpu_milli=2000))
    (found,) = invert(snapshot(needs, unknown, nodes=(node(),)))
    assert found.basis is Basis.STARTED


def test_two_small_holders_on_one_node_block_together_but_not_on_two_nodes() -> None:
    one, two = (runner(n, placements=(Placement("n1", gpu_milli=1000),)) for n in ("b1", "b2"))
    (found,) = invert(snapshot(waiter(), one, two, nodes=(node(),)))
    assert [culprit.workload for culprit in found.culprits] == ["b1", "b2"]
    apart = runner("b2", placements=(Placement("n2", gpu_milli=1000),))
    nodes = (node("n1", gpus=1, used=1000), node("n2", gpus=1, used=1000))
    assert invert(snapshot(waiter(), one, apart, nodes=nodes)) == []
    # Two pieces of one GPU each may lie apart.
    pieces = waiter(demand=Demand(gpu_milli=1000, pieces=2))
    assert len(invert(snapshot(pieces, one, apart, nodes=nodes))) == 1


def test_without_nodes_each_culprit_must_hold_the_gpus_asked_for_and_the_rest_is_reported_as_unchecked() -> None:
    picky = waiter(constraints=Constraints(partitions=("gpu",), unchecked=("pod affinity",)))
    (found,) = invert(snapshot(picky, runner(placements=())))
    assert found.checks[0] is Check.GPU_COUNT
    assert {item.what for item in found.unchecked} >= {"partition", "pod affinity", "node_state"}
    small = runner(placements=(), demand=Demand(gpu_milli=1000))
    assert invert(snapshot(picky, small)) == []


def test_what_lies_on_a_draining_or_tainted_node_is_of_no_use() -> None:
    assert invert(snapshot(waiter(), runner(), nodes=(node(state=NodeState.DRAINING),))) == []
    tainted = node(taints=(Taint("dedicated", "batch"),))
    intolerant = waiter(constraints=Constraints(tolerations=()))
    assert invert(snapshot(intolerant, runner(), nodes=(tainted,))) == []
    tolerant = waiter(constraints=Constraints(tolerations=(Toleration("dedicated", "Equal", "batch"),)))
    assert len(invert(snapshot(tolerant, runner(), nodes=(tainted,)))) == 1


def test_an_exclusive_waiter_needs_the_node_without_anyone_as_urgent() -> None:
    exclusive = waiter(demand=Demand(gpu_milli=1000), constraints=Constraints(exclusive=True))
    low = runner("low", placements=(Placement("n1", gpu_milli=1000),))
    peer = runner("peer", rank=0, placements=(Placement("n1", gpu_milli=1000),))
    assert len(invert(snapshot(exclusive, low, nodes=(node(),)))) == 1
    assert invert(snapshot(exclusive, low, peer, nodes=(node(),))) == []


def test_shares_are_released_on_the_gpu_they_lie_on() -> None:
    shared = Node("n1", gpu_capacity_milli=2000, gpu_free_milli=(400, 400), devices=("g0", "g1"))
    low = runner(placements=(Placement("n1", gpu_milli=300, devices=("g0",)),))
    fits = waiter(demand=Demand(gpu_milli=700))
    assert len(invert(snapshot(fits, low, nodes=(shared,)))) == 1
    # 400 + 300 on one GPU is not 800, though 1100 are free in total.
    assert invert(snapshot(waiter(demand=Demand(gpu_milli=800)), low, nodes=(shared,))) == []


def test_an_unknown_start_of_a_culprit_is_reported() -> None:
    (found,) = invert(snapshot(waiter(), runner(started=None, preemptible=True), nodes=(node(),)))
    assert "start time" in {item.what for item in found.unchecked}
    assert found.culprits[0].gpu_seconds == pytest.approx(2 * 200)


def test_many_culprits_are_counted_and_the_largest_named() -> None:
    crowd = tuple(
        runner(f"b{index:02}", started=801.0 + index, placements=(Placement("n1", gpu_milli=1000),))
        for index in range(40)
    )
    (found,) = invert(snapshot(waiter(), *crowd, nodes=(node(gpus=40, used=40_000),)))
    assert len(found.culprits) == 25
    assert found.culprits[0].workload == "b00"
    assert found.detail.startswith("40 less urgent")


@st.composite
def clusters(draw: st.DrawFn) -> Snapshot:
    count = draw(st.integers(1, 3))
    nodes = []
    workloads = []
    for at in range(count):
        free = draw(st.integers(0, 2))
        used = 0
        for index in range(draw(st.integers(0, 3))):
            gpus = draw(st.integers(1, 2))
            used += gpus
            workloads.append(
                runner(
                    f"r{at}{index}",
                    rank=draw(st.integers(0, 2)),
                    started=draw(st.sampled_from([700.0, 800.0, 850.0, 900.0])),
                    preemptible=draw(st.booleans()),
                    demand=Demand(gpu_milli=gpus * 1000),
                    placements=(Placement(f"n{at}", gpu_milli=gpus * 1000),),
                )
            )
        state = draw(st.sampled_from([NodeState.UP, NodeState.UP, NodeState.DRAINING]))
        partition = draw(st.sampled_from(["a", "b"]))
        nodes.append(node(f"n{at}", gpus=used + free, used=used * 1000, partitions=(partition,), state=state))
    for index in range(draw(st.integers(1, 3))):
        workloads.append(
            waiter(
                f"w{index}",
                rank=draw(st.integers(0, 2)),
                submitted=draw(st.sampled_from([800.0, 890.0, 945.0])),
                demand=Demand(
                    gpu_milli=draw(st.integers(1, 4)) * 1000,
                    pieces=draw(st.integers(1, 2)),
                    distinct_nodes=draw(st.booleans()),
                ),
                constraints=Constraints(partitions=draw(st.sampled_from([(), ("a",), ("a", "b")]))),
            )
        )
    return snapshot(*workloads, nodes=tuple(nodes))


def brute_force(snap: Snapshot, victim: Workload) -> set[str]:
    """Try every way to lay the pieces on nodes once the eligible less urgent holders are gone."""
    assert victim.submitted is not None
    assert victim.rank is not None
    if NOW - victim.submitted <= 60:
        return set()
    free: dict[str, int] = {}
    culprits: dict[str, set[str]] = {}
    for place in snap.nodes:
        allowed = not victim.constraints.partitions or set(place.partitions) & set(victim.constraints.partitions)
        if place.state is not NodeState.UP or not allowed:
            continue
        free[place.name] = sum(place.free_gpus or ()) // 1000
        culprits[place.name] = set()
    for other in snap.workloads:
        where = other.placements[0].node if other.placements else ""
        if other.state is WorkloadState.RUNNING and where in free and (other.rank or 0) > victim.rank:
            assert other.started is not None
            if other.preemptible or other.started > victim.submitted:
                free[where] += other.placements[0].gpu_milli // 1000
                culprits[where].add(other.id)
    need, pieces = victim.demand.gpu_milli // 1000, victim.demand.pieces
    feasible = False
    for layout in product(free, repeat=pieces):
        if victim.demand.distinct_nodes and len(set(layout)) < pieces:
            continue
        if all(layout.count(name) * need <= free[name] for name in set(layout)):
            feasible = True
    if not feasible:
        return set()
    return set().union(*(names for name, names in culprits.items() if free[name] >= need))


@settings(max_examples=300)
@given(clusters())
def test_inversions_agree_with_brute_force(snap: Snapshot) -> None:
    expected = {
        w.id: names for w in snap.workloads if w.state is WorkloadState.PENDING and (names := brute_force(snap, w))
    }
    assert {v.victim: {culprit.workload for culprit in v.culprits} for v in invert(snap)} == expected


# --- V2


def test_a_delay_begins_when_the_slo_runs_out() -> None:
    (found,) = delay.detect(snapshot(waiter(queue="gpu", reason="Resources"), waiter("new", submitted=990.0)), POLICY)
    assert (found.victim, found.queue, found.start, found.detail) == ("urgent", "gpu", 860.0, "Resources")


def test_the_wait_slo_depends_on_the_level() -> None:
    old = [waiter(f"w{rank}", rank=rank, submitted=NOW - 400) for rank in (0, 1, 2, 3)]
    assert {v.victim for v in delay.detect(snapshot(*old), default_policy())} == {"w0", "w1"}


# --- V3


def blocked(snap: Snapshot) -> list[Violation]:
    return fragmentation.detect(ClusterView(snap), POLICY)


def test_fragmentation_blocks_when_the_sum_suffices_and_no_node_does() -> None:
    halves = (node("n1", used=1000), node("n2", used=1000))
    (found,) = blocked(snapshot(waiter(), nodes=halves))
    assert found.type is ViolationType.FRAGMENTATION_BLOCKED
    assert found.detail == "asks for 1 x 2 GPU; 2 GPU free on 2 eligible nodes, where 0 of 1 pieces fit"


@pytest.mark.parametrize(
    ("why", "demand", "nodes"),
    [
        ("a node fits", Demand(gpu_milli=2000), (node("n1", used=0), node("n2"))),
        ("too few in total: scarce", Demand(gpu_milli=2000), (node("n1", used=1000), node("n2", used=2000))),
        ("the other half is draining", Demand(gpu_milli=2000),
         (node("n1", used=1000), node("n2", used=1000, state=NodeState.DRAINING))),
        ("CPU is scarce in total", Demand(gpu_milli=2000, cpu_milli=8000), (
            node("n1", used=1000, cpu_capacity_milli=4000, cpu_allocated_milli=4000),
            node("n2", used=1000, cpu_capacity_milli=4000, cpu_allocated_milli=0))),
        ("free GPUs of a node not known", Demand(gpu_milli=2000), (node("n1", used=1000), Node("n2"))),
        ("asks for no GPU", Demand(cpu_milli=1), (node("n1", used=1000),)),
        ("no nodes known", Demand(gpu_milli=2000), ()),
    ],
)  # fmt: skip
def test_no_fragmentation(why: str, demand: Demand, nodes: tuple[Node, ...]) -> None:
    assert blocked(snapshot(waiter(demand=demand), nodes=nodes)) == [], why


def test_fragmentation_of_shares_of_pieces_of_cpu_and_of_mig() -> None:
    shares = (Node("n1", gpu_capacity_milli=2000, gpu_free_milli=(400, 400)),)
    assert len(blocked(snapshot(waiter(demand=Demand(gpu_milli=700)), nodes=shares))) == 1
    assert blocked(snapshot(waiter(demand=Demand(gpu_milli=400)), nodes=shares)) == []
    gang = waiter(demand=Demand(gpu_milli=2000, pieces=2))
    uneven = (node("n1", gpus=3, used=0), node("n2", gpus=1, used=0))
    assert len(blocked(snapshot(gang, nodes=uneven))) == 1
    # GPUs are free where CPUs are not, and the other way round.
    crossed = (
        node("n1", used=0, cpu_capacity_milli=8000, cpu_allocated_milli=8000),
        node("n2", used=2000, cpu_capacity_milli=8000, cpu_allocated_milli=0),
    )
    assert len(blocked(snapshot(waiter(demand=Demand(gpu_milli=2000, cpu_milli=4000)), nodes=crossed))) == 1
    slices = tuple(
        Node(f"n{i}", gpu_capacity_milli=1000, gpu_allocated_milli=0, mig_free={"1g.10gb": 1}) for i in (1, 2)
    )
    mig = waiter(demand=Demand(mig_profile="1g.10gb", mig_instances=2))
    assert len(blocked(snapshot(mig, nodes=slices))) == 1


def test_a_shared_gpu_without_the_memory_does_not_fit() -> None:
    shared = (
        Node("n1", gpu_capacity_milli=2000, gpu_free_milli=(500, 500), devices=("g0", "g1"), gpu_memory_bytes=80),
    )
    devices = tuple(
        Device(name, "n1", memory_total_bytes=80, memory_used_bytes=used) for name, used in (("g0", 70), ("g1", 10))
    )
    view = ClusterView(snapshot(nodes=shared, devices=devices))
    assert list(view.free_gpus(shared[0], Demand(gpu_milli=500, gpu_memory_bytes=40)) or ()) == [0, 500]


# --- V4


def test_a_preemption_that_is_overdue() -> None:
    low = runner(started=100.0, preemptible=True)
    snap = snapshot(waiter(may_preempt=True), low, nodes=(node(),))
    (found,) = preemption.detect(Blocking(ClusterView(snap)), POLICY)
    # Due since the waiter came at 800, with the default deadline of 60 s.
    assert (found.type, found.start, found.limit_seconds) == (ViolationType.PREEMPTION_FAILED, 860.0, 60.0)
    assert [culprit.workload for culprit in found.culprits] == ["batch"]


@pytest.mark.parametrize(
    ("why", "victim", "holder", "used"),
    [
        ("holder not preemptible", waiter(), runner(started=100.0, preemptible=False), 2000),
        ("not known whether preemptible", waiter(), runner(started=100.0), 2000),
        ("the waiter never preempts", waiter(may_preempt=False), runner(preemptible=True), 2000),
        ("deadline not over", waiter(submitted=950.0), runner(preemptible=True), 2000),
        ("the holder came just now", waiter(), runner(started=990.0, preemptible=True), 2000),
        ("fits in what is free", waiter(), runner(preemptible=True), 0),
        ("would not fit anyway", waiter(demand=Demand(gpu_milli=8000)), runner(preemptible=True), 2000),
    ],
)
def test_no_preemption_is_due(why: str, victim: Workload, holder: Workload, used: int) -> None:
    snap = snapshot(victim, holder, nodes=(node(gpus=4, used=used + 2000) if not used else node(used=used),))
    assert preemption.detect(Blocking(ClusterView(snap)), POLICY) == [], why


def test_a_wrong_way_preemption_and_a_reported_failure() -> None:
    events = (
        Event("e1", EventKind.PREEMPTED, 900.0, workload="urgent", by="batch", rank=0, by_rank=3),
        Event("e2", EventKind.PREEMPTED, 900.0, workload="batch", by="urgent", rank=3, by_rank=0),
        Event("e3", EventKind.PREEMPTED, 900.0, workload="gone", by="urgent"),
        Event("e4", EventKind.PREEMPTION_FAILED, 910.0, workload="urgent", reason="no victims"),
        Event("e5", EventKind.XID, 910.0, device="g0"),
    )
    snap = snapshot(waiter(), runner(started=None), events=events)
    wrong, failed = preemption.detect(Blocking(ClusterView(snap)), POLICY)
    assert (wrong.type, wrong.victim, wrong.culprits[0].workload) == (
        ViolationType.WRONG_WAY_PREEMPTION,
        "urgent",
        "batch",
    )
    assert wrong.end == 900.0
    assert (failed.type, failed.detail) == (ViolationType.PREEMPTION_FAILED, "no victims")


# --- V11


def test_qos_gaps_are_named() -> None:
    policy = load_policy("medical-imaging")
    training = runner(
        "t", submitted=10.0, task_class="critical-training", qos_class=QosClass.BEST_EFFORT, restart_policy="Never"
    )
    (found,) = qos.detect(snapshot(training), policy)
    assert found.start == 10.0
    assert "critical-training should be Guaranteed, is BestEffort" in found.detail
    assert "restart policy should be Always, is Never" in found.detail
    assert {item.what for item in found.unchecked} == {"may preempt", "preemptible"}


def test_guaranteed_inference_at_low_use_is_a_mismatch_and_unknown_use_is_not() -> None:
    policy = load_policy("low-latency-risk-control")
    inference = runner(
        "i",
        submitted=10.0,
        task_class="online-inference",
        qos_class=QosClass.GUARANTEED,
        restart_policy="Always",
        may_preempt=True,
        preemptible=False,
        placements=(Placement("n1", gpu_milli=2000, devices=("g0", "g1")),),
    )

    def gaps(*use: float | None) -> list[str]:
        devices = tuple(Device(f"g{at}", "n1", gpu_utilization_ratio=value) for at, value in enumerate(use))
        return [v.detail for v in qos.detect(snapshot(inference, devices=devices), policy)]

    assert gaps(0.2, 0.4) == ["uses 30% of its GPUs, under the 40% of its class"]
    assert gaps(0.5, 0.4) == []
    assert gaps(0.1, None) == []


def test_undeclared_and_unknown_classes_are_no_mismatch() -> None:
    policy = load_policy("batch-support")
    assert qos.detect(snapshot(runner("a", submitted=1.0, qos_class=QosClass.BEST_EFFORT)), policy) == []
    assert qos.detect(snapshot(runner("a", submitted=1.0, task_class="made-up")), policy) == []
    gaps, _ = qos.compare(
        runner(demand=Demand(), qos_class=QosClass.GUARANTEED),
        TaskClass("x", QosClass.GUARANTEED, gpu_affinity="required", gpu_models=("H100",)),
        {},
    )
    assert gaps == ["x needs a GPU and asks for none"]


def test_detect_runs_every_detector() -> None:
    snap = snapshot(waiter(), runner(preemptible=True), nodes=(node(),))
    assert {v.type for v in detect(snap, POLICY)} == {
        ViolationType.INVERSION,
        ViolationType.SCHEDULING_DELAY,
        ViolationType.PREEMPTION_FAILED,
    }
