"""A training run from its configuration to its end, for train.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.checkpoint import CheckpointError
from megatron.checkpoint.levels import Levels
from megatron.checkpoint.save.saver import Copies, Saver
from megatron.checkpoint.save.store import sole_writer
from megatron.checkpoint.save.writer import non_finite
from megatron.config import Config
from megatron.config.file_access import replace_file
from megatron.config.problems import UserError, counted
from megatron.config.sequences import as_stage, stage_at, stages_of
from megatron.data.loader import Loader, build_loader
from megatron.data.manifest import NO_CHECKSUMS
from megatron.data.plan_builder import set_names
from megatron.engine.engine import PlainEngine, build_engine
from megatron.engine.parts.teacher import Teacher
from megatron.kinds.common.attention.attend_across import describe_context
from megatron.model.costs.describe import flops_of_step, teacher_flops, totals
from megatron.model.kernels.choice import describe_flash_attention, describe_kernels
from megatron.model.kernels.compile import describe_compile
from megatron.parallel.layout.precision import COMPUTE_TYPES
from megatron.parallel.messages.watched import watched_collectives
from megatron.parallel.transport.compression import describe_wire
from megatron.plan.prediction import Prediction, predict, steps_after
from megatron.report.console import say
from megatron.report.sinks import open_run, put_damage_aside
from megatron.worker.beacon import SETUP
from megatron.worker.job import read_job
from megatron.worker.place import StartError, WorkerEnvironment

from .algorithms import chosen_algorithms, memory_of_hosts
from .hook import HookContext, ValidationSet
from .hooks import hooks_of
from .hooks.log import device_name
from .sampler import sampler
from .start.fetch import copies_of
from .start.resume import StartPoint, contents, find, load, tokens_read
from .start.same_run import check_loss, data_changes, with_proof
from .start.upcycle import INITIAL
from .trainer import Outcome, Trainer
from .world import World, joined

if TYPE_CHECKING:
    from megatron.engine.pipelined import PipelinedEngine


def train() -> int:
    """Train as the arguments and the environment of this process say. Returns the exit status."""
    config, place = read_job()
    with joined(config, place) as world:
        outcome = run_training(config, place, world)
    return status(outcome)


def printed_by_launcher(place: WorkerEnvironment, device: str) -> bool:
    """Whether the launcher has printed the prediction for this device."""
    return place.attempt == 0 and os.environ.get("JOB_PLAN_TOLD") == device


def status(outcome: Outcome) -> int:
    """The exit status: 128 + n if signal n ended the run before its last step (after saving), else 0."""
    stopped = not outcome.finished and outcome.reason.startswith("signal ")
    return 128 + signal.Signals[outcome.reason.removeprefix("signal ")] if stopped else 0


def run_training(config: Config, place: WorkerEnvironment, world: World) -> Outcome:
    """Build everything, train, and close everything. All ranks call it.

    Raises:
        UserError: the configuration is of several peers.
    """
    if config.launch.peers is not None:
        raise UserError(
            f"launch.peers = {config.launch.peers} must be read by `deepy train`, which starts the peers, and this "
            "process is one run. Use `deepy train` without srun, mpirun and torchrun, or remove launch.peers"
        )
    with ExitStack() as stack:
        stack.enter_context(watched_collectives(world.beacon, world.mesh))
        log = say if world.is_main else (lambda *_: None)
        stack.enter_context(memory_of_hosts(config, log))
        stack.enter_context(chosen_algorithms(config, world, log))
        with _mistakes(place):
            stack.enter_context(sole_writer(config.checkpoint.dir, world.communicator, insist=not place.attempt))
        return _run(config, place, world)


def _run(config: Config, place: WorkerEnvironment, world: World) -> Outcome:
    _prepare_torch(config)
    log = say if world.is_main else (lambda *_: None)
    if world.is_main:
        folder = Path(config.run.dir)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "config.yml", place.config_text)
        put_damage_aside(folder)
    data, tell = world.mesh.data, partial(world.beacon.at, SETUP)
    tell(detail=b"opening the data")
    loader = build_loader(config, data_rank=data.rank, data_ranks=data.size)
    _describe_data(loader, log)
    with _mistakes(place):
        own, insist = config.checkpoint, not place.attempt
        levels = Levels(own.near, own.dir, world.communicator, world.device, insist) if own.near else None
        for line in levels.refused if levels else ():
            log(f"warning: {line}")
        source = find(config, world, log, place.attempt, levels)
    changed = data_changes(source.checkpoint.meta, config, loader.plan, source.left_out) if source.checkpoint else []
    for line in changed:
        log(line)
    # with a map, new layers or rows of new tokens, tensors may keep their initial values
    values = source.new or bool(own.initialize_map or own.initialize_layers) or own.initialize_vocabulary == INITIAL
    prediction = predicted(config, place, world)
    if prediction is not None and not printed_by_launcher(place, device_name(world.device)):
        log(prediction.text(*steps_after(config, source.checkpoint.step if source.checkpoint else 0)))
    tell(detail=b"building the model and the engine")
    teacher = Teacher.of(config, world.mesh, world.device)
    engine = build_engine(config, world.mesh, world.device, values=values, beacon=world.beacon, teacher=teacher)
    tell(detail=b"reading the checkpoint" if source.checkpoint else b"")
    with _mistakes(place):
        load(source, world, engine)
        if teacher is not None:
            read = teacher.load(world.communicator)
            log(f"teacher: {totals(teacher.config).parameters:,} parameters of {read.path}, step {read.step}")
    _describe_model(config, world, log)
    validation = _validation_sets(config, world)
    try:
        while True:
            loader.leave_out(source.left_out)
            if source.checkpoint is not None and config.checkpoint.prove:
                with _mistakes(place):
                    source.facts.update(check_loss(source.checkpoint, config, world, engine, loader, log))
            if source.checkpoint is not None:
                source.checkpoint.release()
            outcome = _train(config, place, world, engine, loader, validation, source, log, prediction, levels)
            if outcome.back is None:
                return outcome
            tell(detail=b"going back to a checkpoint")
            source = outcome.back.find(config, world, outcome.back, source.left_out, log, levels)
            load(source, world, engine)
    finally:
        for each in (loader, *(which.loader for which in validation)):
            each.close()


def predicted(config: Config, place: WorkerEnvironment, world: World) -> Prediction | None:
    """On rank 0, the predicted needs of the run on its devices. None if the formulas fail, or predictions are off."""
    if not world.is_main or not config.logging.predictions:
        return None
    local = place.local_world_size
    capacity = (
        torch.cuda.get_device_properties(world.device).total_memory
        if world.device.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    )
    try:
        return predict(config, place.world_size, device_name(world.device), local, capacity)
    except Exception as error:  # a failed plan must not end the run. Counts of a user's own kind may raise anything
        print(f"plan: none, since the formulas fail: {type(error).__name__}: {error}")
        return None


def _describe_model(config: Config, world: World, log: Callable[[str], Any]) -> None:
    layout = world.mesh.layout
    context = f"{'folded' if layout.shares_rows else 'context'} {layout.context}, " if layout.context > 1 else ""
    context += f"depth {layout.depth}, " if layout.depth > 1 else ""
    grid = f" ({layout.columns} columns)" if layout.columns > 1 else ""
    log(
        f"{totals(config).parameters:,} parameters on {counted(layout.world_size, 'rank')}: "
        f"tensor {layout.tensor}{grid}, pipeline {layout.pipeline}, {context}data {layout.data}, "
        f"ZeRO {layout.zero_stage}, {config.precision.compute}, {world.device.type}"
    )
    if config.parallel.communication.compress.data != "none" and world.mesh.replicas.size > 1:
        log(describe_wire(config.parallel.communication.compress.data))
    for axis, size in (("tensor", layout.tensor), ("pipeline", layout.pipeline)):
        if (wire := getattr(config.parallel.communication.compress, axis)) != "none" and size > 1:
            log(f"activations and their gradients travel as {wire} on the {axis} axis, in evaluations too")
    if config.precision.products == "fp8":
        log("products of blocks: fp8, a scale per tensor (matrices whose sides are multiples of 16)")
    log(describe_compile(config, world.device))
    chosen = (describe_flash_attention, describe_kernels)
    for line in (*(line for each in chosen for line in each(config, world.device)), *describe_context(config)):
        log(line)


def _operations(config: Config) -> Callable[[int], float]:
    """Operations per token in an update: forward, backward, a teacher's forward. Shorter sequences have fewer."""
    stages = [as_stage(config, stage) for stage in stages_of(config)]
    by_stage, taught = [totals(each) for each in stages], [teacher_flops(each) for each in stages]

    def of_step(step: int) -> float:
        number = stage_at(config, step).number
        return flops_of_step(config, by_stage[number], step) + taught[number]

    return of_step


