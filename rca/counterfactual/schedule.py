"""The *replay* engine: would the victim have waited anyway? Reruns the recorded schedule with one thing changed (R5).

First the recording itself is replayed; what cannot be reproduced cannot be asked about. Then, each by itself: without
each culprit, with priorities swapped, with work packed tightly, with preemption, under the declared policy. Until the
recording ends a replay uses what it shows. Past that, how long the rest goes on is drawn (`rca.replay.remaining`), the
same draws for every change; nothing new is submitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Final

import numpy as np
import pyarrow.compute as pc

from exporters.model import WorkloadState
from exporters.policy import Policy as Declaration
from exporters.policy import default_policy
from rca.counterfactual.shapley import shapley
from rca.explanation import Attribution, AttributionEntry, NotChecked, Reproduction
from rca.incident import Incident, Relation
from rca.replay.engine import replay
from rca.replay.model import Backfill, Failure, Floats, Ints, Options, Result, Status, Trace
from rca.replay.policies.base import Placement, Policy, View
from rca.replay.policies.declared import Declared, as_seen
from rca.replay.recorded import AsRecorded, NotRecordedError, Recorded, trace_of
from rca.replay.remaining import LONGEST, Drawn, draw
from rca.replay.reproduce import MOST_MISSED, Reproduced, Rules, reproduce, tolerance

METRIC: Final = "queue_wait_seconds"
WHAT: Final = "replay of the schedule"
#: Draws of the durations that are not known.
DRAWS: Final = 40
#: Of them, so many go into Shapley shares.
SHAPLEY_DRAWS: Final = 8
#: Most culprits that are taken away one by one.
MOST_CULPRITS: Final = 8
#: Most victims of one incident.
MOST_VICTIMS: Final = 3
#: About so many events of replays may be spent on one victim: what keeps an explanation within a second.
BUDGET: Final = 12_000
#: Workloads times nodes above which no replay is made beside an explanation.
LARGEST: Final = 2_000_000
_SEED: Final = 20_260_105
_STRICT: Final = Rules("priority", Backfill.NONE)
_APART: Final = 1e-6


@dataclass(frozen=True)
class Answer:
    """What the replay has to say: one attribution a victim, and what could not be checked."""

    attributions: tuple[Attribution, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()


@dataclass(frozen=True)
class Change:
    """One thing that is changed: in the trace, or in how the rules of the scheduler become a policy and options."""

    trace: Trace
    policy: Callable[[Rules], Policy]
    options: Callable[[Rules], Options]


@dataclass
class World:
    """A reproduced recording and one victim in it. Starts are [draws], in seconds; `LONGEST` for never.

    Where the recording does not tell the rules of the scheduler, the draws are shared out among the possible ones.
    """

    recorded: Recorded
    reproduced: Reproduced
    victim: int
    drawn: Drawn
    spent: int = 0
    _starts: dict[tuple[frozenset[int], int], Floats] = field(default_factory=dict)

    @property
    def rules(self) -> tuple[Rules, ...]:
        """How the scheduler may work."""
        return self.reproduced.alike

    @property
    def asked(self) -> float:
        """When the victim was submitted, in seconds of the replay."""
        return float(self.recorded.asked[self.victim])

    def as_it_was(self) -> Change:
        """Nothing changed."""
        return Change(self.recorded.trace, Rules.policy, lambda rules: rules.options(self.recorded))

    def without(self, rows: frozenset[int], draws: int = DRAWS) -> Floats:
        """Starts of the victim without the given rows, in the first draws; each set is replayed once."""
        key = rows, draws
        if key not in self._starts:
            change = self.as_it_was()
            trace = change.trace.without(sorted(rows)) if rows else change.trace
            self._starts[key] = self.starts(replace(change, trace=trace), draws)
        return self._starts[key]

    def starts(self, change: Change, draws: int = DRAWS) -> Floats:
        """Starts of the victim under ``change``, one for each of the first draws."""
        out = np.empty(draws)
        for number, rules in enumerate(self.rules[:draws]):
            mine = np.arange(number, draws, len(self.rules))
            out[mine] = self._starts_under(change, rules, self.drawn.totals[mine])
        return out

    def _starts_under(self, change: Change, rules: Rules, totals: Floats) -> Floats:
        until = self.recorded.until
        options = change.options(rules)
        first = self._replay(change.trace, change.policy(rules), replace(options, horizon=until))
        work = change.trace.workloads
        at = int(np.flatnonzero(work.uid == self.victim)[0])
        # The first moment at which it matters how long something goes on that had not ended.
        least = self.recorded.least[work.uid]
        with np.errstate(invalid="ignore"):
            open_until = np.where(work.censored & np.isfinite(first.start), first.start + least, np.inf)
        known_until = min(until, float(open_until.min(initial=np.inf)))
        start = float(first.first_start[at])
        if start <= known_until:
            return np.full(len(totals), start)
        if known_until < until:
            first = self._replay(change.trace, change.policy(rules), replace(options, horizon=known_until))
        return self._continue(change, rules, first, known_until, totals, at)

    def _replay(self, trace: Trace, policy: Policy, options: Options) -> Result:
        result = replay(trace, policy, options)
        self.spent += result.events + len(trace.workloads) // 2 + 10
        return result

    def _continue(
        self, change: Change, rules: Rules, so_far: Result, moment: float, draws: Floats, victim: int
    ) -> Floats:
        """Go on from ``moment`` with each draw of the durations, [draws, rows]."""
        work = change.trace.workloads
        alive = np.isin(so_far.status, (Status.RUNNING, Status.WAITING, Status.NOT_SUBMITTED))
        if not alive[victim]:
            return np.full(len(draws), LONGEST)
        running = so_far.status == Status.RUNNING
        order = np.flatnonzero(alive)
        # What runs comes first, and stays where it is.
        order = order[np.argsort(~running[order], kind="stable")]
        kept = work.select(order)
        on = running[order]
        count = int(on.sum())
        begin = np.where(on, moment - (count - np.arange(len(order))) * _APART, np.maximum(kept.submit, moment))
        elapsed = np.where(on, moment - so_far.start[order], 0.0)
        column = {row: at for at, row in enumerate(self.drawn.rows.tolist())}
        place = np.array([column.get(int(uid), -1) for uid in kept.uid], np.int64)
        base = replace(
            kept,
            submit=begin,
            estimate=np.maximum(kept.estimate - elapsed, 0.0),
            pinned=np.where(on, so_far.node[order], kept.pinned),
            gang=np.where(on, -1, kept.gang),
        )
        at = int(np.flatnonzero(order == victim)[0])
        options = change.options(rules)
        down = tuple(Failure(item.node, max(item.start, moment), max(item.end, moment)) for item in options.failures)
        options = replace(options, failures=down, horizon=math.inf)
        policy = change.policy(rules)
        if isinstance(policy, AsRecorded):
            # Nothing that is yet to start has a recorded node.
            policy = Packed(policy)
        out = np.empty(len(draws))
        known: dict[bytes, float] = {}
        for number, totals in enumerate(draws):
            total = np.where(place >= 0, totals[place], kept.duration)
            duration = np.maximum(total - elapsed, _APART)
            key = duration.tobytes()
            if key not in known:
                trace = replace(change.trace, workloads=replace(base, duration=duration))
                start = float(self._replay(trace, policy, options).first_start[at])
                known[key] = min(start, LONGEST) if math.isfinite(start) else LONGEST
            out[number] = known[key]
        return out


class Packed(Policy):
    """The order of ``base``, where least is left over."""

    placement = Placement.BEST_FIT

    def __init__(self, base: Policy) -> None:
        self.base, self.name = base, base.name
        self.interval, self.rounds, self.preempts = base.interval, base.rounds, base.preempts

    def keys(self, trace: Trace) -> Floats:
        """Return the order of the base policy."""
        keys = self.base.keys(trace)
        self.guarantees = self.base.guarantees
        return keys

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the order of the base policy."""
        return self.base.order(view, rows)


