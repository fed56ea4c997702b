"""Asks the planned queries of one capture, and keeps the record of what each source gave and failed to give."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rca.incident import Source, SourceStatus
from rca.telemetry.prometheus.answers import Answer, Api, Failure, QueryError, Series

#: What a failed query is called in a source's detail; longer lists are cut.
_MOST_NOTES = 6
#: Requests that may fail before the first answer; then nobody is there, and waiting for more would help nobody.
_MOST_SILENCES = 3


@dataclass(frozen=True)
class Query:
    """One PromQL expression. ``what`` it measures, in words for a reader of the explanation."""

    what: str
    promql: str


@dataclass(frozen=True)
class Span:
    """Evaluation times ``start, start + step, … <= end``, in Unix seconds."""

    start: float
    end: float


@dataclass
class Record:
    """What one source was asked, and how it answered."""

    name: str
    kind: str = "prometheus"
    queries: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    problems: dict[str, None] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    gave: set[str] = field(default_factory=set)
    absent: str = ""

    def source(self) -> Source:
        """The entry for the incident's header."""
        if self.absent:
            status = SourceStatus.ABSENT
        elif self.failed and not self.gave:
            status = SourceStatus.FAILED
        elif self.problems:
            status = SourceStatus.PARTIAL
        else:
            status = SourceStatus.OK
        said = [*([self.absent] if self.absent else []), *self.problems, *self.notes]
        if len(said) > _MOST_NOTES:
            said = [*said[:_MOST_NOTES], f"and {len(said) - _MOST_NOTES} more"]
        return Source(
            name=self.name, kind=self.kind, status=status, detail="; ".join(said), queries=tuple(self.queries)
        )


@dataclass
class Inquiry:
    """One capture's questions to one Prometheus or recording: a `Record` per source, in the order of first use."""

    api: Api
    step: float
    kind: str = "prometheus"
    records: dict[str, Record] = field(default_factory=dict)
    answered: bool = False
    unreachable: str = ""
    silences: int = 0

    def record(self, source: str) -> Record:
        """The record of ``source``."""
        return self.records.setdefault(source, Record(source, self.kind))

    async def names(self, pattern: str, span: Span) -> frozenset[str] | None:
        """Metric names that exist in ``span``; None when that could not be told."""
        try:
            found = await self.api.names(pattern, span.start, span.end)
        except QueryError as error:
            self._failed(error)
            return None
        self.answered = True
        return found

    async def ask(
        self, source: str, queries: Iterable[Query], spans: Sequence[Span], step: float | None = None
    ) -> dict[str, tuple[Series, ...]]:
        """Evaluate ``queries`` over ``spans``; return the series of each, by `Query.what`.

        A query that fails in one span keeps what the others gave; the record says so.
        """
        planned = [(query, span) for query in queries for span in spans]
        record = self.record(source)
        for query, _ in planned:
            record.queries.setdefault(query.promql)
        answers = await asyncio.gather(*(self._one(record, query, span, step) for query, span in planned))
        out: dict[str, tuple[Series, ...]] = {}
        for (query, _), answer in zip(planned, answers, strict=True):
            out[query.what] = (*out.get(query.what, ()), *answer.series)
        return out

    async def _one(self, record: Record, query: Query, span: Span, step: float | None) -> Answer:
        try:
            if not self.answered and self.silences >= _MOST_SILENCES:
                raise QueryError(Failure.TIMEOUT, f"not asked after {self.silences} requests without any answer")
            answer = await self.api.range(query.promql, span.start, span.end, step or self.step)
        except QueryError as error:
            self._failed(error)
            record.failed.add(query.what)
            record.problems.setdefault(f"{query.what}: {error.kind.value}: {error}")
            return Answer()
        self.answered = True
        if answer.partial:
            record.problems.setdefault(f"{query.what}: the server says that its answer is partial")
        for note in answer.notes:
            text = f"the server notes: {' '.join(note.split())[:200]}"
            (record.problems if answer.partial else record.notes).setdefault(text)
        if answer.series:
            record.gave.add(query.what)
        return answer

    def _failed(self, error: QueryError) -> None:
        if error.kind in (Failure.UNREACHABLE, Failure.TIMEOUT, Failure.REFUSED):
            self.silences += 1
            self.unreachable = self.unreachable or f"{error.kind.value}: {error}"

    def sources(self) -> tuple[Source, ...]:
        """All records, for the header."""
        return tuple(record.source() for record in self.records.values())


def selector(name: str, *matchers: str) -> str:
    """``name{matchers}``, leaving out empty ones."""
    inside = ", ".join(filter(None, matchers))
    return f"{name}{{{inside}}}" if inside else name


def label_matcher(name: str, values: Iterable[str]) -> str:
    """A matcher for exactly these values; empty for none."""
    found = sorted(set(values))
    if not found:
        return ""
    if len(found) == 1:
        return f"{name}={quoted(found[0])}"
    return f"{name}=~{quoted('|'.join(_escaped(value) for value in found))}"


def quoted(text: str) -> str:
    """A PromQL string: label values come from outside, and must not end it."""
    inside = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{inside}"'


def _escaped(text: str) -> str:
    # RE2's metacharacters; Python's re.escape would also escape characters that RE2 refuses to see escaped.
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$" else char for char in text)


def utc(seconds: float) -> str:
    """RFC 3339, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def by(labels: Mapping[str, str], *names: str) -> tuple[str, ...]:
    """The values of some labels; "" where one is missing."""
    return tuple(labels.get(name, "") for name in names)
