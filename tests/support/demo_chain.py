"""A small chain of real HTTP services on loopback, of which one gets its work done by Slurm jobs.

``gateway -> auth``, ``gateway -> api -> inference``, ``api -> store``. Each service is an HTTP server of its own,
measures the calls that it makes and the requests that it serves, and exposes them under the names of the OpenTelemetry
service graph connector. ``inference`` collects requests for a moment and submits one urgent GPU job for all of them;
they are answered when that job has run. So when somebody less urgent has the GPUs, users wait because a job waits.

Run it as a process of its own; it prints the address of each service as JSON and ends on SIGTERM::

    python -m tests.support.demo_chain --slurm-conf slurm.conf --rate 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tests.support.services import HOST, SBIN

#: Who calls whom, in order; every call is made once a request.
CALLS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("auth", "api"),
    "api": ("store", "inference"),
    "auth": (),
    "store": (),
    "inference": (),
}
#: Seconds of a service's own work.
OWN = {"gateway": 0.002, "api": 0.003, "auth": 0.004, "store": 0.006, "inference": 0.0}
TIMEOUT_SECONDS = 30.0
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 30.0)


class Metrics:
    """What one service measures, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        pair = ("client", "server", "connection_type")
        self.total = Counter("traces_service_graph_request", "Calls", pair, registry=self.registry)
        self.failed = Counter("traces_service_graph_request_failed", "Failed calls", pair, registry=self.registry)
        self.client, self.server = (
            Histogram(
                f"traces_service_graph_request_{side}_seconds",
                f"Calls as the {side} saw them",
                pair,
                buckets=_BUCKETS,
                registry=self.registry,
            )
            for side in ("client", "server")
        )


@dataclass
class Batches:
    """Gets requests done by Slurm jobs, one for all that came in meanwhile."""

    conf: Path
    gap_seconds: float = 0.7
    _waiting: list[threading.Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        """Return when a job that was submitted after this call has run."""
        done = threading.Event()
        with self._lock:
            self._waiting.append(done)
        if not done.wait(TIMEOUT_SECONDS):
            raise TimeoutError("no job ran in time")

    def run(self) -> None:
        """Submit job after job until `stop`."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": SBIN, "LC_ALL": "C"}
        options = ["-Q", "-J", "inference", "-p", "urgent", "--gres=gpu:4", "--comment=service=inference", "-t", "5"]
        while not self._stop.wait(self.gap_seconds):
            with self._lock:
                batch, self._waiting = self._waiting, []
            if not batch:
                continue
            # salloc returns when the job ran, so the batch waits exactly as long as its job does.
            with subprocess.Popen(
                ["salloc", *options, "true"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as job:
                while job.poll() is None and not self._stop.is_set():
                    time.sleep(0.02)
                if job.poll() is None:
                    job.terminate()
            for done in batch:
                done.set()

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()


class Service:
    """One HTTP server: does its own work, then calls others, and measures both."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name, self.metrics = name, Metrics()
        self.peers: dict[str, str] = {}
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, generate_latest(service.metrics.registry))
                    return
                client = self.headers.get("X-Client", "user")
                # Whoever is not instrumented is a virtual node to the connector.
                pair = (client, service.name, "virtual_node" if client == "user" else "")
                start = time.perf_counter()
                status = 200
                try:
                    work()
                    for peer in CALLS[service.name]:
                        service.call(peer)
                except (OSError, TimeoutError):
                    status = 503
                service.metrics.server.labels(*pair).observe(time.perf_counter() - start)
                if client == "user":
                    service.metrics.total.labels(*pair).inc()
                    if status != 200:
                        service.metrics.failed.labels(*pair).inc()
                with contextlib.suppress(ConnectionError):
                    self._answer(status, b"done\n")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self.server = Server((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self.server.server_address[1]}"

    def call(self, peer: str) -> None:
        """Call another service and measure it as its client."""
        pair = (self.name, peer, "")
        # Both exist from the start, as counters should: a first failure would not show in a rate otherwise.
        self.metrics.failed.labels(*pair)
        self.metrics.total.labels(*pair).inc()
        request = urllib.request.Request(self.peers[peer], headers={"X-Client": self.name})  # noqa: S310
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS + 2) as answer:  # noqa: S310
                answer.read()
        except OSError:
            self.metrics.failed.labels(*pair).inc()
            raise
        finally:
            self.metrics.client.labels(*pair).observe(time.perf_counter() - start)


def main() -> None:
    """Run the chain and send it requests until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slurm-conf", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    batches = Batches(options.slurm_conf)
    services = {name: Service(name, batches.work if name == "inference" else _sleeper(OWN[name])) for name in CALLS}
    addresses = {name: service.url for name, service in services.items()}
    for service in services.values():
        service.peers = addresses
        threading.Thread(target=service.server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    working = threading.Thread(target=batches.run)
    working.start()
    sys.stdout.write(json.dumps(addresses) + "\n")
    sys.stdout.flush()
    while not stop.wait(1.0 / options.rate):
        threading.Thread(target=_user, args=(addresses["gateway"],), daemon=True).start()
    batches.stop()
    working.join()


def _sleeper(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def _user(url: str) -> None:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS + 5) as answer:  # noqa: S310
        answer.read()


if __name__ == "__main__":
    sys.exit(main())
