"""Zamba and Zamba2: Mamba or Mamba-2 layers, and before some of them a transformer of shared weights."""

import re
from collections.abc import Callable, Collection
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link
from megatron.kinds.mamba import hf as mamba
from megatron.kinds.shared_attention import hf as shared

from ..architecture import Architecture, Field, Found, Layers, numbers_of
from ..layer_types import rope_parameters, rope_values
from .common import BARE, EMBEDDING, HEAD, STREAM, activation, fields, options, rms_norm
from .mamba import MAMBA_SIZES, NO_STEP, STEPS, heads

_SHARED = "shared_attention"
_SIZES = (
    *fields(_SHARED, heads="num_attention_heads", kv_heads="num_key_value_heads"),
    Field(f"{_SHARED}.mlp.hidden_size", "intermediate_size"),
    activation("hidden_act", f"{_SHARED}.mlp"),
)
_ENDS = (EMBEDDING, Link("final_norm", "model.final_layernorm"), HEAD)


def _layers(ours: Collection[str]) -> tuple[list[int], list[int], int]:
    """All layers, those before which a shared block runs, and the number of shared blocks."""
    layers = numbers_of(ours)
    calls = [layer for layer in layers if f"layers.{layer}.shared_attention.output.weight" in ours]
    return layers, calls, len({name.split(".")[1] for name in ours if name.startswith("shared_attention.")})


def _mixers(layers: list[int], calls: list[int], mixer: Callable[[str, str], tuple[Link, ...]]) -> list[Link]:
    """Every layer's norm and own mixer, in a module of their own where a shared block runs before it.

    Args:
        mixer: links of a mixer, from the module's name there and here.
    """
    links = []
    for layer in layers:
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}" + (".mamba_decoder" if layer in calls else "")
        links.append(Link(f"{ours}.mixer_norm", f"{theirs}.input_layernorm"))
        links += mixer(f"{theirs}.mamba", ours)
    return links


def _source(module: str) -> Callable[[str, Collection[str]], str | None]:
    """A later layer's names of its shared block stand for the first layer's names."""

    def source(name: str, saved: Collection[str]) -> str | None:
        found = re.fullmatch(rf"model\.layers\.(\d+)\.{module}\.(.+)", name)
        if found is None:
            return None
        calls = sorted(int(x.split(".")[2]) for x in saved if re.fullmatch(r"model\.layers\.\d+\.linear\.weight", x))
        blocks = len({each.split(".")[2] for each in saved if f".{module}." in each})
        layer = int(found[1])
        if layer not in calls[blocks:]:
            return None
        return f"model.layers.{calls[calls.index(layer) % blocks]}.{module}.{found[2]}"

    return source


# -- Zamba: Mamba of several heads, one shared block -------------------------------------------------------------------


def _zamba_values(theirs: PreTrainedConfig) -> Found:
    problems = []
    if theirs.attention_hidden_size != 2 * theirs.hidden_size:
        problems.append(
            f"attention_hidden_size={theirs.attention_hidden_size} is not computed here, "
            f"only 2 * hidden_size = {2 * theirs.hidden_size}"
        )
    if list(theirs.layers_block_type).count("hybrid") < 2:
        problems.append("layers_block_type: transformers builds no Zamba with fewer than two layers that share")
    return {}, problems


def _zamba_links(ours: Collection[str]) -> tuple[Link, ...]:
    layers, calls, _ = _layers(ours)
    links = _mixers(layers, calls, lambda theirs, ours: mamba.mixer_of_heads(theirs, f"{ours}.mamba"))
    links += map(shared.output, calls)
    if calls:
        links += shared.block(0, f"model.layers.{calls[0]}.shared_transf", gate_up_joined=False)
    return tuple(links)


