"""The most probable way of an anomaly from a cause to the victim (spec R2)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from rca.graph import RELATIONS, CallGraph, Floats

#: An edge is never impossible: the network can be wrong about one hop.
_LEAST = 1e-6


@dataclass(frozen=True)
class Step:
    """One hop between node indices, over edge ``edge``; ``upward`` when the effect went from callee to caller."""

    source: int
    target: int
    edge: int
    upward: bool
    probability: float


def most_probable_path(graph: CallGraph, crossed: Floats, cause: int, victim: int) -> tuple[Step, ...]:
    """Dijkstra over -log(probability); ties go to fewer hops, then to lower node and edge numbers.

    Args:
        crossed: probability that the anomaly crossed each edge, [2E]: effect first, load second.

    Returns:
        The steps in order; empty when cause and victim are the same or not joined.
    """
    count = len(graph.callers)
    cost = -np.log(np.clip(crossed, _LEAST, 1.0))
    leaving: dict[int, list[tuple[int, int]]] = {}
    for k in range(count):
        caller, callee = int(graph.callers[k]), int(graph.callees[k])
        leaving.setdefault(callee, []).append((caller, k))
        leaving.setdefault(caller, []).append((callee, count + k))
    best: dict[int, tuple[float, int]] = {cause: (0.0, 0)}
    via: dict[int, tuple[int, int]] = {}
    done: set[int] = set()
    heap: list[tuple[float, int, int]] = [(0.0, 0, cause)]
    while heap:
        distance, hops, node = heapq.heappop(heap)
        if node in done:
            continue
        done.add(node)
        if node == victim:
            break
        for target, edge in leaving.get(node, ()):
            if target in done:
                continue
            offer = (distance + float(cost[edge]), hops + 1)
            if target not in best or offer < best[target]:
                best[target] = offer
                via[target] = (node, edge)
                heapq.heappush(heap, (*offer, target))
    if victim not in done or victim == cause:
        return ()
    steps: list[Step] = []
    node = victim
    while node != cause:
        source, edge = via[node]
        steps.append(
            Step(
                source=source,
                target=node,
                edge=edge % count,
                upward=edge < count,
                probability=float(crossed[edge]),
            )
        )
        node = source
    return tuple(reversed(steps))


def relation_of(graph: CallGraph, step: Step) -> str:
    """Name of the dependency that a step went over."""
    return RELATIONS[int(graph.relations[step.edge])].value
