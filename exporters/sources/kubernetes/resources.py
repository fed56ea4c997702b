"""What a pod asks for: quantities, effective requests, QoS class, and GPUs in every spelling that is documented below.

GPU requests that are understood (``resource``: in requests or limits of a container; ``annotation``: of the pod):

=====================================  ==========  ==================================================================
name                                   kind        meaning
=====================================  ==========  ==================================================================
``nvidia.com/gpu``, ``amd.com/gpu``    resource    whole GPUs (or time slices, where the node says ``gpu.replicas``)
``nvidia.com/gpu.shared``              resource    time slices: 1/replicas of a GPU each
``nvidia.com/mig-1g.5gb``              resource    MIG instances of a profile
``nvidia.com/gpumem``                  resource    HAMi: MiB on each of the ``nvidia.com/gpu`` virtual GPUs
``nvidia.com/gpumem-percentage``       resource    HAMi: the same in per cent of the GPU
``nvidia.com/gpucores``                resource    HAMi: compute in per cent of the GPU
``aliyun.com/gpu-mem``                 resource    Alibaba GPU share: memory units of one GPU (GiB by default)
``aliyun.com/gpu-core.percentage``     resource    Alibaba cGPU: compute in per cent of one GPU
``alibabacloud.com/gpu-milli``         either      Alibaba open GPU share: milli-GPU on each GPU
``alibabacloud.com/gpu-count``         either      Alibaba open GPU share: how many GPUs (1 when not given)
``alibabacloud.com/gpu-card-model``    annotation  Alibaba open GPU share: models that will do, ``A|B``
``gpu-fraction``                       annotation  run:ai, KAI: share of a GPU, such as ``0.5``
``gpu-memory``                         annotation  run:ai, KAI: MiB on one GPU
``gpu-fraction-num-devices``           annotation  run:ai, KAI: on how many GPUs
=====================================  ==========  ==================================================================

Which GPU a share lies on is read from the annotations ``alibabacloud.com/gpu-index``, ``ALIYUN_COM_GPU_MEM_IDX`` and
``hami.io/vgpu-devices-allocated`` and from the label ``runai-gpu-group``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import lru_cache
from math import ceil
from typing import Final

import msgspec

from exporters.model import WHOLE_GPU, QosClass

MIB: Final = 1024**2
GIB: Final = 1024**3

#: Larger amounts are mistakes, and would not fit the recorded form.
MAX_AMOUNT: Final = 1 << 62

WHOLE_GPU_RESOURCES: Final = ("nvidia.com/gpu", "amd.com/gpu")
SHARED_GPU_RESOURCE: Final = "nvidia.com/gpu.shared"
MIG_PREFIX: Final = "nvidia.com/mig-"
HAMI_MEMORY: Final = "nvidia.com/gpumem"
HAMI_MEMORY_PERCENT: Final = "nvidia.com/gpumem-percentage"
HAMI_CORES: Final = "nvidia.com/gpucores"
ALIYUN_MEMORY: Final = "aliyun.com/gpu-mem"
ALIYUN_COUNT: Final = "aliyun.com/gpu-count"
ALIYUN_CORES: Final = "aliyun.com/gpu-core.percentage"
ALIBABA_MILLI: Final = "alibabacloud.com/gpu-milli"
ALIBABA_COUNT: Final = "alibabacloud.com/gpu-count"
ALIBABA_MODEL: Final = "alibabacloud.com/gpu-card-model"
FRACTION: Final = "gpu-fraction"
FRACTION_MEMORY: Final = "gpu-memory"
FRACTION_DEVICES: Final = "gpu-fraction-num-devices"

_ALIBABA_INDEX: Final = "alibabacloud.com/gpu-index"
_ALIYUN_INDEX: Final = "ALIYUN_COM_GPU_MEM_IDX"
_HAMI_ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
_RUNAI_GROUP: Final = "runai-gpu-group"

#: Annotations that anything here reads; the others are not kept.
ANNOTATIONS: Final = frozenset(
    {
        ALIBABA_MILLI,
        ALIBABA_COUNT,
        ALIBABA_MODEL,
        FRACTION,
        FRACTION_MEMORY,
        FRACTION_DEVICES,
        _ALIBABA_INDEX,
        _ALIYUN_INDEX,
        _HAMI_ALLOCATED,
    }
)

Amounts = Mapping[str, int]


@lru_cache(maxsize=65536)
def scaled(quantity: str, scale: int = 1) -> int:
    """Return a Kubernetes quantity (``100m``, ``2Gi``, ``1e3``) times ``scale``, rounded up as the API server does.

    Raises:
        ValueError: not a quantity, negative, or larger than 2^62.
    """
    from kubernetes.utils import parse_quantity

    value: Decimal = parse_quantity(quantity)  # type: ignore[no-untyped-call]
    if not value.is_finite() or value < 0 or value * scale > MAX_AMOUNT:
        raise ValueError(f"quantity {quantity!r} is out of range")
    return ceil(value * scale)


def amounts(quantities: Mapping[str, str | int | float] | None) -> dict[str, int]:
    """Return quantities by resource: ``cpu`` in milli-CPU, all else in its own unit (bytes, pieces)."""
    return {name: scaled(str(quantity), 1000 if name == "cpu" else 1) for name, quantity in (quantities or {}).items()}


class Container(msgspec.Struct, frozen=True):
    """Requests and limits of one container, as in `amounts`; ``sidecar``: an init container that keeps running."""

    requests: dict[str, int]
    limits: dict[str, int]
    sidecar: bool = False

    @property
    def effective(self) -> dict[str, int]:
        """What the scheduler counts: a limit without a request is the request."""
        return {**self.limits, **self.requests}


def _add(total: dict[str, int], more: Amounts) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount


def _at_least(total: dict[str, int], floor: Amounts) -> None:
    for name, amount in floor.items():
        if amount > total.get(name, 0):
            total[name] = amount


def effective_requests(
    containers: Iterable[Container],
    init_containers: Iterable[Container] = (),
    overhead: Amounts | None = None,
    pod_level: Container | None = None,
) -> dict[str, int]:
    """Return what the scheduler reserves for a pod (Kubernetes KEP-753 and KEP-2837).

    Init containers run one after the other before the containers; sidecars among them stay. The pod needs the larger of
    the two phases, plus its overhead. Requests at pod level replace the sum for the resources that they name.
    """
    running: dict[str, int] = {}
    starting: dict[str, int] = {}
    sidecars: dict[str, int] = {}
    for container in containers:
        _add(running, container.effective)
    for container in init_containers:
        if container.sidecar:
            _add(sidecars, container.effective)
            _at_least(starting, sidecars)
        else:
            phase = dict(sidecars)
            _add(phase, container.effective)
            _at_least(starting, phase)
    _add(running, sidecars)
    _at_least(running, starting)
    if pod_level is not None:
        running.update(pod_level.effective)
    _add(running, overhead or {})
    return running


def qos_class(containers: Iterable[Container], pod_level: Container | None = None) -> QosClass:
    """Return the QoS class as the API server derives it: from CPU and memory only, zero amounts not counted."""
    parts = [pod_level] if pod_level is not None and (pod_level.requests or pod_level.limits) else list(containers)
    guaranteed, anything = True, False
    for part in parts:
        for name in ("cpu", "memory"):
            limit = part.limits.get(name, 0)
            request = part.requests.get(name, 0) or limit
            anything |= bool(limit or request)
            guaranteed &= limit > 0 and request == limit
    if not anything:
        return QosClass.BEST_EFFORT
    return QosClass.GUARANTEED if guaranteed else QosClass.BURSTABLE


class GpuRequest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a pod asks of GPUs, before it is known how large the GPUs are.

    ``count`` GPUs, on each of which it wants all (no other field set), ``milli``, ``memory_bytes`` or ``units`` (of
    Alibaba's ``gpu-mem``) of it, or ``slices`` time slices in all. ``mig`` counts instances by profile. ``groups`` are
    names of the GPUs that it got, unique on a node.
    """

    count: int = 0
    milli: int | None = None
    memory_bytes: int | None = None
    units: int | None = None
    slices: int = 0
    mig: tuple[tuple[str, int], ...] = ()
    models: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def wanted(self) -> bool:
        """Whether it asks for any GPU."""
        return bool(self.count or self.slices or self.mig)

    @property
    def shares(self) -> bool:
        """Whether it takes parts of GPUs."""
        return self.milli is not None or self.memory_bytes is not None or self.units is not None


