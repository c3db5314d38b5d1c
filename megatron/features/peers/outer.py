"""Outer steps of local-update training, on whole tensors and without a layout.

DiLoCo (arXiv 2311.08105): each peer trains for H steps from common weights theta. Its *delta* is theta minus its
weights. The mean of the deltas is a gradient for an outer optimizer, SGD with Nesterov momentum. Streaming DiLoCo
(arXiv 2501.18512) exchanges a fragment of the layers at a time, applies it some steps later, and keeps a share of the
local weights. Operations are separate multiplications and additions, so that every processor gets the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import Tensor

_LAYER = re.compile(r"^(?:layers|blocks)\.(\d+)\.")


def tree_mean(deltas: Sequence[Tensor]) -> Tensor:
    """Mean of tensors, summed in a binary tree over their order."""
    sums = list(deltas)
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] if i + 1 < len(sums) else sums[i] for i in range(0, len(sums), 2)]
    return sums[0] / len(deltas)


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
