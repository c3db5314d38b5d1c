"""Zamba and Zamba2: Mamba or Mamba-2 layers, and before some of them a transformer of shared weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection

from .hybrids import Hybrid, mamba2
from .links import Fused, Heads, Interleaved, Link
from .rope import rope_parameters, rope_values


def _layers(ours: Collection[str]) -> tuple[list[int], list[int], int]:
    """All layers, those before which a shared block runs, and the number of shared blocks."""
    layers = sorted({int(name.split(".")[1]) for name in ours if name.startswith("layers.")})
    calls = [layer for layer in layers if f"layers.{layer}.shared_attention.output.weight" in ours]
    return layers, calls, len({name.split(".")[1] for name in ours if name.startswith("shared_attention.")})


def _mixers(layers: list[int], calls: list[int], mixer: Callable[[str, str], tuple[Link, ...]]) -> list[Link]:
    """Every layer's own mixer, which has a module of its own where a shared block runs before it."""
    names = {layer: f"model.layers.{layer}" + (".mamba_decoder" if layer in calls else "") for layer in layers}
    return [link for layer, theirs in names.items() for link in mixer(f"layers.{layer}", theirs)]


def _block(number: int, theirs: str, gate_up: Link) -> tuple[Link, ...]:
    """A shared block; `theirs` is its module in the first layer that uses it, with which it is saved."""
    ours = f"shared_attention.{number}"
    return (
        Link(f"{ours}.norm", f"{theirs}.input_layernorm"),
        Link(f"{ours}.attention.query", f"{theirs}.self_attn.q_proj"),
        Link(f"{ours}.attention.key_value", (f"{theirs}.self_attn.k_proj", f"{theirs}.self_attn.v_proj"), Fused()),
        Link(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj"),
        Link(f"{ours}.ffn_norm", f"{theirs}.pre_ff_layernorm"),
        gate_up,
        Link(f"{ours}.mlp.down", f"{theirs}.feed_forward.down_proj"),
    )


def _source(module: str) -> Callable[[str, Collection[str]], str | None]:
    """A later layer's names of its shared block stand for those of the block's first layer."""

    def source(name: str, saved: Collection[str]) -> str | None:
        found = re.fullmatch(rf"model\.layers\.(\d+)\.{module}\.(.+)", name)
        if found is None:
            return None
        calls = sorted(
            int(each.split(".")[2]) for each in saved if re.fullmatch(r"model\.layers\.\d+\.linear\.weight", each)
        )
        blocks = len({each.split(".")[2] for each in saved if f".{module}." in each})
        layer = int(found[1])
        if layer not in calls[blocks:]:
            return None
        return f"model.layers.{calls[calls.index(layer) % blocks]}.{module}.{found[2]}"

    return source


# -- Zamba: Mamba of several heads, one shared block ------------------------------------------------------------------


def _zamba_values(theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    problems = []
    if theirs.attention_hidden_size != 2 * theirs.hidden_size:
        problems.append(
            f"attention_hidden_size={theirs.attention_hidden_size} is not computed here, "
            f"only 2 * hidden_size = {2 * theirs.hidden_size}"
        )
    if list(theirs.layers_block_type).count("hybrid") < 2:
        problems.append("layers_block_type: transformers builds no Zamba with fewer than two layers that share")
    return {}, problems


def _zamba_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    return {"layers_block_type": kinds}


def _mamba(ours: str, theirs: str) -> tuple[Link, ...]:
    """A Mamba mixer of several heads and the norm before it; `theirs` is the module that has both."""
    mixer = f"{theirs}.mamba"
    cut = {"A_log": "A_log", "D": "D", "dt_bias": "dt_proj_bias", "dt.weight": "dt_proj_weight"}
    return (
        Link(f"{ours}.mixer_norm", f"{theirs}.input_layernorm"),
        Link(f"{ours}.mamba.zx", f"{mixer}.in_proj", Interleaved()),
        Link(f"{ours}.mamba.x_conv", f"{mixer}.conv1d"),
        *(Link(f"{ours}.mamba.{mine}", f"{mixer}.{each}", Heads(0), suffixes=("",)) for mine, each in cut.items()),
        Link(f"{ours}.mamba.dt_bc.weight", f"{mixer}.x_proj_weight", Heads(1), suffixes=("",)),
        Link(f"{ours}.mamba.output", f"{mixer}.out_proj"),
    )


def _zamba_links(ours: Collection[str]) -> tuple[Link, ...]:
    layers, calls, _ = _layers(ours)
    links = _mixers(layers, calls, _mamba)
    links += [Link(f"layers.{layer}.shared_attention.output", f"model.layers.{layer}.linear") for layer in calls]
    if calls:
        theirs = f"model.layers.{calls[0]}.shared_transf"
        parts = (f"{theirs}.feed_forward.gate_proj", f"{theirs}.feed_forward.up_proj")
        links += _block(0, theirs, Link("shared_attention.0.mlp.gate_up", parts, Fused()))
    return tuple(links)


ZAMBA = Hybrid(
    {"mamba+shared_attention": "hybrid", "mamba": "linear_attention"},
    _zamba_values,
    _zamba_settings,
    _zamba_links,
    _source("shared_transf"),
)


# -- Zamba2: Mamba-2, shared blocks used in turn, adapters -------------------------------------------------------------

# Their lower bound of time steps where we have none: they take its logarithm while they build a model.
NO_STEP = 1e-30


def _zamba2_values(theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
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
    shared, mamba2 = model.shared_attention, model.mamba2
    return {
        "layers_block_type": kinds,
        "n_mamba_heads": mamba2.expand * model.hidden_size // mamba2.head_dim,
        "add_bias_linear": mamba2.bias,
        "use_mem_rope": shared.position == "rotary",
        "rope_parameters": rope_parameters(shared.rotary, partial=False),
        "time_step_min": max(mamba2.least_step, NO_STEP),
        # a model of theirs always has adapters
        "adapter_rank": max(shared.adapter_rank, 1),
    }


def _zamba2_links(ours: Collection[str]) -> tuple[Link, ...]:
    """A shared block is saved with its first layer; the adapters of all its layers are saved there, too."""
    layers, calls, blocks = _layers(ours)
    links = _mixers(layers, calls, mamba2)
    for number, layer in enumerate(calls):
        shared = f"model.layers.{calls[number % blocks]}.shared_transformer"
        mine = f"layers.{layer}.shared_attention"
        links.append(Link(f"{mine}.output", f"model.layers.{layer}.linear"))
        for name, theirs in (
            ("mlp", "feed_forward.gate_up_proj"),
            *((each, f"self_attn.linear_{each[0]}") for each in ("query", "key", "value")),
        ):
            links += [
                Link(f"{mine}.{name}_adapter.{part}", f"{shared}.{theirs}_adapter_list.{number}.{index}")
                for index, part in enumerate(("down", "up"))
            ]
    for number, layer in enumerate(calls[:blocks]):
        theirs = f"model.layers.{layer}.shared_transformer"
        gate_up = Link(f"shared_attention.{number}.mlp.gate_up", f"{theirs}.feed_forward.gate_up_proj")
        links += _block(number, theirs, gate_up)
    return tuple(links)


ZAMBA2 = Hybrid(
    {"mamba2+shared_attention": "hybrid", "mamba2": "linear_attention"},
    _zamba2_values,
    _zamba2_settings,
    _zamba2_links,
    _source("shared_transformer"),
)
