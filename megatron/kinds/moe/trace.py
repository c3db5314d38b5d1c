"""Decisions of a model's routers on given tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.model.expert_tally import recorded

from .layer import MoE
from .router import scores_of, weights_of

if TYPE_CHECKING:
    from megatron.model.stack import Model


def moe_layers(model: nn.Module) -> dict[int, MoE]:
    """The mixture of experts layers by their number in the stack."""
    return {each.balance.layer: each for each in model.modules() if isinstance(each, MoE)}


@torch.no_grad()
def traced(
    model: Model, tokens_BS: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer -> (experts int64 [B, S, k], best first, their weights fp32 [B, S, k]), as in evaluation.

    The number of experts stands for none (`router.skip`). `positions` and `documents` are as in `Stream`.

    Raises:
        ValueError: experts choose in this model, so tokens have no list of theirs.
    """
    layers, scores, hooks = moe_layers(model), dict[int, Tensor](), []
    for number, moe in layers.items():
        if moe.options.router.select == "expert_choice":
            raise ValueError(f"layer {number}: experts choose their tokens (select: expert_choice)")

        def keep(_router: nn.Module, _inputs: Any, output: Any, number: int = number, moe: MoE = moe) -> None:
            scores[number] = scores_of(output[0], moe.options.router.score)

        hooks.append(moe.router.register_forward_hook(keep))
    model.eval()
    try:
        with recorded(model) as experts:
            model.logits(tokens_BS, positions, documents)
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for number, moe in layers.items():
        experts_Tk = experts[number][-1]
        weights_Tk = weights_of(scores[number], experts_Tk, moe.options, moe.expert_scale)
        found[number] = experts_Tk.unflatten(0, tokens_BS.shape), weights_Tk.unflatten(0, tokens_BS.shape)
    return found
