"""Run all methods side by side on the chosen data sets, and sum up by row of the result table."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import datasets
from benchmarks.baselines import prior
from benchmarks.baselines.dowhy_gcm import DidNotFinishError
from benchmarks.cases import Case
from benchmarks.methods import Answer, Method
from benchmarks.metrics import Estimate, average_at, hit_probability, interval, separation
from rca.errors import PrioscopeError
from rca.graph import build

#: Rank depths of the table.
DEPTHS = (1, 3, 5)
ALL = "all"


class Outcome(msgspec.Struct, frozen=True):
    """One method on one case. Hits are probabilities over random tie-breaking; empty for a quiet window.

    ``problem`` says why there is no answer (time-out, error); such a case counts as a miss.
    """

    method: str
    case: str
    dataset: str
    scenario: str
    group: str
    quiet: bool
    hits: dict[str, float]
    average5: float | None
    named: bool
    level: float | None
    seconds: float | None
    confidence: float | None = None
    problem: str = ""


class Row(msgspec.Struct, frozen=True):
    """One line of the result table: a method on the cases of one group. None: no such cases."""

    dataset: str
    scenario: str
    group: str
    method: str
    title: str
    cases: int
    top1: Estimate | None
    top3: Estimate | None
    top5: Estimate | None
    average5: Estimate | None
    named: Estimate | None
    quiet_cases: int
    specificity: Estimate | None
    separation: float | None
    median_seconds: float | None
    unfinished: int
    first_problem: str


class Report(msgspec.Struct, frozen=True):
    """Everything a run found."""

    rows: list[Row]
    outcomes: list[Outcome]
    skipped: dict[str, str]
    seed: int
    python: str
    machine: str


@dataclass
class _Seen:
    """Of each incident, what the constant rankers need."""

    case: Case
    candidates: tuple[str, ...]


def judge(case: Case, candidates: Sequence[str], method: str, answer: Answer, seconds: float | None) -> Outcome:
    """Compare an answer with the truth of its case."""
    hits, average = {}, None
    if not case.quiet:
        hits = {str(k): hit_probability(answer.scores, case.truth, candidates, k) for k in DEPTHS}
        average = average_at(answer.scores, case.truth, candidates)
    return Outcome(
        method, case.name, case.dataset, case.scenario, case.group, case.quiet,
        hits=hits,
        average5=average,
        named=answer.named,
        level=answer.level if math.isfinite(answer.level) else None,
        seconds=seconds,
        confidence=answer.confidence,
    )  # fmt: skip


def ask(case: Case, candidates: Sequence[str], method: Method) -> Outcome:
    """Put one case to one method; a failure is an outcome, not an exception."""
    began = time.perf_counter()
    try:
        answer = method.answer(case.incident)
    except (DidNotFinishError, PrioscopeError) as error:
        missed = {} if case.quiet else {str(k): 0.0 for k in DEPTHS}
        return Outcome(
            method.name, case.name, case.dataset, case.scenario, case.group, case.quiet,
            hits=missed,
            average5=None if case.quiet else 0.0,
            named=False,
            level=None,
            seconds=time.perf_counter() - began,
            problem=str(error).splitlines()[0] if str(error) else type(error).__name__,
        )  # fmt: skip
    return judge(case, candidates, method.name, answer, time.perf_counter() - began)


def run(
    names: Sequence[str],
    methods: Sequence[Method],
    priors: Sequence[str],
    *,
    quiet: int = 50,
    skipped: dict[str, str] | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Report:
    """Run ``methods`` and constant ``priors`` on the data sets ``names``.

    Each case is loaded once and put to all methods in turn, so all see the same bytes. Progress goes to ``console``.

    Raises:
        NotFoundError: a data set is not there.
        InvalidInputError: a file of it is malformed.
    """
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console or Console(stderr=True)) as progress:
        for name in names:
            loader = datasets.load(name)
            seen: list[_Seen] = []
            for phase, source in (("incidents", loader.incidents()), ("quiet windows", loader.quiet(quiet))):
                task = progress.add_task(f"{name}: {phase}", total=None)
                for case in source:
                    candidates = build(case.incident).nodes
                    if not case.quiet:
                        seen.append(_Seen(_without_rows(case), candidates))
                    for method in methods:
                        progress.update(task, description=f"{name}: {phase} · {method.name}")
                        outcomes.append(ask(case, candidates, method))
                    progress.advance(task)
                done = progress.tasks[task].completed
                progress.update(task, description=f"{name}: {phase}", total=done, completed=done)
            outcomes.extend(_constant(seen, priors))
    titles = {method.name: method.title for method in methods} | {
        "prior_loo": "constant prior, leave one out",
        "prior_in_sample": "constant prior, in sample",
    }
    return Report(
        summarise(outcomes, titles, seed=seed),
        outcomes,
        dict(skipped or {}),
        seed,
        platform.python_version(),
        f"{platform.machine()} {platform.system()}",
    )


def _without_rows(case: Case) -> Case:
    """The case without its bundle's rows, which would fill the memory."""
    bundle = case.incident
    empty = {name: table.slice(0, 0) for name, table in bundle.tables.items()}
    return Case(
        case.name, case.dataset, case.scenario, case.group, type(bundle)(header=bundle.header, **empty), case.truth
    )


