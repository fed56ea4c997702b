"""Loaders on tiny folders laid out as the public data sets are."""

import json

import numpy as np
import pyarrow.compute as pc
import pytest

from benchmarks import datasets
from benchmarks.cases import data_root, dataset_folder
from benchmarks.datasets import nezha, petshop
from benchmarks.datasets.tables import DAY, evenly_spaced, fold_seconds
from rca.errors import InvalidInputError, NotFoundError

# --- PetShop ------------------------------------------------------------------------------------------------------

COLUMNS = [
    ("Site", "latency", "Average"),
    ("Site", "latency", "p90"),
    ("Site", "availability", "Average"),
    ("Site", "requests", "Sum"),
    ("Search", "latency", "Average"),
]
AUGUST, APRIL = 1_692_608_400, 1_681_855_320


def sheet(start, rows):
    head = [["microservice", "metric", "statistic"][k] + "," + ",".join(c[k] for c in COLUMNS) for k in range(3)]
    body = [f"{start + 300 * n}.0," + ",".join(row) for n, row in enumerate(rows)]
    return "\n".join([*head, "unix_timestamp" + "," * len(COLUMNS), *body]) + "\n"


def write_issue(folder, metric="latency", alert=APRIL + 485):
    folder.mkdir(parents=True)
    rows = [["0.09", "0.2", "100.00000000000001", "300", "0.03"]] * 2 + [["0.3", "0.6", "98.5", "600", ""]] * 3
    (folder / "metrics.csv").write_text(sheet(APRIL, rows))
    target = {"node": "Site", "metric": metric, "agg": "Average", "timestamp": alert}
    (folder / "target.json").write_text(
        json.dumps({"target": target, "root_cause": {"node": "Search", "metric": None}})
    )


@pytest.fixture
def shop(tmp_path):
    for scenario in ("high_traffic", "low_traffic"):
        place = tmp_path / "petshop" / scenario
        (place / "noissue").mkdir(parents=True)
        (place / "graph.csv").write_text(",Site,Search\nSite,0,1\nSearch,0,1\n")
        normal = [["0.1", "0.2", "100", "300", f"{0.02 + 0.001 * (n % 3)}"] for n in range(600)]
        (place / "noissue" / "metrics.csv").write_text(sheet(AUGUST, normal))
        write_issue(place / "test" / "issue_0")
        write_issue(place / "train" / "issue_10", metric="availability")
    return tmp_path / "petshop"


def values(incident, node, metric, window=True):
    table = incident.metrics
    span = incident.header.window if window else incident.header.baseline
    chosen = pc.and_(pc.equal(table["node"], node), pc.equal(table["metric"], metric))
    chosen = pc.and_(chosen, pc.is_null(table["peer"]))  # the node's own view
    chosen = pc.and_(chosen, pc.greater_equal(table["timestamp"], span.start))
    return table.filter(pc.and_(chosen, pc.less(table["timestamp"], span.end)))["value"].to_pylist()


def test_petshop_finds_every_scenario_and_split(shop):
    cases = list(petshop.incidents(shop))
    assert [(case.scenario, case.group, case.name.split("-", 2)[2]) for case in cases] == [
        ("high_traffic", "latency", "test-issue_0"),
        ("high_traffic", "availability", "train-issue_10"),
        ("low_traffic", "latency", "test-issue_0"),
        ("low_traffic", "availability", "train-issue_10"),
    ]
    assert {case.truth for case in cases} == {("Search",)}


def test_petshop_values_have_canonical_names_and_units(shop):
    incident = next(petshop.incidents(shop)).incident
    assert values(incident, "Site", "latency_mean_seconds") == [0.3] * 3
    assert values(incident, "Site", "latency_p90_seconds") == [0.6] * 3
    assert values(incident, "Site", "error_ratio") == pytest.approx([0.015] * 3)
    assert values(incident, "Site", "request_rate") == [2.0] * 3
    assert set(values(incident, "Site", "error_ratio", window=False)) == {0.0}


def test_petshop_window_begins_with_the_alert_and_rows_before_it_are_no_baseline(shop):
    incident = next(petshop.incidents(shop)).incident
    window, baseline = incident.header.window, incident.header.baseline
    assert window.start.timestamp() == APRIL + 485
    assert window.end.timestamp() == APRIL + 5 * 300
    assert (baseline.start.timestamp(), baseline.seconds) == (AUGUST, 600 * 300)
    assert incident.header.victim.node == "Site"


