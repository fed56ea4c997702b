"""Metrics and edges from CSV: the layouts, names, units and times that are understood, and what is said of the rest."""

from __future__ import annotations

import gzip
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from rca.errors import InvalidInputError, NotFoundError
from rca.telemetry import naming
from rca.telemetry.metrics_csv import MetricsFile, read_edges, read_metrics
from rca.telemetry.timestamps import parse_duration, parse_time

FIXTURES = Path(__file__).parent / "fixtures" / "import"


def metrics(tmp_path: Path, text: str, **options: object) -> MetricsFile:
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    return read_metrics(path, **options)  # type: ignore[arg-type]


def edges(tmp_path: Path, text: str, *, reverse: bool = False) -> pa.Table:
    path = tmp_path / "edges.csv"
    path.write_text(text)
    return read_edges(path, reverse=reverse).table


def samples(table: pa.Table) -> dict[tuple[str, str], list[float | None]]:
    """(node, metric) -> values in order of time."""
    found: dict[tuple[str, str], list[float | None]] = {}
    for row in table.to_pylist():
        found.setdefault((row["node"], row["metric"]), []).append(row["value"])
    return found


# --- layouts -------------------------------------------------------------------------------------------------------


def test_multi_row_header_as_pandas_writes_it() -> None:
    found = read_metrics(FIXTURES / "metrics-multirow.csv")
    assert found.layout == "multi-row header"
    assert samples(found.table) == {
        ("cart", "error_ratio"): [0.0, None, 0.75],
        ("cart", "latency_p90_seconds"): [0.125, None, 0.375],
        ("cart", "request_rate"): [1.0, 0.0, 0.1],
        ("frontend", "error_ratio"): [0.0, pytest.approx(0.02), 0.5],
        ("frontend", "latency_p90_seconds"): [0.25, 0.5, 0.75],
        # 600 requests in the 300 s between samples.
        ("frontend", "request_rate"): [2.0, 3.0, 0.5],
    }
    assert found.table["timestamp"][0].as_py() == datetime(2026, 1, 31, 3, 0, tzinfo=UTC)
    assert found.unknown == ()


def test_tidy_layout() -> None:
    found = read_metrics(FIXTURES / "metrics-tidy.csv")
    assert found.layout == "tidy"
    assert found.table.num_rows == 160
    values = samples(found.table)
    assert values["frontend", "latency_mean_seconds"][:2] == pytest.approx([0.1, 0.101])
    assert values["frontend", "error_ratio"][-1] == pytest.approx(0.05)
    assert values["cart", "cpu_utilization_ratio"][0] == 0.4


def test_tidy_layout_with_peer_statistic_and_unit(tmp_path: Path) -> None:
    found = metrics(
        tmp_path,
        "ts,service,peer,metric,statistic,unit,value\n"
        "1769828400,frontend,cart,latency,p99,ms,250\n"
        "1769828400,frontend,,latency,p99,s,0.5\n",
    )
    assert [(row["peer"], row["metric"], row["value"]) for row in found.table.to_pylist()] == [
        (None, "latency_p99_seconds", 0.5),
        ("cart", "latency_p99_seconds", 0.25),
    ]


@pytest.mark.parametrize("separator", [":", "/", "|", "."])
def test_wide_layout(tmp_path: Path, separator: str) -> None:
    found = metrics(tmp_path, f"time,cart{separator}latency_ms,cart{separator}cpu\n2026-01-31 03:00:00,250,0.5\n")
    assert found.layout == "wide"
    assert samples(found.table) == {("cart", "cpu_utilization_ratio"): [0.5], ("cart", "latency_mean_seconds"): [0.25]}


def test_wide_layout_with_underscores_needs_known_metrics(tmp_path: Path) -> None:
    found = metrics(tmp_path, "time,cart_service_latency-90,cart_service_cpu\n1769828400,0.25,0.5\n")
    assert samples(found.table) == {
        ("cart_service", "cpu_utilization_ratio"): [0.5],
        ("cart_service", "latency_p90_seconds"): [0.25],
    }
    with pytest.raises(InvalidInputError, match="cannot tell node and metric of column 'cart_cpu'"):
        metrics(tmp_path, "time,cart_cpu,cart_flux\n1769828400,1,1\n")


def test_node_names_may_hold_the_separator(tmp_path: Path) -> None:
    found = metrics(tmp_path, "time,AWS::DynamoDB:latency,db.eu:latency\n1769828400,1,2\n")
    assert {node for node, _ in samples(found.table)} == {"AWS::DynamoDB", "db.eu"}
    # `latency.p99` is a known metric, `p99` is not.
    found = metrics(tmp_path, "time,db.eu.latency.p99\n1769828400,1\n")
    assert samples(found.table) == {("db.eu", "latency_p99_seconds"): [1.0]}


