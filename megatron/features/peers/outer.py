"""Outer steps of local-update training, on whole tensors and without a layout.

DiLoCo (arXiv 2311.08105): each peer trains for H steps from common weights theta. Its *delta* is theta minus its
weights. The mean of the deltas is a gradient for an outer optimizer, SGD with Nesterov momentum. Streaming DiLoCo
(arXiv 2501.18512) exchanges a fragment of the layers at a time, applies it some steps later, and keeps a share of the
local weights. Decoupled DiLoCo (arXiv 2604.21428) merges the deltas of those peers that have arrived, by weights.
Operations are separate multiplications and additions, so that every processor gets the same bits."""

import re
from collections.abc import Iterable, Sequence
from math import fsum, sqrt

import torch
from torch import Tensor

_LAYER = re.compile(r"^(?:layers|blocks)\.(\d+)\.")


def tree_sum(terms: Iterable[Tensor | None]) -> Tensor | None:
    """Sum in a binary tree over the places of the terms. None is no term, so its place does not move the others."""
    sums = list(terms)
    while len(sums) > 1:
        pairs = [(sums[at], sums[at + 1] if at + 1 < len(sums) else None) for at in range(0, len(sums), 2)]
        sums = [b if a is None else a if b is None else a + b for a, b in pairs]
    return sums[0]


def tree_mean(deltas: Sequence[Tensor]) -> Tensor:
    """Mean of tensors, summed in a binary tree over their order."""
    whole = tree_sum(deltas)
    assert whole is not None
    return whole / len(deltas)


def merged(name: str, deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Decoupled DiLoCo's merge of a tensor of this name, in float64. All means are weighted. In layers it is the mean
    norm, in the direction of the mean of the directions: orthogonal deltas of more peers do not make it shorter. Other
    tensors, and opposite deltas, have the mean of the deltas."""
    wide, total = [each.double() for each in deltas], fsum(weights)
    mean = tree_sum(each * (weight / total) for each, weight in zip(wide, weights, strict=True))
    assert mean is not None
    if _LAYER.match(name):
        norms = [norm_of(each) for each in wide]
        known = [(each, weight / total, norm) for each, weight, norm in zip(wide, weights, norms, strict=True) if norm]
        direction = tree_sum(each * (weight / norm) for each, weight, norm in known) if known else None
        # In a shorter sum of directions only the rounding of the deltas is left.
        if direction is not None and (length := norm_of(direction)) > torch.finfo(deltas[0].dtype).eps:
            mean = direction * (fsum(weight * norm for _, weight, norm in known) / length)
    return mean.to(deltas[0].dtype)


def norm_of(values: Tensor) -> float:
    """Euclidean norm in float64, with the same bits on every processor: the order of the sum is fixed."""
    squares = values.double().reshape(-1).square()
    while len(squares) > 1:
        half = (len(squares) + 1) // 2
        rest = torch.nn.functional.pad(squares[half:], (0, 2 * half - len(squares)))
        squares = squares[:half] + rest
    return sqrt(float(squares.sum()))


def outer_step(theta: Tensor, velocity: Tensor | None, gradient: Tensor, lr: float, momentum: float) -> None:
    """SGD with Nesterov momentum, in place: v = m v + g, theta = theta - lr (g + m v).

    Args:
        velocity: v, which starts at 0. None without momentum.
    """
    direction = gradient
    if velocity is not None:
        velocity.mul_(momentum).add_(gradient)
        direction = gradient + velocity * momentum
    theta.sub_(direction * lr)


def mixed(local: Tensor, theta: Tensor, alpha: float) -> Tensor:
    """Weights to continue from: theta + alpha (local - theta). alpha is the share of the local weights."""
    return theta.clone() if alpha == 0 else theta + (local - theta) * alpha


def fragments_of(names: Iterable[str], fragments: int) -> list[list[str]]:
    """Tensor names of each fragment, sorted. Layer l belongs to fragment l mod `fragments`, as the published strided
    fragments do. Tensors before the layers belong to the first one, and those after them to the last."""
    found: list[list[str]] = [[] for _ in range(fragments)]
    for name in sorted(names):
        layer = _LAYER.match(name)
        first = 0 if "embedding" in name else fragments - 1
        found[int(layer[1]) % fragments if layer else first].append(name)
    return found
