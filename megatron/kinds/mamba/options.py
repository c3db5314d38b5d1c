"""Options of the mamba mixer, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import divisors, near
from megatron.config.section import Derivable, Derived, key
from megatron.kinds.common.options import (
    StateSpaceOptions,
    divides_over_tensor_ranks,
    parts_of_sequences_have_the_taps,
    time_steps_are_a_range,
)

if TYPE_CHECKING:
    from megatron.config.problems import Problem


class MambaOptions(StateSpaceOptions):
    state_size: int = key(16, "State elements per channel.", gt=0)
    heads: int = key(1, "Equal parts of the channels, with time steps, B and C of their own (Zamba has 2).", gt=0)
    inner_norms: bool = key(False, "RMSNorm of the time steps before their projection, and of B and C (Jamba).")
    rank: Derivable[int] = key(
        None,
        "Rank of the projection that gives the time steps.",
        derived=Derived(
            "model.hidden_size / 16, rounded up",
            lambda own, at: -(-at["model.hidden_size"] // 16) if at.uses("mamba") else None,
            ("model.hidden_size",),
        ),
        gt=0,
    )
    chunk: int = key(
        256, "Tokens that are scanned at a time. Changes memory and speed, not the result.", unit="tokens", gt=0
    )


def heads_are_equal(at: KindUse[MambaOptions]) -> Iterator[Problem]:
    inner = at.options.expand * at.hidden_size
    if inner % at.options.heads:
        yield at.problem(
            ".heads",
            "model.hidden_size",
            rule=f"the heads must share the {inner} inner channels (expand * hidden_size) evenly",
            fix=f"use {near(at.options.heads, divisors(inner))} heads",
        )


def heads_fit_the_tensor_ranks(at: KindUse[MambaOptions]) -> Iterator[Problem]:
    """A rank has some heads, or a part of one."""
    heads, ranks = at.options.heads, at.config.parallel.tensor
    if heads % ranks and ranks % heads:
        yield at.problem(
            ".heads",
            "parallel.tensor",
            rule=f"a tensor parallel rank must have whole heads of mamba ({heads} in all), or an equal part of one",
            fix=f"use parallel.tensor = {near(ranks, divisors(heads))} or a multiple of {heads}",
        )


KIND = LayerKind(
    role="mixer",
    options=MambaOptions,
    about="Options of the mamba mixer (Gu and Dao 2023).",
    layer="megatron.kinds.mamba.layer:Mamba",
    rules=(
        time_steps_are_a_range,
        heads_are_equal,
        divides_over_tensor_ranks(
            lambda at: at.options.expand * at.hidden_size, "inner channels", ".expand", "model.hidden_size"
        ),
        heads_fit_the_tensor_ranks,
        parts_of_sequences_have_the_taps(lambda own: own.convolution - 1, ".convolution"),
    ),
    packages={"mamba_ssm": "pip install mamba-ssm causal-conv1d"},
    linears=lambda options: ("zx", "output"),
    keeps_fp32=True,
    context="scans",
    repeats=True,
)
