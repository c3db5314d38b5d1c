"""AdamW in 8 bits on one process: against torchao's optimizer."""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn
from torchao.optim import AdamW8bit

from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
from megatron.parallel.layout.shard import Role
from tests.engine.optimizers.test_optimizers import RATES, gradients, parameter
from tests.training.settings import settings


def tensors() -> list[nn.Parameter]:
    """A matrix and two experts of at least 4096 elements, in whole blocks, and what stays in fp32."""
    return [
        parameter("up", Role.HIDDEN, 96, 64, matrices=(96,)),
        parameter("experts", Role.HIDDEN, 2, 64, 64, matrices=(32, 32)),
        parameter("small", Role.HIDDEN, 16, 64),
        parameter("odd", Role.EMBEDDING, 99, 65),
        parameter("norm", Role.NORM, 64),
    ]


def test_it_is_torchaos():
    chosen = {"betas": (0.8, 0.9), "epsilon": 1e-6, "weight_decay": 0.2, "groups": {"norm": {"weight_decay": 0.2}}}
    ours = tensors()
    optimizer = build_optimizer(settings(optimizer={"type": "adamw_8bit", **chosen}), ours)
    values = [part for p in ours for part in (p.detach() if p.dim() == 3 else [p.detach()])]
    copies = [nn.Parameter(value.clone()) for value in values]
    with mock.patch("torch.compile", lambda function, **options: function):
        reference = AdamW8bit(copies, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
        for step, lr in enumerate(RATES):
            gradients(ours, step)
            parts = [part for p in ours for part in (p.grad if p.dim() == 3 else [p.grad])]
            for copy, gradient in zip(copies, parts, strict=True):
                copy.grad = gradient.clone()
            set_learning_rate(optimizer, lr)
            reference.param_groups[0]["lr"].fill_(lr)
            optimizer.step()
            reference.step()
    for found, wanted in zip(values, copies):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)
    of_up = next(states for unit, states in optimizer._owned.items() if unit.tensor.name == "up")
    assert {name: (value.dtype, value.numel()) for name, value in of_up.items()} == {
        "exp_avg_8bit": (torch.uint8, 6144),
        "exp_avg_scale": (torch.float32, 24),
        "exp_avg_sq_8bit": (torch.uint8, 6144),
        "exp_avg_sq_scale": (torch.float32, 24),
    }
