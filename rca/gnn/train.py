"""Training: simulate, fit, stop early, calibrate, export. Needs the ``train`` extra.

Everything is seeded and single-threaded where order matters, so that one command gives the same weights again.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.utils import scatter

from rca.errors import InvalidInputError
from rca.gnn import data
from rca.gnn.data import Example
from rca.gnn.model import Config, RootCauseNet
from rca.gnn.recipe import Recipe
from rca.simulation.faults import MECHANISMS

if TYPE_CHECKING:
    from rca.gnn.evaluate import Quality

#: Called with (what is going on, done, total).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Batch:
    """Several incidents side by side."""

    node: Tensor
    edge: Tensor
    edge_index: Tensor
    batch: Tensor
    victims: Tensor
    cause: Tensor
    mechanism: Tensor
    crossed: Tensor
    sizes: tuple[int, ...]


def collate(examples: Sequence[Example]) -> Batch:
    """Join graphs into one with offsets; a cause of -1 (nothing broke) stays -1."""
    offsets = np.cumsum([0, *(len(e.node) for e in examples)])
    return Batch(
        node=torch.from_numpy(np.concatenate([e.node for e in examples])),
        edge=torch.from_numpy(np.concatenate([e.edge for e in examples])),
        edge_index=torch.from_numpy(
            np.concatenate([e.edge_index + o for e, o in zip(examples, offsets, strict=False)], axis=1)
        ),
        batch=torch.from_numpy(np.repeat(np.arange(len(examples)), [len(e.node) for e in examples])),
        victims=torch.tensor([e.victim + o for e, o in zip(examples, offsets, strict=False)]),
        cause=torch.tensor([e.cause + o if e.cause >= 0 else -1 for e, o in zip(examples, offsets, strict=False)]),
        mechanism=torch.tensor([e.mechanism for e in examples]),
        crossed=torch.from_numpy(np.concatenate([e.crossed for e in examples])),
        sizes=tuple(len(e.node) for e in examples),
    )


def batches(examples: Sequence[Example], order: np.ndarray[Any, Any], nodes: int) -> Iterable[Batch]:
    """Group examples in ``order`` until a batch has about ``nodes`` nodes."""
    group: list[Example] = []
    total = 0
    for position in order:
        group.append(examples[position])
        total += len(examples[position].node)
        if total >= nodes:
            yield collate(group)
            group, total = [], 0
    if group:
        yield collate(group)


def graph_log_softmax(cause: Tensor, nothing: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities over the nodes of each graph and the option that nothing broke."""
    graphs = nothing.shape[0]
    top = torch.maximum(scatter(cause, batch, dim_size=graphs, reduce="max"), nothing).detach()
    total = scatter((cause - top[batch]).exp(), batch, dim_size=graphs, reduce="sum") + (nothing - top).exp()
    norm = top + total.log()
    return cause - norm[batch], nothing - norm


