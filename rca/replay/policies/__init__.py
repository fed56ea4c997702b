"""Policies of the replay, behind the interface of `rca.replay.policies.base`.

`resolve` turns what a user writes into a policy: a name from `NAMES`, ``file.py:Class``, or a policy file.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rca.errors import InvalidInputError, NotFoundError
from rca.replay.policies import dynamic, learned, multi_objective, ordering, placement
from rca.replay.policies.base import Fcfs, Placement, Policy, View

#: Every policy by its name, with what it does; the functions make a fresh one.
NAMES: Final[Mapping[str, Callable[[], Policy]]] = {
    "fcfs": Fcfs,
    "sjf": ordering.Sjf,
    "priority": ordering.Priority,
    "preemptive-priority": ordering.PreemptivePriority,
    "static-wrr": ordering.StaticRoundRobin,
    "memory-reservation": ordering.MemoryReservation,
    "dynamic-priority": ordering.DynamicPriority,
    "semantic-dynamic": ordering.SemanticDynamic,
    "health-weight": dynamic.HealthWeight,
    "urgency-weight": dynamic.UrgencyWeight,
    "memory-pressure-weight": dynamic.MemoryPressureWeight,
    "edf": ordering.Edf,
    "edf-compensated": ordering.CompensatedEdf,
    "tchebycheff": multi_objective.Tchebycheff,
    "best-fit": placement.best_fit,
    "worst-fit": placement.worst_fit,
    "dot-product": placement.dot_product,
    "packing": placement.packing,
    "clustering": placement.clustering,
    "random": placement.random,
    "fgd": placement.fgd,
    "learned": learned.Learned,
    "learned-elastic": learned.elastic,
}


def resolve(text: str) -> Policy:
    """Return the policy that ``text`` names: one of `NAMES`, ``file.py:Class``, or a `TaskPriorityPolicy` file.

    Raises:
        NotFoundError: no such name, file or class.
        InvalidInputError: the file is no policy, or raises when it is loaded.
    """
    if text in NAMES:
        return NAMES[text]()
    file, separator, name = text.rpartition(":")
    if separator and file.endswith(".py"):
        return _from_python(Path(file), name)
    if text.endswith(".py"):
        raise InvalidInputError(f"policy {text} names no class", cure=f"write {text}:MyPolicy")
    from exporters.policy import load_policy, profiles
    from rca.replay.policies.declared import Declared

    if Path(text).exists() or text in profiles():
        return Declared(load_policy(text))
    close = difflib.get_close_matches(text, NAMES, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise NotFoundError(
        f"policy {text!r} does not exist",
        cure=f"{hint}Give one of {', '.join(NAMES)}, file.py:Class, or a TaskPriorityPolicy file",
    )


def _from_python(path: Path, name: str) -> Policy:
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", cure="give the path of the file that defines the policy")
    spec = importlib.util.spec_from_file_location(f"_policy_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidInputError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = getattr(module, name, None)
        if made is None:
            raise NotFoundError(f"{path} defines no {name}", cure="name a class that derives from Policy")
        policy = made()
    except (InvalidInputError, NotFoundError):
        raise
    except Exception as error:
        raise InvalidInputError(
            f"{path}: {type(error).__name__}: {error}", cure="the file must load by itself"
        ) from error
    if not isinstance(policy, Policy):
        raise InvalidInputError(f"{path}:{name} is no policy", cure="derive it from rca.replay.policies.base.Policy")
    return policy


__all__ = ["NAMES", "Placement", "Policy", "View", "resolve"]
