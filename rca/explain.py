"""From an incident to an `Explanation`: the pipeline that every face of the product calls.

bundle -> call graph and panel -> features -> network -> path -> counterfactual -> explanation. Nothing here imports
torch, reads the truth, or asks another system; equal bundles give equal explanations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from rca import panel as panels
from rca.blocking import METRIC, blocking, settle
from rca.counterfactual import mechanism
from rca.errors import InvalidInputError
from rca.explanation import (
    Attribution,
    Cause,
    Evidence,
    Explanation,
    GraphEdge,
    GraphNode,
    Hop,
    Impact,
    Model,
    NextStep,
    NotChecked,
    Path,
    PolicyJudgement,
    Provenance,
    RuledOut,
    Series,
    Verdict,
)
from rca.features import Deviation, Features, extract
from rca.gnn import infer
from rca.graph import RELATIONS, CallGraph, Floats
from rca.incident import Incident, NodeKind, Relation, SourceStatus, Victim
from rca.panel import LEAD, Panel
from rca.propagation import Step, most_probable_path, relation_of
from rca.provenance import seal
from rca.signals import Signal, describe, signal_of

#: |z| from which a deviation is worth telling.
NOTABLE = 3.0
#: |z| of the victim below which there is nothing to explain. Low: a noisy baseline hides real incidents at |z| < 1.
UNCHANGED = 0.25
#: Probability from which a candidate beyond the first is listed.
CREDIBLE = 0.005
#: How much of a large graph goes into the drawing and the JSON.
MAX_DRAWN = 200
MAX_POINTS = 240


@dataclass(frozen=True)
class Options:
    """What the caller may choose.

    Attributes:
        top: how many candidate causes to list.
        min_confidence: least probability of the first cause for the verdict *explained*.
        victim, metric: explain another victim than the bundle's.
    """

    top: int = 5
    min_confidence: float = 0.5
    victim: str | None = None
    metric: str | None = None


@dataclass(frozen=True)
class Analysis:
    """Everything between the bundle and the words.

    ``explains``: share of the victim's change that each node accounts for by itself, [N].
    """

    panel: Panel
    features: Features
    prediction: infer.Prediction
    ranking: tuple[int, ...]
    path: tuple[Step, ...]
    explains: Floats
    attribution: Attribution | None
    model: infer.Model


def analyse(panel: Panel, model: infer.Model, top: int = 5) -> Analysis:
    """Judge one panel: rank the nodes, find the path from the first, attribute the victim's change."""
    features = extract(panel)
    prediction = settle(panel, model.predict(features, panel.victim), model.card.mechanisms).bounded()
    names = panel.graph.nodes
    # Equal probabilities are ordered by name, so that the order of rows in a bundle does not matter.
    order = sorted(range(len(names)), key=lambda i: (-round(float(prediction.cause[i]), 9), names[i]))
    ranking = tuple(order)
    path = most_probable_path(panel.graph, prediction.crossed, ranking[0], panel.victim)
    candidates = ranking[: min(top, mechanism.CANDIDATES)]
    credible = [node for k, node in enumerate(candidates) if k == 0 or prediction.cause[node] >= CREDIBLE]
    felt = features.deviations.get(panel.metric)
    changed = felt is not None and abs(np.nan_to_num(felt.z[panel.victim], nan=UNCHANGED)) >= UNCHANGED
    attribution = (
        mechanism.attribute(panel, features, prediction.cause, credible, model.card.intervals) if changed else None
    )
    explains = mechanism.explained_share(panel, features)
    return Analysis(panel, features, prediction, ranking, path, explains, attribution, model)


def rank(incident: Incident) -> dict[str, float]:
    """Probability of each node being the root cause."""
    panel = panels.from_incident(incident)
    model = infer.load()
    prediction = settle(panel, model.predict(extract(panel), panel.victim), model.card.mechanisms).bounded()
    return {name: float(p) for name, p in zip(panel.graph.nodes, prediction.cause, strict=True)}


