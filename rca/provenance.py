"""The local hash chain that ties an explanation to its inputs (R7, grade C).

Each step hashes one input by what it *means*, not by how it happens to be stored: a bundle read from a directory, a
zip or another Parquet writer gives the same digests. The chain is::

    content = sha256(content bytes)
    digest  = sha256(previous digest + content)        # raw 32-byte digests; the first predecessor is 32 zero bytes

Grade C shows that nothing was changed by accident or by one who did not recompute the chain. It proves neither who made
the explanation (grade A, a hardware signature) nor when (grade B, an external time stamp).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rca.columns import floats, integers, valid
from rca.explanation import Explanation, Provenance, ProvenanceStep
from rca.incident import Incident

GRADE: Final = "C"
_GENESIS: Final = bytes(32)


def chain(steps: Sequence[tuple[str, bytes]]) -> Provenance:
    """Build the hash chain over ``(name, content)`` steps, in their order."""
    previous = _GENESIS
    links = []
    for name, content in steps:
        hashed = hashlib.sha256(content).digest()
        previous = hashlib.sha256(previous + hashed).digest()
        links.append(ProvenanceStep(step=name, content_sha256=hashed.hex(), digest=previous.hex()))
    return Provenance(grade=GRADE, steps=tuple(links))


def verify(provenance: Provenance, steps: Sequence[tuple[str, bytes]]) -> list[str]:
    """Recompute the chain over ``steps`` and return every disagreement with ``provenance``; empty when it holds."""
    if provenance.grade != GRADE:
        return [f"grade {provenance.grade!r} cannot be checked here; a local hash chain is grade {GRADE}"]
    problems = []
    expected = chain(steps).steps
    recorded = provenance.steps
    for number, (want, have) in enumerate(zip(expected, recorded, strict=False), start=1):
        if want.step != have.step:
            problems.append(f"step {number} is {have.step!r}, not {want.step!r}")
        elif want.content_sha256 != have.content_sha256:
            problems.append(f"step {number} ({want.step}): the content differs from what was recorded")
    problems.extend(f"step {want.step!r} is not recorded" for want in expected[len(recorded) :])
    problems.extend(f"step {have.step!r} is recorded but unknown" for have in recorded[len(expected) :])
    # The links are checked against the recorded contents, so that one changed content is not reported for every step.
    previous = _GENESIS
    for number, have in enumerate(recorded, start=1):
        try:
            previous = hashlib.sha256(previous + bytes.fromhex(have.content_sha256)).digest()
        except ValueError:
            problems.append(f"step {number} ({have.step}): {have.content_sha256!r} is not a SHA-256 digest")
            break
        if previous.hex() != have.digest:
            problems.append(f"step {number} ({have.step}): the chain is broken here")
            break
    return problems


def incident_steps(incident: Incident) -> list[tuple[str, bytes]]:
    """Return one step for the header and one for each table that has rows.

    The content of a table step is a small JSON document with the row count and a digest of each column's values; row
    order counts, storage does not. The truth is no input of an explanation, so it is not part of the chain.
    """
    steps = [("incident.json", msgspec.json.encode(incident.header, order="deterministic"))]
    for name, table in incident.tables.items():
        if table.num_rows:
            columns = {column: column_digest(table.column(column)) for column in table.column_names}
            content = {"rows": table.num_rows, "columns": columns}
            steps.append((name, msgspec.json.encode(content, order="deterministic")))
    return steps


def explanation_steps(explanation: Explanation, incident: Incident) -> list[tuple[str, bytes]]:
    """Return every step behind ``explanation``: the incident, the model, the options and the explanation itself."""
    body = msgspec.structs.replace(explanation, provenance=Provenance(grade=GRADE, steps=()))
    return [
        *incident_steps(incident),
        ("model", explanation.model.sha256.encode()),
        ("options", msgspec.json.encode(explanation.options, order="deterministic")),
        ("explanation", msgspec.json.encode(body, order="deterministic")),
    ]


def seal(explanation: Explanation, incident: Incident) -> Explanation:
    """Return ``explanation`` with the provenance that traces it to ``incident``, its model and its options."""
    return msgspec.structs.replace(explanation, provenance=chain(explanation_steps(explanation, incident)))


def column_digest(column: pa.ChunkedArray | pa.Array) -> str:
    """Return the SHA-256 of a column's logical values: nulls count; chunking, offsets and padding do not."""
    hasher = hashlib.sha256()
    hasher.update(_type_name(column.type).encode() + b"\0")
    for block in _blocks(column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])):
        hasher.update(block)
    return hasher.hexdigest()


def _type_name(kind: pa.DataType) -> str:
    """Name of a type without the names of its fields, which change when Parquet stores it."""
    if pa.types.is_map(kind):
        return f"map<{_type_name(kind.key_type)}, {_type_name(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"list<{_type_name(kind.value_type)}>"
    return str(kind)


def _blocks(column: pa.ChunkedArray) -> Iterator[Any]:
    """Yield the validity, the lengths and the values, each over all chunks, as buffers."""
    kind = column.type
    known = valid(column)
    yield known.astype(np.uint8).data
    if pa.types.is_string(kind):
        yield integers(pc.binary_length(column), missing=0).data
        yield from _text(column.drop_null())
    elif pa.types.is_map(kind):
        entry = pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
        yield from _nested(column.cast(pa.list_(entry)))
    elif pa.types.is_list(kind):
        yield from _nested(column)
    elif pa.types.is_floating(kind):
        yield np.where(known, floats(column), 0.0).data
    else:
        yield integers(column, missing=0).data


def _nested(lists: pa.ChunkedArray) -> Iterator[Any]:
    yield integers(pc.list_value_length(lists), missing=0).data
    items = pc.list_flatten(lists)
    fields = range(items.type.num_fields) if pa.types.is_struct(items.type) else [None]
    for field in fields:
        yield column_digest(items if field is None else pc.struct_field(items, field)).encode()


def _text(column: pa.ChunkedArray) -> Iterator[Any]:
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        if len(chunk) and data is not None:
            bounds = np.frombuffer(offsets, dtype=np.int32)
            start, end = int(bounds[chunk.offset]), int(bounds[chunk.offset + len(chunk)])
            yield data.slice(start, end - start)
