"""How long `rca dashboards build` takes, as a process of its own: ``python -m benchmarks.dashboards``."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time

RUNS = 5
LIMIT_SECONDS = 2.0


def main() -> None:
    """Print the median over some runs, beside what was asked for."""
    walls, cpus = [], []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cli.main", "dashboards", "build", "--out", folder]
        for _ in range(RUNS):
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            walls.append(time.perf_counter() - began)
            cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    wall, cpu = statistics.median(walls), statistics.median(cpus)
    print(f"rca dashboards build: {wall:.2f} s (CPU {cpu:.2f} s), median of {RUNS}")
    print(f"asked for: less than {LIMIT_SECONDS:g} s")


if __name__ == "__main__":
    main()
