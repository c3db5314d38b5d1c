"""One rank's rehearsal: build its engine and make two steps, observed by a ledger and a recorder."""

import contextlib
import os
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.arithmetic.pipelines import by_table, is_file
from megatron.data.batch import StepBatch
from megatron.engine.deepspeed.options import accumulation_steps
from megatron.engine.deepspeed.process import prepare_deepspeed
from megatron.engine.deepspeed.without_values import without_values
from megatron.engine.engine import build_engine
from megatron.engine.parts.teacher import Teacher
from megatron.model import norm
from megatron.objectives.named import objective_of
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import Recorder
from megatron.training.hooks.communication import label_layers

from .repeats import Repeats
from .storage_counter import Allocation, Moment, ProgramPlace, StorageCounter, mark_states, watch_gradients


class _Fused(torch.autograd.Function):
    """Keeps the same tensors as torch's GPU kernel: the input, the weight, and a scale for each vector."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        scales = x.new_empty((*x.shape[:-dims], *dims * (1,)), dtype=torch.float32)
        context.save_for_backward(x, weight, scales)
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = context.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, epsilon: float | None = None) -> Tensor:
    """[..., *shape] of the same shape and type, without values."""
    return _Fused.apply(x, weight, len(shape))


class Labels(Recorder):
    """A recorder of communication that also knows the layer of the backward pass: the last one whose output received a
    gradient."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._backward = ""
        self._places: dict[tuple[str, str], ProgramPlace] = {}

    def label(self, module: nn.Module, name: str) -> None:
        """Label the module, and note when the gradient of its output arrives."""
        super().label(module, name)

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _main(output)
            if tensor is not None and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._enter(name))

        self._handles.append(module.register_forward_hook(watch))

    def _enter(self, name: str) -> None:
        self._backward = name

    def now(self) -> ProgramPlace:
        """Where the program is."""
        phase = self.phase or "start"
        if phase == "backward" and self._layers:
            phase = "recompute"
        layer = self._layers[-1] if self._layers else self._backward if phase == "backward" else ""
        return self._places.setdefault((phase, layer), ProgramPlace(phase, layer))


