"""Products of decays over parts of a chunk of the sequence, for recurrences computed chunk by chunk.

Shapes: B samples, c chunks of Q positions, h heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decays(rate_BcQh: Tensor, starts_BS: Tensor | None, room: int, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products of decays from one position to another, in the rates' type.

    Sums of rates are float64: a difference of two large sums must keep the digits of a short stretch.

    Returns:
        inside [B, c, h, Q, Q] from the column to the row, to_end [B, c, Q, h], from_begin [B, c, Q, h] of the state
        before the chunk, through [B, c, h] the whole chunk.
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
    total = total.transpose(2, 3)
    inside = total.unsqueeze(-1) - total.unsqueeze(-2)
    inside = inside.to(rate_BcQh.dtype).masked_fill(~causal, float("-inf")).exp()
    return inside, to_end, from_begin, through