NO_GPU: Final = GpuRequest()


def gpu_request(
    requests: Amounts, annotations: Mapping[str, str] | None = None, labels: Mapping[str, str] | None = None
) -> GpuRequest:
    """Return the GPU request of a pod whose effective requests, annotations and labels are these.

    Raises:
        ValueError: an annotation that the table above lists has a value that it cannot have.
    """
    annotations = annotations or {}
    whole = sum(requests.get(name, 0) for name in WHOLE_GPU_RESOURCES)
    mig = tuple(
        sorted((name.removeprefix(MIG_PREFIX), n) for name, n in requests.items() if n and name.startswith(MIG_PREFIX))
    )
    groups = _groups(annotations, labels or {})
    models = tuple(m.strip() for m in annotations.get(ALIBABA_MODEL, "").split("|") if m.strip())
    slices = requests.get(SHARED_GPU_RESOURCE, 0)

    count, milli, memory, units = whole, None, None, None
    if ALIBABA_MILLI in annotations or requests.get(ALIBABA_MILLI):
        milli = _whole_number(annotations, ALIBABA_MILLI, requests)
        count = _whole_number(annotations, ALIBABA_COUNT, requests, default=1)
    elif requests.get(ALIYUN_MEMORY) or requests.get(ALIYUN_CORES):
        units = requests.get(ALIYUN_MEMORY) or None
        cores = requests.get(ALIYUN_CORES, 0)
        milli = min(WHOLE_GPU, cores * 10) if cores else None
        memory = units * GIB if units else None
        count = requests.get(ALIYUN_COUNT, 1) or 1
    elif FRACTION in annotations or FRACTION_MEMORY in annotations:
        count = _whole_number(annotations, FRACTION_DEVICES, {}, default=1)
        if FRACTION in annotations:
            milli = _fraction(annotations[FRACTION])
        else:
            memory = _whole_number(annotations, FRACTION_MEMORY, {}) * MIB
    elif whole and any(requests.get(name) for name in (HAMI_MEMORY, HAMI_MEMORY_PERCENT, HAMI_CORES)):
        # HAMi counts memory per virtual GPU; the effective request has the sum over containers, of which one has GPUs.
        percent = max(requests.get(HAMI_MEMORY_PERCENT, 0), requests.get(HAMI_CORES, 0))
        milli = min(WHOLE_GPU, percent * 10) if percent else None
        memory = requests.get(HAMI_MEMORY, 0) * MIB or None
    if milli is not None and milli >= WHOLE_GPU:
        # All of it, however it is spelt.
        milli = memory = units = None
    return GpuRequest(
        count=count, milli=milli, memory_bytes=memory, units=units, slices=slices, mig=mig, models=models, groups=groups
    )


