"""From a process id to its pod or Slurm job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from exporters.errors import SourceUnreachableError
from exporters.sources.processes import (
    ControlGroup,
    KubeletDevices,
    Owner,
    PodDevice,
    ProcessTable,
    environment_job,
    parse_cgroup,
)

POD = "0a1b2c3d-1111-2222-3333-0123456789ab"
CONTAINER = "f" * 60 + "0123"
OUTER = "e" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
            f"{POD.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope",
            ControlGroup(POD, CONTAINER),
            id="v2, systemd, containerd",
        ),
        pytest.param(
            f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{CONTAINER}.scope/container",
            ControlGroup(POD, CONTAINER),
            id="v2, systemd, CRI-O, Guaranteed",
        ),
        pytest.param(
            f"12:devices:/kubepods/besteffort/pod{POD}/{CONTAINER}\n1:name=systemd:/kubepods/besteffort/pod{POD}/{CONTAINER}",
            ControlGroup(POD, CONTAINER),
            id="v1, cgroupfs",
        ),
        pytest.param(
            f"0::/../../kubepods-burstable-pod{POD.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope",
            ControlGroup(POD, CONTAINER),
            id="seen from another cgroup namespace",
        ),
        pytest.param(
            f"0::/docker/{OUTER}/kubelet/kubepods/pod{POD}/{CONTAINER}",
            ControlGroup(POD, CONTAINER),
            id="a node that is a container",
        ),
        pytest.param(
            f"0::/kubepods/burstable/pod{'ab' * 16}/{CONTAINER}",
            ControlGroup("ab" * 16, CONTAINER),
            id="static pod",
        ),
        pytest.param(
            f"0::/system.slice/docker-{CONTAINER}.scope", ControlGroup(container=CONTAINER), id="Docker, no pod"
        ),
        pytest.param(
            "11:memory:/slurm/uid_1000/job_812/step_0/task_0\n10:freezer:/slurm/uid_1000/job_812/step_0",
            ControlGroup(job="812"),
            id="Slurm, v1",
        ),
        pytest.param(
            "4:devices:/slurm_gpu-7/uid_0/job_9/step_batch", ControlGroup(job="9"), id="Slurm, v1, several daemons"
        ),
        pytest.param(
            "0::/system.slice/slurmstepd.scope/job_812/step_0/user/task_0", ControlGroup(job="812"), id="Slurm, v2"
        ),
        pytest.param(
            "0::/system.slice/gpu-7_slurmstepd.scope/job_12/step_extern/slurm",
            ControlGroup(job="12"),
            id="Slurm, v2, several daemons",
        ),
        pytest.param("0::/user.slice/user-1000.slice/session-3.scope", ControlGroup(), id="a login"),
        pytest.param("0::/podcast.slice/job_7/x", ControlGroup(), id="neither a pod nor a job"),
        pytest.param("", ControlGroup(), id="empty"),
    ],
)
def test_control_groups(text: str, expected: ControlGroup) -> None:
    assert parse_cgroup(text) == expected


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        (b"HOME=/root\0SLURM_JOB_ID=812\0PATH=/bin\0", "812"),
        (b"MY_SLURM_JOB_ID=7\0", ""),
        (b"SLURM_JOB_ID=$(reboot)\0", ""),
        (b"\xff\xfe=\0SLURM_JOB_ID=3", "3"),
        (b"", ""),
    ],
)
def test_the_job_in_an_environment(environment: bytes, job: str) -> None:
    assert environment_job(environment) == job


class Proc:
    """A ``/proc`` and a ``/var/log/pods`` made of files."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.logs = root / "pods"
        self.proc.mkdir()
        self.logs.mkdir()

    def add(self, pid: int, name: str, cgroup: str, environment: bytes = b"", started: int = 100) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "cgroup").write_text(f"{cgroup}\n")
        (folder / "environ").write_bytes(environment)
        (folder / "stat").write_text(f"{pid} ({name}) S 1 " + "0 " * 17 + f"{started} 0 0")

    def table(self, **options: Any) -> ProcessTable:
        return ProcessTable(str(self.proc), str(self.logs), **options)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


ME = ProcessTable().owners({os.getpid()})[os.getpid()].user


def test_a_pods_process_has_the_pods_name_from_its_log_folder(proc: Proc) -> None:
    proc.add(7, "python3", f"0::/kubepods/pod{POD}/{CONTAINER}")
    (proc.logs / f"ml-team_train-llama-0_{POD}").mkdir()

    assert proc.table().owners({7}) == {7: Owner("python3", ME, POD, "ml-team", "train-llama-0", CONTAINER)}


def test_a_pod_that_came_later_is_found(proc: Proc) -> None:
    table = proc.table()
    proc.add(7, "python3", f"0::/kubepods/pod{POD}/{CONTAINER}")
    before = table.owners({7})[7].pod
    (proc.logs / f"ml_late-0_{POD}").mkdir()
    os.utime(proc.logs, ns=(1, 1))

    assert (before, table.owners({7})[7].pod) == ("", "late-0")


