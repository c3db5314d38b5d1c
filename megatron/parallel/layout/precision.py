"""The rule for computing in a wider type than the stream's, copies to a device, and pages of a CPU's memory."""

import ctypes
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TYPES = {**COMPUTE_TYPES, "fp64": torch.float64}
_NAMES = {dtype: name for name, dtype in TYPES.items()}
LARGE = 1 << 24  # bytes of a tensor with large pages: the kernel limits the number of ranges with advice
_VECTORS = 64  # numbers that torch computes at once on any processor, four vectors of at most 16


def type_name(dtype: torch.dtype) -> str:
    """Name in configurations and accounts (bf16), or torch's own (int64)."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32 where its type is narrower, else as it is: for decays, routers, norms and losses.

    A model whose parameters are float64 computes in float64 throughout, as in comparisons of tests."""
    return x.to(wide_type(x.dtype))


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """fp32, or the given type where that is wider."""
    return torch.promote_types(dtype, torch.float32)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, through pinned memory to a GPU: from other memory the host would wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not is_fake(tensor):
        tensor = tensor.contiguous().pin_memory()  # which refuses an expanded tensor
    return tensor.to(device, non_blocking=True)


def numbers_on(device: torch.device | str, values: Sequence[Any]) -> Tensor:
    """Numbers of the host, int64, on the device. The host does not wait for it."""
    return to_device(torch.tensor(list(values), dtype=torch.int64), torch.device(device))


def exp_(x: Tensor) -> Tensor:
    """e^x in the place of x [..., n], which needs no gradient. The bits of a row are its own.

    torch calls MKL for exp of fp32 on CPUs. On processors of AMD it takes 0.66 ns a number, and torch's own exp2 0.16
    ns (Zen 5). Rounding of factor and product changes a result by at most |x| 1.2e-7 of it. Rounding of a logit x and
    of the largest one changes their difference by the same amount. Numbers that do not fill a vector are rounded in
    another way by exp2, so rows must fill theirs, as the rows of padded vocabularies do."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and x.shape[-1] % _VECTORS == 0:
        return x.mul_(math.log2(math.e)).exp2_()
    return x.exp_()


def plain(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """F.linear, or the function that a library has put in its place since the layer was built."""
    return F.linear(x, weight_NK, bias_N)


def use_large_pages(tensors: Iterable[Tensor], heap: bool = False) -> None:
    """Ask Linux for pages of 2 MiB below large tensors of a CPU that stay, and below the C library's `heap` with them.

    A product that reads a matrix by columns needs the address of another page for each row. With pages of 4 KiB the
    processor looks most addresses up in memory. Values stay. A kernel without large pages changes nothing.
    """
    if sys.platform != "linux":
        return
    stored = [each.untyped_storage() for each in tensors if each.device.type == "cpu" and not is_fake(each)]
    ranges = {(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in stored if each.nbytes() >= LARGE}
    if ranges and heap:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
        ranges |= {(int(begin, 16), int(end, 16)) for begin, end in (line[0].split("-") for line in lines)}
    for begin, end in ((-(-begin // 4096) * 4096, end // 4096 * 4096) for begin, end in ranges):
        for advice in (14, 25):  # MADV_HUGEPAGE for pages to come, and MADV_COLLAPSE for present ones
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
