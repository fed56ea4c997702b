"""Alibaba's openb trace as replay input: nodes, pods, and the pod lists that FGD's experiments resample."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import data_root
from rca.errors import InvalidInputError, NotFoundError
from rca.replay.model import WHOLE, Cluster, Floats, Trace, Workloads

#: Urgency of openb's QoS classes: latency-sensitive and guaranteed pods first, best effort last.
RANKS = {"LS": 0, "Guaranteed": 0, "Burstable": 1, "BE": 2}


def _rows(name: str) -> list[dict[str, str]]:
    path: Path = data_root() / "openb" / name
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", cure="PRIOSCOPE_DATA names the folder that holds openb/")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _numbers(rows: list[dict[str, str]], column: str, missing: float = 0.0) -> Floats:
    try:
        return np.array([float(row.get(column) or missing) for row in rows])
    except ValueError as error:
        raise InvalidInputError(f"openb: column {column}: {error}") from None


def nodes(name: str = "openb_node_list_gpu_node.csv") -> Cluster:
    """Read a node list."""
    rows = _rows(name)
    return Cluster.of(
        _numbers(rows, "gpu").astype(int),
        names=[row["sn"] for row in rows],
        cpu_milli=_numbers(rows, "cpu_milli").astype(int),
        memory_mib=_numbers(rows, "memory_mib").astype(int),
        model=[row["model"] for row in rows],
    )


def _demands(rows: list[dict[str, str]]) -> dict[str, Any]:
    count = _numbers(rows, "num_gpu").astype(int)
    return {
        "cpu_milli": _numbers(rows, "cpu_milli").astype(int),
        "memory_mib": _numbers(rows, "memory_mib").astype(int),
        "gpu_count": count,
        "gpu_milli": np.where(count > 0, _numbers(rows, "gpu_milli").astype(int), WHOLE),
    }


def pod_list(workload: str) -> Workloads:
    """Read the demands of a pod list (``default``, ``gpushare100``, ``multigpu50``), in the order of their names."""
    rows = sorted(_rows(f"openb_pod_list_{workload}.csv"), key=lambda row: row["name"])
    return Workloads.of(
        np.arange(len(rows), dtype=np.float64),
        np.full(len(rows), np.inf),
        names=[row["name"] for row in rows],
        **_demands(rows),
    )


#: With ``load``, `recorded` makes arrivals this many times denser and takes every so many-th node only: the pods of the
#: trace used a quarter of a percent of the GPUs on average.
DENSITY, EVERY = 350, 6


def recorded(repeat: int = 1, *, load: bool = False) -> Trace:
    """The recorded arrivals and run times, ``repeat`` times, on all nodes.

    As recorded, one copy after the other: nothing ever waits. With ``load``, all copies at once, each shifted in time
    at random, denser, and on fewer nodes: a hundred copies keep them about as busy as first come, first served can.
    A pod that was never scheduled leaves the queue when it was deleted; it would have run for the median time.
    """
    rows = _rows("openb_pod_list_default.csv")
    created, deleted = _numbers(rows, "creation_time"), _numbers(rows, "deletion_time")
    scheduled = _numbers(rows, "scheduled_time", np.nan)
    ran = np.maximum(deleted - scheduled, 1.0)
    span = created.max() + 1.0
    submit = np.tile(created, repeat) + np.repeat(np.arange(repeat) * span, len(rows))
    if load:
        shift = np.random.default_rng(0).random(repeat) * span
        submit = (np.tile(created, repeat) + np.repeat(shift, len(rows))) % span * (repeat / DENSITY)
    offset = submit - np.tile(created, repeat)
    columns: dict[str, Any] = {name: np.tile(values, repeat) for name, values in _demands(rows).items()}
    cluster = nodes("openb_node_list_all_node.csv")
    if load:
        cluster = cluster.select(np.arange(len(cluster)) % EVERY == 0)
    return Trace(
        cluster,
        Workloads.of(
            submit,
            np.tile(np.where(np.isnan(ran), np.nanmedian(ran), ran), repeat),
            rank=np.tile([RANKS[row["qos"]] for row in rows], repeat),
            preemptible=np.tile([row["qos"] == "BE" for row in rows], repeat),
            cancel=np.tile(np.where(np.isnan(scheduled), deleted, np.inf), repeat) + offset,
            observed_start=np.tile(scheduled, repeat) + offset,
            qos=[row["qos"] for row in rows] * repeat,
            **columns,
        ),
        name=f"openb x {repeat}{' under load' if load else ''}",
    )
