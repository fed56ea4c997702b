"""Policies that differ by where they put a workload; their order is first come, first served.

The scores are those of FGD's published experiments (Weng et al., USENIX ATC 2023), whose simulator rounds them down to
integers from 0 to 100 before ties are broken: ``levels=100``. With ``levels=0`` they stay exact.
"""

from __future__ import annotations

from rca.replay.policies.base import Placement, Policy


class Placing(Policy):
    """First come, first served, with one of the engine's placement rules."""

    def __init__(self, name: str, placement: Placement, levels: int = 0) -> None:
        self.name = name
        self.placement = placement
        self.levels = levels


def random(levels: int = 0) -> Placing:
    """Any node and any GPU that fits, drawn by the identities of workload and node."""
    return Placing("random", Placement.RANDOM, levels)


def dot_product(levels: int = 0) -> Placing:
    """Where demand and free resources are least aligned (after Tetris, as the published simulator scores it)."""
    return Placing("dot-product", Placement.DOT_PRODUCT, levels)


def clustering(levels: int = 0) -> Placing:
    """Workloads of one size class (shares, one GPU, two, ...) together."""
    return Placing("clustering", Placement.CLUSTERING, levels)


def packing(levels: int = 0) -> Placing:
    """Shared GPUs before free ones, used nodes before free ones."""
    return Placing("packing", Placement.PACKING, levels)


def best_fit(levels: int = 0) -> Placing:
    """Where the least is left over, CPU and GPU weighing the same."""
    return Placing("best-fit", Placement.BEST_FIT, levels)


def worst_fit(levels: int = 0) -> Placing:
    """Where the most is left over."""
    return Placing("worst-fit", Placement.WORST_FIT, levels)


def fgd(levels: int = 0) -> Placing:
    """Where the expected fragmentation F rises least (M2)."""
    return Placing("fgd", Placement.FGD, levels)
