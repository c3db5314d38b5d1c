"""Architectures whose layers are of several kinds: how each writes down which layer is which, and what layers share."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.pattern import Block, parse
from megatron.config.sections.model import ModelSection

from .links import DeltaConvolutions, Fused, Link, Mamba2Rows
from .rope import rope_parameters, rope_values


def _none(*_: Any) -> tuple:
    return ()


@dataclass(frozen=True)
class Hybrid:
    """What an architecture with several kinds of layers has beside its tables.

    Attributes:
        blocks: the patterns of its layers, variants left out, and the name that the configuration has for each. A model
            without the first of them is not one of this architecture.
        values: further options of ours (dotted), and what we do not compute, from their configuration.
        settings: further settings of theirs, from our section.
        links: further tensors, from the names of all of ours.
        source: the tensor that a name is a second name of, among the names that a model is saved with; None if of none.
    """

    blocks: dict[str, str]
    values: Callable[[PreTrainedConfig], tuple[dict[str, Any], list[str]]]
    settings: Callable[[ModelSection, list[str]], dict[str, Any]]
    links: Callable[[Collection[str]], tuple[Link, ...]] = _none
    source: Callable[[str, Collection[str]], str | None] = field(default=lambda name, saved: None)

    def pattern(self, theirs: PreTrainedConfig) -> str:
        """Our layer pattern of their list of layers."""
        names = {theirs: ours for ours, theirs in self.blocks.items()}
        runs = itertools.groupby(names[each] for each in getattr(theirs, "layers_block_type", None) or theirs.layer_types)
        return " ".join(f"{name} x{len(list(run))}" for name, run in runs)

    def kinds(self, model: ModelSection) -> list[str]:
        """Their name of each of our layers."""
        return [self.blocks[without_variants(block)] for block in parse(model.layers)]


def without_variants(block: Block) -> str:
    return re.sub(r"@\w+", "", str(block))


# -- Zamba2: Mamba-2, and before some layers a transformer of shared weights ------------------------------------------

# Their lower bound of time steps where we have none: they take its logarithm while they build a model.
NO_STEP = 1e-30
_PLAIN, _SHARED = "mamba2", "mamba2+shared_attention"


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


def mamba2(ours: str, theirs: str) -> tuple[Link, ...]:
    """A Mamba-2 mixer and the norm before it; `theirs` is the module that has both."""
    mixer = f"{theirs}.mamba"
    return (
        Link(f"{ours}.mixer_norm", f"{theirs}.input_layernorm"),
        *(Link(f"{ours}.mamba2.{each}", f"{mixer}.{each}", suffixes=("",)) for each in ("A_log", "D", "dt_bias")),
        Link(tuple(f"{ours}.mamba2.{each}" for each in ("zx", "bc", "dt")), f"{mixer}.in_proj", Mamba2Rows(True)),
        Link((f"{ours}.mamba2.x_conv", f"{ours}.mamba2.bc_conv"), f"{mixer}.conv1d", Mamba2Rows(False)),
        Link(f"{ours}.mamba2.norm", f"{mixer}.norm"),
        Link(f"{ours}.mamba2.output", f"{mixer}.out_proj"),
    )


def _zamba2_links(ours: Collection[str]) -> tuple[Link, ...]:
    """A shared block is saved with its first layer; the adapters of all its layers are saved there, too."""
    layers = sorted({int(name.split(".")[1]) for name in ours if name.startswith("layers.")})
    calls = [layer for layer in layers if f"layers.{layer}.shared_attention.output.weight" in ours]
    blocks = len({name.split(".")[1] for name in ours if name.startswith("shared_attention.")})
    links: list[Link] = []
    for layer in layers:
        own = f"model.layers.{layer}"
        links += mamba2(f"layers.{layer}", f"{own}.mamba_decoder" if layer in calls else own)
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
        block, theirs = f"shared_attention.{number}", f"model.layers.{layer}.shared_transformer"
        links += [
            Link(f"{block}.norm", f"{theirs}.input_layernorm"),
            Link(f"{block}.attention.query", f"{theirs}.self_attn.q_proj"),
            Link(f"{block}.attention.key_value", (f"{theirs}.self_attn.k_proj", f"{theirs}.self_attn.v_proj"), Fused()),
            Link(f"{block}.attention.output", f"{theirs}.self_attn.o_proj"),
            Link(f"{block}.ffn_norm", f"{theirs}.pre_ff_layernorm"),
            Link(f"{block}.mlp.gate_up", f"{theirs}.feed_forward.gate_up_proj"),
            Link(f"{block}.mlp.down", f"{theirs}.feed_forward.down_proj"),
        ]
    return tuple(links)


def _zamba2_source(name: str, saved: Collection[str]) -> str | None:
    """A later layer's names of its shared block stand for those of the block's first layer."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.shared_transformer\.(.+)", name)
    if found is None:
        return None
    calls = sorted(int(each.split(".")[2]) for each in saved if re.fullmatch(r"model\.layers\.\d+\.linear\.weight", each))
    blocks = len({each.split(".")[2] for each in saved if ".shared_transformer." in each})
    layer = int(found[1])
    if layer not in calls[blocks:]:
        return None
    return f"model.layers.{calls[calls.index(layer) % blocks]}.shared_transformer.{found[2]}"