def attribute(incident: Incident, declared: Declaration | None = None) -> Answer:
    """Replay the schedule that ``incident`` recorded for each workload whose wait it is about.

    Args:
        declared: the policy that was promised; strict priority and the default wait SLOs without one.
    """
    victims = victims_of(incident)
    if not victims:
        return Answer()
    attributions, missing = [], []
    for victim in victims:
        found = _of_victim(incident, victim, declared)
        if isinstance(found, NotChecked):
            missing.append(found)
        else:
            attributions.append(found[0])
            missing += found[1]
    return Answer(tuple(attributions), tuple(missing))


def victims_of(incident: Incident) -> list[str]:
    """Workloads whose wait the incident is about: the victim itself, or those of the victim's service that waited."""
    header = incident.header
    rows = incident.workloads.select(["workload", "service", "state", "submitted", "started"]).to_pylist()
    mine = [row for row in rows if header.victim.node == row["workload"]]
    if not mine:
        mine = [row for row in rows if header.victim.node == row["service"]]
        mine = [row for row in mine if WorkloadState(row["state"]).waiting]
    elif header.victim.metric != METRIC and not WorkloadState(mine[0]["state"]).waiting:
        return []
    mine.sort(key=lambda row: (row["submitted"] is None, str(row["submitted"]), row["workload"]))
    return [row["workload"] for row in mine[:MOST_VICTIMS]]


