"""Continuations by a model that this process has."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.kinds.common.attention.fewer_keys import Reading
from megatron.model.stack import Model
from megatron.parallel.layout.mesh import ALONE, Axis

from .covered import obstacle
from .decoder import Decoder, ReadsOn, WholeModel, largest_of
from .sampling import Sampling, choose_tokens
from .schedule import Request


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
    """Continue prompts of equal length, one token [B] at a time, where the decoder cannot.

    It cannot on ranks that share the keys of a text, with a tolerance, with a class of transformers, or without states.

    Args:
        prompt_BS: int64 [B, S], S at least 1.
        vocabulary: only ids below it are chosen. The embedding may have more rows than the tokenizer has ids.
        cache: False reads the whole text again for each token. The result is the same, slower.
        depth: passes through a recurrent core. Default: as in evaluation.
        tolerance: end earlier when a pass changes the newest token's state by at most this share. All tokens of the
            text then have the passes of the newest, so the text is read again for each.
        axis: ranks that share the keys of the texts. Each has the whole model and calls this with the same arguments.
    """
    was_training, own, text = model.training, model.plan.depth, prompt_BS
    model.eval()
    try:
        with nullcontext() if own is None else own.at(depth, tolerance):
            state = model.new_state(axis) if cache and tolerance is None else None
            logits = model.logits(text) if state is None else model.decode(text, state, 0)
            for _ in range(tokens):
                places = [text.shape[1]] * len(text)
                following, _ = choose_tokens(logits[:, -1, :vocabulary], sampling, range(len(text)), places)
                yield following
                text, newest = torch.cat([text, following.unsqueeze(1)], dim=1), following.unsqueeze(1)
                logits = model.logits(text) if state is None else model.decode(newest, state, places[0])
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
    reading: Callable[[int], Reading] | None = None,
) -> Iterator[int]:
    """The tokens that follow one prompt, up to `tokens`, the end-of-document token, or the last learned position.

    The other arguments are as in `generate`, and `reading` as of `Decoder`."""
    tokens = int(min(tokens, tokens_left(model, len(prompt))))
    if tokens < 1:
        return
    if covers(model) and cache and tolerance is None and axis.size == 1:
        made = _decoded(model, prompt, tokens, sampling, vocabulary, device, depth, reading)
    else:
        text = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
        how: dict[str, Any] = {"cache": cache, "depth": depth, "tolerance": tolerance, "axis": axis}
        made = map(int, generate(model, text, tokens, sampling, vocabulary=vocabulary, **how))
    for token in made:
        if token == end:
            return
        yield token


def covers(model: Model) -> bool:
    """Whether the decoder can read this model, which is whole here."""
    return obstacle(model.plan.config) is None


def _decoded(
    model: Model,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    vocabulary: int | None,
    device: torch.device | str,
    depth: int | None,
    reading: Callable[[int], Reading] | None,
) -> Iterator[int]:
    was_training, own = model.training, model.plan.depth
    try:
        with nullcontext() if own is None else own.at(depth):
            decoder = Decoder(WholeModel(model), device, rows=1, vocabulary=vocabulary, reading=reading)
            live = decoder.begin([Request(tuple(prompt), tokens, sampling=sampling)])[0]
            shown = 0
            while decoder.step():
                yield from live.drawn.tokens[shown:]
                shown = len(live.drawn.tokens)
    finally:
        model.train(was_training)


def continuations(
    engine: ReadsOn,
    requests: Sequence[Request],
    *,
    vocabulary: int | None = None,
    device: torch.device | str = "cpu",
    axis: Axis = ALONE,
    stages: Axis = ALONE,
    reading: Callable[[int], Reading] | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, without a last `Request.end`: together where the decoder reads the model.

    Args:
        engine: one that is no `WholeModel` must have a model that the decoder reads (`obstacle`).
        axis: ranks that call this with the same requests, and exchange tokens with each other's experts. Texts of one
            may end earlier by rounding.
        stages, reading: as in `Decoder`.
    """
    longest = _longest(engine)
    found: list[list[int]] = [[] for _ in requests]
    able = {
        number: replace(each, tokens=int(min(each.tokens, longest - len(each.prompt))))
        for number, each in enumerate(requests)
        if longest > len(each.prompt)
    }
    if obstacle(engine.config) is None:
        agree = partial(largest_of, axis, device)
        decoder = Decoder(engine, device, vocabulary=vocabulary, agree=agree, stages=stages, reading=reading)
        for number, drawn in zip(able, decoder.run(list(able.values()))):
            found[number] = drawn.tokens
    else:
        assert isinstance(engine, WholeModel)
        for number, each in able.items():
            how: dict[str, Any] = {"end": each.end, "vocabulary": vocabulary, "device": device}
            found[number] = list(complete(engine.model, each.prompt, each.tokens, each.sampling, **how))
    return [ids[:-1] if ids and ids[-1] == each.end else ids for ids, each in zip(found, requests)]


def _longest(engine: ReadsOn) -> float:
    """Tokens of the longest text."""
    if isinstance(engine, WholeModel):
        return tokens_left(engine.model, 0)
    embedding = engine.config.model.embedding
    return embedding.max_positions if embedding.position == "learned" else math.inf
