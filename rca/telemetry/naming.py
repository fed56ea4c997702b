"""Metric names as users have them -> the canonical names and units of `rca.signals`.

A name may carry its unit (``latency_ms``, ``CpuUsageRate(%)``) and its statistic (``latency-90``, ``LatencyP99(s)``).
Every conversion is affine: canonical value = scale * value + offset. What is not recognised keeps its own name, made
lower_snake_case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from rca.errors import InvalidInputError
from rca.signals import METRICS


class Quantity(StrEnum):
    """What a number measures, hence which units it may have."""

    DURATION = "duration"
    RATIO = "ratio"
    COMPLEMENT = "complement"  # a share of successes, stored as a share of failures
    COUNT = "count"  # events per sample interval, stored as events per second
    RATE = "rate"
    BYTES = "bytes"
    NUMBER = "number"


#: Alias -> (canonical name, quantity). ``{stat}`` is replaced by mean, p50, ... (mean where none is given).
ALIASES: Mapping[str, tuple[str, Quantity]] = {
    **dict.fromkeys(
        (
            "latency",
            "server_latency",
            "pod_server_latency",
            "request_latency",
            "request_duration",
            "response_time",
            "responsetime",
            "duration",
            "rt",
        ),
        ("latency_{stat}_seconds", Quantity.DURATION),
    ),
    **dict.fromkeys(("self_time",), ("self_time_mean_seconds", Quantity.DURATION)),
    **dict.fromkeys(("network_gap",), ("network_gap_mean_seconds", Quantity.DURATION)),
    **dict.fromkeys(
        ("availability", "success_rate", "success_ratio", "pod_success_rate"), ("error_ratio", Quantity.COMPLEMENT)
    ),
    **dict.fromkeys(
        ("error_ratio", "error_rate", "failure_ratio", "failure_rate", "fault_rate"), ("error_ratio", Quantity.RATIO)
    ),
    **dict.fromkeys(("requests", "request_count"), ("request_rate", Quantity.COUNT)),
    **dict.fromkeys(
        ("request_rate", "requests_per_second", "rps", "qps", "tps", "throughput", "load", "workload", "pod_workload"),
        ("request_rate", Quantity.RATE),
    ),
    **dict.fromkeys(
        (
            "cpu",
            "cpu_usage",
            "cpu_usage_rate",
            "cpu_utilization",
            "cpu_utilisation",
            "cpu_utilization_ratio",
            "cpu_percent",
        ),
        ("cpu_utilization_ratio", Quantity.RATIO),
    ),
    **dict.fromkeys(
        (
            "mem",
            "memory",
            "memory_usage",
            "memory_usage_rate",
            "memory_utilization",
            "memory_utilisation",
            "memory_utilization_ratio",
            "memory_percent",
            "mem_percent",
        ),
        ("memory_utilization_ratio", Quantity.RATIO),
    ),
    **dict.fromkeys(
        ("gpu", "gpu_util", "gpu_utilization", "gpu_utilisation", "gpu_utilization_ratio"),
        ("gpu_utilization_ratio", Quantity.RATIO),
    ),
    **dict.fromkeys(
        ("gpu_memory", "gpu_mem", "gpu_memory_utilization", "gpu_memory_utilization_ratio"),
        ("gpu_memory_utilization_ratio", Quantity.RATIO),
    ),
    **dict.fromkeys(("gpu_fragmentation", "gpu_fragmentation_ratio"), ("gpu_fragmentation_ratio", Quantity.RATIO)),
    **dict.fromkeys(("queue_depth", "queue_length", "queue_size"), ("queue_depth", Quantity.NUMBER)),
    **dict.fromkeys(("queue_wait", "queue_time"), ("queue_wait_seconds", Quantity.DURATION)),
    "network_receive_bytes_per_second": ("network_receive_bytes_per_second", Quantity.BYTES),
    "network_transmit_bytes_per_second": ("network_transmit_bytes_per_second", Quantity.BYTES),
}
#: Aliases whose unit is fixed by whoever defines the metric.
FIXED_UNITS: Mapping[str, tuple[str, str]] = {"dcgm_fi_dev_gpu_util": ("gpu_utilization_ratio", "%")}

_STATISTICS: Mapping[str, str] = {
    **dict.fromkeys(("mean", "average", "avg"), "mean"),
    **dict.fromkeys(("p50", "50", "median"), "p50"),
    "p75": "p75",
    "75": "p75",
    **dict.fromkeys(("p90", "90"), "p90"),
    **dict.fromkeys(("p95", "95"), "p95"),
    **dict.fromkeys(("p99", "99"), "p99"),
    **dict.fromkeys(("sum", "total"), "sum"),
    **dict.fromkeys(("max", "maximum"), "max"),
    **dict.fromkeys(("min", "minimum"), "min"),
    **dict.fromkeys(("count", "samplecount", "sample_count"), "count"),
}

_DURATION_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "millis", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "µs", "usec", "micros", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ns", "nsec", "nanos", "nanosecond", "nanoseconds"), 1e-9),
}
_RATIO_UNITS = {
    **dict.fromkeys(("%", "percent", "pct", "percentage"), 0.01),
    **dict.fromkeys(("ratio", "1", "fraction"), 1.0),
}
_RATE_UNITS = {
    **dict.fromkeys(("1/s", "/s", "ops", "op/s", "ops/s", "rps", "qps", "req/s", "hz", "per_second"), 1.0),
    **dict.fromkeys(("1/min", "/min", "rpm", "per_minute"), 1 / 60),
}
_BYTE_UNITS = {**dict.fromkeys(("b", "b/s", "bytes", "bytes/s"), 1.0), "kib/s": 1024.0, "mib/s": 1024.0**2}
_UNITS_OF: Mapping[Quantity, Mapping[str, float]] = {
    Quantity.DURATION: _DURATION_UNITS,
    Quantity.RATIO: _RATIO_UNITS,
    Quantity.COMPLEMENT: _RATIO_UNITS,
    Quantity.COUNT: {**_RATE_UNITS, "1": 1.0, "count": 1.0},
    Quantity.RATE: _RATE_UNITS,
    Quantity.BYTES: _BYTE_UNITS,
    Quantity.NUMBER: {"1": 1.0},
}
#: Units that may end a name after an underscore. One letter units are left out: ``pods_s`` is not seconds.
_SUFFIX_UNITS = tuple(
    sorted(
        {unit for table in (_DURATION_UNITS, _RATIO_UNITS) for unit in table if len(unit) > 1 and unit.isascii()}
        - {"sec", "secs", "millis", "micros", "nanos", "fraction"},
        key=len,
        reverse=True,
    )
)
_IN_BRACKETS = re.compile(r"^(.*?)\s*[(\[]\s*([^()\[\]]*?)\s*[)\]]\s*$")


@dataclass(frozen=True, slots=True)
class Resolution:
    """How one column becomes a canonical metric.

    ``scale`` is None while the unit is unknown and the values have to tell (see `settle`). ``per_step`` says that the
    values are counts per sample interval, to be divided by its length.
    """

    name: str
    quantity: Quantity
    scale: float | None
    offset: float
    per_step: bool
    known: bool


def snake_case(name: str) -> str:
    """Return ``name`` as lower_snake_case of ASCII letters, digits and underscores; '' if none is left."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"[^0-9a-z]+", "_", spaced.lower()).strip("_")


