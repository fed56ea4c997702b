"""Does the replay reproduce what was recorded? Only then may it say what would have happened instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rca.replay.engine import replay
from rca.replay.model import Backfill, Engine, Options, Result
from rca.replay.policies.base import Fcfs, Policy
from rca.replay.policies.ordering import Priority
from rca.replay.recorded import AsRecorded, LeftOut, Recorded

#: A start within this of the recorded one is reproduced, whatever the wait.
SLACK_SECONDS: Final = 10.0
#: Part of a wait that a start may be off by.
SLACK_SHARE: Final = 0.1
#: Part of the starts that must be reproduced before anything is claimed.
MOST_MISSED: Final = 0.2


@dataclass(frozen=True)
class Rules:
    """How the scheduler seems to work: its order, what may overtake, whether it preempts."""

    order: str
    backfill: Backfill
    preemption: bool = False

    def policy(self) -> Policy:
        """Return the policy, which keeps to the nodes that the recording shows."""
        return AsRecorded(Priority() if self.order == "priority" else Fcfs())

    def options(self, recorded: Recorded, horizon: float = math.inf) -> Options:
        """Return the options of a replay of ``recorded``."""
        return Options(
            backfill=self.backfill,
            preemption=self.preemption,
            failures=recorded.failures,
            horizon=horizon,
            series=False,
            engine=Engine.INTERPRETED,
        )

    @property
    def words(self) -> str:
        """The rules as a phrase."""
        order = "by priority" if self.order == "priority" else "first come, first served"
        ahead = {
            Backfill.NONE: "nothing overtakes",
            Backfill.EASY: "backfill by time limits",
            Backfill.GREEDY: "whatever fits may start",
        }[self.backfill]
        return f"{order}, {ahead}" + (", preemption" if self.preemption else "")


@dataclass(frozen=True)
class Error:
    """One start: seconds by which the replay's is later. ``bound``: at least so much, as one of the two is not seen."""

    name: str
    seconds: float
    wait: float
    bound: bool = False

    @property
    def within(self) -> bool:
        """Whether it counts as reproduced."""
        return abs(self.seconds) <= tolerance(self.wait)


@dataclass(frozen=True)
class Reproduced:
    """How well the best rules reproduce the recording.

    Attributes:
        rules: the rules.
        result: the replay, up to the end of the recording.
        errors: of the starts that the recording or the replay has.
        waiting: workloads that wait at the end in both.
        missed: what could not be reproduced, and why.
        alike: all rules that reproduce it as well, ``rules`` first: the recording does not tell them apart.
    """

    rules: Rules
    result: Result
    errors: tuple[Error, ...]
    waiting: int
    missed: tuple[LeftOut, ...]
    alike: tuple[Rules, ...] = ()

    @property
    def median(self) -> float:
        """Median of the absolute errors in seconds; NaN when there are none."""
        return float(np.median([abs(error.seconds) for error in self.errors])) if self.errors else math.nan

    @property
    def largest(self) -> float:
        """Largest absolute error in seconds; NaN when there are none."""
        return max((abs(error.seconds) for error in self.errors), default=math.nan)

    @property
    def within(self) -> float:
        """Part of the starts (and of the waits that go on) that is reproduced."""
        total = len(self.errors) + self.waiting
        return (sum(error.within for error in self.errors) + self.waiting) / total if total else math.nan

    def error_of(self, name: str) -> Error | None:
        """The error of ``name``; None when it waits in both, or is not compared."""
        return next((error for error in self.errors if error.name == name), None)


def tolerance(wait: float) -> float:
    """Seconds that a start may be off by, for a workload that waited ``wait`` seconds."""
    return max(SLACK_SECONDS, SLACK_SHARE * wait)


def candidates(recorded: Recorded) -> list[Rules]:
    """Rules that the scheduler may follow, the most usual first."""
    usual: dict[str, list[Backfill]] = {
        "slurm": [Backfill.EASY, Backfill.GREEDY, Backfill.NONE],
        "kubernetes": [Backfill.GREEDY, Backfill.NONE],
    }
    backfills = usual.get(recorded.scheduler, [Backfill.NONE, Backfill.EASY, Backfill.GREEDY])
    if not recorded.limits:
        # Without time limits, backfill by them would let everything overtake.
        backfills = [item for item in backfills if item is not Backfill.EASY]
    orders = ["priority", "fcfs"]
    plain = [Rules(order, backfill) for order in orders for backfill in backfills]
    return plain + ([replace(item, preemption=True) for item in plain[: len(backfills)]] if recorded.preempted else [])


def reproduce(recorded: Recorded, rules: Sequence[Rules] | None = None) -> Reproduced:
    """Replay the recording under each of ``rules`` and return the one that comes closest to the recorded starts."""
    found = [_compare(recorded, item) for item in rules or candidates(recorded)]
    costs = [sum(min(abs(error.seconds), recorded.until) for error in item.errors) for item in found]
    best = found[int(np.argmin(costs))]
    alike = [
        item.rules
        for item, cost in zip(found, costs, strict=True)
        if item is not best and item.within >= best.within - 1e-9 and cost <= min(costs) + SLACK_SECONDS
    ]
    return replace(best, alike=(best.rules, *alike))


def _compare(recorded: Recorded, rules: Rules) -> Reproduced:
    result = replay(recorded.trace, rules.policy(), rules.options(recorded, recorded.until))
    work = recorded.trace.workloads
    errors = []
    waiting = 0
    missed = list(recorded.left_out)
    for name in recorded.names:
        row = recorded.rows(name)[0]
        if recorded.initial[row]:
            if not np.isfinite(result.first_start[row]):
                missed.append(LeftOut(name, "it ran when the recording began, and finds no room in the replay"))
            continue
        seen, made = float(work.observed_start[row]), float(result.first_start[row])
        submit = float(work.submit[row])
        if not math.isfinite(seen):
            last = min(recorded.until, float(work.cancel[row]))
            if math.isfinite(made) and made < last:
                errors.append(Error(name, made - last, last - submit, bound=True))
            else:
                waiting += 1
        elif math.isfinite(made):
            errors.append(Error(name, made - seen, seen - submit))
        else:
            errors.append(Error(name, recorded.until - seen, seen - submit, bound=True))
    for error in errors:
        if not error.within:
            word = "later" if error.seconds > 0 else "earlier"
            least = "at least " if error.bound else ""
            missed.append(LeftOut(error.name, f"the replay starts it {least}{abs(error.seconds):.0f} s {word}"))
    return Reproduced(rules, result, tuple(errors), waiting, tuple(missed))


__all__ = ["Error", "Reproduced", "Rules", "candidates", "reproduce", "tolerance"]
