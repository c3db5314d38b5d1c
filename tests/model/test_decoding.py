"""Decoding with a state gives the logits of the whole text."""

from __future__ import annotations

import pytest
import torch

from megatron.model.stack import build_model
from tests.model.parity import randomise, relative
from tests.model.test_model_options import OPTIONS, config_of

CASES = [
    "plain",
    "alibi",
    "no positions",
    "learned positions",
    "learned and rotary",
    "rotary fraction",
    "multi-query",
    "grouped, wide heads",
    "qk norm full, grouped",
    "qk norm by head",
    "softcap",
    "softcap, window, alibi",
    "window",
    "window of two",
    "window in one layer",
    "variants of all",
    "attention and mlp blocks",
    "parallel, shared norm",
    "post norm",
    "tied",
    "head multiplier, bias, softcap",
    "biases",
]


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 1, 1, 4], [7, 5]])
@pytest.mark.parametrize("name", CASES)
def test_pieces_equal_the_whole(name: str, pieces: list[int]):
    model = build_model(config_of(OPTIONS[name])).eval()
    randomise(model, 2)
    tokens = torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, state, begin, found = model.logits(tokens), model.new_state(), 0, []
        for piece in pieces:
            found.append(model.decode(tokens[:, begin : begin + piece], state, begin))
            begin += piece
    assert relative(torch.cat(found, 1), wanted) < 1e-5


def test_a_state_grows_without_losing_what_it_has():
    model = build_model(config_of({})).eval()
    tokens = torch.randint(37, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        state = model.new_state()
        for place in range(12):
            model.decode(tokens[:, place : place + 1], state, place)
        cache = state[0].mixer
        assert cache.length == 12 and cache.keys.shape[2] >= 12
        once = model.new_state()
        model.decode(tokens, once, 0)
        torch.testing.assert_close(cache.keys[:, :, :12], once[0].mixer.keys[:, :, :12], rtol=1e-5, atol=1e-6)