def _whole_number(annotations: Mapping[str, str], name: str, requests: Amounts, default: int | None = None) -> int:
    if name not in annotations:
        return requests.get(name) or default or 0
    text = annotations[name].strip()
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= MAX_AMOUNT // GIB:
        raise ValueError(f"annotation {name} is {text[:40]!r}, not a positive whole number")
    return int(text)


def _fraction(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ValueError(f"annotation {FRACTION} is {text[:40]!r}, not a share between 0 and 1")
    return max(1, round(value * WHOLE_GPU))


def _groups(annotations: Mapping[str, str], labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return names of the GPUs that a pod's shares lie on, as its scheduler recorded them."""
    for name in (_ALIBABA_INDEX, _ALIYUN_INDEX):
        if name in annotations:
            # "-1" means not assigned yet; "2-3" and "2,3" are two GPUs.
            text = annotations[name].strip()
            return () if text.startswith("-") else tuple(p for p in text.replace(",", "-").split("-") if p.isdigit())
    if _HAMI_ALLOCATED in annotations:
        # Containers end in ";", the devices of one in ":", the fields of a device (uuid, type, MiB, cores) are commas.
        devices = annotations[_HAMI_ALLOCATED].replace(";", ":").split(":")
        return tuple(dict.fromkeys(uuid for device in devices if (uuid := device.split(",")[0].strip())))
    group = labels.get(_RUNAI_GROUP, "")
    return (group,) if group else ()
