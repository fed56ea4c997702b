"""A real Prometheus with the demo cluster's metrics: an hour of history, and real exporters that go on from there.

The history is what the real collectors made of `demo_cluster.Play`, written with `promtool tsdb create-blocks-from`.
The present comes from `rca exporter file`, which plays the rest of the story, and from one small server for the metrics
of others. To look at the boards, or to point a browser test at it::

    python -m tests.support.demo_stack --port 9090
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporters.collectors.cluster import ClusterCollector
from exporters.exposition import TEXT, render
from exporters.model import Snapshot, write_snapshots
from exporters.policy import load_policy
from exporters.poller import Poller
from exporters.tracker import Tracker
from tests.support.demo_cluster import POLICY, Play, foreign_metrics, incident_families
from tests.support.services import HOST, free_port, program, wait_for

ROOT = Path(__file__).parents[2]

#: Seconds from one snapshot to the next in the part that is played live, and how long it lasts.
STEP = 5.0
LIVE_SECONDS = 2 * 3600.0

RULES = """\
groups:
  - name: demo
    rules:
      - alert: UrgentWorkloadBlocked
        expr: max by (cluster, service, priority_level) (priority_violations_active{violation_type="inversion"}) > 0
        labels: { severity: page }
      - alert: FragmentationBlocks
        expr: >-
          max by (cluster, service, priority_level)
          (priority_violations_active{violation_type="fragmentation_blocked"}) > 0
        labels: { severity: ticket }
"""


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def get(self, path: str, **parameters: object) -> Any:
        """Return the ``data`` of an answer of its API.

        Raises:
            ValueError: Prometheus says that the query is wrong; with its message.
        """
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:  # noqa: S310
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(json.load(error).get("error", str(error))) from None

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        moment = {} if at is None else {"time": at}
        found: list[dict[str, Any]] = self.get("query", query=expression, **moment)["result"]
        return found

    def range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of a range query."""
        found: list[dict[str, Any]] = self.get("query_range", query=expression, start=start, end=end, step=step)[
            "result"
        ]
        return found


class _Listed:
    """A source that gives prepared snapshots, for the poller."""

    def __init__(self, snapshots: Iterable[Snapshot]) -> None:
        self._snapshots = iter(snapshots)

    def poll(self) -> Snapshot:
        return next(self._snapshots)

    def close(self) -> None:
        pass


def write_history(play: Play, out: Path, policy: Path, *, seconds: float, step: float, targets: dict[str, str]) -> None:
    """Write what the exporters would have given before `Play.origin`, as OpenMetrics with time stamps.

    ``targets`` are the addresses of the two scrape targets, so that history and present are the same series.
    """
    moments = [play.origin - seconds + step * index for index in range(int(seconds / step))]
    at = moments[0]
    collector = ClusterCollector(load_policy(policy), Tracker(count_history=True))
    snapshots = [play.snapshot(moment) for moment in moments]
    poller = Poller("file", lambda: _Listed(snapshots), collector, interval=step, max_age=60.0, clock=lambda: at)
    with out.open("w", encoding="utf-8") as stream:
        for moment in moments:
            at = moment
            poller.poll_once()
            _stamp(
                stream,
                render(poller.families(), TEXT).decode(),
                moment,
                f'job="prioscope",instance="{targets["prioscope"]}"',
            )
            _stamp(
                stream,
                foreign_metrics(play, moment) + render(incident_families(play, moment), TEXT).decode(),
                moment,
                f'job="others",instance="{targets["others"]}"',
            )
        stream.write("# EOF\n")
    poller.close()
    # Where the live exporter goes on.
    collector.tracker.save_state(out.with_name("state.json"))


def _stamp(stream: Any, text: str, moment: float, labels: str) -> None:
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            if series.endswith("}"):
                stream.write(f"{series[:-1]},{labels}}} {value} {moment:.3f}\n")
            else:
                stream.write(f"{series}{{{labels}}} {value} {moment:.3f}\n")