def test_petshop_missing_cells_give_no_rows(shop):
    incident = next(petshop.incidents(shop)).incident
    assert values(incident, "Search", "latency_mean_seconds") == []


def test_petshop_graph_rows_call_columns_and_loops_are_dropped(shop):
    edges = next(petshop.incidents(shop)).incident.edges
    assert edges.select(["caller", "callee"]).to_pylist() == [{"caller": "Site", "callee": "Search"}]


def test_bundles_do_not_tell_the_answer(shop):
    for case in petshop.incidents(shop):
        assert case.incident.truth is None
        assert "Search" not in repr(case.incident.header)


def test_petshop_quiet_windows_look_like_issues_and_are_not_in_their_baseline(shop):
    cases = list(petshop.quiet(4, shop))
    assert len(cases) == 2 * 4 * 2, "scenarios x windows x victim metrics"
    assert all(case.quiet for case in cases)
    issue = next(petshop.incidents(shop)).incident
    for case in cases:
        header = case.incident.header
        assert len(values(case.incident, "Site", "request_rate")) == len(values(issue, "Site", "request_rate"))
        assert len(values(case.incident, "Site", "request_rate", window=False)) == 600 - 5
        assert header.baseline.end <= header.window.start
        times = case.incident.metrics.filter(pc.equal(case.incident.metrics["metric"], "request_rate"))["timestamp"]
        assert pc.count_distinct(times).as_py() == 600, "folding must not put two rows on one time"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("graph.csv", lambda text: text.replace("0,1", "0,yes"), "line 2: 'yes' is neither 0 nor 1"),
        ("noissue/metrics.csv", lambda text: text.replace("0.1,0.2", "fast,0.2", 1), "line 5: could not convert"),
        ("noissue/metrics.csv", lambda text: text + "1,2\n", "line 605: 2 cells instead of 6"),
        ("noissue/metrics.csv", lambda text: text.replace(",100,", ",250,", 1), "availability lies outside"),
        ("noissue/metrics.csv", lambda text: text.replace("statistic", "stat", 1), "does not start with the rows"),
        ("test/issue_0/target.json", lambda text: text.replace('"node"', '"host"'), "target.json"),
        ("test/issue_0/target.json", lambda text: text.replace("1681855805", "1981855805"), "no row at or after"),
    ],
)
def test_petshop_malformed_files_are_named(shop, file, change, message):
    path = shop / "high_traffic" / file
    path.write_text(change(path.read_text()))
    with pytest.raises(InvalidInputError, match=message) as caught:
        list(petshop.incidents(shop))
    assert caught.value.cure


def test_petshop_without_its_files_is_not_found(tmp_path, shop):
    with pytest.raises(NotFoundError, match="no scenario"):
        list(petshop.incidents(tmp_path / "elsewhere"))
    (shop / "high_traffic" / "noissue" / "metrics.csv").unlink()
    with pytest.raises(NotFoundError, match="noissue"):
        list(petshop.incidents(shop))


# --- Nezha --------------------------------------------------------------------------------------------------------

MIDNIGHT = 1_675_036_800  # 2023-01-30T00:00:00Z
INJECTIONS = (MIDNIGHT + 12 * 3600, MIDNIGHT + 12 * 3600 + 600)
PODS = ("ts-gateway-service-6f6cfc45b-d9pnv", "ts-order-service-5b67c48447-fj8b7")
METRIC_HEAD = (
    "Time,TimeStamp,PodName,CpuUsage(m),CpuUsageRate(%),PodServerLatencyP90(s),PodWorkload(Ops),PodSuccessRate(%)"
)
SPAN_HEAD = "TraceID,SpanID,ParentID,PodName,OperationName,StartTimeUnixNano,EndTimeUnixNano,Duration"


def spans(at, number, seconds=0.1):
    """One request: the gateway's entry and client spans, the order service's entry."""
    start = round(at * 1e9)
    ends = [start + round(seconds * 1e9) - back for back in (0, 2_000_000, 4_000_000)]
    rows = [
        ("a", "root", PODS[0], "/*", start, ends[0]),
        ("b", "a", PODS[0], "HTTP GET", start + 1_000_000, ends[1]),
        ("c", "b", PODS[1], "/api/order", start + 2_000_000, ends[2]),
    ]
    return [
        f"t{number},{span}{number},{parent if parent == 'root' else parent + str(number)},{pod},{name},{first},{last},"
        f"{(last - first) // 1000}"
        for span, parent, pod, name, first, last in rows
    ]


