"""Simulated incidents with a known cause, path and counterfactual: for training, the demo, and as truth in tests."""
