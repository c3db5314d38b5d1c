"""Sums of squares of large tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 4096  # elements whose squares one fp32 sum takes


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum over all elements of some tensors of one device, 0-d, fp32. Contiguous tensors are not copied.

    On CPUs torch's norm adds a whole tensor up in a few fp32 sums, one per lane of a vector register. A large sum
    absorbs no small squares: for 26 million gradients the norm is 0.1 to 0.5 % too small. Here the norm of each row
    of 4096 elements is taken that way, as fast, and their squares are added up in fp64."""
    return _squares(tensors).float()


def norm(tensor: Tensor) -> Tensor:
    """Norm of a tensor, [1], fp32."""
    return _squares([tensor]).sqrt().float().view(1)


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """fp64 on a CPU, so that the root of one norm's square is that norm."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32)).square().sum()
    parts: list[Tensor] = []
    for flat in (tensor.reshape(-1) for tensor in tensors):
        whole = flat.numel() // ROW * ROW
        parts += [flat[:whole].view(-1, ROW), flat[whole:].view(1, -1)]
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts if part.numel()]
    return torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
