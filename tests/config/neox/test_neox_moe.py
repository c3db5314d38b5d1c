"""GPT-NeoX's mixtures of experts: which layers have them, what they compute, and where they lie."""

from __future__ import annotations

import pytest
import torch

from megatron.config import resolve
from megatron.config.pattern import parse
from megatron.kinds.moe.router import choose_experts, scores_of, weights_of
from tests.config.neox.neox_cases import at, flat, no_effect, noted, problem_of

MOE = {"moe_num_experts": 8}


@pytest.mark.parametrize("layers, interval", [(4, 1), (6, 2), (7, 3), (5, 4), (9, 3), (2, 5), (4, 3), (1, 1)])
def test_layers_with_experts(layers, interval):
    translation = flat(num_layers=layers, moe_expert_interval=interval, **MOE)
    assert translation.problems == []
    kinds = [block.ffn.name for block in parse(at(translation, "model.layers"))]
    assert kinds == ["moe" if number % interval == 0 else "mlp" for number in range(layers)]


@pytest.mark.parametrize(
    "changes, width, gated, activation",
    [
        ({}, 256, False, "gelu"),
        ({"hidden_size": 192}, 768, False, "gelu"),
        ({"hidden_size": 100, "num_attention_heads": 5, "mlp_multiple_of": 7}, 512, False, "gelu"),
        ({"intermediate_size": 100, "mlp_multiple_of": 64, "activation": "silu"}, 100, False, "silu"),
        ({"mlp_type": "llama", "activation": "swish"}, 256, True, "silu"),
        ({"mlp_type": "llama", "activation": "silu", "intermediate_size": 96}, 96, True, "silu"),
        ({"bias_gelu_fusion": True}, 256, False, "gelu"),
    ],
)
def test_experts(changes, width, gated, activation):
    translation = flat(**MOE, **changes)
    assert translation.problems == []
    moe = at(translation, "model.moe")
    assert (moe["hidden_size"], moe["gated"], moe["activation"]) == (width, gated, activation)
    assert noted(translation, "bias_gelu_fusion is of MLPs") == ("bias_gelu_fusion" in changes)


@pytest.mark.parametrize(
    "changes, key, words",
    [
        ({"activation": "swiglu"}, "activation", "not gated"),
        ({"expansion_factor": 2.0}, "expansion_factor", "do not read it"),
        ({"moe_router_type": "hash"}, "moe_router_type", "must be one of sinkhorn, topk"),
        ({"moe_num_experts": 6, "model_parallel_size": 4}, "moe_num_experts", "the same number of whole experts"),
        ({"moe_num_experts": "many"}, "moe_num_experts", "a whole number above 0"),
    ],
)
def test_what_gpt_neox_cannot_do(changes, key, words):
    assert words in problem_of(flat(**(MOE | changes)), key).rule


def test_what_is_repaired_is_told():
    translation = flat(gpt_j_residual=True, hidden_dropout=0.1, moe_router_type="topk", **MOE)
    assert translation.problems == []
    assert noted(translation, "gpt_j_residual with experts", "drops the attention output")
    assert noted(translation, "applied to the experts' output too") and noted(translation, "nothing evens the load")


def test_whole_experts_on_tensor_parallel_ranks():
    translation = flat(model_parallel_size=4, **MOE)
    assert {name: at(translation, f"parallel.{name}") for name in ("tensor", "expert", "expert_tensor")} == {
        "tensor": 4,
        "expert": 4,
        "expert_tensor": 1,
    }
    alone = flat(**MOE).values["parallel"]
    assert "expert" not in alone and "expert_tensor" not in alone


def test_without_experts_nothing_reads_the_other_keys():
    for number in (0, 1):
        translation = flat(moe_num_experts=number, moe_top_k=2, moe_router_type="topk")
        assert translation.problems == [] and "moe" not in translation.values["model"]
        assert "moe_top_k, moe_router_type (no layer reads it" in no_effect(translation)


@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn_chooses_what_gpt_neox_chooses(top_k):
    """On the number of tokens of a micro-batch. Its loop ends after one round only where a mean difference is above
    1e-4."""
    translation = flat(moe_top_k=top_k, **MOE)
    model = translation.values["model"] | {"vocab_size": 8}
    options = resolve({"model": model, "training": {"steps": 1, "sequence_length": 8}}).model.moe
    logits = torch.randn(2048, 8, generator=torch.Generator().manual_seed(top_k)) + torch.linspace(0, 2, 8)
    cost = logits.exp()
    columns, rounds = 1 / (8 * cost.sum(0)), 0
    while rounds < 3:
        before, rounds = columns, rounds + 1
        rows = 1 / 2048 / ((columns * cost).sum(1) + 1e-8)
        columns = 1 / 8 / ((rows[:, None] * cost).sum(0) + 1e-8)
        if (before - columns).abs().mean() > 1e-4:
            break
    assert rounds == 3
    expected = (columns * cost * rows[:, None]).topk(top_k, dim=1).indices
    scores = scores_of(logits, options.router.score)
    chosen = choose_experts(logits, scores, None, options, training=True).experts_Tk
    assert (chosen == expected).all(1).float().mean() > 0.999  # rounding decides near ties
    weights = (logits.sigmoid() if top_k == 1 else logits.softmax(-1)).gather(1, chosen)
    torch.testing.assert_close(weights_of(scores, chosen, options), weights)
    greedy = choose_experts(logits, scores, None, options, training=False).experts_Tk
    assert torch.equal(greedy, logits.topk(top_k, dim=1).indices)
    assert not torch.equal(greedy, expected)


def test_jitter_is_of_the_top_k_router():
    translation = flat(moe_router_type="topk", moe_jitter_eps=0.01, moe_top_k=2, **MOE)
    router = at(translation, "model.moe.router")
    assert router == {"select": "top_k", "score": "softmax", "jitter": 0.01} and at(translation, "model.moe.top_k") == 2
    assert "moe_jitter_eps (the sinkhorn router does not read it)" in no_effect(flat(moe_jitter_eps=0.01, **MOE))
