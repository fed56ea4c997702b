"""The network: ONNX against torch-geometric, training that can be interrupted, and what inference insists on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rca import features as feature_module
from rca.counterfactual.mechanism import Estimate
from rca.errors import InvalidInputError, NotFoundError
from rca.features import Features, extract
from rca.gnn import data, evaluate, infer
from rca.gnn.data import Example, edge_labels, seeds, to_example
from rca.simulation.faults import MECHANISMS
from rca.simulation.incidents import sample_incident

# torch warns once a process about the scalars that training logs.

# --- examples (no torch) ----------------------------------------------------------------------------------------------


def test_the_seeds_of_the_splits_never_meet() -> None:
    ranges = [seeds(split, data.SPLIT_ROOM, seed) for seed in range(3) for split in data.SPLIT_OFFSETS]
    ordered = sorted(ranges, key=lambda r: r.start)
    assert all(one.stop <= other.start for one, other in pairwise(ordered))
    # Tests and demos use small seeds: no split does.
    assert ordered[0].start >= data.SPLIT_ROOM


def test_an_example_is_the_incident_as_features_and_labels() -> None:
    simulated = sample_incident(3, nodes=15)
    example = to_example(3, simulated)
    found = extract(simulated.panel)
    np.testing.assert_array_equal(example.node, found.node)
    np.testing.assert_array_equal(example.edge, found.edge)
    assert example.victim == simulated.panel.victim
    assert example.cause == simulated.cause
    assert simulated.mechanism is not None
    assert MECHANISMS[example.mechanism] is simulated.mechanism


def test_edges_on_the_true_path_are_labelled_in_the_direction_that_was_taken() -> None:
    for seed in range(25):
        simulated = sample_incident(seed, nodes=12)
        graph, labels = simulated.panel.graph, edge_labels(simulated)
        count = len(graph.callers)
        assert labels.shape == (2 * count,)
        assert ((labels >= 0) & (labels <= 1)).all()
        for source, target in simulated.path:
            up = (graph.callees == source) & (graph.callers == target)
            down = (graph.callers == source) & (graph.callees == target)
            assert (labels[:count][up] == 1).all()
            assert (labels[count:][down] == 1).all()
            assert up.any() or down.any()
        if simulated.cause < 0:
            assert not labels.any()


def test_examples_come_in_the_order_of_their_seeds() -> None:
    wanted = [5, 3, 8]
    made = [example for chunk in data.generate(wanted, workers=1) for example in chunk]
    assert [example.seed for example in made] == wanted
    np.testing.assert_array_equal(made[1].node, to_example(3, sample_incident(3)).node)


# --- quality and calibration (no torch) -------------------------------------------------------------------------------


def test_calibration_error_is_the_mean_gap_between_confidence_and_success() -> None:
    assert evaluate.calibration_error(np.array([0.95, 0.95]), np.array([1.0, 1.0])) == pytest.approx(0.05)
    # Half of the answers at 0.85 of which 3 in 4 are right, half at 0.15 of which none is.
    confidence = np.array([0.85] * 4 + [0.15] * 4)
    correct = np.array([1.0, 1.0, 1.0, 0.0] + [0.0] * 4)
    assert evaluate.calibration_error(confidence, correct) == pytest.approx(0.5 * 0.10 + 0.5 * 0.15)
    assert evaluate.calibration_error(np.array([1.0]), np.array([1.0])) == 0.0


def test_conformal_bounds_cover_new_errors_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    hits = []
    for _ in range(300):
        low, high = evaluate.conformal_bounds(rng.standard_t(3, 200), 0.95)
        fresh = rng.standard_t(3, 200)
        hits.append(float(((fresh >= low) & (fresh <= high)).mean()))
    assert 0.945 <= float(np.mean(hits)) <= 0.965


def test_conformal_bounds_always_hold_the_estimate_itself() -> None:
    low, high = evaluate.conformal_bounds(np.linspace(2.0, 3.0, 50), 0.95)
    assert low == 0.0
    assert high == pytest.approx(3.0, abs=0.05)


def test_intervals_are_calibrated_only_on_enough_cases() -> None:
    @dataclass
    class Panel:
        metric: str

    @dataclass
    class Analysis:
        panel: Panel

    @dataclass
    class Case:
        analysis: Analysis
        estimates: tuple[tuple[Estimate, float], ...]

    def cases(metric: str, count: int) -> list[Any]:
        rng = np.random.default_rng(1)
        item = Estimate((0,), factual=2.0, normal=1.0, share=1.0, error=0.05)
        return [Case(Analysis(Panel(metric)), ((item, 1.0 + float(rng.normal(0, 0.1))),)) for _ in range(count)]

    scales = evaluate.interval_scales(cases("latency_mean_seconds", 200) + cases("error_ratio", 20))
    assert set(scales) == {"latency"}
    # One unit is the bootstrap error and a part of the change: 0.05 + 0.05 * 1 and a little.
    assert scales["latency"].low == pytest.approx(-2.0, abs=0.6)
    assert scales["latency"].high == pytest.approx(2.0, abs=0.6)


# --- inference (no torch) ---------------------------------------------------------------------------------------------


def test_no_weights_are_not_found_with_the_ways_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no weights in") as caught:
        infer.load(tmp_path)
    assert "rca train" in caught.value.cure


def test_the_variable_names_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(infer.WEIGHTS_VARIABLE, str(tmp_path))
    assert infer.weights_directory() == tmp_path
    monkeypatch.setenv(infer.WEIGHTS_VARIABLE, "")
    assert infer.weights_directory().name == "weights"


# --- the network ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    pytest.importorskip("torch_geometric", reason="needs the train extra")
    module: ModuleType = pytest.importorskip("torch", reason="needs the train extra")
    return module


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return [to_example(seed, sample_incident(seed, nodes=10 + 3 * seed)) for seed in range(8)]


def untrained(torch: ModuleType, examples: list[Example], members: int = 2) -> Any:
    """A small network with random weights and a made-up calibration."""
    from rca.gnn.export import combine
    from rca.gnn.model import Config, RootCauseNet
    from rca.gnn.train import normalise

    torch.manual_seed(7)
    nets = []
    for _ in range(members):
        net = RootCauseNet(
            Config(examples[0].node.shape[1], examples[0].edge.shape[1], len(MECHANISMS), hidden=16, layers=2)
        )
        normalise(net, examples)
        nets.append(net)
    return combine(nets, temperature=1.3, edge_scale=0.8, edge_bias=-0.2)


def write_card(directory: Path, **changes: Any) -> Path:
    """A card for the weights in ``directory``."""
    import hashlib

    content = {
        "name": "test",
        "version": "0",
        "sha256": hashlib.sha256((directory / "prioscope.onnx").read_bytes()).hexdigest(),
        "features_version": feature_module.VERSION,
        "mechanisms": [kind.value for kind in MECHANISMS],
        **changes,
    }
    (directory / "model_card.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def exported(torch: ModuleType, examples: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The untrained network and the directory that it was exported to."""
    from rca.gnn.export import export_onnx

    directory = tmp_path_factory.mktemp("weights")
    net = untrained(torch, examples)
    export_onnx(net, examples[0], directory / "prioscope.onnx")
    yield net, write_card(directory)
    infer._load.cache_clear()


