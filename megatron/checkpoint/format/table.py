"""Fragments as rows of a table, in files and in the index."""

import json
from math import prod
from typing import Any

import numpy as np

from ...parallel.layout.shard import LogicalTensor, Role, Shard
from .container import DTYPES
from .fragment import FragmentSpec

DTYPE_ORDER = tuple(DTYPES)  # a row names a type by its place here, so append only

# One row per stored fragment: 52 bytes, so that 10,000 ranks with a hundred fragments each fit in 52 MB.
ROW = np.dtype([
    ("tensor", "<i4"),  # place in the table of tensors
    ("state", "<i2"),  # place in the list of states
    ("dtype", "<i2"),
    ("tensor_rank", "<i4"),
    ("tensor_ranks", "<i4"),
    ("file", "<i4"),
    ("start", "<i8"),  # in the flattened local shard
    ("length", "<i8"),
    ("offset", "<i8"),  # byte in the file
    ("checksum", "<u8"),  # xxh3_64 of the fragment's bytes
])


def tensor_to_dict(tensor: LogicalTensor) -> dict[str, Any]:
    values = {**vars(tensor), "role": tensor.role.value}  # `asdict` copies deeply
    del values["scales"]  # belongs to the run, not to the checkpoint
    if tensor.shard is not None:
        values["shard"] = {**vars(tensor.shard)}
        if tensor.shard.across is None:
            del values["shard"]["across"], values["shard"]["columns"]
    return values


def tensor_from_dict(values: dict[str, Any]) -> LogicalTensor:
    """A tensor as read from a file.

    Raises:
        ValueError, TypeError, LookupError: the values are no tensor.
    """
    shard, shape = values["shard"], values["shape"]
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{values['name']!r} has the shape {shape}")
    if shard is not None:
        parts, grid = shard["parts"], (shard.get("across"), shard.get("columns", 1))
        shard = Shard(shard["dim"], None if parts is None else tuple(parts), shard["unit"], *grid)
        if shard.dim not in range(len(shape)) or shard.unit < 1 or sum(shard.parts or ()) not in (0, shape[shard.dim]):
            raise ValueError(f"{values['name']!r} of {shape} is cut by {shard}")
        known = type(shard.columns) is int and shard.columns >= 1
        if not known or (shard.columns > 1 if shard.across is None else shard.across not in range(len(shape))):
            raise ValueError(f"{values['name']!r} of {shape} is cut by {shard}")
        if shard.across is not None and (abs(shard.dim - shard.across) > 1 or shape[shard.across] % shard.columns):
            raise ValueError(f"{values['name']!r} of {shape} is cut by {shard}")
    return LogicalTensor(
        values["name"],
        tuple(values["shape"]),
        Role(values["role"]),
        shard,
        values["keep_fp32"],
        None if values["matrices"] is None else tuple(values["matrices"]),
    )


class Vocabulary:
    """The tensors and states that rows refer to by number.

    Attributes:
        tensors: logical tensors, by number.
        states: names of states, by number.
    """

    def __init__(self, tensors: list[LogicalTensor] | None = None, states: list[str] | None = None) -> None:
        self.tensors = tensors or []
        self.states = states or []
        self._tensor = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        self._state = {state: number for number, state in enumerate(self.states)}

    def tensor(self, tensor: LogicalTensor) -> int:
        """The number of a tensor, which is added if it is new.

        Raises:
            ValueError: the name already stands for another tensor.
        """
        number = self._tensor.setdefault(tensor.name, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        elif self.tensors[number] != tensor:
            raise ValueError(f"{tensor.name} is two tensors: {self.tensors[number]} and {tensor}")
        return number

    def state(self, state: str) -> int:
        number = self._state.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number

    def find(self, name: str, state: str) -> tuple[int, int] | None:
        """Numbers of a tensor and a state. None if either is unknown."""
        if name not in self._tensor or state not in self._state:
            return None
        return self._tensor[name], self._state[state]

    def to_json(self) -> str:
        return json.dumps({"tensors": [tensor_to_dict(tensor) for tensor in self.tensors], "states": self.states})

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        values = json.loads(text)
        return cls([tensor_from_dict(item) for item in values["tensors"]], list(values["states"]))


def spec_of(row: np.void, vocabulary: Vocabulary) -> FragmentSpec:
    numbers = (int(row[name]) for name in ("tensor_rank", "tensor_ranks", "start", "length"))
    return FragmentSpec(vocabulary.tensors[row["tensor"]], vocabulary.states[row["state"]], *numbers)


def coverage_problems(rows: np.ndarray, vocabulary: Vocabulary) -> list[str]:
    """Elements of each (tensor, state) that are missing or stored twice. Rows sorted as in the index."""
    problems = []
    groups = np.flatnonzero(np.diff(rows["tensor"].astype(np.int64) * len(vocabulary.states) + rows["state"])) + 1
    for group in np.split(rows, groups) if len(rows) else []:
        tensor = vocabulary.tensors[group[0]["tensor"]]
        label = f"{tensor.name} ({vocabulary.states[group[0]['state']]})"
        ranks = np.unique(group["tensor_ranks"])
        if len(ranks) > 1:
            problems.append(f"{label}: cut over {' and over '.join(map(str, ranks))} tensor parallel ranks at once")
            continue
        if len(np.unique(group["dtype"])) > 1:
            problems.append(f"{label}: its fragments have different types")
        for rank in range(int(ranks[0])):
            mine = group[group["tensor_rank"] == rank]
            size = prod(tensor.local_shape(rank, int(ranks[0])))
            problems += [f"{label}: {gap}" for gap in _gaps(mine["start"], mine["length"], size, rank, int(ranks[0]))]
    return problems


def _gaps(starts: np.ndarray, lengths: np.ndarray, size: int, rank: int, ranks: int) -> list[str]:
    """The first place where sorted ranges do not tile [0, size)."""
    begins = np.append(starts, size)
    ends = np.append(0, starts + lengths)
    wrong = np.flatnonzero(begins != ends)
    if not len(wrong):
        return []
    begin, end = int(begins[wrong[0]]), int(ends[wrong[0]])
    where = f"of the shard of tensor rank {rank} of {ranks}"
    if end < begin:
        return [f"no rank wrote elements {end} to {begin} {where}"]
    return [f"elements {begin} to {end} {where} were written twice"]
