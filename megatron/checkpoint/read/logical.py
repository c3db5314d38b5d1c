"""Logical tensors as streams of values, a chunk at a time. Content of a checkpoint, and difference of two."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from math import prod, sqrt
from typing import Any

import torch

from ..format.durable import CHUNK
from ..format.errors import CheckpointError
from ..format.fragment import FragmentSpec
from ..format.manifest import Meta
from .reader import Checkpoint


def streamed(checkpoint: Checkpoint, spec: FragmentSpec) -> Iterator[torch.Tensor]:
    """A range of any size as consecutive 1-D tensors in the stored type, of at most `CHUNK` bytes.

    Raises:
        CheckpointError: neither the state nor a substitute is stored.
    """
    source = checkpoint.source(spec)
    if source is None:
        raise CheckpointError(checkpoint.path, f"{spec.label} is not in the checkpoint")
    size = checkpoint.stored[spec.tensor.name, source].itemsize
    return (checkpoint.read(part).data for part in spec.parts(CHUNK // size))


def sha256(checkpoint: Checkpoint, name: str, state: str) -> str:
    """Hash of a logical tensor's bytes (row-major, little-endian), independent of the layout that wrote it."""
    digest = hashlib.sha256()
    for part in streamed(checkpoint, FragmentSpec.whole(checkpoint.tensors[name], state)):
        digest.update(part.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def describe(
    checkpoint: Checkpoint, *, norms: bool = False, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Any]:
    """Step, layout, versions, sizes and tensors of a checkpoint as plain values.

    Args:
        norms: also the 2-norm and the largest magnitude of each tensor and state, which reads all values.
        wanted: function of a tensor's name: whether to list it.
    """
    meta = {name: value for name, value in asdict(checkpoint.meta).items() if name != "config"}
    states: dict[str, dict[str, Any]] = {}
    for (name, state), dtype in checkpoint.stored.items():
        if wanted(name):
            states.setdefault(name, {})[state] = {"dtype": str(dtype).removeprefix("torch.")}
            if norms:
                states[name][state] |= _size(checkpoint, name, state)
    return {
        "path": str(checkpoint.path),
        **meta,
        "config_hash": checkpoint.meta.config_hash,
        "parameters": sum(
            prod(tensor.shape) for name, tensor in checkpoint.tensors.items() if checkpoint.has_weights(name)
        ),
        "files": len(checkpoint.records),
        "bytes": sum(record.size for record in checkpoint.records),
        "fragments": len(checkpoint.index),
        "tensors": [
            {"name": name, "shape": list(checkpoint.tensors[name].shape), "states": found}
            for name, found in states.items()
        ],
    }


def _size(checkpoint: Checkpoint, name: str, state: str) -> dict[str, float]:
    squares, largest, odd = 0.0, 0.0, 0
    for part in streamed(checkpoint, FragmentSpec.whole(checkpoint.tensors[name], state)):
        part = part.double()
        finite = part.isfinite()
        odd += int((~finite).sum())
        squares += float(part.square().sum())
        largest = max(largest, float(part[finite].abs().max()) if finite.any() else 0.0)
    return {"norm": sqrt(squares) if squares == squares else squares, "largest": largest, "not_finite": odd}


ELEMENTS = 8 << 20  # elements compared at a time, in float64


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one state of one tensor."""

    tensor: str
    state: str
    problem: str = ""  # reason why it cannot be compared (only in one of them, another shape), or ""
    dtypes: tuple[str, str] = ("", "")
    elements: int = 0
    differing: int = 0  # number of elements with other values (NaN equals NaN)
    largest: float = 0.0  # largest absolute difference. NaN if only one side is NaN somewhere.
    relative: float = 0.0  # norm of the difference over the norm of A (0 if there is no difference)

    @property
    def equal(self) -> bool:
        return not self.problem and not self.differing and self.dtypes[0] == self.dtypes[1]


def compare_tensors(
    a: Checkpoint, b: Checkpoint, wanted: Callable[[str, str], bool] = lambda tensor, state: True
) -> Iterator[TensorDifference]:
    """Compare all stored tensors of both, chunk by chunk.

    Args:
        wanted: function of (tensor name, state): whether to compare it.
    """
    for name, state in dict.fromkeys([*a.stored, *b.stored]):
        if not wanted(name, state):
            continue
        if (name, state) not in a.stored or (name, state) not in b.stored:
            yield TensorDifference(name, state, f"only in {'A' if (name, state) in a.stored else 'B'}")
        elif a.tensors[name].shape != b.tensors[name].shape:
            yield TensorDifference(name, state, f"shape {a.tensors[name].shape} in A, {b.tensors[name].shape} in B")
        else:
            yield _compare(a, b, name, state)


def compare_meta(a: Meta, b: Meta) -> dict[str, tuple[object, object]]:
    """Entries of the meta data that differ: name -> (in A, in B). Of configurations, the lines that differ."""
    differing = {}
    for item in fields(Meta):
        ours, theirs = getattr(a, item.name), getattr(b, item.name)
        if ours == theirs:
            continue
        if item.name == "config":
            ours, theirs = ours.splitlines(), theirs.splitlines()
            ours, theirs = [x for x in ours if x not in theirs], [x for x in theirs if x not in ours]
        differing[item.name] = (ours, theirs)
    return differing


def to_json(tensors: list[TensorDifference], meta: dict[str, tuple[object, object]], equal: bool) -> str:
    return json.dumps(
        {
            "equal": equal,
            "tensors": [{**asdict(item), "equal": item.equal} for item in tensors],
            "meta": {name: {"a": both[0], "b": both[1]} for name, both in meta.items()},
        },
        indent=1,
    )


def _compare(a: Checkpoint, b: Checkpoint, name: str, state: str) -> TensorDifference:
    dtypes = (str(a.stored[name, state]).removeprefix("torch."), str(b.stored[name, state]).removeprefix("torch."))
    ours, theirs = FragmentSpec.whole(a.tensors[name], state), FragmentSpec.whole(b.tensors[name], state)
    differing, largest, squares, norm = 0, 0.0, 0.0, 0.0
    for one, two in zip(ours.parts(ELEMENTS), theirs.parts(ELEMENTS), strict=True):
        x, y = a.read(one).data.double(), b.read(two).data.double()
        other = (x != y) & ~(x.isnan() & y.isnan())
        differing += int(other.sum())
        if other.any():
            gap = (x - y)[other]
            top = float(gap.abs().max())
            largest = top if top != top or top > largest else largest
            squares += float(gap.square().sum())
        norm += float(x.square().sum())
    relative = sqrt(squares / norm) if squares and norm > 0 else (float("inf") if squares else 0.0)
    return TensorDifference(name, state, "", dtypes, ours.length, differing, largest, relative)
