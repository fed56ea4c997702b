"""Who wins, by the published accounts (spec P3, P6 and V8, M8), on public arrivals: ours beside the reference figures.

The published figures come from clusters and loads that are not public. What is compared is the order and the rough
factor; where a published claim holds only in some settings, both kinds are printed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cases import data_root
from benchmarks.replay import openb
from rca.errors import NotFoundError
from rca.replay.engine import replay
from rca.replay.model import Backfill, Cluster, Floats, Options, Result, Status, Trace, Workloads
from rca.replay.policies import ordering, resolve

#: Node shape of the small clusters: eight GPUs each, as most of openb's.
GPUS, CPU_MILLI, MEMORY_MIB = 8, 128_000, 786_432
#: Seconds of one GPU quarter for a token that is read and one that is written, so that a reply takes seconds.
READ_SECONDS, WRITE_SECONDS = 2e-4, 2e-2
MINUTES: Final = 20


class Row(msgspec.Struct, frozen=True):
    """One policy in one setting: means over the draws, in the order of the block's columns."""

    policy: str
    values: list[float]
    reference: str


class Block(msgspec.Struct, frozen=True):
    """One published ordering. ``held`` says in words what holds here and what does not."""

    title: str
    columns: list[str]
    rows: list[Row]
    held: str


def _cluster(gpus: int) -> Cluster:
    nodes = gpus // GPUS
    return Cluster.of([GPUS] * nodes, cpu_milli=[CPU_MILLI] * nodes, memory_mib=[MEMORY_MIB] * nodes)


