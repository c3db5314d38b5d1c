"""The read plan: the stored bytes that make up a wanted range, and their copies into memory."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from ..format.container import DTYPES
from ..format.durable import CHUNK, read_fully
from ..format.errors import CheckpointError, refuse_size, understanding
from ..format.fragment import FragmentSpec, Piece, common_width, overlap, rectangles
from ..format.index import Index, Run, checksum
from ..format.rankfile import ALIGNED, FileRecord
from ..format.table import DTYPE_ORDER, Vocabulary, spec_of

LONG_RUN = 256 << 10  # bytes. Runs of this length are read one by one, shorter ones together with the gaps
OPEN_FILES = 64
STAGED = 32 << 20  # bytes of pinned memory of a thread that fills tensors of a GPU


@dataclass(frozen=True)
class Read:
    """Copy `piece` from the stored fragment that starts at byte `offset` of file `file`."""

    file: int
    offset: int
    dtype: torch.dtype
    piece: Piece


def plan(index: Index, wanted: FragmentSpec, state: str | None = None) -> list[Read]:
    """The reads that fill `wanted`, in the order of the stored bytes.

    Args:
        state: stored state to read in place of the wanted one.

    Raises:
        CheckpointError: the tensor or the state is missing, incomplete, or has another shape.
    """
    name, state = wanted.tensor.name, state or wanted.state
    run = index.find(name, state)
    if run is None:
        raise CheckpointError(f"{name} ({state})", "it is not in the checkpoint")
    if run.tensor.shape != wanted.tensor.shape:
        raise CheckpointError(f"{name} ({state})", f"its shape is {wanted.tensor.shape} here, {run.tensor.shape} saved")
    with understanding(f"{name} ({state})"):
        reads = list(_reads(index.vocabulary, run, wanted, state))
    found = sum(read.piece.count * read.piece.length for read in reads)
    if found != wanted.length:
        missing = wanted.length - found
        raise CheckpointError(f"{name} ({state})", f"{missing} of {wanted.length} elements are not stored")
    return sorted(reads, key=lambda read: (read.file, read.offset, read.piece.source))


def _reads(vocabulary: Vocabulary, run: Run, wanted: FragmentSpec, state: str) -> Iterator[Read]:
    stored, ranks = run.tensor, run.ranks
    if stored.shard == wanted.tensor.shard and ranks == (1 if stored.shard is None else wanted.tensor_ranks):
        # The same cut: ranges of one flattened shard, in a third of the time that rectangles need
        for row in run.between(wanted.tensor_rank % ranks, wanted.start, wanted.stop):
            there = spec_of(row, vocabulary)
            low, high = max(there.start, wanted.start), min(there.stop, wanted.stop)
            if low < high:
                piece = Piece(1, high - low, low - there.start, high - low, low - wanted.start, high - low)
                yield Read(int(row["file"]), int(row["offset"]), DTYPES[DTYPE_ORDER[row["dtype"]]], piece)
        return
    width = common_width(stored, wanted.tensor)
    target = rectangles(wanted, width)
    for rank in range(ranks):
        size = prod(stored.local_shape(rank, ranks))
        common = overlap(rectangles(FragmentSpec(stored, state, rank, ranks, 0, size), width), target)
        if not common:
            continue
        low = min(piece.source for piece in common)
        high = max(piece.source + (piece.count - 1) * piece.source_stride + piece.length for piece in common)
        for row in run.between(rank, low, high):
            dtype = DTYPES[DTYPE_ORDER[row["dtype"]]]
            for piece in overlap(rectangles(spec_of(row, vocabulary), width), target):
                yield Read(int(row["file"]), int(row["offset"]), dtype, piece)


class Files:
    """The ranks' files of a checkpoint, opened on demand, at most `OPEN_FILES` at once. For one thread."""

    def __init__(self, root: Path, records: Sequence[FileRecord]) -> None:
        self.root = root
        self.records = records
        self._handles: OrderedDict[int, int] = OrderedDict()
        self._scratch: torch.Tensor | None = None
        self._staged: torch.Tensor | None = None
        self._filled = 0

    def scratch(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for values in transit. One for all: the C library's heap grows with each large one.

        For a GPU it is pinned, and copies from it may still be on their way. The host waits for them once it is full.
        """
        size = elements * dtype.itemsize
        if device.type != "cuda":
            if self._scratch is None or self._scratch.numel() < size:
                self._scratch = torch.empty(max(size, CHUNK), dtype=torch.uint8)
            return self._scratch[:size].view(dtype)
        if self._staged is None:
            self._staged = torch.empty(STAGED, dtype=torch.uint8, pin_memory=True)
        if self._filled + size > len(self._staged):
            torch.cuda.current_stream(device).synchronize()
            self._filled = 0
        begin, self._filled = self._filled, self._filled + -(-size // ALIGNED) * ALIGNED
        return self._staged[begin : begin + size].view(dtype)

    def read(self, number: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of file `number`.

        Raises:
            CheckpointError: the file is missing, has another size, or cannot be read.
        """
        try:
            count = read_fully(self._handle(number), buffer, offset)
            problem = f"truncated: {len(buffer)} bytes at {offset} were asked for, {count} are there"
        except OSError as error:
            count, problem = -1, f"cannot be read: {error}"
        if count != len(buffer):
            raise CheckpointError(self.root / self._record(number).path, problem)

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def _record(self, number: int) -> FileRecord:
        if not 0 <= number < len(self.records):
            raise CheckpointError(self.root, f"damaged: its index names file {number} of {len(self.records)}")
        return self.records[number]

    def _handle(self, number: int) -> int:
        if number in self._handles:
            self._handles.move_to_end(number)
            return self._handles[number]
        record = self._record(number)
        handle = os.open(record.under(self.root), os.O_RDONLY)
        try:
            _refuse_other(self.root / record.path, handle, record)
        except BaseException:
            os.close(handle)
            raise
        self._handles[number] = handle
        if len(self._handles) > OPEN_FILES:
            os.close(self._handles.popitem(last=False)[1])
        return handle


def _refuse_other(path: Path, handle: int, record: FileRecord) -> None:
    """Refuse a file that is not the record's. Its table (52 bytes per fragment) has the checksums of all values, so the
    table of another rank or step differs."""
    refuse_size(path, os.fstat(handle).st_size, record.size)
    table = bytearray(record.size - record.end)
    read_fully(handle, memoryview(table), record.end)
    if checksum(bytes(table)) != record.table:
        raise CheckpointError(path, "its table does not have the checksum it was written with: it is another file")


def execute(reads: list[Read], files: Files, target: torch.Tensor) -> None:
    """Fill the 1-D contiguous `target` of any device and type, with at most `CHUNK` bytes of buffer. On a GPU the
    values arrive in the order of the current stream."""
    for read in reads:
        for piece, gap in _chunks(read.piece, read.dtype.itemsize):
            _copy(read, piece, gap, files, target)


def _chunks(piece: Piece, itemsize: int) -> list[tuple[Piece, int]]:
    """The piece in parts that fit in a chunk, each with the distance of its runs in the bytes to read."""
    limit = CHUNK // itemsize
    if piece.count == 1 or piece.length * itemsize >= LONG_RUN:
        found = []
        for run in range(piece.count):
            source, target = piece.source + run * piece.source_stride, piece.target + run * piece.target_stride
            for at in range(0, piece.length, limit):
                found.append((Piece(1, min(limit, piece.length - at), source + at, 0, target + at, 0), 0))
        return found
    rows = max(1, limit // piece.source_stride)
    found = []
    for row in range(0, piece.count, rows):
        source, target = piece.source + row * piece.source_stride, piece.target + row * piece.target_stride
        part = replace(piece, count=min(rows, piece.count - row), source=source, target=target)
        found.append((part, piece.source_stride))
    return found


def _copy(read: Read, piece: Piece, gap: int, files: Files, target: torch.Tensor) -> None:
    span = (piece.count - 1) * gap + piece.length
    offset = read.offset + piece.source * read.dtype.itemsize
    direct = piece.count == 1 and target.dtype == read.dtype and target.device.type == "cpu"
    buffer = target[piece.target : piece.target + span] if direct else files.scratch(span, read.dtype, target.device)
    files.read(read.file, offset, buffer.view(torch.uint8).numpy().data)
    if not direct:
        size = (piece.count, piece.length)
        place = target.as_strided(size, (piece.target_stride, 1), target.storage_offset() + piece.target)
        if piece.count > 1:
            buffer = buffer.to(target.device, non_blocking=True)  # only bytes without gaps arrive without a wait
        place.copy_(buffer.as_strided(size, (gap, 1)), non_blocking=True)
