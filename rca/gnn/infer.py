"""Run the shipped network with onnxruntime; torch is never imported here."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from rca import features
from rca.counterfactual.mechanism import IntervalScale
from rca.errors import InvalidInputError, NotFoundError
from rca.features import Features
from rca.graph import Floats

#: Another set of weights, e.g. from `rca train --out DIR`.
WEIGHTS_VARIABLE = "PRIOSCOPE_WEIGHTS"
#: A network can saturate at 1; its calibration, on some thousand incidents, cannot tell less than this from 0.
DOUBT: Final = 1e-3
_SHIPPED = Path(__file__).parent / "weights"


class Card(msgspec.Struct, frozen=True):
    """What must be known to use the weights; the whole model card is in the same file."""

    name: str
    version: str
    sha256: str
    features_version: int
    mechanisms: tuple[str, ...]
    #: Calibration of the counterfactual intervals, by kind of victim metric ("latency", "errors").
    intervals: dict[str, IntervalScale] = {}


@dataclass(frozen=True)
class Prediction:
    """Calibrated probabilities.

    Attributes:
        cause: of each node being the root cause, [N]. ``nothing``: that none of them is.
        mechanism: of each kind of fault, were the node the cause, [N, K].
        crossed: that the anomaly crossed each edge, [2E], effect first and load second. ``attention``: [2E].
    """

    cause: Floats
    nothing: float
    mechanism: Floats
    crossed: Floats
    attention: Floats

    def bounded(self) -> Prediction:
        """The same without certainty: `DOUBT` of what a cause has goes to "none of them"."""
        return replace(
            self,
            cause=self.cause * (1.0 - DOUBT),
            nothing=self.nothing * (1.0 - DOUBT) + DOUBT,
            mechanism=np.minimum(self.mechanism, 1.0 - DOUBT),
            crossed=np.minimum(self.crossed, 1.0 - DOUBT),
        )


@dataclass(frozen=True)
class Model:
    """Loaded weights."""

    card: Card
    session: Any

    def predict(self, inputs: Features, victim: int) -> Prediction:
        """Run the network on one incident."""
        cause, nothing, mechanism, crossed, attention = self.session.run(
            None,
            {
                "node": inputs.node,
                "edge": inputs.edge,
                "edge_index": np.ascontiguousarray(inputs.edge_index),
                "victim": np.array([victim], dtype=np.int64),
            },
        )
        return Prediction(
            cause=cause.astype(np.float64),
            nothing=float(nothing[0]),
            mechanism=mechanism.astype(np.float64),
            crossed=crossed.astype(np.float64),
            attention=attention.astype(np.float64),
        )


def weights_directory() -> Path:
    """Where the weights are: `PRIOSCOPE_WEIGHTS`, or those in the package."""
    return Path(os.environ.get(WEIGHTS_VARIABLE) or _SHIPPED)


def load(directory: Path | None = None) -> Model:
    """Load weights and their card.

    Raises:
        NotFoundError: there are none.
        InvalidInputError: they are damaged, or were trained on another feature layout.
    """
    return _load(directory or weights_directory())


@lru_cache(maxsize=4)
def _load(directory: Path) -> Model:
    weights, card_file = directory / "prioscope.onnx", directory / "model_card.json"
    if not weights.is_file() or not card_file.is_file():
        raise NotFoundError(
            f"no weights in {directory}",
            cure=f"reinstall prioscope, run `rca train`, or unset {WEIGHTS_VARIABLE}",
        )
    try:
        card = msgspec.json.decode(card_file.read_bytes(), type=Card)
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"{card_file}: {error}", cure="train again, or reinstall prioscope") from None
    content = weights.read_bytes()
    if hashlib.sha256(content).hexdigest() != card.sha256:
        raise InvalidInputError(
            f"{weights} is not the file that its model card describes", cure="train again, or reinstall prioscope"
        )
    if card.features_version != features.VERSION:
        raise InvalidInputError(
            f"{weights} was trained on feature layout {card.features_version}; this prioscope has {features.VERSION}",
            cure="train again with `rca train`, or unset " + WEIGHTS_VARIABLE,
        )
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # One thread: the graphs are small, and sums must come out in the same order each time.
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return Model(card, onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]))
