"""The decoder keeps the experts of a pass over the whole text."""

from __future__ import annotations

import pytest
import torch

from megatron.config import resolve
from megatron.decoding.decoder import Decoder, WholeModel
from megatron.decoding.sampling import Sampling
from megatron.decoding.schedule import Request
from megatron.kinds.moe.trace import traced
from megatron.model.stack import build_model
from tests.float64 import DOUBLE
from tests.model.parity import randomise


@pytest.mark.parametrize("layers", ["(attention/moe) x2", "attention/moe mamba2/mlp attention/moe"])
def test_experts_are_those_of_the_whole_text(layers: str) -> None:
    """Equal prompts are read once, prompts in pieces, and with few pages texts are read again."""
    config = resolve({
        "model": {
            **{"layers": layers, "hidden_size": 32, "vocab_size": 61, "attention": {"heads": 4}},
            **{"mamba2": {"head_dim": 16, "state_size": 8}, "mlp": {"hidden_size": 32}},
            "moe": {"experts": 8, "top_k": 2, "hidden_size": 16, "router": {"correction": "sign"}},
        },
        "training": {"steps": 1, "sequence_length": 96},
    })
    model = build_model(config, dtype=DOUBLE)
    randomise(model, 4)
    long = tuple(range(3, 45))
    sampling = Sampling(seed=3, purpose="rollouts")
    asked = [
        Request(prompt, 24, number, sampling)
        for number, prompt in enumerate([(5, 7), long, long, (1, 2, 3), long[:20], (9,) * 30])
    ]
    decoder = Decoder(WholeModel(model), "cpu", rows=4, budget=16, pages=6, routes=True)
    drawn = decoder.run(asked)
    assert decoder.schedule.preempted and decoder.schedule.reused
    for request, one in zip(asked, drawn):
        text = [*request.prompt, *one.tokens][:-1]
        wanted = torch.cat([experts for experts, _ in traced(model, torch.tensor([text])).values()], -1)[0]
        assert sorted(one.routes) == list(range(len(text)))
        assert torch.stack([one.routes[place] for place in range(len(text))]).equal(wanted)
