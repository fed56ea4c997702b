"""A real Slurm, the real exporter and a real Prometheus: who waits, for whom, how long, and that it ends.

Needs root and the packages of scripts/ci_services.sh; skipped without them, except in continuous integration.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from exporters.model import WorkloadState, by_id
from exporters.sources.slurm import open_slurm
from tests.support.services import absent, free_port, program, wait_for
from tests.support.slurm_cluster import Partition, SlurmCluster, SlurmNode, missing, running

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[3]

POLL = 0.5
SCRAPE = 1

#: What may lie between a job's time in Slurm, which is whole seconds, and the sample that shows it.
SLACK = 3.0 + 2 * POLL + SCRAPE

WAIT_SLO = 2.0

POLICY = """\
apiVersion: prioscope/v1
kind: TaskPriorityPolicy
metadata: { name: test }
spec:
  inversion: { heldCounts: any }
  preemption: { allowed: true, deadlineSeconds: 3 }
  rules:
    - name: urgent
      matchLevels: [P0]
      waitSloSeconds: 2
"""

NODES = [
    *(SlurmNode(f"gpu{number}", {"a100": 4}) for number in range(1, 7)),
]
URGENT, BATCH = "PriorityTier=10", "Default=YES PriorityTier=1"
PARTITIONS = [
    # Who holds may not be preempted here.
    Partition("batch", "gpu[1-2]", f"{BATCH} PreemptMode=OFF"),
    Partition("urgent", "gpu[1-2]", f"{URGENT} PreemptMode=OFF"),
    Partition("spare", "gpu3", "PriorityTier=1 PreemptMode=REQUEUE"),
    Partition("prod", "gpu[3-4]", f"{URGENT} PreemptMode=OFF"),
    # Preempted here means an hour to get ready.
    Partition("slow", "gpu4", "PriorityTier=1 PreemptMode=CANCEL GraceTime=3600"),
    Partition("wide", "gpu[5-6]", f"{URGENT} PreemptMode=OFF"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if why := missing():
        absent(why)
    # Not tmp_path: the path of a unix socket has to be short.
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        running(SlurmCluster(Path(folder), NODES, PARTITIONS, min_job_age=2)) as found,
    ):
        yield found


@dataclass
class Store:
    """A Prometheus that scrapes the exporter."""

    url: str

    def query(self, expression: str) -> list[tuple[dict[str, str], float, float]]:
        """Return the labels, the time and the value of each series of an instant query."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - http, on loopback
            found = json.load(answer)["data"]["result"]
        return [(item["metric"], float(item["value"][0]), float(item["value"][1])) for item in found]

    def sample(self, expression: str) -> tuple[dict[str, str], float, float] | None:
        """Return labels, value and the age-free time of the one series that ``expression`` selects."""
        found = self.query(expression)
        assert len(found) <= 1, found
        if not found:
            return None
        labels, _, value = found[0]
        stamp = self.query(f"timestamp({expression})")
        return labels, value, stamp[0][2] if stamp else time.time()

    def wait(self, expression: str, timeout: float = 40.0) -> tuple[dict[str, str], float, float]:
        """Wait until ``expression`` selects one series."""
        deadline = time.monotonic() + timeout
        while (found := self.sample(expression)) is None:
            assert time.monotonic() < deadline, f"no {expression} after {timeout:g} s:\n{self.everything()}"
            time.sleep(0.2)
        return found

    def wait_gone(self, expression: str, timeout: float = 40.0) -> None:
        """Wait until ``expression`` selects nothing."""
        deadline = time.monotonic() + timeout
        while found := self.query(expression):
            assert time.monotonic() < deadline, f"still there after {timeout:g} s: {found}"
            time.sleep(0.2)

    def everything(self) -> str:
        """Return what there is about violations, for a failed assertion."""
        return "\n".join(
            f"{labels} {value}" for labels, _, value in self.query('{__name__=~"priority_.*|prioscope_s.*"}')
        )


