"""Alertmanager's configuration: who hears of what (amtool), and what silences what (a real Alertmanager)."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alerts import routing
from alerts.build import alerts
from alerts.model import Alert
from exporters.errors import InvalidInputError
from tests.support.services import HOST, free_port, program, wait_for

ALERTS = {alert.name: alert for alert in alerts()}


def amtool(*arguments: str) -> str:
    done = subprocess.run([program("amtool"), *arguments], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alertmanager")
    (folder / "token").write_text("secret")
    path = folder / "alertmanager.yml"
    path.write_text(routing.text("http://127.0.0.1:1", str(folder / "token")))
    return path


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ({"alertname": "PrioscopeUrgentPriorityInversion", "severity": "critical", "rca": "capture"}, "rca-serve,page"),
        ({"alertname": "PrioscopeSchedulingDelay", "severity": "warning", "rca": "capture"}, "rca-serve,ticket"),
        ({"alertname": "PrioscopeWaitSloBurnFast", "severity": "critical"}, "page"),
        ({"alertname": "PrioscopeSnapshotStale", "severity": "warning"}, "ticket"),
        ({"alertname": "PrioscopeQosMismatch", "severity": "info"}, "notice"),
        # An alert of the user's own may be captured, and is routed further as the user says.
        ({"alertname": "CheckoutSlow", "severity": "critical", "rca": "capture"}, "rca-serve"),
        ({"alertname": "CheckoutSlow", "severity": "critical"}, "notice"),
        ({}, "notice"),
    ],
)
def test_routes(configuration: Path, labels: dict[str, str], receivers: str) -> None:
    arguments = [f"{name}={value}" for name, value in labels.items()]
    amtool("config", "routes", "test", f"--config.file={configuration}", f"--verify.receivers={receivers}", *arguments)


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: str(alert.name))
def test_every_alert_reaches_the_receiver_of_its_severity(configuration: Path, alert: Alert) -> None:
    labels = [
        f"alertname={alert.name}",
        f"severity={alert.severity.value}",
        *(["rca=capture"] if alert.capture else []),
    ]
    expected = ",".join([*(["rca-serve"] if alert.capture else []), routing.RECEIVERS[alert.severity.value]])
    amtool("config", "routes", "test", f"--config.file={configuration}", f"--verify.receivers={expected}", *labels)


def test_the_configuration_is_checked_and_holds_no_secret(configuration: Path) -> None:
    assert "SUCCESS" in amtool("check-config", str(configuration))
    assert "secret" not in configuration.read_text()
    for url in ("rca-serve", "ftp://x", "http://user:word@x"):
        with pytest.raises(InvalidInputError):
            routing.configuration(url)


def test_inhibitions_name_alerts_that_exist_and_labels_that_they_have() -> None:
    for item in routing.inhibitions():
        assert not set(item.sources) & set(item.targets), "an alert that silenced itself would never be heard"
        for name in (*item.sources, *item.targets):
            assert set(item.equal) <= set(ALERTS[name].labels), (name, item)


# --- a real Alertmanager


@dataclass
class Alertmanager:
    url: str

    def ask(self, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(  # noqa: S310 - http, on loopback
            f"{self.url}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return json.loads(answer.read() or b"null")

    def ready(self) -> bool:
        try:
            self.ask("/api/v2/status")
        except OSError:
            return False
        return True


@pytest.fixture(scope="module")
def alertmanager(configuration: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    folder = tmp_path_factory.mktemp("data")
    port = free_port()
    command = [
        program("prometheus-alertmanager"),
        f"--config.file={configuration}",
        f"--storage.path={folder}",
        f"--web.listen-address={HOST}:{port}",
        "--cluster.listen-address=",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        found = Alertmanager(f"http://{HOST}:{port}")
        try:
            wait_for(found.ready, "Alertmanager", (folder / "log").read_text)
            yield found
        finally:
            process.terminate()
            process.wait(20)


def labelled(name: str, pair: str, **labels: str) -> dict[str, str]:
    return {"alertname": name, "severity": ALERTS[name].severity.value, "pair": pair, **labels}


@pytest.mark.services
def test_a_real_alertmanager_silences_what_follows_and_nothing_else(alertmanager: Alertmanager) -> None:
    """Every source with every target, once about the same thing and once about another one."""
    posted: list[dict[str, str]] = []
    expected: dict[tuple[str, str], bool] = {}
    for number, item in enumerate(routing.inhibitions()):
        for source in item.sources:
            for target in item.targets:
                for follows in (True, False):
                    pair = f"{number}-{source}-{target}-{follows}"
                    same = dict.fromkeys(item.equal, pair)
                    about = same if follows else {**same, item.equal[-1]: f"not {pair}"}
                    posted += [labelled(source, pair, **same), labelled(target, pair, **about)]
                    expected[source, pair], expected[target, pair] = False, follows
    alertmanager.ask("/api/v2/alerts", [{"labels": labels} for labels in posted])

    def found() -> dict[tuple[str, str], bool]:
        shown = alertmanager.ask("/api/v2/alerts")
        return {(a["labels"]["alertname"], a["labels"]["pair"]): bool(a["status"]["inhibitedBy"]) for a in shown}

    wait_for(lambda: found() == expected, "the inhibitions", lambda: str(set(found().items()) ^ set(expected.items())))
