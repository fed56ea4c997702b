"""Collectors: turn snapshots into the metric families of the catalogue, within their caps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from exporters.collectors.devices import DeviceCollector, device_families
from exporters.families import Family, to_client

if TYPE_CHECKING:
    from prometheus_client.core import Metric as ClientMetric

    from exporters.collectors.cluster import ClusterCollector


def __getattr__(name: str) -> object:
    # numpy and the detectors are not for the exporter on every GPU node.
    if name == "ClusterCollector":
        from exporters.collectors.cluster import ClusterCollector

        return ClusterCollector
    raise AttributeError(name)


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


__all__ = ["ClientCollector", "ClusterCollector", "DeviceCollector", "device_families"]
