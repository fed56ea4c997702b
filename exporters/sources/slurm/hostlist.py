"""Slurm's short form of host names: ``gpu[1-2,5],rack[01-02]n[1-4]``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from exporters.errors import InvalidInputError

#: More names than any cluster has; a longer list is damaged, or an attack.
MAX_HOSTS: Final = 1 << 20

_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?\Z")


def expand(text: str) -> list[str]:
    """Return the host names of ``text``, in order; leading zeros are kept. Empty and ``(null)`` give none.

    Raises:
        InvalidInputError: brackets do not match, a range is not one, or there are more than `MAX_HOSTS` names.
    """
    if text in ("", "(null)", "None", "N/A", "None assigned"):
        return []
    hosts: list[str] = []
    for item in _split(text, text):
        hosts.extend(_expand_one(item, text, MAX_HOSTS - len(hosts)))
    return hosts


def _split(text: str, whole: str) -> Iterator[str]:
    """Split at commas outside of brackets."""
    depth = start = 0
    for at, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            if at > start:
                yield text[start:at]
            start = at + 1
        if depth not in (0, 1):
            raise _damaged(whole)
    if depth:
        raise _damaged(whole)
    if start < len(text):
        yield text[start:]


def _expand_one(item: str, whole: str, room: int) -> list[str]:
    names = [""]
    rest = item
    while rest:
        before, bracket, after = rest.partition("[")
        names = [name + before for name in names]
        if not bracket:
            break
        inside, _, rest = after.partition("]")
        numbers = list(_numbers(inside, whole, room // len(names)))
        names = [name + number for name in names for number in numbers]
    if len(names) > room:
        raise _damaged(whole)
    return names


def _numbers(inside: str, whole: str, room: int) -> Iterator[str]:
    count = 0
    for part in inside.split(","):
        found = _RANGE.match(part)
        if found is None:
            raise _damaged(whole)
        first, last, step = found[1], found[2] or found[1], int(found[3] or 1)
        if step == 0 or int(last) < int(first):
            raise _damaged(whole)
        values = range(int(first), int(last) + 1, step)
        count += len(values)
        if count > room:
            raise _damaged(whole)
        for value in values:
            yield str(value).zfill(len(first))


def task_ids(text: str) -> tuple[list[range], int | None, bool]:
    """Parse the tasks of an array, such as ``1-10%2``, ``0-15:4,20`` or ``[7-8%1]``.

    Returns:
        The ranges of tasks, how many may run at once (None: no limit), and whether Slurm cut the text off (``…``).

    Raises:
        InvalidInputError: not the tasks of an array.
    """
    body, _, limit = text.strip().removeprefix("[").removesuffix("]").partition("%")
    cut = body.endswith("...")
    ranges = []
    for part in body.removesuffix("...").split(","):
        if not part:
            continue
        found = _RANGE.match(part)
        if found is None or int(found[3] or 1) == 0:
            if cut:
                # The last range may have been cut in its middle.
                continue
            raise InvalidInputError(f"{text[:80]!r} is not the tasks of a job array", cure="report this Slurm version")
        ranges.append(range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1)))
    return ranges, int(limit) if limit.isdigit() else None, cut


def _damaged(text: str) -> InvalidInputError:
    return InvalidInputError(f"{text[:80]!r} is not a host list", cure="report this Slurm version")