def _train(
    config: Config,
    place: WorkerEnvironment,
    world: World,
    engine: PlainEngine | PipelinedEngine,
    loader: Loader,
    validation: list[ValidationSet],
    source: StartPoint,
    log: Callable[[str], Any],
    prediction: Prediction | None,
    levels: Levels | None,
) -> Outcome:
    first = source.checkpoint.step if source.checkpoint else 0
    sinks, ledger = open_run(config, rank=world.mesh.rank, start=first, settings=config.model_dump(mode="json"))
    copies = copies_of(Path(config.run.dir) / "ledger.jsonl", ledger) if ledger is not None else Copies()
    copies.go_back(first if source.checkpoint else -1)
    saver = Saver(config.checkpoint.dir, config.checkpoint, world.background, copies)
    saver.prepare(engine.state.fragments())
    tokens = tokens_read(source, config)
    saves = contents(
        config, place.config_text, world, engine, loader.plan, tokens, ledger, source.left_out, source.imported
    )
    if config.checkpoint.prove:
        saves = with_proof(saves, config, world, engine, loader)
    hooks = hooks_of(
        HookContext(
            config,
            flops_per_token=_operations(config),
            validation=validation,
            saver=saver,
            contents=saves,
            inspect=partial(non_finite, compute=COMPUTE_TYPES[config.precision.compute]),
            generate=sampler(config, engine, log),
            facts=source.facts,
            engine=engine,
            world=world,
            prediction=prediction,
            levels=levels,
        )
    )
    try:
        return Trainer(
            config,
            engine=engine,
            loader=loader,
            mesh=world.mesh,
            hooks=hooks,
            sinks=sinks,
            ledger=ledger,
            start=first,
            tokens=tokens,
            device=world.device,
            beacon=world.beacon,
            wall_time=world.wall_time,
        ).run()
    finally:
        sinks.close()
        if ledger is not None:
            ledger.close()


