"""A ledger of tensors: live bytes at each moment, their purpose, and FLOPs.

Every operation passes `__torch_dispatch__`, below autograd, so saved activations, gradients and optimizer states are
all counted. A storage counts from the operation that returns it until torch frees it, with the size to which it was
last resized. The ledger works on tensors with and without values. It does not see temporary memory inside a kernel."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron.engine.parts import TEACHER as TEACHER_PART


def grouped_product_flops(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Of `aten._grouped_mm`, which torch's own counter does not know: every row is in one group."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


FORMULAS = {**flop_registry, torch.ops.aten._grouped_mm: grouped_product_flops}


@dataclass(frozen=True)
class ProgramPlace:
    """Where the program is."""

    phase: str  # start, forward, recompute, backward, update, exchange
    layer: str  # `embedding`, `layers.3.attention`, `head`, empty outside of layers


@dataclass(slots=True)
class Allocation:
    """A storage: its bytes, the place where it was made, and its purpose, if marked."""

    size: int
    place: ProgramPlace
    part: str = ""


@dataclass(frozen=True)
class Moment:
    """Time of the peak: the place in the program, and the operation."""

    place: ProgramPlace
    operation: str


PASSES = ("forward", "recompute", "backward")  # phases that each micro-batch has


@dataclass(frozen=True)
class Repetition:
    """Cost of a repeated piece of the program."""

    operations: int
    flops: int
    operation: str  # at the peak of its own storages, whose bytes are `sizes`
    sizes: tuple[int, ...]


class StorageCounter(TorchDispatchMode):
    """Counts while it is active.

    Args:
        place: returns the place in the program.

    Attributes:
        live: bytes now.
        peak: the largest number so far. `at` says when.
        flops: by place.
        operations: of torch, at most the number of kernels that a GPU launches.
        updating: operations outside of passes, once per step for any number of micro-batches.
    """

    def __init__(self, place: Callable[[], ProgramPlace]) -> None:
        super().__init__()
        self.place = place
        self.live = self.peak = self.operations = self.updating = 0
        self.at = Moment(ProgramPlace("start", ""), "")
        self.flops: dict[ProgramPlace, int] = {}
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Allocation]] = {}
        self._present: list[Allocation] = []  # at the peak, and freed since
        self._later: set[int] = set()  # keys of what was made after the peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # where a tensor is: no operation, and most of what is asked
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        self.updating += self.place().phase not in PASSES
        before = self.peak
        self._see(result)
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            place = self.place()
            done = formula(*args, **(kwargs or {}), out_val=result)
            self.flops[place] = self.flops.get(place, 0) + done
        if self.peak > before:
            self.at = Moment(self.place(), str(func._overloadpacket))
            self._present.clear()
            self._later.clear()
        return result

    def __enter__(self) -> "StorageCounter":
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result, known = resize(storage, size), self._known.get(storage._cdata)
            if known is not None:
                self._hold(storage, known[1].part)
            return result

        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._resizing.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()

    def mark(self, tensor: Tensor, part: str) -> None:
        """Mark the purpose of a tensor's storage."""
        found = self._known.get(tensor.untyped_storage()._cdata)
        if found is not None:
            found[1].part = part

    def part_of(self, tensor: Tensor) -> str | None:
        """Purpose of its storage. None if the ledger does not know it."""
        found = self._known.get(tensor.untyped_storage()._cdata)
        return found[1].part if found else None

    def repetition(self) -> Repetition:
        """All counts, so that other calls can be counted without running them."""
        sizes = tuple(each.size for each in self.at_peak())
        return Repetition(self.operations, sum(self.flops.values()), self.at.operation, sizes)

    def repeat(self, done: Repetition) -> None:
        """Count a piece of the program that is not run. Its results are made after this call."""
        place, most = self.place(), self.live + sum(done.sizes)
        self.operations += done.operations
        if done.flops:
            self.flops[place] = self.flops.get(place, 0) + done.flops
        if most > self.peak:
            self.peak, self.at = most, Moment(place, done.operation)
            self._present = [Allocation(size, place) for size in done.sizes]
            self._later.clear()

    def at_peak(self) -> list[Allocation]:
        """Allocations at the peak. Their sizes sum to `peak`."""
        return [*self._present, *(allocation for key, (_, allocation) in self._known.items() if key not in self._later)]

    def forget_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.live
        self.at = Moment(self.place(), "")
        self._present.clear()
        self._later.clear()

    def _see(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self._add(result)
        elif isinstance(result, (tuple, list)):
            for each in result:
                self._see(each)

    def _add(self, tensor: Tensor) -> None:
        # A meta tensor (DeepSpeed keeps one for each weight) takes no memory.
        if tensor.fake_device.type == "meta" if type(tensor) is FakeTensor else tensor.is_meta:
            return
        self._hold(tensor.untyped_storage())

    def _hold(self, storage: torch.UntypedStorage, part: str = "") -> None:
        key, size = storage._cdata, storage.nbytes()
        found = self._known.get(key)
        if found is not None:
            if found[1].size == size:
                return
            self._gone(key, found[1])  # it was resized
        allocation = Allocation(size, self.place(), part)
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, allocation)), allocation
        self._later.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, allocation: Allocation) -> None:
        found = self._known.get(key)
        if found is None or found[1] is not allocation:
            return
        del self._known[key]
        self.live -= allocation.size
        if key in self._later:
            self._later.discard(key)
        else:
            self._present.append(allocation)


