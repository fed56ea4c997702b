"""How fast the replay runs: FCFS on openb up to a hundred times, one FGD run; memory and cost as the trace grows."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.replay import fgd, openb
from rca.replay.engine import replay
from rca.replay.model import Engine, Options
from rca.replay.policies.base import Fcfs

#: Copies of openb: a hundred, after four doublings.
REPEATS: Final = (6, 12, 25, 50, 100)


class Size(msgspec.Struct, frozen=True):
    """One trace size. ``seconds`` of one core for the event loop; ``peak_mib`` of the whole process."""

    repeat: int
    load: bool
    pods: int
    events: int
    seconds: float
    peak_mib: float
    busy: float
    longest_queue: int

    @property
    def rate(self) -> float:
        """Workload events (submissions, starts, ends, cancellations) per second."""
        return self.events / self.seconds


class Speed(msgspec.Struct, frozen=True):
    """The whole benchmark. ``fgd_seconds`` is the wall-clock time of one full FGD run with reading."""

    sizes: list[Size]
    fgd_seconds: float


def _size(repeat: int, load: bool) -> Size:
    trace = openb.recorded(repeat, load=load)
    result = replay(trace, Fcfs(), Options(engine=Engine.COMPILED))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024 * 1024)
    series = result.series
    busy = float(np.average(series.used_milli[:-1], weights=np.diff(series.time))) / trace.cluster.capacity_milli
    return Size(
        repeat, load, len(trace.workloads), result.events, result.seconds, peak, busy, int(series.waiting.max())
    )


def measure(repeats: Iterable[int] = REPEATS) -> Speed:
    """Measure every size in a process of its own, so that each has its own peak of memory."""
    sizes = []
    for load in (False, True):
        for repeat in repeats if not load else (100,):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                sizes.append(pool.submit(_size, repeat, load).result())
    fgd.timed()  # loads the machine code
    started = time.perf_counter()
    fgd.timed()
    return Speed(sizes, time.perf_counter() - started)


def print_speed(found: Speed, console: Console) -> None:
    """Print the sizes and what doubling costs."""
    for load in (False, True):
        out = Table(
            title=f"FCFS on openb, {'all copies at once, dense' if load else 'as recorded, repeated'}, one core"
        )
        for heading in ("copies", "pods", "events", "s", "events/s", "x time", "peak MiB", "bytes a pod more"):
            out.add_column(heading, justify="right")
        for heading in ("GPU busy", "longest queue"):
            out.add_column(heading, justify="right")
        last: Size | None = None
        for size in (size for size in found.sizes if size.load is load):
            row = [str(size.repeat), f"{size.pods:,}", f"{size.events:,}", f"{size.seconds:.2f}", f"{size.rate:,.0f}"]
            row.append("" if last is None else f"{size.seconds / last.seconds:.2f}")
            row.append(f"{size.peak_mib:.0f}")
            more = 0.0 if last is None else (size.peak_mib - last.peak_mib) * 1024 * 1024 / (size.pods - last.pods)
            row += ["" if last is None else f"{more:.0f}", f"{size.busy:.1%}", f"{size.longest_queue:,}"]
            out.add_row(*row)
            last = size
        console.print(out)
    console.print(f"one full FGD run (openb default, 130 % of the GPUs asked for): {found.fgd_seconds:.2f} s")
