"""How scattered the free memory, or the free MIG slices, of one GPU are (M1); no numpy, for the exporter on a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporters.model import AllocatorState, Device


@dataclass(frozen=True, slots=True)
class Contiguity:
    """How scattered free space is. All in the same unit (bytes, slices); ``free`` is more than 0.

    ``index`` is the published definition, 1 - largest / total, which nears 1 on any full device; ``ratio`` is external
    fragmentation, 1 - largest / free, 0 when all that is free lies together.
    """

    largest: float
    free: float
    total: float

    @property
    def index(self) -> float:
        """1 - largest free block / total."""
        return 1.0 - self.largest / self.total

    @property
    def ratio(self) -> float:
        """1 - largest free block / free."""
        return 1.0 - self.largest / self.free


def allocator_contiguity(states: Sequence[AllocatorState]) -> Contiguity | None:
    """Return the contiguity of the caching allocators on one device, taken together; None when nothing is free."""
    free = sum(state.free_bytes for state in states)
    total = sum(state.reserved_bytes for state in states)
    if free <= 0 or total <= 0:
        return None
    largest = max(state.largest_free_bytes for state in states)
    return Contiguity(float(min(largest, free)), float(free), float(max(total, free)))


def mig_contiguity(device: Device) -> Contiguity | None:
    """Return the contiguity of a MIG device's memory slices; None when none is free or a placement is not known."""
    total = device.mig_slices
    if not device.mig_enabled or not total:
        return None
    taken = [False] * total
    for instance in device.mig_instances:
        if instance.start is None or instance.size is None:
            return None
        for at in range(instance.start, min(total, instance.start + instance.size)):
            taken[at] = True
    runs = [0]
    for used in taken:
        if used:
            runs.append(0)
        else:
            runs[-1] += 1
    free = taken.count(False)
    return Contiguity(float(max(runs)), float(free), float(total)) if free else None
