"""Snapshots of PyTorch's caching allocator, from pickles and from the probe."""

from __future__ import annotations

import ast
import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import probe
from exporters.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from exporters.model import AllocatorState, Device, MigInstance
from exporters.probe import summarize
from exporters.sources.allocator import AllocatorReading, AllocatorSource, load_snapshot, match, snapshot_states

MIB = 2**20


def segment(*blocks: tuple[int, str], device: int = 0) -> dict[str, Any]:
    """A segment as ``torch.cuda.memory._snapshot`` gives it."""
    address = 0x7F0000000000
    return {
        "device": device,
        "address": address,
        "total_size": sum(size for size, _ in blocks),
        "allocated_size": sum(size for size, state in blocks if state == "active_allocated"),
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {"address": address, "size": size, "requested_size": size, "state": state} for size, state in blocks
        ],
    }


FRAGMENTED = [
    segment(
        (6 * MIB, "active_allocated"), (4 * MIB, "inactive"), (2 * MIB, "active_pending_free"), (8 * MIB, "inactive")
    ),
    segment((20 * MIB, "active_allocated"), (5 * MIB, "inactive")),
    segment((2 * MIB, "inactive"), device=1),
]


def write(path: Path, content: object, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


# --- arithmetic


def test_free_and_largest_free_by_device() -> None:
    assert summarize(FRAGMENTED) == {
        # What waits for another stream is not free yet.
        0: {"reserved": 45 * MIB, "free": 17 * MIB, "largest": 8 * MIB, "blocks": 3},
        1: {"reserved": 2 * MIB, "free": 2 * MIB, "largest": 2 * MIB, "blocks": 1},
    }


def test_neighbours_make_one_run_but_not_across_segments() -> None:
    found = summarize([segment((MIB, "inactive"), (2 * MIB, "inactive")), segment((MIB, "inactive"))])

    assert found[0] == {"reserved": 4 * MIB, "free": 4 * MIB, "largest": 3 * MIB, "blocks": 2}


def test_nothing_reserved_gives_nothing() -> None:
    assert summarize([]) == {}


STATES = ["inactive", "active_allocated", "active_pending_free", "active_awaiting_free"]
BLOCKS = st.lists(st.tuples(st.integers(1, 10**9), st.sampled_from(STATES)), max_size=12)


@given(st.lists(BLOCKS, max_size=8))
def test_sums_agree_with_marking_every_block(segments: list[list[tuple[int, str]]]) -> None:
    found = summarize(segment(*blocks) for blocks in segments)

    if not segments:
        assert found == {}
        return
    runs = []
    for blocks in segments:
        text = "".join("f" if state == "inactive" else "-" for _, state in blocks)
        at = 0
        for part in text.split("-"):
            if part:
                runs.append(sum(size for size, _ in blocks[at : at + len(part)]))
            at += len(part) + 1
    assert found[0] == {
        "reserved": sum(size for blocks in segments for size, _ in blocks),
        "free": sum(runs),
        "largest": max(runs, default=0),
        "blocks": len(runs),
    }


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"device": 0, "total_size": 1}, "segment 0: KeyError: 'blocks'"),
        ({"device": 0, "total_size": 1, "blocks": [{"size": 2, "state": "inactive"}]}, "do not fit"),
        ({"device": 0, "total_size": 9, "blocks": [{"size": 2, "state": "melted"}]}, "unknown block state 'melted'"),
        ({"device": -1, "total_size": 0, "blocks": []}, "do not fit"),
    ],
)
def test_a_segment_that_pytorch_would_not_write(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarize([broken])


# --- pickles


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_dumped_snapshot_loads(tmp_path: Path, protocol: int) -> None:
    snapshot = {"segments": FRAGMENTED, "device_traces": [[]], "allocator_settings": {"expandable_segments": False}}

    states = snapshot_states(write(tmp_path / "rank0.pickle", snapshot, protocol))

    assert states[0] == AllocatorState("rank0", 45 * MIB, 17 * MIB, 8 * MIB, 3)


def test_the_list_of_older_releases_loads(tmp_path: Path) -> None:
    assert load_snapshot(write(tmp_path / "old.pickle", FRAGMENTED)) == FRAGMENTED


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "owned"
    path = write(tmp_path / "evil.pickle", {"segments": [Evil(marker)]})

    with pytest.raises(InvalidInputError, match=r"evil.pickle is not a memory snapshot: it refers to posix.system"):
        load_snapshot(path)

    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(pickle.dumps(SimpleNamespace(segments=[])), id="an object"),
        pytest.param(pickle.dumps(len), id="a built-in function"),
        pytest.param(b"cbuiltins\neval\n(V1+1\ntR.", id="protocol 0"),
        pytest.param(b"Pid\n.", id="a persistent id"),
        pytest.param(b"\x80\x04\x82\x01.", id="an extension code"),
        pytest.param(b"}(Va\nVb\nub.", id="state for a dict"),
        pytest.param(pickle.dumps({"segments": FRAGMENTED})[:-40], id="cut off"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x93NUMPY", id="not a pickle"),
        pytest.param(b"(" * 100_000 + b"l" * 100_000, id="nothing but lists"),
        pytest.param(pickle.dumps({"traces": []}), id="no segments"),
        pytest.param(pickle.dumps({"segments": [{"blocks": None}]}), id="no blocks"),
        pytest.param(pickle.dumps("segments"), id="a string"),
    ],
)
def test_anything_else_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)

    with pytest.raises(InvalidInputError, match=r"snapshot.pickle") as raised:
        snapshot_states(path)

    assert "\n" not in str(raised.value)
    assert "_dump_snapshot" in raised.value.cure


