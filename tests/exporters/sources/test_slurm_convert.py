"""From Slurm's records to workloads, nodes, ranks and preemptions."""

from __future__ import annotations

import msgspec
import pytest

from exporters.model import Demand, Event, NodeState, Ranking, Snapshot, Workload, WorkloadState, by_id
from exporters.sources.slurm.classes import Classes
from exporters.sources.slurm.convert import Seen, demand_of, job_state, node_state, snapshot_of
from exporters.sources.slurm.records import (
    Config,
    Dump,
    Job,
    NodeRecord,
    Part,
    PartitionRecord,
    QosRecord,
    Reservation,
)

GIB = 1 << 30

LOW = PartitionRecord("low", "n[1-2]", tier=1, preempt_mode="REQUEUE")
HIGH = PartitionRecord("high", "n[1-2]", tier=10, preempt_mode="OFF")
PREEMPT = Config(preempt_type="partition_prio", preempt_mode="REQUEUE", weight_partition=1000, weight_qos=0)


def job(number: int, state: str = "RUNNING", **fields: object) -> Job:
    base: dict[str, object] = {"id": number, "name": f"job{number}", "states": (state,), "partitions": ("low",)}
    base |= {"submit": 100.0, "eligible": 100.0, "priority": 50.0, "node_count": 1}
    if state in ("RUNNING", "SUSPENDED"):
        base |= {"start": 110.0, "nodes": "n1", "per_node": "gres/gpu:4", "gres": ("gpu:4(IDX:0-3)",)}
    return msgspec.convert(base | fields, Job)


def node(name: str, **fields: object) -> NodeRecord:
    base: dict[str, object] = {"name": name, "states": ("IDLE",), "partitions": ("low", "high"), "gres": "gpu:a100:4"}
    return msgspec.convert(base | {"gres_used": "gpu:a100:0(IDX:N/A)"} | fields, NodeRecord)


def snapshot(*jobs: Job, nodes: tuple[NodeRecord, ...] = (), time: float = 200.0, **parts: object) -> Snapshot:
    dump = Dump(jobs=Part(jobs), nodes=Part(nodes), partitions=Part((LOW, HIGH)), config=PREEMPT, **parts)  # type: ignore[arg-type]
    return snapshot_of(dump, time, "c")[0]


# --- states


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"states": ("PENDING",), "reason": "Resources"}, WorkloadState.PENDING),
        ({"states": ("PENDING",), "reason": "Priority"}, WorkloadState.PENDING),
        ({"states": ("PENDING",), "reason": "ReqNodeNotAvail"}, WorkloadState.PENDING),
        ({"states": ("PENDING",), "restarts": 2}, WorkloadState.REQUEUED),
        ({"states": ("PENDING", "REQUEUED")}, WorkloadState.PENDING),
        # Whatever is free, these could not start.
        ({"states": ("PENDING",), "priority": 0.0}, WorkloadState.HELD),
        ({"states": ("PENDING",), "hold": True}, WorkloadState.HELD),
        ({"states": ("PENDING",), "eligible": 0.0}, WorkloadState.HELD),
        ({"states": ("PENDING",), "reason": "JobHeldUser"}, WorkloadState.HELD),
        ({"states": ("PENDING",), "reason": "BeginTime", "restarts": 1}, WorkloadState.HELD),
        ({"states": ("PENDING",), "reason": "Dependency"}, WorkloadState.HELD),
        ({"states": ("PENDING",), "reason": "QOSMaxGRESPerUser"}, WorkloadState.HELD),
        ({"states": ("PENDING",), "reason": "AssocGrpCpuLimit"}, WorkloadState.HELD),
        ({"states": ("PENDING", "REQUEUE_HOLD")}, WorkloadState.HELD),
        ({"states": ("RUNNING", "CONFIGURING")}, WorkloadState.RUNNING),
        ({"states": ("CONFIGURING",)}, WorkloadState.RUNNING),
        ({"states": ("RUNNING", "STOPPED")}, WorkloadState.SUSPENDED),
        ({"states": ("SUSPENDED",), "priority": 0.0}, WorkloadState.SUSPENDED),
        ({"states": ("COMPLETED", "COMPLETING")}, WorkloadState.COMPLETING),
        ({"states": ("PENDING", "COMPLETING"), "restarts": 1}, WorkloadState.COMPLETING),
        ({"states": ("OUT_OF_MEMORY",)}, WorkloadState.FAILED),
        ({"states": ("TIMEOUT",)}, WorkloadState.TIMED_OUT),
        ({"states": ("PREEMPTED",)}, WorkloadState.PREEMPTED),
        ({"states": ("SOMETHING_NEW",)}, WorkloadState.UNKNOWN),
        ({"states": ()}, WorkloadState.UNKNOWN),
    ],
)
def test_states_of_jobs(fields: dict[str, object], state: WorkloadState) -> None:
    assert job_state(job(1, "PENDING", **fields)) is state


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("IDLE",), NodeState.UP),
        (("MIXED", "PLANNED"), NodeState.UP),
        (("IDLE", "CLOUD", "POWERED_DOWN"), NodeState.UP),
        (("IDLE", "DRAIN"), NodeState.DRAINING),
        (("ALLOCATED", "DRAIN"), NodeState.DRAINING),
        (("DRAINED",), NodeState.DRAINING),
        (("DOWN", "DRAIN"), NodeState.DOWN),
        (("IDLE", "NOT_RESPONDING"), NodeState.DOWN),
        (("IDLE", "POWERING_DOWN"), NodeState.DOWN),
        (("UNKNOWN",), NodeState.UNKNOWN),
        ((), NodeState.UNKNOWN),
    ],
)
def test_states_of_nodes(states: tuple[str, ...], state: NodeState) -> None:
    assert node_state(states) is state


