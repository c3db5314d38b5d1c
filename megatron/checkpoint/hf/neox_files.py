"""The weights, fp32 masters and optimizer states in GPT-NeoX's own checkpoints, which DeepSpeed wrote.

With a pipeline (`pipe_parallel_size` of at least 1) each layer is a file per tensor parallel rank,
`layer_XX-model_YY-model_states.pt`. Without, `mp_rank_YY_model_states.pt` has all layers of a rank, named
`sequential.XX.`. Layers are identified by their content, since some numbers belong to layers without parameters.
Version 2 later renamed the matrices of the MLP. The masters and states:

* ZeRO 1 and 2: `zero_pp_rank_R_mp_rank_M_optim_states.pt`, one per data and model parallel rank. A group of
  parameters is one flat tensor, and a data parallel rank has a slice of it. `param_slice_mappings` has the position of
  each parameter. `param_shapes` in the model parallel rank's file has the shapes (and the order, in files without
  mappings).
* ZeRO 0: in `mp_rank_M_model_states.pt`, for all data parallel ranks. In fp32 it is torch's own list of a state per
  parameter, in fp16 and bf16 one flat tensor per group. Neither has names. GPT-NeoX orders parameters with weight decay
  first, then biases and norms.

Model parallel ranks are ordered by pipeline stage, then by tensor parallel rank."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..format.container import load_tensors
from ..format.errors import CheckpointError, part_of, understanding
from ..format.fragment import MASTER

LAYER = re.compile(r"layer_(\d{1,6})-model_(\d{1,5})-model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d{1,5})_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,5})_optim_states\.pt")
# Programs with objects among the tensors: counters, random states, addresses. They are read as plain values.
PROGRAMS = ("deepspeed", "megatron", "numpy", "_codecs")

RENAMED = {"mlp.linear1.": "mlp.dense_h_to_4h.", "mlp.linear2.": "mlp.dense_4h_to_h."}
BUFFERS = ("attention.rotary_emb.inv_freq", "attention.masked_bias", "attention.bias")
_SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")


@dataclass(frozen=True)
class LayerShard:
    """One tensor parallel rank's part of a layer, under the names of version 1.

    Attributes:
        path: the file.
        values: its tensors if they were read with others. Otherwise they are read on demand.
    """

    path: Path
    values: dict[str, Tensor] | None = None

    def read(self) -> dict[str, Tensor]:
        """The tensors, memory-mapped. No code in the file is run.

        Raises:
            CheckpointError: it is damaged, or has other objects than tensors.
        """
        values = load_tensors(self.path) if self.values is None else self.values
        if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
            raise CheckpointError(self.path, "it contains objects that are not tensors")
        return {first_name(name): value for name, value in values.items() if name not in BUFFERS}


def first_name(name: str) -> str:
    """A tensor's name in version 1."""
    for new, old in RENAMED.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def layers_of(folder: Path) -> dict[int, list[LayerShard]]:
    """The shards of each layer, by rank.

    Raises:
        CheckpointError: there are none, or a rank's file is missing.
    """
    found: dict[int, dict[int, LayerShard]] = {}
    for path, layer, rank in matching(folder, LAYER):
        found.setdefault(layer, {})[rank] = LayerShard(path)
    if not found:
        found = _without_pipeline(folder)
    if not found:
        raise CheckpointError(
            folder,
            "it has no layer_XX-model_YY-model_states.pt, and no mp_rank_YY_model_states.pt that holds the layers: "
            "give the global_stepN folder of a run of GPT-NeoX",
        )
    ranks = max(rank for shards in found.values() for rank in shards) + 1
    lost = [
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt is lost"
        for layer, shards in sorted(found.items())
        for rank in range(ranks)
        if rank not in shards
    ]
    if lost:
        raise CheckpointError(folder, lost)
    return {layer: [shards[rank] for rank in range(ranks)] for layer, shards in sorted(found.items())}


def _without_pipeline(folder: Path) -> dict[int, dict[int, LayerShard]]:
    found: dict[int, dict[int, dict[str, Tensor]]] = {}
    paths = model_files(folder)
    for rank, path in enumerate(paths):
        module = read_model_file(path).get("module")
        for name, value in module.items() if isinstance(module, dict) else ():
            if match := _SEQUENTIAL.fullmatch(str(name)):
                found.setdefault(int(match[1]), {}).setdefault(rank, {})[match[2]] = value
    return {
        layer: {rank: LayerShard(paths[rank], values) for rank, values in shards.items()}
        for layer, shards in found.items()
    }


def model_files(folder: Path) -> list[Path]:
    """`mp_rank_XX_model_states.pt` of each model parallel rank, ordered by pipeline stage.

    Raises:
        CheckpointError: one is missing.
    """
    return complete(folder, {rank: path for path, rank in matching(folder, MODEL)}, "mp_rank_{:02d}_model_states.pt")


def complete(folder: Path, files: dict[int, Path], name: str) -> list[Path]:
    """The files by rank. `name` formats the name of a missing one.

    Raises:
        CheckpointError: one is missing.
    """
    lost = sorted(set(range(max(files, default=-1) + 1)) - set(files))
    if lost:
        raise CheckpointError(folder, [f"{name.format(rank)} is lost" for rank in lost])
    return [files[rank] for rank in sorted(files)]


def read_model_file(path: Path) -> dict[str, Any]:
    """The content of a file with more than tensors. Classes of other programs become plain values.

    Raises:
        CheckpointError: it is damaged, or has any other object.
    """
    values = load_tensors(path, inert=PROGRAMS)
    if not isinstance(values, dict):
        raise CheckpointError(path, "it is none of the files that DeepSpeed writes")
    return values


def matching(folder: Path, pattern: re.Pattern) -> Collection[tuple]:
    """Files whose names match, each with the numbers in its name.

    Raises:
        CheckpointError: one leads out of the folder.
    """
    return [
        (part_of(folder, path.name), *map(int, match.groups()))
        for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
        if (match := pattern.fullmatch(path.name))
    ]


Place = tuple[int, str]  # number of a layer, name in it
Read = Callable[[str], Tensor]  # gives one state of a parameter by its name

Name = TypeVar("Name")  # of a parameter

EMBEDDING = "word_embeddings.weight"
_NAME = re.compile(r"(?:sequential\.)?(\d+)\.(.+)|tied_modules\.\w+\.(.+)")
_NORM = re.compile(r"(?:.*layernorm|norm)\.weight")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class OptimizerStates:
    """An optimizer's states, of all model parallel ranks or of one."""

    parameters: Mapping[Place, list[Read]]  # for each parameter, a function per tensor parallel rank that reads a state
    states: tuple[str, ...]  # our names of the states. The masters are the first.
    step: float  # updates of the optimizer
    scaler: dict[str, Any]  # of the fp16 loss scale. Empty without one.
    engine: dict[str, Any]  # entries of DeepSpeed's engine and of GPT-NeoX (`iteration`, `global_samples`, ...)

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
        raise ValueError(f"it has optimizer states of {len(parts)} of {model['dp_world_size']} data parallel ranks")
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
    file has."""
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
