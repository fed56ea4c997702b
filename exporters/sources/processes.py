"""Whose process is it: from a process id to its pod or Slurm job, by control group, environment and kubelet.

A process id is looked up in the host's ``/proc``. The path of its control group (v1 and v2, cgroupfs and systemd
drivers, containerd, CRI-O and Docker) holds the pod's UID and the container, or the Slurm job. The pod's name is that
of its folder in ``/var/log/pods``; where that is not visible, the kubelet's pod-resources API says which pod holds a
device. Imports only the standard library until `KubeletDevices` is used, since the NVML worker runs it.
"""

from __future__ import annotations

import importlib
import pwd
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

_UID: Final = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
#: A static pod's UID is a hash without dashes; systemd slices spell dashes as underscores.
_POD: Final = re.compile(rf"[/-]pod({_UID}|[0-9a-f]{{32}})(?:\.slice)?(?:/|$)")
_CONTAINER: Final = re.compile(r"[/:-]([0-9a-f]{64})(?:\.scope)?(?:/|$)")
#: ``/slurm/uid_0/job_7/step_0`` (v1), ``/system.slice/node1_slurmstepd.scope/job_7/step_0/user/task_0`` (v2).
_JOB: Final = re.compile(r"/[^/]*slurm[^/]*/(?:[^/]+/)*?job_(\d+)(?:/|$)")

#: ``/proc/PID/environ`` may hold up to ARG_MAX; a job's id is near the top or not worth more.
_MOST_ENVIRONMENT: Final = 4 * 1024 * 1024

KUBELET_SOCKET: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"


class ControlGroup(NamedTuple):
    """What the control group of a process says; empty: it does not say."""

    pod_uid: str = ""
    container: str = ""
    job: str = ""


class Owner(NamedTuple):
    """A process and whom it works for; empty: not known. ``container`` is the container's id."""

    name: str = ""
    user: str = ""
    pod_uid: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    job: str = ""


def parse_cgroup(text: str) -> ControlGroup:
    """Read the content of ``/proc/PID/cgroup``: lines of ``hierarchy:controllers:path``, one for version 2."""
    pod = container = job = ""
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        found = _POD.search(path)
        # Inside a node that is itself a container, the outer container's id comes before the pod.
        inner = _CONTAINER.search(path, found.end() - 1 if found else 0)
        if found:
            pod = found[1].replace("_", "-")
            container = inner[1] if inner else container
        elif inner and not pod:
            container = inner[1]
        if slurm := _JOB.search(path):
            job = slurm[1]
    return ControlGroup(pod, container, job)


def environment_job(environment: bytes) -> str:
    """Return ``SLURM_JOB_ID`` from the content of ``/proc/PID/environ``; empty when it is not there."""
    for item in environment.split(b"\0"):
        name, _, value = item.partition(b"=")
        if name == b"SLURM_JOB_ID" and value.isdigit():
            return value.decode()
    return ""


class ProcessTable:
    """Looks processes up in ``/proc``.

    Args:
        proc: Where the host's ``/proc`` is mounted.
        pod_logs: Where the kubelet keeps the logs of pods, in folders named ``NAMESPACE_POD_UID``.
        read_environment: Whether to look for a job id in the environment where the control group has none (Slurm with
            ``ProctrackType=proctrack/linuxproc``). Needs the process's user, or root; read once per process.
    """

    def __init__(self, proc: str = "/proc", pod_logs: str = "/var/log/pods", *, read_environment: bool = True) -> None:
        self._proc = Path(proc)
        self._pod_logs = Path(pod_logs)
        self._read_environment = read_environment
        self._environments: dict[tuple[int, str], str] = {}
        self._users: dict[int, str] = {}
        self._pods: dict[str, tuple[str, str]] = {}
        self._pods_read_at = -1

    def owners(self, pids: set[int]) -> dict[int, Owner]:
        """Return the owner of each process; one that is gone, or in another process namespace, is left out."""
        found = {pid: owner for pid in sorted(pids) if (owner := self._owner(pid)) is not None}
        self._environments = {key: job for key, job in self._environments.items() if key[0] in pids}
        return found

    def _owner(self, pid: int) -> Owner | None:
        folder = self._proc / str(pid)
        try:
            name = (folder / "comm").read_text(errors="replace").rstrip("\n")
            group = parse_cgroup((folder / "cgroup").read_text(errors="replace"))
            # Field 22 is the start time; the name, field 2, may hold spaces and brackets.
            started = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[19]
            uid = folder.stat().st_uid
        except (OSError, IndexError):
            return None
        job = group.job
        if not job and not group.pod_uid and self._read_environment:
            job = self._job_by_environment(folder, pid, started)
        namespace, pod = self._pod(group.pod_uid)
        return Owner(name, self._user(uid), group.pod_uid, namespace, pod, group.container, job)

    def _job_by_environment(self, folder: Path, pid: int, started: str) -> str:
        # A process id is used again; with its start time it is unique.
        key = (pid, started)
        if key not in self._environments:
            try:
                with (folder / "environ").open("rb") as stream:
                    self._environments[key] = environment_job(stream.read(_MOST_ENVIRONMENT))
            except OSError:
                self._environments[key] = ""
        return self._environments[key]

    def _user(self, uid: int) -> str:
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return self._users[uid]

    def _pod(self, uid: str) -> tuple[str, str]:
        if not uid:
            return "", ""
        if uid not in self._pods:
            try:
                changed = self._pod_logs.stat().st_mtime_ns
                if changed != self._pods_read_at:
                    self._pods = dict(_pod_folders(item.name for item in self._pod_logs.iterdir()))
                    self._pods_read_at = changed
            except OSError:
                self._pods = {}
        return self._pods.get(uid, ("", ""))


