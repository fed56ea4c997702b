"""Reading a CSV file as strings, with errors that name the file, the line and the column."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from rca.errors import InvalidInputError
from rca.telemetry import timestamps
from rca.telemetry.files import Progress, read_all

#: Cells that mean "no value".
MISSING: Final = ("", "NaN", "nan", "NAN", "null", "NULL", "None", "none", "N/A", "NA", "n/a", "<NA>", "-")


@dataclass(frozen=True)
class CsvText:
    """A CSV file in memory: its bytes, its delimiter and its first records."""

    path: Path
    data: bytes
    delimiter: str
    head: list[list[str]]

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (number of the record's last line, cells) of every non-empty record."""
        lazily = io.TextIOWrapper(io.BytesIO(self.data), encoding="utf-8-sig", errors="replace", newline="")
        reader = csv.reader(lazily, delimiter=self.delimiter)
        for record in reader:
            if record:
                yield reader.line_num, record

    def line_of(self, row: int, header_rows: int) -> int:
        """Return the line in the file of data row ``row`` (from 0)."""
        for index, (line, _) in enumerate(self.records()):
            if index == row + header_rows:
                return line
        return row + header_rows + 1


def load(path: Path, progress: Progress | None = None, *, head: int = 12) -> CsvText:
    """Read ``path`` (plain or gzip) and find its delimiter (comma, semicolon or tab).

    Raises:
        NotFoundError, InvalidInputError: the file is absent, empty, damaged, or not text.
    """
    data = read_all(path, progress)
    if b"\x00" in data[:4096]:
        raise InvalidInputError(f"{path} is binary, not CSV", cure="export it as comma-separated text")
    first = next((line for line in data[:1_048_576].splitlines() if line.strip()), b"")
    if not first:
        raise InvalidInputError(f"{path} is empty", cure="export it again with a header line")
    delimiter = max(",;\t", key=lambda mark: first.count(mark.encode()))
    text = CsvText(path, data, delimiter, [])
    try:
        records = text.records()
        return CsvText(path, data, delimiter, [record for _, record in _take(records, head)])
    except csv.Error as error:
        raise InvalidInputError(f"{path} is not readable as CSV: {error}", cure="check its quotes") from None


def _take(records: Iterator[tuple[int, list[str]]], count: int) -> Iterator[tuple[int, list[str]]]:
    for _, item in zip(range(count), records, strict=False):
        yield item


def columns(text: CsvText, header_rows: int, width: int) -> list[pa.Array]:
    """Parse the rows below the header as ``width`` columns of trimmed strings; a missing value is null.

    Raises:
        InvalidInputError: a row has another number of cells, or a cell is not UTF-8.
    """
    names = [str(index) for index in range(width)]
    # The header is cut off here because `skip_rows` counts lines, and quoted names may hold line breaks.
    body = _body(text, header_rows)
    read = {"column_names": names, "block_size": max(1 << 20, min(len(body) + 1, 1 << 28))}
    parse = pa_csv.ParseOptions(delimiter=text.delimiter, newlines_in_values=b'"' in body)
    convert = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        null_values=list(MISSING),
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
    )
    if not body.strip():
        raise InvalidInputError(f"{text.path} has a header but no rows", cure="export it with its data")
    try:
        table = pa_csv.read_csv(io.BytesIO(body), pa_csv.ReadOptions(**read), parse, convert)
    except pa.ArrowInvalid as error:
        raise _explain(text, width, error) from None
    return [pc.utf8_trim_whitespace(column.combine_chunks()) for column in table.columns]


def _body(text: CsvText, header_rows: int) -> bytes:
    lines = 0
    for index, (line, _) in enumerate(text.records()):
        if index + 1 == header_rows:
            lines = line
            break
    position = 0
    for _ in range(lines):
        position = text.data.find(b"\n", position) + 1
        if position == 0:
            return b""
    return text.data[position:]


