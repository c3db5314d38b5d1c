"""Messages of ranks that share the rows of matrices, in closed form (`parallel/layers/folded.py`).

For a matrix of N M numbers and n ranks, the forward pass (and its repetition) sends n - 1 messages to the next rank,
and receives the same from the previous one. Each message has N M / n numbers. The backward pass does the same, and the
same in fp32 with the gradients. An embedding's rows are not needed again. The head's are gathered, and their gradients
scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from megatron.config import Config
from megatron.config.arithmetic.recurrence import Passes, core_of
from megatron.model.block import Block
from megatron.model.costs.traffic import ONCE, SIZES
from megatron.model.embedding_and_head import Embedding, Head
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.mesh import ALONE, Mesh
from megatron.parallel.messages.traffic import Call, Messages


@dataclass(frozen=True)
class RowMatrix:
    """A matrix whose rows ranks share, in one forward pass."""

    layer: str  # in accounts
    elements: int  # of this rank's rows
    block: int | None = None  # number of its block, None outside of blocks
    again: bool = True  # whether the backward pass needs the rows


def row_traffic(config: Config, mesh: Mesh, layers: nn.Module, core: Passes = ONCE) -> Messages:
    """Messages of one micro-batch.

    Args:
        layers: this rank's, as modules without values.
        core: number of passes through a recurrent core.
    """
    tally, ranks = Messages(), mesh.context.size
    if not mesh.layout.shares_rows:
        return tally
    dtype, training = config.precision.compute, config.training
    recompute, chunks = training.activation_checkpointing, training.sequence_chunks
    for module in layers.children():
        for each in _matrices(module):
            sent = [("forward", dtype), ("backward", "fp32"), *([("backward", dtype)] if each.again else [])]
            full = recompute.mode == "full" and each.block is not None and each.block % recompute.every == 0
            if full or (chunks > 1 and each.block is not None):
                sent.append(("recompute", dtype))
            often = core if each.block in core_of(config.model.blocks) else ONCE
            for phase, kind in sent:
                times = chunks * (ranks - 1) * int(often.total if phase == "forward" else often.backward)
                for operation in ("send", "recv"):
                    call = Call(phase, each.layer, "context", 2, operation, kind)
                    tally.add(call, times, times * each.elements * SIZES[kind])
        if isinstance(module, Head) and module.rows.size > 1 and module.weight is not None:
            size = ranks * module.weight.numel() * SIZES[dtype]
            for phase, operation in (("forward", "all_gather"), ("backward", "reduce_scatter")):  # once for all chunks
                tally.add(Call(phase, "head", "context", ranks, operation, dtype), 1, size)
    return tally


def _matrices(module: nn.Module) -> Iterator[RowMatrix]:
    """Matrices of an embedding, of a block, or of the modules that predict further tokens."""
    if isinstance(module, Embedding):
        yield from (RowMatrix("embedding", size, again=False) for size in _sizes(module))
    elif isinstance(module, Block):
        name = ".".join(logical_of(next(module.parameters())).name.split(".")[:2])
        index = int(name.split(".")[1])
        if module.injection is not None:
            yield from (RowMatrix(f"{name}.injection", size, index) for size in _sizes(module.injection))
        for kind, layer in module.layers():
            yield from (RowMatrix(f"{name}.{kind.name}", size, index) for size in _sizes(layer))
        for layer in module.side_layers or ():
            yield from (RowMatrix(name, size, index) for size in _sizes(layer, *getattr(layer, "borrowed", ())))
    elif isinstance(module, Head) and module.further is not None:
        for token in module.further.tokens:
            yield from (RowMatrix("head", size) for size in _sizes(cast(nn.Module, token.projection)))
            yield from (RowMatrix("head", size, again=False) for size in _sizes(module.further.table))
            yield from _matrices(cast(nn.Module, token.block))


def _sizes(*modules: nn.Module) -> list[int]:
    """Elements of this rank's rows of each matrix of the modules. Each module counts once."""
    every = dict.fromkeys(each for module in modules for each in module.modules())
    shared = [each for each in every if getattr(each, "rows", ALONE).size > 1]
    return [cast(Tensor, each.weight).numel() for each in shared]