def test_a_file_that_is_too_large_or_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "big.pickle", {"segments": FRAGMENTED})

    with pytest.raises(InvalidInputError, match="at most 100 are read"):
        load_snapshot(path, max_bytes=100)
    with pytest.raises(NotFoundError, match="none"):
        load_snapshot(tmp_path / "none.pickle")
    with pytest.raises(InvalidInputError):
        load_snapshot(tmp_path)


def test_a_snapshot_of_this_pytorch_loads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    keep = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del keep[::2]
    torch.cuda.memory._dump_snapshot(str(tmp_path / "real.pickle"))

    state = snapshot_states(tmp_path / "real.pickle")[torch.cuda.current_device()]

    assert state.reserved_bytes == torch.cuda.memory_reserved()
    assert 0 < state.largest_free_bytes < state.free_bytes


# --- the probe


def test_the_probe_imports_only_the_standard_library() -> None:
    tree = ast.parse(Path(probe.__file__).read_text())
    names = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names])
    }

    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names


class FakeCuda:
    """The part of ``torch.cuda`` that the probe uses."""

    def __init__(self, *, initialized: bool = True, old: bool = False) -> None:
        self._initialized = initialized
        self._old = old

    def is_initialized(self) -> bool:
        return self._initialized

    def memory_snapshot(self, **options: Any) -> list[dict[str, Any]]:
        if self._old and options:
            raise TypeError("unexpected keyword argument")
        return FRAGMENTED

    def get_device_properties(self, index: int) -> SimpleNamespace:
        uuid = f"1e57ab1e-0000-4000-8000-00000000000{index}"
        return SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0)


@pytest.mark.parametrize("old", [False, True])
def test_the_probe_reads_torch(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=FakeCuda(old=old)))

    assert probe.torch_segments() == FRAGMENTED
    assert probe.torch_devices([1]) == {
        1: {"uuid": "GPU-1e57ab1e-0000-4000-8000-000000000001", "bus": "00000000:1A:00.0"}
    }


def test_the_probe_does_not_initialise_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=FakeCuda(initialized=False)))

    assert probe.torch_segments() == []


def test_the_probe_does_not_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    assert probe.torch_segments() == []
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("target", "interval"), [("tcp:host:1", 10.0), ("unix:", 10.0), ("unix:/x", 0.0), ("unix:/x", float("nan"))]
)
def test_a_probe_that_makes_no_sense_is_refused_at_once(target: str, interval: float) -> None:
    with pytest.raises(ValueError, match="probe"):
        probe.start(target, interval_seconds=interval)


def test_a_probe_without_exporter_disturbs_nobody(tmp_path: Path) -> None:
    running = probe.start(f"unix:{tmp_path}/nobody.sock", segments=lambda: FRAGMENTED, devices=names(0))
    running.stop()

    assert (running.sent, running.failed) == (0, 1)
    assert running.error.startswith("FileNotFoundError")


def test_slow_snapshots_are_taken_less_often(tmp_path: Path) -> None:
    taken: list[float] = []

    def slow() -> list[dict[str, Any]]:
        taken.append(time.monotonic())
        time.sleep(0.02)
        return FRAGMENTED

    running = probe.start(f"file:{tmp_path}/report.json", interval_seconds=0.001, segments=slow, devices=names(0))
    time.sleep(0.3)
    running.stop()

    # At 1 % overhead the second is due after two seconds.
    assert (len(taken), running.sent) == (1, 1)


# --- the source


@pytest.fixture
def source(tmp_path: Path) -> Iterator[AllocatorSource]:
    with AllocatorSource(tmp_path / "probe.sock", tmp_path) as opened:
        yield opened


def names(index: int, uuid: str = "GPU-a") -> Any:
    return lambda _: {index: {"uuid": uuid}}


def test_reports_arrive_with_the_process_id_that_the_kernel_vouches_for(
    tmp_path: Path, source: AllocatorSource
) -> None:
    claimed = json.loads(probe.report(FRAGMENTED[:2], names(0)))
    claimed["pid"] = 1

    probe.send(f"unix:{tmp_path}/probe.sock", json.dumps(claimed).encode())
    readings, unread = source.read()

    assert unread == ()
    assert readings == (
        AllocatorReading(AllocatorState(str(os.getpid()), 45 * MIB, 17 * MIB, 8 * MIB, 3), os.getpid(), "GPU-a", "", 0),
    )


