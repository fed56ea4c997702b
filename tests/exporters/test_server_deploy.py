"""The files in deploy/: the chart as Helm renders it, the scrape examples as promtool reads them, the units."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from alerts import routing
from alerts.build import HEADER, data, dump, rule_groups
from alerts.model import JOBS, SERVE_JOB, Options
from cli.exporter import PORTS, app

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "prioscope"

Manifest = dict[str, Any]


def missing(tool: str) -> None:
    """Skip for want of ``tool``; in continuous integration, where it has to be there, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{tool} is not installed")
    pytest.skip(f"{tool} is not installed")


def render(values: Manifest) -> list[Manifest]:
    """Render the chart with the helm command, else with Helm's engine as the package helm-python-sdk brings it."""
    if shutil.which("helm"):
        command = ["helm", "template", "r", str(CHART), "--namespace", "monitoring", "--values", "-"]
        done = subprocess.run(
            command, check=False, input=json.dumps(values), capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise ValueError(done.stderr)
        texts = [done.stdout]
    else:
        try:
            import helm_python
        except ImportError:
            missing("helm (or the package helm-python-sdk)")
        with helm_python.Chart.load(CHART) as chart:
            chart.validate_schema(values)
            rendered = chart.render(values, name="r", namespace="monitoring")
        texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def one(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    (found,) = [item for item in manifests if item["kind"] == kind and item["metadata"]["name"].endswith(name)]
    return found


def container(workload: Manifest) -> Manifest:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


@pytest.fixture(scope="module")
def default() -> list[Manifest]:
    return render({})


def test_the_default_chart(default: list[Manifest]) -> None:
    kinds = sorted(item["kind"] for item in default)
    assert kinds == [
        "ClusterRole",
        "ClusterRoleBinding",
        "DaemonSet",
        "Deployment",
        "Service",
        "Service",
        "ServiceAccount",
    ]
    assert all(item["apiVersion"] and item["metadata"]["name"].startswith("r-prioscope") for item in default)


def test_the_role_reads_what_the_source_lists_and_nothing_else(default: list[Manifest]) -> None:
    from exporters.sources.kubernetes.source import KUEUE, VOLCANO

    rules = one(default, "ClusterRole")["rules"]
    granted = {(group, resource) for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]}
    assert granted == {
        ("", "pods"),
        ("", "nodes"),
        ("", "events"),
        ("scheduling.k8s.io", "priorityclasses"),
        (KUEUE[0], KUEUE[2]),
        (VOLCANO[0], VOLCANO[2]),
    }
    assert {verb for rule in rules for verb in rule["verbs"]} == {"list", "watch"}
    assert not any("*" in str(rule) for rule in rules)
    binding = one(default, "ClusterRoleBinding")
    account = one(default, "ServiceAccount")["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert binding["roleRef"]["name"] == one(default, "ClusterRole")["metadata"]["name"]


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_pods_have_no_more_rights_than_they_need(default: list[Manifest], kind: str) -> None:
    security = container(one(default, kind))["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    pod = one(default, kind)["spec"]["template"]["spec"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    if kind == "Deployment":
        assert pod["securityContext"]["runAsNonRoot"] is True
    else:
        assert pod["automountServiceAccountToken"] is False


def test_without_the_kubelet_the_gpu_exporter_is_not_root() -> None:
    manifests = render({"gpu": {"podResources": False, "allocatorHostPath": "", "hostPID": False}})
    found = one(manifests, "DaemonSet")
    assert container(found)["securityContext"]["runAsNonRoot"] is True
    assert not [volume for volume in found["spec"]["template"]["spec"]["volumes"] if "hostPath" in volume]


@pytest.mark.parametrize(("kind", "command"), [("Deployment", "kubernetes"), ("DaemonSet", "gpu")])
def test_arguments_are_options_of_the_command(kind: str, command: str) -> None:
    secret = {"webConfig": {"existingSecret": "web"}}
    policy = {"policy": "kind: TaskPriorityPolicy"}
    ages = {"kubernetes": {"maxAge": 90, "gpuOnly": True}, "gpu": {"maxAge": 90}}
    arguments = container(one(render({**secret, **policy, **ages}), kind))["args"]
    assert arguments[:2] == ["exporter", command]
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    for argument in arguments[2:]:
        assert re.search(rf"{argument.split('=')[0]}\b", text), argument
    assert f"--listen=:{PORTS[command]}" in arguments


def test_ports_agree(default: list[Manifest]) -> None:
    for kind, command in (("Deployment", "kubernetes"), ("DaemonSet", "gpu")):
        service = one(default, "Service", command)
        found = container(one(default, kind))
        assert found["ports"] == [{"name": "metrics", "containerPort": PORTS[command]}]
        assert service["spec"]["ports"] == [{"name": "metrics", "port": PORTS[command], "targetPort": "metrics"}]
        labels = one(default, kind)["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert found["livenessProbe"]["httpGet"] == {"path": "/-/healthy", "port": "metrics", "scheme": "HTTP"}


def test_service_monitors_keep_the_labels_of_the_metrics() -> None:
    manifests = render(
        {
            "serviceMonitor": {
                "enabled": True,
                "labels": {"release": "prom"},
                "basicAuth": {"username": {"name": "s"}},
            },
            "webConfig": {"existingSecret": "web", "scheme": "HTTPS", "mutualTls": True},
        }
    )
    monitor = one(manifests, "ServiceMonitor", "kubernetes")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True
    assert endpoint["scheme"] == "https"
    assert monitor["metadata"]["labels"]["release"] == "prom"
    service = one(manifests, "Service", "kubernetes")["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service.items()
    # A kubelet has no client certificate.
    assert container(one(manifests, "Deployment"))["livenessProbe"]["tcpSocket"] == {"port": "metrics"}


def test_a_policy_is_mounted_and_restarts_the_pod() -> None:
    text = (Path(__file__).parents[2] / "exporters" / "policies" / "medical-imaging.yaml").read_text()
    manifests = render({"policy": text})
    config = one(manifests, "ConfigMap")
    from exporters.policy import parse_policy

    assert parse_policy(config["data"]["policy.yaml"]).name == "medical-imaging"
    annotations = one(manifests, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    other = one(render({}), "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["checksum/policy"] != other["checksum/policy"]


def test_parts_can_be_left_out() -> None:
    assert {item["kind"] for item in render({"gpu": {"enabled": False}})} == {
        "ClusterRole",
        "ClusterRoleBinding",
        "Deployment",
        "Service",
        "ServiceAccount",
    }
    assert {item["kind"] for item in render({"kubernetes": {"enabled": False}})} == {"DaemonSet", "Service"}


def test_a_network_policy() -> None:
    peer = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    found = one(render({"networkPolicy": {"enabled": True, "from": peer}}), "NetworkPolicy")
    assert found["spec"]["ingress"] == [{"ports": [{"port": "metrics"}], "from": peer}]


@pytest.mark.parametrize("values", [{"gpus": {}}, {"kubernetes": {"interval": 0}}, {"webConfig": {"scheme": "http"}}])
def test_mistakes_in_values_are_refused(values: Manifest) -> None:
    with pytest.raises(Exception, match=r"(?i)schema|additional|enum|minimum|one of|allowed"):
        render(values)


# --- rca serve and the rules

SERVE = {"serve": {"enabled": True, "prometheusUrl": "http://prom:9090", "token": {"existingSecret": "rca"}}}
SERVE_PORT = urlsplit(routing.SERVE_URL).port


def test_the_incident_server_keeps_its_store_on_a_volume_and_its_token_in_a_secret() -> None:
    manifests = render(SERVE)
    found = container(one(manifests, "Deployment", "serve"))
    assert found["args"][:2] == ["serve", f"--listen=:{SERVE_PORT}"]
    assert "--prometheus=http://prom:9090" in found["args"]
    assert "--token-file=/etc/prioscope/token/token" in found["args"]
    (store,) = found["env"]
    folder = "/" + store["value"].removeprefix("sqlite:////").rsplit("/", 1)[0]
    pod = one(manifests, "Deployment", "serve")["spec"]["template"]["spec"]
    mounts = {item["mountPath"]: item["name"] for item in found["volumeMounts"]}
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    claim = one(manifests, "PersistentVolumeClaim")
    assert volumes[mounts[folder]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert volumes[mounts["/etc/prioscope/token"]]["secret"]["secretName"] == "rca"
    assert found["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    service = one(manifests, "Service", "serve")
    assert service["spec"]["ports"] == [{"name": "metrics", "port": SERVE_PORT, "targetPort": "metrics"}]
    labels = one(manifests, "Deployment", "serve")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_several_incident_servers_need_postgresql() -> None:
    alone = render({"serve": {**SERVE["serve"], "replicas": 3}})
    assert one(alone, "Deployment", "serve")["spec"]["replicas"] == 1
    assert one(alone, "Deployment", "serve")["spec"]["strategy"] == {"type": "Recreate"}
    values = {**SERVE["serve"], "replicas": 3, "store": {"existingSecret": "pg"}, "persistence": {"enabled": False}}
    shared = render({"serve": values})
    assert one(shared, "Deployment", "serve")["spec"]["replicas"] == 3
    (store,) = container(one(shared, "Deployment", "serve"))["env"]
    assert store["valueFrom"]["secretKeyRef"] == {"name": "pg", "key": "url"}
    assert not [item for item in shared if item["kind"] == "PersistentVolumeClaim"]


def test_an_incident_server_without_a_token_is_refused() -> None:
    with pytest.raises(Exception, match="bearer token"):
        render({"serve": {"enabled": True}})


def test_jobs_have_the_names_that_the_alerts_ask_for() -> None:
    manifests = render({**SERVE, "serviceMonitor": {"enabled": True}})
    monitors = [item for item in manifests if item["kind"] == "ServiceMonitor"]
    jobs = {
        rule["replacement"]
        for item in monitors
        for endpoint in item["spec"]["endpoints"]
        for rule in endpoint["relabelings"]
        if rule["targetLabel"] == "job"
    }
    assert jobs == {"prioscope-kubernetes", "prioscope-gpu", SERVE_JOB}
    assert all(re.fullmatch(JOBS, job) for job in jobs)
    services = [item["metadata"]["labels"] for item in manifests if item["kind"] == "Service"]
    for item in monitors:
        wanted = item["spec"]["selector"]["matchLabels"].items()
        assert len([labels for labels in services if wanted <= labels.items()]) == 1


def test_the_chart_has_the_generated_rules() -> None:
    rule = one(render({"prometheusRule": {"enabled": True, "labels": {"release": "prom"}}}), "PrometheusRule")
    assert rule["spec"]["groups"] == [data(group, Options()) for group in rule_groups()]
    assert rule["metadata"]["labels"]["release"] == "prom"
    expected = HEADER + dump({"groups": rule["spec"]["groups"]})
    assert (CHART / "files" / "rules.yaml").read_text() == expected


# --- the rest of deploy/


def test_the_scrape_example_is_valid() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        missing("promtool")
    done = subprocess.run(
        [str(promtool), "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kubernetes_scrape_example_finds_the_services_of_the_chart(default: list[Manifest]) -> None:
    # Debian builds promtool without service discovery, so the labels are compared with the chart's here.
    config = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())
    (job,) = config["scrape_configs"]
    kept = {rule["source_labels"][0]: rule["regex"] for rule in job["relabel_configs"] if rule.get("action") == "keep"}
    for service in (item for item in default if item["kind"] == "Service"):
        name = service["metadata"]["labels"]["app.kubernetes.io/name"]
        assert re.fullmatch(kept["__meta_kubernetes_service_label_app_kubernetes_io_name"], name)
        assert re.fullmatch(kept["__meta_kubernetes_endpoint_port_name"], service["spec"]["ports"][0]["name"])


def test_the_alloy_example_names_the_same_targets() -> None:
    # No Alloy here to read it: brackets, references and ports are checked.
    text = (DEPLOY / "alloy" / "config.alloy").read_text()
    code = re.sub(r"//.*", "", re.sub(r'"[^"\n]*"', '""', text))
    for opening, closing in ("{}", "[]"):
        assert code.count(opening) == code.count(closing)
    for kind, label in re.findall(r"(prometheus\.remote_write|discovery\.\w+)\.(\w+)\.\w+", code):
        assert f'{kind} "{label}"' in text
    static = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in static for group in job["static_configs"] for target in group["targets"]}
    assert set(re.findall(r'"__address__" = "([^"]+)"', text)) == targets
    assert {int(target.split(":")[1]) for target in targets} == {PORTS["gpu"], PORTS["slurm"]}


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: str(path.stem))
def test_units(path: Path) -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    service = parser["Service"]
    program, group, command, *options = service["ExecStart"].split()
    assert (program, group) == ("/opt/prioscope/bin/rca", "exporter")
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    for option in (item for item in options if item.startswith("--")):
        assert re.search(rf"{option}\b", text), option
    assert service["NoNewPrivileges"] == service["DynamicUser"] == "yes"
    assert service["ProtectSystem"] == "strict"
    if (tool := shutil.which("systemd-analyze")) is not None:
        done = subprocess.run([tool, "verify", str(path)], check=False, capture_output=True, text=True, timeout=60)
        # The program is where an administrator will install it.
        problems = [line for line in done.stderr.splitlines() if path.name in line and "not executable" not in line]
        assert problems == []


def test_the_image_has_what_the_package_needs() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    import tomllib

    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    assert copied == set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert re.search(r"^USER \d+", text, re.MULTILINE), "not root"
    assert {int(port) for line in re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE) for port in line.split()} == {
        *PORTS.values(),
        SERVE_PORT,
    }
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().split()
    assert all(f"!{name}" in ignored for name in copied)
