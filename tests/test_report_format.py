"""How figures, times and names are written for people."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest

from rca.incident import Window
from rca.report import format as fmt


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.42, "s", "420 ms"),
        (3.2, "s", "3.2 s"),
        (0.0000352, "s", "35.2 µs"),
        (4e-8, "s", "40 ns"),
        (0.9996, "s", "1 s"),
        (125, "s", "2 min 5 s"),
        (3780, "s", "1 h 3 min"),
        (3599.7, "s", "1 h"),
        (190000, "s", "2 d 5 h"),
        (0, "s", "0 s"),
        (0.124, "ratio", "12.4 %"),
        (0.00034, "ratio", "0.034 %"),
        (1.0, "ratio", "100 %"),
        (1210, "1/s", "1.21 k/s"),
        (999.9, "1/s", "1 k/s"),
        (35, "1/s", "35/s"),
        (2.5e6, "B/s", "2.5 MB/s"),
        (80 * 2**30, "B", "80 GiB"),
        (512, "B", "512 B"),
        (1234, "1", "1.23 k"),
        (17, "", "17"),
        (-0.5, "ratio", "−50 %"),
        (21.5, "°C", "21.5 °C"),
        (math.inf, "s", "∞"),
        (None, "s", "not measured"),
        (math.nan, "ratio", "not measured"),
    ],
)
def test_quantities_have_three_digits_and_a_unit(value: float | None, unit: str, text: str) -> None:
    assert fmt.quantity(value, unit) == text


@pytest.mark.parametrize(
    ("probability", "text"),
    [
        (0.873, "87 %"),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.9999, ">99 %"),
        (0.992, "99 %"),
        (0.0004, "<1 %"),
        (-0.03, "−3 %"),
    ],
)
def test_a_share_is_never_rounded_to_certainty(probability: float, text: str) -> None:
    assert fmt.share(probability) == text


@pytest.mark.parametrize(
    ("baseline", "incident", "text"),
    [
        (0.42, 3.2, "×7.6"),
        (3.2, 0.42, "÷7.6"),
        (100, 112, "+12 %"),
        (100, 98, "−2 %"),
        (100, 100.1, "unchanged"),
        (0, 5, "from zero"),
        (5, 0, "to zero"),
        (0, 0, "unchanged"),
        (-1, 1, "changed sign"),
        (None, 5, ""),
        (5, math.nan, ""),
    ],
)
def test_changes(baseline: float | None, incident: float | None, text: str) -> None:
    assert fmt.change(baseline, incident) == text


@pytest.mark.parametrize(
    ("seconds", "long", "short"),
    [
        (35, "+35 s after the symptom", "+35 s"),
        (-40, "40 s before the symptom", "−40 s"),
        (0, "with the symptom", "0 s"),
        (None, "onset not known", "–"),
        (150, "+2 min 30 s after the symptom", "+2 min 30 s"),
    ],
)
def test_offsets_are_relative_to_the_symptom(seconds: float | None, long: str, short: str) -> None:
    assert (fmt.offset(seconds), fmt.offset_short(seconds)) == (long, short)


def test_times_are_utc() -> None:
    tokyo = datetime(2026, 1, 31, 12, 5, tzinfo=timezone(timedelta(hours=9)))
    assert fmt.moment(tokyo) == "2026-01-31 03:05:00 UTC"


@pytest.mark.parametrize(
    ("minutes", "text"),
    [
        (20, "2026-01-31 23:50 to 2026-02-01 00:10 UTC (20 min)"),
        (5, "2026-01-31 23:50 to 23:55 UTC (5 min)"),
        (0.5, "2026-01-31 23:50:00 to 23:50:30 UTC (30 s)"),
    ],
)
def test_windows_show_what_is_needed(minutes: float, text: str) -> None:
    start = datetime(2026, 1, 31, 23, 50, tzinfo=UTC)
    assert fmt.window(Window(start, start + timedelta(minutes=minutes))) == text


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("latency_p95_seconds", "latency p95"),
        ("gpu_memory_utilization_ratio", "GPU memory utilization"),
        ("network_receive_bytes_per_second", "network receive"),
        ("DCGM_FI_DEV_SM_CLOCK", "DCGM FI DEV SM CLOCK"),
        ("_seconds", "seconds"),
    ],
)
def test_metric_names_become_words(name: str, label: str) -> None:
    assert fmt.metric_label(name) == label


def test_control_and_direction_characters_are_shown_not_obeyed() -> None:
    assert fmt.printable("a\x1b[31m\n\u202eb\u2028") == "a\\x1b[31m\\n\\u202eb\\u2028"
    assert fmt.printable("größe-日本-😀") == "größe-日本-😀"


def test_a_shortened_name_keeps_both_ends() -> None:
    assert fmt.shorten("checkout-7f9c8d-x2kqp", 12) == "checko…x2kqp"
    assert len(fmt.shorten("x" * 50, 13)) == 13
    assert fmt.shorten("short", 12) == "short"


@pytest.mark.parametrize("value", [1.0, 9.995, 0.00012345, 123456.0, 999999.0, 1e6, 1e-7, -42.0])
def test_numbers_keep_three_significant_digits(value: float) -> None:
    shown = float(fmt.number(value).replace("−", "-"))
    assert shown == pytest.approx(value, rel=0.005)
