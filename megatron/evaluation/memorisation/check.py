"""Mistakes in the options of extract.py, found by the launcher before any rank starts. Without torch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.stages import shortest

from ..arguments import OptionError
from ..check import checkpoint_problems
from .arguments import parse


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
