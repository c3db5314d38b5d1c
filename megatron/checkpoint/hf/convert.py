"""Conversion tensor by tensor: sets of tensors that belong together, and checks for missing and extra ones."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import SAME, Form

from ..format.container import header
from ..format.durable import CHUNK
from ..format.errors import CheckpointError
from .architecture import Architecture

EMBEDDING, HEAD = "embedding.tokens.weight", "head.weight"
REWARD, SCORE = "reward.weight", "score.weight"  # a reward model's head, and its name in all architectures


@dataclass(frozen=True)
class ConversionStep:
    """The smallest set of tensors that can be converted together: ours and theirs."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: Form

    def to_hf(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Their tensors, contiguous, made of ours. `read` gives one of ours by its name."""
        made = self.form.to_hf([read(name) for name in self.ours])
        return ((name, tensor.contiguous()) for name, tensor in zip(self.theirs, made, strict=True))

    def from_hf(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Our tensors, contiguous, made of theirs. `read` gives one of theirs by its name."""
        made = self.form.from_hf([read(name) for name in self.theirs])
        return ((name, tensor.contiguous()) for name, tensor in zip(self.ours, made, strict=True))

    def shapes(self, ours: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """The shapes of their tensors, from ours."""
        made = self.to_hf(lambda name: torch.empty(tuple(ours[name]), device="meta"))
        return {name: tuple(tensor.shape) for name, tensor in made}

    def cut_otherwise(self, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether only the cuts between joined rows differ, and the form accepts any cut."""
        if not self.form.any_cut or not all(found.values()):
            return False
        sides = (found.values(), wanted.values())
        rest = {shape[1:] for side in sides for shape in side}
        return len(rest) == 1 and len({sum(shape[0] for shape in side) for side in sides}) == 1


def plan(architecture: Architecture, ours: Iterable[str], model: ModelSection) -> list[ConversionStep]:
    """The steps that convert a model with these logical tensors, in either direction.

    Args:
        ours: names of all logical tensors of the model.
        model: has the number of layers, and the widths that forms need.

    Raises:
        CheckpointError: a tensor has no counterpart in the architecture, or only part of a set exists.
    """
    wanted, steps, problems = set(ours), list[ConversionStep](), []
    if REWARD in wanted:
        wanted.remove(REWARD)
        steps.append(ConversionStep((REWARD,), (SCORE,), SAME))
    layers = len(model.blocks) + len(model.further_blocks)
    for link in architecture.all_links(wanted.copy()):
        for layer in range(layers) if link.repeated else [None]:
            for suffix in link.suffixes:
                names, theirs = link.names(layer, suffix, model)
                have = [name for name in names if name in wanted]
                if not have:
                    continue
                if len(have) < len(names):
                    absent = " and ".join(name for name in names if name not in wanted)
                    problems.append(f"{' and '.join(have)} cannot become {theirs[0]} without {absent}")
                wanted.difference_update(names)
                steps.append(ConversionStep(names, theirs, link.form_in(model)))
    problems += [f"{name} has no counterpart in {architecture.class_name}" for name in sorted(wanted)]
    if problems:
        raise CheckpointError(architecture.class_name, problems)
    return steps


def further_tensors(ours: Iterable[str], model: ModelSection) -> list[str]:
    """Names of our tensors in modules that predict further tokens."""
    parts = {name: name.split(".") for name in ours}
    return [name for name, each in parts.items() if each[0] == "layers" and int(each[1]) >= len(model.blocks)]


def further_copies(
    architecture: Architecture, steps: list[ConversionStep], model: ModelSection
) -> list[ConversionStep]:
    """The steps that write copies of the model's shared tensors in each of those modules, where files have them."""
    made = {step.theirs[0]: step for step in steps}
    found = []
    for layer in range(len(model.blocks), len(model.blocks) + len(model.further_blocks)):
        for suffix in architecture.further_copies:
            name = f"{architecture.prefix}layers.{layer}.{suffix}"
            source = architecture.layers.source(name, made)
            if source is not None:
                found.append(ConversionStep(made[source].ours, (name,), made[source].form))
    return found


def to_hf(steps: Iterable[ConversionStep], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the Hugging Face model. Only one step's tensors are in memory."""
    for step in steps:
        yield from step.to_hf(read)


def match(
    architecture: Architecture, steps: list[ConversionStep], present: Collection[str], read: Callable[[str], Tensor]
) -> dict[str, str]:
    """Find the steps' tensors in a Hugging Face checkpoint: canonical name -> name there.

    Buffers of older checkpoints (masks, rotary frequencies) and tensors that no layer uses are ignored. A head that is
    tied to the embedding, and a second name of a shared tensor, must equal the original.

    Args:
        present: names of all tensors of the checkpoint, as on disk or as in a module's state dict.
        read: gives one of them.

    Raises:
        CheckpointError: tensors are missing or left over, or a tied head is not the embedding.
    """
    there, problems = dict[str, str](), list[str]()
    for name in present:
        if not architecture.is_buffer(name) and (first := there.setdefault(architecture.canonical(name), name)) != name:
            problems.append(f"{first} and {name} are two names of one tensor: keep one of them")
    needed = [name for step in steps for name in step.theirs]
    left = {name for name in set(there) - set(needed) if not architecture.layers.unused(name, needed)}
    for name in sorted(left):  # of the names of a shared tensor, transformers 4 keeps only the last one
        source = architecture.layers.source(name, needed)
        if source in needed:
            there.setdefault(source, there[name])
    problems += [f"missing: {name}" for name in needed if name not in there]
    if architecture.head in left and not problems and not any(HEAD in step.ours for step in steps):
        left.discard(architecture.head)
        problems += _untied(architecture, steps, there, read)
    for name in sorted(left):
        source = architecture.layers.source(name, needed)
        if source is None or source not in there:
            problems.append(f"left over: {there[name]}")
        elif not _same(read(there[name]), read(there[source])):
            problems.append(f"{there[name]} and {there[source]} are one tensor of layers that share it, but differ")
    if problems:
        raise CheckpointError(architecture.class_name, problems)
    return there


def from_hf(
    architecture: Architecture, steps: list[ConversionStep], present: Collection[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Every one of our tensors, made of a Hugging Face checkpoint's. Only one step's tensors are in memory.

    Arguments and errors as of `match`."""
    there = match(architecture, steps, present, read)
    for step in steps:
        yield from step.from_hf(lambda name: read(there[name]))


def _untied(
    architecture: Architecture, steps: list[ConversionStep], there: dict[str, str], read: Callable[[str], Tensor]
) -> list[str]:
    embedding = next(step.theirs[0] for step in steps if step.ours == (EMBEDDING,))
    if _same(read(there[architecture.head]), read(there[embedding])):
        return []
    return [f"tie_word_embeddings says that {there[architecture.head]} is {there[embedding]}, but they differ"]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.equal(other)


# -- files: sharded safetensors as a stream, and their index -----------------------------------------------------------

Planned = tuple[ConversionStep, dict[str, tuple[torch.dtype, tuple[int, ...]]]]  # types and shapes that it writes

INDEX = "model.safetensors.index.json"


def shapes_of(
    steps: Iterable[ConversionStep], ours: dict[str, tuple[int, ...]], types: dict[str, torch.dtype]
) -> list[Planned]:
    """Each step with the names, types and shapes of its tensors, from our types and shapes.

    Wide types come first, so that each tensor of a file begins at a multiple of its element's size."""

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