def losses(net: RootCauseNet, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Cause loss, edge loss and mechanism loss of one batch, each a mean over graphs."""
    cause, nothing, mechanism, crossed, _ = net(batch.node, batch.edge, batch.edge_index, batch.batch, batch.victims)
    node_log, nothing_log = graph_log_softmax(cause, nothing, batch.batch)
    broken = batch.cause >= 0
    picked = torch.where(broken, node_log[batch.cause.clamp(min=0)], nothing_log)
    of_edge = batch.batch[batch.edge_index[0]]
    per_edge = torch.nn.functional.binary_cross_entropy_with_logits(crossed, batch.crossed, reduction="none")
    per_edge = per_edge * (1.0 + 2.0 * batch.crossed)
    edge_loss = scatter(per_edge, of_edge, dim_size=len(batch.sizes), reduce="mean")
    if broken.any():
        kind_loss = torch.nn.functional.cross_entropy(mechanism[batch.cause[broken]], batch.mechanism[broken])
    else:
        kind_loss = mechanism.sum() * 0.0
    return -picked.mean(), edge_loss.mean(), kind_loss


def make_examples(split: str, count: int, recipe: Recipe, cache: Path | None, progress: Progress) -> list[Example]:
    """Simulate ``count`` incidents, reusing and completing what an interrupted run left in ``cache``."""
    wanted = data.seeds(split, count, recipe.seed)
    done: list[Example] = []
    path = None if cache is None else cache / f"{split}-{recipe.seed}-{_source_digest()}.pickle"
    if path is not None and path.exists():
        good = 0
        with path.open("rb") as cached:
            while True:
                try:
                    done += pickle.load(cached)  # noqa: S301 - our own cache, in a directory that the user named
                except EOFError:
                    break
                except Exception:  # whatever a torn record raises, what follows it is not usable
                    break
                good = cached.tell()
        # An interrupted write leaves a torn record: what is appended must not lie behind it.
        os.truncate(path, good)
        done = done[:count]
        progress(f"simulate {split}", len(done), count)
    missing = wanted[len(done) :]
    stream = None if path is None else path.open("ab")
    try:
        for chunk in data.generate(missing, os.cpu_count() or 1):
            done += chunk
            if stream is not None:
                pickle.dump(chunk, stream)
            progress(f"simulate {split}", len(done), count)
    finally:
        if stream is not None:
            stream.close()
    return done


def _source_digest() -> str:
    """Digest of the code that decides the examples: after a change of it, old examples are not reused."""
    import rca

    root = Path(rca.__file__).parent
    files = [root / "features.py", root / "panel.py", root / "graph.py", *sorted((root / "simulation").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def normalise(net: RootCauseNet, examples: Sequence[Example]) -> None:
    """Set the input scaling from (a sample of) the training set."""
    sample = examples[:4000]
    for name in ("node", "edge"):
        stacked = np.concatenate([getattr(e, name) for e in sample])
        mean, std = stacked.mean(axis=0), stacked.std(axis=0)
        getattr(net, f"{name}_mean").copy_(torch.from_numpy(mean))
        getattr(net, f"{name}_scale").copy_(torch.from_numpy((1.0 / np.maximum(std, 0.05)).astype(np.float32)))


def fit(
    recipe: Recipe,
    train: Sequence[Example],
    validation: Sequence[Example],
    checkpoint: Path | None,
    progress: Progress,
    member: int = 0,
    note: Callable[[str], None] = lambda _: None,
) -> tuple[RootCauseNet, list[dict[str, float]]]:
    """Train network number ``member``; resumes from ``checkpoint`` when that exists and belongs to the same recipe.

    Raises:
        InvalidInputError: the checkpoint belongs to another recipe.
    """
    torch.manual_seed(recipe.seed * 1000 + member)
    torch.use_deterministic_algorithms(True)
    config = Config(
        node_features=train[0].node.shape[1],
        edge_features=train[0].edge.shape[1],
        mechanisms=len(MECHANISMS),
        hidden=recipe.hidden,
        layers=recipe.layers,
        dropout=recipe.dropout,
    )
    net = RootCauseNet(config)
    normalise(net, train)
    optimizer = torch.optim.AdamW(net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    steps = math.ceil(sum(len(e.node) for e in train) / recipe.batch_nodes) * recipe.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.learning_rate, total_steps=max(steps + recipe.epochs, 20), pct_start=0.1
    )
    history: list[dict[str, float]] = []
    best: dict[str, Tensor] = {}
    best_loss, since_best, start = math.inf, 0, 0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        if saved["recipe"] != asdict(recipe):
            raise InvalidInputError(
                f"{checkpoint} belongs to another training recipe", cure="delete it, or use the same options"
            )
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        history, best, best_loss = saved["history"], saved["best"], saved["best_loss"]
        since_best, start = saved["since_best"], saved["epoch"]
        torch.set_rng_state(saved["rng"])
    for epoch in range(start, recipe.epochs):
        if since_best >= recipe.patience:
            break
        net.train()
        order = np.random.default_rng([recipe.seed, member, epoch]).permutation(len(train))
        seen = 0
        total = np.zeros(3)
        for batch in batches(train, order, recipe.batch_nodes):
            cause, edge, kind = losses(net, batch)
            loss = cause + recipe.edge_weight * edge + recipe.mechanism_weight * kind
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seen += len(batch.sizes)
            total += len(batch.sizes) * np.array([float(part.detach()) for part in (cause, edge, kind)])
            progress(f"network {member + 1}/{recipe.members}, epoch {epoch + 1}/{recipe.epochs}", seen, len(train))
        report = {"epoch": epoch + 1.0, "train_cause": total[0] / seen, "train_edge": total[1] / seen}
        report |= validate(net, validation, recipe)
        history.append(report)
        score = report["cause"] + recipe.edge_weight * report["edge"]
        if score < best_loss:
            best_loss, since_best = score, 0
            best = {name: value.clone() for name, value in net.state_dict().items()}
        else:
            since_best += 1
        note(f"network {member + 1}, epoch {epoch + 1}: loss {report['cause']:.3f}, top-1 {report['top1']:.3f}")
        if checkpoint is not None:
            _save(
                checkpoint,
                {
                    "recipe": asdict(recipe),
                    "net": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "history": history,
                    "best": best,
                    "best_loss": best_loss,
                    "since_best": since_best,
                    "epoch": epoch + 1,
                    "rng": torch.get_rng_state(),
                },
            )
    net.load_state_dict(best)
    net.eval()
    return net, history


def _save(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(path)


@torch.no_grad()  # type: ignore[untyped-decorator]
def validate(net: RootCauseNet, examples: Sequence[Example], recipe: Recipe) -> dict[str, float]:
    """Losses and accuracies on ``examples``."""
    net.eval()
    total = np.zeros(3)
    hits = broken_count = quiet_hits = quiet_count = kind_hits = 0
    for batch in batches(examples, np.arange(len(examples)), 4 * recipe.batch_nodes):
        total += len(batch.sizes) * np.array([float(v) for v in losses(net, batch)])
        cause, nothing, mechanism, _, _ = net(batch.node, batch.edge, batch.edge_index, batch.batch, batch.victims)
        start = 0
        for graph, size in enumerate(batch.sizes):
            scores = cause[start : start + size]
            if batch.cause[graph] >= 0:
                broken_count += 1
                hits += int(int(scores.argmax()) + start == int(batch.cause[graph]))
                kind_hits += int(int(mechanism[batch.cause[graph]].argmax()) == int(batch.mechanism[graph]))
            else:
                quiet_count += 1
                quiet_hits += int(float(nothing[graph]) > float(scores.max()))
            start += size
    count = len(examples)
    return {
        "cause": total[0] / count,
        "edge": total[1] / count,
        "mechanism": total[2] / count,
        "top1": hits / max(broken_count, 1),
        "mechanism_top1": kind_hits / max(broken_count, 1),
        "quiet": quiet_hits / max(quiet_count, 1),
    }


@torch.no_grad()  # type: ignore[untyped-decorator]
def calibrate(nets: Sequence[RootCauseNet], examples: Sequence[Example]) -> tuple[float, float, float]:
    """Temperature of the cause probabilities, and scale and bias (Platt) of the edge logits, on fresh incidents."""
    joint: list[Tensor] = []
    labels: list[int] = []
    edge_logits: list[Tensor] = []
    edge_labels: list[Tensor] = []
    for example in examples:
        batch = collate([example])
        log, edge = [], []
        for net in nets:
            cause, nothing, _, crossed, _ = net(batch.node, batch.edge, batch.edge_index, batch.batch, batch.victims)
            log.append(torch.log_softmax(torch.cat([cause, nothing]), dim=0))
            edge.append(crossed)
        joint.append(torch.stack(log).mean(dim=0))
        labels.append(example.cause if example.cause >= 0 else len(example.node))
        edge_logits.append(torch.stack(edge).mean(dim=0))
        edge_labels.append(batch.crossed)
    grid = np.exp(np.linspace(np.log(0.3), np.log(4.0), 200))
    cost = [
        -float(np.mean([float(torch.log_softmax(z / t, 0)[y]) for z, y in zip(joint, labels, strict=True)]))
        for t in grid
    ]
    temperature = float(grid[int(np.argmin(cost))])
    flat, target = torch.cat(edge_logits), torch.cat(edge_labels)
    with torch.enable_grad():
        parameters = torch.tensor([1.0, 0.0], requires_grad=True)
        solver = torch.optim.LBFGS([parameters], max_iter=100)

        def closure() -> Tensor:
            solver.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(flat * parameters[0] + parameters[1], target)
            loss.backward()
            return loss

        solver.step(closure)
    scale, bias = (float(v) for v in parameters.detach())
    return temperature, scale, bias


def train(recipe: Recipe, out: Path, progress: Progress, note: Callable[[str], None]) -> Quality:
    """Run the whole recipe and leave ``prioscope.onnx``, ``model_card.json`` and ``MODEL_CARD.md`` in ``out``.

    Interrupted at any point, the same call goes on from what ``out/work`` holds.

    Raises:
        InvalidInputError: ``out/work`` belongs to another recipe.
    """
    from rca.gnn import card, evaluate, infer
    from rca.gnn.export import combine, export_onnx

    started = time.monotonic()
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(os.cpu_count() or 1)
    examples = {
        split: make_examples(split, count, recipe, work, progress)
        for split, count in (("train", recipe.incidents), ("validation", recipe.validation))
    }
    nets, histories = [], []
    for member in range(recipe.members):
        net, history = fit(
            recipe,
            examples["train"],
            examples["validation"],
            work / f"network-{recipe.seed}-{member}.pt",
            progress,
            member,
            note,
        )
        nets.append(net)
        histories.append(history)
    fresh = make_examples("calibration", recipe.calibration, recipe, work, progress)
    temperature, edge_scale, edge_bias = calibrate(nets, fresh)
    note(f"temperature {temperature:.3f}, edge scale {edge_scale:.3f}, edge bias {edge_bias:.3f}")
    export_onnx(combine(nets, temperature, edge_scale, edge_bias), fresh[0], out / "prioscope.onnx")
    card.write(out, recipe, {}, None, histories, time.monotonic() - started)
    model = infer.load(out)
    wanted = data.seeds("calibration", recipe.calibration, recipe.seed)
    judged = evaluate.judge(model, wanted, lambda done: progress("calibrate intervals", done, len(wanted)))
    scales = evaluate.interval_scales(judged)
    held_out = data.seeds("test", recipe.test, recipe.seed)
    judged = evaluate.judge(model, held_out, lambda done: progress("test", done, len(held_out)))
    quality = evaluate.summarise(judged, scales)
    card.write(out, recipe, scales, quality, histories, time.monotonic() - started)
    return quality
