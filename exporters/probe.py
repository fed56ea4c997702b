"""A probe for training and serving processes: reports how scattered PyTorch's cached GPU memory is.

Imports only the standard library, and torch when the process has it, so that this one file can be copied into a
container. In the process to watch::

    from exporters import probe
    probe.start()                     # or probe.start("unix:/run/prioscope/allocator.sock", interval_seconds=10)

It never initialises CUDA, never blocks on the exporter, never raises into the program, and keeps the time spent on
snapshots under `MOST_OVERHEAD` of wall time by waiting longer where they are slow.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

#: Where the exporter listens; the environment variable ``PRIOSCOPE_PROBE`` overrides it.
DEFAULT_TARGET: Final = "unix:/run/prioscope/allocator.sock"

#: Version of the report. Raised when a field is removed or changes meaning.
REPORT_VERSION: Final = 1

#: Largest share of wall time that snapshots may take.
MOST_OVERHEAD: Final = 0.01

_LIVE: Final = frozenset({"active_allocated", "active_pending_free", "active_awaiting_free"})
_FREE: Final = "inactive"


def summarize(segments: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, int]]:
    """Add up the segments of ``torch.cuda.memory_snapshot()`` by device index.

    Returns bytes per device: ``reserved`` (all segments), ``free`` (blocks in no live allocation), ``largest`` (the
    largest contiguous run of those; segments are separate allocations, so no run spans two), and the count ``blocks``
    of such runs. A block whose release waits for another stream is not free yet.

    Raises:
        ValueError: a segment is not as PyTorch writes it; the message names it.
    """
    totals: dict[int, dict[str, int]] = {}
    for number, segment in enumerate(segments):
        try:
            device, size = int(segment["device"]), int(segment["total_size"])
            blocks = [(int(block["size"]), block["state"]) for block in segment["blocks"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"segment {number}: {type(error).__name__}: {error}") from None
        if size < 0 or device < 0 or sum(length for length, _ in blocks) > size or any(n < 0 for n, _ in blocks):
            raise ValueError(f"segment {number}: its blocks do not fit into its {size} bytes")
        entry = totals.setdefault(device, {"reserved": 0, "free": 0, "largest": 0, "blocks": 0})
        entry["reserved"] += size
        run = 0
        for length, state in [*blocks, (0, "end")]:
            if state == _FREE:
                run += length
            elif state in _LIVE or state == "end":
                if run:
                    entry["free"] += run
                    entry["largest"] = max(entry["largest"], run)
                    entry["blocks"] += 1
                run = 0
            else:
                raise ValueError(f"segment {number}: unknown block state {state!r}")
    return totals


def torch_segments() -> list[Mapping[str, Any]]:
    """Return the allocator's segments; none when this process has not initialised CUDA (this does not do so)."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    try:
        # Without the history of allocations, which may be large; older releases do not have the argument.
        found = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:
        found = torch.cuda.memory_snapshot()
    return list(found)


def torch_devices(indices: Iterable[int]) -> dict[int, dict[str, str]]:
    """Return ``uuid`` and ``bus`` of CUDA devices as NVML spells them, as far as this release of PyTorch has them."""
    torch: Any = sys.modules.get("torch")
    found: dict[int, dict[str, str]] = {}
    for index in indices if torch is not None else ():
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", "") or "")
        if uuid and not uuid.startswith(("GPU-", "MIG-")):
            uuid = f"GPU-{uuid}"
        bus = ""
        if hasattr(properties, "pci_bus_id"):
            bus = f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
        found[index] = {"uuid": uuid, "bus": bus}
    return found


def report(
    segments: Iterable[Mapping[str, Any]], devices: Callable[[Iterable[int]], Mapping[int, Mapping[str, str]]]
) -> bytes:
    """Return one report as JSON: who reports, when, and the sums for each of its devices."""
    totals = summarize(segments)
    names = devices(totals)
    entries = [{"index": index, **names.get(index, {}), **entry} for index, entry in sorted(totals.items())]
    return json.dumps(
        {
            "version": REPORT_VERSION,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
            "devices": entries,
        }
    ).encode()


def send(target: str, data: bytes) -> None:
    """Send a report to ``unix:PATH`` (a datagram socket; dropped when it is full) or replace the file ``file:PATH``.

    Raises:
        OSError: nobody listens, or the file cannot be written.
        ValueError: no such kind of target.
    """
    kind, _, path = target.partition(":")
    if kind == "unix" and path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            client.connect(path)
            client.send(data)
    elif kind == "file" and path:
        # Written beside and renamed, so that a reader never sees half a report.
        partial = Path(f"{path}.{os.getpid()}.partial")
        partial.write_bytes(data)
        partial.replace(path)
    else:
        raise ValueError(f"probe target {target!r} is neither unix:PATH nor file:PATH")


class Probe:
    """Reports in a daemon thread until `stop`.

    Attributes:
        sent: Reports that were sent.
        failed: Reports that could not be made or sent.
        error: The last failure; empty after a success.
    """

    def __init__(
        self,
        target: str,
        interval_seconds: float,
        segments: Callable[[], Iterable[Mapping[str, Any]]],
        devices: Callable[[Iterable[int]], Mapping[int, Mapping[str, str]]],
    ) -> None:
        self.sent = 0
        self.failed = 0
        self.error = ""
        self._target = target
        self._interval = interval_seconds
        self._segments = segments
        self._devices = devices
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prioscope-probe", daemon=True)
        self._thread.start()

    def push(self) -> float:
        """Report once, now, and return the seconds that it took. Never raises."""
        began = time.perf_counter()
        try:
            segments = list(self._segments())
            if segments:
                send(self._target, report(segments, self._devices))
                self.sent += 1
            self.error = ""
        except Exception as error:
            # Whatever goes wrong here must not disturb the program that is watched.
            self.failed += 1
            self.error = f"{type(error).__name__}: {error}"
        return time.perf_counter() - began

    def _run(self) -> None:
        took = self.push()
        while not self._stopped.wait(max(self._interval, took / MOST_OVERHEAD)):
            took = self.push()

    def stop(self) -> None:
        """Stop reporting and wait for a report that is being sent."""
        self._stopped.set()
        self._thread.join()


def start(
    target: str | None = None,
    *,
    interval_seconds: float = 10.0,
    segments: Callable[[], Iterable[Mapping[str, Any]]] = torch_segments,
    devices: Callable[[Iterable[int]], Mapping[int, Mapping[str, str]]] = torch_devices,
) -> Probe:
    """Start to report every ``interval_seconds``.

    Args:
        target: ``unix:PATH`` or ``file:PATH``; by default ``PRIOSCOPE_PROBE`` or `DEFAULT_TARGET`.
        interval_seconds: Shortest time between reports.
        segments: Takes the snapshot, for allocators other than PyTorch's own.
        devices: Names the devices, likewise.

    Raises:
        ValueError: the target is of no known kind, or the interval is not positive.
    """
    where = target or os.environ.get("PRIOSCOPE_PROBE") or DEFAULT_TARGET
    kind, _, path = where.partition(":")
    if kind not in ("unix", "file") or not path:
        raise ValueError(f"probe target {where!r} is neither unix:PATH nor file:PATH")
    if not interval_seconds > 0:
        raise ValueError(f"probe interval {interval_seconds} is not a positive number of seconds")
    return Probe(where, interval_seconds, segments, devices)
