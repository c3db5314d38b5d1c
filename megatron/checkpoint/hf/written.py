"""Write a Hugging Face folder: sharded safetensors as a stream, and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..format.container import header
from ..format.durable import CHUNK
from .convert import ConversionStep

Planned = tuple[ConversionStep, dict[str, tuple[torch.dtype, tuple[int, ...]]]]  # types and shapes that it writes

INDEX = "model.safetensors.index.json"


def shapes_of(
    steps: Iterable[ConversionStep], ours: dict[str, tuple[int, ...]], types: dict[str, torch.dtype]
) -> list[Planned]:
    """Each step with the names, types and shapes of its tensors, from our types and shapes.

    Wide types come first, so that each tensor of a file begins at a multiple of its element's size.
    """

    def empty(name: str) -> Tensor:
        return torch.empty(ours[name], device="meta", dtype=types[name])

    wide = sorted(steps, key=lambda step: -types[step.ours[0]].itemsize)
    return [(step, {name: (each.dtype, tuple(each.shape)) for name, each in step.to_hf(empty)}) for step in wide]


def files_of(planned: list[Planned], limit: int) -> list[list[Planned]]:
    """The steps in files of at most `limit` bytes. A step is never split, so a single one may be larger."""
    files: list[list[Planned]] = [[]]
    size = 0
    for step, shapes in planned:
        own = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in shapes.values())
        if files[-1] and size + own > limit:
            files.append([])
            size = 0
        files[-1].append((step, shapes))
        size += own
    return files


def write_tensors(folder: Path, planned: list[Planned], read: Callable[[str], Tensor], limit: int) -> Iterator[str]:
    """Write all tensors, with one step's tensors in memory at a time. Yields the name of each finished file.

    Args:
        read: gives one of our tensors by its name, in its planned type.
        limit: bytes of a file.
    """
    files, total = files_of(planned, limit), 0
    places: dict[str, str] = {}
    for number, content in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        shapes = {key: shape for _, each in content for key, shape in each.items()}
        start, entries = header(shapes, {"format": "pt"})
        with open(folder / name, "wb") as file:
            file.write(start)
            for step, _ in content:
                for key, tensor in step.to_hf(read):
                    if (found := (tensor.dtype, tuple(tensor.shape))) != shapes[key]:
                        raise ValueError(f"{key}: {found} instead of {shapes[key]}")
                    _write(file, tensor)
        places |= dict.fromkeys(shapes, name)
        total += sum(entry.end - entry.begin for entry in entries.values())
        yield name
    if len(files) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def _write(file: BinaryIO, tensor: Tensor) -> None:
    values = tensor.flatten().view(torch.uint8).numpy()
    for begin in range(0, len(values), CHUNK):
        file.write(values[begin : begin + CHUNK].data)