@contextmanager
def _mistakes(place: WorkerEnvironment) -> Iterator[None]:
    """A checkpoint that a first start cannot use is the user's mistake. A later start may find the disk back again."""
    try:
        yield
    except CheckpointError as error:
        if place.attempt:
            raise
        raise StartError(str(error)) from error


def _prepare_torch(config: Config) -> None:
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # else a kernel fills each new tensor, without use
    torch.set_float32_matmul_precision("high" if config.precision.compute != "fp32" else "highest")
    if torch.cuda.is_available() and not any("ALLOC_CONF" in name for name in os.environ):
        allocator: Any = torch._C
        with suppress(AttributeError, RuntimeError):  # of torch that does not have the option
            # Else pinned memory is rounded up to a power of two, and copies for saves take up to twice their size.
            allocator._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1")


def _validation_sets(config: Config, world: World) -> list[ValidationSet]:
    if config.evaluation.every is None and not (config.evaluation.at_start or config.evaluation.at_end):
        return []
    sets = []
    for name in set_names(config, "validation"):
        loader: Loader = build_loader(
            config, data_rank=world.mesh.data.rank, data_ranks=world.mesh.data.size, split="validation", name=name
        )
        sets.append(ValidationSet(name, loader, loader.steps))
    return sets


def _describe_data(loader: Loader, log: Callable[[str], Any]) -> None:
    for use in loader.plan.uses():
        passes = f"{use.epochs:.3g} epochs of {use.available:,}" if use.available else "of a stream"
        log(f"data: {use.name}: {use.tokens:,} tokens, {passes} ({use.order})")
    for source in getattr(loader.plan, "sources", ()):
        if source.opened.checksums is None and not source.opened.grows:
            log(f"note: {source.name} {NO_CHECKSUMS.format(source.file.prefix)}")
    for warning in loader.plan.warnings():
        log(f"warning: {warning}")
