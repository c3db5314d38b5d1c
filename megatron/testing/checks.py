"""Checks of a kind's declarations: decoding against whole sequences, counts against torch's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import resolve
from megatron.parallel.layers.parameters import logical_of

from .noise import batch, noise


def check_decoding(values: Mapping[str, Any], pieces: Sequence[int] = (3, 1, 1, 2), bound: float = 1e-10) -> None:
    """A sequence read piece by piece with a state has the logits of the whole, in float64.

    Args:
        pieces: lengths in tokens.
        bound: largest error, over the largest logit.

    Raises:
        AssertionError: with the error.
    """
    from megatron.model.stack import build_model

    config = resolve(dict(values))
    model = build_model(config, dtype=torch.float64).eval()
    for parameter in dict.fromkeys(model.parameters()):
        parameter.data += torch.from_numpy(noise(logical_of(parameter))).to(parameter.dtype)
    tokens = batch(config)["tokens"][:2, : sum(pieces)]
    with torch.no_grad():
        wanted, state, begin, found = model.logits(tokens), model.new_state(), 0, []
        for piece in pieces:
            found.append(model.decode(tokens[:, begin : begin + piece], state, begin))
            begin += piece
    error = ((torch.cat(found, 1) - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= bound, f"pieces of {list(pieces)} tokens: logits differ from the whole sequence's by {error:.1e}"


def check_counts(values: Mapping[str, Any]) -> None:
    """Counts of parameters and of the forward pass's FLOPs equal torch's.

    Raises:
        AssertionError: with both numbers.
    """
    from megatron.model.costs.describe import totals
    from megatron.model.stack import build_model

    config = resolve(dict(values))
    model, said = build_model(config).eval(), totals(config)
    parameters = sum(parameter.numel() for parameter in dict.fromkeys(model.parameters()))
    assert said.parameters == parameters, f"counts say {said.parameters} parameters, and there are {parameters}"
    tokens = batch(config)["tokens"][:1, :-1]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.logits(tokens)
    flops = counter.get_total_flops() / tokens.numel()
    assert said.forward_flops == flops, f"counts say {said.forward_flops} FLOPs per token, torch counts {flops}"
