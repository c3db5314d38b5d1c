"""Pure functions that a rehearsal runs once for all equal calls.

A scan is a loop of small operations, which each layer of a kind calls with tensors of the same shapes. The shapes
determine the cost of a call. The first call is run and its counts are noted: operations, FLOPs, the peak of its live
bytes, and the form of its results. For the others the note is counted, and results of the same form are made."""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron.engine.deepspeed.without_values import Values
from megatron.kinds.common.recurrence import recomputed

from .storage_counter import Repetition, StorageCounter

HARMLESS = (FakeTensorMode, Values, StorageCounter)  # modes that do the same in every call


@dataclass(frozen=True)
class Form:
    """Form of a tensor in the results of a call."""

    storage: int  # which of the new storages it is in, or -1 - the place of the input whose storage it shares
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # in that storage, or from the input's own
    dtype: torch.dtype


@dataclass(frozen=True)
class Note:
    """Counts and results of a call."""

    counts: Repetition
    storages: tuple[tuple[int, torch.dtype], ...]  # bytes and type of each new storage in the results
    results: tuple[Any, ...]  # a `Form`, or a value that is not a tensor, for each leaf of `tree`
    tree: Any

    def again(self, inputs: Sequence[Any]) -> Any:
        """The results of another call."""
        made = [torch.empty(size // dtype.itemsize, dtype=dtype) for size, dtype in self.storages]

        def result(each: Any) -> Any:
            if not isinstance(each, Form):
                return each
            base = made[each.storage] if each.storage >= 0 else inputs[-1 - each.storage]
            begin = 0 if each.storage >= 0 else base.storage_offset()
            return torch.as_strided(base, each.shape, each.strides, begin + each.offset)

        return tree_unflatten([result(each) for each in self.results], self.tree)


class _Within(StorageCounter):
    """Counts the storages that a call makes, without its inputs."""

    def __init__(self, outer: StorageCounter, inputs: Sequence[Tensor]) -> None:
        super().__init__(outer.place)
        self._inputs = {each.untyped_storage()._cdata for each in inputs}

    def _add(self, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.untyped_storage()._cdata not in self._inputs:
            super()._add(tensor)


class Repeats:
    """Replaces `recomputed.call` while a ledger counts.

    Attributes:
        notes: by the key of equal calls, None for calls that must be run each time.
    """

    def __init__(self, ledger: StorageCounter) -> None:
        self._counters = [ledger]  # and the counters of calls that are being noted, the innermost last
        self.notes: dict[Hashable, Note | None] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run equal calls once from now on."""
        before, recomputed.call = recomputed.call, self.call
        try:
            yield
        finally:
            recomputed.call = before

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Result of `function(*inputs)`, without values."""
        leaves, tree = tree_flatten(inputs)
        key = _alike(function, leaves, tree)
        if key is None or (key in self.notes and self.notes[key] is None):
            return function(*inputs)
        note = self.notes.get(key)
        if note is None:
            return self._first(key, function, inputs, leaves)
        operations = [counter.operations for counter in self._counters]
        for counter in self._counters:
            counter.repeat(note.counts)
        results = note.again(leaves)
        for counter, before in zip(self._counters, operations):
            counter.operations = before + note.counts.operations
        return results

    def _first(self, key: Hashable, function: Callable[..., Any], inputs: Sequence[Any], leaves: Sequence[Any]) -> Any:
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        within = _Within(self._counters[0], tensors)
        self._counters.append(within)
        try:
            with within:
                results = function(*inputs)
        finally:
            self._counters.pop()
        self.notes[key] = _noted(within, results, leaves)
        return results


def _noted(within: StorageCounter, results: Any, inputs: Sequence[Any]) -> Note | None:
    """Note of a call. None if another call could differ: a result has a foreign storage, or other storages remain."""
    found, tree = tree_flatten(results)
    tensors = [(at, each) for at, each in enumerate(inputs) if isinstance(each, Tensor)]
    places = {each.untyped_storage()._cdata: at for at, each in reversed(tensors)}
    storages: dict[int, tuple[int, torch.dtype]] = {}
    forms: list[Any] = []
    for each in found:
        if not isinstance(each, Tensor):
            forms.append(each)
            continue
        key, offset = each.untyped_storage()._cdata, int(each.storage_offset())
        if each.requires_grad:
            return None
        if key in places:
            place = places[key]
            if inputs[place].dtype != each.dtype:
                return None
            at, offset = -1 - place, offset - int(inputs[place].storage_offset())
        elif within.part_of(each) is not None:
            size = each.untyped_storage().nbytes()
            if storages.setdefault(key, (size, each.dtype)) != (size, each.dtype):
                return None
            at = [*storages].index(key)
        else:
            return None
        forms.append(Form(at, tuple(each.shape), tuple(each.stride()), offset, each.dtype))
    if within.live != sum(size for size, _ in storages.values()):
        return None
    return Note(within.repetition(), tuple(storages.values()), tuple(forms), tree)


def _alike(function: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> Hashable | None:
    """Key of equal calls. None if equality cannot be determined."""
    if not all(isinstance(mode, HARMLESS) for mode in _get_current_dispatch_mode_stack()):
        return None  # such as the mode of selective recomputation, which keeps some results
    try:
        parts = [_part(each) for each in (function, *leaves)]
    except TypeError:
        return None
    return (*parts, str(tree), torch.is_grad_enabled())


def _part(value: Any) -> Hashable:
    """Of a key.

    Raises:
        TypeError: the value may not mean the same in another call.
    """
    if isinstance(value, FakeTensor):
        return value.dtype, tuple(value.shape), tuple(value.stride()), value.requires_grad
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return value
    if isinstance(value, functools.partial):
        words = sorted((value.keywords or {}).items())
        return _part(value.func), *map(_part, value.args), *((name, _part(each)) for name, each in words)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), value
    raise TypeError(f"a {type(value).__name__}")
