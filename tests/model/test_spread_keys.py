"""Decoding on ranks that share the keys of a text: the logits and the texts of one process."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch

from megatron import api
from megatron.decoding.one_text import generate
from megatron.decoding.sampling import Sampling
from megatron.kinds.common.attention.key_value_cache import KeyValueCache
from megatron.kinds.common.attention.spread_keys import SpreadKeys
from megatron.model.stack import build_model
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import ALONE, Axis, Mesh
from tests.float64 import DOUBLE, EXACT
from tests.workers import run

RANKS = 3
PIECES = (11, 1, 1, 5, 1, 1)  # prompts in pieces, and single tokens. Of fewer tokens than ranks, too
# Windows and sinks. Attention next to states. Latents. Compressed keys and convolutions. Shared blocks. ALiBi and caps.
NAMES = ["gpt_oss", "falcon_h1", "deepseek_v2", "zaya", "zamba2", "rwkv7_hybrid"]


def decoded(axis: Axis) -> dict[str, tuple[torch.Tensor, torch.Tensor, int]]:
    """Of each model the logits of a text that is read in pieces, tokens that follow, and the most keys of a layer."""
    found = {}
    for name in NAMES:
        model = build_model(api.resolve(f"test/tiny_{name}").config, dtype=DOUBLE).eval()
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=DOUBLE)
        tokens = torch.randint(60, (2, sum(PIECES)), generator=draw)
        state, begin, logits = model.new_state(axis), 0, []
        with torch.no_grad():
            for piece in PIECES:
                logits.append(model.decode(tokens[:, begin : begin + piece], state, begin))
                begin += piece
        made = torch.stack(list(generate(model, tokens, 6, Sampling(seed=5), axis=axis)), 1)
        found[name] = torch.cat(logits, 1), made, max(map(kept, state))
    return found


def kept(state: Any) -> int:
    """The most keys that a layer has, in a block's state."""
    if isinstance(state, SpreadKeys):
        return state.keys.length
    if isinstance(state, KeyValueCache):
        return state.length
    parts = [getattr(state, each.name) for each in fields(state)] if is_dataclass(state) else []
    parts += list(state.values()) if isinstance(state, dict) else []
    parts += list(state) if isinstance(state, tuple) else []
    return max(map(kept, parts), default=0)


def on_ranks() -> dict[str, tuple[torch.Tensor, torch.Tensor, int]]:
    return decoded(Mesh.build(Layout(data=RANKS)).data)


def test_ranks_that_share_keys_give_the_numbers_of_one():
    wanted = decoded(ALONE)
    for found in run(RANKS, on_ranks):
        for name, (logits, made, count) in found.items():
            whole, tokens, all_keys = wanted[name]
            assert (logits - whole).norm() <= EXACT * whole.norm(), name
            assert made.equal(tokens), name
            assert count <= all_keys / RANKS + len(PIECES), name
