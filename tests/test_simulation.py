"""The simulated cluster: figures worked out by hand, and the promises that training and the demo rest on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rca.graph import Floats
from rca.incident import SourceStatus
from rca.panel import LEAD, Panel
from rca.simulation import engine, faults, incidents, scenarios, telemetry
from rca.simulation.engine import MAX_LOAD, Drivers, Effects, State
from rca.simulation.faults import MECHANISMS, Mechanism
from rca.simulation.incidents import SimulatedIncident, sample_incident
from rca.simulation.topology import Topology, random_topology

STEPS = 4


def cluster(
    *edges: str,
    own: tuple[float, ...] = (),
    rate: float = 10.0,
    calls: tuple[float, ...] = (),
    busy: float = 1e-9,
    **more: object,
) -> Topology:
    """Services a, b, ... on levels by their longest way from a; nobody waits in a queue unless ``busy`` says so."""
    names = tuple(sorted({c for edge in edges for c in edge if c.isalpha()}))
    source = np.array([names.index(e[0]) for e in edges], dtype=np.int64)
    target = np.array([names.index(e[2]) for e in edges], dtype=np.int64)
    level = np.zeros(len(names), dtype=np.int64)
    for _ in names:
        for a, b in zip(source, target, strict=True):
            level[b] = max(level[b], level[a] + 1)
    services, count = len(names), len(edges)
    nowhere = np.full(services, -1)
    entry = np.zeros(services)
    entry[0] = rate
    plain = Topology(
        names=names,
        level=level,
        base_time=np.array(own or (0.1,) * services),
        spread=np.full(services, 0.5),
        busy=np.full(services, busy),
        parallel=np.zeros(services, dtype=bool),
        base_error=np.zeros(services),
        entry_rate=entry,
        source=source,
        target=target,
        calls=np.array(calls or (1.0,) * count),
        asynchronous=np.zeros(count, dtype=bool),
        timeout=np.full(count, np.inf),
        retries=np.zeros(count, dtype=np.int64),
        fallback=np.zeros(count),
        network=np.zeros(count),
        host=nowhere,
        gpu=nowhere,
        queue=nowhere,
        hosts=(),
        gpus=(),
        queues=(),
        workloads=(),
        workload_gpu=np.empty(0, dtype=np.int64),
        workload_host=np.empty(0, dtype=np.int64),
    )
    return replace(plain, **more)  # type: ignore[arg-type]


def calm(topology: Topology) -> Drivers:
    """No chance at all."""
    ones = np.ones((topology.size, STEPS))
    return Drivers(
        demand=ones,
        own=ones,
        error=ones,
        host=np.zeros((len(topology.hosts), STEPS)),
        gpu=np.zeros((len(topology.gpus), STEPS)),
        queue_wait=np.zeros((len(topology.queues), STEPS)),
    )


def play(topology: Topology, **effects: dict[int, float]) -> State:
    """Run with effects that last all the time."""
    steady = {name: {k: np.full(STEPS, v) for k, v in rows.items()} for name, rows in effects.items()}
    return engine.run(topology, calm(topology), Effects(**steady))  # type: ignore[arg-type]


def last(values: Floats) -> list[float]:
    return values[:, -1].tolist()


# --- load flows down --------------------------------------------------------------------------------------------------


def test_load_flows_down_times_calls_per_request() -> None:
    state = play(cluster("a>b", "a>c", "b>c", calls=(2.0, 0.5, 3.0)))
    # c: half a call of each of 10, and three of each of 20.
    assert last(state.rate) == pytest.approx([10.0, 20.0, 65.0])
    assert last(state.call_rate) == pytest.approx([20.0, 5.0, 60.0])


@given(seed=st.integers(0, 10**6), services=st.integers(4, 40))
@settings(max_examples=25, deadline=None)
def test_what_arrives_is_what_was_sent(seed: int, services: int) -> None:
    rng = np.random.default_rng(seed)
    topology = random_topology(rng, services)
    topology = replace(topology, retries=np.zeros_like(topology.retries))
    plan = replace(incidents.draw_plan(rng), baseline_steps=10, window_steps=5, onset_step=0)
    drivers = incidents.draw_drivers(rng, topology, plan)
    state = engine.run(topology, drivers)
    arrived = topology.entry_rate[:, None] * drivers.demand
    np.add.at(arrived, topology.target, state.call_rate)
    np.testing.assert_allclose(state.rate, arrived, rtol=1e-9)
    # Nothing answers before its own work and the calls it waits for one after the other are done.
    waited = np.zeros_like(state.own)
    np.add.at(waited, topology.source, state.time_share)
    serial = ~topology.parallel
    np.testing.assert_allclose(state.latency[serial], (state.own + waited)[serial], rtol=1e-9)
    assert (state.latency >= state.own - 1e-12).all()
    assert ((state.error >= 0) & (state.error <= 1)).all()


def test_retries_send_a_failed_call_again() -> None:
    topology = cluster("a>b", retries=np.array([2]))
    state = play(topology, error_add={1: 0.5})
    # 1 + 0.5 + 0.25 attempts; it fails for the caller when all three fail.
    assert last(state.call_rate) == pytest.approx([17.5])
    assert last(state.call_error) == pytest.approx([0.125])
    assert last(state.error) == pytest.approx([0.125, 0.5])
    assert last(state.latency) == pytest.approx([0.1 + 1.75 * 0.1, 0.1])


# --- latency comes up -------------------------------------------------------------------------------------------------


def test_latency_of_calls_one_after_the_other_adds_up() -> None:
    topology = cluster("a>b", "a>c", "c>d", own=(0.01, 0.1, 0.02, 0.3), calls=(2.0, 1.0, 0.5), network=np.full(3, 1e-3))
    state = play(topology)
    c = 0.02 + 0.5 * (0.3 + 1e-3)
    assert last(state.latency) == pytest.approx([0.01 + 2 * 0.101 + (c + 1e-3), 0.1, c, 0.3])
    assert last(state.time_share) == pytest.approx([0.202, c + 1e-3, 0.5 * 0.301])
    assert last(state.call_latency) == pytest.approx([0.101, c + 1e-3, 0.301])


def test_of_calls_at_once_only_the_longest_counts() -> None:
    topology = cluster("a>b", "a>c", own=(0.01, 0.1, 0.4), parallel=np.array([True, False, False]))
    assert last(play(topology).latency)[0] == pytest.approx(0.41)
    # The shorter one may get slower without anybody noticing.
    assert last(play(topology, own_add={1: 0.2}).latency)[0] == pytest.approx(0.41)
    assert last(play(topology, own_add={1: 0.5}).latency)[0] == pytest.approx(0.61)


def test_nobody_waits_for_an_asynchronous_call_nor_feels_its_failure() -> None:
    topology = cluster("a>b", own=(0.01, 0.1), asynchronous=np.array([True]))
    state = play(topology, own_add={1: 5.0}, error_add={1: 0.9})
    assert last(state.latency) == pytest.approx([0.01, 5.1])
    assert last(state.error) == pytest.approx([0.0, 0.9])
    assert last(state.rate) == pytest.approx([10.0, 10.0])


def test_a_time_out_ends_the_wait_with_a_failure() -> None:
    topology = cluster("a>b", own=(0.01, 0.1), timeout=np.array([1.0]))
    fine, hung = play(topology), play(topology, own_add={1: 60.0})
    assert last(fine.latency)[0] == pytest.approx(0.11, rel=1e-3)
    assert last(fine.error)[0] < 1e-3
    assert last(hung.latency)[0] == pytest.approx(1.01, rel=1e-3)
    assert last(hung.call_error)[0] == pytest.approx(1.0, abs=1e-3)
    # Right at the limit half of the calls are too late.
    at_limit = play(topology, own_add={1: 0.9})
    assert last(at_limit.call_error)[0] == pytest.approx(0.5)


def test_failures_come_up_and_a_fallback_survives_them() -> None:
    assert last(play(cluster("a>b"), error_add={1: 0.2}).error)[0] == pytest.approx(0.2)
    assert last(play(cluster("a>b", fallback=np.array([0.75])), error_add={1: 0.2}).error)[0] == pytest.approx(0.05)
    # Of two failing callees, a request survives only if both answer.
    both = play(cluster("a>b", "a>c"), error_add={1: 0.5, 2: 0.5})
    assert last(both.error)[0] == pytest.approx(0.75)


def test_failing_fast_shortens_the_answers() -> None:
    topology = cluster("a>b", own=(0.01, 0.2))
    usual = play(topology)
    slow_failure, fast_failure = (
        play(topology, error_add={1: 0.5}),
        play(topology, error_add={1: 0.5}, fail_fast={1: 1}),
    )
    assert last(slow_failure.latency) == pytest.approx(last(usual.latency))
    assert last(fast_failure.latency) == pytest.approx([0.01 + 0.2 * 0.55, 0.2 * 0.55])
    assert last(fast_failure.error) == last(slow_failure.error)


def test_delay_between_two_nodes_is_seen_by_the_caller_alone() -> None:
    topology = cluster("a>b", own=(0.01, 0.1))
    state = play(topology, network_add={0: 0.3})
    assert last(state.latency) == pytest.approx([0.41, 0.1])
    assert last(state.network) == pytest.approx([0.3])


def test_a_resource_slows_those_who_share_it() -> None:
    topology = cluster(
        "a>b", "a>c", own=(0.01, 0.1, 0.1), hosts=("h",), gpus=("g",), queues=("q",),
        host=np.array([0, -1, -1]), gpu=np.array([-1, 0, -1]), queue=np.array([-1, -1, 0]),
    )  # fmt: skip
    usual = play(topology)
    assert last(play(topology, gpu_add={0: 2.0}).own - usual.own) == pytest.approx([0.0, 0.2, 0.0])
    assert last(play(topology, host_add={0: 1.0}).own - usual.own) == pytest.approx([0.01, 0.0, 0.0])
    waiting = play(topology, queue_add={0: 0.7})
    assert last(waiting.own - usual.own) == pytest.approx([0.0, 0.0, 0.7])
    assert last(waiting.queue_wait) == pytest.approx([0.7])
    assert last(play(topology, gpu_error={0: 0.3}).error) == pytest.approx([0.3, 0.3, 0.0])


def test_a_busy_service_gets_slow_and_then_sheds_load() -> None:
    topology = cluster("a>b", own=(0.01, 0.1), busy=0.5)
    usual = play(topology)
    assert last(usual.utilization) == pytest.approx([0.5, 0.5])
    assert last(usual.own)[1] == pytest.approx(0.1 * (1 + 0.25 / 0.5))
    flood = play(topology, calls_scale={0: 4.0})
    assert last(flood.utilization)[1] == pytest.approx(2.0)
    assert last(flood.own)[1] == pytest.approx(0.1 * (1 + MAX_LOAD**2 / (1 - MAX_LOAD)))
    assert last(flood.error)[1] == pytest.approx(1 - MAX_LOAD / 2)


# --- clusters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 25, 60, 150, 500])
def test_clusters_of_every_size_are_sound(size: int) -> None:
    for seed in range(3):
        topology = random_topology(np.random.default_rng([size, seed]), size)
        assert topology.size == size
        # Callers come before callees, so there is no cycle and each service has a way in.
        assert (topology.level[topology.source] < topology.level[topology.target]).all()
        assert (topology.source < topology.target).all()
        called = np.zeros(size, dtype=bool)
        called[topology.target] = True
        assert (called | (topology.level == 0)).all()
        assert (topology.entry_rate[topology.level == 0] > 0).all()
        assert len(set(zip(topology.source.tolist(), topology.target.tolist(), strict=True))) == len(topology.source)
        assert (topology.base_rates() > 0).all()
        assert (topology.host < len(topology.hosts)).all()
        assert (topology.gpu < len(topology.gpus)).all()
        assert (topology.queue < len(topology.queues)).all()


def test_clusters_differ() -> None:
    drawn = [random_topology(np.random.default_rng(seed), 40) for seed in range(40)]
    assert len({len(t.source) for t in drawn}) > 10
    assert any(t.gpus for t in drawn)
    assert any(not t.gpus for t in drawn)
    assert any(t.queues for t in drawn)
    assert any(t.workloads for t in drawn)
    assert any(t.parallel.any() for t in drawn)
    assert any(t.asynchronous.any() for t in drawn)
    assert any((t.retries > 0).any() for t in drawn)
    assert any(np.isfinite(t.timeout).any() for t in drawn)
    # Some callees are shared by many callers.
    assert max(int(np.bincount(t.target).max()) for t in drawn) >= 8


def test_a_fault_has_no_strength_before_its_onset() -> None:
    for seed in range(30):
        shape = faults.profile(np.random.default_rng(seed), 50, 30)
        assert (shape[:30] == 0).all()
        assert shape[30:].max() > 0.3
        assert shape.max() <= 1.5


# --- incidents --------------------------------------------------------------------------------------------------------


def same_panel(one: Panel, other: Panel) -> None:
    for group in ("baseline", "window", "edge_baseline", "edge_window"):
        assert set(getattr(one, group)) == set(getattr(other, group))
        for name, values in getattr(one, group).items():
            np.testing.assert_array_equal(values, getattr(other, group)[name])


def test_the_same_seed_gives_the_same_incident_and_another_seed_another() -> None:
    one, again, other = sample_incident(5), sample_incident(5), sample_incident(6)
    same_panel(one.panel, again.panel)
    assert one.incident.equals(again.incident)
    assert (one.cause, one.path, one.mechanism) == (again.cause, again.path, again.mechanism)
    assert not one.incident.equals(other.incident)


@pytest.fixture(scope="module")
def drawn() -> list[SimulatedIncident]:
    return [sample_incident(seed, nodes=12 + seed % 15) for seed in range(110)]


def test_most_incidents_have_a_cause_and_some_have_none(drawn: list[SimulatedIncident]) -> None:
    quiet = [s for s in drawn if s.cause < 0]
    assert 2 <= len(quiet) <= 30
    for item in quiet:
        assert (item.mechanism, item.path) == (None, ())
        assert item.flow.tolist() == [0.0] * len(item.flow)
        assert item.incident.truth is not None
        assert item.incident.truth.causes == ()
    assert len({s.mechanism for s in drawn}) == 1 + len(MECHANISMS)


def test_the_true_path_goes_over_edges_from_the_cause_to_the_victim(drawn: list[SimulatedIncident]) -> None:
    with_path = 0
    for item in drawn:
        graph = item.panel.graph
        joined = {frozenset(pair) for pair in zip(graph.callers.tolist(), graph.callees.tolist(), strict=True)}
        if not item.path:
            continue
        with_path += 1
        assert item.path[0][0] == item.cause
        assert item.path[-1][1] == item.panel.victim
        assert all(frozenset(step) in joined for step in item.path)
        assert all(one[1] == other[0] for one, other in pairwise(item.path))
        nodes = [item.path[0][0], *(target for _, target in item.path)]
        assert len(set(nodes)) == len(nodes)
    assert with_path > 50


def test_a_cause_is_a_node_of_the_graph_and_the_victim_felt_it(drawn: list[SimulatedIncident]) -> None:
    felt = []
    for item in drawn:
        panel = item.panel
        values = panel.window[panel.metric][panel.victim, LEAD + item.onset_step :]
        assert np.isfinite(values).any()
        assert item.cause < len(panel.graph.nodes)
        assert ((item.flow >= 0) & (item.flow <= 1)).all()
        if item.cause >= 0:
            felt.append(np.nanmean(values) > np.nanmean(item.counterfactual_first[item.onset_step :]))
    # A gap in the telemetry can swallow what was felt, rarely.
    assert np.mean(felt) > 0.95


def test_telemetry_has_the_gaps_of_real_monitoring(drawn: list[SimulatedIncident]) -> None:
    panels = [s.panel for s in drawn]
    assert {p.step for p in panels} >= {1.0, 15.0, 60.0, 300.0}
    assert min(next(iter(p.window.values())).shape[1] - LEAD for p in panels) <= 4
    assert any(not p.edge_window for p in panels)
    assert any(p.edge_window for p in panels)
    assert any("error_ratio" not in p.window for p in panels)
    assert any(s.hidden_cause for s in drawn)
    assert any(np.isnan(next(iter(p.window.values()))[:, :LEAD]).all() for p in panels)
    assert any(p.onset is not None for p in panels)
    assert any(p.onset is None for p in panels)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_can_be_drawn(mechanism: Mechanism) -> None:
    for seed in range(3):
        item = sample_incident(seed, nodes=20, mechanism=mechanism)
        assert item.mechanism is mechanism
        assert item.cause >= 0
        truth = item.incident.truth
        assert truth is not None
        assert truth.kind == mechanism.value
        assert truth.causes == (item.panel.graph.nodes[item.cause],)


@pytest.mark.parametrize("size", [10, 100, 500])
def test_incidents_of_every_size_can_be_drawn(size: int) -> None:
    graph = sample_incident(1, nodes=size).panel.graph
    services = [name for name in graph.nodes if name.startswith("svc-")]
    assert 0.6 * size <= len(services) <= size


def test_a_fault_that_cannot_be_is_refused() -> None:
    rng = np.random.default_rng(0)
    bare = random_topology(rng, 20, infrastructure=False)
    possible = faults.possible(bare)
    assert Mechanism.GPU_CONTENTION not in possible
    assert Mechanism.QUEUE_IMBALANCE not in possible
    assert Mechanism.LATENCY in possible


# --- the counterfactual -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_rerun_differs_by_the_fault_alone(mechanism: Mechanism) -> None:
    rng = np.random.default_rng(11)
    for _ in range(50):
        topology = random_topology(rng, 25)
        if mechanism in faults.possible(topology):
            break
    plan = replace(incidents.draw_plan(rng), baseline_steps=40, window_steps=12, onset_step=3)
    drivers = incidents.draw_drivers(rng, topology, plan)
    usual = engine.run(topology, drivers)
    shape = np.where(np.arange(plan.steps) >= plan.onset, 1.0, 0.0)
    fault = faults.draw(rng, topology, mechanism, shape, usual.latency.mean(axis=1), strength=2.0)
    broken = engine.run(topology, drivers, fault.effects)
    before, after = slice(0, plan.onset), slice(plan.onset, None)
    fields = vars(usual)
    # Before the onset both worlds are the same to the last bit; after it they are not.
    for name in fields:
        np.testing.assert_array_equal(getattr(broken, name)[:, before], fields[name][:, before], err_msg=name)
    assert any(np.abs(getattr(broken, name)[:, after] - fields[name][:, after]).max() > 1e-4 for name in fields)
    # The fault taken back gives the usual world again.
    np.testing.assert_array_equal(engine.run(topology, drivers, Effects()).latency, usual.latency)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_world_measured_twice_with_one_seed_gives_the_same_readings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = random_topology(rng, 20)
    plan = replace(incidents.draw_plan(rng), baseline_steps=20, window_steps=8, onset_step=0)
    coverage = incidents.draw_coverage(rng, topology)
    usual = engine.run(topology, incidents.draw_drivers(rng, topology, plan))
    one = telemetry.observe(7, topology, coverage, usual, usual, plan.step, None, {})
    two = telemetry.observe(7, topology, coverage, usual, usual, plan.step, None, {})
    other = telemetry.observe(8, topology, coverage, usual, usual, plan.step, None, {})
    for name in one.services:
        np.testing.assert_array_equal(one.services[name], two.services[name])
    assert not np.array_equal(one.services["request_rate"], other.services["request_rate"])


@pytest.mark.parametrize("mechanism", [Mechanism.LATENCY, Mechanism.ERRORS, Mechanism.FAIL_FAST])
def test_what_the_fault_does_not_reach_reads_the_same_with_and_without_it(mechanism: Mechanism) -> None:
    rng = np.random.default_rng(4)
    # Retries would carry load, and with it the fault, to other callees.
    topology = random_topology(rng, 30)
    topology = replace(topology, retries=np.zeros_like(topology.retries))
    plan = replace(incidents.draw_plan(rng), baseline_steps=20, window_steps=8, onset_step=0)
    coverage = incidents.draw_coverage(rng, topology)
    drivers = incidents.draw_drivers(rng, topology, plan)
    usual = engine.run(topology, drivers)
    shape = np.where(np.arange(plan.steps) >= plan.onset, 1.0, 0.0)
    at = int(topology.target[-1])
    fault = faults.draw(rng, topology, mechanism, shape, usual.latency.mean(axis=1), at=at, strength=3.0)
    broken = engine.run(topology, drivers, fault.effects)
    with_fault = telemetry.observe(3, topology, coverage, broken, usual, plan.step, fault, {})
    without = telemetry.observe(3, topology, coverage, usual, usual, plan.step, None, {})
    reached = telemetry.touched_share(topology, fault) > 0
    assert reached[at]
    assert not reached.all()
    changed = False
    for name, values in with_fault.services.items():
        np.testing.assert_array_equal(values[~reached], without.services[name][~reached], err_msg=name)
        changed |= not np.array_equal(values[reached], without.services[name][reached], equal_nan=True)
    assert changed
    for key, reading in with_fault.resources.items():
        np.testing.assert_array_equal(reading, without.resources[key], err_msg=str(key))


def test_the_readings_scatter_around_the_truth() -> None:
    topology = cluster("a>b", "b>c", rate=200.0)
    steps = 400
    ones = np.ones((3, steps))
    drivers = Drivers(ones, ones, ones, np.zeros((0, steps)), np.zeros((0, steps)), np.zeros((0, steps)))
    state = engine.run(topology, drivers, Effects(error_add={2: np.full(steps, 0.1)}))
    coverage = telemetry.Coverage(("latency_mean_seconds",), (), False, False, 1.0, np.zeros(3, dtype=bool), 0.0, 0.0)
    seen = telemetry.observe(0, topology, coverage, state, state, 10.0, None, {})
    for name, truth in (
        ("latency_mean_seconds", state.latency),
        ("request_rate", state.rate),
        ("error_ratio", state.error),
    ):
        np.testing.assert_allclose(seen.services[name].mean(axis=1), truth.mean(axis=1), rtol=0.02, err_msg=name)
    p50, p99 = seen.services["latency_p50_seconds"], seen.services["latency_p99_seconds"]
    assert (p50 < p99).mean() > 0.99
    np.testing.assert_allclose(seen.calls["request_rate"].mean(axis=1), state.call_rate.mean(axis=1), rtol=0.02)


def test_a_quiet_incident_is_its_own_counterfactual() -> None:
    quiet = next(s for s in (sample_incident(seed, nodes=12, normal=1.0) for seed in range(5)) if s.cause < 0)
    values = quiet.panel.window[quiet.panel.metric][quiet.panel.victim, LEAD:]
    seen = np.isfinite(values)
    np.testing.assert_array_equal(values[seen], quiet.counterfactual[seen])


# --- scenarios --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_every_scenario_breaks_what_it_says(name: str, seed: int) -> None:
    scenario, built = scenarios.SCENARIOS[name], scenarios.build(name, seed)
    incident = built.incident
    assert incident.problems() == []
    assert incident.truth is not None
    assert incident.truth.causes == (scenario.at,)
    assert incident.truth.kind == scenario.mechanism.value
    assert (incident.header.victim.node, incident.header.victim.metric) == (scenario.victim, scenario.metric)
    assert incident.truth.path[0][0] == scenario.at
    assert incident.truth.path[-1][1] == scenario.victim
    assert incident.workloads.num_rows
    assert incident.devices.num_rows
    assert all(source.status is SourceStatus.OK for source in incident.header.sources)
    values = built.panel.window[scenario.metric][built.panel.victim, LEAD + built.onset_step :]
    assert incident.truth.counterfactual is not None
    assert np.nanmedian(values) > 1.2 * np.nanmedian(built.counterfactual[built.onset_step :])


def test_a_scenario_is_the_same_for_the_same_seed() -> None:
    assert scenarios.build("overload", 1).incident.equals(scenarios.build("overload", 1).incident)
    assert not scenarios.build("overload", 1).incident.equals(scenarios.build("overload", 2).incident)


def test_one_scenario_has_a_training_job_take_a_gpu_from_p0_inference() -> None:
    rows = {row["workload"]: row for row in scenarios.build("gpu-contention", 0).incident.workloads.to_pylist()}
    job, serving = rows["train-llm-812"], rows["chat-inference-0"]
    assert job["devices"] == serving["devices"] == ["gpu-0"]
    assert (serving["priority_class"], job["priority_class"]) == ("P0", "P3")
    assert job["started"] > serving["started"]


def test_an_unknown_scenario_is_refused() -> None:
    with pytest.raises(KeyError):
        scenarios.build("meteor", 0)
