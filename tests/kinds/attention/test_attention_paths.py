"""The ways to compute attention agree, and the choice between them is the documented one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron.kinds.common.attention import attend as paths
from megatron.kinds.common.attention.attend import attend, choose
from megatron.kinds.common.attention.pattern import Pattern, alibi_slopes
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import relative

B, HEADS, KV, S, D = 2, 4, 2, 24, 8
SLOPES = tuple(alibi_slopes(HEADS))
PATTERNS = {
    "causal": Pattern(0.3),
    "window": Pattern(0.3, window=5),
    "softcap": Pattern(0.3, softcap=0.5),
    "alibi": Pattern(0.3, slopes=SLOPES),
    "all": Pattern(0.3, window=7, softcap=0.5, slopes=SLOPES),
}


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, HEADS, S, D), (B, KV, S, D), (B, KV, S, D))
    q, k, v = (torch.randn(shape, generator=generator).to(DOUBLE) for shape in shapes)
    documents = torch.tensor([[0] * 9 + [1] * 15, [0] * 3 + [1] * 4 + [2] * 17])
    return q, k, v, documents


class Memo(dict):
    """Values that the layers of one forward pass share."""

    def remember(self, key, make):
        if key not in self:
            self[key] = make()
        return self[key]


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_flex_equals_the_other_path(name: str, with_documents: bool):
    """The functions that FlexAttention gets, run by its eager form (on CPU without a backward pass), against
    our own.
    """
    pattern, (q, k, v, documents) = PATTERNS[name], inputs()
    documents = documents if with_documents else None
    allowed, score = paths.flex_modifiers(pattern, documents, "cpu")
    mask = create_block_mask(allowed, B if with_documents else None, None, S, S, device="cpu")
    flex = flex_attention(q, k, v, score_mod=score, block_mask=mask, scale=pattern.scale, enable_gqa=True)
    plain = attend(q, k, v, pattern, documents_BS=documents)
    assert relative(flex, plain) < EXACT


def test_flex_is_called_as_it_is_written(monkeypatch):
    """The whole branch, its mask shared by layers, with the eager function in place of the compiled one."""
    monkeypatch.setattr(paths, "_compiled_flex", lambda: flex_attention)
    remember = Memo().remember
    for name in ("window", "all", "window"):
        q, k, v, documents = inputs()
        for sinks in (None, torch.linspace(-1.0, 2.0, HEADS, dtype=DOUBLE)):
            blocks = paths._remembered("flex", PATTERNS[name], S, S, documents, q.device, q.dtype, remember)
            found = paths._flex(q, k, v, PATTERNS[name], blocks, sinks)
            plain = attend(q, k, v, PATTERNS[name], documents_BS=documents, sinks_n=sinks)
            assert relative(found, plain) < EXACT


@pytest.mark.parametrize("name", PATTERNS)
def test_the_written_out_path(name: str):
    pattern, (q, k, v, documents) = PATTERNS[name], inputs()
    mask = paths._mask(S, S, pattern, documents, "cpu", DOUBLE)
    found = paths._math(q, k, v, pattern, mask, None, None)
    assert relative(found, attend(q, k, v, pattern, documents_BS=documents)) < EXACT


def test_layers_with_different_windows_do_not_share_masks():
    remember = Memo().remember
    q, k, v, documents = inputs()
    for pattern in (*PATTERNS.values(), Pattern(0.3, window=2)):
        shared = attend(q, k, v, pattern, documents_BS=documents, remember=remember)
        assert shared.equal(attend(q, k, v, pattern, documents_BS=documents))


@pytest.mark.parametrize(
    "pattern, facts, wanted",
    [
        (Pattern(1.0), {}, "causal"),
        (Pattern(1.0), {"narrow": True}, "tiles"),
        (Pattern(1.0), {"keys": 1024, "narrow": True}, "causal"),
        (Pattern(1.0), {"device": "cuda", "narrow": True}, "causal"),
        (Pattern(1.0, window=64), {"narrow": True}, "tiles"),
        (Pattern(1.0, window=8), {}, "masked"),
        (Pattern(1.0, window=8), {"device": "cuda"}, "flex"),
        (Pattern(1.0, window=8), {"device": "cuda", "channels": 8}, "masked"),
        (Pattern(1.0), {"documents": True}, "masked"),
        (Pattern(1.0), {"documents": True, "device": "cuda"}, "flex"),
        (Pattern(1.0, softcap=2.0), {}, "math"),
        (Pattern(1.0, softcap=2.0), {"device": "cuda"}, "flex"),
        (Pattern(1.0, slopes=SLOPES), {"device": "cuda", "square": False}, "masked"),
        (Pattern(1.0), {"dropout": 0.1, "device": "cuda"}, "math"),
        (Pattern(1.0), {"square": False}, "masked"),
    ],
)
def test_the_choice(pattern: Pattern, facts: dict, wanted: str):
    usual = {"documents": False, "keys": 64, "square": True, "dropout": 0.0, "device": "cpu"}
    kind, reason = choose(pattern, **{**usual, **facts})
    assert kind == wanted and reason


@pytest.mark.parametrize(
    "heads, wanted",
    [
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (2, [2**-4, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_slopes(heads: int, wanted: list[float]):
    assert alibi_slopes(heads) == pytest.approx(wanted)
