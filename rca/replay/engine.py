"""Run a trace under a policy: prepares arrays for the kernel, and answers its questions with the policy's methods."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from rca.errors import InvalidInputError
from rca.replay import kernel
from rca.replay.model import (
    MIG_PROFILES,
    WHOLE,
    Backfill,
    Bools,
    Cluster,
    Engine,
    Failure,
    Floats,
    Ints,
    Options,
    Result,
    Series,
    Trace,
    Workloads,
)
from rca.replay.policies.base import Placement, Policy, View
from rca.replay.typical import Typical, typical_tasks

#: Workloads times nodes from which compiled code pays for being loaded (about a second when it is on disk already).
WORTH_COMPILING: Final = 200_000
#: Entries of the largest table of FGD scores by node and demand class.
MAX_CACHE: Final = 40_000_000
_MAX_RANKS: Final = 64
_BACKFILL: Final = (Backfill.NONE, Backfill.EASY, Backfill.GREEDY)


def replay(trace: Trace, policy: Policy, options: Options | None = None, typical: Typical | None = None) -> Result:
    """Rerun ``trace`` under ``policy``.

    The same arguments give the same result, whichever engine runs it. Random draws belong to the identities of
    workloads and nodes, so that a trace with one workload less differs by that workload alone.

    Args:
        typical: the tasks by which F is measured; the trace's own demand distribution by default. To compare replays
            of a trace and of a changed one, give both the same.

    Raises:
        InvalidInputError: a value of the trace, the options or the policy makes no sense.
    """
    options = options or Options()
    trace.check()
    _check(trace, options)
    engine = _engine(trace, options)
    run = _Run(trace, policy, options, typical)
    functions = kernel.compiled() if engine is Engine.COMPILED else vars(kernel)
    if engine is Engine.COMPILED:
        # Load or build the machine code before the clock starts; without workloads there is nothing to run.
        nothing = replace(trace, workloads=trace.workloads.select(np.zeros(0, np.int64)))
        _Run(nothing, Policy(), options, run.typical).warm(functions)
    started = time.process_time()
    run.go(functions)
    return run.result(engine, time.process_time() - started)


def _check(trace: Trace, options: Options) -> None:
    for name, value in (
        ("restart_seconds", options.restart_seconds),
        ("checkpoint_seconds", options.checkpoint_seconds),
    ):
        if not value >= 0:
            raise InvalidInputError(f"{name} is {value:g}", cure="give seconds, 0 or more")
    for failure in options.failures:
        if not 0 <= failure.node < len(trace.cluster) or not failure.start <= failure.end:
            raise InvalidInputError(
                f"{failure} is not possible", cure="name a node of the cluster, and start before end"
            )

    unknown = sorted(set(options.quotas) - set(trace.workloads.tenant_names))
    if unknown:
        known = ", ".join(trace.workloads.tenant_names) or "none"
        raise InvalidInputError(f"quota for {unknown[0]}, who is no tenant of the trace", cure=f"its tenants: {known}")


def _engine(trace: Trace, options: Options) -> Engine:
    if options.engine is not Engine.AUTO:
        return options.engine
    large = len(trace.workloads) * len(trace.cluster) > WORTH_COMPILING
    return Engine.COMPILED if large and find_spec("numba") is not None else Engine.INTERPRETED


def identity_hash(uid: Ints, seed: int) -> Ints:
    """Mix identities with a seed (splitmix64) into residues from 1 to `kernel.PRIME` - 1."""
    with np.errstate(over="ignore"):
        x = uid.astype(np.uint64) + np.uint64(seed % (1 << 63)) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x % np.uint64(kernel.PRIME - 1)).astype(np.int64) + 1


def demand_classes(work: Workloads) -> Ints:
    """Number workloads so that equal demands have equal numbers, [W]; each gang is a class of its own."""
    columns = np.stack(
        [
            work.cpu_milli,
            work.memory_mib,
            work.gpu_count,
            work.gpu_milli,
            work.mig,
            work.models,
            work.pools,
            work.pinned,
            work.gang,
        ],
        axis=1,
    )
    if len(columns) == 0:
        return np.zeros(0, np.int64)
    return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def fits_empty_cluster(cluster: Cluster, work: Workloads, demand: Ints) -> Bools:
    """Which workloads would fit some node of the empty cluster, each for itself, [W]."""
    result = np.zeros(len(work), bool)
    classes, firsts = np.unique(demand, return_index=True)
    model_bit = np.where(cluster.model >= 0, 1 << np.maximum(cluster.model, 0), 0)
    verdict = np.zeros(len(classes), bool)
    for at, row in enumerate(firsts):
        fits = (cluster.cpu_milli >= work.cpu_milli[row]) & (cluster.memory_mib >= work.memory_mib[row])
        if work.gpu_count[row]:
            fits &= cluster.mig == (work.mig[row] >= 0)
            fits &= cluster.gpus >= (1 if work.mig[row] >= 0 else work.gpu_count[row])
        if work.models[row]:
            fits &= (model_bit & work.models[row]) != 0
        if work.pools[row]:
            fits &= (cluster.pool & work.pools[row]) != 0
        if work.pinned[row] >= 0:
            fits &= np.arange(len(cluster)) == work.pinned[row]
        verdict[at] = fits.any()
    result[:] = verdict[np.searchsorted(classes, demand)]
    return result


def _gangs(work: Workloads) -> tuple[Ints, Ints]:
    """Return the next member (-1 at the end) and the leader (first member) of each workload's gang, [W]."""
    size = len(work)
    following = np.full(size, -1, np.int64)
    leader = np.arange(size, dtype=np.int64)
    rows = np.flatnonzero(work.gang >= 0)
    rows = rows[np.argsort(work.gang[rows], kind="stable")]
    same = work.gang[rows[1:]] == work.gang[rows[:-1]]
    following[rows[:-1][same]] = rows[1:][same]
    first = np.flatnonzero(np.concatenate([[True], ~same])) if len(rows) else np.zeros(0, np.int64)
    if len(rows):
        leader[rows] = rows[first][np.cumsum(np.concatenate([[True], ~same])) - 1]
    return following, leader


