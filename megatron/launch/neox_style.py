"""GPT-NeoX's own command line: `deepy.py train.py -d configs a b`, translated to the words that deepy.py knows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron.config.arguments import ArgumentError

FOLDER = ("-d", "--conf_dir")
# GPT-NeoX's option -> the key that it sets here.
KEYS = {
    "-H": "launch.hostfile",
    "--hostfile": "launch.hostfile",
    "--wandb_group": "logging.wandb.group",
    "--wandb_run_name": "run.name",
    "--wandb_team": "logging.wandb.entity",
}
REFUSED = {
    "--autotuning": "DeepSpeed's autotuner is not used; python tools/config.py layers shows what each layer costs",
    "--iteration": "name the checkpoint: checkpoint.resume=RUN/checkpoints/step_N, or generate.py with its path",
    "--eval_tasks": "use ./deepy.py evaluate.py a.yml --tasks NAME,...",
    "--eval_results_prefix": "use ./deepy.py evaluate.py a.yml --tasks NAME,... --output FILE",
    "--sample_input_file": "python generate.py RUN --prompt TEXT",
    "--sample_output_file": "python generate.py RUN --prompt TEXT > FILE",
    "-i": "python generate.py RUN --prompt TEXT",
    "-o": "python generate.py RUN --prompt TEXT > FILE",
}
ENDINGS = (".yml", ".yaml", ".json")


def translated(words: Sequence[str]) -> list[str]:
    """The same command line without GPT-NeoX's options; words that have none of them are returned as they are.

    Args:
        words: the script and what follows it. After a bare `--` everything is the script's own.

    Raises:
        ArgumentError: an option or a script of GPT-NeoX that there is no counterpart of.
    """
    end = words.index("--") if "--" in words else len(words)
    script, own, rest = words[0], list(words[1:end]), list(words[end:])
    _check_script(script, own)
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
    return [script, *files, *overrides, *kept[first:], *rest]


def _is_file(word: str) -> bool:
    return "=" not in word or word.endswith(ENDINGS)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _check_script(script: str, words: list[str]) -> None:
    """GPT-NeoX's other two scripts take a run's files; what does their work here takes a run or a checkpoint."""
    name = Path(script).name
    if name == "eval.py" and not Path(script).exists():
        raise ArgumentError(
            "eval.py is GPT-NeoX's script, and there is none of that name here\n"
            "fix: for tasks, ./deepy.py evaluate.py a.yml --tasks NAME,...; validation losses are a run's own "
            "(evaluation.every)"
        )
    files = [word for word in words if word.endswith(ENDINGS)]
    if name == "generate.py" and (files or any(word.partition("=")[0] in FOLDER for word in words)):
        raise ArgumentError(
            "generate.py takes a run's directory or a checkpoint, not the files of a configuration as in GPT-NeoX\n"
            'fix: python generate.py runs/NAME --prompt "Once upon a time"; checkpoints of GPT-NeoX come in by '
            "tools/checkpoint/from_neox.py"
        )
