"""Grafana boards, generated with grafanalib: one module a board, `dashboards.build.BOARDS` lists them."""
