"""``rca exporter`` as a user runs it: processes, signals, exit codes, and output that Prometheus accepts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

import cli.main
from exporters.model import (
    Demand,
    Device,
    Event,
    EventKind,
    Node,
    Placement,
    Snapshot,
    Workload,
    WorkloadState,
    read_snapshots,
    write_snapshots,
)

HERE = Path(__file__).parent
START = 1_700_000_000.0

POLICY = """\
apiVersion: prioscope/v1
kind: TaskPriorityPolicy
metadata: { name: strict }
spec:
  levels:
    - { level: P0, waitSloSeconds: 20 }
    - { level: P3 }
  rules: []
"""


def story(polls: int = 9, interval: float = 15.0) -> Iterator[Snapshot]:
    """A batch job takes both GPUs; urgent inference asks for them at 0 s, waits past its SLO, starts at 90 s."""
    for at in range(polls):
        now = START + at * interval
        waiting = now < START + 90
        batch = Workload(
            "batch-1",
            "batch-1",
            WorkloadState.RUNNING if waiting else WorkloadState.PREEMPTED,
            service="training",
            queue="gpu",
            rank=3,
            submitted=START - 100,
            started=START + 5,
            ended=None if waiting else START + 88,
            demand=Demand(gpu_milli=2000),
            placements=(Placement("n1", 2000),) if waiting else (),
            preemptible=True,
        )
        urgent = Workload(
            "urgent-1",
            "urgent-1",
            WorkloadState.PENDING if waiting else WorkloadState.RUNNING,
            service="inference",
            queue="gpu",
            rank=0,
            submitted=START,
            started=None if waiting else START + 90,
            demand=Demand(gpu_milli=2000),
            placements=() if waiting else (Placement("n1", 2000),),
        )
        event = Event("e1", EventKind.PREEMPTED, START + 88, "batch-1", "urgent-1", rank=3, by_rank=0)
        yield Snapshot(
            now,
            "prod",
            "test",
            workloads=(batch, urgent),
            nodes=(Node("n1", gpu_capacity_milli=2000, gpu_allocated_milli=2000),),
            devices=(Device("GPU-1", "n1", 0, model='H100 "80GB"\\', gpu_utilization_ratio=0.5, power_watts=400.0),),
            events=() if waiting else (event,),
        )


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "story.jsonl.gz"
    write_snapshots(path, story())
    return path


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.replace("rules: []", "rules: [{ name: all }]"))
    return path


def rca(*arguments: object) -> int:
    return cli.main.main([str(argument) for argument in arguments])


def values(text: str, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for item in parse(text)
        for sample in item.samples
        if sample.name == name
    }


def only(text: str, name: str, **labels: str) -> float:
    (found,) = [value for key, value in values(text, name).items() if labels.items() <= dict(key).items()]
    return found


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NODE_NAME", "KUBECONFIG")}
    return {**kept, "PYTHONPATH": str(HERE.parent), **more}


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", "exporter", *map(str, arguments)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, env=env or environment(), cwd=HERE.parent
    )


class Running:
    """An exporter process; ``url`` is where it serves."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:  # noqa: S310 - http, on loopback
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def metrics(self) -> str:
        return self.get("/metrics")[1]

    def until(self, pattern: str, seconds: float = 30.0) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if re.search(pattern, text := self.metrics(), re.MULTILINE):
                return text
            time.sleep(0.05)
        raise AssertionError(f"no {pattern} in\n{text}")

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return the exit code and what was logged."""
        self.process.send_signal(number)
        assert self.process.stderr is not None
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log


@contextlib.contextmanager
def serving(*arguments: object, env: dict[str, str] | None = None) -> Iterator[Running]:
    command = [sys.executable, "-m", "cli.main", "exporter", *map(str, arguments), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env or environment(), cwd=HERE.parent)
    assert process.stderr is not None
    try:
        seen = ""
        while not (found := re.search(r"serving (\S+)/metrics", seen)):
            line = process.stderr.readline()
            assert line, f"it ended: {seen}"
            seen += line
        yield Running(process, found[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        process.stderr.close()


# --- one exposition


def test_once_plays_the_whole_recording(
    recording: Path, policy: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert rca("exporter", "file", recording, "--policy", policy, "--once") == 0
    text = capsysbinary.readouterr().out.decode()
    inversion = {"service": "inference", "priority_level": "P0", "violation_type": "inversion"}
    assert only(text, "priority_violation_total", **inversion, basis="dominated") == 1
    # Past its SLO from 20 s on, started at 90 s; a violation begins where its wait's SLO ran out.
    assert only(text, "priority_violation_duration_seconds_count", **inversion) == 1
    assert only(text, "priority_preemptions_total", winner_priority_level="P0", victim_priority_level="P3") == 1
    assert only(text, "priority_workload_wait_seconds_sum", priority_level="P0") == 90
    assert not values(text, "priority_violations_active"), "it ended when the victim started"
    assert only(text, "gpu_power_watts") == 400.0
    assert only(text, "prioscope_polls_total") == 9


def test_once_in_the_middle_shows_who_blocks_whom(
    tmp_path: Path, policy: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "half.jsonl"
    write_snapshots(path, story(5))
    assert rca("exporter", "file", path, "--policy", policy, "--once") == 0
    text = capsysbinary.readouterr().out.decode()
    blame = {"workload": "urgent-1", "service": "inference", "culprit": "batch-1", "culprit_service": "training"}
    # Two GPUs, from the start of the batch job at 5 s to the last snapshot at 60 s.
    assert only(text, "priority_violation_culprit_gpu_seconds", **blame) == 110
    assert only(text, "priority_violations_active", violation_type="inversion") == 1
    assert only(text, "priority_workload_oldest_wait_seconds", priority_level="P0") == 60


def test_once_in_openmetrics(recording: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert rca("exporter", "file", recording, "--once", "--openmetrics") == 0
    assert capsysbinary.readouterr().out.endswith(b"# EOF\n")


def test_state_survives_a_restart_without_counting_twice(
    tmp_path: Path, policy: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    state, snapshots = tmp_path / "state.json", list(story())
    for part in (snapshots[:5], snapshots[4:]):
        path = tmp_path / "part.jsonl"
        write_snapshots(path, part)
        assert rca("exporter", "file", path, "--policy", policy, "--state", state, "--once") == 0
    text = capsysbinary.readouterr().out.decode().rpartition("# HELP priority_violation_total")[2]
    inversion = {"violation_type": "inversion"}
    assert only("# HELP priority_violation_total" + text, "priority_violation_total", **inversion) == 1


# --- mistakes


def problem(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_a_bad_policy_names_its_line(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.replace("waitSloSeconds", "waitSlo"))
    assert rca("exporter", "file", recording, "--policy", path, "--once") == 2
    assert f"error: {path}:6: " in problem(capsys)


def test_a_policy_that_is_not_there(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rca("exporter", "file", recording, "--policy", "strict", "--once") == 3
    assert "medical-imaging" in problem(capsys)


def test_a_recording_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rca("exporter", "file", tmp_path / "gone.jsonl", "--once") == 3
    assert "gone.jsonl is not a file" in problem(capsys)


def test_a_damaged_recording_names_its_line(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged.jsonl"
    write_snapshots(path, story(2))
    path.write_bytes(path.read_bytes() + b'{"time": "yesterday"}\n')
    assert rca("exporter", "file", path, "--once", "--interval", 1) == 2
    assert f"{path}:3 is not a snapshot" in problem(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "nowhere"], "'nowhere' is not an address"),
        (["--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
        (["--max-age", "10", "--interval", "15"], "--max-age 10 is not longer than --interval 15"),
        (["--web-config", "gone.yml"], "web config gone.yml does not exist"),
        (["--state", "/nowhere/state.json"], "folder of --state /nowhere/state.json does not exist"),
    ],
)
def test_wrong_options_end_it_at_once(
    arguments: list[str], message: str, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rca("exporter", "file", recording, *arguments) in (2, 3)
    text = problem(capsys)
    assert f"error: {message}" in text or message in text
    assert "cure: " in text


def test_a_port_that_is_in_use(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert rca("exporter", "file", recording, "--listen", address) == 2
    assert f"error: cannot listen on {address}: address already in use" in problem(capsys)


def test_a_damaged_state_file(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state.json"
    state.write_text("{")
    assert rca("exporter", "file", recording, "--state", state, "--once") == 2
    assert "state.json is not an exporter state" in problem(capsys)


def test_bad_certificates(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    web = tmp_path / "web.yml"
    web.write_text("tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n")
    assert rca("exporter", "file", recording, "--web-config", web) == 2
    assert f"{web}:1: {tmp_path / 'cert.pem'} cannot be read" in problem(capsys)


def test_help_of_every_command_is_light() -> None:
    for command in ("gpu", "slurm", "kubernetes", "file", "record gpu", "record slurm", "record kubernetes"):
        code = (
            "import sys, cli.main; code = cli.main.main(sys.argv[1:]);"
            "sys.exit(code or sorted({'numpy', 'uvicorn', 'msgspec', 'exporters.model'} & sys.modules.keys()) or 0)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "exporter", *command.split(), "--help"],
            check=False,
            capture_output=True,
            text=True,
            env=environment(),
            cwd=HERE.parent,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        assert "--interval" in done.stdout


# --- serving


def test_it_serves_plays_drains_and_keeps_its_state(recording: Path, policy: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with serving("file", recording, "--policy", policy, "--interval", "0.05", "--state", state) as exporter:
        text = exporter.until(r'what="snapshot",why="the source has ended"')
        assert only(text, "priority_violation_total", violation_type="inversion") == 1
        assert exporter.get("/-/ready") == (200, "Ready\n"), "the end of a recording does not get old"
        assert exporter.get("/-/healthy")[0] == 200
        assert "Prioscope file exporter" in exporter.get("/")[1]
        code, log = exporter.stop()
    assert code == 0
    assert "SIGTERM" in log
    assert "Traceback" not in log
    assert msgspec.json.decode(state.read_bytes())["last_time"] == START + 8 * 15


def test_a_recording_gets_old_when_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    write_snapshots(path, story(2))
    with serving("file", path, "--interval", "0.1", "--max-age", "0.6") as exporter:
        exporter.until(r"^gpu_power_watts")
        text = exporter.until(r"^prioscope_snapshot_stale\S* 1\.0")
        assert not values(text, "gpu_power_watts")
        assert exporter.get("/-/ready") == (503, "The snapshot is too old\n")
        assert exporter.get("/-/healthy")[0] == 200
        assert exporter.stop(signal.SIGINT)[0] == 0


def test_following_a_recording_that_grows(tmp_path: Path) -> None:
    path, snapshots = tmp_path / "live.jsonl", list(story())
    write_snapshots(path, snapshots[:1])
    with serving("file", path, "--interval", "0.05", "--max-age", "30", "--follow") as exporter:
        exporter.until(r"has no new snapshot")
        lines = b"".join(msgspec.json.encode(item) + b"\n" for item in snapshots[1:3])
        with path.open("ab") as stream:
            # Half a line is no error: it is still being written.
            stream.write(lines[:100])
            stream.flush()
            time.sleep(0.2)
            stream.write(lines[100:])
        exporter.until(r"^priority_workload_oldest_wait_seconds\S* 30\.0")
        assert only(exporter.metrics(), "prioscope_poll_errors_total", cause="invalid") == 0


def test_a_request_under_way_is_finished_before_it_exits(recording: Path) -> None:
    with serving("file", recording, "--interval", "0.05") as exporter:
        exporter.until(r"the source has ended")
        host, port = exporter.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            exporter.process.send_signal(signal.SIGTERM)
            answer = b""
            while part := slow.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        length = int(re.search(rb"content-length: (\d+)", answer)[1])  # type: ignore[index]
        assert len(answer.partition(b"\r\n\r\n")[2]) == length
        assert exporter.process.wait(20) == 0


def test_serving_on_a_unix_socket(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    command = [sys.executable, "-m", "cli.main", "exporter", "file", recording, "--listen", f"unix:{path}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(), cwd=HERE.parent) as process:
        assert process.stderr is not None
        assert f"serving unix:{path}" in process.stderr.readline()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        process.terminate()
        assert process.wait(20) == 0
        assert not path.exists()


# --- recording


def test_a_recording_of_a_cluster_can_be_played(kubernetes: Path, tmp_path: Path) -> None:
    out = tmp_path / "cluster.jsonl.gz"
    done = run("record", "kubernetes", "--kubeconfig", kubernetes, "--out", out, "--polls", "3", "--interval", "0.1")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, f"3 snapshots: {out}")
    snapshots = list(read_snapshots(out))
    assert [len(snapshot.workloads) for snapshot in snapshots] == [2, 2, 2]
    assert snapshots[0].cluster == "kubernetes"
    assert "priority_workloads" in run("file", out, "--once").stdout

    again = run("record", "kubernetes", "--kubeconfig", kubernetes, "--out", out, "--polls", "1")
    assert again.returncode == 2
    assert "--append" in again.stderr
    more = run("record", "kubernetes", "--kubeconfig", kubernetes, "--out", out, "--polls", "1", "--append")
    assert more.returncode == 0
    assert len(list(read_snapshots(out))) == 4


def test_recording_ends_cleanly_on_sigterm(kubernetes: Path, tmp_path: Path) -> None:
    out = tmp_path / "cluster.jsonl.gz"
    command = [sys.executable, "-m", "cli.main", "exporter", "record", "kubernetes", "--kubeconfig", kubernetes]
    command += ["--out", out, "--interval", "0.1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(), cwd=HERE.parent) as process:
        deadline = time.monotonic() + 30
        while (not out.exists() or out.stat().st_size < 500) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    count = len(list(read_snapshots(out)))
    assert count >= 1
    assert f"{count:,} snapshots: {out}" in log


def test_there_is_nothing_to_record_without_an_answer(tmp_path: Path) -> None:
    out = tmp_path / "gpus.jsonl"
    done = run("record", "gpu", "--out", out, "--polls", "1", env=environment(LD_LIBRARY_PATH=str(tmp_path)))
    assert done.returncode == 5
    assert "error: NVML" in done.stderr
    assert not out.exists() or out.stat().st_size == 0


# --- every exporter's output, as Prometheus sees it


@pytest.fixture(scope="module")
def promtool() -> str:
    return needed("promtool")


def needed(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{tool} is not installed (Debian: apt-get install prometheus)")
        pytest.skip(f"{tool} is not installed (Debian: apt-get install prometheus)")
    return found


def lint(promtool: str, exposition: str) -> str:
    done = subprocess.run(
        [promtool, "check", "metrics"], check=False, input=exposition, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr + (f"exit {done.returncode}" if done.returncode else "")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that sees eight GPUs of the stub driver."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build the NVML stub")
    folder = tmp_path_factory.mktemp("driver")
    source = HERE / "exporters" / "nvml" / "nvml_stub.c"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-pthread", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(command, check=True)
    healthy = {"name": "H100", "mem_total": 80 << 30, "mem_used": 30 << 30, "util": 71, "power": 412_345, "temp": 56}
    lines = ["system count 8", *(f"gpu* {key} {value}" for key, value in healthy.items())]
    (folder / "gpus.txt").write_text("\n".join([*lines, ""]))
    return environment(NVML_STUB_FILE=str(folder / "gpus.txt"), LD_LIBRARY_PATH=str(folder), NODE_NAME="gpu-node-7")


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The kubeconfig of an API server with two pods, of which the urgent one waits."""
    monkeypatch.syspath_prepend(str(HERE / "exporters" / "kube"))
    import kube_objects
    from kube_api import FakeKubernetes

    with FakeKubernetes() as server:
        server.create("priorityclasses", kube_objects.priority_class("urgent", 1_000_000))
        server.create("nodes", kube_objects.node("n1", gpus=4))
        server.create("pods", kube_objects.pod("train", gpus=4, node="n1", priority=0))
        server.create("pods", kube_objects.pod("serve", gpus=2, priority=1_000_000, priorityClassName="urgent"))
        path = tmp_path / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": server.url}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        users = [{"name": "u", "user": {"token": "t"}}]
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": users}
        path.write_text(json.dumps(config | {"current-context": "c"}))
        yield path


