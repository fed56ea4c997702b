"""The NVML source on the stub driver: what it reads, and what it does about GPUs and drivers that misbehave."""

from __future__ import annotations

import getpass
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

from exporters.collectors import device_families
from exporters.errors import SourceUnreachableError
from exporters.measures.contiguity import mig_contiguity
from exporters.model import Device, EventKind, Snapshot, Unread
from exporters.probe import report, send
from exporters.sources.allocator import AllocatorSource
from exporters.sources.nvml import NvmlSource, NvmlTiming, Strays
from exporters.sources.processes import KubeletDevices, PodDevice

GIB = 2**30
#: Short, so that a hang is soon noticed; generous enough for a busy machine.
TIMING = NvmlTiming(start=20.0, step=1.0, poll=20.0, backoff=60.0)


class FakeKubelet(KubeletDevices):
    """A kubelet that gave these devices away."""

    def __init__(self, pods: tuple[PodDevice, ...] = (), allocatable: frozenset[str] | None = None) -> None:
        super().__init__("/nonexistent/kubelet.sock")
        self._answer = (pods, allocatable)

    @property
    def present(self) -> bool:
        return True

    def devices(self) -> tuple[tuple[PodDevice, ...], frozenset[str] | None]:
        return self._answer


Open = Callable[..., NvmlSource]


@pytest.fixture
def open_source(gpus: Any) -> Iterator[Open]:
    """Open sources that are closed after the test, leaving no process behind."""
    opened: list[NvmlSource] = []

    def make(timing: NvmlTiming = TIMING, **options: Any) -> NvmlSource:
        opened.append(NvmlSource(cluster="lab", node="node-1", timing=timing, **options))
        return opened[-1]

    yield make
    for source in opened:
        source.close()
    assert workers() == []


