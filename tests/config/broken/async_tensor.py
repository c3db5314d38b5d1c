"""Products that overlap with messages of tensor parallel ranks, where there are none or they cannot."""

from __future__ import annotations

from tests.config.broken.case import case

ON = "parallel: {tensor: 2, sequence: true, async_tensor: true}\n"

ASYNC_TENSOR = [
    case(
        "asynchronous products of whole activations",
        "parallel: {tensor: 2, async_tensor: true}",
        "parallel.sequence = false (default)",
        "must have activations that tensor ranks share",
        "or parallel.sequence=true",
    ),
    case(
        "asynchronous products of compressed activations",
        "parallel: {tensor: 2, sequence: true, async_tensor: true, communication: {compress: {tensor: bf16}}}",
        "parallel.communication.compress.tensor = 'bf16' (a.yml:2)",
        "must have uncompressed activations",
    ),
    case(
        "asynchronous products of weights that move",
        ON + "zero: {stage: 3}",
        "zero.stage = 3 (a.yml:3)",
        "must have weights that stay where they are",
        "or zero.stage=2",
    ),
    case(
        "asynchronous products, recomputed",
        ON + "training: {activation_checkpointing: {mode: selective}}",
        "training.activation_checkpointing.mode = 'selective' (a.yml:3)",
        "must have each product once a step",
    ),
    case(
        "asynchronous products of chunks",
        ON + "training: {sequence_chunks: 2}",
        "must have whole sequences in a pass",
        "or training.sequence_chunks=1",
    ),
    case(
        "asynchronous products across islands",
        "parallel: {tensor: 4, sequence: true, async_tensor: true, communication: {island: 2}}",
        "parallel.communication.island = 2",
        "must share fast links",
        ranks=4,
    ),
]
