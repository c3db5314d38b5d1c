"""Base of optimizers of whole matrices, such as Muon: matrices in their own groups, AdamW for the rest.

A subclass defines the step of one whole matrix (`direction`). `whole.WholeTensors` chooses the rank that has it whole,
and moves its parts there and back. The engine gives each rank's holdings once (`attach`). Without an engine each
parameter is whole. A state is kept per element by the element's holder (`matrix_states`), or by the owner for the whole
matrix (`owner_states`), in any size. Both are saved as parts of logical tensors, independent of the layout."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from megatron.config import Config
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.mesh import ALONE, Axis
from megatron.parallel.layout.shard import LogicalTensor, Role

from .base import EagerOptimizer, decay_cautiously
from .contract import STEP, initialize_state, optimizer_class
from .groups import use_fused
from .whole import Held, OwnedUnit, WholeTensors

WEIGHT = "weight"  # among the states of a matrix, if the optimizer reads it


def has_matrices(logical: LogicalTensor) -> bool:
    """Whether a tensor is a matrix, several of them fused, or a stack of experts' matrices."""
    return len(logical.shape) == 2 or logical.stacked


def sizes(logical: LogicalTensor) -> list[tuple[int, int]]:
    """(rows, columns) of the matrices that are fused in a tensor, or in each of its experts."""
    rows, columns = logical.shape[-2:]
    return [(each, columns) for each in logical.matrices or (rows,)]


def blocks(unit: OwnedUnit, whole: Tensor) -> list[Tensor]:
    """Views [experts or 1, rows, columns] of the matrices that are fused in a whole tensor."""
    stack = whole.view(-1, *unit.shape[-2:])
    return list(stack.split([rows for rows, _ in sizes(unit.tensor)], dim=1))


class MatrixOptimizer(EagerOptimizer):
    """One optimizer for groups whose `matrix` is true, AdamW for the others.

    Args:
        groups: from `parameter_groups`. Parameters of matrix groups have `.logical`, and are matrices or stacks [E,
            rows, columns] of experts' matrices.
        defaults: of the matrix groups.
        lr, betas, eps, fused: as in `torch.optim.AdamW`.
        cautious: see `base.decay_cautiously`.

    Raises:
        ValueError: a parameter of a matrix group is not a matrix.
    """

    _device = torch.device("cpu")
    travels: torch.dtype | None = None  # type in which values are sent to owners. None: their own
    reads_weights = False  # owners get the whole parameter too, as the state `weight`
    matrices_alone = True  # False: a parameter of a matrix group may have any shape

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: Mapping[str, Any] = MappingProxyType({}),
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
                if self.matrices_alone and not has_matrices(logical):
                    raise ValueError(f"{type(self).__name__}: {logical.name} {logical.shape} is not a matrix")
        self._wholes: dict[Tensor, WholeTensors] = {}  # by the first of the flat tensors of a step
        self._owned: dict[OwnedUnit, dict[str, Tensor]] = {}

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> Self:
        common, fused = config.optimizer, use_fused(config, groups)
        return cls(groups, **cls.settings(config), betas=common.betas, eps=common.epsilon, fused=fused)

    @classmethod
    def settings(cls, config: Config) -> dict[str, Any]:
        """Further arguments of the class."""
        return {}

    @classmethod
    def treats(cls, config: Config, logical: LogicalTensor) -> bool:
        """Whether a tensor is in a matrix group: by default matrices inside the blocks, without embeddings and head."""
        return logical.role in (Role.HIDDEN, Role.OUTPUT) and has_matrices(logical)

    @classmethod
    def group_settings(cls, config: Config, logical: LogicalTensor) -> dict[str, Any]:
        matrix = cls.treats(config, logical)
        return {"matrix": matrix, "algorithm": config.optimizer.type if matrix else "adamw"}

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.matrix_states(group) if group["matrix"] else ("exp_avg", "exp_avg_sq", "step")

    def matrix_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that holders keep of their own elements, as in `contract.Optimizer.state_names`."""
        return (STEP,)

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        """The states that a matrix's owner keeps, zero at first. None is one number per element, else a number per
        tensor (per expert of a stack)."""
        return {}

    def owner_type(self, name: str) -> torch.dtype:
        """Type of an owner's state."""
        return torch.float32

    def values(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        """Input of the owner for a holder's elements, of the parameter's shape. The gradient by default."""
        return gradient

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        """On the owner, from the whole of `values` to the step, of the same shape: parameter -= lr * step.

        Args:
            states: the `owner_states`, to be updated in place: of the unit's shape, or [experts, numbers]. With
                `reads_weights` also `weight`, a copy of the whole parameter.
            done: steps before this one, counted where "step" is among `matrix_states`.
        """
        raise NotImplementedError

    def attach(
        self, flats: Sequence[tuple[Sequence[Tensor], Sequence[Held]]], axis: Axis, device: torch.device
    ) -> None:
        """Exchange the ranks' holdings of matrices. All ranks of the pipeline stage call it together.

        Args:
            flats: the tensors of each group during a step, and their contents (numbered in this order).

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
                "DeepSpeed has cut the ranks' matrices into different numbers of pieces: "
                "use a larger deepspeed.zero_optimization.sub_group_size"
            )
        self._device = device
        for number, (tensors, _) in enumerate(flats):
            self._wholes[tensors[0]] = WholeTensors([row[number] for row in everyone], axis, device)

    def owned_states(self) -> Iterator[tuple[LogicalTensor, str, int, Tensor]]:
        """This rank's states as an owner: (tensor, state, first element, values 1-D). A state with numbers per
        tensor is a logical tensor of its own, named after the matrix."""
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

    def step_group(self, group: dict[str, Any]) -> None:
        if group["params"]:  # under ZeRO 3 only one group has a tensor at a time
            (self._matrices if group["matrix"] else self._adamw)(group)

    def _matrices(self, group: dict[str, Any]) -> None:
        """A missing gradient counts as zeros, as in ZeRO's flat tensors."""
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
        """Count this step. Returns the number of steps before it."""
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
        initialize_state(self, group, parameters)
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
    """Whether the run's optimizer keeps states of whole matrices, which formats of DeepSpeed do not have."""
    kind: Any = optimizer_class(config)
    return issubclass(kind, MatrixOptimizer) and kind.owner_states is not MatrixOptimizer.owner_states
