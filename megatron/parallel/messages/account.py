"""The account of the messages of this rank: every message of every process group, by phase and layer.

All collectives, also of DeepSpeed and of backward passes, end in a method of `ProcessGroup`. While a recorder is
installed, these methods count and then do their work. A call does not synchronise and reads no tensor. It costs a few
dictionary look-ups. Groups of one rank are skipped.

`size` is S of nccl-tests in bytes: the whole result of an all-gather, the whole input of a reduce-scatter and an
all-to-all, else the tensor. `wire_bytes` is the number of bytes that a rank then sends with a ring. Where hosts are
known, the bytes to other hosts are counted separately (`crossing_bytes`)."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup, get_process_group_ranks

from ..layout.layout import AXES, Coordinates, Layout
from ..layout.mesh import Mesh
from ..layout.precision import type_name
from .interception import ACCOUNT, intercept, release
from .timing import Clock, Message, Timer
from .traffic import Call, Tally, crossing_bytes

# Method of a process group -> (name of the operation, number of the argument whose bytes count).
METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", None),
}
EVALUATE = "evaluate"
# descriptions of groups that are a level of another group: ranks of a host, hosts, and ranks of a pair
LEVELS = ("inside", "between", "pair")
_installed: "Recorder | None" = None


def group_name(ranks: Sequence[int], layout: Layout, at: Coordinates) -> str:
    """The axis of the rank at `at` that has these ranks, or the axes on which they differ.

    A group that is several axes at once has the first name of tensor, context, data, pipeline, expert, expert_data,
    world."""
    ranks = sorted(ranks)
    lines = {name: [replace(at, **{name: index}) for index in range(getattr(layout, name))] for name in AXES}
    if layout.columns > 1:
        lines["rows"], lines["columns"] = layout.on_grid(at)
    lines |= {"expert": layout.all_experts(at), "expert_data": layout.same_experts(at)}
    for name, line in lines.items():
        if sorted(map(layout.rank, line)) == ranks:
            return name
    if len(ranks) == layout.world_size:
        return "world"
    places = [layout.coordinates(rank) for rank in ranks]
    return "+".join(name for name in AXES if len({getattr(one, name) for one in places}) > 1)


def pair_name(here: Coordinates, there: Coordinates) -> str:
    """The axes on which two ranks differ."""
    return "+".join(axis for axis in AXES if getattr(here, axis) != getattr(there, axis))


class Recorder:
    """Counts into `tally` while it is installed.

    Args:
        mesh: names the groups.
        clock: measures times while `timer.active`. None: no times.
        hosts: name of the host of each rank of the job, for `crossing`, the bytes to other hosts. May be set later.
    """

    def __init__(self, mesh: Mesh, clock: Clock | None = None, hosts: Sequence[Hashable] = ()) -> None:
        self.mesh, self.tally, self.crossing = mesh, Tally(), Tally()
        self.hosts = hosts
        self.timer = Timer(clock) if clock is not None else None
        self.phase = ""
        self._layers: list[str] = []  # of the modules whose forward pass is running, the innermost last
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._handles: list[Any] = []

    def install(self) -> None:
        """Start to count calls.

        Raises:
            RuntimeError: another recorder is installed in this process.
        """
        global _installed
        if _installed is not None:
            raise RuntimeError("a recorder of communication is installed already")
        _installed = self
        if self.timer is not None:
            self.timer.install()
        intercept(ACCOUNT, METHODS, lambda method, plain: self._counting(plain, *METHODS[method]))

    def remove(self) -> None:
        """Leave torch and the modules as they were."""
        global _installed
        if _installed is self:
            release(ACCOUNT)
            _installed = None
        for handle in self._handles:
            handle.remove()
        if self.timer is not None:
            self.timer.remove()
        self._handles = []

    def label(self, module: nn.Module, name: str) -> None:
        """Count calls inside this module's forward pass, and their backward passes, for layer `name`."""
        self._handles += [
            module.register_forward_pre_hook(lambda *_: self._layers.append(name)),
            # also where a recomputation ends early, which it does with an exception
            module.register_forward_hook(lambda *_: self._layers.pop() and None, always_call=True),
        ]

    @property
    def layer(self) -> str:
        """The layer whose forward pass, or gradient, is computed."""
        if self._layers:
            return self._layers[-1]
        return getattr(torch._C._current_autograd_node(), "layer", "") if self.phase == "backward" else ""

    def _counting(self, plain: Callable, operation: str, argument: int | None) -> Callable:
        if self.timer is not None:
            return self._timing(plain, operation, argument, self.timer)

        def counting(group: ProcessGroup, *args: Any, **options: Any) -> Any:
            self._count(group, operation, args, argument)
            return plain(group, *args, **options)

        return counting

    def _timing(self, plain: Callable, operation: str, argument: int | None, timer: Timer) -> Callable:
        def timing(group: ProcessGroup, *args: Any, **options: Any) -> Any:
            message = self._count(group, operation, args, argument)
            if message is not None and timer.active:
                return timer.call(message, plain, group, args, options)
            work = plain(group, *args, **options)
            timer.forget(work)
            return work

        return timing

    def _count(self, group: ProcessGroup, operation: str, args: tuple, argument: int | None) -> Message | None:
        """Count a call. Return the message if its times are measured."""
        name, ranks = self._group(group)
        size, place = len(ranks), None
        if size == 1:
            return None
        if operation in ("send", "recv"):
            place = args[1] if len(args) > 2 else None  # None: from any rank (`recv_anysource`)
            if place is not None:
                level, peer = name.partition("/")[1:], ranks[place]  # the first: of an algorithm's own group
                name = pair_name(self.mesh.at, self.mesh.layout.coordinates(peer)) + "".join(level)
                size, ranks = 2, (self.mesh.rank, peer)
        bytes_, dtype = _bytes(args[argument]) if argument is not None else (0, "")
        phase = "recompute" if self.phase == "backward" and self._layers else self.phase
        call = Call(phase, self.layer, name, size, operation, dtype)
        self.tally.add(call, 1, bytes_)
        if self.hosts and (crossing := crossing_bytes(operation, ranks, self.hosts, self.mesh.rank, bytes_)):
            self.crossing.add(call, 1, crossing)
        if self.timer is None or not self.timer.active:
            return None
        known = group in dist.distributed_c10d._world.pg_group_ranks
        return Message(call, group if known else None, tuple(sorted(ranks)), place, bytes_)

    def _group(self, group: ProcessGroup) -> tuple[str, tuple[int, ...]]:
        key = group.group_name
        if key not in self._groups:
            # a group that torch does not list has no ranks of the job
            known = group in dist.distributed_c10d._world.pg_group_ranks
            ranks = tuple(get_process_group_ranks(group)) if known else tuple(range(group.size()))
            name = group_name(ranks, self.mesh.layout, self.mesh.at)
            level = group.group_desc if group.group_desc in LEVELS else ""
            self._groups[key] = f"{name}/{level}" if level else name, ranks
        return self._groups[key]


