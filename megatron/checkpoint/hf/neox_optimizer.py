"""The fp32 masters and optimizer states in GPT-NeoX's own checkpoints, which DeepSpeed wrote.

* ZeRO 1 and 2: `zero_pp_rank_R_mp_rank_M_optim_states.pt`, one per data and model parallel rank. A group of
  parameters is one flat tensor, and a data parallel rank has a slice of it. `param_slice_mappings` has the position of
  each parameter. `param_shapes` in the model parallel rank's file has the shapes (and the order, in files without
  mappings).
* ZeRO 0: in `mp_rank_M_model_states.pt`, for all data parallel ranks. In fp32 it is torch's own list of a state per
  parameter, in fp16 and bf16 one flat tensor per group. Neither has names. GPT-NeoX orders parameters with weight decay
  first, then biases and norms.

Model parallel ranks are ordered by pipeline stage, then by tensor parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..format.errors import CheckpointError, understanding
from ..format.fragment import MASTER
from .neox_files import OPTIMIZER, LayerShard, complete, first_name, matching, model_files, read_model_file

Place = tuple[int, str]  # number of a layer, name in it
Read = Callable[[str], Tensor]  # gives one state of a parameter by its name

Name = TypeVar("Name")  # of a parameter

EMBEDDING = "word_embeddings.weight"
_NAME = re.compile(r"(?:sequential\.)?(\d+)\.(.+)|tied_modules\.\w+\.(.+)")
_NORM = re.compile(r"(?:.*layernorm|norm)\.weight")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class OptimizerStates:
    """An optimizer's states, of all model parallel ranks or of one.

    Attributes:
        parameters: for each parameter, a function per tensor parallel rank that reads a state.
        states: our names of the states. The masters are the first.
        step: updates of the optimizer.
        scaler: of the fp16 loss scale. Empty without one.
        engine: entries of DeepSpeed's engine and of GPT-NeoX (`iteration`, `global_samples`, ...).
    """

    parameters: Mapping[Place, list[Read]]
    states: tuple[str, ...]
    step: float
    scaler: dict[str, Any]
    engine: dict[str, Any]

    def shards(self, place: Place, state: str) -> list[Tensor]:
        """One state of a parameter on each tensor parallel rank."""
        return [read(state) for read in self.parameters[place]]


def has_optimizer(folder: Path) -> bool:
    """Whether there are optimizer states."""
    if matching(folder, OPTIMIZER):
        return True
    return any(read_model_file(path).get("optimizer") for path in model_files(folder)[:1])


def read_optimizer(folder: Path, layers: Mapping[int, list[LayerShard]]) -> OptimizerStates:
    """All states of a checkpoint. Tensors are mapped, and read on demand.

    Args:
        layers: the weights, by layer and tensor parallel rank.

    Raises:
        CheckpointError: files or parameters are missing, or a file has another form than DeepSpeed's.
    """
    ranks, files = len(next(iter(layers.values()))), model_files(folder)
    zero: dict[int, dict[int, Path]] = {}
    for path, data_rank, rank in matching(folder, OPTIMIZER):
        zero.setdefault(rank, {})[data_rank] = path
    if not files or len(files) % ranks or (zero and set(zero) != set(range(len(files)))):
        raise CheckpointError(
            folder,
            f"the weights are of {ranks} tensor parallel ranks, there are {len(files)} files "
            f"mp_rank_*_model_states.pt, and optimizer states of {len(zero) or 'no'} model parallel ranks: some "
            "are lost",
        )
    found, rest = [], list(layers)  # `rest`: the layers of this pipeline stage and of those after it
    for rank, path in enumerate(files):
        model = read_model_file(path)
        with understanding(path):
            if zero:
                name = f"zero_pp_rank_{{}}_mp_rank_{rank:02d}_optim_states.pt"
                found.append(_of_zero(model, complete(folder, zero[rank], name), layers))
            else:
                here = {number: shards[rank % ranks].read() for number, shards in layers.items()}
                found.append(_of_plain(model, here, rest))
                if rank % ranks == ranks - 1:
                    rest = [number for number in rest if number > max(place[0] for place in found[-1].parameters)]
    return _together(folder, found, layers, ranks)


def _together(
    folder: Path, found: list[OptimizerStates], layers: Mapping[int, list[LayerShard]], ranks: int
) -> OptimizerStates:
    """Join all model parallel ranks. A tied embedding is on the first and the last stage, and taken from the first."""
    parameters: dict[Place, dict[int, Read]] = {}
    for rank, part in enumerate(found):
        for place, (read,) in part.parameters.items():
            parameters.setdefault(place, {}).setdefault(rank % ranks, read)
    embedding = next((place for place in parameters if place[1] == EMBEDDING), None)
    lost = [
        f"the optimizer has no states of layer {number}'s {name} on tensor parallel rank {rank}"
        for number, shards in layers.items()
        for name in shards[0].read()
        for rank in range(ranks)
        if rank not in parameters.get((number, name), {}) and not (name == EMBEDDING and embedding)
    ]
    if len({(part.states, part.step) for part in found}) > 1:
        lost.append("model parallel ranks have done different numbers of updates, or have different states")
    if lost:
        raise CheckpointError(folder, lost)
    whole = {place: [reads[rank] for rank in range(ranks)] for place, reads in parameters.items()}
    first = found[0]
    return OptimizerStates(whole, first.states, first.step, first.scaler, first.engine)


def _of_zero(model: dict[str, Any], files: list[Path], layers: Mapping[int, list[LayerShard]]) -> OptimizerStates:
    """One model parallel rank's part with ZeRO 1 or 2. `files`: one per data parallel rank."""
    parts = [read_model_file(path)["optimizer_state_dict"] for path in files]
    if len(parts) != model.get("dp_world_size", len(parts)):
        raise ValueError(
            f"the run had {model['dp_world_size']} data parallel ranks, and there are optimizer states of {len(parts)}"
        )
    mapped = all(part.get("param_slice_mappings") for part in parts)
    parameters, states, steps = {}, [], set()
    for group, shapes in enumerate(model["param_shapes"]):
        flats = []
        for part in parts:
            base = part["base_optimizer_state"]
            options = {} if isinstance(base, list) else base["param_groups"][group]
            state = base[group] if isinstance(base, list) else base["state"][options["params"][0]]
            flats.append({MASTER: part["single_partition_of_fp32_groups"][group], **_of_elements(state)})
            steps.add(_step(state, options, part.get("base_optimizer_state_step")))
        states += [tuple(flat) for flat in flats]
        slices = (
            _mapped([part["param_slice_mappings"][group] for part in parts], shapes)
            if mapped
            else _in_order(shapes, [len(flat[MASTER]) for flat in flats])
        )
        for name, shape in shapes.items():
            parameters[_place(name, layers)] = [_pieces(name, flats, slices[name], shape)]
    return _checked(parameters, states, steps, _scaler(parts[0].get("loss_scaler")), model)


