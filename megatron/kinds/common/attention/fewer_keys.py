"""Ways to read fewer keys or values of the tokens after a prompt: Loki and SiftAttention.

Prompts are read with full attention. Each token after them is computed by itself, so its result does not depend on the
other tokens of a pass.

Shapes: R tokens, n query heads, m key/value heads with g queries each, D and E channels of a key and of a value.
Whole pages have L places, and k of them are read."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.parallel.layout.precision import at_least_fp32

NEVER = float("-inf")


@dataclass(frozen=True)
class RowGroup:
    """Tokens after prompts whose texts have the same number of pages up to them.

    Attributes:
        rows, places, slots, steps: int64 [R], numbers in the pass, positions, slots of their texts, and numbers of the
            tokens after their prompts, from 1.
        pages: int64 [R, pages].
    """

    rows: Tensor
    places: Tensor
    slots: Tensor
    steps: Tensor
    pages: Tensor


@dataclass
class Reads:
    """Numbers that were read for tokens after prompts, in all layers.

    Attributes:
        read, full: numbers of keys and values, and of full attention. Each query head reads its own choice.
        recall: sum over tokens and heads of the share of the exact largest logits that were chosen, with `measures`.
        dropped: sum of the probability that was not read.
        heads: number of (token, head) in these sums.
        measures: whether these numbers are computed. Recall and dropped probability take all keys.
    """

    read: int = 0
    full: int = 0
    recall: float = 0.0
    dropped: float = 0.0
    heads: int = 0
    measures: bool = False


class Reading:
    """How a layer reads its keys and values."""

    def turned(self, x_TnD: Tensor) -> Tensor:
        """Queries or keys in the basis in which keys are kept."""
        return x_TnD

    def attend(self, q_RnD: Tensor, keys: Tensor, values: Tensor, group: RowGroup, scale: float) -> Tensor:
        """Attention [R, n, E] of tokens after prompts. `keys` and `values` are all pages, [pages, m, PAGE, D or E]."""
        raise AssertionError("calibration reads prompts")

    def see(self, k_TmD: Tensor) -> None:
        """Get the keys of a pass."""


def _of_pages(pool: Tensor, group: RowGroup) -> Tensor:
    """[R, m, 1, L, D]."""
    return pool[group.pages].transpose(1, 2).flatten(2, 3).unsqueeze(2)


def _logits(q_RmgD: Tensor, k_Rm1LD: Tensor, places_R: Tensor, scale: float) -> Tensor:
    """[R, m, g, L], -inf behind the token."""
    logits = at_least_fp32((q_RmgD.unsqueeze(-2) @ k_Rm1LD.transpose(-1, -2)).squeeze(-2)) * scale
    behind = torch.arange(logits.shape[-1], device=logits.device) > places_R.view(-1, 1, 1, 1)
    return logits.masked_fill(behind, NEVER)


@dataclass
class Moments(Reading):
    """Sums of keys and of their products, for the principal components of each key/value head. Attention is full."""

    count: int = 0
    first: Tensor | None = None
    second: Tensor | None = None

    def see(self, k_TmD: Tensor) -> None:
        k_mTD = k_TmD.double().transpose(0, 1)
        first, second = k_mTD.sum(1), k_mTD.transpose(1, 2) @ k_mTD
        self.first = first if self.first is None else self.first + first
        self.second = second if self.second is None else self.second + second
        self.count += len(k_TmD)

    def components(self) -> tuple[Tensor, Tensor]:
        """Principal components [m, D, D] as columns, the largest variance first, and the variances [m, D]."""
        assert self.first is not None and self.second is not None
        mean = self.first / self.count
        covariance = self.second / self.count - mean.unsqueeze(2) * mean.unsqueeze(1)
        variances, vectors = torch.linalg.eigh(covariance)
        return vectors.flip(-1), variances.flip(-1).clamp(min=0)


@dataclass
class Loki(Reading):
    """Loki (Singhania et al. 2024): keys are chosen by their first principal components, and then read whole.

    Keys are kept in the basis of their principal components, which changes no product of a query and a key."""

    basis: Tensor  # [m, D, D], components as columns
    rank: int  # components by which keys are chosen
    keys: float | int  # number of places that are read, or below 1 (or as 1.0) their share of the places in whole pages
    reads: Reads = field(default_factory=Reads)

    def turned(self, x_TnD: Tensor) -> Tensor:
        basis = self.basis.to(x_TnD).repeat_interleave(x_TnD.shape[1] // len(self.basis), 0)
        return (x_TnD.transpose(0, 1) @ basis).transpose(0, 1)

    def count(self, length: int) -> int:
        """Number of places that a head reads among the `length` of whole pages."""
        asked = self.keys if isinstance(self.keys, int) else -int(-self.keys * length // 1)
        return max(1, min(asked, length))

    def attend(self, q_RnD: Tensor, keys: Tensor, values: Tensor, group: RowGroup, scale: float) -> Tensor:
        page, m = keys.shape[2], keys.shape[1]
        length, places = group.pages.shape[1] * page, group.places
        q_RmgD, count = q_RnD.unflatten(1, (m, -1)), self.count(length)
        index = _of_pages(keys[..., : self.rank], group)
        guess = _logits(q_RmgD[..., : self.rank], index, places, scale)
        chosen_Rmgk = guess.topk(count, dim=-1).indices.sort(dim=-1).values
        where = group.pages.gather(1, (chosen_Rmgk // page).flatten(1)).view_as(chosen_Rmgk)
        head = torch.arange(m, device=keys.device).view(1, m, 1, 1)
        own_k, own_v = (pool[where, head, chosen_Rmgk % page] for pool in (keys, values))  # [R, m, g, k, D or E]
        logits = at_least_fp32((q_RmgD.unsqueeze(-2) @ own_k.transpose(-1, -2)).squeeze(-2)) * scale
        logits = logits.masked_fill(chosen_Rmgk > places.view(-1, 1, 1, 1), NEVER)
        y = (logits.softmax(-1).to(own_v.dtype).unsqueeze(-2) @ own_v).squeeze(-2)
        self._note(q_RmgD, keys, group, scale, chosen_Rmgk, values.shape[-1])
        return y.flatten(1, 2)

    def _note(
        self, q_RmgD: Tensor, keys: Tensor, group: RowGroup, scale: float, chosen_Rmgk: Tensor, channels: int
    ) -> None:
        R, m, g, D = q_RmgD.shape
        count, length, reads = chosen_Rmgk.shape[-1], group.pages.shape[1] * keys.shape[2], self.reads
        if not reads.measures:
            return
        reads.read += R * m * (length * self.rank + g * count * (D + channels))
        reads.full += R * m * length * (D + channels)
        logits = _logits(q_RmgD, _of_pages(keys, group), group.places, scale)
        best, seen = logits.topk(count, dim=-1).indices, torch.zeros_like(logits, dtype=torch.bool)
        seen.scatter_(-1, chosen_Rmgk, True)
        real = logits.gather(-1, best) > NEVER
        hits = (seen.gather(-1, best) & real).sum(-1) / real.sum(-1)
        reads.recall += float(hits.sum())
        reads.dropped += float(logits.softmax(-1).masked_fill(seen, 0).sum())
        reads.heads += R * m * g


@dataclass
class Sift(Reading):
    """SiftAttention: values are read only where probabilities reach a threshold, which a power law predicts.

    The `quantile` of a head's probabilities is noted at each of the first `warmup` tokens after a prompt, with full
    attention. Later the threshold is a * step^-b, by least squares of the logarithms. The likeliest and the newest
    place are always read. All keys are read."""

    quantile: float
    warmup: int
    renormalise: bool = True  # whether the probabilities that are read are divided by their sum
    reads: Reads = field(default_factory=Reads)
    noted: Tensor | None = None  # the quantiles, [slots, m, g, warmup] in fp64

    def attend(self, q_RnD: Tensor, keys: Tensor, values: Tensor, group: RowGroup, scale: float) -> Tensor:
        q_RmgD = q_RnD.unflatten(1, (keys.shape[1], -1))
        probabilities = _logits(q_RmgD, _of_pages(keys, group), group.places, scale).softmax(-1)
        levels_Rmg = self._levels(probabilities, group)
        kept = probabilities >= levels_Rmg.unsqueeze(-1)
        kept.scatter_(-1, probabilities.argmax(-1, keepdim=True), True)
        kept.scatter_(-1, group.places.view(-1, 1, 1, 1).expand(*kept.shape[:3], 1), True)
        kept &= torch.arange(kept.shape[-1], device=kept.device) <= group.places.view(-1, 1, 1, 1)
        own = probabilities.masked_fill(~kept, 0)
        total = own.sum(-1, keepdim=True)
        self._note(kept, total, keys, values)
        if self.renormalise:
            own = torch.where(levels_Rmg.unsqueeze(-1) > 0, own / total, own)
        values_Rm1LE = _of_pages(values, group)
        return (own.to(values.dtype).unsqueeze(-2) @ values_Rm1LE).squeeze(-2).flatten(1, 2)

    def _levels(self, probabilities: Tensor, group: RowGroup) -> Tensor:
        """The threshold of each head, [R, m, g]. 0 reads all values."""
        slots, steps = group.slots, group.steps
        self._grow(int(slots.max()) + 1, probabilities)
        assert self.noted is not None
        early = steps <= self.warmup
        if early.any():
            found = quantiles(probabilities[early], group.places[early] + 1, self.quantile)
            self.noted[slots[early], :, :, steps[early] - 1] = found.double()
        a, b = power_law(self.noted[slots])
        levels = a * steps.view(-1, 1, 1).double() ** -b
        everything = early.view(-1, 1, 1) | (self.quantile == 0)
        return levels.masked_fill(everything, 0).to(probabilities.dtype)

    def _grow(self, slots: int, like: Tensor) -> None:
        held = 0 if self.noted is None else len(self.noted)
        if slots > held:
            new = torch.ones(
                max(slots, 2 * held), *like.shape[1:3], self.warmup, dtype=torch.float64, device=like.device
            )
            if self.noted is not None:
                new[:held] = self.noted
            self.noted = new

    def _note(self, kept: Tensor, total: Tensor, keys: Tensor, values: Tensor) -> None:
        R, m, g, length = kept.shape
        D, E, reads = keys.shape[-1], values.shape[-1], self.reads
        if not reads.measures:  # on a GPU the host would wait for the count
            return
        reads.read += R * m * length * D + int(kept.sum()) * E
        reads.full += R * m * length * (D + E)
        reads.dropped += float((1 - total).sum())
        reads.heads += R * m * g


def quantiles(probabilities_RmgL: Tensor, lengths_R: Tensor, quantile: float) -> Tensor:
    """The quantile of each head's first `lengths` probabilities, by linear interpolation, [R, m, g].

    At least the smallest normal number, which has a logarithm."""
    places = torch.arange(probabilities_RmgL.shape[-1], device=lengths_R.device)
    behind = places >= lengths_R.view(-1, 1, 1, 1)
    ordered = probabilities_RmgL.masked_fill(behind, float("inf")).sort(dim=-1).values
    at = (quantile * (lengths_R - 1).double()).view(-1, 1, 1, 1).expand(*ordered.shape[:3], 1)
    low, high = (ordered.gather(-1, each.long()).double() for each in (at.floor(), at.ceil()))
    found = (low + (at - at.floor()) * (high - low)).squeeze(-1)
    return found.clamp(min=torch.finfo(probabilities_RmgL.dtype).tiny)


def power_law(levels: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) of a * i^-b for i = 1 ... w, by least squares of the logarithms of `levels` [..., w]."""
    x = torch.arange(1, levels.shape[-1] + 1, device=levels.device, dtype=levels.dtype).log()
    y = levels.log()
    slope = ((x - x.mean()) * (y - y.mean(-1, keepdim=True))).sum(-1) / ((x - x.mean()) ** 2).sum()
    return (y.mean(-1) - slope * x.mean()).exp(), -slope
