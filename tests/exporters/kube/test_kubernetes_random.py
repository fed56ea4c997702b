"""Ten thousand random events, with every fault in between: no pod is lost and none is left over."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import time
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kube_api import FakeKubernetes
from kube_objects import node, pod, raw
from kube_source import QUICK, Watch, live, settle

from exporters.model import Snapshot, WorkloadState
from exporters.sources.kubernetes.records import parse_pod
from exporters.sources.kubernetes.stores import MAX_TOMBSTONES, PodStore

EVENTS = 10_000
MAX_PODS = 300


class Model:
    """Applies random changes to the server, and knows what a snapshot must then say."""

    def __init__(self, api: FakeKubernetes, seed: int) -> None:
        self.api = api
        self.random = random.Random(seed)
        self.born = 0

    def change(self) -> None:
        """Add, change, finish or delete one pod."""
        names = [name for _, name in self.api.objects["pods"]]
        what = self.random.random()
        if not names or (what < 0.4 and len(names) < MAX_PODS):
            self.add()
        elif what < 0.6:
            self.api.update("pods", self.random.choice(names), self.schedule)
        elif what < 0.7:
            self.api.update("pods", self.random.choice(names), self.relabel)
        elif what < 0.8:
            self.api.update("pods", self.random.choice(names), self.finish)
        else:
            self.api.delete("pods", self.random.choice(names))

    def add(self) -> None:
        # Names come back, as a StatefulSet's do; UIDs never.
        taken = {name for _, name in self.api.objects["pods"]}
        name = next(n for n in iter(lambda: f"p{self.random.randrange(2 * MAX_PODS)}", None) if n not in taken)
        self.born += 1
        meta = {"uid": f"uid-{self.born}"}
        self.api.create("pods", pod(name, gpus=self.random.randrange(5), meta=meta, priority=self.random.randrange(9)))

    def schedule(self, item: dict[str, Any]) -> None:
        if item["status"]["phase"] == "Pending":
            item["spec"]["nodeName"] = self.random.choice(["n1", "n2"])
            item["status"]["phase"] = "Running"

    def relabel(self, item: dict[str, Any]) -> None:
        item["metadata"]["labels"] = {"step": str(self.api.version)}

    def finish(self, item: dict[str, Any]) -> None:
        item["status"]["phase"] = self.random.choice(["Succeeded", "Failed"])

    def fault(self) -> None:
        """Break something."""
        api = self.api
        match self.random.randrange(8):
            case 0:
                api.cut()
            case 1:
                api.compact()
            case 2:
                api.compact()
                api.cut()
            case 3:
                api.fail_next("pods", self.random.choice([429, 500, 503]), 504)
                api.cut()
            case 4:
                api.faults.garbage["pods"] = b'{"type":"MODIFIED","object":{"metadata":{"na'
                api.cut()
            case 5:
                api.faults.garbage["pods"] = b'{"type":"ERROR","object":{"code":410,"reason":"Expired"}}\n'
            case 6:
                api.faults.gone_as_status = not api.faults.gone_as_status
                api.compact()
                api.cut()
            case 7:
                api.stop()
                api.start()

    def check(self, snapshot: Snapshot) -> None:
        """The snapshot is what the server has: every pod, once, as it is now."""
        expected = {
            item["metadata"]["uid"]: (
                item["metadata"]["name"],
                WorkloadState.RUNNING if item["spec"].get("nodeName") else WorkloadState.PENDING,
                1000 * int(item["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]),
                item["spec"]["priority"],
                item["metadata"].get("labels", {}),
            )
            for item in self.api.objects["pods"].values()
            if item["status"]["phase"] in ("Pending", "Running")
        }
        found = [item for item in snapshot.workloads if not item.state.ended]
        assert len(found) == len({item.id for item in found})
        assert {
            item.id: (item.name, item.state, item.demand.gpu_milli, item.priority, item.labels) for item in found
        } == expected
        held = sum(gpus for _, state, gpus, _, _ in expected.values() if state is WorkloadState.RUNNING)
        assert sum(node.gpu_allocated_milli or 0 for node in snapshot.nodes) == held
        assert snapshot.unread == ()


def test_ten_thousand_random_events(api: FakeKubernetes, watch: Watch) -> None:
    model = Model(api, seed=20250101)
    for name in ("n1", "n2"):
        api.create("nodes", node(name, gpus=8))
    timing = dataclasses.replace(QUICK, backoff=0.002, max_backoff=0.02)
    source = watch(timing=timing, page_size=50, keep_ended_seconds=0.5)
    settle(source, api)
    threads = threading.active_count()
    checks = 0
    for step in range(EVENTS):
        model.change()
        if model.random.random() < 0.01:
            model.fault()
        if model.random.random() < 0.002:
            source.poll()  # in the middle of everything: must not fail
        if model.random.random() < 0.1:
            time.sleep(0.001)  # let the watches in between two changes
        if step % 500 == 499:
            model.check(settle(source, api))
            checks += 1
    assert checks == EVENTS // 500
    reflector = source.reflectors["pods"]
    assert reflector.lists > 10, "lost history was part of it"
    assert reflector.failures > 5, "failures were part of it"

    # No leak: what ended is forgotten after its time, and nothing grows with the number of events.
    time.sleep(0.6)
    model.check(source.poll())
    assert len(source.pods) == len(live(source.poll()))
    assert source.pods.departed() == []
    assert len(source.pods.tombstones()) <= min(MAX_TOMBSTONES, model.born)
    assert len(source._converted) == len(source.pods)
    gc.collect()
    # The server's own threads come and go; the source has one per resource.
    assert threading.active_count() <= threads + 5


Step = st.tuples(st.sampled_from(["put", "end", "remove", "relist", "malformed"]), st.integers(0, 5), st.integers(0, 3))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(Step, max_size=60))
def test_a_store_is_what_the_last_messages_said(steps: list[tuple[str, int, int]]) -> None:
    """Small sequences that hypothesis can shrink: the store against a dictionary."""
    clock = [1000.0]
    store = PodStore(parse_pod, keep_seconds=10.0, clock=lambda: clock[0])
    store.begin().commit()
    model: dict[str, int] = {}
    for what, number, version in steps:
        clock[0] += 1
        uid = f"uid-{number}"
        item = pod(str(number), meta={"uid": uid, "resourceVersion": str(version)}, priority=version)
        match what:
            case "put":
                store.put(raw(item))
                model[uid] = version
            case "end":
                store.put(raw(item | {"status": {"phase": "Succeeded"}}))
                model.pop(uid, None)
            case "remove":
                store.remove(raw(item))
                model.pop(uid, None)
            case "malformed":
                store.put(raw(item | {"spec": {"priority": "high"}}))
                model.pop(uid, None)
            case "relist":
                listing = store.begin()
                model = {uid: version}
                listing.add(raw(item))
                listing.commit()
        assert {record.uid: record.priority for record in store.records()} == model
        assert not {ended.pod.uid for ended in store.departed()} & set(model)
    clock[0] += 11
    assert store.departed() == []
    assert len(store.tombstones()) <= 6
    listing = store.begin()
    listing.commit()
    assert (len(store), store.rejected) == (0, {})
