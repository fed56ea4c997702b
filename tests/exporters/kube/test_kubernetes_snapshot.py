"""What a snapshot says about pods, nodes, priorities, gangs, queues and preemptions."""

from __future__ import annotations

from typing import Any

import pytest
from kube_api import KUEUE, VOLCANO, FakeKubernetes
from kube_objects import (
    CREATED_AT,
    condition,
    container,
    kueue_workload,
    node,
    pod,
    pod_group,
    preempted,
    priority_class,
)
from kube_source import Watch, live, settle

from exporters.model import Demand, NodeState, Placement, Ranking, Snapshot, Unread, Workload, WorkloadState
from exporters.sources.kubernetes.convert import NOWHERE


@pytest.fixture
def look(api: FakeKubernetes, watch: Watch) -> Any:
    def snapshot(**options: Any) -> Snapshot:
        return settle(watch(**options), api)

    return snapshot


def only(snapshot: Snapshot) -> Workload:
    (workload,) = live(snapshot).values()
    return workload


# --- pods


def test_a_running_pod_holds_what_it_asked_for(api: FakeKubernetes, look: Any) -> None:
    api.create("nodes", node("n1", gpus=4))
    labels = {"app": "trainer", "team": "vision", "pod-template-hash": "5d8"}
    api.create(
        "pods",
        pod(
            "trainer-5d8-x2",
            node="n1",
            containers=[container({"nvidia.com/gpu": "2"}, {"cpu": "500m", "memory": "1Gi"})],
            meta={"labels": labels},
            priority=100,
            restartPolicy="Always",
            preemptionPolicy="Never",
        ),
    )
    found = only(look())
    assert found.id == "uid-trainer-5d8-x2"
    assert found.state is WorkloadState.RUNNING
    assert found.demand == Demand(gpu_milli=2000, cpu_milli=500, memory_bytes=1024**3)
    assert found.placements == (Placement("n1", 2000, cpu_milli=500, memory_bytes=1024**3),)
    assert (found.submitted, found.started) == (CREATED_AT, CREATED_AT + 60)
    assert (found.service, found.namespace, found.restart_policy) == ("trainer", "default", "Always")
    assert found.may_preempt is False
    assert found.preemptible is True
    assert found.labels == {"app": "trainer", "team": "vision"}


@pytest.mark.parametrize(
    ("item", "state"),
    [
        (pod(), WorkloadState.PENDING),
        (pod(schedulingGates=[{"name": "example.com/quota"}]), WorkloadState.HELD),
        # Scheduled and pulling its image: the GPUs are taken already.
        (pod(node="n1", phase="Pending"), WorkloadState.RUNNING),
        (pod(node="n1"), WorkloadState.RUNNING),
        (pod(node="n1", phase="Unknown"), WorkloadState.RUNNING),
        (pod(node="n1", meta={"deletionTimestamp": "2025-01-01T01:00:00Z"}), WorkloadState.COMPLETING),
    ],
)
def test_states(api: FakeKubernetes, look: Any, item: dict[str, Any], state: WorkloadState) -> None:
    api.create("pods", item)
    assert only(look()).state is state


def test_why_a_pod_waits_is_told(api: FakeKubernetes, look: Any) -> None:
    blocked = condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes: 3 Insufficient gpu.")
    api.create("pods", pod(gpus=8, conditions=[blocked]))
    assert only(look()).reason == "Unschedulable: 0/3 nodes: 3 Insufficient gpu."


def test_a_pod_that_was_held_back_waits_from_then_on(api: FakeKubernetes, watch: Watch) -> None:
    now = [CREATED_AT + 1000.0]
    api.create("pods", pod(schedulingGates=[{"name": "example.com/quota"}]))
    source = watch(clock=lambda: now[0])
    assert only(settle(source, api)).state is WorkloadState.HELD
    api.update("pods", "train", lambda item: item["spec"].pop("schedulingGates"))
    found = only(settle(source, api))
    assert (found.state, found.waiting_since) == (WorkloadState.PENDING, CREATED_AT + 1000)
    # A new list does not forget it.
    api.compact()
    api.cut()
    api.update("pods", "train", lambda item: item["metadata"].update(labels={"x": "y"}))
    assert only(settle(source, api)).waiting_since == CREATED_AT + 1000


