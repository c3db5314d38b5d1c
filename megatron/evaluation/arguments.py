"""The options of evaluate.py, after the configuration files, and mistakes of an evaluation. Without torch.

The launcher finds them before any rank starts. One is a tokenizer that is not the one that a checkpoint was trained
with."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron.config import Config
from megatron.config.file_access import read_json, unreadable
from megatron.config.sections.data import TokenizerSection
from megatron.config.sections.output import TaskOptions
from megatron.config.sequences import longest_text, stage_of
from megatron.data.errors import DataError
from megatron.data.manifest import read_manifest
from megatron.data.plan_builder import is_local
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.decoding.covered import evaluation_problem

from .probes import ProbeError, longest_of, read_probes
from .select import Request, data_problems, did_you_mean, problems


class OptionError(ValueError):
    """A wrong option. The text has the rule."""


@dataclass(frozen=True)
class Options:
    """The tasks and checkpoints of an evaluation."""

    requests: tuple[Request, ...]
    # A step, or the path of a checkpoint, of a run's directory or of a Hugging Face folder. None: the newest of the
    # run.
    checkpoint: str | None = None
    every: bool = False  # all checkpoints of the run, oldest first
    output: Path | None = None  # file of the harness's JSON. None: in `evaluations/` of the run's directory.
    folders: tuple[str, ...] = ()  # folders of the user's task files
    max_length: int | None = None  # tokens that the model reads at once. None: training.sequence_length.
    texts: int | None = None  # in a micro-batch. None: training.micro_batch_size.
    samples: bool = False  # keep documents with prompts and answers too
    as_json: bool = False  # print the harness's JSON instead of a table.
    # needles, depths, needle_texts: lengths, depths (per cent) and number of haystacks of each. See `needles`.
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
        prog="deepy evaluate",
        usage="deepy evaluate a.yml ... key.path=value ... --tasks NAME,... [options]",
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


META = "meta.json"  # of a checkpoint. megatron.checkpoint has this name, but imports torch
KEY = "tokenizer"  # in checkpoint.allow_changes: the user accepts the difference
SAMPLE = (
    "The year 2024 cost 1,234.50 dollars, didn't it?  Two  spaces, a\ttab.\n\ndef f(x_1):\n    return x_1 ** 2  # sum\n"
    "Zürich, naïve café, Ελληνικά, русский, 中文, 日本語, 한국어, עברית, \N{GRINNING FACE} e\N{COMBINING ACUTE ACCENT}"
)


def tokenizer_problems(config: Config, checkpoint: Path | None) -> list[str]:
    """A sentence if the configuration's tokenizer gives other ids than that of the checkpoint's training.

    The checkpoint's tokenizer is known from a Hugging Face folder, or from the configuration in a checkpoint of ours,
    if it is on this machine. The manifests of the run's token files name it too.

    Args:
        checkpoint: a checkpoint, a Hugging Face folder, a folder of checkpoints or a run's directory. None if unknown.
    """
    if checkpoint is None or KEY in config.checkpoint.allow_changes or config.tokenizer.type == "none":
        return []
    try:
        own = build_tokenizer(config.tokenizer)
        found = next(_differences(own, checkpoint), None)
    except DataError as error:
        return [str(error)]
    if found is None:
        return []
    return [
        f"tokenizer.path: the tokenizer must be the one that {checkpoint} was trained with: {found}. Fix: give that "
        f"one, or checkpoint.allow_changes=[{KEY}] if you know that ids mean the same"
    ]


def _differences(own: Tokenizer, checkpoint: Path) -> Iterator[str]:
    if (checkpoint / "config.json").is_file() and not (checkpoint / META).is_file():
        if (checkpoint / "tokenizer.json").is_file():
            section = TokenizerSection(type="huggingface", path=str(checkpoint))
            yield from _difference(own, build_tokenizer(section), str(checkpoint / "tokenizer.json"))
        return
    values = _recorded(checkpoint)
    section = TokenizerSection(**values.get("tokenizer") or {})
    if section.type != "none" and is_local(section):
        yield from _difference(own, build_tokenizer(section), f"its run's {section.path or section.type}")
    data = values.get("data") or {}
    for prefix in sorted({str(each["path"]) for each in _sources(data) if each.get("path")}):
        manifest = read_manifest(prefix)
        if manifest is not None and manifest.tokenizer.get("hash") != own.hash:
            yield f"{prefix} was made with {manifest.tokenizer.get('name')}, and this is {own.name}"


def _sources(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    blends = [data.get("train"), *(phase.get("sources") for phase in data.get("phases") or [])]
    for blend in blends:
        yield from (each if isinstance(each, dict) else {"path": each} for each in blend or [])


def _recorded(checkpoint: Path) -> dict[str, Any]:
    """The configuration in a checkpoint, or in the newest of a folder or a run. {} if none can be read."""
    newest = [sorted(folder.glob("step_*"))[-1:] for folder in (checkpoint, checkpoint / "checkpoints")]
    for each in (checkpoint, *newest[0], *newest[1]):
        try:
            values = yaml.safe_load(read_json(each / META)["config"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
            continue  # the ranks report a damaged checkpoint
        return values if isinstance(values, dict) else {}
    return {}


def _difference(own: Tokenizer, other: Tokenizer, name: str) -> Iterator[str]:
    """Differences in the meaning of `other`'s ids. Additional tokens of `own`, and the form of its file, do not
    matter."""
    if own.hash == other.hash and own.eod_id == other.eod_id:
        return
    if own.size < other.size:
        yield f"it has {own.size} ids, and {name} has {other.size}"
        return
    unlike = next((each for each in range(other.size) if own.token(each) != other.token(each)), None)
    if unlike is not None:
        yield f"its id {unlike} is {own.token(unlike)!r}, and that of {name} is {other.token(unlike)!r}"
    elif own.encode(SAMPLE) != other.encode(SAMPLE):
        yield f"it splits words in another way than {name}"
    elif other.eod_id is not None and own.eod_id != other.eod_id:
        yield f"its documents end with id {own.eod_id}, and with {other.eod_id} in {name}"


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
    found += _too_long(options, config) + _way_of_reading(config)
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
    return [f"{option} has {n} tokens, and {have}: use at most these" for option, n in asked.items() if n > longest]


def _way_of_reading(config: Config) -> list[str]:
    """Mistakes of `evaluation.exact`, `read_less` and `placement`, and files of theirs that cannot be read."""
    wrong, own = evaluation_problem(config), config.evaluation
    files = {"evaluation.placement": own.placement, "evaluation.read_less.loki": own.read_less.loki}
    reasons = {name: (path, unreadable(path)) for name, path in files.items() if path is not None}
    missing = [f"{name}: {path}: {reason}" for name, (path, reason) in reasons.items() if reason is not None]
    return missing if wrong is None else [wrong, *missing]


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
    return [*found, *_way_of_reading(config), *(f"evaluation.tasks: {line}" for line in lines)]


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