def _main(output: Any) -> Tensor | None:
    """The residual stream, or the loss, in a layer's output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple) and output:
        return _main(output[0])
    hidden = getattr(output, "hidden", None)
    return hidden if isinstance(hidden, Tensor) else None


Batches = Callable[[int], StepBatch]
STEPS = 2  # a second one finds what the first one keeps, such as gradients and flat copies of them


@dataclass
class RankCounts:
    """Counts of one rank: bytes, and FLOPs, operations and messages of a step of `micro_batches`."""

    peak: int  # largest number of live bytes in the steps
    at: Moment  # time of the peak
    allocations: list[Allocation]  # live at the peak
    start: int  # largest number of live bytes while the engine was built, without the initial values
    kept: int  # live bytes after a step
    micro_batches: int  # of each step
    flops: dict[ProgramPlace, int]  # by place
    operations: int  # of torch, about the number of kernels that a GPU launches
    updating: int  # operations once per step, for any number of micro-batches
    messages: list[list[Any]]  # rows of an account (`Tally.rows`)
    groups: list[int]  # sizes of this rank's process groups
    checkpoint: dict[str, int]  # bytes that this rank writes into a checkpoint, by state
    fragments: int  # pieces of tensors, each an entry of the checkpoint's index
    host: int  # peak bytes of the rehearsing process
    processor: float  # its seconds of processor time, without imports

    def whole(self, full: int) -> tuple[float, float]:
        """Operations and FLOPs of a step of `full` micro-batches."""
        share = full / self.micro_batches
        flops = sum(done * (1 if place.phase == "update" else share) for place, done in self.flops.items())
        return self.updating + share * (self.operations - self.updating), flops


def enough_micro_batches(config: Config, layout: Layout) -> int:
    """Micro-batches that a rehearsal needs: one that adds to gradients of another, and a full pipeline."""
    wanted, whole = 2 if layout.pipeline == 1 else layout.pipeline + 1, accumulation_steps(config, layout)
    if by_table(
        config.parallel, config.zero.stage
    ):  # a file has one number of micro-batches, an interleaved schedule multiples of ranks
        wanted = whole if is_file(config.parallel.schedule) else 2 * layout.pipeline
    return min(whole, wanted)


def with_micro_batches(config: Config, layout: Layout, micro_batches: int) -> Config:
    """The same run with steps of `micro_batches`."""
    size = micro_batches * config.training.micro_batch_size * layout.data
    training = config.training.model_copy(update={"global_batch_size": size, "accumulation": micro_batches})
    return config.model_copy(update={"training": training})


def rehearse_rank(
    config: Config, ranks: int, rank: int, micro_batches: int | None = None, gpu: bool = False
) -> RankCounts:
    """Run a rank of `ranks` on tensors without values. The process must have no process group, and gets none.

    Args:
        config: resolved for `ranks`.
        micro_batches: of each step, None for `enough_micro_batches`.
        gpu: norms are one kernel, as on GPUs.
    """
    layout = Layout.of(config, ranks)
    config = with_micro_batches(config, layout, micro_batches or enough_micro_batches(config, layout))
    prepare_deepspeed(torch.device("cpu"))
    # DeepSpeed's ZeRO checks the alignment of its flat tensors, which have no address here.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    by_rows = mock.patch.object(norm, "BY_ROWS", norm.BY_ROWS and not gpu)
    fused = mock.patch.object(F, "rms_norm", rms_norm) if gpu else contextlib.nullcontext()
    with _group_of_nobody(ranks, rank), without_values(), by_rows, fused:
        return observe(config, Mesh.build(layout), repeats=True)


def observe(config: Config, mesh: Mesh, batch: Batches | None = None, repeats: bool = False) -> RankCounts:
    """Build the engine of this process and make steps, with a ledger and a recorder.

    Args:
        repeats: run only the first of equal calls of a scan, and count it for the others. Their results have no values.
        batch: returns the batch of a step, by its number, and then weights get their initial values. None takes blank
            batches of the right shapes, and leaves weights as they are.
    """
    labels = Labels(mesh)
    ledger = StorageCounter(labels.now)
    labels.install()
    try:
        with ledger, Repeats(ledger).installed() if repeats else contextlib.nullcontext():
            return _observed(config, mesh, batch, labels, ledger)
    finally:
        labels.remove()


def _observed(config: Config, mesh: Mesh, batch: Batches | None, labels: Labels, ledger: StorageCounter) -> RankCounts:
    teacher = Teacher.of(config, mesh)
    if teacher is not None and batch is not None:
        teacher.load()
    elif teacher is not None:
        teacher.ready = True  # as far as memory and messages go
    engine = build_engine(config, mesh, "cpu", values=batch is not None, teacher=teacher)
    if batch is None:
        _count_labels(engine)
        _blank_probes(engine)
    label_layers(labels, engine.deepspeed.module)
    start = ledger.peak
    # As a run does before its first step, it gives the optimizer its states.
    checkpoint, fragments = _checkpoint(engine)
    mark_states(ledger, engine)
    watch_gradients(ledger, engine)
    ledger.forget_peak()
    for number in range(STEPS):
        ledger.flops.clear()
        labels.tally.take()
        before = ledger.operations, ledger.updating
        engine.step(batch(number) if batch else blank_batch(config, mesh.layout, engine.form), config.optimizer.lr)
        mark_states(ledger, engine)
        if number == 0 and engine.accumulation > 1:
            # Its later micro-batches find gradients, as all of a second step do, and scale to a step of more.
            first = dict(ledger.flops), ledger.operations - before[0], ledger.updating - before[1], labels.tally.rows()
    seen = dict(ledger.flops), ledger.operations - before[0], ledger.updating - before[1], labels.tally.rows()
    flops, operations, updating, messages = first if engine.accumulation > 1 else seen
    used = resource.getrusage(resource.RUSAGE_SELF)
    return RankCounts(
        peak=ledger.peak,
        at=ledger.at,
        allocations=ledger.at_peak(),
        start=start,
        kept=ledger.live,
        micro_batches=engine.accumulation,
        flops=flops,
        operations=operations,
        updating=updating,
        messages=messages,
        groups=[dist.get_world_size(group) for group in dist.distributed_c10d._world.pg_map],
        checkpoint=checkpoint,
        fragments=fragments,
        host=used.ru_maxrss * 1024,
        processor=used.ru_utime + used.ru_stime,
    )


def _count_labels(engine: Any) -> None:
    """Replace the sum of weights by 1: without values it would be 0, and an engine skips steps without labels."""
    scale = engine._scale

    def counted(batch: StepBatch) -> float | Tensor:
        found = scale(batch)
        return torch.ones(()) if found is None else found

    engine._scale = counted


def _blank_probes(engine: Any) -> None:
    """Replace the samples that a step reads before it by ones without values, of the same shapes."""
    part = engine.parts.get("probes")
    if part is None:
        return

    def blank(batch: StepBatch) -> StepBatch:
        shape = batch.labels.shape
        columns = {name: torch.zeros(shape) for name in part.objective.columns_of_probes}
        return replace(batch, loss_mask=torch.ones(shape), columns=columns)

    part.probes_of = blank


def _checkpoint(engine: Any) -> tuple[dict[str, int], int]:
    """Bytes by state that this rank writes into a checkpoint, and the number of fragments."""
    found, fragments = dict[str, int](), list(engine.state.fragments())
    for each in fragments:
        found[each.state] = found.get(each.state, 0) + each.data.numel() * each.data.element_size()
    return found, len(fragments)


def blank_batch(config: Config, layout: Layout, form: Any) -> StepBatch:
    """A step's batch of the right shapes: token 0, one document per sample, all labels count."""
    training = config.training
    shape = (accumulation_steps(config, layout), training.micro_batch_size)
    length = training.sequence_length
    places: dict[str, Tensor | None] = {"positions": None, "documents": None}
    if form.documents:
        places["positions"] = torch.arange(length, dtype=torch.int32).expand(*shape, length).contiguous()
        places["documents"] = torch.zeros((*shape, length), dtype=torch.int32)
    return StepBatch(
        step=0,
        tokens=torch.zeros((*shape, length + 1), dtype=torch.int64),
        sample_ids=torch.zeros(shape, dtype=torch.int64),
        hash=0,
        loss_mask=torch.ones((*shape, length)) if objective_of(config).weighs else None,
        columns={name: torch.zeros((*shape, length)) for name in objective_of(config).columns},
        **places,
    )


@contextlib.contextmanager
def _group_of_nobody(ranks: int, rank: int) -> Iterator[None]:
    """A process group of `ranks` that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()}):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
