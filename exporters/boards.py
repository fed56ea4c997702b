"""The Grafana boards by stable uid, once: dashboards are built with them, alerts and reports link to them."""

from __future__ import annotations

from enum import StrEnum


class Board(StrEnum):
    """Uid of each board (at most 40 characters; Grafana keeps a board's links across versions by its uid)."""

    FLEET = "prioscope-fleet"
    SERVICE = "prioscope-service"
    POD = "prioscope-pod"
    FRAGMENTATION = "prioscope-fragmentation"
    SCHEDULER = "prioscope-scheduler"
    INCIDENT = "prioscope-incident"
    EXPORTERS = "prioscope-exporters"
