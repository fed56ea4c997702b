"""Kubernetes: pods, nodes, PriorityClasses, preemptions, Kueue Workloads and Volcano PodGroups, by list and watch."""

from exporters.sources.kubernetes.client import connect
from exporters.sources.kubernetes.reflector import Timing
from exporters.sources.kubernetes.source import KubernetesSource, open_source

__all__ = ["KubernetesSource", "Timing", "connect", "open_source"]
