"""The demonstration with a real Prometheus and a real Alertmanager: from the recording to the webhook."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import routing
from alerts.build import Format, files
from alerts.model import Options
from tests.support.answering import Reply, answering
from tests.support.services import HOST, free_port, program, wait_for

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]


def ask(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - http, on loopback
            return json.load(answer)
    except OSError:
        return None


@contextlib.contextmanager
def started(folder: Path, *commands: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"{number}.log").open("wb"))
            process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT))
            stack.callback(process.terminate)
        yield


def test_an_inversion_reaches_the_incident_server_with_its_victim_and_token(tmp_path: Path) -> None:
    exporter, prometheus, alertmanager = free_port(), free_port(), free_port()
    (tmp_path / "token").write_text("s3cret")
    for name, text in files(Options(), Format.PROMETHEUS).items():
        (tmp_path / name).write_text(text)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(tmp_path / "*.yaml")],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"{HOST}:{alertmanager}"]}]}]},
        "scrape_configs": [
            {"job_name": "prioscope-file", "static_configs": [{"targets": [f"{HOST}:{exporter}"]}]},
        ],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with answering(lambda _: Reply()) as webhook:
        (tmp_path / "alertmanager.yml").write_text(routing.text(webhook.url, str(tmp_path / "token")))
        recording = ROOT / "deploy" / "demo" / "inversion.jsonl"
        commands: tuple[list[str], ...] = (
            [
                *(sys.executable, "-m", "cli.main", "exporter", "file", str(recording)),
                *("--interval", "0.05", "--listen", f"{HOST}:{exporter}"),
            ],
            [
                program("prometheus"),
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/tsdb",
                f"--web.listen-address={HOST}:{prometheus}",
            ],
            [
                program("prometheus-alertmanager"),
                f"--config.file={tmp_path}/alertmanager.yml",
                f"--storage.path={tmp_path}/am",
                f"--web.listen-address={HOST}:{alertmanager}",
                "--cluster.listen-address=",
            ],
        )

        def fired() -> dict[str, Any]:
            shown = ask(f"http://{HOST}:{alertmanager}/api/v2/alerts") or ()
            return {item["labels"]["alertname"]: item for item in shown}

        def logs() -> str:
            return "".join(path.read_text()[-2000:] for path in tmp_path.glob("*.log"))

        with started(tmp_path, *commands):
            wait_for(lambda: "PrioscopeUrgentPriorityInversion" in fired(), "the alert", logs, 60)
            wait_for(lambda: webhook.requests, "the webhook to be called", logs, 60)
            found = fired()
            rules = ask(f"http://{HOST}:{prometheus}/api/v1/rules")["data"]["groups"]
    sent = webhook.requests[0]
    assert (sent.method, sent.path, sent.headers["Authorization"]) == ("POST", "/api/v1/alerts", "Bearer s3cret")
    alert = found["PrioscopeUrgentPriorityInversion"]
    assert {item["name"] for item in alert["receivers"]} == {"rca-serve", "page"}
    wanted = {
        "cluster": "demo",
        "service": "chat-inference",
        "workload": "813",
        "priority_level": "P0",
        "rca": "capture",
    }
    assert wanted.items() <= alert["labels"].items()
    assert alert["annotations"]["rca_metric"] == "queue_wait_seconds"
    assert "var-pod=813" in alert["annotations"]["dashboard_url"]
    assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}