def explain(incident: Incident, options: Options = Options()) -> Explanation:
    """Explain ``incident``.

    Raises:
        NotFoundError: the victim is not in the call graph, or no weights are installed.
        InvalidInputError: the victim's metric was not measured at all, or nothing was measured in the window.
    """
    panel = panels.from_incident(incident, victim=options.victim, metric=options.metric)
    _check_victim(incident, panel)
    model = infer.load()
    analysis = analyse(panel, model, options.top)
    impact = _impact(incident, analysis)
    causes = _causes(incident, analysis, options.top)
    reasons = _doubts(analysis, impact, causes, options)
    verdict = Verdict.INCONCLUSIVE if reasons else Verdict.EXPLAINED
    shown = [panel.graph.index[cause.node] for cause in causes]
    drawn = _drawn(analysis, shown)
    explanation = Explanation(
        incident_id=incident.header.id,
        title=incident.header.title,
        labels=dict(sorted(incident.header.labels.items())),
        verdict=verdict,
        verdict_reasons=tuple(reasons),
        impact=impact,
        causes=causes,
        no_cause_probability=_round(analysis.prediction.nothing),
        path=_path(analysis) if causes and analysis.path else None,
        attribution=() if analysis.attribution is None else (analysis.attribution,),
        evidence=_evidence(incident, analysis, shown),
        ruled_out=_ruled_out(analysis, shown),
        not_checked=_not_checked(incident, analysis),
        next_steps=_next_steps(incident, analysis, impact, causes, verdict),
        nodes=_drawn_nodes(analysis, drawn),
        edges=_drawn_edges(analysis, drawn),
        series=_series(analysis, shown),
        model=Model(model.card.name, model.card.version, model.card.sha256),
        provenance=Provenance("C", ()),
        options={
            "top": options.top,
            "min_confidence": options.min_confidence,
            "victim": options.victim,
            "metric": options.metric,
        },
        policy=_judge_policy(incident, analysis, causes, verdict),
        sources=incident.header.sources,
    )
    return seal(explanation, incident)


def _round(value: float, digits: int = 6) -> float:
    """Round for output: identical JSON must not hang on the last bits of a sum."""
    return round(float(value), digits)


def _significant(value: float) -> float:
    return float(f"{value:.6g}")


def _optional(value: float) -> float | None:
    return _significant(float(value)) if np.isfinite(value) else None


def _moment(panel: Panel, column: float) -> datetime:
    """Time of a window column (lead-in included)."""
    return datetime.fromtimestamp(panel.window_start + (column - LEAD) * panel.step, UTC)


def _check_victim(incident: Incident, panel: Panel) -> None:
    """A victim metric that exists nowhere is a mistake in the question, not an inconclusive answer."""
    measured = sorted(name for name, values in panel.window.items() if np.isfinite(values[panel.victim]).any())
    known = panel.metric in panel.window or panel.metric in panel.baseline
    if not known or (panel.metric not in measured and not _has_rows(incident, panel)):
        name = panel.graph.nodes[panel.victim]
        cure = f"choose one with --metric: {', '.join(measured)}" if measured else "choose another --victim"
        raise InvalidInputError(f"{name} has no metric {panel.metric!r} in incident {incident.header.id}", cure=cure)


def _has_rows(incident: Incident, panel: Panel) -> bool:
    import pyarrow.compute as pc

    rows = pc.and_(
        pc.equal(incident.metrics["node"], panel.graph.nodes[panel.victim]),
        pc.equal(incident.metrics["metric"], panel.metric),
    )
    return bool(pc.any(rows).as_py())


def _impact(incident: Incident, analysis: Analysis) -> Impact:
    panel, features = analysis.panel, analysis.features
    deviation = features.deviations.get(panel.metric)
    v = panel.victim
    baseline = None if deviation is None else _optional(deviation.baseline[v])
    now = None if deviation is None else _optional(deviation.post[v])
    peak = None if deviation is None else _optional(deviation.peak[v])
    felt = deviation is not None and np.isfinite(deviation.z[v]) and abs(deviation.z[v]) >= 1.0
    return Impact(
        victim=Victim(panel.graph.nodes[v], panel.metric),
        kind=panel.graph.kind(v).value,
        unit=describe(panel.metric).unit,
        window=incident.header.window,
        baseline_window=incident.header.baseline,
        baseline=baseline,
        incident=now,
        peak=peak,
        change_ratio=_significant(now / baseline) if now is not None and baseline else None,
        onset=incident.header.onset or (_moment(panel, max(features.onset, 0)) if felt else None),
        baseline_samples=0 if deviation is None else int(deviation.baseline_count[v]),
        incident_samples=0 if deviation is None else int(deviation.count[v]),
    )