ZAMBA = Architecture(
    "zamba",
    _ENDS,
    Layers(
        {"mamba+shared_attention": "hybrid", "mamba": "linear_attention"},
        _zamba_values,
        lambda model, kinds: {"layers_block_type": kinds},
        _zamba_links,
        _source("shared_transf"),
    ),
    fields=(
        *(*STREAM, rms_norm(), *MAMBA_SIZES, *_SIZES),
        *fields("mamba", heads="n_mamba_heads", **STEPS),
        Field(f"{_SHARED}.head_dim", "attention_head_dim"),
    ),
    # as for Zamba2, shared blocks are tied where the embedding is
    fixed={
        **BARE,
        "embedding.tied": True,
        "mamba.inner_norms": False,
        **options(_SHARED, blocks=1, adapter_rank=0, position="none"),
        **options(f"{_SHARED}.mlp", gated=True, bias=False),
    },
    required={"tie_word_embeddings": True, "hidden_mamba_act": "silu"},
)


# -- Zamba2: Mamba-2, shared blocks used in turn, adapters -------------------------------------------------------------


def _zamba2_values(theirs: PreTrainedConfig) -> Found:
    values: dict[str, Any] = {
        "mamba2.head_dim": theirs.mamba_headdim,
        "mamba2.bias": theirs.add_bias_linear,
        "shared_attention.mlp.bias": theirs.add_bias_linear,
        "shared_attention.position": "rotary" if theirs.use_mem_rope else "none",
        "mamba2.least_step": float(theirs.time_step_min) if theirs.time_step_min > NO_STEP else 0.0,
    }
    if not theirs.use_mem_rope:
        return values, []
    rotary, problems = rope_values(theirs.rope_parameters, partial=False)
    return {**values, "shared_attention.rotary": rotary}, problems


def _zamba2_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    own = model.shared_attention
    return {
        "layers_block_type": kinds,
        "n_mamba_heads": heads(model),
        "add_bias_linear": model.mamba2.bias,
        "use_mem_rope": own.position == "rotary",
        "rope_parameters": rope_parameters(own.rotary, partial=False),
        "time_step_min": max(model.mamba2.least_step, NO_STEP),
        # a model of theirs always has adapters
        "adapter_rank": max(own.adapter_rank, 1),
    }


def _zamba2_links(ours: Collection[str]) -> tuple[Link, ...]:
    """A shared block is saved with its first layer, together with the adapters of all its layers."""
    layers, calls, blocks = _layers(ours)
    links = _mixers(layers, calls, lambda theirs, ours: mamba.mixer2(theirs, f"{ours}.mamba2"))
    for number, layer in enumerate(calls):
        links.append(shared.output(layer))
        links += shared.adapters(layer, number, f"model.layers.{calls[number % blocks]}.shared_transformer")
    for number, layer in enumerate(calls[:blocks]):
        links += shared.block(number, f"model.layers.{layer}.shared_transformer", gate_up_joined=True)
    return tuple(links)


ZAMBA2 = Architecture(
    "zamba2",
    _ENDS,
    Layers(
        {"mamba2+shared_attention": "hybrid", "mamba2": "linear_attention"},
        _zamba2_values,
        _zamba2_settings,
        _zamba2_links,
        _source("shared_transformer"),
    ),
    fields=(
        *(*STREAM, *_SIZES),
        *fields("mamba2", expand="mamba_expand", state_size="mamba_d_state", convolution="mamba_d_conv"),
        *fields("mamba2", groups="mamba_ngroups", time_step_high="time_step_max", time_step_floor="time_step_floor"),
        *fields(_SHARED, blocks="num_mem_blocks", adapter_rank="adapter_rank"),
        Field(f"{_SHARED}.attention_adapters", "use_shared_attention_adapter"),
    ),
    # transformers ties the shared blocks where it ties the embedding, and only there
    fixed={
        **BARE,
        "embedding.tied": True,
        "norm.epsilon": 1e-5,
        "mamba2.convolution_bias": True,
        "mamba2.most_step": None,
        f"{_SHARED}.mlp.gated": True,
    },
    required={"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "use_long_context": False, "use_conv_bias": True},
)
