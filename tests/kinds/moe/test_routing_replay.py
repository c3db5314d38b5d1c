"""Experts that were recorded in one pass and are used in another."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.nn.functional as F

from megatron.config import load, resolve
from megatron.config.routes import choices_of, route_columns
from megatron.model.expert_tally import ExpertTally, recorded
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, randomise, relative
from tests.paths import ROOT

B, S, V = 2, 12, 37


@pytest.mark.parametrize("mode", ["none", "full"])
def test_recorded_experts_have_the_weights_and_gradients_of_the_present_router(mode: str):
    """The second layer's experts follow other weights, but for some tokens. A loop over tokens is the formula."""
    config = resolve({
        "model": {
            "layers": "attention/mlp attention/moe",
            "hidden_size": 24,
            "vocab_size": V,
            "norm": {"type": "rmsnorm"},
            "attention": {"heads": 3},
            "mlp": {"hidden_size": 32},
            "moe": {
                **{"experts": 6, "top_k": 2, "hidden_size": 16, "losses": {"balance": 0.0}},
                "router": {"score": "sigmoid", "normalize": True, "correction": "sign"},
            },
        },
        "training": {"steps": 1, "sequence_length": S, "activation_checkpointing": {"mode": mode}},
    })
    assert route_columns(config.model) == {1: ("experts.1.0", "experts.1.1")}
    model = build_model(config, dtype=DOUBLE)
    randomise(model, 1)
    tokens, labels = torch.randint(V, (2, B, S), generator=torch.Generator().manual_seed(2))
    with recorded(model) as layers, torch.no_grad():
        model.logits(tokens)
    (experts_Tk,) = layers[1]
    randomise(model, 3)
    with recorded(model) as layers, torch.no_grad():
        model.logits(tokens)
    own_Tk = layers[1][0]
    assert (own_Tk != experts_Tk).any()
    given_Tk = experts_Tk.clone()
    given_Tk[::5] = -1  # these tokens ask their router
    wanted_Tk = torch.where(given_Tk < 0, own_Tk, experts_Tk)
    columns = {
        name: given_Tk[:, place].unflatten(0, (B, S)).float()
        for place, name in enumerate(route_columns(config.model)[1])
    }

    loss, _ = model(tokens, labels, torch.ones(B, S, dtype=DOUBLE), columns=columns)
    loss.backward()
    found = {name: p.grad.clone() for name, p in named(model).items()}
    model.zero_grad()

    moe, weights = model.blocks[1].ffn, named(model)

    def by_token(x_BSH: torch.Tensor, *_: object) -> torch.Tensor:
        scores = (x_BSH.flatten(0, 1) @ weights["layers.1.moe.router.weight"].T).sigmoid()
        rows = []
        for x, score, chosen in zip(x_BSH.flatten(0, 1), scores, wanted_Tk):
            parts = []
            for expert in chosen:
                gate, up = (weights["layers.1.moe.experts.gate_up.weight"][expert] @ x).chunk(2)
                parts.append(weights["layers.1.moe.experts.down.weight"][expert] @ (F.silu(gate) * up))
            share = score[chosen] / score[chosen].sum()
            rows.append(sum(part * own for part, own in zip(parts, share)))
        return torch.stack(rows).view_as(x_BSH)

    moe.forward = by_token
    again, _ = model(tokens, labels, torch.ones(B, S, dtype=DOUBLE))
    again.backward()
    assert relative(loss, again) < EXACT
    assert set(found) == {p.logical.name for p in chain(model.parameters())}
    for name, parameter in named(model).items():
        assert relative(found[name], parameter.grad) < EXACT, name
    assert found["layers.1.moe.router.weight"].any()


def test_a_record_may_have_tokens_without_an_expert():
    """They have the number of experts, which a round's file may have too."""
    config = load([str(ROOT / "configs/test/tiny_zaya.yml")], ["model.moe.losses.balance=0"], check_inputs=False).config
    columns = route_columns(config.model)
    assert all(choices_of(config.model, layer) == config.model.moe.experts + 1 for layer in columns)
    model = build_model(config, dtype=DOUBLE)
    randomise(model, 1, std=0.5)
    for each in model.modules():
        if isinstance(each, ExpertTally) and each.correction is not None:
            each.correction.zero_()  # none is as likely as an expert
    tokens, labels = torch.randint(V, (2, B, S), generator=torch.Generator().manual_seed(2))
    weights = torch.ones(B, S, dtype=DOUBLE)
    with recorded(model) as layers:
        loss, _ = model(tokens, labels, weights)
    given = {
        name: experts_Tk[:, place].unflatten(0, (B, S)).float()
        for layer, (experts_Tk,) in layers.items()
        for place, name in enumerate(columns[layer])
    }
    assert any((each == config.model.moe.experts).any() for each in given.values())
    assert relative(model(tokens, labels, weights, columns=given)[0], loss) < EXACT