def _loudest(features: Features, node: int) -> Deviation | None:
    """The deviation of ``node`` with the largest |z|."""
    found = [d for d in features.deviations.values() if np.isfinite(d.z[node])]
    return max(found, key=lambda d: (abs(d.z[node]), d.metric)) if found else None


def _onset_offset(analysis: Analysis, node: int) -> float | None:
    """Seconds between the symptom and the first notable deviation of ``node``; negative when it came first."""
    columns = [
        d.onset[node]
        for d in analysis.features.deviations.values()
        if abs(np.nan_to_num(d.z[node])) >= NOTABLE and np.isfinite(d.onset[node])
    ]
    return _significant((min(columns) - analysis.features.onset) * analysis.panel.step) if columns else None


def _causes(incident: Incident, analysis: Analysis, top: int) -> tuple[Cause, ...]:
    panel, prediction = analysis.panel, analysis.prediction
    out = []
    for position, node in enumerate(analysis.ranking[:top]):
        confidence = float(prediction.cause[node])
        # Beyond the first, a candidate with no probability to speak of is only noise on the page.
        if position and confidence < CREDIBLE:
            break
        kind = int(np.argmax(prediction.mechanism[node]))
        name = analysis.model.card.mechanisms[kind]
        out.append(
            Cause(
                rank=position + 1,
                node=panel.graph.nodes[node],
                kind=panel.graph.kind(node).value,
                mechanism=name,
                mechanism_probability=_round(prediction.mechanism[node][kind]),
                confidence=_round(confidence),
                summary=_summary(incident, analysis, node),
                onset_offset_seconds=_onset_offset(analysis, node),
            )
        )
    return tuple(out)


def _summary(incident: Incident, analysis: Analysis, node: int) -> str:
    """One line for a candidate: what it is, how it looks, and what it shares with the victim."""
    from rca.report import format as fmt

    graph = analysis.panel.graph
    deviation = _loudest(analysis.features, node)
    parts = []
    who = _workload_words(incident, graph.nodes[node])
    if who:
        parts.append(who)
    if deviation is None:
        parts.append("no telemetry of its own")
    elif abs(deviation.z[node]) >= NOTABLE:
        metric = describe(deviation.metric)
        parts.append(
            f"{fmt.metric_label(metric.name)} {fmt.quantity(float(deviation.baseline[node]), metric.unit)} -> "
            f"{fmt.quantity(float(deviation.post[node]), metric.unit)}"
        )
    else:
        parts.append("its own metrics stayed near their baseline")
    parts += _blocked_words(incident, analysis.panel, node)
    share = analysis.explains[node]
    if np.isfinite(share) and share >= 0.01:
        parts.append(f"by itself accounts for {share:.0%} of the victim's change")
    return "; ".join(parts)


def _blocked_words(incident: Incident, panel: Panel, node: int) -> list[str]:
    """What the scheduler's account says that ``node`` took from those who waited, and how strong that case is."""
    taken = blocking(panel)
    edges = np.flatnonzero((panel.graph.callees == node) & (taken > 0))
    longest = edges[np.argsort(-taken[edges], kind="stable")][:3]
    about = dict(zip(incident.nodes["node"].to_pylist(), incident.nodes["attributes"].to_pylist(), strict=True))
    basis = dict(about.get(panel.graph.nodes[node]) or ()).get("inversion_basis", "")
    strength = f" (basis: {basis})" if basis else ""
    return [
        f"took {taken[edge]:,.0f} GPU-seconds while {panel.graph.nodes[panel.graph.callers[edge]]} waited{strength}"
        for edge in longest.tolist()
    ]


