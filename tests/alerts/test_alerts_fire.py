"""Every alert in promtool: when it fires, with which labels and words, and when it does not (cases.yaml)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts.build import Format, alerts, annotations_of, files
from alerts.model import SERVE_JOB, Alert, Options
from tests.support.services import program

CASES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())
OPTIONS = Options()
ALERTS = {alert.name: alert for alert in alerts()}

#: What a scrape through the Prometheus operator adds. None of it may leak into an alert or into an aggregation.
TARGET = {"endpoint": "metrics", "container": "exporter", "namespace": "monitoring", "pod": "exporter-0"}


def with_target(series: str) -> str:
    """Add the target's labels to a series that does not have them."""
    name, _, inner = series.rstrip("}").partition("{")
    have = dict(re.findall(r'(\w+)="([^"]*)"', inner))
    gpu = (name.startswith("gpu_") and "node" in have and "cluster" not in have) or have.get("source") == "gpu"
    job, instance = ("prioscope-gpu", "n1:9941") if gpu or 'uuid="' in inner else ("prioscope-slurm", "head:9942")
    if name.startswith("rca_"):
        job, instance = SERVE_JOB, "serve:9945"
    if have.get("xid"):
        job, instance = "prioscope-gpu", "n1:9941"
    labels = {"job": job, "instance": instance, "service": "prioscope", **TARGET, **have}
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def filled(template: str, labels: dict[str, str]) -> str:
    """Put label values into a template of an annotation, as Prometheus does."""
    return re.sub(r"\{\{ \$labels\.(\w+)(?: \| urlquery)? \}\}", lambda found: labels.get(found[1], ""), template)


def expected(alert: Alert, case: dict[str, Any]) -> dict[str, Any]:
    labels = {name: str(value) for name, value in case["labels"].items()}
    words = annotations_of(alert, OPTIONS)
    kept = {name: filled(text, labels) for name, text in words.items() if name != "description"}
    marks = {"severity": alert.severity.value, **({"rca": "capture"} if alert.capture else {})}
    return {"exp_labels": {**labels, **marks}, "exp_annotations": {**kept, "description": case["description"]}}


def promtool(folder: Path, tests: list[dict[str, Any]], every: str) -> subprocess.CompletedProcess[str]:
    """Run promtool's unit tests against the default rules."""
    tool = program("promtool")
    for name, text in files(OPTIONS, Format.PROMETHEUS).items():
        (folder / name).write_text(text)
    content = {"rule_files": ["recording.yaml", "alerts.yaml"], "evaluation_interval": every, "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(content))
    command = [tool, "test", "rules", str(folder / "tests.yaml")]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


def case_test(name: str, case: dict[str, Any], every: str, expectation: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": case.get("why", "fires"),
        "interval": case.get("every", every),
        "input_series": [{"series": with_target(key), "values": str(value)} for key, value in case["series"].items()],
        "alert_rule_test": [{"eval_time": case["at"], "alertname": name, "exp_alerts": expectation}],
    }


def test_every_alert_has_a_case_for_firing_and_one_for_not_firing() -> None:
    assert set(CASES) == set(ALERTS)
    for name, cases in CASES.items():
        assert cases["fires"]["series"], name
        assert cases["quiet"], name


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_alert_fires_and_stays_quiet(name: str, tmp_path: Path) -> None:
    cases, alert = CASES[name], ALERTS[name]
    every = cases.get("every", cases["fires"].get("every", "1m"))
    fires = cases["fires"]
    assert set(fires["labels"]) <= set(alert.labels), "the alert declares its labels"
    tests = [
        case_test(name, fires, every, [expected(alert, fires)]),
        *(case_test(name, case, every, []) for case in cases["quiet"]),
    ]
    done = promtool(tmp_path, tests, every)
    assert done.returncode == 0, done.stdout + done.stderr


def all_quiet(series: dict[str, str], at: str) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": with_target(key), "values": value} for key, value in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": []} for name in ALERTS],
    }


def test_nothing_fires_in_an_empty_prometheus_or_on_a_healthy_cluster_without_gpus(tmp_path: Path) -> None:
    healthy = {
        'up{job="prioscope-slurm",instance="head:9942"}': "1x200",
        'up{job="prioscope-gpu",instance="n1:9941"}': "1x200",
        'up{job="node",instance="n1:9100"}': "1x200",
        'node_cpu_seconds_total{job="node",instance="n1:9100",cpu="0",mode="idle"}': "0+0.1x200",
        'probe_icmp_duration_seconds{job="ping",instance="n1",phase="rtt"}': "0.5x200",
        'prioscope_source_up{source="slurm"}': "1x200",
        'prioscope_snapshot_stale{source="slurm"}': "0+0x200",
        'prioscope_snapshot_age_seconds{source="slurm"}': "3x200",
        'prioscope_polls_total{source="slurm"}': "0+4x200",
        'prioscope_poll_errors_total{source="slurm",cause="timeout"}': "0+0x200",
        # A gpu exporter that found no driver, as it says itself.
        'prioscope_source_up{source="gpu"}': "0+0x200",
        'prioscope_snapshot_stale{source="gpu"}': "0+0x200",
        'prioscope_source_unread{source="gpu",what="snapshot",why="NVML: NVML Shared Library Not Found"}': "1x200",
        'prioscope_polls_total{source="gpu"}': "0+4x200",
        'prioscope_poll_errors_total{source="gpu",cause="unreachable"}': "0+4x200",
        'priority_workloads{cluster="c",queue="cpu",priority_level="P2",state="running"}': "12x200",
        'priority_workloads{cluster="c",queue="cpu",priority_level="P2",state="pending"}': "3x200",
        'priority_workload_oldest_wait_seconds{cluster="c",queue="cpu",priority_level="P2"}': "40x200",
        'priority_workload_held_gpus{cluster="c",queue="cpu",priority_level="P2"}': "0+0x200",
        'priority_queue_entropy{cluster="c",queue="cpu"}': "0+0x200",
        'gpu_cluster_capacity_gpus{cluster="c"}': "0+0x200",
        'gpu_cluster_free_gpus{cluster="c"}': "0+0x200",
        'gpu_node_up{cluster="c",node="n1",state="up"}': "1x200",
        'priority_workload_wait_seconds_bucket{cluster="c",queue="cpu",priority_level="P2",le="1800.0"}': "0+2x200",
        'priority_workload_wait_seconds_count{cluster="c",queue="cpu",priority_level="P2"}': "0+2x200",
    }
    done = promtool(tmp_path, [all_quiet({}, "3h"), all_quiet(healthy, "3h")], "1m")
    assert done.returncode == 0, done.stdout + done.stderr
