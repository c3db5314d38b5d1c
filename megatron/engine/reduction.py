"""How DeepSpeed sums gradients that fill a bucket on their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def sum_large_gradients_in_place(engine: Any) -> None:
    """Gradients of more elements than a bucket has are sent as they are, and not packed with what came before them.

    DeepSpeed packs all. Its bf16 optimizer keeps the gradients of a group in one fp32 tensor, so that at the end of
    every step of a large model there was a second copy of nearly all of a rank's gradients: 8.4 GiB for 70 billion
    parameters over 8 tensor parallel ranks and 4 stages.

    Args:
        engine: DeepSpeed's.
    """
    pack = engine.allreduce_no_retain

    def reduce(
        bucket: Sequence[Tensor], dp_group: Any, numel_per_bucket: int = 500_000_000, dp_world_size: float | None = None
    ) -> None:
        for tensor in bucket:
            if tensor.numel() > numel_per_bucket:
                engine.allreduce_bucket([tensor], dp_group, dp_world_size)  # one tensor is packed by a view of it
        pack([each for each in bucket if each.numel() <= numel_per_bucket], dp_group, numel_per_bucket, dp_world_size)

    engine.allreduce_no_retain = reduce
