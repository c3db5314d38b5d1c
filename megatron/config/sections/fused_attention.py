"""Which of FlashAttention's kernels compute attention on GPUs."""

from __future__ import annotations

from typing import Any, Literal

from ..section import Derivable, Derived, Section, key

SHORT = 64  # tokens of a document: those of a micro-batch are taken to be as long, on average


def _most_documents(own: dict[str, Any], at: Any) -> int:
    return max(8, at["training.sequence_length"] // SHORT)


class FusedAttentionOptions(Section):
    flash: Literal["auto", "fa3"] = key(
        "auto",
        "What torch computes plain causal attention with on a GPU: its own choice (cuDNN or FlashAttention 2), or the "
        "package of FlashAttention 3 (Hopper).",
    )
    documents: Literal["auto", "varlen"] = key(
        "auto",
        "What keeps documents apart on a GPU (data.reset_attention_at_eod): FlexAttention, or FlashAttention of "
        "documents one after another.",
    )
    most_documents: Derivable[int] = key(
        None,
        "varlen: documents that a sample may have, on average over a micro-batch; more of them are an error.",
        unit="documents",
        derived=Derived("training.sequence_length / 64, at least 8", _most_documents, ("training.sequence_length",)),
        gt=0,
        le=2**20,
    )
