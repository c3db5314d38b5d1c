"""What this rank owns of the run's state, as fragments of logical tensors, under every ZeRO stage.

DeepSpeed keeps fp32 masters and optimizer states in flat tensors: at stage 0 each parameter is its own; at stages 1
and 2 (and in its bf16 optimizer) one per parameter group, of which a data parallel rank has an equal share; at
stage 3 one per sub-group, with an equal share of every parameter. Here all three are a list of `Owned`: a range of a
parameter's shard, and where it lies in which flat tensor. Checkpoints read and write those in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.format.fragment import AVERAGE, MASTER, TRAINED, WEIGHT, Fragment
from megatron.parallel.layers.parameters import is_spread, logical_of, shard_index, shard_start
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor

from .optimizers.contract import element_states, fingerprints, initialize_state, number_names
from .optimizers.matrix import MatrixOptimizer
from .optimizers.whole import Held

FINGERPRINTS = "fingerprints"  # among the counters


@dataclass(frozen=True)
class Owned:
    """Elements [start, start + length) of the flattened shard `cut` (rank, ranks), which lie in `flat` from
    `place` on.
    """

    tensor: LogicalTensor
    cut: tuple[int, int]
    start: int
    length: int
    flat: Tensor
    place: int
    replica: bool = False  # another rank owns the same elements and saves them

    def view(self, values: Tensor) -> Tensor:
        """This range of `flat` or of a state tensor of the same shape, 1-D."""
        return values.detach().view(-1)[self.place : self.place + self.length]


class EngineState:
    """Masters and optimizer states of one engine.

    Args:
        engine: DeepSpeed's engine.
        optimizer: the torch optimizer that it was given.
        parameters: this rank's parameters, each once.
        buffers: tensors that are saved and no optimizer sees (`ParameterFactory.buffer`).
        average: whether an average of the weights is kept too.
    """

    def __init__(
        self,
        engine: Any,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        mesh: Mesh,
        stage: int,
        buffers: Sequence[Tensor] = (),
        average: bool = False,
    ):
        self._averages: dict[Tensor, Tensor] = {}  # by flat tensor, of its shape
        self._evaluates: Any = getattr(optimizer, "evaluation_weights", None)
        self._trained: dict[Tensor, Tensor] = {}  # by flat tensor: what it goes on with after an evaluation
        self._averaging = average
        self.engine, self.optimizer, self.mesh, self.stage = engine, optimizer, mesh, stage
        self.parameters, self.buffers = list(dict.fromkeys(parameters)), buffers
        self.before_change: Callable[[], None] = lambda: None  # called before somebody changes masters
        self._first_scaler = self.loss_scaler()

    def fragments(self) -> Iterator[Fragment]:
        """What this rank saves: each element of the run's state is saved by exactly one rank."""
        yield from self._fragments(replicas=False)
        if self.mesh.tensor.rank == self.mesh.replicas.rank == 0:
            yield from self._buffer_fragments()

    def weights(self, dtype: torch.dtype) -> Iterator[Fragment]:
        """What this rank saves of the weights alone, made of the masters, and of their average."""
        for fragment in self.fragments():
            if fragment.state == MASTER:
                data = fragment.data if fragment.tensor.keep_fp32 else fragment.data.to(dtype)
                yield replace(fragment, state=WEIGHT, data=data)
            elif fragment.state == AVERAGE:
                yield fragment

    def targets(self) -> list[Fragment]:
        """Everything that this rank must fill to resume, replicas included; the data are the engine's own tensors."""
        return [*self._fragments(replicas=True), *self._buffer_fragments()]

    def addresses(self) -> list[int]:
        """Where the tensors lie that `targets` gives parts of, and the weights of the forward pass. While these are the
        same, so are the targets.
        """
        self.for_training()
        flats = [flat for _, flat in self._flats()]
        states = [value for flat in flats for value in self.optimizer.state.get(flat, {}).values()]
        others = [*self.buffers, *self._averages.values(), *(self.parameters if self.stage < 3 else ())]
        if isinstance(self.optimizer, MatrixOptimizer):
            others += [values for *_, values in self.optimizer.owned_states()]
        return [each.data_ptr() for each in (*flats, *states, *others) if isinstance(each, Tensor)]

    def masters(self) -> list[Fragment]:
        """The engine's own fp32 masters, for a start from weights alone."""
        found = [replace(each, state=MASTER) for each in self.targets() if each.state in (MASTER, TRAINED)]
        return found

    def refresh(self) -> None:
        """Make the weights of the forward pass from the masters; call after the targets were filled, or changed."""
        self.before_change()
        self._refresh()

    def _refresh(self) -> None:
        if self.stage == 3:
            self._refresh_partitioned()
        elif self.stage > 0:
            self.engine.optimizer.update_lp_params()

    def for_evaluation(self) -> None:
        """Put the weights that the optimizer evaluates in the place of those that it trains, where they are others."""
        if self._evaluates is None or self._trained:
            return
        self._create_states()
        for group, flat in self._flats():
            weights = self._evaluates(group, flat, self.optimizer.state[flat])
            self._trained[flat] = flat.detach().clone()
            flat.data.copy_(weights)
        self._refresh()

    def for_training(self) -> None:
        """Undo `for_evaluation`, to the last bit."""
        if not self._trained:
            return
        for flat, weights in self._trained.items():
            flat.data.copy_(weights)
        self._trained.clear()
        self._refresh()

    def begin_average(self) -> None:
        """The average is what the weights are."""
        for _, flat in self._flats():
            self._average_of(flat).copy_(flat.detach())

    def advance_average(self, coefficient: float) -> None:
        """average = coefficient * average + (1 - coefficient) * weights."""
        for _, flat in self._flats():
            self._average_of(flat).lerp_(flat.detach(), 1 - coefficient)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """While this is open, the engine computes with the average; afterwards all is as it was, to the last bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for _, flat in self._flats():
            average = self._average_of(flat)
            weights = flat.detach().clone()
            flat.data.copy_(average)
            average.copy_(weights)
        self._refresh()

    def _average_of(self, flat: Tensor) -> Tensor:
        if flat not in self._averages:
            self._averages[flat] = flat.detach().clone()
        return self._averages[flat]

    def counters(self) -> dict[str, Any]:
        """What the optimizer keeps besides tensors: updates done, and other numbers that all parameters share; and
        what tells whether files that it reads are the same."""
        self._create_states()  # before the first update the counts are 0, not unknown
        names, states = number_names(self.optimizer), self.optimizer.state.values()
        found: dict[str, Any] = {
            name: float(state[name]) for state in reversed(states) for name in names if name in state
        }
        read = fingerprints(self.optimizer)
        return {**found, FINGERPRINTS: read} if read else found

    def other_files(self, counters: Mapping[str, Any]) -> list[str]:
        """Keys that name files of which the optimizer has read others than the one that counted."""
        kept, own = counters.get(FINGERPRINTS, {}), fingerprints(self.optimizer)
        return sorted(key for key in kept.keys() & own.keys() if kept[key] != own[key])

    def restore_counters(self, counters: Mapping[str, Any]) -> None:
        """Set the counts, those that are not given to 0: a checkpoint without counts is of before the first update."""
        self._create_states()
        for state in self.optimizer.state.values():
            for name in number_names(self.optimizer):
                if name in state:
                    state[name].fill_(counters.get(name, 0.0))

    def loss_scaler(self) -> dict[str, Any]:
        """State of the dynamic loss scaler; empty without fp16."""
        scaler = self._dynamic_scaler()
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: getattr(scaler, name) for name in names if hasattr(scaler, name)}

    def restore_loss_scaler(self, values: Mapping[str, Any]) -> None:
        """Set the scaler; what is not given is as at the beginning."""
        scaler = self._dynamic_scaler()
        for name, value in {**self._first_scaler, **values}.items() if scaler else ():
            setattr(scaler, name, value)

    def _dynamic_scaler(self) -> Any:
        """ZeRO has a scaler in fp32 too, a constant 1, which another layout (one data parallel rank) does not have."""
        scaler = getattr(getattr(self.engine, "optimizer", None), "loss_scaler", None)
        return scaler if hasattr(scaler, "cur_iter") else None

    def held(self, chosen: Callable[[Mapping[str, Any]], bool]) -> list[tuple[list[Tensor], list[Held]]]:
        """What this rank has of the parameters of chosen optimizer groups, replicas too: the flat tensors that a group
        has during a step of the optimizer, and what lies where in them. ZeRO 3 steps once for each of its flat tensors.
        """
        steps: dict[Any, list[Tensor]] = {}
        for number, (group, flat) in enumerate(self._flats()):
            if chosen(group):
                steps.setdefault(number if self.stage == 3 else group["name"], []).append(flat)
        lying: dict[Tensor, list[Owned]] = {}
        for owned in self.owned():
            lying.setdefault(owned.flat, []).append(owned)
        return [
            (
                flats,
                [
                    Held(each.tensor, each.cut, each.start, each.length, number, each.place)
                    for number, flat in enumerate(flats)
                    for each in lying.get(flat, ())
                ],
            )
            for flats in steps.values()
        ]

    def scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of masters; `refresh` makes the weights of it.

        Args:
            factors: by name of a parameter, one for each row of this rank's shard.
        """
        for owned in self.owned():
            if owned.tensor.name in factors:
                shape, view = owned.tensor.local_shape(*owned.cut), owned.view(owned.flat)
                places = torch.arange(owned.start, owned.start + owned.length, device=view.device)
                view.mul_(factors[owned.tensor.name].to(view.device)[places // prod(shape[1:])])

    def _buffer_fragments(self) -> Iterator[Fragment]:
        for tensor in self.buffers:
            yield Fragment(logical_of(tensor), MASTER, 0, 1, 0, tensor.view(-1))

    def _fragments(self, replicas: bool) -> Iterator[Fragment]:
        """Masters and states of what this rank owns, with or without what others save too.

        Where the optimizer evaluates other weights than it trains, the masters are those, made for the purpose, and the
        others are saved beside them. The former follow from the rest, so that no rank is to be filled with them.
        """
        self.for_training()
        self._create_states()
        groups = {flat: group for group, flat in self._flats()}
        states = {flat: element_states(self.optimizer, group, flat) for flat, group in groups.items()}

        def averages(flat: Tensor) -> dict[str, Tensor]:
            return {AVERAGE: self._average_of(flat)} if self._averaging else {}

        for owned in self.owned():
            if replicas or not owned.replica:
                other = self._evaluates is not None and owned.flat in groups
                if other and not replicas:
                    values = self._evaluation_weights(groups[owned.flat], owned, states[owned.flat])
                    yield Fragment(owned.tensor, MASTER, *owned.cut, owned.start, values)
                weights = {TRAINED if other else MASTER: owned.flat}
                for name, values in {**weights, **averages(owned.flat), **states.get(owned.flat, {})}.items():
                    yield Fragment(owned.tensor, name, *owned.cut, owned.start, owned.view(values))
        if isinstance(self.optimizer, MatrixOptimizer):
            copies = {logical_of(p).name for p in self.parameters if getattr(p, "ds_pipe_replicated", False)}
            for tensor, name, start, values in self.optimizer.owned_states():
                if replicas or tensor.name.removesuffix(f".{name}") not in copies:
                    yield Fragment(tensor, name, 0, 1, start, values)

    def _evaluation_weights(self, group: Mapping[str, Any], owned: Owned, states: Mapping[str, Tensor]) -> Tensor:
        kept = self.optimizer.state[owned.flat]
        own = {name: owned.view(values) for name, values in states.items()}
        return self._evaluates(group, owned.view(owned.flat), {**kept, **own})

    def owned(self) -> Iterator[Owned]:
        """Where what this rank has of each tensor lies, replicas included."""
        find = {0: self._whole, 3: self._partitioned}.get(self.stage, self._flattened)
        for parameter in self.parameters:
            tensor = logical_of(parameter)
            replica = (tensor.shard is None and self.mesh.tensor.rank > 0) or getattr(
                parameter, "ds_pipe_replicated", False
            )
            yield from find(parameter, tensor, replica)

    def _whole(self, parameter: nn.Parameter, tensor: LogicalTensor, replica: bool) -> Iterator[Owned]:
        same = self.mesh.expert_data if is_spread(parameter) else self.mesh.replicas
        yield Owned(
            tensor,
            shard_index(parameter),
            shard_start(parameter),
            parameter.numel(),
            parameter,
            0,
            replica or same.rank > 0,
        )

    def _flattened(self, parameter: nn.Parameter, tensor: LogicalTensor, replica: bool) -> Iterator[Owned]:
        flattened: Any = parameter  # with an attribute of DeepSpeed
        mapping = flattened._hp_mapping
        if mapping is None:
            return
        (flat,) = self.optimizer.param_groups[mapping.param_group_index]["params"]
        yield Owned(
            tensor,
            shard_index(parameter),
            shard_start(parameter) + mapping.lp_fragment_address.start,
            mapping.lp_fragment_address.numel,
            flat,
            mapping.hp_fragment_address.start,
            replica,
        )

    def _partitioned(self, parameter: nn.Parameter, tensor: LogicalTensor, replica: bool) -> Iterator[Owned]:
        zero = self.engine.optimizer
        group, place, share = zero.grad_position[zero.get_param_id(parameter)]
        start = self.mesh.replicas.rank * share
        partitioned: Any = parameter  # with an attribute of DeepSpeed
        length = min(share, partitioned.ds_numel - start)  # the last share is padded
        if length > 0:
            yield Owned(
                tensor, shard_index(parameter), start, length, zero.fp32_partitioned_groups_flat[group], place, replica
            )

    def partitions(self) -> Iterator[tuple[Owned, Tensor]]:
        """At ZeRO 3, this rank's share of the weights of the forward pass: they lie as their masters do."""
        zero = self.engine.optimizer
        flats = dict(zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True))
        for owned in self.owned():
            if flats[owned.flat] is not None:
                yield owned, owned.view(flats[owned.flat])

    def _create_states(self) -> None:
        """Give the optimizer its states before its first step, as it would make them itself."""
        for group, flat in self._flats():
            initialize_state(self.optimizer, group, [flat])

    def _flats(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        if self.stage < 3:
            for group in self.optimizer.param_groups:
                for flat in group["params"]:
                    yield group, flat
            return
        zero = self.engine.optimizer
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            yield self.optimizer.param_groups[zero.sub_group_to_group_id[index]], flat

    def _refresh_partitioned(self) -> None:
        zero = self.engine.optimizer
        # An evaluation leaves parameters gathered that a backward pass would read again: they would stay what they are.
        zero.parameter_offload.partition_all_parameters()
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            zero.fp16_partitioned_groups_flat[index].data.copy_(flat.data)
            parts = zero.unflatten(zero.fp16_partitioned_groups_flat[index], zero.fp16_partitioned_groups[index])
            for partition, values in zip(zero.fp16_partitioned_groups[index], parts):
                partition.data = values.data
        zero.invalidate_secondary_tensor()  # hpZ's second copy, which DeepSpeed makes again of the new weights
        if zero.persistent_parameters:  # small parameters that are never released: gather their new values
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