def _bytes(tensors: Any) -> tuple[int, str]:
    """Bytes of a tensor, or of all in nested lists, and their type."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size(), type_name(tensors.dtype)
    found = [_bytes(each) for each in tensors]
    return sum(size for size, _ in found), next((dtype for _, dtype in found if dtype), "")


def here() -> str:
    """The running layer, which an autograd function keeps in its context as `layer`."""
    return "" if _installed is None else _installed.layer


@contextlib.contextmanager
def counted_for(layer: str) -> Iterator[None]:
    """Count calls inside for this layer (`here`), whichever runs."""
    layers = [] if _installed is None else _installed._layers
    layers.append(layer)
    try:
        yield
    finally:
        layers.pop()


def saved_of(ctx: Any) -> tuple[Any, ...]:
    """The saved tensors of an autograd function in its backward pass. Where recomputation makes them again, messages
    of other layers do not count for its layer."""
    layer, ctx.layer = ctx.layer, ""
    saved = ctx.saved_tensors
    ctx.layer = layer
    return saved


def note(group: ProcessGroup, operation: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Count a message that goes through no method of its group.

    Args:
        shape: of the tensor whose bytes count, as in `METHODS`.
    """
    if _installed is not None:
        _installed._count(group, operation, (torch.empty(tuple(shape), dtype=dtype, device="meta"),), 0)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Count calls inside for this phase of a step, or for the evaluation around it."""
    recorder = _installed
    if recorder is None:
        yield
        return
    before, timer = recorder.phase, recorder.timer
    recorder.phase = before if before == EVALUATE else name
    begin = timer.clock.mark() if timer is not None and timer.active else None
    try:
        yield
    finally:
        recorder.phase = before
        if timer is not None and begin is not None:
            timer.spans.append((name, begin, timer.clock.mark()))
