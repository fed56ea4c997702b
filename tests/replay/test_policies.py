"""What each policy decides, on schedules small enough to check by hand; and how users name their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exporters.policy import load_policy, parse_policy
from rca.errors import InvalidInputError, NotFoundError
from rca.replay.engine import replay
from rca.replay.model import Backfill, Cluster, Options, Trace, Workloads
from rca.replay.policies import NAMES, Policy, View, learned, multi_objective, ordering, resolve
from rca.replay.policies.declared import Declared, with_promises


def one_gpu(submit: list[float], duration: list[float], **columns: object) -> Trace:
    """Workloads that need the one GPU of the cluster for themselves."""
    return Trace(Cluster.of([1]), Workloads.of(submit, duration, gpu_count=1, **columns))


def started(trace: Trace, policy: Policy, **options: object) -> list[int]:
    """Rows in the order in which they first ran."""
    return np.argsort(replay(trace, policy, Options(**options)).first_start, kind="stable").tolist()  # type: ignore[arg-type]


def test_sjf_takes_the_shortest_and_is_fcfs_when_all_are_equal() -> None:
    trace = one_gpu([0, 1, 2, 3], [9, 8, 2, 5])
    assert started(trace, resolve("sjf")) == [0, 2, 3, 1]
    equal = replace(trace, workloads=replace(trace.workloads, estimate=np.full(4, 3.0)))
    assert started(equal, resolve("sjf")) == started(equal, resolve("fcfs"))


def test_round_robin_gives_each_rank_its_share_of_every_round() -> None:
    """Weights 2 and 1 with a backlog: two urgent ones, one background, again and again."""
    trace = one_gpu([0] * 9, [1] * 9, rank=[0] * 6 + [1] * 3)
    order = started(trace, ordering.StaticRoundRobin((2, 1)))
    assert [int(trace.workloads.rank[row]) for row in order] == [0, 0, 1, 0, 0, 1, 0, 0, 1]


def test_a_reservation_is_free_for_its_rank_even_when_others_fill_the_rest() -> None:
    trace = Trace(Cluster.of([4]), Workloads.of([0, 0, 0, 0, 1], [9] * 5, gpu_count=1, rank=[1, 1, 1, 1, 0]))
    result = replay(trace, ordering.MemoryReservation((0.25,)))
    assert result.start.tolist() == [0, 0, 0, 9, 1]


def test_less_time_left_raises_the_dynamic_weight_and_cpu_saturation_lowers_it() -> None:
    policy = ordering.DynamicPriority()
    trace = Trace(
        Cluster.of([1], cpu_milli=[10_000]),
        Workloads.of([0, 0, 0], [1, 1, 1], cpu_milli=[0, 0, 10_000], rank=1, wait_slo=[100.0, 20.0, 100.0]),
    )
    loose, tight, hungry = policy.order(view(trace, now=10.0, free_cpu=[10_000]), np.arange(3))
    assert tight < loose == hungry
    loose, _, hungry = policy.order(view(trace, now=10.0, free_cpu=[0]), np.arange(3))
    assert loose < hungry


def view(trace: Trace, now: float = 0.0, free_cpu: list[int] | None = None, **changes: object) -> View:
    """A view in which everything waits and nothing has run, but for ``changes``."""
    size, cluster = len(trace.workloads), trace.cluster
    nothing = np.zeros(0, np.int64)
    columns: dict[str, object] = {
        "now": now,
        "trace": trace,
        "options": Options(),
        "waiting": np.arange(size),
        "running": nothing,
        "finished": nothing,
        "status": np.ones(size, np.int64),
        "start": np.full(size, np.nan),
        "first_start": np.full(size, np.nan),
        "end": np.full(size, np.nan),
        "node": np.full(size, -1),
        "preemptions": np.zeros(size, np.int64),
        "free_gpu": np.full((len(cluster), int(cluster.gpus.max())), 1000),
        "free_cpu": np.array(free_cpu) if free_cpu is not None else cluster.cpu_milli,
        "free_memory": cluster.memory_mib,
    }
    return View(**{**columns, **changes})  # type: ignore[arg-type]


def test_the_urgency_weight_follows_the_published_formula() -> None:
    trace = Trace(
        Cluster.of([1], cpu_milli=[10_000]),
        Workloads.of([0, 0], [1, 1], cpu_milli=[5000, 0], wait_slo=[300.0, 30.0], business=[1.0, 5.0]),
    )
    found = -resolve("urgency-weight").order(view(trace), np.arange(2))
    np.testing.assert_allclose(found, [0.4 * 1.1 + 0.35 * 0.8 + 0.25, 0.4 + 0.35 * 0.9 + 0.25 * 5])


def test_the_health_weight_follows_each_service_and_takes_the_unknown_for_healthy() -> None:
    trace = one_gpu([0, 0, 0], [1, 1, 1], service=["slow", "slow", "new"], wait_slo=0.15)
    first_start = np.array([0.1, np.nan, np.nan])
    seen = view(trace, finished=np.array([0]), first_start=first_start)
    found = -resolve("health-weight").order(seen, np.array([1, 2]))
    np.testing.assert_allclose(found, [0.6 * 0.5 + 0.3 * 1.0 + 0.1, 1.0])


def test_memory_pressure_scales_the_base_and_is_left_out_where_memory_is_unknown() -> None:
    known = Trace(Cluster.of([1], memory_mib=[1000]), Workloads.of([0, 0], [1, 1], rank=[0, 1]))
    pressed = view(known, free_memory=np.array([400]))
    np.testing.assert_allclose(-resolve("memory-pressure-weight").order(pressed, np.arange(2)), [0.4, 0.2])
    unknown = replace(known, cluster=Cluster.of([1]))
    np.testing.assert_allclose(-resolve("memory-pressure-weight").order(view(unknown), np.arange(2)), [1.0, 0.5])


def test_edf_takes_the_earliest_deadline_and_derives_missing_ones() -> None:
    trace = one_gpu(
        [0, 1, 1, 1], [5, 5, 5, 5], deadline=[np.inf, 60, 30, np.inf], wait_slo=[np.inf, np.inf, np.inf, 14]
    )
    assert started(trace, resolve("edf")) == [0, 3, 2, 1]


def test_firm_deadlines_let_the_hopeless_leave() -> None:
    trace = one_gpu([0, 1], [10, 5], deadline=[20, 9])
    assert replay(trace, ordering.Edf(firm=True)).started.tolist() == [True, False]
    assert replay(trace, ordering.Edf()).started.tolist() == [True, True]


def test_compensation_is_fifteen_hundredths_of_the_spread_of_recent_latencies() -> None:
    trace = one_gpu([0, 0, 100], [10, 30, 1], deadline=1000)
    policy = ordering.CompensatedEdf()
    replay(trace, policy)
    latencies = np.array([10.0, 40.0])
    assert policy.extension[2] == pytest.approx(0.15 * (np.percentile(latencies, 95) - latencies.mean()))
    assert policy.extension[0] == 0


def test_semantic_dynamic_lifts_who_has_waited_half_its_sla_and_stops_background_work() -> None:
    trace = one_gpu([0, 1], [100, 5], rank=[2, 0], preemptible=[True, False], wait_slo=[1000, 10])
    result = replay(trace, resolve("semantic-dynamic"))
    assert (result.wait[1], result.preemptions[0]) == (0, 1)
    waiting = one_gpu([0, 5], [1, 1], rank=[2, 1], wait_slo=[10, 100])
    keys = ordering.SemanticDynamic().order(view(waiting, now=9.0), np.arange(2))
    assert keys[0] < keys[1]


def test_tchebycheff_weights_choose_what_matters() -> None:
    """Alone, throughput prefers the small job, fairness the tenant that holds nothing."""
    work = Workloads.of([0, 0, 0], [50, 5, 50], gpu_count=1, tenant=["rich", "rich", "poor"])
    trace = Trace(Cluster.of([2]), work)
    seen = view(trace, running=np.array([0]))
    rows = np.array([1, 2])
    throughput = multi_objective.Tchebycheff(multi_objective.Weights(1.0, 0.0, 0.0)).order(seen, rows)
    fairness = multi_objective.Tchebycheff(multi_objective.Weights(0.0, 1.0, 0.0)).order(seen, rows)
    assert throughput[0] < throughput[1]
    assert fairness[1] < fairness[0]
    with pytest.raises(ValueError, match="negative"):
        multi_objective.Weights(-1.0)


def test_the_learned_policy_beats_first_come_first_served_on_schedules_it_never_saw() -> None:
    """Inference needs no torch; the schedules are those of `rca.replay.policies.training`, written out here."""
    late = dict.fromkeys(("fcfs", "learned"), 0)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        size = 120
        rank = rng.choice(3, size, p=[0.4, 0.35, 0.25])
        duration = rng.lognormal(np.array([4.0, 6.0, 7.0])[rank], 0.8)
        slo = np.array([60.0, 900.0, 7200.0])[rank]
        work = Workloads.of(
            np.cumsum(rng.exponential(25.0, size)),
            duration,
            gpu_count=rng.integers(1, 5, size),
            rank=rank,
            wait_slo=slo,
        )
        for name in late:
            result = replay(Trace(Cluster.of([8, 8, 8]), work), resolve(name), Options(backfill=Backfill.GREEDY))
            late[name] += int((~(result.wait <= slo)).sum())
    assert late["learned"] < late["fcfs"]


def test_the_elastic_pool_grows_under_load_and_shrinks_when_idle() -> None:
    trace = Trace(Cluster.of([1] * 20), Workloads.of([0], [1]))
    pool = learned.ElasticPool()
    busy = view(trace, free_gpu=np.zeros((20, 1), np.int64), waiting=np.zeros(0, np.int64))
    idle = view(trace, waiting=np.zeros(0, np.int64))
    assert [int(pool.step(busy).sum()) for _ in range(3)] == [6, 8, 10]
    assert [int(pool.step(idle).sum()) for _ in range(5)] == [8, 6, 4, 4, 4]


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "actor.npz"
    np.savez(path, w1=np.zeros((4, 3)), b1=np.zeros(4), w2=np.zeros((6, 4)), b2=np.zeros(6))
    with pytest.raises(InvalidInputError, match="w1 of shape"):
        learned.load_actor(path)
    path.write_bytes(b"no archive")
    with pytest.raises(InvalidInputError, match="holds no weights"):
        learned.load_actor(path)


@pytest.mark.train
def test_training_gives_weights_that_the_policy_takes() -> None:
    pytest.importorskip("torch")
    from rca.replay.policies import training

    arrays = training.train(episodes=2, seed=1, report=lambda _: None)
    policy = learned.Learned(learned.Actor(arrays))
    assert replay(training.synthetic(5, 30), policy).started.any()


USER_POLICY = """
import numpy as np
from rca.replay.policies.base import Placement, Policy

