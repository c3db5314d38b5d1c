"""Muon (Jordan et al. 2024): momentum, orthogonalised by a Newton-Schulz iteration, for matrices; AdamW for the rest.

The iteration needs whole matrices. A parameter may hold several, fused along dim 0 (query, key and value; gate and
up): each is orthogonalised alone. Under ZeRO 1 and 2 a rank has a flat piece of each group instead; `pieces` then
brings the parts of a cut matrix together for the iteration, and every rank keeps its part of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from megatron.config import Config
from megatron.parallel.parameters import logical_of
from megatron.parallel.shard import LogicalTensor, Role

from .groups import use_fused
from .pieces import Pieces

# Muon is made for matrices inside the blocks; embeddings, the head and everything else stay with AdamW.
MATRIX_ROLES = (Role.HIDDEN, Role.OUTPUT)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the quintic with the steepest slope at 0, from the authors
ITERATIONS = 5
EPSILON = 1e-7


def muon_layouts(config) -> str | None:
    """Why Muon cannot be exact on the layout of a resolved `Config`, with what to do; None if it can."""
    if config.optimizer.type != "muon":
        return None
    if config.parallel.tensor > 1:
        return (
            f"optimizer.type: muon needs whole matrices, and parallel.tensor: {config.parallel.tensor} cuts them; "
            "use parallel.tensor: 1 (pipeline and data parallel sizes are free)"
        )
    if config.zero.stage == 3:
        return "optimizer.type: muon needs whole matrices, and zero.stage: 3 cuts each of them; use zero.stage: 1 or 2"
    if config.zero.offload_optimizer.device != "none":
        return (
            "optimizer.type: muon's matrix products are made for the accelerator; "
            "use zero.offload_optimizer.device: none"
        )
    return None


def orthogonalize(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Roughly U V^T of the singular value decomposition U S V^T of `matrix` [rows, columns], computed in `dtype`.

    Singular values end between about 0.7 and 1.2, which is as good for training as 1 and much cheaper.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def muon_direction(
    update: torch.Tensor, matrices: tuple[int, ...] | None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The orthogonalised `update` [rows, columns], each fused matrix alone, times sqrt(max(1, rows / columns)).

    The factor keeps the change of a layer's output independent of its shape. Of experts [E, rows, columns] each is
    treated alone.
    """
    if update.dim() == 3:
        return torch.stack([muon_direction(expert, matrices, dtype) for expert in update])
    if matrices is None:
        matrices = (update.size(0),)
    parts = []
    for part in update.split(list(matrices)):
        rows, columns = part.shape
        parts.append(orthogonalize(part, dtype).to(update.dtype) * max(1.0, rows / columns) ** 0.5)
    return torch.cat(parts)


class Muon(torch.optim.Optimizer):
    """Muon for groups whose `matrix` is true, AdamW for the others, in one optimizer.

    State: `momentum_buffer` of the matrices; `step`, `exp_avg`, `exp_avg_sq` of the rest.

    Args:
        groups: groups made by `parameter_groups`; the parameters of matrix groups are matrices, or [E, ...] of
            experts, and have `.logical`.
        momentum: averaging coefficient of the matrices' gradients (Nesterov form).
        lr, betas, eps, fused: as in `torch.optim.AdamW`.
        dtype: of the Newton-Schulz iteration. bf16 is enough for training and the fastest, but a last digit of a
            gradient may tip a rounding in it, so that two layouts of a run differ by more than fp32 does.

    Raises:
        ValueError: a parameter of a matrix group is not a matrix.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.95,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__(
            groups,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": 0.0,
                "momentum": momentum,
                "fused": bool(fused),
                "matrix": False,
            },
        )
        self.dtype = dtype
        # ZeRO replaces the parameters of a group by one flat piece; the originals tell what lies in it.
        self._originals: dict[str, list[nn.Parameter]] = {}
        self._pieces: dict[str, Pieces] = {}
        for group in self.param_groups:
            if group["matrix"]:
                self._originals[group["name"]] = list(group["params"])
                for parameter in group["params"]:
                    if parameter.dim() not in (2, 3):
                        raise ValueError(f"muon: {logical_of(parameter).name} {tuple(parameter.shape)} is not a matrix")

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> Muon:
        options = config.optimizer
        return cls(
            groups,
            momentum=options.muon_momentum,
            lr=0.0,
            betas=options.betas,
            eps=options.epsilon,
            fused=use_fused(config, groups),
            dtype=torch.float32 if config.precision.compute == "fp32" else torch.bfloat16,
        )

    @classmethod
    def group_settings(cls, config: Config, logical: LogicalTensor) -> dict[str, Any]:
        """Matrices have groups of their own, whose rate follows the schedule as a multiple of `optimizer.lr`.

        Raises:
            ValueError: `optimizer.lr` is 0.
        """
        options = config.optimizer
        if options.lr == 0:
            raise ValueError("optimizer.lr: muon's matrices follow the schedule of optimizer.lr, which must be above 0")
        whole = len(logical.shape) == 2 or logical.matrices is not None  # or experts: matrices in a stack
        matrix = logical.role in MATRIX_ROLES and whole
        if matrix:
            return {"matrix": True, "algorithm": "muon", "lr_scale": options.muon_lr / options.lr}
        return {"matrix": False, "algorithm": "adamw"}

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["matrix"] else ("exp_avg", "exp_avg_sq", "step")

    @torch.no_grad()
    def step(self, closure=None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["matrix"]:
                self._adamw(group)
            elif self._whole(group):
                self._matrices(group)
            else:
                self._flat(group)
        return loss

    def _whole(self, group: dict[str, Any]) -> bool:
        originals = self._originals[group["name"]]
        return [p.shape for p in group["params"]] == [p.shape for p in originals]

    def _momentum(self, group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
        """Advance the momentum and return the update to orthogonalise, of the parameter's shape; element by element."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradient = parameter.grad.to(parameter.dtype)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"])

    def _apply(self, group: dict[str, Any], parameter: torch.Tensor, direction: torch.Tensor) -> None:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])

    def _matrices(self, group: dict[str, Any]) -> None:
        for parameter, original in zip(group["params"], self._originals[group["name"]]):
            if parameter.grad is not None:
                update = self._momentum(group, parameter)
                self._apply(group, parameter, muon_direction(update, logical_of(original).matrices, self.dtype))

    def _flat(self, group: dict[str, Any]) -> None:
        (parameter,), name = group["params"], group["name"]
        if name not in self._pieces:
            self._pieces[name] = Pieces.of(self._originals[name])
        update = self._momentum(group, parameter)
        direction = torch.zeros_like(update)
        for original, matrix, mine in self._pieces[name].whole(update):
            whole = muon_direction(matrix, logical_of(original).matrices, self.dtype).reshape(-1)
            direction[mine.place : mine.place + mine.count] = whole[mine.start : mine.start + mine.count]
        self._apply(group, parameter, direction)

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                place = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=place)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=group["fused"],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
