"""Running sources on the fake server, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kube_api import FakeKubernetes
from kubernetes.client import ApiClient, Configuration

from exporters.model import Snapshot, Workload
from exporters.sources.kubernetes import KubernetesSource, Timing

#: Short delays, so that what takes minutes in a cluster takes a moment here.
QUICK = Timing(connect=1.0, read=2.0, watch=30.0, idle=5.0, backoff=0.01, max_backoff=0.1, settled=0.5)

Watch = Callable[..., KubernetesSource]


def client_of(server: FakeKubernetes) -> ApiClient:
    configuration = Configuration()
    configuration.host = server.url
    configuration.retries = 0
    return ApiClient(configuration)


def eventually(check: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Return the first true answer of ``check``; fail when it has none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = check()
        if answer:
            return answer
        time.sleep(0.005)
    raise AssertionError("it did not happen in time")


def settle(source: KubernetesSource, server: FakeKubernetes) -> Snapshot:
    """Wait until every watch has caught up with the server, and return a snapshot."""

    def caught_up() -> bool:
        return all(item.absent or int(item.version or 0) >= server.version for item in source.reflectors.values())

    eventually(caught_up, 20.0)
    return source.poll()


def live(snapshot: Snapshot) -> dict[str, Workload]:
    """Return the workloads that have not ended, by name."""
    return {item.name: item for item in snapshot.workloads if not item.state.ended}
