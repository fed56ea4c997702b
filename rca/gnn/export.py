"""Write trained networks as one ONNX file with its model card. Needs the ``train`` extra."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch

from rca.gnn.data import Example
from rca.gnn.model import RootCauseNet, SingleGraph

INPUTS = ("node", "edge", "edge_index", "victim")
OUTPUTS = ("cause", "nothing", "mechanism", "crossed", "attention")


def export_onnx(net: SingleGraph, example: Example, path: Path) -> None:
    """Write ``net`` to ``path``, with free numbers of nodes and edges."""
    net.eval()
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    arguments = tensors(example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            net,
            arguments,
            dynamo=True,
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            dynamic_shapes=({0: nodes}, {0: edges}, {1: edges}, None),
            opset_version=18,
            external_data=False,
            verbose=False,
        )
    partial = path.with_suffix(".partial")
    program.save(str(partial), external_data=False)
    model = onnx.load(str(partial))
    without_traces(model)
    onnx.save(model, str(partial))
    partial.replace(path)


def without_traces(model: onnx.ModelProto) -> None:
    """Remove what the exporter notes of this machine: stack traces with paths, on nodes and values."""
    graphs = [model.graph, *model.functions]
    for graph in graphs:
        for node in graph.node:
            del node.metadata_props[:]
            node.doc_string = ""
        for value in graph.value_info:
            del value.metadata_props[:]
            value.doc_string = ""
        del graph.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""
    del model.metadata_props[:]


def tensors(example: Example) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of `SingleGraph` for one example."""
    return (
        torch.from_numpy(example.node),
        torch.from_numpy(example.edge),
        torch.from_numpy(np.ascontiguousarray(example.edge_index)),
        torch.tensor([example.victim]),
    )


def combine(nets: Sequence[RootCauseNet], temperature: float, edge_scale: float, edge_bias: float) -> SingleGraph:
    """The shipped network: the average of ``nets`` with its calibration."""
    single = SingleGraph(list(nets), temperature, edge_scale, edge_bias)
    single.eval()
    return single
