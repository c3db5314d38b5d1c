"""Options and rules that the RWKV mixers and feed-forward networks share. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.kind import KindUse
from megatron.config.problems import divisors, near
from megatron.config.section import Section, key
from megatron.kinds.common.options import divides_over_tensor_ranks

if TYPE_CHECKING:
    from megatron.config.problems import Problem

Start = Literal["published", "uniform", "model"]
EXCHANGE = "deepy checkpoint to-rwkv writes RWKV-5, 6 and 7 in the layout of their authors"


class RWKVOptions(Section):
    """Options of all of them."""

    init: Start = key(
        "published",
        "How matrices start. published: orthogonal with the authors' gains, 0 where they write to the stream. uniform: "
        "the authors' simplified recipe for RWKV-7, 1/sqrt(fan in) in the others. model: model.init's schemes. "
        "All other parameters start as published.",
    )


def heads_are_whole(at: KindUse[Any]) -> Iterator[Problem]:
    width, size = at.hidden_size, at.options.head_dim
    if width % size:
        yield at.problem(
            ".head_dim",
            "model.hidden_size",
            rule=f"model.hidden_size, the {width} channels of {at.kind}, must be a multiple of head_dim",
            fix=f"use head_dim = {near(size, divisors(width))}",
        )


def _heads(at: KindUse[Any]) -> int | None:
    heads, left = divmod(at.hidden_size, at.options.head_dim)
    return None if left else heads


heads_divide_over_tensor_ranks = divides_over_tensor_ranks(_heads, "heads", ".head_dim")
