"""Simulated incidents with a known cause, path and counterfactual: for training, for the demo, and as truth in tests."""
