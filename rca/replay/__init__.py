"""Discrete-event replay of a recorded schedule with one thing changed (R5, P2 to P8); see docs/replay.md."""