def _workload_words(incident: Incident, name: str) -> str:
    columns = ["workload", "service", "state", "priority_class", "gpus"]
    for row in incident.workloads.select(columns).to_pylist():
        if name in (row["workload"], row["service"]):
            words = [row["state"], "workload"]
            if row["priority_class"]:
                words.append(f"of priority {row['priority_class']}")
            if row["gpus"]:
                words.append(f"on {row['gpus']:g} GPU{'s' * (row['gpus'] != 1)}")
            return " ".join(words)
    return ""


def _doubts(analysis: Analysis, impact: Impact, causes: Sequence[Cause], options: Options) -> list[str]:
    """Why no cause can be named; empty when one can."""
    reasons = []
    first = causes[0] if causes else None
    if impact.incident is None:
        reasons.append(f"the victim's {impact.victim.metric} has no value in the incident window")
    if impact.baseline is None:
        reasons.append(f"the victim's {impact.victim.metric} has no value in the baseline window")
    deviation = analysis.features.deviations.get(impact.victim.metric)
    z = np.nan if deviation is None else deviation.z[analysis.panel.victim]
    if np.isfinite(z) and abs(z) < UNCHANGED:
        reasons.append(
            f"the victim's {impact.victim.metric} did not change, compared with its usual spread "
            f"({abs(z):.2f} standard deviations)"
        )
    nothing = analysis.prediction.nothing
    if first is None or first.confidence < options.min_confidence:
        if nothing > (first.confidence if first else 0.0):
            reasons.append(
                f"most likely ({nothing:.0%}) no monitored node broke: the change is within what is usual here, or its "
                "cause is not monitored"
            )
        elif first is not None:
            reasons.append(
                f"the first candidate reaches {first.confidence:.3f} confidence, less than the "
                f"{options.min_confidence:g} asked for"
            )
    return reasons


def _path(analysis: Analysis) -> Path:
    graph = analysis.panel.graph
    hops = tuple(
        Hop(
            source=graph.nodes[step.source],
            target=graph.nodes[step.target],
            relation=relation_of(graph, step),
            direction="effect" if step.upward else "load",
            probability=_round(step.probability),
        )
        for step in analysis.path
    )
    return Path(hops=hops, probability=_round(float(np.prod([step.probability for step in analysis.path]))))


def _evidence(incident: Incident, analysis: Analysis, causes: Sequence[int]) -> tuple[Evidence, ...]:
    """The notable deviations of the victim, the candidates and the path; strongest first within each node."""
    panel, features = analysis.panel, analysis.features
    graph = panel.graph
    on_path = [step.source for step in analysis.path]
    order = list(dict.fromkeys([panel.victim, *causes[:3], *on_path]))
    out: list[Evidence] = []
    for node in order:
        deviations = [d for d in features.deviations.values() if np.isfinite(d.z[node])]
        deviations.sort(key=lambda d: (d.metric != panel.metric or node != panel.victim, -abs(d.z[node]), d.metric))
        kept = [
            d for d in deviations if abs(d.z[node]) >= NOTABLE or (node == panel.victim and d.metric == panel.metric)
        ]
        out += [_item(incident, analysis, d, node, graph.nodes[node], None) for d in kept[:3]]
    for step in analysis.path:
        for d in sorted(features.edge_deviations.values(), key=lambda d: -abs(np.nan_to_num(d.z[step.edge]))):
            if abs(np.nan_to_num(d.z[step.edge])) >= NOTABLE:
                caller, callee = graph.nodes[graph.callers[step.edge]], graph.nodes[graph.callees[step.edge]]
                out.append(_item(incident, analysis, d, step.edge, caller, callee))
                break
    return tuple(out[:24])


def _item(
    incident: Incident, analysis: Analysis, deviation: Deviation, row: int, node: str, peer: str | None
) -> Evidence:
    onset = deviation.onset[row]
    baseline, now = float(deviation.baseline[row]), float(deviation.post[row])
    notable = abs(deviation.z[row]) >= NOTABLE and np.isfinite(onset)
    return Evidence(
        node=node,
        peer=peer,
        metric=deviation.metric,
        unit=describe(deviation.metric).unit,
        baseline=_significant(baseline),
        incident=_significant(now),
        change_ratio=_significant(now / baseline) if baseline else None,
        z=_significant(float(deviation.z[row])),
        samples=int(deviation.count[row]),
        baseline_samples=int(deviation.baseline_count[row]),
        onset_offset_seconds=_significant((onset - analysis.features.onset) * analysis.panel.step) if notable else None,
        window=incident.header.window,
    )