# --- demands


@pytest.mark.parametrize(
    ("fields", "demand", "unchecked"),
    [
        ({"per_node": "gres/gpu:a100:4"}, Demand(gpu_milli=4000, gpu_models=("a100",)), ()),
        ({"per_node": "gres:gpu:2", "node_count": 3}, Demand(gpu_milli=2000, pieces=3, distinct_nodes=True), ()),
        # Eight GPUs anywhere, or all on one node.
        ({"per_job": "gres/gpu:8"}, Demand(gpu_milli=1000, pieces=8), ()),
        ({"per_job": "gres/gpu:8", "max_nodes": 1}, Demand(gpu_milli=8000), ()),
        ({"per_job": "gres/gpu:8", "node_count": 2}, Demand(gpu_milli=1000, pieces=8), ("node count",)),
        ({"per_task": "gres/gpu=2", "tasks": 4}, Demand(gpu_milli=2000, pieces=4), ()),
        ({"per_task": "gres/gpu=2", "tasks": 4, "max_nodes": 1}, Demand(gpu_milli=8000), ()),
        (
            {"per_task": "gres:gpu:1", "tasks": 8, "tasks_per_node": 4, "node_count": 2},
            Demand(gpu_milli=4000, pieces=2, distinct_nodes=True),
            (),
        ),
        ({"per_socket": "gres/gpu:2", "sockets_per_node": 2}, Demand(gpu_milli=4000), ()),
        (
            {"per_node": "gres/gpu:a100:1,gres/gpu:h100:2"},
            Demand(gpu_milli=3000, gpu_models=("a100", "h100")),
            ("several GPU types",),
        ),
        ({"per_node": "gres/gpu:a100_1g.5gb:2"}, Demand(mig_profile="1g.5gb", mig_instances=2), ()),
        ({"per_node": "gres/gpu:1,gres/nic:2"}, Demand(gpu_milli=1000), ("gres nic",)),
        ({"per_node": "gres/shard:3"}, Demand(), ("gres shard",)),
        # Accounting knows only sums.
        ({"tres_req": "gres/gpu=8,node=2", "node_count": 2}, Demand(gpu_milli=4000, pieces=2, distinct_nodes=True), ()),
        # CPU jobs: tasks lie where they fit.
        ({"tasks": 64, "cpus": 64}, Demand(pieces=64, cpu_milli=1000), ()),
        ({"tasks": 64, "cpus": 64, "max_nodes": 1}, Demand(cpu_milli=64000), ()),
        # Memory per node, CPU or GPU.
        (
            {"per_node": "gres/gpu:2", "cpus": 4, "memory_per_node": 1024.0},
            Demand(gpu_milli=2000, cpu_milli=4000, memory_bytes=GIB),
            (),
        ),
        (
            {"per_node": "gres/gpu:2", "cpus": 4, "memory_per_cpu": 1024.0},
            Demand(gpu_milli=2000, cpu_milli=4000, memory_bytes=4 * GIB),
            (),
        ),
        (
            {"per_node": "gres/gpu:2", "cpus": 4, "memory_per_cpu": 500.0, "memory_per_tres": "gres:gpu:2048"},
            Demand(gpu_milli=2000, cpu_milli=4000, memory_bytes=4 * GIB),
            (),
        ),
    ],
)
def test_what_a_job_asks_for(fields: dict[str, object], demand: Demand, unchecked: tuple[str, ...]) -> None:
    assert demand_of(job(1, "PENDING", **fields)) == (demand, unchecked)