def _of_victim(
    incident: Incident, victim: str, declared: Declaration | None
) -> tuple[Attribution, list[NotChecked]] | NotChecked:
    what = f"{WHAT} for {victim}"
    reproduced: tuple[Recorded, Reproduced] | None = None
    problem = ""
    for since in _beginnings(incident, victim):
        try:
            recorded = trace_of(incident, since)
        except NotRecordedError as error:
            return NotChecked(what, str(error))
        if not recorded.rows(victim):
            why = recorded.why_left_out(victim) or "it is not in the scheduler's view"
            return NotChecked(what, f"{victim}: {why}")
        if recorded.initial[recorded.rows(victim)[0]]:
            problem = f"{victim} ran before the recording began"
            continue
        if len(recorded.trace.workloads) * len(recorded.trace.cluster) > LARGEST:
            return NotChecked(
                what,
                f"{len(recorded.trace.workloads):,} workloads on {len(recorded.trace.cluster):,} nodes are too many "
                "for a replay beside an explanation",
            )
        found = reproduce(recorded)
        problem = _unreproduced(recorded, found, victim)
        if not problem:
            reproduced = recorded, found
            break
    if reproduced is None:
        return NotChecked(what, problem)
    return _changes(incident, victim, declared, *reproduced)


def _beginnings(incident: Incident, victim: str) -> list[float]:
    """When to begin: with the baseline; if that cannot be reproduced, with the victim's wait."""
    row = next(row for row in incident.workloads.to_pylist() if row["workload"] == victim)
    first = incident.header.baseline.start.timestamp()
    if row["submitted"] is None:
        return [first]
    later = row["submitted"].timestamp() - 1.0
    return [first, later] if later > first else [first]


def _unreproduced(recorded: Recorded, found: Reproduced, victim: str) -> str:
    """Why nothing can be claimed about ``victim``; "" when something can."""
    lost = f"the replay does not reproduce what was recorded ({found.rules.words}): "
    row = recorded.rows(victim)[0]
    if found.result.status[row] == Status.UNPLACEABLE:
        return lost + f"{victim} fits no node of the recording"
    error = found.error_of(victim)
    if error is not None and not error.within:
        word = "later" if error.seconds > 0 else "earlier"
        return lost + f"it starts {victim} {abs(error.seconds):.0f} s {word}"
    if found.within < 1.0 - MOST_MISSED:
        return lost + (
            f"{1.0 - found.within:.0%} of {len(found.errors) + found.waiting} starts are off by more than "
            f"{tolerance(0):.0f} s and 10 % of the wait (median {found.median:.0f} s, largest {found.largest:.0f} s)"
        )
    return ""


def culprits_of(incident: Incident, recorded: Recorded, victim: str) -> tuple[list[str], list[NotChecked]]:
    """Who may have kept ``victim`` waiting, who took most first; and those that cannot be taken away, with the reason.

    The scheduler's account comes first (`blocking_gpu_seconds`, then `queued_behind`); then less urgent workloads that
    held GPUs during the wait where the victim may run; without any, those as urgent as the victim.
    """
    told: dict[str, float] = {}
    for row in incident.metrics.filter(_about(incident, victim)).to_pylist():
        told[row["peer"]] = max(told.get(row["peer"], 0.0), float(row["value"] or 0.0))
    for edge in incident.edges.to_pylist():
        if edge["caller"] == victim and edge["relation"] == Relation.QUEUED_BEHIND.value:
            told.setdefault(edge["callee"], 0.0)
    names = set(incident.workloads["workload"].to_pylist())
    ordered = sorted((name for name in told if name in names), key=lambda name: (-told[name], name))
    absent = [
        NotChecked(
            f"without {name}", recorded.why_left_out(name) or "it had ended, or came, outside of what was recorded"
        )
        for name in ordered
        if not recorded.rows(name)
    ]
    found = [name for name in ordered if recorded.rows(name)]
    held = _held(recorded, victim)
    ranks = {name: int(recorded.trace.workloads.rank[recorded.rows(name)[0]]) for name in held}
    mine = int(recorded.trace.workloads.rank[recorded.rows(victim)[0]])
    less = [name for name in held if ranks[name] > mine and name not in found]
    found += sorted(less, key=lambda name: (-held[name], name))
    if not found:
        found = sorted((name for name in held if ranks[name] == mine), key=lambda name: (-held[name], name))
    return found, absent


