"""Configurations of RWKV: the published numbers of parameters, to the last one."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from megatron.checkpoint.hf.rwkv_files import steps_of
from megatron.model.costs.describe import totals
from megatron.model.stack import build_model
from tests.model.test_configs import files, settings

RWKV4 = {  # Peng et al. 2023, table of the models
    "169m": (12, 768, 169_342_464),
    "430m": (24, 1024, 430_397_440),
    "1.5b": (24, 2048, 1_515_106_304),
    "3b": (32, 2560, 2_984_627_200),
    "7b": (32, 4096, 7_392_649_216),
    "14b": (40, 5120, 14_148_597_760),
}
RWKV6 = {
    "1.6b": (24, 2048, 32, 64, 1_599_873_024),
    "3b": (32, 2560, 32, 64, 3_099_863_040),
    "7b": (32, 4096, 64, 128, 7_635_746_816),
}
RWKV7 = {  # of the released weights, whose first layer has no matrix that blends values
    "0.1b": (12, 768, 64, 32, 128, 191_034_624),
    "0.4b": (24, 1024, 64, 32, 128, 450_767_872),
    "1.5b": (24, 2048, 96, 64, 256, 1_527_404_544),
    "2.9b": (32, 2560, 96, 64, 320, 2_947_735_040),
}


def test_every_file_is_tested():
    ours = {name for family in ("rwkv4", "rwkv6", "rwkv7") for name in files(family)}
    assert ours == {
        f"{family}/{size}" for family, sizes in (("rwkv4", RWKV4), ("rwkv6", RWKV6), ("rwkv7", RWKV7)) for size in sizes
    } | {"rwkv7/hybrid"}


def size_of(name: str) -> int:
    """By our counts and by our model, which must agree. No rule has anything to say."""
    resolved = settings(name)
    assert not resolved.warnings
    counted = totals(resolved.config).parameters
    assert counted == sum(p.numel() for p in build_model(resolved.config, device="meta").parameters())
    return counted


@pytest.mark.parametrize("size", RWKV4)
def test_rwkv4(size: str):
    layers, width, published = RWKV4[size]
    with torch.device("meta"):
        theirs = hf.RwkvForCausalLM(hf.RwkvConfig(vocab_size=50277, hidden_size=width, num_hidden_layers=layers))
    assert size_of(f"rwkv4/{size}") == published == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("size", RWKV6)
def test_rwkv6(size: str):
    """The embedding and head, three norms outside the blocks (of the embedding and before the head), and in each block
    13 square matrices, matrices of low rank and 16 vectors."""
    layers, C, mix, decay, published = RWKV6[size]
    assert (
        size_of(f"rwkv6/{size}")
        == published
        == 2 * 65536 * C + 4 * C + layers * (13 * C * C + 2 * C * (5 * mix + decay) + 16 * C)
    )


@pytest.mark.parametrize("size", RWKV7)
def test_rwkv7(size: str):
    layers, C, both, value, gate, published = RWKV7[size]
    in_all = 2 * 65536 * C + 4 * C + layers * (12 * C * C + 19 * C + 2 * C * (2 * both + value + gate))
    assert size_of(f"rwkv7/{size}") == published == in_all - (C + 2 * C * value)


def test_ranks_of_the_authors_current_code():
    """They follow from the width. The authors' code has the blend in the first layer, too."""
    for size, wanted in (
        ("0.1b", 191_084_544),
        ("0.4b", 453_980_160),
        ("1.5b", 1_530_814_464),
        ("2.9b", 2_953_308_160),
    ):
        free = [f"model.rwkv7.{name}_rank=null" for name in ("decay", "rate", "value", "gate")]
        config = settings(f"rwkv7/{size}", overrides=tuple(free)).config
        C = config.model.hidden_size
        assert totals(config).parameters + C + 2 * C * config.model.rwkv7.value_rank == wanted


def test_the_mixed_stack():
    config = settings("rwkv7/hybrid").config
    kinds = [str(block) for block in build_model(config, device="meta").plan.blocks]
    assert kinds == ["rwkv7/mlp", "rwkv7/mlp", "rwkv7/mlp", "attention@local/mlp"] * 6
    H, width = 1024, 2816
    block = 3 * H * width + 2 * H
    rwkv7 = 4 * H * H + 2 * H * (64 + 64 + 64 + 160) + 14 * H
    attention = 2 * H * H + 2 * H * (4 * 64)
    assert size_of("rwkv7/hybrid") == 2 * 65536 * H + H + 24 * block + 18 * rwkv7 + 6 * attention - (H + 2 * H * 64)


@pytest.mark.parametrize("name", ["rwkv6/1.6b", "rwkv7/0.1b"])
def test_published_names(name: str):
    """The number of tensors of the published files: 28 per block of RWKV-6, 33 of RWKV-7, 3 fewer in the first."""
    config = settings(name).config
    names = [each for step in steps_of(config) for each in step.theirs]
    per_layer = {"rwkv6": 28, "rwkv7": 33}[name.split("/")[0]]
    layers = len(build_model(config, device="meta").plan.blocks)
    assert len(names) == len(set(names)) == 6 + per_layer * layers - (3 if "rwkv7" in name else 0)
