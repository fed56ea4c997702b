"""Measures: pure functions from a snapshot to numbers (spec M1, M2, M5, M8 and the queues behind V2)."""
