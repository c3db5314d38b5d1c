"""Dion (Ahn et al. 2025, arXiv 2504.05295): orthonormal steps of low rank, for matrices. AdamW for the rest.

The momentum M of a matrix [rows, columns] keeps a basis Q [columns, rank] near its strongest right directions. One
power iteration makes orthonormal P from M Q, and the next Q from M^T P. The rest of M, which the step P Q^T lacks,
stays in the momentum (error feedback). A direction that is rounding, as in gradients of lower rank, is no part of the
step, and Q keeps its column. So layouts do not differ by it."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.parallel.layout.shard import LogicalTensor

from .facts import DION
from .matrix import MatrixOptimizer, blocks, sizes
from .muon import Muon
from .whole import OwnedUnit

ZERO = 1e-5  # of the longest column of M^T P: a shorter one is rounding


class Dion(Muon):
    """Dion for groups whose `matrix` is true, AdamW for the others, in one optimizer.

    State, at the owner of a matrix: `momentum`, and `basis`, columns * rank numbers of each fused matrix.

    Args:
        groups, lr, betas, eps, fused, cautious: see `MatrixOptimizer`.
        momentum: share of the step's part of the momentum that stays in it.
        rank: of a step, as a share of a matrix's shorter side.
    """

    kind = DION

    def __init__(self, groups: Iterable[dict[str, Any]], *, rank: float = 0.25, **muon: Any) -> None:
        super().__init__(groups, **muon)
        self.rank, self.travels = rank, None

    @classmethod
    def settings(cls, config: Config) -> dict[str, Any]:
        return {**cls.kind.options_of(config), "momentum": config.optimizer.muon_momentum}

    def matrix_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return MatrixOptimizer.matrix_states(self, group)

    def values(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        return {"momentum": None, "basis": sum(columns * self._rank(rows, columns) for rows, columns in sizes(logical))}

    def _rank(self, rows: int, columns: int) -> int:
        return math.ceil(round(self.rank * min(rows, columns), 6))  # 0.07 * 100 is a little more than 7

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        begin, steps = 0, []
        gradients = blocks(unit, whole.to(states["momentum"].dtype))
        for gradient, momentum in zip(gradients, blocks(unit, states["momentum"]), strict=True):
            columns = gradient.size(2)
            rank = self._rank(gradient.size(1), columns)
            basis = states["basis"][:, begin : begin + columns * rank].unflatten(1, (columns, rank))
            begin += columns * rank
            if done == 0:
                basis.copy_(first_basis(columns, rank))
            steps.append(dion_step(gradient, momentum, basis, group["momentum"]))
        return torch.cat(steps, dim=1).view(unit.shape)


def first_basis(columns: int, rank: int) -> Tensor:
    """Normal numbers [columns, rank], float64, the same in every run."""
    return torch.randn(columns, rank, generator=torch.Generator().manual_seed(columns), dtype=torch.float64)


def dion_step(gradient: Tensor, momentum: Tensor, basis: Tensor, mu: float) -> Tensor:
    """The step of matrices [n, rows, columns], with sqrt(rows / columns): a layer's output then changes equally at
    every width. `momentum` and `basis` [n, columns, rank] are changed in place."""
    momentum.add_(gradient)
    left = torch.linalg.qr(momentum @ basis)[0]
    right = momentum.mT @ left
    momentum.sub_(left @ right.mT, alpha=1 - mu)
    norms = torch.linalg.vector_norm(right, dim=-2, keepdim=True)
    known = norms > ZERO * norms.amax(-1, keepdim=True)
    basis.copy_(torch.where(known, right / norms.clamp(min=torch.finfo(norms.dtype).tiny), basis))
    return left @ (basis * known).mT * (gradient.size(-2) / gradient.size(-1)) ** 0.5
