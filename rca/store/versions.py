"""Version vectors (P10): which updates of a record an update has seen.

A vector counts, for each writer, the updates of that writer that went into a version. ``a`` dominates ``b`` when it has
seen all that ``b`` has, and more. Two versions of which neither dominates were made side by side: that is a conflict.

Source: Parker et al., "Detection of Mutual Inconsistency in Distributed Systems", IEEE TSE 9(3), 1983.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

Vector: TypeAlias = Mapping[str, int]


def advance(vector: Vector, writer: str) -> dict[str, int]:
    """Return the vector of an update that ``writer`` makes to a version with ``vector``."""
    return {**vector, writer: vector.get(writer, 0) + 1}


def dominates(one: Vector, other: Vector) -> bool:
    """Whether ``one`` has seen everything that ``other`` has, and something more."""
    return all(one.get(writer, 0) >= count for writer, count in other.items()) and any(
        count > other.get(writer, 0) for writer, count in one.items()
    )


def same(one: Vector, other: Vector) -> bool:
    """Whether both have seen the same updates."""
    return not dominates(one, other) and not dominates(other, one) and not concurrent(one, other)


def concurrent(one: Vector, other: Vector) -> bool:
    """Whether each has seen an update that the other has not."""
    return any(count > other.get(writer, 0) for writer, count in one.items()) and any(
        count > one.get(writer, 0) for writer, count in other.items()
    )


def merge(one: Vector, other: Vector) -> dict[str, int]:
    """Return the least vector that has seen what either has."""
    return {writer: max(one.get(writer, 0), other.get(writer, 0)) for writer in {*one, *other}}


def encode(vector: Vector) -> str:
    """Write a vector as text; equal vectors give equal text, so that a database can compare them."""
    return msgspec.json.encode({key: count for key, count in vector.items() if count}, order="sorted").decode()


def decode(text: str) -> dict[str, int]:
    """Read what `encode` wrote."""
    return msgspec.json.decode(text, type=dict[str, int])