def test_wide_layout_with_a_callers_view_of_one_callee(tmp_path: Path) -> None:
    row = metrics(tmp_path, "time,frontend->cart:latency_ms\n1769828400,5\n").table.to_pylist()[0]
    assert (row["node"], row["peer"], row["value"]) == ("frontend", "cart", 0.005)


def test_one_file_per_pod_with_one_column_a_metric(tmp_path: Path) -> None:
    found = metrics(
        tmp_path,
        "Time,TimeStamp,PodName,CpuUsageRate(%),CpuUsage(m),LatencyP99(s),Workload(Ops),Phase\n"
        "2026-01-31 03:00:00.5 +0000 UTC m=+1.5,1769828400,cart-0,25,500,0.5,12,Running\n",
    )
    assert found.layout == "wide-by-node"
    assert samples(found.table) == {
        ("cart-0", "cpu_m"): [500.0],
        ("cart-0", "cpu_utilization_ratio"): [0.25],
        ("cart-0", "latency_p99_seconds"): [0.5],
        ("cart-0", "request_rate"): [12.0],
    }
    assert found.unknown == ("cpu_m",)
    assert "ignored columns: Time, Phase" in found.notes


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_gzip_bom_and_crlf(tmp_path: Path, delimiter: str) -> None:
    text = "timestamp,node,metric,value\r\n1769828400,cart,latency,1\r\n".replace(",", delimiter)
    path = tmp_path / "metrics.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
    assert samples(read_metrics(path).table) == {("cart", "latency_mean_seconds"): [1.0]}


# --- names and units -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "statistic", "name", "scale", "offset"),
    [
        ("latency", "Average", "latency_mean_seconds", 1.0, 0.0),
        ("latency", "p95", "latency_p95_seconds", 1.0, 0.0),
        ("latency", "p75", "latency_p75_seconds", 1.0, 0.0),
        ("latency_p99_ms", None, "latency_p99_seconds", 1e-3, 0.0),
        ("ResponseTime (us)", None, "latency_mean_seconds", 1e-6, 0.0),
        ("latency_mean_seconds", None, "latency_mean_seconds", 1.0, 0.0),
        ("availability_percent", None, "error_ratio", -0.01, 1.0),
        ("ErrorRate[%]", None, "error_ratio", 0.01, 0.0),
        ("qps", None, "request_rate", 1.0, 0.0),
        ("DCGM_FI_DEV_GPU_UTIL", None, "gpu_utilization_ratio", 0.01, 0.0),
        ("queue_wait_ms", None, "queue_wait_seconds", 1e-3, 0.0),
        ("gc pause (ms)", "max", "gc_pause_max_seconds", 1e-3, 0.0),
        ("ThreadCount", None, "thread_count", 1.0, 0.0),
    ],
)
def test_names_and_units(metric: str, statistic: str | None, name: str, scale: float, offset: float) -> None:
    found = naming.resolve(metric, statistic)
    assert (found.name, found.scale, found.offset) == (name, pytest.approx(scale), offset)


def test_a_percentile_of_a_utilisation_is_not_the_utilisation() -> None:
    assert naming.resolve("cpu", "max").name == "cpu_max"


def test_a_unit_can_be_stated(tmp_path: Path) -> None:
    text = "timestamp,node,metric,value\n1769828400,cart,latency,250\n1769828400,cart,cpu,50\n"
    found = metrics(tmp_path, text, units={"latency": "ms", "cpu": "%"})
    assert samples(found.table) == {("cart", "cpu_utilization_ratio"): [0.5], ("cart", "latency_mean_seconds"): [0.25]}
    with pytest.raises(InvalidInputError, match="names the metric 'latencies'") as caught:
        metrics(tmp_path, text, units={"latencies": "ms"})
    assert "did you mean 'latency'?" in caught.value.cure
    with pytest.raises(InvalidInputError, match="unit 'parsec' does not fit latency_mean_seconds"):
        metrics(tmp_path, text, units={"latency": "parsec"})


def test_a_ratio_without_a_unit_that_exceeds_one_is_never_guessed(tmp_path: Path) -> None:
    found = metrics(tmp_path, "timestamp,node,metric,value\n1769828400,cart,cpu,3.5\n")
    assert samples(found.table) == {("cart", "cpu"): [3.5]}
    assert "'cpu' reaches 3.5, so it is no ratio: kept as 'cpu' (say --unit 'cpu=%' if percent)" in found.notes


