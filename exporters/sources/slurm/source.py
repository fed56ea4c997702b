"""The Slurm source: turns what a reader gives into snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from exporters.errors import SourceUnreachableError
from exporters.model import Ranking, Snapshot
from exporters.sources.slurm.convert import Seen, snapshot_of
from exporters.sources.slurm.reader import Reader


class SlurmSource:
    """Reads jobs, nodes and partitions of one cluster, once per poll.

    Args:
        reader: How to read it: `RestReader` or `CommandReader`.
        cluster: Name of the cluster in the snapshots; empty: as Slurm calls it, else ``slurm``.
        ranking: How priorities become ranks (from a policy file). None: by the configured priorities of partitions and
            QOS, see `exporters.sources.slurm.convert.Classes`.
        clock: Unix seconds.
    """

    name = "slurm"

    def __init__(
        self,
        reader: Reader,
        *,
        cluster: str = "",
        ranking: Ranking | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reader = reader
        self._cluster = cluster
        self._ranking = ranking
        self._clock = clock
        self._seen = Seen()
        self._closed = False

    def poll(self) -> Snapshot:
        """Return the cluster as it is now.

        Raises:
            SourceUnreachableError: neither jobs nor nodes can be read, or the source was closed.
        """
        if self._closed:
            raise SourceUnreachableError("the Slurm source is closed", cure="make a new one")
        # Before the reading: a wait must not look longer than it was when it was read.
        now = self._clock()
        dump = self._reader.read()
        cluster = self._cluster or dump.cluster or "slurm"
        snapshot, self._seen = snapshot_of(dump, now, cluster, self._ranking, self._seen)
        return snapshot

    def close(self) -> None:
        """Close the reader."""
        self._closed = True
        self._reader.close()

    def __enter__(self) -> SlurmSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_slurm(
    *,
    rest: str = "",
    user: str = "",
    token: str = "",
    token_file: Path | None = None,
    api_version: int | None = None,
    preempt_type: str = "",
    commands: Path | None = None,
    conf: Path | None = None,
    timeout: float = 30.0,
    cluster: str = "",
    ranking: Ranking | None = None,
) -> SlurmSource:
    """Return a source that reads slurmrestd at ``rest``, or with Slurm's commands when that is empty.

    ``token`` defaults to ``SLURM_JWT``. See `RestReader` and `CommandReader` for the others.

    Raises:
        InvalidInputError: an option cannot be used.
    """
    if rest:
        from exporters.sources.slurm.rest import RestReader, environment_token

        reader: Reader = RestReader(
            rest,
            user=user,
            token=token or environment_token(),
            token_file=token_file,
            version=api_version,
            timeout=timeout,
            preempt_type=preempt_type,
        )
    else:
        from exporters.sources.slurm.commands import CommandReader

        reader = CommandReader(folder=commands, conf=conf, timeout=timeout)
    return SlurmSource(reader, cluster=cluster, ranking=ranking)