@pytest.mark.parametrize(
    ("change", "state", "ended"),
    [
        ({"phase": "Succeeded"}, WorkloadState.COMPLETED, None),
        ({"phase": "Failed"}, WorkloadState.FAILED, None),
        (
            {
                "phase": "Failed",
                "conditions": [condition("DisruptionTarget", reason="PreemptionByScheduler")],
                "containerStatuses": [{"state": {"terminated": {"finishedAt": "2025-01-01T00:07:00Z"}}}],
            },
            WorkloadState.PREEMPTED,
            CREATED_AT + 420,
        ),
    ],
)
def test_a_pod_that_ended_is_seen_once_more(
    api: FakeKubernetes, watch: Watch, change: dict[str, Any], state: WorkloadState, ended: float | None
) -> None:
    now = [CREATED_AT + 600.0]
    api.create("nodes", node())
    api.create("pods", pod(gpus=2, node="n1"))
    source = watch(clock=lambda: now[0], keep_ended_seconds=60.0)
    settle(source, api)
    api.update("pods", "train", lambda item: item["status"].update(change))
    snapshot = settle(source, api)
    (found,) = snapshot.workloads
    assert (found.state, found.ended) == (state, ended if ended is not None else now[0])
    assert snapshot.nodes[0].gpu_allocated_milli == 0
    now[0] += 61
    assert source.poll().workloads == ()
    assert len(source.pods) == 0


def test_a_deleted_pod_is_cancelled_and_old_ones_are_not_news(api: FakeKubernetes, watch: Watch) -> None:
    api.create("pods", pod("old", phase="Succeeded"))
    api.create("pods", pod("gone"))
    source = watch()
    assert set(live(settle(source, api))) == {"gone"}
    api.delete("pods", "gone")
    (found,) = settle(source, api).workloads
    assert (found.name, found.state) == ("gone", WorkloadState.CANCELLED)


@pytest.mark.parametrize(
    ("meta", "spec", "preemptible"),
    [
        ({}, {}, True),
        ({"annotations": {"kubernetes.io/config.mirror": "x"}}, {}, False),
        ({}, {"schedulerName": "volcano"}, None),
        ({"annotations": {"volcano.sh/preemptable": "true"}}, {"schedulerName": "volcano"}, True),
        ({"labels": {"volcano.sh/preemptable": "false"}}, {"schedulerName": "volcano"}, False),
    ],
)
def test_what_may_be_preempted(
    api: FakeKubernetes, look: Any, meta: dict[str, Any], spec: dict[str, Any], preemptible: bool | None
) -> None:
    api.create("pods", pod(meta=meta, **spec))
    assert only(look()).preemptible is preemptible


@pytest.mark.parametrize(
    ("labels", "owner", "service"),
    [
        ({"app.kubernetes.io/name": "chat", "app": "x"}, None, "chat"),
        ({"app": "chat"}, None, "chat"),
        ({"pod-template-hash": "7c9"}, {"kind": "ReplicaSet", "name": "chat-7c9"}, "chat"),
        ({}, {"kind": "Job", "name": "nightly"}, "nightly"),
        ({}, None, "train"),
    ],
)
def test_the_service_of_a_pod(
    api: FakeKubernetes, look: Any, labels: dict[str, str], owner: dict[str, str] | None, service: str
) -> None:
    owners = [owner | {"uid": "u1", "controller": True}] if owner else []
    api.create("pods", pod(meta={"labels": labels, "ownerReferences": owners}))
    assert only(look()).service == service


def test_the_declared_task_class_and_gpu_only(api: FakeKubernetes, look: Any) -> None:
    api.create("pods", pod("web", meta={"annotations": {"prioscope.io/task-class": "batch-inference"}}))
    api.create("pods", pod("plain"))
    api.create("pods", pod("train", gpus=1))
    found = live(look(gpu_only=True))
    assert set(found) == {"web", "train"}
    assert found["web"].task_class == "batch-inference"


# --- where it may run


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


