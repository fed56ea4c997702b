"""The training recipe: everything that decides the weights. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rca.features import VERSION as FEATURES_VERSION


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights. ``members``: networks whose log-probabilities are averaged."""

    incidents: int = 18_000
    validation: int = 1_000
    calibration: int = 1_500
    test: int = 600
    members: int = 2
    epochs: int = 10
    patience: int = 4
    batch_nodes: int = 2_500
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    dropout: float = 0.2
    edge_weight: float = 0.5
    mechanism_weight: float = 0.25
    hidden: int = 64
    layers: int = 3
    seed: int = 0
    features_version: int = field(default=FEATURES_VERSION)
