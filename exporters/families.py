"""Metric families on their way from the collectors to the exposition, and the caps that keep them bounded.

A `Family` is what a scrape needs and nothing more: a catalogue entry and its samples as label values with a number.
`exporters.exposition` writes it as text; `to_client` turns it into the type of prometheus_client, for a registry.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from exporters.catalog import METRICS, Metric, MetricType

if TYPE_CHECKING:
    from prometheus_client.core import Metric as ClientMetric

#: Label values in the order of `Metric.labels`.
Labels: TypeAlias = tuple[str, ...]

#: The value that every label of the overflow series has.
OVERFLOW: Final = "overflow"


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's content: ``counts`` per bucket (not cumulative, the last is +Inf) and the sum of the values."""

    counts: tuple[int, ...]
    sum: float

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> Distribution:
        """Return a distribution with no observation for buckets with these upper bounds."""
        return cls((0,) * (len(bounds) + 1), 0.0)

    def observe(self, bounds: Sequence[float], value: float) -> Distribution:
        """Return this distribution with ``value`` added (``bounds`` are inclusive upper bounds)."""
        index = bisect.bisect_left(bounds, value)
        counts = self.counts
        return Distribution((*counts[:index], counts[index] + 1, *counts[index + 1 :]), self.sum + value)

    def add(self, other: Distribution) -> Distribution:
        """Return the sum of both."""
        return Distribution(tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)), self.sum + other.sum)

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Family:
    """The samples of one metric. Histograms fill ``distributions``, the others ``samples``.

    ``texts`` and ``histogram_texts`` are what `exporters.exposition.TextCache` prepared: the text in front of each
    value, in the order of ``samples`` or ``distributions``; empty: not prepared.
    """

    metric: Metric
    samples: Sequence[tuple[Labels, float]] = ()
    distributions: Sequence[tuple[Labels, Distribution]] = ()
    texts: Sequence[str] = ()
    histogram_texts: Sequence[tuple[str, ...]] = ()

    def __len__(self) -> int:
        """Number of label sets."""
        return len(self.samples) + len(self.distributions)


def family(
    name: str,
    samples: Mapping[Labels, float] | Iterable[tuple[Labels, float]] = (),
    *,
    distributions: Mapping[Labels, Distribution] | None = None,
) -> Family:
    """Build a family of the catalogue.

    Raises:
        KeyError: no such metric in the catalogue.
        ValueError: a label set does not match the metric's labels.
    """
    metric = METRICS[name]
    pairs = tuple(samples.items()) if isinstance(samples, Mapping) else tuple(samples)
    histograms = tuple((distributions or {}).items())
    width = len(metric.labels)
    for labels, _ in (*pairs[:1], *histograms[:1]):
        if len(labels) != width:
            raise ValueError(f"{name} has labels {metric.labels}, not {len(labels)} values")
    return Family(metric, pairs, histograms)


def series(families: Iterable[Family]) -> int:
    """Return how many label sets these families have in all."""
    return sum(len(item) for item in families)


def overflow_labels(metric: Metric) -> Labels:
    """Return the label set of the overflow series; ``cluster`` and every other label read ``overflow``."""
    return (OVERFLOW,) * len(metric.labels)


def capped_sum(name: str, samples: Mapping[Labels, float], cap: int | None = None) -> tuple[Family, int]:
    """Keep the largest ``cap`` samples and add the rest up in the overflow series; also return how many those were.

    For gauges that add up (counts of workloads, GPUs). ``cap`` defaults to the catalogue's.
    """
    metric = METRICS[name]
    limit = metric.cap if cap is None else cap
    if len(samples) <= limit:
        return family(name, samples), 0
    kept = dict(heapq.nlargest(limit, samples.items(), key=_by_value))
    rest = math.fsum(value for labels, value in samples.items() if labels not in kept)
    kept[overflow_labels(metric)] = rest
    return family(name, kept), len(samples) - limit


def capped_top(name: str, samples: Mapping[Labels, float], cap: int | None = None) -> tuple[Family, int]:
    """Keep the largest ``cap`` samples and leave the rest out; also return how many those were.

    For gauges of single workloads or GPUs, whose sum would mean nothing.
    """
    limit = METRICS[name].cap if cap is None else cap
    if len(samples) <= limit:
        return family(name, samples), 0
    return family(name, heapq.nlargest(limit, samples.items(), key=_by_value)), len(samples) - limit


def _by_value(item: tuple[Labels, float]) -> tuple[float, Labels]:
    value, labels = item[1], item[0]
    return (value if value == value else -math.inf, labels)


def to_client(item: Family) -> ClientMetric:
    """Convert to prometheus_client's type, as a custom collector returns it."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    metric = item.metric
    if metric.type is MetricType.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, data in item.distributions:
            bounds = (*(repr(float(bound)) for bound in metric.buckets), "+Inf")
            buckets = list(zip(bounds, itertools.accumulate(data.counts), strict=True))
            histogram.add_metric(labels, buckets=buckets, sum_value=data.sum)
        return histogram
    kind = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    simple = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in item.samples:
        simple.add_metric(labels, value)
    return simple
