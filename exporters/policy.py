"""Policy files: what each priority level was promised, as YAML under version control (spec P1).

A file holds one ``TaskPriorityPolicy`` and any number of ``TaskClass`` documents. ``docs/policy.md`` describes every
field; ``exporters/policies`` holds three full profiles and the JSON schema. Every error names the file and the line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from exporters.documents import Document, read_documents
from exporters.errors import InvalidInputError, NotFoundError
from exporters.model import LAST_LEVEL, QosClass, Ranking, Workload

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

#: A policy is written by hand; anything larger is a mistake or an attack.
MAX_FILE_BYTES: Final = 1024 * 1024

#: Wait SLOs by rank when no policy file is given; the last level has none.
DEFAULT_WAIT_SLO: Final[Mapping[int, float]] = {0: 60.0, 1: 300.0, 2: 1800.0}
DEFAULT_DEADLINE_SECONDS: Final = 60.0

_KINDS: Final = ("TaskPriorityPolicy", "TaskClass")


class StartedFrom(StrEnum):
    """From when a start of less urgent work counts against the waiter: its submission, or when its SLO ran out."""

    SUBMISSION = "submission"
    BREACH = "breach"


class HeldCounts(StrEnum):
    """Which less urgent workloads that ran before the waiter came count: those that may be preempted, or any."""

    PREEMPTIBLE = "preemptible"
    ANY = "any"


class Grade(StrEnum):
    """Where a measured value stands against an objective."""

    HEALTHY = "healthy"
    WARN = "warn"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class Objective:
    """A target for one metric. Between ``healthy`` and ``degraded`` lies *warn*; the bounds themselves are kept."""

    metric: str
    at_most: bool
    healthy: float
    degraded: float
    reference: str = ""

    def grade(self, value: float) -> Grade:
        """Grade a measured ``value``."""
        sign = 1.0 if self.at_most else -1.0
        if sign * value <= sign * self.healthy:
            return Grade.HEALTHY
        return Grade.WARN if sign * value <= sign * self.degraded else Grade.DEGRADED


@dataclass(frozen=True, slots=True)
class Preemption:
    """Whether a waiter may preempt less urgent workloads, and within how many seconds it must have happened."""

    allowed: bool = True
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS


@dataclass(frozen=True, slots=True)
class ResourceGuarantee:
    """What a rule reserves: GPUs, and shares in [0, 1] of GPU memory and CPU."""

    gpus: float | None = None
    gpu_memory_ratio: float | None = None
    cpu_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. Every ``match`` that is given must match; patterns of queues, namespaces, classes may use ``*``."""

    name: str
    match_labels: Mapping[str, str] = field(default_factory=dict)
    match_queues: tuple[str, ...] = ()
    match_namespaces: tuple[str, ...] = ()
    match_priority_classes: tuple[str, ...] = ()
    match_levels: tuple[str, ...] = ()
    weight: float | None = None
    timeout_seconds: float | None = None
    wait_slo_seconds: float | None = None
    resource_guarantee: ResourceGuarantee | None = None
    preemption_allowed: bool | None = None
    preemption_deadline_seconds: float | None = None
    objectives: tuple[Objective, ...] = ()

    def matches(self, workload: Workload) -> bool:
        """Whether this rule is about ``workload``."""
        labels = workload.labels
        return (
            all(key in labels and fnmatchcase(labels[key], value) for key, value in self.match_labels.items())
            and _any(self.match_queues, workload.queue)
            and _any(self.match_namespaces, workload.namespace)
            and _any(self.match_priority_classes, workload.priority_class)
            and (not self.match_levels or workload.level in self.match_levels)
        )


