"""Text from a model: sampling with a key/value cache. Reading the whole text again gives the same logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.layout.mesh import ALONE, Axis
from megatron.parallel.layout.random import site_key, uniform

from .stack import Model


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token.

    Attributes:
        temperature: logits are divided by it. 0 takes the likeliest token.
        top_k: only the k likeliest tokens. 0 is all.
        top_p: only the smallest set of likeliest tokens whose probabilities reach p (Holtzman et al. 2020).
        seed: draws are a function of (seed, sequence number, position).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def filtered(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V] after temperature, top-k and top-p, in float64."""
    logits = logits_BV.double() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p
        kept = ordered.masked_fill(outside, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, index, kept)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def choose_token(logits_BV: Tensor, sampling: Sampling, position: int, first: int = 0) -> Tensor:
    """The next token of each sequence, int64 [B]. Equal on every rank that has the same logits.

    Args:
        position: of the token in its text.
        first: number of the first sequence, which keys its draws.
    """
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1)
    probabilities = filtered(logits_BV, sampling)
    sequences = torch.arange(first, first + logits_BV.shape[0], device=logits_BV.device)
    counter = torch.tensor([position], device=logits_BV.device)
    draw = uniform(site_key(sampling.seed, "generate"), sequences, counter).double()
    return (probabilities.cumsum(-1) <= draw).sum(-1).clamp(max=logits_BV.shape[-1] - 1)


@torch.no_grad()
def generate(
    model: Model,
    prompt_BS: Tensor,
    tokens: int,
    sampling: Sampling,
    *,
    vocabulary: int | None = None,
    cache: bool = True,
    depth: int | None = None,
    tolerance: float | None = None,
    axis: Axis = ALONE,
) -> Iterator[Tensor]:
    """Continue prompts of equal length, one token [B] at a time.

    Args:
        prompt_BS: int64 [B, S], S at least 1.
        vocabulary: only ids below it are chosen. The embedding may have more rows than the tokenizer has ids.
        cache: False reads the whole text again for each token. The result is the same, slower.
        depth: passes through a recurrent core. Default: as in evaluation.
        tolerance: end earlier when a pass changes the newest token's state by at most this share. All tokens of the
            text then have the passes of the newest, so the text is read again for each.
        axis: ranks that share the keys of the texts. Each has the whole model and calls this with the same arguments.
    """
    was_training, own = model.training, model.plan.depth
    model.eval()
    with nullcontext() if own is None else own.at(depth, tolerance):
        cached = cache and tolerance is None
        yield from _continued(model, prompt_BS, tokens, sampling, vocabulary, cached, axis, was_training)


def _continued(
    model: Model,
    prompt_BS: Tensor,
    tokens: int,
    sampling: Sampling,
    vocabulary: int | None,
    cache: bool,
    axis: Axis,
    was_training: bool,
) -> Iterator[Tensor]:
    """See `generate`."""
    try:
        state, text = model.new_state(axis), prompt_BS
        logits = (model.decode(prompt_BS, state, 0) if cache else model.logits(prompt_BS))[:, -1]
        for _ in range(tokens):
            following = choose_token(logits[:, :vocabulary], sampling, text.shape[1])
            yield following
            text = torch.cat([text, following.unsqueeze(1)], dim=1)
            if cache:
                logits = model.decode(following.unsqueeze(1), state, text.shape[1] - 1)[:, -1]
            else:
                logits = model.logits(text)[:, -1]
    finally:
        model.train(was_training)


def tokens_left(model: Model, prompt: int) -> float:
    """Tokens that can follow a prompt of this length: without end, unless positions are learned."""
    return math.inf if model.longest is None else model.longest - prompt


def complete(
    model: Model,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    *,
    end: int | None = None,
    vocabulary: int | None = None,
    device: torch.device | str = "cpu",
    cache: bool = True,
    depth: int | None = None,
    tolerance: float | None = None,
    axis: Axis = ALONE,
) -> Iterator[int]:
    """The tokens that follow one prompt, up to `tokens`, the end-of-document token, or the last learned position.

    The other arguments are as in `generate`.
    """
    text = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    tokens = int(min(tokens, tokens_left(model, len(prompt))))
    if tokens < 1:
        return
    more: dict[str, Any] = {"depth": depth, "tolerance": tolerance, "axis": axis}
    for following in generate(model, text, tokens, sampling, vocabulary=vocabulary, cache=cache, **more):
        token = int(following[0])
        if token == end:
            return
        yield token