@lru_cache(maxsize=65_536)
def resolve(metric: str, statistic: str | None = None, unit: str | None = None) -> Resolution:
    """Find the canonical metric of a column.

    Args:
        metric: the name as written, perhaps with statistic and unit in it.
        statistic: how samples were aggregated (``Average``, ``p99``, ``Sum``), where the input says so apart.
        unit: the unit, where the input or the user says so apart.

    Raises:
        InvalidInputError: the name is empty, or the unit does not fit what is measured.
    """
    base, written = _split_unit(metric)
    unit = unit or written
    if metric in METRICS:
        return _canonical(metric, unit)
    base = snake_case(base)
    if not base:
        raise InvalidInputError(f"metric name {metric!r} holds no letter or digit", cure="rename that metric")
    stat = _statistic(statistic)
    if base in FIXED_UNITS:
        name, fixed = FIXED_UNITS[base]
        return _affine(name, Quantity.RATIO, unit or fixed, known=True)
    if stat is None and base not in ALIASES:
        base, stat = _split_statistic(base)
    if base not in ALIASES:
        return _own_name(base, stat, unit)
    template, quantity = ALIASES[base]
    if quantity is Quantity.COUNT and stat not in (None, "sum", "count"):
        return _own_name(base, stat, unit)
    if "{stat}" in template:
        if stat in ("sum", "count"):
            return _own_name(base, stat, unit)
        name = template.format(stat=stat or "mean")
        return _affine(name, quantity, unit or "s", known=name in METRICS)
    if stat in (None, "mean") or (quantity is Quantity.COUNT):
        return _affine(template, quantity, unit, known=True)
    # A maximum or a percentile of a utilisation is not the utilisation.
    return _own_name(base, stat, unit)


