"""Incidents as they come in the night: each gives one line and its cure, or an answer that admits what it lacks."""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cli.main
from rca.errors import InvalidInputError, NotFoundError
from rca.explain import explain
from rca.explanation import Explanation, Verdict, from_json
from rca.gnn import infer
from rca.incident import Header, Incident, Victim, Window, metrics_table
from rca.panel import from_incident

START = datetime(2026, 1, 31, 3, 0, tzinfo=UTC)
BASELINE = Window(START, START + timedelta(minutes=60))
INCIDENT = Window(START + timedelta(minutes=63), START + timedelta(minutes=83))
LATENCY, ERRORS, RATE = "latency_mean_seconds", "error_ratio", "request_rate"
Levels = dict[str, tuple[float, float]]
#: db gets 0.4 s slower; all that call it feel it.
SLOW: Levels = {"web": (0.3, 0.7), "cart": (0.2, 0.6), "db": (0.1, 0.5), "auth": (0.05, 0.05)}
CALLS = ("web>cart", "cart>db", "web>auth")


@pytest.fixture(scope="module")
def model() -> infer.Model:
    """The shipped weights (or those that PRIOSCOPE_WEIGHTS names)."""
    try:
        return infer.load()
    except NotFoundError as error:
        pytest.skip(f"{error}: {error.cure}")


