"""Every Slurm answer among the public captures is read, with the number of jobs, nodes and GPUs that it holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC
from functools import partial
from pathlib import Path

import pytest

from exporters.errors import SourceUnreachableError
from exporters.sources.slurm import records, text
from exporters.sources.slurm.convert import snapshot_of
from exporters.sources.slurm.records import Dump, Part
from exporters.sources.slurm.tres import gpus_of, gpus_of_tres, parse_gres, parse_tres

FOLDER = Path(os.environ.get("PRIOSCOPE_DATA", "/nonexistent")) / "captures"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "slurmrestd").is_dir(), reason="no captures: set PRIOSCOPE_DATA to the folder of the public data sets"
)

Parse = Callable[[bytes], Part]


def in_text(parse: Callable[[str], Part]) -> Parse:
    return lambda data: parse(text.decode(data))


def table(convert: Callable[[list[dict[str, str]]], Part], separator: str = "|", columns: str = "") -> Parse:
    names = columns.split(" ") if columns else ()
    return lambda data: convert(text.parse_table(text.decode(data), names, separator))


def padded(columns: str, widths: tuple[int, ...], convert: Callable[[list[dict[str, str]]], Part]) -> Parse:
    """A table of columns of fixed width, as ``-O`` without a separator prints it."""

    def parse(data: bytes) -> Part:
        rows = []
        for line in text.decode(data).splitlines():
            row, at = {}, 0
            for name, width in zip(columns.split(" "), widths, strict=True):
                row[name], at = line[at : at + width].strip(), at + width
            rows.append(row)
        return convert(rows)

    return parse


JOBS_OF_SACCT = table(partial(text.jobs_of_rows, zone=UTC))

#: Columns of a third party's squeue call, which has no header.
SQUEUE = (
    "TRES_PER_NODE MIN_CPUS JOBID JOBID_RAW NAME TIMELIMIT MIN_MEMORY COMMAND PRIORITY STATE USER CPUS NODES "
    "TIME_LEFT TIME_USED NODELIST DEPENDENCY EXC_NODES START_TIME SUBMIT_TIME ELIGIBLE_TIME ACCRUE_TIME PENDING_TIME "
    "COMMENT PARTITION ACCOUNT QOS REASON TRES_ALLOC RESERVATION REQUEUE FEATURE RESTARTCNT SCHEDNODES"
)

#: What is in each folder: file, how it is read, records, and GPUs (jobs: held or asked for; nodes: configured).
EXPECTED: dict[str, dict[str, tuple[Parse, int, int]]] = {
    "slurm-22.05": {
        "rest-jobs.json": (records.parse_jobs, 11, 32 + 8 + 16 + 1),
        "squeue.json": (records.parse_jobs, 11, 32 + 8 + 16 + 1),
        "scontrol-jobs-d.txt": (in_text(partial(text.parse_jobs, zone=UTC)), 11, 32 + 8 + 16 + 1),
        "squeue-parsable.txt": (
            padded(
                "JOBID PARTITION PRIORITY STATE REASON TRES_ALLOC TRES_PER_NODE",
                (10, 10, 12, 5, 40, 60, 30),
                text.jobs_of_rows,
            ),
            11,
            # Of one job the column cut the resources off: it is named as not read, not guessed.
            32 + 8 + 1,
        ),
        "sacct.json": (records.parse_accounting, 11, 32 + 8 + 16 + 1),
        "restdb-jobs.json": (records.parse_accounting, 11, 32 + 8 + 16 + 1),
        "sacct-parsable.txt": (JOBS_OF_SACCT, 11, 32 + 8 + 16 + 1),
        "rest-nodes.json": (records.parse_nodes, 4, 32),
        "sinfo.json": (records.parse_nodes, 4, 32),
        "scontrol-nodes.txt": (in_text(text.parse_nodes), 4, 32),
        "scontrol-nodes-oneliner.txt": (in_text(text.parse_nodes), 4, 32),
        "sinfo-parsable.txt": (
            padded(
                "NODELIST PARTITION STATE CPUS(A/I/O/T) ALLOCMEM MEMORY GRES GRES_USED",
                (20, 10, 12, 20, 10, 10, 30, 60),
                text.nodes_of_rows,
            ),
            4,
            32,
        ),
        "rest-partitions.json": (records.parse_partitions, 2, 0),
        "scontrol-partitions.txt": (in_text(text.parse_partitions), 2, 0),
        "rest-reservations.json": (records.parse_reservations, 0, 0),
        "restdb-qos.json": (records.parse_qos, 1, 0),
    },
    "slurm-cli": {
        "sample-squeue-output.txt": (table(text.jobs_of_rows, "|#", SQUEUE), 5, 2 + 1 + 256 + 2 * 160),
        "sample-sinfo-output.txt": (table(text.nodes_of_rows), 3, 8 + 8 + 2),
        "sample-scontrol-output.txt": (in_text(text.parse_partitions), 3, 0),
        "sample-sacctmgr-qos.txt": (in_text(text.parse_qos), 5, 0),
        # Only steps of one job, which are no jobs.
        "sample-sacct-output.txt": (JOBS_OF_SACCT, 0, 0),
        "sample-sacct-output-invalid-utf8.txt": (JOBS_OF_SACCT, 2, 8 + 1),
        "sample-sacct-multiple-multiline.txt": (
            table(partial(text.jobs_of_rows, zone=UTC), "|#"),
            4,
            1024 + 3 * 256,
        ),
    },
}

#: GPUs of the single jobs in slurmrestd's folders, by the end of the file's name; all others have none.
GPUS = {
    "gpus-completed": 4,
    "gpus-gres": 4,
    "gpus-multi-nodes": 8,
    "gpus-multi-types": 1,
    "gpus-pending": 4,
    "gpus-per-node": 2,
    # Two on each of two sockets were asked for, and Slurm gave it one socket: see HELD.
    "gpus-per-socket": 4,
    "gpus-per-task": 4,
    "gpus-running": 4,
    "gpus-type": 1,
}

HELD = GPUS | {"gpus-per-socket": 2, "gpus-pending": 0, "gpus-completed": 0}

#: Records of the lists in slurmrestd's folders; None: the answer is an error.
LISTS = {
    "24.05/0.0.41": {
        "slurm-jobs": 14,
        "slurm-nodes": 100,
        "slurm-partitions": 4,
        "slurm-qos": 2,
        "slurm-reservations": 1,
    },
    "25.05/0.0.43": {
        "slurm-jobs": 19,
        "slurm-nodes": 6,
        "slurm-partitions": 2,
        "slurm-qos": 2,
        "slurm-reservations": 0,
    },
}
FAILED = ("slurm-job-archived", "slurm-job-gpus-archived", "slurm-job-unfound", "slurm-node-unfound")
#: slurmdbd answers with an empty list for a job that it does not know.
EMPTY = ("slurmdb-job-unfound", "24.05/0.0.41/slurmdb-job-gpus-pending")

#: Captures of things that no source reads.
NOT_READ = {
    *("rest-openapi.json", "restdb-clusters.json", "restdb-tres.json", "rest-licenses.json", "rest-ping.json"),
    *("rest-diag.json", "sdiag.txt", "sprio.txt", "sshare.txt"),
    *("slurm-accounts.json", "slurmdb-associations.json", "slurm-ping.json", "status.json"),
}


def gpus_of_part(part: Part) -> int:
    """GPUs that jobs ask for, or nodes have."""
    total = 0
    jobs = snapshot_of(Dump(jobs=part), 0.0, "c")[0].workloads if _are(part, records.Job) else ()
    total += sum(workload.demand.total_gpu_milli for workload in jobs) // 1000
    for node in part.items if _are(part, records.NodeRecord) else ():
        total += gpus_of(parse_gres(node.gres)).count
    return total


def _are(part: Part, kind: type) -> bool:
    return bool(part.items) and isinstance(part.items[0], kind)


@pytest.mark.parametrize("folder", sorted(EXPECTED))
def test_commands_and_the_api_of_22_05(folder: str) -> None:
    files = {path.name for path in (FOLDER / folder).iterdir()}
    assert files - NOT_READ == set(EXPECTED[folder])
    for name, (parse, count, gpus) in EXPECTED[folder].items():
        part = parse((FOLDER / folder / name).read_bytes())
        assert not part.rejected, name
        assert (len(part.items), gpus_of_part(part)) == (count, gpus), name


def _parser(name: str) -> Parse:
    if name.startswith("slurmdb-job"):
        return records.parse_accounting
    kinds = {
        "slurm-job": records.parse_jobs,
        "slurm-node": records.parse_nodes,
        "slurm-part": records.parse_partitions,
        "slurm-qos": records.parse_qos,
        "slurm-rese": records.parse_reservations,
        "slurm-jwt-": records.parse_jobs,
    }
    return next(parse for start, parse in kinds.items() if name.startswith(start))


@pytest.mark.parametrize("version", sorted(LISTS))
def test_slurmrestd(version: str) -> None:
    seen = 0
    for path in sorted((FOLDER / "slurmrestd" / version).glob("*.json")):
        name = path.stem
        if path.name in NOT_READ:
            continue
        seen += 1
        parse = _parser(name)
        if name in FAILED or name.startswith("slurm-jwt-"):
            with pytest.raises(SourceUnreachableError) as caught:
                parse(path.read_bytes())
            if "jwt-expired" in name:
                assert "token" in caught.value.cure
            continue
        part = parse(path.read_bytes())
        assert not part.rejected, name
        empty = any(f"{version}/{name}".endswith(item) for item in EMPTY)
        assert len(part.items) == LISTS[version].get(name, 0 if empty else 1), name
        if name.startswith("slurm-job-"):
            kind = name.removeprefix("slurm-job-")
            assert gpus_of_part(part) == GPUS.get(kind, 0), name
            held = sum(workload.held_gpu_milli for workload in snapshot_of(Dump(jobs=part), 0.0, "c")[0].workloads)
            assert held == 1000 * HELD.get(kind, 0), name
        if name.startswith("slurm-node"):
            assert gpus_of_part(part) == (
                8 if name == "slurm-nodes" and "25" in version else 4 * part.items[0].gres.count("gpu")
            )
    assert seen > 40


def test_slurmrestd_of_22_05_9() -> None:
    folder = FOLDER / "slurmrestd" / "telegraf"
    counts = {"jobs": 3, "nodes": 3, "partitions": 1, "reservations": 0}
    for what, count in counts.items():
        parse: Parse = getattr(records, f"parse_{what}")
        part = parse((folder / f"testcases__gather__responses__{what}.json").read_bytes())
        assert (len(part.items), dict(part.rejected)) == (count, {})
        assert parse((folder / f"testcases__panic__responses__{what}.json").read_bytes()) == Part()


def test_who_holds_what_in_the_captured_inversion() -> None:
    folder = FOLDER / "slurm-22.05"
    dump = Dump(
        jobs=records.parse_jobs((folder / "rest-jobs.json").read_bytes()),
        nodes=records.parse_nodes((folder / "rest-nodes.json").read_bytes()),
        partitions=records.parse_partitions((folder / "rest-partitions.json").read_bytes()),
        qos=records.parse_qos((folder / "restdb-qos.json").read_bytes()).items,
    )
    snapshot, _ = snapshot_of(dump, 1796082025.0, "demo")
    workloads = {workload.name: workload for workload in snapshot.workloads}
    assert (workloads["prod-train"].rank, workloads["low1"].rank) == (0, 1)
    assert workloads["prod-multi"].demand.pieces == 2
    assert workloads["prod-multi"].demand.distinct_nodes
    assert workloads["low2"].placements[0].devices == tuple(f"gpu1/gpu{at}" for at in range(4, 8))
    assert all(node.gpu_free_milli == (0,) * 8 for node in snapshot.nodes)
    tracked = gpus_of_tres(parse_tres("cpu=8,gres/gpu=4,gres/gpu:a100=4"))
    assert tracked is not None
    assert sum(workload.held_gpu_milli for workload in snapshot.workloads) == 8 * tracked.count * 1000
