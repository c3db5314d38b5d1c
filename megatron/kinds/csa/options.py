"""Options of the csa mixer, and their rules."""

from collections.abc import Iterator
from typing import Literal

from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import Problem
from megatron.config.section import Needed, RotaryOptions, Section, key
from megatron.kinds.common.options import divides_over_tensor_ranks, heads_are_given, rotary_scaling_is_complete


class CSAOptions(Section):
    heads: Needed[int] = key(None, "Number of query heads. Needed where the pattern has a csa layer.", gt=0)
    head_dim: int = key(512, "Channels of a head. All heads share one vector as key and value.", unit="channels", gt=0)
    query_rank: int = key(1024, "Channels of the compressed vector of the queries of all heads.", unit="channels", gt=0)
    rope_dim: int = key(64, "Channels of a head that positions turn.", unit="channels", gt=0)
    position: Literal["rotary", "none"] = key("rotary", "Whether positions turn the rope_dim channels.")
    rotary: RotaryOptions = key(RotaryOptions, "Rotary embedding options, used when position is rotary.")
    window: int = key(128, "A token reads itself and the window-1 tokens before it one by one.", unit="tokens", gt=0)
    rate: int | None = key(
        4, "Tokens of a compressed entry, which all later tokens may read. null: only the window.", unit="tokens", gt=0
    )
    overlap: bool = key(
        True, "An entry is also made of the tokens of the entry before it, by weights of their own (rate 4 of V4)."
    )
    index_top_k: int | None = key(
        512, "Entries that a token reads: those with the largest scores of an indexer. null: all.", gt=0
    )
    index_heads: int = key(64, "Heads of the indexer.", gt=0)
    index_dim: int = key(128, "Channels of the indexer's queries and entries.", unit="channels", gt=0)
    index_loss: float = key(
        1.0,
        "Coefficient of the indexer's loss: the divergence of attention's probabilities of the entries that are read, "
        "summed over heads, from the softmax of the scores. Only the indexer gets its gradient. 0: it does not learn.",
        ge=0,
    )
    groups: int = key(8, "Groups of heads. The output of each is compressed before all are mixed.", gt=0)
    output_rank: int = key(1024, "Channels of the compressed output of a group.", unit="channels", gt=0)

    @property
    def indexed(self) -> bool:
        """Whether an indexer chooses entries."""
        return self.rate is not None and self.index_top_k is not None

    @property
    def series(self) -> int:
        """Number of vectors of a token, one for its own entry and one for the next."""
        return 2 if self.overlap else 1

    @property
    def span(self) -> int:
        """Number of tokens in an entry."""
        return (self.rate or 0) * self.series

    @property
    def learns(self) -> bool:
        """Whether the indexer has a loss."""
        return self.indexed and self.index_loss > 0.0


def turned_channels_fit(at: KindUse[CSAOptions]) -> Iterator[Problem]:
    own = at.options
    if own.position != "rotary":
        return
    if own.rope_dim % 2:
        yield at.problem(
            ".rope_dim",
            rule="rotary positions turn pairs of channels: rope_dim must be even",
            fix=f"use {own.rope_dim + 1}",
        )
    for name in ("head_dim", *(("index_dim",) if own.indexed else ())):
        if getattr(own, name) < own.rope_dim:
            yield at.problem(
                f".{name} .rope_dim",
                rule=f"{name} must have the {own.rope_dim} channels that positions turn",
                fix=f"use {name}: {own.rope_dim}, or a smaller rope_dim",
            )
    if own.rotary.fraction != 1.0:
        yield at.problem(
            ".rotary.fraction .rope_dim",
            rule="rope_dim says which channels are turned, so rotary.fraction must be 1",
            fix="remove fraction",
        )
    if own.rotary.scaling.type == "dynamic":
        yield at.problem(
            ".rotary.scaling.type",
            rule="must not be dynamic: entries that are kept were turned by the frequencies of a shorter text",
            fix="use yarn",
        )


def groups_have_equal_heads(at: KindUse[CSAOptions]) -> Iterator[Problem]:
    own = at.options
    if own.heads and own.heads % own.groups:
        yield at.problem(
            ".groups .heads",
            rule=f"groups must divide the {own.heads} heads",
            fix="use a number of groups that divides the heads",
        )


def _weights(options: CSAOptions, width: int) -> tuple[int, int]:
    if not options.heads:
        return 0, 0
    own, inner = options, options.heads * options.head_dim
    found = own.query_rank * (width + inner) + width * own.head_dim + own.output_rank * (inner + own.groups * width)
    if own.rate is not None:
        found += 2 * own.series * width * own.head_dim
    if own.indexed:
        found += 2 * own.series * width * own.index_dim
        found += own.index_heads * (own.query_rank * own.index_dim + width)
    return found, 0


KIND = LayerKind(
    role="mixer",
    options=CSAOptions,
    about="Options of the csa mixer: attention to a window and to compressed entries (DeepSeek-V4, 2026).",
    layer="megatron.kinds.csa.layer:CSA",
    rules=(
        heads_are_given,
        turned_channels_fit,
        groups_have_equal_heads,
        rotary_scaling_is_complete,
        divides_over_tensor_ranks("groups", "groups of heads"),
    ),
    attends=True,
    keeps_fp32=True,
    linears=lambda options: (
        *("query_down", "query", "key", "output"),
        *(("compressor.project",) if options.rate else ()),
    ),
    weights=_weights,
)
