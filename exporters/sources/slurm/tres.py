"""Trackable and generic resources of Slurm in all their spellings.

Generic resources (GRES): ``gpu:4``, ``gpu:a100:4(S:0-1)``, ``gpu:a100:3(IDX:0,2-3)``, ``gpu:h100:0(IDX:N/A)``,
``gpu:(null):2(IDX:0-1)``, ``gres:gpu:2`` (22.05), ``gres/gpu:a100:2`` (later), ``gres/gpu=2``, ``(null)``, and lists.
Trackable resources (TRES): ``cpu=8,mem=64G,node=1,billing=8,gres/gpu=4,gres/gpu:a100=4``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from exporters.errors import InvalidInputError
from exporters.sources.slurm.hostlist import task_ids

_NONE: Final = frozenset({"", "(null)", "N/A", "n/a", "none", "None"})
_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)\Z", re.IGNORECASE)
_SCALE: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_MIG: Final = re.compile(r"(?:^|_)(\d+c\.)?(\d+g\.\d+gb(?:\+\w+)*)\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gres:
    """One generic resource. ``kind`` is its type (empty: any); ``indices`` are those in use, None when not given."""

    name: str
    kind: str
    count: int
    indices: tuple[int, ...] | None = None

    @property
    def mig_profile(self) -> str:
        """The MIG profile that the type names, such as ``1g.10gb``; empty when it is a whole GPU."""
        found = _MIG.search(self.kind)
        return found[2].lower() if found else ""


def parse_gres(text: str | None) -> tuple[Gres, ...]:
    """Parse a list of generic resources.

    Raises:
        InvalidInputError: a count or an index is not a number.
    """
    if text is None or text in _NONE:
        return ()
    return tuple(_gres(item, text) for item in _split(text) if item not in _NONE)


def _gres(item: str, whole: str) -> Gres:
    body, indices = _notes(item)
    body = re.sub(r"^gres[:/]", "", body).replace("=", ":")
    name, *rest = body.split(":")
    rest = [part for part in rest if part != "no_consume"]
    count = 1
    if rest and _COUNT.match(rest[-1]):
        count = amount(rest.pop(), whole)
    if len(rest) > 1:
        raise InvalidInputError(f"{whole[:80]!r} is not a list of resources", cure="report this Slurm version")
    kind = rest[0] if rest and rest[0] not in _NONE else ""
    if indices == "N/A":
        found: tuple[int, ...] | None = ()
    else:
        found = None if indices is None else tuple(n for part in task_ids(indices)[0] for n in part)
    return Gres(name, kind, count, found)


def _notes(item: str) -> tuple[str, str | None]:
    """Take off ``(S:0-1)``, ``(IDX:0,2-3)`` and a shard's ``(0/4,3/4)``, but not the ``(null)`` of a missing type."""
    found = re.search(r"\(IDX:([^()]*)\)", item)
    return re.sub(r"\((?!null\))[^()]*\)", "", item), found[1] if found else None


def _split(text: str) -> Iterator[str]:
    """Split at commas outside of parentheses."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()


def parse_tres(text: str | None) -> dict[str, int]:
    """Parse trackable resources to a number by name; ``mem`` in bytes.

    Raises:
        InvalidInputError: an item is not ``name=amount``.
    """
    found: dict[str, int] = {}
    if text is None or text in _NONE:
        return found
    for item in text.split(","):
        name, equals, value = item.strip().rpartition("=")
        if not equals:
            raise InvalidInputError(f"{text[:80]!r} is not a list of resources", cure="report this Slurm version")
        # Memory without a unit is MiB.
        found[name] = amount(value if name != "mem" or not value[-1:].isdigit() else value + "M", text)
    return found


def amount(text: str, whole: str = "") -> int:
    """Parse ``64G``, ``1280.50G``, ``1000M``, ``8`` to a number.

    Raises:
        InvalidInputError: not a number.
    """
    found = _COUNT.match(text.strip())
    if found is None:
        raise InvalidInputError(f"{(whole or text)[:80]!r}: {text[:40]!r} is not an amount", cure="report this version")
    return round(float(found[1]) * _SCALE[found[2].upper()])


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a list of generic resources: whole ones, MIG instances by profile, and names of what is neither."""

    count: int = 0
    models: tuple[str, ...] = ()
    mig: tuple[tuple[str, int], ...] = ()
    others: tuple[str, ...] = ()


def gpus_of(items: Sequence[Gres]) -> Gpus:
    """Sum what a list of generic resources says about GPUs."""
    count = 0
    models: list[str] = []
    mig: dict[str, int] = {}
    others: list[str] = []
    for item in items:
        if item.name != "gpu":
            if item.count and item.name not in others:
                others.append(item.name)
        elif item.mig_profile:
            mig[item.mig_profile] = mig.get(item.mig_profile, 0) + item.count
        else:
            count += item.count
            if item.kind and item.count and item.kind not in models:
                models.append(item.kind)
    return Gpus(count, tuple(models), tuple(mig.items()), tuple(others))


def gpus_of_tres(tres: Mapping[str, int]) -> Gpus | None:
    """Return the GPUs among trackable resources; None when they do not track GPUs.

    ``gres/gpu`` is the sum of the typed entries beside it, where both are tracked.
    """
    typed = [Gres("gpu", name.partition(":")[2], count) for name, count in tres.items() if name.startswith("gres/gpu:")]
    total = tres.get("gres/gpu")
    if total is None and not typed:
        return None
    found = gpus_of(typed)
    in_mig = sum(number for _, number in found.mig)
    whole = found.count if total is None else max(0, total - in_mig)
    return Gpus(whole, found.models, found.mig)
