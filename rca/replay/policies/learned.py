"""A learned policy (P8): an actor network turns the state of the cluster into weights of the workloads' features.

`rca.replay.policies.training` (torch) trains the network; here its exported weights are used with NumPy.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from rca.errors import InvalidInputError, NotFoundError
from rca.replay.model import Bools, Floats, Ints
from rca.replay.policies.base import Policy, View
from rca.replay.policies.ordering import urgency

#: Entries of the state and of a workload's features.
STATE_SIZE: Final = 8
FEATURES: Final = 6
#: Seconds between two decisions.
INTERVAL: Final = 30.0

#: Limits, step and target use of the elastic pool, in units of nodes (P8).
POOL_LEAST, POOL_MOST, POOL_STEP = 4, 64, 2
POOL_LOW, POOL_HIGH = 0.40, 0.70


def state_of(view: View) -> Floats:
    """What the actor sees, [STATE_SIZE], each about [0, 1]: use of GPU, CPU and memory, queue, urgency, recent past."""
    work = view.trace.workloads
    waiting, finished = view.waiting, view.finished
    wait = view.first_start[finished] - work.submit[finished]
    used = urgency(view, waiting)
    return np.array(
        [
            view.gpu_use,
            view.cpu_use,
            view.memory_use,
            np.log1p(len(waiting)) / 8.0,
            float((work.rank[waiting] == 0).mean()) if len(waiting) else 0.0,
            float(used.mean()) if len(waiting) else 0.0,
            float((wait > work.wait_slo[finished]).mean()) if len(finished) else 0.0,
            float(np.log1p(np.percentile(wait, 95))) / 12.0 if len(finished) else 0.0,
        ]
    )


def features_of(view: View, rows: Ints) -> Floats:
    """Features of waiting workloads, [len(rows), FEATURES], each about [0, 1]."""
    work = view.trace.workloads
    capacity = max(1, view.trace.cluster.capacity_milli)
    waited = np.maximum(0.0, view.now - work.submit[rows])
    return np.stack(
        [
            1.0 / (1.0 + work.rank[rows]),
            urgency(view, rows),
            np.log1p(waited) / 12.0,
            -np.log1p(np.minimum(work.estimate[rows], 1e9)) / 12.0,
            -np.minimum(1.0, 8.0 * work.demand_milli[rows] / capacity),
            work.business[rows] / 5.0,
        ],
        axis=1,
    )


class Actor:
    """A perceptron with one hidden layer: state to the mean of the weight vector."""

    def __init__(self, arrays: dict[str, npt.NDArray[np.float64]]) -> None:
        for name, shape in (("w1", (None, STATE_SIZE)), ("b1", (None,)), ("w2", (FEATURES, None)), ("b2", (FEATURES,))):
            found = arrays.get(name)
            if found is None or found.ndim != len(shape):
                raise InvalidInputError(
                    f"the policy's weights lack {name}", cure="export them with the training module"
                )
            if any(want is not None and want != have for want, have in zip(shape, found.shape, strict=True)):
                raise InvalidInputError(f"the policy's weights have {name} of shape {found.shape}, expected {shape}")
        self.arrays = arrays

    def __call__(self, state: Floats) -> Floats:
        hidden = np.tanh(self.arrays["w1"] @ state + self.arrays["b1"])
        weights: Floats = self.arrays["w2"] @ hidden + self.arrays["b2"]
        return weights


def load_actor(path: Path) -> Actor:
    """Read exported weights (``.npz``)."""
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", cure="train a policy first")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return Actor({name: archive[name].astype(np.float64) for name in archive.files})
    except (ValueError, OSError) as error:
        raise InvalidInputError(f"{path} holds no weights: {error}") from None


@cache
def shipped_actor() -> Actor:
    """Return the actor that comes with the package."""
    with resources.as_file(resources.files("rca.replay.policies") / "weights" / "actor.npz") as path:
        return load_actor(path)


class Learned(Policy):
    """The largest weighted sum of features first; the weights follow the cluster's state."""

    name = "learned"
    interval = INTERVAL

    def __init__(self, actor: Actor | None = None, *, elastic: bool = False) -> None:
        self.actor = actor or shipped_actor()
        self.pool = ElasticPool() if elastic else None

    def order(self, view: View, rows: Ints) -> Floats:
        """Return the negative weighted sums."""
        keys: Floats = -(features_of(view, rows) @ self.actor(state_of(view)))
        return keys

    def open_nodes(self, view: View) -> Bools | None:
        """Return the nodes of the elastic pool, all without one."""
        return None if self.pool is None else self.pool.step(view)


def elastic(actor: Actor | None = None) -> Learned:
    """The learned policy with an elastic pool of nodes."""
    policy = Learned(actor, elastic=True)
    policy.name = "learned-elastic"
    return policy


class ElasticPool:
    """How many nodes take new work: from 4 to 64 units, 2 more or less a step, for a use from 40 to 70 % (P8).

    A unit is a 64th of the cluster, at least one node. The pool also grows while anything waits in spite of a lower
    use, so that what fits only a closed node does not starve. Running work is never moved.
    """

    def __init__(self) -> None:
        self.units = POOL_LEAST

    def step(self, view: View) -> Bools:
        """Adjust the size once; returns which nodes are open, [N]."""
        nodes = len(view.trace.cluster)
        unit = -(-nodes // POOL_MOST)
        most = -(-nodes // unit)
        opened = np.arange(nodes) < self.units * unit
        capacity = float(view.trace.cluster.gpus[opened].sum()) * 1000.0
        use = 1.0 - float(view.free_gpu[opened].sum()) / capacity if capacity else 1.0
        if use > POOL_HIGH or len(view.waiting):
            self.units += POOL_STEP
        elif use < POOL_LOW:
            self.units -= POOL_STEP
        self.units = max(min(POOL_LEAST, most), min(self.units, most, POOL_MOST))
        result: Bools = np.arange(nodes) < self.units * unit
        return result
