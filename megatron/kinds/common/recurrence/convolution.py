"""The short causal convolution in front of a recurrence: of each channel, over its last K tokens.

Shapes: B samples, S positions, C channels, K taps (the last tap is the token itself).

Kernels of packages are loaded at the first call. They have the arguments and results of the torch function, for whole
sequences without a past. torch computes numbers of taps that the kernels of causal_conv1d lack."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.arithmetic.machine import installed
from megatron.kinds.common.options import RecurrentOptions
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import Init
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role, Shard

from .pieces import document_bounds
from .recomputed import recomputed


def causal_convolution(
    x_BSC: Tensor,
    weight_C1K: Tensor,
    bias_C: Tensor | None,
    past_BKC: Tensor | None = None,
    starts_BS: Tensor | None = None,
) -> Tensor:
    """silu(bias + sum over k of weight[k] * x[t - K + 1 + k]), [B, S, C].

    Args:
        past_BKC: the K - 1 tokens before. None where nothing came before.
        starts_BS: int [B, S], index of the first token of each token's document: taps do not read before it.
    """
    if starts_BS is None and x_BSC.device.type == "cpu":
        return _OnCPU.apply(x_BSC, weight_C1K, bias_C, past_BKC)
    return recomputed(_convolve, x_BSC, weight_C1K, bias_C, past_BKC, starts_BS)


def in_graph(x_BSC: Tensor, taps: Sequence[Tensor], bias: Tensor | None, starts_BS: Tensor | None) -> Tensor:
    """`causal_convolution` of whole sequences, in loops of a compiler.

    Args:
        taps: the weights of each [C], or for all tokens (`over_tokens`), as `bias`.
    """
    length = x_BSC.shape[1]
    places = torch.arange(length, device=x_BSC.device)
    total: Tensor | float = 0.0 if bias is None else at_least_fp32(bias)
    for back, weight in zip(reversed(range(len(taps))), taps):
        by = min(back, length)
        own = at_least_fp32(F.pad(x_BSC, (0, 0, by, -by))) * at_least_fp32(weight)
        total = total + (own if starts_BS is None else own * (places - back >= starts_BS).unsqueeze(-1))
    return F.silu(torch.as_tensor(total)).to(x_BSC.dtype)


def last_taps(x_BSC: Tensor, past_BKC: Tensor | None, taps: int, starts_BS: Tensor | None = None) -> Tensor:
    """The last `taps` - 1 tokens of the past and x together, for a later piece of the sequence.

    Args:
        starts_BS: as above. Tokens of documents before the last one become 0.
    """
    kept = with_past(x_BSC, past_BKC, taps)[:, x_BSC.shape[1] :]
    if starts_BS is None:
        return kept
    places = torch.arange(x_BSC.shape[1] - taps + 1, x_BSC.shape[1], device=x_BSC.device)
    return kept * (places >= starts_BS[:, -1:]).unsqueeze(-1)


def with_past(x_BSC: Tensor, past_BKC: Tensor | None, taps: int) -> Tensor:
    """x behind the `taps` - 1 tokens before it, zeros where nothing came before."""
    if past_BKC is None:
        return F.pad(x_BSC, (0, 0, taps - 1, 0))
    return torch.cat([past_BKC.to(x_BSC.dtype), x_BSC], 1)


def _convolve(
    x_BSC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None, past_BKC: Tensor | None, starts_BS: Tensor | None
) -> Tensor:
    length, taps = x_BSC.shape[1], weight_C1K.shape[-1]
    padded = with_past(x_BSC, past_BKC, taps)
    if starts_BS is None:
        y = F.conv1d(padded.transpose(1, 2), weight_C1K, bias_C, groups=weight_C1K.shape[0])
        return F.silu(y).transpose(1, 2).contiguous()
    places = torch.arange(length, device=x_BSC.device)
    total: Tensor | float = 0.0 if bias_C is None else at_least_fp32(bias_C)
    for tap in range(taps):
        seen = (places - (taps - 1 - tap) >= starts_BS).unsqueeze(-1)
        total = total + at_least_fp32(padded[:, tap : tap + length]) * at_least_fp32(weight_C1K[:, 0, tap]) * seen
    return F.silu(torch.as_tensor(total)).to(x_BSC.dtype)


class _OnCPU(torch.autograd.Function):
    """The convolution of samples without documents. Its gradient takes a third of the time of torch's own."""

    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None, past_BKC: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_BSC, weight_C1K, bias_C, past_BKC)
        return F.silu(_products(with_past(x_BSC, past_BKC, weight_C1K.shape[-1]), weight_C1K, bias_C))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y_BSC: Tensor) -> tuple[Tensor | None, ...]:
        x_BSC, weight_C1K, bias_C, past_BKC = ctx.saved_tensors
        length, taps = x_BSC.shape[1], weight_C1K.shape[-1]
        padded = with_past(x_BSC, past_BKC, taps)
        y = _products(padded, weight_C1K, bias_C)
        of_y = torch.ops.aten.silu_backward(of_y_BSC.contiguous(), y)
        of_padded = _products(F.pad(of_y, (0, 0, taps - 1, taps - 1)), weight_C1K.flip(-1), None)
        wide = at_least_fp32(of_y)
        of_weight = torch.stack(
            [(wide * padded[:, tap : tap + length]).sum((0, 1)) for tap in range(taps)], -1
        ).unsqueeze(1)
        of_bias = None if bias_C is None else wide.sum((0, 1)).to(bias_C.dtype)
        of_past = None if past_BKC is None else of_padded[:, : taps - 1].to(past_BKC.dtype)
        return of_padded[:, taps - 1 :], of_weight.to(weight_C1K.dtype), of_bias, of_past