class _Others(http.server.BaseHTTPRequestHandler):
    """Serves the metrics of others, and those of incidents."""

    play: Play

    def do_GET(self) -> None:
        now = time.time()
        body = foreign_metrics(self.play, now).encode() + render(incident_families(self.play, now), TEXT)
        self.send_response(200)
        self.send_header("Content-Type", TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def prometheus(
    folder: Path, scrapes: str, *, port: int = 0, cors: str = ".*", options: Sequence[str] = ()
) -> Iterator[Prometheus]:
    """Run a Prometheus with its data in ``folder``; ``scrapes`` is the YAML of its targets, empty for none."""
    port = port or free_port()
    (folder / "rules.yml").write_text(RULES)
    (folder / "prometheus.yml").write_text(
        "global: { scrape_interval: 1s, evaluation_interval: 1s }\nrule_files: [rules.yml]\n" + scrapes
    )
    command = [
        program("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address={HOST}:{port}",
        f"--web.cors.origin={cors}",
        "--log.level=warn",
        *options,
    ]
    with (folder / "prometheus.log").open("wb") as log, _process(command, log):
        found = Prometheus(f"http://{HOST}:{port}")
        wait_for(lambda: _answers(found), "Prometheus", (folder / "prometheus.log").read_text, timeout=60)
        yield found


@contextlib.contextmanager
def demo_stack(folder: Path, *, port: int = 0, seconds: float = 3600.0, step: float = 15.0) -> Iterator[Prometheus]:
    """Run Prometheus with ``seconds`` of history and the exporters of the present, until the block ends."""
    play = Play(time.time())
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    targets = {"prioscope": f"{HOST}:{free_port()}", "others": f"{HOST}:{free_port()}"}
    history = folder / "history.om"
    write_history(play, history, policy, seconds=seconds, step=step, targets=targets)
    make_blocks = [program("promtool"), "tsdb", "create-blocks-from", "openmetrics", str(history), str(folder / "tsdb")]
    made = subprocess.run(make_blocks, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    history.unlink()
    recording = folder / "present.jsonl"
    write_snapshots(recording, (play.snapshot(play.origin + STEP * n) for n in range(int(LIVE_SECONDS / STEP))))
    exporter = [sys.executable, "-m", "cli.main", "exporter", "file", str(recording), "--interval", str(STEP)]
    exporter += ["--policy", str(policy), "--listen", targets["prioscope"], "--state", str(folder / "state.json")]
    scrapes = "scrape_configs:\n" + "".join(
        f"  - {{ job_name: {job}, static_configs: [{{ targets: ['{target}'] }}] }}\n" for job, target in targets.items()
    )
    handler = type("_Handler", (_Others,), {"play": play})
    with (
        (folder / "exporter.log").open("wb") as log,
        _process(exporter, log),
        _serving(handler, targets["others"]),
        prometheus(folder, scrapes, port=port) as found,
    ):
        ready = 'count(prioscope_source_up == 1) and count(up == 1) == 2 and count(ALERTS{alertstate="firing"})'
        logs = (folder / "exporter.log").read_text
        wait_for(lambda: found.query(ready), "the first scrapes", logs, timeout=60)
        yield found


@contextlib.contextmanager
def _process(command: list[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _serving(handler: type[http.server.BaseHTTPRequestHandler], address: str) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    server = http.server.ThreadingHTTPServer((host, int(port)), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answers(server: Prometheus) -> bool:
    try:
        return bool(server.query("vector(1)"))
    except (OSError, ValueError):
        # While it reads its blocks it answers 503, in plain text.
        return False


def main() -> None:
    """Run the stack until it is told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9090, help="port of Prometheus on loopback (0: any free one)")
    parser.add_argument("--hours", type=float, default=1.0, help="hours of history")
    arguments = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with (
        tempfile.TemporaryDirectory(prefix="prioscope-demo-") as folder,
        demo_stack(Path(folder), port=arguments.port, seconds=3600 * arguments.hours) as found,
    ):
        # The line that a script waits for.
        print(f"ready {found.url}", flush=True)  # noqa: T201
        stop.wait()


if __name__ == "__main__":
    main()
