"""NVML: the GPUs of this machine, through pynvml in a process of its own.

A driver call may never return, may crash, and after a driver upgrade works again only in a process that loads the
library anew. So a worker process (`exporters.sources._nvml_worker`) makes the calls, one GPU after the other, and this
side waits a bounded time for each. A GPU that does not answer is reported down with the call that hung; the worker is
killed, a new one reads the other GPUs, and the wedged one is left alone for a time that doubles. Where even the kernel
cannot end a worker, no more than a few are ever left behind.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Protocol, cast

import msgspec

from exporters.errors import SourceUnreachableError
from exporters.model import (
    WHOLE_GPU,
    AllocatorState,
    Device,
    DeviceProcess,
    Event,
    EventKind,
    MigInstance,
    Snapshot,
    Unread,
)
from exporters.sources._nvml_worker import BOARD_BYTES
from exporters.sources.allocator import AllocatorReading, AllocatorSource, match
from exporters.sources.processes import KUBELET_SOCKET, KubeletDevices, Owner, PodDevice

_START: Final = "import sys; sys.path.append(sys.argv.pop(1)); from exporters.sources._nvml_worker import main; main()"

#: How long a killed worker gets to go before it is taken for stuck in the kernel.
_KILL_SECONDS: Final = 0.5

_CURE: Final = "check `nvidia-smi`; the exporter tries again by itself"


@dataclass(frozen=True, slots=True)
class NvmlTiming:
    """Limits in seconds.

    ``start``: for the library to load and initialise (slow without persistence mode). ``step``: for all calls of one
    GPU, for the events and for looking processes up. ``poll``: for one poll over all GPUs; those that it does not reach
    are reported as not read. ``backoff``, ``max_backoff``: how long something that hung is left alone, doubling.
    ``forget``: after which a GPU that the driver no longer lists is no longer reported.
    """

    start: float = 30.0
    step: float = 5.0
    poll: float = 30.0
    backoff: float = 30.0
    max_backoff: float = 600.0
    forget: float = 3600.0


class MigReading(msgspec.Struct, frozen=True):
    """A MIG device, or a GPU instance without compute instance (no ``uuid``). ``memory``: total, used, reserved."""

    profile: str = ""
    uuid: str = ""
    gi: int | None = None
    ci: int | None = None
    start: int | None = None
    size: int | None = None
    memory: tuple[int, int, int | None] | None = None


class ProcessReading(msgspec.Struct, frozen=True):
    """A process on a GPU; ``instance`` is the UUID of its MIG device."""

    pid: int
    memory: int | None = None
    instance: str = ""


class GpuReading(msgspec.Struct, frozen=True, tag="gpu"):
    """What the worker read of one GPU, in NVML's units; None: not supported or not readable (then in ``unread``)."""

    index: int
    uuid: str = ""
    down: str = ""
    name: str = ""
    minor: int | None = None
    bus: str = ""
    memory: tuple[int, int, int | None] | None = None
    utilization: tuple[int, int] | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    energy_mj: int | None = None
    temperature: int | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    throttle: tuple[str, ...] | None = None
    mig_enabled: bool | None = None
    mig_slices: int | None = None
    mig: tuple[MigReading, ...] = ()
    processes: tuple[ProcessReading, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()


class _Init(msgspec.Struct, frozen=True, tag="init"):
    driver: str
    count: int


class _Name(msgspec.Struct, frozen=True, tag="name"):
    index: int
    uuid: str


class _Gone(msgspec.Struct, frozen=True, tag="gone"):
    why: str


class _Xid(msgspec.Struct, frozen=True):
    index: int
    code: int
    time: float


class _Events(msgspec.Struct, frozen=True, tag="events"):
    xids: tuple[_Xid, ...]
    error: str


class _Processes(msgspec.Struct, frozen=True, tag="processes"):
    owners: dict[int, Owner]


class _Done(msgspec.Struct, frozen=True, tag="done"):
    pass


_Answer = _Init | _Gone | _Name | GpuReading | _Events | _Processes | _Done
_decode: Final[Callable[[bytes], _Answer]] = msgspec.json.Decoder(_Answer).decode


class _HungError(Exception):
    """The worker did not answer in time, or died. ``step`` and ``why`` say where and how."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(why)
        self.step = step
        self.why = why


class _DriverGoneError(Exception):
    """NVML cannot be used; the text says why."""


class Child(Protocol):
    """The part of `subprocess.Popen` that `Strays` needs."""

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        ...


class Strays:
    """Killed workers that the kernel has not let go of yet; ``full`` means that no other may be risked."""

    def __init__(self, limit: int = 4) -> None:
        self._limit = limit
        self._children: list[Child] = []

    def add(self, child: Child) -> None:
        """Take in a killed worker."""
        self._children.append(child)

    def reap(self) -> int:
        """Forget those that are gone and return how many are left."""
        self._children = [child for child in self._children if child.poll() is None]
        return len(self._children)

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self.reap() >= self._limit


class _Worker:
    """One worker process and its pipes."""

    def __init__(self) -> None:
        out, answers = os.pipe()
        shared = os.memfd_create("prioscope-nvml")
        try:
            os.ftruncate(shared, BOARD_BYTES)
            self._board = mmap.mmap(shared, BOARD_BYTES)
            root = str(Path(__file__).resolve().parents[2])
            # -P: the working directory is not searched for modules.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-c", _START, root, str(answers), str(shared)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(answers, shared),
            )
        except BaseException:
            os.close(out)
            raise
        finally:
            os.close(answers)
            os.close(shared)
        self._requests = cast("IO[bytes]", self._process.stdin)
        self._out = out
        self._poller = select.poll()
        self._poller.register(out, select.POLLIN)
        self._buffer = bytearray()
        self.count: int | None = None

    def send(self, request: object) -> None:
        """Send a request; a worker that died is noticed by `receive`."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()

    def receive(self, seconds: float) -> _Answer:
        """Return the next answer.

        Raises:
            _HungError: none came in time, or the worker died.
            _DriverGoneError: the worker says so.
        """
        deadline = time.monotonic() + seconds
        while (end := self._buffer.find(b"\n")) < 0:
            left = deadline - time.monotonic()
            if left <= 0 or not self._poller.poll(left * 1000):
                raise self._hung(f"no answer within {seconds:g} s")
            data = os.read(self._out, 65536)
            if not data:
                raise self._hung(self._death())
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        answer = _decode(line)
        if isinstance(answer, _Gone):
            raise _DriverGoneError(answer.why)
        return answer

    def _hung(self, what: str) -> _HungError:
        step, _, call = self._board[:].rstrip(b"\0").decode(errors="replace").partition("\n")
        return _HungError(step or "init", f"{what} ({call})" if call else what)

    def _death(self) -> str:
        try:
            status = self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return "the NVML worker closed its answers"
        if status >= 0:
            return f"the NVML worker ended with status {status}"
        return f"the NVML worker died: {signal.strsignal(-status)}"

    def stop(self, strays: Strays) -> None:
        """End the process: by itself if it can, else by force; one that stays goes to ``strays``."""
        self._end(strays, kill_after=_KILL_SECONDS)

    def kill(self, strays: Strays) -> None:
        """End a process that hangs."""
        self._end(strays, kill_after=0.0)

    def _end(self, strays: Strays, kill_after: float) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(kill_after)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                strays.add(self._process)
        os.close(self._out)
        self._board.close()


class _Quarantine:
    """Steps that hung, and until when they are left alone."""

    def __init__(self, timing: NvmlTiming) -> None:
        self._timing = timing
        self._until: dict[str, tuple[float, int, str]] = {}

    def add(self, step: str, why: str) -> None:
        failures = self._until.get(step, (0.0, 0, ""))[1] + 1
        wait = min(self._timing.max_backoff, self._timing.backoff * 2.0 ** min(failures - 1, 30))
        self._until[step] = (time.monotonic() + wait, failures, why)

    def reason(self, step: str) -> str | None:
        """Why the step is to be left out now; None: it may be tried."""
        until, _, why = self._until.get(step, (0.0, 0, ""))
        return why if time.monotonic() < until else None

    def clear(self, step: str) -> None:
        self._until.pop(step, None)

    def clear_gpus(self) -> None:
        self._until = {step: item for step, item in self._until.items() if not step.startswith("gpu ")}


@dataclass(slots=True)
class _Sweep:
    """What one poll found, by index of the GPU."""

    read: dict[int, GpuReading] = field(default_factory=dict)
    wedged: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    xids: list[_Xid] = field(default_factory=list)
    owners: dict[int, Owner] | None = None
    unread: list[Unread] = field(default_factory=list)
    count: int | None = None
    gone: str = ""


@dataclass(slots=True)
class _Known:
    """A GPU that was seen before."""

    device: Device
    seen: float
    xids: dict[str, int] = field(default_factory=dict)


class NvmlSource:
    """Reads the GPUs of this machine.

    Args:
        cluster: Name of the cluster in the snapshots.
        node: Name of this machine as the scheduler has it; by default ``NODE_NAME``, else the host name.
        timing: Limits and delays.
        allocators: Where reports of caching allocators come in, if anywhere. Closed with this source.
        kubelet: Who says which pod holds a device; by default the kubelet of this machine, where it has one.
        processes: Whether to look up to whom processes belong.

    Use from one thread, or several (polls then take turns); close it when done.
    """

    def __init__(
        self,
        *,
        cluster: str = "",
        node: str = "",
        timing: NvmlTiming | None = None,
        allocators: AllocatorSource | None = None,
        kubelet: KubeletDevices | None = None,
        processes: bool = True,
    ) -> None:
        self.cluster = cluster
        self.node = node or os.environ.get("NODE_NAME") or socket.gethostname()
        self._timing = timing or NvmlTiming()
        self._allocators = allocators
        self._kubelet = kubelet or KubeletDevices(KUBELET_SOCKET)
        self._processes = processes
        self._worker: _Worker | None = None
        self._strays = Strays()
        self._quarantine = _Quarantine(self._timing)
        self._known: dict[str, _Known] = {}
        self._by_index: dict[int, str] = {}
        self._recycle = False
        self._lock = threading.Lock()

    @property
    def workers_left_behind(self) -> int:
        """Workers that were killed and that the kernel still holds, as with a GPU in an uninterruptible wait."""
        return self._strays.reap()

    def poll(self) -> Snapshot:
        """Read all GPUs.

        Takes at most about ``timing.poll`` plus one step. A GPU that cannot be read is in the snapshot with
        ``up=False`` and the reason.

        Raises:
            SourceUnreachableError: the driver cannot be used and no GPU was ever seen, so that there is nothing to say.
        """
        with self._lock:
            now = time.time()
            readings, problems = self._allocators.read() if self._allocators else ((), ())
            sweep = self._sweep({item.pid for item in readings if item.pid})
            if sweep.gone and not sweep.read and not self._known:
                raise SourceUnreachableError(f"NVML: {sweep.gone}", cure=_CURE)
            unread = list(sweep.unread)
            if sweep.gone:
                unread.append(Unread("driver", sweep.gone))
            pods, allocatable = self._ask_kubelet(unread)
            devices, events = self._merge(sweep, now, pods, allocatable)
            unread.extend(problems)
            devices = _with_allocators(devices, readings, sweep.owners or {}, unread)
        return Snapshot(
            time=now,
            cluster=self.cluster,
            source="nvml",
            devices=tuple(devices),
            events=tuple(events),
            unread=tuple(unread),
        )

    def close(self) -> None:
        """End the worker and the allocators' socket. Bounded, also when the driver hangs."""
        with self._lock:
            if self._worker is not None:
                self._worker.stop(self._strays)
                self._worker = None
            self._kubelet.close()
            if self._allocators is not None:
                self._allocators.close()

    def __enter__(self) -> NvmlSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- talking to the worker

    def _sweep(self, pids: set[int]) -> _Sweep:
        """Read what can be read, with a new worker after each one that hung, until all is tried or time is up.

        ``pids`` are looked up beside the processes that the driver lists.
        """
        found = _Sweep()
        deaths = 0
        deadline = time.monotonic() + self._timing.poll
        if self._recycle and self._quarantine.reason("recycle") is None:
            # A GPU that was reset, or a driver that was replaced, comes back only to a fresh process.
            self._recycle = False
            self._quarantine.add("recycle", "")
            self._discard(by_force=False)
        while True:
            try:
                worker = self._start()
                found.count = worker.count
                self._ask(worker, found, pids, deadline)
                break
            except _DriverGoneError as error:
                found.gone = str(error)
                self._discard(by_force=False)
                break
            except _HungError as error:
                self._discard(by_force=True)
                if error.step == "idle" and deaths == 0:
                    # It died between polls (out of memory, an operator): no GPU is to blame.
                    deaths += 1
                    continue
                if error.step == "poll":
                    break
                self._quarantine.add(error.step, error.why)
                if error.step.startswith("gpu "):
                    found.wedged[int(error.step.removeprefix("gpu "))] = error.why
                elif error.step in ("events", "processes"):
                    found.unread.append(Unread(error.step, error.why))
                else:
                    found.gone = error.why
                    break
                if time.monotonic() >= deadline:
                    break
        for index in range(found.count or 0):
            if index not in found.read and index not in found.wedged:
                found.wedged[index] = found.gone or "the driver answers too slowly for one poll"
        return found

    def _start(self) -> _Worker:
        """Return the worker, starting one if there is none."""
        if self._worker is None:
            why = self._quarantine.reason("init")
            if why is not None:
                raise _DriverGoneError(why)
            if self._strays.full:
                raise _DriverGoneError("killed NVML workers are stuck in the driver; no other is started")
            self._worker = _Worker()
        worker = self._worker
        if worker.count is None:
            answer = worker.receive(self._timing.start)
            if not isinstance(answer, _Init):
                raise _HungError("init", "the NVML worker answered out of turn")
            worker.count = answer.count
            self._quarantine.clear("init")
            if self._by_index and set(range(answer.count)) != set(self._by_index):
                # The driver numbers anew what is left: an index may mean another GPU now.
                self._quarantine.clear_gpus()
        return worker

    def _ask(self, worker: _Worker, found: _Sweep, pids: set[int], deadline: float) -> None:
        for index in range(worker.count or 0):
            why = self._quarantine.reason(f"gpu {index}")
            if why is not None and index not in found.read:
                found.wedged.setdefault(index, why)
        request = {
            "skip": sorted({*found.read, *found.wedged}),
            "events": self._quarantine.reason("events") is None,
            "processes": self._processes and self._quarantine.reason("processes") is None,
            "pids": sorted(pids | {item.pid for reading in found.read.values() for item in reading.processes}),
        }
        for step in ("events", "processes"):
            why = self._quarantine.reason(step)
            if why is not None and not any(item.what == step for item in found.unread):
                found.unread.append(Unread(step, why))
        worker.send(request)
        while True:
            if time.monotonic() >= deadline:
                raise _HungError("poll", "the driver answers too slowly for one poll")
            answer = worker.receive(self._timing.step)
            match answer:
                case _Name():
                    found.names[answer.index] = answer.uuid
                case GpuReading():
                    found.read[answer.index] = answer
                    if answer.down:
                        self._recycle = True
                    else:
                        self._quarantine.clear(f"gpu {answer.index}")
                case _Events():
                    found.xids.extend(answer.xids)
                    self._quarantine.clear("events")
                    if answer.error:
                        found.unread.append(Unread("events", answer.error))
                        self._recycle = True
                case _Processes():
                    found.owners = answer.owners
                    self._quarantine.clear("processes")
                case _Done():
                    if not self._recycle:
                        self._quarantine.clear("recycle")
                    return
                case _:
                    raise _HungError("poll", "the NVML worker answered out of turn")

    def _discard(self, *, by_force: bool) -> None:
        if self._worker is not None:
            if by_force:
                self._worker.kill(self._strays)
            else:
                self._worker.stop(self._strays)
            self._worker = None

    def _ask_kubelet(self, unread: list[Unread]) -> tuple[tuple[PodDevice, ...], frozenset[str] | None]:
        if not self._kubelet.present or self._quarantine.reason("kubelet") is not None:
            return (), None
        try:
            found = self._kubelet.devices()
        except SourceUnreachableError as error:
            self._quarantine.add("kubelet", str(error))
            unread.append(Unread("kubelet pod resources", str(error)))
            return (), None
        self._quarantine.clear("kubelet")
        return found

    # --- turning readings into the model

    def _merge(
        self, sweep: _Sweep, now: float, pods: Sequence[PodDevice], allocatable: frozenset[str] | None
    ) -> tuple[list[Device], list[Event]]:
        by_index = dict(self._by_index) if sweep.gone else {}
        fresh: dict[str, Device] = {}
        down: dict[str, str] = {}
        for index, reading in sweep.read.items():
            uuid = reading.uuid or self._by_index.get(index) or f"{self.node}:{index}"
            by_index[index] = uuid
            if reading.down:
                down[uuid] = reading.down
                self._known.setdefault(uuid, _Known(Device(uuid, self.node, index), now))
            else:
                fresh[uuid] = _device(reading, self.node, _Held(pods, allocatable), sweep.owners)
        for index, why in sweep.wedged.items():
            uuid = sweep.names.get(index) or self._by_index.get(index) or f"{self.node}:{index}"
            by_index[index] = uuid
            down[uuid] = why
            self._known.setdefault(uuid, _Known(Device(uuid, self.node, index), now))
        self._by_index = by_index
        for uuid, device in fresh.items():
            known = self._known.setdefault(uuid, _Known(device, now))
            known.device, known.seen = device, now
        for index, uuid in by_index.items():
            # What stood for this GPU while its UUID could not be read.
            if uuid != f"{self.node}:{index}":
                self._known.pop(f"{self.node}:{index}", None)
        events = self._count_xids(sweep.xids, now)
        devices = []
        for uuid, known in list(self._known.items()):
            if uuid in fresh:
                devices.append(msgspec.structs.replace(fresh[uuid], xid_errors=dict(known.xids)))
                continue
            why = down.get(uuid) or sweep.gone
            if why:
                known.seen = now
            elif now - known.seen > self._timing.forget:
                del self._known[uuid]
                continue
            devices.append(_lost(known, why or "the driver no longer lists this GPU"))
        return sorted(devices, key=lambda device: (device.index is None, device.index or 0, device.id)), events

    def _count_xids(self, xids: Iterable[_Xid], now: float) -> list[Event]:
        events = []
        for item in xids:
            uuid = self._by_index.get(item.index, "")
            known = self._known.get(uuid)
            if known is None:
                continue
            code = str(item.code)
            known.xids[code] = known.xids.get(code, 0) + 1
            events.append(
                Event(
                    id=f"xid:{uuid}:{item.time:.6f}:{code}",
                    kind=EventKind.XID,
                    time=min(item.time, now),
                    node=self.node,
                    device=uuid,
                    reason=f"XID {code}",
                )
            )
        return events


def _with_allocators(
    devices: list[Device], readings: Sequence[AllocatorReading], owners: dict[int, Owner], unread: list[Unread]
) -> list[Device]:
    assigned = match(readings, devices)
    if homeless := assigned.pop("", []):
        unread.append(Unread("allocator reports", f"{len(homeless)} for GPUs that the driver does not list"))

    def state(reading: AllocatorReading) -> AllocatorState:
        return msgspec.structs.replace(reading.state, workload=_workload(owners.get(reading.pid, Owner())))

    return [
        msgspec.structs.replace(device, allocators=tuple(state(item) for item in assigned[device.id]))
        if device.id in assigned
        else device
        for device in devices
    ]


class _Held:
    """Look-ups over what the kubelet gave away."""

    def __init__(self, pods: Sequence[PodDevice], allocatable: frozenset[str] | None) -> None:
        self._pods = pods
        self._allocatable = allocatable

    def holder(self, *devices: str) -> PodDevice | None:
        """The pod that holds a device, when it is the only one."""
        found = [item for item in self._pods if item.device in devices]
        return found[0] if len({(item.namespace, item.pod) for item in found}) == 1 else None

    def given(self, device: str) -> bool | None:
        """Whether a device was given to a pod; None: not known, or not the kubelet's to give."""
        if any(item.device == device for item in self._pods):
            return True
        known = {name.partition("::")[0] for name in self._allocatable or ()}
        return False if device in known else None

    def milli(self, device: str) -> int | None:
        """How much of a GPU was given away; of a time-sliced GPU the share of its replicas."""
        given = sum(1 for item in self._pods if item.device == device)
        every = sum(1 for name in self._allocatable or () if name.partition("::")[0] == device)
        if every:
            return WHOLE_GPU * min(given, every) // every
        return WHOLE_GPU if given else None


def _workload(owner: Owner) -> str:
    """The `Workload.id` of a process: its pod's UID or its Slurm job."""
    return owner.pod_uid or owner.job


def _device(reading: GpuReading, node: str, held: _Held, owners: dict[int, Owner] | None) -> Device:
    total, used, reserved = reading.memory or (None, None, None)
    busy, accessed = reading.utilization or (None, None)
    unread = [Unread(what, why) for what, why in dict.fromkeys(reading.unread)]
    strangers = 0 if owners is None else sum(item.pid not in owners for item in reading.processes)
    if strangers:
        unread.append(
            Unread(
                "processes", f"{strangers} not found in /proc (ended just now, or the exporter lacks the host's PIDs)"
            )
        )
    return Device(
        id=reading.uuid,
        node=node,
        index=reading.index,
        model=reading.name,
        minor_number=reading.minor,
        pci_bus_id=reading.bus,
        memory_total_bytes=total,
        memory_used_bytes=used,
        memory_reserved_bytes=reserved,
        gpu_utilization_ratio=_scaled(busy, 100),
        memory_utilization_ratio=_scaled(accessed, 100),
        power_watts=_scaled(reading.power_mw, 1000),
        power_limit_watts=_scaled(reading.power_limit_mw, 1000),
        energy_joules=_scaled(reading.energy_mj, 1000),
        temperature_celsius=_scaled(reading.temperature, 1),
        sm_clock_hertz=_scaled(reading.sm_mhz, 1e-6),
        memory_clock_hertz=_scaled(reading.memory_mhz, 1e-6),
        ecc_corrected=reading.ecc_corrected,
        ecc_uncorrected=reading.ecc_uncorrected,
        throttle_reasons=reading.throttle,
        allocated_milli=held.milli(reading.uuid),
        mig_enabled=reading.mig_enabled,
        mig_slices=reading.mig_slices if reading.mig_enabled else None,
        mig_instances=tuple(_mig(item, reading.uuid, held) for item in reading.mig),
        processes=tuple(_process(item, reading.uuid, held, owners or {}) for item in reading.processes),
        unread=tuple(unread),
    )


def _scaled(value: float | None, units: float) -> float | None:
    return None if value is None else value / units


def _mig(reading: MigReading, gpu: str, held: _Held) -> MigInstance:
    total, used, _ = reading.memory or (None, None, None)
    return MigInstance(
        id=reading.uuid or f"{gpu}/gi{reading.gi}",
        profile=reading.profile,
        start=reading.start,
        size=reading.size,
        gpu_instance_id=reading.gi,
        compute_instance_id=reading.ci,
        memory_total_bytes=total,
        memory_used_bytes=used,
        allocated=held.given(reading.uuid) if reading.uuid else None,
    )


def _process(reading: ProcessReading, gpu: str, held: _Held, owners: dict[int, Owner]) -> DeviceProcess:
    owner = owners.get(reading.pid, Owner())
    namespace, pod, container = owner.namespace, owner.pod, ""
    holder = held.holder(reading.instance or gpu)
    if holder is not None and owner.pod_uid and pod in ("", holder.pod):
        namespace, pod, container = holder.namespace, holder.pod, holder.container
    return DeviceProcess(
        pid=reading.pid,
        name=owner.name,
        memory_bytes=reading.memory,
        workload=_workload(owner),
        namespace=namespace,
        pod=pod,
        container=container or owner.container,
        job=owner.job,
        user=owner.user,
        mig_instance=reading.instance,
    )


def _lost(known: _Known, why: str) -> Device:
    """A GPU that cannot be read now: who it is and what it counted, and no readings."""
    last = known.device
    return Device(
        id=last.id,
        node=last.node,
        index=last.index,
        model=last.model,
        up=False,
        reason=why,
        minor_number=last.minor_number,
        pci_bus_id=last.pci_bus_id,
        xid_errors=dict(known.xids),
    )