def _mapped(mappings: list[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[tuple[int, int, int]]]:
    """Position of each parameter: (data parallel rank, start, length) of its pieces, in order."""
    return {
        name: [
            (rank, int(mapping[name].start), int(mapping[name].numel))
            for rank, mapping in enumerate(mappings)
            if name in mapping
        ]
        for name in names
    }


def _in_order(shapes: Mapping[Name, Any], lengths: list[int]) -> dict[Name, list[tuple[int, int, int]]]:
    """As `_mapped`, for consecutive parameters of one flat tensor, cut into slices of these lengths."""
    found, place = {}, 0
    for name, shape in shapes.items():
        own, begin = [], 0
        for rank, length in enumerate(lengths):
            start, stop = max(place, begin), min(place + prod(shape), begin + length)
            if start < stop:
                own.append((rank, start - begin, stop - start))
            begin += length
        found[name] = own
        place += prod(shape)
    return found


def _of_plain(model: dict[str, Any], here: Mapping[int, Mapping[str, Tensor]], rest: list[int]) -> OptimizerStates:
    """One model parallel rank's part with ZeRO 0.

    Args:
        here: the weights of all layers on its tensor parallel rank.
        rest: the layers of its pipeline stage and of later stages.
    """
    optimizer = model.get("optimizer")
    if not optimizer:
        raise ValueError(
            "it has no optimizer states, and there are no zero_pp_rank_* files (DeepSpeed did not save them for bf16 "
            "with ZeRO 0 until 2026): take only the weights (--weights)"
        )
    base = optimizer.get("optimizer_state_dict", optimizer)
    flat, masters = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
    keys = [group["params"] for group in base["param_groups"]]
    amount = sum(map(len, flat)) if flat else sum(map(len, keys))
    groups = _grouped(_stage(here, rest, amount, count=not flat), len(keys))
    parameters: dict[Place, list[Read]] = {}
    states: list[tuple[str, ...]] = []
    steps: set[float] = set()
    for number, (own, options) in enumerate(zip(groups, base["param_groups"], strict=True)):
        shapes = {place: tuple(here[place[0]][place[1]].shape) for place in own}
        if flat:
            entries = [{MASTER: flat[number], **_of_elements(base["state"][keys[number][0]])}]
            slices = _in_order(shapes, [len(flat[number])])
            parameters |= {place: [_pieces(place[1], entries, slices[place], shapes[place])] for place in own}
        else:
            fp32 = masters[number] if masters else [here[layer][name] for layer, name in own]
            entries = [
                {MASTER: master, **_of_elements(base["state"][key])}
                for master, key in zip(fp32, keys[number], strict=True)
            ]
            for place, entry in zip(own, entries, strict=True):
                parameters[place] = [
                    _pieces(place[1], [_flattened(entry)], [(0, 0, prod(shapes[place]))], shapes[place])
                ]
        states += [tuple(entry) for entry in entries]
        steps |= {_step(base["state"][key], options, None) for key in keys[number]}
    return _checked(parameters, states, steps, _scaler(optimizer), model)


def _stage(here: Mapping[int, Mapping[str, Tensor]], rest: list[int], amount: int, count: bool) -> list[Place]:
    """The parameters of the first layers of `rest` that have `amount` of them (or of elements), in module order.

    A tied embedding is stored once, in a module before all layers. The last stage has its own copy, which no layer's
    file has.
    """
    first = (next(iter(here)), EMBEDDING)
    found: dict[Place, int] = {}
    for layer in rest:
        if sum(found.values()) >= amount:
            break
        found |= {
            (layer, name): 1 if count else tensor.numel()
            for name, tensor in here[layer].items()
            if name != EMBEDDING or (layer, name) == first
        }
    copy = 1 if count else here[first[0]][EMBEDDING].numel()
    if first not in found and sum(found.values()) == amount - copy:
        found[first] = copy
    if sum(found.values()) != amount:
        raise ValueError(
            f"the optimizer has {amount} {'parameters' if count else 'elements'}, the layers {sum(found.values())}"
        )
    return sorted(found, key=lambda place: place[1] != EMBEDDING)


def _grouped(places: list[Place], groups: int) -> list[list[Place]]:
    """GPT-NeoX's groups of the optimizer: one without weight decay, else two."""
    if groups == 1:
        return [places]
    bare = [place for place in places if place[1].endswith(".bias") or _NORM.fullmatch(place[1])]
    return [[place for place in places if place not in set(bare)], bare]


def _pieces(
    name: str, flats: list[dict[str, Tensor]], slices: list[tuple[int, int, int]], shape: Sequence[int]
) -> Read:
    """A function that reads a parameter from these pieces (see `_mapped`) of flat tensors."""
    beyond = [rank for rank, start, length in slices if start < 0 or start + length > len(flats[rank][MASTER])]
    if beyond or sum(length for *_, length in slices) != prod(shape):
        raise ValueError(f"{name} is of the shape {tuple(shape)}, and the optimizer's flat tensors have not all of it")

    def read(state: str) -> Tensor:
        parts = [flats[rank][state][start : start + length] for rank, start, length in slices]
        return torch.cat(parts).view(tuple(shape))

    return read


def _flattened(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {state: values.flatten() for state, values in entry.items()}


def _of_elements(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}


def _step(state: Mapping[str, Any], options: Mapping[str, Any], elsewhere: Any) -> float:
    found = state.get("step", options.get("step", elsewhere))
    if found is None:
        raise ValueError("the optimizer does not say how many updates it has done")
    return float(found)


def _scaler(held: Any) -> dict[str, Any]:
    values = held if isinstance(held, dict) else getattr(held, "__dict__", {})
    found = {name: values[name] for name in _SCALER if isinstance(values.get(name), int | float)}
    return found if "cur_iter" in found else {}


def _place(name: str, layers: Mapping[int, list[LayerShard]]) -> Place:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"the optimizer has a parameter {name!r}, which is none of a layer's")
    if match[3] is None:
        return int(match[1]), first_name(match[2])
    return next(number for number, shards in layers.items() if match[3] in shards[0].read()), match[3]


def _checked(
    parameters: dict[Place, list[Read]],
    states: list[tuple[str, ...]],
    steps: Collection[float],
    scaler: dict[str, Any],
    model: Mapping[str, Any],
) -> OptimizerStates:
    if len(set(states)) != 1 or len(steps) != 1:
        raise ValueError("parameters have different states, or have been updated different numbers of times")
    engine = {name: value for name, value in model.items() if name not in ("module", "optimizer")}
    return OptimizerStates(parameters, states[0], next(iter(steps)), scaler, engine)