def features_of(example: Example) -> Features:
    """What `Model.predict` needs of `Features`."""
    blank = np.empty(0)
    return Features(
        node=example.node, edge=example.edge, edge_index=example.edge_index, onset=0, deviations={}, edge_deviations={},
        weight=blank, error_weight=blank, own=blank, own_errors=blank, calls=blank, centre=None,
    )  # fmt: skip


def bare(nodes: int, example: Example) -> Example:
    """The first nodes of an example, without any edge."""
    return replace(
        example,
        node=example.node[:nodes],
        edge=example.edge[:0],
        edge_index=np.empty((2, 0), dtype=np.int64),
        victim=0,
        cause=-1,
        crossed=example.crossed[:0],
    )


@pytest.mark.train
def test_onnx_and_torch_geometric_agree(torch: ModuleType, exported: Any, examples: list[Example]) -> None:
    from rca.gnn.export import tensors

    net, directory = exported
    model = infer.load(directory)
    large = to_example(1, sample_incident(1, nodes=90))
    for example in [*examples, large]:
        with torch.no_grad():
            expected = [value.numpy() for value in net(*tensors(example))]
        got = model.predict(features_of(example), example.victim)
        for name, want, have in (
            ("cause", expected[0], got.cause),
            ("nothing", expected[1][0], got.nothing),
            ("mechanism", expected[2], got.mechanism),
            ("crossed", expected[3], got.crossed),
            ("attention", expected[4], got.attention),
        ):
            np.testing.assert_allclose(have, want, atol=1e-5, rtol=0, err_msg=f"{name}, seed {example.seed}")
        assert got.cause.sum() + got.nothing == pytest.approx(1.0, abs=1e-5)
        assert got.mechanism.sum(axis=1) == pytest.approx(np.ones(len(example.node)), abs=1e-5)


