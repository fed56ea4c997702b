"""The catalogue is in step with its documentation and keeps the naming rules of Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exporters.catalog import METRICS, Metric, MetricType, markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_document_is_generated_from_the_catalogue() -> None:
    assert DOCUMENT.read_text() == markdown(), "run `python -m exporters.catalog > docs/metrics.md`"


def test_the_published_names_are_there_with_the_published_labels() -> None:
    total = METRICS["priority_violation_total"]
    assert total.type is MetricType.COUNTER
    assert {"service", "priority_level", "violation_type"} <= set(total.labels)
    assert "priority_violation_duration_seconds" in METRICS


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    assert not re.search(r"_(ms|us|mb|gb|kb|percent|count|sum|bucket|gauge|counter)(_|$)", metric.name)
    for unit in ("seconds", "bytes", "watts", "joules", "celsius", "hertz", "ratio"):
        if metric.unit == unit:
            assert unit in metric.name or metric.name.endswith("_index")
    assert metric.help
    assert not metric.help.endswith(".")
    assert metric.spec
    assert len(set(metric.labels)) == len(metric.labels)
    assert not {"le", "quantile", "job", "instance"} & set(metric.labels)
    assert bool(metric.buckets) == (metric.type is MetricType.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
