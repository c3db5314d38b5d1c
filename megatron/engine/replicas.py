"""Cheap hashes of state that several ranks hold. `training.hashes` compares them: they must be equal to the last bit.

A hash is a weighted sum of the tensor's bits, read as integers, modulo 2**64. The weights are odd, so a change of
one value always changes it. It takes one pass over the tensor, on its device."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.parallel.layers.parameters import logical_of, shard_index, shard_start

from .state import EngineState

_CHUNK = 4096  # words of 64 bits with the same weight. Tensors of fewer values have a single weight
_COPY = 1 << 22  # values that are copied at once, where the tensor is not aligned to words
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_bits(values: Tensor) -> Tensor:
    """int64, 0-d, on the tensor's device. Independent of the tensor's place in memory.

    Large tensors are read as words of 64 bits, which torch adds several times as fast as narrower integers."""
    flat = values.detach().reshape(-1)
    if flat.numel() < _CHUNK:
        return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)
    wide = 8 // flat.element_size()
    whole = flat.numel() // wide * wide
    words, rest = flat[:whole], flat[whole:].view(_BITS[flat.element_size()])
    aligned = words.storage_offset() % wide == 0
    parts = [words.view(torch.int64)] if aligned else (each.clone().view(torch.int64) for each in words.split(_COPY))
    total = torch.cat([*(_chunk_sums(each) for each in parts), rest.sum(dtype=torch.int64).view(1)])
    return (total * (2 * torch.arange(len(total), device=total.device) + 1)).sum()


def _chunk_sums(words: Tensor) -> Tensor:
    whole = len(words) // _CHUNK
    sums = words[: whole * _CHUNK].view(whole, _CHUNK).sum(1)
    return sums if len(words) == whole * _CHUNK else torch.cat([sums, words[whole * _CHUNK :].sum().view(1)])


def named_pieces(state: EngineState) -> Iterator[tuple[str, str, Tensor]]:
    """(readable name, exact name, values) of everything that this rank holds. Pieces with the same exact name are the
    same piece of the run's state.

    From ZeRO 1 on, the weights of the forward pass are further pieces, next to their masters: under ZeRO 3 this
    rank's share of them."""
    for each in state.targets():
        place = f"{each.tensor_rank}/{each.tensor_ranks} {each.start}+{each.data.numel()}"
        yield f"{each.tensor.name} ({each.state})", f"{each.tensor.name} {each.state} {place}", each.data
    if state.stage == 3:
        for owned, values in state.partitions():
            place = f"{owned.cut[0]}/{owned.cut[1]} {owned.start}+{owned.length}"
            yield f"{owned.tensor.name} (weight)", f"{owned.tensor.name} weight {place}", values
    elif state.stage > 0:
        for parameter in state.parameters:
            if not parameter.untyped_storage().nbytes():  # at ZeRO 3 of a pipeline, between passes
                continue
            name, (index, count) = logical_of(parameter).name, shard_index(parameter)
            place = f"{index}/{count} {shard_start(parameter)}+{parameter.numel()}"
            yield f"{name} (weight)", f"{name} weight {place}", parameter


class Piece(NamedTuple):
    """A part of the state that this rank holds: its readable name, a hash of its exact name, its values."""

    name: str
    code: int
    values: Tensor


class _SmallPieces:
    """Pieces of fewer than `_CHUNK` values of one width, hashed together: one by one, each takes several calls."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._words = [each.detach().view(-1).view(_BITS[each.element_size()]) for each in pieces]
        counts = torch.tensor([0, *map(len, self._words)], device=pieces[0].device)
        self._ends = counts.cumsum(0)  # in the running sums, which begin with 0
        self._words.insert(0, self._words[0].new_zeros(1))

    def hashes(self) -> Tensor:
        """int64 [pieces], as `hash_bits` of each."""
        return torch.cat(self._words).cumsum(0, dtype=torch.int64)[self._ends].diff()


class PieceHashes:
    """Hashes of everything that this rank holds. The places of its pieces are found once, and again when a tensor
    has moved: for small pieces, finding takes several times as long as hashing."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._addresses: list[int] = []
        self._pieces: list[Piece] = []
        self._arranged: tuple[list[Piece], Collection[int]] | None = None  # all pieces, and the excluded ones
        self._wanted: list[Piece] = []  # the others
        self._codes = torch.zeros(0, dtype=torch.int64)
        self._small: list[tuple[Tensor, _SmallPieces]] = []  # numbers of pieces, and these
        self._others: list[int] = []  # numbers of the rest

    def find(self) -> list[Piece]:
        """All pieces. The same list as before while they have not moved."""
        addresses = self._state.addresses()
        if addresses != self._addresses:
            self._pieces = [Piece(name, _code(exact), values) for name, exact, values in named_pieces(self._state)]
            self._addresses = self._state.addresses()  # now with states that `named_pieces` has created
        return self._pieces

    def take(self, device: torch.device, excluded: Collection[int] = ()) -> tuple[Tensor, list[str]]:
        """int64 [pieces, 2] on `device`: 63 bits of a hash of each piece's exact name, and the hash of its values. Also
        their readable names.

        Args:
            excluded: codes of pieces that only this rank holds.
        """
        pieces = self.find()
        if self._arranged is None or self._arranged[0] is not pieces or self._arranged[1] != excluded:
            self._arrange(pieces, device, excluded)
        found = torch.zeros(len(self._wanted), 2, dtype=torch.int64, device=device)
        found[:, 0] = self._codes
        for numbers, small in self._small:
            found[numbers, 1] = small.hashes().to(device)
        if self._others:
            hashes = [hash_bits(self._wanted[each].values) for each in self._others]
            found[self._others, 1] = torch.stack(hashes).to(device)
        return found, [each.name for each in self._wanted]

    def _arrange(self, pieces: list[Piece], device: torch.device, excluded: Collection[int]) -> None:
        self._arranged = pieces, excluded
        self._wanted = [each for each in pieces if each.code not in excluded]
        self._codes = torch.tensor([each.code for each in self._wanted], dtype=torch.int64, device=device)
        alike: dict[tuple, list[int]] = {}
        self._others = []
        for number, (_, _, values) in enumerate(self._wanted):
            if values.numel() < _CHUNK and values.is_contiguous():
                alike.setdefault((values.device, values.element_size()), []).append(number)
            else:
                self._others.append(number)
        self._small = [
            (torch.tensor(numbers, device=device), _SmallPieces([self._wanted[each].values for each in numbers]))
            for numbers in alike.values()
        ]


def _code(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
