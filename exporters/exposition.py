"""The exposition formats: Prometheus text 0.0.4 and OpenMetrics 1.0, with cached label prefixes.

prometheus_client formats and escapes every label of every sample at every scrape, over 10 µs a sample; most label sets
are the same from one scrape to the next. `Renderer` keeps the finished text in front of the value, so that a sample
costs one look-up and one number. The output is parsed by the client's own parsers to the same samples (tested), and
``benchmarks/exporters/exposition.py`` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from exporters.catalog import Metric, MetricType
from exporters.families import Distribution, Family, Labels

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
    return repr(value)


class Renderer:
    """Writes families as text, remembering the text of label sets from one call to the next.

    Not thread-safe: one renderer belongs to one thread, or is called under a lock. A label set that is not rendered in
    two calls in a row is forgotten, so that memory follows the series that live.
    """

    def __init__(self) -> None:
        self._old: dict[str, dict[Labels, str]] = {}
        self._old_histograms: dict[str, dict[Labels, tuple[str, ...]]] = {}

    def render(self, families: Iterable[Family], content_type: str = TEXT) -> bytes:
        """Return the exposition of ``families`` in ``content_type`` (`TEXT` or `OPENMETRICS`)."""
        openmetrics = content_type == OPENMETRICS
        lines: list[str] = []
        fresh: dict[str, dict[Labels, str]] = {}
        fresh_histograms: dict[str, dict[Labels, tuple[str, ...]]] = {}
        for item in families:
            metric = item.metric
            lines.append(_header(metric, openmetrics))
            if metric.type is MetricType.HISTOGRAM:
                fresh_histograms[metric.name] = self._histograms(item, lines)
            else:
                fresh[metric.name] = self._samples(item, lines)
        self._old, self._old_histograms = fresh, fresh_histograms
        if openmetrics:
            lines.append("# EOF\n")
        return "".join(lines).encode()

    def _samples(self, item: Family, lines: list[str]) -> dict[Labels, str]:
        old = self._old.get(item.metric.name, {})
        kept: dict[Labels, str] = {}
        append = lines.append
        for labels, value in item.samples:
            prefix = old.get(labels)
            if prefix is None:
                prefix = _prefix(item.metric.name, item.metric.labels, labels)
            kept[labels] = prefix
            # Subtracting a finite number from itself gives 0; infinities and NaN give NaN.
            append(f"{prefix}{value}\n" if value - value == 0 else f"{prefix}{number(value)}\n")
        return kept

    def _histograms(self, item: Family, lines: list[str]) -> dict[Labels, tuple[str, ...]]:
        old = self._old_histograms.get(item.metric.name, {})
        kept: dict[Labels, tuple[str, ...]] = {}
        for labels, data in item.distributions:
            prefixes = old.get(labels)
            if prefixes is None:
                prefixes = _histogram_prefixes(item.metric, labels)
            kept[labels] = prefixes
            _histogram(prefixes, data, lines)
        return kept


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


def _histogram(prefixes: tuple[str, ...], data: Distribution, lines: list[str]) -> None:
    total = 0
    for prefix, count in zip(prefixes, data.counts, strict=False):
        total += count
        lines.append(f"{prefix}{total}\n")
    lines.append(f"{prefixes[-2]}{total}\n")
    lines.append(f"{prefixes[-1]}{number(data.sum)}\n")
