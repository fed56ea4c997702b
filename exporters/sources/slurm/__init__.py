"""Slurm: jobs, nodes and partitions through slurmrestd or Slurm's own commands, all versions from 21.08 to 25.11."""

from exporters.sources.slurm.source import SlurmSource, open_slurm

__all__ = ["SlurmSource", "open_slurm"]
