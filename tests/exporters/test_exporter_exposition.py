"""The exposition is what prometheus_client would have written, read back by its own parsers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as ClientMetric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporters.catalog import METRICS
from exporters.exposition import OPENMETRICS, TEXT, TextCache, choose, number, render
from exporters.families import Distribution, Family, capped_sum, capped_top, family, to_client

BOUNDS = METRICS["prioscope_poll_duration_seconds"].buckets


class OneShot:
    """A custom collector that serves given families through prometheus_client."""

    def __init__(self, families: list[Family]) -> None:
        self.families = families

    def collect(self) -> list[ClientMetric]:
        return [to_client(item) for item in self.families]


def by_client(families: list[Family]) -> bytes:
    registry = CollectorRegistry()
    registry.register(OneShot(families))
    return generate_latest(registry)


def samples(text: str, openmetrics: bool = False) -> list[tuple[str, tuple[tuple[str, str], ...], str]]:
    parse = parse_openmetrics if openmetrics else parse_text
    return sorted(
        (sample.name, tuple(sorted(sample.labels.items())), repr(float(sample.value)))
        for metric in parse(text)
        for sample in metric.samples
    )


def example(text: str = "a", value: float = 1.5) -> list[Family]:
    waits = Distribution.empty(BOUNDS).observe(BOUNDS, 0.02).observe(BOUNDS, 0.01).observe(BOUNDS, 99)
    return [
        family("priority_violation_total", {("c", text, "P0", "inversion", "held"): value}),
        family("gpu_power_watts", {("n", "0", "GPU-1"): value, ("n", "1", text): 3}),
        family("prioscope_poll_duration_seconds", distributions={(text,): waits}),
        family("prioscope_scrape_duration_seconds", distributions={(): Distribution.empty((0.0,) * 9)}),
    ]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=20), st.floats())
def test_text_parses_to_the_same_samples_as_the_client_writes(text: str, value: float) -> None:
    families = example(text, value)
    assert samples(render(families).decode()) == samples(by_client(families).decode())


def test_openmetrics_passes_the_clients_strict_parser() -> None:
    families = example('quote " backslash \\ newline \n end')
    text = render(families, OPENMETRICS).decode()
    assert text.endswith("# EOF\n")
    assert samples(text, openmetrics=True) == samples(by_client(families).decode())


def test_prepared_families_render_alike_and_dead_series_are_forgotten() -> None:
    cache = TextCache()
    assert render(cache.prepare(example())) == render(example())
    assert render(cache.prepare(example())) == render(example())
    cache.prepare([family("gpu_power_watts", {("n", "0", "GPU-1"): 1.0})])
    assert [list(known) for known in cache._series.values()] == [[("n", "0", "GPU-1")]]
    assert cache._histograms == {}


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.0, 1.5, math.nan, math.inf, 1e308]), max_size=6),
        max_size=5,
    )
)
def test_a_cache_changes_nothing_whatever_comes_and_goes(polls: list[dict[str, float]]) -> None:
    cache = TextCache()
    for poll in polls:
        families = [family("gpu_power_watts", {("n", name, "u"): value for name, value in poll.items()})]
        assert render(cache.prepare(families)) == render(families)


@pytest.mark.parametrize("value", [0.1, 1e300, 12345678.0, 5, math.inf, -math.inf])
def test_numbers_round_trip(value: float) -> None:
    assert float(number(value)) == value


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1", OPENMETRICS),
        ("application/openmetrics-text;q=0.1, text/plain;q=0.9", TEXT),
        ("application/openmetrics-text;version=9.0", TEXT),
        ("application/openmetrics-text;q=zero", TEXT),
    ],
)
def test_the_accept_header_chooses_the_format(accept: str, expected: str) -> None:
    assert choose(accept) == expected


def test_a_family_must_be_in_the_catalogue_with_its_labels() -> None:
    with pytest.raises(KeyError):
        family("made_up_total", {})
    with pytest.raises(ValueError, match="gpu_power_watts has labels"):
        family("gpu_power_watts", {("only-one",): 1.0})


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=30), st.integers(1, 10))
def test_capped_sums_keep_the_total_and_stay_within_the_cap(values: dict[str, int], cap: int) -> None:
    numbers = {("c", key, "P0"): float(value) for key, value in values.items()}
    item, dropped = capped_sum("priority_workload_held_gpus", numbers, cap)
    assert len(item) <= cap + 1
    assert dropped == max(0, len(numbers) - cap)
    assert sum(value for _, value in item.samples) == sum(numbers.values())


def test_capped_tops_keep_the_largest() -> None:
    numbers = {("n", str(index), "u"): float(index) for index in range(10)}
    item, dropped = capped_top("gpu_power_watts", numbers, 3)
    assert sorted(value for _, value in item.samples) == [7.0, 8.0, 9.0]
    assert dropped == 7
