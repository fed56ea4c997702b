"""Benchmarks: root-cause accuracy on public incidents, start-up time, and held-out simulated incidents.

Run from a checkout: ``python -m benchmarks --help``. Nothing here is part of the installed package.
"""
