"""Pruning in the engine: the parameter of a pruned matrix is the vector of its kept elements.

DeepSpeed sees only this vector. Its gradient, its sums over ranks, its master and its moments are therefore as short as
it is, at ZeRO 0 and 1 alike. A layer that multiplies gets the matrix with zeros in its other places, and the gradient
of the matrix is cut to the kept places as soon as it exists. In checkpoints the tensors are whole."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from megatron.checkpoint import CheckpointError, Fragment
from megatron.checkpoint.format.communicator import all_problems
from megatron.config.problems import UserError
from megatron.engine.base import BaseEngine
from megatron.engine.part import EnginePart
from megatron.engine.state import Owned
from megatron.parallel.layers.parameters import logical_of, shard_index
from megatron.training.start.fetch import weights_of

from .masks import Matrix, Values, linear_layers, local_places, masks_of, matrices_of, of_checkpoint, of_file, of_start
from .options import TENSORS, pruning_of


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
        weights: dict[str, nn.Parameter] = {logical_of(each.weight).name: each.weight for each in layers}
        if any(each.is_meta or is_fake(each) for each in weights.values()):  # no values, for a count of bytes
            keep = pruning_of(engine.config).keep or 1.0
            places = {
                name: torch.arange(max(1, round(keep * each.numel())), dtype=torch.int32, device=each.device)
                for name, each in weights.items()
            }
        else:
            places = self._places_of = self._chosen(engine, weights)
            self._sizes = {name: each.numel() for name, each in weights.items()}
        vectors = {name: _vector(each, places[name]) for name, each in weights.items()}
        for layer in layers:
            name = logical_of(layer.weight).name
            _replace(layer, vectors[name], places[name])

    def _chosen(self, engine: BaseEngine, weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Places of the kept elements of this rank's matrices, by the masks of all matrices.

        Raises:
            CheckpointError: on every rank. The ranks found different masks, or a mask cannot be used.
            UserError: on every rank. A mask of this or another rank cannot be used.
        """
        talk, found = engine.communicator, dict[str, Tensor]()
        failure: Exception | None = None
        try:
            found = self._places_by_masks(engine, weights)
        except (CheckpointError, OSError, UserError) as error:  # raised below: other stages and hosts wait
            failure = error
        if problems := all_problems(talk, [str(failure)] if failure else []):
            raise failure or UserError("; ".join(problems))
        if len(set(talk.gather(self.hash))) > 1:
            where = pruning_of(engine.config).mask or engine.config.checkpoint.initialize_from or ""
            raise CheckpointError(Path(where), "it must be the same on every host: ranks found different masks in it")
        return found

    def _places_by_masks(self, engine: BaseEngine, weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        hashes, found, matrices = hashlib.sha256(), dict[str, Tensor](), matrices_of(engine.config)
        if not matrices:
            raise UserError("pruning needs linear layers in blocks, and this model has none: remove pruning")
        for name, mask in masks_of(pruning_of(engine.config), matrices, *self._values(engine, matrices)):
            hashes.update(f"{name} {mask.shape}\n".encode() + np.packbits(mask).tobytes())
            if name in weights:
                found[name] = _places(weights[name], mask)
        self.hash = hashes.hexdigest()
        return found

    def _values(self, engine: BaseEngine, matrices: Mapping[str, Matrix]) -> tuple[list[str], Values]:
        options, base = pruning_of(engine.config), engine.config.checkpoint.initialize_from
        if options.mask is not None and options.mask.endswith(TENSORS):
            return of_file(Path(options.mask), matrices)
        if options.mask is None and base is None:
            return list(matrices), of_start(matrices, engine.plan.factory("").seed)
        where, key = (options.mask, "pruning.mask") if options.mask else (base, "checkpoint.initialize_from")
        assert where is not None
        return list(matrices), of_checkpoint(weights_of(where, key, engine.config, engine.communicator), matrices)

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
        UserError: on every rank of the stage. One of them has none, and DeepSpeed has no empty parameters.
    """
    logical, (rank, ranks) = logical_of(weight), shard_index(weight)
    found = [local_places(logical, mask, each, ranks) for each in range(ranks)]
    if not all(map(len, found)):
        raise UserError(
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