def _ran() -> Workloads:
    """Openb's pods that asked for a GPU and ran, and that fit a node of `_cluster`."""
    work = openb.recorded().workloads
    return work.select((work.gpu_count > 0) & np.isfinite(work.observed_start) & (work.cpu_milli <= CPU_MILLI // 2))


def requests(kind: str, minutes: float = MINUTES) -> tuple[Floats, Floats]:
    """Arrival times and durations of Azure's LLM requests (``conv`` or ``code``) in the first minutes."""
    path = data_root() / "azure-llm" / f"AzureLLMInferenceTrace_{kind}.csv"
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", cure="PRIOSCOPE_DATA names the folder that holds azure-llm/")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    stamps = np.array([np.datetime64(row["TIMESTAMP"].replace(" ", "T")[:26], "us") for row in rows])
    times = (stamps - stamps.min()) / np.timedelta64(1, "s")
    read = np.array([float(row["ContextTokens"]) for row in rows])
    written = np.array([float(row["GeneratedTokens"]) for row in rows])
    kept = times < 60 * minutes
    return times[kept], (read * READ_SECONDS + written * WRITE_SECONDS)[kept]


# --- P3: SJF and FCFS ------------------------------------------------------------------------------------------------


def burst(seed: int, gpus: int = 64, size: int = 500) -> Trace:
    """``size`` pods of openb within ten minutes on ``gpus`` GPUs, drained to the end."""
    rng = np.random.default_rng(seed)
    ran = _ran()
    work = ran.select(rng.choice(len(ran), size, replace=False))
    return Trace(_cluster(gpus), replace(work, submit=np.sort(rng.random(size)) * 600.0))


def stream(seed: int, gpus: int = 64, size: int = 3000, load: float = 0.95) -> Trace:
    """A steady stream of openb's pods, cut at two hours each, at a load of 95 %."""
    rng = np.random.default_rng(seed)
    ran = _ran()
    work = ran.select(rng.choice(len(ran), size))
    duration = np.minimum(work.duration, 7200.0)
    submit = np.cumsum(rng.exponential(1.0, size))
    submit *= float((duration * work.demand_milli).sum()) / (gpus * 1000 * load) / submit[-1]
    return Trace(
        _cluster(gpus),
        replace(work, submit=submit, duration=duration, estimate=duration, uid=np.arange(size, dtype=np.int64)),
    )


def idle_while_waiting(result: Result) -> float:
    """Share of GPU capacity that is idle while something waits."""
    series = result.series
    length = np.diff(series.time)
    idle = 1.0 - series.used_milli[:-1] / result.trace.cluster.capacity_milli
    waiting = series.waiting[:-1] > 0
    return float(np.average(idle[waiting], weights=length[waiting])) if length[waiting].sum() > 0 else 0.0


def shortest_first(seeds: Sequence[int] = tuple(range(20))) -> list[Block]:
    """P3 in a burst that drains, where it holds, and in a steady stream, where long jobs starve."""
    reference = {"fcfs": "1247 ms, 38.2 %", "sjf": "412 ms, 19.6 %"}
    blocks = []
    for title, make, draws in (
        (f"P3 · SJF against FCFS, burst of 500 openb pods on 64 GPUs, drained; {len(seeds)} draws", burst, seeds),
        (f"P3 · the same in a steady stream at 95 % load; {len(seeds[:5])} draws", stream, seeds[:5]),
    ):
        found = {
            name: np.array(
                [
                    (np.nanmax(result.wait), idle_while_waiting(result), np.nanmean(result.wait))
                    for result in (replay(make(seed), resolve(name)) for seed in draws)
                ]
            )
            for name in reference
        }
        better = (found["sjf"] < found["fcfs"]).mean(axis=0)
        rows = [Row(name, values.mean(axis=0).tolist(), reference[name]) for name, values in found.items()]
        held = f"SJF has the shorter longest wait in {better[0]:.0%} of the draws, less idle in {better[1]:.0%}"
        blocks.append(Block(title, ["longest wait s", "idle while waiting", "mean wait s"], rows, held))
    return blocks


# --- P6, V8: EDF -----------------------------------------------------------------------------------------------------


def deadlined(gpus: int = 7, slack: float = 0.5, minutes: float = 30.0) -> Trace:
    """Azure's conversation requests, a quarter of a GPU each, due ``slack`` seconds after their own duration."""
    submit, duration = requests("conv", minutes)
    return Trace(
        Cluster.of([gpus]),
        Workloads.of(submit, duration, gpu_count=1, gpu_milli=250, deadline=submit + duration + slack),
    )


def compensated_deadlines(slacks: Iterable[float] = (0.5, 1.0, 2.0)) -> list[Block]:
    """V8: firm deadlines (what can no longer meet its own leaves), with and without compensation."""
    rows, fewer, strict = [], [], []
    for slack in slacks:
        trace = deadlined(slack=slack)
        work = trace.workloads
        seen = []
        for policy in (ordering.Edf(firm=True), ordering.CompensatedEdf(firm=True)):
            result = replay(trace, policy)
            extension = policy.extension if isinstance(policy, ordering.CompensatedEdf) else np.zeros(len(work))
            end = np.where(result.status == Status.FINISHED, result.end, np.inf)
            late = float((end > work.deadline + np.nan_to_num(extension) + 1e-9).mean())
            late_by_original = float((end > work.deadline + 1e-9).mean())
            spent = float((work.duration * work.demand_milli / 1000)[result.status == Status.FINISHED].sum())
            seen.append((late, late_by_original, spent))
        (plain, plain_original, base), (ours, ours_original, spent) = seen
        rows.append(Row(f"edf, slack {slack:g} s", [100 * plain, 100 * plain_original, 0.0], "18.7 %"))
        more = 100 * (spent / base - 1)
        rows.append(Row("  compensated", [100 * ours, 100 * ours_original, more], "2.3 % at 6.1 % more resources"))
        fewer.append(ours < plain)
        strict.append(ours_original < plain_original)
    held = (
        f"compensated EDF misses fewer of its own (extended) deadlines in {sum(fewer)} of {len(fewer)} settings; "
        f"judged by the original deadlines in {sum(strict)}: compensation tolerates lateness, it does not prevent it"
    )
    return [
        Block(
            "P6, V8 · EDF with firm deadlines on Azure's conversation requests, 7 GPUs",
            ["missed %", "missed by original deadline %", "more GPU-seconds %"],
            rows,
            held,
        )
    ]


# --- M8: three ways to share -----------------------------------------------------------------------------------------


def mixed(seed: int, gpus: int = 32, load: float = 0.9) -> Trace:
    """Chat (rank 0) and code (rank 1) requests of Azure, and openb's best-effort pods (rank 2) up to the load."""
    rng = np.random.default_rng(seed)
    chat, code = requests("conv"), requests("code")
    served = 0.25 * float(chat[1].sum() + code[1].sum())
    ran = _ran()
    batch = ran.select(ran.rank == 2)
    batch = batch.select(rng.choice(len(batch), 4000))
    lasts = np.clip(batch.duration, 10.0, 600.0)
    room = load * gpus * 60 * MINUTES - served
    size = int(np.searchsorted(np.cumsum(lasts * batch.demand_milli / 1000), room))
    batch = batch.select(np.arange(size))
    rank = np.repeat([0, 1, 2], [len(chat[0]), len(code[0]), size])
    online = len(chat[0]) + len(code[0])

    def column(of_requests: int, of_batch: np.ndarray) -> np.ndarray:
        return np.concatenate([np.full(online, of_requests), of_batch])

    return Trace(
        _cluster(gpus),
        Workloads.of(
            np.concatenate([chat[0], code[0], np.sort(rng.random(size)) * 60 * MINUTES]),
            np.concatenate([chat[1], code[1], lasts[:size]]),
            gpu_count=column(1, batch.gpu_count),
            gpu_milli=column(250, batch.gpu_milli),
            cpu_milli=column(1000, batch.cpu_milli),
            rank=rank,
            preemptible=rank == 2,
            wait_slo=np.array([1.0, 5.0, 1800.0])[rank],
            service=[("chat", "code", "batch")[item] for item in rank],
        ),
    )


def swing(result: Result) -> float:
    """Half the range of the GPU use over its mean, sampled every 10 s after the first minute, while work arrives."""
    series = result.series
    grid = np.arange(60.0, float(result.trace.workloads.submit.max()), 10.0)
    use = series.used_milli[np.searchsorted(series.time, grid, side="right") - 1]
    return float((use.max() - use.min()) / 2 / use.mean())


def sharing(seeds: Sequence[int] = (0, 1, 2), loads: Iterable[float] = (0.8, 0.9, 1.0)) -> list[Block]:
    """M8 at three loads: P95 of the wait, share of workloads that wait past their SLO, swing."""
    reference = {
        "static-wrr": "248 ms, 37.2 %, ±42 %",
        "memory-reservation": "163 ms, 12.8 %, ±19 %",
        "semantic-dynamic": "89 ms, 2.1 %, ±7 %",
    }
    options = Options(backfill=Backfill.GREEDY, checkpoint_seconds=60.0, restart_seconds=10.0)
    columns = ["P95 wait s", "past SLO %", "swing ± %", "P95 wait s of batch", "stopped"]
    blocks = []
    for load in loads:
        found = {}
        for name in reference:
            values = []
            for seed in seeds:
                result = replay(mixed(seed, load=load), resolve(name), options)
                work = result.trace.workloads
                late = ~(result.wait <= work.wait_slo)
                values.append(
                    (
                        np.nanpercentile(result.wait, 95),
                        100 * late.mean(),
                        100 * swing(result),
                        np.nanpercentile(result.wait[work.rank == 2], 95),
                        result.preemptions.sum(),
                    )
                )
            found[name] = np.mean(values, axis=0)
        names = list(reference)
        order = [all(found[after][at] < found[first][at] for first, after in pairwise(names)) for at in range(3)]
        words = ["holds" if fine else "does not hold" for fine in order]
        blocks.append(
            Block(
                f"M8 · 32 GPUs, Azure requests over openb batch at {load:.0%} load; {len(seeds)} draws",
                columns,
                [Row(name, values.tolist(), reference[name]) for name, values in found.items()],
                f"the published order {words[0]} for P95, {words[1]} for violations, {words[2]} for the swing",
            )
        )
    return blocks


def run() -> list[Block]:
    """All orderings."""
    return [*shortest_first(), *compensated_deadlines(), *sharing()]


def print_blocks(blocks: Iterable[Block], console: Console) -> None:
    """Print every block with its reference figures and its verdict."""
    for block in blocks:
        out = Table(title=block.title, title_justify="left")
        out.add_column("policy")
        for column in block.columns:
            out.add_column(column, justify="right")
        out.add_column("published")
        for row in block.rows:
            out.add_row(row.policy, *(f"{value:,.3g}" for value in row.values), row.reference)
        console.print(out)
        console.print(f"{block.held}\n")
