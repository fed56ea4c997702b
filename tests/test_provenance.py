"""The hash chain of an explanation (R7, grade C)."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rca.explanation import Explanation, ProvenanceStep, from_json, to_json
from rca.incident import Incident, Source, Truth, read
from rca.provenance import chain, column_digest, explanation_steps, incident_steps, seal, verify

STEPS = [("a", b"one"), ("b", b"two"), ("c", b"three")]


def test_the_chain_is_sha256_over_the_previous_digest_and_the_content() -> None:
    first, second, _ = chain(STEPS).steps
    assert first.content_sha256 == hashlib.sha256(b"one").hexdigest()
    assert first.digest == hashlib.sha256(bytes(32) + hashlib.sha256(b"one").digest()).hexdigest()
    assert second.digest == hashlib.sha256(bytes.fromhex(first.digest) + hashlib.sha256(b"two").digest()).hexdigest()


def test_an_untouched_chain_verifies() -> None:
    assert verify(chain(STEPS), STEPS) == []


def test_a_changed_content_is_named_once() -> None:
    changed = [STEPS[0], ("b", b"TWO"), STEPS[2]]
    assert verify(chain(STEPS), changed) == ["step 2 (b): the content differs from what was recorded"]


def test_a_removed_and_an_added_step_are_named() -> None:
    assert verify(chain(STEPS), STEPS[:2]) == ["step 'c' is recorded but unknown"]
    assert verify(chain(STEPS[:2]), STEPS) == ["step 'c' is not recorded"]


def test_exchanged_steps_are_named() -> None:
    assert verify(chain(STEPS), [STEPS[1], STEPS[0], STEPS[2]])[0] == "step 1 is 'a', not 'b'"


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("digest", "00" * 32, "step 2 (b): the chain is broken here"),
        ("content_sha256", "not hex", "step 2 (b): 'not hex' is not a SHA-256 digest"),
    ],
)
def test_a_forged_link_is_found(field: str, value: str, problem: str) -> None:
    good = chain(STEPS)
    forged: list[ProvenanceStep] = list(good.steps)
    forged[1] = msgspec.structs.replace(forged[1], **{field: value})
    assert problem in verify(msgspec.structs.replace(good, steps=tuple(forged)), STEPS)


def test_another_grade_is_not_claimed_to_be_checked() -> None:
    assert "cannot be checked" in verify(msgspec.structs.replace(chain(STEPS), grade="A"), STEPS)[0]


def test_storage_does_not_change_the_digests(incident: Incident, tmp_path: Path) -> None:
    as_zip, as_folder = incident.write(tmp_path / "i.zip"), incident.write(tmp_path / "i")
    # The same rows, by another Parquet writer: other compression, other row groups, dictionaries off.
    metrics = pq.read_table(as_folder / "metrics.parquet")
    pq.write_table(metrics, as_folder / "metrics.parquet", compression="none", row_group_size=7, use_dictionary=False)
    expected = incident_steps(incident)
    assert incident_steps(read(as_zip)) == expected
    assert incident_steps(read(as_folder)) == expected
    assert zipfile.is_zipfile(as_zip)


def test_every_part_of_the_content_changes_the_digests(incident: Incident) -> None:
    before = dict(incident_steps(incident))
    metrics = incident.metrics
    values = metrics.column("value").to_pylist()
    values[5] += 1e-12
    nudged = metrics.set_column(metrics.schema.get_field_index("value"), metrics.schema.field("value"), [values])
    assert dict(incident_steps(incident.replace(metrics=nudged)))["metrics"] != before["metrics"]
    swapped = metrics.take([1, 0, *range(2, metrics.num_rows)])
    assert dict(incident_steps(incident.replace(metrics=swapped)))["metrics"] != before["metrics"]
    header = msgspec.structs.replace(incident.header, sources=(Source("prometheus", "prometheus"),))
    assert dict(incident_steps(incident.replace(header=header)))["incident.json"] != before["incident.json"]


def test_label_order_and_the_truth_do_not_matter(incident: Incident) -> None:
    labels = dict(reversed(incident.header.labels.items()))
    header = msgspec.structs.replace(incident.header, labels=labels)
    changed = incident.replace(header=header, truth=Truth(causes=("db",)))
    assert incident_steps(changed) == incident_steps(incident)


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a", None, "", "ü", "bc"]),
        pa.array([1.5, None, float("nan"), 0.0]),
        pa.array([True, None, False]),
        pa.array([["x"], None, [], ["y", None]], pa.list_(pa.string())),
        pa.array([[("k", "v")], None, [], [("a", None), ("b", "c")]], pa.map_(pa.string(), pa.string())),
    ],
    ids=lambda values: str(values.type),
)
def test_column_digests_see_values_and_nulls_but_not_chunks(values: pa.Array) -> None:
    digest = column_digest(values)
    assert column_digest(pa.chunked_array([values.slice(0, 1), values.slice(1)])) == digest
    assert column_digest(pa.concat_arrays([values.slice(2), values]).slice(len(values) - 2)) == digest
    assert column_digest(values.slice(0, 2)) != digest
    filled = pa.concat_arrays([values.slice(0, 1), values.slice(0, 1), values.slice(2)])
    assert column_digest(filled) != digest, "the null in second place was not seen"


def test_strings_are_not_confused_by_where_they_end() -> None:
    assert column_digest(pa.array(["ab", "c"])) != column_digest(pa.array(["a", "bc"]))
    assert column_digest(pa.array([None, ""])) != column_digest(pa.array(["", None]))


def test_a_sealed_explanation_verifies_after_a_round_trip(explained: Explanation, incident: Incident) -> None:
    options: dict[str, str | int | float | None] = {"top": 5, "min_confidence": 1.0, "victim": None}
    sealed = seal(msgspec.structs.replace(explained, options=options), incident)
    back = from_json(to_json(sealed))
    assert [step.step for step in back.provenance.steps] == [
        "incident.json",
        "metrics",
        "edges",
        "model",
        "options",
        "explanation",
    ]
    assert verify(back.provenance, explanation_steps(back, incident)) == []
    edited = msgspec.structs.replace(back, title="Nothing to see here")
    assert verify(back.provenance, explanation_steps(edited, incident)) == [
        "step 6 (explanation): the content differs from what was recorded"
    ]
