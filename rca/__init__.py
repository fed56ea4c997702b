"""Root-cause analysis over call-chain graphs: capture an incident once, explain it anywhere."""

__version__ = "0.1.0"
