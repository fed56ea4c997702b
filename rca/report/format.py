"""How figures, times and names are written for people. Pure functions, shared by every renderer.

Units are the ones of `rca.signals`: ``s``, ``ratio``, ``1/s``, ``B/s``, ``B``, ``1`` and the empty string (unknown).
Numbers keep three significant digits, because no measurement here is better than that. Times are UTC.
"""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime
from typing import Final

from rca.incident import Window

NOT_MEASURED: Final = "not measured"

_SI: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_IEC: Final = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400

#: Suffixes of metric names that only repeat the unit.
_UNIT_SUFFIXES: Final = ("_bytes_per_second", "_seconds", "_ratio", "_bytes")
_ACRONYMS: Final = {"cpu": "CPU", "gpu": "GPU", "io": "I/O", "rtt": "RTT"}

_RELATION_VERBS: Final = {
    "calls": "calls",
    "runs_on": "runs on",
    "shares_device": "shares a device with",
    "queued_behind": "is queued behind",
}


def number(value: float, digits: int = 3) -> str:
    """Write ``value`` with ``digits`` significant digits, no exponent below 1e6 and a true minus sign.

    >>> number(3.20), number(0.00421), number(-1234.5)
    ('3.2', '0.00421', '−1230')
    """
    if math.isnan(value):
        return NOT_MEASURED
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    rounded = round(value, digits - 1 - exponent)
    if abs(rounded) >= 1e6 or abs(rounded) < 1e-6:
        text = f"{rounded:.{digits - 1}e}"
    else:
        text = f"{rounded:.{max(0, digits - 1 - exponent)}f}"
        if "." in text:
            text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−")


def quantity(value: float | None, unit: str) -> str:
    """Write a measurement with its unit: ``420 ms``, ``3.2 s``, ``12.4 %``, ``1.2 k/s``; None is ``not measured``."""
    if value is None or math.isnan(value):
        return NOT_MEASURED
    if math.isinf(value):
        return number(value)
    match unit:
        case "s":
            return duration(value)
        case "ratio":
            return f"{number(100 * value)} %"
        case "1/s":
            scaled, prefix = _scale(value)
            return f"{scaled} {prefix}/s" if prefix else f"{scaled}/s"
        case "B/s":
            scaled, prefix = _scale(value)
            return f"{scaled} {prefix}B/s"
        case "B":
            for factor, name in _IEC:
                if abs(value) >= factor:
                    return f"{number(value / factor)} {name}"
            return f"{number(value)} B"
        case _:
            scaled, prefix = _scale(value)
            return " ".join(part for part in (scaled, prefix, "" if unit == "1" else unit) if part)


def _scale(value: float) -> tuple[str, str]:
    for factor, prefix in _SI:
        # 999.9 would round to "1000", so it takes the larger prefix.
        if abs(value) >= 0.9995 * factor:
            return number(value / factor), prefix
    return number(value), ""


def duration(seconds: float) -> str:
    """Write a length of time in the unit that suits it: ``35 µs``, ``420 ms``, ``3.2 s``, ``2 min 5 s``, ``1 h 3 min``.

    >>> duration(0.42), duration(125), duration(-90061)
    ('420 ms', '2 min 5 s', '−1 d 1 h')
    """
    if math.isnan(seconds) or math.isinf(seconds):
        return number(seconds)
    size = abs(seconds)
    sign = "−" if seconds < 0 else ""
    if size == 0:
        return "0 s"
    for factor, name in ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms")):
        if size < 999.5 * factor:
            return f"{sign}{number(size / factor)} {name}"
    if size < 99.95:
        return f"{sign}{number(size)} s"
    whole = round(size)
    if whole < _HOUR:
        big, small = divmod(whole, _MINUTE)
        names = ("min", "s")
    elif whole < _DAY:
        big, small = divmod(round(whole / _MINUTE), 60)
        names = ("h", "min")
    else:
        big, small = divmod(round(whole / _HOUR), 24)
        names = ("d", "h")
    return sign + f"{big} {names[0]}" + (f" {small} {names[1]}" if small else "")


def share(probability: float) -> str:
    """Write a probability or a share as whole per cent, and never round it to certainty.

    >>> share(0.873), share(0.9999), share(0.0004), share(1.0)
    ('87 %', '>99 %', '<1 %', '100 %')
    """
    if math.isnan(probability):
        return NOT_MEASURED
    if 0.99 < probability < 1:
        return ">99 %" if probability > 0.994 else "99 %"
    if 0 < probability < 0.005:
        return "<1 %"
    return f"{round(100 * probability)} %".replace("-", "−")


