"""Muon (Jordan et al. 2024): momentum, orthogonalised by a Newton-Schulz iteration, for matrices. AdamW for the rest.

The iteration needs whole matrices, which `whole` brings together on one rank each. A parameter may hold several,
fused along a dimension (query, key and value, or gate and up), or one per expert. Each is orthogonalised separately.
The momentum is an average per element, kept by the element's holder.

NorMuon (Li et al. 2025, arXiv 2510.05491) divides the orthogonal matrix by a second moment of each row. The mean square
of each row is averaged over steps. Rows are divided by the root of their average, and the matrix then gets the
Frobenius norm back that it had, as in the authors' program. `muon_scale: moonlight` gives steps of a root mean square
near 0.2, as in the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.parallel.layout.shard import LogicalTensor, Scales

from .contract import initialize_state
from .facts import MUON, NORMUON
from .matrix import MatrixOptimizer, sizes
from .whole import OwnedUnit

EPSILON = 1e-7


@dataclass(frozen=True)
class Iteration:
    """X <- a X + b X X^T X + c X X^T X X^T X, once for each (a, b, c)."""

    coefficients: tuple[tuple[float, float, float], ...]
    margin: float = 1.0  # a matrix begins with its Frobenius norm at 1 / margin


ITERATIONS = {
    # The quintic with the steepest slope at 0, from the authors. Singular values end between about 0.7 and 1.2.
    "jordan": Iteration(5 * ((3.4445, -4.7750, 2.0315),)),
    # Amsel et al. 2025 (arXiv 2505.16932): each is the best quintic for the singular values that the steps before leave
    # of 0.001 to 1. Cushion and margin are 0.02, for the rounding of bf16. The last polynomial has no margin.
    "polar_express": Iteration(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        margin=1.02,
    ),
}


def orthogonalize(matrices: Tensor, dtype: torch.dtype, polynomials: str = "jordan") -> Tensor:
    """Approximately U V^T of the singular value decomposition U S V^T of each of `matrices` [..., rows, columns].

    The singular values end near 1, which is as good for training as 1 and much cheaper.

    Args:
        dtype: of the computation and the result.
        polynomials: a name in `ITERATIONS`.
    """
    iteration = ITERATIONS[polynomials]
    x = matrices.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPSILON) * iteration.margin)
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    for a, b, c in iteration.coefficients:
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def factor(rows: int, columns: int, scale: str) -> float:
    """Factor of an orthogonal matrix.

    "original": sqrt(max(1, rows / columns)). The change of a layer's output then does not depend on its shape.
    "moonlight": 0.2 sqrt(max(rows, columns)). The update then has the size of AdamW's, so that AdamW's rates suit
    (Liu et al. 2025, arXiv 2502.16982)."""
    return 0.2 * max(rows, columns) ** 0.5 if scale == "moonlight" else max(1.0, rows / columns) ** 0.5


def muon_direction(
    update: Tensor,
    matrices: tuple[int, ...] | None,
    dtype: torch.dtype = torch.bfloat16,
    scale: str = "original",
    heads: tuple[int, ...] | None = None,
    polynomials: str = "jordan",
    normalized: Callable[[list[Tensor]], list[Tensor]] | None = None,
) -> Tensor:
    """The orthogonalised `update` [rows, columns] in fp32 or wider, times its `factor`. Fused matrices and experts [E,
    rows, columns] are treated separately.

    Args:
        matrices: rows of each fused matrix.
        heads: rows of each of its heads, if these are matrices of their own.
        normalized: applied to the orthogonal matrices.
    """
    wide = torch.promote_types(update.dtype, torch.float32)
    parts = update.split(list(matrices or (update.size(-2),)), dim=-2)
    if heads is not None:
        parts = tuple(part.unflatten(-2, (-1, rows)) for part, rows in zip(parts, heads, strict=True))
    orthogonal = [orthogonalize(part, dtype, polynomials).to(wide) for part in parts]
    if normalized is not None:
        orthogonal = normalized(orthogonal)
    found = [part * factor(part.size(-2), part.size(-1), scale) for part in orthogonal]
    return torch.cat([part if heads is None else part.flatten(-3, -2) for part in found], dim=-2)


class Muon(MatrixOptimizer):
    """Muon for groups whose `matrix` is true, AdamW for the others, in one optimizer.

    State: `momentum_buffer` of the matrices. `step`, `exp_avg`, `exp_avg_sq` of the rest.

    Args:
        groups, lr, betas, eps, fused: see `MatrixOptimizer`.
        momentum: averaging coefficient of the matrices' gradients (Nesterov form).
        scale: see `factor`.
        per_head: treat each head of queries, keys and values as a matrix of its own, where a layer declares heads.
        polynomials: see `orthogonalize`.
        dtype: of the Newton-Schulz iteration. bf16 suffices for training and is fastest. But a last digit of a gradient
            may tip a rounding in it. Two layouts of a run then differ by more than in fp32.

    Raises:
        ValueError: a parameter of a matrix group is not a matrix.
    """

    kind = MUON

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.95,
        scale: str = "original",
        per_head: bool = False,
        polynomials: str = "jordan",
        dtype: torch.dtype = torch.bfloat16,
        **adamw: Any,
    ) -> None:
        super().__init__(groups, {"momentum": momentum, "scale": scale}, **adamw)
        self.dtype, self.per_head, self.polynomials = dtype, per_head, polynomials
        self.travels = dtype  # the iteration begins by rounding to it

    @classmethod
    def settings(cls, config: Config) -> dict[str, Any]:
        return {
            **cls.kind.options_of(config),
            "momentum": config.optimizer.muon_momentum,
            "scale": config.optimizer.muon_scale,
            "dtype": torch.float32 if config.precision.compute == "fp32" else torch.bfloat16,
        }

    @classmethod
    def group_settings(cls, config: Config, logical: LogicalTensor) -> dict[str, Any]:
        """The rate of matrices follows the schedule as a multiple of `optimizer.lr`.

        Raises:
            ValueError: `optimizer.lr` is 0.
        """
        options, settings = config.optimizer, super().group_settings(config, logical)
        if options.lr == 0:
            raise ValueError("optimizer.lr: muon's matrices follow the schedule of optimizer.lr, which must be above 0")
        if not settings["matrix"]:
            return settings
        # An orthogonalised step changes a layer's output equally at every width. Moonlight's factor grows with the root
        # of the width. Adam's steps, which the tensor's scales are for, grow with the width.
        width = logical.scales.weight_decay ** (0.5 if options.muon_scale == "moonlight" else 0.0)
        scales = Scales(logical.scales.lr * logical.scales.weight_decay / width, width)
        return settings | {"lr_scale": options.muon_lr / options.lr, "scales": scales}

    def matrix_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def values(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        """Advance the momentum. Returns the matrix to orthogonalise."""
        initialize_state(self, group, [parameter])
        average = self.state[parameter]["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"])

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        rows = self.head_rows(unit.tensor)
        return muon_direction(whole, unit.tensor.matrices, self.dtype, group["scale"], rows, self.polynomials)

    def head_rows(self, logical: LogicalTensor) -> tuple[int, ...] | None:
        """Rows of a head of each fused matrix, where heads are matrices of their own."""
        heads = logical.heads if self.per_head else None
        return None if heads is None else tuple(rows for _, rows in heads)


ROW_EPSILON = 1e-8


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
        divided = part / (average.sqrt() + ROW_EPSILON).unsqueeze(-1)
        norms = [torch.linalg.vector_norm(each, dim=(-2, -1), keepdim=True) for each in (part, divided)]
        return divided * (norms[0] / norms[1].clamp(min=ROW_EPSILON))
