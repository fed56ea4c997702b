"""Grafana dashboards, one module per board, generated from the metric catalogue."""
