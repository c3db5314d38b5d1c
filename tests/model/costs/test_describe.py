"""The counts that users see, against models that exist: parameters, FLOPs, kept activations, decoding state."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import resolve
from megatron.model.costs.describe import layers, layers_table, totals
from megatron.model.stack import Model, build_model
from tests.model.test_model_options import BASE, OPTIONS, merged
from tests.model.test_recomputation import Allocations
from tests.selection import covering

B, S = 2, 64
MORE = {
    "dropout": {"dropout": 0.1},
    "dropout, parallel": {"dropout": 0.1, "residual": {"form": "parallel"}},
    "llama": {
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2},
        "mlp": {"gated": True, "activation": "silu"},
    },
    "olmo2": {
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "qk_norm": "full"},
        "residual": {"norm": "post"},
        "mlp": {"gated": True, "activation": "silu"},
    },
    "qwen3 wide": {
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2, "head_dim": 40, "qk_norm": "head"},
    },
    "multipliers": {
        "attention": {"heads": 4, "input_multiplier": 0.7, "output_multiplier": 1.3},
        "mlp": {"gated": True, "activation": "silu", "gate_multiplier": 0.6, "output_multiplier": 1.7},
    },
}
CASES = {**OPTIONS, **MORE, "learned and rotary": {"embedding": {"position": "learned", "max_positions": 70}}}
SHARED = 8192  # bytes that all layers share: rotary tables, losses of the tokens


def config_of(name: str, **training):
    model = merged(merged(BASE, {"hidden_size": 48}), CASES[name])
    return resolve({"model": model, "training": {"steps": 1, "sequence_length": S, "micro_batch_size": B, **training}})


def inputs():
    tokens, labels = torch.randint(37, (2, B, S), generator=torch.Generator().manual_seed(0))
    return tokens, labels, torch.ones(labels.shape)


def parts(model: Model) -> list[torch.nn.Module]:
    return [model.embedding, *model.blocks, model.head]


@pytest.mark.parametrize("name", CASES)
def test_parameters(name: str):
    config = config_of(name)
    model, found = build_model(config, device="meta"), []
    seen: set[int] = set()
    for part in parts(model):
        own = {id(p): p.numel() for p in part.parameters() if id(p) not in seen}
        seen |= set(own)
        found.append(sum(own.values()))
    assert [row["parameters"] for row in layers_table(config)] == found
    places = model.embedding.positions
    tables = (model.embedding.tokens.weight, places and places.weight, model.head.weight)
    embeddings = {id(p): p.numel() for p in tables if p is not None}
    assert totals(config).parameters == sum(found)
    assert totals(config).non_embedding_parameters == sum(found) - sum(embeddings.values())


@pytest.mark.parametrize("name", [name for name in CASES if "window" not in name and "variants" not in name])
def test_flops(name: str):
    """Exactly what torch counts: matrix products and attention over the full square."""
    config = config_of(name)
    model, (tokens, labels, weights) = build_model(config), inputs()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        model.eval().logits(tokens)
    total = totals(config)
    assert forward.get_total_flops() == total.forward_flops * B * S
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as both:
        model(tokens, labels, weights)[0].backward()
    # products that are computed again for the gradient, without recomputation of the rest
    again = sum(p.numel() for p in model.parameters() if p.logical.name.endswith("rows.projection"))
    assert both.get_total_flops() == (total.training_flops + 2 * again) * B * S


def test_flops_of_a_window():
    """A window of w costs w keys per query. A torch mask would still cost the square."""
    near, far = (layers(config_of("plain", sequence_length=S))[1], layers(config_of("window"))[1])
    assert near.counts.flops - far.counts.flops == 2 * 2 * (S - 3) * 48
    assert far.counts.state == 2 * 48 * 3 and near.counts.state == 2 * 48 * S


def test_full_recomputation_runs_the_blocks_again():
    config = config_of("llama", activation_checkpointing={"mode": "full", "every": 2})
    model, (tokens, labels, weights) = build_model(config), inputs()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, labels, weights)[0].backward()
    total, rows = totals(config), layers(config)
    assert total.hardware_flops == total.training_flops + rows[1].counts.flops and not rows[2].recomputed
    counted = counter.get_total_flops() / (B * S)
    # torch stops a recomputation once the last kept tensor is there: before the block's last product
    last = 2 * model.blocks[0].ffn.down.weight.numel()
    assert counted == total.hardware_flops - last


def kept_bytes(config) -> int:
    """Bytes that exist between forward and backward, next to parameters, inputs, and the head's weight gradient."""
    model, (tokens, labels, weights) = build_model(config), inputs()
    with Allocations(model.parameters()) as allocations:
        loss, _ = model(tokens, labels, weights, samples=torch.arange(B))
    found = allocations.bytes()
    loss.backward()
    return found - model.head.weight.numel() * 4 - (config.model.vocab_size * 4 if config.model.head.bias else 0)


