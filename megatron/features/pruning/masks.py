"""Which elements of the matrices are kept: a function of whole tensors, so that every layout has the same ones.

Each rank computes the mask of each whole matrix, one after the other, and keeps the places of its own part."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from megatron.checkpoint import Checkpoint, CheckpointError, FragmentSpec
from megatron.checkpoint.format.fragment import WEIGHT
from megatron.config import Config
from megatron.model.block import Block
from megatron.model.stack import ModelPlan
from megatron.parallel.layers.linear import ColumnLinear, PartialLinear, RowLinear, WholeLinear
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.initial import Init, initial_values
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor, Role

from .options import PruningSection

HALF = 1 << 16  # magnitudes are counted by the upper and by the lower half of their bits
LINEARS = (ColumnLinear, RowLinear, WholeLinear, PartialLinear)  # of blocks
FLOATS = ("F16", "BF16", "F32", "F64")
Values = Callable[[str], np.ndarray]  # name -> fp32 of the whole matrix


@dataclass(frozen=True)
class Matrix:
    """A matrix that is pruned: its logical tensor, and how it starts."""

    logical: LogicalTensor
    init: Init


def linear_layers(module: nn.Module) -> Iterator[Any]:
    """The linear layers of blocks, in the order of their logical names. Layers with one matrix follow each other."""
    found = [
        part
        for block in module.modules()
        if isinstance(block, Block)
        for part in block.modules()
        if type(part) in LINEARS and logical_of(cast(Tensor, part.weight)).role in (Role.HIDDEN, Role.OUTPUT)
    ]
    yield from sorted(dict.fromkeys(found), key=lambda each: logical_of(cast(Tensor, each.weight)).name)


def matrices_of(config: Config) -> dict[str, Matrix]:
    """All matrices of a model that are pruned, in the order of their names. Each stage of a pipeline has some."""
    plan, found = ModelPlan(config, Mesh.describe(Layout(), 0), "meta", values=False), {}
    for index in range(len(config.model.blocks)):
        for layer in linear_layers(plan.block(index)):
            found[logical_of(layer.weight).name] = Matrix(logical_of(layer.weight), layer.weight.init)
    return dict(sorted(found.items()))


def of_start(matrices: Mapping[str, Matrix], seed: int) -> Values:
    """Initial values of a run."""

    def values(name: str) -> np.ndarray:
        matrix = matrices[name]
        return initial_values(replace(matrix.logical, shard=None), matrix.init, seed).numpy()

    return values


def of_checkpoint(checkpoint: Checkpoint, matrices: Mapping[str, Matrix]) -> Values:
    """Weights of a checkpoint.

    Raises:
        CheckpointError: it lacks a matrix, or has one of another shape.
    """
    for name, matrix in matrices.items():
        found = checkpoint.tensors.get(name)
        if found is None or not checkpoint.has_weights(name):
            raise CheckpointError(checkpoint.path, f"it must have the weights of {name}, which are pruned by it")
        _check_shape(checkpoint.path, name, found.shape, matrix.logical.shape)

    def values(name: str) -> np.ndarray:
        tensor = checkpoint.tensors[name]
        read = checkpoint.read(FragmentSpec.whole(tensor, WEIGHT), torch.float32).data.view(tensor.shape)
        return _finite(checkpoint.path, name, read.numpy())

    return values


def of_file(path: Path, matrices: Mapping[str, Matrix]) -> tuple[list[str], Values]:
    """(names of the matrices that a safetensors file has, their values).

    Raises:
        CheckpointError: it is damaged, or has a tensor of a name, shape or type that is none of a pruned matrix.
    """
    from safetensors import SafetensorError, safe_open

    try:  # the library compares every place with the size of the file, before anything is read
        file = safe_open(path, framework="pt")
        names = sorted(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path, f"it must be a whole safetensors file ({error})") from error
    if not names:
        raise CheckpointError(path, "it must have a mask, and has no tensors")
    for name in names:
        if name not in matrices:
            some = ", ".join(itertools.islice(matrices, 3))
            raise CheckpointError(path, f"{name!r:.99} must be the name of a linear layer's matrix, such as {some}")
        part = file.get_slice(name)
        _check_shape(path, name, tuple(part.get_shape()), matrices[name].logical.shape)
        if part.get_dtype() not in ("BOOL", "U8", "I8", *FLOATS):
            raise CheckpointError(path, f"{name} must be of type bool, 8 bits or float, and is {part.get_dtype()}")

    def values(name: str) -> np.ndarray:
        return _finite(path, name, file.get_tensor(name).float().numpy())

    return names, values


def _check_shape(path: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != tuple(wanted):
        raise CheckpointError(path, f"{name} must have the shape {list(wanted)}, and has {list(found)}")


def _finite(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise CheckpointError(path, f"{name} must have finite numbers only")
    return values


@dataclass
class Largest:
    """The elements above a magnitude, and the first `ties` elements that have it."""

    bits: int
    ties: int

    def of(self, values: np.ndarray) -> np.ndarray:
        """The mask of the next matrix."""
        found = _bits(values)
        mask = found > self.bits
        ties = np.flatnonzero(found.reshape(-1) == self.bits)[: self.ties]
        self.ties -= len(ties)
        mask.reshape(-1)[ties] = True
        return mask


def _bits(values: np.ndarray) -> np.ndarray:
    """Magnitudes as integers of the same order."""
    return np.abs(np.ascontiguousarray(values, dtype=np.float32)).view(np.int32)


def largest(names: list[str], values: Values, keep: float) -> Largest:
    """The largest elements of several matrices together: round(keep n) of n, at least one.

    Among equal magnitudes the first are kept, in the order of names and rows. Memory for one matrix is needed."""
    above = np.zeros(HALF, dtype=np.int64)
    for name in names:
        above += np.bincount(_bits(values(name)).reshape(-1) >> 16, minlength=HALF)
    count = max(1, round(keep * int(above.sum())))
    upper, left = _place(above, count)
    inside = np.zeros(HALF, dtype=np.int64)
    for name in names:
        bits = _bits(values(name)).reshape(-1)
        inside += np.bincount(bits[bits >> 16 == upper] & (HALF - 1), minlength=HALF)
    lower, left = _place(inside, left)
    return Largest((upper << 16) + lower, left)


def _place(counts: np.ndarray, count: int) -> tuple[int, int]:
    """(the largest bin at which `count` elements of the upper bins are reached, how many of its own are needed)."""
    sums = np.cumsum(counts[::-1])
    place = int(np.searchsorted(sums, count))
    return HALF - 1 - place, count - (int(sums[place - 1]) if place else 0)


def masks_of(
    options: PruningSection, matrices: Mapping[str, Matrix], names: list[str], values: Values
) -> Iterator[tuple[str, np.ndarray]]:
    """The mask of each matrix of the model, in order.

    Args:
        names: of the matrices that have `values`. The others stay whole.

    Raises:
        CheckpointError: `pruning.mask` keeps no element of a matrix, or has too few.
    """

    def largest_of(some: list[str]) -> Largest:
        assert options.keep is not None
        found = largest(some, values, options.keep)
        if options.mask is not None and found.bits == 0:
            where = some[0] if len(some) == 1 else f"its {len(some)} matrices together"
            rule = f"it must have at least {options.keep:.2%} of elements other than 0 in {where}, as pruning.keep says"
            raise CheckpointError(Path(options.mask), rule)
        return found

    whole = largest_of(names) if options.keep is not None and options.scope == "global" else None
    for name, matrix in matrices.items():
        if name not in names:
            yield name, np.ones(matrix.logical.shape, dtype=bool)
            continue
        mask = values(name) != 0 if options.keep is None else (whole or largest_of([name])).of(values(name))
        if options.mask is not None and not mask.any():
            raise CheckpointError(Path(options.mask), f"it must keep an element of {name}, and keeps none")
        yield name, mask


def local_places(matrix: LogicalTensor, mask: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """Places of the kept elements in the flattened shard of a rank, in order."""
    own = np.zeros(matrix.local_shape(rank, ranks), dtype=bool)
    for pieces in itertools.product(*matrix.spans(rank, ranks)):
        here = tuple(slice(each.local, each.local + each.length) for each in pieces)
        own[here] = mask[tuple(slice(each.start, each.stop) for each in pieces)]
    return np.flatnonzero(own)