def labels(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("terms", "allowed"),
    [
        ([labels("gpu", "In", "a100", "h100")], ("n1", "n2")),
        ([labels("gpu", "NotIn", "a100")], ("n2", "n3")),
        ([labels("gpu", "Exists")], ("n1", "n2")),
        ([labels("gpu", "DoesNotExist")], ("n3",)),
        ([labels("rank", "Gt", "1")], ("n2",)),
        ([labels("rank", "Lt", "2")], ("n1",)),
        # Terms are alternatives; an empty one matches nothing.
        ([labels("gpu", "In", "h100"), labels("rank", "Lt", "2")], ("n1", "n2")),
        ([{}], (NOWHERE,)),
        ([labels("gpu", "In", "b200")], (NOWHERE,)),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n3"]}]}], ("n3",)),
    ],
)
def test_node_affinity_becomes_the_nodes_that_it_allows(
    api: FakeKubernetes, look: Any, terms: list[dict[str, Any]], allowed: tuple[str, ...]
) -> None:
    api.create("nodes", node("n1", labels={"gpu": "a100", "rank": "1"}))
    api.create("nodes", node("n2", labels={"gpu": "h100", "rank": "2"}))
    api.create("nodes", node("n3", labels={"rank": "x"}))
    api.create("pods", pod(affinity=affinity(*terms)))
    assert only(look()).constraints.required_nodes == allowed


def test_a_label_that_changes_moves_the_affinity(api: FakeKubernetes, watch: Watch) -> None:
    api.create("nodes", node("n1", labels={"zone": "a"}))
    api.create("pods", pod(affinity=affinity(labels("zone", "In", "b"))))
    source = watch()
    assert only(settle(source, api)).constraints.required_nodes == (NOWHERE,)
    api.update("nodes", "n1", lambda item: item["metadata"]["labels"].update(zone="b"))
    assert only(settle(source, api)).constraints.required_nodes == ("n1",)


def test_constraints_that_cannot_be_expressed_are_named(api: FakeKubernetes, look: Any) -> None:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}
    api.create(
        "pods",
        pod(
            containers=[container(ports=[{"hostPort": 80}])],
            affinity={"podAffinity": required, "podAntiAffinity": required},
            topologySpreadConstraints=[{"whenUnsatisfiable": "DoNotSchedule"}],
            volumes=[{"persistentVolumeClaim": {"claimName": "data"}}],
            resourceClaims=[{"name": "gpu"}],
            nodeSelector={"nvidia.com/gpu.product": "A100"},
            tolerations=[{"key": "gpu", "operator": "Exists", "tolerationSeconds": 30}],
        ),
    )
    limits = only(look()).constraints
    assert limits.unchecked == (
        "pod affinity",
        "pod anti-affinity",
        "topology spread",
        "volumes",
        "resource claims",
        "host ports",
    )
    assert limits.node_selector == {"nvidia.com/gpu.product": "A100"}
    assert limits.tolerations is not None
    assert limits.tolerations[0].operator == "Exists"


# --- nodes and their GPUs


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, NodeState.UP),
        ({"spec": {"unschedulable": True}}, NodeState.DRAINING),
        ({"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}, NodeState.DOWN),
        ({"conditions": []}, NodeState.UNKNOWN),
    ],
)
def test_node_states(api: FakeKubernetes, look: Any, fields: dict[str, Any], state: NodeState) -> None:
    api.create("nodes", node(**fields))
    (found,) = look().nodes
    assert found.state is state
    assert bool(found.reason) is (state is not NodeState.UP)


def test_a_node_counts_every_pod_that_holds_something(api: FakeKubernetes, look: Any) -> None:
    product = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920"}
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    api.create("nodes", node(gpus=8, labels=product, spec={"taints": [taint]}))
    api.create("pods", pod("a", gpus=2, node="n1"))
    api.create("pods", pod("b", node="n1", containers=[container({}, {"cpu": "250m"})]))
    api.create("pods", pod("waits", gpus=4))
    api.create("pods", pod("done", gpus=4, node="n1", phase="Succeeded"))
    (found,) = look(gpu_only=True).nodes
    assert (found.gpu_capacity_milli, found.gpu_allocated_milli) == (8000, 2000)
    assert (found.cpu_capacity_milli, found.cpu_allocated_milli) == (64000, 250)
    assert found.gpu_models == ("NVIDIA-A100-SXM4-80GB",)
    assert found.gpu_memory_bytes == 80 * 1024**3
    assert found.taints is not None
    assert found.taints[0].key == "nvidia.com/gpu"
    assert found.mig_free == {}


