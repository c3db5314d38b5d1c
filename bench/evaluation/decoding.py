"""Measure the continuation of mixed requests, and compare three ways of transformers.

    OMP_NUM_THREADS=1 python -m bench decoding --shape llama-14m --clock cpu

All have the same weights in fp32 and continue the same prompts greedily, in turns, in one process. The ways are
continuous batching, `generate` of each prompt, and `generate` of a padded batch. A fourth of the prompts share their
first half. At least nine of ten continuations must be equal.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from bench.runner import Result, compare, comparison, in_turns, share, timed
from bench.step.contenders import has, twin
from bench.step.setup import SHAPES, Setup, configuration

Prompts = list[list[int]]
TIES = 0.1  # share of continuations that may differ, since rounding chooses between equally likely tokens


def prompts_of(count: int, vocabulary: int) -> tuple[Prompts, list[int]]:
    """Prompts of 4 to 120 tokens, and the number of tokens that follow each, 4 to 32."""
    import torch

    draw = torch.Generator().manual_seed(0)

    def some(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=draw))

    shared = torch.randint(vocabulary, (64,), generator=draw).tolist()
    made = [torch.randint(vocabulary, (some(4, 120),), generator=draw).tolist() for _ in range(count)]
    for number in range(0, count, 4):
        made[number] = [*shared, *made[number][:56]]
    return made, [some(4, 32) for _ in range(count)]


def ours(model: Any, prompts: Prompts, tokens: list[int]) -> list[list[int]]:
    from megatron.decoding.decoder import Decoder, WholeModel
    from megatron.decoding.schedule import Request

    asked = [Request(tuple(prompt), count) for prompt, count in zip(prompts, tokens)]
    return [each.tokens for each in Decoder(WholeModel(model), "cpu").run(asked)]


def one_by_one(model: Any, prompts: Prompts, tokens: list[int]) -> list[list[int]]:
    import torch

    found = []
    for prompt, count in zip(prompts, tokens):
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(made[0, len(prompt) :].tolist())
    return found


def padded(model: Any, prompts: Prompts, tokens: list[int]) -> list[list[int]]:
    """All in one batch, padded on the left, until the longest has ended."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
    seen = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    made = model.generate(
        ids, attention_mask=seen, max_new_tokens=max(tokens), do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [row[width : width + count].tolist() for row, count in zip(made, tokens)]


def continuous(model: Any, prompts: Prompts, tokens: list[int]) -> list[list[int]]:
    """Requests join and leave. They stop by a common length, so the longest is asked for."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    how = GenerationConfig(max_new_tokens=max(tokens), do_sample=False, eos_token_id=-1, pad_token_id=0)
    own = ContinuousBatchingConfig(num_blocks=64, page_size=256, max_batch_tokens=512, use_cuda_graph=False)
    with model.continuous_batching_context_manager(
        generation_config=how, continuous_batching_config=own, block=True, warmup=False
    ) as manager:
        names = [manager.add_request(prompt, max_new_tokens=count) for prompt, count in zip(prompts, tokens)]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' thread has ended without all results")
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
    return [found[name] for name in names]


def measure(given: argparse.Namespace) -> Result:
    """Raises RuntimeError where the sides do not agree."""
    import torch

    from megatron.model.stack import build_model

    setup = Setup(given.shape, given.sequence, 1, vocabulary=given.vocabulary)
    config = configuration(setup)
    mine, theirs = build_model(config, dtype=torch.float32).eval(), twin(config).float().eval()
    prompts, tokens = prompts_of(given.requests, config.model.vocab_size)
    sides = {
        "ours": functools.partial(ours, mine),
        "continuous batching": functools.partial(continuous, theirs),
        "generate, one by one": functools.partial(one_by_one, theirs),
        "generate, padded": functools.partial(padded, theirs),
    }
    first = {name: side(prompts, tokens) for name, side in sides.items()}  # not counted
    for name, found in first.items():
        apart = sum(one != other for one, other in zip(found, first["ours"]))
        if apart > len(found) * TIES:
            raise RuntimeError(f"{name}: {apart} of {len(found)} continuations are not ours")
    ways: dict[str, Callable[[], float]] = {
        name: functools.partial(timed, side, given.clock, prompts, tokens) for name, side in sides.items()
    }
    what = f"continue {len(prompts)} prompts, {given.shape}, fp32"
    return comparison(compare(what, "tokens/s", in_turns(ways, given.rounds), sum(tokens)))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=[each for each in SHAPES if has("eager", each)], default="llama-14m")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=2048)
    share(parser, "--sequence", "--rounds", "--clock", rounds=3)
