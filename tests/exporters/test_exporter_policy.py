"""Policy files: the shipped profiles, what each rule decides, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exporters.errors import InvalidInputError, NotFoundError
from exporters.model import QosClass, Workload, WorkloadState
from exporters.policy import Grade, default_policy, load_policy, parse_policy, profiles

HEAD = "apiVersion: prioscope/v1\nkind: TaskPriorityPolicy\nmetadata: {name: p}\nspec:\n"
RULE = HEAD + "  rules:\n  - name: a\n"
LEVELS = HEAD + "  rules: []\n  levels:\n"

#: Each line repeats the one above eight times: a few hundred bytes that would expand to millions.
LAUGHS = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in ("ab", "bc", "cd", "de", "ef")
)


def workload(**fields: Any) -> Workload:
    return Workload(id="w", name="w", state=WorkloadState.PENDING, **fields)


def test_the_three_profiles_carry_the_published_targets() -> None:
    assert set(profiles()) == {"batch-support", "low-latency-risk-control", "medical-imaging"}
    risk, imaging, batch = (
        load_policy(name) for name in ("low-latency-risk-control", "medical-imaging", "batch-support")
    )
    assert (risk.rules[0].objectives[0].healthy, risk.rules[0].objectives[0].degraded) == (0.012, 0.086)
    assert imaging.rules[0].resource_guarantee is not None
    assert imaging.rules[0].resource_guarantee.gpu_memory_ratio == 0.45
    assert [(o.metric, o.healthy, o.degraded) for o in batch.rules[1].objectives] == [
        ("f1_ratio", 0.872, 0.865),
        ("f1_drop_ratio", 0.012, 0.012),
        ("latency_p99_seconds", 0.65, 0.8),
    ]
    for policy in (risk, imaging, batch):
        training = policy.task_classes["critical-training"]
        assert (training.qos_class, training.retry_policy, training.preemption_allowed, training.gpu_affinity) == (
            QosClass.GUARANTEED,
            "Always",
            True,
            "required",
        )
        assert policy.task_classes["batch-inference"].qos_class is QosClass.BURSTABLE
        assert policy.task_classes["preemptible-background"].preemptible is True


def test_objectives_grade_both_directions() -> None:
    f1, drop, latency = load_policy("batch-support").rules[1].objectives
    assert [f1.grade(value) for value in (0.9, 0.872, 0.87, 0.86)] == [
        Grade.HEALTHY,
        Grade.HEALTHY,
        Grade.WARN,
        Grade.DEGRADED,
    ]
    assert [latency.grade(value) for value in (0.65, 0.8, 0.81)] == [Grade.HEALTHY, Grade.WARN, Grade.DEGRADED]
    assert [drop.grade(value) for value in (0.012, 0.013)] == [Grade.HEALTHY, Grade.DEGRADED]


def test_the_first_rule_that_sets_a_value_decides_then_the_level() -> None:
    policy = parse_policy(
        HEAD
        + """  levels:
  - {level: P0, waitSloSeconds: 30, priorityClasses: [urgent]}
  - {level: P3, waitSloSeconds: 900}
  preemption: {allowed: false, deadlineSeconds: 20}
  rules:
  - {name: weight-only, weight: 0.5}
  - {name: labelled, matchLabels: {app: scoring-*}, waitSloSeconds: 5, preemption: {allowed: true}}
  - {name: queue, matchQueues: ["train*"], matchLevels: [P0, P1], timeoutSeconds: 60}
  - {name: namespace, matchNamespaces: [ml], matchPriorityClasses: [urgent], waitSloSeconds: 7}
