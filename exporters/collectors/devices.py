"""The families of GPUs: health, memory, utilisation, power, MIG and memory fragmentation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from exporters.collectors._families import FamilyBuilder
from exporters.exposition import TextCache
from exporters.families import Family, Labels, family
from exporters.measures.contiguity import Contiguity, allocator_contiguity, mig_contiguity
from exporters.model import WHOLE_GPU, Device, Snapshot

#: Gauges and counters that are one field of the device; a field that is not known gives no sample.
_FIELDS: Final[Mapping[str, Callable[[Device], float | None]]] = {
    "gpu_memory_total_bytes": lambda device: device.memory_total_bytes,
    "gpu_memory_used_bytes": lambda device: device.memory_used_bytes,
    "gpu_memory_reserved_bytes": lambda device: device.memory_reserved_bytes,
    "gpu_utilization_ratio": lambda device: device.gpu_utilization_ratio,
    "gpu_memory_utilization_ratio": lambda device: device.memory_utilization_ratio,
    "gpu_power_watts": lambda device: device.power_watts,
    "gpu_power_limit_watts": lambda device: device.power_limit_watts,
    "gpu_energy_joules_total": lambda device: device.energy_joules,
    "gpu_temperature_celsius": lambda device: device.temperature_celsius,
    "gpu_sm_clock_hertz": lambda device: device.sm_clock_hertz,
    "gpu_memory_clock_hertz": lambda device: device.memory_clock_hertz,
    "gpu_allocated_ratio": lambda device: (
        None if device.allocated_milli is None else device.allocated_milli / WHOLE_GPU
    ),
}


def device_families(
    devices: Sequence[Device], caps: Mapping[str, int] | None = None
) -> tuple[list[Family], dict[str, int]]:
    """Return the families of ``devices``, and how many samples passed a cap, by family.

    A device that is down has `gpu_up` 0 with its reason and only those other series that its record still holds.
    """
    builder = FamilyBuilder(caps)
    keyed = [(_labels(device), device) for device in devices]
    builder.top("gpu_up", {(*key, device.reason): float(device.up) for key, device in keyed})
    builder.top("gpu_info", {(*key, device.model): 1.0 for key, device in keyed if device.model})
    for name, read in _FIELDS.items():
        builder.top(name, {key: float(value) for key, device in keyed if (value := read(device)) is not None})
    _errors(builder, keyed)
    _memory(builder, keyed)
    _mig(builder, keyed)
    return builder.families, builder.dropped


class DeviceCollector:
    """Turns the successive snapshots of a GPU node into families; see `exporters.collectors.ClusterCollector`.

    Args:
        caps: Most label sets by family, where it should differ from the catalogue.
    """

    def __init__(self, caps: Mapping[str, int] | None = None) -> None:
        self._caps = caps
        self._families: tuple[Family, ...] = ()
        self._dropped: Counter[str] = Counter()
        self._texts = TextCache()

    def update(self, snapshot: Snapshot) -> None:
        """Take in a snapshot, of which only the devices count."""
        families, dropped = device_families(snapshot.devices, self._caps)
        self._dropped.update(dropped)
        lost: dict[Labels, float] = {(name,): float(count) for name, count in self._dropped.items()}
        if lost:
            families.append(family("prioscope_series_overflow_total", lost))
        self._families = self._texts.prepare(families)

    def families(self) -> tuple[Family, ...]:
        """Return the families of the last update; empty before the first."""
        return self._families


def _labels(device: Device) -> Labels:
    return (device.node, "" if device.index is None else str(device.index), device.id)


def _errors(builder: FamilyBuilder, keyed: Sequence[tuple[Labels, Device]]) -> None:
    ecc: dict[Labels, float] = {}
    throttled: dict[Labels, float] = {}
    xid: dict[Labels, float] = {}
    for key, device in keyed:
        for kind, count in (("corrected", device.ecc_corrected), ("uncorrected", device.ecc_uncorrected)):
            if count is not None:
                ecc[(*key, kind)] = float(count)
        for reason in device.throttle_reasons or ():
            throttled[(*key, reason)] = 1.0
        for code, count in device.xid_errors.items():
            xid[(*key, code)] = float(count)
    builder.top("gpu_ecc_errors_total", ecc)
    builder.top("gpu_throttled", throttled)
    builder.top("gpu_xid_errors_total", xid)


def _memory(builder: FamilyBuilder, keyed: Sequence[tuple[Labels, Device]]) -> None:
    reserved: dict[Labels, float] = {}
    free: dict[Labels, float] = {}
    largest: dict[Labels, float] = {}
    processes: dict[Labels, float] = defaultdict(float)
    scattered: dict[Labels, Contiguity] = {}
    for key, device in keyed:
        for state in device.allocators:
            labels = (*key, state.process, state.workload)
            reserved[labels] = float(state.reserved_bytes)
            free[labels] = float(state.free_bytes)
            largest[labels] = float(state.largest_free_bytes)
        for process in device.processes:
            if process.memory_bytes is not None:
                names = (process.workload, process.namespace, process.pod, process.job)
                processes[(*key, str(process.pid), process.name, *names)] += process.memory_bytes
        for scope, found in (("allocator", allocator_contiguity(device.allocators)), ("mig", mig_contiguity(device))):
            if found is not None:
                scattered[(*key, scope)] = found
    builder.top("gpu_allocator_reserved_bytes", reserved)
    builder.top("gpu_allocator_free_bytes", free)
    builder.top("gpu_allocator_largest_free_bytes", largest)
    builder.top("gpu_fragmentation_index", {key: found.index for key, found in scattered.items()})
    builder.top("gpu_fragmentation_ratio", {key: found.ratio for key, found in scattered.items()})
    builder.top("gpu_process_memory_bytes", processes)


def _mig(builder: FamilyBuilder, keyed: Sequence[tuple[Labels, Device]]) -> None:
    info: dict[Labels, float] = {}
    used: dict[Labels, float] = {}
    total: dict[Labels, float] = {}
    for key, device in keyed:
        for instance in device.mig_instances:
            labels = (*key, instance.id, instance.profile)
            start = "" if instance.start is None else str(instance.start)
            size = "" if instance.size is None else str(instance.size)
            info[(*labels, start, size)] = 1.0
            if instance.memory_used_bytes is not None:
                used[labels] = float(instance.memory_used_bytes)
            if instance.memory_total_bytes is not None:
                total[labels] = float(instance.memory_total_bytes)
    builder.top("gpu_mig_instance_info", info)
    builder.top("gpu_mig_memory_used_bytes", used)
    builder.top("gpu_mig_memory_total_bytes", total)
