"""The incident bundle: what is written is what is read, and damaged or hostile bundles get a one-line error."""

from __future__ import annotations

import stat
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rca.incident
from rca.errors import ExitCode, InvalidInputError, NotFoundError, PrioscopeError
from rca.incident import Header, Incident, Source, SourceStatus, Truth, Victim, Window, examine, metrics_table, read

START = datetime(2026, 1, 31, 3, 0, tzinfo=UTC)


def make_header(**changes: Any) -> Header:
    values: dict[str, Any] = {
        "id": "inc-1",
        "window": Window(start=START + timedelta(minutes=30), end=START + timedelta(minutes=40)),
        "baseline": Window(start=START, end=START + timedelta(minutes=30)),
        "victim": Victim(node="frontend", metric="latency_mean_seconds"),
        "sources": (Source(name="prometheus", kind="prometheus", status=SourceStatus.PARTIAL, detail="no spans"),),
    }
    return Header(**{**values, **changes})


def make_incident(**changes: Any) -> Incident:
    times = START.timestamp() + 60.0 * np.arange(40)
    tables = {
        "metrics": metrics_table(times, ["frontend"] * 40, ["latency_mean_seconds"] * 40, np.linspace(0.1, 0.5, 40)),
        "edges": pa.table({"caller": ["frontend"], "callee": ["cart"], "relation": ["calls"], "call_rate": [12.5]}),
        "nodes": pa.table({"node": ["frontend", "gpu-3"], "kind": ["service", "gpu"]}),
    }
    header = changes.pop("header", None) or make_header()
    return Incident.create(header, **{**tables, **changes})


