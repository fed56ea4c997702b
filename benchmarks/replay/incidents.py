"""Does the replay of an incident name the cause, and do its intervals hold? Simulated schedules with a known cause.

The simulation (`rca.simulation.schedules`) runs each schedule again without the culprit, with the durations and
arrivals that the recording does not show. Seeds are consecutive, the intervals are nominally 95 %.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rca.counterfactual.schedule import attribute
from rca.simulation.schedules import ScheduledIncident, draw_incident
from rca.telemetry.snapshots import incident_of

#: Seconds by which an interval may miss the truth: the simulated scheduler looks every 1 to 10 s.
CYCLE: Final = 10.0


class Case(msgspec.Struct, frozen=True):
    """One incident. ``first`` is whom the replay names first; seconds are of the victim's wait without the culprit."""

    seed: int
    culprits: int
    reproduced: bool
    first_right: bool
    longest_right: bool
    latest_right: bool
    truth: float
    saved: float | None
    low: float | None
    high: float | None
    others: int
    others_covered: int
    median_error: float | None
    largest_error: float | None
    rules_right: bool
    seconds: float

    @property
    def covered(self) -> bool:
        """Whether the interval covers the truth."""
        assert self.low is not None
        assert self.high is not None
        return self.low - CYCLE <= self.truth <= self.high + CYCLE


class Summary(msgspec.Struct, frozen=True):
    """What came of all incidents. Shares with their 95 % Wilson bounds."""

    incidents: int
    reproduced: int
    first: tuple[float, float, float]
    covered: tuple[float, float, float]
    covered_others: tuple[float, float, float]
    longest_holder_first: float
    latest_starter_first: float
    median_start_error: float
    largest_start_error: float
    seconds_median: float
    seconds_p95: float
    cases: list[Case]


def measure(count: int = 300, first_seed: int = 0) -> Summary:
    """Draw, record, replay and compare ``count`` incidents."""
    cases = [
        _case(seed)
        for seed in track(
            range(first_seed, first_seed + count), "incidents", console=Console(stderr=True), transient=True
        )
    ]
    known = [case for case in cases if case.reproduced]
    others = sum(case.others for case in known)
    errors = [case.median_error for case in known if case.median_error is not None]
    largest = [case.largest_error for case in known if case.largest_error is not None]
    return Summary(
        incidents=count,
        reproduced=len(known),
        # What could not be reproduced names nobody, and counts as wrong.
        first=_share(sum(case.first_right for case in cases), count),
        covered=_share(sum(case.covered for case in known), len(known)),
        covered_others=_share(sum(case.others_covered for case in known), others),
        longest_holder_first=sum(case.longest_right for case in cases) / count,
        latest_starter_first=sum(case.latest_right for case in cases) / count,
        median_start_error=float(np.median(errors)) if errors else float("nan"),
        largest_start_error=max(largest, default=float("nan")),
        seconds_median=float(np.median([case.seconds for case in cases])),
        seconds_p95=float(np.percentile([case.seconds for case in cases], 95)),
        cases=cases,
    )


def _case(seed: int) -> Case:
    known = draw_incident(seed)
    incident = incident_of(known.snapshots(), victim=known.victim, id=known.name)
    began = time.perf_counter()
    answer = attribute(incident)
    seconds = time.perf_counter() - began
    longest, latest = _holders(known)
    found = answer.attributions[0] if answer.attributions else None
    singles = {} if found is None else {entry.nodes[0]: entry for entry in found.entries if len(entry.nodes) == 1}
    mine = singles.get(known.culprit)
    first = next(iter(singles), "")
    others = [(name, entry) for name, entry in singles.items() if name != known.culprit and name in known.waits]
    covered = 0
    for name, entry in others:
        assert entry.saved_low is not None
        assert entry.saved_high is not None
        truth = known.waits[""] - known.waits[name]
        covered += entry.saved_low - CYCLE <= truth <= entry.saved_high + CYCLE
    rules = "" if found is None or found.reproduction is None else found.reproduction.rules
    return Case(
        seed=seed,
        culprits=len(singles),
        reproduced=mine is not None,
        first_right=first == known.culprit,
        longest_right=longest == known.culprit,
        latest_right=latest == known.culprit,
        truth=known.saved,
        saved=None if mine is None else mine.saved,
        low=None if mine is None else mine.saved_low,
        high=None if mine is None else mine.saved_high,
        others=len(others),
        others_covered=covered,
        median_error=None if found is None or found.reproduction is None else found.reproduction.median_seconds,
        largest_error=None if found is None or found.reproduction is None else found.reproduction.largest_seconds,
        rules_right=("by priority" in rules) == known.scheduler.by_rank,
        seconds=seconds,
    )


def _holders(known: ScheduledIncident) -> tuple[str, str]:
    """Of the less urgent jobs that held GPUs during the wait: who held most GPUs, and who started last."""
    jobs = {job.name: job for job in known.jobs}
    names = [name for name in known.waits if name]
    most = max(names, key=lambda name: (jobs[name].gpus, -jobs[name].submit))
    return most, max(names, key=lambda name: known.starts[name][0])


def _share(hits: int, total: int) -> tuple[float, float, float]:
    """A share and its 95 % Wilson bounds; NaN for nothing."""
    if total == 0:
        return float("nan"), float("nan"), float("nan")
    z, p = 1.959964, hits / total
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z * ((p * (1 - p) + z * z / (4 * total)) / total) ** 0.5 / (1 + z * z / total)
    return p, centre - half, centre + half


def print_summary(found: Summary, console: Console) -> None:
    """Print the figures."""
    table = Table(title=f"Replay of {found.incidents} simulated incidents with a known cause")
    table.add_column("")
    table.add_column("share", justify="right")
    table.add_column("95 % bounds", justify="right")
    for label, (share, low, high) in (
        ("the culprit is named first", found.first),
        ("its 95 % interval covers the truth", found.covered),
        ("the same for other holders", found.covered_others),
    ):
        table.add_row(label, f"{share:.1%}", f"{low:.1%} to {high:.1%}")
    table.add_row("for comparison: whoever holds most GPUs", f"{found.longest_holder_first:.1%}", "")
    table.add_row("for comparison: whoever started last", f"{found.latest_starter_first:.1%}", "")
    console.print(table)
    console.print(
        f"{found.reproduced} of {found.incidents} reproduced; start times off by {found.median_start_error:.1f} s "
        f"(median), {found.largest_start_error:.0f} s at most; {found.seconds_median:.2f} s an incident "
        f"(95th percentile {found.seconds_p95:.2f} s)"
    )
