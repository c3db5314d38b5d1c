"""Pruning in the engine: the parameter of a pruned matrix is the vector of its kept elements.

DeepSpeed sees only this vector. Its gradient, its sums over ranks, its master and its moments are therefore as short as
it is, at ZeRO 0 and 1 alike. A layer that multiplies gets the matrix with zeros in its other places, and the gradient
of the matrix is cut to the kept places as soon as it exists. In checkpoints the tensors are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from megatron.checkpoint import SOLO, CheckpointError, Communicator, Fragment, GroupCommunicator
from megatron.checkpoint.save.store import Store
from megatron.engine.part import EnginePart
from megatron.model.block import Block
from megatron.parallel.layers.linear import ColumnLinear, PartialLinear, RowLinear, WholeLinear
from megatron.parallel.layers.parameters import logical_of, shard_index
from megatron.parallel.layout.shard import Role
from megatron.training.start.fetch import local_path

from .masks import MaskHash, Matrix, Values, largest, local_places, of_checkpoint, of_file, of_start, other_than_zero
from .options import TENSORS, pruning_of

if TYPE_CHECKING:
    from megatron.engine.base import BaseEngine
    from megatron.engine.state import Owned

LINEARS = (ColumnLinear, RowLinear, WholeLinear, PartialLinear)  # of blocks


class _Spread(torch.autograd.Function):
    """Kept elements [k] and their places [k] to a matrix that is 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(places)
        whole = kept.new_zeros(shape.numel())
        whole[places] = kept
        return whole.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.reshape(-1)[places], None, None


@cache
def _pruned(kind: Any) -> Any:
    """The class of a pruned linear layer. Its `weight` is made of `kept` where it is read."""

    def weight(self: Any) -> Tensor:
        return cast(Tensor, _Spread.apply(self.kept, self.places, self.whole_shape))

    return type(f"Pruned{kind.__name__}", (kind,), {"weight": property(weight)})


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


