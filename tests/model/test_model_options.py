"""Every option of the dense model against the float64 reference: logits, loss, and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch

from megatron.config import Config, resolve
from megatron.model.stack import Model, build_model
from megatron.parallel.layers.parameters import buffers_of, logical_of
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, randomise, relative
from tests.model.reference import Reference, loss_of

BASE = {
    "layers": "(attention/mlp) x2",
    "hidden_size": 24,
    "vocab_size": 37,
    "attention": {"heads": 3},
    "mlp": {"hidden_size": 32},
}
B, S = 2, 12

OPTIONS = {
    "plain": {},
    "alibi": {"attention": {"position": "alibi"}},
    "alibi, power of two": {"attention": {"heads": 4, "position": "alibi"}},
    "alibi, many heads, grouped": {"attention": {"heads": 12, "kv_heads": 6, "position": "alibi"}},
    "no positions": {"attention": {"position": "none"}},
    "learned positions": {"attention": {"position": "none"}, "embedding": {"position": "learned"}},
    "learned and rotary": {"embedding": {"position": "learned", "max_positions": 30}},
    "rotary fraction": {"attention": {"rotary": {"fraction": 0.5, "base": 100.0}}},
    "rotary fraction 0": {"attention": {"rotary": {"fraction": 0.0}}},
    "multi-query": {"attention": {"kv_heads": 1}},
    "grouped, wide heads": {"attention": {"heads": 4, "kv_heads": 2, "head_dim": 10}},
    "biases": {"attention": {"qkv_bias": True, "output_bias": True}, "mlp": {"bias": True}},
    "output bias alone": {"attention": {"output_bias": True}},
    "qk norm by head": {"attention": {"qk_norm": "head"}},
    "qk rmsnorm by head": {"norm": {"type": "rmsnorm"}, "attention": {"qk_norm": "head"}},
    "qk norm full, grouped": {"attention": {"heads": 4, "kv_heads": 2, "qk_norm": "full"}},
    "keys are values": {"attention": {"heads": 4, "kv_heads": 2, "values": "keys", "qkv_bias": True}},
    "normalised values that are keys": {
        "attention": {"heads": 4, "kv_heads": 2, "values": "keys", "value_norm": True, "qk_norm": "head"}
    },
    "normalised values": {"attention": {"value_norm": True}},
    "proportional rotary": {
        "attention": {"rotary": {"base": 100.0, "fraction": 0.5, "scaling": {"type": "proportional", "factor": 3.0}}}
    },
    "softcap": {"attention": {"softcap": 0.4}},
    "softcap, window, alibi": {"attention": {"softcap": 0.4, "window": 4, "position": "alibi"}},
    "scale": {"attention": {"scale": 1.3}},
    "sinks": {"attention": {"sinks": True}},
    "sinks, window, grouped": {"attention": {"heads": 4, "kv_heads": 2, "sinks": True, "window": 4}},
    "gate by channel": {"attention": {"heads": 4, "kv_heads": 2, "head_dim": 10, "gate": "channel"}},
    "gate by head, biases": {"attention": {"gate": "head", "qkv_bias": True}},
    "window": {"attention": {"window": 3}},
    "window of two": {"attention": {"window": 2}},
    "window as long as the sequence": {"attention": {"window": 12}},
    "window in one layer": {"layers": "attention@near/mlp attention/mlp", "variants": {"near": {"window": 3}}},
    "variants of all": {
        "layers": "attention@a/mlp@b attention/mlp",
        "variants": {
            "a": {"heads": 2, "rotary": {"base": 50.0}, "qkv_bias": True},
            "b": {"hidden_size": 8, "activation": "relu"},
        },
    },
    "attention and mlp blocks": {"layers": "attention mlp attention/mlp"},
    "parallel": {"residual": {"form": "parallel"}},
    "parallel with bare blocks": {"residual": {"form": "parallel"}, "layers": "attention mlp attention/mlp"},
    "parallel, shared norm": {"residual": {"form": "parallel", "shared_norm": True}},
    "shared norm with bare blocks": {
        "residual": {"form": "parallel", "shared_norm": True},
        "layers": "mlp attention/mlp",
    },
    "parallel, post norm": {"residual": {"form": "parallel", "norm": "post"}},
    "post norm": {"residual": {"norm": "post"}},
    "deepnorm": {"residual": {"norm": "deepnorm", "stream_multiplier": 2.5, "multiplier": 0.8}},
    "deepnorm with bare blocks": {"layers": "attention mlp attention/mlp", "residual": {"norm": "deepnorm"}},
    "branch multiplier": {"residual": {"multiplier": 0.3, "norm": "post"}},
    "block scale": {"residual": {"block_scale": True}},
    "inputs of tokens": {"residual": {"token_inputs": 5, "multiplier": 0.7}, "embedding": {"multiplier": 3.0}},
    "variants that read earlier keys": {
        "layers": "attention@near/mlp attention attention@last/mlp attention@near_last/mlp attention@last",
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2, "head_dim": 10, "qk_norm": "head", "value_norm": True, "gate": "head"},
        "variants": {
            "last": {"keys": "earlier"},
            "near": {"window": 5, "kv_heads": 1, "rotary": {"base": 100.0}},
            "near_last": {"window": 5, "kv_heads": 1, "rotary": {"base": 100.0}, "keys": "earlier"},
        },
    },
    "variants that read earlier keys, norms of all heads": {
        "layers": "attention attention@last/mlp",
        "attention": {"heads": 4, "kv_heads": 2, "qk_norm": "full", "qkv_bias": True},
        "variants": {"last": {"keys": "earlier"}},
    },
    "channel scales": {"residual": {"channel_scales": True}},
    "channel scales, bare blocks, post norm": {
        "layers": "attention mlp attention/mlp",
        "residual": {"channel_scales": True, "norm": "post", "multiplier": 0.7},
    },
    "three rows": {"residual": {"streams": 3, "sinkhorn_iterations": 5}},
    "two rows, bare blocks, post norm": {
        "layers": "attention mlp attention/mlp",
        "residual": {"streams": 2, "norm": "post", "multiplier": 0.7},
    },
    "rmsnorm": {"norm": {"type": "rmsnorm", "epsilon": 1e-2}},
    "layernorm without bias": {"norm": {"bias": False}},
    "norm without parameters": {"norm": {"type": "nonparametric"}, "attention": {"qk_norm": "head"}},
    "embedding norm and multiplier": {"embedding": {"norm": True, "multiplier": 3.0}},
    "multiplier beside positions": {"embedding": {"position": "learned", "multiplier": 3.0}},
    "tied": {"embedding": {"tied": True}},
    "head multiplier, bias, softcap": {"head": {"multiplier": 0.4, "bias": True, "softcap": 1.5}},
    "tied head with bias": {"embedding": {"tied": True}, "head": {"bias": True}},
} | {
    f"{activation}{' gated' if gated else ''}": {"mlp": {"activation": activation, "gated": gated}}
    for activation in ("gelu", "gelu_tanh", "silu", "relu", "relu2", "identity", "quick_gelu", "xielu")
    for gated in (False, True)
}


def merged(base: dict, over: dict) -> dict:
    return {
        **base,
        **{
            key: merged(base[key], value) if isinstance(value, dict) and key in base else value
            for key, value in over.items()
        },
    }


def config_of(change: dict, **training) -> Config:
    return resolve({"model": merged(BASE, change), "training": {"steps": 1, "sequence_length": S, **training}})


def make(config: Config, seed: int = 0) -> tuple[Model, Reference]:
    model = build_model(config, dtype=DOUBLE)
    randomise(model, seed)
    weights = {name: p.detach().double().requires_grad_() for name, p in named(model).items()}
    buffers = {logical_of(each).name: each.double() for each in buffers_of(model)}
    for number, each in enumerate(buffers.values(), start=2):  # 1 at the start, to which a comparison is blind
        each *= number
    for tensor, value in zip(buffers_of(model), buffers.values()):
        tensor.copy_(value)
    return model, Reference(config, weights, buffers)


def batch(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(37, (2, B, S), generator=generator)
    return tokens, labels, torch.rand(B, S, generator=generator).to(DOUBLE)


def compare(config: Config, positions=None, documents=None) -> None:
    model, reference = make(config)
    tokens, labels, weights = batch()
    logits = torch.stack([reference.logits(tokens[b], None if documents is None else documents[b]) for b in range(B)])
    assert relative(model.logits(tokens, positions, documents), logits) < EXACT
    wanted = loss_of(logits, labels, weights, config.training.z_loss)
    wanted.backward()
    loss, entropies = model(tokens, labels, weights, positions, documents)
    loss.backward()
    assert relative(loss, wanted) < EXACT
    plain = logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    assert relative(entropies, plain) < EXACT and not entropies.requires_grad
    ours = named(model)
    assert set(ours) == set(reference.weights)
    for name, parameter in ours.items():
        wanted_gradient = reference.weights[name].grad
        assert wanted_gradient.abs().max() > 0, f"the test is blind to {name}"
        assert relative(parameter.grad, wanted_gradient) < EXACT, name


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_formulas(name: str):
    compare(config_of(OPTIONS[name]))


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "alibi", "learned positions", "window", "softcap, window, alibi", "grouped, wide heads"),
        *("normalised values that are keys", "proportional rotary"),
    ],
)
def test_documents_are_apart(name: str):
    """Packed documents compute the same as separate ones: no attention across, positions from 0."""
    documents = torch.tensor([[0] * 5 + [1] * 1 + [2] * 6, [0] * 12])
    positions = torch.tensor([[*range(5), 0, *range(6)], [*range(12)]])
    config = resolve({
        "model": merged(BASE, OPTIONS[name]),
        "training": {"steps": 1, "sequence_length": S},
        "data": {"reset_attention_at_eod": True},
    })
    compare(config, positions, documents)
    model, _ = make(config)
    tokens, _, _ = batch()
    packed = model.logits(tokens, positions, documents)
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        alone = model.logits(tokens[:1, begin:end])
        assert relative(packed[:1, begin:end], alone) < EXACT


def test_z_loss_and_weights():
    compare(config_of({"head": {"multiplier": 0.4, "bias": True}}, z_loss=0.3))
    compare(config_of({"head": {"softcap": 2.0}, "embedding": {"tied": True}}, z_loss=0.3))


def test_bf16_follows():
    """In bf16 the logits follow the reference as far as bf16 does."""
    config = resolve({"model": BASE, "training": {"steps": 1, "sequence_length": S}, "precision": "bf16"})
    model = build_model(config)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    weights = {name: p.detach().double() for name, p in named(model).items()}
    tokens, _, _ = batch()
    logits = torch.stack([Reference(config, weights).logits(tokens[b]) for b in range(B)])
    assert model.logits(tokens).dtype == torch.float32
    assert relative(model.logits(tokens), logits) < 2e-2