def test_counts_need_the_length_of_their_interval(tmp_path: Path) -> None:
    text = "timestamp,node,metric,value\n1769828400,cart,requests,120\n"
    with pytest.raises(InvalidInputError, match="counts events") as caught:
        metrics(tmp_path, text)
    assert "--step" in caught.value.cure
    assert samples(metrics(tmp_path, text, step_seconds=60.0).table) == {("cart", "request_rate"): [2.0]}


# --- times ---------------------------------------------------------------------------------------------------------

MOMENT = datetime(2026, 1, 31, 3, 0, 0, 250_000, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "1769828400.25",
        "1769828400250",
        "1769828400250000",
        "1769828400250000000",
        "2026-01-31T03:00:00.25Z",
        "2026-01-31T04:00:00.250+01:00",
        "2026-01-31 03:00:00.250",
        "2026-01-31 03:00:00.250 +0000 UTC m=+1.25",
    ],
)
def test_times(text: str) -> None:
    assert parse_time(text) == MOMENT


@pytest.mark.parametrize("text", ["", "noon", "3", "31.01.2026", "2026-13-01", "1e30", "-1769828400"])
def test_what_is_not_a_time(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--at"):
        parse_time(text, "--at")


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90", "30s", "5m", "1h30m", "250ms")] == [90, 30, 300, 5400, 0.25]
    for text in ("", "0s", "5 apples", "m5", "-5m"):
        with pytest.raises(InvalidInputError, match="positive duration"):
            parse_duration(text)


# --- errors --------------------------------------------------------------------------------------------------------

HEADER = "timestamp,node,metric,value\n"
GOOD = "1769828400,cart,latency,0.5\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (HEADER, "has a header but no rows"),
        ("node,metric,value\ncart,latency,1\n", "names no time column"),
        ("timestamp,value\n1769828400,1\n", "cannot tell node and metric of column 'value'"),
        ("timestamp,a:x,a:x\n1769828400,1,2\n", "columns 2 and 3 are both named 'a:x'"),
        (HEADER + GOOD + "1769828460,cart,latency\n", "line 3 has 3 cells where the header has 4"),
        (HEADER + GOOD + "1769828460,cart,latency,fast\n", "line 3, column 'value': 'fast' is not a number"),
        (HEADER + GOOD + '1769828460,cart,latency,"0,5"\n', "'0,5' is not a number"),
        (HEADER + GOOD + "yesterday,cart,latency,1\n", "line 3, column 'timestamp': time 'yesterday'"),
        (HEADER + GOOD + ",cart,latency,1\n", "line 3, column 'timestamp': the time is empty"),
        (HEADER + GOOD + "1769828460000,cart,latency,1\n", "looks like Unix ms, those above it like s"),
        (HEADER + "7,cart,latency,1\n", "'7' is not a Unix time"),
        (HEADER + GOOD + "\n\n1769828460,,latency,1\n", "line 5, column 'node' is empty"),
        (HEADER + "1769828400,cart,???,1\n", "holds no letter or digit"),
        (
            "microservice,a,b\nmetric,latency\nt,,\n1769828400,1,2\n",
            r"line 2 \(metric\) has 2 cells where line 1 has 3",
        ),
        ("microservice,a,\nmetric,latency,latency\n1769828400,1,2\n", "column 3 has no node"),
        ('timestamp,node,metric,value\n1769828400,"cart,latency,1\n', "not readable as CSV|cells"),
    ],
)
def test_errors_name_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        metrics(tmp_path, text)
    assert "metrics.csv" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.cure


def test_files_that_are_not_csv(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no file at"):
        read_metrics(tmp_path / "absent.csv")
    with pytest.raises(InvalidInputError, match="is a directory"):
        read_metrics(tmp_path)
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"PAR1\x00\x00\x00")
    with pytest.raises(InvalidInputError, match="is binary"):
        read_metrics(path)
    path.write_bytes(gzip.compress(HEADER.encode() * 100)[:-12])
    with pytest.raises(InvalidInputError, match="damaged or truncated gzip"):
        read_metrics(path)
    path.write_bytes((HEADER + GOOD).encode() + "1769828460,Jérôme,latency,1\n".encode("latin-1"))
    with pytest.raises(InvalidInputError, match="line 3 is not UTF-8"):
        read_metrics(path)


