"""Live capture from a Prometheus-compatible HTTP API: an alert in, an incident out.

``capture_from(config: CaptureConfig) -> Capture`` (see `rca.telemetry.request`) is the way in.
"""

from rca.telemetry.prometheus.config import CaptureConfig, LabelNames, TracesKind

__all__ = ["CaptureConfig", "LabelNames", "TracesKind"]