def _ruled_out(analysis: Analysis, causes: Sequence[int]) -> tuple[RuledOut, ...]:
    """Loud nodes that are not the cause, each with the observation that speaks against it."""
    panel, features, prediction = analysis.panel, analysis.features, analysis.prediction
    graph = panel.graph
    size = np.full(len(graph.nodes), 0.0)
    for deviation in features.deviations.values():
        size = np.fmax(size, np.abs(np.nan_to_num(deviation.z)))
    credible = {node for node in causes if prediction.cause[node] >= 0.05}
    loud = [i for i in np.argsort(-size, kind="stable").tolist() if size[i] >= NOTABLE and i not in credible]
    depth = graph.depths_from(panel.victim)
    share = analysis.explains
    out = []
    for node in loud:
        reason = _against(analysis, node, int(depth[node]), float(share[node]), credible)
        if reason:
            out.append(RuledOut(node=graph.nodes[node], reason=f"{_deviates(features, node)}, but {reason}"))
        if len(out) == 5:
            break
    return tuple(out)


def _deviates(features: Features, node: int) -> str:
    from rca.report import format as fmt

    deviation = _loudest(features, node)
    assert deviation is not None  # noqa: S101 - only called for nodes with a deviation
    word = "up" if deviation.z[node] > 0 else "down"
    return f"{fmt.metric_label(deviation.metric)} is {word} ({abs(deviation.z[node]):.1f} standard deviations)"


def _against(analysis: Analysis, node: int, depth: int, share: float, credible: set[int]) -> str:
    """The strongest observation against ``node``, or "" when there is none (then it is not ruled out)."""
    panel = analysis.panel
    graph = panel.graph
    loudest = _loudest(analysis.features, node)
    requests = loudest is not None and signal_of(loudest.metric) in (Signal.LATENCY, Signal.ERRORS)
    carried = _carried_by(analysis, node) if requests else ""
    if node == panel.victim:
        return f"its change comes from what it calls: {carried}" if carried else ""
    if depth < 0:
        into = graph.undirected_distance(node)[panel.victim]
        return "nothing connects it with the victim" if into < 0 else "the victim does not depend on it"
    if carried:
        return f"its change comes from what it calls: {carried}"
    if np.isfinite(share) and share < 0.1:
        return f"what it adds by itself is {share:.0%} of the victim's change"
    offset = _onset_offset(analysis, node)
    if offset is not None and offset >= 2 * panel.step and credible:
        return f"it began {offset:g} s after the symptom"
    return ""


def _carried_by(analysis: Analysis, node: int) -> str:
    """Name the callee that most of the excess of ``node`` came through, or "" when it is its own."""
    features, graph = analysis.features, analysis.panel.graph
    centre = features.deviations.get(features.centre or "")
    if signal_of(analysis.panel.metric) is Signal.ERRORS:
        centre = features.deviations.get("error_ratio")
        own = features.own_errors
    else:
        own = features.own
    if centre is None:
        return ""
    change = centre.post - centre.baseline
    if not np.isfinite(own[node]) or not change[node] > 0 or own[node] > 0.5 * change[node]:
        return ""
    calls = np.flatnonzero((graph.callers == node) & (graph.relations == RELATIONS.index(Relation.CALLS)))
    carried = np.nan_to_num(features.calls[calls] * change[graph.callees[calls]])
    if not len(calls) or carried.max() <= 0.3 * change[node]:
        return ""
    return str(graph.nodes[int(graph.callees[calls[int(np.argmax(carried))]])])