WEIGHTS, GRADIENTS, MASTERS, MOMENTS = "weights", "gradients", "masters", "moments"
GATHERED, BUCKETS, BUFFERS, TEACHER = "gathered weights", "buckets", "buffers", "teacher"

# Words in the names of DeepSpeed's attributes, and what such tensors are for. The first that fits counts.
_WORDS = (
    ("ipg", BUCKETS),
    ("bucket", BUCKETS),
    ("temp_grad", BUCKETS),
    ("grad", GRADIENTS),
    ("single_partition", MASTERS),
    ("fp32", MASTERS),
    ("bit16", WEIGHTS),
    ("fp16", WEIGHTS),
    ("bf16", WEIGHTS),
)


def mark_states(ledger: StorageCounter, engine: Any) -> None:
    """Mark the purpose of an engine's tensors in the ledger. Called again after each step, since some are made late.

    Args:
        engine: a `BaseEngine`.
    """
    zero = engine.deepspeed.optimizer
    for name, value in vars(zero).items() if hasattr(zero, "__dict__") else ():
        part = next((part for word, part in _WORDS if word in name.lower()), None)
        for tensor in _tensors(value) if part else ():
            if part and not ledger.part_of(tensor):
                ledger.mark(tensor, part)
    for group in engine.optimizer.param_groups:
        for tensor in group["params"]:
            ledger.mark(tensor, MASTERS)
            for value in engine.optimizer.state.get(tensor, {}).values():
                if isinstance(value, Tensor):
                    ledger.mark(value, MOMENTS)
    module: nn.Module = engine.deepspeed.module
    for parameter in module.parameters():
        for weight in (parameter, getattr(parameter, "ds_tensor", None)):
            if weight is not None:
                ledger.mark(weight, WEIGHTS)
    teacher = engine.parts.get(TEACHER_PART)
    if teacher is not None:
        for weight in teacher.model.parameters():
            ledger.mark(weight, TEACHER)
    for buffer in (*module.buffers(), *engine.state.buffers):
        ledger.mark(buffer, BUFFERS)


def watch_gradients(ledger: StorageCounter, engine: Any) -> None:
    """Mark each gradient as soon as it exists."""

    def mark(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.mark(parameter.grad, GRADIENTS)

    for parameter in engine.deepspeed.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark)


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors in lists, dictionaries and buckets."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, depth - 1)
    elif depth and type(value).__module__.startswith("deepspeed") and type(value).__name__ == "IPGBucket":
        for each in vars(value).values():
            yield from _tensors(each, depth - 1)
