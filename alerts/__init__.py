"""Alert and recording rules, runbooks and Alertmanager wiring, generated from one description.

`alerts.build.rule_groups` gives the rules for `alerts.model.Options`; `alerts.build` renders them for Prometheus and
for the Prometheus operator, `alerts.routing` the Alertmanager configuration. ``alerts/generated`` holds what the
defaults give.
"""
