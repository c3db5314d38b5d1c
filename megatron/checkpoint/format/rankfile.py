"""The file of one rank: its fragments one after the other, then a table of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import xxhash

from .container import DTYPE_NAMES, TensorEntry, header, metadata_of
from .durable import CHUNK, name_errors, new_file, opened, read_fully
from .errors import CheckpointError, part_of, understanding
from .fragment import FragmentSpec
from .index import checksum
from .table import DTYPE_ORDER, ROW, Vocabulary

TABLE_NAME = "__table__"
READERS = 32  # threads that read the tables: thousands of small reads, mostly waiting
AHEAD = 2 * READERS  # tables in memory at once
WINDOW = 128 << 20  # bytes of pinned memory that are filled at a time, twice
ALIGNED = 16  # bytes, a multiple of every element's size
FILES_PER_FOLDER = 256  # keeps folders small at any number of ranks


def file_name(rank: int) -> str:
    """Path of a rank's file inside the checkpoint."""
    return f"data/{rank // FILES_PER_FOLDER:04d}/rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """A written file, with all that is needed to verify it."""

    rank: int
    size: int
    header: str  # checksum of the bytes before the first fragment
    table: str  # checksum of the table, which has the checksums of the fragments. So every byte is covered.
    begin: int  # begin, end: bytes of the fragments
    end: int

    @property
    def path(self) -> str:
        """Path inside the checkpoint."""
        return file_name(self.rank)

    @classmethod
    def from_dict(cls, values: dict) -> "FileRecord":
        """A record as read from a file.

        Raises:
            ValueError, TypeError: the values are no record.
        """
        record = cls(**values)
        if type(record.rank) is not int or record.rank < 0:
            raise ValueError(f"{record.rank!r} is not a rank")
        places = (0, record.begin, record.end, record.size)
        if any(type(place) is not int for place in places) or sorted(places) != list(places):
            raise ValueError(f"{record.path}: its parts do not follow each other: {places}")
        return record

    def under(self, root: Path) -> Path:
        """Path of the file. Errors as of `part_of`."""
        return part_of(root, self.path)


def write_rank_file(
    root: Path,
    rank: int,
    items: Iterable[tuple[FragmentSpec, torch.dtype]],
    values: Callable[[int], Iterable[torch.Tensor]],
    *,
    wait: bool = True,
) -> FileRecord | None:
    """Write the file of `rank` under `root`. With `wait`, fsync it.

    Args:
        items: fragments with their types.
        values: returns the elements of the item with that number, as consecutive 1-D host tensors. Called once per
            item, in turn, so only one item need be in memory.

    Returns:
        The record. None if the rank has nothing to write.

    Raises:
        OSError: the disk is full, the folder is gone, ...
        ValueError: one name stands for two tensors, or values have another type or size than announced.
    """
    given = list(items)
    order = _order([(spec.length, dtype.itemsize) for spec, dtype in given])
    numbered = [(number, _canonical(given[number][0]), given[number][1]) for number in order]
    if not numbered:
        return None
    vocabulary, rows = Vocabulary(), np.zeros(len(numbered), ROW)
    start, entries = _layout(rank, [(spec, dtype) for _, spec, dtype in numbered], vocabulary, rows)
    path = root / file_name(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, wait=wait) as write:
        write(start)
        for row, (number, spec, dtype) in zip(rows, numbered, strict=True):
            row["checksum"] = _write_values(write, spec, dtype, values(number))
        table = rows.tobytes()
        write(table)
    place = entries[TABLE_NAME]
    return FileRecord(rank, place.end, checksum(start), checksum(table), len(start), place.begin)


def _layout(
    rank: int, items: list[tuple[FragmentSpec, torch.dtype]], vocabulary: Vocabulary, rows: np.ndarray
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The header and the entries of a file. Fills the vocabulary and the rows, except for the checksums."""
    names = {_entry_name(spec): (dtype, (spec.length,)) for spec, dtype in items}
    if len(names) < len(items):
        raise ValueError(f"rank {rank} gave the same fragment twice: {_twice(spec for spec, _ in items)}")
    for row, (spec, dtype) in zip(rows, items, strict=True):
        row["tensor"], row["state"] = vocabulary.tensor(spec.tensor), vocabulary.state(spec.state)
        row["dtype"] = DTYPE_ORDER.index(DTYPE_NAMES[dtype])
        row["tensor_rank"], row["tensor_ranks"] = spec.tensor_rank, spec.tensor_ranks
        row["start"], row["length"] = spec.start, spec.length
    start, entries = header(
        {**names, TABLE_NAME: (torch.uint8, (rows.nbytes,))},
        {"format": "megatron.fragments", "vocabulary": vocabulary.to_json()},
    )
    for row, (spec, _) in zip(rows, items, strict=True):
        row["offset"] = entries[_entry_name(spec)].begin
    return start, entries


