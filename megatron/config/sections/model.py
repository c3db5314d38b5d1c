"""The model: the layer pattern, the options of each layer kind, initialisation."""

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from ..arithmetic.tokenizer_size import SizeUnknown, tokenizer_size
from ..features.feature import extended
from ..kind import kinds_of
from ..pattern import BlockPattern, blocks_of
from ..section import Derivable, Derived, Section, key, same_as


def _repeats(at: Any) -> bool:
    return any(block.recurrent for block in at.blocks)


def _state_std(own: dict[str, Any], at: Any) -> float | None:
    if not _repeats(at):
        return None
    width = at["model.parametrization.base_width"] or at["model.hidden_size"]
    return at["model.embedding.multiplier"] * math.sqrt(2.0 / (5.0 * width))


class RecurrenceOptions(Section):
    sampling: Literal["lognormal_poisson", "fixed"] = key(
        "lognormal_poisson",
        "Passes through the core in a training step. lognormal_poisson: a log-normal rate with mean `mean` is "
        "drawn, then Poisson(rate) + 1 passes, once per step. fixed: `mean` passes in every step.",
    )
    mean: int = key(32, "Mean of the rate at which passes are drawn.", unit="passes", gt=0, le=1024)
    spread: float = key(0.5, "Standard deviation of the rate's logarithm.", ge=0, le=2)
    backward: int = key(8, "Backpropagate through the last n passes only. They bound the activation memory.", gt=0)
    evaluation: Derivable[int] = key(
        None,
        "Passes in evaluation and generation.",
        unit="passes",
        derived=Derived("model.recurrence.mean", lambda own, at: own["mean"] if _repeats(at) else None, (".mean",)),
        gt=0,
        le=100_000,
    )
    state_std: Derivable[float] = key(
        None,
        "Standard deviation of the random state that the core starts from: normal, cut off at three of them.",
        derived=Derived(
            "model.embedding.multiplier * sqrt(2 / (5 * hidden_size)), with the width of the base model under a "
            "parametrization",
            _state_std,
            ("model.embedding.multiplier", "model.hidden_size", "model.parametrization.base_width"),
        ),
        ge=0,
    )
    norm: Literal["head", "none"] = key(
        "head", "head: the state after the last pass is normalised with the weights of the norm before the head."
    )


class ParametrizationOptions(Section):
    type: Literal["standard", "mup", "completep"] = key(
        "standard",
        "standard: the same rates at every size. mup: the rates of a base model are right at every width. "
        "completep: at every width and depth.",
    )
    base_width: int | None = key(
        None, "model.hidden_size of the base model, whose rates and initial values these are.", unit="channels", gt=0
    )
    base_depth: int | None = key(None, "completep: depth of the base model of model.init.", unit="blocks", gt=0)
    depth_exponent: float = key(
        1.0,
        "completep: a branch is multiplied by (blocks / base_depth) ** -this. 1 is CompleteP, 0.5 has other rates.",
        ge=0.5,
        le=1.0,
    )
    base_head_dim: int | None = key(
        None,
        "Channels per head of the base model: attention's scale is multiplied by sqrt(this / head_dim), so that "
        "it falls with 1 / head_dim. Without it, heads grow in number and not in size.",
        unit="channels",
        gt=0,
    )


SHORT = 64  # tokens of a document, assumed as the mean of a micro-batch


