"""The lightning indexer: a score of each earlier token, and the loss by which it learns (DeepSeek-V3.2, 2025).

    score(t, s) = sum over heads j of w_tj relu(q_tj k_s)

Shapes: B samples, S positions, T tokens that were read, r rows of positions at a time, h heads of D channels."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.dsa.options import DSAOptions
from megatron.model.initialisation import Initialisation
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.linear import ColumnLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, ZEROS
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role

ELEMENTS = 2**26  # of the scores of all heads at one time
NORM_EPSILON = 1e-6


class Indexer(nn.Module):
    """x [B, S, H] and the queries' input to queries [B, S, h, D], keys [B, S, 1, D] and weights [B, S, h].

    Every tensor parallel rank computes all of it. Each adds its share of the loss, so gradients are summed."""

    def __init__(self, make: ParameterFactory, hidden_size: int, options: DSAOptions, init: Initialisation):
        super().__init__()
        self.axis, self.heads, D = make.mesh.tensor, options.index_heads, options.index_dim
        self.scale = (self.heads * D) ** -0.5

        def matrix(name: str, inputs: int, outputs: int) -> ColumnLinear:
            return ColumnLinear(
                make.scope(name), inputs, (outputs,), init=init.reads(inputs, outputs), role=Role.ROUTER, shard=False
            )

        self.query = matrix("query", options.query_rank or hidden_size, self.heads * D)
        self.key = matrix("key", hidden_size, D)
        self.weigh = matrix("weigh", hidden_size, self.heads)
        self.key_norm = nn.ParameterList(
            make.scope("key_norm").parameter(name, (D,), role=Role.NORM, init=start)
            for name, start in (("weight", ONES), ("bias", ZEROS))
        )

    def forward(self, x_BSH: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = (sum_gradient(each, self.axis) for each in self.key_norm)
        k = F.layer_norm(self.key(x_BSH), weight.shape, weight, bias, NORM_EPSILON)
        q = self.query(inputs).unflatten(-1, (self.heads, -1))
        return q, k.unsqueeze(2), at_least_fp32(self.weigh(x_BSH)) * self.scale


def scores(q_BrhD: Tensor, k_BTD: Tensor, weights_Brh: Tensor) -> Tensor:
    """[B, r, T], fp32."""
    products = at_least_fp32(q_BrhD.transpose(1, 2)) @ at_least_fp32(k_BTD).unsqueeze(1).transpose(-1, -2)
    return (weights_Brh.unsqueeze(2) @ products.relu().transpose(1, 2)).squeeze(2)


def pieces(q_BShD: Tensor, tokens: int) -> Iterator[slice]:
    """Runs of positions whose scores are computed at one time."""
    rows = max(1, ELEMENTS // (q_BShD.shape[0] * q_BShD.shape[2] * tokens))
    return (slice(at, at + rows) for at in range(0, q_BShD.shape[1], rows))


@torch.no_grad()
def chosen(q_BShD: Tensor, k_BTD: Tensor, weights_BSh: Tensor, seen_BST: Tensor, count: int) -> Tensor:
    """Of the tokens that each position sees, the `count` with the largest scores, bool [B, S, T]."""
    if count >= k_BTD.shape[1]:
        return seen_BST
    found = []
    for rows in pieces(q_BShD, k_BTD.shape[1]):
        seen = seen_BST[:, rows]
        score = scores(q_BShD[:, rows], k_BTD, weights_BSh[:, rows]).masked_fill(~seen, float("-inf"))
        # of equal scores (often 0) the earlier token, so that the choice does not depend on tokens behind
        best = torch.sort(score, dim=-1, descending=True, stable=True).indices[..., :count]
        found.append(torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True) & seen)
    return torch.cat(found, 1)


def divergence(q_BShD: Tensor, k_BTD: Tensor, weights_BSh: Tensor, read_BST: Tensor, target_BST: Tensor) -> Tensor:
    """Mean over positions of KL(target, softmax of the scores), both of the tokens that were read."""
    total = [
        recomputed(_divergence, q_BShD[:, rows], k_BTD, weights_BSh[:, rows], read_BST[:, rows], target_BST[:, rows])
        for rows in pieces(q_BShD, k_BTD.shape[1])
    ]
    return torch.stack(total).sum() / (target_BST.shape[0] * target_BST.shape[1])


def _divergence(q: Tensor, k: Tensor, weights: Tensor, read: Tensor, target: Tensor) -> Tensor:
    own = scores(q, k, weights).masked_fill(~read, float("-inf")).log_softmax(-1).masked_fill(~read, 0.0)
    return (torch.special.xlogy(target, target) - target * own).sum()
