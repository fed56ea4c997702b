"""Collectors: turn snapshots into the metric families of the catalogue, within their caps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from exporters.collectors.cluster import ClusterCollector
from exporters.collectors.devices import device_families
from exporters.families import Family, to_client

if TYPE_CHECKING:
    from prometheus_client.core import Metric as ClientMetric


class ClientCollector:
    """A custom collector for a prometheus_client registry: builds the families anew for each scrape.

    Args:
        families: Returns the families to expose, such as `ClusterCollector.families`.
    """

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterator[ClientMetric]:
        """Yield each family in the client's type."""
        return map(to_client, self._families())

    def describe(self) -> list[ClientMetric]:
        """Return nothing, so that registering does not run a collection."""
        return []


__all__ = ["ClientCollector", "ClusterCollector", "device_families"]
