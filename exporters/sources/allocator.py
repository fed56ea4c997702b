"""Caching allocators: what PyTorch processes say about the memory they cached on each GPU (spec M1).

Two ways in. `load_snapshot` reads a pickle that ``torch.cuda.memory._dump_snapshot`` wrote, with an unpickler that
builds nothing but plain containers, strings and numbers, so that a file from elsewhere cannot run code.
`AllocatorSource` receives the reports of `exporters.probe` on a unix socket, and reads report files and pickles from a
folder.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import msgspec

from exporters.errors import InvalidInputError, NotFoundError, SourceUnreachableError
from exporters.model import AllocatorState, Device, Unread
from exporters.probe import REPORT_VERSION, summarize

#: A snapshot with a long history may have hundreds of MiB; more than this is not read.
MAX_PICKLE_BYTES: Final = 1024 * 1024 * 1024

#: A report has under 200 bytes a device.
MAX_REPORT_BYTES: Final = 64 * 1024

#: Blocks over all segments of a snapshot; references may make a small file look large.
MAX_BLOCKS: Final = 20_000_000

_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, tuples, sets, strings, bytes, numbers, booleans and None; refuses any import."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}; a memory snapshot has only plain data")

    def persistent_load(self, _: object) -> NoReturn:
        raise pickle.UnpicklingError("it has a persistent id; a memory snapshot has only plain data")


def load_snapshot(path: Path | str, max_bytes: int = MAX_PICKLE_BYTES) -> list[Mapping[str, Any]]:
    """Return the segments of a pickled snapshot (``_snapshot()`` or, from older releases, ``memory_snapshot()``).

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: the file is too large, not a pickle, holds anything but plain data, or no segments.
    """
    path = Path(path)
    cure = "write it with torch.cuda.memory._dump_snapshot; pickles with code in them are never loaded"
    try:
        with path.open("rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise InvalidInputError(f"{path} is not a regular file", cure=cure)
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise InvalidInputError(
                    f"{path} has {size} bytes; at most {max_bytes} are read",
                    cure="record less history: torch.cuda.memory._record_memory_history(max_entries=...)",
                )
            loaded = _PlainUnpickler(stream).load()
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist", cure=cure) from None
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}", cure=cure) from None
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        # What damaged and hostile pickles raise; none of it needs a traceback.
        raise InvalidInputError(
            f"{path} is not a memory snapshot: {error or type(error).__name__}", cure=cure
        ) from None
    segments = loaded.get("segments") if isinstance(loaded, dict) else loaded
    if not isinstance(segments, list):
        raise InvalidInputError(f"{path} is not a memory snapshot: it has no list of segments", cure=cure)
    blocks = 0
    for number, segment in enumerate(segments):
        if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
            raise InvalidInputError(f"{path} segment {number} has no list of blocks", cure=cure)
        blocks += len(segment["blocks"])
        if blocks > MAX_BLOCKS:
            raise InvalidInputError(f"{path} has more than {MAX_BLOCKS} blocks", cure=cure)
    return segments


def snapshot_states(path: Path | str) -> dict[int, AllocatorState]:
    """Return the allocator's state by CUDA device index; the process is named after the file.

    Raises:
        NotFoundError, InvalidInputError: as for `load_snapshot`, or a segment is not as PyTorch writes it.
    """
    try:
        totals = summarize(load_snapshot(path))
    except ValueError as error:
        raise InvalidInputError(
            f"{path} is not a memory snapshot: {error}", cure="write it with torch.cuda.memory._dump_snapshot"
        ) from None
    return {
        device: _state(Path(path).stem, entry["reserved"], entry["free"], entry["largest"], entry["blocks"])
        for device, entry in totals.items()
    }


def _state(process: str, reserved: int, free: int, largest: int, blocks: int) -> AllocatorState:
    return AllocatorState(
        process=process, reserved_bytes=reserved, free_bytes=free, largest_free_bytes=largest, free_blocks=blocks
    )


Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Name = Annotated[str, msgspec.Meta(max_length=128)]


class _ReportDevice(msgspec.Struct, frozen=True, gc=False):
    index: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    reserved: Bytes
    free: Bytes
    largest: Bytes
    blocks: Bytes
    uuid: _Name = ""
    bus: _Name = ""

    def __post_init__(self) -> None:
        if not self.largest <= self.free <= self.reserved:
            raise ValueError("largest <= free <= reserved does not hold")


class _Report(msgspec.Struct, frozen=True):
    version: int
    pid: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    time: float
    devices: Annotated[tuple[_ReportDevice, ...], msgspec.Meta(max_length=64)]
    host: _Name = ""


_report = msgspec.json.Decoder(_Report).decode


class AllocatorReading(msgspec.Struct, frozen=True, gc=False):
    """The state of one process on one device. The device is known by ``uuid``, else ``bus``, else CUDA ``index``.

    ``pid`` is as the exporter's own ``/proc`` has it; 0: not known.
    """

    state: AllocatorState
    pid: int = 0
    uuid: str = ""
    bus: str = ""
    index: int | None = None


class AllocatorSource:
    """Keeps the last report of each process.

    Args:
        socket_path: Where to listen for `exporters.probe`; None: nowhere. Datagrams carry the sender's process id as
            the kernel sees it, so that a probe in a container is known by its id on the host.
        folder: Where to look for reports (``*.json``, target ``file:``) and snapshots (``*.pickle``, ``*.pkl``).
        max_age_seconds: After which a report that is not renewed is forgotten.
        max_processes: Most processes to keep; the oldest go first.
        mode: Permissions of the socket. Everyone may report by default, since jobs run as their users.
    """

    def __init__(
        self,
        socket_path: Path | str | None = None,
        folder: Path | str | None = None,
        *,
        max_age_seconds: float = 60.0,
        max_processes: int = 1024,
        mode: int = 0o666,
    ) -> None:
        self._max_age = max_age_seconds
        self._max_processes = max_processes
        self._folder = None if folder is None else Path(folder)
        self._reports: dict[str, tuple[float, tuple[AllocatorReading, ...]]] = {}
        self._files: dict[Path, tuple[tuple[int, int], tuple[AllocatorReading, ...] | Unread]] = {}
        self._path = None if socket_path is None else Path(socket_path)
        self._socket = None if self._path is None else _listen(self._path, mode)

    def read(self, now: float | None = None) -> tuple[tuple[AllocatorReading, ...], tuple[Unread, ...]]:
        """Take in what arrived and return the current readings, and what could not be read. Does not wait."""
        current = time.time() if now is None else now
        unread = [*self._receive(current), *self._scan(current)]
        self._reports = {key: item for key, item in self._reports.items() if current - item[0] <= self._max_age}
        readings = [reading for _, group in self._reports.values() for reading in group]
        for _, found in self._files.values():
            if not isinstance(found, Unread):
                readings.extend(found)
        return tuple(readings), tuple(unread)

    def _receive(self, now: float) -> list[Unread]:
        if self._socket is None:
            return []
        rejected = 0
        why = ""
        # Bounded, so that a flood of reports cannot keep the poll from ending.
        for _ in range(4 * self._max_processes):
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(MAX_REPORT_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            except OSError as error:
                return [Unread("allocator reports", f"{self._path}: {error.strerror}")]
            pid = 0
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[0]
            try:
                if flags & socket.MSG_TRUNC:
                    raise ValueError(f"longer than {MAX_REPORT_BYTES} bytes")
                report = _parse(data)
            except ValueError as error:
                rejected += 1
                why = f"of process {pid}: {error}"
                continue
            self._keep(f"pid {pid}", now, _readings(report, pid, str(pid)))
        return [Unread("allocator reports", f"{rejected} rejected, the last {why}")] if rejected else []

    def _keep(self, key: str, now: float, readings: tuple[AllocatorReading, ...]) -> None:
        self._reports.pop(key, None)
        self._reports[key] = (now, readings)
        while len(self._reports) > self._max_processes:
            del self._reports[next(iter(self._reports))]

    def _scan(self, now: float) -> list[Unread]:
        if self._folder is None:
            return []
        try:
            entries = sorted(self._folder.iterdir())
        except OSError as error:
            self._files = {}
            return [Unread("allocator folder", f"{self._folder}: {error.strerror}")]
        kept: dict[Path, tuple[tuple[int, int], tuple[AllocatorReading, ...] | Unread]] = {}
        for path in entries:
            if path.suffix not in (".json", ".pickle", ".pkl") or len(kept) >= self._max_processes:
                continue
            with contextlib.suppress(OSError):
                status = path.stat()
                if not stat.S_ISREG(status.st_mode) or now - status.st_mtime > self._max_age:
                    continue
                version = (status.st_mtime_ns, status.st_size)
                known = self._files.get(path)
                kept[path] = known if known and known[0] == version else (version, _from_file(path))
        self._files = kept
        return [found for _, found in kept.values() if isinstance(found, Unread)]

    def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if self._path is not None:
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> AllocatorSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listen(path: Path, mode: int) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        server.setblocking(False)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # What a previous run left behind; never a file that is not a socket.
        if path.is_socket():
            path.unlink()
        server.bind(str(path))
        path.chmod(mode)
    except OSError as error:
        server.close()
        raise SourceUnreachableError(
            f"{path} cannot be listened on: {error.strerror or error}",
            cure="create its folder, writable by the exporter (systemd: RuntimeDirectory=prioscope)",
        ) from None
    return server


def _parse(data: bytes) -> _Report:
    """Decode a report. Raises ValueError (msgspec's errors are)."""
    report = _report(data)
    if report.version != REPORT_VERSION:
        raise ValueError(f"report version {report.version}; this release reads {REPORT_VERSION}")
    return report


def _readings(report: _Report, pid: int, process: str) -> tuple[AllocatorReading, ...]:
    return tuple(
        AllocatorReading(
            _state(process, item.reserved, item.free, item.largest, item.blocks), pid, item.uuid, item.bus, item.index
        )
        for item in report.devices
    )


def _from_file(path: Path) -> tuple[AllocatorReading, ...] | Unread:
    try:
        if path.suffix == ".json":
            with path.open("rb") as stream:
                data = stream.read(MAX_REPORT_BYTES + 1)
            if len(data) > MAX_REPORT_BYTES:
                raise ValueError(f"longer than {MAX_REPORT_BYTES} bytes")
            report = _parse(data)
            # The process id is as the process sees itself, in its own namespace: good as a name, not for look-ups.
            return _readings(report, 0, f"{report.host}/{report.pid}" if report.host else str(report.pid))
        states = snapshot_states(path)
    except (OSError, ValueError, InvalidInputError, NotFoundError) as error:
        return Unread(f"allocator {path.name}", str(error))
    return tuple(AllocatorReading(state, index=index) for index, state in states.items())


def match(readings: Sequence[AllocatorReading], devices: Sequence[Device]) -> dict[str, list[AllocatorReading]]:
    """Assign readings to devices by their id; those of no device are under the empty id.

    A MIG instance's UUID stands for its GPU. The CUDA index counts what the process may see, so that it is only used
    where a reading has neither UUID nor bus.
    """
    by_uuid = {device.id.lower(): device.id for device in devices}
    by_uuid.update({item.id.lower(): device.id for device in devices for item in device.mig_instances})
    by_bus = {device.pci_bus_id.lower(): device.id for device in devices if device.pci_bus_id}
    by_index = {device.index: device.id for device in devices if device.index is not None}
    found: dict[str, list[AllocatorReading]] = {}
    for reading in readings:
        if reading.uuid or reading.bus:
            uuid = by_uuid.get(reading.uuid.lower()) or by_bus.get(reading.bus.lower(), "")
        else:
            uuid = "" if reading.index is None else by_index.get(reading.index, "")
        found.setdefault(uuid, []).append(reading)
    return found
