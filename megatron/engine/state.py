"""This rank's part of the run's state, as fragments of logical tensors, under every ZeRO stage.

DeepSpeed keeps fp32 masters and optimizer states in flat tensors. At stage 0 each parameter is its own. At stages 1
and 2 (and in its bf16 optimizer) there is one per parameter group, shared equally by the data parallel ranks. At
stage 3 there is one per sub-group, with an equal share of every parameter. Here all three are a list of `Owned`: a
range of a parameter's shard, and its place in a flat tensor. Checkpoints read and write these in place."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.format.fragment import AVERAGE, MASTER, TRAINED, WEIGHT, Fragment
from megatron.parallel.layers.parameters import is_copy, is_spread, logical_of, shard_index, shard_start
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor

from .optimizers.contract import element_states, fingerprints, initialize_state, number_names
from .optimizers.matrix import MatrixOptimizer
from .optimizers.whole import Held

FINGERPRINTS = "fingerprints"  # among the counters


@dataclass(frozen=True)
class Owned:
    """Elements [start, start + length) of the flattened shard `cut` (rank, ranks), which lie in `flat` from `place`
    on."""

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


def fragment_of(owned: Owned, name: str, values: Tensor, target: bool) -> Fragment:
    """The fragment of a checkpoint with these values of a range. A part may give another, whose data are a copy.

    Args:
        target: whether it may be filled. `EngineState.filled` then takes the new values.
    """
    return Fragment(owned.tensor, name, *owned.cut, owned.start, values)


class EngineState:
    """Masters and optimizer states of one engine.

    Args:
        optimizer: the torch optimizer that it was given.
        parameters: this rank's parameters, each once.
        buffers: tensors that are saved, but not optimized (`ParameterFactory.buffer`).
        average: whether an average of the weights is kept too.
        frozen: this rank's parameters that are not trained, and that no checkpoint of the run has.
        settle: waits for weights that are being gathered. Here it is called before weights are read, and before masters
            are written: on CPUs in fp32 they are a part of the weights, which a gather would overwrite.
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
        frozen: Sequence[nn.Parameter] = (),
        settle: Callable[[], None] = lambda: None,
    ):
        self._averages: dict[Tensor, Tensor] = {}  # by flat tensor, of its shape
        self._evaluates: Any = getattr(optimizer, "evaluation_weights", None)
        self._trained: dict[Tensor, Tensor] = {}  # by flat tensor: weights to restore after an evaluation
        self._averaging, self._settle = average, settle
        self.engine, self.optimizer, self.mesh, self.stage = engine, optimizer, mesh, stage
        self.parameters, self.buffers = list(dict.fromkeys(parameters)), buffers
        self._frozen = list(dict.fromkeys(frozen))
        self.others: list[Callable[[], Iterator[Fragment]]] = []  # further fragments that this rank keeps
        self.before_change: Callable[[], None] = lambda: None  # called before masters are changed from outside
        self.fragment_of = fragment_of
        self.filled: Callable[[], None] = lambda: None  # called after `targets` were filled
        self._first_scaler = self.loss_scaler()

    def fragments(self) -> Iterator[Fragment]:
        """Fragments that this rank saves. Exactly one rank saves each element of the run's state."""
        yield from self._fragments(replicas=False)
        for each in self.others:
            yield from each()
        if self.mesh.tensor.rank == self.mesh.replicas.rank == 0:
            yield from self._buffer_fragments()

    def weights(self, dtype: torch.dtype) -> Iterator[Fragment]:
        """Fragments that this rank saves of the weights, made from the masters, and of their average."""
        for fragment in self.fragments():
            if fragment.state == MASTER:
                data = fragment.data if fragment.tensor.keep_fp32 else fragment.data.to(dtype)
                yield replace(fragment, state=WEIGHT, data=data)
            elif fragment.state == AVERAGE:
                yield fragment

    def targets(self) -> list[Fragment]:
        """All fragments that this rank must fill to resume, replicas included. Their data are the engine's own
        tensors."""
        others = [fragment for each in self.others for fragment in each()]
        return [*self._fragments(replicas=True), *self._buffer_fragments(), *others]

    def addresses(self) -> list[int]:
        """Addresses of the tensors behind `targets`, and of the weights of the forward pass. The targets are the
        same while these are."""
        self._settle()
        self.for_training()
        flats = [flat for _, flat in self.flats()]
        states = [value for flat in flats for value in self.optimizer.state.get(flat, {}).values()]
        others = [*self.buffers, *self._averages.values(), *(self.parameters if self.stage < 3 else ())]
        if isinstance(self.optimizer, MatrixOptimizer):
            others += [values for *_, values in self.optimizer.owned_states()]
        return [each.data_ptr() for each in (*flats, *states, *others) if isinstance(each, Tensor)]

    def masters(self) -> list[Fragment]:
        """The engine's own fp32 masters, for a start from weights only."""
        return [replace(each, state=MASTER) for each in self.targets() if each.state in (MASTER, TRAINED)]

    def frozen(self) -> Iterator[Fragment]:
        """Fragments of this rank's frozen parameters, with the tensors of the forward pass."""
        for parameter in self._frozen:
            tensor, cut, begin = logical_of(parameter), shard_index(parameter), shard_start(parameter)
            marks: Any = parameter  # with attributes of DeepSpeed
            if self.stage < 3:
                yield Fragment(tensor, WEIGHT, *cut, begin, parameter.detach().view(-1))
                continue
            first = self.mesh.replicas.rank * marks.ds_tensor.ds_numel
            length = min(marks.ds_tensor.ds_numel, marks.ds_numel - first)  # the last share is padded
            if length > 0:
                yield Fragment(tensor, WEIGHT, *cut, first, marks.ds_tensor.detach().view(-1)[:length])

    @property
    def has_frozen(self) -> bool:
        """Whether some weights of the run are frozen."""
        return bool(self._frozen)

    def refresh(self) -> None:
        """Update the weights of the forward pass from the masters. Call it after filling or changing masters."""
        self.before_change()
        self.filled()
        self._refresh()

    def _refresh(self) -> None:
        if self.stage == 3:
            self._refresh_partitioned()
        elif self.stage > 0:
            self.engine.optimizer.update_lp_params()

    def for_evaluation(self) -> None:
        """Replace the weights by the optimizer's evaluation weights, if it has such."""
        self._settle()
        if self._evaluates is None or self._trained:
            return
        self._create_states()
        for group, flat in self.flats():
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
        for _, flat in self.flats():
            self._average_of(flat).copy_(flat.detach())

    def advance_average(self, coefficient: float) -> None:
        """average = coefficient * average + (1 - coefficient) * weights."""
        for _, flat in self.flats():
            self._average_of(flat).lerp_(flat.detach(), 1 - coefficient)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the average inside this context. Restores everything afterwards, to the last bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self._settle()
        for _, flat in self.flats():
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
        """Numbers that the optimizer keeps in addition to tensors: updates done, other numbers shared by all
        parameters, and fingerprints of the files that it reads."""
        self._create_states()  # before the first update the counts are 0, not missing
        names, states = number_names(self.optimizer), self.optimizer.state.values()
        found: dict[str, Any] = {name: float(each[name]) for each in reversed(states) for name in names if name in each}
        read = fingerprints(self.optimizer)
        return {**found, FINGERPRINTS: read} if read else found

    def other_files(self, counters: Mapping[str, Any]) -> list[str]:
        """Keys whose files have changed since the optimizer wrote `counters`."""
        kept, own = counters.get(FINGERPRINTS, {}), fingerprints(self.optimizer)
        return sorted(key for key in kept.keys() & own.keys() if kept[key] != own[key])

    def restore_counters(self, counters: Mapping[str, Any]) -> None:
        """Set the counts. Missing ones become 0: a checkpoint without counts is from before the first update."""
        self._create_states()
        for state in self.optimizer.state.values():
            for name in number_names(self.optimizer):
                if name in state:
                    state[name].fill_(counters.get(name, 0.0))

    def loss_scaler(self) -> dict[str, Any]:
        """State of the dynamic loss scaler. Empty without fp16."""
        scaler = self._dynamic_scaler()
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: getattr(scaler, name) for name in names if hasattr(scaler, name)}

    def restore_loss_scaler(self, values: Mapping[str, Any]) -> None:
        """Set the scaler. Missing values are reset."""
        scaler = self._dynamic_scaler()
        for name, value in {**self._first_scaler, **values}.items() if scaler else ():
            setattr(scaler, name, value)

    def _dynamic_scaler(self) -> Any:
        """The scaler of fp16. ZeRO has a constant scaler of 1 in fp32 too, which other layouts do not have."""
        scaler = getattr(getattr(self.engine, "optimizer", None), "loss_scaler", None)
        return scaler if hasattr(scaler, "cur_iter") else None

    def held(self, chosen: Callable[[Mapping[str, Any]], bool]) -> list[tuple[list[Tensor], list[Held]]]:
        """This rank's parts of the parameters of chosen optimizer groups, replicas included: the flat tensors that a
        group has during a step of the optimizer, and their contents. ZeRO 3 steps once for each of its flat tensors."""
        steps: dict[Any, list[Tensor]] = {}
        for number, (group, flat) in enumerate(self.flats()):
            if chosen(group):
                steps.setdefault(number if self.stage == 3 else group["name"], []).append(flat)
        lying: dict[Tensor, list[Owned]] = {}
        for owned in self.owned():
            lying.setdefault(owned.flat, []).append(owned)

        def within(flats: list[Tensor]) -> list[Held]:
            return [
                Held(each.tensor, each.cut, each.start, each.length, number, each.place)
                for number, flat in enumerate(flats)
                for each in lying.get(flat, ())
            ]

        return [(flats, within(flats)) for flats in steps.values()]

    def scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of masters. Call `refresh` afterwards.

        Args:
            factors: by name of a parameter, one for each row of this rank's shard.
        """
        self._settle()
        for owned in self.owned():
            if owned.tensor.name in factors:
                shape, view = owned.tensor.local_shape(*owned.cut), owned.view(owned.flat)
                places = torch.arange(owned.start, owned.start + owned.length, device=view.device)
                view.mul_(factors[owned.tensor.name].to(view.device)[places // prod(shape[1:])])

    def _buffer_fragments(self) -> Iterator[Fragment]:
        for tensor in self.buffers:
            yield Fragment(logical_of(tensor), MASTER, 0, 1, 0, tensor.view(-1))

    def _fragments(self, replicas: bool) -> Iterator[Fragment]:
        """Masters and states that this rank owns, with or without replicas.

        An optimizer may evaluate other weights than it trains. The masters are then the evaluated weights, computed
        here, and the trained ones are saved next to them. The evaluated weights follow from the rest, so they are no
        target of a read."""
        self._settle()
        self.for_training()
        self._create_states()
        groups = {flat: group for group, flat in self.flats()}
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
                    yield self.fragment_of(owned, name, owned.view(values), replicas)
        if isinstance(self.optimizer, MatrixOptimizer):
            copies = {
                logical_of(p).name
                for p in self.parameters
                if getattr(p, "ds_pipe_replicated", False) and not is_copy(p)
            }
            for tensor, name, start, values in self.optimizer.owned_states():
                if replicas or tensor.name.removesuffix(f".{name}") not in copies:
                    yield Fragment(tensor, name, 0, 1, start, values)

    def _evaluation_weights(self, group: Mapping[str, Any], owned: Owned, states: Mapping[str, Tensor]) -> Tensor:
        kept = self.optimizer.state[owned.flat]
        own = {name: owned.view(values) for name, values in states.items()}
        return self._evaluates(group, owned.view(owned.flat), {**kept, **own})

    def owned(self) -> Iterator[Owned]:
        """All that this rank has of each tensor, replicas included."""
        find = {0: self._whole, 3: self._partitioned}.get(self.stage, self._flattened)
        for parameter in self.parameters:
            tensor, copy = logical_of(parameter), getattr(parameter, "ds_pipe_replicated", False)
            yield from find(parameter, tensor, copy or (tensor.shard is None and self.mesh.tensor.rank > 0))

    def _whole(self, parameter: nn.Parameter, tensor: LogicalTensor, replica: bool) -> Iterator[Owned]:
        same = self.mesh.expert_data if is_spread(parameter) else self.mesh.replicas
        cut, start = shard_index(parameter), shard_start(parameter)
        yield Owned(tensor, cut, start, parameter.numel(), parameter, 0, replica or same.rank > 0)

    def _flattened(self, parameter: nn.Parameter, tensor: LogicalTensor, replica: bool) -> Iterator[Owned]:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # an attribute of DeepSpeed
        if mapping is None:
            return
        (flat,) = self.optimizer.param_groups[mapping.param_group_index]["params"]
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        start = shard_start(parameter) + here.start
        yield Owned(tensor, shard_index(parameter), start, here.numel, flat, there.start, replica)

    def _partitioned(self, parameter: nn.Parameter, tensor: LogicalTensor, replica: bool) -> Iterator[Owned]:
        zero = self.engine.optimizer
        group, place, share = zero.grad_position[zero.get_param_id(parameter)]
        start = self.mesh.replicas.rank * share
        # An attribute of DeepSpeed. The last share is padded.
        length = min(share, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if length > 0:
            flat = zero.fp32_partitioned_groups_flat[group]
            yield Owned(tensor, shard_index(parameter), start, length, flat, place, replica)

    def partitions(self) -> Iterator[tuple[Owned, Tensor]]:
        """At ZeRO 3, this rank's share of the weights of the forward pass. They lie as their masters do."""
        zero = self.engine.optimizer
        flats = dict(zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True))
        for owned in self.owned():
            if flats[owned.flat] is not None:
                yield owned, owned.view(flats[owned.flat])

    def _create_states(self) -> None:
        """Create the optimizer's states before its first step, as that would."""
        for group, flat in self.flats():
            initialize_state(self.optimizer, group, [flat])

    def flats(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Each flat tensor of this rank with its group of the optimizer."""
        if self.stage < 3:
            for group in self.optimizer.param_groups:
                for flat in group["params"]:
                    yield group, flat
            return
        zero = self.engine.optimizer
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            yield self.optimizer.param_groups[zero.sub_group_to_group_id[index]], flat

    def _refresh_partitioned(self) -> None:
        from .deepspeed.step_on_device import order_gathers  # loads DeepSpeed

        zero = self.engine.optimizer
        # After an evaluation some parameters are still gathered. They would keep their old values.
        zero.parameter_offload.partition_all_parameters()
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            zero.fp16_partitioned_groups_flat[index].data.copy_(flat.data)
            parts = zero.unflatten(zero.fp16_partitioned_groups_flat[index], zero.fp16_partitioned_groups[index])
            for partition, values in zip(zero.fp16_partitioned_groups[index], parts):
                partition.data = values.data
        order_gathers(zero)
        zero.invalidate_secondary_tensor()  # hpZ's second copy, which DeepSpeed makes again from the new weights
        # Small parameters are never released: gather their new values. But in its first micro-batch DeepSpeed notes who
        # has to gather, and a parameter that is whole by then is released and gathered by another module later.
        if zero.persistent_parameters and zero.parameter_offload.get_param_coordinator().is_complete_trace():
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