def test_a_process_that_is_gone_is_left_out(proc: Proc) -> None:
    proc.add(7, "python3", "0::/")

    assert proc.table().owners({7, 8}).keys() == {7}


@pytest.mark.parametrize("name", ["a b) S 1 (c", "tmux: server", "x" * 15])
def test_names_that_confuse_simple_parsers(proc: Proc, name: str) -> None:
    proc.add(7, name, "0::/slurm/uid_0/job_5/step_0")

    owner = proc.table().owners({7})[7]

    assert (owner.name, owner.job) == (name, "5")


def test_without_a_job_control_group_the_environment_says_the_job(proc: Proc) -> None:
    proc.add(7, "python3", "0::/user.slice", b"SLURM_JOB_ID=44\0")

    assert proc.table().owners({7})[7].job == "44"
    assert proc.table(read_environment=False).owners({7})[7].job == ""


def test_the_environment_of_a_pod_is_not_asked(proc: Proc) -> None:
    # Whoever wrote the pod's manifest chose its environment.
    proc.add(7, "python3", f"0::/kubepods/pod{POD}/{CONTAINER}", b"SLURM_JOB_ID=44\0")

    assert proc.table().owners({7})[7].job == ""


def test_the_environment_is_read_once_per_process_and_anew_for_a_used_again_id(proc: Proc) -> None:
    table = proc.table()
    proc.add(7, "python3", "0::/", b"SLURM_JOB_ID=1\0", started=100)
    first = table.owners({7})[7].job
    proc.add(7, "python3", "0::/", b"SLURM_JOB_ID=2\0", started=100)
    same = table.owners({7})[7].job
    proc.add(7, "python3", "0::/", b"SLURM_JOB_ID=3\0", started=200)

    assert (first, same, table.owners({7})[7].job) == ("1", "1", "3")


# --- the kubelet


def message(*fields: tuple[int, str | bytes]) -> bytes:
    """Encode length-delimited protobuf fields by hand, to check the field numbers independently."""
    out = b""
    for number, value in fields:
        data = value.encode() if isinstance(value, str) else value
        length, size = b"", len(data)
        while size > 127:
            length += bytes([size & 127 | 128])
            size >>= 7
        out += bytes([number << 3 | 2]) + length + bytes([size]) + data
    return out


def pod(name: str, namespace: str, container: str, resource: str, *ids: str) -> tuple[int, bytes]:
    devices = message((1, resource), *((2, item) for item in ids))
    return 1, message((1, name), (2, namespace), (3, message((1, container), (2, devices))))


Serve = Callable[[dict[str, bytes]], str]


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Serve]:
    """Serve these answers, by method, over gRPC on a socket."""
    grpc: Any = pytest.importorskip("grpc", reason="needs grpcio")
    servers = []

    def serve(answers: dict[str, bytes]) -> str:
        class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> Any:
                answer = answers.get(details.method.removeprefix("/v1.PodResourcesLister/"))
                return None if answer is None else grpc.unary_unary_rpc_method_handler(lambda *_: answer)

        socket = f"{tmp_path}/kubelet.sock"
        server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        servers.append(server)
        return socket

    yield serve
    for server in servers:
        server.stop(0).wait()


def test_the_kubelet_says_which_pod_holds_which_device(kubelet: Serve) -> None:
    socket = kubelet(
        {
            "List": message(
                pod("train-0", "ml", "main", "nvidia.com/gpu", "GPU-a", "GPU-b"),
                pod("serve-0", "web", "llm", "nvidia.com/gpu", "GPU-c::3"),
                pod("other", "web", "x", "example.com/fpga", "fpga-0"),
            ),
            "GetAllocatableResources": message(
                (1, message((1, "nvidia.com/gpu"), (2, "GPU-a"), (2, "GPU-z"))),
                (1, message((1, "example.com/fpga"), (2, "fpga-0"))),
            ),
        }
    )
    client = KubeletDevices(socket)

    held, allocatable = client.devices()
    client.close()

    assert held == (
        PodDevice("nvidia.com/gpu", "GPU-a", "ml", "train-0", "main"),
        PodDevice("nvidia.com/gpu", "GPU-b", "ml", "train-0", "main"),
        PodDevice("nvidia.com/gpu", "GPU-c", "web", "serve-0", "llm", "3"),
    )
    assert allocatable == {"GPU-a", "GPU-z"}


def test_an_old_kubelet_cannot_say_what_is_allocatable(kubelet: Serve) -> None:
    client = KubeletDevices(kubelet({"List": message(pod("train-0", "ml", "main", "nvidia.com/gpu", "GPU-a"))}))

    held, allocatable = client.devices()
    client.close()

    assert [item.device for item in held] == ["GPU-a"]
    assert allocatable is None


def test_a_kubelet_that_does_not_answer_is_an_error_with_a_cure(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="needs grpcio")
    client = KubeletDevices(str(tmp_path / "none.sock"), timeout_seconds=0.5)

    with pytest.raises(SourceUnreachableError, match="none") as raised:
        client.devices()

    assert "kubelet" in raised.value.cure
    assert not client.present
