"""The weights in GPT-NeoX's own checkpoints, by layer and tensor parallel rank.

With a pipeline (`pipe_parallel_size` of at least 1) each layer is a file per rank, `layer_XX-model_YY-model_states.pt`.
Without, `mp_rank_YY_model_states.pt` has all layers of a rank, named `sequential.XX.`. Layers are identified by their
content, since some numbers belong to layers without parameters. Version 2 later renamed the matrices of the MLP.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.config.file_access import UnsafeName, path_inside

from ..format.errors import CheckpointError
from ..format.pickles import load_tensors

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
    try:
        return [
            (path_inside(folder, path.name), *map(int, match.groups()))
            for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
            if (match := pattern.fullmatch(path.name))
        ]
    except UnsafeName as error:
        raise CheckpointError(folder, str(error)) from error
