"""What `rca explain` says, as typed data: every report format renders this and nothing else.

The split follows docs/architecture.md, decision 7: what was observed, what is inferred and how sure we are, what was
ruled out, and what was not checked and why.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from rca.incident import Source, Victim, Window

#: Version of the JSON output. Raised when a field is removed or changes meaning; new fields do not raise it.
SCHEMA_VERSION = 1


class Verdict(StrEnum):
    """Whether a cause can be named."""

    EXPLAINED = "explained"
    INCONCLUSIVE = "inconclusive"


class Impact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happened to the victim. Values have the victim metric's unit."""

    victim: Victim
    kind: str
    unit: str
    window: Window
    baseline_window: Window
    baseline: float | None
    incident: float | None
    peak: float | None
    change_ratio: float | None
    onset: datetime | None
    baseline_samples: int
    incident_samples: int


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A candidate root cause with its calibrated probability (`confidence`, in [0, 1])."""

    rank: int
    node: str
    kind: str
    mechanism: str
    mechanism_probability: float
    confidence: float
    summary: str
    onset_offset_seconds: float | None = None


class Hop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of the propagation path: the anomaly went from `source` to `target`."""

    source: str
    target: str
    relation: str
    direction: str
    probability: float


class Path(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most probable propagation path from the first cause to the victim."""

    hops: tuple[Hop, ...]
    probability: float


class NotChecked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What could not be examined, and why."""

    what: str
    why: str


class AttributionEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the victim would have seen with `nodes` back to normal.

    `contribution` is (incident value - value under intervention) / incident value (R4); `low` and `high` bound it with
    95 % confidence. `shapley` is the share of the joint contribution, for single causes. `extrapolates` says that the
    intervention leaves the range seen in the baseline.
    """

    nodes: tuple[str, ...]
    counterfactual: float
    contribution: float
    low: float
    high: float
    shapley: float | None = None
    extrapolates: bool = False
    change: str = ""
    saved: float | None = None
    saved_low: float | None = None
    saved_high: float | None = None
    broken: float | None = None


class Reproduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well a replay reproduces what was recorded: seconds between replayed and recorded starts.

    `compared` starts were compared and `waiting` workloads wait at the end in both; `within` is the share of these that
    is reproduced. Errors are None when nothing started. `missed` lists what could not be reproduced.
    """

    rules: str
    compared: int
    waiting: int
    within: float
    median_seconds: float | None
    largest_seconds: float | None
    missed: tuple[NotChecked, ...] = ()


class Attribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counterfactual attribution by one engine (`mechanism` or `replay`).

    Of a replay, `victim` is the workload that waited, `factual_low` and `factual_high` bound a wait that had not ended
    (95 %), and `promised` is what was promised, in the metric's unit.
    """

    engine: str
    metric: str
    unit: str
    factual: float
    entries: tuple[AttributionEntry, ...]
    notes: tuple[str, ...] = ()
    victim: str = ""
    factual_low: float | None = None
    factual_high: float | None = None
    promised: float | None = None
    reproduction: Reproduction | None = None


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One observed deviation: value against baseline, how unusual, when it began relative to the symptom."""

    node: str
    peer: str | None
    metric: str
    unit: str
    baseline: float
    incident: float
    change_ratio: float | None
    z: float
    samples: int
    baseline_samples: int
    onset_offset_seconds: float | None
    window: Window


class RuledOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A suspicious node that is not the cause, and why."""

    node: str
    reason: str


class NextStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An action, and the check that would show that it helped (R11)."""

    action: str
    check: str
    command: str | None = None


class GraphNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the drawing. `deviation` is the largest |z| seen there, None when nothing was measured."""

    node: str
    kind: str
    cause_probability: float
    deviation: float | None


class GraphEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dependency of the drawing: `caller` depends on `callee`; `probability` that the anomaly crossed it."""

    caller: str
    callee: str
    relation: str
    probability: float
    on_path: bool


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time series to draw: Unix seconds and values (None where nothing was measured)."""

    node: str
    metric: str
    unit: str
    timestamps: tuple[float, ...]
    values: tuple[float | None, ...]


class PolicyJudgement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which policy the incident was judged by (R7), and whether it was violated; None when that cannot be told."""

    policy: str
    violated: bool | None
    detail: str


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that judged."""

    name: str
    version: str
    sha256: str


class ProvenanceStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One link of the hash chain: `digest` = sha256(previous digest + sha256 of the content)."""

    step: str
    content_sha256: str
    digest: str


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the explanation can be traced back to its inputs (R7). Grade C: a local hash chain."""

    grade: str
    steps: tuple[ProvenanceStep, ...]


class Explanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole answer."""

    incident_id: str
    title: str
    labels: dict[str, str]
    verdict: Verdict
    verdict_reasons: tuple[str, ...]
    impact: Impact
    causes: tuple[Cause, ...]
    no_cause_probability: float
    path: Path | None
    attribution: tuple[Attribution, ...]
    evidence: tuple[Evidence, ...]
    ruled_out: tuple[RuledOut, ...]
    not_checked: tuple[NotChecked, ...]
    next_steps: tuple[NextStep, ...]
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    series: tuple[Series, ...]
    model: Model
    provenance: Provenance
    schema_version: int = SCHEMA_VERSION
    #: The options that it was made with, so that it can be made again and its provenance checked.
    options: dict[str, str | int | float | None] = {}
    policy: PolicyJudgement | None = None
    #: The systems that were asked for data, with the queries used.
    sources: tuple[Source, ...] = ()


def to_json(explanation: Explanation) -> bytes:
    """Encode as indented JSON, the same bytes for the same explanation."""
    return msgspec.json.format(msgspec.json.encode(explanation), indent=2) + b"\n"


def from_json(data: bytes | str) -> Explanation:
    """Decode what `to_json` wrote.

    Raises:
        msgspec.DecodeError: the data is not an explanation.
    """
    return msgspec.json.decode(data, type=Explanation)
