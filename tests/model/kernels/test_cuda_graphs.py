"""CUDA graphs of blocks: the options of inductor, and gradients that outlive the memory of a graph.
`test_kernel_counts` has inductor judge blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config import Config, resolve
from megatron.model.kernels.compile import MIX_ORDER, _options, describe_compile, gradients_leave_graphs, graphs


def settings(compute: str = "bf16", cuda_graphs: bool = True, **residual: Any) -> Config:
    model = {"layers": "attention/mlp", "hidden_size": 32, "vocab_size": 64, "attention": {"heads": 2}}
    model["residual"] = residual
    training = {"steps": 1, "sequence_length": 32, "global_batch_size": 1, "cuda_graphs": cuda_graphs}
    return resolve({"model": model, "training": training, "precision": {"compute": compute}})


def test_what_inductor_is_told():
    config = settings()
    assert _options(config, "cuda") == {"triton.cudagraphs": True}
    assert "triton.cudagraphs" in torch._inductor.list_options()
    assert describe_compile(config, "cuda").endswith("as CUDA graphs")
    for other, device in ((config, "cpu"), (settings(cuda_graphs=False), "cuda")):
        assert not graphs(other, device) and "CUDA graphs" not in describe_compile(other, device)
        assert not (_options(other, device) or {}).get("triton.cudagraphs")


def test_gradients_of_two_norms_of_one_input_are_sums_of_their_own():
    assert MIX_ORDER in torch._inductor.list_options()
    assert _options(settings(cuda_graphs=False, form="parallel"), "cuda") == {MIX_ORDER: False}
    assert _options(settings(form="parallel"), "cuda") == {"triton.cudagraphs": True, MIX_ORDER: False}
    for residual in ({}, {"form": "parallel", "shared_norm": True}):
        assert _options(settings(cuda_graphs=False, **residual), "cuda") is None
    assert _options(settings("fp32", cuda_graphs=False, form="parallel"), "cpu") is None


class Replayed(torch.autograd.Function):
    """weight * x, whose gradient lies where that of every call lies, as a graph's does."""

    memory = torch.empty(4)

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return weight * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return Replayed.memory.copy_(gradients[0] * x).detach(), None


@pytest.mark.parametrize("safe", [False, True])
def test_gradients_of_micro_batches_are_summed(safe: bool):
    block = nn.Module()
    block.weight = nn.Parameter(torch.ones(4))
    block.fixed = nn.Parameter(torch.ones(4), requires_grad=False)
    if safe:
        gradients_leave_graphs(block)
    batches = [torch.arange(4.0), torch.full((4,), 10.0)]
    for x in batches:
        Replayed.apply(block.weight, x).sum().backward()
    found = block.weight.grad
    assert torch.equal(found, sum(batches)) == safe  # else the second is there twice
    assert (found.data_ptr() == Replayed.memory.data_ptr()) != safe
