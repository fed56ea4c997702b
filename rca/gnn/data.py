"""Training examples: simulated incidents turned into tensors, made in parallel and the same for the same seed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rca.features import Floats32, extract
from rca.graph import Ints
from rca.simulation.faults import MECHANISMS
from rca.simulation.incidents import SimulatedIncident, sample_incident

#: Seeds of the splits never meet: a split has room for a million incidents per training seed.
SPLIT_OFFSETS = {"train": 0, "validation": 1, "calibration": 2, "test": 3}
SPLIT_ROOM = 1_000_000


@dataclass(frozen=True)
class Example:
    """One incident as the network sees it, with its labels.

    Attributes:
        node [N, F], edge [2E, G], edge_index [2, 2E]: inputs, see `rca.features`.
        victim: node index. ``cause``: node index, or -1 when nothing broke.
        mechanism: index into MECHANISMS, -1 when nothing broke.
        crossed: [2E] in [0, 1], whether the anomaly crossed the edge in that direction.
    """

    seed: int
    node: Floats32
    edge: Floats32
    edge_index: Ints
    victim: int
    cause: int
    mechanism: int
    crossed: Floats32


def seeds(split: str, count: int, seed: int = 0) -> range:
    """Incident seeds of ``split``; training runs with different ``seed`` share none."""
    start = (seed * len(SPLIT_OFFSETS) + SPLIT_OFFSETS[split] + 1) * SPLIT_ROOM
    return range(start, start + count)


def edge_labels(simulated: SimulatedIncident) -> Floats32:
    """Whether the anomaly crossed each edge: 1 on the true path, else the share of the deviation that it carried."""
    graph = simulated.panel.graph
    count = len(graph.callers)
    labels = np.zeros(2 * count, dtype=np.float32)
    if simulated.cause < 0:
        return labels
    labels[:count] = np.where(simulated.flow > 0.15, simulated.flow, 0.0)
    path = set(simulated.path)
    for k, (caller, callee) in enumerate(zip(graph.callers.tolist(), graph.callees.tolist(), strict=True)):
        if (callee, caller) in path:
            labels[k] = 1.0
        if (caller, callee) in path:
            labels[count + k] = 1.0
    return labels


def to_example(seed: int, simulated: SimulatedIncident) -> Example:
    """Features and labels of one simulated incident."""
    features = extract(simulated.panel)
    return Example(
        seed=seed,
        node=features.node,
        edge=features.edge,
        edge_index=features.edge_index,
        victim=simulated.panel.victim,
        cause=simulated.cause,
        mechanism=-1 if simulated.mechanism is None else MECHANISMS.index(simulated.mechanism),
        crossed=edge_labels(simulated),
    )


def _make(seed: int) -> Example:
    return to_example(seed, sample_incident(seed))


def _make_chunk(chunk: Sequence[int]) -> list[Example]:
    return [_make(seed) for seed in chunk]


def generate(wanted: Sequence[int], workers: int) -> Iterator[list[Example]]:
    """Make the incidents of ``wanted`` seeds in order, a chunk at a time, on ``workers`` processes."""
    chunks = _chunks(wanted, 64)
    if workers <= 1:
        yield from map(_make_chunk, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(_make_chunk, chunks)


def _chunks(items: Sequence[int], size: int) -> list[list[int]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