def _about(incident: Incident, victim: str) -> pc.Expression:
    table = incident.metrics
    mine = pc.and_(pc.equal(table["node"], victim), pc.equal(table["metric"], "blocking_gpu_seconds"))
    return pc.and_(mine, pc.is_valid(table["peer"]))


def _held(recorded: Recorded, victim: str) -> dict[str, float]:
    """GPU-seconds that each other workload held during the victim's wait on nodes where the victim may run."""
    work, cluster = recorded.trace.workloads, recorded.trace.cluster
    row = recorded.rows(victim)[0]
    begin = float(work.submit[row])
    end = float(work.observed_start[row]) if math.isfinite(work.observed_start[row]) else recorded.until
    allowed = np.ones(len(cluster), bool)
    if work.pools[row]:
        allowed &= (cluster.pool & work.pools[row]) != 0
    if work.models[row]:
        allowed &= (np.where(cluster.model >= 0, 1 << np.maximum(cluster.model, 0), 0) & work.models[row]) != 0
    out: dict[str, float] = {}
    for name in recorded.names:
        if name == victim:
            continue
        for other in recorded.rows(name):
            node = int(work.observed_node[other])
            if node >= 0 and not allowed[node]:
                continue
            if recorded.initial[other]:
                start, stop = 0.0, float(work.submit[other] + work.duration[other])
            else:
                start = float(work.observed_start[other])
                stop = start + float(work.duration[other])
            if math.isfinite(start):
                seconds = max(0.0, min(stop, end) - max(start, begin))
                if seconds:
                    out[name] = out.get(name, 0.0) + seconds * float(work.demand_milli[other]) / 1000.0
    return out


def _changes(
    incident: Incident, victim: str, declared: Declaration | None, recorded: Recorded, reproduced: Reproduced
) -> tuple[Attribution, list[NotChecked]]:
    row = recorded.rows(victim)[0]
    work = recorded.trace.workloads
    world = World(recorded, reproduced, row, draw(recorded, DRAWS, _SEED))
    factual = world.without(frozenset())
    seen = float(work.observed_start[row])
    if not math.isfinite(seen):
        # It waits in the recording: it cannot have started before.
        factual = np.maximum(factual, recorded.until)
    factual_waits = (np.full(DRAWS, seen) if math.isfinite(seen) else factual) - world.asked
    culprits, missing = culprits_of(incident, recorded, victim)
    if len(culprits) > MOST_CULPRITS:
        more = len(culprits) - MOST_CULPRITS
        missing.append(
            NotChecked("further culprits", f"{more} that took less of the GPUs than the first {MOST_CULPRITS}")
        )
        culprits = culprits[:MOST_CULPRITS]
    if not culprits:
        missing.append(NotChecked("without a culprit", "nobody is recorded to have held what the victim waits for"))
    promise = _promise(recorded, row, declared)
    judge = _Judge(world, factual, factual_waits, promise)
    rows = {name: frozenset(recorded.rows(name)) for name in culprits}
    shares, how = _shares(world, [rows[name] for name in culprits], factual)
    entries = [
        judge.entry(world.without(rows[name]), (name,), f"without {name}", share)
        for name, share in zip(culprits, shares, strict=True)
    ]
    entries.sort(key=lambda item: (-(item.shapley or 0.0), -(item.saved or 0.0), item.nodes))
    if len(culprits) > 1:
        together = frozenset().union(*rows.values())
        named = culprits if len(culprits) <= 3 else []
        change = f"without {', '.join(culprits)}" if named else f"without all {len(culprits)} of them"
        entries.append(judge.entry(world.without(together), tuple(sorted(culprits)), change))
    for words, other in _other_changes(world, entries[0].nodes[0] if entries else "", declared, missing):
        entries.append(judge.entry(world.starts(other), (), words))
    return (
        Attribution(
            engine="replay",
            metric=METRIC,
            unit="s",
            factual=_tidy(float(np.median(factual_waits))),
            entries=tuple(entries),
            notes=tuple(_notes(world, judge, how)),
            victim=victim,
            factual_low=None if math.isfinite(seen) else _tidy(_quantile(factual_waits, 0.025)),
            factual_high=None if math.isfinite(seen) else _tidy(_quantile(factual_waits, 0.975)),
            promised=promise,
            reproduction=_reproduction(reproduced),
        ),
        missing,
    )


