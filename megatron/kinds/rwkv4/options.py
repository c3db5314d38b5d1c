"""Options of the rwkv4 mixer, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.arithmetic.divisors import divisors, near
from megatron.config.kind import KindUse, LayerKind
from megatron.config.section import key
from megatron.kinds.common.rwkv.options import RWKVOptions

if TYPE_CHECKING:
    from megatron.config.problems import Problem


class RWKV4Options(RWKVOptions):
    chunk: int = key(
        256, "Tokens that are scanned at a time. Changes memory and speed, not the result.", unit="tokens", gt=0
    )


def channels_divide_over_tensor_ranks(at: KindUse[RWKV4Options]) -> Iterator[Problem]:
    width, ranks = at.hidden_size, at.config.parallel.tensor
    if width % ranks:
        yield at.problem(
            "model.hidden_size",
            "parallel.tensor",
            rule=f"each tensor parallel rank must have the same number of the {width} channels of {at.kind}",
            fix=f"use parallel.tensor = {near(ranks, divisors(width))}",
        )


KIND = LayerKind(
    role="mixer",
    options=RWKV4Options,
    about="Options of the rwkv4 mixer (Peng et al. 2023).",
    layer="megatron.kinds.rwkv4.layer:RWKV4",
    rules=(channels_divide_over_tensor_ranks,),
    keeps_fp32=True,
    context="scans",
)
