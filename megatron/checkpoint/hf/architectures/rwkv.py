"""RWKV-4, which transformers calls Rwkv. Later ones are published as files of their own (`rwkv_files`)."""

from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.kinds.common.links import Link
from megatron.kinds.rwkv.hf import transformers_block, transformers_mixes

from ..architecture import Architecture, Field, Found, Functions, uniform
from .common import OURS, STREAM, TIED, options

_THEIRS = "rwkv.blocks.{n}"


def _read(theirs: PreTrainedConfig) -> Found:
    inner, hidden = theirs.attention_hidden_size, theirs.hidden_size
    return {}, [] if inner == hidden else [f"attention_hidden_size={inner} is not hidden_size={hidden}"]


def _write(config: Config) -> dict[str, Any]:
    """Halving the stream now and then changes no logits, but weights in place: it is switched off."""
    return {"rescale_every": 0, "context_length": config.training.sequence_length}


RWKV = Architecture(
    "rwkv",
    (
        Link("embedding.tokens", "rwkv.embeddings"),
        Link("embedding.norm", "rwkv.blocks.0.pre_ln"),
        Link(f"{OURS}.mixer_norm", f"{_THEIRS}.ln1"),
        Link(f"{OURS}.ffn_norm", f"{_THEIRS}.ln2"),
        *transformers_mixes(_THEIRS),
        *transformers_block(_THEIRS),
        Link("final_norm", "rwkv.ln_out"),
        Link("head", "head"),
    ),
    uniform("rwkv4/rwkv4_ffn"),
    fields=(
        *(*STREAM, TIED, Field("hidden_size", "attention_hidden_size")),
        Field("rwkv4_ffn.hidden_size", "intermediate_size"),
    ),
    fixed={
        **options("norm", type="layernorm", bias=True, epsilon=1e-5),
        **options("residual", form="sequential", norm="pre"),
        **options("embedding", norm=True, position="none"),
    },
    # transformers' last norm has this epsilon whatever the configuration says
    required={"layer_norm_epsilon": 1e-5},
    parts=(Functions(_read, _write),),
    prefix="rwkv.",
    buffers=(),
)
