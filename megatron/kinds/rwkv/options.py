"""Options of the RWKV mixers and feed-forward networks, and their rules. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.arithmetic.wire import LEAST_BLOCK, PIPELINE, sends_blocks
from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import divisors, near
from megatron.config.section import Derivable, Derived, Section, key
from megatron.kinds.common.options import divides_over_tensor_ranks

if TYPE_CHECKING:
    from megatron.config.derive import View
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext

HERE = "megatron.kinds.rwkv"
EXCHANGE = "deepy checkpoint to-rwkv writes RWKV-5, 6 and 7 in the layout of their authors"
SCANNED = "Tokens that are scanned at a time. Changes memory and speed, not the result."
EPSILON = "Added to the variance in the norm of each head's output."


class RWKVOptions(Section):
    """Options of all of them."""

    init: Literal["published", "uniform", "model"] = key(
        "published",
        "How matrices start. published: orthogonal with the authors' gains, 0 where they write to the stream. uniform: "
        "the authors' simplified recipe for RWKV-7, 1/sqrt(fan in) in the others. model: model.init's schemes. "
        "All other parameters start as published.",
    )


class RWKV4Options(RWKVOptions):
    chunk: int = key(256, SCANNED, unit="tokens", gt=0)


class RWKV5Options(RWKVOptions):
    head_dim: int = key(64, "Channels per head.", unit="channels", gt=1)
    norm_epsilon: float = key(64e-5, EPSILON, gt=0)
    chunk: int = key(256, SCANNED, unit="tokens", gt=0)


class RWKV6Options(RWKV5Options):
    mix_rank: int = key(32, "Rank of each of the five matrices that shift the token mix.", gt=0)
    decay_rank: int = key(64, "Rank of the matrix that moves the decays.", gt=0)


def _rank(factor: float) -> Derived:
    """Ranks that grow with the root of the width."""

    def rank(own: dict[str, Any], at: View) -> int | None:
        return max(32, 32 * round(factor * at["model.hidden_size"] ** 0.5 / 32)) if at.uses("rwkv7") else None

    return Derived(f"{factor:g} sqrt(model.hidden_size), in steps of 32", rank, ("model.hidden_size",))


class RWKV7Options(RWKVOptions):
    head_dim: int = key(64, "Channels per head.", unit="channels", gt=1)
    decay_rank: Derivable[int] = key(None, "Rank of the matrix that moves the decays.", derived=_rank(2.5), gt=0)
    rate_rank: Derivable[int] = key(None, "Rank of the matrix of in-context learning rates.", derived=_rank(2.5), gt=0)
    value_rank: Derivable[int] = key(
        None, "Rank of the matrix that blends values with the first RWKV-7 layer's.", derived=_rank(1.7), gt=0
    )
    gate_rank: Derivable[int] = key(None, "Rank of the matrix that gates the output.", derived=_rank(5), gt=0)
    norm_epsilon: float = key(64e-5, EPSILON, gt=0)
    # Above 128 the products of decays inside a chunk would leave the range of fp32.
    chunk: int = key(32, "Tokens per chunk. Changes memory and speed, not the result.", unit="tokens", gt=0, le=128)


def _width(kind: str, factor: float, multiple: int, formula: str) -> Any:
    """The key of a channel mix's width, a multiple of the width of the stream."""

    def width(own: dict[str, Any], at: View) -> int | None:
        return max(int(factor * at["model.hidden_size"]) // multiple, 1) * multiple if at.uses(kind) else None

    derived = Derived(formula, width, ("model.hidden_size",))
    return key(None, "Width of the channel mix.", unit="channels", derived=derived, gt=0)


FOUR = (4, 1, "4 * model.hidden_size")
ALMOST_FOUR = (3.5, 32, "3.5 * model.hidden_size rounded down to 32")


class RWKV4FFNOptions(RWKVOptions):
    hidden_size: Derivable[int] = _width("rwkv4_ffn", *FOUR)


class RWKV5FFNOptions(RWKVOptions):
    hidden_size: Derivable[int] = _width("rwkv5_ffn", *ALMOST_FOUR)


class RWKV6FFNOptions(RWKVOptions):
    hidden_size: Derivable[int] = _width("rwkv6_ffn", *ALMOST_FOUR)


class RWKV7FFNOptions(RWKVOptions):
    hidden_size: Derivable[int] = _width("rwkv7_ffn", *FOUR)


def heads_are_whole(at: KindUse[Any]) -> Iterator[Problem]:
    width, size = at.hidden_size, at.options.head_dim
    if width % size:
        yield at.problem(
            ".head_dim model.hidden_size",
            rule=f"model.hidden_size, the {width} channels of {at.kind}, must be a multiple of head_dim",
            fix=f"use head_dim = {near(size, divisors(width))}",
        )


def _heads(at: KindUse[Any]) -> int | None:
    heads, left = divmod(at.hidden_size, at.options.head_dim)
    return None if left else heads


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


def _mixer(options: type[RWKVOptions], layer: str, source: str, *linears: str, **more: Any) -> LayerKind:
    facts: dict[str, Any] = {
        "rules": (heads_are_whole, divides_over_tensor_ranks(_heads, "heads", ".head_dim")),
        "exchange": EXCHANGE,
        **more,
    }
    return LayerKind(
        role="mixer",
        options=options,
        about=f"Options of the {layer.rpartition(':')[2].lower()} mixer ({source}).",
        layer=f"{HERE}.{layer}",
        linears=lambda options: linears,
        keeps_fp32=True,
        columns=True,
        context="scans",
        **facts,
    )


RWKV4 = _mixer(
    RWKV4Options,
    "rwkv4:RWKV4",
    "Peng et al. 2023",
    *("key", "value", "receptance", "output"),
    rules=(divides_over_tensor_ranks(lambda at: at.hidden_size, "channels", "model.hidden_size"),),
    exchange="",
)
_FIVE = ("receptance", "value", "key", "gate", "output")
RWKV5 = _mixer(RWKV5Options, "rwkv5:RWKV5", "Eagle, Peng et al. 2024", *_FIVE)
RWKV6 = _mixer(RWKV6Options, "rwkv5:RWKV6", "Finch, Peng et al. 2024", *_FIVE)
RWKV7 = _mixer(
    RWKV7Options,
    "rwkv7:RWKV7",
    "Peng et al. 2025",
    *("receptance", "value", "key", "output"),
    packages={"fla": "pip install flash-linear-attention"},
    stack_rules=(first_values_are_whole_blocks,),
)


def _ffn(number: int, options: type[RWKVOptions]) -> LayerKind:
    return LayerKind(
        role="ffn",
        options=options,
        about=f"Options of the rwkv{number}_ffn feed-forward.",
        layer=f"{HERE}.ffn:RWKV{number}ChannelMix",
        rules=(divides_over_tensor_ranks("hidden_size", "channels"),),
        columns=True,
        linears=lambda options: ("key", "value") if number == 7 else ("key", "value", "receptance"),
        exchange=EXCHANGE if number > 4 else "",
        context="scans",
    )


RWKV4_FFN = _ffn(4, RWKV4FFNOptions)
RWKV5_FFN = _ffn(5, RWKV5FFNOptions)
RWKV6_FFN = _ffn(6, RWKV6FFNOptions)
RWKV7_FFN = _ffn(7, RWKV7FFNOptions)
