"""Options of the mamba and mamba2 mixers, and their rules."""

from collections.abc import Iterator
from typing import Literal

from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import Problem, divisors, near
from megatron.config.section import Derivable, Section, key
from megatron.kinds.common.options import (
    StateSpaceOptions,
    derived_key,
    divides_over_tensor_ranks,
    in_order,
    parts_of_sequences_have_the_taps,
    time_steps_are_a_range,
)


class MambaOptions(StateSpaceOptions):
    state_size: int = key(16, "State elements per channel.", gt=0)
    heads: int = key(1, "Equal parts of the channels, with time steps, B and C of their own (Zamba has 2).", gt=0)
    inner_norms: bool = key(False, "RMSNorm of the time steps before their projection, and of B and C (Jamba).")
    rank: Derivable[int] = derived_key(
        "Rank of the projection that gives the time steps.",
        "model.hidden_size / 16, rounded up",
        lambda own, at: -(-at["model.hidden_size"] // 16) if at.uses("mamba") else None,
        "model.hidden_size",
    )
    chunk: int = key(256, "Tokens scanned at a time. Changes memory and speed, not the result.", unit="tokens", gt=0)


def heads_are_equal(at: KindUse[MambaOptions]) -> Iterator[Problem]:
    inner = at.options.expand * at.hidden_size
    if inner % at.options.heads:
        yield at.problem(
            ".heads model.hidden_size",
            rule=f"the heads must share the {inner} inner channels (expand * hidden_size) evenly",
            fix=f"use {near(at.options.heads, divisors(inner))} heads",
        )


def heads_fit_the_tensor_ranks(at: KindUse[MambaOptions]) -> Iterator[Problem]:
    """A rank has some heads, or a part of one."""
    heads, ranks = at.options.heads, at.config.parallel.tensor
    if heads % ranks and ranks % heads:
        yield at.problem(
            ".heads parallel.tensor",
            rule=f"a tensor parallel rank must have whole heads of mamba ({heads} in all), or an equal part of one",
            fix=f"use parallel.tensor = {near(ranks, divisors(heads))} or a multiple of {heads}",
        )


MAMBA = LayerKind(
    role="mixer",
    options=MambaOptions,
    about="Options of the mamba mixer (Gu and Dao 2023).",
    layer="megatron.kinds.mamba.mamba:Mamba",
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
    columns=True,
    keeps_fp32=True,
    context="scans",
    repeats=True,
)


class Multipliers(Section):
    """Of the parts of the first projection, before convolution and activations."""

    z: float = key(1.0, "Of the gate.", gt=0)
    x: float = key(1.0, "Of the inner channels.", gt=0)
    B: float = key(1.0, "Of what heads write with.", gt=0)
    C: float = key(1.0, "Of what heads read with.", gt=0)
    dt: float = key(1.0, "Of the time steps, before their bias.", gt=0)


class Mamba2Options(StateSpaceOptions):
    inner_size: int | None = key(None, "Inner channels. Default: expand * model.hidden_size.", unit="channels", gt=0)
    head_dim: int = key(64, "Inner channels per head, which share one decay.", unit="channels", gt=0)
    state_size: int = key(128, "State elements per channel.", gt=0)
    groups: int = key(1, "Groups of heads. The heads of a group share what they write (B) and read (C).", gt=0)
    least_step: float = key(0.0, "Time steps are raised to this (lower end of time_step_limit).", ge=0)
    most_step: float | None = key(None, "Time steps are cut to this (upper end of time_step_limit).", gt=0)
    norm: Literal["after_gate", "before_gate", "none"] = key(
        "after_gate", "RMSNorm over channels of each group: of the gated output, the output before its gate, or none."
    )
    input_multiplier: float = key(1.0, "Multiplies what the mixer reads (Falcon-H1).", gt=0)
    multipliers: Multipliers = key(Multipliers, "Multipliers of what is projected from it.")
    output_multiplier: float = key(1.0, "Multiplies the output.", gt=0)
    chunk: int = key(64, "Tokens per chunk. Changes memory and speed, not the result.", unit="tokens", gt=0)


def inner_channels(options: Mamba2Options, hidden_size: int) -> int:
    return options.inner_size or options.expand * hidden_size


def heads_are_whole(at: KindUse[Mamba2Options]) -> Iterator[Problem]:
    own, inner = at.options, inner_channels(at.options, at.hidden_size)
    if inner % own.head_dim:
        yield at.problem(
            ".head_dim model.hidden_size",
            rule=f"{'inner_size' if own.inner_size else 'expand * hidden_size'} ({inner} inner channels) must be a "
            "multiple of head_dim",
            fix=f"use head_dim = {near(own.head_dim, divisors(inner))}",
        )
    elif inner // own.head_dim % own.groups:
        heads = inner // own.head_dim
        yield at.problem(
            ".groups model.hidden_size",
            rule=f"each group must have the same number of the {heads} heads (expand * hidden_size / head_dim)",
            fix=f"use groups = {near(own.groups, divisors(heads))}",
        )


def _heads(at: KindUse[Mamba2Options]) -> int:
    return inner_channels(at.options, at.hidden_size) // at.options.head_dim


MAMBA2 = LayerKind(
    role="mixer",
    options=Mamba2Options,
    about="Options of the mamba2 mixer (Dao and Gu 2024).",
    layer="megatron.kinds.mamba.mamba2:Mamba2",
    rules=(
        time_steps_are_a_range,
        heads_are_whole,
        in_order("least_step", "most_step", "remove most_step, or make it larger"),
        # Groups of heads need no rule: where they do not divide, all ranks hold B and C of all.
        divides_over_tensor_ranks(_heads, "inner heads", ".head_dim", "model.hidden_size"),
        parts_of_sequences_have_the_taps(lambda own: own.convolution - 1, ".convolution"),
    ),
    packages={"mamba_ssm": "pip install mamba-ssm causal-conv1d", "fla": "pip install flash-linear-attention"},
    linears=lambda options: ("zx", "bc", "dt", "output"),
    columns=True,
    keeps_fp32=True,
    context="scans",
    repeats=True,
)
