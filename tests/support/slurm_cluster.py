"""A real Slurm on loopback for tests: one controller, several node daemons with fake GPUs, slurmrestd; no systemd.

All of it lives in one folder and under process ids that the `SlurmCluster` knows, so that nothing else is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.services import HOST, SBIN, free_port, wait_for

DAEMONS = ("munged", "slurmctld", "slurmd", "slurmrestd", "squeue", "sbatch", "scontrol")

CONFIG = """\
ClusterName=loopback
SlurmctldHost={hostname}({host})
SlurmctldPort={controller_port}
SlurmctldParameters=enable_configless
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
# Many nodes on one address: without these, daemons would listen on every interface, and find each other by name.
CommunicationParameters=NoAddrCache,NoInAddrAny,NoCtldInAddrAny
# The nodes claim more than the machine has.
SlurmdParameters=config_overrides
LaunchParameters=disable_send_gids
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdTimeout=120
KillWait=1
MinJobAge={min_job_age}
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_window=1440,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PriorityType=priority/multifactor
PriorityWeightPartition=10000
PriorityWeightAge=100
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


@dataclass(frozen=True)
class SlurmNode:
    """One emulated machine: GPUs by model."""

    name: str
    gpus: Mapping[str, int]
    cpus: int = 16
    memory_mib: int = 64_000
    features: str = ""


@dataclass(frozen=True)
class Partition:
    """One partition. ``options`` are as in slurm.conf."""

    name: str
    nodes: str
    options: str = ""


