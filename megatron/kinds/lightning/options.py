"""Options of the lightning mixer, and their rules."""

from megatron.config.kind import LayerKind
from megatron.config.section import Derivable, Needed, Section, key
from megatron.kinds.common.options import derived_key, divides_over_tensor_ranks, heads_are_given, heads_have_channels


class LightningOptions(Section):
    heads: Needed[int] = key(
        None, "Number of heads, each with a state. Needed where the pattern has a lightning layer.", gt=0
    )
    head_dim: Derivable[int] = derived_key(
        "Channels per head of queries, keys and values.",
        "model.hidden_size / model.lightning.heads",
        lambda own, at: at["model.hidden_size"] // own["heads"] or None if own["heads"] else None,
        "model.hidden_size .heads",
        unit="channels",
    )
    norm_epsilon: float = key(1e-6, "Added to the mean square of all heads' outputs before the root.", gt=0)
    chunk: int = key(64, "Tokens per chunk. Changes memory and speed, not the result.", unit="tokens", gt=0)


KIND = LayerKind(
    role="mixer",
    options=LightningOptions,
    about="Options of the lightning mixer (Qin et al. 2024, MiniMax 2025).",
    layer="megatron.kinds.lightning.layer:Lightning",
    rules=(
        heads_are_given,
        heads_have_channels("head_dim", "heads", "heads"),
        divides_over_tensor_ranks("heads", "heads"),
    ),
    linears=lambda options: ("query_key_value", "gate", "output"),
    columns=True,
    context="scans",
    repeats=True,
)
