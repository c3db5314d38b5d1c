"""Small ones of published stacks whose parts are of several kinds: what they generate from is what they compute."""

from __future__ import annotations

import pytest
import torch

from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import randomise, relative
from tests.model.test_configs import settings


@pytest.mark.parametrize("name", ["tiny_zaya", "tiny_zamba", "tiny_jamba", "tiny_moe", "tiny_olmoe", "tiny_blackmamba"])
def test_decoding_in_pieces_equals_the_whole(name: str):
    config = settings(f"test/{name}", inputs=True).config
    model = build_model(config, dtype=DOUBLE).eval()
    randomise(model, 3)
    tokens = torch.randint(config.model.vocab_size, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted, state, found = model.logits(tokens), model.new_state(), []
        for begin, end in ((0, 7), (7, 8), (8, 9), (9, 24)):
            found.append(model.decode(tokens[:, begin:end], state, begin))
    assert relative(torch.cat(found, 1), wanted) < EXACT
