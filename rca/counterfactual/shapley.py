"""Shapley shares of a few joint causes, exactly."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import factorial


def shapley(players: int, worth: Callable[[frozenset[int]], float]) -> list[float]:
    """Return each player's Shapley value of the game ``worth`` (Shapley, 1953).

    The values add up to ``worth(all) - worth(none)``. Cost is 2^players evaluations, so keep players below ten.
    """
    cache: dict[frozenset[int], float] = {}

    def value(coalition: frozenset[int]) -> float:
        if coalition not in cache:
            cache[coalition] = worth(coalition)
        return cache[coalition]

    shares = []
    for player in range(players):
        others = [other for other in range(players) if other != player]
        total = 0.0
        for size in range(players):
            weight = factorial(size) * factorial(players - size - 1) / factorial(players)
            for chosen in combinations(others, size):
                before = frozenset(chosen)
                total += weight * (value(before | {player}) - value(before))
        shares.append(total)
    return shares
