"""muP and CompleteP against the tables of the papers. `test_mup_package.py` has the package of muP's authors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.checkpoint.hf.config import hf_config
from megatron.config import Config, resolve
from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
from megatron.model.parametrization import folded
from megatron.model.stack import Model, build_model
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, randomise, relative

RATE, DECAY, EPSILON = 0.01, 0.1, 1e-8
BASE = 64
DENSE = {
    "layers": "(attention/mlp) x2",
    "vocab_size": 211,
    "norm": {"type": "rmsnorm"},
    "attention": {"heads": 4},
    "init": {"std": 0.05, "output": "normal"},
}
# One layer of every kind whose parameters grow in other ways than matrices and vectors.
KINDS = {
    "layers": "attention/moe mla/moe@states mamba2/mlp mamba/mlp rwkv7/rwkv7_ffn rwkv6/rwkv6_ffn cca/mlp gated_delta "
    "dsa/mlp",
    "vocab_size": 50,
    "residual": {"streams": 2},
    "attention": {"heads": 4},
    "mla": {"heads": 4, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8},
    "dsa": {"heads": 4, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8, "index_heads": 2, "index_dim": 8},
    "moe": {"experts": 4, "shared_size": 32, "shared_gate": True},
    "variants": {"states": {"router": {"network": "mlp", "width": 12, "average": False}}},
    "rwkv7": {"head_dim": 16},
    "rwkv6": {"head_dim": 16},
    "mamba2": {"head_dim": 16},
    "cca": {"heads": 4, "head_dim": 16},
    "gated_delta": {"heads": 4, "key_dim": 8, "value_dim": 8},
}
# Matrices from the stream to a number of outputs that no width changes.
READOUTS = ("moe.router.weight", "moe.router.down.weight", "moe.shared.gate.weight", "rows.projection")
READOUTS += ("indexer.query.weight", "indexer.key.weight", "indexer.weigh.weight")


def config_of(model: dict[str, Any], width: int = 256, optimizer: str = "adamw", **parametrization: Any) -> Config:
    return resolve({
        "model": {**model, "hidden_size": width, "parametrization": {"base_width": BASE, **parametrization}},
        "training": {"steps": 1, "sequence_length": 8},
        "optimizer": {
            "type": optimizer,
            "lr": RATE,
            "weight_decay": DECAY,
            "groups": {"norm": {"weight_decay": DECAY}},
        },
        "data": {"synthetic": "copy"},
    })


def settings(config: Config, model: Model) -> dict[str, tuple[float, float, float]]:
    """(rate, decay, epsilon) of each parameter by its logical name, as the optimizer has them."""
    optimizer = build_optimizer(config, model.parameters())
    set_learning_rate(optimizer, RATE)
    return {
        p.logical.name: (group["lr"], group["weight_decay"], group.get("eps", EPSILON))
        for group in optimizer.param_groups
        for p in group["params"]
    }


def expected(role: str, name: str, m: float, depth: float, exponent: float) -> tuple[float, float, float]:
    """(rate, decay, epsilon) by table 1 of Dey et al. 2025 and, for routers and low ranks, table 3 of Yang et al."""
    if not name.startswith("layers."):
        return RATE, DECAY, EPSILON / m
    of_depth, of_branch = depth ** (exponent - 1), depth**-exponent
    down = any(word in name for word in (".down.weight", "mix_down")) and role == "state"
    readout = down or name.endswith(READOUTS)
    if readout:
        return RATE / m * of_depth, DECAY * m, EPSILON * of_branch
    if role in ("hidden", "output"):
        return RATE / m * of_depth, DECAY * m, EPSILON / m * of_branch
    return RATE * of_depth, DECAY, EPSILON / m * of_branch


@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_every_kind_has_the_settings_of_completep(exponent):
    m, depth = 128 / BASE, 9 / 2
    config = config_of(KINDS, width=128, type="completep", base_depth=2, depth_exponent=exponent)
    model = build_model(config, dtype=torch.float32)
    undecayed = ("bias", "state", "decay")
    for name, found in settings(config, model).items():
        role = named(model)[name].logical.role.value
        lr, decay, epsilon = expected(role, name, m, depth, exponent)
        wanted = lr, 0.0 if role in undecayed else decay, epsilon
        assert found == pytest.approx(wanted, rel=1e-12), (name, role)


def starts(width: int, model: dict[str, Any], **parametrization: Any) -> dict[str, float]:
    """Mean square of each tensor's initial values."""
    built = build_model(config_of(model, width=width, **parametrization))
    return {name: float(each.detach().double().square().mean()) for name, each in named(built).items()}