@pytest.fixture(params=["incident", "incident.zip"])
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The path of a written bundle, once as a directory and once as a zip."""
    return make_incident().write(tmp_path / request.param)


def members(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return {item.name: item.read_bytes() for item in path.iterdir()}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# --- round trip ----------------------------------------------------------------------------------------------------


def test_a_bundle_survives_a_round_trip_byte_for_byte(bundle: Path, tmp_path: Path) -> None:
    incident = read(bundle)
    assert incident.equals(make_incident())
    again = incident.write(tmp_path / f"again{bundle.suffix}")
    assert members(again) == members(bundle)
    if bundle.suffix == ".zip":
        assert again.read_bytes() == bundle.read_bytes()


def test_directory_and_zip_hold_the_same_bytes(tmp_path: Path) -> None:
    incident = make_incident()
    assert members(incident.write(tmp_path / "a")) == members(incident.write(tmp_path / "b.zip"))


_names = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=("Cs",)), min_size=1, max_size=8
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 4_000_000_000_000_000),
            _names,
            st.none() | _names,
            _names,
            st.none() | st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=12,
    ),
    spans=st.lists(
        st.tuples(st.integers(0, 2**62), st.floats(0, 1e6), st.none() | st.dictionaries(_names, _names, max_size=3)),
        max_size=4,
    ),
    labels=st.dictionaries(_names, _names, max_size=3),
    suffix=st.sampled_from(["", ".zip"]),
)
def test_any_content_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, spans: Any, labels: dict[str, str], suffix: str
) -> None:
    schema = rca.incident.METRICS_SCHEMA
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    metrics = pa.table(
        {f.name: pa.array(list(column), f.type) for f, column in zip(schema, columns, strict=True)}, schema=schema
    )
    table = pa.table(
        {
            "trace_id": ["t"] * len(spans),
            "span_id": [str(number) for number in range(len(spans))],
            "service": ["api"] * len(spans),
            "start": pa.array([start for start, _, _ in spans], pa.int64()).cast(pa.timestamp("ns", tz="UTC")),
            "duration_seconds": pa.array([duration for _, duration, _ in spans], pa.float64()),
            "attributes": pa.array(
                [None if pairs is None else list(pairs.items()) for _, _, pairs in spans],
                pa.map_(pa.string(), pa.string()),
            ),
        }
    )
    incident = Incident.create(
        make_header(labels=labels),
        metrics=metrics,
        spans=table,
        truth=Truth(causes=("gpu-3",), path=(("gpu-3", "frontend"),)),
    )
    path = incident.write(tmp_path_factory.mktemp("round") / f"bundle{suffix}")
    assert read(path, with_truth=True).equals(incident)


def test_nan_means_missing_and_is_stored_as_null(tmp_path: Path) -> None:
    incident = make_incident(
        metrics=metrics_table(np.array([START.timestamp()]), ["frontend"], ["x"], np.array([np.nan]))
    )
    assert incident.metrics["value"].to_pylist() == [None]
    assert read(incident.write(tmp_path / "a.zip")).equals(incident)


def test_the_truth_is_not_read_unless_asked_for(tmp_path: Path) -> None:
    path = make_incident(truth=Truth(causes=("cart",))).write(tmp_path / "a")
    assert read(path).truth is None
    assert read(path, with_truth=True).truth == Truth(causes=("cart",))
    (path / "truth.json").write_text("damaged")
    assert read(path).truth is None


# --- writing -------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_bundle_and_no_debris(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = members(bundle)
    real = pq.write_table

    def full_disk(table: pa.Table, *args: Any, **kwargs: Any) -> None:
        if "caller" in table.column_names:
            raise OSError(28, "No space left on device")
        real(table, *args, **kwargs)

    monkeypatch.setattr(rca.incident.pq, "write_table", full_disk)
    with pytest.raises(InvalidInputError, match=r"cannot write .*: No space left on device"):
        make_incident(header=make_header(title="new")).write(bundle)
    assert members(bundle) == before
    assert list(bundle.parent.iterdir()) == [bundle]


def test_a_failed_swap_of_directories_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_incident().write(tmp_path / "a")
    before = members(path)
    real = Path.rename

    def fails_for_the_new_one(self: Path, target: Path) -> Path:
        if target == path and self.name != "bundle":
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new_one)
    with pytest.raises(InvalidInputError, match="Input/output error"):
        make_incident(header=make_header(title="new")).write(path)
    assert members(path) == before
    assert list(tmp_path.iterdir()) == [path]


def test_writing_over_a_bundle_replaces_it(bundle: Path) -> None:
    make_incident(header=make_header(title="new"), nodes=pa.table({"node": [], "kind": []}, schema=NODES)).write(bundle)
    assert read(bundle).header.title == "new"
    assert "nodes.parquet" not in members(bundle)


NODES = pa.schema([("node", pa.string()), ("kind", pa.string())])


def test_writing_never_deletes_other_peoples_files(tmp_path: Path) -> None:
    path = make_incident().write(tmp_path / "a")
    (path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInputError, match="other files"):
        make_incident().write(path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInputError, match="not a directory"):
        make_incident().write(tmp_path / "file")


def test_a_zip_can_be_read_by_others(tmp_path: Path) -> None:
    path = make_incident().write(tmp_path / "a.zip")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


# --- damaged bundles -----------------------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no incident bundle at") as caught:
        read(tmp_path / "absent")
    assert caught.value.exit_code is ExitCode.NOT_FOUND


@pytest.mark.parametrize("name", ["incident.json", "metrics.parquet", "edges.parquet"])
def test_a_missing_part_is_named(tmp_path: Path, name: str) -> None:
    path = make_incident().write(tmp_path / "a")
    (path / name).unlink()
    with pytest.raises(InvalidInputError, match=f"lacks {name}"):
        read(path)


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_truncated_parquet(tmp_path: Path, keep: int) -> None:
    path = make_incident().write(tmp_path / "a")
    file = path / "metrics.parquet"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InvalidInputError, match=r"metrics\.parquet is not a readable Parquet file") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert caught.value.cure


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "has schema version 99; this prioscope reads up to 1"),
        ({"schema_version": 0}, "has schema version 0"),
        ({"schema_version": "one"}, "Expected `int`, got `str`"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"window": {"start": "2026-01-31T03:30:00", "end": "2026-01-31T03:40:00Z"}}, "start has no time zone"),
        ({"window": {"start": "2026-01-31T03:40:00Z", "end": "2026-01-31T03:30:00Z"}}, "end is not after start"),
        ({"onset": "2026-01-31T03:31:00"}, "onset has no time zone"),
        ({"victim": {"node": "frontend"}}, r"missing required field `metric` - at `\$.victim`"),
        (
            {"baseline": {"start": "2026-01-31T03:00:00Z", "end": "2026-01-31T03:35:00Z"}},
            "overlaps the incident window",
        ),
        ({"id": "../../etc"}, "incident id"),
    ],
)
def test_a_wrong_header_is_explained(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = make_incident().write(tmp_path / "a")
    header = path / "incident.json"
    header.write_bytes(msgspec.json.encode({**msgspec.json.decode(header.read_bytes()), **change}))
    with pytest.raises(InvalidInputError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"edges": {"caller": ["a"], "callee": ["b"], "relation": ["calls"], "call_rate": [-1.0]}},
            "negative call_rate",
        ),
        ({"edges": {"caller": ["a"], "callee": ["b"], "relation": ["likes"]}}, "'likes', which is none of calls"),
        ({"edges": {"caller": ["a"], "callee": [None], "relation": ["calls"]}}, "'callee' holds 1 empty values"),
        ({"edges": {"caller": ["a"], "relation": ["calls"]}}, "lacks the column 'callee'"),
        ({"nodes": {"node": ["a", "a"], "kind": ["gpu", "gpu"]}}, "lists node 'a' more than once"),
        ({"nodes": {"node": ["a"], "kind": ["toaster"]}}, "kind 'toaster'"),
        ({"metrics": {"timestamp": [datetime(2026, 1, 31)], "node": ["a"], "metric": ["m"]}}, "without a time zone"),
        ({"metrics": {"timestamp": ["noon"], "node": ["a"], "metric": ["m"]}}, "'timestamp' is string"),
        (
            {"metrics": {"timestamp": [datetime(1950, 1, 1, tzinfo=UTC)], "node": ["a"], "metric": ["m"]}},
            "1970 to 2261",
        ),
    ],
)
def test_inconsistent_tables_are_explained(table: dict[str, dict[str, list[Any]]], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_incident(**{name: pa.table(columns) for name, columns in table.items()})


def test_every_problem_is_listed_not_only_the_first(tmp_path: Path) -> None:
    path = make_incident().write(tmp_path / "a")
    (path / "incident.json").write_text("{}")
    (path / "metrics.parquet").write_bytes(b"PAR1")
    (path / "edges.parquet").unlink()
    incident, problems = examine(path)
    assert incident is None
    assert [next(name for name in members_of_interest if name in str(problem)) for problem in problems] == [
        "incident.json",
        "metrics.parquet",
        "edges.parquet",
    ]


members_of_interest = ("incident.json", "metrics.parquet", "edges.parquet")


def test_columns_that_we_do_not_know_are_ignored(tmp_path: Path) -> None:
    path = make_incident().write(tmp_path / "a")
    edges = pq.read_table(path / "edges.parquet")
    pq.write_table(edges.append_column("colour", pa.array(["red"])), path / "edges.parquet")
    assert read(path).equals(make_incident())


def test_a_column_given_twice_is_refused(tmp_path: Path) -> None:
    path = make_incident().write(tmp_path / "a")
    edges = pq.read_table(path / "edges.parquet")
    pq.write_table(edges.append_column("caller", pa.array(["x"])), path / "edges.parquet")
    with pytest.raises(InvalidInputError, match="'caller' twice"):
        read(path)


# --- hostile bundles -----------------------------------------------------------------------------------------------


def rezip(source: Path, target: Path, extra: list[tuple[zipfile.ZipInfo | str, bytes]], prefix: str = "") -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, payload in members(source).items():
            archive.writestr(prefix + name, payload)
        for name, payload in extra:
            archive.writestr(name, payload)
    return target


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_incident().write(tmp_path / "plain.zip")


def test_one_top_folder_in_a_zip_is_fine(plain: Path, tmp_path: Path) -> None:
    assert read(rezip(plain, tmp_path / "a.zip", [], prefix="incident-1/")).equals(make_incident())


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/passwd", "a/../../evil", "..\\evil.txt", "C:evil"])
def test_path_traversal_is_refused(plain: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match="unsafe path"):
        read(rezip(plain, tmp_path / "a.zip", [(name, b"x")]))


def test_a_symbolic_link_is_refused(plain: Path, tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(InvalidInputError, match="symbolic link 'link'"):
        read(rezip(plain, tmp_path / "a.zip", [(link, b"/etc/passwd")]))


def test_duplicate_entries_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        rezip(plain, tmp_path / "a.zip", [("incident.json", b"{}")])
    with pytest.raises(InvalidInputError, match=r"holds 'incident\.json' twice"):
        read(tmp_path / "a.zip")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="would unpack to 50,000,000 bytes") as caught:
        read(rezip(plain, tmp_path / "a.zip", [("spans.parquet", bytes(50_000_000))]))
    assert "zip bomb" in caught.value.cure


def test_a_parquet_bomb_is_refused_while_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_incident().write(tmp_path / "a")
    count = 200_000
    # One long string in a dictionary, used again and again: tiny on disk and by its metadata.
    long = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), ["x" * 1000]).cast(pa.string())
    edges = pa.table({"caller": long, "callee": long, "relation": ["calls"] * count})
    pq.write_table(edges, path / "edges.parquet")
    assert (path / "edges.parquet").stat().st_size < 100_000
    monkeypatch.setattr(rca.incident, "MAX_MEMBER_BYTES", 50_000_000)
    with pytest.raises(InvalidInputError, match="takes more than 50,000,000 bytes in memory"):
        read(path)


def test_too_many_rows_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rca.incident, "MAX_ROWS", 39)
    with pytest.raises(InvalidInputError, match="holds 40 rows; the limit is 39"):
        read(bundle)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 torn"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match="neither a directory nor a zip"):
        read(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_parquet_gives_an_error_or_sound_tables(plain: Path, data: st.DataObject) -> None:
    path = plain.parent / "directory"
    make_incident().write(path)
    file = path / data.draw(st.sampled_from(["metrics.parquet", "edges.parquet"]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    incident, problems = examine(path)
    if incident is not None:
        for table in incident.tables.values():
            table.validate(full=True)
    assert all(problem.cure and "\n" not in str(problem) for problem in problems)


def test_a_flipped_bit_in_a_value_is_noticed(tmp_path: Path) -> None:
    path = make_incident().write(tmp_path / "a")
    file = path / "metrics.parquet"
    content = bytearray(file.read_bytes())
    value = pq.read_metadata(file).row_group(0).column(4)
    content[value.data_page_offset + value.total_compressed_size // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"metrics\.parquet is not a readable Parquet file"):
        read(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_zip_gives_an_error_or_the_truth_and_never_a_traceback(plain: Path, data: st.DataObject) -> None:
    content = bytearray(plain.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(content)))
    damaged = plain.parent / "damaged.zip"
    damaged.write_bytes(bytes(content[:cut]))
    error: PrioscopeError | None = None
    try:
        incident = read(damaged)
    except PrioscopeError as raised:
        error = raised
    if error is None:
        assert incident.header == make_header()
    else:
        assert "\n" not in str(error)
        assert error.cure
