"""The options of extract.py, after the configuration files."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.sequences import shortest

from ..arguments import OptionError, Parser, checkpoint_problems


@dataclass(frozen=True)
class Options:
    """The sequences and checkpoints to try."""

    steps: range  # steps of the run whose sequences are tried
    context: int = 32  # context, continuation: tokens that the model is given, and tokens that it is asked for
    continuation: int = 32
    samples: int | None = None  # only the first sequences of each step. None: all.
    scores: bool = True  # whether sequences that are not extractable get their score too
    checkpoint: str | None = None  # a step or a path. None: the newest of the run.
    every: bool = False  # all checkpoints of the run, oldest first
    output: Path | None = None  # folder of the results. None: `memorisation/` in the run's directory.
    texts: int | None = None  # sequences in a micro-batch. None: training.micro_batch_size.


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="deepy extract",
        usage="deepy extract a.yml ... key.path=value ... --steps FIRST:END [options]",
        description="Find the sequences of the run's own data that a checkpoint can recite, on any layout.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--steps", required=True, metavar="FIRST:END[:EVERY]", help="try the sequences of these steps, without END")
    add("--context", type=int, default=32, metavar="K", help="tokens of the prompt (default: %(default)s)")
    add("--continuation", type=int, default=32, metavar="L", help="tokens of the continuation (default: %(default)s)")
    add("--samples", type=int, metavar="N", help="only the first N sequences of each step")
    add("--flags-only", action="store_true", help="only whether a sequence is extractable: one pass, no scores")
    add("--checkpoint", metavar="STEP|PATH", help="a step of the run, or a checkpoint (default: the newest)")
    add("--all-checkpoints", action="store_true", help="every checkpoint of the run")
    add("--output", type=Path, metavar="FOLDER", help="results (default: memorisation/ in the run's directory)")
    add("--batch-size", type=int, metavar="N", help="sequences in a micro-batch (default: training.micro_batch_size)")
    return made


def parse(words: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
        OptionError: an option is wrong.
    """
    given = parser().parse_args(list(words))
    for name in ("context", "continuation", "samples", "batch_size"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise OptionError(f"extract.py: --{name.replace('_', '-')} is {value}: it must be at least 1")
    if given.all_checkpoints and given.checkpoint:
        raise OptionError("extract.py: --all-checkpoints and --checkpoint exclude each other: remove one")
    return Options(
        _steps(given.steps),
        given.context,
        given.continuation,
        given.samples,
        not given.flags_only,
        given.checkpoint,
        given.all_checkpoints,
        given.output,
        given.batch_size,
    )


def _steps(text: str) -> range:
    parts = re.fullmatch(r"(\d+):(\d+)(?::(\d+))?", text)
    found = range(int(parts[1]), int(parts[2]), int(parts[3] or 1) or 1) if parts else range(0)
    if not found or parts is None or parts[3] == "0":
        raise OptionError(
            f"extract.py: --steps is {text}: it must be FIRST:END or FIRST:END:EVERY with at least one step, as in "
            "0:1000"
        )
    return found


def smallest_batch(config: Config, steps: range) -> int:
    """Sequences that each of these steps has."""
    return min(map(batches_of(config).size, steps))


def before_start(words: Sequence[str], config: Config) -> list[str]:
    """A sentence for each mistake."""
    try:
        options = parse(words)
    except OptionError as error:
        return [str(error)]
    found, training = [], config.training
    longest = shortest(config, options.steps.start, options.steps.stop)
    if options.context + options.continuation > longest + 1:
        found.append(
            f"--context and --continuation are {options.context} + {options.continuation} tokens: they must fit the "
            f"{longest + 1} tokens of a sequence of these steps. Make one smaller"
        )
    if options.steps[-1] >= training.steps:
        found.append(f"--steps must end at {training.steps} or before: the run has steps 0 to {training.steps - 1}")
    if options.samples is not None and options.samples > (most := smallest_batch(config, options.steps)):
        found.append(f"--samples must be at most {most}, the sequences of a step")
    return found + checkpoint_problems(options.checkpoint, config, "a step or a checkpoint")
