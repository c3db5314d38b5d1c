"""Open a run's checkpoints on any layout, run tasks on them, and write down their scores, for evaluate.py.

The run itself is only read: its checkpoints, ledger and metrics stay unchanged."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from megatron.config import Config
from megatron.config.features.feature import for_reading
from megatron.config.sequences import stage_at
from megatron.data.tokenizer import build_tokenizer
from megatron.engine.engine import build_engine
from megatron.evaluation.scoring import Scorer
from megatron.training.start.resume import initialize, made_in
from megatron.training.world import World, joined
from megatron.worker.job import read_job
from megatron.worker.place import StartError

from . import harness
from .arguments import OptionError, Options, before_start, parse, tokenizer_problems
from .checkpoints import named_checkpoints
from .harness import run_tasks
from .needles import Cell, needles, table, write
from .select import TaskError

FOLDER = "evaluations"  # in the run's directory: a file for each checkpoint, and their picture
PICTURE = "curves.png"
NEEDLES = ".needles.json"  # ending of the results of `needles`


def evaluate() -> int:
    """Evaluate as the arguments and the environment of this process say. Returns the exit status."""
    config, place = read_job(check_inputs=False)
    try:
        options = parse(place.own, config.evaluation.tasks, config.evaluation.task_folders)
    except OptionError as error:
        raise StartError(str(error)) from error
    if place.rank == 0 and place.starter != "agent" and (wrong := before_start(place.own, config)):
        raise StartError("\n".join(wrong))  # with agents, deepy.py has checked before it started anything
    try:
        with joined(config, place) as world:
            run(config, options, world)
    except (CheckpointError, TaskError) as error:
        raise StartError(str(error)) from error
    return 0


def run(config: Config, options: Options, world: World) -> None:
    """Evaluate all requested checkpoints. All ranks call it.

    Raises:
        CheckpointError: one is missing or damaged, or is not of this model.
    """
    log = (lambda line: print(line, file=sys.stderr, flush=True)) if world.is_main else (lambda _: None)
    paths = named_checkpoints(config, world, options.checkpoint, options.every, Path(config.run.dir) / FOLDER)
    todo = [path for path in paths if options.needles or not (options.every and _done(config, options, path))]
    if len(todo) < len(paths):
        log(f"{len(paths) - len(todo)} of {len(paths)} checkpoints have their results already")
    tokenizer = build_tokenizer(config.tokenizer)
    engine = None
    texts = options.texts or config.training.micro_batch_size
    for path in todo:
        checkpoint = open_checkpoint(path, verify="sizes")
        if (
            options.checkpoint is not None
            and "://" in options.checkpoint
            and (wrong := tokenizer_problems(config, path))
        ):
            raise TaskError(wrong[0])  # the launcher has checked the others
        log(f"evaluating {path}")
        if engine is None:  # one for all
            engine = build_engine(for_reading(config), world.mesh, world.device, values=False)
        initialize(checkpoint, world, engine)
        update = made_in(checkpoint, config)
        engine.start_at(update)
        scorer = Scorer.of_tasks(config, engine, world.mesh, world.device, texts, moves=True)
        if options.needles:
            cells = needles(scorer, tokenizer, options.needles, options.depths, options.needle_texts)
            if world.is_main:
                _report_needles(config, options, cells, checkpoint, log)
        found = None
        if options.requests:
            found = run_tasks(
                options.requests,
                scorer,
                world.communicator,
                tokenizer,
                max_length=options.max_length or stage_at(config, update).length,
                folders=options.folders,
                samples=options.samples,
                facts=facts(config, checkpoint, options),
            )
        if found is not None:
            _report(config, options, found, checkpoint, log)
    if options.every and options.requests and world.is_main:
        _draw(Path(config.run.dir) / FOLDER, log)


def _report_needles(
    config: Config, options: Options, cells: list[Cell], checkpoint: Checkpoint, log: Callable[[str], Any]
) -> None:
    file = _file(config, checkpoint.path).with_suffix(NEEDLES)
    own = {"step": checkpoint.meta.step, "checkpoint": str(checkpoint.path), "texts": options.needle_texts}
    picture = write(file, cells, own)
    print(file.read_text() if options.as_json and not options.requests else f"{table(cells)}\n", flush=True)
    log(f"results: {file}, {picture}")


def facts(config: Config, checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    """Facts that results depend on: the checkpoint and the options. Results with the same facts are not made again."""
    return {
        "step": checkpoint.meta.step,
        "checkpoint": str(checkpoint.path),
        "requests": [asdict(request) for request in options.requests],
        "max_length": options.max_length,
        **({"given": options.checkpoint} if options.checkpoint is not None else {}),
        **({"truncate": True} if config.evaluation.truncate else {}),
        **({"placement": config.evaluation.placement} if config.evaluation.placement else {}),
        **({"exact": True} if config.evaluation.exact else {}),
        **({"read_less": less.model_dump()} if (less := config.evaluation.read_less).asked else {}),
    }


def _file(config: Config, path: Path) -> Path:
    return Path(config.run.dir) / FOLDER / f"{path.name}.json"


def _done(config: Config, options: Options, path: Path) -> bool:
    found = harness.read(_file(config, path))
    return found is not None and found.get("config", {}).get("model_args") == facts(
        config, open_checkpoint(path, verify="sizes"), options
    )


def _report(
    config: Config, options: Options, found: dict[str, Any], checkpoint: Checkpoint, log: Callable[[str], Any]
) -> None:
    file = options.output or _file(config, checkpoint.path)
    harness.write(file, found)
    print(harness.text(found) if options.as_json else f"{harness.table(found)}\n", flush=True)
    asked = {request.name: request.few_shot for request in options.requests}
    if names := [name for name, shots in asked.items() if shots and found.get("n-shot", {}).get(name) == 0]:
        log(f"no examples before questions of {', '.join(names)}: the task's file says num_fewshot: 0")
    log(f"results: {file}")


def _draw(folder: Path, log: Callable[[str], Any]) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for file in sorted(folder.glob("*.json")):
        found = harness.read(file)
        if found is None or file.name.endswith(NEEDLES):
            continue
        step = found["config"]["model_args"]["step"]
        for task, values in harness.numbers(found).items():
            name = next((each for each in ("acc_norm", "acc", "exact_match", "bits_per_byte") if each in values), "")
            if name:
                series.setdefault(f"{task} {name}", []).append((step, values[name]))
    if series:
        from megatron.report.figures import save_lines

        save_lines(folder / PICTURE, series, title="tasks over the run", x="step", y="score")
        log(f"picture: {folder / PICTURE}")
