"""States of layers for many texts: pages of keys, and a slot of each text for recurrences."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron.kinds.common.attention.fewer_keys import Reading
from megatron.kinds.common.attention.key_value_cache import KeyValueCache
from megatron.kinds.common.attention.paged_keys import FEWEST, Current, PagedKeys, Pass
from megatron.model.block import BlockState
from megatron.model.chunks import mapped
from megatron.model.stream import Stream
from megatron.parallel.layout.precision import numbers_on


def walked(function: Callable[[Tensor, Any], Any], state: Any, other: Any = None) -> Any:
    """A copy of a layer's state with `function` of each tensor and its partner in another state of the same form."""

    def part(name: Any) -> Any:
        if other is None:
            return None
        return getattr(other, name) if dataclasses.is_dataclass(other) else other[name]

    if isinstance(state, Tensor):
        return function(state, other)
    if isinstance(state, dict):
        return {name: walked(function, each, part(name)) for name, each in state.items()}
    if isinstance(state, tuple | list):
        return type(state)(walked(function, each, part(place)) for place, each in enumerate(state))
    if dataclasses.is_dataclass(state) and not isinstance(state, type | PagedKeys):
        names = [each.name for each in dataclasses.fields(state)]
        return replace(state, **{name: walked(function, getattr(state, name), part(name)) for name in names})
    return state


def picked(state: Any, rows: Tensor) -> Any:
    """A copy of a layer's state with the samples of these rows."""
    return walked(lambda each, _: each.index_select(0, rows), state)


class ManyRows(TorchFunctionMode):
    """Gives each expert at least `FEWEST` rows on CPUs, whose kernels round products of fewer rows differently."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "grouped_mm" not in getattr(func, "__name__", "") or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        x_RK, weight_EKN, ends_E = args[0], args[1], kwargs["offs"].long()
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        more_E = -(-counts_E // FEWEST) * FEWEST
        new_E = more_E.cumsum(0)
        places_R = torch.arange(len(x_RK)) + (new_E - more_E - ends_E + counts_E).repeat_interleave(counts_E)
        padded = x_RK.new_zeros(int(new_E[-1]), x_RK.shape[1])
        padded[places_R] = x_RK
        return func(padded, weight_EKN, **{**kwargs, "offs": new_E.int()})[places_R]


@dataclass
class Turn:
    """Tokens of a pass that a recurrence reads together: at most one of each text."""

    rows: Tensor
    slots: Tensor
    begins: bool
    read: Pass
    memo: dict[Any, Any] = field(default_factory=dict)


def turns_of(now: Pass) -> list[Turn]:
    """The turns of a pass, first tokens of texts apart from others."""
    seen: dict[int, int] = {}
    found: dict[tuple[int, bool], list[int]] = {}
    for row, token in enumerate(now.tokens):
        place = seen[token.slot] = seen.get(token.slot, -1) + 1
        found.setdefault((place, token.position == 0), []).append(row)
    turns, groups = list[Turn](), [(begins, rows) for (_, begins), rows in sorted(found.items())]
    for begins, rows in groups + [(False, list[int]())] * (now.turns - len(groups)):
        own = Pass([now.tokens[row] for row in rows], now.device)
        more = [0] * (own.size - len(rows))
        at = numbers_on(now.device, rows + more)
        slots = numbers_on(now.device, [*(each.slot for each in own.tokens), *more])
        turns.append(Turn(at, slots, begins, own))
    return turns


@dataclass
class Turns:
    """State of a layer that continues from one token to the next.

    It reads one token of each text at a time. So its results do not depend on the lengths of pieces."""

    current: Current
    slots: int  # of texts. Slot 0 is of padding.
    empty: Any  # the state before a text
    held: Any = None  # the state of all slots, [slots, ...] each. None before the first token.
    plain: bool = False  # the layer keeps nothing of earlier tokens in evaluation

    def read(self, layer: nn.Module, x_T1H: Tensor, stream: Stream) -> Any:
        """The layer's output, [T, 1, H], and channels that it writes."""
        now = self.current.read
        outputs: list[Any] = []
        for turn in now.remember("turns", lambda: turns_of(now)):
            if self.plain:
                break
            outputs.append(self._turn(layer, x_T1H, stream, turn))
        if self.plain or not outputs:
            with ManyRows():
                return layer(x_T1H, stream, None)
        result = walked(lambda each, _: each.new_zeros(now.size, *each.shape[1:]), outputs[0])
        for turn, own in zip(now.remember("turns", list), outputs):
            result = walked(partial(_put_rows, turn.rows[: len(turn.read.tokens)]), own, result)
        return result

    def _turn(self, layer: nn.Module, x_T1H: Tensor, stream: Stream, turn: Turn) -> Any:
        own = Stream(
            stream.hidden[turn.rows],
            turn.read.positions_T1,
            channels={name: each[turn.rows] for name, each in stream.channels.items()},
            memo=turn.memo,
        )
        begins = turn.begins or self.held is None  # without one the turn is of padding
        state = walked(lambda each, _: each, self.empty) if begins else picked(self.held, turn.slots)
        before, self.current.read = self.current.read, turn.read
        try:
            output = layer(x_T1H[turn.rows], own, state)
        finally:
            self.current.read = before
        tensors: list[Tensor] = []
        walked(lambda each, _: tensors.append(each), state)
        self.plain = not tensors and state == self.empty
        self.held = walked(lambda new, old: self._put(new, old, turn.slots), state, self.held)
        return output

    def _put(self, new: Tensor, old: Tensor | None, slots: Tensor) -> Tensor:
        if old is None:
            old = new.new_zeros(self.slots, *new.shape[1:])
        return old.index_copy_(0, slots, new)

    def copy(self, source: int, target: int) -> None:
        """Let a text continue from the state of another."""
        walked(lambda each, _: each[target].copy_(each[source]), self.held)


def _put_rows(rows: Tensor, new: Tensor, whole: Tensor) -> Tensor:
    return whole.index_copy_(0, rows, new[: len(rows)])


class States:
    """The states of all layers, for `pages` pages and `slots` texts at a time.

    Args:
        reading: (number of a layer with keys, from 0) -> how it reads them.
    """

    def __init__(
        self,
        states: list[Any],
        pages: int,
        slots: int,
        device: torch.device | str,
        reading: Callable[[int], Reading] | None = None,
    ) -> None:
        self.reading = reading
        self.current = Current(Pass((), device))
        self.keys: list[PagedKeys] = []
        self.turns: list[Turns] = []
        self.of_layers = [mapped(each, lambda part: self._made(part, pages + 1, slots + 1)) for each in states]

    def _made(self, part: Any, pages: int, slots: int) -> Any:
        if isinstance(part, KeyValueCache):
            own = None if self.reading is None else self.reading(len(self.keys))
            self.keys.append(PagedKeys(self.current, pages, own))
            return self.keys[-1]
        if isinstance(part, BlockState):
            return None
        inner = mapped(part, lambda own: self._made(own, pages, slots) if isinstance(own, KeyValueCache) else None)
        self.turns.append(Turns(self.current, slots, inner))
        return self.turns[-1]

    @property
    def continues(self) -> bool:
        """Whether a text cannot begin with pages of another: a layer has a state besides keys and values, or keys of
        tokens after a prompt differ from full attention's."""
        return any(not each.plain for each in self.turns) or any(each.reading is not None for each in self.keys)

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        for each in self.keys:
            each.copy(source, target, tokens)

    def copy_slot(self, source: int, target: int) -> None:
        for each in self.turns:
            each.copy(source, target)