@pytest.fixture
def trains(tmp_path):
    day = tmp_path / "nezha-train-ticket" / "2023-01-30"
    (day / "metric").mkdir(parents=True)
    (day / "trace").mkdir()
    faults = [
        {"inject_time": f"2023-01-30 12:{m:02}:00", "inject_pod": PODS[1], "inject_type": kind}
        for m, kind in ((0, "network_delay"), (10, "cpu_contention"))
    ]
    (day / "2023-01-30-fault_list.json").write_text(json.dumps({"12": faults}))
    times = np.arange(INJECTIONS[0] - 1800, INJECTIONS[1] + 3600, 60) + 7
    for pod in PODS:
        rows = [METRIC_HEAD]
        for time in times:
            faulty = any(at < time < at + 240 for at in INJECTIONS)
            latency = "" if pod == PODS[1] and time % 240 < 60 else ("2.0" if faulty else "0.5")
            rows.append(f"x,{time},{pod},10,{90 if faulty else 2},{latency},1.5,0")
        (day / "metric" / f"{pod}_metric.csv").write_text("\n".join(rows) + "\n")
    number = 0
    for at in INJECTIONS:
        rows = []
        for offset in [*np.arange(-30.0, -1.0, 1.0), -0.5, *np.arange(0.5, 150.0, 1.0)]:
            number += 1
            rows += spans(at + offset, number, 1.1 if offset >= -0.5 else 0.1)
        half = len(rows) // 2 // 3 * 3
        (day / "trace" / f"{at}_a_trace.csv").write_text("\n".join([SPAN_HEAD, *rows[: half + 3]]) + "\n")
        (day / "trace" / f"{at}_b_trace.csv").write_text("\n".join([SPAN_HEAD, *rows[half:]]) + "\n")
    return tmp_path / "nezha-train-ticket"


def test_nezha_names_services_and_groups_by_fault(trains):
    cases = list(nezha.incidents(trains))
    assert [(case.group, case.truth) for case in cases] == [
        ("network_delay", ("ts-order-service",)),
        ("cpu_contention", ("ts-order-service",)),
    ]
    header = cases[0].incident.header
    assert (header.victim.node, header.victim.metric) == ("ts-gateway-service", "latency_p90_seconds")
    assert header.window.start.timestamp() == INJECTIONS[0]
    assert "order" not in repr(header)


def test_nezha_baseline_holds_no_sample_of_any_fault(trains):
    for case in nezha.incidents(trains):
        usual = values(case.incident, "ts-gateway-service", "latency_p90_seconds", window=False)
        assert set(usual) == {0.5}
        # 100 minutes, without two faults of five and the two before the alert.
        assert len(usual) == 100 - 5 - 5 - 2
        assert values(case.incident, "ts-gateway-service", "latency_p90_seconds") == [2.0] * 4


def test_nezha_what_was_not_measured_is_absent(trains):
    incident = next(nezha.incidents(trains)).incident
    assert values(incident, "ts-gateway-service", "error_ratio", window=False) == []
    gaps = values(incident, "ts-order-service", "latency_p90_seconds", window=False)
    assert 0 < len(gaps) < 88
    assert values(incident, "ts-order-service", "cpu_utilization_ratio") == pytest.approx([0.9] * 4)


def test_nezha_spans_of_both_files_are_read_once(trains):
    table = nezha.read_spans(trains / "2023-01-30" / "trace")
    assert table.num_rows == pc.count_distinct(table["span_id"]).as_py() == 2 * 180 * 3


def test_nezha_normal_traces_are_baseline_and_straddling_ones_are_dropped(trains):
    for case in nezha.incidents(trains):
        header, table = case.incident.header, case.incident.spans
        before = table.filter(pc.less(table["start"], header.window.start))
        within = table.filter(pc.greater_equal(table["start"], header.window.start))
        assert before.num_rows == 2 * 29 * 3, "both faults' normal traces, without the one that straddles"
        assert pc.max(before["duration_seconds"]).as_py() == pytest.approx(0.1)
        assert within.num_rows == 150 * 3