def _constant(seen: Sequence[_Seen], priors: Sequence[str]) -> Iterator[Outcome]:
    """The constant rankers, which need the labels of the whole data set. They always name a cause."""
    truths = [item.case.truth for item in seen]
    for name in priors:
        scores = prior.leave_one_out(truths) if name == "prior_loo" else prior.in_sample(truths)
        for item, score in zip(seen, scores, strict=True):
            yield judge(item.case, item.candidates, name, Answer(score, True, float("nan")), None)


def summarise(outcomes: Sequence[Outcome], titles: dict[str, str], *, seed: int = 0) -> list[Row]:
    """One row per (data set, scenario, group) and method, then per scenario, then per data set with several.

    Quiet windows count for their own group where incidents have one of that name, and always for the scenario.
    """
    order: dict[tuple[str, str, str], None] = {}
    for outcome in outcomes:
        order.setdefault((outcome.dataset, outcome.scenario, outcome.group))
    scenarios = dict.fromkeys((dataset, scenario) for dataset, scenario, _ in order)
    methods = dict.fromkeys(outcome.method for outcome in outcomes)
    rows = []
    for dataset, scenario in scenarios:
        here = [item for item in outcomes if (item.dataset, item.scenario) == (dataset, scenario)]
        groups = sorted(group for found, place, group in order if (found, place) == (dataset, scenario))
        for group in [*groups, ALL]:
            for method in methods:
                chosen = [item for item in here if item.method == method and group in (item.group, ALL)]
                if chosen:
                    rows.append(_row(dataset, scenario, group, method, titles.get(method, method), chosen, seed))
    for dataset in dict.fromkeys(dataset for dataset, _ in scenarios):
        if sum(found == dataset for found, _ in scenarios) < 2:
            continue
        for method in methods:
            chosen = [item for item in outcomes if (item.dataset, item.method) == (dataset, method)]
            if chosen:
                rows.append(_row(dataset, ALL, ALL, method, titles.get(method, method), chosen, seed))
    return rows


def _row(
    dataset: str, scenario: str, group: str, method: str, title: str, outcomes: Sequence[Outcome], seed: int
) -> Row:
    incidents = [item for item in outcomes if not item.quiet]
    quiet = [item for item in outcomes if item.quiet]
    answered = [item for item in quiet if not item.problem]
    seconds = [item.seconds for item in outcomes if item.seconds is not None]
    problems = [item.problem for item in outcomes if item.problem]

    def hits(k: int) -> Estimate | None:
        return interval([item.hits[str(k)] for item in incidents], seed=seed)

    def levels(items: Iterable[Outcome]) -> list[float]:
        return [-math.inf if item.level is None else item.level for item in items if not item.problem]

    constant = method.startswith("prior_")
    return Row(
        dataset, scenario, group, method, title,
        cases=len(incidents),
        top1=hits(1),
        top3=hits(3),
        top5=hits(5),
        average5=interval([item.average5 for item in incidents if item.average5 is not None], seed=seed),
        named=interval([float(item.named) for item in incidents], seed=seed),
        quiet_cases=len(quiet),
        specificity=interval([float(not item.named) for item in answered], seed=seed),
        separation=None if constant else separation(levels(incidents), levels(quiet)),
        median_seconds=float(np.median(seconds)) if seconds else None,
        unfinished=len(problems),
        first_problem=problems[0] if problems else "",
    )  # fmt: skip


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return f"{estimate.value:.3f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def print_report(report: Report, console: Console) -> None:
    """Print the accuracy and the specificity of every row, with 95 % intervals."""
    places = dict.fromkeys((row.dataset, row.scenario, row.group) for row in report.rows)
    for dataset, scenario, group in places:
        rows = [row for row in report.rows if (row.dataset, row.scenario, row.group) == (dataset, scenario, group)]
        incidents, quiet = max(row.cases for row in rows), max(row.quiet_cases for row in rows)
        table = Table(
            title=f"{dataset} / {scenario} / {group}: {incidents} incidents, {quiet} quiet windows",
            title_justify="left",
        )
        table.add_column("method", no_wrap=True)
        for heading in ("top-1", "top-3", "top-5", "Avg@5", "names a cause", "specificity"):
            table.add_column(heading, justify="right", no_wrap=True)
        for heading in ("AUC", "s/case"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("did not finish")
        for row in rows:
            table.add_row(
                row.title,
                *map(_cell, (row.top1, row.top3, row.top5, row.average5, row.named, row.specificity)),
                "–" if row.separation is None else f"{row.separation:.2f}",
                "–" if row.median_seconds is None else f"{row.median_seconds:.3f}",
                f"{row.unfinished} ({row.first_problem})" if row.unfinished else "",
            )
        console.print(table)
    for name, reason in report.skipped.items():
        console.print(f"skipped {name}: {reason}")


def to_json(report: Report) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