def make(
    levels: Levels = SLOW,
    calls: tuple[str, ...] = CALLS,
    *,
    victim: str = "web",
    metric: str = LATENCY,
    keep: Callable[[float, str, str], bool] = lambda minute, node, name: True,
    value: Callable[[str, float], float] = lambda node, usual: usual,
    every: float = 1.0,
) -> Incident:
    """Latency, errors and request rate of each node, one sample a minute, with what ``keep`` leaves of it."""
    rng = np.random.default_rng(1)
    minutes, nodes, names, values = [], [], [], []
    for node, (before, after) in levels.items():
        for minute in np.arange(0.0, 83.0, every).tolist():
            noise = float(np.exp(rng.normal(0.0, 0.05)))
            for name, usual in (
                (LATENCY, (after if minute >= 66 else before) * noise),
                (ERRORS, 0.001),
                (RATE, 20.0 * noise),
            ):
                if keep(minute, node, name):
                    minutes.append(minute)
                    nodes.append(node)
                    names.append(name)
                    values.append(value(node, usual) if name == LATENCY else usual)
    return Incident.create(
        Header(id="INC-1", window=INCIDENT, baseline=BASELINE, victim=Victim(victim, metric)),
        metrics=metrics_table(START.timestamp() + 60.0 * np.array(minutes), nodes, names, np.array(values)),
        edges=pa.table(
            {
                "caller": pa.array([c.split(">")[0] for c in calls], pa.string()),
                "callee": pa.array([c.split(">")[1] for c in calls], pa.string()),
                "relation": pa.array(["calls"] * len(calls), pa.string()),
            }
        ),
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make().write(tmp_path / "bundle")


class Ran:
    """What one call of the command left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def rca(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*arguments: object) -> Ran:
        code = cli.main.main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return Ran(code, shown.out, shown.err)

    return run


def refused(ran: Ran, code: int, message: str, cure: str) -> None:
    """One line that names the input, one that names the cure, nothing on stdout."""
    assert ran.code == code
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert len(lines) == 2, ran.err
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert lines[1].startswith("cure: ")
    assert cure in lines[1]


def reasons(answer: Explanation) -> dict[str, str]:
    return {item.what: item.why for item in answer.not_checked}


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_missing_file(rca: Callable[..., Ran], tmp_path: Path) -> None:
    refused(rca("explain", tmp_path / "none.zip"), 3, "no incident bundle at", "check the path")


@pytest.mark.parametrize("name", ["incident.json", "metrics.parquet", "edges.parquet"])
def test_a_missing_part(rca: Callable[..., Ran], bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    refused(rca("explain", bundle), 2, f"lacks {name}", "")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
def test_truncated_parquet(rca: Callable[..., Ran], bundle: Path, keep: float) -> None:
    path = bundle / "metrics.parquet"
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    refused(rca("explain", bundle), 2, "metrics.parquet is not a readable Parquet file", "export the bundle again")


def test_an_unknown_victim(rca: Callable[..., Ran], tmp_path: Path) -> None:
    path = make(victim="webb").write(tmp_path / "a.zip")
    refused(rca("explain", path), 3, "no node 'webb' in the call graph", "closest names: web")
    good = make().write(tmp_path / "b.zip")
    refused(rca("explain", good, "--victim", "dbb"), 3, "no node 'dbb'", "closest names: db")


def test_an_unknown_metric_of_the_victim(rca: Callable[..., Ran], bundle: Path) -> None:
    ran = rca("explain", bundle, "--metric", "latency_p95_seconds")
    refused(ran, 2, "web has no metric 'latency_p95_seconds'", f"choose one with --metric: {ERRORS}, {LATENCY}, {RATE}")


def test_a_victim_that_nothing_measures(rca: Callable[..., Ran], tmp_path: Path) -> None:
    path = make(keep=lambda minute, node, name: node != "web").write(tmp_path / "a.zip")
    refused(rca("explain", path), 2, "web has no metric 'latency_mean_seconds'", "choose another --victim")


def test_only_nan(rca: Callable[..., Ran], tmp_path: Path) -> None:
    incident = make(keep=lambda minute, node, name: name == LATENCY, value=lambda node, usual: float("nan"))
    assert incident.metrics["value"].null_count == incident.metrics.num_rows > 0
    refused(rca("explain", incident.write(tmp_path / "a.zip")), 2, "no metric value lies in the incident window", "UTC")


def test_no_rows_at_all(rca: Callable[..., Ran], tmp_path: Path) -> None:
    path = make(keep=lambda minute, node, name: False).write(tmp_path / "a.zip")
    refused(rca("explain", path), 2, "no metric value lies in the incident window", "check the window")


def test_duplicate_node_names(rca: Callable[..., Ran], bundle: Path) -> None:
    pq.write_table(pa.table({"node": ["db", "db"], "kind": ["service", "host"]}), bundle / "nodes.parquet")
    refused(rca("explain", bundle), 2, "nodes table lists node 'db' more than once", "rca incident validate")


def test_a_newer_schema_version(rca: Callable[..., Ran], bundle: Path) -> None:
    header = json.loads((bundle / "incident.json").read_text())
    (bundle / "incident.json").write_text(json.dumps(header | {"schema_version": 99, "new_field": [1]}))
    refused(rca("explain", bundle), 2, "has schema version 99; this prioscope reads up to 1", "upgrade prioscope")


def test_windows_that_overlap(rca: Callable[..., Ran], bundle: Path) -> None:
    header = json.loads((bundle / "incident.json").read_text())
    (bundle / "incident.json").write_text(json.dumps(header | {"baseline": header["window"]}))
    refused(rca("explain", bundle), 2, "baseline window overlaps the incident window", "rca incident validate")


def zipped(bundle: Path, target: Path, name: str, content: bytes) -> Path:
    """The bundle as a zip with one more entry."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in sorted(bundle.iterdir()):
            archive.write(part, part.name)
        archive.writestr(name, content)
    return target


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../evil", "..\\evil", "c:/evil"])
def test_path_traversal_in_a_zip(rca: Callable[..., Ran], bundle: Path, tmp_path: Path, name: str) -> None:
    path = zipped(bundle, tmp_path / "a.zip", name, b"x")
    refused(rca("explain", path), 2, "holds the unsafe path", "do not trust this file")
    assert {p.name for p in tmp_path.iterdir()} == {"bundle", "a.zip"}
    assert not (tmp_path.parent / "evil").exists()


def test_a_zip_bomb(rca: Callable[..., Ran], bundle: Path, tmp_path: Path) -> None:
    path = zipped(bundle, tmp_path / "a.zip", "spans.parquet", bytes(100_000_000))
    started = time.perf_counter()
    refused(rca("explain", path), 2, "would unpack to 100,000,000 bytes", "zip bomb")
    assert time.perf_counter() - started < 1.0


def test_something_else(rca: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"hello")
    refused(rca("explain", tmp_path / "a.zip"), 2, "neither a directory nor a zip file", "rca incident import")
    (tmp_path / "empty").mkdir()
    refused(rca("explain", tmp_path / "empty"), 2, "lacks incident.json", "rca incident import")


# --- answered ---------------------------------------------------------------------------------------------------------


def answered(ran: Ran) -> Explanation:
    """A whole answer on stdout, nothing on stderr, and the exit code that goes with the verdict."""
    assert ran.err == ""
    answer = from_json(ran.out)
    assert "NaN" not in ran.out
    assert ran.code == (0 if answer.verdict is Verdict.EXPLAINED else 4)
    assert (answer.verdict is Verdict.INCONCLUSIVE) == bool(answer.verdict_reasons)
    return answer


@pytest.mark.parametrize("format", ["text", "json", "markdown", "html"])
def test_a_sound_incident_for_comparison(
    model: infer.Model, rca: Callable[..., Ran], bundle: Path, format: str
) -> None:
    ran = rca("explain", bundle, "-o", format)
    assert ran.code in (0, 4)
    assert "web" in ran.out
    if format == "json":
        answer = answered(ran)
        assert answer.impact.baseline == pytest.approx(0.3, rel=0.05)
        assert answer.impact.incident == pytest.approx(0.7, rel=0.05)


def test_an_empty_baseline(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    path = make(keep=lambda minute, node, name: minute >= 63).write(tmp_path / "a.zip")
    answer = answered(rca("explain", path, "-o", "json"))
    assert answer.verdict is Verdict.INCONCLUSIVE
    assert any("no value in the baseline window" in reason for reason in answer.verdict_reasons)
    assert (answer.impact.baseline, answer.impact.baseline_samples) == (None, 0)
    assert answer.evidence == ()
    assert answer.impact.change_ratio is None
    assert any("no baseline to compare with" in why for why in reasons(answer).values())
    assert rca("explain", path).code == 4


def test_a_victim_that_is_only_nan(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    path = make(value=lambda node, usual: float("nan") if node == "web" else usual).write(tmp_path / "a.zip")
    answer = answered(rca("explain", path, "-o", "json"))
    assert answer.verdict is Verdict.INCONCLUSIVE
    assert any("no value in the incident window" in reason for reason in answer.verdict_reasons)
    assert (answer.impact.baseline, answer.impact.incident, answer.impact.peak) == (None, None, None)
    assert answer.attribution == ()


def test_another_node_that_is_only_nan(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    whole = make().write(tmp_path / "a.zip")
    blind = make(value=lambda node, usual: float("nan") if node == "auth" else usual).write(tmp_path / "b.zip")
    one, other = (answered(rca("explain", path, "-o", "json")) for path in (whole, blind))
    assert one.impact == other.impact
    assert not [item for item in other.evidence if item.node == "auth" and item.metric == LATENCY]


def test_a_negative_latency_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"negative latency_mean_seconds \(-.*, node 'web'"):
        make(value=lambda node, usual: -usual if node == "web" else usual)


def test_a_workload_in_a_state_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="state 'sleeping', which is none of pending,"):
        make().replace(workloads=pa.table({"workload": ["job-1"], "state": ["sleeping"]}))


def test_infinite_values_count_as_missing(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    path = make(value=lambda node, usual: float("inf") if node == "cart" else usual).write(tmp_path / "a.zip")
    answer = answered(rca("explain", path, "-o", "json"))
    assert "Infinity" not in rca("explain", path, "-o", "json").out
    assert not [item for item in answer.evidence if item.node == "cart" and item.metric == LATENCY]


@pytest.mark.parametrize(
    "calls",
    [("web>cart", "cart>db", "db>web"), ("web>cart", "cart>web"), ("web>web", "web>cart", "cart>db", "db>cart")],
    ids=["all around", "two", "below the victim"],
)
def test_a_cyclic_graph(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path, calls: tuple[str, ...]) -> None:
    answer = answered(rca("explain", make(calls=calls).write(tmp_path / "a.zip"), "-o", "json"))
    assert "calls in a circle" in reasons(answer)
    for entry in answer.attribution[0].entries:
        assert entry.low <= entry.contribution + 1e-6
        assert entry.contribution <= entry.high + 1e-6 <= 1.0 + 2e-6
    assert answer.path is None or answer.path.hops[-1].target == "web"


@pytest.mark.parametrize("calls", [(), ("cart>db", "auth>db")], ids=["no edge at all", "edges elsewhere"])
def test_a_disconnected_victim(
    model: infer.Model, rca: Callable[..., Ran], tmp_path: Path, calls: tuple[str, ...]
) -> None:
    answer = answered(rca("explain", make(calls=calls).write(tmp_path / "a.zip"), "-o", "json"))
    assert "no edge leads to or from it" in reasons(answer)["dependencies of the victim"]
    assert answer.path is None
    assert answer.impact.incident == pytest.approx(0.7, rel=0.05)


def test_a_victim_alone_in_the_world(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    path = make({"web": (0.3, 0.9)}, ()).write(tmp_path / "a.zip")
    answer = answered(rca("explain", path, "-o", "json"))
    assert [node.node for node in answer.nodes] == ["web"]
    assert answer.path is None
    assert rca("explain", path, "-o", "html").code in (0, 4)


def test_one_sample_in_the_incident(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    path = make(keep=lambda minute, node, name: minute < 60 or minute == 70).write(tmp_path / "a.zip")
    answer = answered(rca("explain", path, "-o", "json"))
    assert answer.impact.incident_samples == 1
    assert answer.impact.incident == pytest.approx(0.7, rel=0.2)


def test_one_sample_altogether(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    path = make(keep=lambda minute, node, name: (minute, node, name) == (70.0, "web", LATENCY)).write(
        tmp_path / "a.zip"
    )
    answer = answered(rca("explain", path, "-o", "json"))
    assert answer.verdict is Verdict.INCONCLUSIVE
    assert (answer.impact.incident_samples, answer.impact.baseline_samples) == (1, 0)
    assert "order of onsets" in reasons(answer)
    assert "cart" in " ".join(reasons(answer))


def test_one_constant_value_everywhere(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    for level in (0.0, 1.0):
        path = make(value=lambda node, usual, level=level: level).write(tmp_path / f"{level}.zip")  # type: ignore[misc]
        answer = answered(rca("explain", path, "-o", "json"))
        assert answer.impact.baseline == answer.impact.incident == level
        assert all(abs(item.z) < 1e-6 for item in answer.evidence if item.metric == LATENCY)


def test_extreme_values_do_not_break_the_figures(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    for factor in (1e-200, 1e12):
        path = make(value=lambda node, usual, f=factor: f * usual).write(tmp_path / f"{factor}.zip")  # type: ignore[misc]
        answered(rca("explain", path, "-o", "json"))


def test_times_in_any_order_and_samples_given_twice(
    model: infer.Model, rca: Callable[..., Ran], tmp_path: Path
) -> None:
    incident = make()
    rows = incident.metrics
    again = pa.concat_tables([rows, rows]).take(pa.array(np.random.default_rng(0).permutation(2 * rows.num_rows)))
    one = answered(rca("explain", incident.write(tmp_path / "a.zip"), "-o", "json"))
    other = answered(rca("explain", incident.replace(metrics=again).write(tmp_path / "b.zip"), "-o", "json"))
    assert one.impact == other.impact
    assert one.causes == other.causes


def test_names_of_any_letters(model: infer.Model, rca: Callable[..., Ran], tmp_path: Path) -> None:
    strange = {"web": "вебсервер", "cart": "a b\tc'\"<>", "db": "数据库/pod:1", "auth": "🔑"}
    levels = {strange[node]: pair for node, pair in SLOW.items()}
    incident = make(levels, (), victim=strange["web"])
    edges = pa.table(
        {
            "caller": [strange["web"], strange["cart"]],
            "callee": [strange["cart"], strange["db"]],
            "relation": ["calls", "calls"],
        }
    )
    path = incident.replace(edges=edges).write(tmp_path / "a.zip")
    assert {node.node for node in answered(rca("explain", path, "-o", "json")).nodes} == set(strange.values())
    for format in ("text", "markdown", "html"):
        assert rca("explain", path, "-o", format).code in (0, 4)


# --- large ------------------------------------------------------------------------------------------------------------


def large(rows: int = 1_000_000, nodes: int = 50) -> Incident:
    """A chain of ``nodes`` services with a million samples, one a second or so; the last one gets slow."""
    per_node = rows // nodes
    times = START.timestamp() + np.linspace(0.0, 83 * 60 - 1, per_node)
    slow = times >= START.timestamp() + 66 * 60
    rng = np.random.default_rng(0)
    depth = np.arange(nodes)
    level = 0.02 * (nodes - depth)[:, None] + 0.5 * slow[None, :]
    names = np.array([f"svc-{i:02d}" for i in range(nodes)], dtype=object)
    table = metrics_table(
        np.tile(times, nodes),
        pa.array(np.repeat(names, per_node).tolist(), pa.string()),
        pa.array([LATENCY] * (nodes * per_node), pa.string()),
        (level * np.exp(rng.normal(0, 0.05, level.shape))).ravel(),
    )
    return Incident.create(
        Header(id="INC-L", window=INCIDENT, baseline=BASELINE, victim=Victim("svc-00", LATENCY)),
        metrics=table,
        edges=pa.table(
            {"caller": names[:-1].tolist(), "callee": names[1:].tolist(), "relation": ["calls"] * (nodes - 1)}
        ),
    )


def test_a_million_rows_are_laid_out_right_and_soon() -> None:
    incident = large()
    assert incident.metrics.num_rows == 1_000_000
    started = time.perf_counter()
    panel = from_incident(incident)
    # 0.5 s on one core; the bound only catches what grows faster than the rows.
    assert time.perf_counter() - started < 8.0
    values = panel.window[LATENCY]
    after = values[:, -100:].mean(axis=1)
    assert after == pytest.approx(0.02 * (50 - np.arange(50)) + 0.5, rel=0.02)


def test_a_million_rows_are_explained(model: infer.Model) -> None:
    answer = explain(large())
    assert answer.impact.baseline == pytest.approx(1.0, rel=0.02)
    assert answer.impact.incident == pytest.approx(1.5, rel=0.02)
    assert max(len(series.timestamps) for series in answer.series) <= 1200
