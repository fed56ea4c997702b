"""List and watch: pages, bookmarks, lost history, refusals, broken and silent connections, and being shut down."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kube_api import KUEUE, FakeKubernetes, Resource
from kube_objects import kueue_workload, node, pod, preempted, priority_class
from kube_source import QUICK, Watch, client_of, eventually, live, settle

from exporters.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from exporters.model import Unread
from exporters.sources.kubernetes import KubernetesSource, connect


def unread(snapshot: Any) -> dict[str, str]:
    return {item.what: item.why for item in snapshot.unread}


# --- list


def test_a_long_list_is_read_in_pages(api: FakeKubernetes, watch: Watch) -> None:
    for number in range(25):
        api.create("pods", pod(f"p{number:02}"))
    source = watch(page_size=10)
    assert len(live(settle(source, api))) == 25
    assert api.lists("pods") == 3
    assert all(
        query["limit"] == "10" for path, query in api.requests if path == "/api/v1/pods" and "watch" not in query
    )


def test_history_lost_between_pages_means_one_list_without_pages(api: FakeKubernetes, watch: Watch) -> None:
    for number in range(25):
        api.create("pods", pod(f"p{number:02}"))
    original = api.list

    def forgetful(resource: Resource, namespace: str, query: dict[str, str]) -> Any:
        if "continue" in query:
            api.compact()
        return original(resource, namespace, query)

    api.list = forgetful  # type: ignore[method-assign]
    source = watch(page_size=10)
    assert len(live(settle(source, api))) == 25
    lists = [query for path, query in api.requests if path == "/api/v1/pods" and "watch" not in query]
    assert ["limit" in query for query in lists] == [True, True, False]


def test_the_cache_shows_the_old_state_until_a_new_list_is_complete(api: FakeKubernetes, watch: Watch) -> None:
    api.create("pods", pod("a"))
    source = watch()
    settle(source, api)
    api.faults.slow["pods"] = 0.3
    api.update("pods", "a", lambda item: item)
    api.compact()
    api.cut()
    eventually(lambda: api.lists("pods") == 2)
    assert set(live(source.poll())) == {"a"}
    settle(source, api)


# --- watch


def test_a_watch_goes_on_from_the_last_bookmark(api: FakeKubernetes, watch: Watch) -> None:
    source = watch()
    settle(source, api)
    # Changes of nodes do not reach the watch of pods, but its bookmarks tell how far it is.
    api.create("nodes", node())
    version = api.version
    eventually(lambda: source.reflectors["pods"].version == str(version))
    api.compact()
    api.cut()
    api.create("pods", pod("a"))
    assert set(live(settle(source, api))) == {"a"}
    assert api.lists("pods") == 1, "the bookmark saved a list"


def test_events_arrive_in_pieces_and_several_at_once(api: FakeKubernetes, watch: Watch) -> None:
    source = watch()
    settle(source, api)
    for batch in range(5):
        with api.changed:  # one answer with three events, cut in the middle of the second
            for number in range(3):
                api.create("pods", pod(f"p{batch}-{number}"))
        settle(source, api)
    assert len(live(source.poll())) == 15
    assert source.reflectors["pods"].failures == 0


@pytest.mark.parametrize("as_status", [False, True])
def test_lost_history_means_a_new_list(api: FakeKubernetes, watch: Watch, as_status: bool) -> None:
    api.faults.gone_as_status = as_status
    api.bookmark_seconds = 60.0
    api.create("pods", pod("stays"))
    api.create("pods", pod("goes"))
    source = watch()
    eventually(lambda: source.ready() and api.watches("pods") == 1)
    api.stop()
    api.delete("pods", "goes")
    api.create("pods", pod("comes"))
    api.compact()
    api.start()
    eventually(lambda: set(live(source.poll())) == {"stays", "comes"})
    assert source.reflectors["pods"].lists == 2
    assert source.poll().unread == ()


@pytest.mark.parametrize("kind", ["list", "watch"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_server_errors_are_retried(api: FakeKubernetes, watch: Watch, kind: str, status: int) -> None:
    api.create("pods", pod("a"))
    if kind == "list":
        api.fail_next("pods", status, status)
        source = watch()
    else:
        source = watch()
        settle(source, api)
        api.fail_next("pods", status, status)
        api.cut()
        eventually(lambda: not api.faults.statuses["pods"])
    api.create("pods", pod("b"))
    assert set(live(settle(source, api))) == {"a", "b"}
    assert source.reflectors["pods"].failures >= 2
    assert source.reflectors["pods"].problem is None


def test_retry_after_is_kept(api: FakeKubernetes, watch: Watch) -> None:
    api.fail_next("pods", 429, retry_after="60")
    timing = dataclasses.replace(QUICK, max_backoff=0.5)
    source = watch(timing=timing)
    began = time.monotonic()
    eventually(source.reflectors["pods"].synced.is_set)
    assert 0.45 < time.monotonic() - began < 10.0, "a minute was asked for, half a second is the most"


def test_delays_grow_and_vary(api: FakeKubernetes, watch: Watch) -> None:
    source = watch(timing=dataclasses.replace(QUICK, backoff=0.5, max_backoff=60.0))
    reflector = source.reflectors["pods"]
    for attempt, most in ((1, 0.5), (2, 1.0), (5, 8.0), (50, 60.0)):
        delays = {reflector._backoff(attempt) for _ in range(50)}
        assert most / 2 <= min(delays) < max(delays) <= most
        assert len(delays) > 10


def test_a_server_that_forgets_at_once_is_not_hammered(api: FakeKubernetes, watch: Watch) -> None:
    # Every list works and every watch is gone at once: without a delay this would be hundreds of lists.
    gone = b'{"type":"ERROR","object":{"code":410,"reason":"Expired","message":"too old"}}\n'
    api.watch = lambda *_: iter([gone])  # type: ignore[method-assign]
    source = watch()
    time.sleep(0.5)
    assert 3 <= source.reflectors["pods"].lists <= 20


@pytest.mark.parametrize(
    "garbage",
    [
        b'{"type":"MODIFIED","object":{"metada',
        b"<html>proxy error</html>\n",
        b'{"type":"ERROR","object":{"code":500,"reason":"InternalError","message":"etcdserver: leader changed"}}\n',
        b'{"type":"SOMETHING","object":{"metadata":{}}}\n',
        b'{"type":"MODIFIED","object":[]}\n',
        b"\n\n",
    ],
)
def test_garbage_in_a_watch_does_no_harm(api: FakeKubernetes, watch: Watch, garbage: bytes) -> None:
    source = watch()
    settle(source, api)
    api.faults.garbage["pods"] = garbage
    api.create("pods", pod("a"))
    eventually(lambda: "pods" not in api.faults.garbage)
    api.cut()
    api.create("pods", pod("b"))
    assert set(live(settle(source, api))) == {"a", "b"}


def test_a_connection_that_died_silently_is_replaced(api: FakeKubernetes, watch: Watch) -> None:
    source = watch(timing=dataclasses.replace(QUICK, idle=0.2))
    settle(source, api)
    api.faults.silent = True
    api.create("pods", pod("a"))
    time.sleep(0.1)
    assert live(source.poll()) == {}
    before = api.watches("pods")
    eventually(lambda: api.watches("pods") > before)
    api.faults.silent = False
    assert set(live(settle(source, api))) == {"a"}
    assert source.reflectors["pods"].failures == 0, "silence is no error"


def test_the_server_ends_watches_and_they_go_on(api: FakeKubernetes, watch: Watch) -> None:
    source = watch(timing=dataclasses.replace(QUICK, watch=1.0))
    settle(source, api)
    eventually(lambda: api.watches("pods") >= 2)
    api.create("pods", pod("a"))
    assert set(live(settle(source, api))) == {"a"}
    assert api.lists("pods") == 1
    seconds = {query["timeoutSeconds"] for path, query in api.requests if "watch" in query}
    assert seconds <= {"1", "2"}


def test_a_pod_that_came_back_under_its_name_is_another(api: FakeKubernetes, watch: Watch) -> None:
    api.create("pods", pod("web-0", meta={"uid": "first"}))
    source = watch()
    settle(source, api)
    api.delete("pods", "web-0")
    api.create("pods", pod("web-0", meta={"uid": "second"}))
    assert live(settle(source, api))["web-0"].id == "second"


# --- what cannot be read


def test_one_resource_that_is_forbidden_does_not_hold_up_the_others(api: FakeKubernetes, watch: Watch) -> None:
    api.faults.forbidden |= {"nodes", "events", "priorityclasses"}
    api.create("pods", pod("a", gpus=1, priority=0))
    source = watch()
    assert source.ready(5.0)
    eventually(lambda: live(source.poll()))
    snapshot = source.poll()
    assert set(live(snapshot)) == {"a"}
    assert snapshot.lacks("nodes")
    assert snapshot.lacks("events")
    assert not snapshot.lacks("workloads")
    why = unread(snapshot)
    assert 'cannot list resource "nodes"' in why["nodes"]
    assert why["nodes"].startswith("HTTP 403: nodes is forbidden")
    assert "priority classes" in why
    # The right is granted later: no restart is needed.
    api.create("nodes", node())
    api.faults.forbidden.clear()
    assert settle(source, api).unread == ()
    assert len(source.poll().nodes) == 1


def test_a_right_that_is_taken_away_counts_at_once(api: FakeKubernetes, watch: Watch) -> None:
    api.create("nodes", node())
    source = watch()
    settle(source, api)
    api.faults.forbidden.add("nodes")
    api.cut()
    eventually(lambda: source.poll().lacks("nodes"))
    assert source.poll().nodes == ()


def test_without_pods_the_use_of_nodes_is_not_known(api: FakeKubernetes, watch: Watch) -> None:
    api.faults.forbidden.add("pods")
    api.create("nodes", node())
    source = watch()
    eventually(lambda: source.poll().nodes)
    snapshot = source.poll()
    assert snapshot.lacks("workloads")
    # What is taken of the node is not known, which is not the same as nothing.
    assert snapshot.nodes[0].gpu_capacity_milli == 4000
    assert snapshot.nodes[0].gpu_allocated_milli is None
    assert snapshot.nodes[0].mig_free is None


def test_an_object_that_is_not_understood_is_named_and_others_are_kept(api: FakeKubernetes, watch: Watch) -> None:
    api.create("pods", pod("good"))
    api.create("pods", pod("bad", meta={"annotations": {"gpu-fraction": "half"}}))
    source = watch()
    snapshot = settle(source, api)
    assert set(live(snapshot)) == {"good"}
    message = "annotation gpu-fraction is 'half', not a share between 0 and 1"
    assert snapshot.unread == (Unread("pod: default/bad", message),)
    api.update("pods", "bad", lambda item: item["metadata"].update(annotations={}))
    snapshot = settle(source, api)
    assert (set(live(snapshot)), snapshot.unread) == ({"good", "bad"}, ())
    api.update("pods", "bad", lambda item: item["spec"].update(priority="high"))
    assert set(live(settle(source, api))) == {"good"}
    api.delete("pods", "bad")
    assert settle(source, api).unread == ()


def test_a_server_that_does_not_answer_is_unreachable(api: FakeKubernetes, watch: Watch) -> None:
    api.stop()
    source = watch()
    assert source.ready(5.0)
    with pytest.raises(SourceUnreachableError, match=r"API server http://127.0.0.1:\d+ cannot be read: .*refused") as e:
        source.poll()
    assert e.value.cure
    api.start()
    api.create("pods", pod("a"))
    assert set(live(settle(source, api))) == {"a"}


def test_bad_credentials_are_said_to_be_so(api: FakeKubernetes, watch: Watch) -> None:
    api.faults.unauthorized = True
    source = watch()
    assert source.ready(5.0)
    with pytest.raises(SourceUnreachableError, match="refuses to list pods and nodes: HTTP 401"):
        source.poll()


def test_a_server_of_another_kind_is_no_empty_cluster(api: FakeKubernetes, watch: Watch) -> None:
    for resource in ("pods", "nodes", "events", "priorityclasses"):
        del api.resources[resource]
    source = watch()
    assert source.ready(5.0)
    with pytest.raises(SourceUnreachableError, match="HTTP 404"):
        source.poll()


def test_a_short_break_keeps_what_was_known_and_a_long_one_does_not(api: FakeKubernetes, watch: Watch) -> None:
    api.create("pods", pod("a"))
    source = watch()
    settle(source, api)
    api.stop()
    eventually(lambda: source.reflectors["pods"].problem)
    assert set(live(source.poll())) == {"a"}
    source._max_age = 0.2

    def given_up() -> bool:
        try:
            snapshot = source.poll()
        except SourceUnreachableError:
            return True
        # Until all have noticed: what is missing is said to be, and never an empty cluster.
        assert snapshot.lacks("workloads") or live(snapshot)
        return False

    eventually(given_up)


def test_the_first_poll_does_not_wait(api: FakeKubernetes, watch: Watch) -> None:
    api.faults.slow = dict.fromkeys(["pods", "nodes", "events", "priorityclasses"], 0.5)
    api.create("pods", pod("a"))
    source = watch()
    began = time.monotonic()
    snapshot = source.poll()
    assert time.monotonic() - began < 0.3
    assert unread(snapshot)["workloads"] == "the first list is not complete"
    assert not source.ready(0.0)
    assert source.ready(10.0)
    assert set(live(settle(source, api))) == {"a"}


# --- custom resources


def test_custom_resources_are_found_when_installed_later_and_forgotten_when_removed(
    api: FakeKubernetes, watch: Watch
) -> None:
    source = watch()
    assert settle(source, api).unread == ()
    api.install(KUEUE)
    api.create("workloads", kueue_workload())
    eventually(lambda: set(live(source.poll())) == {"job-train"})
    api.uninstall(KUEUE)
    eventually(lambda: live(source.poll()) == {})
    assert source.poll().unread == ()


def test_the_newest_version_that_both_know_is_read(api: FakeKubernetes, watch: Watch) -> None:
    api.install(Resource("kueue.x-k8s.io", "v1beta2", "workloads", "Workload"))
    reference = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "prod"}
    api.create("workloads", kueue_workload(spec={"priorityClassRef": reference, "priority": 5}))
    source = watch()
    eventually(lambda: live(source.poll()))
    assert live(source.poll())["job-train"].priority_class == "prod"
    assert any("/v1beta2/workloads" in path for path, _ in api.requests)


def test_custom_resources_that_are_forbidden_are_reported(api: FakeKubernetes, watch: Watch) -> None:
    api.install(KUEUE)
    api.faults.forbidden.add("workloads")
    source = watch()
    assert source.ready(5.0)
    eventually(lambda: "kueue workloads" in unread(source.poll()))
    assert not source.poll().lacks("workloads")


# --- memory and life


def deep_size(item: Any) -> int:
    """Bytes of a record and all that only it holds (interned text and empty constants are shared)."""
    if isinstance(item, msgspec.Struct):
        return sys.getsizeof(item) + sum(deep_size(getattr(item, name)) for name in item.__struct_fields__)
    if isinstance(item, dict):
        return sys.getsizeof(item) + sum(deep_size(k) + deep_size(v) for k, v in item.items())
    if isinstance(item, tuple):
        return sys.getsizeof(item) + sum(map(deep_size, item))
    return sys.getsizeof(item)


def test_only_what_is_needed_is_kept(api: FakeKubernetes, watch: Watch) -> None:
    big = pod("a", gpus=1)
    big["spec"]["containers"][0]["env"] = [{"name": f"V{i}", "value": "x" * 100} for i in range(500)]
    big["metadata"]["managedFields"] = [{"manager": "kubectl", "fieldsV1": {"f:spec": {"x" * 5000: {}}}}]
    big["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 20000}
    api.create("pods", big)
    source = watch()
    settle(source, api)
    (record,) = source.pods.records()
    assert deep_size(record) < 4096


def test_heartbeats_of_nodes_are_not_changes(api: FakeKubernetes, watch: Watch) -> None:
    api.create("nodes", node())
    source = watch()
    settle(source, api)
    before = source.nodes.generation
    for second in range(5):
        time_ = f"2025-01-01T00:00:0{second}Z"
        api.update("nodes", "n1", lambda item, t=time_: item["status"]["conditions"][0].update(lastHeartbeatTime=t))
    settle(source, api)
    assert source.nodes.generation == before


def test_unchanged_pods_are_converted_once(api: FakeKubernetes, watch: Watch) -> None:
    api.create("pods", pod("a"))
    api.create("pods", pod("b"))
    source = watch()
    first = live(settle(source, api))
    api.update("pods", "b", lambda item: item["metadata"].update(labels={"x": "y"}))
    second = live(settle(source, api))
    assert second["a"] is first["a"]
    assert second["b"].labels == {"x": "y"}


def test_closing_ends_every_thread_at_once(api: FakeKubernetes) -> None:
    source = KubernetesSource(client_of(api), timing=QUICK)
    settle(source, api)
    began = time.monotonic()
    source.close()
    assert time.monotonic() - began < 1.0
    assert all(item.join(0.0) for item in source.reflectors.values())
    with pytest.raises(SourceUnreachableError, match="closed"):
        source.poll()
    source.close()


# --- connecting


def write_config(path: Path, server: str) -> Path:
    path.write_text(
        f"""
