"""The alerts as files: generated ones in step, runbooks in both directions, links that lead somewhere, options."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from alerts import pages, routing, slo
from alerts.build import Format, alerts, annotations_of, files, rule_groups
from alerts.check import check
from alerts.model import FOREIGN, PREFIX, Alert, Options, Recording, Scope
from cli.alerts import app
from cli.main import main
from exporters.catalog import METRICS, WAIT_BUCKETS
from exporters.errors import InvalidInputError
from exporters.policy import Policy, load_policy, profiles
from tests.support.services import absent, program

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "alerts" / "generated"
DEFAULTS = {
    name: text for format_ in Format for name, text in files(Options(), format_).items()
} | {"alertmanager.yml": routing.text()}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_generated_files_are_in_step(name: str) -> None:
    # scripts/generate_alerts.py writes them.
    assert (GENERATED / name).read_text() == DEFAULTS[name]
    assert {path.name for path in GENERATED.iterdir()} == set(DEFAULTS)


def test_generated_files_pass_the_tools() -> None:
    program("promtool")
    program("amtool")
    found = check(sorted(GENERATED.iterdir()))
    assert [item for item in found if not item.passed] == []
    assert {item.tool for item in found} == {"promtool", "amtool"}


def test_a_crd_has_the_same_rules() -> None:
    manifest = yaml.safe_load(DEFAULTS["prometheusrule.yaml"])
    rules = [yaml.safe_load(DEFAULTS[name])["groups"] for name in ("recording.yaml", "alerts.yaml")]
    assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
    assert manifest["spec"]["groups"] == [group for groups in rules for group in groups]


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert.name))
def test_an_alert_follows_the_conventions(alert: Alert) -> None:
    assert re.fullmatch(rf"{PREFIX}(?:[A-Z][a-z0-9]*)+", alert.name)
    words = annotations_of(alert, Options(grafana_url="https://grafana.example/"))
    assert "{{" not in words["summary"], "a summary is constant, so that notifications can be grouped by it"
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(words.values())))
    assert used <= set(alert.labels)
    assert "{{" in words["description"]
    if alert.capture:
        victim = alert.victim or {"workload", "service"} & set(alert.labels)
        assert victim, "a capture needs a victim"
        assert not alert.name.startswith(("PrioscopeServer", "PrioscopeIncident")), "or it would loop"
    board = json.loads((ROOT / "dashboards" / "generated" / f"{alert.board.value}.json").read_text())
    assert board["uid"] == alert.board.value
    assert set(alert.variables) <= {variable["name"] for variable in board["templating"]["list"]}
    assert words["dashboard_url"].startswith(f"https://grafana.example/d/{alert.board.value}")


def test_every_metric_that_an_expression_names_is_ours_recorded_or_declared_foreign() -> None:
    recorded = {rule.record for group in rule_groups() for rule in group.rules if isinstance(rule, Recording)}
    known = {*FOREIGN, *(f"{name}{suffix}" for name in METRICS for suffix in ("", "_bucket", "_count", "_sum"))}
    for group in rule_groups():
        for rule in group.rules:
            bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", rule.expr)
            named = set(re.findall(r"[a-z]\w*:[\w:]+|(?:priority|gpu|rca|prioscope|node|probe)_\w+|\bup\b", bare))
            assert named, rule
            assert {name for name in named if ":" in name} <= recorded
            unknown = {name for name in named if ":" not in name} - known
            assert unknown <= {label for metric in METRICS.values() for label in metric.labels}, rule
    for name in recorded:
        assert re.fullmatch(r"[a-z_]+:[a-z_0-9]+:[a-z0-9_]+", name), "level:metric:operation"


def test_a_selector_of_a_metric_or_label_that_does_not_exist_is_refused() -> None:
    scope = Scope(Options())
    assert scope("gpu_up", node="n1") == 'gpu_up{node="n1"}'
    for call in (lambda: scope("gpu_upp"), lambda: scope("gpu_up", cluster="c"), lambda: scope("gpu_up_bucket")):
        with pytest.raises(KeyError):
            call()


# --- runbooks


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    assert pages.names() == sorted(alert.name for alert in alerts())


@pytest.mark.parametrize("name", pages.names())
def test_a_page_has_its_sections_and_asks_for_metrics_that_exist(name: str) -> None:
    text = pages.page(name)
    assert re.findall(r"^# (.*)$", text, re.MULTILINE)[0] == name
    assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == pages.SECTIONS
    assert "```promql" in text
    assert all(len(body.strip()) > 20 for body in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:])
    known = {*FOREIGN, *(f"{metric}{suffix}" for metric in METRICS for suffix in ("", "_bucket", "_count", "_sum"))}
    labels = {label for metric in METRICS.values() for label in metric.labels}
    for block in re.findall(r"```promql\n(.*?)```", text, re.DOTALL):
        names = set(re.findall(r"\b(?:priority|gpu|rca|prioscope|node|probe)_\w+", re.sub(r'"[^"]*"', "", block)))
        assert names - known <= labels, block
    for link in re.findall(r"\]\((\w+)\.md\)", text):
        assert link in pages.names()


def test_runbook_queries_are_promql(tmp_path: Path) -> None:
    blocks = [block for name in pages.names() for block in re.findall(r"```promql\n(.*?)```", pages.page(name), re.S)]
    lines = [line for block in blocks for line in block.splitlines()]
    rules = [{"record": f"q{number}", "expr": line} for number, line in enumerate(lines)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "runbooks", "rules": rules}]}))
    (result,) = check([tmp_path / "queries.yaml"])
    if result.passed is None:
        absent(result.detail)
    assert result.passed, result.detail


# --- options


def test_slos_of_the_defaults_and_of_every_profile_are_bounds_of_the_histogram() -> None:
    for policy in (Options().policy, *(load_policy(path) for path in profiles().values())):
        assert all(item.exact for item in slo.judged(policy)), policy.name


def test_an_slo_between_two_bounds_is_judged_at_the_larger_one_and_said_so() -> None:
    policy = Policy("p", level_wait_slo={0: 45.0, 1: 300.0, 2: 2 * WAIT_BUCKETS[-1]})
    first, second, third = slo.judged(policy)
    assert (first.bound, first.exact, "next bound" in first.note) == (60.0, False, True)
    assert second.exact
    assert (third.bound, "no burn-rate alert" in third.note) == (None, True)
    text = files(Options(policy=policy), Format.PROMETHEUS)["recording.yaml"]
    assert "# Wait SLO of P0: 45 s is judged at 60 s" in text
    assert 'priority_level=~"P0|P1"' in text
    names = {alert.name for alert in alerts(rule_groups(Options(policy=Policy("none"))))}
    assert not {name for name in names if "Burn" in name}, "no SLO, no burn rate"


def test_selectors_are_in_every_expression() -> None:
    options = Options(cluster='a"b', selectors={"env": "prod"})
    for group in rule_groups(options):
        for rule in group.rules:
            bare = re.sub(r"\(\w+(?:, \w+)*\)", "", rule.expr)
            series = re.findall(r"(?:priority|gpu|rca|prioscope|node_cpu|probe)_\w+(?=\{|\[|\)|\s)(?!:)", bare)
            if series and ":" not in rule.expr:
                assert rule.expr.count('env="prod"') >= len(set(series)), rule.expr
            if "priority_workloads" in rule.expr:
                assert r'cluster="a\"b"' in rule.expr


@pytest.mark.parametrize(
    "wrong",
    [{"objective": 0.9}, {"objective": 1.0}, {"grafana_url": "grafana"}, {"runbook_url": 'http://x/"'},
     {"selectors": {"a-b": "c"}}],
)  # fmt: skip
def test_options_that_give_rules_which_do_not_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        Options(**wrong)


# --- the command


def test_build_writes_what_check_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "apiVersion: prioscope/v1\nkind: TaskPriorityPolicy\nmetadata: { name: p }\n"
        "spec: { levels: [{ level: P0, waitSloSeconds: 45 }], rules: [{ name: r }] }\n"
    )
    out = tmp_path / "rules"
    build = ["alerts", "build", "--out", str(out), "--policy", str(policy), "--cluster", "c", "--selector", "env=prod"]
    assert main([*build, "--serve-url", "https://rca.example", "--token-file", "/run/token"]) == 0
    assert "P0: 45 s is judged at 60 s" in capsys.readouterr().err
    assert main([*build[:4], "--format", "crd"]) == 0
    assert "https://rca.example/api/v1/alerts" in (out / "alertmanager.yml").read_text()
    status = main(["alerts", "check", str(out), "-o", "json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 4
    assert status == (0 if shutil.which("promtool") and shutil.which("amtool") else 4)
    (out / "alerts.yaml").write_text("groups: [{name: a, rules: [{alert: A, expr: 'sum('}]}]")
    if shutil.which("promtool"):
        assert main(["alerts", "check", str(out / "alerts.yaml")]) == 1
        assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["build", "--out", "x", "--selector", "env"], 2, "'env' is not a selector"),
        (["build", "--out", "x", "--selector", "a=1", "--selector", "a=2"], 2, "selected twice"),
        (["build", "--out", "x", "--objective", "0.5"], 2, "the objective is 0.5"),
        (["build", "--out", "x", "--serve-url", "rca"], 2, "is not an HTTP URL"),
        (["build", "--out", "x", "--policy", "nowhere.yaml"], 3, "policy nowhere.yaml does not exist"),
        (["build", "--out", "/dev/null/x"], 2, "cannot make /dev/null/x"),
        (["check", "nowhere"], 3, "nowhere does not exist"),
        (["runbook", "GpuLos"], 3, "did you mean PrioscopeGpuLost"),
    ],
)
def test_mistakes_get_one_line_and_a_cure(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["alerts", *arguments]) == status
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 2


def test_list_and_runbook() -> None:
    runner = CliRunner()
    rows = json.loads(runner.invoke(app, ["list", "-o", "json"]).output)
    assert {row["name"] for row in rows} == {alert.name for alert in alerts()}
    assert "PrioscopeGpuLost" in runner.invoke(app, ["list"]).output
    assert runner.invoke(app, ["runbook", "gpulost"]).output == pages.page("PrioscopeGpuLost")


def test_without_the_extra_the_cure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["alerts", "build", "--out", str(tmp_path)]) == 2
    assert "prioscope[exporters]" in capsys.readouterr().err


def test_vmalert_reads_the_rules_too() -> None:
    rules = [f"-rule={GENERATED / name}" for name in ("alerts.yaml", "recording.yaml")]
    command = [program("vmalert"), "-dryRun", *rules]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