@pytest.mark.train
def test_the_order_of_nodes_and_edges_does_not_matter(exported: Any, examples: list[Example]) -> None:
    model = infer.load(exported[1])
    rng = np.random.default_rng(0)
    for example in examples[:4]:
        nodes, edges = len(example.node), len(example.edge)
        order, edge_order = rng.permutation(nodes), rng.permutation(edges)
        place = np.argsort(order)
        moved = replace(
            example,
            node=example.node[order],
            edge=example.edge[edge_order],
            edge_index=place[example.edge_index[:, edge_order]],
            victim=int(place[example.victim]),
        )
        one = model.predict(features_of(example), example.victim)
        other = model.predict(features_of(moved), moved.victim)
        np.testing.assert_allclose(other.cause, one.cause[order], atol=1e-5)
        np.testing.assert_allclose(other.crossed, one.crossed[edge_order], atol=1e-5)
        assert other.nothing == pytest.approx(one.nothing, abs=1e-5)


@pytest.mark.train
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_graphs_without_edges_and_a_lone_node_are_judged(exported: Any, examples: list[Example], nodes: int) -> None:
    got = infer.load(exported[1]).predict(features_of(bare(nodes, examples[0])), 0)
    assert got.cause.shape == (nodes,)
    assert got.mechanism.shape == (nodes, len(MECHANISMS))
    assert got.crossed.shape == got.attention.shape == (0,)
    assert np.isfinite(got.cause).all()
    assert got.cause.sum() + got.nothing <= 1.0 + 1e-5


@pytest.mark.train
def test_two_runs_give_the_same_bits(exported: Any, examples: list[Example]) -> None:
    model = infer.load(exported[1])
    one, two = (model.predict(features_of(examples[3]), examples[3].victim) for _ in range(2))
    assert one.cause.tobytes() == two.cause.tobytes()
    assert one.crossed.tobytes() == two.crossed.tobytes()


@pytest.mark.train
@pytest.mark.parametrize(
    ("break_it", "message", "cure"),
    [
        (lambda d: (d / "prioscope.onnx").write_bytes(b"\x00other"), "is not the file that its model card", "train"),
        (lambda d: (d / "model_card.json").write_text("{"), "model_card.json", "train again"),
        (lambda d: (d / "model_card.json").write_text("{}"), "model_card.json", "train again"),
        (lambda d: write_card(d, features_version=0), "trained on feature layout 0", "rca train"),
    ],
    ids=["other weights", "torn card", "empty card", "old features"],
)
def test_weights_that_do_not_fit_are_refused(
    exported: Any, tmp_path: Path, break_it: Any, message: str, cure: str
) -> None:
    directory = Path(shutil.copytree(exported[1], tmp_path / "weights"))
    break_it(directory)
    with pytest.raises(InvalidInputError, match=message) as caught:
        infer.load(directory)
    assert cure in caught.value.cure


