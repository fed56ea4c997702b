"""The live chain on loopback: Slurm, our exporter, a demo of services, a store of metrics, rules and Alertmanager.

Everything is the real program, with intervals of one second. Whoever uses it says where Alertmanager posts to.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO
from urllib.parse import urlencode

from tests.support.services import HOST, free_port, program, wait_for
from tests.support.slurm_cluster import Partition, SlurmCluster, SlurmNode, running

ROOT = Path(__file__).parents[2]
SECONDS = 1

POLICY = """\
apiVersion: prioscope/v1
kind: TaskPriorityPolicy
metadata: { name: live-chain }
spec:
  inversion: { heldCounts: any }
  rules:
    - name: urgent
      matchLevels: [P0]
      waitSloSeconds: 2
"""

ALERTMANAGER = """\
route: {{ receiver: rca, group_by: ['...'], group_wait: 0s, group_interval: 1s, repeat_interval: 1h }}
receivers:
  - name: rca
    webhook_configs:
      - url: {url}
        send_resolved: true
        max_alerts: 0
{credentials}"""
INDENT = " " * 8


class Metrics(StrEnum):
    """What stores the metrics, and is asked by the capture."""

    PROMETHEUS = "prometheus"
    VICTORIA = "victoria-metrics"


@dataclass
class LiveChain:
    """The running programs and their addresses."""

    folder: Path
    cluster: SlurmCluster
    rules: str
    webhook: str
    token: str = ""
    metrics: Metrics = Metrics.PROMETHEUS
    services: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    store_url: str = ""
    alertmanager_url: str = ""

    def run(self, name: str, *command: str | Path, stdout: int | IO[bytes] | None = None) -> None:
        """Start a program; its output goes to ``NAME.out.log``."""
        with (self.folder / f"{name}.out.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=stdout or log,
                stderr=log,
                env=self.cluster.environment,
                cwd=ROOT,
            )

    def start(self) -> None:
        """Start everything and wait until all targets are scraped."""
        exporter, alerts = free_port(), free_port()
        (self.folder / "policy.yaml").write_text(POLICY)
        conf = self.folder / "slurm.conf"
        self.run(
            "exporter",
            sys.executable,
            *("-m", "cli.main", "exporter", "slurm", "--listen", f"{HOST}:{exporter}", "--conf", conf),
            *("--policy", self.folder / "policy.yaml", "--interval", "0.5", "--timeout", "5"),
        )
        self.run(
            "chain",
            sys.executable,
            *("-m", "tests.support.demo_chain", "--slurm-conf", conf),
            stdout=subprocess.PIPE,
        )
        out = self.processes["chain"].stdout
        assert out is not None
        self.services = json.loads(out.readline())
        targets = {"slurm": [f"{HOST}:{exporter}"]}
        targets["chain"] = [url.removeprefix("http://") for url in self.services.values()]
        (self.folder / "rules.yaml").write_text(self.rules)
        self._alertmanager(alerts)
        if self.metrics is Metrics.PROMETHEUS:
            self._prometheus(targets)
        else:
            self._victoria(targets)
        wait_for(lambda: self.value("sum(up)") == len(self.services) + 1, "the targets to be scraped", self.log, 60)

    def _alertmanager(self, port: int) -> None:
        credentials = ""
        if self.token:
            (self.folder / "webhook-token").write_text(self.token)
            credentials = (
                f"{INDENT}http_config: {{ authorization: {{ credentials_file: {self.folder}/webhook-token }} }}\n"
            )
        (self.folder / "alertmanager.yml").write_text(ALERTMANAGER.format(url=self.webhook, credentials=credentials))
        self.run(
            "alertmanager",
            program("prometheus-alertmanager"),
            f"--config.file={self.folder}/alertmanager.yml",
            f"--storage.path={self.folder}/alertmanager",
            f"--web.listen-address={HOST}:{port}",
            "--cluster.listen-address=",
        )
        self.alertmanager_url = f"http://{HOST}:{port}"

    def _prometheus(self, targets: Mapping[str, Sequence[str]]) -> None:
        port = free_port()
        alerts = self.alertmanager_url.removeprefix("http://")
        (self.folder / "prometheus.yml").write_text(
            f"global: {{ scrape_interval: {SECONDS}s, evaluation_interval: {SECONDS}s }}\n"
            f"rule_files: [{self.folder}/rules.yaml]\n"
            f"alerting: {{ alertmanagers: [{{ static_configs: [{{ targets: ['{alerts}'] }}] }}] }}\n" + _scrape(targets)
        )
        self.run(
            "prometheus",
            program("prometheus"),
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/tsdb",
            f"--web.listen-address={HOST}:{port}",
        )
        self.store_url = f"http://{HOST}:{port}"

    def _victoria(self, targets: Mapping[str, Sequence[str]]) -> None:
        """VictoriaMetrics scrapes and stores; vmalert evaluates the rules."""
        port, other = free_port(), free_port()
        (self.folder / "victoria.yml").write_text(f"global: {{ scrape_interval: {SECONDS}s }}\n" + _scrape(targets))
        self.store_url = f"http://{HOST}:{port}"
        self.run(
            "victoria-metrics",
            program("victoria-metrics"),
            f"-promscrape.config={self.folder}/victoria.yml",
            f"-storageDataPath={self.folder}/victoria",
            f"-httpListenAddr={HOST}:{port}",
            "-retentionPeriod=1d",
            # By default it hides the newest 30 s, and versions before latency_offset cannot be asked for them.
            f"-search.latencyOffset={SECONDS}s",
        )
        self.run(
            "vmalert",
            program("vmalert"),
            f"-rule={self.folder}/rules.yaml",
            f"-datasource.url={self.store_url}",
            f"-notifier.url={self.alertmanager_url}",
            f"-evaluationInterval={SECONDS}s",
            f"-httpListenAddr={HOST}:{other}",
        )

    def value(self, expression: str) -> float | None:
        """Value of the first series of an instant query; None without one, and while the store does not answer."""
        try:
            answer = json.loads(get(f"{self.store_url}/api/v1/query?{urlencode({'query': expression})}"))
        except (OSError, ValueError):
            return None
        found = answer["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    def stop(self) -> None:
        """End every program that was started here."""
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in reversed(self.processes.values()):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            if process.stdout is not None:
                process.stdout.close()
        self.processes.clear()

    def log(self) -> str:
        """The end of each program's output."""
        return self.cluster.log()