"""
    )
    assert policy.wait_slo(workload(labels={"app": "scoring-eu"}, queue="train-a", rank=0)) == 5
    assert policy.wait_slo(workload(queue="train-a", rank=1)) == 60
    assert policy.wait_slo(workload(queue="train-a", rank=2)) is None
    assert policy.wait_slo(workload(namespace="ml", priority_class="urgent")) == 7
    assert policy.wait_slo(workload(namespace="ml", rank=0)) == 30
    assert policy.wait_slo(workload(rank=5)) == 900
    assert policy.wait_slo(workload()) is None
    assert policy.preemption_for(workload(labels={"app": "scoring-eu"})).allowed
    assert policy.preemption_for(workload()) == policy.preemption
    rule = policy.rule_for(workload())
    assert rule is not None
    assert rule.name == "weight-only"
    assert policy.ranking.rank(None, "urgent") == 0


def test_levels_make_the_ranking() -> None:
    policy = load_policy("medical-imaging")
    assert policy.ranking.rank(5.0, "imaging-routine") == 2
    assert [policy.ranking.rank(p) for p in (2e6, 1e6, 5e5, 1e4, 0)] == [0, 0, 1, 2, 3]
    assert policy.ranking.rank(None) is None
    assert default_policy().ranking.rank(1, "system-node-critical") == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.yaml holds no document"),
        ("a: [", "p.yaml:1: not valid YAML"),
        ("- a", "p.yaml:1: kind is None"),
        ("kind: Policy", "p.yaml:1: kind is 'Policy'"),
        ("1: a", "p.yaml:1: a key is not text"),
        (HEAD + "  rules: []\n  rules: []", "p.yaml:6: 'rules' is given twice"),
        (RULE + "    wieght: 1", "p.yaml:7: spec.rules[0] has no field 'wieght'; did you mean 'weight'"),
        (HEAD + "  rules:\n  - weight: 1", "p.yaml:6: spec.rules[0] lacks 'name'"),
        (RULE + "    weight: -1", "p.yaml:7: spec.rules[0].weight: -1 is less than"),
        (RULE + "    weight: .nan", "p.yaml:7: .nan is not a finite number"),
        (RULE + "    weight: 1\n  - name: a", "p.yaml:8: rule 'a' is defined twice"),
        (RULE + "    matchLevels:\n    - P9", "p.yaml:8: spec.rules[0].matchLevels[0] is 'P9'; allowed"),
        (LEVELS + "  - {level: P1, minPriority: 5}", "p.yaml:7: P1 has a minPriority but P0 has none"),
        (
            LEVELS + "  - {level: P0, minPriority: 5}\n  - {level: P1, minPriority: 9}",
            "p.yaml:8: minPriority 9 of P1 is not below that of P0",
        ),
        (LEVELS + "  - {level: P0}\n  - {level: P0}", "p.yaml:8: level P0 is given twice"),
        (
            LEVELS + "  - {level: P0, priorityClasses: [a]}\n  - {level: P1, priorityClasses: [a]}",
            "p.yaml:8: class 'a' has two levels",
        ),
        (
            RULE + "    objectives:\n    - {metric: m, direction: atMost, healthy: 2, degraded: 1}",
            "p.yaml:8: degraded 1 is better than healthy 2 (atMost)",
        ),
        (HEAD + "  rules: []\n---\n" + HEAD + "  rules: []", "p.yaml:7 has 2 TaskPriorityPolicy documents"),
        (
            "apiVersion: prioscope/v1\nkind: TaskClass\nmetadata: {name: c}\nspec: {qosClass: Burstable}",
            "p.yaml has 0 TaskPriorityPolicy documents",
        ),
        ("a: &a [*a]", "p.yaml:1"),
        (LAUGHS, "the document is too large"),
        ("a: !!python/object/apply:os.system [x]", "p.yaml"),
    ],
)
def test_errors_name_file_and_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_policy(text, "p.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.cure


def test_a_file_that_is_missing_binary_or_huge(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        load_policy(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InvalidInputError, match=r"binary\.yaml"):
        load_policy(binary)
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * 2_000_000)
    with pytest.raises(InvalidInputError, match="larger than"):
        load_policy(huge)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_policy(tmp_path)