def _promise(recorded: Recorded, row: int, declared: Declaration | None) -> float | None:
    """Seconds that the victim may wait; None: no promise is known."""
    return (declared or default_policy()).wait_slo(as_seen(recorded.trace.workloads, row))


@dataclass
class _Judge:
    """Compares the victim's starts under a change with those as it was; starts and waits are [draws]."""

    world: World
    factual: Floats
    waits: Floats
    promise: float | None
    endless: bool = False

    def entry(
        self, starts: Floats, nodes: tuple[str, ...], change: str, shapley: float | None = None
    ) -> AttributionEntry:
        """What the victim would have seen, from its starts under the change."""
        errors = np.array([error.seconds for error in self.world.reproduced.errors if not error.bound])
        rng = np.random.default_rng(_SEED)
        # The replay is off by so much elsewhere; where the change makes no difference, both are off by the same.
        off = rng.choice(errors, len(starts)) if len(errors) else np.zeros(len(starts))
        waits = np.maximum(starts - off - self.world.asked, 0.0)
        waits = np.where(starts == self.factual, self.waits, waits)
        saved = self.waits - waits
        ratio = saved / np.maximum(self.waits, _APART)
        self.endless |= bool((starts >= LONGEST).any())
        return AttributionEntry(
            nodes=nodes,
            counterfactual=_tidy(float(np.median(waits))),
            contribution=_tidy(float(np.median(ratio))),
            low=_tidy(_quantile(ratio, 0.025)),
            high=_tidy(_quantile(ratio, 0.975)),
            shapley=None if shapley is None else _tidy(shapley),
            change=change,
            saved=_tidy(float(np.median(saved))),
            saved_low=_tidy(_quantile(saved, 0.025)),
            saved_high=_tidy(_quantile(saved, 0.975)),
            broken=None if self.promise is None else _tidy(float((waits > self.promise).mean())),
        )


def _quantile(values: Floats, share: float) -> float:
    """Quantile of draws, so that the next draw lies outside of both bounds with the probability that is left over."""
    return float(np.quantile(values, share, method="weibull"))


