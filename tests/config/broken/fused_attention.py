"""Kernels of attention that are asked for where they cannot be."""

from __future__ import annotations

from tests.config.broken.case import case

APART = "precision: bf16\ndata: {reset_attention_at_eod: true}\ntokenizer: {eod_id: 0}"
HERE = "FlashAttention must have a GPU, and this machine has none"

FUSED_ATTENTION = [
    case(
        "FlashAttention 3 without a GPU",
        "model: {fused_attention: {flash: fa3}}\nprecision: bf16",
        "a.yml:2: model.fused_attention.flash = 'fa3'",
        HERE,
        "use flash: auto",
    ),
    case(
        "FlashAttention 3 of fp32 on a CPU",
        "model: {fused_attention: {flash: fa3}}\nlaunch: {device: cpu}",
        "a.yml:2: model.fused_attention.flash = 'fa3'",
        "precision.compute = 'fp32'",
        "FlashAttention must have queries, keys and values of 16 bits",
        "launch.device = 'cpu' (a.yml:3)",
        "FlashAttention must have a GPU",
        problems=2,
    ),
    case(
        "kernels of documents without documents",
        "model: {fused_attention: {documents: varlen}}\nprecision: bf16",
        "a.yml:2: model.fused_attention.documents = 'varlen'",
        "varlen must have documents that attention keeps apart",
        "use data.reset_attention_at_eod=true",
        HERE,
        problems=2,
    ),
    case(
        "FlashAttention 3 where masks keep documents apart",
        f"model: {{fused_attention: {{flash: fa3}}}}\n{APART}",
        "a.yml:2: model.fused_attention.flash = 'fa3'",
        "data.reset_attention_at_eod = true (a.yml:4)",
        "fa3 must go with documents: varlen where attention keeps documents apart",
        HERE,
        problems=2,
    ),
    case(
        "FlashAttention 3 where all layers have windows",
        "model: {fused_attention: {flash: fa3}, attention: {window: 8}}\nprecision: bf16",
        "must be auto where FlashAttention computes no layer: attention has a window",
        "use flash: auto",
        HERE,
        problems=2,
    ),
    case(
        "FlashAttention 3 for tokens that are chosen",
        "model: {fused_attention: {flash: fa3}, layers: dsa/mlp x4, dsa: {heads: 4, rope_dim: 64, value_dim: 192}}\n"
        "precision: bf16",
        "must be auto where FlashAttention computes no layer: dsa reads the tokens that an indexer chooses",
        HERE,
        problems=2,
    ),
    case(
        "kernels of documents for changed logits",
        f"model: {{fused_attention: {{documents: varlen}}, attention: {{softcap: 30.0}}}}\n{APART}",
        "must be auto where FlashAttention computes no layer: attention changes its logits",
        "use documents: auto",
        HERE,
        problems=2,
    ),
    case(
        "kernels of documents for heads of 4 channels",
        f"model: {{fused_attention: {{documents: varlen}}, attention: {{heads: 16}}}}\n{APART}",
        "attention has heads of 4 channels, and not of 8, 16, ... or 256",
        HERE,
        problems=2,
    ),
    case(
        "kernels of documents where ranks share sequences",
        f"model: {{fused_attention: {{documents: varlen}}}}\nparallel: {{context: 2}}\n{APART}",
        "parallel.context = 2 (a.yml:3)",
        "must be auto with parallel.context > 1: parts of sequences are computed otherwise",
        "use documents: auto, or parallel.context=1",
        HERE,
        problems=2,
    ),
]
WARNED_FUSED_ATTENTION = [
    case(
        "room for documents without the kernels that need it",
        "model: {fused_attention: {most_documents: 9}}",
        "a.yml:2: model.fused_attention.most_documents = 9",
        "must go with documents: varlen, without which it has no effect",
    )
]
