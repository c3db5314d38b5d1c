"""Problems with figures: a model or a schedule that no rank can hold, checkpoints that fill the disk.

All figures are lower bounds: activations, buffers, and layers without a short formula come on top."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from os.path import isdir
from pathlib import Path as File

from ..arithmetic import machine
from ..arithmetic.pipeline_costs import live_micro_batches, most_live
from ..arithmetic.pipelines import is_file, table_of
from ..optimizer_kind import state_bytes
from ..problems import Problem
from ..rule_context import RuleContext
from ..sections.layout import ParallelSection

LARGEST_GPU = 288 * 2**30  # bytes: AMD MI355X and NVIDIA B300
LOG_SPACED = frozenset([0, *(2**power for power in range(10))])


def gib(size: float) -> str:
    return f"{size / 2**40:,.1f} TiB" if size >= 2**40 else f"{size / 2**30:,.1f} GiB"


@dataclass(frozen=True)
class WeightCounts:
    """Parameters in large matrices of routed experts, and of all other layers."""

    dense: int
    experts: int

    @classmethod
    def of(cls, context: RuleContext) -> "WeightCounts":
        model, dense, experts = context.config.model, 0, 0
        width = model.hidden_size
        dense += (model.vocab_size or 0) * width * (1 if model.embedding.tied else 2)
        for use in context.layers():
            more, routed = context.kinds[use.kind].weights(use.options, width)
            dense, experts = dense + more, experts + routed
        return cls(dense, experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


def _bytes_on_a_rank(context: RuleContext, weights: WeightCounts, replicas: int) -> float:
    """Least bytes of weights, gradients and optimizer state on the rank that has most of them."""
    config = context.config
    parallel, zero, mixed = config.parallel, config.zero, config.precision.compute != "fp32"
    sizes = {"weights": 2 if mixed else 4, "gradients": 4 if config.precision.accumulate == "fp32" else 2}
    sizes["state"] = state_bytes(config) + (4 if mixed else 0)
    if zero.offload_optimizer.device != "none":
        sizes["state"] = 0
    if zero.offload_parameters.device != "none":
        sizes["weights"] = 0
    shared = {"state": zero.stage >= 1, "gradients": zero.stage >= 2, "weights": zero.stage >= 3}
    rows = max(parallel.depth, parallel.folded)  # ranks that share rows of matrices
    each = sum(size / (replicas if shared[name] else rows) for name, size in sizes.items())
    # ranks that share experts are replicas too
    spread = max(parallel.expert, parallel.depth) if not shared["weights"] else 1
    experts = weights.experts / (spread * (parallel.expert_tensor or 1) * parallel.columns)
    fewer = sum(size / (max(replicas // spread, 1) if shared[name] else 1) for name, size in sizes.items())
    return (each * weights.dense / (parallel.tensor * parallel.columns) + fewer * experts) / parallel.pipeline


def _room(context: RuleContext) -> tuple[float, str] | None:
    """Memory that a rank can have at most, with a sentence about it. None if it is not known."""
    on_cpu = context.config.launch.device == "cpu" or (context.starts_here and not machine.has_gpu())
    if context.data_ranks is None or (on_cpu and not context.starts_here):
        return None
    memory, ranks = machine.memory_bytes() if on_cpu else LARGEST_GPU, context.ranks or 1
    if memory is None:
        return None
    room = f"this machine has {gib(memory)} for {ranks} of them" if on_cpu else f"no GPU has over {gib(memory)}"
    return memory / (ranks if on_cpu else 1), room


def model_fits_on_a_rank(context: RuleContext) -> Iterator[Problem]:
    weights, found = WeightCounts.of(context), _room(context)
    need = _bytes_on_a_rank(context, weights, context.replicas or 1)
    if found is None or need <= found[0]:
        return
    room = found[1]
    yield context.warning(
        "model.layers parallel.tensor parallel.pipeline zero.stage",
        rule=f"weights, gradients and optimizer state of {weights.total:,} parameters take at least {gib(need)} on "
        f"each rank, and {room}",
        fix="share them among more ranks (parallel.tensor, parallel.pipeline, zero.stage), or use a smaller model",
    )


def _kept(parallel: ParallelSection, micro_batches: int) -> list[int]:
    """The most forward passes of each rank whose backward pass has not come. Empty if there is no table."""
    try:
        if is_file(parallel.schedule):
            return [most_live(own) for own in table_of(parallel, micro_batches)]
        ranks, each = range(parallel.pipeline), parallel.stages_per_rank
        return [round(each * live_micro_batches(parallel, rank, micro_batches)) for rank in ranks]
    except (OSError, ValueError):  # another rule reports it
        return []


def kept_passes_fit_on_a_rank(context: RuleContext) -> Iterator[Problem]:
    """Certain are the tensors between stages, which the executor keeps from a forward to its backward pass. Inputs of
    all blocks, weights and states come on top, and are probable where nothing is offloaded."""
    config, found = context.config, _room(context)
    parallel, training, count = config.parallel, config.training, config.training.accumulation
    if parallel.pipeline == 1 or count is None or found is None or not (kept := _kept(parallel, count)):
        return
    room, words = found
    width = config.model.hidden_size * (4 if config.precision.compute == "fp32" else 2)
    cut = parallel.context * parallel.columns * (parallel.tensor if parallel.sequence else 1)
    stream = training.micro_batch_size * training.sequence_length * width / cut
    # ranks of one machine share its memory, and one may have more than its part
    most = max(kept) if room == LARGEST_GPU else sum(kept) / len(kept)
    again, stages = training.activation_checkpointing, parallel.pipeline * parallel.stages_per_rank
    blocks = max(len(context.blocks) // stages // ((again.every or 1) if again.mode == "full" else 1), 1)
    states = _bytes_on_a_rank(context, WeightCounts.of(context), context.replicas or 1)
    certain, rank, fewest = most * stream > room, kept.index(max(kept)), min(parallel.pipeline, count)
    need = most * stream if certain else most * stream * blocks + states
    if need <= room or (states > room and not certain):
        return
    legal = int((room if certain else room - states) // (stream if certain else stream * blocks))
    least = "outputs of these" if certain else "inputs of blocks, weights and optimizer state"
    fix = f"keep at most {legal} of them: " if legal else ""
    if fewest <= legal and fewest < max(kept):
        fix += f"parallel.schedule=1f1b, with one stage per rank, keeps {fewest}"
    else:
        fix += "use a smaller training.micro_batch_size, or more ranks that share a sequence (parallel.context)"
    yield context.problem(
        "parallel.schedule training.micro_batch_size",
        rule=f"rank {rank} keeps {kept[rank]} forward passes of its stages at a time, and most of all ranks. The "
        f"{least} take at least {gib(need)} on a rank, and {words}",
        fix=fix,
        fatal=certain and (config.launch.device != "auto" or machine.has_gpu()),  # else the device is a guess
    )


def kept_checkpoints(context: RuleContext) -> int:
    """Number of checkpoints at the end of the run, without saves by time or by a signal."""
    options, last = context.config.checkpoint, context.config.training.steps
    regular = last // options.every if options.every else 0
    named = {*options.steps, *(LOG_SPACED if options.log_spaced else ()), *((last,) if options.at_end else ())}
    total = regular + sum(step <= last and not (options.every and step and step % options.every == 0) for step in named)
    if options.keep_last is None:
        return total
    for_ever = last // lcm(options.keep_every, options.every or 1) if options.keep_every else 0
    return min(total, options.keep_last + for_ever)


def checkpoints_fit_on_the_disk(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    if not context.starts_here:
        return
    folder = File(config.launch.working_directory or ".", config.checkpoint.dir)
    free = machine.free_bytes(folder)
    state = state_bytes(config) if config.checkpoint.optimizer_state else 0
    size = WeightCounts.of(context).total * (4 + state)
    there = sum(1 for _ in folder.glob("step_*")) if isdir(folder) else 0
    count = max(kept_checkpoints(context) - there, 0)
    if free is not None and count * size > free:
        yield context.warning(
            "checkpoint.dir checkpoint.every checkpoint.keep_last",
            rule=f"{count:,} more checkpoints of at least {gib(size)} will be kept, {gib(count * size)} in all, and "
            f"{gib(free)} are free there",
            fix="give checkpoint.keep_last (and keep_every), save less often, or use a larger disk",
        )


INPUT_RULES = (model_fits_on_a_rank, kept_passes_fit_on_a_rank, checkpoints_fit_on_the_disk)