# --- arrays, federations, what is not known


def test_each_waiting_task_of_an_array_is_a_workload_with_the_id_that_it_keeps() -> None:
    waiting = job(500, "PENDING", array_job=500, array_tasks="3-5%3", array_limit=3, per_node="gres/gpu:1")
    running = [job(600 + task, array_job=500, array_task=task, array_limit=3) for task in (1, 2)]
    found = {workload.id: workload for workload in snapshot(waiting, *running).workloads}
    # One more may run; the rest waits for the array's own limit.
    assert {name: item.state.value for name, item in found.items()} == {
        "500_1": "running",
        "500_2": "running",
        "500_3": "pending",
        "500_4": "held",
        "500_5": "held",
    }
    assert {item.array_job_id for item in found.values()} == {"500"}


def test_a_huge_array_is_cut_and_said_to_be() -> None:
    found = snapshot(job(7, "PENDING", array_job=7, array_tasks="0-3999999"))
    assert len(found.workloads) == 1000
    (unread,) = found.unread
    assert unread.what == "workloads: array tasks"
    assert "3,999,000 more tasks" in unread.why


def test_the_copy_of_a_federated_job_that_runs_elsewhere_is_left_out() -> None:
    found = snapshot(job(1, states=("PENDING", "REVOKED")), job(2, "PENDING", siblings="alpha,beta"))
    (workload,) = found.workloads
    assert workload.id == "2"
    assert "federation" in workload.constraints.unchecked


def test_a_job_that_cannot_be_read_is_named_and_the_others_stay() -> None:
    found = snapshot(job(1, nodes="n[1-"), job(2))
    assert [workload.id for workload in found.workloads] == ["2"]
    assert [(item.what, item.why) for item in found.unread] == [("jobs", "job 1: 'n[1-' is not a host list")]


def test_a_job_that_was_cancelled_while_it_waited_never_started() -> None:
    (workload,) = snapshot(job(1, "CANCELLED", start=150.0, end=150.0)).workloads
    assert (workload.started, workload.ended) == (None, 150.0)
    # An expected start is none either.
    (workload,) = snapshot(job(1, "PENDING", start=9000.0)).workloads
    assert workload.started is None


def test_labels_and_service_come_from_the_comment() -> None:
    (workload,) = snapshot(job(1, comment="service=chat;team=x y, not a pair", wckey="w")).workloads
    assert workload.labels == {"service": "chat", "team": "x y", "wckey": "w"}
    assert workload.display_service == "chat"


# --- nodes


def test_free_gpus_are_known_one_by_one() -> None:
    found = snapshot(nodes=(node("n1", gres_used="gpu:a100:3(IDX:0,2-3)", states=("MIXED",)),))
    assert found.nodes[0].gpu_free_milli == (0, 1000, 0, 0)
    assert found.nodes[0].devices == ("n1/gpu0", "n1/gpu1", "n1/gpu2", "n1/gpu3")


def test_gpus_without_a_type_are_known_from_the_jobs() -> None:
    holder = job(1, gres=("gpu:2(IDX:1-2)",))
    found = snapshot(holder, nodes=(node("n1", gres="gpu:4", gres_used="gpu:2"),))
    assert found.nodes[0].gpu_free_milli == (1000, 0, 0, 1000)


def test_where_nodes_tell_nothing_the_jobs_do_and_without_both_it_is_not_known() -> None:
    silent = node("n1", gres_used=None)
    assert snapshot(job(1), nodes=(silent,)).nodes[0].gpu_allocated_milli == 4000
    tracked = node("n1", gres_used=None, tres="gres/gpu=4", tres_used="gres/gpu=3")
    assert snapshot(nodes=(tracked,)).nodes[0].gpu_allocated_milli == 3000
    alone, _ = snapshot_of(Dump(nodes=Part((silent,))), 0.0, "c")
    assert alone.nodes[0].gpu_allocated_milli is None
    assert [item.what for item in alone.unread] == ["nodes: gpu allocation"]


def test_shared_gpus_are_not_taken_as_free() -> None:
    shared = node("n1", gres="gpu:a100:4,shard:a100:16", gres_used="gpu:a100:0(IDX:N/A),shard:a100:3(0/4,3/4,0/4,0/4)")
    found = snapshot(nodes=(shared,))
    assert found.nodes[0].free_gpus is None
    assert "shard" in found.unread[0].why


