"""Times as users write them -> UTC.

Accepted, per column: Unix seconds, milliseconds, microseconds or nanoseconds (told apart by magnitude), RFC 3339, and
``YYYY-mm-dd[ HH:MM[:SS[.fraction]]]``, which is taken as UTC. Go's default format
(``2023-01-30 11:39:53.9 +0000 UTC m=+1.1``) is understood too.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rca.errors import InvalidInputError

CURE = "write times as RFC 3339 (2026-01-31T03:00:00Z), 'YYYY-mm-dd HH:MM:SS' in UTC, or Unix s, ms, us or ns"

_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_ZONE = r"([zZ]|[+-][0-9]{2}:?[0-9]{2})$"
_EARLIEST = 100_000_000  # 1973: smaller numbers are row numbers or offsets, not times
_LATEST = 10_000_000_000  # 2286

#: Largest |value| read in each unit, and nanoseconds per unit.
_UNITS = ((1e11, "s", 1_000_000_000), (1e14, "ms", 1_000_000), (1e17, "us", 1_000), (1e20, "ns", 1))


class TimeError(ValueError):
    """A time that cannot be read: ``index`` is its position in the column, ``reason`` says why."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


def parse_column(column: pa.Array | pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read a column of strings as times.

    Args:
        column: strings without nulls.

    Returns:
        Nanoseconds since 1970-01-01 UTC, shape (rows,).

    Raises:
        TimeError: with the position of the first entry that is not a time.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    encoded = column.dictionary_encode()
    if column.null_count:
        raise TimeError(int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]), "the time is empty")
    texts = encoded.dictionary
    try:
        unique = _parse_unique(texts)
    except TimeError as error:
        first = pc.index(encoded.indices, error.index).as_py()
        raise TimeError(first, error.reason) from None
    return np.asarray(unique[encoded.indices.to_numpy(zero_copy_only=False)])


def _parse_unique(texts: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    if not len(texts):
        return np.empty(0, np.int64)
    texts = pc.utf8_trim_whitespace(texts)
    numeric = pc.match_substring_regex(texts, _NUMBER).to_numpy(zero_copy_only=False)
    if numeric.all():
        return _parse_numbers(texts)
    if numeric.any():
        odd = int(np.flatnonzero(numeric != numeric[0])[0])
        raise TimeError(odd, f"time {texts[odd].as_py()!r} is written differently from {texts[0].as_py()!r} above it")
    return _parse_dates(texts)


def _parse_numbers(texts: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    approximate = texts.cast(pa.float64()).to_numpy()
    units = np.searchsorted([limit for limit, _, _ in _UNITS], np.abs(approximate), side="right")
    if (units >= len(_UNITS)).any():
        bad = int(np.argmax(units))
        raise TimeError(bad, f"{texts[bad].as_py()!r} is not a Unix time")
    other = np.flatnonzero(units != units[0])
    if len(other):
        bad = int(other[0])
        names = [_UNITS[unit][1] for unit in (units[0], units[bad])]
        raise TimeError(bad, f"time {texts[bad].as_py()!r} looks like Unix {names[1]}, those above it like {names[0]}")
    nanos_per_unit = _UNITS[units[0]][2]
    seconds = approximate * (nanos_per_unit / 1e9)
    outside = np.flatnonzero((seconds < _EARLIEST) | (seconds > _LATEST))
    if len(outside):
        bad = int(outside[0])
        raise TimeError(bad, f"{texts[bad].as_py()!r} is not a Unix time (it would be in {_year(seconds[bad])})")
    try:
        # Exact for whole numbers: a float holds nanoseconds only to 256 ns.
        return np.asarray(texts.cast(pa.int64()).to_numpy() * nanos_per_unit, dtype=np.int64)
    except pa.ArrowInvalid:
        whole = np.floor(approximate)
        # A float of Unix seconds is good to about 0.2 us, so rounding to microseconds loses nothing real.
        part = np.round((approximate - whole) * nanos_per_unit / 1000).astype(np.int64) * 1000
        return np.asarray(whole.astype(np.int64) * nanos_per_unit + part)


def _year(seconds: float) -> str:
    return "1970" if 0 <= seconds < 31_536_000 else f"{1970 + seconds / 31_556_952:.0f}"


def _parse_dates(texts: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    for pattern, replacement in (
        (r" m=[+-][0-9.]+$", ""),
        (r" (UTC|GMT)$", ""),
        (r"\s+([+-][0-9]{2}:?[0-9]{2})$", r"\1"),
    ):
        texts = pc.replace_substring_regex(texts, pattern, replacement)
    zoned = pc.match_substring_regex(texts, _ZONE).to_numpy(zero_copy_only=False)
    # A date such as 2026-01-31 ends like a zone offset; only a text with a time of day can have one.
    zoned &= pc.match_substring(texts, ":").to_numpy(zero_copy_only=False)
    nanos = np.empty(len(texts), np.int64)
    for mask, kind in ((zoned, pa.timestamp("ns", tz="UTC")), (~zoned, pa.timestamp("ns"))):
        where = np.flatnonzero(mask)
        if len(where):
            chosen = texts.take(pa.array(where))
            try:
                nanos[where] = chosen.cast(kind).cast(pa.int64()).to_numpy()
            except pa.ArrowInvalid:
                position, text = _first_unreadable(chosen, kind)
                raise TimeError(int(where[position]), f"{text!r} is not a time") from None
    return nanos


def _first_unreadable(texts: pa.Array, kind: pa.DataType) -> tuple[int, str]:
    for index, text in enumerate(texts):
        try:
            pa.array([text.as_py()]).cast(kind)
        except pa.ArrowInvalid:
            return index, text.as_py()
    raise AssertionError("every time was readable")


def parse_time(text: str, what: str = "time") -> datetime:
    """Read one time, in any of the formats above, as UTC.

    Raises:
        InvalidInputError: ``text`` is not a time.
    """
    try:
        nanos = int(parse_column(pa.array([text]))[0])
    except TimeError as error:
        raise InvalidInputError(f"{what}: {error.reason}", cure=CURE) from None
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=nanos // 1000)


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def parse_duration(text: str, what: str = "duration") -> float:
    """Read a length of time such as ``90``, ``30s``, ``5m`` or ``1h30m`` as seconds.

    Raises:
        InvalidInputError: ``text`` is not a positive duration.
    """
    position, total = 0, 0.0
    for match in _DURATION.finditer(text.strip()):
        if match.start() != position:
            break
        total += float(match[1]) * _SECONDS[match[2]]
        position = match.end()
    if position != len(text.strip()) or total <= 0:
        raise InvalidInputError(f"{what}: {text!r} is not a positive duration", cure="write it as 30s, 5m or 1h30m")
    return total