def test_nezha_derives_series_and_edges_from_traces(trains):
    incident = next(nezha.incidents(trains)).incident
    assert incident.edges.select(["caller", "callee"]).to_pylist() == [
        {"caller": "ts-gateway-service", "callee": "ts-order-service"}
    ]
    # One request a second, though normal traces cover half a minute only.
    assert incident.edges["call_rate"][0].as_py() == pytest.approx(1.0, rel=0.05)
    assert values(incident, "ts-gateway-service", "latency_mean_seconds") == pytest.approx([1.1] * 3)
    assert set(values(incident, "ts-gateway-service", "latency_p90_seconds")) == {2.0}, "the monitoring's, not ours"
    peers = incident.metrics.filter(pc.equal(incident.metrics["peer"], "ts-order-service"))
    rates = peers.filter(pc.equal(peers["metric"], "request_rate"))["value"].to_numpy()
    assert len(rates) >= 4
    np.testing.assert_allclose(rates, 1.0, rtol=0.06)


def test_nezha_quiet_windows_touch_no_fault(trains):
    cases = list(nezha.quiet(5, trains))
    assert [case.group for case in cases].count("metrics only") == 5
    assert [case.group for case in cases].count("with traces") == 2
    for case in cases:
        window = case.incident.header.window
        assert case.quiet
        assert set(values(case.incident, "ts-gateway-service", "latency_p90_seconds")) == {0.5}
        assert all(window.end.timestamp() <= at or window.start.timestamp() >= at + 300 for at in INJECTIONS)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("2023-01-30-fault_list.json", lambda text: text.replace("12:00:00", "noon"), "fault_list.json"),
        (f"metric/{PODS[0]}_metric.csv", lambda text: text.replace("TimeStamp", "When"), "'TimeStamp'"),
        (f"metric/{PODS[0]}_metric.csv", lambda text: text.replace(",0.5,", ",fast,", 1), "PodServerLatencyP90"),
        (f"trace/{INJECTIONS[0]}_a_trace.csv", lambda text: text.replace("ParentID", "Parent"), "'ParentID'"),
    ],
)
def test_nezha_malformed_files_are_named(trains, file, change, message):
    path = trains / "2023-01-30" / file
    path.write_text(change(path.read_text()))
    with pytest.raises(InvalidInputError, match=message) as caught:
        list(nezha.incidents(trains))
    assert caught.value.cure


def test_service_is_the_pod_without_its_hashes():
    assert nezha.service_of("ts-order-other-service-6cdbf9b4cc-swvb5") == "ts-order-other-service"
    assert nezha.service_of("ts-order-service") == "ts-order-service"


# --- shared -------------------------------------------------------------------------------------------------------


def test_folding_moves_later_times_before_all_others_by_whole_days():
    times = np.array([0.0, 10.0, 20.0, 30.0])
    assert fold_seconds(times, 15.0) == DAY
    assert fold_seconds(np.array([0.0, 3 * DAY]), 1.0) == 4 * DAY
    assert fold_seconds(times, 100.0) == 0.0


def test_evenly_spaced_choices_do_not_repeat():
    assert evenly_spaced(3, list(range(10, 21))) == [10, 15, 20]
    assert evenly_spaced(9, [1, 2]) == [1, 2]
    assert evenly_spaced(0, [1, 2]) == evenly_spaced(3, []) == []


def test_data_is_found_by_the_environment(monkeypatch, tmp_path, shop):
    monkeypatch.delenv("PRIOSCOPE_DATA", raising=False)
    with pytest.raises(NotFoundError, match="PRIOSCOPE_DATA is not set") as caught:
        data_root()
    assert "docs/benchmarks.md" in caught.value.cure
    monkeypatch.setenv("PRIOSCOPE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError, match="not a folder"):
        data_root()
    monkeypatch.setenv("PRIOSCOPE_DATA", str(tmp_path))
    assert dataset_folder("petshop") == shop
    with pytest.raises(NotFoundError, match="nezha"):
        dataset_folder("nezha*")
    assert len(list(petshop.incidents())) == 4


def test_an_unknown_data_set_is_named_with_the_known_ones():
    with pytest.raises(NotFoundError, match="'exathlon'") as caught:
        datasets.load("exathlon")
    assert "petshop" in caught.value.cure


@pytest.mark.parametrize("name", datasets.NAMES)
def test_every_loader_offers_incidents_and_quiet_windows(name):
    loader = datasets.load(name)
    assert callable(loader.incidents)
    assert callable(loader.quiet)
