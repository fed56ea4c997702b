"""Benchmarks of the exporters: violation counts on a public trace, and the speed of the exposition."""
