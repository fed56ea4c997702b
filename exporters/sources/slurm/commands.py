"""Reads Slurm with its own commands: JSON where they write it, text where they do not (22.05 and before)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from exporters.errors import InvalidInputError, SourceUnreachableError
from exporters.sources.slurm import records, text
from exporters.sources.slurm.reader import Reading, Remembered
from exporters.sources.slurm.records import Config, Dump, Part, QosRecord

#: From this version on squeue and sinfo write JSON, and from that on scontrol does.
JSON_SQUEUE: Final = (21, 8)
JSON_SCONTROL: Final = (23, 2)

#: Variables of Slurm that say where the cluster is; all others change what commands print.
_KEPT: Final = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"})


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Slurm's commands print the same everywhere.

    Variables such as ``SQUEUE_FORMAT`` or ``SLURM_TIME_FORMAT`` of whoever starts the exporter must not reach them.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name in _KEPT
        or not name.startswith(("SLURM", "SQUEUE", "SINFO", "SACCT", "SCONTROL", "SBATCH", "LC_", "LANG", "COLUMNS"))
    }
    # %s is Unix seconds: no zone, no summer time. 0 is no limit to how long a list of array tasks may be.
    return {**found, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


class CommandReader:
    """Reads one cluster with squeue, sinfo, scontrol and sacctmgr.

    Args:
        folder: Where the commands are; None: on the path.
        conf: The slurm.conf; None: as the environment or the default says.
        timeout: Seconds for one command, which is killed then.
    """

    def __init__(self, *, folder: Path | None = None, conf: Path | None = None, timeout: float = 30.0) -> None:
        self._folder = folder
        self._timeout = timeout
        self._environment = clean_environment(os.environ)
        if conf is not None:
            self._environment["SLURM_CONF"] = str(conf)
        self._version: tuple[int, int] | None = None
        self._json = True
        self._config: Remembered[Config] = Remembered(self._read_config)
        self._qos: Remembered[tuple[QosRecord, ...]] = Remembered(self._read_qos)

    def read(self) -> Dump:
        """Read jobs, nodes and partitions, and configuration and QOS when they are due; see `Reader.read`."""
        if self._version is None:
            self._version = _version(self._run(["squeue", "--version"]))
            self._json = self._version >= JSON_SQUEUE
        reading = Reading({})
        jobs = reading.part("workloads", self._jobs)
        nodes = reading.part("nodes", self._nodes)
        reading.check(jobs, nodes)
        partitions = reading.part("partitions", lambda: text.parse_partitions(self._scontrol("partition")))
        reservations = reading.part("reservations", lambda: text.parse_reservations(self._scontrol("reservation")))
        config = Config()
        try:
            config = self._config.get() or config
        except (SourceUnreachableError, InvalidInputError) as error:
            reading.unread["configuration"] = str(error)
        qos: tuple[QosRecord, ...] | None = None
        if config.accounting is not False:
            try:
                qos = self._qos.get()
            except (SourceUnreachableError, InvalidInputError) as error:
                reading.unread["qos"] = str(error)
        return Dump(jobs, nodes, partitions, reservations, qos, config, reading.unread, config.cluster)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    # --- parts

    def _jobs(self) -> Part:
        # All states: the exact end of a job is only in its own record.
        return self._either(
            ["squeue", "--json", "--local", "--all", "--states=all"],
            records.parse_jobs,
            lambda: text.parse_jobs(self._scontrol("job", "--details")),
        )

    def _nodes(self) -> Part:
        # From 23.02 on, what sinfo --json writes is sums over nodes, not nodes.
        new = self._version is not None and self._version >= JSON_SCONTROL
        return self._either(
            ["scontrol", "show", "nodes", "--json"] if new else ["sinfo", "--json", "--local", "--all"],
            records.parse_nodes,
            lambda: text.parse_nodes(self._scontrol("node", "--details", "--all")),
        )

    def _either(self, command: Sequence[str], parse: Callable[[bytes, str], Part], as_text: Callable[[], Part]) -> Part:
        """Return what a command says in JSON, or in text where this Slurm cannot write JSON."""
        if self._json:
            try:
                return parse(self._run(command), " ".join(command[:2]))
            except _NoJsonError:
                self._json = False
        return as_text()

    def _scontrol(self, what: str, *options: str) -> str:
        return text.decode(self._run(["scontrol", *options, "show", what]))

    def _read_config(self) -> Config:
        return text.parse_config(self._scontrol("config"))

    def _read_qos(self) -> tuple[QosRecord, ...]:
        command = ["sacctmgr", "--parsable2", "--readonly", "show", "qos", "format=Name,Priority,Preempt,PreemptMode"]
        return text.parse_qos(text.decode(self._run(command))).items

    # --- processes

    def _run(self, command: Sequence[str]) -> bytes:
        """Run a command to its end and return what it printed.

        Raises:
            SourceUnreachableError: it is not there, takes too long, or fails.
        """
        program = shutil.which(command[0], path=str(self._folder) if self._folder else self._environment.get("PATH"))
        if program is None:
            where = f"in {self._folder}" if self._folder else "on the path"
            raise SourceUnreachableError(
                f"{command[0]} is not {where}",
                cure="install Slurm's client commands (slurm-client), or read slurmrestd instead: --rest",
            )
        shown = " ".join(command)
        process = subprocess.Popen(  # noqa: S603
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired:
            raise SourceUnreachableError(
                f"`{shown}` does not end within {self._timeout:g} s",
                cure="is slurmctld down or overloaded? Raise --timeout",
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        reason = " ".join(errors.decode("utf-8", "replace").split())[:300]
        if "--json" in command and (process.returncode or not output.strip()) and _NO_JSON.search(reason):
            raise _NoJsonError(reason)
        if process.returncode:
            raise SourceUnreachableError(
                f"`{shown}` failed ({process.returncode}): {reason or 'it does not say why'}",
                cure="run it by hand as the exporter's user; is slurmctld up, and munge?",
            )
        return output


class _NoJsonError(Exception):
    """This Slurm cannot write JSON."""


_NO_JSON: Final = re.compile(r"unrecognized option|unknown option|invalid option|serializer|plugin|json", re.IGNORECASE)


def _version(output: bytes) -> tuple[int, int]:
    found = re.search(rb"(\d+)\.(\d+)", output)
    if found is None:
        raise InvalidInputError(
            f"squeue --version says {output[:60].decode('utf-8', 'replace')!r}", cure="is it Slurm's squeue?"
        )
    return int(found[1]), int(found[2])
