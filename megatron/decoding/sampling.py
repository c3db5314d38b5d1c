"""Choice of the next token, and the texts that end a continuation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.data.tokenizer import Tokenizer
from megatron.parallel.layout.precision import exp_, numbers_on
from megatron.parallel.layout.random import site_key, uniform


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token.

    Attributes:
        temperature: logits are divided by it. 0 takes the likeliest token.
        top_k: only the k likeliest tokens. 0 is all.
        top_p: only the smallest set of likeliest tokens whose probabilities reach p (Holtzman et al. 2020). It has at
            least one token.
        seed: draws are a function of (seed, purpose, number of the text, position).

    Raises:
        ValueError: a number is outside of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    purpose: str = "generate"

    def __post_init__(self) -> None:
        for name, sound, rule in (
            ("temperature", 0 <= self.temperature < math.inf, "finite and at least 0"),
            ("top_k", self.top_k >= 0 and int(self.top_k) == self.top_k, "a whole number of at least 0"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
        ):
            if not sound:
                raise ValueError(f"{name} must be {rule}, not {getattr(self, name)!r}")


GREEDY = Sampling(temperature=0.0)


def filtered(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V] after temperature, top-k and top-p, in float64."""
    logits = logits_BV.double()
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # finite at the largest one
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(int(sampling.top_k), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p
        outside[..., 0] = False
        kept = ordered.masked_fill(outside, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, index, kept)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def choose_tokens(
    logits_BV: Tensor, sampling: Sampling, numbers: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The next token of each text, int64 [B], and its log-probability [B] before temperature and filters.

    Equal on every rank that has the same logits.

    Args:
        numbers: of the texts, which key their draws.
        positions: of the tokens in their texts.
    """
    if sampling.temperature == 0.0:
        ids_B = logits_BV.argmax(-1)
    else:
        device, key, equal = logits_BV.device, site_key(sampling.seed, sampling.purpose), len(set(positions)) == 1
        texts = numbers_on(device, numbers)
        draws = uniform(key, texts, numbers_on(device, positions[:1] if equal else positions))
        draws_B = (draws[:, 0] if equal else draws.diagonal()).double()
        below = filtered(logits_BV, sampling).cumsum(-1) <= draws_B.unsqueeze(1)
        ids_B = below.sum(-1).clamp(max=logits_BV.shape[-1] - 1)
    return ids_B, log_probabilities(logits_BV, ids_B)


def log_probabilities(logits_BV: Tensor, ids_B: Tensor) -> Tensor:
    """Log-probability of an id in each row [B], or of several [B, k], by the operations of `token_scores`, so that
    equal logits have equal bits."""
    largest_B1 = logits_BV.amax(1, keepdim=True)
    total_B1 = exp_(logits_BV - largest_B1).sum(1, keepdim=True)
    logs_Bk = logits_BV.gather(1, ids_B.view(len(ids_B), -1)) - largest_B1 - total_B1.log()
    return logs_Bk.view(ids_B.shape)


def likeliest(logits_BV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The likeliest ids of each row with their log-probabilities. Of equal ones the smallest id comes first."""
    ids_Bk = logits_BV.sort(dim=1, descending=True, stable=True).indices[:, :count]
    logs_Bk = log_probabilities(logits_BV, ids_Bk)
    return [list(zip(ids, logs)) for ids, logs in zip(ids_Bk.tolist(), logs_Bk.tolist())]


def ending(
    tokenizer: Tokenizer, stops: Sequence[str], least: int = 0, after: Sequence[int] = ()
) -> Callable[[list[int]], bool] | None:
    """Whether one of the stops is at the end of a text of these tokens. None without stops.

    Args:
        least: stops that are complete before this number of tokens do not count.
        after: last ids before the first token. Some tokenizers write a token differently at the beginning of a text.
    """
    if not stops:
        return None
    # A stop has no more tokens than bytes. A few more, so that no character is cut at the front.
    most, before = max(len(stop.encode()) for stop in stops) + 4, list(after)
    if tokenizer.decode(before).endswith("\ufffd"):
        before = []

    def ended(tokens: list[int]) -> bool:
        begin = len(tokens) - most
        ids = tokens[begin:] if begin > 0 else [*before, *tokens]
        known = least - 1 - begin if begin > 0 else len(before) + max(least - 1, 0)  # their stops do not count
        tail, early = tokenizer.decode(ids), len(tokenizer.decode(ids[:known])) if known > 0 else 0
        return any(tail.find(stop, max(early - len(stop) + 1, 0)) >= 0 for stop in stops)

    return ended