def test_promtool_likes_the_file_exporter(promtool: str, recording: Path, policy: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.jsonl"
    write_snapshots(half, story(5))
    for path in (recording, half):
        done = run("file", path, "--policy", policy, "--once")
        assert lint(promtool, done.stdout) == ""


def test_promtool_likes_the_gpu_exporter(promtool: str, driver: dict[str, str]) -> None:
    done = run("gpu", "--once", env=driver)
    assert done.returncode == 0, done.stderr
    assert len(values(done.stdout, "gpu_up")) == 8
    assert only(done.stdout, "gpu_power_watts", node="gpu-node-7", gpu="3") == pytest.approx(412.345)
    assert lint(promtool, done.stdout) == ""


def test_promtool_likes_the_kubernetes_exporter(promtool: str, kubernetes: Path) -> None:
    done = run("kubernetes", "--kubeconfig", kubernetes, "--once")
    assert done.returncode == 0, done.stderr
    assert only(done.stdout, "priority_workloads", state="pending") == 1
    assert lint(promtool, done.stdout) == ""


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder with Slurm commands of version 23.11 that tell of one node, a batch job on it and an urgent one."""

    def number(value: int) -> dict[str, object]:
        return {"set": True, "infinite": False, "number": value}

    now = int(time.time())
    common = {"cluster": "alpha", "user_name": "ann", "node_count": number(1), "cpus": number(1)}
    batch = common | {
        "job_id": 7,
        "name": "train",
        "partition": "low",
        "job_state": ["RUNNING"],
        "priority": number(10),
        "submit_time": number(now - 900),
        "start_time": number(now - 600),
        "nodes": "n1",
        "tres_per_node": "gres/gpu:4",
        "tres_req_str": "cpu=1,node=1,gres/gpu=4",
        "tres_alloc_str": "cpu=1,node=1,gres/gpu=4",
        "gres_detail": ["gpu:4(IDX:0-3)"],
    }
    urgent = common | {
        "job_id": 8,
        "name": "serve",
        "partition": "high",
        "job_state": ["PENDING"],
        "state_reason": "Priority",
        "priority": number(900),
        "submit_time": number(now - 700),
        "start_time": number(0),
        "tres_per_node": "gres/gpu:2",
        "tres_req_str": "cpu=1,node=1,gres/gpu=2",
    }
    node = {
        "name": "n1",
        "state": ["ALLOCATED"],
        "partitions": ["low", "high"],
        "gres": "gpu:4",
        "gres_used": "gpu:4(IDX:0-3)",
        "cpus": 64,
        "alloc_cpus": 1,
        "real_memory": 512000,
        "alloc_memory": 0,
        "tres": "cpu=64,mem=500G,gres/gpu=4",
        "tres_used": "cpu=1,gres/gpu=4",
    }
    partitions = "\n\n".join(
        f"PartitionName={name}\n   PriorityTier={tier} Nodes=n1 State=UP PreemptMode=REQUEUE"
        for name, tier in (("low", 1), ("high", 9))
    )
    answers = {
        "squeue --version": "slurm 23.11.4",
        "squeue --json": json.dumps({"jobs": [batch, urgent]}),
        "scontrol show nodes": json.dumps({"nodes": [node]}),
        "scontrol show partition": partitions,
        "scontrol show config": "ClusterName = alpha\nPreemptType = preempt/partition_prio\nPreemptMode = REQUEUE",
    }
    folder = tmp_path / "slurm"
    folder.mkdir()
    for program in ("squeue", "scontrol"):
        cases = []
        for at, (call, answer) in enumerate(answers.items()):
            if call.startswith(program):
                (folder / f"{at}.txt").write_text(answer + "\n")
                cases.append(f"*' {call.split(' ', 1)[1]}'*) cat {folder}/{at}.txt ;;")
        script = "\n".join(["#!/bin/sh", 'case " $*" in', *cases, "*) echo no such thing >&2; exit 1 ;;", "esac", ""])
        (folder / program).write_text(script)
        (folder / program).chmod(0o755)
    return folder


def test_promtool_likes_the_slurm_exporter(promtool: str, slurm: Path, tmp_path: Path) -> None:
    done = run("slurm", "--commands", slurm, "--once")
    assert done.returncode == 0, done.stderr
    inversion = {"cluster": "alpha", "violation_type": "inversion"}
    assert only(done.stdout, "priority_violations_active", **inversion) == 1
    assert only(done.stdout, "gpu_cluster_capacity_gpus") == 4
    assert lint(promtool, done.stdout) == ""

    out = tmp_path / "slurm.jsonl"
    assert run("record", "slurm", "--commands", slurm, "--out", out, "--polls", "1").returncode == 0
    (snapshot,) = read_snapshots(out)
    assert {workload.name: workload.rank for workload in snapshot.workloads} == {"train": 1, "serve": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--user", "ann"], "--user needs --rest"),
        (["--rest", "http://127.0.0.1:1", "--conf", "slurm.conf"], "--conf does not go with --rest"),
        (["--rest", "slurm-head:6820"], "'slurm-head:6820' is not the address of a slurmrestd"),
    ],
)
def test_slurm_options_that_cannot_be_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rca("exporter", "slurm", "--once", *arguments) == 2
    assert f"error: {message}" in problem(capsys)


def test_a_slurm_that_is_away(tmp_path: Path) -> None:
    for arguments in (["--commands", tmp_path], ["--rest", "http://127.0.0.1:1"]):
        done = run("slurm", "--once", *arguments)
        assert done.returncode == 5
        assert len(done.stderr.splitlines()) == 2, done.stderr


def test_promtool_finds_a_fault() -> None:
    assert lint(needed("promtool"), "# TYPE a_total gauge\na_total 1\n") != "", "the check can fail"


def test_the_gpu_exporter_starts_before_the_driver(tmp_path: Path) -> None:
    with serving("gpu", "--interval", "0.2", env=environment(LD_LIBRARY_PATH=str(tmp_path))) as exporter:
        text = exporter.until(r"^prioscope_poll_errors_total\S*unreachable\S* [1-9]")
        assert only(text, "prioscope_source_up") == 0
        assert any("NVML" in dict(key)["why"] for key in values(text, "prioscope_source_unread"))
        assert exporter.get("/-/ready")[0] == 503
        assert exporter.get("/-/healthy")[0] == 200
        code, log = exporter.stop()
    assert code == 0
    assert "Traceback" not in log


def test_without_an_answer_once_says_so(tmp_path: Path) -> None:
    done = run("gpu", "--once", env=environment(LD_LIBRARY_PATH=str(tmp_path)))
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("error: NVML")
    assert len(done.stderr.splitlines()) == 2


def test_prometheus_sees_a_violation_begin_and_end(policy: Path, tmp_path: Path) -> None:
    prometheus = needed("prometheus")
    path, snapshots = tmp_path / "live.jsonl", list(story())
    write_snapshots(path, snapshots[:5])
    port = free_port()
    arguments = ["file", path, "--policy", policy, "--interval", "0.05", "--max-age", "300", "--follow"]
    with serving(*arguments) as exporter:
        config = tmp_path / "prometheus.yml"
        target = exporter.url.removeprefix("http://")
        config.write_text(
            "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
            f"scrape_configs: [{{job_name: x, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        command = [prometheus, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                assert query(port, "priority_violations_active{violation_type='inversion'}") == 1
                assert query(port, "priority_violation_culprit_gpu_seconds{culprit='batch-1'}") == 110
                with path.open("ab") as stream:
                    stream.writelines(msgspec.json.encode(item) + b"\n" for item in snapshots[5:])
                assert query(port, "priority_violation_duration_seconds_count{violation_type='inversion'}") == 1
                deadline = time.monotonic() + 20
                while ask(port, "priority_violations_active") and time.monotonic() < deadline:
                    time.sleep(0.2)
                assert ask(port, "priority_violations_active") == [], "what lasted has ended"
                assert query(port, "up") == 1
            finally:
                process.terminate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ask(port: int, expression: str) -> list[float]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return [float(item["value"][1]) for item in json.load(answer)["data"]["result"]]


def query(port: int, expression: str, seconds: float = 40.0) -> float:
    """Return the value of an expression, once there is one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if found := ask(port, expression):
                return found[0]
        time.sleep(0.2)
    raise AssertionError(f"no {expression}")


def test_scrapes_while_polls_run_are_whole(recording: Path) -> None:
    """Every exposition is of one poll: the exporter replaces what it serves at once, never bit by bit."""
    bad: list[str] = []
    with serving("file", recording, "--interval", "0.02") as exporter:

        def scrape() -> None:
            for _ in range(15):
                text = exporter.metrics()
                active = values(text, "priority_workloads")
                if active and sum(active.values()) != 2:
                    bad.append(text)

        threads = [threading.Thread(target=scrape) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert bad == []