@pytest.fixture(scope="module")
def store(cluster: SlurmCluster) -> Iterator[Store]:
    """The exporter, as `rca exporter slurm` runs it, scraped by Prometheus."""
    prometheus = program("prometheus")
    folder = cluster.folder
    (folder / "policy.yaml").write_text(POLICY)
    exporter_port, port = free_port(), free_port()
    (folder / "prometheus.yml").write_text(
        f"global: {{ scrape_interval: {SCRAPE}s }}\n"
        "scrape_configs:\n"
        f"  - {{ job_name: slurm, static_configs: [{{ targets: ['127.0.0.1:{exporter_port}'] }}] }}\n"
    )
    options = ["--conf", folder / "slurm.conf", "--policy", folder / "policy.yaml", "--interval", POLL, "--timeout", 5]
    commands = {
        "exporter": [sys.executable, "-m", "cli.main", "exporter", "slurm", "--listen", f"127.0.0.1:{exporter_port}"]
        + [str(option) for option in options],
        "prometheus": [
            prometheus,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    }
    processes = []
    for name, command in commands.items():
        with (folder / f"{name}.out.log").open("wb") as log:
            environment = {**cluster.environment, "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "relative"}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT))
    found = Store(f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: _is_up(found), "the exporter in Prometheus", cluster.log, timeout=60)
        yield found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


def _is_up(store: Store) -> bool:
    try:
        return any(value == 1 for _, _, value in store.query("prioscope_source_up"))
    except OSError:
        return False


def times(cluster: SlurmCluster, job: str) -> tuple[float, float | None]:
    """When Slurm says that a job was submitted and started."""
    text = cluster.command("scontrol", "show", "job", job)
    found = dict(re.findall(r"(SubmitTime|StartTime)=(\S+)", text))
    as_seconds = {
        name: None if value == "Unknown" else time.mktime(time.strptime(value, "%Y-%m-%dT%H:%M:%S"))
        for name, value in found.items()
    }
    submitted = as_seconds["SubmitTime"]
    assert submitted is not None
    return submitted, as_seconds["StartTime"]


def test_an_inversion_has_its_victim_culprits_gpu_seconds_and_an_end(cluster: SlurmCluster, store: Store) -> None:
    # A batch job holds the GPUs of gpu1 when the urgent one comes. On gpu2 one CPU is missing for the urgent one, so
    # that Slurm backfills a short batch job on its GPUs: it starts while the urgent one waits.
    holder = cluster.submit("train", "batch", "-w", "gpu1", "--gres=gpu:a100:4", "-t", "60")
    small = cluster.submit("small", "batch", "-w", "gpu2", "-t", "60")
    cluster.wait_state(holder, "RUNNING")
    cluster.wait_state(small, "RUNNING")
    victim = cluster.submit("chat", "urgent", "-N", "1", "--gres=gpu:a100:4", "-c", "16", "-t", "10")
    time.sleep(2)
    late = cluster.submit("sweep", "batch", "-w", "gpu2", "--gres=gpu:a100:4", "-t", "2")
    cluster.wait_state(late, "RUNNING")
    submitted, _ = times(cluster, victim)
    _, late_start = times(cluster, late)
    assert late_start is not None
    assert late_start > submitted

    mine = f'workload="{victim}",violation_type="inversion"'
    labels, lasted, at = store.wait(f'priority_violation_active_seconds{{{mine},basis="started"}}')
    assert labels["service"] == "chat"
    assert labels["priority_level"] == "P0"
    assert labels["cluster"] == "loopback"
    assert lasted == pytest.approx(at - submitted - WAIT_SLO, abs=SLACK)

    for culprit, service, since, basis in (
        (holder, "train", submitted, "held"),
        (late, "sweep", late_start, "started"),
    ):
        labels, taken, at = store.wait(
            f'priority_violation_culprit_gpu_seconds{{workload="{victim}",culprit="{culprit}"}}'
        )
        assert labels["culprit_service"] == service
        assert labels["culprit_priority_level"] == "P1"
        assert labels["basis"] == basis
        assert taken == pytest.approx(4 * (at - since), abs=4 * SLACK)
    # In one scrape, the two differ by what the first took alone: to the second, whatever the machine is doing.
    taken_by = {
        labels["culprit"]: value
        for labels, _, value in store.query(f'priority_violation_culprit_gpu_seconds{{workload="{victim}"}}')
    }
    assert taken_by[holder] - taken_by[late] == pytest.approx(4 * (late_start - submitted), abs=0.01)
    # Who only holds a CPU is not to blame for missing GPUs.
    assert len(store.query(f'priority_violation_culprit_gpu_seconds{{workload="{victim}"}}')) == 2

    cluster.cancel(holder)
    cluster.wait_state(victim, "RUNNING")
    _, started = times(cluster, victim)
    assert started is not None
    store.wait_gone(f'priority_violation_active_seconds{{workload="{victim}"}}')
    store.wait_gone(f'priority_violation_culprit_gpu_seconds{{workload="{victim}"}}')
    over = '{service="chat",violation_type="inversion",priority_level="P0"}'
    _, count, _ = store.wait(f"priority_violation_duration_seconds_count{over}")
    _, total, _ = store.wait(f"priority_violation_duration_seconds_sum{over}")
    assert count == 1
    assert total == pytest.approx(started - submitted - WAIT_SLO, abs=SLACK)
    _, began, _ = store.wait('sum(priority_violation_total{service="chat",violation_type="inversion"})')
    assert began == 1

    cluster.cancel(victim, late, small)


def test_a_preemption_is_counted_with_winner_and_victim(cluster: SlurmCluster, store: Store) -> None:
    victim = cluster.submit("spare-work", "spare", "--gres=gpu:a100:3", "--requeue")
    cluster.wait_state(victim, "RUNNING")
    store.wait('priority_workload_held_gpus{queue="spare"} == 3')
    winner = cluster.submit("serving", "prod", "-w", "gpu3", "--gres=gpu:a100:2")
    cluster.wait_state(winner, "RUNNING")
    _, count, _ = store.wait('priority_preemptions_total{winner_priority_level="P0",victim_priority_level="P1"}')
    assert count == 1
    assert cluster.state(victim) == "PENDING"
    assert not store.query(f'priority_violation_active_seconds{{workload=~"{victim}|{winner}"}}')
    cluster.cancel(winner, victim)


def test_a_preemption_that_does_not_come_is_a_violation(cluster: SlurmCluster, store: Store) -> None:
    # Slurm gives this job an hour to end, and it ignores the signal.
    holder = cluster.command(
        *("sbatch", "--parsable", "-J", "stubborn", "-p", "slow", "-o", "/dev/null", "--gres=gpu:a100:4"),
        "--wrap=trap '' TERM; sleep 600",
    )
    cluster.wait_state(holder, "RUNNING")
    waiter = cluster.submit("answer", "prod", "-w", "gpu4", "--gres=gpu:a100:1")
    submitted, _ = times(cluster, waiter)
    mine = f'workload="{waiter}",violation_type="preemption_failed"'
    labels, lasted, at = store.wait(f"priority_violation_active_seconds{{{mine}}}")
    assert labels["service"] == "answer"
    assert lasted == pytest.approx(at - submitted - 3.0, abs=SLACK)
    assert cluster.state(holder) == "RUNNING"
    assert cluster.state(waiter) == "PENDING"
    cluster.cancel(waiter)
    cluster.command("scancel", "--signal=KILL", "--full", holder)
    store.wait_gone(f'priority_violation_active_seconds{{workload="{waiter}"}}')


def test_fragmentation_is_told_from_scarcity(cluster: SlurmCluster, store: Store) -> None:
    halves = [cluster.submit("half", "wide", "-w", node, "--gres=gpu:a100:2") for node in ("gpu5", "gpu6")]
    for job in halves:
        cluster.wait_state(job, "RUNNING")
    # Four GPUs are free, two on each node: enough for one job, on no node.
    blocked = cluster.submit("whole", "wide", "-N", "1", "--gres=gpu:a100:4")
    scarce = cluster.submit("both", "wide", "-N", "2", "--gres=gpu:a100:4")
    submitted, _ = times(cluster, blocked)
    kind = 'violation_type="fragmentation_blocked"'
    labels, lasted, at = store.wait(f'priority_violation_active_seconds{{workload="{blocked}",{kind}}}')
    assert labels["service"] == "whole"
    assert lasted == pytest.approx(at - submitted - WAIT_SLO, abs=SLACK)
    store.wait(f'priority_violation_active_seconds{{workload="{scarce}",violation_type="scheduling_delay"}}')
    assert not store.query(f'priority_violation_active_seconds{{workload="{scarce}",{kind}}}')
    # Nobody less urgent is in the way.
    assert not store.query(f'priority_violation_active_seconds{{workload="{blocked}",violation_type="inversion"}}')
    stranded = {labels["size"]: value for labels, _, value in store.query("gpu_cluster_stranded_gpus")}
    assert stranded["4"] == 4

    cluster.cancel(scarce, halves[0])
    cluster.wait_state(blocked, "RUNNING")
    store.wait_gone(f'priority_violation_active_seconds{{workload="{blocked}"}}')
    cluster.cancel(blocked, halves[1])


def test_every_way_to_read_gives_the_same(cluster: SlurmCluster) -> None:
    job = cluster.submit("one", "batch", "--gres=gpu:a100:2", "-c", "2", "--mem=2G", "--comment=service=llm")
    array = cluster.submit("many", "batch", "--array=1-5%2", "--gres=gpu:a100:1")
    cluster.wait_state(job, "RUNNING")
    wait_for(lambda: cluster.command("squeue", "-h", "-t", "R", "-r").count("many") == 2, "two tasks", cluster.log)
    conf = cluster.folder / "slurm.conf"
    sources = {
        "commands": open_slurm(conf=conf),
        "socket": open_slurm(rest=f"unix:{cluster.rest_socket}", preempt_type="partition_prio"),
    }
    if cluster.tokens:
        token = cluster.folder / "token"
        token.write_text(cluster.command("scontrol", "token", "lifespan=300"))
        address = f"http://127.0.0.1:{cluster.rest_port}"
        sources["token"] = open_slurm(rest=address, user="root", token_file=token, preempt_type="partition_prio")
    snapshots = {}
    for name, source in sources.items():
        snapshots[name] = source.poll()
        source.close()
    first = snapshots["commands"]
    assert len(first.nodes) == len(NODES)
    workload = by_id(first.workloads)[job]
    assert (workload.state, workload.service, workload.rank) == (WorkloadState.RUNNING, "llm", 1)
    assert workload.placements[0].gpu_milli == 2000
    assert workload.placements[0].cpu_milli == 2000
    assert workload.placements[0].memory_bytes == 2 << 30
    states = [by_id(first.workloads)[f"{array}_{task}"].state for task in range(1, 6)]
    assert states == [WorkloadState.RUNNING] * 2 + [WorkloadState.HELD] * 3
    # Slurm may forget a job that has ended between two readings.
    alive = {
        name: {workload.id: workload for workload in snapshot.workloads if not workload.state.ended}
        for name, snapshot in snapshots.items()
    }
    for name, snapshot in snapshots.items():
        assert alive[name] == alive["commands"]
        assert snapshot.nodes == first.nodes
        assert snapshot.unread == first.unread == ()
    cluster.cancel(job, array)


def test_when_all_jobs_have_ended_so_have_their_series(cluster: SlurmCluster, store: Store) -> None:
    cluster.command("scancel", "--full", "-u", "root")
    wait_for(lambda: not cluster.command("squeue", "-h"), "the jobs to end", cluster.log)
    for family in ("violation_active_seconds", "violation_culprit_gpu_seconds", "workload_waiting_seconds"):
        store.wait_gone(f"priority_{family}")
    store.wait_gone("priority_violations_active > 0 or priority_workload_held_gpus > 0")
    # Slurm forgets its jobs after MinJobAge, and the exporter with it.
    store.wait_gone("priority_workloads", timeout=90)
    _, free, _ = store.wait("gpu_cluster_free_gpus")
    assert free == 4 * len(NODES)


def test_a_controller_that_is_away_is_said_and_survived(cluster: SlurmCluster, store: Store) -> None:
    controller = cluster.processes["slurmctld"]
    controller.terminate()
    controller.wait(10)
    store.wait("prioscope_source_up == 0", timeout=90)
    reasons = [labels["why"] for labels, _, _ in store.query('prioscope_source_unread{what="snapshot"}')]
    assert any("squeue" in reason for reason in reasons), reasons
    cluster.start_controller()
    store.wait("prioscope_source_up == 1", timeout=60)
