"""Held-out simulated incidents: seeds far from those that training draws."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import Case
from rca.simulation.incidents import SimulatedIncident, sample_incident

#: Training and validation use seeds below this.
FIRST_SEED = 1_000_000_000
COUNT = 100


def draw(count: int, *, normal: float = 0.0, first: int = FIRST_SEED) -> Iterator[SimulatedIncident]:
    """Draw ``count`` held-out incidents; ``normal`` is the share in which nothing broke."""
    for number in range(count):
        yield sample_incident(first + number, normal=normal)


def _case(drawn: SimulatedIncident, group: str) -> Case:
    bundle = drawn.incident
    truth = bundle.truth.causes if bundle.truth is not None else ()
    return Case(drawn.id, "simulated", "held-out", group, bundle.replace(truth=None), truth)


def incidents(count: int = COUNT) -> Iterator[Case]:
    """Yield ``count`` incidents with a fault, grouped by its mechanism."""
    for drawn in draw(count):
        yield _case(drawn, "none" if drawn.mechanism is None else drawn.mechanism.value)


def quiet(count: int = 50) -> Iterator[Case]:
    """Yield ``count`` windows in which nothing broke."""
    for drawn in draw(count, normal=1.0, first=FIRST_SEED + 500_000_000):
        yield _case(drawn, "quiet")