class Pruning(EnginePart):
    """Prunes the layers, and keeps a hash of the masks with each checkpoint: a resume computes the same ones.

    Attributes:
        hash: of the masks. Empty on tensors without values.
    """

    hash = ""

    def __init__(self) -> None:
        self._places_of: dict[str, Tensor] = {}  # of the kept elements in the flattened shard
        self._sizes: dict[str, int] = {}  # of the shard
        self._open: list[tuple[Tensor, Tensor, Tensor]] = []  # whole range, places in it, kept values

    def module_made(self, engine: BaseEngine, module: nn.Module) -> None:
        layers = [*linear_layers(module)]
        matrices = {logical_of(each.weight).name: Matrix(logical_of(each.weight), each.weight.init) for each in layers}
        if not layers:
            raise ValueError("pruning needs linear layers in blocks, and this model has none")
        fake = layers[0].weight.is_meta or is_fake(layers[0].weight)
        masks, hashes = self._masks(engine, matrices, fake), MaskHash()
        vectors: dict[str, tuple[nn.Parameter, Tensor]] = {}
        for layer in layers:
            weight: nn.Parameter = layer.weight
            name = logical_of(weight).name
            if name not in vectors:
                if fake:  # tensors without values, for a count of bytes
                    count = max(1, round((pruning_of(engine.config).keep or 1.0) * weight.numel()))
                    places = torch.arange(count, dtype=torch.int32, device=weight.device)
                else:
                    mask = next(masks)
                    hashes.add(name, mask)
                    places = _places(weight, mask)
                    self._places_of[name], self._sizes[name] = places, weight.numel()
                vectors[name] = _vector(weight, places), places
            _replace(layer, *vectors[name])
        self.hash = hashes.text()

    def _masks(self, engine: BaseEngine, matrices: Mapping[str, Matrix], fake: bool) -> Iterator[np.ndarray]:
        """The mask of each matrix, in order."""
        if fake:
            return
        options = pruning_of(engine.config)
        names, values = self._values(engine, matrices)
        whole = largest(names, values, options.keep) if options.keep is not None and options.scope == "global" else None
        for name, matrix in matrices.items():
            if name not in names:
                yield np.ones(matrix.logical.shape, dtype=bool)
            elif options.keep is None:
                yield other_than_zero(values(name))
            else:
                yield (whole or largest([name], values, options.keep)).of(values(name))

    def _values(self, engine: BaseEngine, matrices: Mapping[str, Matrix]) -> tuple[list[str], Values]:
        options, base = pruning_of(engine.config), engine.config.checkpoint.initialize_from
        if options.mask is not None and options.mask.endswith(TENSORS):
            return of_file(Path(options.mask), matrices)
        if options.mask is None and base is None:
            return list(matrices), of_start(matrices, engine.plan.factory("").seed)
        where, key = (options.mask, "pruning.mask") if options.mask else (base, "checkpoint.initialize_from")
        assert where is not None
        folder, talk = Path(engine.config.checkpoint.dir), _communicator(engine)
        found = Store(folder, talk).weights(local_path(where, folder, talk, engine.config), key=key).checkpoint
        assert found is not None  # one was named
        return list(matrices), of_checkpoint(found, matrices)

    def attach(self, engine: BaseEngine) -> None:
        self._folder = Path(engine.config.checkpoint.dir)
        engine.state.fragment_of = self._fragment
        engine.state.filled = self._take

    def _fragment(self, owned: Owned, name: str, values: Tensor, target: bool) -> Fragment:
        """A range of the whole shard: from the first kept element that a rank owns to the next rank's first one."""
        places = self._places_of.get(owned.tensor.name)
        if places is None:
            return Fragment(owned.tensor, name, *owned.cut, owned.start, values)
        end = owned.start + owned.length
        first = int(places[owned.start]) if owned.start else 0
        last = int(places[end]) if end < len(places) else self._sizes[owned.tensor.name]
        own = places[owned.start : end].long() - first
        whole = values.new_zeros(last - first)
        whole[own] = values
        if target:
            self._open.append((whole, own, values))
        return Fragment(owned.tensor, name, *owned.cut, first, whole)

    def _take(self) -> None:
        """Whole tensors were filled: take the kept elements."""
        for whole, own, values in self._open:
            values.copy_(whole[own])
        self._open.clear()

    def before_step(self, step: int, micro_batches: int) -> None:
        self._open.clear()  # of readers that filled nothing

    def state(self) -> dict[str, Any]:
        return {"mask": self.hash}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Compare the masks with the hash of a checkpoint.

        Raises:
            CheckpointError: on every rank. They are others.
        """
        if state and state.get("mask") != self.hash:
            raise CheckpointError(
                self._folder,
                f"it was trained with another mask (hash {str(state.get('mask')):.12}, and here {self.hash:.12}). "
                "pruning.mask or checkpoint.initialize_from must name the weights that decided in its run",
            )


def _places(weight: nn.Parameter, mask: np.ndarray) -> Tensor:
    """Places of a rank's kept elements, as the whole mask says.

    Raises:
        ValueError: on every rank. One of them has none, and DeepSpeed has no empty parameters.
    """
    logical, (rank, ranks) = logical_of(weight), shard_index(weight)
    found = [local_places(logical, mask, each, ranks) for each in range(ranks)]
    if not all(map(len, found)):
        raise ValueError(
            f"pruning leaves a tensor parallel rank no element of {logical.name}: keep more, use pruning.scope=matrix, "
            "or fewer tensor parallel ranks"
        )
    places = torch.from_numpy(found[rank]).to(torch.int32 if weight.numel() < 2**31 else torch.int64)
    return places.to(weight.device)


def _vector(weight: nn.Parameter, places: Tensor) -> nn.Parameter:
    """The parameter of kept elements, with the marks of the matrix."""
    vector = nn.Parameter(weight.detach().reshape(-1)[places])
    vars(vector).update(vars(weight))
    return vector


def _replace(layer: Any, vector: nn.Parameter, places: Tensor) -> None:
    shape = layer.weight.shape
    del layer._parameters["weight"]
    kind: Any = type(layer)
    layer.__class__ = _pruned(kind)
    layer.kept, layer.whole_shape = vector, shape
    layer.register_buffer("places", places, persistent=False)


def _communicator(engine: BaseEngine) -> Communicator:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SOLO
    return GroupCommunicator(device=engine.device)