def test_mig_instances_are_counted_by_profile(api: FakeKubernetes, look: Any) -> None:
    api.create("nodes", node(gpus=0, allocatable={"nvidia.com/mig-1g.5gb": "7", "nvidia.com/mig-3g.20gb": "2"}))
    api.create("pods", pod("a", node="n1", containers=[container({"nvidia.com/mig-1g.5gb": "2"})]))
    snapshot = look()
    assert snapshot.nodes[0].mig_free == {"1g.5gb": 5, "3g.20gb": 2}
    demand = only(snapshot).demand
    assert (demand.mig_profile, demand.mig_instances, demand.gpu_milli) == ("1g.5gb", 2, 0)


def test_time_slices_are_parts_of_a_gpu(api: FakeKubernetes, look: Any) -> None:
    api.create("nodes", node(gpus=8, labels={"nvidia.com/gpu.replicas": "4"}))
    api.create("pods", pod("a", gpus=1, node="n1"))
    snapshot = look()
    (found,) = snapshot.nodes
    assert (found.gpu_capacity_milli, found.gpu_allocated_milli) == (2000, 250)
    assert only(snapshot).demand.gpu_milli == 250


def share(milli: int, index: str) -> dict[str, str]:
    return {"alibabacloud.com/gpu-milli": str(milli), "alibabacloud.com/gpu-index": index}


def test_shares_whose_gpu_is_recorded_give_the_free_part_of_each(api: FakeKubernetes, look: Any) -> None:
    api.create("nodes", node(gpus=0, allocatable={"alibabacloud.com/gpu-count": "4"}))
    for name, milli, index in (("a", 500, "0"), ("b", 300, "0"), ("c", 600, "1")):
        api.create("pods", pod(name, node="n1", meta={"annotations": share(milli, index)}))
    api.create("pods", pod("d", node="n1", meta={"annotations": share(1000, "2")}))
    (found,) = look().nodes
    assert found.gpu_free_milli == (1000, 400, 200, 0)
    assert found.gpu_allocated_milli == 2400


def test_shares_whose_gpu_is_not_recorded_are_not_guessed(api: FakeKubernetes, look: Any) -> None:
    api.create("nodes", node(gpus=4))
    api.create("pods", pod("a", node="n1", meta={"annotations": {"gpu-fraction": "0.5"}}))
    snapshot = look()
    assert snapshot.nodes[0].gpu_allocated_milli is None
    assert snapshot.nodes[0].free_gpus is None
    assert snapshot.unread == (Unread("nodes: which GPU a share lies on", "not recorded, on n1 for one"),)


def test_hami_nodes_are_read_from_their_annotation(api: FakeKubernetes, look: Any) -> None:
    devices = (
        '[{"id":"GPU-a","count":10,"devmem":16384,"devcore":100,"type":"NVIDIA-Tesla T4","numa":0,"health":true},'
        '{"id":"GPU-b","count":10,"devmem":16384,"devcore":100,"type":"NVIDIA-Tesla T4","numa":0,"health":true}]'
    )
    api.create("nodes", node(gpus=20, meta={"annotations": {"hami.io/node-nvidia-register": devices}}))
    allocated = {"hami.io/vgpu-devices-allocated": "GPU-b,NVIDIA,4096,0:;"}
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "4096"}
    api.create("pods", pod("a", node="n1", containers=[container(limits)], meta={"annotations": allocated}))
    snapshot = look()
    (found,) = snapshot.nodes
    assert found.gpu_models == ("Tesla T4",)
    assert (found.gpu_capacity_milli, found.gpu_free_milli) == (2000, (1000, 750))
    assert only(snapshot).demand.gpu_milli == 250