def _products(padded_BSC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None) -> Tensor:
    """Every tap's product with its token, summed, [B, S - K + 1, C] in memory."""
    # with a height of one this layout is "channels last" to torch, which needs no transposed copies then
    y = F.conv2d(padded_BSC.transpose(1, 2).unsqueeze(2), weight_C1K.unsqueeze(2), bias_C, groups=weight_C1K.shape[0])
    return y.squeeze(2).transpose(1, 2).contiguous()


class Taps(nn.Module):
    """Weights [channels, 1, K] and biases of a causal convolution of each channel, with the start of torch's Conv1d.

    Args:
        parts: numbers of channels of the fused convolutions. Each is cut over the ranks.
        shard: False keeps all channels on every rank. Each rank uses some of them.
    """

    def __init__(
        self, make: ParameterFactory, parts: tuple[int, ...], options: RecurrentOptions, *, shard: bool = True
    ):
        super().__init__()
        self.axis = None if shard else make.mesh.tensor
        cut, init = Shard(0, parts) if shard else None, Init("uniform", options.convolution**-0.5)
        self.weight = make.parameter(
            "weight", (sum(parts), 1, options.convolution), role=Role.CONVOLUTION, init=init, shard=cut
        )
        self.bias = None
        if options.convolution_bias:
            self.bias = make.parameter("bias", (sum(parts),), role=Role.BIAS, init=init, shard=cut)

    def taps(self) -> tuple[Tensor, Tensor | None]:
        if self.axis is None:
            return self.weight, self.bias
        return sum_gradient(self.weight, self.axis), None if self.bias is None else sum_gradient(self.bias, self.axis)


def of_causal_conv1d(
    x_BSC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None, past_BKC: None = None, starts_BS: Tensor | None = None
) -> Tensor:
    """See `causal_convolution`."""
    if not (installed("causal_conv1d") and 2 <= weight_C1K.shape[-1] <= 4 and x_BSC.shape[-1] % 8 == 0):
        return causal_convolution(x_BSC, weight_C1K, bias_C, None, starts_BS)
    from causal_conv1d import causal_conv1d_fn

    y_BCS = causal_conv1d_fn(
        x_BSC.transpose(1, 2), weight_C1K.squeeze(1), bias_C, seq_idx=sequences(starts_BS), activation="silu"
    )
    return y_BCS.transpose(1, 2)


def of_fla(
    x_BSC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None, past_BKC: None = None, starts_BS: Tensor | None = None
) -> Tensor:
    """See `causal_convolution`."""
    from fla.modules.causal_conv1d import causal_conv1d

    x, bounds = x_BSC, None
    if starts_BS is not None:  # documents of all samples one after another, as one sample
        x, bounds = x_BSC.flatten(0, 1).unsqueeze(0), document_bounds(starts_BS)
    y, _ = causal_conv1d(x, weight_C1K.squeeze(1), bias_C, activation="silu", cu_seqlens=bounds)
    return y.view(x_BSC.shape)


def sequences(starts_BS: Tensor | None) -> Tensor | None:
    """Numbers of documents: tokens are of one document where their starts are equal."""
    return None if starts_BS is None else starts_BS.to(torch.int32)


CONVOLUTIONS: Mapping[str, Callable[..., Tensor]] = {
    "torch": causal_convolution,
    "mamba_ssm": of_causal_conv1d,
    "fla": of_fla,
}