def test_every_kind_starts_as_the_base_model_scaled():
    """The mean square of hidden matrices falls with the width, of routers with its square. That of others stays."""
    wide, base = starts(128, KINDS, type="mup"), starts(64, KINDS, type="standard", base_width=None)
    assert wide.keys() == base.keys()
    roles = {name: each.logical for name, each in named(build_model(config_of(KINDS, width=128, type="mup"))).items()}
    for name, found in wide.items():
        logical, factor = roles[name], 1.0
        if logical.role.value in ("hidden", "output"):
            factor = 0.5
        elif name.endswith(READOUTS):
            factor = 0.25
        room = 8 / torch.Size(logical.shape).numel() ** 0.5
        assert found == pytest.approx(base[name] * factor, rel=max(room, 0.02), abs=1e-12), name


@pytest.mark.parametrize(
    "scheme", ["normal", "scaled_normal", "small_init", "wang_init", "xavier_normal", "fan_in_uniform", "orthogonal"]
)
def test_schemes_follow_from_the_base(scheme):
    """Whatever the scheme, the base model's numbers are divided by the root of the width, and a head's numbers are
    kept."""
    init = {"hidden": scheme, "output": scheme, "embedding": scheme, "head": "normal"}
    small = {**DENSE, "vocab_size": 512, "init": init}
    wide, base = starts(256, small, type="mup"), starts(64, small, type="standard", base_width=None)
    for name, found in wide.items():
        factor = 0.25 if name.endswith(("query.weight", "key_value.weight", "output.weight", "up.weight")) else 1.0
        factor = 0.25 if name.endswith("down.weight") else factor
        assert found == pytest.approx(base[name] * factor, rel=0.1), name


@pytest.mark.parametrize("type", ["mup", "completep"])
def test_folding_is_the_same_function(type):
    """The model with its multipliers in the sections of its parts, without a parametrization."""
    model = {
        **KINDS,
        "layers": "attention/mlp attention@wide/moe mla/mlp",
        "variants": {"wide": {"head_dim": 48, "scale": 0.3}},
        "residual": {"multiplier": 0.7},
        "head": {"multiplier": 3.0},
    }
    config = config_of(model, width=128, type=type, base_head_dim=8, **({"base_depth": 2} if type != "mup" else {}))
    plain = config.model_copy(update={"model": folded(config.model)})
    assert plain.model.parametrization.type == "standard"
    ours, theirs = build_model(config, dtype=DOUBLE), build_model(plain, dtype=DOUBLE)
    randomise(ours, 1)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 50, (2, 8))
    assert relative(ours.logits(tokens), theirs.logits(tokens)) < EXACT
    unscaled = build_model(config_of(model, width=128, type="standard", base_width=None), dtype=DOUBLE)
    unscaled.load_state_dict(ours.state_dict())
    assert relative(ours.logits(tokens), unscaled.logits(tokens)) > 1e-3


def test_granite_can_be_exported_and_llama_is_refused():
    granite = {**DENSE, "mlp": {"gated": True, "activation": "silu"}, "residual": {"multiplier": 0.5}}
    _, theirs = hf_config(config_of(granite, type="completep", base_depth=1, base_head_dim=16), "granite")
    assert theirs.logits_scaling == pytest.approx(4.0)
    assert theirs.residual_multiplier == pytest.approx(0.25)
    assert theirs.attention_multiplier == pytest.approx(4 / 64)
    with pytest.raises(Exception, match="model.head.multiplier"):
        hf_config(config_of(granite, type="mup"), "llama")


@pytest.mark.parametrize("scale, factor", [("original", 1.0), ("moonlight", 0.5)])
def test_steps_of_muon_are_as_large_at_every_width(scale, factor):
    """Spectral norm of the step of a square matrix over the root of its side stays: 1 / m, 1 / sqrt(m)."""
    config = config_of(DENSE, optimizer="muon", type="mup")
    config = resolve({
        **config.model_dump(include={"model", "training", "data"}),
        "optimizer": {"type": "muon", "lr": RATE, "muon_lr": 3 * RATE, "weight_decay": DECAY, "muon_scale": scale},
    })
    found = settings(config, build_model(config))
    assert found["layers.0.mlp.up.weight"][:2] == pytest.approx((3 * RATE * factor, DECAY / factor), rel=1e-12)
    assert found["embedding.tokens.weight"][:2] == pytest.approx((RATE, DECAY), rel=1e-12)


def test_standard_leaves_everything_as_it_is():
    config = config_of(KINDS, width=128, type="standard", base_width=None)
    for name, found in settings(config, build_model(config)).items():
        assert found[0] == RATE and found[1] in (0.0, DECAY) and found[2] == EPSILON, name