def test_a_share_by_memory_depends_on_the_gpu(api: FakeKubernetes, look: Any) -> None:
    api.create("nodes", node("small", labels={"nvidia.com/gpu.memory": "16384"}))
    api.create("nodes", node("large", labels={"nvidia.com/gpu.memory": "81920"}))
    api.create("pods", pod("waits", meta={"annotations": {"gpu-memory": "8192"}}))
    api.create("pods", pod("runs", node="large", meta={"annotations": {"gpu-memory": "8192"}}))
    found = live(look())
    assert found["runs"].placements[0].gpu_milli == 100
    # Not placed yet: of the smallest GPU, and marked.
    assert found["waits"].demand.gpu_milli == 500
    assert found["waits"].demand.gpu_memory_bytes == 8 * 1024**3
    assert found["waits"].constraints.unchecked == ("size of the GPU that is shared",)


# --- priorities


def test_ranks_follow_the_priority_classes(api: FakeKubernetes, watch: Watch) -> None:
    api.create("priorityclasses", priority_class("system-node-critical", 2_000_001_000))
    api.create("priorityclasses", priority_class("online", 1000, preemptionPolicy="Never"))
    api.create("priorityclasses", priority_class("batch", 100))
    priorities = {"node": 2_000_001_000, "online": 1000, "between": 500, "batch": 100, "none": 0, "below": -5}
    for name, priority in priorities.items():
        api.create("pods", pod(name, priority=priority, priorityClassName=name))
    source = watch()
    found = live(settle(source, api))
    ranks = {name: item.rank for name, item in found.items()}
    assert ranks == {"node": 0, "online": 0, "between": 1, "batch": 1, "none": 2, "below": 3}
    assert found["online"].may_preempt is False
    # A new class moves the ranks of pods that are there.
    api.create("priorityclasses", priority_class("urgent", 5000))
    assert live(settle(source, api))["batch"].rank == 2


def test_a_policys_ranking_wins(api: FakeKubernetes, look: Any) -> None:
    api.create("priorityclasses", priority_class("online", 1000))
    api.create("pods", pod("a", priority=1000, priorityClassName="online"))
    api.create("pods", pod("b", priority=1000))
    found = live(look(ranking=Ranking(classes={"online": 2}, thresholds=(500.0,))))
    assert (found["a"].rank, found["b"].rank) == (2, 0)


def test_without_priority_classes_nothing_is_urgent_by_default(api: FakeKubernetes, look: Any) -> None:
    api.create("pods", pod(priority=0))
    assert only(look()).level == "P3"


# --- preemptions


def test_a_preemption_names_both_sides_even_when_they_are_gone(api: FakeKubernetes, watch: Watch) -> None:
    api.create("priorityclasses", priority_class("online", 1000))
    api.create("nodes", node())
    api.create("pods", pod("loser", gpus=2, node="n1", priority=0, meta={"labels": {"app": "batch"}}))
    api.create("pods", pod("winner", gpus=2, priority=1000, meta={"labels": {"app": "chat"}}))
    source = watch(clock=lambda: CREATED_AT + 700)
    settle(source, api)
    api.delete("pods", "loser")
    api.delete("pods", "winner")
    related = {"kind": "Pod", "name": "winner", "namespace": "default", "uid": "uid-winner"}
    message = "Preempted by pod uid-winner on node n1"
    api.create("events", preempted("e1", "loser", message=message, related=related))
    (event,) = settle(source, api).events
    assert (event.workload, event.by, event.node) == ("uid-loser", "uid-winner", "n1")
    assert (event.rank, event.by_rank) == (1, 0)
    assert (event.service, event.by_service) == ("batch", "chat")
    assert (event.time, event.gpu_milli) == (CREATED_AT + 600.123456, 2000)


UID = "40399c9c-7f35-4bd4-9b25-c1a4a0ffa3c9"


