"""GPT-NeoX's own command line: `deepy.py train.py -d configs a b`, translated to the words that deepy.py knows."""

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from megatron.config.source.arguments import ArgumentError

from ..installation import root

FOLDER = ("-d", "--conf_dir")
# GPT-NeoX's option -> the key that it sets here.
KEYS = {
    "-H": "launch.hostfile",
    "--hostfile": "launch.hostfile",
    "--wandb_group": "logging.wandb.group",
    "--wandb_run_name": "run.name",
    "--wandb_team": "logging.wandb.entity",
}
TASKS, PREFIX, ITERATION = "--eval_tasks", "--eval_results_prefix", "--iteration"  # of eval.py
REFUSED = {
    "--autotuning": "DeepSpeed's autotuner is not used: deepy config layers shows what each layer costs",
    ITERATION: "name the checkpoint: checkpoint.resume=RUN/checkpoints/step_N, or generate.py with its path",
    TASKS: "use deepy evaluate a.yml --tasks NAME,...",
    PREFIX: "use deepy evaluate a.yml --tasks NAME,... --output FILE",
    "--sample_input_file": "python generate.py RUN --prompt TEXT",
    "--sample_output_file": "python generate.py RUN --prompt TEXT > FILE",
    "-i": "python generate.py RUN --prompt TEXT",
    "-o": "python generate.py RUN --prompt TEXT > FILE",
}
ENDINGS = (".yml", ".yaml", ".json")


def translated(words: Sequence[str]) -> list[str]:
    """The same command line without GPT-NeoX's options. Words that have none of them are returned unchanged.

    GPT-NeoX's eval.py is evaluate.py here.

    Args:
        words: the script and what follows it. After a bare `--` everything is the script's own.

    Raises:
        ArgumentError: an option or a script of GPT-NeoX that there is no counterpart of.
    """
    end = words.index("--") if "--" in words else len(words)
    script, own, rest = _script(words[0]), list(words[1:end]), list(words[end:])
    _check_script(script, own)
    asked = _evaluation(own) if Path(script).name == "evaluate.py" else []
    folder, kept, overrides = None, [], []
    while own:
        name, equals, value = own.pop(0).partition("=")
        known = name in FOLDER or name in KEYS
        if name in REFUSED:
            raise ArgumentError(f"{name} is an option of GPT-NeoX that is not available here\nfix: {REFUSED[name]}")
        if not known:
            kept.append(name + equals + value)
            continue
        if not equals:
            if not own:
                raise ArgumentError(f"{name} needs a value: {name} {'FOLDER' if name in FOLDER else 'TEXT'}")
            value = own.pop(0)
        if name in FOLDER:
            folder = value
        else:
            overrides.append(f"{KEYS[name]}={_text(value)}")
    first = next((index for index, word in enumerate(kept) if word.startswith("-")), len(kept))  # the script's own
    files = [os.path.join(folder, each) if folder and _is_file(each) else each for each in kept[:first]]
    return [script, *files, *overrides, *kept[first:], *asked, *rest]


def _script(script: str) -> str:
    """evaluate.py for GPT-NeoX's eval.py, unless that exists: one in its folder, or the project's."""
    path = Path(script)
    if path.name != "eval.py" or path.exists():
        return script
    beside = path.with_name("evaluate.py")
    return str(beside if beside.exists() else root() / "evaluate.py")


def _evaluation(words: list[str]) -> list[str]:
    """The options of evaluate.py in place of GPT-NeoX's, which are removed from `words`.

    Raises:
        ArgumentError: one has no value.
    """
    made: dict[str, list[str]] = {}
    for name in (TASKS, PREFIX, ITERATION):
        for index in reversed([at for at, word in enumerate(words) if word.partition("=")[0] == name]):
            values = _values(words, index, several=name == TASKS)
            if not values:
                raise ArgumentError(f"{name} needs a value: {name} {name.removeprefix('--').upper()}")
            made.setdefault(name, values)  # the last one counts
    found = []
    if TASKS in made:
        found += ["--tasks", ",".join(made[TASKS])]
    if ITERATION in made:
        found += ["--checkpoint", *made[ITERATION]]
    if PREFIX in made:
        found += ["--output", f"{made[PREFIX][0]}_eval_results_{datetime.now():%m-%d-%Y-%H-%M-%S}.json"]
    return found


def _values(words: list[str], index: int, several: bool) -> list[str]:
    """Take an option and its values out of `words`. Several ones end at an option or at an override."""
    name, equals, value = words[index].partition("=")
    end = index + 1
    while not equals and end < len(words) and (several or end == index + 1):
        if words[end].startswith("-") or (several and "=" in words[end]):
            break
        end += 1
    values = [value] if equals and value else words[index + 1 : end]
    del words[index:end]
    return values


def _is_file(word: str) -> bool:
    return "=" not in word or word.endswith(ENDINGS)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _check_script(script: str, words: list[str]) -> None:
    """GPT-NeoX's generate.py takes a run's files. Our program takes a run or a checkpoint."""
    name = Path(script).name
    files = [word for word in words if word.endswith(ENDINGS)]
    if name == "generate.py" and (files or any(word.partition("=")[0] in FOLDER for word in words)):
        raise ArgumentError(
            "generate.py takes a run's directory or a checkpoint, not the files of a configuration as in GPT-NeoX\n"
            'fix: python generate.py runs/NAME --prompt "Once upon a time". Checkpoints of GPT-NeoX come in by '
            "deepy checkpoint from-neox"
        )
