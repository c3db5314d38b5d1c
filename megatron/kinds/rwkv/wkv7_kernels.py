"""The recurrence of RWKV-7 by the kernels of flash-linear-attention, which is loaded at the first call. Inside of a
compiled block they are two `operations`."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.kinds.common.recurrence.operations import operations
from megatron.kinds.common.recurrence.pieces import document_bounds

from .wkv7 import wkv7

NARROWEST_HEAD, WIDEST_HEAD = 16, 256  # channels that the kernels take
CHUNK = 16  # tokens


def wkv7_of_fla(
    *inputs: Tensor, chunk: int, starts_BS: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor | None]:
    """`wkv7` of whole sequences without a past. No state is returned. The kernels choose their own chunks.

    Args:
        dtype: of the inputs of matrix products. torch computes fp32, which the kernels would round, and heads
            that do not fit them.
    """
    if dtype == torch.float32 or not NARROWEST_HEAD <= inputs[0].shape[-1] <= WIDEST_HEAD:
        return wkv7(*inputs, chunk=chunk, starts_BS=starts_BS)
    r, log_w, *read = (each.contiguous() for each in inputs)
    given: list[Tensor] = [r.to(dtype), log_w, *(each.to(dtype) for each in read)]
    run: Callable[..., Tensor] = operation if torch.compiler.is_compiling() else forward_by_kernels
    y = run(*given, starts_BS)
    return y.view_as(inputs[3]).to(inputs[3].dtype), None


def _bounds(starts_BS: Tensor | None) -> Tensor | None:
    return None if starts_BS is None else document_bounds(starts_BS)


def _rows(given: tuple[Tensor, ...], starts_BS: Tensor | None) -> tuple[Tensor, ...]:
    """Contiguous, whatever strides a compiler gave them. Documents of all samples follow one another in one sample."""
    given = tuple(each.contiguous() for each in given)
    return given if starts_BS is None else tuple(each.flatten(0, 1).unsqueeze(0) for each in given)


def _by_kernels(*inputs: Any) -> Tensor:
    from fla.ops.rwkv7 import chunk_rwkv7

    *given, bounds = inputs  # decays are in the range of `safe_gate`
    return chunk_rwkv7(*given, scale=1.0, cu_seqlens=bounds, safe_gate=True)[0]


def forward_by_kernels(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, starts_BS: Tensor | None
) -> Tensor:
    """y [B, S, h, N]."""
    given = r, log_w, k, v, a, b
    return _by_kernels(*_rows(given, starts_BS), _bounds(starts_BS)).view_as(v)


def gradient_by_kernels(
    of_y: Tensor, r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, starts_BS: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the six inputs, without the forward pass of autograd: the kernels compute what they need again."""
    from fla.ops.generalized_delta_rule.dplr.chunk import ChunkDPLRDeltaRuleFunction
    from fla.ops.utils import prepare_chunk_indices

    given, bounds = (r, log_w, k, v, a, b), _bounds(starts_BS)
    of_y, r, log_w, k, v, a, b = _rows((of_y, *given), starts_BS)
    kept = SimpleNamespace(
        saved_tensors=(r, k, v, a, b, log_w, None),
        cu_seqlens=bounds,
        chunk_indices=None if bounds is None else prepare_chunk_indices(bounds, CHUNK),
        chunk_size=CHUNK,
        scale=1.0,
        safe_gate=True,
        disable_recompute=False,
        cp_context=None,
        _fwd_used_autocast=False,
        _dtype=None,
    )
    of_r, of_k, of_v, of_a, of_b, of_w, *_ = ChunkDPLRDeltaRuleFunction.backward(kept, of_y, None)
    found = of_r, of_w, of_k, of_v, of_a, of_b
    return tuple(each.view_as(own) for each, own in zip(found, given))  # type: ignore[return-value]


operation, gradient = operations("wkv7", forward_by_kernels, gradient_by_kernels, like=(3,))
