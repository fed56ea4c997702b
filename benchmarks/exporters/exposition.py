"""Exposition speed: this project's renderer against prometheus_client on the same samples.

A cluster of 10,000 workloads and 1,000 GPUs is polled seven times; from poll to poll the devices' values change and 1 %
of the waiting workloads are new. Each poll is written by both, and both texts are parsed by the client's parser and
compared sample by sample. The client is given metrics that are already in its own types, so that only its formatting is
timed. Here the text of the labels is prepared by the poll, which is timed on its own, and a scrape formats the values;
nothing is kept of the values, so a scrape costs the same whether they changed or not. Run with
``python -m benchmarks.exporters.exposition``.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as ClientMetric
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from exporters.collectors import ClusterCollector
from exporters.exposition import TextCache, render
from exporters.families import Family, to_client
from exporters.model import (
    AllocatorState,
    Demand,
    Device,
    Node,
    Placement,
    Snapshot,
    Workload,
    WorkloadState,
)
from exporters.policy import default_policy

WORKLOADS: Final = 10_000
GPUS: Final = 1_000
PER_NODE: Final = 8
CHURN: Final = 0.01
ROUNDS: Final = 7
REQUIRED_RATIO: Final = 10.0

_GIB: Final = 2**30
#: Every workload and pair is to have its series here; the catalogue's caps would leave most out.
_CAPS: Final = {
    "priority_workload_waiting_seconds": WORKLOADS,
    "priority_violation_active_seconds": 3 * WORKLOADS,
    "priority_violation_culprit_gpu_seconds": WORKLOADS,
    "priority_violations_active": WORKLOADS,
    "priority_violation_total": WORKLOADS,
    "priority_violation_seconds_total": WORKLOADS,
}


def snapshot(now: float, workloads: int = WORKLOADS, gpus: int = GPUS, seed: int = 1) -> Snapshot:
    """Return a busy cluster: a GPU each for the first running workloads, the others waiting.

    From one poll (15 s) to the next the values of the devices change and 1 % of the waiting workloads are new.
    """
    noise = random.Random(seed + now)
    gone = int((now - 20_000) / 15 * CHURN * workloads)
    found = []
    for at in range(workloads):
        runs = at < gpus
        name = at if runs else at + gone
        found.append(
            Workload(
                id=f"job-{name}",
                name=f"job-{name}",
                state=WorkloadState.RUNNING if runs else WorkloadState.PENDING,
                service=f"service-{name % 300}",
                queue=f"queue-{name % 12}",
                rank=3 if runs else name * 7919 % 4,
                submitted=1000.0 + name * 104_729 % 9000,
                started=9000.0 + name % 1000 if runs else None,
                demand=Demand(gpu_milli=1000),
                placements=(Placement(f"node-{at // PER_NODE}", 1000, (f"GPU-{at}",)),) if runs else (),
                preemptible=runs,
            )
        )
    nodes = tuple(
        Node(f"node-{at}", gpu_capacity_milli=1000 * PER_NODE, gpu_allocated_milli=1000 * PER_NODE)
        for at in range(-(-gpus // PER_NODE))
    )
    devices = tuple(
        Device(
            id=f"GPU-{at}",
            node=f"node-{at // PER_NODE}",
            index=at % PER_NODE,
            model="NVIDIA H100 80GB HBM3",
            memory_total_bytes=80 * _GIB,
            memory_used_bytes=noise.randrange(80 * _GIB),
            gpu_utilization_ratio=noise.random(),
            memory_utilization_ratio=noise.random(),
            power_watts=700 * noise.random(),
            power_limit_watts=700.0,
            energy_joules=now * 300 + at,
            temperature_celsius=float(noise.randrange(30, 90)),
            sm_clock_hertz=1.98e9,
            memory_clock_hertz=2.619e9,
            ecc_corrected=0,
            ecc_uncorrected=0,
            allocated_milli=1000,
            allocators=(AllocatorState(str(at), 64 * _GIB, noise.randrange(1, 32 * _GIB), 1),),
        )
        for at in range(gpus)
    )
    return Snapshot(now, "bench", "benchmark", tuple(found), nodes, devices)


class Prebuilt:
    """A collector whose metrics are in the client's types already."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._metrics = [to_client(item) for item in families]

    def collect(self) -> list[ClientMetric]:
        """Return the metrics."""
        return self._metrics


def parsed(text: bytes) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
    """Return the samples that the client's parser reads, sorted."""
    return sorted(
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for metric in text_string_to_metric_families(text.decode())
        for sample in metric.samples
    )


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes, with the garbage collector as a server has it."""
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> int:
    """Compare the two and print; 1 when the renderer is less than 10 times as fast or a sample differs."""
    console = Console(soft_wrap=True, highlight=False)
    collector = ClusterCollector(default_policy(), caps=_CAPS)
    cache = TextCache()
    collector.update(snapshot(20_000.0))
    bare = [replace(item, texts=(), histogram_texts=()) for item in collector.families()]
    cold = timed(lambda: render(bare))
    cache.prepare(bare)
    polls, prepared, ours_seconds, client = [], [], [], []
    families: tuple[Family, ...] = ()
    for turn in range(ROUNDS):
        current = snapshot(20_015.0 + 15 * turn)
        polls.append(timed(lambda current=current: collector.update(current)))  # type: ignore[misc]
        families = collector.families()
        prepared.append(timed(lambda families=families: cache.prepare(families)))  # type: ignore[misc]
        registry = CollectorRegistry()
        registry.register(Prebuilt(families))
        client.append(timed(lambda registry=registry: generate_latest(registry)))  # type: ignore[misc]
        ours_seconds.append(timed(lambda families=families: render(families)))  # type: ignore[misc]
    registry = CollectorRegistry()
    registry.register(Prebuilt(families))
    ours, theirs = render(families), generate_latest(registry)
    mine, reference = parsed(ours), parsed(theirs)
    same = mine == reference
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tracemalloc.start()
    collector.update(snapshot(30_000.0))
    render(collector.families())
    allocated = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    ratio = statistics.median(client) / statistics.median(ours_seconds)
    console.print(f"{WORKLOADS:,} workloads, {GPUS:,} GPUs: {len(mine):,} samples, {len(ours) / 2**20:.1f} MiB of text")
    console.print(f"poll to families (detect, track, measure)  {statistics.median(polls):8.3f} s")
    console.print(f"prometheus_client.generate_latest          {statistics.median(client):8.3f} s")
    console.print(f"render, labels not prepared                {cold:8.3f} s")
    console.print(f"of that poll: label text prepared          {statistics.median(prepared):8.3f} s")
    console.print(f"render, as a scrape does                   {statistics.median(ours_seconds):8.3f} s")
    console.print(f"ratio {ratio:.1f} (required {REQUIRED_RATIO:.0f}); medians of {ROUNDS}, taken in turns")
    console.print(f"parsed to the same samples: {'yes' if same else 'NO'}")
    console.print(f"peak memory: {peak:.0f} MiB resident in all; {allocated:.0f} MiB allocated by one poll and render")
    return 0 if same and ratio >= REQUIRED_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
