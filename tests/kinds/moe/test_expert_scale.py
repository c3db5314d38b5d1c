"""Trained numbers of experts (`router.expert_scale`), where a router may choose none, and in the trace of a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.kinds.moe.layer import MoE
from megatron.kinds.moe.trace import traced
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.kinds.moe.blocks import H, config_of, inputs, layer, run
from tests.kinds.moe.test_moe import expert
from tests.model.parity import named, randomise, relative

OPTIONS = {
    "no expert": {"top_k": 1, "router": {"skip": True, "expert_scale": True}},
    "normalised": {"top_k": 2, "router": {"normalize": True, "expert_scale": True, "scale": 2.5}},
}


def choices(moe: MoE, x: Tensor) -> list[list[tuple[int, Tensor]]]:
    """(expert, weight) of each token's choices, best first, by the formulas. The number of experts stands for none."""
    own, parameters, found = moe.options, {name: p.double() for name, p in named(moe).items()}, []
    for token in x.double().flatten(0, 1):
        scores = torch.softmax(parameters["moe.router.weight"] @ token, 0)
        chosen = sorted(range(len(scores)), key=lambda e: -scores[e])[: own.top_k]
        total = sum(scores[e] for e in chosen) if own.router.normalize else 1.0
        numbers = [*parameters["moe.router.expert_scale"], 0.0]
        found.append([(e, scores[e] / total * own.router.scale * numbers[e]) for e in chosen])
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_are_times_the_number_of_the_expert(name: str):
    moe, x = layer(**OPTIONS[name]), inputs(tokens=200)
    found = choices(moe, x)
    wanted = torch.stack([
        sum((weight * expert(moe, e, token) for e, weight in each if e < 8), torch.zeros(H, dtype=DOUBLE))
        for each, token in zip(found, x.double().flatten(0, 1))
    ])
    assert {e < 8 for each in found for e, _ in each} == ({True, False} if name == "no expert" else {True})
    assert relative(run(moe, x).flatten(0, 1), wanted) < EXACT


@pytest.mark.parametrize("name", OPTIONS)
def test_a_trace_has_the_weights_that_the_layer_uses(name: str):
    model = build_model(config_of({"experts": 8, "hidden_size": 12, **OPTIONS[name]}), dtype=DOUBLE)
    randomise(model, 3)
    tokens = torch.randint(37, (2, 24), generator=torch.Generator().manual_seed(0))
    experts, weights = (each.flatten(0, 1) for each in traced(model, tokens)[0])
    with torch.no_grad():
        named(model)["layers.0.moe.router.expert_scale"].mul_(2.0)
    again, twice = (each.flatten(0, 1) for each in traced(model, tokens)[0])
    assert again.equal(experts) and relative(twice, 2.0 * weights) < EXACT