def test_mig_instances_are_counted_by_profile() -> None:
    sliced = node("n1", gres="gpu:a100:1,gpu:a100_1g.5gb:7", gres_used="gpu:a100:1(IDX:0),gpu:a100_1g.5gb:3(IDX:1-3)")
    (found,) = snapshot(nodes=(sliced,)).nodes
    assert found.mig_free == {"1g.5gb": 4}
    assert found.gpu_capacity_milli == 1000
    assert found.gpu_allocated_milli == 1000


def test_a_reservation_keeps_others_away_and_its_own_jobs_on_its_nodes() -> None:
    mine, other = job(1, "PENDING", reservation="r"), job(2, "PENDING")
    active = Part((Reservation("r", "n1", 100.0, 300.0), Reservation("later", "n2", 250.0, 300.0)))
    found = snapshot(mine, other, nodes=(node("n1"), node("n2")), reservations=active)
    workloads, nodes = by_id(found.workloads), {item.name: item for item in found.nodes}
    assert workloads["1"].constraints.required_nodes == ("n1",)
    assert nodes["n2"].taints == ()
    (taint,) = nodes["n1"].taints or ()
    assert any(item.tolerates(taint) for item in workloads["1"].constraints.tolerations or ())
    assert workloads["2"].constraints.tolerations == ()


def test_what_was_not_read_is_said() -> None:
    found, _ = snapshot_of(Dump(nodes=Part((node("n1"),)), unread={"workloads": "timed out"}), 0.0, "c")
    assert found.lacks("workloads")
    assert not found.workloads


# --- ranks


def ranks(classes: Classes, *pairs: tuple[str, str]) -> list[int | None]:
    return [classes.rank(job(1, "PENDING", partitions=(partition,), qos=qos)) for partition, qos in pairs]


def test_the_tier_of_a_partition_decides_before_its_qos() -> None:
    classes = Classes(
        {item.name: item for item in (LOW, HIGH)},
        {item.name: item for item in (QosRecord("normal", 0), QosRecord("vip", 100))},
        Config(weight_partition=0, weight_qos=1000),
    )
    pairs = (("high", "vip"), ("high", "normal"), ("low", "vip"), ("low", "normal"))
    assert ranks(classes, *pairs) == [0, 1, 2, 3]


def test_what_has_no_weight_makes_no_class() -> None:
    flat = {item.name: item for item in (LOW, msgspec.structs.replace(HIGH, tier=1, job_factor=9.0))}
    qos = {item.name: item for item in (QosRecord("normal", 0), QosRecord("vip", 100))}
    only_qos = Classes(flat, qos, Config(weight_partition=0, weight_qos=10))
    assert ranks(only_qos, ("high", "vip"), ("low", "vip"), ("low", "normal")) == [0, 0, 1]
    only_partition = Classes(flat, qos, Config(weight_partition=10, weight_qos=0))
    assert ranks(only_partition, ("high", "normal"), ("low", "vip")) == [0, 1]


def test_with_one_class_ranks_are_not_known() -> None:
    found, _ = snapshot_of(Dump(jobs=Part((job(1),)), partitions=Part((LOW,)), config=PREEMPT), 0.0, "c")
    assert found.workloads[0].rank is None
    assert [item.what for item in found.unread] == ["priority classes"]


def test_a_policy_file_decides_by_name_and_then_by_number() -> None:
    ranking = Ranking(classes={"vip": 0, "low": 2}, thresholds=(1000.0, 10.0))
    classes = Classes({"low": LOW, "high": HIGH}, {}, PREEMPT, ranking)
    assert ranks(classes, ("high", "vip"), ("low", "normal"), ("high", "normal")) == [0, 2, 1]


def test_a_job_in_several_partitions_has_its_best_rank_and_waits_there() -> None:
    (workload,) = snapshot(job(1, "PENDING", partitions=("low", "high"))).workloads
    assert (workload.queue, workload.rank) == ("high", 0)
    assert workload.constraints.partitions == ("low", "high")


# --- preemption


