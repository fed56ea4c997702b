"""API objects for tests, as short as the tests need them."""

from __future__ import annotations

import json
from typing import Any

Object = dict[str, Any]

CREATED = "2025-01-01T00:00:00Z"
CREATED_AT = 1735689600.0


def container(limits: Object | None = None, requests: Object | None = None, **fields: Any) -> Object:
    return {"name": "main", "resources": {"limits": limits or {}, "requests": requests or {}}, **fields}


def pod(
    name: str = "train",
    *,
    gpus: int | None = None,
    node: str = "",
    phase: str = "",
    meta: Object | None = None,
    containers: list[Object] | None = None,
    conditions: list[Object] | None = None,
    **spec: Any,
) -> Object:
    limits = {} if gpus is None else {"nvidia.com/gpu": str(gpus)}
    if node:
        spec["nodeName"] = node
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2025-01-01T00:01:00Z"}
        conditions = [scheduled, *(conditions or [])]
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "creationTimestamp": CREATED}
        | (meta or {}),
        "spec": {"containers": [container(limits)] if containers is None else containers, **spec},
        "status": {"phase": phase or ("Running" if node else "Pending"), "conditions": conditions or []},
    }


def node(name: str = "n1", *, gpus: int = 4, labels: Object | None = None, **fields: Any) -> Object:
    allocatable = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": str(gpus)} | fields.pop("allocatable", {})
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": CREATED}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels or {}} | fields.pop("meta", {}),
        "spec": fields.pop("spec", {}),
        "status": {"allocatable": allocatable, "conditions": fields.pop("conditions", [ready])},
    }


def priority_class(name: str, value: int, **fields: Any) -> Object:
    return {"metadata": {"name": name}, "value": value, **fields}


def preempted(name: str, victim: str, *, message: str, related: Object | None = None, **fields: Any) -> Object:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "reason": "Preempted",
        "type": "Normal",
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": victim, "uid": f"uid-{victim}"},
        "related": related,
        "message": message,
        "eventTime": fields.pop("time", "2025-01-01T00:10:00.123456Z"),
        **fields,
    }


def kueue_workload(
    name: str = "job-train", *, gpus: int = 1, count: int = 1, meta: Object | None = None, **fields: Any
) -> Object:
    spec = {"containers": [container({"nvidia.com/gpu": str(gpus)})]}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "creationTimestamp": CREATED}
        | (meta or {}),
        "spec": {"queueName": "research", "podSets": [{"name": "main", "count": count, "template": {"spec": spec}}]}
        | fields.pop("spec", {}),
        "status": {"conditions": fields.pop("conditions", [])} | fields.pop("status", {}),
    }


def pod_group(name: str = "gang", *, members: int = 4, phase: str = "Inqueue", **spec: Any) -> Object:
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "creationTimestamp": CREATED},
        "spec": {"minMember": members, "queue": "batch", **spec},
        "status": {"phase": phase},
    }


def condition(kind: str, status: str = "True", **fields: Any) -> Object:
    return {"type": kind, "status": status, "lastTransitionTime": "2025-01-01T00:05:00Z", **fields}


def raw(item: Object) -> bytes:
    return json.dumps(item).encode()
