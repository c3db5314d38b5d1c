"""Count what one rank, one host and the launcher do at a start, for worlds of 10 to 10,000 ranks, on one process.

    python -m bench growth --worlds 64 1024 10240 --zero 1

Nothing is started. Process groups are pretended and counted. The checkpoint's manifest and index are of a run of Llama
3 70B on the world's ranks, without its tensors. The specification of the job is written as it would be sent. Each
number is of one rank (or of what the column says), with how it grows from the world before: 0 is not at all, 1 in
proportion.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench.runner import Result, grid
from megatron.checkpoint import Solo, StoreCommunicator
from megatron.checkpoint.format import index_file
from megatron.checkpoint.format.durable import MANIFEST, META, new_file
from megatron.checkpoint.format.fragment import FragmentSpec
from megatron.checkpoint.format.index import INDEX_NAME, Index
from megatron.checkpoint.format.index_file import HashTree, write_index
from megatron.checkpoint.format.manifest import Meta, manifest_of, write_merged
from megatron.checkpoint.format.rankfile import FileRecord
from megatron.checkpoint.format.table import ROW, Vocabulary
from megatron.checkpoint.read.read_plan import plan
from megatron.checkpoint.read.reader import Checkpoint
from megatron.config.problems import UserError
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from megatron.worker.rendezvous import SealedStore

STATES, DEVICES = ("master", "exp_avg", "exp_avg_sq"), 8
TENSOR, PIPELINE = 8, 2  # of the layout, the rest is data parallel
MESSAGE = "x" * 200  # a fingerprint of configuration and code


def groups(world: int) -> dict[str, float]:
    """Process groups of one rank: how many, their members together, and the time to find out who they are."""
    from megatron.parallel.layout import mesh
    from megatron.parallel.layout.layout import Layout

    made: list[int] = []

    def pretend(ranks: Sequence[int], *arguments: Any, **options: Any) -> object:
        made.append(len(ranks))
        return object()

    layout = Layout(tensor=TENSOR, pipeline=PIPELINE, data=world // (TENSOR * PIPELINE))
    with (
        mock.patch.object(mesh, "new_group", pretend),
        mock.patch.object(mesh.dist, "get_world_size", return_value=world),
        mock.patch.object(mesh.dist, "get_rank", return_value=world // 2),
    ):
        seconds, memory = costs(lambda: mesh.Mesh.build(layout))
    return {"groups": len(made) / 2, "members": sum(made) / 2, "groups: ms": seconds * 1e3, "groups: KiB": memory}


def launcher(world: int) -> dict[str, float]:
    """The launcher's message to one host, and the time to write those to all."""
    from megatron.launch.wire.specification import Host, Specification

    hosts = tuple(Host(f"node{number:05d}", tuple(range(DEVICES))) for number in range(max(1, world // DEVICES)))
    job = Specification(hosts, ("python", "train.py"), "/job", configuration="x" * 20_000)
    begin = time.process_time()
    sizes = [len(json.dumps(job.to_message(number))) for number in range(len(hosts))]
    seconds = time.process_time() - begin
    return {"launch: KiB to a host": sizes[0] / 1024, "launch: ms for all hosts": seconds * 1e3}


def agreement(world: int) -> dict[str, float]:
    """Messages to a rank in the check that all run the same thing: rank 0's fingerprint, and whether any differs."""
    return {"agreement: KiB heard": (len(json.dumps(MESSAGE)) + 1) / 1024}


def tensors() -> list[LogicalTensor]:
    """Of Llama 3 70B."""
    hidden, inner, keys, vocabulary, layers = 8192, 28672, 1024, 128256, 80
    cut, head = (hidden, keys, keys), 128
    found = [LogicalTensor("embedding.weight", (vocabulary, hidden), Role.EMBEDDING, Shard(0))]
    for layer in range(layers):
        at = f"layers.{layer}"
        found += [
            LogicalTensor(f"{at}.attention.norm.weight", (hidden,), Role.NORM),
            LogicalTensor(f"{at}.attention.qkv.weight", (sum(cut), hidden), Role.HIDDEN, Shard(0, cut, head)),
            LogicalTensor(f"{at}.attention.out.weight", (hidden, hidden), Role.OUTPUT, Shard(1, None, head)),
            LogicalTensor(f"{at}.mlp.norm.weight", (hidden,), Role.NORM),
            LogicalTensor(f"{at}.mlp.gate_up.weight", (2 * inner, hidden), Role.HIDDEN, Shard(0, (inner, inner))),
            LogicalTensor(f"{at}.mlp.down.weight", (hidden, inner), Role.OUTPUT, Shard(1)),
        ]
    head_weight = LogicalTensor("head.weight", (vocabulary, hidden), Role.HEAD, Shard(0))
    return [*found, LogicalTensor("norm.weight", (hidden,), Role.NORM), head_weight]


def stored_rows(world: int, zero: int) -> np.ndarray:
    """The rows that all ranks save.

    With ZeRO 1 each stage's shards, laid end to end, fall to the data parallel ranks in equal pieces. With ZeRO 3 each
    shard does.
    """
    found, data = [], world // (TENSOR * PIPELINE)
    every = tensors()
    for stage in range(PIPELINE):
        mine = range(len(every) * stage // PIPELINE, len(every) * (stage + 1) // PIPELINE)
        for rank in range(TENSOR):
            own = [number for number in mine if every[number].shard is not None or rank == 0]
            sizes = np.array([math.prod(every[number].local_shape(rank, TENSOR)) for number in own])
            ends = np.cumsum(sizes)
            runs = [(0, int(ends[-1]))] if zero == 1 else list(zip((ends - sizes).tolist(), ends.tolist()))
            pieces = [-(-(end - begin) // data) for begin, end in runs]
            cuts = [np.arange(begin, end, piece) for (begin, end), piece in zip(runs, pieces)]
            owners = [(cut - begin) // piece for cut, (begin, _), piece in zip(cuts, runs, pieces)]
            starts = np.unique(np.concatenate([*cuts, ends - sizes]))
            place = np.searchsorted(ends, starts, side="right")
            rows = np.zeros(len(starts), ROW)
            rows["tensor"], rows["tensor_rank"] = np.array(own)[place], rank
            rows["tensor_ranks"] = [TENSOR if every[number].shard is not None else 1 for number in rows["tensor"]]
            rows["start"] = starts - (ends - sizes)[place]
            rows["length"] = np.diff(np.append(starts, ends[-1]))
            known = np.concatenate(owners)[np.searchsorted(np.concatenate(cuts), starts, side="right") - 1]
            rows["file"] = (stage * data + known) * TENSOR + rank
            for state in range(len(STATES)):
                rows["state"] = state
                found.append(rows.copy())
    together = np.concatenate(found)
    return together[np.lexsort((together["start"], together["tensor_rank"], together["state"], together["tensor"]))]


def write_checkpoint(folder: Path, world: int, rows: np.ndarray) -> None:
    """Manifest, index and meta data."""
    records = [FileRecord(rank, 10**9, "0" * 32, "0" * 32, 0, 10**9) for rank in range(world)]
    meta = Meta(1).to_bytes()
    with new_file(folder / INDEX_NAME, wait=False) as write:
        seal = write_index(write, Index(Vocabulary(tensors(), list(STATES)), rows), [rows], records)
    (folder / META).write_bytes(meta)
    (folder / MANIFEST).write_bytes(manifest_of(seal, meta))


class Heard(Solo):
    """The other ranks: they want what this one does not, find nothing wrong, and say as much as it does."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.bytes = rank, size, 0

    def gather(self, value: Any) -> list[Any]:
        self.bytes += self.size * len(json.dumps(value))
        return [value] * self.size

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        self.bytes += len(flags)
        return list(flags) if len(flags) == 1 else [True] * len(flags)


def resume(place: Path, rank: int, world: int, wanted: Sequence[FragmentSpec]) -> tuple[int, int]:
    """Open a checkpoint as a rank, see that it fits, and find its own part and the files that have it.

    Returns the bytes that the rank has read and received.
    """
    trees: list[HashTree] = []

    def grown(*arguments: Any) -> HashTree:
        trees.append(HashTree(*arguments))
        return trees[-1]

    with mock.patch.object(index_file, "HashTree", grown):
        opened, others = Checkpoint(place, share=(rank, world)), Heard(rank, world)
    opened.check(wanted, communicator=others)
    for spec in wanted:
        for read in plan(opened.index, spec):
            assert opened.records[read.file].size
    whole = sum((place / name).stat().st_size for name in (MANIFEST, META))
    start = json.loads(json.loads((place / MANIFEST).read_bytes())["content"])["parts"][INDEX_NAME]["begin"]
    return whole + start + sum(tree.read for tree in trees), others.bytes


def checkpoint(world: int, zero: int = 1) -> dict[str, float]:
    """A rank that resumes from a checkpoint of the same number of ranks, on the same layout."""
    rank, rows, known = world // 2, stored_rows(world, zero), tensors()
    wanted = [
        FragmentSpec(
            known[row["tensor"]],
            STATES[row["state"]],
            *(int(row[name]) for name in ("tensor_rank", "tensor_ranks", "start", "length")),
        )
        for row in rows[rows["file"] == rank]
    ]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "step_00000001"
        place.mkdir()
        write_checkpoint(place, world, rows)
        sizes = [(place / name).stat().st_size for name in (MANIFEST, INDEX_NAME)]
        read, heard = resume(place, rank, world, wanted)
        seconds, memory = costs(lambda: resume(place, rank, world, wanted))
    return {
        "manifest: KiB": sizes[0] / 1024,
        "index: KiB": sizes[1] / 1024,
        "resume: KiB read": read / 1024,
        "resume: KiB heard": heard / 1024,
        "resume: ms": seconds * 1e3,
        "resume: KiB held": memory,
    }


def tables(world: int, zero: int, records: list[FileRecord]) -> Iterator[tuple[str, np.ndarray]]:
    """The part of each rank's file that rank 0 reads, in their order. `records` are filled with theirs."""
    rows, known = stored_rows(world, zero), tensors()
    rows = rows[np.argsort(rows["file"], kind="stable")]
    ends = np.flatnonzero(np.diff(rows["file"], append=-1)) + 1
    texts: dict[bytes, str] = {}
    for rank, (begin, end) in enumerate(zip(np.append(0, ends[:-1]), ends)):
        own = rows[begin:end].copy()
        numbers, own["tensor"] = np.unique(own["tensor"], return_inverse=True)
        if numbers.tobytes() not in texts:
            texts[numbers.tobytes()] = Vocabulary([known[number] for number in numbers], list(STATES)).to_json()
        records.append(FileRecord(rank, 10**9, "0" * 32, "0" * 32, 0, 10**9))
        yield texts[numbers.tobytes()], own


def save(world: int, zero: int = 1) -> dict[str, float]:
    """Rank 0 that has read the tables of all files: what it gathers to know of them, and makes of them. To read them
    costs what the disk does."""
    records: list[FileRecord] = []
    given = list(tables(world, zero, records))
    with tempfile.TemporaryDirectory() as folder:
        seconds, memory = costs(lambda: write_merged(Path(folder), iter(given), records, whole=True))
    text = json.dumps([[asdict(records[0])], None, False])
    return {
        "save: KiB gathered by rank 0": world * len(text) / 1024,
        "save: ms to gather them": gathered(world, text) * 1e3,
        "save: ms of rank 0": seconds * 1e3,
        "save: KiB held by rank 0": memory,
    }


def gathered(world: int, text: str) -> float:
    """Seconds in which rank 0 reads a text of each rank from the ranks' store, on this host."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    first = StoreCommunicator(store, 0, world, "growth", secret="growth")
    sealed = SealedStore(store, "communicator/growth", "growth")
    for rank in range(1, world):
        sealed.set(f"1/{rank}", text)
    begin = time.perf_counter()
    first.collect(None)
    return time.perf_counter() - begin


def costs(action: Callable[[], Any]) -> tuple[float, float]:
    """Processor seconds of the first call, and KiB of the most that a second one held at once."""
    begin = time.process_time()
    action()
    seconds = time.process_time() - begin
    tracemalloc.start()
    action()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, most / 1024


def counts(world: int, zero: int) -> dict[str, float]:
    return {**groups(world), **launcher(world), **agreement(world), **checkpoint(world, zero), **save(world, zero)}


def table(worlds: Sequence[int], found: Sequence[dict[str, float]]) -> str:
    """Markdown: a line for each number, and the power of the world by which the last two differ."""
    cells = [["of one rank", *(f"{world:,} ranks" for world in worlds), "grows as"]]
    for name in found[0]:
        values = [each[name] for each in found]
        power = math.log(values[-1] / values[-2]) / math.log(worlds[-1] / worlds[-2]) if values[-2] else 0.0
        shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        cells.append([name, *shown, f"world^{power:.1f}"])
    return grid(cells)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worlds", nargs="+", type=int, default=[64, 1024, 10240])
    parser.add_argument("--zero", type=int, choices=(1, 3), default=1, help="stage that cuts the saved states")


def measure(given: argparse.Namespace) -> Result:
    if any(world % (TENSOR * PIPELINE) for world in given.worlds) or len(given.worlds) < 2:
        raise UserError(f"--worlds must be two or more multiples of {TENSOR * PIPELINE}")
    counts(given.worlds[0], given.zero)  # imports
    found = [counts(world, given.zero) for world in given.worlds]
    return Result(dict(zip(map(str, given.worlds), found)), table(given.worlds, found))
