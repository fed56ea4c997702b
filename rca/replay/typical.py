"""The typical tasks by which fragmentation F is measured, as arrays for the kernel.

The definition of F is that of `exporters.measures.fragmentation`; this is the same distribution, grouped by GPU demand
so that one pass over a node's GPUs serves all tasks of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exporters.measures.fragmentation import MAX_TASK_CLASSES, TaskShare
from exporters.model import Demand
from rca.replay.model import WHOLE, Cluster, Floats, Ints, Workloads

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Typical:
    """M tasks in Q groups of equal GPU demand; group q's tasks are ``group_from[q]`` to ``group_from[q + 1]``."""

    group_milli: Ints
    group_count: Ints
    group_models: Ints
    group_from: Ints
    cpu: Ints
    memory: Ints
    share: Floats

    @classmethod
    def none(cls) -> Typical:
        """Return the empty distribution."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing, np.zeros(1, np.int64), nothing, nothing, np.zeros(0))

    def shares(self, cluster: Cluster) -> tuple[TaskShare, ...]:
        """Return the distribution in the form that `exporters.measures.fragmentation` takes."""
        found = []
        for group in range(len(self.group_milli)):
            mask = int(self.group_models[group])
            models = tuple(name for bit, name in enumerate(cluster.models) if mask >> bit & 1)
            for row in range(self.group_from[group], self.group_from[group + 1]):
                demand = Demand(
                    gpu_milli=int(self.group_milli[group] * self.group_count[group]),
                    gpu_models=models,
                    cpu_milli=int(self.cpu[row]),
                    memory_bytes=int(self.memory[row]) * _MIB,
                )
                found.append(TaskShare(demand, float(self.share[row])))
        return tuple(found)


def typical_tasks(
    work: Workloads, *, cover: float = 1.0, memory: bool = True, limit: int = MAX_TASK_CLASSES
) -> Typical:
    """Count the demands of ``work``, most frequent first, until ``cover`` of all workloads or ``limit`` demands.

    FGD's published experiments cover 0.95 and leave memory out. Ties go to the larger demand, by CPU, share, GPUs.
    """
    plain = work.mig < 0
    columns = np.stack(
        [
            work.cpu_milli[plain],
            work.gpu_milli[plain],
            work.gpu_count[plain],
            work.models[plain],
            work.memory_mib[plain] if memory else np.zeros(plain.sum(), np.int64),
        ],
        axis=1,
    )
    if len(columns) == 0:
        return Typical.none()
    demands, counts = np.unique(columns, axis=0, return_counts=True)
    # np.unique sorts ascending by column, so that the reversed rows have the larger demand first.
    order = np.argsort(-counts[::-1], kind="stable")
    demands, counts = demands[::-1][order], counts[::-1][order]
    kept = min(limit, int(np.searchsorted(np.cumsum(counts), cover * counts.sum() - 1e-9)) + 1)
    demands, counts = demands[:kept], counts[:kept]
    order = np.lexsort((demands[:, 4], demands[:, 0], demands[:, 3], demands[:, 2], demands[:, 1]))
    demands, share = demands[order], counts[order] / counts.sum()
    keys = demands[:, 1:4]
    first = np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)])
    starts = np.flatnonzero(first)
    # A demand over WHOLE per device does not exist; a share of several devices keeps its share.
    return Typical(
        group_milli=np.minimum(keys[starts, 0], WHOLE),
        group_count=keys[starts, 1],
        group_models=keys[starts, 2],
        group_from=np.append(starts, len(demands)).astype(np.int64),
        cpu=demands[:, 0].copy(),
        memory=demands[:, 4].copy(),
        share=share,
    )