@pytest.mark.parametrize(
    "message",
    [
        f"Preempted by pod {UID} on node n1",
        f"Preempted to accommodate a workload (UID: {UID}, JobUID: UNKNOWN) due to prioritization in the ClusterQueue",
        f"Preempted to accommodate a workload (UID: {UID}) in the ClusterQueue",
    ],
)
def test_the_winner_is_read_from_the_message_when_the_event_has_no_related(
    api: FakeKubernetes, look: Any, message: str
) -> None:
    api.create("events", preempted("e1", "loser", message=message))
    (event,) = look(clock=lambda: CREATED_AT + 700).events
    assert event.by == UID
    assert event.rank is None


def test_only_preemptions_are_asked_for_and_old_ones_are_dropped(api: FakeKubernetes, look: Any) -> None:
    api.create("events", preempted("e1", "a", message="Preempted by a pod on node n1"))
    api.create("events", preempted("e2", "b", message="x") | {"reason": "FailedScheduling"})
    api.create("events", preempted("e3", "c", message="x", time="2025-01-01T02:00:00Z"))
    assert [event.id for event in look(clock=lambda: CREATED_AT + 7300).events] == ["uid-e3"]


def test_a_repeated_event_is_another_preemption(api: FakeKubernetes, watch: Watch) -> None:
    source = watch(clock=lambda: CREATED_AT + 700)
    api.create("events", preempted("e1", "a", message="x"))
    assert [event.id for event in settle(source, api).events] == ["uid-e1"]
    api.update("events", "e1", lambda item: item.update(count=2, lastTimestamp="2025-01-01T00:11:00Z"))
    (event,) = settle(source, api).events
    assert (event.id, event.time) == ("uid-e1#2", CREATED_AT + 660)


# --- Kueue


def test_a_workload_in_kueues_queue_waits(api: FakeKubernetes, look: Any) -> None:
    api.install(KUEUE)
    boost = {"annotations": {"kueue.x-k8s.io/priority-boost": "-60"}, "labels": {"app": "llm"}}
    pending = condition("QuotaReserved", "False", reason="Pending", message="insufficient quota for nvidia.com/gpu")
    api.create(
        "workloads",
        kueue_workload(
            gpus=8, count=4, meta=boost, spec={"priority": 100, "priorityClassName": "prod"}, conditions=[pending]
        ),
    )
    found = only(look(ranking=Ranking(thresholds=(90.0, 30.0))))
    assert (found.id, found.state, found.queue) == ("uid-job-train", WorkloadState.PENDING, "research")
    assert (found.demand.gpu_milli, found.demand.pieces) == (8000, 4)
    # Base 100, boosted by -60.
    assert (found.priority, found.rank, found.priority_class) == (40.0, 1, "prod")
    assert found.reason == "Pending: insufficient quota for nvidia.com/gpu"
    assert "quota" in found.constraints.unchecked


def test_an_admitted_workload_is_its_pods(api: FakeKubernetes, watch: Watch) -> None:
    api.install(KUEUE)
    api.create("nodes", node())
    owner = {"kind": "Job", "name": "train", "uid": "uid-job", "controller": True}
    api.create("workloads", kueue_workload(meta={"ownerReferences": [owner]}, spec={"priority": 900}))
    source = watch(ranking=Ranking(thresholds=(500.0,)))
    assert set(live(settle(source, api))) == {"job-train"}
    api.update("workloads", "job-train", lambda item: item["status"].update(conditions=[condition("Admitted")]))
    meta = {"ownerReferences": [owner], "creationTimestamp": "2025-01-01T00:00:50Z"}
    api.create("pods", pod("train-0", gpus=1, node="n1", priority=0, meta=meta))
    found = live(settle(source, api))
    assert set(found) == {"train-0"}
    # With Kueue's priority and queue, and a wait that began in that queue.
    assert (found["train-0"].rank, found["train-0"].queue) == (0, "research")
    assert found["train-0"].waiting_since == CREATED_AT
    api.update("workloads", "job-train", lambda item: item["status"]["conditions"].append(condition("Finished")))
    assert set(live(settle(source, api))) == {"train-0"}


def test_evicted_and_inactive_workloads(api: FakeKubernetes, look: Any) -> None:
    api.install(KUEUE)
    evicted = condition("Evicted", reason="Preempted")
    api.create("workloads", kueue_workload("evicted", conditions=[evicted], status={"requeueState": {"count": 2}}))
    api.create("workloads", kueue_workload("off", spec={"active": False}))
    found = live(look())
    assert (found["evicted"].state, found["evicted"].requeues) == (WorkloadState.REQUEUED, 2)
    assert found["evicted"].waiting_since == CREATED_AT + 300
    assert found["off"].state is WorkloadState.HELD


