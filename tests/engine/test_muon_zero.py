"""Muon on the flat pieces of DeepSpeed's ZeRO 1 and 2, against Muon on whole matrices in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megatron.engine.optimizers import Muon, build_optimizer, initialize_state, set_learning_rate
from megatron.parallel.shard import LogicalTensor, Role
from tests.training.settings import settings
from tests.workers import run

RATES = (0.01, 0.02, 0.01)
CLIP = 0.4


class Network(nn.Module):
    """Matrices of which cuts into 2 or 4 parts meet several, a fused one among them, and parameters for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def parameter(name: str, role: Role, *shape: int, matrices=None) -> nn.Parameter:
            made = nn.Parameter(torch.randn(shape, generator=generator) * 0.3)
            made.logical = LogicalTensor(name, shape, role, matrices=matrices)
            return made

        self.embedding = parameter("embedding", Role.EMBEDDING, 9, 12)
        self.qkv = parameter("qkv", Role.HIDDEN, 36, 12, matrices=(12, 12, 12))
        self.out = parameter("out", Role.OUTPUT, 12, 12)
        self.up = parameter("up", Role.HIDDEN, 70, 12)
        self.down = parameter("down", Role.OUTPUT, 12, 70)
        self.scale = parameter("scale", Role.NORM, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens]
        q, k, v = (x @ self.qkv.T).chunk(3, dim=-1)
        x = x + (torch.softmax(q @ k.mT, -1) @ v) @ self.out.T
        x = x + torch.relu(x @ self.up.T) @ self.down.T
        logits = ((x * self.scale) @ self.embedding.T).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def muon_settings(dtype: str):
    optimizer = {"type": "muon", "lr": 0.01, "muon_lr": 0.05, "weight_decay": 0.1}
    return settings(optimizer=optimizer, precision={"compute": dtype})


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 9, (2, 7), generator=torch.Generator().manual_seed(100 * step + rank))


def with_zero(dtype: str, stage: int, same_batch: bool) -> dict[str, torch.Tensor]:
    """On every rank: train with DeepSpeed; the fp32 weights at the end, gathered by DeepSpeed's own accessor."""
    import deepspeed
    import deepspeed.ops
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles an extension we do not use
    network = Network()
    if dtype == "bf16":
        logical = {name: p.logical for name, p in network.named_parameters()}
        network.bfloat16()
        for name, p in network.named_parameters():
            p.logical = logical[name]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        config |= {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    optimizer = build_optimizer(muon_settings(dtype), network.parameters())
    assert isinstance(optimizer, Muon)
    engine, _, _, _ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
    for group in optimizer.param_groups:
        initialize_state(optimizer, group)
    for step, lr in enumerate(RATES):
        set_learning_rate(optimizer, lr)
        engine.backward(engine(tokens_of(step, 0 if same_batch else dist.get_rank())))
        engine.step()
    weights = {name: p.get_full_hp_param().detach().clone() for name, p in network.named_parameters()}
    state = {name: set(p._hp_mapping.get_optim_state_keys()) for name, p in network.named_parameters() if p._hp_mapping}
    for name, keys in state.items():
        assert keys == ({"momentum_buffer"} if name in ("qkv", "out", "up", "down") else {"exp_avg", "exp_avg_sq"})
    return weights


def alone(dtype: str, ranks: int) -> dict[str, torch.Tensor]:
    """The same in one process: fp32 masters, the mean gradient of the ranks' batches, clipped by its whole norm."""
    masters = Network()
    if dtype == "bf16":  # DeepSpeed makes its masters of the bf16 weights
        for master in masters.parameters():
            master.data = master.data.bfloat16().float()
    optimizer = build_optimizer(muon_settings(dtype), masters.parameters())
    for step, lr in enumerate(RATES):
        working = copy.deepcopy(masters)
        if dtype == "bf16":
            working.bfloat16()
        sum(working(tokens_of(step, rank)) for rank in range(ranks)).backward()
        for master, used in zip(masters.parameters(), working.parameters(), strict=True):
            master.grad = used.grad.float() / ranks
        norm = torch.sqrt(sum(p.grad.double().square().sum() for p in masters.parameters()))
        for p in masters.parameters():
            p.grad *= min(1.0, CLIP / (float(norm) + 1e-6))
        set_learning_rate(optimizer, lr)
        optimizer.step()
    return {name: p.detach() for name, p in masters.named_parameters()}


@pytest.mark.parametrize("ranks, stage", [(2, 1), (2, 2), (4, 1)])
def test_fp32(ranks, stage):
    expected = alone("fp32", ranks)
    start = Network()
    for weights in run(ranks, with_zero, "fp32", stage, False):
        for name, value in expected.items():
            moved = float((value - getattr(start, name).detach()).abs().max())
            assert moved > 0.005
            torch.testing.assert_close(weights[name].view_as(value), value, rtol=0, atol=1e-4 * moved, msg=name)


@pytest.mark.parametrize("stage", [1, 2])
def test_bf16(stage):
    """With one batch for all ranks the mean gradient is exact, so only the order of sums in the norm may differ."""
    expected = alone("bf16", 1)
    for weights in run(2, with_zero, "bf16", stage, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name].view_as(value), value, rtol=0, atol=2e-4, msg=name)
