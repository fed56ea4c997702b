"""The network: GATv2 with edge attributes (Brody et al., ICLR'22) and heads for cause, mechanism and propagation.

Needs the ``train`` extra. Inputs carry no node identity (docs/architecture.md, decision 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv
from torch_geometric.utils import scatter


@dataclass(frozen=True)
class Config:
    """Sizes of the network."""

    node_features: int
    edge_features: int
    mechanisms: int
    hidden: int = 64
    heads: int = 4
    edge_hidden: int = 32
    layers: int = 3
    dropout: float = 0.1


def _mlp(inputs: int, hidden: int, outputs: int, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, outputs))


class RootCauseNet(nn.Module):  # type: ignore[misc]
    """Scores every node as the cause, every edge as crossed, and every node's mechanism were it the cause."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.hidden
        self.register_buffer("node_mean", torch.zeros(config.node_features))
        self.register_buffer("node_scale", torch.ones(config.node_features))
        self.register_buffer("edge_mean", torch.zeros(config.edge_features))
        self.register_buffer("edge_scale", torch.ones(config.edge_features))
        self.encode_node = _mlp(config.node_features, 2 * width, width, config.dropout)
        self.encode_edge = _mlp(config.edge_features, 2 * config.edge_hidden, config.edge_hidden, config.dropout)
        self.convolutions = nn.ModuleList(
            GATv2Conv(
                width,
                width // config.heads,
                heads=config.heads,
                edge_dim=config.edge_hidden,
                add_self_loops=False,
                dropout=0.0,
            )
            for _ in range(config.layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(config.layers))
        self.mixes = nn.ModuleList(_mlp(2 * width, width, width, config.dropout) for _ in range(config.layers))
        context = 3 * width
        self.cause = _mlp(2 * width + context, 2 * width, 1, config.dropout)
        self.nothing = _mlp(context, width, 1, config.dropout)
        self.mechanism = _mlp(2 * width, width, config.mechanisms)
        self.crossed = _mlp(3 * width + config.edge_hidden, 2 * width, 1, config.dropout)

    def forward(
        self, node: Tensor, edge: Tensor, edge_index: Tensor, batch: Tensor, victims: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Run the network on a batch of graphs.

        Args:
            node: [N, F]. edge: [M, G]. edge_index: [2, M]. batch: graph of each node, [N]. victims: [B].

        Returns:
            Cause logits [N], nothing-broke logits [B], mechanism logits [N, K], crossed logits [M], and the last
            layer's attention averaged over heads [M].
        """
        x = self.encode_node((node - self.node_mean) * self.node_scale)
        e = self.encode_edge((edge - self.edge_mean) * self.edge_scale)
        skip = x
        attention = edge.new_zeros(edge.shape[0])
        for convolution, norm, mix in zip(self.convolutions, self.norms, self.mixes, strict=True):
            message, (_, weights) = convolution(norm(x), edge_index, e, return_attention_weights=True)
            attention = weights.mean(dim=1)
            x = x + mix(torch.cat([x, nn.functional.gelu(message)], dim=1))
        graphs = victims.shape[0]
        mean = scatter(x, batch, dim=0, dim_size=graphs, reduce="mean")
        top = scatter(x, batch, dim=0, dim_size=graphs, reduce="max")
        context = torch.cat([mean, top, x[victims]], dim=1)
        cause = self.cause(torch.cat([x, skip, context[batch]], dim=1)).squeeze(1)
        nothing = self.nothing(context).squeeze(1)
        mechanism = self.mechanism(torch.cat([x, skip], dim=1))
        source, target = edge_index[0], edge_index[1]
        pair = torch.cat([x[source], x[target], x[victims][batch[source]], e], dim=1)
        return cause, nothing, mechanism, self.crossed(pair).squeeze(1), attention


class SingleGraph(nn.Module):  # type: ignore[misc]
    """The network for one incident with its calibration: probabilities instead of logits. This is what ships."""

    def __init__(self, nets: list[RootCauseNet], temperature: float, edge_scale: float, edge_bias: float) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)
        self.temperature = temperature
        self.edge_scale = edge_scale
        self.edge_bias = edge_bias

    def forward(
        self, node: Tensor, edge: Tensor, edge_index: Tensor, victim: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Probability of each node being the cause [N], of nothing being broken [1], of each mechanism [N, K], of each
        edge being crossed [M], and the attention [M].
        """
        batch = torch.zeros_like(node[:, 0], dtype=torch.int64)
        joint, mechanisms, edges, attentions = [], [], [], []
        for net in self.nets:
            cause, nothing, mechanism, crossed, attention = net(node, edge, edge_index, batch, victim)
            joint.append(torch.log_softmax(torch.cat([cause, nothing]), dim=0))
            mechanisms.append(torch.log_softmax(mechanism, dim=1))
            edges.append(crossed)
            attentions.append(attention)
        logits = torch.stack(joint).mean(dim=0)
        probability = torch.softmax(logits / self.temperature, dim=0)
        crossed = torch.sigmoid(torch.stack(edges).mean(dim=0) * self.edge_scale + self.edge_bias)
        kinds = torch.softmax(torch.stack(mechanisms).mean(dim=0), dim=1)
        return probability[:-1], probability[-1:], kinds, crossed, torch.stack(attentions).mean(dim=0)
