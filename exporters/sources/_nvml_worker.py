"""The process that talks to NVML on behalf of `exporters.sources.nvml`, so that a hung driver call hangs only it.

Reads one JSON request a line from standard input, answers with JSON lines on a pipe of its own (a driver may print),
and writes the step and the call that it is in to shared memory before every call, for the parent to read when it gives
up on it. Imports as little as it can: its memory is paid for on every node.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from exporters.sources.processes import ProcessTable

#: Size of the shared memory; the longest NVML function name has 60 characters.
BOARD_BYTES: Final = 128

# Codes of nvmlReturn_t (nvml.h).
_UNSUPPORTED: Final = frozenset({3, 13, 21})  # NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_DATA
_LOST: Final = frozenset({15, 16, 28})  # GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND
_GONE: Final = frozenset({1, 9, 12, 18})  # UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, version mismatch
_NOT_FOUND: Final = 6
_NO_PERMISSION: Final = 4
_TIMED_OUT: Final = 10

_XID: Final = 0x8
_MEMORY_V2: Final = 0x02000028

#: An idle GPU's clocks are low because nothing asks for more: that is not reported.
_REASONS: Final = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
_IDLE: Final = 0x1

#: How long one wait for events may take, and after how many failures in a row, or seconds without return, it is news.
_EVENT_WAIT_MS: Final = 1000
_EVENT_FAILURES: Final = 30
_EVENT_SILENCE_SECONDS: Final = 30.0
_MOST_EVENTS: Final = 1024


class LostError(Exception):
    """This GPU cannot be read."""


class GoneError(Exception):
    """The driver cannot be used at all."""


def throttle_reasons(bits: int) -> list[str]:
    """Name the reasons in an NVML bit mask, as nvidia-smi does; an unknown bit is ``bit_N``."""
    return [
        _REASONS.get(1 << at, f"bit_{at}") for at in range(bits.bit_length()) if bits >> at & 1 and 1 << at != _IDLE
    ]


def mig_profile(name: str, slices: int = 0, memory_mb: int = 0) -> str:
    """Return the profile (``1g.10gb``) from the name of a MIG device or profile, else from its size."""
    _, found, profile = name.rpartition("MIG ")
    if found:
        return profile.strip()
    return f"{slices}g.{-(-memory_mb // 1024)}gb" if slices and memory_mb else ""


class Reader:
    """Reads GPUs through pynvml.

    ``stage`` is told the step and the call before each call; ``answer`` gets the UUID of a GPU as soon as it is known,
    so that the GPU has its name should a later call hang.
    """

    def __init__(self, nvml: Any, stage: Callable[[str, str], None], answer: Callable[[dict[str, Any]], None]) -> None:
        self._nvml = nvml
        self._stage = stage
        self._answer = answer
        self._named: dict[int, str] = {}
        self._step = ""
        self._watched: dict[int, int] = {}
        self._event_set: Any = None
        self._events: deque[tuple[int, int, float]] = deque(maxlen=_MOST_EVENTS)
        self._event_error = ""
        self._event_returned = time.monotonic()
        self._waiting = False
        self._profiles: dict[str, list[Any]] = {}
        self._slices: dict[str, int] = {}

    def step(self, name: str) -> None:
        """Say that what follows belongs to the step ``name``."""
        self._step = name
        self._stage(name, "")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of pynvml.

        Raises:
            LostError, GoneError: by the error's code; any other NVMLError passes.
        """
        self._stage(self._step, name)
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in _LOST:
                raise LostError(str(error)) from None
            if error.value in _GONE:
                raise GoneError(str(error)) from None
            raise

    def start(self) -> dict[str, Any]:
        """Load the library and return what the driver says of itself."""
        self.step("init")
        self.call("nvmlInit")
        driver = self._text(self.call("nvmlSystemGetDriverVersion"))
        return {"type": "init", "driver": driver, "count": self.call("nvmlDeviceGetCount")}

    def gpu(self, index: int) -> dict[str, Any]:
        """Read one GPU. Keys are the fields of `exporters.sources.nvml.GpuReading`; what is not supported is absent."""
        self.step(f"gpu {index}")
        reading: dict[str, Any] = {"type": "gpu", "index": index, "unread": []}
        try:
            self._read_gpu(index, reading)
        except LostError as error:
            reading["down"] = str(error)
        except self._nvml.NVMLError as error:
            # Only getting the handle or the identity fails so.
            reading["down"] = str(error)
        return reading

    def _read_gpu(self, index: int, out: dict[str, Any]) -> None:
        handle = self.call("nvmlDeviceGetHandleByIndex", index)
        out["uuid"] = self._text(self.call("nvmlDeviceGetUUID", handle))
        if self._named.get(index) != out["uuid"]:
            self._named[index] = out["uuid"]
            self._answer({"type": "name", "index": index, "uuid": out["uuid"]})
        before = len(out)
        self._field(out, "name", self._text, "nvmlDeviceGetName", handle)
        self._field(out, "minor", int, "nvmlDeviceGetMinorNumber", handle)
        self._field(out, "bus", lambda pci: self._text(pci.busId), "nvmlDeviceGetPciInfo", handle)
        self._memory(out, handle)
        self._field(
            out,
            "utilization",
            lambda rates: [rates.gpu, rates.memory],
            "nvmlDeviceGetUtilizationRates",
            handle,
        )
        self._field(out, "power_mw", int, "nvmlDeviceGetPowerUsage", handle)
        self._field(out, "power_limit_mw", int, "nvmlDeviceGetEnforcedPowerLimit", handle)
        self._field(out, "energy_mj", int, "nvmlDeviceGetTotalEnergyConsumption", handle)
        self._field(out, "temperature", int, ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), handle, 0)
        self._field(out, "sm_mhz", int, "nvmlDeviceGetClockInfo", handle, 1)
        self._field(out, "memory_mhz", int, "nvmlDeviceGetClockInfo", handle, 2)
        self._field(out, "ecc_corrected", int, "nvmlDeviceGetTotalEccErrors", handle, 0, 0)
        self._field(out, "ecc_uncorrected", int, "nvmlDeviceGetTotalEccErrors", handle, 1, 0)
        self._field(
            out,
            "throttle",
            throttle_reasons,
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
            handle,
        )
        self._field(out, "mig_enabled", lambda modes: bool(modes[0]), "nvmlDeviceGetMigMode", handle)
        processes: dict[tuple[int, str], dict[str, Any]] = {}
        if out.get("mig_enabled"):
            self._mig(out, handle, processes)
        else:
            self._processes(out, handle, "", processes)
        out["processes"] = list(processes.values())
        if out["unread"] and len(out) == before + 1:
            raise LostError(out["unread"][0][1])
        self._watch(out, index, handle)

    def _field(
        self,
        out: dict[str, Any],
        key: str,
        convert: Callable[[Any], Any],
        names: str | tuple[str, ...],
        *arguments: Any,
    ) -> bool:
        """Set ``out[key]``; without support leave it out, and note any other failure. Whether it is there."""
        for name in (names,) if isinstance(names, str) else names:
            if not hasattr(self._nvml, name):
                continue
            try:
                out[key] = convert(self.call(name, *arguments))
                return True
            except self._nvml.NVMLError as error:
                if error.value not in _UNSUPPORTED:
                    out["unread"].append([key, str(error)])
                    return False
        return False

    def _memory(self, out: dict[str, Any], handle: Any) -> None:
        def full(info: Any) -> list[int]:
            return [info.total, info.used, info.reserved]

        # Version 1 counts what the driver keeps as used.
        quiet: dict[str, Any] = {"unread": []}
        if self._field(quiet, "memory", full, "nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2):
            out["memory"] = quiet["memory"]
        else:
            self._field(out, "memory", lambda info: [info.total, info.used, None], "nvmlDeviceGetMemoryInfo", handle)

    def _processes(
        self, out: dict[str, Any], handle: Any, instance: str, found: dict[tuple[int, str], dict[str, Any]]
    ) -> None:
        for kind in ("Compute", "Graphics", "MPSCompute"):
            name = f"nvmlDeviceGet{kind}RunningProcesses"
            read: dict[str, Any] = {"unread": []}
            self._field(read, "list", list, (name, f"{name}_v2"), handle)
            out["unread"].extend(["processes", why] for _, why in read["unread"])
            for item in read.get("list", ()):
                # A process may compute and draw: its memory is the same memory.
                reading = {"pid": item.pid, "memory": item.usedGpuMemory, "instance": instance}
                found.setdefault((item.pid, instance), reading)

    # --- MIG

    def _mig(self, out: dict[str, Any], handle: Any, processes: dict[tuple[int, str], dict[str, Any]]) -> None:
        if out["uuid"] not in self._profiles:
            self._profiles[out["uuid"]] = self._profiles_of(handle)
        profiles = self._profiles[out["uuid"]]
        instances = self._gpu_instances(out, handle, profiles)
        found: list[dict[str, Any]] = []
        out["mig"] = found
        handles = []
        most: dict[str, Any] = {"unread": []}
        self._field(most, "count", int, "nvmlDeviceGetMaxMigDeviceCount", handle)
        for at in range(most.get("count", 0)):
            try:
                child = self.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, at)
            except self._nvml.NVMLError as error:
                if error.value == _NOT_FOUND or error.value in _UNSUPPORTED:
                    continue
                out["unread"].append([f"MIG device {at}", str(error)])
                continue
            item: dict[str, Any] = {"unread": out["unread"], "profile": "", "gi": None, "ci": None}
            self._field(item, "uuid", self._text, "nvmlDeviceGetUUID", child)
            self._field(item, "profile", lambda name: mig_profile(self._text(name)), "nvmlDeviceGetName", child)
            self._field(item, "gi", int, "nvmlDeviceGetGpuInstanceId", child)
            self._field(item, "ci", int, "nvmlDeviceGetComputeInstanceId", child)
            self._memory(item, child)
            placed = instances.get(item["gi"], {})
            item.update(start=placed.get("start"), size=placed.get("size"))
            item["profile"] = item["profile"] or placed.get("profile", "")
            del item["unread"]
            found.append(item)
            handles.append((item.get("uuid", ""), child))
        taken = {item["gi"] for item in found}
        # A GPU instance without compute instance is no MIG device, and takes its slices all the same.
        found.extend({"gi": gi, "ci": None, **placed} for gi, placed in instances.items() if gi not in taken)
        for uuid, child in handles:
            self._processes(out, child, uuid, processes)
        if out["uuid"] not in self._slices:
            self._slices[out["uuid"]] = max(
                (end for profile in profiles for end in self._placement_ends(handle, profile.id)), default=0
            )
        if self._slices[out["uuid"]]:
            out["mig_slices"] = self._slices[out["uuid"]]

    def _profiles_of(self, handle: Any) -> list[Any]:
        found = []
        for number in range(getattr(self._nvml, "NVML_GPU_INSTANCE_PROFILE_COUNT", 0)):
            try:
                found.append(self.call("nvmlDeviceGetGpuInstanceProfileInfo", handle, number))
            except self._nvml.NVMLError:
                continue
        return found

    def _placement_ends(self, handle: Any, profile: int) -> list[int]:
        """Where each possible placement of a profile ends, in memory slices; empty when that may not be asked."""
        nvml = self._nvml
        count = ctypes.c_uint(0)
        try:
            self.call("nvmlDeviceGetGpuInstancePossiblePlacements", handle, profile, None, ctypes.byref(count))
            places = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
            self.call("nvmlDeviceGetGpuInstancePossiblePlacements", handle, profile, places, ctypes.byref(count))
        except nvml.NVMLError:
            return []
        return [place.start + place.size for place in places[: count.value]]

    def _gpu_instances(self, out: dict[str, Any], handle: Any, profiles: list[Any]) -> dict[int, dict[str, Any]]:
        nvml = self._nvml
        found: dict[int, dict[str, Any]] = {}
        for profile in profiles:
            most = max(1, profile.instanceCount)
            handles = (nvml.c_nvmlGpuInstance_t * most)()
            count = ctypes.c_uint(most)
            try:
                self.call("nvmlDeviceGetGpuInstances", handle, profile.id, handles, ctypes.byref(count))
                for gpu_instance in handles[: count.value]:
                    info = self.call("nvmlGpuInstanceGetInfo", gpu_instance)
                    found[info.id] = {
                        "profile": mig_profile(self._text(profile.name), profile.sliceCount, profile.memorySizeMB),
                        "start": info.placement.start,
                        "size": info.placement.size,
                    }
            except nvml.NVMLError as error:
                if error.value == _NO_PERMISSION:
                    out["unread"].append(["MIG placements", f"{error}: needs root or the MIG monitor capability"])
                    return {}
                if error.value not in _UNSUPPORTED and error.value != _NOT_FOUND:
                    out["unread"].append(["MIG placements", str(error)])
        return found

    # --- events

    def _watch(self, out: dict[str, Any], index: int, handle: Any) -> None:
        """Register for XID errors, once for each GPU that has them."""
        address = ctypes.cast(handle, ctypes.c_void_p).value or 0
        if address in self._watched:
            return
        try:
            if self._event_set is None:
                self._event_set = self.call("nvmlEventSetCreate")
            if self.call("nvmlDeviceGetSupportedEventTypes", handle) & _XID:
                self.call("nvmlDeviceRegisterEvents", handle, _XID, self._event_set)
        except self._nvml.NVMLError as error:
            if error.value not in _UNSUPPORTED:
                out["unread"].append(["XID events", str(error)])
                return
        self._watched[address] = index

    def events(self) -> dict[str, Any]:
        """Return the XID errors since the last call, and start to wait for more.

        NVML keeps only the last code of several errors, so that a thread waits for each as it comes.
        """
        self.step("events")
        if self._event_set is not None and not self._waiting:
            self._waiting = True
            self._event_returned = time.monotonic()
            threading.Thread(target=self._wait, name="events", daemon=True).start()
        xids = []
        while self._events:
            index, code, when = self._events.popleft()
            xids.append({"index": index, "code": code, "time": when})
        silent = time.monotonic() - self._event_returned
        error = self._event_error
        if self._waiting and silent > _EVENT_SILENCE_SECONDS:
            error = f"nvmlEventSetWait has not returned for {silent:.0f} s"
        return {"type": "events", "xids": xids, "error": error}

    def _wait(self) -> None:
        failures = 0
        while failures < _EVENT_FAILURES:
            try:
                data = self._nvml.nvmlEventSetWait(self._event_set, _EVENT_WAIT_MS)
                address = ctypes.cast(data.device, ctypes.c_void_p).value or 0
                if data.eventType & _XID and address in self._watched:
                    self._events.append((self._watched[address], int(data.eventData), time.time()))
                failures, self._event_error = 0, ""
            except self._nvml.NVMLError as error:
                if error.value == _TIMED_OUT:
                    failures, self._event_error = 0, ""
                else:
                    failures += 1
                    self._event_error = str(error)
                    time.sleep(_EVENT_WAIT_MS / 1000)
            self._event_returned = time.monotonic()
        # Over: report the error from now on, not the silence.
        self._waiting = False
        self._event_set = None

    @staticmethod
    def _text(value: Any) -> str:
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def serve(requests: Any, answer: Callable[[dict[str, Any]], None], stage: Callable[[str, str], None]) -> None:
    """Answer requests until there are no more, or the driver is gone."""
    stage("init", "import pynvml")
    try:
        reader = Reader(importlib.import_module("pynvml"), stage, answer)
    except ImportError:
        answer({"type": "gone", "why": "the Python package nvidia-ml-py is not installed"})
        return
    nvml_error = reader._nvml.NVMLError
    try:
        started = reader.start()
        reader.step("idle")
        answer(started)
        table = ProcessTable()
        for line in requests:
            request = json.loads(line)
            pids: set[int] = set()
            for index in range(started["count"]):
                if index not in request["skip"]:
                    reading = reader.gpu(index)
                    pids.update(item["pid"] for item in reading.get("processes", ()))
                    answer(reading)
            if request["events"]:
                answer(reader.events())
            if request["processes"]:
                reader.step("processes")
                owners = table.owners(pids | set(request["pids"]))
                answer({"type": "processes", "owners": {str(pid): list(owner) for pid, owner in owners.items()}})
            reader.step("idle")
            answer({"type": "done"})
    except (GoneError, LostError, nvml_error) as error:
        answer({"type": "gone", "why": str(error)})


def main() -> None:
    """Run the worker: ``argv`` is the file descriptors of the answer pipe and of the shared memory."""
    # Ctrl-C reaches the whole group; the parent ends its worker by closing standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out, shared = int(sys.argv[1]), int(sys.argv[2])
    board = mmap.mmap(shared, BOARD_BYTES)

    def stage(step: str, call: str) -> None:
        board[:] = f"{step}\n{call}".encode()[:BOARD_BYTES].ljust(BOARD_BYTES, b"\0")

    def answer(item: dict[str, Any]) -> None:
        data = json.dumps(item).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]

    try:
        serve(sys.stdin, answer, stage)
    except BrokenPipeError:
        pass
    except Exception as error:
        answer({"type": "gone", "why": f"the NVML worker failed: {type(error).__name__}: {error}"})
    finally:
        # A thread may be inside the driver, where an orderly exit would wait for it.
        os._exit(0)
