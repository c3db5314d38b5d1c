"""A residual stream that is fp32 while the layers compute in bf16."""

from __future__ import annotations

import pytest
import torch

from megatron.checkpoint.hf.config import hf_config, model_values
from megatron.config import resolve
from megatron.model.costs.describe import layers
from megatron.model.stack import build_model
from tests.model.parity import relative
from tests.model.test_recomputation import Allocations
from tests.selection import covering

V, S, B, H = 61, 24, 2, 32
MODEL = {
    "hidden_size": H,
    "vocab_size": V,
    "norm": {"type": "layernorm"},
    "attention": {"heads": 4},
    "mamba2": {"head_dim": 8, "state_size": 8, "groups": 2, "chunk": 8},
    "shared_attention": {"heads": 4, "mlp": {"hidden_size": 40}},
    "rwkv7": {"head_dim": 16, "decay_rank": 4, "rate_rank": 4, "value_rank": 4, "gate_rank": 4},
    "moe": {"experts": 4, "hidden_size": 16, "router": {"network": "mlp", "width": 8}},
    "variants": {"first": {"router": {"average": False}}},
}
STACKS = {
    "sequential": {"layers": "mamba2+shared_attention (rwkv7/mlp) x2 attention/moe@first attention/moe"},
    "parallel": {"layers": "(attention/mlp) x2", "residual": {"form": "parallel"}},
    "parallel, one norm": {"layers": "(attention/mlp) x2", "residual": {"form": "parallel", "shared_norm": True}},
    "post norm": {"layers": "(attention/mlp) x2", "residual": {"norm": "post"}},
    "scaled": {"layers": "(attention/mlp) x2", "residual": {"channel_scales": True}},
    "embedding norm": {"layers": "mamba2 x2", "embedding": {"norm": True}},
}


def settings(name: str, wide: bool = True, mode: str = "none"):
    stack = STACKS[name]
    model = {**MODEL, **{key: value for key, value in stack.items() if key not in MODEL}}
    kinds = {
        "variants": "@first",
        **{kind: kind for kind in ("mamba2", "shared_attention", "rwkv7", "moe", "attention")},
    }
    used = {key: value for key, value in model.items() if kinds.get(key, "") in stack["layers"]}
    return resolve({
        "model": {**used, "residual": {**stack.get("residual", {}), "fp32": wide}},
        "precision": {"compute": "bf16"},
        "training": {
            "steps": 1,
            "sequence_length": S,
            "micro_batch_size": B,
            "activation_checkpointing": {"mode": mode},
        },
    })


def inputs():
    tokens = torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:], torch.full((B, S), 1 / (B * S))


@pytest.mark.parametrize("name", STACKS)
def test_the_stream_is_fp32_and_layers_read_their_own_type(name):
    model, seen = build_model(settings(name), dtype=torch.bfloat16), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, stream: seen.append(("stream", stream.hidden.dtype)))
        for layer in (block.mixer, block.ffn):
            if layer is not None:
                layer.register_forward_pre_hook(lambda module, given: seen.append(("layer", given[0].dtype)))
    loss, _ = model(*inputs())
    loss.backward()
    assert set(seen) == {("stream", torch.float32), ("layer", torch.bfloat16)}
    for parameter in model.parameters():
        assert parameter.grad.dtype == parameter.dtype and parameter.grad.isfinite().all(), parameter.logical.name
    reference = build_model(settings(name), dtype=torch.float32)
    expected, _ = reference(*inputs())
    expected.backward()
    assert relative(loss, expected) < 1e-2
    whole = [torch.cat([p.grad.double().flatten() for p in each.parameters()]) for each in (model, reference)]
    assert relative(*whole) < 0.2


def test_additions_below_a_digit_of_bf16_are_not_lost():
    """64 branches of about a thousandth of the stream each: less than bf16's last digit of it."""

    def hidden(wide: bool, dtype: torch.dtype) -> torch.Tensor:
        config = resolve({
            "model": {
                "layers": "(mlp) x64",
                "hidden_size": H,
                "vocab_size": V,
                "residual": {"fp32": wide, "multiplier": 1e-3},
                "init": {"embedding": "normal", "hidden": "fan_in_uniform", "output": "fan_in_uniform", "std": 1.0},
            },
            "precision": {"compute": "bf16"},
            "training": {"steps": 1, "sequence_length": S},
        })
        model = build_model(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
            stream = model.stream(inputs()[0])
            return stream.hidden.double() - model.embedding(inputs()[0]).hidden.double()

    exact = hidden(True, torch.float32)
    assert relative(hidden(True, torch.bfloat16), exact) < 0.02
    assert relative(hidden(False, torch.bfloat16), exact) > 0.3


@pytest.mark.parametrize("name", ["sequential", "scaled"])
def test_in_fp32_it_changes_nothing(name):
    wide, plain = (build_model(settings(name, wide), dtype=torch.float32)(*inputs())[0] for wide in (True, False))
    assert torch.equal(wide, plain)


def test_decoding():
    model = build_model(settings("sequential"), dtype=torch.bfloat16).eval()
    tokens = inputs()[0]
    with torch.no_grad():
        state = model.new_state()
        pieces = [model.decode(tokens[:, begin : begin + 6], state, begin) for begin in range(0, S, 6)]
        whole = model.logits(tokens)
    assert relative(torch.cat(pieces, 1), whole) < 3e-2


@pytest.mark.parametrize(
    ("mode", "name"), covering(["none", "full", "selective"], ["parallel", "parallel, one norm", "post norm", "scaled"])
)
def test_what_it_keeps_is_counted(name, mode):
    """Bytes between forward and backward that it adds, and the count of them."""

    def kept(wide: bool) -> int:
        model = build_model(settings(name, wide, mode), dtype=torch.bfloat16)
        with Allocations(model.parameters()) as allocations:
            loss, _ = model(*inputs())
        found = allocations.bytes()
        loss.backward()
        return found

    counted = [sum(layer.saved for layer in layers(settings(name, wide, mode))) * B * S * 2 for wide in (True, False)]
    of_norms = 5 * (2 * B * S * 2 + 2 * H * 4)  # statistics and weights that these take in fp32
    assert kept(True) - kept(False) == pytest.approx(counted[0] - counted[1], abs=of_norms)
    assert counted[0] > counted[1]


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_transformers_knows_it_for_mamba(kind, wide):
    config = resolve({
        "model": {
            "layers": f"{kind} x2",
            "hidden_size": H,
            "vocab_size": V,
            "residual": {"fp32": wide},
            "norm": {"type": "rmsnorm"},
            "mamba2": {"head_dim": 8},
        },
        "training": {"steps": 1, "sequence_length": S},
    })
    _, theirs = hf_config(config, kind)
    assert theirs.residual_in_fp32 is wide
    assert model_values(theirs)["residual"]["fp32"] is wide