def _not_checked(incident: Incident, analysis: Analysis) -> tuple[NotChecked, ...]:
    """What could not be examined: sources, nodes, signals, time order, the scheduler's view."""
    panel, features = analysis.panel, analysis.features
    graph = panel.graph
    out = [
        NotChecked(f"{source.name} ({source.kind})", source.detail or f"the source is {source.status.value}")
        for source in incident.header.sources
        if source.status is not SourceStatus.OK
    ]
    measured = np.zeros(len(graph.nodes), dtype=bool)
    compared = np.zeros(len(graph.nodes), dtype=bool)
    for deviation in features.deviations.values():
        measured |= np.isfinite(deviation.post)
        compared |= np.isfinite(deviation.z)
    depends = graph.depths_from(panel.victim) > 0
    out += _group(graph, depends & ~measured, "no telemetry in the incident window")
    out += _group(graph, depends & measured & ~compared, "no baseline to compare with")
    signals = {signal_of(name) for name in panel.window}
    services = (graph.kinds == 0).sum()
    if analysis.attribution is None:
        out.append(NotChecked("counterfactual", "the victim's change is too small, or its level before is unknown"))
    if Signal.ERRORS not in signals:
        out.append(NotChecked("errors", "no error ratio was measured: a fault that only fails requests would not show"))
    if Signal.LATENCY not in signals:
        out.append(NotChecked("latency", "no latency was measured: a fault that only slows requests would not show"))
    if "network_gap_mean_seconds" not in panel.edge_window and services > 1:
        out.append(
            NotChecked(
                "network between services",
                "no traces with client and server spans: network delay shows only as a slow caller",
            )
        )
    if not panel.edge_window.keys() - {METRIC} and services > 1:
        out.append(NotChecked("single calls", "no metrics per call: calls per request were estimated from node rates"))
    kinds = {graph.kind(i) for i in range(len(graph.nodes))}
    if NodeKind.GPU not in kinds and NodeKind.WORKLOAD not in kinds:
        out.append(
            NotChecked(
                "GPUs and scheduler",
                "the bundle holds no workloads or devices: contention by another job "
                "would show only at the services it slows",
            )
        )
    elif Signal.GPU not in signals:
        out.append(NotChecked("GPU use", "no GPU metrics were captured"))
    samples = _window_samples(panel)
    if samples < 4:
        out.append(
            NotChecked(
                "order of onsets",
                f"{samples} sample{'s' * (samples != 1)} of {panel.step:g} s in the window: too "
                "few to say what began first",
            )
        )
    if graph.has_cycle():
        out.append(
            NotChecked(
                "calls in a circle",
                "the call graph has a cycle: effects were followed once around, so shares on it are approximate",
            )
        )
    if graph.undirected_distance(panel.victim).max() < 1 and len(graph.nodes) > 1:
        out.append(NotChecked("dependencies of the victim", "no edge leads to or from it: paths cannot be followed"))
    return tuple(out)


def _window_samples(panel: Panel) -> int:
    for group in (panel.window, panel.edge_window):
        for values in group.values():
            return int(values.shape[1]) - LEAD
    return 0


def _group(graph: CallGraph, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]], why: str) -> list[NotChecked]:
    names = [graph.nodes[i] for i in np.flatnonzero(chosen)]
    if not names:
        return []
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return [NotChecked(listed, why)]


_ACTIONS: Mapping[str, str] = {
    "added latency": "Roll back the latest change of {node} (code, configuration, data), or take slow replicas out",
    "errors": "Read the error logs of {node} from {onset} on and roll back its latest change",
    "CPU contention": "Free CPU for the victim's path: limit or move {node}",
    "GPU contention": "Preempt, requeue or move {node} off the shared GPU",
    "GPU memory fragmentation": "Drain {node} and restart what holds its memory, so that free blocks join up",
    "network delay": "Check the network of {node}: errors and drops at its interface, its host's link, policies",
    "overload": "Throttle or scale: limit the calls that {node} sends, or add capacity where they arrive",
    "queue imbalance": "Rebalance {node}: move waiting work to other queues or add consumers",
    "dependency outage": "Fail over from {node}, or open the circuit breaker of its callers until it is back",
    "failing fast": "Take {node} out of rotation: it answers quickly with errors and draws traffic",
}


