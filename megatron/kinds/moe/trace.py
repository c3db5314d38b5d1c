"""Decisions of a model's routers on given tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
    layers, found, hooks = moe_layers(model), {}, []
    for number, moe in layers.items():
        if moe.options.router.select == "expert_choice":
            raise ValueError(f"layer {number}: experts choose their tokens (select: expert_choice)")

        def keep(_router: nn.Module, _inputs: Any, output: Any, number: int = number, moe: MoE = moe) -> None:
            logits_TE = output[0]
            scores_TE = scores_of(logits_TE, moe.options.router.score)
            experts_Tk = moe.choose(logits_TE, scores_TE).of_tokens
            weights_Tk = weights_of(scores_TE, experts_Tk, moe.options)
            found[number] = experts_Tk.unflatten(0, tokens_BS.shape), weights_Tk.unflatten(0, tokens_BS.shape)

        hooks.append(moe.router.register_forward_hook(keep))
    model.eval()
    try:
        model.logits(tokens_BS, positions, documents)
    finally:
        for hook in hooks:
            hook.remove()
    return found
