"""Options and rules that the RWKV mixers and feed-forward networks share. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.arithmetic.divisors import divisors, near
from megatron.config.kind import KindUse
from megatron.config.section import Section, key

if TYPE_CHECKING:
    from megatron.config.problems import Problem

Start = Literal["published", "uniform", "model"]
EXCHANGE = "deepy checkpoint to-rwkv writes RWKV-5, 6 and 7 in the layout of their authors"


class RWKVOptions(Section):
    """Options of all of them."""

    init: Start = key(
        "published",
        "How matrices start: published (orthogonal with the authors' gains, 0 where they write to the stream), uniform "
        "(the authors' simplified recipe for RWKV-7, 1/sqrt(fan in) in the others), or model (model.init's schemes). "
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


def heads_divide_over_tensor_ranks(at: KindUse[Any]) -> Iterator[Problem]:
    width, size, ranks = at.hidden_size, at.options.head_dim, at.config.parallel.tensor
    if width % size == 0 and width // size % ranks:
        yield at.problem(
            ".head_dim",
            "parallel.tensor",
            rule=f"each tensor parallel rank must have the same number of the {width // size} heads of {at.kind}",
            fix=f"use parallel.tensor = {near(ranks, divisors(width // size))}",
        )
