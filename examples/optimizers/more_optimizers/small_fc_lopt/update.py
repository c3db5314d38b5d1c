"""The learned optimizer small_fc_lopt (Metz et al. 2022, arXiv 2203.11860), as the package PyLO computes it.

A small network, trained on other trainings, computes the step of each element from 39 features. They are gradient and
weight, three averages of the gradient, one of its square, squares by row and column with three coefficients, and the
step's number. Features are divided by their root mean square over the tensor, and squares by row and column are of the
whole tensor, so each tensor has an owner. With the rates of muP it is MuLO (Thérien et al. 2024, arXiv 2406.00153).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import Config
from megatron.config.problems import UserError
from megatron.engine.optimizers.groups import use_fused
from megatron.engine.optimizers.matrix import WEIGHT, MatrixOptimizer, blocks, sizes
from megatron.engine.optimizers.whole import Held, OwnedUnit
from megatron.parallel.layout.mesh import Axis
from megatron.parallel.layout.shard import LogicalTensor

from .network import FEATURES, LARGEST, NAME, RULE, network_of, weights_file
from .options import OPTIMIZER, PACKAGE

KEY = "optimizer.options.weights"
THREE = 3  # coefficients of the averages of gradients, and of the averages of their squares by row and column
# Our states by PyLO's names of them.
STATES = {
    "mom": "momenta",
    "rms": "squares",
    "fac_vec_row": "row_squares",
    "fac_vec_col": "column_squares",
    "fac_vec_v": "vector_squares",
}


class SmallFcLopt(MatrixOptimizer):
    """small_fc_lopt for all tensors. Fused matrices and experts are tensors of their own.

    State, at the owner of a tensor: `momenta`, `squares`, and of matrices `row_squares`, `column_squares`, of vectors
    `vector_squares`.

    Args:
        network: the weights of the optimizer's network, by name.
        groups, fused: see `MatrixOptimizer`.
    """

    reads_weights = True
    matrices_alone = False

    def __init__(self, groups: Iterable[dict[str, Any]], network: Mapping[str, Tensor], **adamw: Any) -> None:
        super().__init__(groups, {}, **adamw)
        self.network = network
        self._packages: dict[torch.device, Any] = {}

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> SmallFcLopt:
        path = OPTIMIZER.options_of(config)["weights"]
        return cls(groups, read_network(str(path)), fused=use_fused(config, groups))

    @classmethod
    def group_settings(cls, config: Config, logical: LogicalTensor) -> dict[str, Any]:
        return {"matrix": True, "algorithm": "small_fc_lopt"}

    def matrix_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("step",)

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        shapes = sizes(logical) if is_matrices(logical) else [logical.shape]
        found: dict[str, int] = defaultdict(int)
        for shape in shapes:
            for name, own in state_shapes(shape).items():
                found[name] += prod(own)
        return dict(found)

    def attach(
        self, flats: Sequence[tuple[Sequence[Tensor], Sequence[Held]]], axis: Axis, device: torch.device
    ) -> None:
        self._package(device)  # what is wrong with it is said before the first step
        self._refuse_others(axis)
        super().attach(flats, axis, device)

    def fingerprints(self) -> dict[str, str]:
        """Of the network's names, shapes and fp32 values, in whatever form they were stored."""
        digest = hashlib.sha256()
        for name, values in sorted(self.network.items()):
            digest.update(f"{name} {list(values.shape)}\n".encode())
            digest.update(values.numpy().astype("<f4").tobytes())
        return {KEY: digest.hexdigest()}

    def _refuse_others(self, axis: Axis) -> None:
        """Each host reads a file of its own.

        Raises:
            UserError: ranks have different networks. All ranks raise it.
        """
        if axis.size == 1:
            return
        everyone: list[Any] = [None] * axis.size
        dist.all_gather_object(everyone, self.fingerprints()[KEY], group=axis.group)
        others = [str(rank) for rank, each in zip(axis.ranks, everyone) if each != everyone[0]]
        if others:
            raise UserError(
                f"{KEY}: must have the same values on all ranks. Rank{'s' * (len(others) > 1)} {', '.join(others)} "
                f"and rank {axis.ranks[0]} have different ones: copy one file to all hosts"
            )

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        places, steps = dict.fromkeys(states, 0), []
        for gradients, weights in zip(pieces(unit, whole.float()), pieces(unit, states[WEIGHT].float())):
            kept = {}
            for name, shape in state_shapes(gradients.shape[1:]).items():
                begin, places[name] = places[name], places[name] + prod(shape)
                kept[name] = states[name][:, begin : places[name]].unflatten(1, shape)
            steps.append(torch.empty_like(gradients))
            for number, (gradient, weight) in enumerate(zip(gradients, weights)):
                own = {name: values[number] for name, values in kept.items()}
                steps[-1][number] = self._step(gradient, weight, own, done)
        step = torch.cat(steps, dim=1) if len(steps) > 1 else steps[0]
        return step.view(unit.shape) * (1 - group["lr"] * group["weight_decay"])  # PyLO decays what the step has made

    def _step(self, gradient: Tensor, weight: Tensor, kept: Mapping[str, Tensor], done: int) -> Tensor:
        """The package's step of one tensor at a rate of 1. Its states change in place."""
        package, parameter = self._package(gradient.device), weight.clone()
        parameter.grad = gradient
        nothing = gradient.new_empty(0)
        states = {theirs: kept.get(ours, nothing) for theirs, ours in STATES.items()}
        package.param_groups[0].update(params=[parameter], step=done)
        package.state = defaultdict(dict, {parameter: states})
        package.step()
        for theirs, ours in STATES.items():
            if ours in kept:
                kept[ours].copy_(states[theirs])
        package.state = defaultdict(dict)
        return weight - parameter

    def _package(self, device: torch.device) -> Any:
        if device not in self._packages:
            self._packages[device] = package_optimizer(self.network, device)
        return self._packages[device]


