"""The form of optimizers that treat whole matrices, such as Muon: matrices in their own groups, AdamW for the rest.

A subclass says what becomes of one whole matrix (`direction`). Which rank has it whole, and how its parts get there
and back, is `whole.WholeTensors`'s concern: the engine tells each rank's holdings once (`attach`); without an engine
each parameter is whole. A state may be kept per element by whoever holds the element (`matrix_states`), or by the owner
for the whole matrix (`owner_states`), in any size; both are saved as parts of logical tensors, so no layout shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from megatron.config import Config
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.mesh import ALONE, Axis
from megatron.parallel.layout.shard import LogicalTensor, Role

from .base import EagerOptimizer, decay_cautiously
from .contract import STEP, initialize_state
from .named import optimizer_class
from .whole import Held, OwnedUnit, WholeTensors

WEIGHT = "weight"  # beside the states of a matrix, where the optimizer reads it

# Matrices inside the blocks; embeddings, the head and everything else stay with AdamW.
MATRIX_ROLES = (Role.HIDDEN, Role.OUTPUT)


def is_matrix(logical: LogicalTensor) -> bool:
    """Whether a tensor is a matrix inside a block, several of them fused, or a stack of experts' matrices."""
    return logical.role in MATRIX_ROLES and (len(logical.shape) == 2 or logical.stacked)


def sizes(logical: LogicalTensor) -> list[tuple[int, int]]:
    """(rows, columns) of the matrices that are fused in a tensor; of each of its experts, where it has some."""
    rows, columns = logical.shape[-2:]
    return [(each, columns) for each in logical.matrices or (rows,)]


def blocks(unit: OwnedUnit, whole: Tensor) -> list[Tensor]:
    """Views [experts or 1, rows, columns] of the matrices that are fused in a whole of the unit's shape."""
    stack = whole.view(-1, *unit.shape[-2:])
    return list(stack.split([rows for rows, _ in sizes(unit.tensor)], dim=1))


