"""Keys and values of many texts in pages, for decoding. A token's result does not depend on the other tokens of a pass.

A page has `PAGE` tokens of one text. A query at position p reads all pages up to its own, with a mask behind p, so the
sizes of its products follow from p. Kernels for CPUs round a row in the same way in products of `FEWEST` rows and more.
With fewer rows other kernels are taken. So the number of queries that are computed together changes no bit.

Shapes: T tokens of a pass, n query heads, m key/value heads, D and E channels of a key and of a value. A tile has the
queries of one text in one page. G tiles have M rows each."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.layout.precision import numbers_on

from .attend import attend_masked
from .fewer_keys import Reading, RowGroup
from .pattern import Pattern

PAGE = 32  # tokens
FEWEST = 8  # rows of a product
PADDED = 32  # tokens of a pass are a multiple of this, so that no vector of a kernel has numbers of two tokens


@dataclass(frozen=True)
class Token:
    """One token of a pass."""

    id: int  # id, position: of the token in its text
    position: int
    table: Sequence[int]  # pages of its text, by their numbers in the pool
    slot: int  # place of the text in the states of recurrences
    step: int = 0  # number of the token after its prompt, from 1. 0 in the prompt.


@dataclass(frozen=True)
class TileGroup:
    """Tiles that read equally many pages, with equally many rows."""

    rows: Tensor  # int64 [G, M], numbers of tokens in the pass. Padding has 0.
    places: Tensor  # int64 [G, M], their positions
    pages: Tensor  # int64 [G, pages]
    real: Tensor  # int64 [R], which of the G M rows are no padding, and `targets` [R] their tokens
    targets: Tensor


@dataclass
class Pass:
    """The tokens that are read together, on the device, padded."""

    tokens: Sequence[Token]
    device: torch.device | str
    turns: int = 0  # number of turns in which recurrences read it, at least: that of the rank with most of them
    memo: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def size(self) -> int:
        return max(PADDED, -(-len(self.tokens) // PADDED) * PADDED)

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return numbers_on(self.device, [*values, *[0] * (self.size - len(values))])

    @cached_property
    def ids_T1(self) -> Tensor:
        return self._numbers([each.id for each in self.tokens]).unsqueeze(1)

    @cached_property
    def positions_T1(self) -> Tensor:
        return self._numbers([each.position for each in self.tokens]).unsqueeze(1)

    @cached_property
    def longest(self) -> int:
        return max((each.position for each in self.tokens), default=0) + 1

    @cached_property
    def pages(self) -> Tensor:
        """int64 [T], the page of each token. Padding goes to page 0, which no text has."""
        return self._numbers([each.table[each.position // PAGE] for each in self.tokens])

    @cached_property
    def last(self) -> int:
        """The largest number of a page that tokens are written to."""
        return max((each.table[each.position // PAGE] for each in self.tokens), default=0)

    @cached_property
    def offsets(self) -> Tensor:
        return self._numbers([each.position % PAGE for each in self.tokens])

    @cached_property
    def fresh(self) -> Tensor:
        """Pages whose first token is in the pass."""
        found = [each.table[each.position // PAGE] for each in self.tokens if each.position % PAGE == 0]
        return numbers_on(self.device, found)

    @cached_property
    def groups(self) -> list[TileGroup]:
        return self._groups(range(len(self.tokens)))

    @cached_property
    def prompts(self) -> list[TileGroup]:
        """The groups of the tokens of prompts."""
        return self._groups([row for row, each in enumerate(self.tokens) if not each.step])

    @cached_property
    def drawn(self) -> list[RowGroup]:
        """The tokens after prompts, those with the fewest pages first."""
        alike: dict[int, list[int]] = {}
        for row, each in enumerate(self.tokens):
            if each.step:
                alike.setdefault(each.position // PAGE + 1, []).append(row)
        found = []
        for pages, rows in sorted(alike.items()):
            own = [self.tokens[row] for row in rows]
            numbers = [(row, each.position, each.slot, each.step) for row, each in zip(rows, own)]
            tables = numbers_on(self.device, [list(each.table[:pages]) for each in own])
            row_numbers, places, slots, steps = numbers_on(self.device, numbers).unbind(1)
            found.append(RowGroup(row_numbers, places, slots, steps, tables))
        return found

    def _groups(self, rows: Sequence[int]) -> list[TileGroup]:
        tiles: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            each = self.tokens[row]
            tiles.setdefault((each.slot, each.position // PAGE), []).append(row)
        alike: dict[tuple[int, int], list[list[int]]] = {}
        for (_, page), some in tiles.items():
            alike.setdefault((page + 1, FEWEST if len(some) <= FEWEST else PAGE), []).append(some)
        return [self._group(pages, width, found) for (pages, width), found in sorted(alike.items())]

    def _group(self, pages: int, width: int, tiles: list[list[int]]) -> TileGroup:
        tensor = partial(numbers_on, self.device)
        rows = [[*each, *[0] * (width - len(each))] for each in tiles]
        places = [[self.tokens[row].position for row in each] for each in tiles]
        real = [number * width + at for number, each in enumerate(tiles) for at in range(len(each))]
        return TileGroup(
            tensor(rows),
            tensor([[*each, *[each[0]] * (width - len(each))] for each in places]),
            tensor([list(self.tokens[each[0]].table[:pages]) for each in tiles]),
            tensor(real),
            tensor([row for each in tiles for row in each]),
        )

    def remember(self, key: Hashable, make: Any) -> Any:
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


@dataclass
class Current:
    """The pass that all layers read now."""

    read: Pass

    @property
    def length(self) -> int:
        """Tokens before the newest token of the longest text, by which layers make tables of positions."""
        return self.read.longest - 1


@dataclass
class PagedKeys:
    """State of a layer that attends: its keys and values of all texts, [pages, m, PAGE, D or E].

    Memory grows by doubling, up to the last page that texts have had."""

    current: Current
    pages: int  # of the pool
    reading: Reading | None = None  # how keys of tokens after prompts are read. None is full attention.
    unit: int = 1  # tokens that share a place of a page. It divides `PAGE`.
    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def length(self) -> int:
        return self.current.length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, sinks_n: Tensor | None = None) -> Tensor:
        """Attention of each token to the tokens of its text, up to itself.

        Args:
            q: [T, n, 1, D], k: [T, m, 1, D], v: [T, m, 1, E].

        Returns:
            [T, n, 1, E].
        """
        now, reading = self.current.read, self.reading
        q_TnD, k_TmD = q.squeeze(2), k.squeeze(2)
        if reading is not None:
            q_TnD, k_TmD = reading.turned(q_TnD), reading.turned(k_TmD)
            reading.see(k_TmD[: len(now.tokens)])
        keys, values = self.write(now, k_TmD, v.squeeze(2))
        y_TnE = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
        for number, group in enumerate(now.groups if reading is None else now.prompts):
            own = q_TnD[group.rows].transpose(1, 2)
            seen, read = self.pages_of(keys, group.pages), self.pages_of(values, group.pages)
            remember = lambda key, make, number=number: now.remember((number, key), make)  # noqa: E731
            y = attend_masked(own, seen, read, group.places, pattern, sinks_n, remember)
            y_TnE[group.targets] = y.transpose(1, 2).flatten(0, 1)[group.real]
        if reading is not None:
            for some in now.drawn:
                y_TnE[some.rows] = reading.attend(q_TnD[some.rows], keys, values, some, pattern.scale)
        return y_TnE.unsqueeze(2)

    def write(self, now: Pass, k_TmD: Tensor, v_TmE: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values of the pass into their pages, and return all pages, [pages, m, PAGE, D or E]."""
        self.keys, self.values = self._grown(self.keys, now.last, k_TmD), self._grown(self.values, now.last, v_TmE)
        for pool, new in ((self.keys, k_TmD), (self.values, v_TmE)):
            if len(now.fresh):
                pool[now.fresh] = 0  # a text that has diverged may have left NaNs, which no mask removes
            pool[now.pages, :, now.offsets // self.unit] = new
        return self.keys, self.values

    def _grown(self, pool: Tensor | None, last: int, like_TmD: Tensor) -> Tensor:
        """The pages with the one of number `last`."""
        held = 0 if pool is None else len(pool)
        if pool is not None and last < held:
            return pool
        new = like_TmD.new_zeros(
            min(self.pages, max(last + 1, 2 * held)), like_TmD.shape[1], PAGE // self.unit, like_TmD.shape[2]
        )
        if pool is not None:
            new[:held] = pool
        return new

    @staticmethod
    def pages_of(pool: Tensor, pages: Tensor) -> Tensor:
        """[G, m, pages PAGE, D]."""
        return pool[pages].transpose(1, 2).flatten(2, 3)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a page to a page of no text."""
        if self.keys is None or self.values is None:
            return
        self.keys = self._grown(self.keys, target, self.keys[0].transpose(0, 1))
        self.values = self._grown(self.values, target, self.values[0].transpose(0, 1))
        for pool in (self.keys, self.values):
            pool[target] = 0
            kept = -(-tokens // self.unit)
            pool[target, :, :kept] = pool[source, :, :kept]