@pytest.mark.parametrize(
    ("config", "mode", "qos", "expected"),
    [
        (Config(preempt_type="none"), "REQUEUE", "", False),
        (PREEMPT, "REQUEUE", "", True),
        (PREEMPT, "OFF", "", False),
        (PREEMPT, "GANG,SUSPEND", "", True),
        (PREEMPT, "", "", None),
        (Config(preempt_type="qos", preempt_mode="REQUEUE"), "OFF", "normal", True),
        (Config(preempt_type="qos", preempt_mode="REQUEUE"), "OFF", "vip", False),
        (Config(preempt_type="qos", preempt_mode="REQUEUE"), "OFF", "unheard", None),
        (Config(preempt_type="qos", preempt_mode="OFF"), "OFF", "normal", False),
        # slurmrestd does not tell the type: known only where both types say no.
        (Config(), "OFF", "vip", False),
        (Config(), "REQUEUE", "vip", None),
    ],
)
def test_who_may_be_preempted(config: Config, mode: str, qos: str, expected: bool | None) -> None:
    low = msgspec.structs.replace(LOW, preempt_mode=mode)
    levels = {item.name: item for item in (QosRecord("normal"), QosRecord("vip", 100, preempts=("normal",)))}
    classes = Classes({"low": low, "high": HIGH}, levels, config)
    assert classes.preemptible(job(1, qos=qos)) is expected


def after(first: Dump, second: Dump, seconds: float = 10.0) -> tuple[Event, ...]:
    """The events of the second of two readings."""
    _, seen = snapshot_of(first, 200.0, "c")
    found, _ = snapshot_of(second, 200.0 + seconds, "c", None, seen)
    return found.events


def dump(*jobs: Job) -> Dump:
    return Dump(jobs=Part(jobs), partitions=Part((LOW, HIGH)), config=PREEMPT)


def winner(**fields: object) -> Job:
    return job(9, **{"partitions": ("high",), "submit": 203.0, "start": 205.0, "gres": ("gpu:2(IDX:0-1)",)} | fields)


REQUEUED = job(1, "PENDING", restarts=1, submit=205.0, eligible=325.0, reason="BeginTime")


def test_a_requeued_job_whose_place_was_taken_was_preempted() -> None:
    (event,) = after(dump(job(1)), dump(REQUEUED, winner()))
    assert (event.workload, event.by, event.rank, event.by_rank) == ("1", "9", 1, 0)
    assert (event.time, event.node, event.gpu_milli) == (205.0, "n1", 4000)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        # The node failed, or an administrator requeued it: nobody took its place.
        (job(1), (REQUEUED,)),
        (job(1), (REQUEUED, winner(nodes="n2"))),
        # It was there before.
        (job(1), (REQUEUED, winner(start=150.0))),
        # It may not preempt.
        (job(1), (REQUEUED, winner(partitions=("low",)))),
        # It took other GPUs of the node.
        (job(1, gres=("gpu:2(IDX:2-3)",)), (REQUEUED, winner())),
        # The victim may not be preempted.
        (job(1, partitions=("high",)), (msgspec.structs.replace(REQUEUED, partitions=("high",)), winner())),
    ],
)
def test_other_requeues_are_no_preemptions(before: Job, now: tuple[Job, ...]) -> None:
    assert after(dump(before), dump(*now)) == ()


def test_a_job_that_slurm_marks_as_preempted_needs_no_proof() -> None:
    gone = job(1, "PREEMPTED", start=110.0, end=205.0, nodes="n1", preempted=205.0)
    (event,) = after(dump(job(1)), dump(gone, winner()))
    assert (event.time, event.by, event.by_rank) == (205.0, "9", 0)
    # Even by whom need not be known.
    (event,) = after(dump(), dump(gone))
    assert (event.workload, event.by, event.by_rank) == ("1", "", None)


def test_a_preemption_is_reported_once_with_one_id_and_through_a_slow_handover() -> None:
    stopping = job(1, states=("RUNNING", "COMPLETING"))
    readings = [dump(job(1)), dump(stopping), dump(REQUEUED), dump(REQUEUED, winner()), dump(REQUEUED, winner())]
    seen = Seen()
    found: list[tuple[Event, ...]] = []
    for at, reading in enumerate(readings):
        taken, seen = snapshot_of(reading, 200.0 + 5 * at, "c", None, seen)
        found.append(taken.events)
    assert [len(events) for events in found] == [0, 0, 0, 1, 1]
    assert found[3] == found[4]


def test_several_winners_of_one_rank_leave_the_rank_known() -> None:
    second = msgspec.structs.replace(winner(gres=("gpu:2(IDX:2-3)",)), id=10)
    (event,) = after(dump(job(1)), dump(REQUEUED, winner(), second))
    assert (event.by, event.by_rank) == ("", 0)


def test_nothing_is_kept_of_jobs_that_are_gone() -> None:
    seen = Seen()
    for at in range(50):
        _, seen = snapshot_of(
            dump(*(job(number) for number in range(at * 10, at * 10 + 10))), 200.0 + at, "c", None, seen
        )
    assert len(seen.running) == 10
    assert isinstance(next(iter(seen.running.values())), Workload)
