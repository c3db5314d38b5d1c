"""Optimizers of whole matrices, written from their papers, for the plain run of `runs`: one process, nothing cut."""

from __future__ import annotations

import torch

from megatron.parallel.shard import LogicalTensor, Role


def is_matrix(logical: LogicalTensor) -> bool:
    inside = logical.role in (Role.HIDDEN, Role.OUTPUT)
    return inside and (len(logical.shape) == 2 or (len(logical.shape) == 3 and logical.matrices is not None))


def blocks(tensor: torch.Tensor, logical: LogicalTensor) -> list[torch.Tensor]:
    """Views of the matrices that are fused in a tensor: experts, and in each query, key and value, or gate and up."""
    experts = tensor if tensor.dim() == 3 else [tensor]
    return [part for expert in experts for part in expert.split(list(logical.matrices or (expert.shape[0],)))]


class PlainMuon:
    """By singular values: the iteration X <- aX + bXX'X + cXX'XX'X maps each to a s + b s^3 + c s^5 and leaves the
    singular vectors alone.
    """

    def __init__(self, options) -> None:
        self.rate, self.momentum, self.scale = options.muon_lr, options.muon_momentum, options.muon_scale

    def start(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros_like(matrix)}

    def direction(self, state: dict[str, torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        state["momentum"].mul_(self.momentum).add_(gradient, alpha=1 - self.momentum)
        left, values, right = torch.linalg.svd(
            (1 - self.momentum) * gradient + self.momentum * state["momentum"], full_matrices=False
        )
        values = values / values.square().sum().sqrt().clamp(min=1e-7)  # an expert that saw no token
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        rows, columns = gradient.shape
        size = 0.2 * max(rows, columns) ** 0.5 if self.scale == "moonlight" else max(1, rows / columns) ** 0.5
        return size * (left * values) @ right


PLAIN = {"muon": PlainMuon}


class PlainMatrices:
    """One of these rules for each matrix inside a block, torch's AdamW for all other tensors."""

    def __init__(self, options, logicals: list[LogicalTensor], masters: list[torch.Tensor], decays: list[float]):
        self.rule, self.logicals, self.masters, self.decays = PLAIN[options.type](options), logicals, masters, decays
        rest = [
            {"params": [m], "weight_decay": decay}
            for m, decay, logical in zip(masters, decays, logicals)
            if not is_matrix(logical)
        ]
        self.adamw = torch.optim.AdamW(rest, lr=options.lr, betas=options.betas, eps=options.epsilon, foreach=False)
        self.states = [
            [self.rule.start(block) for block in blocks(m, logical)] if is_matrix(logical) else []
            for m, logical in zip(masters, logicals)
        ]

    def step(self, gradients: list[torch.Tensor]) -> None:
        for master, gradient in zip(self.masters, gradients):
            master.grad = gradient
        self.adamw.step()
        for master, gradient, logical, decay, states in zip(
            self.masters, gradients, self.logicals, self.decays, self.states
        ):
            pairs = zip(blocks(master, logical), blocks(gradient, logical), states) if states else ()
            for matrix, part, state in pairs:
                matrix -= self.rule.rate * (self.rule.direction(state, part) + decay * matrix)
