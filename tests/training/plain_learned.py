"""A learned optimizer for the plain run of `runs`: the package PyLO by itself, on tensors that nothing has cut."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron.parallel.layout.shard import LogicalTensor
from tests.training.plain_matrices import blocks


class PlainLearned:
    """Masters have their gradients. Experts, and queries, keys and values, are tensors of their own to the package. It
    computes in the masters' type, with averages in fp32.
    """

    def __init__(self, options, tensors: list[LogicalTensor], masters: list[torch.Tensor], rates: list, decays: list):
        from pylo.optim import AdafacLO_naive

        self.tensors, self.masters = tensors, masters
        self.parts = [self.split(*pair) for pair in zip(masters, tensors)]
        groups = [
            {"params": parts, "lr": rate, "weight_decay": decay}
            for parts, rate, decay in zip(self.parts, rates, decays)
        ]
        weights = load_file(options.options["weights"])
        width, layers = len(weights["network.input.bias"]), sum("linear" in name for name in weights) // 2
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"input_size": 39, "hidden_size": width, "hidden_layers": layers}
            Path(folder, "config.json").write_text(json.dumps(sizes))
            save_file(weights, Path(folder, "model.safetensors"))
            self.package = AdafacLO_naive(groups, hf_key=folder)
        self.package.network.to(masters[0].dtype)

    @staticmethod
    def split(tensor: torch.Tensor, logical: LogicalTensor) -> list[torch.Tensor]:
        return blocks(tensor, logical) if len(logical.shape) == 2 or logical.stacked else [tensor]

    def step(self) -> None:
        for master, logical, parts in zip(self.masters, self.tensors, self.parts):
            for part, gradient in zip(parts, self.split(master.grad, logical), strict=True):
                part.grad = gradient
        self.package.step()