def test_repeated_samples_are_dropped_and_contradictions_are_errors(tmp_path: Path) -> None:
    found = metrics(tmp_path, HEADER + GOOD + GOOD + "1769828400,cart,latency,\n")
    assert samples(found.table) == {("cart", "latency_mean_seconds"): [0.5]}
    assert "dropped 2 repeated samples" in found.notes
    with pytest.raises(
        InvalidInputError, match=r"lines 2 and 4: 'latency' of 'cart' has two values at one time \(0\.5 and 0\.75\)"
    ):
        metrics(tmp_path, HEADER + GOOD + "1769828400,web,latency,1\n1769828400,cart,latency,0.75\n")


def test_two_columns_for_one_metric_must_agree(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'latency' of 'a' and 'latency_ms' are the same metric but differ"):
        metrics(tmp_path, "time,a:latency_ms,a:latency\n1769828400,250,0.3\n")


def test_missing_and_infinite_values_are_kept_as_missing(tmp_path: Path) -> None:
    rows = "".join(f"{1769828400 + n},cart,latency,{cell}\n" for n, cell in enumerate(("", "NaN", "null", "+Inf", "1")))
    assert samples(metrics(tmp_path, HEADER + rows).table)["cart", "latency_mean_seconds"] == [None] * 4 + [1.0]


def test_a_million_rows_take_seconds(tmp_path: Path) -> None:
    path = tmp_path / "big.csv"
    names = ("latency_ms", "cpu", "requests", "threads")
    with path.open("w") as out:
        out.write(HEADER)
        out.writelines(
            f"{1769828400 + row // 100 * 10},svc{row % 25},{names[row // 25 % 4]},{row % 97 / 100}\n"
            for row in range(1_000_000)
        )
    before = time.process_time()
    assert read_metrics(path).table.num_rows == 1_000_000
    assert time.process_time() - before < 10


# --- edges ---------------------------------------------------------------------------------------------------------


def test_edge_list() -> None:
    found = read_edges(FIXTURES / "edges.csv")
    assert found.layout == "edge list"
    assert [
        (row["caller"], row["callee"], row["relation"], row["protocol"], row["call_rate"])
        for row in found.table.to_pylist()
    ] == [
        ("cart", "redis", "calls", "redis", 40.0),
        ("frontend", "cart", "calls", "grpc", 12.5),
    ]


def test_adjacency_matrix() -> None:
    found = read_edges(FIXTURES / "graph-matrix.csv")
    assert found.layout == "adjacency matrix"
    assert list(zip(*(found.table[name].to_pylist() for name in ("caller", "callee")), strict=True)) == [
        ("cart", "redis"),
        ("frontend", "cart"),
    ]


def test_a_matrix_keeps_nodes_without_edges(tmp_path: Path) -> None:
    path = tmp_path / "matrix.csv"
    path.write_text(",a,b,c\na,1,1,0\nb,0,0,0\nc,0,0,0\n")
    found = read_edges(path)
    assert found.isolated == ("c",)
    assert "dropped 1 edges from a node to itself" in found.notes


def test_other_column_names_relations_and_direction(tmp_path: Path) -> None:
    text = "source,target,relation,asynchronous\ncart,gpu-3,runs_on,\nmail,queue,,true\n"
    rows = edges(tmp_path, text).to_pylist()
    assert [(row["caller"], row["relation"], row["asynchronous"]) for row in rows] == [
        ("cart", "runs_on", None),
        ("mail", "calls", True),
    ]
    assert edges(tmp_path, text, reverse=True)["caller"].to_pylist() == ["gpu-3", "queue"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("caller,callee\na,\n", "line 2, column 'callee' is empty"),
        ("caller,callee,relation\na,b,likes\n", "line 2: relation 'likes' is unknown"),
        ("caller,callee,call_rate\na,b,1\na,c,-2\n", "line 3, column 'call_rate': -2 is negative"),
        ("caller,callee,call_rate\na,b,1\nx,y,1\na,b,2\n", "lines 2 and 4: the edge 'a' -> 'b'"),
        ("caller,callee,asynchronous\na,b,maybe\n", "'maybe' is not true or false"),
        (",a,b,a\na,0,1,0\nb,0,0,0\n", "line 1: node 'a' has more than one column"),
        (",a,b\na,0,1\nb,0,0\na,0,0\n", "line 4: node 'a' has more than one row"),
        (",a,b\na,0,yes\n", "line 2, column 'b': 'yes' is not a number"),
        ("x,y\n1,2\n", "neither an edge list nor an adjacency matrix"),
        ("caller\na\n", "neither an edge list nor an adjacency matrix"),
    ],
)
def test_wrong_edges_are_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        edges(tmp_path, text)


def test_repeated_identical_edges_are_dropped(tmp_path: Path) -> None:
    assert edges(tmp_path, "caller,callee\na,b\na,b\n").num_rows == 1