def _scrape(targets: Mapping[str, Sequence[str]]) -> str:
    jobs = [
        f"  - {{ job_name: {name}, static_configs: [{{ targets: {json.dumps(list(found))} }}] }}"
        for name, found in targets.items()
    ]
    return "scrape_configs:\n" + "\n".join(jobs) + "\n"


def get(url: str, token: str = "", timeout: float = 10.0) -> bytes:
    """Fetch ``url`` from loopback."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
        body: bytes = answer.read()
    return body


NODES = [SlurmNode("gpu1", {"": 4}), SlurmNode("gpu2", {})]
PARTITIONS = [
    Partition("batch", "gpu1", "Default=YES PriorityTier=1 PreemptMode=OFF"),
    Partition("urgent", "gpu1", "PriorityTier=10 PreemptMode=OFF"),
]


@contextlib.contextmanager
def live_chain(
    rules: str, webhook: str, *, token: str = "", metrics: Metrics = Metrics.PROMETHEUS
) -> Iterator[LiveChain]:
    """Run the chain for the length of a with statement."""
    # Not tmp_path: the path of a unix socket has to be short.
    with (
        tempfile.TemporaryDirectory(prefix="chain") as name,
        running(SlurmCluster(Path(name), NODES, PARTITIONS, min_job_age=5, rest=False)) as cluster,
    ):
        chain = LiveChain(Path(name), cluster, rules, webhook, token, metrics)
        try:
            chain.start()
            yield chain
        finally:
            chain.stop()
