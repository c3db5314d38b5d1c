"""Compressed sums of gradients over replicas (`parallel.communication.compress.data`)."""

from megatron.config.arithmetic.wire import skips_late
from megatron.parallel.transport.compression import CompressedSum

from ..base import BaseEngine
from ..deepspeed.reduction import compress_gradients
from ..part import EnginePart


class CompressedSums(EnginePart):
    """Has DeepSpeed average its buckets through a `CompressedSum`.

    Attributes:
        sums: `Undo` begins, ends and forgets its error feedback.
    """

    def __init__(self) -> None:
        self.sums: CompressedSum

    def attach(self, engine: BaseEngine) -> None:
        wire = engine.config.parallel.communication.compress.data
        self.sums = compress_gradients(engine.deepspeed, wire, skips_late(engine.config))