def _next_steps(
    incident: Incident, analysis: Analysis, impact: Impact, causes: Sequence[Cause], verdict: Verdict
) -> tuple[NextStep, ...]:
    """Actions, each with the check that would show that it helped (R11)."""
    from rca.report import format as fmt

    unit = impact.unit
    goal = "its baseline" if impact.baseline is None else fmt.quantity(impact.baseline, unit)
    label = fmt.metric_label(impact.victim.metric)
    check = f"{label} of {impact.victim.node} back near {goal} within {_wait(analysis.panel.step)}"
    onset = fmt.moment(impact.onset) if impact.onset is not None else "the start of the incident"
    steps = []
    if verdict is Verdict.EXPLAINED and causes:
        first = causes[0]
        text = _ACTIONS.get(first.mechanism, "Examine {node}").format(node=first.node, onset=onset)
        steps.append(NextStep(action=text, check=check, command=_command(incident, first)))
        if len(causes) > 1 and causes[1].confidence >= 0.1:
            steps.append(
                NextStep(
                    action=f"If that does not help, examine {causes[1].node} ({causes[1].mechanism})",
                    check=check,
                    command=None,
                )
            )
    else:
        for cause in list(causes)[:3]:
            steps.append(
                NextStep(
                    action=f"Examine {cause.node} ({cause.mechanism}, {cause.confidence:.0%})",
                    check="its metrics and logs show a change at the time of the symptom",
                    command=None,
                )
            )
        steps.append(
            NextStep(
                action="Capture again with a longer window, or with what is listed under Not checked",
                check="the first candidate's confidence rises above the threshold",
                command=None,
            )
        )
    return tuple(steps)


def _wait(step: float) -> str:
    minutes = max(1, round(3 * step / 60))
    return f"{minutes} minute{'s' * (minutes != 1)}"


def _command(incident: Incident, cause: Cause) -> str | None:
    """A command for the scheduler that the bundle names; none when that is not known."""
    if cause.kind != NodeKind.WORKLOAD.value:
        return None
    scheduler = incident.header.labels.get("scheduler", "").lower()
    if scheduler == "slurm":
        return f"scontrol requeue {cause.node}"
    if scheduler == "kubernetes":
        namespace = incident.header.labels.get("namespace")
        return f"kubectl{f' -n {namespace}' if namespace else ''} delete pod {cause.node}"
    return None


#: Without a policy file, what every scheduler with priorities promises.
DEFAULT_POLICY = "strict priority (default): a less urgent workload must not slow a more urgent one"


def _judge_policy(incident: Incident, analysis: Analysis, causes: Sequence[Cause], verdict: Verdict) -> PolicyJudgement:
    """Whether the first cause is a less urgent workload that slowed a more urgent one beside it (R7, V1)."""
    if verdict is not Verdict.EXPLAINED or not causes:
        return PolicyJudgement(DEFAULT_POLICY, None, "not judged: no cause is established")
    urgency: dict[str, tuple[int, str]] = {}
    for row in incident.workloads.select(["workload", "service", "priority_rank", "priority_class"]).to_pylist():
        if row["priority_rank"] is not None:
            name = row["service"] or row["workload"]
            label = row["priority_class"] or f"rank {row['priority_rank']}"
            urgency[name] = min(urgency.get(name, (row["priority_rank"], label)), (row["priority_rank"], label))
    if not urgency:
        return PolicyJudgement(DEFAULT_POLICY, None, "not judged: the bundle holds no workloads with priorities")
    first = causes[0].node
    if first not in urgency:
        return PolicyJudgement(DEFAULT_POLICY, False, f"{first} is not a workload with a priority")
    hurt = [analysis.panel.graph.nodes[step.target] for step in analysis.path]
    outranked = [name for name in hurt if name in urgency and urgency[name][0] < urgency[first][0]]
    if outranked:
        detail = f"{first} ({urgency[first][1]}) slowed {outranked[0]} ({urgency[outranked[0]][1]})"
        return PolicyJudgement(DEFAULT_POLICY, True, detail)
    return PolicyJudgement(
        DEFAULT_POLICY, False, f"nothing more urgent than {first} ({urgency[first][1]}) is on the path"
    )


