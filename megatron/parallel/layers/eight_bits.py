"""Matrix products of 8-bit floats in the linear layers of blocks (`precision.products: fp8`).

Both sides of y = x Wᵀ are rounded to e4m3 (three bits of mantissa). In the products of gradients, the gradient of y is
rounded to e5m2, which has a larger range (Micikevicius et al. 2022, arXiv:2209.05433). A tensor's scale follows from
its largest magnitude and is a power of two. It changes only exponents, so the other numbers of a micro-batch do not
change how a number is rounded, unless it is below 2^-13 of the largest (2^-28 in e5m2). Sums are fp32. Results have the
type of x, weights and their gradients the type of the run.

`torch._scaled_mm` multiplies: on NVIDIA GPUs in their 8-bit units, on CPUs the same numbers, slowly.

Shapes: T tokens, N outputs, K inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.layout.precision import plain

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOP = {E4M3: 7, E5M2: 14}  # exponent of the largest number: one below that of the type's largest
SIDE = 16  # the sides of a matrix must be multiples of it, in the units of GPUs
EXPONENT = 0x7F800000  # the bits of an fp32 number's exponent
LEAST = (8, 9)  # compute capability of the first NVIDIA GPUs with such units


def linear_for(products: str, inputs: int, outputs: int, device: torch.device | str, dtype: torch.dtype) -> Linear:
    """The product with a matrix [outputs, inputs], whole on this rank.

    Args:
        products: `precision.products`.
        dtype: of the weights. float64, in which tests compare, is not rounded.

    Raises:
        ValueError: this device has no such products.
    """
    if products != "fp8" or inputs % SIDE or outputs % SIDE or dtype == torch.float64:
        return plain
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        if torch.version.hip is not None:
            raise ValueError("precision.products: fp8 must have NVIDIA GPUs: AMD's have other 8-bit types")
        if torch.cuda.get_device_capability(device) < LEAST:
            name = torch.cuda.get_device_name(device)
            raise ValueError(f"precision.products: fp8 must have GPUs with 8-bit products (sm_89 on), unlike {name}")
    return linear_of_8_bits


def linear_of_8_bits(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """[..., K] to [..., N], as `F.linear`."""
    y_TN: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight_NK)
    y = y_TN.view(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in 8 bits, and the scale, fp32. Where x is not finite, the result is not finite."""
    largest = x.abs().amax().float()
    power = (largest.view(torch.int32) & EXPONENT).view(torch.float32)  # the largest power of two that is not larger
    scale = power.clamp_min(2.0**-100) * 2.0 ** -TOP[dtype]
    return (x * scale.reciprocal()).to(dtype), scale


def multiplied(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """a [A, C] times b [B, C] transposed, both rounded with their scales."""
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=dtype)


def turned(a: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Transposed in memory: 8-bit units sum along rows only."""
    return a[0].t().contiguous(), a[1]


class _Product(torch.autograd.Function):
    """x_TK Wᵀ. Saves x in 8 bits, and the weights as they are."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        x = rounded(x_TK, E4M3)
        ctx.save_for_backward(*x, weight_NK)
        return multiplied(x, rounded(weight_NK, E4M3), x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None]:
        *x, weight_NK = ctx.saved_tensors
        grad = rounded(gradients[0], E5M2)
        for_x, for_weight = ctx.needs_input_grad
        of_x = multiplied(grad, turned(rounded(weight_NK, E4M3)), gradients[0].dtype) if for_x else None
        of_weight = multiplied(turned(grad), turned((x[0], x[1])), weight_NK.dtype) if for_weight else None
        return of_x, of_weight
