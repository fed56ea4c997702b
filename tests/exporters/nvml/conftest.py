"""The stub driver: a libnvidia-ml.so.1 built for the test run, and the file that says which GPUs it has."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FLAGS = ["-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]

GIB = 2**30

#: A healthy H100; every GPU that has no line of its own is one.
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "minor": 0,
    "mem_total": 80 * GIB,
    "mem_used": 30 * GIB,
    "mem_reserved": GIB // 2,
    "util": 71,
    "util_mem": 33,
    "power": 412_345,
    "limit": 700_000,
    "energy": 123_456_789,
    "temp": 56,
    "sm_clock": 1980,
    "mem_clock": 2619,
    "ecc_corrected": 2,
    "ecc_uncorrected": 0,
    "throttle": 0x4 | 0x1,
    "mig": 0,
}


class StubGpus:
    """Writes the file that the stub reads. Each `set` replaces all that was said before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base: dict[str, object] = dict(H100)

    def set(self, count: int = 8, *lines: str) -> None:
        """Describe ``count`` GPUs like `base`, changed by ``lines``, each ``SCOPE KEY VALUE``."""
        common = [f"gpu* {key} {value}" for key, value in self.base.items()]
        partial = self.path.with_suffix(".new")
        partial.write_text("\n".join([f"system count {count}", *lines, *common, ""]))
        partial.replace(self.path)

    @staticmethod
    def uuid(gpu: int) -> str:
        """The UUID of a GPU that has no other."""
        return f"GPU-1e57ab1e-0000-4000-8000-{gpu:012d}"


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stub and return the folder for ``LD_LIBRARY_PATH``."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build the NVML stub")
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", *FLAGS, "-o", str(target), str(HERE / "nvml_stub.c")], check=True)
    return folder


@pytest.fixture
def gpus(stub_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubGpus]:
    """Eight healthy GPUs, for every process that this test starts."""
    stub = StubGpus(tmp_path / "gpus.txt")
    stub.set()
    monkeypatch.setenv("NVML_STUB_FILE", str(stub.path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_library))
    yield stub
    # Lets go of any call that still hangs.
    stub.set()
