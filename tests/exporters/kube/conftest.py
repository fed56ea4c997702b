"""A fake API server, and sources that watch it; see `kube_api`, `kube_objects` and `kube_source`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kube_api import FakeKubernetes

pytest.importorskip("kubernetes")

from kube_source import QUICK, Watch, client_of
from kubernetes.client import ApiClient

from exporters.sources.kubernetes import KubernetesSource


@pytest.fixture
def api() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as server:
        yield server


@pytest.fixture
def client(api: FakeKubernetes) -> Iterator[ApiClient]:
    made = client_of(api)
    yield made
    made.rest_client.pool_manager.clear()


@pytest.fixture
def watch(api: FakeKubernetes) -> Iterator[Watch]:
    """Return a function that starts a source on the fake server; they are closed afterwards."""
    made: list[KubernetesSource] = []

    def start(**options: Any) -> KubernetesSource:
        options = {"timing": QUICK, "rediscover_seconds": 0.05, **options}
        made.append(KubernetesSource(client_of(api), cluster="test", **options))
        return made[-1]

    yield start
    for source in made:
        source.close()
        assert all(item.join(5.0) for item in source.reflectors.values()), "a thread outlived its source"
