"""Options of the rwkv7 mixer, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.config.arithmetic.wire import LEAST_BLOCK, PIPELINE, sends_blocks
from megatron.config.kind import LayerKind
from megatron.config.section import Derivable, Derived, key
from megatron.kinds.common.rwkv.options import EXCHANGE, RWKVOptions, heads_are_whole, heads_divide_over_tensor_ranks

if TYPE_CHECKING:
    from megatron.config.derive import View
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext


def _rank(factor: float) -> Derived:
    """Ranks that grow with the root of the width."""

    def rank(own: dict[str, Any], at: View) -> int | None:
        return max(32, 32 * round(factor * at["model.hidden_size"] ** 0.5 / 32)) if at.uses("rwkv7") else None

    return Derived(f"{factor:g} sqrt(model.hidden_size), in steps of 32", rank, ("model.hidden_size",))


class RWKV7Options(RWKVOptions):
    head_dim: int = key(64, "Channels per head.", unit="channels", gt=1)
    decay_rank: Derivable[int] = key(None, "Rank of the matrix that moves the decays.", derived=_rank(2.5), gt=0)
    rate_rank: Derivable[int] = key(
        None, "Rank of the matrix that gives the in-context learning rates.", derived=_rank(2.5), gt=0
    )
    value_rank: Derivable[int] = key(
        None, "Rank of the matrix that blends values with the first RWKV-7 layer's.", derived=_rank(1.7), gt=0
    )
    gate_rank: Derivable[int] = key(None, "Rank of the matrix that gates the output.", derived=_rank(5), gt=0)
    norm_epsilon: float = key(64e-5, "Added to the variance in the norm of each head's output.", gt=0)
    # Above 128 the products of decays inside a chunk would leave the range of fp32.
    chunk: int = key(32, "Tokens per chunk. Changes memory and speed, not the result.", unit="tokens", gt=0, le=128)


def first_values_are_whole_blocks(context: RuleContext) -> Iterator[Problem]:
    """Each tensor parallel rank sends the values of its heads to the next stage, in blocks of their own."""
    parallel = context.config.parallel
    numbers = context.config.model.hidden_size // (1 if parallel.sequence else parallel.tensor)
    if context.uses("rwkv7") and sends_blocks(parallel) and numbers % LEAST_BLOCK:
        yield context.problem(
            PIPELINE,
            "model.hidden_size",
            "parallel.tensor",
            rule=f"the {numbers} values that a rank has of the first rwkv7 layer must be a multiple of {LEAST_BLOCK} "
            "to travel as int8_block",
            fix="use compress.pipeline=bf16, or fewer tensor parallel ranks",
        )


KIND = LayerKind(
    role="mixer",
    options=RWKV7Options,
    about="Options of the rwkv7 mixer (Peng et al. 2025).",
    layer="megatron.kinds.rwkv7.layer:RWKV7",
    rules=(heads_are_whole, heads_divide_over_tensor_ranks),
    linears=lambda options: ("receptance", "value", "key", "output"),
    packages={"fla": "pip install flash-linear-attention"},
    untried=("fla",),
    stack_rules=(first_values_are_whole_blocks,),
    keeps_fp32=True,
    exchange=EXCHANGE,
    context="scans",
)
