"""Jamba: Mamba or attention, each with an MLP or with experts, at regular distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link
from megatron.kinds.mamba import hf as mamba
from megatron.kinds.mlp import hf as mlp
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field
from ..layers import Layers
from . import common

MAMBA_SIZES = (
    *common.fields("mamba", expand="mamba_expand", state_size="mamba_d_state", convolution="mamba_d_conv"),
    *common.fields("mamba", rank="mamba_dt_rank", convolution_bias="mamba_conv_bias", bias="mamba_proj_bias"),
)


@dataclass(frozen=True)
class _Jamba(Layers):
    def pattern(self, theirs: PreTrainedConfig) -> str:
        mixers = ("attention" if each == "attention" else "mamba" for each in theirs.layers_block_type)
        ffns = ("moe" if experts > 1 else "mlp" for experts in theirs.layers_num_experts)
        return " ".join(f"{mixer}/{ffn}" for mixer, ffn in zip(mixers, ffns))


def _settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    blocks = model.blocks
    attention = _every([block.mixer is not None and block.mixer.name == "attention" for block in blocks])
    experts = _every([block.ffn is not None and block.ffn.name == "moe" for block in blocks])
    return {
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
    }


def _every(chosen: list[bool]) -> tuple[int, int]:
    """Period and offset of the chosen layers, or of none if they are irregular. Reading back then shows it."""
    for period in range(1, len(chosen) + 2):
        for offset in range(period):
            if all((index % period == offset) == each for index, each in enumerate(chosen)):
                return period, offset
    return len(chosen) + 1, len(chosen)


JAMBA = Architecture(
    "jamba",
    "JambaForCausalLM",
    (
        common.EMBEDDING,
        Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
        *common.LLAMA_ATTENTION,
        *mamba.inner_norms(f"{common.THEIRS}.mamba"),
        *mamba.mixer(f"{common.THEIRS}.mamba"),
        Link(f"{common.OURS}.ffn_norm", f"{common.THEIRS}.pre_ff_layernorm"),
        *mlp.gated(f"{common.THEIRS}.feed_forward"),
        Link(f"{common.OURS}.moe.router", f"{common.THEIRS}.feed_forward.router"),
        *moe.experts(f"{common.THEIRS}.feed_forward.experts"),
        Link("final_norm", "model.final_layernorm"),
        common.HEAD,
    ),
    _Jamba(
        dict.fromkeys(("mamba/moe", "mamba/mlp", "attention/mlp", "attention/moe"), ""),
        settings=_settings,
        needed=("mamba/moe", "mamba/mlp"),
    ),
    fields=(
        *common.experts("intermediate_size", "num_experts"),
        Field("mlp.hidden_size", "intermediate_size"),
        *MAMBA_SIZES,
        common.activation("hidden_act"),
    ),
    fixed={
        **{**common.MOE_FIXED, **common.NO_BIAS},
        "attention.position": "none",
        "moe.router.normalize": False,
        "mlp.gated": True,
        **common.options("mamba", heads=1, inner_norms=True),
    },
    required={"hidden_act": "silu"},
)
