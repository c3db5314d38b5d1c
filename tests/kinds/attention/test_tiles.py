"""Attention tile by tile against the formula, and its rounding against that of torch's kernel."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.config.sections.layout import ActivationCheckpointing
from megatron.kinds.common.attention import tiles
from megatron.kinds.common.attention.attend import TILED, choose
from megatron.kinds.common.attention.pattern import Pattern
from megatron.kinds.common.attention.tiles import attend_in_tiles
from megatron.model.recompute import recompute_activations
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import relative

SCALE = 0.3


def inputs(heads: int, kv: int, length: int, channels: int, of_values: int) -> list[torch.Tensor]:
    """Queries, keys and values as layers give them, heads of a token side by side, and the gradient of the result."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((heads, channels), (kv, channels), (kv, of_values), (heads, of_values))
    return [torch.randn(2, length, *each, generator=generator).to(DOUBLE).transpose(1, 2) for each in shapes]


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Query by query and head by head, with no mask."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    rows = []
    for at in range(q.shape[2]):
        logits = [SCALE * k[:, head // group, : at + 1] @ q[:, head, at, :, None] for head in range(heads)]
        shares = [(each - each.amax(1, True)).exp() for each in logits]
        found = [(each * v[:, head // group, : at + 1]).sum(1) / each.sum(1) for head, each in enumerate(shares)]
        rows.append(torch.stack(found, 1))
    return torch.stack(rows, 2)


def gradients(way, given: list[torch.Tensor], dtype: torch.dtype = DOUBLE) -> list[torch.Tensor]:
    *leaves, of_y = (each.to(dtype) for each in given)
    leaves = [each.clone().requires_grad_() for each in leaves]
    y = way(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, of_y)]


@pytest.mark.parametrize(
    "heads, kv, length, channels, of_values", [(3, 3, 16, 4, 4), (4, 2, 21, 4, 6), (4, 1, 1, 4, 4), (2, 2, 33, 6, 2)]
)
@pytest.mark.parametrize("room", [1, 1 << 9, 1 << 20])  # of the logits: one head, some, all at once
def test_it_is_the_formula(heads, kv, length, channels, of_values, room, monkeypatch):
    monkeypatch.setattr(tiles, "QUERIES", 8)
    monkeypatch.setattr(tiles, "LOGITS", room)
    given = inputs(heads, kv, length, channels, of_values)
    found = gradients(lambda q, k, v: attend_in_tiles(q, k, v, SCALE), given)
    for ours, wanted in zip(found, gradients(formula, given), strict=True):
        assert relative(ours, wanted) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_rounds_no_more_than_torch(dtype: torch.dtype):
    """Errors against float64 of the output and the three gradients, together, next to the errors of torch's kernel."""
    given = [each.to(dtype).to(DOUBLE) for each in inputs(4, 4, 300, 32, 32)]
    exact = gradients(lambda q, k, v: attend_in_tiles(q, k, v, SCALE), given)
    ways = [
        gradients(lambda q, k, v: attend_in_tiles(q, k, v, SCALE), given, dtype),
        gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE), given, dtype),
    ]
    ours, theirs = (math.hypot(*(float(relative(*pair)) for pair in zip(way, exact))) for way in ways)
    assert ours < 1.5 * theirs


def test_selective_recomputation_keeps_the_output_alone(monkeypatch):
    """Its products are not made again in the backward pass, and the gradients are the same bits."""

    class Block(torch.nn.Module):
        def forward(self, q, state=None):
            return attend_in_tiles(q, q, q, SCALE).square()

    calls, forward = [], tiles._forward
    monkeypatch.setattr(tiles, "_forward", lambda *given: calls.append(1) or forward(*given))
    found = []
    for mode in ("none", "selective", "full"):
        block, q = Block(), inputs(2, 2, 20, 4, 4)[0].clone().requires_grad_()
        recompute_activations(block, 0, ActivationCheckpointing(mode=mode))
        calls.clear()
        block(q).sum().backward()
        found.append((len(calls), q.grad))
    assert [count for count, _ in found] == [1, 1, 2]
    assert all(gradient.equal(found[0][1]) for _, gradient in found)


def test_short_sequences_on_a_processor_are_computed_so():
    usual = {"documents": False, "keys": TILED, "square": True, "dropout": 0.0, "device": "cpu", "narrow": True}
    assert choose(Pattern(1.0), **usual)[0] == "tiles"
    for other in ({"keys": TILED + 1}, {"device": "cuda"}, {"device": "meta"}, {"compiled": True}, {"narrow": False}):
        assert choose(Pattern(1.0), **{**usual, **other})[0] == "causal"
