"""deploy/compose.yaml and what it mounts: files that exist, ports and options of the code, configurations that load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from alerts import routing
from alerts.model import JOBS, SERVE_JOB
from cli.exporter import PORTS
from cli.exporter import app as exporter_app
from cli.main import COMMANDS, main
from exporters.model import read_snapshots
from tests.support.services import program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SCRAPE: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "compose.yml").read_text())


def test_every_file_that_is_mounted_exists_and_every_volume_is_declared() -> None:
    for name, service in SERVICES.items():
        for mount in service.get("volumes", ()):
            source, target, *mode = mount.split(":")
            assert target.startswith("/"), mount
            if source.startswith("."):
                assert (DEPLOY / source).exists(), f"{name} mounts {source}"
                assert mode == ["ro"], mount
            else:
                assert source in COMPOSE["volumes"]
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
    assert (DEPLOY / COMPOSE["x-prioscope"]["build"]["dockerfile"].removeprefix("deploy/")).exists()


def test_nothing_is_reachable_from_outside_and_images_are_pinned() -> None:
    published = {port for service in SERVICES.values() for port in service.get("ports", ())}
    assert published
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in published)
    images = {service["image"] for service in SERVICES.values()} - {"prioscope"}
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)
    assert COMPOSE["secrets"] == {"rca-token": {"environment": "RCA_TOKEN"}}, "no secret in a file of the repository"


def test_targets_are_services_of_the_file_on_the_ports_of_the_code() -> None:
    targets = {
        job["job_name"]: target
        for job in SCRAPE["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    serve = urlsplit(routing.SERVE_URL).port
    assert targets == {"prioscope-file": f"exporter:{PORTS['file']}", SERVE_JOB: f"serve:{serve}"}
    assert all(re.fullmatch(JOBS, job) for job in targets)
    assert {target.partition(":")[0] for target in targets.values()} <= set(SERVICES)
    assert f":{PORTS['file']}" in SERVICES["exporter"]["command"]
    assert f":{serve}" in SERVICES["serve"]["command"]
    (alertmanager,) = SCRAPE["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert alertmanager.partition(":")[0] in SERVICES


def options_of(app: Any, command: list[str]) -> set[str]:
    return set(re.findall(r"--[a-z-]+", CliRunner().invoke(app, command, env={"COLUMNS": "200"}).output))


def test_options_are_those_of_the_commands() -> None:
    command = SERVICES["exporter"]["command"]
    assert command[:2] == ["exporter", "file"]
    assert {item for item in command if item.startswith("--")} <= options_of(exporter_app, ["file", "--help"])


@pytest.mark.skipif("serve" not in COMMANDS, reason="this release has no `rca serve`")
def test_options_of_the_incident_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    main(["serve", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {item for item in SERVICES["serve"]["command"] if item.startswith("--")} <= known


def test_prometheus_reads_its_configuration_and_the_rules(tmp_path: Path) -> None:
    # As mounted: the configuration, and the rules in a folder beside it.
    (tmp_path / "prometheus.yml").write_text((DEPLOY / "prometheus" / "compose.yml").read_text())
    (tmp_path / "rules").mkdir()
    for path in (ROOT / "alerts" / "generated").iterdir():
        (tmp_path / "rules" / path.name).write_text(path.read_text())
    command = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == 2


def test_alertmanagers_configuration_is_generated_and_loads() -> None:
    path = DEPLOY / "alertmanager" / "alertmanager.yml"
    assert path.read_text() == routing.text("http://serve:9945", "/run/secrets/rca-token")
    done = subprocess.run(
        [program("amtool"), "check-config", str(path)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafanas_data_source_is_the_prometheus_of_the_file() -> None:
    (mount,) = (item for item in SERVICES["grafana"]["volumes"] if "datasources" in item)
    (source,) = yaml.safe_load((DEPLOY / mount.split(":")[0]).read_text())["datasources"]
    assert urlsplit(source["url"]).hostname in SERVICES


def test_the_demonstration_is_what_its_script_writes_and_holds_an_inversion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = DEPLOY / "demo" / "inversion.jsonl"
    script = ROOT / "scripts" / "demo_recording.py"
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, timeout=60)
    assert done.stdout == path.read_bytes()
    assert len(list(read_snapshots(path))) == 60
    assert main(["exporter", "file", str(path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r'priority_violation_culprit_gpu_seconds\{.*culprit_service="train-llm".*\} [1-9]', shown)
