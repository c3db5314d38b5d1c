"""Whole logical tensors on rank 0, from the parts that ranks hold, and back. One tensor at a time, bit for bit."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.format.fragment import Fragment, natural_width, rectangles
from megatron.parallel.layout.mesh import Mesh

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WholeTensors:
    """All ranks call each method, in the same order.

    Args:
        device: of the ranks' parts and of the messages. Rank 0's whole tensors are on the host.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device, self._several = mesh, device, mesh.layout.world_size > 1

    def gather(self, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[Fragment]) -> Tensor | None:
        """The tensor on rank 0, zero where no rank has a part. None elsewhere.

        Args:
            parts: this rank's. Each element is a part of one rank.
        """
        bits = _BITS[dtype.itemsize]
        whole = torch.zeros(tuple(shape), dtype=bits, device=self._device)
        for each in parts:
            for there, here in views(each, whole, each.data.view(bits)):
                there.copy_(here)
        if self._several:
            dist.reduce(whole, 0)  # sums of integers keep every bit
        return whole.cpu().view(dtype) if self._mesh.rank == 0 else None

    def spread(
        self, shape: Sequence[int], dtype: torch.dtype, whole: Tensor | None, parts: Iterable[Fragment]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Send rank 0's tensor. Yields each of this rank's parts as equal matrices of the tensor and of the part."""
        bits = _BITS[dtype.itemsize]
        sent = torch.empty(tuple(shape), dtype=bits, device=self._device)
        if whole is not None:
            sent.copy_(whole.view(bits))
        if self._several:
            dist.broadcast(sent, 0)
        for each in parts:
            yield from views(each, sent.view(dtype), each.data)


def views(fragment: Fragment, whole: Tensor, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of a logical tensor that a fragment is, as equal matrices of the tensor and of the fragment."""
    matrix = whole.view(-1, max(natural_width(fragment.tensor), 1))
    for each in rectangles(fragment.spec):
        size = (each.rows, each.columns)
        here = data.as_strided(size, (each.stride, 1), data.storage_offset() + each.local)
        yield matrix[each.row : each.row + each.rows, each.column : each.column + each.columns], here