def _drawn(analysis: Analysis, causes: Sequence[int]) -> list[int]:
    """Nodes worth drawing: path, victim, candidates and their neighbours, then what the victim depends on."""
    graph = analysis.panel.graph
    chosen = dict.fromkeys([analysis.panel.victim, *(s.source for s in analysis.path), *causes])
    core = np.zeros(len(graph.nodes), dtype=bool)
    core[list(chosen)] = True
    near = np.concatenate([graph.callees[core[graph.callers]], graph.callers[core[graph.callees]]])
    distance = graph.undirected_distance(analysis.panel.victim)
    far = np.where(distance < 0, len(graph.nodes) + 1, distance)
    for group in (sorted(set(near.tolist())), np.argsort(far, kind="stable").tolist()):
        for node in group:
            if len(chosen) >= MAX_DRAWN:
                break
            chosen.setdefault(int(node))
    return sorted(chosen)


def _drawn_nodes(analysis: Analysis, drawn: Sequence[int]) -> tuple[GraphNode, ...]:
    graph = analysis.panel.graph
    out = []
    for node in drawn:
        deviation = _loudest(analysis.features, node)
        out.append(
            GraphNode(
                node=graph.nodes[node],
                kind=graph.kind(node).value,
                cause_probability=_round(analysis.prediction.cause[node]),
                deviation=None if deviation is None else _significant(abs(float(deviation.z[node]))),
            )
        )
    return tuple(out)


def _drawn_edges(analysis: Analysis, drawn: Sequence[int]) -> tuple[GraphEdge, ...]:
    graph = analysis.panel.graph
    inside = np.zeros(len(graph.nodes), dtype=bool)
    inside[list(drawn)] = True
    count = len(graph.callers)
    on_path = {step.edge for step in analysis.path}
    crossed = analysis.prediction.crossed
    return tuple(
        GraphEdge(
            caller=graph.nodes[graph.callers[k]],
            callee=graph.nodes[graph.callees[k]],
            relation=RELATIONS[int(graph.relations[k])].value,
            probability=_round(max(crossed[k], crossed[count + k])),
            on_path=int(k) in on_path,
        )
        for k in np.flatnonzero(inside[graph.callers] & inside[graph.callees]).tolist()
    )


def _series(analysis: Analysis, causes: Sequence[int]) -> tuple[Series, ...]:
    """The victim's metric and the loudest metric of each candidate and of the path."""
    panel = analysis.panel
    wanted: list[tuple[int, str]] = [(panel.victim, panel.metric)]
    for node in dict.fromkeys([*causes[:3], *(step.source for step in analysis.path)]):
        deviation = _loudest(analysis.features, node)
        if deviation is not None and abs(deviation.z[node]) >= 1.0 and (node, deviation.metric) not in wanted:
            wanted.append((node, deviation.metric))
    return tuple(
        Series(
            node=panel.graph.nodes[node],
            metric=metric,
            unit=describe(metric).unit,
            timestamps=tuple(times),
            values=tuple(values),
        )
        for node, metric in wanted[:6]
        for times, values in [_points(panel, node, metric)]
        if times
    )


def _points(panel: Panel, node: int, metric: str) -> tuple[list[float], list[float | None]]:
    times: list[float] = []
    values: list[float | None] = []
    window = panel.window.get(metric)
    before = panel.baseline.get(metric)
    if before is not None and before.shape[1]:
        cells = -(-before.shape[1] // MAX_POINTS)
        width = panel.baseline_step
        for start in range(0, before.shape[1], cells):
            part = before[node, start : start + cells]
            part = part[np.isfinite(part)]
            times.append(_round(panel.baseline_start + start * width, 3))
            values.append(_significant(float(part.mean())) if len(part) else None)
    if window is not None:
        last = times[-1] if times else -np.inf
        for column in range(window.shape[1]):
            moment = panel.window_start + (column - LEAD) * panel.step
            if moment > last:
                times.append(_round(moment, 3))
                values.append(_optional(float(window[node, column])))
    return times, values


__all__ = ["Analysis", "Options", "analyse", "explain", "rank"]
