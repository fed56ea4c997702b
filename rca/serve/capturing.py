"""Where the server gets incidents from: a Prometheus-compatible API, or a folder of bundles for a rehearsal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from rca.errors import InvalidInputError, NotFoundError
from rca.telemetry.request import CaptureRequest

if TYPE_CHECKING:
    from rca.incident import Incident, Window
    from rca.store.records import StoredIncident
    from rca.telemetry.prometheus import CaptureConfig
    from rca.telemetry.request import Capture


@dataclass(frozen=True)
class Rehearsal:
    """Answers each alert with a bundle of ``folder``: the one that annotation ``rca_bundle`` names, else one that
    depends on the fingerprint only. So the chain from Alertmanager to the report can be tried before there is
    telemetry.
    """

    folder: Path


#: What makes a capture; it travels to the worker processes.
Origin: TypeAlias = "CaptureConfig | Rehearsal"


def capture_of(origin: Origin) -> Capture:
    """Return the capture of ``origin``."""
    if isinstance(origin, Rehearsal):
        return _Replayed(origin.folder)
    from rca.telemetry.prometheus import capture_from

    return capture_from(origin)


class _Replayed:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, request: CaptureRequest) -> Incident:
        from rca.incident import read

        names = sorted(path.name for path in self._folder.iterdir() if path.suffix == ".zip")
        if not names:
            raise NotFoundError(f"there is no bundle in {self._folder}", cure="put .zip bundles there")
        name = request.annotations.get("rca_bundle")
        if name is None:
            name = names[int(hashlib.sha256(request.fingerprint.encode()).hexdigest(), 16) % len(names)]
        elif name not in names:
            raise InvalidInputError(
                f"annotation rca_bundle names {name!r}, which is not in {self._folder}", cure="name a bundle there"
            )
        found = read(self._folder / name)
        return found.replace(
            header=msgspec.structs.replace(
                found.header, id=request.id, labels={**found.header.labels, **request.labels}
            )
        )


def request_of(record: StoredIncident, busy: tuple[Window, ...] = ()) -> CaptureRequest:
    """Return what to ask for to capture ``record``."""
    ended = record.ended_at
    return CaptureRequest(
        id=record.id,
        labels=record.labels,
        annotations=record.annotations,
        onset=record.starts_at,
        end=ended if ended is not None and ended > record.starts_at else None,
        busy=busy,
        fingerprint=record.fingerprint,
        generator_url=record.generator_url,
    )


__all__ = ["Origin", "Rehearsal", "capture_of", "request_of"]
