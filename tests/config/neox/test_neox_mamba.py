"""GPT-NeoX's Mamba keys: the resulting model has upstream's tensors."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.config import resolve
from megatron.model.stack import build_model
from tests.config.neox.neox_cases import at, flat, noted, problem_of

MAMBA = {"norm": "rmsnorm", "output_layer_init_method": "single_residual_scaled_normal", "init_method": "small_init"}


def shapes(translation) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the logical tensors of the model that a translation describes."""
    values = translation.values
    values["model"]["vocab_size"] = 128
    model = build_model(resolve(values, ranks=1), device=torch.device("meta"), dtype=torch.float32, values=False)
    return {tensor.logical.name: tuple(tensor.logical.shape) for tensor in model.parameters()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", [None, 3])
def test_a_stack_of_mamba(factor, bias):
    """Upstream's block: in_proj, conv1d (bias or none), x_proj, dt_proj with bias, A_log, D, out_proj, one norm."""
    found = flat(attention_config=[[["mamba"], 4]], expansion_factor=factor, mamba_use_bias_in_conv=bias, **MAMBA)
    assert found.problems == [] and at(found, "model.layers") == "mamba x4"
    hidden, inner, rank, state, taps = 64, 64 * (factor or 2), 4, 16, 4
    upstream = (
        2 * hidden * inner + (taps + bias) * inner + inner * (rank + 2 * state) + (rank + 1) * inner
        + inner * state + inner + inner * hidden + hidden
    )  # fmt: skip
    sizes = {name: math.prod(shape) for name, shape in shapes(found).items()}
    for layer in range(4):
        assert sum(size for name, size in sizes.items() if name.startswith(f"layers.{layer}.")) == upstream


def test_hybrids_and_the_initial_values():
    found = flat(attention_config=[[["flash", "mamba", "mamba"], 1], [["global"], 1]], **MAMBA)
    assert found.problems == [] and at(found, "model.layers") == "(attention/mlp) x1 mamba x2 (attention/mlp) x1"
    assert at(found, "model.init.output") == "single_residual_scaled_normal"
    values = found.values
    values["model"]["vocab_size"] = 128
    model = build_model(resolve(values, ranks=1), device=torch.device("cpu"), dtype=torch.float32)
    down = next(
        each for each in model.parameters() if each.logical.name.startswith("layers.3") and "down" in each.logical.name
    )
    assert float(down.detach().std()) == pytest.approx(0.02 / math.sqrt(4), rel=0.05)


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"mamba_selective_fp32_params": False}, "mamba_selective_fp32_params"),
        ({"mamba_use_bias_in_linears": True}, "mamba_use_bias_in_linears"),
        ({"intermediate_size": 100}, "intermediate_size"),
    ],
)
def test_what_mamba_here_has_not(changes, key):
    assert problem_of(flat(attention_config=[[["mamba"], 4]], **MAMBA, **changes), key).fix


def test_keys_without_a_layer_that_reads_them():
    assert noted(flat(mamba_use_bias_in_conv=False), "mamba_use_bias_in_conv (no layer is of kind mamba)")
    assert "gMLP" in problem_of(flat(attention_config=[[["gmlp"], 4]]), "attention_config").fix
    assert "uses one norm twice" in problem_of(flat(attention_config=[[["rwkv"], 4]]), "attention_config").fix
