"""Start-up time: what an engineer on call waits for, measured over whole processes in turns (A B A B)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from rca.errors import ExitCode, InvalidInputError
from rca.graph import build
from rca.incident import EDGES_SCHEMA, Incident, Relation
from rca.simulation.faults import Mechanism
from rca.simulation.incidents import sample_incident

IMPORT_TORCH = (sys.executable, "-c", "import torch, torch_geometric")


class Timing(msgspec.Struct, frozen=True):
    """Two commands timed in turns: medians in seconds and the ratio of the first to the second."""

    first: str
    second: str
    first_seconds: list[float]
    second_seconds: list[float]
    first_median: float
    second_median: float
    ratio: float


def _explain(bundle: Path) -> tuple[str, ...]:
    script = Path(sys.executable).with_name("rca")
    start = (str(script),) if script.exists() else (sys.executable, "-c", "from cli.main import main; main()")
    return (*start, "explain", str(bundle), "-o", "json")


def _seconds(command: Sequence[str], allowed: frozenset[int]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - began
    if done.returncode not in allowed:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
        raise InvalidInputError(
            f"{' '.join(command)} ended with {done.returncode}: {reason}", cure="make that command work first"
        )
    return elapsed


def paired(
    first: Sequence[str], second: Sequence[str], *, names: tuple[str, str], runs: int, warm_up: int = 1
) -> Timing:
    """Time two commands in turns, so that a slow moment of the machine hits both.

    Raises:
        InvalidInputError: a command fails (exit codes 0 and 4, inconclusive, are fine).
    """
    allowed = frozenset({int(ExitCode.OK), int(ExitCode.INCONCLUSIVE)})
    for command in (first, second) * warm_up:
        _seconds(command, allowed)
    a, b = [], []
    for _ in range(runs):
        a.append(_seconds(first, allowed))
        b.append(_seconds(second, allowed))
    medians = float(np.median(a)), float(np.median(b))
    return Timing(names[0], names[1], a, b, *medians, medians[0] / medians[1])


def grow(incident: Incident, nodes: int) -> Incident:
    """Enlarge a call graph to about ``nodes`` nodes: renamed copies of it, each called by the entry of another.

    The copies hang below the original victim in a tree of fan-out four, so all of it can reach the victim. The
    simulator itself draws graphs of up to 500 services.
    """
    size = len(build(incident).nodes)
    copies = max(round(nodes / size), 1)
    entry = incident.header.victim.node

    def renamed(table: pa.Table, columns: tuple[str, ...], number: int) -> pa.Table:
        for name in columns if number else ():
            position = table.schema.get_field_index(name)
            changed = pc.binary_join_element_wise(table.column(name), f"copy-{number}", "/")
            table = table.set_column(position, table.schema.field(name), changed)
        return table

    def all_copies(table: pa.Table, *columns: str) -> pa.Table:
        return pa.concat_tables([renamed(table, columns, number) for number in range(copies)])

    def name(number: int) -> str:
        return f"{entry}/copy-{number}" if number else entry

    links = pa.table(
        {
            **{field.name: pa.nulls(copies - 1, field.type) for field in EDGES_SCHEMA},
            "caller": pa.array([name((number - 1) // 4) for number in range(1, copies)], pa.string()),
            "callee": pa.array([name(number) for number in range(1, copies)], pa.string()),
            "relation": pa.array([Relation.CALLS.value] * (copies - 1), pa.string()),
        },
        schema=EDGES_SCHEMA,
    )
    return incident.replace(
        metrics=all_copies(incident.metrics, "node", "peer"),
        edges=pa.concat_tables([all_copies(incident.edges, "caller", "callee"), links]),
        nodes=all_copies(incident.nodes, "node"),
    )


def write_bundle(folder: Path, nodes: int, seed: int) -> Path:
    """Write an incident of about ``nodes`` nodes below ``folder`` and return its path."""
    drawn = sample_incident(seed, nodes=min(nodes, 50), mechanism=Mechanism.LATENCY)
    bundle = drawn.incident.replace(truth=None)
    return (grow(bundle, nodes) if nodes > 50 else bundle).write(folder / f"incident-{nodes}")


def measure(*, runs: int = 7, seed: int = 1, large: tuple[int, int] = (1000, 10_000), console: Console) -> list[Timing]:
    """Time `rca explain` on 50 nodes against importing torch, and on the larger against the smaller of ``large``."""
    timings = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = write_bundle(folder, 50, seed)
        if importlib.util.find_spec("torch") and importlib.util.find_spec("torch_geometric"):
            timings.append(
                paired(_explain(small), IMPORT_TORCH, names=("rca explain, 50 nodes", "import torch"), runs=runs)
            )
        else:
            console.print("not measured: rca explain against importing torch (the train extra is not installed)")
        fewer, more = (write_bundle(folder, nodes, seed) for nodes in large)
        timings.append(
            paired(
                _explain(more),
                _explain(fewer),
                names=(f"rca explain, {large[1]:,} nodes", f"rca explain, {large[0]:,} nodes"),
                runs=max(runs // 2, 1),
            )
        )
    return timings


def print_timings(timings: Sequence[Timing], console: Console) -> None:
    """Print medians and ratios."""
    for item in timings:
        console.print(
            f"{item.first}: {item.first_median:.3f} s   {item.second}: {item.second_median:.3f} s   "
            f"ratio {item.ratio:.2f}   ({len(item.first_seconds)} runs each, in turns)"
        )
