"""The model card: what the weights are, how they were made, how good they are, and where they should not be trusted."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rca import __version__
from rca.counterfactual.mechanism import IntervalScale
from rca.features import VERSION
from rca.simulation.faults import MECHANISMS

if TYPE_CHECKING:
    from rca.gnn.evaluate import Quality
    from rca.gnn.recipe import Recipe

NAME = "prioscope-gatv2"


def write(
    out: Path,
    recipe: Recipe,
    scales: Mapping[str, IntervalScale],
    quality: Quality | None,
    histories: Sequence[Sequence[Mapping[str, float]]],
    seconds: float,
) -> None:
    """Write ``model_card.json`` (read by inference) and ``MODEL_CARD.md`` (for people) beside the weights."""
    import torch
    import torch_geometric

    digest = hashlib.sha256((out / "prioscope.onnx").read_bytes()).hexdigest()
    versions = {
        "prioscope": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch-geometric": str(torch_geometric.__version__),
    }
    content: dict[str, Any] = {
        "name": NAME,
        "version": f"{__version__}+{digest[:8]}",
        "sha256": digest,
        "features_version": VERSION,
        "mechanisms": [kind.value for kind in MECHANISMS],
        "intervals": dict(scales),
        "recipe": asdict(recipe),
        "versions": versions,
        "training_minutes": round(seconds / 60, 1),
        "quality": quality,
        "history": [[{k: round(float(v), 4) for k, v in row.items()} for row in history] for history in histories],
    }
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=2)
    (out / "model_card.json").write_bytes(encoded + b"\n")
    (out / "MODEL_CARD.md").write_text(_markdown(content, quality), encoding="utf-8")


def _markdown(content: Mapping[str, Any], quality: Quality | None) -> str:
    recipe, versions = content["recipe"], content["versions"]
    lines = [
        f"# Model card: {content['name']} {content['version']}",
        "",
        "Ranks the nodes of a call-chain graph as root cause of an incident, names the mechanism, and says which",
        "edges the anomaly crossed. GATv2 with edge attributes; inputs carry no node identity. Trained on simulated",
        "incidents only; no public benchmark's labels were used.",
        "",
        "## Recipe",
        "",
        f"`rca train` with seed {recipe['seed']}: {recipe['incidents']:,} simulated incidents for training,",
        f"{recipe['validation']:,} for early stopping, {recipe['calibration']:,} for calibration and",
        f"{recipe['test']:,} held out, on disjoint seeds, each with its own random topology;",
        f"{recipe['members']} networks averaged.",
        f"It took {content['training_minutes']} minutes with Python {versions['python']}, torch {versions['torch']}",
        f"and torch-geometric {versions['torch-geometric']}.",
        "",
        "## Quality on held-out simulated incidents",
        "",
    ]
    if quality is None:
        lines.append("Not measured yet.")
    else:
        rows = [
            ("incidents, quiet windows", f"{quality.incidents}, {quality.quiet}"),
            ("top-1", f"{quality.top1:.3f}"),
            ("top-3", f"{quality.top3:.3f}"),
            ("mechanism, given the cause", f"{quality.mechanism:.3f}"),
            ("a cause named (≥ 50 %) in a quiet window", f"{quality.named_when_quiet:.3f}"),
            ("path steps, F1", f"{quality.path_f1:.3f}"),
            ("true counterfactual inside the 95 % interval", f"{quality.coverage:.3f}"),
            ("median width of that interval, of the factual value", f"{quality.interval_width:.3f}"),
            ("expected calibration error of the confidence", f"{quality.calibration_error:.3f}"),
        ]
        rows += [(f"top-1, {kind}", f"{value:.3f}") for kind, value in quality.top1_by_mechanism.items()]
        lines += ["| measure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    lines += [
        "",
        "## Limits",
        "",
        "- A cause that is not monitored is reported as the nearest monitored node, or as inconclusive.",
        "- The confidence is calibrated on the simulation; on a platform unlike it, it may be too high or too low.",
        "- One root cause is assumed; a second, independent one lowers the confidence.",
        "- Slow links that no trace covers look like slow callers.",
        "",
    ]
    return "\n".join(lines)