def decomposed_norms(config) -> int:
    """Elements per token that CPU's RMSNorm keeps more than the fused one: the normalised vector, for each norm."""
    model = config.model
    if model.norm.type == "rmsnorm":
        return model.hidden_size
    return 0


ACTIVATIONS = [
    name for name in CASES if not any(word in name for word in ("softcap", "sinks", "variants", "blocks", "window in"))
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kept_activations_of_a_block(name: str):
    config = config_of(name)
    less = resolve({
        "model": {**merged(merged(BASE, {"hidden_size": 48}), CASES[name]), "layers": "attention/mlp"},
        "training": {"steps": 1, "sequence_length": S, "micro_batch_size": B},
    })
    found = kept_bytes(config) - kept_bytes(less)
    row, attention = layers(config)[1], config.model.attention
    elements = row.counts.activations + 2 * decomposed_norms(config)
    if attention.qk_norm == "full" or (attention.qk_norm == "head" and config.model.norm.type == "rmsnorm"):
        elements += (attention.heads + attention.kv_heads) * attention.head_dim
    assert found == pytest.approx(elements * B * S * 4, rel=0.001)
    assert layers_table(config)[1]["activation_bytes"] == row.counts.activations * B * S * 4


@pytest.mark.parametrize(
    "name",
    ["plain", "dropout", "tied", "channel scales", "embedding norm and multiplier", "head multiplier, bias, softcap"],
)
def test_kept_activations_of_the_ends(name: str):
    """The layers' counts add up to the model, but for shared parts."""
    config = config_of(name)
    ends = sum(layer.saved for layer in layers(config))
    assert kept_bytes(config) == pytest.approx(ends * B * S * 4, abs=SHARED)


@pytest.mark.parametrize(
    ("name", "mode"),
    covering(
        ["plain", "biases", "parallel", "llama", "olmo2", "qk norm by head", "silu gated", "dropout", "channel scales"],
        [{"mode": "selective"}, {"mode": "full"}, {"mode": "full", "every": 2}],
    ),
)
def test_kept_activations_with_recomputation(name: str, mode: dict):
    config = config_of(name, activation_checkpointing=mode)
    wanted = sum(layer.saved for layer in layers(config)) + decomposed_norms(config)
    if mode.get("every") == 2:
        wanted += 2 * decomposed_norms(config) + (96 if name == "olmo2" else 0)
    assert kept_bytes(config) == pytest.approx(wanted * B * S * 4, abs=SHARED)


@pytest.mark.parametrize("name", ["plain", "multi-query", "grouped, wide heads", "attention and mlp blocks"])
def test_decoding_state(name: str):
    config = config_of(name)
    model, (tokens, _, _) = build_model(config).eval(), inputs()
    state = model.new_state()
    with torch.no_grad():
        model.decode(tokens, state, 0)
    for block, row in zip(state, layers_table(config)[1:-1]):
        cache = block.mixer
        held = 0 if cache is None else 4 * (cache.keys[0, :, :S].numel() + cache.values[0, :, :S].numel())
        assert row["state_bytes"] == held


def test_the_table():
    config = resolve(
        {
            "model": {**BASE, "layers": "(attention/mlp) x3 mlp"},
            "precision": "bf16",
            "parallel": {"pipeline": 2, "pipeline_split": [1, 3]},
            "training": {"steps": 1, "sequence_length": S, "micro_batch_size": B, "accumulation": 2},
            "zero": {"stage": 1},
        },
        ranks=2,
    )
    rows = layers_table(config)
    assert [row["name"] for row in rows] == ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert [row["kind"] for row in rows] == ["embedding", *["attention/mlp"] * 3, "mlp", "head"]
    assert [row["stage"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert rows[1]["activation_bytes"] == layers(config)[1].saved * B * S * 2
    assert totals(config).forward_flops == sum(row["flops"] for row in rows)
