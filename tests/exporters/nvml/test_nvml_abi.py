"""The stub is a faithful double: unmodified pynvml works on it, and its structures are laid out as NVIDIA's are."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pynvml: Any = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

HERE = Path(__file__).parent

#: C type, the class of pynvml, its fields.
STRUCTURES = [
    ("nvmlMemory_t", pynvml.c_nvmlMemory_t, ["total", "free", "used"]),
    ("nvmlMemory_v2_t", pynvml.c_nvmlMemory_v2_t, ["version", "total", "reserved", "free", "used"]),
    ("nvmlUtilization_t", pynvml.c_nvmlUtilization_t, ["gpu", "memory"]),
    (
        "nvmlProcessInfo_t",
        pynvml.c_nvmlProcessInfo_v3_t,
        ["pid", "usedGpuMemory", "gpuInstanceId", "computeInstanceId"],
    ),
    (
        "nvmlPciInfo_t",
        pynvml.nvmlPciInfo_t,
        ["busIdLegacy", "domain", "bus", "device", "pciDeviceId", "pciSubSystemId", "busId"],
    ),
    (
        "nvmlEventData_t",
        pynvml.c_nvmlEventData_t,
        ["device", "eventType", "eventData", "gpuInstanceId", "computeInstanceId"],
    ),
    ("nvmlGpuInstancePlacement_t", pynvml.c_nvmlGpuInstancePlacement_t, ["start", "size"]),
    ("nvmlGpuInstanceInfo_t", pynvml.c_nvmlGpuInstanceInfo_t, ["device", "id", "profileId", "placement"]),
    (
        "nvmlGpuInstanceProfileInfo_v2_t",
        pynvml.c_nvmlGpuInstanceProfileInfo_v2_t,
        ["version", "id", "sliceCount", "instanceCount", "ofaCount", "memorySizeMB", "name"],
    ),
]


def c_layout(tmp_path: Path, include: str, *flags: str) -> list[int]:
    """Compile a program that prints every size and offset, in the order of `STRUCTURES`."""
    prints = []
    for name, _, fields in STRUCTURES:
        prints.append(f'printf("%zu\\n", sizeof({name}));')
        prints.extend(f'printf("%zu\\n", offsetof({name}, {member}));' for member in fields)
    source = tmp_path / "layout.c"
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include {include}\nint main(void) {{ {' '.join(prints)} }}\n"
    )
    program = tmp_path / "layout"
    subprocess.run(["gcc", *flags, "-o", str(program), str(source)], check=True)
    return [int(line) for line in subprocess.run([program], check=True, capture_output=True).stdout.split()]


def own_layout(tmp_path: Path) -> list[int]:
    return c_layout(tmp_path, f'"{HERE / "nvml_abi.h"}"')


def nvidia_include() -> Path:
    """The folder of NVIDIA's own nvml.h."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in Path(folder).glob("*/include/nvml.h")]
    if not found:
        pytest.skip("needs nvml.h (pip install nvidia-nvml-dev)")
    return found[0].parent


def test_layout_is_that_of_pynvml(stub_library: Path, tmp_path: Path) -> None:
    expected = []
    for _, kind, fields in STRUCTURES:
        expected.append(ctypes.sizeof(kind))
        expected.extend(getattr(kind, name).offset for name in fields)

    assert own_layout(tmp_path) == expected


def test_layout_is_that_of_nvidias_header(stub_library: Path, tmp_path: Path) -> None:
    assert own_layout(tmp_path) == c_layout(tmp_path, "<nvml.h>", f"-I{nvidia_include()}")


def test_functions_have_the_prototypes_of_nvidias_header(stub_library: Path, tmp_path: Path) -> None:
    # Compiled against the header, a wrong prototype is a conflict with the declaration there. The stub gives its own
    # integers for enumerators and implements some functions that the header has marked as deprecated.
    flags = ["-fsyntax-only", "-Wall", "-Werror", "-Wno-enum-conversion", "-Wno-deprecated-declarations"]
    subprocess.run(
        ["gcc", *flags, "-DSTUB_WITH_NVML_H", f"-I{nvidia_include()}", str(HERE / "nvml_stub.c")], check=True
    )


def ask(expression: str) -> Any:
    """Evaluate an expression with pynvml in a process that loads the stub; ``gpu(i)`` is a handle."""
    program = (
        "import json, pynvml as n; n.nvmlInit(); gpu = n.nvmlDeviceGetHandleByIndex\n"
        f"try: print(json.dumps({expression}))\n"
        "except n.NVMLError as error: print(json.dumps(type(error).__name__))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_pynvml_reads_a_gpu(gpus: Any) -> None:
    assert ask("[n.nvmlDeviceGetCount(), n.nvmlDeviceGetName(gpu(7)), n.nvmlDeviceGetPowerUsage(gpu(7))]") == [
        8,
        "NVIDIA H100 80GB HBM3",
        412_345,
    ]


def test_pynvml_reads_both_versions_of_the_memory(gpus: Any) -> None:
    used = "n.nvmlDeviceGetMemoryInfo(gpu(0), {}).used"

    with_reserved, without = ask(f"[{used.format('None')}, {used.format('n.nvmlMemory_v2')}]")

    assert with_reserved - without == gpus.base["mem_reserved"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("gpu0 fault:* 15", "NVMLError_GpuIsLost"),
        ("gpu0 fault:nvmlDeviceGetTemperature 3", "NVMLError_NotSupported"),
        ("gpu0 fault:nvmlDeviceGetTemperature 999", "NVMLError_Unknown"),
    ],
)
def test_pynvml_raises_what_the_file_says(gpus: Any, line: str, error: str) -> None:
    gpus.set(8, line)

    assert ask("n.nvmlDeviceGetTemperature(gpu(0), 0)") == error
    assert ask("n.nvmlDeviceGetTemperature(gpu(1), 0)") == 56


def test_pynvml_sees_no_driver(gpus: Any) -> None:
    gpus.set(8, "system fault:nvmlInitWithFlags 9")

    with pytest.raises(subprocess.CalledProcessError) as failed:
        ask("0")

    assert "Driver Not Loaded" in failed.value.stderr


def test_pynvml_finds_mig_devices(gpus: Any) -> None:
    gpus.set(1, "gpu0 mig 1", "gpu0/mig0 gi 3", "gpu0/mig0 uuid MIG-a", "gpu0/gi3 profile 9", "gpu0/gi3 start 4")

    child = "n.nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), 0)"

    assert ask(f"[n.nvmlDeviceGetUUID({child}), n.nvmlDeviceGetGpuInstanceId({child})]") == ["MIG-a", 3]
    assert ask("n.nvmlDeviceGetUtilizationRates(gpu(0)).gpu") == "NVMLError_NotSupported"
