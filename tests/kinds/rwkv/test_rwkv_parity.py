"""RWKV-5, 6 and 7 against the recurrences of the papers, token by token in float64: logits, loss, every gradient."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.hf.convert import ConversionStep
from megatron.checkpoint.hf.rwkv_files import steps_of
from megatron.config import resolve
from megatron.model.stack import Model, build_model
from tests.float64 import DOUBLE, EXACT
from tests.kinds.rwkv import rwkv_reference as reference
from tests.model.parity import named, relative
from tests.selection import covering

V, H, S = 29, 24, 13
MODELS = {
    "rwkv5": {"layers": "(rwkv5/rwkv5_ffn) x2", "rwkv5": {"head_dim": 12, "chunk": 9}},
    "rwkv6": {"layers": "(rwkv6/rwkv6_ffn) x2", "rwkv6": {"head_dim": 12, "chunk": 9, "mix_rank": 3, "decay_rank": 4}},
    "rwkv7": {
        "layers": "(rwkv7/rwkv7_ffn) x3",
        "rwkv7": {"head_dim": 12, "chunk": 5, "decay_rank": 3, "rate_rank": 4, "value_rank": 2, "gate_rank": 5},
    },
}


def config_of(name: str, documents: bool = False):
    model = {"hidden_size": H, "vocab_size": V, "embedding": {"norm": True}, **MODELS[name]}
    return resolve({
        "model": model,
        "data": {"reset_attention_at_eod": documents},
        "training": {"steps": 1, "sequence_length": S},
    })


def randomised(model: Model, seed: int) -> None:
    """Every parameter off its start, by so much that each matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in named(model).items():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.endswith("mix"):
                parameter.copy_(0.5 + 0.4 * noise)
            else:
                parameter.copy_(0.3 * noise if parameter.dim() == 2 else 0.6 * noise)


def published(model: Model, config) -> tuple[list[ConversionStep], dict[str, torch.Tensor]]:
    """The model under its published names, in float64, as leaves."""
    steps, ours = steps_of(config), named(model)
    made = {key: value for step in steps for key, value in step.to_hf(lambda name: ours[name].detach())}
    return steps, {key: value.double().requires_grad_() for key, value in made.items()}


@pytest.mark.parametrize(("documents", "name", "seed"), covering([False, True], MODELS, [0, 5]))
def test_equals_the_recurrence(name: str, documents: bool, seed: int):
    config = config_of(name, documents)
    model = build_model(config, dtype=DOUBLE).eval()
    randomised(model, seed)
    steps, theirs = published(model, config)
    tokens, labels = torch.randint(V, (2, 2, S), generator=torch.Generator().manual_seed(1))
    starts = [frozenset({4, 5, 10}), frozenset({8})] if documents else [frozenset()] * 2
    numbers = torch.tensor([[sum(t >= s for s in row) for t in range(S)] for row in starts]) if documents else None
    positions = torch.zeros_like(numbers) if documents else None

    heads = H // MODELS[name][name]["head_dim"]
    wanted = torch.stack([
        reference.logits(theirs, row.tolist(), int(name[-1]), heads, starts=begins)
        for row, begins in zip(tokens, starts)
    ])
    assert relative(model.logits(tokens, positions, numbers).double(), wanted) < EXACT
    loss, _ = model(
        tokens,
        labels,
        torch.full(labels.shape, 1.0 / labels.numel(), dtype=DOUBLE),
        positions=positions,
        documents=numbers,
    )
    mean = F.cross_entropy(wanted.flatten(0, 1), labels.flatten())
    assert relative(loss, mean) < EXACT
    loss.backward()
    mean.backward()
    ours, compared = named(model), set()
    for step in steps:
        for key, gradient in step.to_hf(lambda name: ours[name].grad):
            assert theirs[key].grad.abs().max() > 0, f"the test is blind to {key}"
            assert relative(gradient.double(), theirs[key].grad) < EXACT, key
            compared.add(key)
    assert compared == set(theirs) and {name for step in steps for name in step.ours} == set(ours)


@pytest.mark.parametrize("name", MODELS)
def test_as_exact_as_the_recurrence_in_fp32(name: str):
    """Over several models, hard ones too: the largest errors of gradients, next to the errors of the papers' form in
    the same type.
    """
    config, ratios = config_of(name), []
    heads = H // MODELS[name][name]["head_dim"]
    tokens, labels = torch.randint(V, (2, 1, S), generator=torch.Generator().manual_seed(1))
    for seed in range(6):
        model = build_model(config).eval()
        randomised(model, seed)
        steps, exact = published(model, config)
        single = {key: value.detach().float().requires_grad_() for key, value in exact.items()}
        for leaves in (exact, single):
            rows = torch.stack([reference.logits(leaves, row.tolist(), int(name[-1]), heads) for row in tokens])
            F.cross_entropy(rows.flatten(0, 1), labels.flatten()).backward()
        model(tokens, labels, torch.full(labels.shape, 1.0 / labels.numel()))[0].backward()
        gradients = {own: parameter.grad for own, parameter in named(model).items()}
        mine = {key: each for step in steps for key, each in step.to_hf(gradients.__getitem__)}
        errors = [
            max(relative(each[key].double(), exact[key].grad) for key in exact)
            for each in (mine, {key: value.grad for key, value in single.items()})
        ]
        ratios.append(math.log(errors[0] / errors[1]))
    assert sum(ratios) / len(ratios) < math.log(2.5)
