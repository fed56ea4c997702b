"""Soak: a thousand polls with churn, each scraped over HTTP. Memory must stay flat and the series must come back.

Every poll replaces a tenth of 500 workloads by new ones, whose services come and go, with violations, starts and
preemptions among them; its exposition is fetched over a connection of its own, as text or OpenMetrics, plain or
compressed. Every tenth poll fails. After the churn the quiet cluster of the beginning returns. Run with
``python -m benchmarks.exporters.soak``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import http.client
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console

from exporters.collectors.cluster import ClusterCollector
from exporters.errors import SourceUnreachableError
from exporters.model import Demand, Event, EventKind, Node, Placement, Snapshot, Workload, WorkloadState
from exporters.policy import default_policy
from exporters.poller import Poller
from exporters.server import Application, listen, make_server
from exporters.tracker import Tracker
from exporters.web_config import LiveWebConfig, WebConfig

POLLS: Final = 1000
WARM_UP: Final = 200
SIZE: Final = 500
CHURN: Final = 50
PERIOD: Final = 15.0
#: Short, so that the series of services that are gone expire within the run.
RETENTION: Final = 600.0
GROWTH_LIMIT: Final = 0.05
FAILURE_EVERY: Final = 10
OVERFLOWED: Final = b"prioscope_series_overflow_total"
#: What a scrape may ask for; each is used in turn.
ASKED: Final[tuple[dict[str, str], ...]] = (
    {},
    {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"},
    {"Accept-Encoding": "gzip"},
)


def workload(number: int, now: float, draw: random.Random) -> Workload:
    """Return a new workload: two in five run, the others wait for longer than their SLO allows, or shorter."""
    runs = number % 5 < 2
    return Workload(
        id=f"job-{number}",
        name=f"job-{number}",
        state=WorkloadState.RUNNING if runs else WorkloadState.PENDING,
        service=f"service-{number // 100}",
        queue=f"queue-{number % 4}",
        rank=3 if runs else draw.randrange(4),
        submitted=now - draw.randrange(2000),
        started=now - 5 if runs else None,
        demand=Demand(gpu_milli=1000),
        placements=(Placement(f"node-{number % 25}", 1000),) if runs else (),
        preemptible=runs,
    )


def resident() -> int:
    """Resident memory of this process in bytes, from Linux's /proc."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Stream:
    """A source that gives what was put into it, or fails."""

    def __init__(self) -> None:
        self.next: Snapshot | None = None

    def poll(self) -> Snapshot:
        """Return the next snapshot once; fail without one."""
        snapshot, self.next = self.next, None
        if snapshot is None:
            raise SourceUnreachableError("the scheduler does not answer")
        return snapshot

    def close(self) -> None:
        """Nothing to let go of."""


@contextlib.contextmanager
def serving(poller: Poller) -> Iterator[int]:
    """Serve what ``poller`` has on loopback; the port."""
    live = LiveWebConfig(WebConfig(), time.monotonic)
    server = make_server(Application(poller.families, poller.status, live), live)
    listener = listen("127.0.0.1:0")
    port = int(listener.getsockname()[1])
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield port
    finally:
        server.should_exit = True
        thread.join()


def scrape(port: int, headers: dict[str, str]) -> int:
    """Return how many samples an exposition has, without the counters of overflows.

    That something once overflowed is remembered for the life of the process; everything else has to go.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"a scrape answers {answer.status}")
    if answer.getheader("Content-Encoding") == "gzip":
        body = gzip.decompress(body)
    return sum(1 for line in body.splitlines() if line[:1] not in (b"", b"#") and not line.startswith(OVERFLOWED))


def descriptors() -> int:
    """Return how many files and sockets this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path per entry would be garbage in what is measured


def main() -> int:
    """Run the polls; 1 when memory grew by 5 % or more after the warm-up, or series or sockets did not come back."""
    console = Console(soft_wrap=True, highlight=False)
    logging.disable(logging.CRITICAL)
    draw = random.Random(1)
    nodes = tuple(Node(f"node-{at}", gpu_capacity_milli=8000, gpu_allocated_milli=8000) for at in range(25))
    tracker = Tracker(retention_seconds=RETENTION)
    collector = ClusterCollector(default_policy(), tracker, quality_window_seconds=RETENTION)
    stream = Stream()
    now, number, scrapes = 1_000_000.0, 0, 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        state = Path(folder) / "state.json"
        poller = Poller(
            "soak",
            lambda: stream,
            collector,
            interval=PERIOD,
            max_age=4 * PERIOD,
            after_poll=lambda: tracker.save_state(state),
        )
        port = stack.enter_context(serving(poller))

        def poll(workloads: list[Workload], events: tuple[Event, ...] = ()) -> int:
            nonlocal scrapes
            stream.next = Snapshot(now, "soak", "benchmark", tuple(workloads), nodes, (), events)
            if (error := poller.poll_once()) is not None:
                raise error
            scrapes += 1
            return scrape(port, ASKED[scrapes % len(ASKED)])

        quiet = [
            Workload(
                "first", "first", WorkloadState.RUNNING, service="s", queue="q", rank=0, started=now, submitted=now
            )
        ]
        base = poll(quiet)
        current: list[Workload] = []
        most = after_warm_up = open_before = 0
        for turn in range(POLLS):
            now += PERIOD
            fresh = [workload(number + at, now, draw) for at in range(SIZE if not current else CHURN)]
            number += len(fresh)
            current = (current + fresh)[-SIZE:]
            event = Event(f"e{turn}", EventKind.PREEMPTED, now, rank=turn % 4, by_rank=(turn + 1) % 4)
            most = max(most, poll(current, (event,)))
            if turn % FAILURE_EVERY == 0:
                poller.poll_once()
            if turn == WARM_UP:
                gc.collect()
                after_warm_up, open_before = resident(), descriptors()
        gc.collect()
        end, open_after = resident(), descriptors()
        size = state.stat().st_size
        for _ in range(int(2 * RETENTION / PERIOD)):
            now += PERIOD
            last = poll(quiet)
        status = poller.status()
    growth = end / after_warm_up - 1
    console.print(
        f"{status.snapshots:,} snapshots of {SIZE} workloads, {number:,} different ones; "
        f"{status.polls - status.snapshots} polls failed, {scrapes:,} scrapes; state file {size / 1024:.0f} KiB"
    )
    console.print(
        f"resident memory after {WARM_UP} polls {after_warm_up / 2**20:.2f} MiB, "
        f"after {POLLS} {end / 2**20:.2f} MiB: {growth:+.1%}"
    )
    console.print(f"open files: {open_before} after {WARM_UP} polls, {open_after} after {POLLS}")
    console.print(f"series: {base} at first, {most} at most, {last} once it was quiet again")
    return 0 if growth < GROWTH_LIMIT and last <= base and open_after <= open_before + 1 else 1


if __name__ == "__main__":
    sys.exit(main())
