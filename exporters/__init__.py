"""Prometheus exporters for priority violations and GPU fragmentation, from schedulers and GPUs.

`exporters.sources` read one system each and return the types of `exporters.model`; `exporters.detectors` and
`exporters.measures` are pure functions over those types; `exporters.collectors` turn their results into the metric
families that `exporters.catalog` names.
"""
