"""The entropy of attention's probabilities, measured separately from the computation.

Shapes: B samples, n query heads, m key/value heads (m divides n), s positions of this rank, S of the whole sequence, D
channels."""

from functools import partial

import torch
from torch import Tensor

from megatron.model.logit_clip import ROWS
from megatron.model.stream import Stream
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layout.precision import at_least_fp32, to_device

from .pattern import Pattern


class AttentionEntropy:
    """Sum of the entropies of one attention layer, while active.

    The entropy of a query's probabilities over the keys that it sees is -sum p log p, in nats: 0 for one key, log k for
    k equal keys. A sink counts as a key. Dropout is not applied.

    Attributes:
        active: whether forward passes of training are measured.
        count: number of measured queries, over samples and heads.
    """

    def __init__(self) -> None:
        self.active = False
        self._sums: list[Tensor] = []
        self.count = 0

    def begin(self) -> None:
        self.active, self._sums, self.count = True, [], 0
        # only here: it imports the compiler
        self.see = torch.compiler.disable(partial(AttentionEntropy.see, self))  # type: ignore[method-assign]

    def finish(self) -> tuple[Tensor | float, int]:
        """The sum and the number since `begin`."""
        self.active = False
        return torch.stack(self._sums).sum() if self._sums else 0.0, self.count

    @torch.no_grad()
    def see(
        self, q: Tensor, k: Tensor, pattern: Pattern, stream: Stream, group: ContextGroup, sinks_n: Tensor | None = None
    ) -> None:
        """Measure a forward pass. All ranks that share the sequence call it.

        Args:
            q: [B, n, s, D], k: [B, m, s, D].
            stream: has the documents of these tokens.
            sinks_n: a logit of each head that takes its share of the softmax.
        """
        documents, places = stream.documents, group.places(q.shape[2], q.device)
        whole = documents
        if group.size > 1:
            k = group.gather(k.transpose(1, 2)).transpose(1, 2)
            whole = None if documents is None else group.gather_numbers(documents)
        found = q.new_zeros((), dtype=torch.float64)
        for first in range(0, q.shape[2], ROWS):
            part = slice(first, first + ROWS)
            logits = _logits(q[:, :, part], k, pattern, places[part])
            if documents is not None and whole is not None:
                other = documents[:, part, None] != whole[:, None, :]
                logits = logits.masked_fill(other[:, None], -torch.inf)
            if sinks_n is not None:
                sinks = at_least_fp32(sinks_n).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
                logits = torch.cat([logits, sinks], -1)
            logs = logits.log_softmax(-1)
            found -= torch.where(logs > -torch.inf, logs.exp() * logs, 0.0).sum(dtype=torch.float64)
        self._sums.append(found)  # added later: selective recomputation must find the same operations each time
        self.count += q.shape[0] * q.shape[1] * q.shape[2]


def _logits(q: Tensor, k: Tensor, pattern: Pattern, places: Tensor) -> Tensor:
    """[B, n, Q, S] of queries at these places to all keys, in fp32 at least, -inf where masked."""
    keys = k.shape[1]
    grouped = q.unflatten(1, (keys, q.shape[1] // keys))
    logits = at_least_fp32(grouped @ k[:, :, None].transpose(-1, -2)).flatten(1, 2) * pattern.scale
    if pattern.softcap:
        logits = pattern.softcap * torch.tanh(logits / pattern.softcap)
    before = places[:, None] - torch.arange(k.shape[2], device=k.device)
    if pattern.slopes is not None:
        slopes = to_device(torch.tensor(pattern.slopes, dtype=logits.dtype), k.device).view(1, -1, 1, 1)
        logits = logits - slopes * before
    hidden = before < 0
    if pattern.window is not None:
        hidden = hidden | (before >= pattern.window)
    return logits.masked_fill(hidden, -torch.inf)