def is_matrices(logical: LogicalTensor) -> bool:
    """Whether it is a matrix, several of them fused, or experts'."""
    return len(logical.shape) == 2 or logical.stacked


def pieces(unit: OwnedUnit, whole: Tensor) -> list[Tensor]:
    """Views [experts or 1, ...] of the tensors that a unit has fused."""
    return blocks(unit, whole) if is_matrices(unit.tensor) else [whole.view(1, *unit.shape)]


def state_shapes(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Of one tensor, as PyLO has them: squares are averaged over the longest dimension, and over the next longest."""
    found = {"momenta": (*shape, THREE), "squares": (*shape, 1)}
    if len(shape) < 2:
        return {**found, "vector_squares": (*shape, THREE)}
    next_longest, longest = (int(place) for place in np.argsort(shape)[-2:])
    for name, left_out in (("row_squares", longest), ("column_squares", next_longest)):
        found[name] = (*(size for place, size in enumerate(shape) if place != left_out), THREE)
    return found


def read_network(path: str) -> dict[str, Tensor]:
    """The network's weights, fp32.

    Raises:
        UserError: there is no such file, it is damaged, of another network, or has values that are not finite.
    """
    try:
        found = _tensors(weights_file(path))
        network_of({name: tuple(each.shape) for name, each in found.items()})
        if sum(each.nbytes for each in found.values()) > LARGEST:  # one stored value may stand for any number of them
            raise ValueError(f"{RULE} has more than {LARGEST // 2**20} MiB")
        broken = next((name for name, each in found.items() if not each.float().isfinite().all()), None)
        if broken is not None:
            raise ValueError(f"{RULE} has values in {broken} that are not finite")
    except (ValueError, OSError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"must be a file that can be read: {error.strerror}"
        raise UserError(f"{KEY} = {path!r}: {reason}: give weights of small_fc_lopt") from error
    return {name: each.float().contiguous() for name, each in found.items()}


def _tensors(file: Path) -> dict[str, Tensor]:
    """The content of a file.

    Raises:
        ValueError: it is damaged, or has something else than plain tensors of floating point by name.
    """
    try:
        if file.suffix == ".safetensors":
            found: Any = safetensors.torch.load_file(file)
        else:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # readers of archives fail in many ways
        raise ValueError(f"must be a file of tensors, and {file.name} cannot be read as tensors") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) and _plain(each) for name, each in found.items()):
        raise ValueError(f"{RULE} is no mapping from names to tensors of floating point")
    return found


def _plain(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.device.type == "cpu"
    )


def package_optimizer(network: Mapping[str, Tensor], device: torch.device) -> Any:
    """PyLO's optimizer with this network and one parameter, which stands for any.

    It reads its network from where Hugging Face's hub would put it: given a folder, it asks no server.

    Raises:
        UserError: the package is not there, or is another one of that name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of CUDA kernels that are not built
            from pylo.optim import AdafacLO_naive
    except ImportError as error:
        raise UserError(
            f"optimizer.type = 'small_fc_lopt' needs the package {PACKAGE.name}: {PACKAGE.command} ({error})"
        ) from error
    shape = network_of({key: tuple(each.shape) for key, each in network.items()})
    with tempfile.TemporaryDirectory(prefix="small_fc_lopt-") as folder:
        sizes = {"input_size": FEATURES, "hidden_size": shape.width, "hidden_layers": shape.layers}
        (Path(folder) / "config.json").write_text(json.dumps(sizes))
        safetensors.torch.save_file(dict(network), Path(folder) / NAME)
        return AdafacLO_naive([torch.zeros(1, device=device)], lr=1.0, weight_decay=0.0, hf_key=folder)
