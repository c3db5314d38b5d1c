"""Collectives in the rank's beacon: each call of `torch.distributed` is written there.

The functions are replaced during a run, in the modules of torch that have them, so that calls of libraries (DeepSpeed,
torch's own gathering of objects) are written too. A call costs one or two microseconds more. On gloo a call returns
with its result, so the time inside is the time of waiting for others. With NCCL it returns when the operation is
queued."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from hashlib import blake2b
from threading import get_ident
from typing import Any

import torch.distributed as dist
from torch import Tensor, dtype
from torch.compiler import is_compiling
from torch.distributed import distributed_c10d as home

from megatron.worker.beacon import PEERS, Beacon, ranks_text

from ..layout.mesh import Mesh

COLLECTIVES = (
    "all_reduce all_reduce_coalesced all_gather all_gather_into_tensor all_gather_coalesced reduce_scatter "
    "reduce_scatter_tensor all_to_all all_to_all_single broadcast reduce gather scatter barrier monitored_barrier"
).split()
MESSAGES = ("send", "recv")
UNEVEN = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier")


class _Watcher:
    def __init__(self, beacon: Beacon, mesh: Mesh | None) -> None:
        self.beacon, self.mesh = beacon, mesh
        self.slots: dict[Any, int] = {}
        self.busy = False
        self.last = -1
        self.thread = get_ident()

    def follow(self, group: Any) -> int:
        """The slot of a process group at its first call. None is the group of all ranks. -1: the group is skipped."""
        named = dist.group.WORLD if group is None else group
        if named is None or named is dist.GroupMember.NON_GROUP_MEMBER:
            return -1
        if named not in self.slots:
            self.slots[named] = self._follow(named)
        slot = self.slots[group] = self.slots[named]
        return slot

    def _follow(self, group: Any) -> int:
        ranks = tuple(dist.get_process_group_ranks(group))
        key = blake2b(str(getattr(group, "group_name", ranks)).encode(), digest_size=8).hexdigest()
        return self.beacon.group(key, self._name(group, ranks), ranks_text(ranks))

    def _name(self, group: Any, ranks: tuple[int, ...]) -> str:
        if len(ranks) == dist.get_world_size():
            return "the group of all ranks"
        for name in ("tensor", "columns", "rows", "pipeline", "data", "expert", "expert_data"):
            if self.mesh is not None and getattr(self.mesh, name).ranks == ranks:
                return f"the {name.replace('_', ' ')} group"
        return f"the group of ranks {ranks_text(ranks)}"

    def collective(self, name: str, function: Callable) -> Callable:
        names = list(inspect.signature(function).parameters)
        place, operation, sized = names.index("group"), name.encode(), name not in UNEVEN
        later = names.index("async_op") if "async_op" in names else None
        root = next((word for word in ("src", "dst") if word in names), None)
        towards = b" to rank %d" if root == "dst" else b" from rank %d"
        beacon, slots = self.beacon, self.slots

        # Between two calls a step fills the processor's caches. A function then costs more than in a loop, so this one
        # calls as few as possible.
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.busy or is_compiling():
                return function(*args, **kwargs)
            group = args[place] if len(args) > place else kwargs.get("group")
            slot = slots.get(group)
            if slot is None:
                slot = self.follow(group)
            if slot < 0:
                return function(*args, **kwargs)
            what = args[0] if args else next(iter(kwargs.values()), None)
            self.busy = True
            form = _type(what)
            if root is not None:
                form += towards % _root(dict(zip(names, args)) | kwargs, root)
            elements = what.numel() if isinstance(what, Tensor) else _elements(what)
            beacon.enter(slot, operation, elements, sized=sized, form=form)
            try:
                return function(*args, **kwargs)
            finally:
                beacon.leave()
                self.busy = False
                if later is not None and (args[later] if len(args) > later else kwargs.get("async_op")):
                    self.last = slot

        return call

    def message(self, name: str, function: Callable) -> Callable:
        names, operation = list(inspect.signature(function).parameters), name.encode()

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.busy or is_compiling():
                return function(*args, **kwargs)
            given = dict(zip(names, args)) | kwargs
            peer = given.get("dst" if name == "send" else "src")
            if peer is None and given.get("group_dst" if name == "send" else "group_src") is None:
                peer = -1  # from anybody
            elif peer is None:
                group = given.get("group") or dist.distributed_c10d._get_default_group()
                peer = dist.get_global_rank(group, given["group_" + names[1]])
            self.busy = True
            self.beacon.enter(PEERS, operation, _elements(given.get("tensor")), peer)
            try:
                return function(*args, **kwargs)
            finally:
                self.beacon.leave()
                self.busy = False

        return call

    def waiting(self, function: Callable) -> Callable:
        """`Work.wait`, of an operation that was called without waiting and is not complete."""

        @wraps(function)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            elsewhere = self.beacon.inside or get_ident() != self.thread  # which waits for a message of its own
            if self.busy or self.last < 0 or elsewhere or work.is_completed():
                return function(work, *args, **kwargs)
            self.busy = True
            self.beacon.wait(self.last)
            try:
                return function(work, *args, **kwargs)
            finally:
                self.beacon.leave()
                self.busy = False

        return wait


_TYPES: dict[dtype, bytes] = {}  # names of types, which are slow to make


def _type(what: Any) -> bytes:
    """The type of a tensor, or of the first in a list."""
    first = what[0] if isinstance(what, (list, tuple)) and what else what
    if not isinstance(first, Tensor):
        return b""
    if first.dtype not in _TYPES:
        _TYPES[first.dtype] = str(first.dtype).removeprefix("torch.").encode()
    return _TYPES[first.dtype]


def _root(given: dict[str, Any], word: str) -> int:
    if given.get(word) is not None:
        return int(given[word])
    place = given.get(f"group_{word}")
    return 0 if place is None else dist.get_global_rank(given.get("group") or home._get_default_group(), place)


def _elements(what: Any) -> int:
    if isinstance(what, Tensor):
        return what.numel()
    if isinstance(what, (list, tuple)):
        return sum(each.numel() for each in what if isinstance(each, Tensor))
    return 0


@contextmanager
def watched_collectives(beacon: Beacon, mesh: Mesh | None = None) -> Iterator[None]:
    """Write every collective of this process to the beacon, until the end of the block.

    Args:
        beacon: of this rank.
        mesh: gives groups their names.
    """
    watcher = _Watcher(beacon, mesh)
    replaced: list[tuple[Any, str, Any]] = []

    def replace(where: Any, name: str, new: Any) -> None:
        replaced.append((where, name, getattr(where, name)))
        setattr(where, name, new)

    try:
        for names, watched in ((COLLECTIVES, watcher.collective), (MESSAGES, watcher.message)):
            for name in names:
                function = getattr(home, name, None)
                if function is None:
                    continue
                new = watched(name, function)
                for module in (home, dist):
                    if getattr(module, name, None) is function:
                        replace(module, name, new)
        replace(dist.Work, "wait", watcher.waiting(dist.Work.wait))
        yield
    finally:
        for where, name, old in reversed(replaced):
            setattr(where, name, old)
