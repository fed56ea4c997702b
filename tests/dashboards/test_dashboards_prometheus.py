"""Every query of every board on a real Prometheus: with the demo cluster's data, and with none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_queries import Asked, asked, columns, interpolate

from dashboards.build import build
from dashboards.lint import panels
from tests.support.demo_stack import Prometheus, demo_stack, prometheus
from tests.support.services import wait_for

pytestmark = pytest.mark.services

BOARDS = build()
ASKED = [query for board in BOARDS.values() for query in asked(board)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with an hour of the demo cluster and its live exporters."""
    with demo_stack(tmp_path_factory.mktemp("demo"), step=30.0) as found:
        # Two scrapes more, so that what only the live exporters give has a rate.
        time.sleep(3)
        yield found


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus that knows nothing."""
    with prometheus(tmp_path_factory.mktemp("empty"), "") as found:
        yield found


def answer(server: Prometheus, query: Asked) -> list[dict[str, Any]]:
    """Return the series of a query that have a number: now, or over the last hour."""
    now = time.time()
    if query.instant:
        return [series for series in server.query(query.expr) if series["value"][1] != "NaN"]
    found = server.range(query.expr, now - 3600, now, 30)
    return [series for series in found if any(value != "NaN" for _, value in series["values"])]


def test_every_query_finds_the_demo_cluster(demo: Prometheus) -> None:
    lost = [str(query) for query in ASKED if not answer(demo, query)]
    assert not lost, "\n".join(lost)


def test_tables_find_the_columns_that_they_show(demo: Prometheus) -> None:
    lost = []
    for board in BOARDS.values():
        for panel in panels(board):
            wanted = columns(panel)
            found: set[str] = set()
            for target in panel.get("targets", ()):
                for series in demo.query(interpolate(target["expr"])):
                    found |= set(series["metric"])
            if not wanted <= found:
                lost.append(f"{board['uid']}, {panel['title']!r}: no {sorted(wanted - found)} among {sorted(found)}")
    assert not lost, "\n".join(lost)


def test_legends_find_their_labels(demo: Prometheus) -> None:
    import re

    lost = []
    for query in ASKED:
        names = re.findall(r"\{\{(\w+)\}\}", query.legend)
        for series in answer(demo, query):
            lost += [f"{query}: no {name}" for name in names if name not in series["metric"]]
    # A label that is empty is absent in Prometheus: an overflow series has all of them, so none is excused here.
    assert not lost, "\n".join(sorted(set(lost)))


def test_variables_find_their_values(demo: Prometheus) -> None:
    for board in BOARDS.values():
        for variable in board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            series, label = interpolate(variable["query"]["query"])[len("label_values(") : -1].rsplit(", ", 1)
            values = demo.get(f"label/{label}/values", **{"match[]": series})
            assert values, f"{board['uid']}: no value for {variable['name']} from {series}"


def test_without_data_no_query_is_an_error(empty: Prometheus) -> None:
    for query in ASKED:
        answer(empty, query)


def test_without_data_nothing_reads_as_fine(empty: Prometheus) -> None:
    """A figure on a board is either measured or missing: nothing measured is never 0."""
    shown = [str(query) for query in ASKED if query.instant and answer(empty, query)]
    assert shown == []


def test_a_cluster_without_cluster_label_is_shown_too(demo: Prometheus, tmp_path: Path) -> None:
    exporter = demo.query('up{job="prioscope"}')[0]["metric"]["instance"]
    scrapes = (
        f"scrape_configs: [{{ job_name: bare, static_configs: [{{ targets: ['{exporter}'] }}], "
        "metric_relabel_configs: [{ action: labeldrop, regex: cluster }] }]\n"
    )
    now = [
        query for query in ASKED if query.instant and "priority_workload" in query.expr and "rate(" not in query.expr
    ]
    with prometheus(tmp_path, scrapes) as bare:
        wait_for(lambda: bare.query("priority_workloads"), "the first scrape")
        assert bare.get("label/cluster/values") == []
        assert [str(query) for query in now if not answer(bare, query)] == []
