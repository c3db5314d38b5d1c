"""Jamba: Mamba or attention, each with an MLP or with experts, at regular distances."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection

from .hybrids import Hybrid
from .links import Fused, Link, Stacked
from .tables import mamba_mixer

_OURS, _THEIRS = "layers.{n}", "model.layers.{n}"
_NORMS = {"dt_norm": "dt_layernorm", "B_norm": "b_layernorm", "C_norm": "c_layernorm"}
_EXPERT = f"{_THEIRS}.feed_forward.experts.{{e}}"

LINKS = (
    Link("embedding.tokens", "model.embed_tokens"),
    Link(f"{_OURS}.mixer_norm", f"{_THEIRS}.input_layernorm"),
    Link(f"{_OURS}.attention.query", f"{_THEIRS}.self_attn.q_proj"),
    Link(f"{_OURS}.attention.key_value", (f"{_THEIRS}.self_attn.k_proj", f"{_THEIRS}.self_attn.v_proj"), Fused()),
    Link(f"{_OURS}.attention.output", f"{_THEIRS}.self_attn.o_proj"),
    *(Link(f"{_OURS}.mamba.{ours}", f"{_THEIRS}.mamba.{theirs}") for ours, theirs in _NORMS.items()),
    *mamba_mixer(f"{_THEIRS}.mamba"),
    Link(f"{_OURS}.ffn_norm", f"{_THEIRS}.pre_ff_layernorm"),
    Link(f"{_OURS}.mlp.gate_up", (f"{_THEIRS}.feed_forward.gate_proj", f"{_THEIRS}.feed_forward.up_proj"), Fused()),
    Link(f"{_OURS}.mlp.down", f"{_THEIRS}.feed_forward.down_proj"),
    Link(f"{_OURS}.moe.router", f"{_THEIRS}.feed_forward.router"),
    Link(f"{_OURS}.moe.experts.gate_up", (f"{_EXPERT}.gate_proj", f"{_EXPERT}.up_proj"), Stacked(2)),
    Link(f"{_OURS}.moe.experts.down", f"{_EXPERT}.down_proj", Stacked()),
    Link("final_norm", "model.final_layernorm"),
    Link("head", "lm_head"),
)


class _Jamba(Hybrid):
    def pattern(self, theirs: PreTrainedConfig) -> str:
        mixers = ("attention" if each == "attention" else "mamba" for each in theirs.layers_block_type)
        ffns = ("moe" if experts > 1 else "mlp" for experts in theirs.layers_num_experts)
        return " ".join(f"{mixer}/{ffn}" for mixer, ffn in zip(mixers, ffns))


def _settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    blocks = model.blocks
    attention = _every([block.mixer.name == "attention" for block in blocks])
    experts = _every([block.ffn.name == "moe" for block in blocks])
    return {
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
    }


def _every(chosen: list[bool]) -> tuple[int, int]:
    """The period and the offset of the chosen layers; those of none where they are not at regular distances, so that
    what is different shows when the configuration is read back."""
    for period in range(1, len(chosen) + 2):
        for offset in range(period):
            if all((index % period == offset) == each for index, each in enumerate(chosen)):
                return period, offset
    return len(chosen) + 1, len(chosen)


def _nothing(_theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    return {}, []


_BLOCKS = dict.fromkeys(("mamba/moe", "mamba/mlp", "attention/mlp", "attention/moe"), "")
HYBRID = _Jamba(_BLOCKS, _nothing, _settings, needed=("mamba/moe", "mamba/mlp"))
