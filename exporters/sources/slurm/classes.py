"""How jobs rank and who may preempt whom, from the configuration of partitions and QOS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from exporters.model import Ranking, dense_ranks
from exporters.sources.slurm.records import Config, Job, PartitionRecord, QosRecord


@dataclass(frozen=True)
class Classes:
    """How jobs rank, and who may preempt whom, from the configuration of partitions and QOS.

    With a ``ranking`` from a policy file, that decides: names of QOS and partitions first, then the job's number.
    Otherwise the configured part of Slurm's order does: the partition's priority tier, then what partition and QOS add
    to a job's priority. Age, size and fair share move and are left out, so that a rank is not lost by waiting. If all
    partitions and QOS are equal there is only one class, and ranks are not known.
    """

    partitions: Mapping[str, PartitionRecord] = field(default_factory=dict)
    qos: Mapping[str, QosRecord] = field(default_factory=dict)
    config: Config = field(default_factory=Config)
    ranking: Ranking | None = None

    def rank(self, job: Job) -> int | None:
        """Return the rank of a job; None: not known."""
        names = [name for name in (job.qos, *self._ordered(job)) if name]
        if self.ranking is not None:
            return self.ranking.rank(job.priority, *names)
        ranks = self._ranks
        found = [ranks[key] for name in job.partitions if (key := self._key(name, job.qos)) in ranks]
        return min(found) if found and len(ranks) > 1 else None

    def queue(self, job: Job) -> str:
        """Return the partition that a job waits in; of several, the one where Slurm tries first."""
        return next(iter(self._ordered(job)), "")

    def _ordered(self, job: Job) -> list[str]:
        return sorted(job.partitions, key=lambda name: -self.partitions[name].tier if name in self.partitions else 0)

    @property
    def single(self) -> bool:
        """Whether all jobs are of one class, as far as the configuration says."""
        return self.ranking is None and len(self._ranks) <= 1

    @cached_property
    def _ranks(self) -> dict[float, int]:
        qos = list(self.qos) or [""]
        return dense_ranks(self._key(partition, name) for partition in self.partitions for name in qos)

    def _key(self, partition: str, qos: str) -> float:
        record = self.partitions.get(partition)
        if record is None:
            return float("nan")
        # The tier decides alone; the configured share of the priority is below 1, in steps that floats keep apart.
        return record.tier + round(self._share(record, self.qos.get(qos)), 9)

    def _share(self, partition: PartitionRecord, qos: QosRecord | None) -> float:
        weights = (self.config.weight_partition, self.config.weight_qos)
        by_partition, by_qos = (1.0, 1.0) if weights == (None, None) else (weights[0] or 0.0, weights[1] or 0.0)
        if by_partition + by_qos == 0:
            return 0.0
        most_factor = max((item.job_factor for item in self.partitions.values()), default=0.0) or 1.0
        most_priority = max((item.priority for item in self.qos.values()), default=0.0) or 1.0
        score = by_partition * partition.job_factor / most_factor
        score += by_qos * (qos.priority if qos else 0.0) / most_priority
        return 0.999 * score / (by_partition + by_qos)

    # --- preemption

    def preemptible(self, job: Job) -> bool | None:
        """Whether Slurm may stop the job for a more urgent one; None: not known."""
        kind = self.config.preempt_type
        if kind == "none" or (kind and self.config.preempt_mode == "OFF" and kind == "qos"):
            return False
        if kind == "qos":
            return self._by_qos(job)
        if kind == "partition_prio":
            return self._by_partition(job)
        # slurmrestd does not tell the type. What both types rule out is ruled out.
        answers = (self._by_qos(job), self._by_partition(job))
        return False if answers == (False, False) else None

    def may_preempt(self, job: Job) -> bool | None:
        """Whether the job may make Slurm stop others; None: not known."""
        kind = self.config.preempt_type
        if kind == "none":
            return False
        if kind == "qos":
            record = self.qos.get(job.qos)
            return None if record is None else bool(record.preempts)
        if kind == "partition_prio":
            tiers = [self.partitions[name].tier for name in job.partitions if name in self.partitions]
            return bool(tiers) and any(
                _stops(item.preempt_mode) and item.tier < max(tiers) for item in self.partitions.values()
            )
        return None

    def _by_qos(self, job: Job) -> bool | None:
        if job.qos and job.qos not in self.qos:
            return None
        record = self.qos.get(job.qos)
        if record is not None and record.preempt_mode == "OFF":
            return False
        return any(job.qos in other.preempts for other in self.qos.values())

    def _by_partition(self, job: Job) -> bool | None:
        record = self.partitions.get(self.queue(job))
        if record is None:
            return None
        if not any(other.tier > record.tier for other in self.partitions.values()):
            return False
        return _stops(record.preempt_mode)


def _stops(mode: str) -> bool | None:
    """Whether a PreemptMode stops a job; None when it is not told."""
    return None if not mode else not set(mode.split(",")) <= {"OFF", "DISABLED", "WITHIN", "GANG"}
