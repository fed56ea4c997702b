"""Live capture from a Prometheus-compatible HTTP API: an alert in, an incident out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rca.telemetry.prometheus.config import CaptureConfig, LabelNames, TracesKind

if TYPE_CHECKING:
    from rca.telemetry.request import Capture


def capture_from(config: CaptureConfig) -> Capture:
    """Return a capture that asks what ``config`` names; see `rca.telemetry.prometheus.capture.capture_from`."""
    # The settings alone are wanted by commands that must start fast.
    from rca.telemetry.prometheus import capture

    return capture.capture_from(config)


__all__ = ["CaptureConfig", "LabelNames", "TracesKind", "capture_from"]
