"""What `rca demo` can play: incidents whose cause is known, each as a bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rca.incident import Incident
from rca.simulation.scenarios import SCENARIOS, build

INVERSION = "priority-inversion"


@dataclass(frozen=True)
class Demo:
    """One scenario. ``make`` takes the seed and a folder for what it leaves beside the bundle."""

    name: str
    summary: str
    make: Callable[[int, Path], Incident]


def _simulated(name: str, seed: int, _folder: Path) -> Incident:
    return build(name, seed).incident


def _inversion(seed: int, folder: Path) -> Incident:
    """Run the embedded cluster, record it, export it, and capture the incident from what was exported."""
    import msgspec

    from exporters.exposition import OPENMETRICS, render
    from exporters.model import write_snapshots
    from exporters.policy import default_policy
    from rca.simulation import cluster
    from rca.telemetry.recording import capture_recording, scrapes, snapshots

    policy = default_policy()
    recording = folder / f"{INVERSION}.jsonl"
    recording.unlink(missing_ok=True)
    write_snapshots(recording, cluster.recording(seed))
    _, last = scrapes(snapshots(recording), policy)
    (folder / f"{INVERSION}.prom").write_bytes(render(last, OPENMETRICS))
    found = capture_recording(recording, policy, incident=f"demo-{INVERSION}-{seed}")
    header = msgspec.structs.replace(
        found.header, title=DEMOS[INVERSION].summary, labels={**found.header.labels, "origin": "simulation"}
    )
    return replace(found, header=header, truth=cluster.truth())


#: By name; the first is the default.
DEMOS: dict[str, Demo] = {
    INVERSION: Demo(
        INVERSION,
        "A P3 sweep has borrowed the GPUs that P0 chat inference needs to scale up: it waits.",
        _inversion,
    ),
    **{name: Demo(name, scenario.summary, partial(_simulated, name)) for name, scenario in SCENARIOS.items()},
}