@dataclass
class SlurmCluster:
    """Starts and stops the daemons, and runs Slurm's commands against them.

    Args:
        folder: Where everything is kept. Its path must be short: it holds unix sockets.
    """

    folder: Path
    nodes: Sequence[SlurmNode]
    partitions: Sequence[Partition]
    min_job_age: int = 300
    rest: bool = True
    rest_port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that Slurm's commands need to find this cluster."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SQUEUE", "SBATCH"))}
        return {**kept, "PATH": SBIN, "LC_ALL": "C", "SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def tokens(self) -> bool:
        """Whether the plugin for JSON Web Tokens is installed (slurm-wlm-jwt-plugin)."""
        return any(path.exists() for path in Path("/usr/lib").glob("*/slurm-wlm/auth_jwt.so"))

    @property
    def rest_socket(self) -> Path:
        """Where slurmrestd listens, without a token."""
        return self.folder / "rest.sock"

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        # munge serves only where everyone may reach its socket.
        self.folder.chmod(0o755)
        for name in ("state", "spool", "dev", "jobs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._configure()
        self._munge()
        self.start_controller("-c")
        for node in self.nodes:
            (self.folder / "spool" / node.name).mkdir()
            self._run(f"slurmd.{node.name}", ["slurmd", "-D", "-N", node.name])
        if self.rest:
            self.start_rest()
        wait_for(
            lambda: (
                len(self.command("sinfo", "-h", "-N", "-o", "%N", "-t", "idle", check=False).split()) >= len(self.nodes)
            ),
            "the nodes",
            self.log,
        )

    def start_controller(self, *options: str) -> None:
        """Start slurmctld, with the state of the one before unless ``-c`` is among ``options``."""
        self._run("slurmctld", ["slurmctld", "-D", *options])
        wait_for(lambda: self.command("scontrol", "ping", check=False).count(" is UP"), "slurmctld", self.log)

    def start_rest(self) -> None:
        """Start slurmrestd on `rest_socket`, without tokens, and on `rest_port` of TCP, with tokens if it can."""
        self.rest_port = free_port()
        version = self.version
        plugin = "openapi/v0.0.38" if version < (23, 2) else "openapi/v0.0.39"
        if version >= (23, 11):
            plugin = "openapi/slurmctld"
        # It refuses to be run by root or by SlurmUser unless it is told that this is a test.
        test = {"SLURMRESTD_SECURITY": "disable_user_check"}
        if version >= (23, 2):
            test["SLURMRESTD_SECURITY"] += ",become_user"
        command = ["slurmrestd", "-s", plugin, "-a"]
        self._run("slurmrestd.local", [*command, "rest_auth/local", f"unix:{self.rest_socket}"], **test)
        if self.tokens:
            self._run(
                "slurmrestd.jwt", [*command, "rest_auth/jwt", f"{HOST}:{self.rest_port}"], SLURM_JWT="daemon", **test
            )
        wait_for(self.rest_socket.exists, "slurmrestd", self.log)

    def stop(self) -> None:
        """End the jobs, then every process that was started here."""
        if "slurmctld" in self.processes and self.processes["slurmctld"].poll() is None:
            with contextlib.suppress(subprocess.SubprocessError):
                self.command("scancel", "--full", "-u", "root", check=False)
                deadline = time.monotonic() + 8
                while self.command("squeue", "-h", check=False) and time.monotonic() < deadline:
                    time.sleep(0.1)
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)
        self.processes.clear()

    # --- commands

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor version of the installed Slurm."""
        text = subprocess.run(["squeue", "--version"], capture_output=True, env=self.environment, check=True).stdout
        found = re.search(rb"(\d+)\.(\d+)", text)
        assert found, text
        return int(found[1]), int(found[2])

    def command(self, *arguments: str, check: bool = True, timeout: float = 15.0) -> str:
        """Run one of Slurm's commands and return what it printed."""
        done = subprocess.run(
            arguments,
            capture_output=True,
            env=self.environment,
            cwd=self.folder / "jobs",
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(arguments)}: {done.stderr.decode(errors='replace')}\n{self.log()}")
        return done.stdout.decode(errors="replace").strip()

    def submit(self, name: str, partition: str, *options: str, seconds: float = 600) -> str:
        """Submit a job that sleeps and return its id."""
        answer = self.command(
            "sbatch", "--parsable", "-J", name, "-p", partition, "-o", "/dev/null", *options, f"--wrap=sleep {seconds}"
        )
        return answer.split(";")[0]

    def state(self, job: str) -> str:
        """Return the state of a job, such as ``RUNNING``."""
        return self.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False)

    def wait_state(self, job: str, *states: str, timeout: float = 20.0) -> None:
        """Wait until a job is in one of ``states``."""
        wait_for(lambda: self.state(job) in states, f"job {job} to be {' or '.join(states)}", self.log, timeout)

    def cancel(self, *jobs: str) -> None:
        """Cancel jobs and wait until they hold nothing."""
        self.command("scancel", *jobs)
        wait_for(
            lambda: not self.command("squeue", "-h", "-j", ",".join(jobs), "-o", "%i", check=False),
            f"jobs {', '.join(jobs)} to end",
            self.log,
        )

    def log(self) -> str:
        """Return the end of each daemon's output, for a failed assertion."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:])
            for path in sorted(self.folder.glob("*.out.log"))
        )

    # --- daemons

    def _run(self, name: str, command: list[str], **environment: str) -> None:
        with (self.folder / f"{name}.out.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, **environment},
                cwd=self.folder,
                start_new_session=True,
            )

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        paths = {name: self.folder / f"munge{end}" for name, end in (("socket", ".sock"), ("pid-file", ".pid"))}
        paths |= {"log-file": self.folder / "munged.log", "seed-file": self.folder / "munge.seed", "key-file": key}
        options = [f"--{name}={path}" for name, path in paths.items()]
        self._run("munged", ["munged", "--foreground", "--force", "--num-threads=4", *options])
        wait_for(paths["socket"].exists, "munged", self.log)

    def _configure(self) -> None:
        (self.folder / "jwt.key").write_bytes(secrets.token_bytes(32))
        (self.folder / "jwt.key").chmod(0o600)
        hostname = socket.gethostname().split(".")[0]
        lines = [
            CONFIG.format(
                folder=self.folder,
                hostname=hostname,
                host=HOST,
                controller_port=free_port(),
                min_job_age=self.min_job_age,
            )
        ]
        if self.tokens:
            lines.append(f"AuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key={self.folder}/jwt.key")
        gres = ["AutoDetect=off"]
        for node in self.nodes:
            wanted = ",".join(f"gpu:{model}:{count}" if model else f"gpu:{count}" for model, count in node.gpus.items())
            lines.append(
                f"NodeName={node.name} NodeHostname={hostname} NodeAddr={HOST} Port={free_port()} Sockets=2 "
                f"CoresPerSocket={node.cpus // 2} ThreadsPerCore=1 RealMemory={node.memory_mib}"
                + (f" Gres={wanted}" if wanted else "")
                + (f" Feature={node.features}" if node.features else "")
                + " State=UNKNOWN"
            )
            index = 0
            for model, count in node.gpus.items():
                kind = f" Type={model}" if model else ""
                files = [self._device(number) for number in range(index, index + count)]
                gres += [f"NodeName={node.name} Name=gpu{kind} File={file}" for file in files]
                index += count
        lines += [f"PartitionName={part.name} Nodes={part.nodes} {part.options} State=UP" for part in self.partitions]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "gres.conf").write_text("\n".join(gres) + "\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if self.version >= (23, 11) else "")

    def _device(self, number: int) -> Path:
        path = self.folder / "dev" / f"nvidia{number}"
        if not path.exists():
            # The device of /dev/null: there, and nothing behind it.
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        return path


def missing() -> str:
    """Why no cluster can be started here; empty when it can."""
    absent = [name for name in DAEMONS if shutil.which(name, path=SBIN) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (scripts/ci_services.sh installs them)"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    return ""


@contextlib.contextmanager
def running(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """Run ``cluster`` for the length of a with statement."""
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