def _any(patterns: tuple[str, ...], value: str) -> bool:
    return not patterns or any(fnmatchcase(value, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class TaskClass:
    """What a declared task class must look like in Kubernetes (V11). None: the file does not say."""

    name: str
    qos_class: QosClass
    retry_policy: str | None = None
    preemption_allowed: bool | None = None
    preemptible: bool | None = None
    gpu_affinity: str | None = None
    gpu_models: tuple[str, ...] = ()
    min_gpu_utilization: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """What was promised. For each value the first rule that matches *and* sets it decides; then level; then default."""

    name: str
    rules: tuple[Rule, ...] = ()
    task_classes: Mapping[str, TaskClass] = field(default_factory=dict)
    level_wait_slo: Mapping[int, float] = field(default_factory=dict)
    ranking: Ranking = field(default_factory=Ranking)
    preemption: Preemption = field(default_factory=Preemption)
    started_from: StartedFrom = StartedFrom.SUBMISSION
    held_counts: HeldCounts = HeldCounts.PREEMPTIBLE
    path: str = ""

    def wait_slo(self, workload: Workload) -> float | None:
        """Seconds that ``workload`` may wait; None: no promise. A rule's ``timeoutSeconds`` stands in for its SLO."""
        for rule in self.rules:
            if rule.wait_slo_seconds is None and rule.timeout_seconds is None:
                continue
            if rule.matches(workload):
                return rule.wait_slo_seconds if rule.wait_slo_seconds is not None else rule.timeout_seconds
        return None if workload.rank is None else self.level_wait_slo.get(min(workload.rank, LAST_LEVEL))

    def preemption_for(self, workload: Workload) -> Preemption:
        """Whether ``workload`` may preempt, and its deadline."""
        allowed: bool | None = None
        deadline: float | None = None
        for rule in self.rules:
            if rule.preemption_allowed is None and rule.preemption_deadline_seconds is None:
                continue
            if rule.matches(workload):
                allowed = rule.preemption_allowed if allowed is None else allowed
                deadline = rule.preemption_deadline_seconds if deadline is None else deadline
        return Preemption(
            self.preemption.allowed if allowed is None else allowed,
            self.preemption.deadline_seconds if deadline is None else deadline,
        )

    def rule_for(self, workload: Workload) -> Rule | None:
        """Return the first rule that matches ``workload``."""
        return next((rule for rule in self.rules if rule.matches(workload)), None)


def default_policy() -> Policy:
    """Return the policy that holds when no file is given: a wait SLO of 60 s, 5 min and 30 min for P0, P1 and P2."""
    return Policy(
        name="default",
        level_wait_slo=DEFAULT_WAIT_SLO,
        ranking=Ranking(
            classes={"system-node-critical": 0, "system-cluster-critical": 0},
            thresholds=(1_000_000, 100_000, 1_000),
        ),
    )


def uniform_policy(wait_slo_seconds: float, **changes: Any) -> Policy:
    """Return a policy with one wait SLO for every workload; ``changes`` are fields of `Policy`."""
    return Policy(
        name=f"wait-{wait_slo_seconds:g}s", rules=(Rule("all", wait_slo_seconds=wait_slo_seconds),), **changes
    )


def profiles() -> dict[str, Path]:
    """Return the shipped profiles by name."""
    folder = Path(str(resources.files("exporters") / "policies"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


@cache
def schema() -> dict[str, Any]:
    """Return the JSON schema of policy documents."""
    text = (resources.files("exporters") / "policies" / "schema.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def load_policy(path: Path | str) -> Policy:
    """Read and check a policy file, or a shipped profile by its name.

    Raises:
        NotFoundError: neither a file nor a profile of that name.
        InvalidInputError: not YAML, not according to the schema, or contradicting itself; names file and line.
    """
    file = Path(path)
    if not file.exists():
        shipped = profiles()
        if str(path) not in shipped:
            raise NotFoundError(f"policy {path} does not exist", cure=f"give a file, or one of {', '.join(shipped)}")
        file = shipped[str(path)]
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be read: {error.strerror}", cure="check its permissions") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInputError(f"{file} is larger than {MAX_FILE_BYTES:,} bytes", cure="is it a policy file?")
    return parse_policy(data, str(file))


def parse_policy(data: bytes | str, where: str = "policy") -> Policy:
    """Parse the content of a policy file; ``where`` names it in errors. Raises as `load_policy`."""
    documents = [document for document in read_documents(data, where) if document.data is not None]
    if not documents:
        raise InvalidInputError(f"{where} holds no document", cure="start from one of the shipped profiles")
    for document in documents:
        _validate(document, where)
    policies = [document for document in documents if document.data["kind"] == "TaskPriorityPolicy"]
    if len(policies) != 1:
        place = f"{where}:{policies[1].line()}" if policies else where
        raise InvalidInputError(
            f"{place} has {len(policies)} TaskPriorityPolicy documents; one is needed",
            cure="keep one policy a file; TaskClass documents may be many",
        )
    classes: dict[str, TaskClass] = {}
    for document in documents:
        if document.data["kind"] == "TaskClass":
            item = _task_class(document.data)
            if item.name in classes:
                line = document.line("metadata", "name")
                raise InvalidInputError(f"{where}:{line}: TaskClass {item.name!r} is defined twice", cure="rename one")
            classes[item.name] = item
    return _policy(policies[0], classes, where)


def _validate(document: Document, where: str) -> None:
    from jsonschema import Draft202012Validator

    data = document.data
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in _KINDS:
        line = document.line("kind")
        raise InvalidInputError(f"{where}:{line}: kind is {kind!r}", cure=f"use {' or '.join(_KINDS)}")
    validator = Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": schema()["$defs"]})
    problems = sorted((_explain(error, document) for error in validator.iter_errors(data)), key=lambda item: item[0])
    if problems:
        line, text = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidInputError(f"{where}:{line}: {text}{more}", cure="docs/policy.md describes every field")


def _explain(error: ValidationError, document: Document) -> tuple[int, str]:
    """Return the line and a short text for one schema error."""
    path = tuple(error.absolute_path)
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "document"
    rule = error.validator
    argument: Any = error.validator_value
    instance: Any = error.instance
    if rule == "additionalProperties" and isinstance(error.instance, dict):
        known = list(error.schema.get("properties", ())) if isinstance(error.schema, Mapping) else []
        extra = next(key for key in error.instance if key not in known)
        close = difflib.get_close_matches(extra, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return document.line(*path, extra), f"{name} has no field {extra!r}{hint}"
    if rule == "required":
        missing = next(key for key in argument if key not in instance)
        return document.line(*path), f"{name} lacks {missing!r}"
    if rule in ("enum", "const"):
        allowed = argument if rule == "enum" else [argument]
        return document.line(*path), f"{name} is {error.instance!r}; allowed: {', '.join(map(str, allowed))}"
    return document.line(*path), f"{name}: {error.message}"


def _task_class(data: Mapping[str, Any]) -> TaskClass:
    spec = data["spec"]
    affinity = spec.get("affinity", {})
    return TaskClass(
        name=data["metadata"]["name"],
        qos_class=QosClass(spec["qosClass"]),
        retry_policy=spec.get("retryPolicy"),
        preemption_allowed=spec.get("preemptionAllowed"),
        preemptible=spec.get("preemptible"),
        gpu_affinity=affinity.get("gpu"),
        gpu_models=tuple(affinity.get("gpuModels", ())),
        min_gpu_utilization=spec.get("minGpuUtilization"),
    )


def _policy(document: Document, classes: Mapping[str, TaskClass], where: str) -> Policy:
    spec = document.data["spec"]
    rules = []
    names: set[str] = set()
    for index, data in enumerate(spec["rules"]):
        if data["name"] in names:
            line = document.line("spec", "rules", index, "name")
            raise InvalidInputError(f"{where}:{line}: rule {data['name']!r} is defined twice", cure="rename one")
        names.add(data["name"])
        rules.append(_rule(data, document, index, where))
    wait_slo, ranking = _levels(spec.get("levels", []), document, where)
    inversion = spec.get("inversion", {})
    preemption = spec.get("preemption", {})
    return Policy(
        name=document.data["metadata"]["name"],
        rules=tuple(rules),
        task_classes=classes,
        level_wait_slo=wait_slo,
        ranking=ranking,
        preemption=Preemption(
            preemption.get("allowed", True), preemption.get("deadlineSeconds", DEFAULT_DEADLINE_SECONDS)
        ),
        started_from=StartedFrom(inversion.get("startedFrom", StartedFrom.SUBMISSION)),
        held_counts=HeldCounts(inversion.get("heldCounts", HeldCounts.PREEMPTIBLE)),
        path=where,
    )


def _rule(data: Mapping[str, Any], document: Document, index: int, where: str) -> Rule:
    guarantee = data.get("resourceGuarantee")
    preemption = data.get("preemption", {})
    objectives = []
    for number, item in enumerate(data.get("objectives", ())):
        objective = Objective(
            metric=item["metric"],
            at_most=item["direction"] == "atMost",
            healthy=item["healthy"],
            degraded=item["degraded"],
            reference=item.get("reference", ""),
        )
        if objective.grade(objective.degraded) is Grade.HEALTHY and objective.healthy != objective.degraded:
            line = document.line("spec", "rules", index, "objectives", number, "degraded")
            raise InvalidInputError(
                f"{where}:{line}: degraded {objective.degraded:g} is better than healthy {objective.healthy:g} "
                f"({item['direction']})",
                cure="swap the two, or change the direction",
            )
        objectives.append(objective)
    return Rule(
        name=data["name"],
        match_labels=data.get("matchLabels", {}),
        match_queues=tuple(data.get("matchQueues", ())),
        match_namespaces=tuple(data.get("matchNamespaces", ())),
        match_priority_classes=tuple(data.get("matchPriorityClasses", ())),
        match_levels=tuple(data.get("matchLevels", ())),
        weight=data.get("weight"),
        timeout_seconds=data.get("timeoutSeconds"),
        wait_slo_seconds=data.get("waitSloSeconds"),
        resource_guarantee=None
        if guarantee is None
        else ResourceGuarantee(guarantee.get("gpus"), guarantee.get("gpuMemoryRatio"), guarantee.get("cpuRatio")),
        preemption_allowed=preemption.get("allowed"),
        preemption_deadline_seconds=preemption.get("deadlineSeconds"),
        objectives=tuple(objectives),
    )


def _levels(levels: list[Mapping[str, Any]], document: Document, where: str) -> tuple[Mapping[int, float], Ranking]:
    """Return the wait SLO by rank and the ranking; without levels, the defaults."""
    if not levels:
        default = default_policy()
        return default.level_wait_slo, default.ranking
    wait_slo: dict[int, float] = {}
    classes: dict[str, int] = {}
    bounds: dict[int, tuple[float, int]] = {}
    seen: set[int] = set()
    for index, level in enumerate(levels):
        rank = int(level["level"][1:])
        line = document.line("spec", "levels", index)
        if rank in seen:
            raise InvalidInputError(f"{where}:{line}: level {level['level']} is given twice", cure="merge the two")
        seen.add(rank)
        if "waitSloSeconds" in level:
            wait_slo[rank] = level["waitSloSeconds"]
        for name in level.get("priorityClasses", ()):
            if name in classes:
                raise InvalidInputError(f"{where}:{line}: class {name!r} has two levels", cure="keep one of them")
            classes[name] = rank
        if "minPriority" in level:
            bounds[rank] = (level["minPriority"], document.line("spec", "levels", index, "minPriority"))
    thresholds: list[float] = []
    for rank in sorted(bounds):
        bound, line = bounds[rank]
        if rank != len(thresholds):
            raise InvalidInputError(
                f"{where}:{line}: P{rank} has a minPriority but P{len(thresholds)} has none",
                cure="give minPriority to every level from P0 down to the last that uses it",
            )
        if thresholds and bound >= thresholds[-1]:
            raise InvalidInputError(
                f"{where}:{line}: minPriority {bound:g} of P{rank} is not below that of P{rank - 1}",
                cure="a larger number is more urgent: P0 has the largest",
            )
        thresholds.append(bound)
    return wait_slo, Ranking(classes=classes, thresholds=tuple(thresholds))
