"""The options of evaluate.py, after the configuration files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron.config.sections.output import TaskOptions

from .select import Request


class OptionError(ValueError):
    """A wrong option. The text has the rule."""


@dataclass(frozen=True)
class Options:
    """The tasks and checkpoints of an evaluation.

    Attributes:
        needles, depths, needle_texts: lengths, depths (per cent) and number of haystacks of each. See `needles`.
        checkpoint: a step, or the path of a checkpoint, of a run's directory or of a Hugging Face folder. None: the
            newest of the run.
        every: all checkpoints of the run, oldest first.
        output: file of the harness's JSON. None: in `evaluations/` of the run's directory.
        folders: folders of the user's task files.
        max_length: tokens that the model reads at once. None: training.sequence_length.
        texts: in a micro-batch. None: training.micro_batch_size.
        samples: keep documents with prompts and answers too.
        as_json: print the harness's JSON instead of a table.
    """

    requests: tuple[Request, ...]
    checkpoint: str | None = None
    every: bool = False
    output: Path | None = None
    folders: tuple[str, ...] = ()
    max_length: int | None = None
    texts: int | None = None
    samples: bool = False
    as_json: bool = False
    needles: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()
    needle_texts: int = 0


class Parser(argparse.ArgumentParser):
    """Raises an error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        where = ". Overrides (key.path=value) come before options" if "=" in message.partition(":")[2] else ""
        raise OptionError(f"{self.prog}: {message}{where}")


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="evaluate.py",
        usage="./deepy.py evaluate.py a.yml ... key.path=value ... --tasks NAME,... [options]",
        description="Score a run's checkpoints on benchmark tasks, on any layout.",
        allow_abbrev=False,
    )
    add = made.add_argument
    tasks = "tasks, groups, patterns (mmlu_*) or task files (.yaml) (default: evaluation.tasks)"
    add("--tasks", metavar="NAME,...", help=tasks)
    add("--needles", metavar="N,...", help="also find a sentence in texts of N tokens")
    add("--depths", default="0,25,50,75,100", metavar="P,...", help="its place, in per cent (default: %(default)s)")
    texts = "texts of each length and depth (default: %(default)s)"
    add("--needle-texts", type=int, default=20, metavar="N", help=texts)
    add("--few-shot", type=int, metavar="N", help="examples before each question (default: the task's number)")
    add("--limit", type=float, metavar="N", help="only the first N documents of each task, or a share below 1")
    which = "a step, a checkpoint, or a Hugging Face folder (default: the newest)"
    add("--checkpoint", metavar="STEP|PATH", help=which)
    add("--all-checkpoints", action="store_true", help="every checkpoint of the run that has no results yet")
    add("--output", type=Path, metavar="FILE", help="the harness's JSON (default: evaluations/ in the run's directory)")
    add("--include-path", action="append", default=[], metavar="FOLDER", help="a folder with task files of your own")
    add("--max-length", type=int, metavar="N", help="tokens read at once (default: training.sequence_length)")
    add("--batch-size", type=int, metavar="N", help="texts in a micro-batch (default: training.micro_batch_size)")
    add("--log-samples", action="store_true", help="keep each document with its prompt and the model's answers")
    add("--json", action="store_true", help="print the results as one JSON document")
    return made


def parse(words: Sequence[str], tasks: Sequence[TaskOptions] = (), folders: Sequence[str] = ()) -> Options:
    """The options of a command line.

    Args:
        tasks: of the configuration, used if the command line names none.
        folders: of the configuration, with task files. The command line adds to them.

    Raises:
        OptionError: an option is wrong.
    """
    given = parser().parse_args(list(words))
    for name in ("max_length", "batch_size", "needle_texts"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise OptionError(f"evaluate.py: --{name.replace('_', '-')} is {value}: it must be at least 1")
    if given.all_checkpoints and (given.checkpoint or given.output):
        other = "--checkpoint" if given.checkpoint else "--output"
        raise OptionError(f"evaluate.py: --all-checkpoints and {other} exclude each other")
    needles = _numbers("--needles", given.needles or "", 1, 2**31)
    return Options(
        () if needles and given.tasks is None else _requests(given, tasks),
        given.checkpoint,
        given.all_checkpoints,
        given.output,
        (*folders, *given.include_path),
        given.max_length,
        given.batch_size,
        given.log_samples,
        given.json,
        tuple(map(int, needles)),
        _numbers("--depths", given.depths, 0, 100),
        given.needle_texts,
    )


def _numbers(option: str, text: str, least: float, most: float) -> tuple[float, ...]:
    """The numbers of a list with commas, each once.

    Raises:
        OptionError: one is no number, or out of range.
    """
    try:
        found = tuple(dict.fromkeys(float(each) for each in text.split(",") if each))
    except ValueError as error:
        raise OptionError(f"evaluate.py: {option} must be numbers with commas between them: {text}") from error
    if wrong := [each for each in found if not least <= each <= most or (option == "--needles" and each % 1)]:
        whole = "whole numbers" if option == "--needles" else "numbers"
        raise OptionError(f"evaluate.py: {option} has {wrong[0]:g}: it must have {whole} from {least:g} to {most:g}")
    return found


def _requests(given: argparse.Namespace, tasks: Sequence[TaskOptions]) -> tuple[Request, ...]:
    """The tasks. The command line's settings take precedence."""
    if given.tasks is not None:
        return tuple(Request(name, given.few_shot, given.limit) for name in given.tasks.split(",") if name)
    return tuple(
        Request(
            task.name,
            task.few_shot if given.few_shot is None else given.few_shot,
            task.limit if given.limit is None else given.limit,
        )
        for task in tasks
    )
