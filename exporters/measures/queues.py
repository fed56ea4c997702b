"""Queues: how many wait and run, for how long, holding and asking for how much (V2), and their entropy (M5)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from exporters.measures.entropy import priority_entropy
from exporters.model import Snapshot

#: (queue, priority level)
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Queues:
    """Figures by (queue, priority level); GPUs in milli-GPU, waits in seconds.

    ``states`` adds the state to the key. ``entropy`` is by queue, over the ranks of waiting workloads. ``waits`` holds
    (workload id, service, queue, level) and the wait of every waiting workload.
    """

    states: dict[tuple[str, str, str], int]
    held: dict[Key, int]
    requested: dict[Key, int]
    oldest: dict[Key, float]
    entropy: dict[str, float]
    waits: dict[tuple[str, str, str, str], float]


def measure(snapshot: Snapshot) -> Queues:
    """Measure the queues of one snapshot. A workload whose submit time is not known has no wait."""
    states: dict[tuple[str, str, str], int] = defaultdict(int)
    held: dict[Key, int] = defaultdict(int)
    requested: dict[Key, int] = defaultdict(int)
    oldest: dict[Key, float] = {}
    ranks: dict[str, list[int]] = defaultdict(list)
    waits: dict[tuple[str, str, str, str], float] = {}
    for workload in snapshot.workloads:
        queue, level = workload.queue, workload.level
        key = (queue, level)
        states[(queue, level, workload.state.value)] += 1
        if workload.state.holding:
            held[key] += workload.held_gpu_milli
        elif workload.state.waiting:
            requested[key] += workload.demand.total_gpu_milli
            if workload.rank is not None:
                ranks[queue].append(workload.rank)
            since = workload.waiting_since
            if since is not None:
                wait = max(0.0, snapshot.time - since)
                oldest[key] = max(wait, oldest.get(key, 0.0))
                waits[(workload.id, workload.display_service, queue, level)] = wait
    entropy = {queue: value for queue, items in ranks.items() if (value := priority_entropy(items)) is not None}
    return Queues(dict(states), dict(held), dict(requested), oldest, entropy, waits)
