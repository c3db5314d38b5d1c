"""Several updates of the state per token: Gated DeltaProduct (Siems et al. 2025, arXiv 2502.10297, section 3).

The updates of a token are steps of the gated delta rule over a longer sequence, which has all of them. The state decays
before a token's first update, and is read after its last."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def steps(
    q_BSgK: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], decay: Tensor, beta_BSn: Tensor, starts_BS: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The rule's inputs, of one update after another.

    Args:
        q_BSgK: read after the last update of each token.
        k, v: of each update, [B, S, g, K] and [B, S, h, V].
        decay: [B, S, h] or [B, S, h, K], logarithms.
        beta_BSn: of all heads of the first update, then of the next.
    """
    count = len(k)
    if count == 1:
        return q_BSgK, k[0], v[0], decay, beta_BSn, starts_BS
    q = F.pad(q_BSgK.unsqueeze(2), (0, 0, 0, 0, count - 1, 0)).flatten(1, 2)
    decay = F.pad(decay.unsqueeze(2), (0, 0) * (decay.dim() - 2) + (0, count - 1)).flatten(1, 2)
    keys, values = (torch.stack(list(each), 2).flatten(1, 2) for each in (k, v))
    beta = beta_BSn.unflatten(-1, (count, -1)).flatten(1, 2)
    starts = None if starts_BS is None else (starts_BS * count).repeat_interleave(count, 1)
    return q, keys, values, decay, beta, starts


def read(y_BShV: Tensor, count: int) -> Tensor:
    """The results of each token's last update."""
    return y_BShV if count == 1 else y_BShV[:, count - 1 :: count].contiguous()
