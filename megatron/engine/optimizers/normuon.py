"""NorMuon (Li et al. 2025, arXiv 2510.05491): Muon whose orthogonal matrix is divided by a second moment of each row.

The mean square of each row is averaged over steps. Rows are divided by the root of their average, and the matrix then
gets the Frobenius norm back that it had, as in the authors' program. `muon_scale: moonlight` gives steps of a root mean
square near 0.2, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.layout.shard import LogicalTensor

from .facts import NORMUON
from .matrix import sizes
from .muon import Muon, muon_direction
from .whole import OwnedUnit

EPSILON = 1e-8


class NorMuon(Muon):
    """As Muon. State, at the owner of a matrix: `row_square`, one number per row.

    Args:
        beta2: coefficient of that average.
    """

    kind = NORMUON

    def __init__(self, groups: Iterable[dict[str, Any]], *, beta2: float = 0.95, **muon: Any) -> None:
        super().__init__(groups, **muon)
        self.beta2 = beta2

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        return {"row_square": sum(rows for rows, _ in sizes(logical))}

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        squares = states["row_square"].split([rows for rows, _ in sizes(unit.tensor)], dim=-1)

        def normalized(parts: list[Tensor]) -> list[Tensor]:
            return [self._divide(part, square) for part, square in zip(parts, squares, strict=True)]

        tensor, rows = unit.tensor, self.head_rows(unit.tensor)
        stack = whole.view(-1, *unit.shape[-2:])  # one matrix, or one per expert
        found = muon_direction(stack, tensor.matrices, self.dtype, group["scale"], rows, self.polynomials, normalized)
        return found.view_as(whole)

    def _divide(self, part: Tensor, square: Tensor) -> Tensor:
        """`part` [n, rows, columns] or [n, heads, rows, columns], each matrix by itself. Updates `square` [n, rows]."""
        average = square.view(part.shape[:-1])
        average.lerp_(part.square().mean(-1).to(square.dtype), 1 - self.beta2)
        divided = part / (average.sqrt() + EPSILON).unsqueeze(-1)
        norms = [torch.linalg.vector_norm(each, dim=(-2, -1), keepdim=True) for each in (part, divided)]
        return divided * (norms[0] / norms[1].clamp(min=EPSILON))
