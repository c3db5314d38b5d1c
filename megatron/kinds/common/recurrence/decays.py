"""Products of decays over parts of a chunk of the sequence, for recurrences computed chunk by chunk.

Shapes: B samples, c chunks of Q positions, h heads."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE = 16  # positions of a chunk between which products with decays of channels are written out


def decays(rate_BcQh: Tensor, starts_BS: Tensor | None, room: int, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products of decays from one position to another, in the rates' type.

    Returns:
        `inside` [B, c, h, Q, Q]: from the column to the row. `to_end` [B, c, Q, h]. `from_begin` [B, c, Q, h]: of the
        state before the chunk. `through` [B, c, h]: of the whole chunk.
    """
    total, causal, to_end, from_begin, through = stretches(rate_BcQh, starts_BS, room, chunk)
    total = total.transpose(2, 3)
    inside = total.unsqueeze(-1) - total.unsqueeze(-2)
    inside = inside.to(rate_BcQh.dtype).masked_fill(~causal, float("-inf")).exp()
    return inside, to_end, from_begin, through


def stretches(
    rate_BcQh: Tensor, starts_BS: Tensor | None, room: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sums of rates from a chunk's begin, and products of decays to its ends.

    Sums of rates are float64: a difference of two large sums must keep the digits of a short stretch.

    Returns:
        total [B, c, Q, h] float64, and causal [B, c, 1, Q, Q]: whether the row's position sees the column's of its own
        document. Then to_end, from_begin and through, as `decays` returns them.
    """
    total = rate_BcQh.double().cumsum(2)
    last = total[:, :, -1:]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).tril()[None, None, None]
    to_end, from_begin, through = (each.to(rate_BcQh.dtype).exp() for each in (last - total, total, last[:, :, 0]))
    if starts_BS is not None:
        starts = F.pad(starts_BS.double(), (0, room), mode="replicate").unflatten(1, (-1, chunk))
        first = torch.arange(starts.shape[1], device=starts.device).view(1, -1, 1) * chunk
        places = first + torch.arange(chunk, device=starts.device)
        causal = causal & (places.unsqueeze(2) >= starts.unsqueeze(3)).unsqueeze(2)
        to_end = to_end * (places >= starts[:, :, -1:]).unsqueeze(-1)
        from_begin = from_begin * (starts < first).unsqueeze(-1)
        through = through * (starts[:, :, -1] < first[:, :, 0]).unsqueeze(-1)
    return total, causal, to_end, from_begin, through


class _Product(torch.autograd.Function):
    """torch's product asks in its backward pass whether a factor is 0, and the host waits for the answer."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor) -> Tensor:
        product = factors.prod(1)
        ctx.save_for_backward(factors, product)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_product: Tensor) -> Tensor:
        factors, product = ctx.saved_tensors
        of_product, product, one = of_product.unsqueeze(1), product.unsqueeze(1), torch.ones_like(factors[:, :1])
        before = torch.cat([one, factors[:, :-1]], 1).cumprod(1)
        after = torch.cat([one, factors[:, 1:].flip(1)], 1).cumprod(1).flip(1)
        of_others = torch.where((factors == 0).any(), before * after, product / factors)
        return of_product * of_others


def chunk_product(through_Bch: Tensor) -> Tensor:
    """The product over chunks, [B, h]. Its gradient has the bits of torch's own."""
    return _Product.apply(through_Bch)


def products_by_channel(x: Tensor, y: Tensor, total: Tensor, causal: Tensor) -> Tensor:
    """Sum over channels K of x y times the channel's decay from y's position to x's, [B, c, h, Q, Q].

    Positions of one piece of the chunk are multiplied pair by pair. Between pieces the products are of matrices whose
    decays end or begin at the later piece's begin, so that no factor is above 1.

    Args:
        x, y: [B, c, h, Q, K].
        total: float64 of the same shape, sums of the logarithms of decays from the chunk's begin.
        causal: as `stretches` returns it.
    """
    rows, chunk, before = [], x.shape[-2], torch.zeros_like(total[..., :1, :])
    for at in range(0, chunk, PIECE):
        own = slice(at, at + PIECE)
        x_own, here = x[..., own, :], total[..., own, :]
        near = (here.unsqueeze(-2) - here.unsqueeze(-3)).to(x.dtype)
        near = near.masked_fill(~causal[..., own, own].unsqueeze(-1), float("-inf")).exp()
        parts = [(x_own.unsqueeze(-2) * y[..., own, :].unsqueeze(-3) * near).sum(-1)]
        if at:
            reach = x_own * (here - before).to(x.dtype).exp()
            past = y[..., :at, :] * (before - total[..., :at, :]).to(x.dtype).exp()
            parts = [reach @ past.transpose(-1, -2) * causal[..., own, :at], *parts]
        rows.append(F.pad(torch.cat(parts, -1), (0, chunk - min(at + PIECE, chunk))))
        before = here[..., -1:, :]
    return torch.cat(rows, -2)