apiVersion: v1
kind: Config
current-context: lab
contexts: [{{name: lab, context: {{cluster: lab, user: me}}}}]
clusters: [{{name: lab, cluster: {{server: "{server}"}}}}]
users: [{{name: me, user: {{token: abc}}}}]
""",
        encoding="utf-8",
    )
    return path


def test_connecting_by_kubeconfig(api: FakeKubernetes, tmp_path: Path) -> None:
    api.create("pods", pod("a"))
    with KubernetesSource(connect(write_config(tmp_path / "config", api.url)), timing=QUICK) as source:
        assert set(live(settle(source, api))) == {"a"}


@pytest.mark.parametrize(
    ("content", "context", "error", "message"),
    [
        (None, None, NotFoundError, "does not exist"),
        ("clusters: [", None, InvalidInputError, "is not valid"),
        ("just text", None, InvalidInputError, "kubeconfig"),
        ("", "lab", InvalidInputError, "kubeconfig"),
    ],
)
def test_a_bad_kubeconfig_is_one_clear_error(
    tmp_path: Path, content: str | None, context: str | None, error: type[Exception], message: str
) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(error, match=message) as caught:
        connect(path, context)
    assert "\n" not in str(caught.value)


def test_a_context_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="prod"):
        connect(write_config(tmp_path / "config", "http://127.0.0.1:1"), "prod")


def test_no_configuration_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(NotFoundError, match="no kubeconfig and no service account"):
        connect()


def test_a_service_account_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(NotFoundError, match="service account cannot be read"):
        connect()


def test_events_and_priority_classes_follow_their_watches_too(api: FakeKubernetes, watch: Watch) -> None:
    source = watch(clock=lambda: 1735689600.0 + 700)
    settle(source, api)
    api.create("priorityclasses", priority_class("online", 1000))
    api.create("events", preempted("e1", "a", message="x"))
    assert len(settle(source, api).events) == 1
    api.delete("events", "e1")
    api.delete("priorityclasses", "online", namespace="")
    assert settle(source, api).events == ()
    assert len(source.classes) == 0