ZAMBA2 = Hybrid(
    {_SHARED: "hybrid", _PLAIN: "linear_attention"}, _zamba2_values, _zamba2_settings, _zamba2_links, _zamba2_source)


# -- Bamba: Mamba-2 or attention, each with an MLP --------------------------------------------------------------------


def _bamba_values(theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    most = theirs.time_step_limit[1]
    return {
        "mamba2.head_dim": theirs.mamba_d_head,
        "mamba2.least_step": float(theirs.time_step_limit[0]),
        "mamba2.most_step": None if math.isinf(most) else float(most),
    }, []


def _bamba_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    mamba2 = model.mamba2
    return {
        "attn_layer_indices": [index for index, kind in enumerate(kinds) if kind == "full_attention"],
        "mamba_n_heads": mamba2.expand * model.hidden_size // mamba2.head_dim,
        "mamba_d_head": mamba2.head_dim,
        "time_step_limit": (mamba2.least_step, math.inf if mamba2.most_step is None else mamba2.most_step),
    }


BAMBA = Hybrid({"mamba2/mlp": "linear_attention", "attention/mlp": "full_attention"}, _bamba_values, _bamba_settings)


# -- OLMo Hybrid: Gated DeltaNet or attention, each with an MLP -------------------------------------------------------


def _olmo_values(theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    parameters = theirs.rope_parameters or {}
    if parameters.get("rope_theta") is None:
        return {"attention.position": "none"}, []
    rotary, problems = rope_values(parameters, partial=False)
    return {"attention.position": "rotary", "attention.rotary": rotary}, problems


def _olmo_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    turned = model.attention.position == "rotary"
    nothing = {"rope_type": "default", "rope_theta": None}
    return {
        "layer_types": kinds, "rope_parameters": rope_parameters(model.attention.rotary, partial=False) if turned else nothing}


def _olmo_links(ours: Collection[str]) -> tuple[Link, ...]:
    """transformers saves the norm after a mixer under one name, whether it is the mixer's own (attention) or the MLP's."""
    links: list[Link] = []
    for layer in sorted({int(name.split(".")[1]) for name in ours if name.startswith("layers.")}):
        mine, theirs = f"layers.{layer}", f"model.layers.{layer}"
        if f"{mine}.gated_delta.A_log" in ours:
            links += [
                Link(f"{mine}.mixer_norm", f"{theirs}.attention_layer_norm"),
                Link(f"{mine}.ffn_norm", f"{theirs}.feedforward_layer_norm"),
                *_gated_delta(f"{mine}.gated_delta", f"{theirs}.linear_attn"),
            ]
        else:
            links += [
                Link(f"{mine}.mixer_norm", f"{theirs}.feedforward_layer_norm"),
                Link(f"{mine}.ffn_norm", f"{theirs}.post_feedforward_layernorm"),
            ]
    return tuple(links)


def _gated_delta(ours: str, theirs: str) -> tuple[Link, ...]:
    pairs = {"query_key": "qk", "value_gate": "vg", "decay_beta": "ab"}
    return (
        *(Link(f"{ours}.{name}", tuple(f"{theirs}.{each}_proj" for each in both), Fused()) for name, both in pairs.items()),
        *(Link(f"{ours}.{name}", f"{theirs}.{name}", suffixes=("",)) for name in ("A_log", "dt_bias")),
        Link((f"{ours}.query_key_conv", f"{ours}.value_conv"), tuple(f"{theirs}.{each}_conv1d" for each in "qkv"),
             DeltaConvolutions()),
        Link(f"{ours}.norm", f"{theirs}.o_norm"),
        Link(f"{ours}.output", f"{theirs}.o_proj"),
    )


OLMO_HYBRID = Hybrid(
    {"gated_delta/mlp": "linear_attention", "attention/mlp": "full_attention"}, _olmo_values, _olmo_settings, _olmo_links)
