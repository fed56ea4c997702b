"""Helper that applies the caps and keeps count of what they cost."""

from __future__ import annotations

from collections.abc import Mapping

from exporters.families import Family, Labels, capped_sum, capped_top, family


class FamilyBuilder:
    """Collects families for one poll; ``dropped`` counts the samples past a cap, by family."""

    def __init__(self, caps: Mapping[str, int] | None = None) -> None:
        self._caps = caps or {}
        self.families: list[Family] = []
        self.dropped: dict[str, int] = {}

    def sum(self, name: str, samples: Mapping[Labels, float]) -> None:
        """Add a family whose samples past the cap are summed in the overflow series."""
        self._add(name, *capped_sum(name, samples, self._caps.get(name)))

    def top(self, name: str, samples: Mapping[Labels, float]) -> None:
        """Add a family whose samples past the cap are left out, smallest first."""
        self._add(name, *capped_top(name, samples, self._caps.get(name)))

    def plain(self, name: str, samples: Mapping[Labels, float]) -> None:
        """Add a family whose size is bounded by its labels."""
        self._add(name, family(name, samples), 0)

    def _add(self, name: str, item: Family, dropped: int) -> None:
        if len(item):
            self.families.append(item)
        if dropped:
            self.dropped[name] = self.dropped.get(name, 0) + dropped
