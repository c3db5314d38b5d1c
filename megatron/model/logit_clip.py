"""QK-clip of MuonClip (Kimi Team 2025, arXiv 2507.20534): queries and keys shrink where their products are large."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.parallel.layout.precision import at_least_fp32

ROWS = 1024  # queries whose products with all keys exist at one time


@torch.no_grad()
def largest_logits(
    q: Tensor, k: Tensor, scale: float, window: int | None = None, documents_BS: Tensor | None = None
) -> Tensor:
    """The largest scaled product of a query and a key that it sees, of each query head. fp32 or wider [n].

    Args:
        q: [B, n, S, D], k: [B, m, S, D].
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
    """A weight or bias of queries or keys, and the exponent of a head's factor for each of its rows.

    Attributes:
        shares: (number of rows, exponent of the head's factor) for the rows of one head, in order. All heads of this
            rank have such rows, one head after the other.
        skipped: rows after the heads' rows, which stay.
    """

    parameter: nn.Parameter
    shares: tuple[tuple[int, float], ...]
    skipped: int = 0


class LogitClip:
    """Largest logits of one attention layer in a step.

    Attributes:
        threshold: tau, the bound of a head's largest logit.
        largest: of each local query head, in this step so far.
        projections: the parameters that shrink where a head's logits are larger.
    """

    def __init__(self, threshold: float, heads: int, projections: list[Projection], device: torch.device | str) -> None:
        self.threshold, self.projections = threshold, projections
        self.largest = torch.full((heads,), -torch.inf, device=device)

    @torch.no_grad()
    def see(self, largest_n: Tensor) -> None:
        self.largest.copy_(torch.maximum(self.largest, largest_n))

    def factors(self, largest_n: Tensor) -> Tensor:
        """gamma = min(1, tau / largest) of each head, [n]."""
        return torch.where(largest_n > self.threshold, self.threshold / largest_n, 1.0)

    def rows(self, projection: Projection, factors_n: Tensor) -> Tensor:
        """Factor of each row of a projection's parameter."""
        shares = [share for count, share in projection.shares for _ in range(count)]
        rows = (factors_n[:, None] ** factors_n.new_tensor(shares)).flatten()
        return torch.cat([rows, rows.new_ones(projection.skipped)])
