"""The fake API server keeps the rules that the real one has, as seen through the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kube_api import KUEUE, FakeKubernetes
from kube_objects import kueue_workload, pod
from kubernetes.client import ApiClient, ApiException, ApisApi, CoreV1Api, CustomObjectsApi
from kubernetes.watch import Watch as OfficialWatch


@pytest.fixture
def core(client: ApiClient) -> CoreV1Api:
    return CoreV1Api(client)


def names(answer: Any) -> list[str]:
    return [item.metadata.name for item in answer.items]


def test_pages_show_the_state_of_the_first_page(api: FakeKubernetes, core: CoreV1Api) -> None:
    for name in "abcde":
        api.create("pods", pod(name))
    first = core.list_pod_for_all_namespaces(limit=2)
    api.delete("pods", "c")
    api.create("pods", pod("cc"))
    second = core.list_pod_for_all_namespaces(limit=2, _continue=first.metadata._continue)
    third = core.list_pod_for_all_namespaces(limit=2, _continue=second.metadata._continue)
    assert names(first) + names(second) + names(third) == list("abcde")
    assert third.metadata._continue is None
    assert {page.metadata.resource_version for page in (first, second, third)} == {first.metadata.resource_version}


def test_an_expired_token_is_410_with_a_token_to_go_on_inconsistently(api: FakeKubernetes, core: CoreV1Api) -> None:
    for name in "abc":
        api.create("pods", pod(name))
    first = core.list_pod_for_all_namespaces(limit=1)
    api.compact()
    with pytest.raises(ApiException) as gone:
        core.list_pod_for_all_namespaces(limit=1, _continue=first.metadata._continue)
    assert gone.value.status == 410
    token = json.loads(gone.value.body)["metadata"]["continue"]
    assert names(core.list_pod_for_all_namespaces(_continue=token)) == ["b", "c"]


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        ({"label_selector": "app=a"}, ["p1"]),
        ({"label_selector": "app!=a"}, ["p2", "p3"]),
        ({"label_selector": "app in (a, b),tier"}, ["p1"]),
        ({"label_selector": "app notin (a)"}, ["p2", "p3"]),
        ({"label_selector": "!app"}, ["p3"]),
        ({"field_selector": "spec.nodeName=n1"}, ["p2"]),
        ({"field_selector": "spec.nodeName!=n1,status.phase=Pending"}, ["p1", "p3"]),
        ({"field_selector": "metadata.name==p3"}, ["p3"]),
    ],
)
def test_selectors(api: FakeKubernetes, core: CoreV1Api, selectors: dict[str, str], expected: list[str]) -> None:
    api.create("pods", pod("p1", meta={"labels": {"app": "a", "tier": "x"}}))
    api.create("pods", pod("p2", node="n1", meta={"labels": {"app": "b"}}))
    api.create("pods", pod("p3"))
    assert names(core.list_pod_for_all_namespaces(**selectors)) == expected


def test_a_field_that_cannot_be_selected_is_refused(core: CoreV1Api) -> None:
    with pytest.raises(ApiException) as refused:
        core.list_pod_for_all_namespaces(field_selector="spec.priority=1")
    assert refused.value.status == 400


def test_the_official_watch_sees_changes_through_a_selector(api: FakeKubernetes, core: CoreV1Api) -> None:
    version = core.list_pod_for_all_namespaces().metadata.resource_version
    api.create("pods", pod("a"))
    api.update("pods", "a", lambda item: item["metadata"].update(labels={"app": "x"}))
    api.update("pods", "a", lambda item: item["metadata"].update(labels={"app": "x", "more": "y"}))
    api.update("pods", "a", lambda item: item["metadata"].update(labels={}))
    stream = OfficialWatch().stream(
        core.list_pod_for_all_namespaces, resource_version=version, label_selector="app=x", timeout_seconds=1
    )
    events = [(event["type"], event["object"].metadata.labels) for event in stream]
    # One that stops to match is deleted, and shown as it was.
    more = {"app": "x", "more": "y"}
    assert events == [("ADDED", {"app": "x"}), ("MODIFIED", more), ("DELETED", more)]


def test_a_version_that_is_forgotten_is_gone(api: FakeKubernetes, core: CoreV1Api) -> None:
    version = core.list_pod_for_all_namespaces().metadata.resource_version
    api.create("pods", pod("a"))
    api.compact()
    for as_status in (False, True):
        api.faults.gone_as_status = as_status
        stream = OfficialWatch().stream(core.list_pod_for_all_namespaces, resource_version=version, timeout_seconds=1)
        with pytest.raises(ApiException) as gone:
            next(stream)
        assert gone.value.status == 410


def test_discovery_follows_what_is_installed(api: FakeKubernetes, client: ApiClient) -> None:
    custom = CustomObjectsApi(client)
    assert "kueue.x-k8s.io" not in {group.name for group in ApisApi(client).get_api_versions().groups}
    with pytest.raises(ApiException) as missing:
        custom.list_cluster_custom_object("kueue.x-k8s.io", "v1beta1", "workloads")
    assert missing.value.status == 404
    api.install(KUEUE)
    api.create("workloads", kueue_workload())
    assert "kueue.x-k8s.io" in {group.name for group in ApisApi(client).get_api_versions().groups}
    found = custom.list_cluster_custom_object("kueue.x-k8s.io", "v1beta1", "workloads")
    assert [item["metadata"]["name"] for item in found["items"]] == ["job-train"]