def settle(resolution: Resolution, original: str, largest: float) -> tuple[Resolution, str]:
    """Decide the unit of a ratio that states none, from its largest value.

    Values up to 1 are ratios. A share of successes above 1 is in percent. Any other "ratio" above 1 could be percent,
    cores or bytes: it keeps its own name, and the note says how to state the unit.

    Returns:
        The decided resolution, and a note for the user ('' if nothing was assumed).
    """
    if resolution.scale is not None:
        return resolution, ""
    if not largest > 1.0 + 1e-9:
        return _affine(resolution.name, resolution.quantity, "ratio", known=True), ""
    if resolution.quantity is Quantity.COMPLEMENT and largest <= 100.0 + 1e-6:
        return _affine(resolution.name, resolution.quantity, "%", known=True), f"{original!r} read as percent"
    own = snake_case(original)
    if own in METRICS:
        own = f"{own}_as_given"
    note = (
        f"{original!r} reaches {largest:g}, so it is no ratio: kept as {own!r} (say --unit '{original}=%' if percent)"
    )
    return Resolution(own, Quantity.NUMBER, 1.0, 0.0, per_step=False, known=False), note


def _statistic(text: str | None) -> str | None:
    if text is None or not text.strip():
        return None
    key = text.strip().lower()
    return _STATISTICS.get(key) or _STATISTICS.get(snake_case(key)) or snake_case(key) or None


def _split_unit(metric: str) -> tuple[str, str | None]:
    match = _IN_BRACKETS.match(metric)
    if match and match[1]:
        return match[1], match[2].lower() or None
    lowered = metric.lower()
    for unit in _SUFFIX_UNITS:
        if lowered.endswith(f"_{unit}") and len(metric) > len(unit) + 1:
            return metric[: -len(unit) - 1], unit
    return metric, None


def _split_statistic(base: str) -> tuple[str, str | None]:
    stem, _, last = base.rpartition("_")
    if stem in ALIASES and last in _STATISTICS:
        return stem, _STATISTICS[last]
    return base, None


def _quantity_of(name: str) -> Quantity:
    unit = METRICS[name].unit
    if unit == "s":
        return Quantity.DURATION
    return {"ratio": Quantity.RATIO, "1/s": Quantity.RATE, "B/s": Quantity.BYTES}.get(unit, Quantity.NUMBER)


def _canonical(name: str, unit: str | None) -> Resolution:
    quantity = _quantity_of(name)
    if unit is None and quantity is Quantity.RATIO:
        # A canonical name promises a ratio; `settle` still checks it.
        return Resolution(name, quantity, None, 0.0, per_step=False, known=True)
    return _affine(name, quantity, unit, known=True)


def _own_name(base: str, stat: str | None, unit: str | None) -> Resolution:
    name = base if stat in (None, "mean") else f"{base}_{stat}"
    scale = 1.0
    if unit in _DURATION_UNITS:
        scale, name = _DURATION_UNITS[unit], f"{name}_seconds"
    elif unit in ("%", "percent", "pct", "percentage"):
        scale, name = 0.01, f"{name}_ratio"
    elif unit and (suffix := snake_case(unit)):
        name = f"{name}_{suffix}"
    if name in METRICS:
        return _affine(name, _quantity_of(name), unit, known=True)
    return Resolution(name, Quantity.NUMBER, scale, 0.0, per_step=False, known=False)


def _affine(name: str, quantity: Quantity, unit: str | None, *, known: bool) -> Resolution:
    if unit is None:
        if quantity in (Quantity.RATIO, Quantity.COMPLEMENT):
            return Resolution(name, quantity, None, 0.0, per_step=False, known=known)
        return Resolution(name, quantity, 1.0, 0.0, per_step=quantity is Quantity.COUNT, known=known)
    table = _UNITS_OF[quantity]
    scale = table.get(unit.strip().lower())
    if scale is None:
        if quantity in (Quantity.RATIO, Quantity.NUMBER, Quantity.RATE, Quantity.BYTES):
            # `memory(MiB)` is a size and not a share: another metric, kept under its own name.
            stem = re.sub(r"_(utilization_)?ratio$", "", name)
            return Resolution(
                f"{stem}_{snake_case(unit) or 'other'}", Quantity.NUMBER, 1.0, 0.0, per_step=False, known=False
            )
        raise InvalidInputError(
            f"unit {unit!r} does not fit {name}, a {quantity}", cure=f"use one of {', '.join(sorted(table))}"
        )
    if quantity is Quantity.COMPLEMENT:
        return Resolution(name, quantity, -scale, 1.0, per_step=False, known=known)
    per_step = quantity is Quantity.COUNT and unit.strip().lower() in ("1", "count")
    return Resolution(name, quantity, scale, 0.0, per_step=per_step, known=known)


def is_known(metric: str) -> bool:
    """Whether ``metric``, as a user writes it, is one that the catalogue knows."""
    try:
        return resolve(metric).known
    except InvalidInputError:
        return False