def read_table(root: Path, record: FileRecord) -> tuple[str, np.ndarray]:
    """The vocabulary (as JSON) and the rows of a written file, verified against its record.

    Raises:
        CheckpointError: the file does not have the recorded content.
        OSError: it cannot be read.
    """
    path = record.under(root)
    start, table = bytearray(record.begin), bytearray(record.size - record.end)
    with opened(path) as handle, name_errors(path):
        read_fully(handle, memoryview(start), 0)
        read_fully(handle, memoryview(table), record.end)
    for part, found, written in (("header", start, record.header), ("table", table, record.table)):
        if checksum(bytes(found)) != written:
            raise CheckpointError(path, f"its {part} does not have the checksum it was written with")
    with understanding(path):
        rows = np.frombuffer(bytes(table), ROW)
        places = [record.begin, *rows["offset"].tolist(), record.end]
        if sorted(places) != places:
            raise ValueError("its fragments do not follow each other")
        return metadata_of(bytes(start[8:]))["vocabulary"], rows


def tables_of(root: Path, records: Sequence[FileRecord]) -> Iterator[tuple[str, np.ndarray]]:
    """`read_table` of each record, read ahead by a pool of threads."""
    with ThreadPoolExecutor(READERS) as pool:
        for begin in range(0, len(records), AHEAD):
            yield from pool.map(partial(read_table, root), records[begin : begin + AHEAD])


def host_values(tensors: Sequence[torch.Tensor]) -> Callable[[int], Iterator[torch.Tensor]]:
    """The `values` of `write_rank_file` for 1-D tensors: the elements of each in host pieces of at most `CHUNK` bytes.

    A GPU fills one window of pinned memory while the other is written: the host waits once per window."""
    if not any(tensor.is_cuda for tensor in tensors):
        return lambda number: _pieces(tensors[number])
    order = _order([(each.numel(), each.element_size()) for each in tensors])
    arriving = _through_windows([piece for number in order for piece in _pieces(tensors[number])])

    def values(number: int) -> Iterator[torch.Tensor]:
        yield from islice(arriving, sum(1 for _ in _pieces(tensors[number])))

    return values


def _pieces(data: torch.Tensor) -> Iterator[torch.Tensor]:
    step = max(1, CHUNK // data.element_size())
    for start in range(0, data.numel(), step):
        yield data[start : start + step].detach()


def _order(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """The order in which a file has its items, given by length and element size, without empty ones. The widest
    come first, so every fragment starts at a multiple of its element size."""
    return sorted((number for number, size in enumerate(sizes) if size[0]), key=lambda number: -sizes[number][1])


def _through_windows(pieces: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Copies of the pieces on the host, in turn. A copy is valid until the next one is asked for."""
    windows: list[list[tuple[torch.Tensor, int]]] = [[]]
    filled = largest = 0
    for piece in pieces:
        size = -(-piece.nbytes // ALIGNED) * ALIGNED
        if filled + size > WINDOW:
            windows.append([])
            filled = 0
        windows[-1].append((piece, filled))
        filled += size
        largest = max(largest, filled)
    memory = [torch.empty(largest, dtype=torch.uint8, pin_memory=True) for _ in windows[:2]]

    def fill(number: int) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        copies, arrived = list[torch.Tensor](), torch.cuda.Event()
        for piece, begin in windows[number]:
            place = memory[number % 2][begin : begin + piece.nbytes].view(piece.dtype)
            copies.append(place.copy_(piece, non_blocking=True))
        arrived.record()
        return copies, arrived

    ahead = fill(0)
    for number in range(len(windows)):
        copies, arrived = ahead
        arrived.synchronize()
        if number + 1 < len(windows):
            ahead = fill(number + 1)  # where the copies before these were, which are written
        yield from copies


def _write_values(
    write: Callable[[memoryview], None], spec: FragmentSpec, dtype: torch.dtype, parts: Iterable[torch.Tensor]
) -> int:
    digest, count = xxhash.xxh3_64(), 0
    for part in parts:
        if part.dtype != dtype:
            raise ValueError(f"{spec.label}: announced as {dtype}, but given as {part.dtype}")
        count += part.numel()
        if count > spec.length:
            break
        content = part.contiguous().view(torch.uint8).numpy().data
        digest.update(content)
        write(content)
    if count != spec.length:
        raise ValueError(f"{spec.label}: {spec.length} values were announced, not {count}")
    return digest.intdigest()


def _canonical(spec: FragmentSpec) -> FragmentSpec:
    """A tensor that is not cut is the same on all tensor parallel ranks, and is stored as that of one rank."""
    if spec.tensor.shard is not None or spec.tensor_ranks == 1:
        return spec
    return FragmentSpec(spec.tensor, spec.state, 0, 1, spec.start, spec.length)


def _entry_name(spec: FragmentSpec) -> str:
    return f"{spec.state}:{spec.tensor.name}:{spec.tensor_rank}/{spec.tensor_ranks}@{spec.start}"


def _twice(specs: Iterable[FragmentSpec]) -> str:
    counts = Counter(map(_entry_name, specs))
    return next(name for name, count in counts.items() if count > 1)
