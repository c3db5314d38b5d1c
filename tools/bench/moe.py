#!/usr/bin/env python
"""Measure a training step with experts.

Ours is compared with transformers' Mixtral, and with our dense model of equal active FLOPs.

    OMP_NUM_THREADS=1 python tools/bench/moe.py --shapes small --sequence 512 --micro-batch 4 --clock cpu

Ours and Mixtral (its experts as grouped products) have the same weights, batches and recipe, and must report the same
losses and gradient norms before anything is timed; status 1 where they do not. The dense model's MLP is as wide as the
experts that a token uses together, so that it does the same matrix products per token but for the router's: what it is
faster by is the price of routing, sorting and small products. Processes, rounds and the share of matrix products as in
`train_step.py`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from tools.bench.beside import add_shares, lines  # noqa: E402
from tools.bench.contenders import Ours, Setup, Transformers, flops_per_token, recipe  # noqa: E402
from tools.bench.processor import Products  # noqa: E402
from tools.bench.train_step import CHECKED_STEPS, TOLERANCE, Mismatch, check_equal, started  # noqa: E402

if TYPE_CHECKING:
    from torch import nn

    from megatron.config import Config

VOCABULARY = 8192
SHAPES = {  # hidden size, layers, heads, experts, experts per token, width of an expert
    "tiny": (32, 2, 4, 8, 2, 32),
    "small": (256, 4, 8, 8, 2, 448),
    "medium": (768, 12, 12, 8, 2, 1344),
}


def configuration(setup: Setup, dense: bool = False) -> Config:
    """Our configuration of the setup: Mixtral's form, or its dense counterpart."""
    from megatron.config import resolve

    hidden, layers, heads, experts, top_k, width = SHAPES[setup.shape]
    feed_forward: dict[str, Any] = {
        "layers": f"(attention/moe) x{layers}",
        "moe": {
            "experts": experts,
            "top_k": top_k,
            "hidden_size": width,
            "router": {"normalize": True},
            "losses": {"balance": 0.0},  # transformers adds its own only where router logits are asked for
        },
    }
    if dense:
        feed_forward = {
            "layers": f"(attention/mlp) x{layers}",
            "mlp": {"hidden_size": top_k * width, "gated": True, "activation": "silu"},
        }
    return resolve({
        "model": {
            **feed_forward,
            "hidden_size": hidden,
            "vocab_size": setup.vocabulary,
            "norm": {"type": "rmsnorm"},
            "attention": {"heads": heads, "kv_heads": heads // 2},
            "embedding": {"tied": False},
        },
        **recipe(setup),
        "precision": {"compute": setup.compute},
    })


def mixtral(setup: Setup) -> nn.Module:
    """transformers' Mixtral with the initial values of ours."""
    import transformers

    from megatron.checkpoint.hf import convert
    from megatron.checkpoint.hf.config import hf_config
    from megatron.model.stack import build_model
    from megatron.parallel.layers.parameters import logical_of

    config = configuration(setup)
    architecture, theirs_config = hf_config(config, "mixtral")
    theirs = transformers.AutoModelForCausalLM.from_config(theirs_config)
    theirs.set_experts_implementation("grouped_mm")
    ours = {logical_of(p).name: p.detach() for p in build_model(config, dtype=theirs.dtype).parameters()}
    steps = convert.plan(architecture, ours, config.model)
    state = {}
    for name, tensor in convert.to_hf(steps, ours.__getitem__):
        if ".experts." not in name:  # in memory the experts are one tensor, as ours
            state[name.replace("block_sparse_moe", "mlp")] = tensor
    for layer in range(SHAPES[setup.shape][1]):
        for here, there in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            state[f"model.layers.{layer}.mlp.experts.{there}"] = ours[f"layers.{layer}.moe.experts.{here}.weight"]
    theirs.load_state_dict(state, strict=True)
    return theirs


def ours_dense(setup: Setup) -> Ours:
    return Ours(setup, lambda each: configuration(each, dense=True))


def ours_moe(setup: Setup) -> Ours:
    return Ours(setup, configuration)


def theirs_moe(setup: Setup) -> Transformers:
    return Transformers(setup, compiled=False, make=mixtral)


MAKERS = {"ours": ours_moe, "transformers": theirs_moe, "ours, dense": ours_dense}


def measure(setup: Setup, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds per step of each contender in each round, and on a CPU the measured peak of matrix products, FLOP/s.

    Raises:
        Mismatch: ours and Mixtral do not compute the same thing.
    """
    makers = MAKERS | ({"products": Products} if setup.device == "cpu" else {})
    with started(list(makers), setup, makers) as remotes:
        first = {remote.name: remote.run(0, CHECKED_STEPS) for remote in remotes}
        check_equal({name: first[name] for name in ("ours", "transformers")}, TOLERANCE[setup.compute])
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for number in range(rounds):
            for remote in remotes:
                answer = remote.run(CHECKED_STEPS + number * steps, steps)
                seconds[remote.name].append(answer["seconds"] / steps)
    products = seconds.pop("products", None)
    peak = None if products is None else Products.flops / statistics.median(products)
    return {"setup": setup, "seconds": seconds, "peak": peak}


def as_lines(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Of docs/performance.md."""
    setup = row["setup"]
    what = f"MoE {setup.shape}, {setup.compute}, {setup.micro_batch} x {setup.sequence} tokens"
    made = lines(what, "tokens/s", row["seconds"], setup.tokens)
    if row["peak"] is not None:
        add_shares(made, row["peak"], _flops(setup))
    return made


def _flops(setup: Setup) -> dict[str, float]:
    """Per token, of each contender."""
    sparse, dense = (flops_per_token(configuration(setup, dense=each)) for each in (False, True))
    return {"ours": sparse, "transformers": sparse, "ours, dense": dense}


def line(row: dict[str, Any]) -> str:
    """A row of the table: our tokens per second, and medians of the ratios of neighbouring rounds."""
    setup, seconds = row["setup"], row["seconds"]
    hidden, layers, _, experts, top_k, width = SHAPES[setup.shape]

    def ratio(over: str) -> float:
        return statistics.median(theirs / ours for theirs, ours in zip(seconds[over], seconds["ours"]))

    speed = setup.tokens / statistics.median(seconds["ours"])
    return (
        f"| {hidden} x {layers}, {experts} experts of {width}, top {top_k} | {setup.sequence} | {setup.micro_batch} "
        f"| {speed:,.0f} | {ratio('transformers'):.2f} | {ratio('ours, dense'):.2f} | {_share(row, speed)} |"
    )


def _share(row: dict[str, Any], speed: float) -> str:
    peak = row["peak"]
    return "" if peak is None else f"{_flops(row['setup'])['ours'] * speed / peak:.0%} of {peak / 1e9:.0f} GFLOP/s"


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["small"])
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sample")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples per step")
    parser.add_argument("--steps", type=int, default=2, help="steps of one contender in one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="as of train_step.py")
    parser.add_argument("--precision", choices=TOLERANCE, default="fp32")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    asked = parser.parse_args(given)
    made: list[dict[str, Any]] = []
    if not asked.json:
        heads = ("shape", "sequence", "micro-batch", "ours: tokens/s", "speed / transformers", "speed / dense")
        print(f"| {' | '.join((*heads, 'share of matmul peak'))} |\n{'| --- ' * (len(heads) + 1)}|")
    for shape in asked.shapes:
        setup = Setup(
            shape, asked.sequence, asked.micro_batch, asked.device, VOCABULARY, (), asked.clock, asked.precision
        )
        try:
            row = measure(setup, asked.steps, asked.rounds)
        except (Mismatch, RuntimeError) as error:
            print(f"{shape}: {error}", file=sys.stderr)
            return 1
        if asked.json:
            made += as_lines(row)
        else:
            print(line(row), flush=True)
    if asked.json:
        print(json.dumps(made))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
