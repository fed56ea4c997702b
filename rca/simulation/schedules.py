"""Simulated schedules with a known cause: a cluster, its jobs, and one less urgent job that an urgent one waits for.

The scheduler here has nothing in common with the replay's engine: a cycle of some seconds, jobs by rank or by arrival,
whole GPUs of one node each. What it leaves behind are snapshots, as `rca exporter record` writes them: no durations of
what still runs, no future arrivals. The truth (`ScheduledIncident.waits`) comes from running it again without a job.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from exporters.model import (
    Constraints,
    Demand,
    Node,
    Placement,
    Snapshot,
    Workload,
    WorkloadState,
)

#: Unix seconds at which simulated recordings begin.
EPOCH: Final = 1_767_571_200.0
#: Seconds that an urgent job may wait.
PROMISE: Final = 60.0
#: Seconds for which the snapshots still show what has ended.
_REMEMBERED: Final = 300.0


@dataclass(frozen=True)
class Kind:
    """A kind of job: its service, rank, sizes in GPUs, and the log-normal distribution of its duration in seconds."""

    service: str
    rank: int
    gpus: tuple[int, ...]
    median: float
    spread: float
    share: float


KINDS: Final = (
    Kind("train", 3, (2, 4, 8), 2400.0, 0.8, 0.25),
    Kind("batch", 2, (1, 2, 4), 700.0, 0.7, 0.35),
    Kind("evaluate", 2, (1, 1, 2), 240.0, 0.6, 0.25),
    Kind("chat", 0, (1, 2, 4), 900.0, 0.5, 0.15),
)


@dataclass(frozen=True)
class Job:
    """One job: submitted at ``submit``, ``gpus`` on one node for ``duration`` seconds."""

    name: str
    service: str
    rank: int
    submit: float
    gpus: int
    duration: float


@dataclass(frozen=True)
class Scheduler:
    """How jobs are started: every ``cycle`` seconds, by rank or by arrival, with or without overtaking."""

    nodes: int
    gpus: int
    cycle: float = 2.0
    by_rank: bool = True
    overtaking: bool = True
    packing: bool = True

    def run(self, jobs: Sequence[Job], until: float = math.inf) -> dict[str, tuple[float, int]]:
        """Return the start and the node of every job that starts before ``until``."""
        free = [self.gpus] * self.nodes
        ends: list[tuple[float, int, int]] = []
        arrivals = sorted(jobs, key=lambda job: (job.submit, job.name))
        queue: list[Job] = []
        started: dict[str, tuple[float, int]] = {}
        at = 0
        while at < len(arrivals) or queue:
            moments = [arrivals[at].submit] if at < len(arrivals) else []
            moments += [ends[0][0]] if ends else []
            if not moments:
                break
            # The scheduler looks at the next whole cycle.
            now = math.ceil(min(moments) / self.cycle) * self.cycle
            if now >= until:
                break
            while at < len(arrivals) and arrivals[at].submit <= now:
                queue.append(arrivals[at])
                at += 1
            while ends and ends[0][0] <= now:
                _, node, gpus = heapq.heappop(ends)
                free[node] += gpus
            queue.sort(key=lambda job: (job.rank if self.by_rank else 0, job.submit, job.name))
            waiting = []
            blocked = False
            for job in queue:
                room = [] if blocked else [node for node in range(self.nodes) if free[node] >= job.gpus]
                if not room:
                    waiting.append(job)
                    blocked = not self.overtaking
                    continue
                sign = 1 if self.packing else -1
                node = min(room, key=lambda node: (sign * free[node], node))
                free[node] -= job.gpus
                heapq.heappush(ends, (now + job.duration, node, job.gpus))
                started[job.name] = (now, node)
            queue = waiting
        return started


@dataclass(frozen=True)
class ScheduledIncident:
    """An urgent job that waits, and who is to blame.

    Attributes:
        waits: what the victim waits in all, as it was (key "") and without each less urgent job that held GPUs then.
        until: when the recording ends, in seconds since it began.
    """

    name: str
    scheduler: Scheduler
    jobs: tuple[Job, ...]
    victim: str
    culprit: str
    until: float
    poll: float
    waits: Mapping[str, float]
    starts: Mapping[str, tuple[float, int]] = field(repr=False, default_factory=dict)

    @property
    def saved(self) -> float:
        """Seconds that the victim would have waited less without the culprit."""
        return self.waits[""] - self.waits[self.culprit]

    def snapshots(self) -> Iterator[Snapshot]:
        """What the recording holds: one snapshot each ``poll`` seconds, the last at the end."""
        moments = np.arange(self.until, -1e-9, -self.poll)[::-1]
        for moment in moments.tolist():
            yield self._snapshot(float(moment))

    def _snapshot(self, now: float) -> Snapshot:
        workloads = []
        used = [0] * self.scheduler.nodes
        for job in self.jobs:
            start, node = self.starts.get(job.name, (math.inf, -1))
            end = start + job.duration
            if job.submit > now or end <= now - _REMEMBERED:
                continue
            state = WorkloadState.PENDING
            if end <= now:
                state = WorkloadState.COMPLETED
            elif start <= now:
                state = WorkloadState.RUNNING
                used[node] += job.gpus
            placed = (Placement(f"node-{node}", job.gpus * 1000),) if state is WorkloadState.RUNNING else ()
            workloads.append(
                Workload(
                    id=job.name,
                    name=job.service,
                    service=job.service,
                    state=state,
                    queue="gpu",
                    rank=job.rank,
                    submitted=EPOCH + job.submit,
                    started=EPOCH + start if start <= now else None,
                    ended=EPOCH + end if end <= now else None,
                    demand=Demand(gpu_milli=job.gpus * 1000),
                    placements=placed,
                    constraints=Constraints(partitions=("gpu",)),
                    preemptible=job.rank > 1,
                )
            )
        nodes = tuple(
            Node(
                f"node-{number}",
                partitions=("gpu",),
                gpu_models=("a100",),
                gpu_capacity_milli=self.scheduler.gpus * 1000,
                gpu_allocated_milli=taken * 1000,
            )
            for number, taken in enumerate(used)
        )
        return Snapshot(EPOCH + now, "simulated", "slurm", tuple(workloads), nodes)


def draw_incident(seed: int) -> ScheduledIncident:
    """Draw an incident: a busy cluster, a less urgent job that takes what is left, an urgent one that comes too late.

    An urgent job has to wait past its promise, by far the most of it on account of that one job: it waits at least two
    minutes less without it, and no removal of another less urgent job saves as much.
    """
    for attempt in range(1000):
        found = _attempt(np.random.default_rng([seed, attempt]), f"schedule-{seed}")
        if found is not None:
            return found
    raise RuntimeError(f"no incident in 1000 attempts with seed {seed}")


def _attempt(rng: np.random.Generator, name: str) -> ScheduledIncident | None:
    scheduler = Scheduler(
        nodes=int(rng.integers(2, 7)),
        gpus=int(rng.choice([4, 8])),
        cycle=float(rng.choice([1.0, 2.0, 5.0, 10.0])),
        by_rank=bool(rng.random() < 0.85),
        overtaking=bool(rng.random() < 0.6),
        packing=bool(rng.random() < 0.6),
    )
    warm, length, after = 7200.0, 7200.0, 6 * 3600.0
    background = _jobs(rng, scheduler, warm + length + after, load=float(rng.uniform(0.45, 0.75)))
    background = [replace(job, submit=job.submit - warm) for job in background]
    asks = int(rng.choice([size for size in (1, 2, 4) if size <= scheduler.gpus]))
    came = float(rng.uniform(length * 0.6, length))
    victim = Job("victim", "chat", 0, came, asks, 600.0)
    kind = KINDS[int(rng.choice([0, 0, 1]))]
    culprit = Job(
        "culprit",
        kind.service,
        kind.rank,
        came - float(rng.uniform(20.0, 900.0)),
        int(rng.choice([size for size in (2, 4, 8) if asks <= size <= scheduler.gpus])),
        _duration(rng, kind),
    )
    jobs = [*background, victim, culprit]
    # Names that give nothing away.
    labels = {job.name: f"job-{1000 + at}" for at, job in enumerate(sorted(jobs, key=lambda job: job.submit))}
    jobs = [replace(job, name=labels[job.name]) for job in jobs]
    mine, theirs = labels["victim"], labels["culprit"]
    starts = scheduler.run(jobs)
    start = starts.get(mine, (math.inf, -1))[0]
    if start - came < PROMISE or theirs not in starts or starts[theirs][0] > came or not math.isfinite(start):
        return None
    until = came + PROMISE + float(rng.uniform(20.0, 400.0))
    waits = {"": start - came}
    for job in jobs:
        began = starts.get(job.name, (math.inf, -1))[0]
        if job.rank > 0 and began < min(start, until) and began + job.duration > came:
            rest = [other for other in jobs if other.name != job.name]
            waits[job.name] = scheduler.run(rest)[mine][0] - came
    if theirs not in waits:
        return None
    saved = waits[""] - waits[theirs]
    others = [waits[""] - wait for name, wait in waits.items() if name not in ("", theirs)]
    if saved < 120.0 or saved < 0.5 * waits[""] or saved <= 1.1 * max(others, default=0.0):
        return None
    return ScheduledIncident(
        name=name,
        scheduler=scheduler,
        jobs=tuple(job for job in jobs if job.submit <= until),
        victim=mine,
        culprit=theirs,
        until=until,
        poll=float(rng.choice([15.0, 30.0])),
        waits=waits,
        starts=starts,
    )


def _jobs(rng: np.random.Generator, scheduler: Scheduler, length: float, load: float) -> list[Job]:
    """Jobs that arrive at random, about as many as keep ``load`` of the GPUs busy."""
    fitting = [replace(kind, gpus=tuple(g for g in kind.gpus if g <= scheduler.gpus)) for kind in KINDS]
    share = np.array([kind.share for kind in fitting])
    work = np.array([np.mean(kind.gpus) * kind.median * math.exp(kind.spread**2 / 2) for kind in fitting])
    rate = load * scheduler.nodes * scheduler.gpus / float((share * work).sum() / share.sum())
    times = np.cumsum(rng.exponential(1.0 / rate, int(rate * length * 1.3) + 10))
    jobs = []
    for number, time in enumerate(times[times < length].tolist()):
        kind = fitting[int(rng.choice(len(fitting), p=share / share.sum()))]
        gpus = int(rng.choice(kind.gpus))
        jobs.append(Job(f"background-{number}", kind.service, kind.rank, time, gpus, _duration(rng, kind)))
    return jobs


def _duration(rng: np.random.Generator, kind: Kind) -> float:
    return max(5.0, kind.median * math.exp(kind.spread * float(rng.standard_normal())))


__all__ = ["ScheduledIncident", "Scheduler", "draw_incident"]