@pytest.mark.train
def test_inference_imports_no_torch(exported: Any) -> None:
    code = (
        "import sys; from pathlib import Path; from rca.gnn import infer; infer.load(Path(sys.argv[1]));"
        "bad = {'torch', 'torch_geometric', 'pandas', 'scipy'} & set(sys.modules); sys.exit(f'{bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(exported[1])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- training ---------------------------------------------------------------------------------------------------------


def tiny() -> Any:
    from rca.gnn.recipe import Recipe

    return Recipe(
        incidents=6, validation=2, calibration=2, test=2, members=1, epochs=4, patience=4, batch_nodes=60, hidden=8,
        layers=1,
    )  # fmt: skip


def quiet(what: str, done: int, total: int) -> None:
    """Show no progress."""


class StoppedError(Exception):
    """Stands in for a power cut."""


def same_weights(torch: ModuleType, one: Any, other: Any) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.train
def test_a_seed_decides_the_weights(torch: ModuleType, examples: list[Example]) -> None:
    from rca.gnn.train import fit

    train, validation = examples[:6], examples[6:]
    one, history = fit(tiny(), train, validation, None, quiet)
    again, same_history = fit(tiny(), train, validation, None, quiet)
    other, _ = fit(replace(tiny(), seed=1), train, validation, None, quiet)
    member, _ = fit(tiny(), train, validation, None, quiet, member=1)
    assert same_weights(torch, one, again)
    assert history == same_history
    assert not same_weights(torch, one, other)
    assert not same_weights(torch, one, member)


@pytest.mark.train
@pytest.mark.parametrize("stop", ["epoch 2/4", "epoch 4/4"])
def test_an_interrupted_training_goes_on_to_the_same_weights(
    torch: ModuleType, examples: list[Example], tmp_path: Path, stop: str
) -> None:
    from rca.gnn.train import fit

    train, validation = examples[:6], examples[6:]
    whole, history = fit(tiny(), train, validation, None, quiet)

    def cut(what: str, done: int, total: int) -> None:
        if stop in what and done > 2:
            raise StoppedError

    checkpoint = tmp_path / "network.pt"
    with pytest.raises(StoppedError):
        fit(tiny(), train, validation, checkpoint, cut)
    resumed, resumed_history = fit(tiny(), train, validation, checkpoint, quiet)
    assert same_weights(torch, whole, resumed)
    assert resumed_history == history
    # Finished work is not done again.
    epochs: list[str] = []
    again, _ = fit(tiny(), train, validation, checkpoint, lambda what, *_: epochs.append(what))
    assert same_weights(torch, whole, again)
    assert epochs == []


@pytest.mark.train
def test_a_checkpoint_of_another_recipe_is_refused(torch: ModuleType, examples: list[Example], tmp_path: Path) -> None:
    from rca.gnn.train import fit

    fit(replace(tiny(), epochs=1), examples[:6], examples[6:], tmp_path / "network.pt", quiet)
    with pytest.raises(InvalidInputError, match="belongs to another training recipe") as caught:
        fit(tiny(), examples[:6], examples[6:], tmp_path / "network.pt", quiet)
    assert "delete it" in caught.value.cure


@pytest.mark.train
def test_training_stops_early_and_keeps_the_best(torch: ModuleType, examples: list[Example]) -> None:
    from rca.gnn.train import fit, validate

    recipe = replace(tiny(), epochs=60, patience=2, learning_rate=0.3)
    net, history = fit(recipe, examples[:6], examples[6:], None, quiet)
    assert len(history) < 60
    scores = [row["cause"] + recipe.edge_weight * row["edge"] for row in history]
    assert int(np.argmin(scores)) == len(scores) - 1 - recipe.patience
    found = validate(net, examples[6:], recipe)
    assert found["cause"] + recipe.edge_weight * found["edge"] == pytest.approx(min(scores))


@pytest.mark.train
def test_simulated_examples_are_kept_and_completed(
    torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rca.gnn import train

    asked: list[list[int]] = []

    def generate(wanted: Any, workers: int) -> Iterator[list[Example]]:
        asked.append(list(wanted))
        for seed in wanted:
            yield [to_example(seed, sample_incident(seed, nodes=10))]

    monkeypatch.setattr(data, "generate", generate)
    first = train.make_examples("train", 3, tiny(), tmp_path, quiet)
    more = train.make_examples("train", 5, tiny(), tmp_path, quiet)
    fewer = train.make_examples("train", 2, tiny(), tmp_path, quiet)
    wanted = list(seeds("train", 5))
    assert asked == [wanted[:3], wanted[3:], []]
    assert [e.seed for e in more] == wanted
    assert [e.seed for e in fewer] == wanted[:2]
    for one, other in zip(first, more, strict=False):
        np.testing.assert_array_equal(one.node, other.node)


@pytest.mark.train
def test_a_batch_is_its_graphs_side_by_side(torch: ModuleType, examples: list[Example]) -> None:
    from rca.gnn.train import batches, collate

    joined = collate(examples[:3])
    sizes = [len(e.node) for e in examples[:3]]
    assert joined.sizes == tuple(sizes)
    assert joined.node.shape[0] == sum(sizes)
    assert joined.victims.tolist() == [
        examples[0].victim,
        sizes[0] + examples[1].victim,
        sizes[0] + sizes[1] + examples[2].victim,
    ]
    assert joined.edge_index.max() < sum(sizes)
    none = collate([replace(examples[0], cause=-1), examples[1]])
    assert none.cause.tolist()[0] == -1
    seen = [n for batch in batches(examples, np.arange(len(examples)), 40) for n in batch.sizes]
    assert seen == [len(e.node) for e in examples]


@pytest.mark.train
def test_scores_in_a_batch_are_those_of_each_graph_alone(torch: ModuleType, examples: list[Example]) -> None:
    from rca.gnn.train import collate, graph_log_softmax

    single = untrained(torch, examples, members=1)
    net = single.nets[0]
    joined = collate(examples[:3])
    with torch.no_grad():
        cause, nothing, *_ = net(joined.node, joined.edge, joined.edge_index, joined.batch, joined.victims)
        log_cause, log_nothing = graph_log_softmax(cause, nothing, joined.batch)
        start = 0
        for graph, example in enumerate(examples[:3]):
            alone = collate([example])
            one, none, *_ = net(alone.node, alone.edge, alone.edge_index, alone.batch, alone.victims)
            expected = torch.log_softmax(torch.cat([one, none]), dim=0)
            size = len(example.node)
            assert log_cause[start : start + size].tolist() == pytest.approx(expected[:-1].tolist(), abs=1e-4)
            assert float(log_nothing[graph]) == pytest.approx(float(expected[-1]), abs=1e-4)
            start += size


@pytest.mark.train
def test_the_whole_recipe_leaves_weights_with_a_card_that_fits(
    torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rca.gnn import train

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    notes: list[str] = []
    quality = train.train(tiny(), tmp_path, quiet, notes.append)
    assert (tmp_path / "MODEL_CARD.md").read_text().startswith("# Model card: prioscope-gatv2")
    card = json.loads((tmp_path / "model_card.json").read_text())
    assert card["recipe"]["incidents"] == 6
    assert card["quality"]["incidents"] == quality.incidents
    assert quality.incidents + quality.quiet == 2
    model = infer.load(tmp_path)
    simulated = sample_incident(0, nodes=12)
    prediction = model.predict(extract(simulated.panel), simulated.panel.victim)
    assert prediction.cause.sum() + prediction.nothing == pytest.approx(1.0, abs=1e-5)
    assert any("temperature" in note for note in notes)


@pytest.mark.train
def test_without_edges_equal_nodes_get_equal_scores(exported: Any, examples: list[Example]) -> None:
    alone = bare(4, examples[0])
    node = alone.node.copy()
    node[1:] = node[1]
    got = infer.load(exported[1]).predict(features_of(replace(alone, node=node)), 0)
    assert got.cause[1:] == pytest.approx(got.cause[1], abs=1e-6)


@pytest.mark.train
def test_a_lone_node_and_nothing_share_the_probability(exported: Any, examples: list[Example]) -> None:
    got = infer.load(exported[1]).predict(features_of(bare(1, examples[0])), 0)
    assert got.cause.sum() + got.nothing == pytest.approx(1.0, abs=1e-5)


@pytest.mark.train
def test_a_torn_cache_is_repaired(torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rca.gnn import train

    asked: list[int] = []

    def generate(wanted: Any, workers: int) -> Iterator[list[Example]]:
        asked.append(len(wanted))
        for seed in wanted:
            yield [to_example(seed, sample_incident(seed, nodes=10))]

    monkeypatch.setattr(data, "generate", generate)
    train.make_examples("train", 3, tiny(), tmp_path, quiet)
    (cache,) = tmp_path.glob("train*.pickle")
    cache.write_bytes(cache.read_bytes()[:-5000])
    for _ in range(2):
        train.make_examples("train", 3, tiny(), tmp_path, quiet)
    assert asked == [3, 1, 0]