def _shares(world: World, groups: Sequence[frozenset[int]], factual: Floats) -> tuple[list[float], str]:
    """Shapley shares of the culprits in what their joint absence saves; exact where that is cheap, else sampled."""
    if not groups:
        return [], ""
    if len(groups) == 1:
        return [1.0 if _worth(world, groups, factual, frozenset({0})) > 0 else 0.0], ""

    def worth(members: frozenset[int]) -> float:
        return _worth(world, groups, factual, members)

    before = world.spent
    worth(frozenset(range(len(groups))))
    cost = max(1, world.spent - before)
    if 2 ** len(groups) * cost <= BUDGET:
        values = shapley(len(groups), worth)
        how = ""
    else:
        values, count = _sampled(len(groups), worth, max(2, BUDGET // (cost * len(groups))))
        how = f"Shapley shares are the mean over {count} sampled orders of the {len(groups)} culprits"
    total = sum(values)
    # A culprit may also speed things up; shares are of what the helpful removals save.
    return [value / total if total > 0 else 0.0 for value in values], how


def _worth(world: World, groups: Sequence[frozenset[int]], factual: Floats, members: frozenset[int]) -> float:
    """Seconds saved without ``members``, the median over the draws."""
    if not members:
        return 0.0
    rows: frozenset[int] = frozenset().union(*(groups[member] for member in members))
    starts = world.without(rows, SHAPLEY_DRAWS)
    before = factual[:SHAPLEY_DRAWS]
    saved = np.where(starts == before, 0.0, before - starts)
    return float(np.median(saved))


def _sampled(players: int, worth: Callable[[frozenset[int]], float], orders: int) -> tuple[list[float], int]:
    """Shapley values as the mean over sampled orders, each taken forwards and backwards."""
    rng = np.random.default_rng(_SEED)
    if math.factorial(players) <= orders:
        chosen = [tuple(order) for order in permutations(range(players))]
    else:
        half = [tuple(rng.permutation(players).tolist()) for _ in range(max(1, orders // 2))]
        chosen = [order for item in half for order in (item, item[::-1])]
    values = [0.0] * players
    for order in chosen:
        before = 0.0
        members: frozenset[int] = frozenset()
        for player in order:
            members = members | {player}
            now = worth(members)
            values[player] += (now - before) / len(chosen)
            before = now
    return values, len(chosen)


def _other_changes(
    world: World, first: str, declared: Declaration | None, missing: list[NotChecked]
) -> list[tuple[str, Change]]:
    """Priorities swapped, work packed, preemption, the policy; what makes no sense here goes to ``missing``."""
    recorded, base = world.recorded, world.as_it_was()
    work = recorded.trace.workloads
    out = []
    by_priority = any(rules.order == "priority" for rules in world.rules)
    if first:
        mine, theirs = recorded.rows(work.names[world.victim]), recorded.rows(first)
        rank = work.rank.copy()
        rank[list(mine)], rank[list(theirs)] = work.rank[theirs[0]], work.rank[mine[0]]
        words = f"priorities of {work.names[world.victim]} and {first} swapped"
        if work.rank[mine[0]] == work.rank[theirs[0]]:
            missing.append(NotChecked(words, "they have the same"))
        elif not by_priority:
            missing.append(NotChecked(words, "the schedule is reproduced without regard to priorities"))
        else:
            out.append((words, replace(base, trace=replace(base.trace, workloads=replace(work, rank=rank)))))
    out.append(("work packed tightly, without fragmentation", _packed(world)))
    if any(rules.preemption for rules in world.rules):
        missing.append(NotChecked("preemption", "it was on already"))
    elif not by_priority:
        missing.append(NotChecked("preemption", "the schedule is reproduced without regard to priorities"))
    else:
        out.append(
            (
                "preemption allowed",
                replace(base, options=lambda rules: replace(rules.options(recorded), preemption=True)),
            )
        )
    if declared is not None:
        out.append((f"policy {declared.name} enforced", replace(base, policy=lambda _: AsRecorded(Declared(declared)))))
    elif world.rules != (_STRICT,):
        out.append(
            (
                "strict priority enforced",
                Change(base.trace, lambda _: _STRICT.policy(), lambda _: _STRICT.options(recorded)),
            )
        )
    return out


def _packed(world: World) -> Change:
    """What ran when the recording began is placed anew, the largest first; what follows where least is left over."""
    recorded, base = world.recorded, world.as_it_was()
    work = recorded.trace.workloads
    rows = np.flatnonzero(recorded.initial)
    ordered = rows[np.lexsort((work.uid[rows], -work.demand_milli[rows]))]
    submit = work.submit.copy()
    submit[ordered] = (np.arange(len(ordered)) - len(ordered)) * _APART
    changed = replace(work, submit=submit, pinned=np.where(recorded.initial, -1, work.pinned))
    return Change(
        replace(base.trace, workloads=changed),
        lambda rules: Packed(rules.policy()),
        lambda rules: replace(rules.options(recorded), compaction=True),
    )


def _notes(world: World, judge: _Judge, how: str) -> list[str]:
    recorded = world.recorded
    notes = [
        "the recorded schedule was replayed with one thing changed; nothing is submitted that was not recorded",
    ]
    if world.drawn.rows.size:
        notes.append(f"how long what had not ended goes on is drawn from recorded durations: {world.drawn.basis}")
    notes += recorded.assumed
    if how:
        notes.append(how)
    if len(world.rules) > 1:
        notes.append(
            f"{len(world.rules)} kinds of scheduler reproduce the recording equally well; the intervals cover each"
        )
    if judge.endless:
        notes.append("in some draws the victim never starts")
    return notes


def _reproduction(found: Reproduced) -> Reproduction:
    return Reproduction(
        rules=found.rules.words,
        compared=len(found.errors),
        waiting=found.waiting,
        within=_tidy(found.within),
        median_seconds=_tidy(found.median) if found.errors else None,
        largest_seconds=_tidy(found.largest) if found.errors else None,
        missed=tuple(NotChecked(item.name, item.why) for item in found.missed[:20]),
    )


def _tidy(value: float) -> float:
    """Six significant digits: more would be noise, and would differ between processors."""
    return float(f"{value:.6g}") + 0.0


__all__ = ["Answer", "attribute", "culprits_of", "victims_of"]
