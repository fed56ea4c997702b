"""Alert and recording rules, runbooks and Alertmanager wiring, generated from one description."""