class MatrixOptimizer(EagerOptimizer):
    """One optimizer for groups whose `matrix` is true; AdamW for the others.

    Args:
        groups: made by `parameter_groups`; parameters of matrix groups have `.logical`, and are matrices or stacks
            [E, rows, columns] of experts' matrices.
        defaults: of the matrix groups.
        lr, betas, eps, fused: as in `torch.optim.AdamW`.
        cautious: see `base.decay_cautiously`.

    Raises:
        ValueError: a parameter of a matrix group is not a matrix.
    """

    _device = torch.device("cpu")
    travels: torch.dtype | None = None  # the type in which values are sent to owners; their own where it is None
    reads_weights = False  # owners get the whole parameter too, as the state `weight`
    matrices_alone = True  # else a parameter of a matrix group may have any shape

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: Mapping[str, Any],
        *,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
        cautious: bool = False,
    ) -> None:
        self.cautious = cautious
        shared = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": bool(fused), "matrix": False}
        super().__init__(groups, {**shared, **defaults})
        for group in self.param_groups:
            for parameter in group["params"] if group["matrix"] else ():
                logical = logical_of(parameter)
                if self.matrices_alone and len(logical.shape) != 2 and not logical.stacked:
                    raise ValueError(f"{type(self).__name__}: {logical.name} {logical.shape} is not a matrix")
        self._wholes: dict[Tensor, WholeTensors] = {}  # by the first of the flat tensors of a step
        self._owned: dict[OwnedUnit, dict[str, Tensor]] = {}

    @classmethod
    def group_settings(cls, config: Config, logical: LogicalTensor) -> dict[str, Any]:
        """Matrices have groups of their own."""
        if is_matrix(logical):
            return {"matrix": True, "algorithm": config.optimizer.type}
        return {"matrix": False, "algorithm": "adamw"}

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.matrix_states(group) if group["matrix"] else ("exp_avg", "exp_avg_sq", "step")

    def matrix_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that holders keep of their own elements, as in `contract.Optimizer.state_names`."""
        raise NotImplementedError

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        """The states that a matrix's owner keeps, zero at first: None is one number per element, a number how
        many there are for the tensor (for each expert of a stack).
        """
        return {}

    def owner_type(self, name: str) -> torch.dtype:
        """Of such a state."""
        return torch.float32

    def values(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        """What the owner needs of a holder's elements, of the parameter's shape; the gradient by default."""
        return gradient

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        """On the owner, from the whole of `values` to the step, of the same shape: parameter -= lr * step.

        Args:
            states: what `owner_states` says, to be updated in place: of the unit's shape, or [experts, numbers]. With
                `reads_weights` also `weight`, a copy of the whole parameter.
            done: steps before this one; counted where "step" is among `matrix_states`.
        """
        raise NotImplementedError

    def attach(
        self, flats: Sequence[tuple[Sequence[Tensor], Sequence[Held]]], axis: Axis, device: torch.device
    ) -> None:
        """Learn what each rank of the pipeline stage holds of the matrices; all of them call it together.

        Args:
            flats: the tensors that a group has during a step, and what lies in them (numbered in this order).

        Raises:
            ValueError: the ranks hold parts of different matrices together.
        """
        mine = [list(held) for _, held in flats]
        everyone: list[Any] = [mine]
        if axis.size > 1:
            everyone = [None] * axis.size
            dist.all_gather_object(everyone, mine, group=axis.group)
        if len({len(row) for row in everyone}) > 1:
            raise ValueError(
                "DeepSpeed has cut the ranks' matrices into different numbers of pieces; "
                "use a larger deepspeed.zero_optimization.sub_group_size"
            )
        self._device = device
        for number, (tensors, _) in enumerate(flats):
            self._wholes[tensors[0]] = WholeTensors([row[number] for row in everyone], axis, device)

    def owned_states(self) -> Iterator[tuple[LogicalTensor, str, int, Tensor]]:
        """What this rank keeps as an owner: (tensor, state, first element, values 1-D). A state with numbers of its own
        is a logical tensor of its own, named after the matrix.
        """
        for unit in (unit for wholes in self._wholes.values() for unit in wholes.owned):
            stacked = unit.tensor.stacked
            for name, numbers in self.owner_states(unit.tensor).items():
                values = self._of_owner(unit, None)[name].view(-1)
                if numbers is None:
                    yield unit.tensor, name, unit.segment((0, 1))[0], values
                    continue
                shape = (unit.tensor.shape[0], numbers) if stacked else (numbers,)
                own = LogicalTensor(f"{unit.tensor.name}.{name}", shape, unit.tensor.role, keep_fp32=True)
                yield own, name, unit.first * numbers, values

    def _of_owner(self, unit: OwnedUnit, device: torch.device | None) -> dict[str, Tensor]:
        if unit not in self._owned:
            self._owned[unit] = {
                name: torch.zeros(
                    unit.shape if numbers is None else (unit.count, numbers),
                    dtype=self.owner_type(name),
                    device=device or self._device,
                )
                for name, numbers in self.owner_states(unit.tensor).items()
            }
        return self._owned[unit]

    def _whole_tensors(self, parameters: Sequence[Tensor]) -> WholeTensors:
        if parameters[0] not in self._wholes:  # no engine: each parameter is whole
            held = [Held(logical_of(p), (0, 1), 0, p.numel(), flat, 0) for flat, p in enumerate(parameters)]
            self._wholes[parameters[0]] = WholeTensors([held], ALONE)
        return self._wholes[parameters[0]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:  # ZeRO 3 shows one of its flat tensors at a time
                (self._matrices if group["matrix"] else self._adamw)(group)
        return loss

    def _matrices(self, group: dict[str, Any]) -> None:
        """A parameter without a gradient has one of zeros, as it has in ZeRO's flat tensors."""
        parameters, values = group["params"], []
        for parameter in parameters:
            gradient = parameter.grad
            gradient = torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)
            values.append(self.values(group, parameter, gradient))
        done = self._count(group, parameters)

        def direction(unit: OwnedUnit, whole: Tensor, *weight: Tensor) -> Tensor:
            states = self._of_owner(unit, whole.device)
            return self.direction(group, unit, whole, {**states, WEIGHT: weight[0]} if weight else states, done)

        read = parameters if self.reads_weights else None
        steps = self._whole_tensors(parameters).transform(values, direction, self.travels, read)
        for parameter, step in zip(parameters, steps):
            self._decay(group, parameter, step)
            parameter.add_(step, alpha=-group["lr"])

    def _decay(self, group: Mapping[str, Any], parameter: Tensor, step: Tensor) -> None:
        amount = group["lr"] * group["weight_decay"]
        if self.cautious:
            decay_cautiously(parameter, step, amount)
        else:
            parameter.mul_(1 - amount)

    def _count(self, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> int:
        """The number of steps before this one, which it counts."""
        if STEP not in self.matrix_states(group):
            return 0
        initialize_state(self, group, parameters)
        done = int(self.state[parameters[0]][STEP])
        for parameter in parameters:
            self.state[parameter][STEP] += 1
        return done

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
        for parameter, state in zip(parameters, states) if self.cautious else ():
            step = state["exp_avg"].lerp(parameter.grad.to(parameter.dtype), 1 - group["betas"][0])
            self._decay(group, parameter, step)
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
            weight_decay=0.0 if self.cautious else group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def keeps_owner_states(config: Config) -> bool:
    """Whether the run's optimizer keeps states of whole matrices, which formats of DeepSpeed do not know."""
    kind: Any = optimizer_class(config)
    return issubclass(kind, MatrixOptimizer) and kind.owner_states is not MatrixOptimizer.owner_states
