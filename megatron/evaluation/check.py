"""Mistakes of an evaluation, found by the launcher before any rank starts. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.config import Config
from megatron.config.sections.output import TaskOptions
from megatron.config.sequences import longest_text
from megatron.config.stages import stage_of
from megatron.data.errors import DataError
from megatron.data.tokenizer import build_tokenizer

from .arguments import OptionError, Options, parse
from .foreign import tokenizer_problems
from .loading import data_problems
from .probes import ProbeError, longest_of, read_probes
from .select import Request, did_you_mean, problems


def before_start(words: Sequence[str], config: Config) -> list[str]:
    """A sentence for each mistake in evaluate.py's options."""
    try:
        options = parse(words, config.evaluation.tasks, config.evaluation.task_folders)
    except OptionError as error:
        return [str(error)]
    found = []
    if config.tokenizer.type == "none":
        found.append("tokenizer.type is none, so no task can be read: set tokenizer.type and tokenizer.path")
    missing = checkpoint_problems(options.checkpoint, config, "a step, a checkpoint or a Hugging Face folder")
    found += missing or tokenizer_problems(config, _place(options.checkpoint, config))
    found += _too_long(options, config)
    if options.needles and not options.requests:
        return found
    return [*found, *_readable(options.requests, options.folders, config, options.max_length)]


def _too_long(options: Options, config: Config) -> list[str]:
    """Texts beyond the positions that the model has learned, or that ranks can share evenly."""
    longest, there = longest_text(config), config.model.embedding.max_positions
    if longest is None:
        return []
    have = f"the model {there} positions"
    if longest < there:
        have = f"ranks that share sequences can have {longest} of the model's {there} positions"
    asked = {"--needles": max(options.needles, default=0), "--max-length": options.max_length or 0}
    return [
        f"{option} has {tokens} tokens, and {have}: use at most these"
        for option, tokens in asked.items()
        if tokens > longest
    ]


def _place(named: str | None, config: Config) -> Path | None:
    """The path of the checkpoint, as far as it is known before it is opened. None for a URL."""
    if named is None or named.isdigit():
        return Path(config.checkpoint.dir)
    return None if "://" in named else Path(named)


def _readable(
    requests: Sequence[Request], folders: tuple[str, ...], config: Config, longest: int | None = None
) -> list[str]:
    """Mistakes of tasks: their names, and if these are right their data and the lengths of their texts."""
    if found := problems(requests, folders):
        return found
    if config.tokenizer.type == "none":
        return []  # reported already
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except DataError as error:
        return [f"tasks need the run's tokenizer: {error}"]
    longest = longest or config.training.sequence_length
    return data_problems(requests, folders, tokenizer, longest, config.evaluation.truncate)


def checkpoint_problems(named: str | None, config: Config, kinds: str) -> list[str]:
    """Mistakes of `--checkpoint`, which may name one of `kinds`, or of its default."""
    if named is not None and "://" in named:
        from megatron.config.rules.output import protocol_problem

        wrong = protocol_problem(named)
        return [f"--checkpoint {named}: {wrong[0]}. Fix: {wrong[1]}"] if wrong else []
    if named is not None and not named.isdigit() and not Path(named).exists():
        return [f"--checkpoint {named} does not exist: give {kinds}{did_you_mean(named)}"]
    if named is not None and named.isdigit():
        return _step_problems(int(named), Path(config.checkpoint.dir))
    if named is None and not Path(config.checkpoint.dir).is_dir():
        return [f"there is no folder {config.checkpoint.dir}: train the run first, or give --checkpoint"]
    return []


def _step_problems(step: int, folder: Path) -> list[str]:
    there = sorted(int(each.name[5:]) for each in folder.glob("step_*") if each.name[5:].isdigit())
    if step in there:
        return []
    closest = sorted(sorted(there, key=lambda each: abs(each - step))[:5])
    known = f"the closest steps are {', '.join(map(str, closest))}" if there else "there are none"
    return [f"--checkpoint {step}: {folder} has no checkpoint of step {step}: {known}"]


def before_training(words: Sequence[str], config: Config) -> list[str]:
    """A sentence for each mistake in `evaluation.tasks` and `evaluation.probes`."""
    return [*_tasks(config), *_probes(config)]


def during_training(config: Config) -> list[TaskOptions]:
    """The entries of `evaluation.tasks` for training. Those with `every: 0` are only for evaluate.py."""
    return [task for task in config.evaluation.tasks if task.every != 0]


def _tasks(config: Config) -> list[str]:
    tasks = during_training(config)
    if not tasks:
        return []
    steps = config.training.steps
    first = min(min(task.every or steps, steps) for task in tasks)  # lengths grow by stages
    longest = stage_of(config, first).length
    found = []
    if config.tokenizer.type == "none":
        found.append("evaluation.tasks needs a tokenizer, and tokenizer.type is none: set tokenizer.type and .path")
    lines = _readable([*map(Request.of, tasks)], tuple(config.evaluation.task_folders), config, longest)
    return [*found, *(f"evaluation.tasks: {line}" for line in lines)]


def _probes(config: Config) -> list[str]:
    probes, names = config.evaluation.probes, [each.name for each in config.evaluation.probes]
    if not probes:
        return []
    twice = sorted({name for name in names if names.count(name) > 1})
    found = [f"evaluation.probes: names must differ, and there are several {name!r}: rename one" for name in twice]
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except DataError as error:
        return [*found, f"evaluation.probes needs the run's tokenizer: {error}"]
    for each in probes:
        try:
            read_probes(each.path, tokenizer, longest_of(config, each))
        except ProbeError as error:
            found.append(f"evaluation.probes: {error}")
    return found
