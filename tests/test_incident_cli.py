"""`rca incident` as a user meets it: import, show, validate, and what it says of mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_incident import START, make_header, make_incident
from typer.testing import CliRunner, Result

from cli.incident import app
from rca.errors import ExitCode, InvalidInputError, NotFoundError, PrioscopeError
from rca.incident import Incident, metrics_table, read
from rca.telemetry.checks import warnings

FIXTURES = Path(__file__).parent / "fixtures" / "import"


def rca(*arguments: str | Path) -> Result:
    """Run `rca incident ...`; an error for the user is raised, as `rca` itself would print it."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, PrioscopeError):
        raise result.exception
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def import_csv(out: Path, *options: str) -> Result:
    window = () if "--at" in options or "--start" in options else ("--at", "2026-01-31T03:35:00Z", "--margin", "5m")
    victim = () if "--victim" in options else ("--victim", "frontend")
    inputs = (FIXTURES / "metrics-tidy.csv", "--edges", FIXTURES / "edges.csv")
    return rca("import", "csv", *inputs, *victim, *window, "-o", out, *options)


# --- import --------------------------------------------------------------------------------------------------------


def test_csv_to_bundle(tmp_path: Path) -> None:
    out = tmp_path / "incident.zip"
    result = import_csv(out, "--label", "cluster=a", "--label", "env=prod", "--title", "Slow front page")
    assert result.exit_code == 0
    assert result.stdout == f"{out}\n", "only data on stdout"
    assert "tidy CSV, 160 samples" in result.stderr
    incident = read(out)
    header = incident.header
    assert header.id == "20260131T033000Z-frontend-latency_mean_seconds"
    assert (header.victim.node, header.victim.metric) == ("frontend", "latency_mean_seconds")
    assert (header.window.start.isoformat(), header.window.seconds) == ("2026-01-31T03:30:00+00:00", 600)
    assert (header.baseline.start.isoformat(), header.baseline.end) == (
        "2026-01-31T03:00:00+00:00",
        header.window.start,
    )
    assert header.labels == {"cluster": "a", "env": "prod"}
    assert [(source.name, source.kind) for source in header.sources] == [
        ("metrics-tidy.csv", "metrics-csv"),
        ("edges.csv", "edges-csv"),
    ]
    assert incident.metrics.num_rows == 160
    assert incident.edges["caller"].to_pylist() == ["cart", "frontend"]


