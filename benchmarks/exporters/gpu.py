"""The GPU exporter against nvitop-exporter: time of a scrape and memory, on the same stub driver with eight GPUs.

Both poll once a second and are scraped in turns over fresh connections; each GPU has two processes. Memory is summed
over the exporter and its children after the scrapes. Proportional memory (PSS) shares pages such as the interpreter's
code among their users; private memory is what would be freed if the exporter ended. The floor is a Python process that
does nothing but ``import pynvml``. Needs gcc, and nvitop-exporter in an environment of its own, whose `bin` folder is
the argument::

    python -m venv /tmp/nvitop && /tmp/nvitop/bin/pip install nvitop-exporter
    python -m benchmarks.exporters.gpu /tmp/nvitop/bin
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

GPUS: Final = 8
PER_GPU: Final = 2
SCRAPES: Final = 300
WARM_UP_SECONDS: Final = 5.0
START_SECONDS: Final = 30.0
REQUIRED_RATIO: Final = 0.5

_STUB: Final = Path(__file__).parents[2] / "tests" / "exporters" / "nvml" / "nvml_stub.c"
_MIB: Final = 1024 * 1024

_HEALTHY: Final = {
    "name": "NVIDIA H100 80GB HBM3",
    "mem_total": 80 * 1024 * _MIB,
    "mem_used": 30 * 1024 * _MIB,
    "mem_reserved": 512 * _MIB,
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
    "throttle": 4,
    "mig": 0,
}


@dataclass(slots=True)
class Measured:
    """One exporter: seconds of each scrape, samples of the last, memory in MiB by kind, CPU seconds per second."""

    name: str
    seconds: list[float] = field(default_factory=list)
    samples: int = 0
    memory: dict[str, float] = field(default_factory=dict)
    processes: int = 0
    cpu: float = 0.0


def build_stub(folder: Path, pids: list[int]) -> dict[str, str]:
    """Build the stub driver into ``folder`` and return the environment of a process that is to see it."""
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-pthread", "-o", library, _STUB], check=True)
    lines = [f"system count {GPUS}", *(f"gpu* {key} {value}" for key, value in _HEALTHY.items())]
    for gpu in range(GPUS):
        own = pids[gpu * PER_GPU : (gpu + 1) * PER_GPU]
        lines.append(f"gpu{gpu} procs {','.join(f'{pid}:{15 * 1024 * _MIB}' for pid in own)}")
    (folder / "gpus.txt").write_text("\n".join([*lines, ""]))
    return {**os.environ, "NVML_STUB_FILE": str(folder / "gpus.txt"), "LD_LIBRARY_PATH": str(folder)}


def scrape(port: int) -> tuple[float, bytes]:
    """Return the seconds that one scrape takes, and its body."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    taken = time.perf_counter() - began
    if answer.status != 200:
        raise RuntimeError(f"port {port} answers {answer.status}")
    return taken, body


def tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found.extend(tree(int(child)))
    return found


def memory(pids: list[int]) -> dict[str, float]:
    """Return resident, proportional and private memory in MiB, summed over ``pids``."""
    kinds = {"Rss:": "resident", "Pss:": "proportional", "Private_Dirty:": "private", "Private_Clean:": "private"}
    sums = dict.fromkeys(kinds.values(), 0.0)
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            key, *rest = line.split()
            if key in kinds:
                sums[kinds[key]] += int(rest[0]) / 1024
    return sums


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor time that ``pids`` have used."""
    ticks = 0
    for pid in pids:
        parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(parts[11]) + int(parts[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str], port: int) -> Iterator[int]:
    """Run an exporter until the block ends; its process id, once it answers with GPU samples."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError, RuntimeError):
                    if b"gpu_power" in scrape(port)[1]:
                        break
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"{command[0]} does not serve GPU metrics on port {port}")
                time.sleep(0.1)
            yield process.pid
        finally:
            process.terminate()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def floor(environment: dict[str, str]) -> dict[str, float]:
    """Return the memory of a Python process that only imports pynvml."""
    command = [sys.executable, "-c", "import sys, pynvml; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return memory([process.pid])


def measure(nvitop: Path) -> tuple[Measured, Measured, dict[str, float]]:
    """Run both exporters and scrape them in turns; return ours, theirs and the floor."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        sleepers = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(GPUS * PER_GPU)]
        for sleeper in sleepers:
            stack.callback(sleeper.terminate)
        environment = build_stub(Path(temporary), [sleeper.pid for sleeper in sleepers])
        ports = free_port(), free_port()
        ours = [sys.executable, "-m", "cli.main", "exporter", "gpu", "--listen", f"127.0.0.1:{ports[0]}"]
        theirs = [str(nvitop / "nvitop-exporter"), "--bind-address", "127.0.0.1", "--port", str(ports[1])]
        pids = [
            stack.enter_context(running([*ours, "--interval", "1"], environment, ports[0])),
            stack.enter_context(running([*theirs, "--interval", "1"], environment, ports[1])),
        ]
        results = [Measured("rca exporter gpu"), Measured("nvitop-exporter")]
        time.sleep(WARM_UP_SECONDS)
        began = time.monotonic()
        used = [cpu_seconds(tree(pid)) for pid in pids]
        time.sleep(WARM_UP_SECONDS)
        for result, pid, before in zip(results, pids, used, strict=True):
            result.cpu = (cpu_seconds(tree(pid)) - before) / (time.monotonic() - began)
        for _ in range(SCRAPES):
            for result, port in zip(results, ports, strict=True):
                taken, body = scrape(port)
                result.seconds.append(taken)
                result.samples = sum(1 for line in body.splitlines() if line and not line.startswith(b"#"))
        for result, pid in zip(results, pids, strict=True):
            members = tree(pid)
            result.processes, result.memory = len(members), memory(members)
        return results[0], results[1], floor(environment)


def main() -> int:
    """Compare and print; 1 when a ratio is above what is required, 2 when nvitop-exporter is not there."""
    console = Console(soft_wrap=True, highlight=False)
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "nvitop-exporter").exists():
        console.print("usage: python -m benchmarks.exporters.gpu BIN, the folder with nvitop-exporter", style="red")
        return 2
    ours, theirs, least = measure(Path(sys.argv[1]))
    console.print(f"{GPUS} GPUs on the stub driver, {PER_GPU} processes each, polled once a second")
    for item in (ours, theirs):
        median, late = statistics.median(item.seconds), statistics.quantiles(item.seconds, n=20)[-1]
        kinds = ", ".join(f"{kind} {size:.1f}" for kind, size in item.memory.items())
        speed = f"scrape {1000 * median:6.2f} ms median, {1000 * late:6.2f} ms p95, {item.samples} samples"
        console.print(
            f"{item.name:17s} {speed}; CPU {100 * item.cpu:.1f} %; MiB in {item.processes} processes: {kinds}"
        )
    console.print("floor             " + ", ".join(f"{kind} {size:.1f} MiB" for kind, size in least.items()))
    ratios = {"scrape time": statistics.median(ours.seconds) / statistics.median(theirs.seconds)}
    ratios.update((f"{kind} memory", ours.memory[kind] / theirs.memory[kind]) for kind in ours.memory)
    for name, ratio in ratios.items():
        console.print(f"{name:20s} {ratio:5.2f} x ({'at most' if ratio <= REQUIRED_RATIO else 'MORE THAN'} 0.5)")
    return 0 if max(ratios.values()) <= REQUIRED_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
