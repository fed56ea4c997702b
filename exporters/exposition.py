"""The exposition formats: Prometheus text 0.0.4 and OpenMetrics 1.0, with label text that is prepared once.

prometheus_client formats and escapes every label of every sample at every scrape; most label sets are the same from one
poll to the next. `TextCache` writes the text in front of a value when the families are built and keeps it while the
series lives, so that `render` has only numbers to format. The output is parsed by the client's own parsers to the same
samples (tested), and ``benchmarks/exporters/exposition.py`` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from exporters.catalog import Metric, MetricType
from exporters.families import Family, Labels

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def choose(accept: str) -> str:
    """Return the content type to answer an ``Accept`` header with: OpenMetrics when asked for, else text.

    Of several media types the one with the highest ``q`` wins; OpenMetrics wins a tie, as it is the richer.
    """
    best, chosen = 0.0, TEXT
    for part in accept.split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        quality = 1.0
        version = ""
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
            elif key.strip() == "version":
                version = value.strip().strip('"')
        if media == "application/openmetrics-text" and version in ("", "0.0.1", "1.0.0"):
            kind = OPENMETRICS
        elif media in ("text/plain", "text/*", "*/*"):
            kind = TEXT
        else:
            continue
        if quality > best or (quality == best and quality > 0 and kind is OPENMETRICS):
            best, chosen = quality, kind
    return chosen


def number(value: float) -> str:
    """Format a sample value so that it parses back to the same float."""
    if value != value:
        return "NaN"
    if value in (math.inf, -math.inf):
        return "+Inf" if value > 0 else "-Inf"
    return str(value)


class TextCache:
    """Prepares families for `render`: the text in front of every value, kept from one poll to the next.

    Used where families are built, once a poll and off the path of a scrape; only label sets that the poll before did
    not have cost any formatting. A label set that a poll does not have is forgotten, so that memory follows the series
    that live. Not thread-safe: one cache belongs to the thread that polls.
    """

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, str]] = {}
        self._histograms: dict[str, dict[Labels, tuple[str, ...]]] = {}

    def prepare(self, families: Iterable[Family]) -> tuple[Family, ...]:
        """Return the families of one poll with their texts; what is not among them is forgotten."""
        series: dict[str, dict[Labels, str]] = {}
        histograms: dict[str, dict[Labels, tuple[str, ...]]] = {}
        prepared = []
        for item in families:
            metric = item.metric
            name, names = metric.name, metric.labels
            if metric.type is MetricType.HISTOGRAM:
                old = self._histograms.get(name, {})
                found = [old.get(key) or _histogram_prefixes(metric, key) for key, _ in item.distributions]
                histograms[name] = {key: texts for (key, _), texts in zip(item.distributions, found, strict=True)}
                prepared.append(replace(item, histogram_texts=found))
            else:
                known = self._series.get(name, {})
                texts = [known.get(key) or _prefix(name, names, key) for key, _ in item.samples]
                series[name] = {key: text for (key, _), text in zip(item.samples, texts, strict=True)}
                prepared.append(replace(item, texts=texts))
        self._series, self._histograms = series, histograms
        return tuple(prepared)


def render(families: Iterable[Family], content_type: str = TEXT) -> bytes:
    """Return the exposition of ``families`` in ``content_type`` (`TEXT` or `OPENMETRICS`).

    Thread-safe. Families that went through a `TextCache` cost one number a sample, others their labels too.
    """
    openmetrics = content_type == OPENMETRICS
    parts: list[str] = []
    for item in families:
        metric = item.metric
        parts.append(_header(metric, openmetrics))
        if metric.type is MetricType.HISTOGRAM:
            _histograms(item, parts)
        else:
            _samples(item, parts)
    if openmetrics:
        parts.append("# EOF\n")
    return "".join(parts).encode()


def _samples(item: Family, parts: list[str]) -> None:
    name, names = item.metric.name, item.metric.labels
    texts = item.texts or [_prefix(name, names, labels) for labels, _ in item.samples]
    # A finite sum has finite terms, which need no care; a sum that overflows only takes the longer way.
    if math.isfinite(sum([value for _, value in item.samples])):
        lines = [f"{text}{value}\n" for text, (_, value) in zip(texts, item.samples, strict=True)]
    else:
        lines = [f"{text}{number(value)}\n" for text, (_, value) in zip(texts, item.samples, strict=True)]
    # Joined family by family, so that the lines are freed while they are still in the processor's cache.
    parts.append("".join(lines))


def _histograms(item: Family, parts: list[str]) -> None:
    prepared = item.histogram_texts or [_histogram_prefixes(item.metric, labels) for labels, _ in item.distributions]
    for texts, (_, data) in zip(prepared, item.distributions, strict=True):
        total = 0
        for text, count in zip(texts, data.counts, strict=False):
            total += count
            parts.append(f"{text}{total}\n")
        parts.append(f"{texts[-2]}{total}\n")
        parts.append(f"{texts[-1]}{number(data.sum)}\n")


def _header(metric: Metric, openmetrics: bool) -> str:
    name = metric.name
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        text = text.replace('"', r"\"")
        if metric.type is MetricType.COUNTER:
            name = name.removesuffix("_total")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.type.value}\n"


def _prefix(name: str, names: tuple[str, ...], values: Labels, extra: str = "") -> str:
    # Sorted, as the client does, so that both outputs compare line by line.
    pairs = sorted(zip(names, values, strict=True))
    inner = ",".join(f'{key}="{value.translate(_ESCAPES)}"' for key, value in pairs)
    if extra:
        inner = f"{inner},{extra}" if inner else extra
    return f"{name}{{{inner}}} " if inner else f"{name} "


def _histogram_prefixes(metric: Metric, labels: Labels) -> tuple[str, ...]:
    bounds = [*(repr(float(bound)) for bound in metric.buckets), "+Inf"]
    return (
        *(_prefix(f"{metric.name}_bucket", metric.labels, labels, f'le="{bound}"') for bound in bounds),
        _prefix(f"{metric.name}_count", metric.labels, labels),
        _prefix(f"{metric.name}_sum", metric.labels, labels),
    )
