"""In what form gradients and activations travel between ranks, and how many bytes that is. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..features.feature import wanted_features
from ..optimizer_kind import optimizer_kind

if TYPE_CHECKING:
    from .. import Config
    from ..sections.layout import ParallelSection

WIRES = ("none", "bf16", "fp16", "int8_block", "top_k")
FEEDS_BACK = ("int8_block", "top_k")  # their errors are added to the next gradients
BLOCK = 256  # elements with a scale of their own
LEAST_BLOCK = 16  # elements of a block between pipeline stages
SHARE = 32  # one in this number of elements is sent
PIPELINE = "parallel.communication.compress.pipeline"


def scatters_gradients(config: Config, layout: Any) -> bool:
    """Whether ZeRO 1 and 2 reduce-scatter gradients in buckets during the backward pass, instead of DeepSpeed's sums.

    Args:
        layout: a `Layout`.
    """
    precision, kind = config.precision, optimizer_kind(config)
    wide = precision.compute == "fp32" or (precision.compute == "bf16" and precision.accumulate == "fp32")
    plain = config.zero.offload_optimizer.device == "none" and not config.deepspeed
    plain = plain and config.parallel.communication.compress.data == "none"
    elementwise = kind is not None and not kind.whole_matrices
    stages = (1, 2) if layout.pipeline == 1 else (1, 2, 3)  # with a pipeline, ZeRO 3 is ZeRO 2 with parts of weights
    return layout.zero_stage in stages and layout.replicas > 1 and wide and plain and elementwise


def bucket_elements(config: Config, replicas: int) -> int:
    """Elements of a bucket that is scattered: enough for each rank's part, and few enough that most are sent early."""
    return min(config.zero.bucket_size, max(40_000_000, 1_000_000 * replicas))


def skips_late(config: Config) -> bool:
    """Whether an update may be skipped when the gradients were summed already: the rounding errors of sums are then
    kept twice, before and after the step."""
    features = wanted_features(config).values()
    return config.precision.compute == "fp16" or any(feature.skips_updates(config) for feature in features)


def sends_blocks(parallel: ParallelSection) -> bool:
    """Whether the stream goes from stage to stage in blocks."""
    return parallel.pipeline > 1 and parallel.communication.compress.pipeline == "int8_block"


def part_elements(wire: str, elements: int, ranks: int) -> int:
    """Elements of each rank's part of a tensor, padded to whole blocks."""
    unit = {"int8_block": BLOCK, "top_k": SHARE}.get(wire, 1)
    return -(-elements // (ranks * unit)) * unit


def row_block(width: int) -> int:
    """Elements with a scale of their own between pipeline stages, where rows of `width` must not be padded."""
    return math.gcd(BLOCK, width)


def part_bytes(wire: str, elements: int, block: int = BLOCK) -> int:
    """Of a part on its way."""
    if wire == "int8_block":
        return elements + 4 * (elements // block)
    return 8 * (elements // SHARE) if wire == "top_k" else 2 * elements


def between_stages(wire: str, elements: int, width: int, dtype: str) -> tuple[str, int]:
    """(type, elements) of what travels between pipeline stages for a sample's elements of a type, whose rows have a
    multiple of `width` of them. Bytes pass as fp32, since only floats have gradients there."""
    if wire == "int8_block":
        return "fp32", part_bytes(wire, elements, row_block(width)) // 4
    return (dtype, elements) if wire == "none" else (wire, elements)
