"""Compiled blocks as CUDA graphs (`training.cuda_graphs`): each pass of a block is recorded once, then replayed, so
that the host launches one graph where it launched some thirty kernels.

A graph reads and writes the memory that it was recorded with. torch's compiler does the recording (its "trees" of
graphs, a path for the blocks in their order). Here and in
`config/rules/gpu.py` is what it relies on:

* Weights stay where they are. DeepSpeed moves them into its flat tensors before the first pass. ZeRO 3 and offloading,
  which move them later, are refused.
* Gradients leave the graph's memory, which the next replay overwrites while DeepSpeed still sums them: a copy of 16
  bits per weight.
* `begin_pass` marks a new pass through the model: activations of the pass before (of an evaluation, which no backward
  pass frees) may be overwritten then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

OPTIONS: dict[str, Any] = {"triton.cudagraphs": True}  # for inductor


def gradients_leave_graphs(block: nn.Module) -> None:
    """Give autograd a copy of each gradient of the block's parameters."""

    def elsewhere(gradient: Tensor) -> Tensor:
        return gradient.clone()

    for parameter in block.parameters():
        if parameter.requires_grad:
            parameter.register_hook(elsewhere)


def begin_pass() -> None:
    """The memory of the pass before may be used again."""
    torch.compiler.cudagraph_mark_step_begin()
