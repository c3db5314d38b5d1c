"""Find the sequence length from which Mamba-2 or RWKV-7 is faster than attention.

    OMP_NUM_THREADS=1 python -m bench crossover --hidden 128 512 --clock cpu

Models of about equal parameters per layer group: a block of attention and mlp, two of Mamba-2, a block of RWKV-7 and
its channel mix. Timed is forward and backward of all tokens of a step, the same number for every length. The vocabulary
is small, because embedding and head are the same for all. One process, kinds in turn, medians of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.runner import CLOCKS, Result, grid, share

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


def speeds(
    hidden: int, blocks: int, lengths: list[int], tokens: int, rounds: int, now: Clock
) -> tuple[dict[int, dict[str, float]], dict[str, int]]:
    """By length and kind, median tokens per second of attention, or the ratio to attention. Then parameters by kind."""
    import torch

    found, models = {}, {kind: model_of(kind, hidden, blocks, lengths[0]) for kind in KINDS}
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
    return found, {kind: size for kind, (_, size) in models.items()}


def crossover(ratios: dict[int, float]) -> float | None:
    """The length at which the ratio of speeds passes 1 for good, between measured ones on logarithmic scales.

    None: it is below 1 at the longest. 0: it is above 1 at all.
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


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--sequence", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=8192, help="per step, at least one sample")
    share(parser, "--rounds", "--clock", rounds=3)


def measure(given: argparse.Namespace) -> Result:
    found, text = {}, []
    for hidden in given.hidden:
        ratios, sizes = speeds(hidden, given.blocks, given.sequence, given.tokens, given.rounds, CLOCKS[given.clock])
        found[hidden] = ratios
        cells: list[list[Any]] = [["sequence", "attention: tokens/s", "mamba2 / attention", "rwkv7 / attention"]]
        for length, row in ratios.items():
            cells.append([length, f"{row['attention']:,.0f}", f"{row['mamba2']:.2f}", f"{row['rwkv7']:.2f}"])
        named = ", ".join(f"{kind} {size:,} parameters" for kind, size in sizes.items())
        text += [f"width {hidden}: {named}", grid(cells)]
        for kind in ("mamba2", "rwkv7"):
            where = crossover({length: row[kind] for length, row in ratios.items()})
            said: dict[float | None, str] = {None: "slower at every length", 0: "faster at every length"}
            text.append(f"{kind}: {said.get(where) or f'faster from {where:,.0f} tokens on'}")
    return Result(found, "\n".join(text))