def _explain(text: CsvText, width: int, error: pa.ArrowInvalid) -> InvalidInputError:
    for line, record in text.records():
        if len(record) != width and any(record):
            return InvalidInputError(
                f"{text.path}, line {line} has {len(record)} cells where the header has {width}",
                cure="quote cells that hold the delimiter, and fill short rows",
            )
    if "UTF8" in str(error):
        for number, raw in enumerate(text.data.splitlines(), 1):
            try:
                raw.decode()
            except UnicodeDecodeError:
                return InvalidInputError(f"{text.path}, line {number} is not UTF-8", cure="save the file as UTF-8")
    reason = re.sub(r"\s+", " ", str(error))[:200]
    return InvalidInputError(f"{text.path} is not readable as CSV: {reason}", cure="check its quotes and line ends")


def as_numbers(text: CsvText, header_rows: int, name: str, column: pa.Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a column of strings as float64, shape (rows,); missing and infinite values are NaN.

    Raises:
        InvalidInputError: a cell is not a number.
    """
    try:
        values = np.array(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    except pa.ArrowInvalid:
        for row, cell in enumerate(column):
            try:
                cell.cast(pa.float64())
            except pa.ArrowInvalid:
                raise InvalidInputError(
                    f"{text.path}, line {text.line_of(row, header_rows)}, column {name!r}: "
                    f"{cell.as_py()!r} is not a number",
                    cure="use a point for decimals and leave missing values empty",
                ) from None
        raise
    values[~np.isfinite(values)] = np.nan
    return values


def is_numeric(column: pa.Array) -> bool:
    """Whether every cell of a column of strings is a number or missing."""
    try:
        column.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def as_booleans(text: CsvText, header_rows: int, name: str, column: pa.Array) -> pa.Array:
    """Return a column of strings as booleans; a missing value is null.

    Raises:
        InvalidInputError: a cell is not true, false, yes, no, 1 or 0.
    """
    lowered = pc.utf8_lower(column)
    yes = pc.is_in(lowered, pa.array(["true", "1", "1.0", "yes"]))
    no = pc.is_in(lowered, pa.array(["false", "0", "0.0", "no"]))
    known = pc.or_(pc.or_(yes, no), column.is_null())
    odd = pc.index(known, False).as_py()
    if odd >= 0:
        raise InvalidInputError(
            f"{text.path}, line {text.line_of(odd, header_rows)}, column {name!r}: "
            f"{column[odd].as_py()!r} is not true or false",
            cure="write true or false",
        )
    return pc.if_else(column.is_null(), pa.scalar(None, pa.bool_()), yes)


def as_times(text: CsvText, header_rows: int, name: str, column: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a column of strings as nanoseconds since 1970 UTC, shape (rows,).

    Raises:
        InvalidInputError: a cell is empty or not a time.
    """
    try:
        return timestamps.parse_column(column)
    except timestamps.TimeError as error:
        raise InvalidInputError(
            f"{text.path}, line {text.line_of(error.index, header_rows)}, column {name!r}: {error.reason}",
            cure=timestamps.CURE,
        ) from None


def require_filled(text: CsvText, header_rows: int, name: str, column: pa.Array) -> None:
    """Raise `InvalidInputError` naming the line if a cell of ``column`` is empty."""
    if column.null_count or pc.any(pc.equal(column, "")).as_py():
        empty = pc.fill_null(pc.equal(column, ""), True).to_numpy(zero_copy_only=False)
        row = int(np.flatnonzero(empty)[0])
        raise InvalidInputError(
            f"{text.path}, line {text.line_of(row, header_rows)}, column {name!r} is empty",
            cure="fill it in, or drop that row",
        )


def find_column(header: list[str], aliases: tuple[str, ...]) -> int | None:
    """Return the position of the first alias (in order of preference) that is a name in ``header``, ignoring case,
    spaces, underscores and hyphens."""
    keys = [re.sub(r"[\s_\-]", "", name).lower() for name in header]
    for alias in aliases:
        key = alias.replace("_", "")
        if key in keys:
            return keys.index(key)
    return None


def check_unique_header(text: CsvText, header: list[str]) -> None:
    """Raise `InvalidInputError` if two columns of ``header`` have the same name."""
    seen: dict[str, int] = {}
    for position, name in enumerate(header, 1):
        if name and name in seen:
            raise InvalidInputError(
                f"{text.path}, line 1: columns {seen[name]} and {position} are both named {name!r}",
                cure="rename one of them",
            )
        seen.setdefault(name, position)