class FusedAttentionOptions(Section):
    flash: Literal["auto", "fa3"] = key(
        "auto",
        "Kernel of plain causal attention on a GPU: torch's own choice (cuDNN or FlashAttention 2), or the "
        "package of FlashAttention 3 (Hopper).",
    )
    documents: Literal["auto", "varlen"] = key(
        "auto",
        "Kernel that keeps documents apart on a GPU (data.reset_attention_at_eod): FlexAttention, or "
        "FlashAttention of documents one after another.",
    )
    most_documents: Derivable[int] = key(
        None,
        "varlen: documents that a sample may have, on average over a micro-batch. More are an error.",
        unit="documents",
        derived=Derived(
            "training.sequence_length / 64, at least 8",
            lambda own, at: max(8, at["training.sequence_length"] // SHORT),
            ("training.sequence_length",),
        ),
        gt=0,
        le=2**20,
    )


Norm = Literal["layernorm", "rmsnorm", "nonparametric"]


def _block_count(own: dict[str, Any], at: Any) -> int | None:
    core = sum(block.recurrent for block in at.blocks)
    return len(at.blocks) + core * (at["model.recurrence.mean"] - 1) or None


def _vocabulary(own: dict[str, Any], at: Any) -> int | None:
    try:
        size = tokenizer_size(at["tokenizer"])
    except SizeUnknown:
        return None
    return -(-size // own["vocab_multiple"]) * own["vocab_multiple"]


class NormOptions(Section):
    type: Norm = key("layernorm", "Which normalisation: LayerNorm, RMSNorm, or LayerNorm without parameters.")
    epsilon: float = key(1e-5, "Added to the variance (or mean square) before the root.", gt=0)
    bias: bool = key(True, "Whether LayerNorm has a bias (RMSNorm never has one).")
    unit_offset: bool = key(False, "A weight is stored minus 1: it starts at 0, and 1 + weight multiplies (Gemma).")


class ResidualOptions(Section):
    form: Literal["sequential", "parallel"] = key(
        "sequential",
        "sequential: x += mixer(n1 x), then x += ffn(n2 x). parallel (GPT-J, NeoX): x += mixer(n1 x) + ffn(n2 x).",
    )
    norm: Literal["pre", "post", "hybrid", "both", "sandwich", "deepnorm"] = key(
        "pre",
        "pre: norm on a branch's input. post: norm on a branch's output, none on its input (OLMo-2). hybrid: post in "
        "blocks with attention, pre in the others (OLMo Hybrid). both: a norm on a branch's input and another on its "
        "output (Gemma 2, GLM-4). sandwich: a norm on a branch's input and another on the stream after the branch was "
        "added (Huginn). deepnorm: the normed stream takes the stream's place, x <- stream_multiplier * n(x) + f(n(x)) "
        "(DeepNorm, MiniMax-01).",
    )
    stream_multiplier: float = key(1.0, "deepnorm: the normed stream is multiplied by this (alpha).", gt=0)
    shared_norm: bool = key(False, "parallel form: one norm feeds both branches (GPT-J) instead of two (NeoX).")
    fp32: bool = key(
        False,
        "The stream is fp32 in every precision (Mamba, Mamba-2, ZAYA1): branches compute in precision.compute after "
        "their norms, and their outputs are added in fp32. Costs twice the memory of the stream in 16-bit training.",
    )
    multiplier: float = key(1.0, "Each branch's output is multiplied by this, then added (Granite, muP depth scaling).")
    channel_scales: bool = key(
        False,
        "sequential form: branch y and stream x are scaled and shifted by trained vectors where they are added, x "
        "<- (y + b) * a + (x + d) * c. So is the embedding (ZAYA1). All start at 1 and 0.",
    )
    block_scale: bool = key(
        False,
        "The stream after each block is multiplied by a number of the block's own, as in Gemma 4. It is 1, or what an "
        "imported model has, and is not trained.",
    )
    token_inputs: int = key(
        0,
        "Channels of a further input of each block (Gemma 4 E2B and E4B): the token's vector in a table of the block's "
        "own, plus the projected embedding. Gated by the stream, it is projected, normalised and added after the "
        "block's branches. 0: none.",
        unit="channels",
        ge=0,
    )
    streams: int = key(
        1,
        "Rows of the stream. Above 1: manifold-constrained hyper-connections. Each branch reads a weighted sum of the "
        "rows, and each block mixes them. The paper has 4.",
        gt=0,
    )
    sinkhorn_iterations: int = key(20, "streams: rounds that balance the mixing matrices.", gt=0)


class EmbeddingOptions(Section):
    tied: bool = key(False, "Use the token embedding as the head's weight.")
    position: Literal["none", "learned"] = key(
        "none", "Learned absolute positions, training.sequence_length of them (or max_positions)."
    )
    max_positions: Derivable[int] = key(
        None,
        "Rows of the learned position table.",
        unit="tokens",
        derived=Derived(
            "training.sequence_length",
            lambda own, at: at["training.sequence_length"] if own["position"] == "learned" else None,
            ("training.sequence_length",),
        ),
        gt=0,
    )
    multiplier: float = key(1.0, "Embeddings are multiplied by this (Gemma: sqrt(hidden_size)).", gt=0)
    norm: bool = key(False, "Normalise the embedding (BLOOM).")


class HeadOptions(Section):
    multiplier: float = key(1.0, "Logits are multiplied by this (logit scale).", gt=0)
    softcap: float | None = key(None, "Cap logits l as softcap * tanh(l / softcap).", gt=0)
    bias: bool = key(False, "Whether the head has a bias.")
    norm: Derivable[Norm] = key(None, "Type of the norm before the head.", derived=same_as("model.norm.type"))


InitScheme = Literal[
    "normal",
    "scaled_normal",
    "single_residual_scaled_normal",
    "small_init",
    "wang_init",
    "xavier_uniform",
    "xavier_normal",
    "fan_in_uniform",
    "scaled_fan_in_uniform",
    "orthogonal",
    "half_orthogonal",
    "tiny_uniform",
    "zeros",
]


class InitOptions(Section):
    std: float = key(0.02, "Standard deviation of normal. scaled_normal divides it by sqrt(2 * layers).", gt=0)
    embedding: InitScheme = key("normal", "Scheme of the token and position embeddings.")
    hidden: InitScheme = key("normal", "Scheme of matrices reading the residual stream (query, key, value, gate, up).")
    output: InitScheme = key("scaled_normal", "Scheme of matrices writing to the residual stream (output, down).")
    head: Derivable[InitScheme] = key(None, "Scheme of the head.", derived=same_as("model.init.embedding"))
    layers: Derivable[int] = key(
        None,
        "Layer count in the depth-dependent schemes. The blocks of a recurrent group count recurrence.mean times.",
        derived=Derived("the number of blocks in model.layers", _block_count, ("model.layers",)),
        gt=0,
    )


class _Stack(Section):
    layers: str = key(
        ...,
        "The stack as a pattern, as in '(attention/mlp) x12'. Kinds are joined by '/', groups repeated by 'x N', "
        "variants named by '@'. '&' joins mixers of one input whose outputs are summed. 'recurrent(...)' is a "
        "group that model.recurrence repeats.",
    )
    hidden_size: int = key(..., "Width of the residual stream.", unit="channels", gt=0, le=2**20)
    vocab_size: Derivable[int] = key(
        None,
        "Rows of the embedding and of the head. They never depend on the layout.",
        unit="tokens",
        derived=Derived(
            "the tokenizer's size rounded up to a multiple of model.vocab_multiple",
            _vocabulary,
            ("tokenizer.path", "model.vocab_multiple"),
        ),
        gt=0,
    )
    vocab_multiple: int = key(128, "The derived vocab_size is a multiple of this.", unit="tokens", gt=0)
    norm: NormOptions = key(NormOptions, "The norm used everywhere in the stack.")
    residual: ResidualOptions = key(ResidualOptions, "How branches are added to the residual stream.")
    embedding: EmbeddingOptions = key(EmbeddingOptions, "Token and position embeddings.")
    head: HeadOptions = key(HeadOptions, "The output head.")


if TYPE_CHECKING:

    class _Kinds(_Stack):
        """Further sections, of kinds and features, are of any type to type checkers."""

        def __getattr__(self, name: str) -> Any: ...

else:  # one section per kind, in the registry's order
    _Kinds = create_model(
        "_Kinds",
        __base__=_Stack,
        __module__=__name__,
        **{name: (kind.options, key(kind.options, kind.about)) for name, kind in kinds_of().items()},
    )


@extended("model")
class ModelSection(_Kinds):
    variants: dict[str, dict[str, Any]] = key(
        dict, "Named variants override a kind's options where the pattern has kind@name, as in 'local: {window: 512}'."
    )
    dropout: float = key(0.0, "Dropout of the embedding and of each branch's output.", ge=0, lt=1)
    init: InitOptions = key(InitOptions, "How parameters start.")
    recurrence: RecurrenceOptions = key(RecurrenceOptions, "How often the recurrent group of the pattern is repeated.")
    parametrization: ParametrizationOptions = key(
        ParametrizationOptions, "How initial values, multipliers and learning rates follow from width and depth."
    )
    kernels: str = key(
        "auto",
        "Program of recurrent mixers: torch, or a package of GPU kernels that a kind names (mamba_ssm, fla). auto "
        "takes one that is installed.",
    )
    fused_attention: FusedAttentionOptions = key(
        FusedAttentionOptions, "Which of FlashAttention's kernels compute attention on GPUs (docs/performance.md)."
    )
    extensions: list[str] = key(
        list,
        "Python modules of other packages that add kinds of layers, optimizers and more, as in '[my_lab.retnet]'. "
        "Each has a mapping EXTENSION of roles to names to import paths.",
    )

    @property
    def blocks(self) -> tuple[BlockPattern, ...]:
        """The blocks of `layers`, in order. A kind that is a whole model has the number of its class.

        Raises:
            PatternError: the pattern cannot be read, which a resolved configuration excludes.
        """
        return blocks_of(self.layers, tuple(self.extensions)) * self.outline[0]

    @property
    def is_whole(self) -> bool:
        """Whether a kind is the whole model, such as a class of transformers."""
        kind = kinds_of(tuple(self.extensions)).get(self.layers)
        return kind is not None and bool(kind.whole)

    @property
    def outline(self) -> tuple[int, str]:
        """(blocks, name of the token embedding) of a kind that is the whole model. Of layers: 1, and the name."""
        kind = kinds_of(tuple(self.extensions)).get(self.layers)
        return kind.outline(getattr(self, self.layers)) if kind and self.is_whole else (1, "embedding.tokens")

    @property
    def further_blocks(self) -> tuple[BlockPattern, ...]:
        """The blocks of the modules of `multi_token_prediction`, numbered after the blocks of the stack.

        Raises:
            PatternError: as for `blocks`.
        """
        options = getattr(self, "multi_token_prediction", None)  # of a feature
        if options is None or not options.depth or options.block is None:
            return ()
        return blocks_of(options.block, tuple(self.extensions))[:1] * options.depth
