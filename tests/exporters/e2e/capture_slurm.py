"""Capture what a real Slurm says, for the tests that have none: python -m tests.exporters.e2e.capture_slurm FOLDER.

One cluster with jobs of every kind that the source tells apart. Names of this machine are replaced.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path

from tests.support.services import wait_for
from tests.support.slurm_cluster import Partition, SlurmCluster, SlurmNode, running

NODES = [
    SlurmNode("gpu1", {"a100": 4}, features="ib,nvlink"),
    SlurmNode("gpu2", {"a100": 2, "h100": 2}),
    SlurmNode("gpu3", {"": 4}),
    SlurmNode("gpu4", {"a100": 4}, features="ib,nvlink"),
    SlurmNode("gpu5", {"a100": 4}),
    SlurmNode("cpu1", {}, features="roce"),
]
PARTITIONS = [
    Partition("low", "ALL", "Default=YES PriorityTier=1 PriorityJobFactor=1 PreemptMode=REQUEUE"),
    Partition("high", "gpu[1-4]", "PriorityTier=10 PriorityJobFactor=100 PreemptMode=OFF"),
]


def play(cluster: SlurmCluster) -> None:
    """Bring the cluster into the state that is captured."""
    submit = cluster.submit
    ended = submit("ended", "low", "-w", "cpu1", seconds=0)
    cluster.command("scontrol", "update", "nodename=gpu5", "state=drain", "reason=row 5 of the power check")
    # gpu1: preempted and requeued by an urgent job. gpu2: a running array of two models.
    victim = submit("victim", "low", "-w", "gpu1", "--gres=gpu:a100:4", "--comment=service=train;team=vision")
    cluster.wait_state(victim, "RUNNING")
    winner = submit("winner", "high", "-w", "gpu1", "--gres=gpu:a100:3", "-c", "2", "--mem=4G")
    cluster.wait_state(winner, "RUNNING")
    suspended = submit("suspended", "low", "-w", "gpu2", "--gres=gpu:h100:2")
    cluster.wait_state(suspended, "RUNNING")
    cluster.command("scontrol", "suspend", suspended)
    submit("array", "low", "--array=1-6%2", "-w", "gpu2", "--gres=gpu:a100:1")
    submit("untyped", "low", "-w", "gpu3", "--gres=gpu:3")
    wide = submit("wide", "low", "-N", "2", "-w", "gpu1,gpu3", "--gres=gpu:1", "--ntasks-per-node=2")
    cluster.wait_state(wide, "RUNNING")
    mixed = ("sbatch", "--parsable", "-J", "mixed", "-o", "/dev/null", "-p", "low", "-w", "cpu1", ":")
    cluster.command(*mixed, "-p", "low", "-w", "gpu4", "--gres=gpu:a100:1", "--wrap=sleep 600")
    name = b'caf\xe9 "x" \\ UserId=eve(7)'
    subprocess.run(
        ["sbatch", "-J", name, "-o", "/dev/null", "-p", "low", "-w", "cpu1", "--wrap=sleep 600"],
        env=cluster.environment,
        cwd=cluster.folder / "jobs",
        check=True,
        capture_output=True,
    )
    cluster.command("scontrol", "update", "nodename=gpu2", "state=drain", "reason=ECC error")
    # A node whose daemon is gone.
    cluster.processes["slurmd.gpu5"].terminate()
    cluster.processes["slurmd.gpu5"].wait(10)
    cluster.command("scontrol", "update", "nodename=gpu5", "state=down", "reason=no power")
    reservation = ("reservationname=maintenance", "nodes=gpu4", "starttime=now", "duration=60", "user=root")
    cluster.command("scontrol", "create", "reservation", *reservation, "flags=maint,ignore_jobs")
    # What waits.
    submit("node", "high", "--gres=gpu:a100:4", "-N", "1", "-x", "gpu1", "-C", "ib&nvlink")
    submit("either", "low,high", "--gpus=4", "-C", "ib|roce")
    submit("tasks", "high", "-n", "4", "--gpus-per-task=a100:1", "-c", "2", "--mem-per-gpu=2G")
    submit("socket", "low", "--sockets-per-node=2", "--gpus-per-socket=1", "-N", "2")
    submit("types", "low", "--gres=gpu:a100:1,gpu:h100:1")
    submit("alone", "low", "--exclusive", "-w", "gpu3")
    submit("later", "low", "--begin=now+1hour")
    submit("held", "low", "--hold")
    submit("dependent", "low", f"--dependency=afterok:{winner}")
    cluster.wait_state(ended, "COMPLETED")
    wait_for(lambda: "PD" not in cluster.command("squeue", "-h", "-n", "untyped", "-o", "%t"), "untyped", cluster.log)
    time.sleep(2)


def captures(cluster: SlurmCluster) -> dict[str, bytes]:
    """Return what each way to ask says, by file name."""
    environment = {**cluster.environment, "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

    def ask(*command: str) -> bytes:
        return subprocess.run(command, env=environment, capture_output=True, check=True).stdout

    found = {
        "squeue.json": ask("squeue", "--json"),
        "sinfo.json": ask("sinfo", "--json"),
        "jobs.txt": ask("scontrol", "--details", "show", "job"),
        "nodes.txt": ask("scontrol", "--details", "show", "node"),
        "partitions.txt": ask("scontrol", "show", "partition"),
        "reservations.txt": ask("scontrol", "show", "reservation"),
        "config.txt": ask("scontrol", "show", "config"),
    }
    for what in ("partitions", "reservations"):
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(cluster.rest_socket))
        connection.request("GET", f"/slurm/v0.0.38/{what}")
        found[f"{what}.json"] = connection.getresponse().read()
        connection.close()
    return found


def neutral(data: bytes, folder: Path) -> bytes:
    """Replace the names of this machine."""
    host = socket.gethostname().split(".")[0].encode()
    data = data.replace(str(folder).encode(), b"/srv/slurm").replace(
        str(folder).replace("/", "\\/").encode(), b"/srv/slurm"
    )
    data = re.sub(rb"\b" + re.escape(host) + rb"\b", b"head", data)
    return re.sub(rb"Linux " + re.escape(os.uname().release.encode()) + rb"[^\"\n]*", b"Linux", data)


def main() -> None:
    """Write the captures to the folder that is given."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slurm") as name:
        folder = Path(name)
        with running(SlurmCluster(folder, NODES, PARTITIONS)) as cluster:
            play(cluster)
            for file, data in captures(cluster).items():
                (target / file).write_bytes(neutral(data, folder))
            (target / "now").write_text(f"{int(time.time())}\n")


if __name__ == "__main__":
    main()
