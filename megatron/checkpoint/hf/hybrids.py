"""Architectures whose layers are of several kinds: how each writes down which layer is which, and what layers share."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.pattern import BlockPattern
from megatron.config.sections.model import ModelSection

from .links import DeltaConvolutions, Fused, Link, Mamba2Rows
from .rope import rope_parameters, rope_values
from .versions import unlimited


def _none(*_: Any) -> tuple:
    return ()


@dataclass(frozen=True)
class Hybrid:
    """What an architecture with several kinds of layers has beside its tables.

    Attributes:
        blocks: the patterns of its layers, variants left out, and the name that the configuration has for each.
        values: further options of ours (dotted), and what we do not compute, from their configuration.
        settings: further settings of theirs, from our section.
        links: further tensors, from the names of all of ours.
        source: the tensor that a name is a second name of, among the names that a model is saved with; None if of none.
        needed: a model with none of these patterns is not one of this architecture; empty stands for the first.
    """

    blocks: dict[str, str]
    values: Callable[[PreTrainedConfig], tuple[dict[str, Any], list[str]]]
    settings: Callable[[ModelSection, list[str]], dict[str, Any]]
    links: Callable[[Collection[str]], tuple[Link, ...]] = _none
    source: Callable[[str, Collection[str]], str | None] = field(default=lambda name, saved: None)
    needed: tuple[str, ...] = ()

    def pattern(self, theirs: PreTrainedConfig) -> str:
        """Our layer pattern of their list of layers."""
        names = {theirs: ours for ours, theirs in self.blocks.items()}
        runs = itertools.groupby(
            names[each] for each in getattr(theirs, "layers_block_type", None) or theirs.layer_types
        )
        return " ".join(f"{name} x{len(list(run))}" for name, run in runs)

    def kinds(self, model: ModelSection) -> list[str]:
        """Their name of each of our layers."""
        return [self.blocks[without_variants(block)] for block in model.blocks]


def runs_of(blocks: list[str]) -> str:
    """A pattern of these blocks, each run of equal ones written once."""
    runs = ((block, len(list(run))) for block, run in itertools.groupby(blocks))
    return " ".join(f"({block}) x{count}" if count > 1 else block for block, count in runs)


def without_variants(block: BlockPattern) -> str:
    return re.sub(r"@\w+", "", str(block))


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


# -- Bamba: Mamba-2 or attention, each with an MLP --------------------------------------------------------------------


def _bamba_values(theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    most = theirs.time_step_limit[1]
    return {
        "mamba2.head_dim": theirs.mamba_d_head,
        "mamba2.least_step": float(theirs.time_step_limit[0]),
        "mamba2.most_step": None if unlimited(most) else float(most),
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
        "layer_types": kinds,
        "rope_parameters": rope_parameters(model.attention.rotary, partial=False) if turned else nothing,
    }


def _olmo_links(ours: Collection[str]) -> tuple[Link, ...]:
    """transformers saves the norm after a mixer under one name, whether it is the mixer's own (attention) or
    the MLP's.
    """
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
        *(
            Link(f"{ours}.{name}", tuple(f"{theirs}.{each}_proj" for each in both), Fused())
            for name, both in pairs.items()
        ),
        *(Link(f"{ours}.{name}", f"{theirs}.{name}", suffixes=("",)) for name in ("A_log", "dt_bias")),
        Link(
            (f"{ours}.query_key_conv", f"{ours}.value_conv"),
            tuple(f"{theirs}.{each}_conv1d" for each in "qkv"),
            DeltaConvolutions(),
        ),
        Link(f"{ours}.norm", f"{theirs}.o_norm"),
        Link(f"{ours}.output", f"{theirs}.o_proj"),
    )


OLMO_HYBRID = Hybrid(
    {"gated_delta/mlp": "linear_attention", "attention/mlp": "full_attention"},
    _olmo_values,
    _olmo_settings,
    _olmo_links,
)


# -- Qwen's mixtures of experts: attention with experts or, in some layers, with an MLP --------------------------------


class _Sparse(Hybrid):
    def pattern(self, theirs: PreTrainedConfig) -> str:
        dense = set(theirs.mlp_only_layers or ())
        blocks = [
            "attention/mlp" if index in dense or (index + 1) % theirs.decoder_sparse_step else "attention/moe"
            for index in range(theirs.num_hidden_layers)
        ]
        return runs_of(blocks)


def _sparse_values(_theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    return {}, []


def _sparse_settings(_model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [index for index, kind in enumerate(kinds) if kind == "dense"]}


SPARSE = _Sparse({"attention/moe": "sparse", "attention/mlp": "dense"}, _sparse_values, _sparse_settings)
