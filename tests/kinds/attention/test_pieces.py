"""Attention of long sequences, computed in pieces, is the attention that is written out whole. Gradients too."""

from __future__ import annotations

import pytest
import torch

from megatron.kinds.common.attention import attend as paths
from megatron.kinds.common.attention import blocks, ring
from megatron.kinds.common.attention.attend import attend, choose
from megatron.kinds.common.attention.pattern import Dropped, Pattern
from tests.float64 import DOUBLE, EXACT
from tests.kinds.attention.test_attention_paths import HEADS, KV, PATTERNS, B, D, S
from tests.model.parity import relative

E = 6  # channels of a value


def results(pattern: Pattern, documents: bool, sinks: bool, dropout: bool) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys, values and sinks."""
    draw = torch.Generator().manual_seed(2)
    shapes = ((B, HEADS, S, D), (B, KV, S, D), (B, KV, S, E))
    leaves = [torch.randn(shape, generator=draw, dtype=DOUBLE, requires_grad=True) for shape in shapes]
    if sinks:
        leaves.append(torch.linspace(-1.0, 2.0, HEADS, dtype=DOUBLE, requires_grad=True))
    packed = torch.tensor([[0] * 9 + [1] * 15, [0] * 3 + [1] * 4 + [2] * 17]) if documents else None
    y = attend(
        *leaves[:3],
        pattern,
        documents_BS=packed,
        dropout=Dropped(0.3, 11, torch.tensor([3, 9])) if dropout else None,
        sinks_n=leaves[3] if sinks else None,
    )
    (y * torch.linspace(-1.0, 1.0, y.numel(), dtype=DOUBLE).view_as(y)).sum().backward()
    return [y.detach(), *(each.grad for each in leaves)]


@pytest.mark.parametrize("sizes", [(5, 3, 1 << 24), (8, 256, 90), (24, 1, 1)], ids=["pieces", "few rows", "one piece"])
@pytest.mark.parametrize("besides", ["", "documents", "sinks", "dropout", "documents sinks dropout"])
@pytest.mark.parametrize("name", PATTERNS)
def test_pieces_are_the_whole(name: str, besides: str, sizes: tuple[int, int, int], monkeypatch):
    words = [each in besides for each in ("documents", "sinks", "dropout")]
    whole = results(PATTERNS[name], *words)
    for module, setting, value in zip((ring, blocks, blocks), ("PIECE", "LEAST_ROWS", "CHUNK"), sizes):
        monkeypatch.setattr(module, setting, value)
    monkeypatch.setattr(paths, "LONG", S - 1)
    for ours, expected in zip(results(PATTERNS[name], *words), whole, strict=True):
        assert relative(ours, expected) < EXACT


def test_long_sequences_are_computed_so():
    for keys, way in ((paths.LONG, "masked"), (paths.LONG + 1, "pieces")):
        assert choose(Pattern(1.0), documents=True, keys=keys, square=True, dropout=0.0, device="cpu")[0] == way
    many = 1 << 20
    assert choose(Pattern(1.0), documents=False, keys=many, square=True, dropout=0.0, device="cpu")[0] == "causal"
    assert choose(Pattern(1.0), documents=True, keys=many, square=True, dropout=0.0, device="cuda")[0] == "flex"
    long = {"documents": True, "keys": many, "square": True, "dropout": 0.0, "device": "cpu"}
    assert choose(Pattern(1.0), **long, compiled=True)[0] == "masked"
    assert choose(Pattern(1.0), documents=True, keys=many, square=False, dropout=0.0, device="cpu")[0] == "masked"
    assert choose(Pattern(1.0), documents=False, keys=many, square=True, dropout=0.1, device="cuda")[0] == "pieces"


def test_what_is_masked_is_not_computed(monkeypatch):
    """With a window, rectangles grow in number with the length, not with its square."""
    seen = []

    def part(q, k, v, at):
        seen.append(at)
        return torch.zeros_like(q), q.sum(-1)

    monkeypatch.setattr(ring, "tile_output", part)
    for pieces in (32, 64):
        q = torch.zeros(1, 1, pieces * ring.PIECE, 1)
        seen.clear()
        attend(q, q, q, Pattern(1.0, window=2 * ring.PIECE))
        assert len(seen) == 3 * pieces - 3  # of each piece's queries: its own keys, and keys of two pieces before
