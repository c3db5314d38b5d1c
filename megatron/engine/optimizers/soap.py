"""SOAP (Vyas et al. 2024, arXiv 2409.11321): AdamW in the eigenbases of Shampoo's factors, for matrices.

For a matrix [rows, columns] it keeps the averages L of G G^T and R of G^T G, and orthogonal matrices near their
eigenvectors. As in the authors' program, the first step only makes these and changes no weight, and a refresh is one
step of orthogonal iteration. Where the factors leave the basis open, it must not depend on rounding. So directions in
which the first gradient is zero get a fixed basis, and the iteration is shifted a little."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.parallel.layout.shard import LogicalTensor

from . import facts
from .matrix import MatrixOptimizer, blocks, sizes
from .whole import OwnedUnit

ZERO = 1e-5  # of the largest singular value: below it a gradient's direction is rounding
SHIFT = 1e-6  # of the sum of all eigenvalues


class SOAP(MatrixOptimizer):
    """SOAP for groups whose `matrix` is true, AdamW for the others.

    State, at the owner of a matrix: `exp_avg` (in the weights' basis), `exp_avg_sq` (in the eigenbases), `left`,
    `right` (the factors), `left_basis`, `right_basis`.

    Args:
        groups, lr, betas, eps, fused: see `MatrixOptimizer`. The matrices have the same betas and epsilon.
        frequency: steps between two refreshes of the bases.
        largest: a side with more rows or columns stays in its own basis.
        beta: averaging coefficient of the factors.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        frequency: int = 10,
        largest: int = 10_000,
        beta: float = 0.95,
        **adamw: Any,
    ) -> None:
        super().__init__(groups, {"frequency": frequency, "beta": beta}, **adamw)
        self.largest = largest

    @classmethod
    def settings(cls, config: Config) -> dict[str, Any]:
        own = facts.SOAP.options_of(config)
        return {**own, "beta": config.optimizer.betas[1] if own["beta"] is None else own["beta"]}

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        left = sum(rows**2 for rows, _ in sizes(logical) if rows <= self.largest)
        right = sum(columns**2 for _, columns in sizes(logical) if columns <= self.largest)
        numbers = {"left": left, "left_basis": left, "right": right, "right_basis": right}
        return {"exp_avg": None, "exp_avg_sq": None, **{name: count for name, count in numbers.items() if count}}

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        place, steps = {"left": 0, "right": 0}, []
        averages = [blocks(unit, states[name]) for name in ("exp_avg", "exp_avg_sq")]
        for gradient, average, square in zip(blocks(unit, whole.float()), *averages):
            factors: dict[str, tuple[Tensor, Tensor]] = {}
            for side, length in (("left", gradient.size(1)), ("right", gradient.size(2))):
                if length <= self.largest:
                    begin, end = place[side], place[side] + length**2
                    place[side] = end
                    factor, basis = (
                        states[name][:, begin:end].unflatten(1, (length, length)) for name in (side, f"{side}_basis")
                    )
                    factors[side] = factor, basis
            steps.append(self._block(group, gradient, average, square, factors, done))
        return torch.cat(steps, dim=1).view(unit.shape)

    def _block(
        self,
        group: Mapping[str, Any],
        gradient: Tensor,
        average: Tensor,
        square: Tensor,
        factors: Mapping[str, tuple[Tensor, Tensor]],
        done: int,
    ) -> Tensor:
        """The step of matrices [n, rows, columns]. All states are changed in place."""
        bases = {side: basis for side, (_, basis) in factors.items()}
        if done == 0:
            for side, (factor, basis) in factors.items():
                wide = gradient.double() if side == "left" else gradient.double().mT
                factor.copy_((1 - group["beta"]) * (wide @ wide.mT))
                for number, matrix in enumerate(wide):
                    basis[number].copy_(first_basis(matrix))
            return torch.zeros_like(gradient)
        beta1, beta2 = group["betas"]
        average.lerp_(gradient, 1 - beta1)
        turned = turn(gradient, bases)
        square.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        size = (1 - beta2**done) ** 0.5 / (1 - beta1**done)
        step = turn(turn(average, bases) / (square.sqrt() + group["eps"]), bases, back=True) * size
        for side, (factor, _) in factors.items():
            factor.lerp_(gradient @ gradient.mT if side == "left" else gradient.mT @ gradient, 1 - group["beta"])
        if done % group["frequency"] == 0:
            for side, (factor, basis) in factors.items():
                refresh(factor, basis, square if side == "left" else square.mT)
        return step


def turn(matrices: Tensor, bases: Mapping[str, Tensor], back: bool = False) -> Tensor:
    """Matrices in the bases of their sides, or back."""
    if "left" in bases:
        matrices = (bases["left"] if back else bases["left"].mT) @ matrices
    if "right" in bases:
        matrices = matrices @ (bases["right"].mT if back else bases["right"])
    return matrices


def first_basis(matrix: Tensor) -> Tensor:
    """Orthogonal [rows, rows]: the left singular vectors of a float64 matrix, largest first. Where they are missing
    or rounding, a basis that depends only on the space, not on a library."""
    rows = matrix.size(0)
    vectors, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    known = vectors[:, values > ZERO * values.max()] if values.max() > 0 else vectors[:, :0]
    if known.size(1) == rows:
        return known
    generator = torch.Generator().manual_seed(rows)
    fixed = torch.randn(rows, rows - known.size(1), generator=generator, dtype=matrix.dtype).to(matrix.device)
    rest, _ = torch.linalg.qr(fixed - known @ (known.mT @ fixed))
    return torch.cat([known, rest], dim=1)


def refresh(factor: Tensor, basis: Tensor, square: Tensor) -> None:
    """One orthogonal iteration of `basis` [n, m, m] towards eigenvectors of `factor`, the largest eigenvalue first.
    The rows of `square` [n, m, k] follow their vectors. All in place."""
    product = factor @ basis
    order = (basis * product).sum(1).argsort(dim=-1, descending=True, stable=True)
    square.copy_(square.gather(1, order.unsqueeze(-1).expand_as(square)))
    columns = order.unsqueeze(1).expand_as(basis)
    shift = SHIFT * factor.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None].clamp(min=1e-30)
    basis.copy_(torch.linalg.qr(product.gather(2, columns) + shift * basis.gather(2, columns))[0])
