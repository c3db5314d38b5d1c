"""Sums and gathers of ranks on one host through shared memory, in the place of gloo's messages over TCP.

This is a layer below the account: operations and bytes are the same. It does all-reduces and reduce-scatters that add
(or average) floats, and all-gathers. They have `LEAST` bytes or more, the caller waits at once, and the ranks of the
gloo group can map each other's memory. All others go through gloo, and so do the first messages of a group, by which
its ranks find each other.

A message goes in chunks that stay in the caches. For each chunk, a rank writes the parts that others sum into its slab.
It adds all ranks' parts of its own share in the order of ranks (16-bit numbers of several ranks in fp32). Then it reads
the other shares from the other slabs. So all ranks have the same bits. The three stages run together, each one chunk
behind the stage before, with one meeting per chunk."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from ..messages.interception import SHARED, complete, intercept, original, release
from .host_memory import WORD, HostGroup

LEAST = 256 * 1024  # bytes of a message
CHUNK = 1024 * 1024  # bytes of all ranks' shares together
MOST = 32  # ranks of a group, for each meets each
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "allreduce", "all_gather", "reduce_scatter"
METHODS = {
    "allreduce": ALL_REDUCE,
    "allreduce_coalesced": ALL_REDUCE,
    "_allgather_base": ALL_GATHER,
    "all_gather_single": ALL_GATHER,
    "_reduce_scatter_base": REDUCE_SCATTER,
    "reduce_scatter_single": REDUCE_SCATTER,
}
_NARROW = (torch.bfloat16, torch.float16)
Stage = Callable[[int], None]  # of the number of a chunk


class SharedGroup:
    """Operations of one group.

    Args:
        host: its ranks.
        width: bytes of a buffer, whole cache lines.
        patience: gives the timeout.
    """

    def __init__(self, host: HostGroup, width: int, patience: Callable[[], timedelta]) -> None:
        self._host, self._width, self._patience = host, width, patience
        self._turn = 0  # chunks so far: buffers are used in turns

    @staticmethod
    def slab(ranks: int, width: int) -> int:
        """Bytes of a rank's part: two buffers for each rank's share, and two for its own sum."""
        return 2 * (ranks + 1) * width

    def all_reduce(self, *tensors: Tensor, average: bool) -> None:
        """Each becomes the sum over all ranks, in place."""
        for x in tensors:
            if x.numel():
                self._all_reduce(x, average)

    def _all_reduce(self, x: Tensor, average: bool) -> None:
        n, width = self._host.size, self._width // x.element_size()
        chunks = [_parts(chunk, n) for chunk in x.split(n * width)]
        own = [chunk[self._host.rank] for chunk in chunks]
        stages = [self._put(chunks), self._add(own, own, average), self._take(chunks)]
        self._run(len(chunks), stages, f"all_reduce {x.dtype} {x.numel()} {average}")

    def reduce_scatter(self, out: Tensor, whole: Tensor, *, average: bool) -> None:
        """out [b] gets this rank's block of the sum of all ranks' whole [n b]."""
        chunks = self._blocks(whole)
        own = [chunk[self._host.rank] for chunk in chunks]
        outs = out.split(self._width // out.element_size())
        stages = [self._put(chunks), self._add(own, outs, average)]
        self._run(len(chunks), stages, f"reduce_scatter {whole.dtype} {whole.numel()} {average}")

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """out [n b] gets the blocks [b] of all ranks. `part` may be this rank's block there."""
        chunks, rank = self._blocks(out), self._host.rank
        parts = part.split(self._width // part.element_size())

        def put(at: int) -> None:
            self._sum(rank, at, parts[at]).copy_(parts[at])
            if chunks[at][rank].data_ptr() != parts[at].data_ptr():
                chunks[at][rank].copy_(parts[at])

        self._run(len(chunks), [put, self._take(chunks)], f"all_gather {out.dtype} {out.numel()}")

    def _blocks(self, whole: Tensor) -> list[tuple[Tensor, ...]]:
        """Of [n b] each chunk's part of each block."""
        width = self._width // whole.element_size()
        return list(zip(*(block.split(width) for block in whole.chunk(self._host.size))))

    def _put(self, chunks: Sequence[Sequence[Tensor]]) -> Stage:
        def put(at: int) -> None:
            for other, part in enumerate(chunks[at]):
                if other != self._host.rank:
                    self._given(self._host.rank, other, at, part).copy_(part)

        return put

    def _add(self, own: Sequence[Tensor], out: Sequence[Tensor], average: bool) -> Stage:
        def add(at: int) -> None:
            rank, n = self._host.rank, self._host.size
            terms = [own[at] if each == rank else self._given(each, rank, at, own[at]) for each in range(n)]
            kept = self._sum(rank, at, own[at])
            if n > 2 and kept.dtype in _NARROW:
                total, rest = terms[0].float(), terms[1:]
            else:
                total, rest = torch.add(terms[0], terms[1], out=kept), terms[2:]
            for term in rest:
                total.add_(term)
            if average:
                total.mul_(1 / n)
            if total is not kept:
                kept.copy_(total)
            out[at].copy_(kept)

        return add

    def _take(self, chunks: Sequence[Sequence[Tensor]]) -> Stage:
        def take(at: int) -> None:
            for other, part in enumerate(chunks[at]):
                if other != self._host.rank:
                    part.copy_(self._sum(other, at, part))

        return take

    def _given(self, rank: int, to: int, at: int, like: Tensor) -> Tensor:
        return self._buffer(rank, 2 * to, at, like)

    def _sum(self, rank: int, at: int, like: Tensor) -> Tensor:
        return self._buffer(rank, 2 * self._host.size, at, like)

    def _buffer(self, rank: int, first: int, at: int, like: Tensor) -> Tensor:
        start = (first + (self._turn + at) % 2) * self._width
        return self._host.slabs[rank][start : start + like.numel() * like.element_size()].view(like.dtype)

    def _run(self, chunks: int, stages: Sequence[Stage], what: str) -> None:
        """Run each stage of a chunk one meeting after the stage before.

        Buffers are used in turns, for a rank may be one meeting ahead."""
        word = zlib.crc32(f"{what} {self._turn}".encode()).to_bytes(WORD, "little")
        last = chunks + len(stages) - 2
        for time in range(last + 1):
            for delay, stage in enumerate(stages):
                if 0 <= time - delay < chunks:
                    stage(time - delay)
            if time < last:
                self._host.meet(word, self._patience)
        self._turn += chunks


def _parts(chunk: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """Nearly equal shares of a chunk, in whole cache lines. The last ones may be empty."""
    line = 64 // chunk.element_size()
    size = -(-chunk.numel() // (ranks * line)) * line
    parts = chunk.split(size)
    return *parts, *(chunk[:0] for _ in range(ranks - len(parts)))


class SharedSums:
    """Does the operations of every group that it can, while it is installed.

    Args:
        log: gets a line where ranks of one host cannot share memory.
        least: bytes of the smallest message that it takes.
        chunk: bytes of a chunk.
    """

    def __init__(self, log: Callable[[str], Any], least: int = LEAST, chunk: int = CHUNK) -> None:
        self._log, self._least, self._chunk = log, least, chunk
        self._known: dict[str, SharedGroup | None] = {}  # by the name of a group
        self._hosts: list[HostGroup] = []

    def wrap(self, method: str, plain: Callable) -> Callable:
        """A layer of `interception`."""
        operation = METHODS[method]

        def shared(group: ProcessGroup, *args: Any, **options: Any) -> Any:
            call = None if options else self._call(operation, group, args)
            if call is None:
                return plain(group, *args, **options)
            with torch.no_grad(), torch.profiler.record_function(f"shared:{operation}"):
                call()
            return complete(args[0])

        return shared

    def _call(self, operation: str, group: ProcessGroup, args: tuple) -> Callable[[], None] | None:
        """A function that does a call. None: by gloo."""
        tensors = list(args[0]) if operation == ALL_REDUCE else list(args[:2])
        if getattr(args[-1], "asyncOp", True) or not self.takes(group, *tensors):
            return None
        if not _fit(operation, tensors, group.size()):
            return None
        op = getattr(args[-1], "reduceOp", dist.ReduceOp.SUM)
        if op != dist.ReduceOp.SUM and op != dist.ReduceOp.AVG:
            return None
        shared = self._find(group)
        if shared is None:
            return None
        flat = [each.detach().view(-1) for each in tensors]
        if operation == ALL_GATHER:
            return partial(shared.all_gather, *flat)
        add = shared.all_reduce if operation == ALL_REDUCE else shared.reduce_scatter
        return partial(add, *flat, average=op == dist.ReduceOp.AVG)

    def takes(self, group: ProcessGroup, *tensors: Tensor) -> bool:
        """Whether tensors have a kind and size for shared memory, if the ranks of the group have it."""
        return (
            1 < group.size() <= MOST
            and all(each.device.type == "cpu" and not each.is_sparse and each.is_contiguous() for each in tensors)
            and max(each.numel() * each.element_size() for each in tensors) >= self._least
        )

    def averages(self, group: ProcessGroup, *tensors: Tensor) -> bool:
        """Whether an all-reduce of these may be an average. All ranks of the group call it."""
        floats = all(each.is_floating_point() for each in tensors)
        return floats and self.takes(group, *tensors) and self._find(group) is not None

    def _find(self, group: ProcessGroup) -> SharedGroup | None:
        key = group.group_name
        if key not in self._known:
            self._known[key] = self._made(group)
        return self._known[key]

    def _made(self, group: ProcessGroup) -> SharedGroup | None:
        """All ranks of the group call it with its first message of such a size."""
        try:
            backend = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # none for this device
            return None
        if backend.name() != "gloo":
            return None
        ranks = group.size()
        width = -(-self._chunk // (64 * ranks)) * 64

        def share(numbers: list[int]) -> list[list[int]]:
            table = torch.zeros(ranks, len(numbers), dtype=torch.int64)
            table[group.rank()] = torch.tensor(numbers)
            original("allreduce")(group, [table], dist.AllreduceOptions()).wait()
            return table.tolist()

        host = HostGroup(group.rank(), ranks, SharedGroup.slab(ranks, width), share)
        if host.reason:
            self._log(
                f"communication: {ranks} ranks of this host share no memory ({host.reason}): "
                "their sums go through gloo, which is slower"
            )
        if not host.ready:
            return None
        self._hosts.append(host)
        return SharedGroup(host, width, lambda: backend.options._timeout)

    @contextmanager
    def installed(self) -> "Iterator[SharedSums]":
        """Send messages through shared memory until the end of the block."""
        global _installed
        intercept(SHARED, METHODS, self.wrap)
        _installed = self
        try:
            yield self
        finally:
            release(SHARED)
            _installed = None
            self._known.clear()
            for host in self._hosts:
                host.close()


def _fit(operation: str, tensors: Sequence[Tensor], ranks: int) -> bool:
    """Whether shared memory can do the operation. gloo reports the errors of others."""
    first, last = tensors[0], tensors[-1]
    if operation == ALL_REDUCE:
        return all(each.is_floating_point() for each in tensors)
    small, large = (last, first) if operation == ALL_GATHER else (first, last)
    floats = operation == ALL_GATHER or first.is_floating_point()
    return floats and first.dtype == last.dtype and large.numel() == ranks * small.numel()


_installed: SharedSums | None = None


def averages(group: ProcessGroup, *tensors: Tensor) -> bool:
    """Whether an all-reduce of these tensors may be an average, which gloo lacks. All ranks of the group call it."""
    return _installed is not None and _installed.averages(group, *tensors)