def test_the_last_report_of_a_process_counts_until_it_is_old(tmp_path: Path, source: AllocatorSource) -> None:
    now = time.time()
    for segments in (FRAGMENTED[:2], FRAGMENTED[1:2]):
        probe.send(f"unix:{tmp_path}/probe.sock", probe.report(segments, names(0)))

    (reading,), _ = source.read(now)
    later, _ = source.read(now + 59)
    too_late, _ = source.read(now + 61)

    assert reading.state.reserved_bytes == 25 * MIB
    assert (len(later), len(too_late)) == (1, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b'{"version": 1}',
        b'{"version": 2, "pid": 1, "time": 0, "devices": []}',
        b'{"version": 1, "pid": 1, "time": 0, "devices": '
        b'[{"index": 0, "reserved": 1, "free": 2, "largest": 1, "blocks": 1}]}',
        b'{"version": 1, "pid": 1, "time": 0, "devices": '
        b'[{"index": 0, "reserved": 1, "free": -1, "largest": -1, "blocks": 1}]}',
        b"[" * 70_000,
    ],
    ids=["empty", "no JSON", "incomplete", "newer", "more free than reserved", "negative", "too long"],
)
def test_a_report_that_is_wrong_is_counted_and_the_others_stand(
    tmp_path: Path, source: AllocatorSource, data: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.connect(f"{tmp_path}/probe.sock")
        client.send(data)
        client.send(probe.report(FRAGMENTED[2:], names(1)))

    readings, (problem,) = source.read()

    assert len(readings) == 1
    assert problem.what == "allocator reports"
    assert problem.why.startswith(f"1 rejected, the last of process {os.getpid()}: ")


def test_report_files_and_pickles_in_a_folder(tmp_path: Path, source: AllocatorSource) -> None:
    write(tmp_path / "rank3.pickle", {"segments": FRAGMENTED[2:]})
    probe.send(f"file:{tmp_path}/rank0.json", probe.report(FRAGMENTED[:2], names(0)))
    (tmp_path / "notes.txt").write_text("not for us")
    (tmp_path / "broken.pickle").write_bytes(b"x")

    readings, (problem,) = source.read()

    by_process = {item.state.process: item for item in readings}
    assert by_process["rank3"].index == 1
    assert by_process[f"{socket.gethostname()}/{os.getpid()}"].uuid == "GPU-a"
    assert problem.what == "allocator broken.pickle"


def test_a_file_is_read_again_when_it_changes_and_forgotten_when_it_is_old(
    tmp_path: Path, source: AllocatorSource
) -> None:
    target = f"file:{tmp_path}/rank0.json"
    probe.send(target, probe.report(FRAGMENTED[:2], names(0)))
    (first,), _ = source.read()
    probe.send(target, probe.report(FRAGMENTED[:1], names(0)))
    (second,), _ = source.read()

    assert (first.state.reserved_bytes, second.state.reserved_bytes) == (45 * MIB, 20 * MIB)
    assert source.read(time.time() + 61) == ((), ())


def test_the_number_of_processes_is_bounded(tmp_path: Path) -> None:
    for at in range(5):
        probe.send(f"file:{tmp_path}/{at}.json", probe.report(FRAGMENTED[:1], names(0)))

    with AllocatorSource(folder=tmp_path, max_processes=3) as source:
        assert len(source.read()[0]) == 3


def test_a_socket_left_behind_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    path = tmp_path / "probe.sock"
    AllocatorSource(path)._socket.close()  # type: ignore[union-attr]  # as after a crash
    with AllocatorSource(path):
        assert path.is_socket()
        assert path.stat().st_mode & 0o777 == 0o666
    assert not path.exists()
    path.write_text("precious")

    with pytest.raises(SourceUnreachableError, match="cannot be listened on"):
        AllocatorSource(path)

    assert path.read_text() == "precious"


def test_readings_go_to_their_device_by_uuid_then_bus_then_index() -> None:
    state = AllocatorState("7", 1, 1, 1)
    devices = [
        Device("GPU-A", "n", 0, pci_bus_id="00000000:1A:00.0"),
        Device("GPU-B", "n", 1, pci_bus_id="00000000:1B:00.0", mig_instances=(MigInstance("MIG-x", "1g.10gb"),)),
    ]
    readings = [
        AllocatorReading(state, 1, "gpu-a", "", 1),
        AllocatorReading(state, 2, "", "00000000:1b:00.0", 0),
        AllocatorReading(state, 3, "MIG-x", "", 0),
        AllocatorReading(state, 4, index=1),
        # Of another machine: its index says nothing.
        AllocatorReading(state, 5, "GPU-C", "", 0),
        AllocatorReading(state, 6, index=9),
    ]

    found = match(readings, devices)

    assert {name: [item.pid for item in group] for name, group in found.items()} == {
        "GPU-A": [1],
        "GPU-B": [2, 3, 4],
        "": [5, 6],
    }
