"""An incident as one file: its bundle, with the store's record and all explanations beside it.

The file is an ordinary bundle for everything that reads bundles, which ignores the two members that are added.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from rca.errors import InvalidInputError
from rca.incident import read
from rca.store.records import ExplanationInfo, State, StoredIncident

if TYPE_CHECKING:
    from rca.store.database import Store

_RECORD: Final = "record.json"
_EXPLANATIONS: Final = "explanations.json"
_MOST: Final = 256 * 1024 * 1024
#: A fixed time, so that equal incidents give equal files.
_STAMP: Final = (1980, 1, 1, 0, 0, 0)


class _Explanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    info: ExplanationInfo
    explanation: bytes


@dataclass(frozen=True)
class Exported:
    """What a file holds."""

    record: StoredIncident
    bundle: bytes
    explanations: tuple[tuple[ExplanationInfo, bytes], ...]


def export_incident(store: Store, record: StoredIncident) -> bytes:
    """Return the file of an incident.

    Raises:
        NotFoundError: it has no bundle (yet).
    """
    buffer = io.BytesIO(store.bundle(record.id))
    found = [_Explanation(info, store.explanation(record.id, info.revision)) for info in store.explanations(record.id)]
    kept = msgspec.structs.replace(record, lease_owner="", lease_until=None)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, value in ((_RECORD, kept), (_EXPLANATIONS, found)):
            archive.writestr(zipfile.ZipInfo(name, _STAMP), msgspec.json.encode(value), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def read_export(path: Path) -> Exported:
    """Read and check a file of `export_incident`, or any bundle.

    Raises:
        NotFoundError: nothing is there.
        InvalidInputError: it is damaged, unsafe, or its parts do not belong together.
    """
    incident = read(path)
    header = incident.header
    # Written anew: what is stored holds the bundle alone, whatever else was in the file.
    with tempfile.TemporaryDirectory(prefix="prioscope-") as folder:
        bundle = incident.write(Path(folder) / "incident.zip").read_bytes()
    record, found = _beside(path)
    if record is None:
        now = datetime.now(UTC)
        record = StoredIncident(
            id=header.id,
            state=State.CAPTURED,
            fingerprint=own_fingerprint(header.id),
            starts_at=header.onset or header.window.start,
            ended_at=header.window.end,
            received_at=now,
            updated_at=now,
            title=header.title or header.id,
            alertname=header.labels.get("alertname", ""),
            labels=header.labels,
            victim=header.victim.node,
            victim_metric=header.victim.metric,
        )
    if record.id != header.id:
        raise InvalidInputError(
            f"{path} holds the record of {record.id!r} beside the bundle of {header.id!r}", cure="export it again"
        )
    # Nobody works on it where it arrives, and it has a bundle.
    state = record.state if record.final else State.CAPTURED
    record = msgspec.structs.replace(record, state=state, bundle_bytes=len(bundle))
    return Exported(record, bundle, found)


def _beside(path: Path) -> tuple[StoredIncident | None, tuple[tuple[ExplanationInfo, bytes], ...]]:
    if path.is_dir():
        return None, ()
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            parts = {}
            for name in (_RECORD, _EXPLANATIONS):
                if name in names:
                    if archive.getinfo(name).file_size > _MOST:
                        raise InvalidInputError(f"{path}: {name} is too large", cure="export it again")
                    parts[name] = archive.read(name)
        record = msgspec.json.decode(parts[_RECORD], type=StoredIncident) if _RECORD in parts else None
        found = msgspec.json.decode(parts.get(_EXPLANATIONS, b"[]"), type=list[_Explanation])
    except (zipfile.BadZipFile, msgspec.DecodeError, ValueError) as error:
        raise InvalidInputError(f"{path}: {error}", cure="export it again") from None
    pairs = []
    for item in found:
        data = item.explanation
        if hashlib.sha256(data).hexdigest() != item.info.sha256:
            raise InvalidInputError(
                f"{path}: explanation {item.info.revision} was changed since it was stored", cure="export it again"
            )
        pairs.append((item.info, data))
    return record, tuple(pairs)


def own_fingerprint(identifier: str) -> str:
    """Return a fingerprint for an incident that no alert was about."""
    return hashlib.sha256(identifier.encode()).hexdigest()[:16]


__all__ = ["Exported", "export_incident", "own_fingerprint", "read_export"]
