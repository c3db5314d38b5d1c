#!/usr/bin/env python
"""Find the sequence length from which Mamba-2 or RWKV-7 is faster than attention.

    OMP_NUM_THREADS=1 python tools/bench/crossover.py --hidden 128 512 --clock cpu

Models of about equal parameters per layer group: a block of attention and mlp, two of Mamba-2, a block of RWKV-7 and
its channel mix. Forward and backward of all tokens of a step, which are the same number for every length; the
vocabulary is small, because embedding and head are the same for all. One process, kinds in turn, medians of
neighbouring rounds.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import math  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    import torch

    from megatron.model.stack import Model

KINDS = {"attention": "(attention/mlp) x{}", "mamba2": "(mamba2 x2) x{}", "rwkv7": "(rwkv7/rwkv7_ffn) x{}"}
VOCABULARY, HEAD = 512, 64
Clock = Callable[[], float]


def model_of(kind: str, hidden: int, blocks: int, length: int) -> tuple[Model, int]:
    """A model in training mode, with the parameters of its layers that are no embedding or head."""
    from megatron.config import resolve
    from megatron.model.costs.describe import totals
    from megatron.model.stack import build_model

    heads = max(2, hidden // HEAD)
    config = resolve({
        "model": {
            "layers": KINDS[kind].format(blocks),
            "hidden_size": hidden,
            "vocab_size": VOCABULARY,
            "norm": {"type": "layernorm", "bias": True},
            "embedding": {"tied": False},
            "attention": {"heads": heads},
            "rwkv7": {"head_dim": hidden // heads},
            "mamba2": {"head_dim": hidden // heads},
            "mlp": {"hidden_size": 4 * hidden, "gated": False, "activation": "gelu"},
        },
        "training": {"steps": 1, "sequence_length": length},
        "precision": {"compute": "fp32"},
    })
    return build_model(config), totals(config).parameters - 2 * VOCABULARY * hidden


def seconds(model: Model, tokens: torch.Tensor, now: Clock) -> float:
    """Of one forward and backward pass."""
    import torch

    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    begin = now()
    model(inputs, labels, torch.ones(labels.shape))[0].backward()
    return now() - begin


def measure(
    hidden: int, blocks: int, lengths: list[int], tokens: int, rounds: int, now: Clock
) -> dict[int, dict[str, float]]:
    """By length and kind: median tokens per second ("attention"), or how many times those of attention."""
    import torch

    found, models = {}, {kind: model_of(kind, hidden, blocks, lengths[0]) for kind in KINDS}
    print(
        f"width {hidden}: " + ", ".join(f"{kind} {size:,} parameters" for kind, (_, size) in models.items()), flush=True
    )
    for length in lengths:
        batch = torch.randint(VOCABULARY, (max(1, tokens // length), length + 1))
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind, (model, _) in models.items():
                once = seconds(model, batch, now)
                if number > 0:
                    times[kind].append(once)
        found[length] = {
            kind: statistics.median(theirs / own for theirs, own in zip(times["attention"], times[kind]))
            for kind in KINDS
        }
        found[length]["attention"] = batch[:, 1:].numel() / statistics.median(times["attention"])
    return found


def crossover(ratios: dict[int, float]) -> float | None:
    """The length at which the ratio of speeds passes 1 for good, between measured ones on logarithmic scales.

    None: it is below 1 at the longest; 0: it is above 1 at all.
    """
    lengths = sorted(ratios)
    if ratios[lengths[-1]] < 1:
        return None
    below = [length for length in lengths if ratios[length] < 1]
    if not below:
        return 0
    low, high = below[-1], lengths[lengths.index(below[-1]) + 1]
    share = -math.log(ratios[low]) / (math.log(ratios[high]) - math.log(ratios[low]))
    return low * (high / low) ** share


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--sequence", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=8192, help="per step, at least one sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="as of train_step.py")
    asked = parser.parse_args(given)
    now = time.process_time if asked.clock == "cpu" else time.perf_counter
    for hidden in asked.hidden:
        found = measure(hidden, asked.blocks, asked.sequence, asked.tokens, asked.rounds, now)
        print("| sequence | attention: tokens/s | mamba2 / attention | rwkv7 / attention |\n| --- | --- | --- | --- |")
        for length, row in found.items():
            print(f"| {length} | {row['attention']:,.0f} | {row['mamba2']:.2f} | {row['rwkv7']:.2f} |")
        for kind in ("mamba2", "rwkv7"):
            where = crossover({length: row[kind] for length, row in found.items()})
            said: dict[float | None, str] = {None: "slower at every length", 0: "faster at every length"}
            print(f"{kind}: {said.get(where) or f'faster from {where:,.0f} tokens on'}", flush=True)
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