def interval(low: float, high: float) -> str:
    """Write an interval of shares: ``38 to 46 %``."""
    return f"{round(100 * low)} to {round(100 * high)} %".replace("-", "−")


def change(baseline: float | None, incident: float | None) -> str:
    """Say how ``incident`` compares with ``baseline``: ``×7.6``, ``÷3.1``, ``+12 %``, ``unchanged``, ``from zero``.

    The answer is empty when either was not measured.
    """
    if baseline is None or incident is None or math.isnan(baseline) or math.isnan(incident):
        return ""
    if baseline == incident:
        return "unchanged"
    if baseline == 0:
        return "from zero"
    if incident == 0:
        return "to zero"
    ratio = incident / baseline
    if ratio < 0:
        return "changed sign"
    if ratio >= 2:
        return f"×{number(ratio, 2)}"
    if ratio <= 0.5:
        return f"÷{number(1 / ratio, 2)}"
    percent = round(100 * (ratio - 1))
    return "unchanged" if percent == 0 else f"{percent:+d} %".replace("-", "−")


def direction(baseline: float | None, incident: float | None) -> str:
    """Return the verb for the change: ``rose``, ``fell``, ``stayed`` or ``was`` (no baseline to compare with)."""
    if baseline is None or incident is None:
        return "was"
    if incident > baseline:
        return "rose"
    return "fell" if incident < baseline else "stayed"


def offset(seconds: float | None) -> str:
    """Say when something began relative to the symptom: ``+35 s after the symptom``, ``40 s before the symptom``."""
    if seconds is None or math.isnan(seconds):
        return "onset not known"
    if abs(seconds) < 0.5:
        return "with the symptom"
    if seconds > 0:
        return f"+{duration(seconds)} after the symptom"
    return f"{duration(-seconds)} before the symptom"


def offset_short(seconds: float | None) -> str:
    """Write the same offset for a narrow table column: ``+35 s``, ``−40 s``, ``0 s`` or a dash."""
    if seconds is None or math.isnan(seconds):
        return "–"
    if abs(seconds) < 0.5:
        return "0 s"
    return ("+" if seconds > 0 else "") + duration(seconds)


def moment(time: datetime) -> str:
    """Write a time in UTC to the second: ``2026-01-31 03:05:00 UTC``."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def window(span: Window) -> str:
    """Write a window: ``2026-01-31 03:00 to 03:20 UTC (20 min)``; seconds and a second date only if needed."""
    start, end = span.start.astimezone(UTC), span.end.astimezone(UTC)
    clock = "%H:%M" if start.second == end.second == 0 else "%H:%M:%S"
    last = end.strftime(clock if start.date() == end.date() else f"%Y-%m-%d {clock}")
    return f"{start.strftime(f'%Y-%m-%d {clock}')} to {last} UTC ({duration(span.seconds)})"


def metric_label(name: str) -> str:
    """Turn a metric name into words: ``latency_p95_seconds`` becomes ``latency p95``, ``cpu_…_ratio`` ``CPU …``."""
    stem = name
    for suffix in _UNIT_SUFFIXES:
        stem = stem.removesuffix(suffix)
    words = [_ACRONYMS.get(word, word) for word in (stem or name).split("_") if word]
    return printable(" ".join(words)) or printable(name)


def relation_verb(relation: str) -> str:
    """Return the verb of an edge, read from caller to callee: ``runs_on`` becomes ``runs on``."""
    return _RELATION_VERBS.get(relation, words(relation))


def words(identifier: str) -> str:
    """Turn an identifier such as ``gpu_contention`` into words."""
    return " ".join(_ACRONYMS.get(word, word) for word in printable(identifier).replace("_", " ").split(" "))


def names(nodes: tuple[str, ...]) -> str:
    """Join the nodes of one intervention."""
    return " + ".join(printable(node) for node in nodes)


def plural(count: int, noun: str, many: str = "") -> str:
    """Write a count with its noun: ``1 sample``, ``12 samples``; ``many`` where an s does not do."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def printable(text: str) -> str:
    """Make text from a bundle safe to show: control, direction-changing and line-breaking characters become escapes.

    Without this a hostile node name could move the cursor, recolour the terminal or reorder the line.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def shorten(text: str, length: int) -> str:
    """Shorten to ``length`` characters with an ellipsis in the middle: both ends of a name tell pods apart."""
    if len(text) <= length:
        return text
    head = length // 2
    tail = length - 1 - head
    return text[:head] + "…" + (text[-tail:] if tail else "")