def test_a_workload_of_unequal_pods_is_several(api: FakeKubernetes, look: Any) -> None:
    api.install(KUEUE)
    item = kueue_workload(gpus=8, count=2)
    launcher = {"name": "launcher", "count": 1, "template": {"spec": {"containers": [container({"cpu": "1"})]}}}
    small = {"containers": [container({"nvidia.com/gpu": "1"})]}
    item["spec"]["podSets"] += [launcher, {"name": "eval", "count": 1, "template": {"spec": small}}]
    api.create("workloads", item)
    found = live(look())
    assert {(w.id, w.demand.total_gpu_milli, w.het_job_id) for w in found.values()} == {
        ("uid-job-train/main", 16000, "uid-job-train"),
        ("uid-job-train/eval", 1000, "uid-job-train"),
    }


def test_a_pod_gated_by_kueue_is_counted_once(api: FakeKubernetes, look: Any) -> None:
    api.install(KUEUE)
    gate = [{"name": "kueue.x-k8s.io/admission"}]
    api.create("pods", pod("notebook", gpus=1, schedulingGates=gate))
    owner = {"kind": "Pod", "name": "notebook", "uid": "uid-notebook"}
    api.create("workloads", kueue_workload("pod-notebook", meta={"ownerReferences": [owner]}))
    assert set(live(look())) == {"pod-notebook"}


# --- Volcano


def gang(names: str, *, gpus: int = 1, running: str = "", **spec: Any) -> list[dict[str, Any]]:
    meta = {"annotations": {"scheduling.k8s.io/group-name": "gang"}}
    return [pod(name, gpus=gpus, node="n1" if name in running else "", meta=meta, **spec) for name in names]


def test_a_gang_waits_as_one(api: FakeKubernetes, watch: Watch) -> None:
    api.install(VOLCANO)
    api.create("nodes", node())
    api.create("podgroups", pod_group(members=4))
    for item in gang("abcd", gpus=2, priority=7):
        api.create("pods", item)
    source = watch()
    found = only(settle(source, api))
    assert (found.id, found.name, found.queue) == ("uid-gang", "gang", "batch")
    assert (found.demand.gpu_milli, found.demand.pieces, found.priority) == (2000, 4, 7)
    # Three run, one is missing: it still waits for that one.
    for name in "abc":
        api.update("pods", name, lambda item: item["spec"].update(nodeName="n1"))
    found_all = live(settle(source, api))
    assert set(found_all) == {"a", "b", "c", "gang"}
    assert found_all["gang"].demand.pieces == 1
    # All run: the pods stand for themselves.
    api.update("pods", "d", lambda item: item["spec"].update(nodeName="n1"))
    assert set(live(settle(source, api))) == {"a", "b", "c", "d"}
    assert live(source.poll())["a"].queue == "batch"


def test_a_gang_without_pods_is_known_from_its_resources(api: FakeKubernetes, look: Any) -> None:
    api.install(VOLCANO)
    api.create("priorityclasses", priority_class("high", 1000))
    resources = {"nvidia.com/gpu": "16", "cpu": "8"}
    api.create("podgroups", pod_group(members=2, phase="Pending", minResources=resources, priorityClassName="high"))
    found = only(look())
    assert (found.demand.gpu_milli, found.demand.pieces, found.demand.cpu_milli) == (8000, 2, 4000)
    assert (found.priority, found.rank) == (1000, 0)


def test_unequal_pods_of_a_gang_stay_apart(api: FakeKubernetes, look: Any) -> None:
    api.install(VOLCANO)
    api.create("podgroups", pod_group(members=2))
    for item in (*gang("a", gpus=1), *gang("b", gpus=4)):
        api.create("pods", item)
    found = live(look())
    assert set(found) == {"a", "b"}
    assert "gang of unequal pods" in found["a"].constraints.unchecked
