"""The mixture of experts against blocks of transformers: outputs and gradients in float64."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor

from megatron.kinds.moe.layer import MoE
from megatron.model.stack import build_model
from megatron.model.stream import Stream
from tests.float64 import DOUBLE, EXACT, wider
from tests.kinds.moe.blocks import H, config_of, inputs, layer, run
from tests.model.parity import named, randomise, relative


def same_gradients(moe: MoE, x: Tensor, wanted_y: Tensor, wanted_x: Tensor, pairs: dict[str, Tensor]) -> None:
    """Outputs, and gradients of one random functional of them."""
    y = run(moe, x)
    assert relative(y, wanted_y) < EXACT
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(DOUBLE)
    (y * weight).sum().backward()
    (wanted_y * weight).sum().backward()
    assert relative(x.grad, wanted_x.grad) < EXACT
    for name, theirs in pairs.items():
        assert relative(named(moe)[name].grad, theirs.grad) < EXACT, name


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_deepseek_v3_block(groups):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    theirs = DeepseekV3MoE(
        hf.DeepseekV3Config(
            hidden_size=H,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=12,
            n_shared_experts=2,
            n_group=groups[0],
            topk_group=groups[1],
            routed_scaling_factor=1.7,
            experts_implementation="eager",
        )
    ).double()
    randomise(theirs, 1)
    with torch.no_grad():
        theirs.gate.e_score_correction_bias.copy_(0.3 * torch.randn(8, generator=torch.Generator().manual_seed(2)))
    ours = layer(
        top_k=3,
        shared_size=24,
        router={
            "score": "sigmoid",
            "normalize": True,
            "scale": 1.7,
            "groups": groups[0],
            "top_groups": groups[1],
            "correction": "sign",
        },
    )
    shared, parameters = theirs.shared_experts, named(ours)
    pairs = {
        "moe.router.weight": theirs.gate.weight,
        "moe.experts.gate_up.weight": theirs.experts.gate_up_proj,
        "moe.experts.down.weight": theirs.experts.down_proj,
        "moe.shared.down.weight": shared.down_proj.weight,
    }
    with torch.no_grad():
        for name, value in pairs.items():
            parameters[name].copy_(value)
        parameters["moe.shared.gate_up.weight"].copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
        ours.balance.correction.copy_(theirs.gate.e_score_correction_bias)
    x, z = inputs(), inputs()
    with wider():
        same_gradients(ours, x, theirs(z), z, pairs)
    fused = torch.cat([shared.gate_proj.weight.grad, shared.up_proj.weight.grad])
    assert relative(parameters["moe.shared.gate_up.weight"].grad, fused) < EXACT


def test_granite_shared_block():
    from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedMLP, GraniteMoeSharedMoE

    config = hf.GraniteMoeSharedConfig(
        hidden_size=H,
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=12,
        shared_intermediate_size=20,
        num_attention_heads=2,
        experts_implementation="eager",
    )
    experts, shared = GraniteMoeSharedMoE(config).double(), GraniteMoeSharedMLP(config).double()
    randomise(experts, 1)
    randomise(shared, 2)
    ours = layer(top_k=3, shared_size=20, router={"normalize": True})
    theirs = dict(experts.named_parameters())
    router = next(value for name, value in theirs.items() if value.shape == (8, H))
    pairs = {
        "moe.router.weight": router,
        "moe.experts.gate_up.weight": experts.experts.gate_up_proj,
        "moe.experts.down.weight": experts.experts.down_proj,
        "moe.shared.gate_up.weight": shared.input_linear.weight,
        "moe.shared.down.weight": shared.output_linear.weight,
    }
    with torch.no_grad():
        for name, value in pairs.items():
            named(ours)[name].copy_(value)
    x, z = inputs(), inputs()
    with wider():
        same_gradients(ours, x, experts(z) + shared(z), z, pairs)


def zaya_pairs(ours, theirs):
    """Random values for theirs. Our parameters with the tensors of theirs that are the same."""
    pairs = {}
    for index, (mine, block) in enumerate(zip(ours, theirs)):
        randomise(block, index)
        block.gate.router_mlp.out_proj.weight.data *= 20  # so that tokens differ in what they choose
        bias = block.gate.balancing_biases.copy_(0.02 * torch.randn(5, generator=torch.Generator().manual_seed(index)))
        mine.balance.correction.copy_(bias)
        gate, own = block.gate, named(mine)
        names = {
            "router.down.weight": gate.down_proj.weight,
            "router.down.bias": gate.down_proj.bias,
            "router.norm.weight": gate.router_mlp.norm.weight,
            "router.fc1.weight": gate.router_mlp.fc1.weight,
            "router.fc1.bias": gate.router_mlp.fc1.bias,
            "router.fc2.weight": gate.router_mlp.fc2.weight,
            "router.fc2.bias": gate.router_mlp.fc2.bias,
            "router.out.weight": gate.router_mlp.out_proj.weight,
            "experts.gate_up.weight": block.experts.gate_up_proj,
            "experts.down.weight": block.experts.down_proj,
        }
        if index:
            names["router.state_scale"] = gate.router_states_scale
        assert {f"layers.{index}.moe.{name}" for name in names} == set(own)
        pairs |= {own[f"layers.{index}.moe.{name}"]: value for name, value in names.items()}
    return pairs


def test_zaya_blocks():
    """Two blocks in a row: the second router has the first one's state. Some tokens use no expert."""
    from transformers.models.zaya.modeling_zaya import ZayaSparseMoeBlock

    theirs_config = hf.ZayaConfig(
        hidden_size=H,
        num_experts=4,
        moe_intermediate_size=12,
        router_hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_hidden_layers=2,
        experts_implementation="eager",
    )
    router = {"network": "mlp", "width": 8, "skip": True, "correction": "sign"}
    config = config_of(
        {"experts": 4, "top_k": 1, "hidden_size": 12, "router": router},
        layers="moe@first moe",
        norm={"type": "rmsnorm", "epsilon": theirs_config.rms_norm_eps},
        variants={"first": {"router": {"average": False}}},
    )
    theirs = [ZayaSparseMoeBlock(theirs_config, index).double() for index in range(2)]
    ours = [block.ffn for block in build_model(config, dtype=DOUBLE).blocks]
    pairs = zaya_pairs(ours, theirs)
    with torch.no_grad():
        for mine, value in pairs.items():
            mine.copy_(value)
    x, z = inputs(40), inputs(40)
    first, channels = ours[0](x, Stream(x))
    y, _ = ours[1](x + first, Stream(x).with_channels(channels))
    with wider():
        their_first, state = theirs[0](z)
        wanted, _ = theirs[1](z + their_first, state)
    assert relative(y, wanted) < EXACT
    unused = wanted.abs().amax(-1) == 0
    assert 0 < unused.sum() < unused.numel() and y[unused].abs().max() == 0
    assert ours[1].balance.tally[4] == unused.sum() and ours[1].balance.tally[:4].sum() == (~unused).sum()
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(DOUBLE)
    (y * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert relative(x.grad, z.grad) < EXACT
    for mine, value in pairs.items():
        assert value.grad.abs().max() > 0 and relative(mine.grad, value.grad) < EXACT, mine.logical.name