def _pod_folders(names: Iterable[str]) -> list[tuple[str, tuple[str, str]]]:
    # Neither a namespace nor a pod's name can have an underscore.
    parts = [name.split("_") for name in names]
    return [(part[2], (part[0], part[1])) for part in parts if len(part) == 3]


class PodDevice(NamedTuple):
    """A device that the kubelet gave to a container. A share of a time-sliced GPU has ``replica`` set."""

    resource: str
    device: str
    namespace: str
    pod: str
    container: str
    replica: str = ""


class KubeletDevices:
    """Asks the kubelet's pod-resources API which pod holds which NVIDIA device.

    Args:
        socket: The kubelet's socket.
        timeout_seconds: How long to wait for an answer.
        prefix: Which resources count.
    """

    def __init__(self, socket: str = KUBELET_SOCKET, timeout_seconds: float = 2.0, prefix: str = "nvidia.com/") -> None:
        self.socket = socket
        self._timeout = timeout_seconds
        self._prefix = prefix
        self._messages: Mapping[str, Any] = {}
        self._channel: Any = None

    @property
    def present(self) -> bool:
        """Whether there is a kubelet on this machine that can be asked."""
        return Path(self.socket).exists()

    def devices(self) -> tuple[tuple[PodDevice, ...], frozenset[str] | None]:
        """Return what pods hold, and the ids of all devices that can be given away (None: the kubelet is too old).

        Raises:
            SourceUnreachableError: the kubelet does not answer, or the package grpcio is missing.
        """
        from exporters.errors import SourceUnreachableError

        try:
            grpc: Any = importlib.import_module("grpc")
        except ImportError:
            raise SourceUnreachableError(
                f"{self.socket}: the Python package grpcio is not installed",
                cure="pip install 'prioscope[exporters]'",
            ) from None
        if self._channel is None:
            self._messages = self._messages or _pod_resource_messages()
            self._channel = grpc.insecure_channel(f"unix://{self.socket}", options=[("grpc.enable_http_proxy", 0)])
        try:
            listed = self._ask("List")
        except grpc.RpcError as error:
            self.close()
            raise SourceUnreachableError(
                f"{self.socket}: {error.code().name.lower()}: {error.details()}",
                cure="check that the kubelet runs and that the socket is mounted and readable",
            ) from None
        try:
            allocatable = self._ask("GetAllocatableResources")
        except grpc.RpcError:
            return self._held(listed), None
        every = (item for item in allocatable.devices if item.resource_name.startswith(self._prefix))
        return self._held(listed), frozenset(name for item in every for name in item.device_ids)

    def _ask(self, method: str) -> Any:
        call = self._channel.unary_unary(
            f"/v1.PodResourcesLister/{method}",
            request_serializer=lambda _: b"",
            response_deserializer=self._messages[method].FromString,
        )
        return call(None, timeout=self._timeout)

    def _held(self, listed: Any) -> tuple[PodDevice, ...]:
        found = []
        for pod in listed.pod_resources:
            for container in pod.containers:
                for item in container.devices:
                    if item.resource_name.startswith(self._prefix):
                        for name in item.device_ids:
                            # The device plugin names the shares of a time-sliced GPU UUID::0, UUID::1, …
                            device, _, replica = name.partition("::")
                            found.append(
                                PodDevice(item.resource_name, device, pod.namespace, pod.name, container.name, replica)
                            )
        return tuple(found)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


#: Messages of ``k8s.io/kubelet/pkg/apis/podresources/v1`` and their fields in use: number, repeated, type.
_FIELDS: Final[Mapping[str, tuple[tuple[str, int, bool, str], ...]]] = {
    "ContainerDevices": (("resource_name", 1, False, "string"), ("device_ids", 2, True, "string")),
    "ContainerResources": (("name", 1, False, "string"), ("devices", 2, True, "ContainerDevices")),
    "PodResources": (
        ("name", 1, False, "string"),
        ("namespace", 2, False, "string"),
        ("containers", 3, True, "ContainerResources"),
    ),
    "ListPodResourcesResponse": (("pod_resources", 1, True, "PodResources"),),
    "AllocatableResourcesResponse": (("devices", 1, True, "ContainerDevices"),),
}


def _pod_resource_messages() -> Mapping[str, Any]:
    """Return the answer types of the two methods, built at run time: the API publishes no Python package."""
    descriptor_pb2: Any = importlib.import_module("google.protobuf.descriptor_pb2")
    descriptor_pool: Any = importlib.import_module("google.protobuf.descriptor_pool")
    message_factory: Any = importlib.import_module("google.protobuf.message_factory")
    file = descriptor_pb2.FileDescriptorProto(name="prioscope/podresources.proto", package="v1", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, repeated, kind in fields:
            added = message.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind == "string":
                added.type = kinds.TYPE_STRING
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".v1.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)

    def kind_of(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1.{name}"))

    return {
        "List": kind_of("ListPodResourcesResponse"),
        "GetAllocatableResources": kind_of("AllocatableResourcesResponse"),
    }
