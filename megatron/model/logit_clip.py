"""QK-clip of MuonClip (Kimi Team 2025, arXiv 2507.20534): queries and keys shrink where their products are large."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.parallel.precision import at_least_fp32

ROWS = 1024  # queries whose products with all keys exist at one time


@torch.no_grad()
def largest_logits(
    q: Tensor, k: Tensor, scale: float, window: int | None = None, documents_BS: Tensor | None = None
) -> Tensor:
    """The largest scaled product of a query and a key that it sees, of each query head; fp32 or wider [n].

    Args:
        q: [B, n, S, D]; k: [B, m, S, D].
        window, documents_BS: see `kinds.common.attend`.
    """
    (heads, length), keys = q.shape[1:3], k.shape[1]
    q, found = q.unflatten(1, (keys, heads // keys)), []
    places = torch.arange(length, device=q.device)
    for first in range(0, length, ROWS):
        last = min(first + ROWS, length)
        begin = 0 if window is None else max(0, first - window + 1)
        rows, columns = places[first:last, None], places[begin:last]
        hidden = columns > rows
        if window is not None:
            hidden = hidden | (rows - columns >= window)
        logits = at_least_fp32(q[:, :, :, first:last] @ k[:, :, None, begin:last].transpose(-1, -2)) * scale
        if documents_BS is not None:
            other = documents_BS[:, first:last, None] != documents_BS[:, None, begin:last]
            logits = logits.masked_fill(other[:, None, None], -torch.inf)
        found.append(logits.masked_fill(hidden, -torch.inf).amax((0, 3, 4)))
    return torch.stack(found).amax(0).flatten()


@dataclass(frozen=True)
class Projection:
    """A weight or a bias of queries or keys: which of its rows, here on this rank, are heads.

    Attributes:
        skipped: rows after those of the heads, which stay.
        share: the exponent of a head's factor.
    """

    parameter: nn.Parameter
    skipped: int
    share: float


class LogitClip:
    """What one attention layer knows of its logits in a step.

    Attributes:
        threshold: tau; the largest logit of a head may be as large.
        largest: of each local query head, in this step so far.
    """

    def __init__(
        self,
        threshold: float,
        heads: int,
        head_dim: int,
        queries: list[nn.Parameter],
        keys: list[nn.Parameter] | None,
        device: torch.device | str,
    ) -> None:
        """`queries`, `keys`: weights and biases. Where `keys` is None their heads are shared by several queries, and
        only the queries shrink, so that a head does not change what another one sees; else both shrink alike."""
        self.threshold, self.head_dim = threshold, head_dim
        self.largest = torch.full((heads,), -torch.inf, device=device)
        share = 1.0 if keys is None else 0.5
        self.projections = [Projection(each, 0, share) for each in queries]
        self.projections += [Projection(each, heads * head_dim, share) for each in keys or ()]  # values come after keys

    @torch.no_grad()
    def see(self, largest_n: Tensor) -> None:
        self.largest.copy_(torch.maximum(self.largest, largest_n))

    def factors(self, largest_n: Tensor) -> Tensor:
        """gamma = min(1, tau / largest) of each head, [n]."""
        return torch.where(largest_n > self.threshold, self.threshold / largest_n, 1.0)

    def rows(self, projection: Projection, factors_n: Tensor) -> Tensor:
        """What each row of a projection's parameter is multiplied by."""
        rows = (factors_n**projection.share).repeat_interleave(self.head_dim)
        return torch.cat([rows, rows.new_ones(projection.skipped)])
