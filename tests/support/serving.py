"""`rca serve` as a process, the webhooks that it gets, and small bundles for it to answer them with."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rca.simulation.incidents import to_incident
from rca.simulation.scenarios import build
from tests.support.services import HOST, free_port, wait_for

ROOT = Path(__file__).parent.parent.parent
ONSET = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)


def webhook(number: int, *, resolved: bool = False, **changes: Any) -> dict[str, Any]:
    """What Alertmanager sends for alert ``number``; ``changes`` are fields of the alert."""
    starts = ONSET + timedelta(seconds=number)
    alert = {
        "status": "resolved" if resolved else "firing",
        "labels": {"alertname": "Slow", "service": f"service-{number}", "cluster": "c1"},
        "annotations": {"summary": f"service-{number} is slow"},
        "startsAt": starts.isoformat().replace("+00:00", "Z"),
        "endsAt": (starts + timedelta(minutes=5)).isoformat() if resolved else "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus:9090/graph",
        "fingerprint": f"{number:016x}",
        **changes,
    }
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="Slow", number="{number}"}}',
        "truncatedAlerts": 0,
        "status": alert["status"],
        "receiver": "rca",
        "groupLabels": {"alertname": "Slow"},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "http://alertmanager:9093",
        "alerts": [alert],
    }


def post(url: str, body: object, token: str = "", timeout: float = 10.0) -> tuple[int, Any]:
    """Post a webhook; return the status and the JSON of the answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(f"{url}/api/v1/alerts", json.dumps(body).encode(), headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def deliver(url: str, body: object, *, seconds: float = 120.0) -> int:
    """Post a webhook as Alertmanager does: again, after a while, until it is taken. Return how often it was refused.

    The server may be gone, or die in the middle of an answer.
    """
    deadline = time.monotonic() + seconds
    refused = 0
    while True:
        try:
            status, _ = post(url, body)
        except (OSError, json.JSONDecodeError):
            status = 0
        if status == 202:
            return refused
        assert status in (0, 503), status
        refused += status == 503
        assert time.monotonic() < deadline, f"not taken within {seconds} s"
        time.sleep(min(0.2 * 2**refused, 3.0))


def get(url: str, path: str) -> Any:
    """Return the JSON that the API answers."""
    with urllib.request.urlopen(f"{url}/api/v1/{path}", timeout=30) as answer:  # noqa: S310
        return json.load(answer)


def write_bundle(folder: Path, name: str = "gpu-contention") -> Path:
    """Write the bundle of a simulated incident into ``folder``."""
    folder.mkdir(exist_ok=True)
    return to_incident(build(name, 0)).write(folder / f"{name}.zip")


@dataclass
class ServeProcess:
    """A server that can be killed and started again."""

    folder: Path
    options: Sequence[str | Path]
    store: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def spawn(self) -> None:
        """Start it, and do not wait."""
        command = [sys.executable, "-m", "cli.main", "serve", "--listen", f"{HOST}:{self.port}", "--store", self.store]
        with (self.folder / f"serve-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *(str(option) for option in self.options)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )

    def start(self) -> None:
        """Start it and wait until it is ready."""
        self.spawn()
        wait_for(self.ready, "the server", self.log, 60)

    def ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready") as answer:  # noqa: S310
            return bool(answer.status == 200)
        return False

    def kill(self) -> None:
        """End it as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        """End it as an operator does; return its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(40)

    def log(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("serve-*.log")))


@contextlib.contextmanager
def serving(folder: Path, *options: str | Path, store: str = "", started: bool = True) -> Iterator[ServeProcess]:
    """Run a server, with its store in ``folder`` unless ``store`` says where."""
    server = ServeProcess(folder, options, store or str(folder / "store.db"))
    try:
        if started:
            server.start()
        yield server
    finally:
        server.kill()