def test_equal_inputs_give_equal_bundles(tmp_path: Path) -> None:
    import_csv(tmp_path / "a.zip")
    import_csv(tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_the_victims_metric_may_be_written_as_in_the_file(tmp_path: Path) -> None:
    import_csv(tmp_path / "a", "--metric", "error_rate_percent")
    assert read(tmp_path / "a").header.victim.metric == "error_ratio"


def test_explicit_windows(tmp_path: Path) -> None:
    import_csv(
        tmp_path / "a",
        *("--start", "2026-01-31 03:30:00", "--end", "1769830500"),
        *("--baseline-start", "2026-01-31T03:05:00Z", "--baseline-end", "2026-01-31T03:25:00Z", "--id", "inc-7"),
    )
    header = read(tmp_path / "a").header
    assert (header.id, header.window.seconds, header.baseline.seconds) == ("inc-7", 300, 1200)


SPAN_WINDOW = ("--start", "2026-01-31 03:00:02", "--end", "2026-01-31 03:00:05", "--step", "1s")


@pytest.mark.parametrize(("kind", "file"), [("otlp", "otlp.jsonl"), ("jaeger", "jaeger.json")])
def test_spans_to_bundle(tmp_path: Path, kind: str, file: str) -> None:
    start = "2026-01-31 03:00:01" if kind == "jaeger" else "2026-01-31 03:00:02"
    out = tmp_path / "incident.zip"
    result = rca(
        *("import", kind, FIXTURES / file, "--victim", "frontend", "--start", start, "--end", "2026-01-31 03:00:05"),
        *("--step", "1s", "--keep-spans", "-o", out),
    )
    assert result.stdout == f"{out}\n"
    incident = read(out)
    assert incident.edges["callee"].to_pylist() == ["redis", "cart"]
    assert incident.spans.num_rows == (8 if kind == "jaeger" else 16)
    assert incident.header.sources[0].kind == kind
    assert "3 services" not in incident.header.sources[0].detail  # redis has no span of its own
    assert "2 services" in incident.header.sources[0].detail


def test_spans_together_with_metrics(tmp_path: Path) -> None:
    gpu = tmp_path / "gpu.csv"
    gpu.write_text(
        "timestamp,node,metric,value\n1769828400,gpu-3,gpu_utilization,97\n1769828402,gpu-3,gpu_utilization,99\n"
    )
    edges = tmp_path / "edges.csv"
    edges.write_text("caller,callee,relation\nfrontend,cart,calls\ncart,gpu-3,runs_on\n")
    rca(
        *("import", "otlp", FIXTURES / "otlp.jsonl", "--victim", "frontend", *SPAN_WINDOW),
        *("--metrics", gpu, "--unit", "gpu_utilization=%", "--edges", edges, "-o", tmp_path / "a"),
    )
    incident = read(tmp_path / "a")
    assert "gpu_utilization_ratio" in incident.metrics["metric"].to_pylist()
    rows = [(row["caller"], row["relation"], row["call_rate"] is None) for row in incident.edges.to_pylist()]
    # The spans' view of an edge is kept: it has numbers.
    assert rows == [("cart", "calls", False), ("frontend", "calls", False), ("cart", "runs_on", True)]


def test_spans_csv_to_bundle(tmp_path: Path) -> None:
    rca(
        *("import", "spans-csv", FIXTURES / "spans.csv", "--service-from-pod", "--victim", "gateway"),
        *("--start", "2026-01-31 03:00:01", "--end", "2026-01-31 03:00:05", "--step", "1s", "-o", tmp_path / "a"),
    )
    assert read(tmp_path / "a").edges.to_pylist()[0]["callee"] == "cart"


@pytest.mark.parametrize(
    ("options", "error", "message", "cure"),
    [
        (("--victim", "fronted"), NotFoundError, "victim 'fronted' is not in the data", "did you mean frontend?"),
        (("--victim", "redis"), NotFoundError, "victim 'redis' has no metric of its own", "measured"),
        (("--metric", "gpu"), NotFoundError, "no metric 'gpu'", "error_ratio, latency_mean_seconds"),
        (("--at", "noon"), InvalidInputError, "--at: 'noon' is not a time", "RFC 3339"),
        (("--at", "2025-01-31T03:00:00Z"), InvalidInputError, "no sample lies in the incident window", "--at"),
        (
            ("--at", "2026-01-31T03:05:00Z"),
            InvalidInputError,
            "no sample lies before the incident window",
            "--baseline",
        ),
        (("--start", "2026-01-31T03:30:00Z"), InvalidInputError, "window is not given", "--end"),
        (("--start", "1769830500", "--end", "1769830200"), InvalidInputError, "end is not after start", "exchange"),
        (("--at", "1769830500", "--start", "1769830500"), InvalidInputError, "--at excludes", "one way"),
        (("--margin", "soon"), InvalidInputError, "--margin: 'soon'", "5m"),
        (("--baseline-start", "1769828400"), InvalidInputError, "belong together", "both"),
        (
            ("--baseline-start", "1769828400", "--baseline-end", "1769830300"),
            InvalidInputError,
            "baseline window overlaps the incident window",
            "",
        ),
        (
            ("--baseline-start", "1700000000", "--baseline-end", "1700000600"),
            InvalidInputError,
            "no sample lies in the baseline",
            "--baseline-start",
        ),
        (("--label", "cluster"), InvalidInputError, "--label 'cluster' is not name=value", "name=value"),
        (("--unit", "latencies=ms"), InvalidInputError, "--unit names the metric 'latencies'", "header"),
        (("--edges", "absent.csv"), NotFoundError, "no file at absent.csv", "path"),
    ],
)
def test_mistakes_are_explained(
    tmp_path: Path, options: tuple[str, ...], error: type[PrioscopeError], message: str, cure: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        import_csv(tmp_path / "a", *options)
    assert cure in caught.value.cure
    assert caught.value.exit_code is (ExitCode.NOT_FOUND if error is NotFoundError else ExitCode.USAGE)
    assert not (tmp_path / "a").exists()


def test_two_files_must_not_contradict_each_other(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("timestamp,node,metric,value\n2026-01-31T03:00:00Z,frontend,latency_ms,7\n")
    with pytest.raises(
        InvalidInputError, match="two inputs give latency_mean_seconds of 'frontend' at 2026-01-31T03:00"
    ):
        rca(
            *("import", "csv", FIXTURES / "metrics-tidy.csv", other),
            *("--victim", "frontend", "--at", "2026-01-31T03:35:00Z", "-o", tmp_path / "a"),
        )


# --- show ----------------------------------------------------------------------------------------------------------


def test_show_as_text_and_as_json(tmp_path: Path) -> None:
    out = tmp_path / "incident.zip"
    import_csv(out, "--title", "Slow [bold]front[/] page")
    text = rca("show", out).stdout
    for expected in (
        "frontend · latency_mean_seconds",
        "Slow [bold]front[/] page",
        "2026-01-31T03:30:00+00:00 to 2026-01-31T03:40:00+00:00 (600 s)",
        "service=3",
        "calls=2",
        "metrics 160, edges 2",
        "cpu_utilization_ratio",
        "metrics-tidy.csv",
    ):
        assert expected in text
    data = json.loads(rca("show", out, "-o", "json").stdout)
    assert data["tables"]["metrics"] == 160
    assert data["nodes"] == {"service": 3}
    assert data["metrics"][0] == {
        "metric": "cpu_utilization_ratio",
        "signal": "cpu",
        "unit": "ratio",
        "nodes": 1,
        "samples": 40,
        "missing": 0,
    }


def test_show_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no incident bundle"):
        rca("show", tmp_path / "absent")


# --- validate ------------------------------------------------------------------------------------------------------


def test_a_sound_bundle(tmp_path: Path) -> None:
    out = tmp_path / "incident.zip"
    import_csv(out)
    result = rca("validate", out)
    assert result.exit_code == 0
    assert "valid, 0 problems" in result.stdout


def test_every_problem_is_listed_with_its_cure(tmp_path: Path) -> None:
    path = make_incident().write(tmp_path / "a")
    (path / "metrics.parquet").write_bytes(b"PAR1")
    (path / "edges.parquet").unlink()
    result = rca("validate", path)
    assert result.exit_code == 2
    assert result.stdout.count("problem: ") == 2
    assert result.stdout.count("cure: ") == 2
    assert "invalid, 2 problems" in result.stdout
    data = json.loads(rca("validate", path, "-o", "json").stdout)
    assert data["valid"] is False
    assert [sorted(problem) for problem in data["problems"]] == [["cure", "message"]] * 2


def test_nothing_to_validate(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        rca("validate", tmp_path / "absent")


MINUTES = START.timestamp() + 60.0 * np.arange(40)


def series(node: str, values: Any, times: Any = MINUTES, metric: str = "latency_mean_seconds") -> pa.Table:
    count = len(times)
    return metrics_table(
        np.asarray(times), [node] * count, [metric] * count, np.broadcast_to(values, count).astype(float)
    )


def edge_table(*pairs: tuple[str, str]) -> pa.Table:
    callers, callees = zip(*pairs, strict=True)
    return pa.table({"caller": callers, "callee": callees, "relation": ["calls"] * len(pairs)})


def said(incident: Incident) -> str:
    return "\n".join(warnings(incident))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": series("frontend", 1, MINUTES[30:])}, "the baseline holds no sample"),
        ({"metrics": series("frontend", 1, MINUTES[:30])}, "the incident window holds no sample"),
        ({"metrics": series("frontend", np.nan)}, "1 of 1 series hold no value: frontend latency_mean_seconds"),
        ({"metrics": series("frontend", np.nan)}, "has no value in the incident window"),
        ({"metrics": series("frontend", 1, MINUTES[:31])}, "only 1 sample in the incident window"),
        ({"metrics": series("frontend", 1, MINUTES[35:36])}, "1 of 1 series hold one sample"),
        ({"metrics": series("frontend", np.inf)}, "40 values are infinite"),
        ({"metrics": series("frontend", 1, np.repeat(MINUTES, 2))}, "40 samples repeat a time of their series"),
        ({"metrics": series("cart", 1)}, "the victim 'frontend' has no metric 'latency_mean_seconds'"),
        (
            {
                "metrics": series("cart", 1),
                "edges": edge_table(("cart", "db")),
                "nodes": pa.table({"node": ["cart"], "kind": ["service"]}),
            },
            "the victim 'frontend' is not in the bundle",
        ),
        ({"metrics": series("frontend", 1).slice(0, 0)}, "there are no metrics at all"),
        ({"edges": edge_table(("cart", "db"))}, "the victim 'frontend' is disconnected"),
        ({"edges": edge_table(("frontend", "a"), ("a", "b"), ("b", "a"))}, "the graph has a cycle: a -> b -> a"),
        ({"edges": edge_table(("frontend", "a"), ("a", "b"))}, "2 of 3 nodes of the graph have no metrics: a, b"),
        ({"metrics": series("frontend", 1, metric="warp")}, "1 metrics are not in the catalogue"),
        ({}, "source 'prometheus' is partial: no spans"),
    ],
)
def test_what_limits_an_explanation_is_a_warning(tmp_path: Path, changes: dict[str, pa.Table], message: str) -> None:
    incident = make_incident(**changes)
    assert message in said(incident)
    result = rca("validate", incident.write(tmp_path / "a"))
    assert result.exit_code == 0
    assert message in result.stdout


def test_a_complete_bundle_has_no_warning() -> None:
    incident = Incident.create(
        make_header(sources=()),
        metrics=pa.concat_tables([series("frontend", 1), series("cart", 2)]),
        edges=edge_table(("frontend", "cart")),
    )
    assert warnings(incident) == []


# --- start-up ------------------------------------------------------------------------------------------------------


def test_help_has_examples_and_imports_nothing_heavy() -> None:
    for command in ("csv", "otlp", "jaeger", "spans-csv"):
        assert f"rca incident import {command}" in rca("import", command, "--help").stdout
    code = (
        "import cli.incident, sys; print([m for m in ('pyarrow', 'numpy', 'pandas', 'rich.table') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
