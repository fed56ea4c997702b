"""Benchmarks of the replay: FGD's published table, published orderings, speed."""