class MyPolicy(Policy):
    name = "mine"
    placement = Placement.CUSTOM
    chooses_victims = True
    preempts = True

    def keys(self, trace):
        return -trace.workloads.submit              # last come, first served

    def place(self, view, workload, feasible):
        return np.arange(len(feasible))             # the last node that fits

    def preempt(self, view, workload):
        rank = view.trace.workloads.rank
        return view.running[rank[view.running] > rank[workload]][:1]
"""


def test_a_users_policy_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USER_POLICY)
    policy = resolve(f"{path}:MyPolicy")
    trace = Trace(Cluster.of([1, 1]), Workloads.of([0, 0, 5], [20, 20, 5], gpu_count=1, rank=[1, 1, 0]))
    result = replay(trace, policy)
    assert (result.policy, result.wait[2], result.node[2]) == ("mine", 0, 1)
    assert result.preemptions.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("x = 1", "MyPolicy", "defines no MyPolicy"),
        ("class MyPolicy: pass", "MyPolicy", "is no policy"),
        ("1 / 0", "MyPolicy", "ZeroDivisionError"),
    ],
)
def test_a_file_that_is_no_policy_is_named(tmp_path: Path, source: str, name: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises((InvalidInputError, NotFoundError), match=message):
        resolve(f"{path}:{name}")


def test_unknown_policies_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(NotFoundError, match="best-fitt") as caught:
        resolve("best-fitt")
    assert "did you mean best-fit?" in caught.value.cure
    assert {resolve(name).name for name in NAMES} == set(NAMES)


def test_answers_of_the_wrong_shape_are_refused() -> None:
    class Wrong(Policy):
        interval = 0.0

        def order(self, view: View, rows: np.ndarray) -> np.ndarray:
            return np.zeros(len(rows) + 1)

    with pytest.raises(InvalidInputError, match="order must give a number for each"):
        replay(one_gpu([0], [1]), Wrong())


DECLARED = """
apiVersion: prioscope/v1
kind: TaskPriorityPolicy
metadata: { name: two-teams }
spec:
  levels:
    - { level: P0, waitSloSeconds: 5 }
    - { level: P1, waitSloSeconds: 50 }
  preemption: { allowed: false }
  rules:
    - { name: scoring, matchLabels: { app: scoring }, weight: 0.9, waitSloSeconds: 2 }
    - { name: batch, matchQueues: [batch], weight: 0.1 }
"""


def test_a_policy_file_orders_by_the_weight_of_the_first_matching_rule_then_by_rank() -> None:
    trace = one_gpu(
        [0, 1, 2, 3], [9, 1, 1, 1], rank=[1, 1, 0, 1],
        service=["other", "other", "other", "scoring"], queue=["batch"] * 3 + ["online"],
    )  # fmt: skip
    declaration = parse_policy(DECLARED)
    assert started(trace, Declared(declaration)) == [0, 3, 2, 1]
    assert with_promises(trace, declaration).workloads.wait_slo.tolist() == [50, 50, 5, 2]


def test_shipped_profiles_run_as_policies() -> None:
    trace = Trace(Cluster.of([8]), Workloads.of([0, 1], [5, 5], gpu_count=1, service=["risk-scoring", "other"]))
    policy = resolve("low-latency-risk-control")
    assert policy.name == load_policy("low-latency-risk-control").name
    result = replay(trace, policy)
    assert result.started.all()
    assert policy.guarantees