def _failures(failures: tuple[Failure, ...]) -> tuple[Floats, Ints, Bools]:
    moments = [(item.start, 0, item.node) for item in failures] + [
        (item.end, 1, item.node) for item in failures if np.isfinite(item.end)
    ]
    moments.sort()
    return (
        np.array([item[0] for item in moments], np.float64),
        np.array([item[2] for item in moments], np.int64),
        np.array([item[1] == 1 for item in moments], bool),
    )


class _Run:
    """One replay: the kernel's arrays, and the policy that answers it."""

    def __init__(self, trace: Trace, policy: Policy, options: Options, typical: Typical | None) -> None:
        self.trace, self.policy, self.options = trace, policy, options
        cluster, work = trace.cluster, trace.workloads
        self.measures = options.fragmentation or policy.placement is Placement.FGD
        if typical is None:
            typical = typical_tasks(work) if self.measures else Typical.none()
        self.typical = typical
        demand = demand_classes(work)
        following, leader = _gangs(work)
        problem = self._problem(cluster, work, demand, following, leader)
        # One memory layout, so that the machine code is built once.
        columns: dict[str, Any] = {name: np.array(column, order="C") for name, column in problem._asdict().items()}
        self.problem = kernel.Problem(**columns)
        self.state = self._state(cluster, work, demand)
        self.next_order = -np.inf

    def _problem(
        self, cluster: Cluster, work: Workloads, demand: Ints, following: Ints, leader: Ints
    ) -> kernel.Problem:
        options, policy, typical = self.options, self.policy, self.typical
        ready = work.submit.copy()
        np.maximum.at(ready, leader, work.submit)
        leaders = np.flatnonzero(leader == np.arange(len(work)))
        arrivals = leaders[np.lexsort((work.uid[leaders], ready[leaders]))]
        failure_time, failure_node, failure_up = _failures(options.failures)
        quota = np.array([options.quotas.get(name, -1) for name in work.tenant_names], np.int64)
        cached = policy.placement is Placement.FGD and len(cluster) * (demand.max(initial=0) + 1) <= MAX_CACHE
        return kernel.Problem(
            gpus=cluster.gpus,
            model_bit=np.where(cluster.model >= 0, 1 << np.maximum(cluster.model, 0), 0).astype(np.int64),
            pool=cluster.pool,
            mig=cluster.mig,
            node_mix=identity_hash(cluster.uid, options.seed + 1),
            cpu=cluster.cpu_milli,
            memory=cluster.memory_mib,
            submit=work.submit,
            duration=work.duration,
            estimate=work.estimate,
            need_cpu=work.cpu_milli,
            need_memory=work.memory_mib,
            need_gpus=work.gpu_count,
            milli=work.gpu_milli,
            profile=work.mig,
            models=work.models,
            pools=work.pools,
            pinned=work.pinned,
            rank=work.rank,
            tenant=work.tenant,
            next_member=following,
            leader=leader,
            distinct=work.distinct,
            preemptible=work.preemptible,
            mix=identity_hash(work.uid, options.seed),
            uid=work.uid,
            demand=demand,
            arrivals=arrivals,
            arrival_time=ready[arrivals],
            mig_size=np.array([profile.size for profile in MIG_PROFILES], np.int64),
            mig_starts=np.array([sum(1 << at for at in profile.starts) for profile in MIG_PROFILES], np.int64),
            failure_time=failure_time,
            failure_node=failure_node,
            failure_up=failure_up,
            quota=quota,
            guarantee=np.array(policy.guarantees, np.float64) * cluster.capacity_milli,
            rounds=np.array(policy.rounds, np.int64),
            group_milli=typical.group_milli,
            group_count=typical.group_count,
            group_models=typical.group_models,
            group_from=typical.group_from,
            typical_cpu=typical.cpu,
            typical_memory=typical.memory,
            typical_share=typical.share,
            flags=np.array(
                [
                    policy.placement,
                    policy.levels,
                    _BACKFILL.index(options.backfill),
                    options.preemption or policy.preempts,
                    policy.chooses_victims,
                    options.retry,
                    options.compaction,
                    policy.interval is not None,
                    self.measures,
                    options.series,
                    bool(policy.guarantees) or bool(policy.rounds),
                    cached,
                ],
                np.int64,
            ),
            numbers=np.array(
                [
                    options.restart_seconds,
                    options.checkpoint_seconds,
                    options.horizon,
                    -1.0 if policy.interval is None else policy.interval,
                    cluster.capacity_milli,
                ],
                np.float64,
            ),
        )

    def _state(self, cluster: Cluster, work: Workloads, demand: Ints) -> kernel.State:
        size, nodes = len(work), len(cluster)
        devices = max(1, int(cluster.gpus.max(initial=1)))
        free = np.where(np.arange(devices) < cluster.gpus[:, None], WHOLE, 0).astype(np.int64)
        blocks = -(-nodes // kernel.BLOCK)
        classes = int(demand.max(initial=0)) + 1
        cache = (nodes, classes) if self.problem.flags[kernel.CACHE] else (1, 1)
        ranks = min(_MAX_RANKS, max(int(work.rank.max(initial=0)) + 1, len(self.policy.guarantees)))
        # At least one entry each, so that compiled code sees arrays of one kind only.
        tenants = max(1, len(work.tenant_names))
        rounds = max(1, len(self.policy.rounds))
        rows = min(1 << 20, 2 * size + 2 * len(self.options.failures) + 1)

        def zeros(*shape: int) -> Ints:
            return np.zeros(shape, np.int64)

        def never(*shape: int) -> Floats:
            return np.full(shape, np.nan)

        state = kernel.State(
            i=zeros(kernel.INTS),
            f=np.zeros(kernel.FLOATS),
            status=zeros(size),
            start=never(size),
            first_start=never(size),
            end=never(size),
            remaining=work.duration.copy(),
            node=zeros(size) - 1,
            devices=zeros(size),
            placeable=fits_empty_cluster(cluster, work, demand),
            slot=zeros(size),
            preemptions=zeros(size),
            lost=np.zeros(size),
            by=zeros(size) - 1,
            cancel=work.cancel.copy(),
            key=self._keys(),
            queue=zeros(2 * size + 2),
            queue_key=np.zeros(2 * size + 2),
            queue_token=zeros(2 * size + 2),
            token=zeros(size),
            heap_time=np.zeros(2 * size + 2),
            heap_id=zeros(2 * size + 2),
            free=free,
            free_cpu=cluster.cpu_milli.copy(),
            free_memory=cluster.memory_mib.copy(),
            mig_used=zeros(nodes, devices),
            down=zeros(nodes),
            open=np.ones(nodes, bool),
            whole=zeros(nodes),
            best=zeros(nodes),
            total=zeros(nodes),
            fragmented=np.zeros(nodes),
            affinity=zeros(nodes, devices + 1),
            version=zeros(nodes),
            block_cpu=zeros(blocks),
            block_memory=zeros(blocks),
            block_whole=zeros(blocks),
            block_best=zeros(blocks),
            first_on=zeros(nodes) - 1,
            next_on=zeros(size) - 1,
            previous_on=zeros(size) - 1,
            running=zeros(size + 1),
            running_at=zeros(size),
            failed=np.zeros(classes, bool),
            rank_blocked=np.zeros(ranks, bool),
            tenant_blocked=np.zeros(tenants, bool),
            rank_used=np.zeros(ranks),
            tenant_used=zeros(tenants),
            round_at=np.zeros(rounds),
            round_used=zeros(rounds),
            requeue=zeros(size + 1),
            victims=zeros(size + 1),
            chosen=zeros(size + 1),
            reserved=np.zeros(nodes, bool),
            taken=zeros(nodes),
            scores=np.zeros(nodes),
            recent=zeros(kernel.WINDOW),
            row=zeros(devices),
            out=zeros(8 + devices),
            cache_score=np.zeros(cache),
            cache_device=zeros(*cache) - 1,
            cache_version=zeros(*cache) - 1,
            copy_free=zeros(nodes, devices),
            copy_cpu=zeros(nodes),
            copy_memory=zeros(nodes),
            copy_mig=zeros(nodes, devices),
            series=np.zeros((rows if self.options.series else 1, 6)),
        )
        state.i[[kernel.SCORES_FOR, kernel.ASKED_FOR]] = -1
        return state

    def _keys(self) -> Floats:
        keys = np.array(self.policy.keys(self.trace), np.float64)
        if keys.shape != (len(self.trace.workloads),) or np.isnan(keys).any():
            raise InvalidInputError(
                f"policy {self.policy.name}: keys must give one number a workload, got shape {keys.shape}"
                + (" with NaN" if np.isnan(keys).any() else "")
            )
        return keys

    def warm(self, functions: dict[str, Any]) -> None:
        """Load or build the machine code: one call without workloads."""
        functions["prepare"](self.problem, self.state)
        functions["advance"](self.problem, self.state)
        functions["stop_all"](self.problem, self.state, np.zeros(0, np.int64), -1)

    def go(self, functions: dict[str, Any]) -> None:
        """Run to the end, answering the kernel."""
        problem, state = self.problem, self.state
        advance = functions["advance"]
        functions["prepare"](problem, state)
        while (code := advance(problem, self.state)) != kernel.DONE:
            state = self.state
            if code == kernel.NEED_SPACE:
                grown = np.zeros((2 * len(state.series), state.series.shape[1]))
                grown[: len(state.series)] = state.series
                self.state = state._replace(series=grown)
            elif code == kernel.NEED_ORDER:
                if state.f[kernel.NOW] >= self.next_order:
                    self._order(functions)
            elif code == kernel.NEED_PLACE:
                self._place(int(state.i[kernel.REQUEST]))
            else:
                self._preempt(int(state.i[kernel.REQUEST]), functions)

    def _view(self) -> View:
        state = self.state
        ended = int(state.i[kernel.RECENT])
        at = np.arange(max(0, ended - kernel.WINDOW), ended) % kernel.WINDOW
        entries = slice(state.i[kernel.HEAD], state.i[kernel.TAIL])
        queue = state.queue[entries]
        return View(
            now=float(state.f[kernel.NOW]),
            trace=self.trace,
            options=self.options,
            waiting=queue[state.queue_token[entries] == state.token[queue]],
            running=state.running[: state.i[kernel.RUNNING]],
            finished=state.recent[at],
            status=state.status,
            start=state.start,
            first_start=state.first_start,
            end=state.end,
            node=state.node,
            preemptions=state.preemptions,
            free_gpu=state.free,
            free_cpu=state.free_cpu,
            free_memory=state.free_memory,
        )

    def _order(self, functions: dict[str, Any]) -> None:
        """Ask the policy anew: for what waits, and for what arrives before it is asked again."""
        state, problem = self.state, self.problem
        view = self._view()
        interval = self.policy.interval or 0.0
        self.next_order = view.now + interval if interval > 0 else -np.inf
        upcoming = problem.arrivals[state.i[kernel.ARRIVAL] :]
        upcoming = upcoming[: np.searchsorted(problem.arrival_time[state.i[kernel.ARRIVAL] :], view.now + interval)]
        rows = np.concatenate([view.waiting, upcoming])
        keys = np.asarray(self.policy.order(view, rows), np.float64)
        if keys.shape != rows.shape or np.isnan(keys).any():
            raise InvalidInputError(f"policy {self.policy.name}: order must give a number for each of {len(rows)} rows")
        state.key[rows] = keys
        waiting = view.waiting
        ordered = waiting[np.lexsort((problem.uid[waiting], problem.submit[waiting], state.key[waiting]))]
        state.queue[: len(ordered)] = ordered
        state.queue_key[: len(ordered)] = state.key[ordered]
        state.queue_token[: len(ordered)] = state.token[ordered]
        state.i[[kernel.HEAD, kernel.TAIL]] = 0, len(ordered)
        self._leave(view, rows, functions)
        opened = self.policy.open_nodes(view)
        if opened is not None and not np.array_equal(opened, state.open):
            state.open[:] = opened
            functions["refresh"](problem, state)
            state.i[kernel.CHANGED] = 1

    def _leave(self, view: View, rows: Ints, functions: dict[str, Any]) -> None:
        """Take over when workloads give up waiting, if the policy decides on that."""
        asked = self.policy.leave_at(view, rows)
        if asked is None:
            return
        times = np.asarray(asked, np.float64)
        if times.shape != rows.shape or np.isnan(times).any():
            raise InvalidInputError(
                f"policy {self.policy.name}: leave_at must give a time for each of {len(rows)} rows"
            )
        size = len(self.trace.workloads)
        for position, row in enumerate(rows.tolist()):
            moment = max(float(times[position]), view.now)
            if self.state.cancel[row] != moment:
                self.state.cancel[row] = moment
                # What has not arrived yet gets its entry on arrival.
                if position < len(view.waiting) and moment < np.inf:
                    functions["push"](self.problem, self.state, moment, size + row)

    def _place(self, workload: int) -> None:
        view = self._view()
        feasible = np.array(
            [kernel.fits(self.problem, self.state, workload, n) for n in range(len(self.trace.cluster))]
        )
        scores = np.asarray(self.policy.place(view, workload, feasible), np.float64)
        if scores.shape != feasible.shape:
            raise InvalidInputError(
                f"policy {self.policy.name}: place must give one score for each of {len(feasible)} nodes"
            )
        self.state.scores[:] = np.nan_to_num(scores, nan=-1e300, posinf=1e300, neginf=-1e300)
        self.state.i[kernel.SCORES_FOR] = workload

    def _preempt(self, workload: int, functions: dict[str, Any]) -> None:
        victims = np.asarray(self.policy.preempt(self._view(), workload), np.int64)
        running = set(self.state.running[: self.state.i[kernel.RUNNING]].tolist())
        if not running.issuperset(victims.tolist()):
            raise InvalidInputError(f"policy {self.policy.name}: preempt named workloads that do not run")
        functions["stop_all"](self.problem, self.state, victims, workload)
        self.state.i[kernel.ASKED_FOR] = workload
        self.state.i[kernel.SCORES_FOR] = -1

    def result(self, engine: Engine, seconds: float) -> Result:
        """Return what happened."""
        state = self.state
        rows = state.series[: state.i[kernel.ROWS]].T.copy()
        return Result(
            trace=self.trace,
            policy=self.policy.name,
            status=state.status,
            start=state.start,
            first_start=state.first_start,
            end=np.where(state.status == 2, np.nan, state.end),
            node=state.node,
            devices=state.devices,
            preemptions=state.preemptions,
            lost_seconds=state.lost,
            preempted_by=state.by,
            series=Series(*rows),
            events=int(state.i[kernel.EVENTS]),
            seconds=seconds,
            engine=engine,
        )
