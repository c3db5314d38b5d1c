"""Options of the retention mixer, and their rules. No torch here: the launcher reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import divisors, near
from megatron.config.section import Derivable, Derived, Needed, Section, key

if TYPE_CHECKING:
    from megatron.config.derive import View
    from megatron.config.problems import Problem


def _head_dim(own: dict[str, Any], at: View) -> int | None:
    return at["model.hidden_size"] // own["heads"] or None if own["heads"] else None


class RetentionOptions(Section):
    heads: Needed[int] = key(None, "Number of heads, each with a decay of its own.", gt=0)
    head_dim: Derivable[int] = key(
        None,
        "Channels per head.",
        unit="channels",
        derived=Derived("model.hidden_size / model.retention.heads", _head_dim, ("model.hidden_size", ".heads")),
        gt=0,
    )
    slowest: float = key(5.0, "Head n keeps 1 - 2^-(slowest + n) of its state from token to token.", gt=0)
    norm_epsilon: float = key(1e-5, "Added to the mean square of each head's output before the root.", gt=0)


def heads_fill_hidden_size(at: KindUse[RetentionOptions]) -> Iterator[Problem]:
    own = at.options
    if own.heads is None:
        yield at.problem(
            ".heads",
            "model.layers",
            rule="the number of heads must be given for a pattern with retention layers",
            fix="give model.retention.heads, for example model.hidden_size / 64",
        )
    elif own.head_dim is None or own.heads * own.head_dim != at.hidden_size:
        yield at.problem(
            ".heads",
            ".head_dim",
            "model.hidden_size",
            rule="heads * head_dim must be model.hidden_size",
            fix=f"remove head_dim, and use {near(own.heads, divisors(at.hidden_size))} heads",
        )


def heads_divide_over_tensor_ranks(at: KindUse[RetentionOptions]) -> Iterator[Problem]:
    heads, ranks = at.options.heads, at.config.parallel.tensor
    if heads and heads % ranks:
        yield at.problem(
            ".heads",
            "parallel.tensor",
            rule="each tensor parallel rank must have the same number of heads",
            fix=f"use parallel.tensor = {near(ranks, divisors(heads))}",
        )


KIND = LayerKind(
    role="mixer",
    options=RetentionOptions,
    about="Options of the retention mixer (Sun et al. 2023).",
    layer="my_lab.retention.layer:Retention",
    rules=(heads_fill_hidden_size, heads_divide_over_tensor_ranks),
    context="states",
)
