"""Adam-mini on one process: against the authors' package."""

from __future__ import annotations

import adam_mini
import torch
from torch import nn

from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
from megatron.parallel.layout.shard import Role
from tests.engine.optimizers.test_optimizers import RATES, gradients, parameter
from tests.training.settings import settings

WIDTH, HEADS, STEP_ROWS = 6, 2, 3


def tensors() -> list[nn.Parameter]:
    """Fused queries, keys and values of two heads of three rows. Experts with gate and up, and others."""
    heads = (("query", STEP_ROWS), ("key", STEP_ROWS), ("value", STEP_ROWS))
    return [
        parameter("embedding", Role.EMBEDDING, 11, WIDTH),
        parameter("qkv", Role.HIDDEN, 18, WIDTH, matrices=(6, 6, 6), heads=heads),
        parameter("qkv.bias", Role.BIAS, 18),
        parameter("out", Role.OUTPUT, 6, WIDTH, matrices=(6,)),
        parameter("experts", Role.HIDDEN, 2, 8, WIDTH, matrices=(4, 4)),
        parameter("router", Role.ROUTER, 2, WIDTH),
        parameter("head", Role.HEAD, 11, WIDTH),
    ]


def theirs(values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors apart, by names that the package recognises."""
    embedding, qkv, bias, out, experts, router, head = values
    parts = dict(zip(("wq", "wk", "wv"), qkv.split(6)))
    each = {f"mlp.{number}": expert for number, expert in enumerate(experts)}
    return {"embed": embedding, **parts, "bias": bias, "wo": out, **each, "mlp.router": router, "lm_head": head}


def test_it_is_the_authors():
    """In fp32 on both sides, where a step's rounding is of the order of 1e-7 of the step."""
    groups = {"bias": {"weight_decay": 0.0}}
    chosen = {"betas": (0.8, 0.9), "epsilon": 1e-6, "weight_decay": 0.2, "groups": groups}
    ours = tensors()
    optimizer = build_optimizer(settings(optimizer={"type": "adam_mini", **chosen}), ours)
    copies = {name: nn.Parameter(value.clone()) for name, value in theirs([p.detach() for p in ours]).items()}
    reference = adam_mini.Adam_mini(
        copies.items(), betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, dim=WIDTH, n_heads=HEADS, verbose=False
    )
    for step, lr in enumerate(RATES):
        gradients(ours, step)
        for name, gradient in theirs([p.grad for p in ours]).items():
            copies[name].grad = gradient.clone()
        set_learning_rate(optimizer, lr)
        for group in reference.param_groups:
            group["lr"] = lr
        optimizer.step()
        reference.step()
    for name, found in theirs([p.detach() for p in ours]).items():
        torch.testing.assert_close(found, copies[name].detach(), rtol=1e-5, atol=1e-6, msg=name)
