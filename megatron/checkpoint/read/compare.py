"""Compare two checkpoints of any layouts, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from math import sqrt

from ..format.fragment import FragmentSpec
from ..format.meta import Meta
from .reader import Checkpoint

ELEMENTS = 8 << 20  # elements compared at a time, in float64


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one state of one tensor.

    Attributes:
        problem: reason why it cannot be compared (only in one of them, another shape), or "".
        differing: number of elements with other values (NaN equals NaN).
        largest: largest absolute difference. NaN if only one side is NaN somewhere.
        relative: norm of the difference over the norm of A (0 if there is no difference).
    """

    tensor: str
    state: str
    problem: str = ""
    dtypes: tuple[str, str] = ("", "")
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    relative: float = 0.0

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