def workers() -> list[int]:
    children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
    return [int(pid) for pid in children if b"_nvml_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def devices_of(source: NvmlSource) -> dict[int | None, Device]:
    return {device.index: device for device in source.poll().devices}


def samples(snapshot: Snapshot, name: str) -> dict[tuple[str, ...], float]:
    families, _ = device_families(snapshot.devices)
    return {labels: value for item in families if item.metric.name == name for labels, value in item.samples}


# --- readings


def test_reads_eight_gpus_in_the_models_units(gpus: Any, open_source: Open) -> None:
    snapshot = open_source().poll()

    assert [device.index for device in snapshot.devices] == list(range(8))
    assert snapshot.unread == ()
    assert snapshot.devices[3] == Device(
        id=gpus.uuid(3),
        node="node-1",
        index=3,
        model="NVIDIA H100 80GB HBM3",
        minor_number=0,
        pci_bus_id="00000000:1A:00.0",
        memory_total_bytes=80 * GIB,
        memory_used_bytes=30 * GIB,
        memory_reserved_bytes=GIB // 2,
        gpu_utilization_ratio=0.71,
        memory_utilization_ratio=0.33,
        power_watts=412.345,
        power_limit_watts=700.0,
        energy_joules=123456.789,
        temperature_celsius=56.0,
        sm_clock_hertz=1.98e9,
        memory_clock_hertz=2.619e9,
        ecc_corrected=2,
        ecc_uncorrected=0,
        # Bit 0, an idle GPU, holds nothing down.
        throttle_reasons=("sw_power_cap",),
        mig_enabled=False,
    )


def test_values_are_read_anew_in_every_poll(gpus: Any, open_source: Open) -> None:
    source = open_source()
    first = devices_of(source)[0]
    gpus.set(8, "gpu0 power 99000")

    assert (first.power_watts, devices_of(source)[0].power_watts) == (412.345, 99.0)


def test_what_a_gpu_does_not_support_is_absent_not_zero(gpus: Any, open_source: Open) -> None:
    gpus.base = {"name": "Tesla K80", "mem_total": 12 * GIB}
    gpus.set(1)

    snapshot = open_source().poll()

    (device,) = snapshot.devices
    assert device.up
    assert device.unread == ()
    assert (device.power_watts, device.ecc_corrected, device.throttle_reasons, device.mig_enabled) == (None,) * 4
    assert samples(snapshot, "gpu_memory_total_bytes") == {("node-1", "0", gpus.uuid(0)): 12.0 * GIB}
    assert samples(snapshot, "gpu_power_watts") == {}
    assert samples(snapshot, "gpu_ecc_errors_total") == {}


def test_a_driver_without_the_second_memory_structure(gpus: Any, open_source: Open) -> None:
    gpus.set(1, "gpu0 fault:nvmlDeviceGetMemoryInfo_v2 13")

    device = devices_of(open_source())[0]

    # The first structure counts what the driver keeps as used and does not say how much that is.
    assert (device.memory_used_bytes, device.memory_reserved_bytes) == (30 * GIB + GIB // 2, None)


def test_a_reading_that_fails_is_named_and_the_others_stand(gpus: Any, open_source: Open) -> None:
    gpus.set(2, "gpu1 fault:nvmlDeviceGetPowerUsage 4")

    device = devices_of(open_source())[1]

    assert device.up
    assert (device.power_watts, device.temperature_celsius) == (None, 56.0)
    assert device.unread == (Unread("power_mw", "Insufficient Permissions"),)


# --- GPUs that are lost


def test_a_lost_gpu_is_down_with_the_reason_and_stops_no_other(gpus: Any, open_source: Open) -> None:
    source = open_source()
    source.poll()
    gpus.set(8, "gpu3 fault:* 15")

    snapshot = source.poll()

    up = samples(snapshot, "gpu_up")
    lost = snapshot.devices[3]
    assert up.pop(("node-1", "3", gpus.uuid(3), "GPU is lost")) == 0.0
    assert list(up.values()) == [1.0] * 7
    assert (lost.model, lost.pci_bus_id) == ("NVIDIA H100 80GB HBM3", "00000000:1A:00.0")
    assert lost.power_watts is None


def test_a_gpu_lost_in_the_middle_of_a_reading_is_down(gpus: Any, open_source: Open) -> None:
    gpus.set(2, "gpu1 fault:nvmlDeviceGetTotalEnergyConsumption 16")

    assert devices_of(open_source())[1].reason == "GPU requires restart"


def test_a_gpu_of_which_nothing_can_be_read_is_down(gpus: Any, open_source: Open) -> None:
    readings = [
        f"gpu1 fault:nvmlDevice{call} 999"
        for call in [
            "GetName",
            "GetMinorNumber",
            "GetPciInfo_v3",
            "GetMemoryInfo_v2",
            "GetMemoryInfo",
            "GetUtilizationRates",
            "GetPowerUsage",
            "GetEnforcedPowerLimit",
            "GetTotalEnergyConsumption",
            "GetTemperatureV",
            "GetClockInfo",
            "GetTotalEccErrors",
            "GetCurrentClocksEventReasons",
            "GetMigMode",
        ]
    ]
    gpus.set(2, *readings)

    found = devices_of(open_source())

    assert (found[0].up, found[1].up, found[1].reason) == (True, False, "Unknown Error")


def test_a_gpu_lost_before_the_exporter_started_has_a_name_until_its_uuid_is_known(
    gpus: Any, open_source: Open
) -> None:
    source = open_source(NvmlTiming(step=1.0, backoff=0.0))
    gpus.set(2, "gpu1 fault:* 15")
    before = devices_of(source)[1]
    gpus.set(2)

    after = source.poll().devices

    assert (before.id, before.up) == ("node-1:1", False)
    assert [(device.id, device.up) for device in after] == [(gpus.uuid(0), True), (gpus.uuid(1), True)]


def test_a_gpu_that_fell_off_the_bus_is_reported_until_it_is_forgotten(gpus: Any, open_source: Open) -> None:
    source = open_source(NvmlTiming(step=1.0, backoff=0.0, forget=0.0))
    lasting = open_source(NvmlTiming(step=1.0, backoff=0.0))
    source.poll()
    lasting.poll()
    gpus.set(7)
    # The library counted its GPUs when it was loaded; the next process knows better.
    assert not devices_of(source)[7].up
    assert not devices_of(lasting)[7].up

    gone = devices_of(lasting)[7]

    assert (gone.up, gone.reason) == (False, "the driver no longer lists this GPU")
    assert sorted(devices_of(source)) == [0, 1, 2, 3, 4, 5, 6]


# --- calls that hang


def test_a_hung_call_costs_one_gpu_and_a_bounded_time(gpus: Any, open_source: Open) -> None:
    source = open_source()
    source.poll()
    gpus.set(8, "gpu3 hang:nvmlDeviceGetPowerUsage 1")

    began = time.monotonic()
    found = devices_of(source)
    took = time.monotonic() - began

    assert [index for index, device in found.items() if not device.up] == [3]
    assert found[3].reason == "no answer within 1 s (nvmlDeviceGetPowerUsage)"
    assert took < TIMING.step + 5


def test_a_gpu_that_hangs_in_its_first_reading_has_its_uuid(gpus: Any, open_source: Open) -> None:
    gpus.set(2, "gpu1 hang:nvmlDeviceGetPowerUsage 1")

    assert devices_of(open_source())[1].id == gpus.uuid(1)


def test_a_wedged_gpu_is_left_alone_so_that_nothing_piles_up(gpus: Any, open_source: Open) -> None:
    source = open_source()
    source.poll()
    gpus.set(8, "gpu3 hang:* 1")
    source.poll()
    threads = threading.active_count()
    descriptors = open_files()

    began = time.monotonic()
    ups = [[device.up for device in source.poll().devices] for _ in range(20)]
    took = time.monotonic() - began

    assert ups == [[True] * 3 + [False] + [True] * 4] * 20
    assert took < 20 * TIMING.step / 2
    assert len(workers()) == 1
    assert threading.active_count() == threads
    assert open_files() == descriptors
    assert source.workers_left_behind == 0


def test_a_gpu_that_answers_again_is_read_again(gpus: Any, open_source: Open) -> None:
    source = open_source(NvmlTiming(step=1.0, backoff=0.0))
    gpus.set(2, "gpu1 hang:nvmlDeviceGetPowerUsage 1")
    wedged = devices_of(source)[1].up
    gpus.set(2)

    assert (wedged, devices_of(source)[1].up) == (False, True)


def test_two_wedged_gpus_are_found_in_one_poll(gpus: Any, open_source: Open) -> None:
    gpus.set(4, "gpu0 hang:* 1", "gpu2 hang:nvmlDeviceGetUUID 1")

    assert {index: device.up for index, device in devices_of(open_source()).items()} == {
        0: False,
        1: True,
        2: False,
        3: True,
    }


def test_a_driver_that_hangs_on_start_is_an_error_within_its_time(gpus: Any, open_source: Open) -> None:
    gpus.set(8, "system hang:nvmlInitWithFlags 1")
    source = open_source(NvmlTiming(start=1.0, backoff=60.0))

    with pytest.raises(SourceUnreachableError, match=r"no answer within 1 s \(nvmlInit\)"):
        source.poll()
    began = time.monotonic()
    with pytest.raises(SourceUnreachableError):
        source.poll()

    assert time.monotonic() - began < 0.5


def test_a_driver_too_slow_for_one_poll_says_so(gpus: Any, open_source: Open) -> None:
    gpus.set(8, "system delay:* 20000")
    source = open_source(NvmlTiming(step=5.0, poll=1.0))

    found = devices_of(source)

    assert found[0].up
    assert not found[7].up
    assert found[7].reason == "the driver answers too slowly for one poll"


def test_a_driver_that_crashes_takes_only_the_gpu_that_made_it_crash(gpus: Any, open_source: Open) -> None:
    gpus.set(4, "gpu2 crash:nvmlDeviceGetPowerUsage 1")

    found = devices_of(open_source())

    assert [index for index, device in found.items() if not device.up] == [2]
    assert found[2].reason == "the NVML worker died: Segmentation fault (nvmlDeviceGetPowerUsage)"


def test_a_worker_killed_between_polls_is_replaced_unnoticed(gpus: Any, open_source: Open) -> None:
    source = open_source()
    source.poll()
    os.kill(workers()[0], signal.SIGKILL)

    snapshot = source.poll()

    assert [device.up for device in snapshot.devices] == [True] * 8
    assert snapshot.unread == ()


def test_no_more_than_a_few_workers_are_left_in_the_kernel() -> None:
    class Stuck:
        status: int | None = None

        def poll(self) -> int | None:
            return self.status

    strays, children = Strays(limit=2), [Stuck(), Stuck()]
    strays.add(children[0])
    one = strays.full
    strays.add(children[1])
    two = strays.full
    children[0].status = -9

    assert (one, two, strays.full, strays.reap()) == (False, True, False, 1)


# --- the driver goes and comes back


def test_no_driver_is_an_error_with_a_cure(gpus: Any, open_source: Open) -> None:
    gpus.set(8, "system fault:nvmlInitWithFlags 9")

    with pytest.raises(SourceUnreachableError, match="Driver Not Loaded") as raised:
        open_source().poll()

    assert "nvidia-smi" in raised.value.cure


def test_the_python_package_is_missing(
    gpus: Any, open_source: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(SourceUnreachableError, match="nvidia-ml-py is not installed"):
        open_source().poll()


def test_a_driver_that_goes_takes_its_gpus_down_and_a_new_one_brings_them_back(gpus: Any, open_source: Open) -> None:
    source = open_source()
    source.poll()
    gpus.set(8, "system fault:* 9")
    gone = source.poll()
    still_gone = source.poll()
    # The new driver answers only processes that load its library anew.
    gpus.set(8, "system generation 2", "system driver 580.65.06")

    back = source.poll()

    assert {(device.up, device.reason) for device in gone.devices} == {(False, "Driver Not Loaded")}
    assert gone.unread == still_gone.unread == (Unread("driver", "Driver Not Loaded"),)
    assert [device.id for device in gone.devices] == [gpus.uuid(gpu) for gpu in range(8)]
    assert [device.up for device in back.devices] == [True] * 8
    assert back.unread == ()


def test_a_driver_upgraded_between_two_polls(gpus: Any, open_source: Open) -> None:
    source = open_source()
    source.poll()
    gpus.set(8, "system generation 2")

    mismatch, after = source.poll(), source.poll()

    assert {device.reason for device in mismatch.devices} == {"RM has detected an NVML/RM version mismatch."}
    assert [device.up for device in after.devices] == [True] * 8


# --- XID errors


def xids_after(source: NvmlSource, gpus: Any, count: int) -> tuple[Snapshot, list[Any]]:
    """Poll until ``count`` events came in."""
    events: list[Any] = []
    deadline = time.monotonic() + 10
    while True:
        snapshot = source.poll()
        events.extend(snapshot.events)
        if len(events) >= count or time.monotonic() > deadline:
            return snapshot, events
        time.sleep(0.05)


def test_xid_errors_are_counted_once_by_gpu_and_code(gpus: Any, open_source: Open) -> None:
    source = open_source()
    source.poll()
    gpus.set(8, "system xid 1:2:79,2:2:31,3:5:79,4:2:31")

    _, events = xids_after(source, gpus, 4)
    later = source.poll()

    assert {event.kind for event in events} == {EventKind.XID}
    assert sorted((event.device, event.reason) for event in events) == [
        (gpus.uuid(2), "XID 31"),
        (gpus.uuid(2), "XID 31"),
        (gpus.uuid(2), "XID 79"),
        (gpus.uuid(5), "XID 79"),
    ]
    assert len({event.id for event in events}) == 4
    assert later.events == ()
    assert later.devices[2].xid_errors == {"79": 1, "31": 2}
    assert samples(later, "gpu_xid_errors_total")[("node-1", "5", gpus.uuid(5), "79")] == 1.0


def test_xid_counts_outlive_the_gpu_and_the_worker(gpus: Any, open_source: Open) -> None:
    source = open_source()
    source.poll()
    gpus.set(8, "system xid 1:2:79")
    xids_after(source, gpus, 1)
    gpus.set(8, "gpu2 hang:* 1")

    device = devices_of(source)[2]

    assert (device.up, device.xid_errors) == (False, {"79": 1})


# --- MIG

MIG = [
    "gpu0 mig 1",
    "gpu0/mig0 gi 1",
    "gpu0/mig0 ci 0",
    "gpu0/mig0 uuid MIG-one",
    "gpu0/mig0 name NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    f"gpu0/mig0 mem_total {40 * GIB}",
    f"gpu0/mig0 mem_used {9 * GIB}",
    "gpu0/gi1 profile 9",
    "gpu0/gi1 start 0",
    "gpu0/gi1 size 4",
    "gpu0/mig1 gi 9",
    "gpu0/mig1 uuid MIG-two",
    "gpu0/mig1 name NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "gpu0/gi9 profile 19",
    "gpu0/gi9 start 5",
    "gpu0/gi9 size 1",
    # A GPU instance on which nobody made a compute instance.
    "gpu0/gi4 profile 19",
    "gpu0/gi4 start 6",
    "gpu0/gi4 size 1",
]


def test_mig_instances_with_their_placements(gpus: Any, open_source: Open) -> None:
    gpus.set(2, *MIG)

    device = devices_of(open_source())[0]

    assert (device.mig_enabled, device.mig_slices) == (True, 8)
    assert [(item.id, item.profile, item.start, item.size) for item in device.mig_instances] == [
        ("MIG-one", "3g.40gb", 0, 4),
        ("MIG-two", "1g.10gb", 5, 1),
        (f"{gpus.uuid(0)}/gi4", "1g.10gb", 6, 1),
    ]
    assert (device.mig_instances[0].memory_total_bytes, device.mig_instances[0].memory_used_bytes) == (
        40 * GIB,
        9 * GIB,
    )
    # In MIG mode the driver gives no utilisation of the whole GPU.
    assert device.gpu_utilization_ratio is None
    # Slices 4 and 7 are free, apart: the larger run is 1 of 2.
    contiguity = mig_contiguity(device)
    assert contiguity is not None
    assert (contiguity.free, contiguity.ratio) == (2.0, 0.5)


def test_placements_that_need_a_privilege_are_named_as_unread(gpus: Any, open_source: Open) -> None:
    gpus.set(1, *MIG, "system unprivileged 1")

    device = devices_of(open_source())[0]

    assert [(item.id, item.profile, item.start) for item in device.mig_instances] == [
        ("MIG-one", "3g.40gb", None),
        ("MIG-two", "1g.10gb", None),
    ]
    assert [item.what for item in device.unread] == ["MIG placements"]
    assert mig_contiguity(device) is None


def test_processes_of_mig_devices(gpus: Any, open_source: Open) -> None:
    gpus.set(1, *MIG, f"gpu0/mig1 procs {os.getpid()}:{GIB}:9:0")

    (process,) = devices_of(open_source())[0].processes

    assert (process.pid, process.memory_bytes, process.mig_instance) == (os.getpid(), GIB, "MIG-two")


# --- processes


def test_processes_have_their_name_and_user(gpus: Any, open_source: Open) -> None:
    gpus.set(2, f"gpu1 procs {os.getpid()}:{5 * GIB}", f"gpu1 gprocs {os.getpid()}:{5 * GIB},{os.getppid()}:?")

    mine, parent = sorted(devices_of(open_source())[1].processes, key=lambda item: item.pid != os.getpid())

    assert mine.name == Path("/proc/self/comm").read_text().strip()
    assert mine.user == getpass.getuser()
    # The same memory, although it is listed for graphics too.
    assert mine.memory_bytes == 5 * GIB
    # The driver may not know.
    assert parent.memory_bytes is None


def test_a_process_that_cannot_be_found_is_named_as_unread(gpus: Any, open_source: Open) -> None:
    gpus.set(1, f"gpu0 procs 4194305:{GIB}")

    device = devices_of(open_source())[0]

    assert (device.processes[0].pid, device.processes[0].name) == (4194305, "")
    assert [item.what for item in device.unread] == ["processes"]


def test_what_the_kubelet_gave_away(gpus: Any, open_source: Open) -> None:
    gpus.set(3, *(line.replace("gpu0", "gpu2") for line in MIG))
    pods = (
        PodDevice("nvidia.com/gpu", gpus.uuid(0), "ml", "train-0", "main"),
        PodDevice("nvidia.com/mig-1g.10gb", "MIG-two", "ml", "serve-0", "main"),
    )
    everything = frozenset({gpus.uuid(0), gpus.uuid(1), "MIG-one", "MIG-two"})

    found = devices_of(open_source(kubelet=FakeKubelet(pods, everything)))

    assert [found[gpu].allocated_milli for gpu in range(3)] == [1000, 0, None]
    assert [item.allocated for item in found[2].mig_instances] == [False, True, None]


def test_shares_of_a_time_sliced_gpu(gpus: Any, open_source: Open) -> None:
    gpus.set(1)
    pods = (PodDevice("nvidia.com/gpu", gpus.uuid(0), "ml", "serve-0", "main", "2"),)
    every = frozenset(f"{gpus.uuid(0)}::{replica}" for replica in range(4))

    assert devices_of(open_source(kubelet=FakeKubelet(pods, every)))[0].allocated_milli == 250


# --- allocators


def test_an_allocators_report_reaches_its_gpu(gpus: Any, open_source: Open, tmp_path: Path) -> None:
    source = open_source(allocators=AllocatorSource(tmp_path / "probe.sock"))
    segment = {
        "device": 0,
        "total_size": 10 * GIB,
        "blocks": [
            {"size": 4 * GIB, "state": "active_allocated"},
            {"size": 2 * GIB, "state": "inactive"},
            {"size": 1 * GIB, "state": "active_pending_free"},
            {"size": 3 * GIB, "state": "inactive"},
        ],
    }
    send(f"unix:{tmp_path / 'probe.sock'}", report([segment], lambda _: {0: {"uuid": gpus.uuid(6)}}))

    snapshot = source.poll()

    (state,) = snapshot.devices[6].allocators
    assert state.process == str(os.getpid())
    assert (state.reserved_bytes, state.free_bytes, state.largest_free_bytes) == (10 * GIB, 5 * GIB, 3 * GIB)
    assert samples(snapshot, "gpu_fragmentation_ratio") == {
        ("node-1", "6", gpus.uuid(6), "allocator"): pytest.approx(0.4)
    }
    assert samples(snapshot, "gpu_fragmentation_index") == {
        ("node-1", "6", gpus.uuid(6), "allocator"): pytest.approx(0.7)
    }


def test_a_report_for_another_machines_gpu_is_named_as_unread(gpus: Any, open_source: Open, tmp_path: Path) -> None:
    source = open_source(allocators=AllocatorSource(tmp_path / "probe.sock"))
    segment = {"device": 0, "total_size": GIB, "blocks": [{"size": GIB, "state": "inactive"}]}
    send(f"unix:{tmp_path / 'probe.sock'}", report([segment], lambda _: {0: {"uuid": "GPU-elsewhere"}}))

    assert [item.what for item in source.poll().unread] == ["allocator reports"]
