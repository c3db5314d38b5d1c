"""Measure a training step with experts.

Ours is compared with transformers' Mixtral, and with our dense model of equal active FLOPs.

    OMP_NUM_THREADS=1 python -m bench moe --shapes small --sequence 512 --micro-batch 4 --clock cpu

Ours and Mixtral (its experts as grouped products) have the same weights, batches and recipe. Before anything is timed,
they must report the same losses and gradient norms. The exit status is 1 where they do not. The dense model's MLP is as
wide as the experts that a token uses together. Per token it does the same matrix products, except the router's. Its
lead is the price of routing, sorting and small products. Processes, rounds and the share of matrix products as in
`train_step.py`.
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

from bench.processor import PRODUCTS, Products
from bench.runner import Result, add_shares, compare, comparison, share
from bench.step.contenders import Ours, Transformers
from bench.step.remote import CHECKED_STEPS, TOLERANCE, check_equal, rounds_of, started
from bench.step.setup import Setup, flops_per_token, recipe

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


def steps_of(given: argparse.Namespace, shape: str) -> list[dict[str, Any]]:
    """Compare a step of a shape, with the shares of the measured peak on a CPU.

    Raises:
        Mismatch: ours and Mixtral do not compute the same thing.
    """
    size = shape, given.sequence, given.micro_batch, given.device, VOCABULARY
    setup = Setup(*size, (), given.clock, given.precision)
    makers = MAKERS | ({PRODUCTS: Products} if setup.device == "cpu" else {})
    with started(list(makers), setup, makers) as remotes:
        first = {remote.name: remote.run(0, CHECKED_STEPS) for remote in remotes}
        check_equal({name: first[name] for name in ("ours", "transformers")}, TOLERANCE[setup.compute])
        seconds, _ = rounds_of(remotes, given.steps, given.rounds)
    return compared(setup, seconds)


def compared(setup: Setup, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Comparisons of seconds per step, by contender. The time of `PRODUCTS` gives the shares."""
    products = seconds.pop(PRODUCTS, None)
    what = f"MoE {setup.shape}, {setup.compute}, {setup.micro_batch} x {setup.sequence} tokens"
    made = compare(what, "tokens/s", seconds, setup.tokens)
    if products is not None:
        add_shares(made, Products.flops / statistics.median(products), _flops(setup))
    return made


def _flops(setup: Setup) -> dict[str, float]:
    """Per token, of each contender."""
    sparse, dense = (flops_per_token(configuration(setup, dense=each)) for each in (False, True))
    return {"ours": sparse, "transformers": sparse, "ours, dense": dense}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["small"])
    share(
        parser,
        "--sequence",
        "--micro-batch",
        "--steps",
        "--rounds",
        "--device",
        "--clock",
        "--precision",
        micro_batch=4,
    )


def measure(given: argparse.Namespace) -> Result:
    return comparison([row for shape in given.shapes for row in steps_of(given, shape)])
