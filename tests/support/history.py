"""A real Prometheus that holds a made-up past, written with ``promtool tsdb create-blocks-from openmetrics``."""

from __future__ import annotations

import contextlib
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.demo_stack import prometheus
from tests.support.services import program


@dataclass
class History:
    """Series in the making. A value is a function of the time; None leaves a hole.

    ``spans`` are the stretches of Unix seconds in which there are samples, every ``step`` seconds.
    """

    spans: list[tuple[float, float]]
    step: float = 15.0
    families: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def gauge(self, name: str, labels: dict[str, str], value: Callable[[float], float | None]) -> None:
        """Add a gauge."""
        self.families.setdefault(name, "gauge")
        for time in self._times():
            found = value(time)
            if found is not None:
                self.lines.append(f"{name}{_labels(labels)} {float(found)!r} {time:.3f}")

    def counter(self, name: str, labels: dict[str, str], rate: Callable[[float], float]) -> None:
        """Add a counter that grows by ``rate`` a second."""
        self.families.setdefault(name.removesuffix("_total"), "counter")
        self._part(name, labels, rate)

    def histogram(
        self, name: str, labels: dict[str, str], rate: Callable[[float], float], mean: Callable[[float], float],
        bounds: tuple[float, ...],
    ) -> None:  # fmt: skip
        """Add a classic histogram of exponentially distributed values with ``mean``."""
        self.families.setdefault(name, "histogram")
        for bound in (*bounds, math.inf):

            def below(time: float, bound: float = bound) -> float:
                return rate(time) * (1.0 - math.exp(-bound / mean(time)) if math.isfinite(bound) else 1.0)

            self._part(f"{name}_bucket", {**labels, "le": "+Inf" if math.isinf(bound) else f"{bound:g}"}, below)
        self._part(f"{name}_sum", labels, lambda time: rate(time) * mean(time))
        self._part(f"{name}_count", labels, rate)

    def _part(self, name: str, labels: dict[str, str], rate: Callable[[float], float]) -> None:
        total, before = 0.0, None
        for time in self._times():
            total += 0.0 if before is None else rate(time) * min(time - before, self.step)
            before = time
            self.lines.append(f"{name}{_labels(labels)} {float(total)!r} {time:.3f}")

    def _times(self) -> Iterator[float]:
        for start, end in self.spans:
            for index in range(int((end - start) / self.step) + 1):
                yield start + index * self.step

    def text(self) -> str:
        """The whole past as OpenMetrics; `promtool` wants neither order nor completeness of families."""
        heads = [f"# TYPE {name} {'unknown' if kind == 'histogram' else kind}" for name, kind in self.families.items()]
        bodies: dict[str, list[str]] = {name: [] for name in self.families}
        for line in self.lines:
            metric = line.split("{", 1)[0]
            owner = max((name for name in self.families if metric.startswith(name)), key=len)
            bodies[owner].append(line)
        parts = []
        for head, (name, body) in zip(heads, bodies.items(), strict=True):
            kind = self.families[name]
            # Each suffix of a histogram as a family of its own: the parser checks the order within histograms.
            if kind == "histogram":
                parts += sorted(body, key=lambda line: line.split("{", 1)[0])
            else:
                parts += [head, *body]
        return "\n".join(parts) + "\n# EOF\n"


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


@contextlib.contextmanager
def past_prometheus(history: History, *options: str) -> Iterator[str]:
    """Run a Prometheus with ``history`` and these options, and give its URL."""
    with tempfile.TemporaryDirectory(prefix="history") as name:
        folder = Path(name)
        (folder / "past.om").write_text(history.text())
        command = [program("promtool"), "tsdb", "create-blocks-from", "openmetrics", "-q"]
        done = subprocess.run(
            [*command, str(folder / "past.om"), str(folder / "tsdb")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        with prometheus(folder, "", options=options) as found:
            yield found.url
