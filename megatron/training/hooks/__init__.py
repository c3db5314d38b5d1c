"""Hooks: one file per concern of a run beside its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..trainer import Hook
from .checkpoint import Checkpoint
from .closing import Closing
from .evaluate import Evaluate, ValidationSet
from .experts import DeadExperts
from .guard import Guard, NonFinite
from .log import Log
from .profile import Profile
from .record import Record
from .samples import Samples
from .stop import Stop

__all__ = [
    "Checkpoint",
    "Closing",
    "Evaluate",
    "Guard",
    "Log",
    "NonFinite",
    "Profile",
    "Record",
    "Samples",
    "Stop",
    "ValidationSet",
    "standard_hooks",
]


def standard_hooks(
    config,
    *,
    flops_per_token: float | None = None,
    validation: Sequence[ValidationSet] = (),
    checkpoint: Checkpoint | None = None,
    generate: Callable[..., list[str]] | None = None,
    facts: Mapping[str, Any] | None = None,
    tasks: Hook | None = None,
) -> list[Hook]:
    """The hooks that a resolved `Config` asks for, in the order in which they act after a step.

    First who may end the run, then who reports, then who saves: so a bad loss is never saved, a stopped run is, and the
    records about a checkpoint's weights are written before it.

    Args:
        flops_per_token: operations of forward and backward per token, over the whole model.
        validation: the sets to evaluate.
        checkpoint: the checkpoint hook, which the checkpoint room's pieces were put into.
        generate: see `Samples`.
        facts: see `Record`.
        tasks: what runs `evaluation.tasks`.
    """
    logging, evaluation, folder = config.logging, config.evaluation, config.run.dir
    hooks: list[Hook | None] = [
        Closing(folder, config.run.name or Path(folder).name, curve=logging.curve),  # speaks last: ends go backwards
        Record(facts),
        Guard(),
        Stop(config.training.stop_after),
        Profile(logging.profile, folder),
        Log(
            logging.every,
            flops_per_token=flops_per_token,
            compute=config.precision.compute,
            peak_tflops=logging.peak_tflops,
        ),
        DeadExperts(logging.every, config.training.global_batch_size * config.training.sequence_length),
        Evaluate(validation, every=evaluation.every, at_start=evaluation.at_start, at_end=evaluation.at_end),
        tasks,
        Samples(evaluation.samples, generate, folder) if generate is not None else None,
        checkpoint,
    ]
    return [hook for hook in hooks if hook is not None]
