"""Stages of sequence length (`training.sequence_schedule`): what a run is at each of its steps. No torch.

The configuration describes the last stage, and so the model that comes out: its sequences are the longest, and its
rotary options are exported. The schedule says what earlier steps have instead. In every stage a step reads the tokens
that it would read without a schedule. A shorter stage cuts each sample into equal pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from .section import Section
from .tree import get, thaw

C = TypeVar("C", bound=Section)


@dataclass(frozen=True)
class Stage:
    """Steps `begin` ... `end` - 1 of a run. The last stage has no end.

    Attributes:
        number: its place in the schedule. The last stage, which no entry describes, has the next number.
        length: tokens of a sample.
        pieces: that a sample of `training.sequence_length` tokens is cut into.
    """

    number: int
    begin: int
    end: int | None
    length: int
    pieces: int


def stages_of(config: Any) -> list[Stage]:
    """The stages of a run, in order. A run without a schedule is one stage."""
    longest, found, begin = config.training.sequence_length, list[Stage](), 0
    for number, entry in enumerate(config.training.sequence_schedule):
        length = entry.sequence_length
        found.append(Stage(number, begin, entry.until, length, longest // length))
        begin = entry.until
    return [*found, Stage(len(found), begin, None, longest, 1)]


def stage_at(config: Any, step: int) -> Stage:
    """The stage of update `step`, from 0."""
    return next(stage for stage in stages_of(config) if stage.end is None or step < stage.end)


def stage_of(config: Any, completed: int) -> Stage:
    """The stage of the last of the completed updates."""
    return stage_at(config, max(completed - 1, 0))


def shortest(config: Any, first: int, end: int | None = None) -> int:
    """Tokens of the shortest samples of updates `first` to `end` - 1, or to the run's end."""
    return min(
        stage.length
        for stage in stages_of(config)
        if (end is None or stage.begin < end) and (stage.end is None or first < stage.end)
    )


def as_stage(config: C, stage: Stage) -> C:
    """The configuration of a run that is nothing but this stage: its lengths, batches and rotary options."""
    training: Any = config.training  # type: ignore[attr-defined]
    if not training.sequence_schedule:
        return config
    return type(config).model_validate(stage_values(config.model_dump(), stage.number))


def as_of(config: C, completed: int) -> C:
    """The configuration after a number of updates, such as that of a checkpoint."""
    return as_stage(config, stage_of(config, completed))


def stage_values(values: Mapping[str, Any], number: int) -> dict[str, Any]:
    """`as_stage` on the plain values of a resolved configuration."""
    found = cast(dict[str, Any], thaw(values))
    training, model = found["training"], found["model"]
    schedule, training["sequence_schedule"] = training.get("sequence_schedule") or [], []
    if number >= len(schedule):
        return found
    entry = schedule[number]
    longest, length = training["sequence_length"], entry["sequence_length"]
    pieces = longest // length
    training["sequence_length"] = length
    training["sequence_chunks"] = _chunks(length, longest // (training.get("sequence_chunks") or 1))
    for name in ("micro_batch_size", "global_batch_size"):
        if training[name] is not None:
            training[name] *= pieces
    for batch in training.get("batch_schedule") or []:
        batch["global_batch_size"] *= pieces
    for name, rotary in entry["rotary"].items():
        put_rotary(model, name, rotary)
    return found


def _chunks(length: int, tokens: int) -> int:
    """Number of chunks of a shorter sequence: each has the tokens of the longest one's chunks, or a divisor of them."""
    return 1 if length <= tokens else length // math.gcd(length, tokens)


def put_rotary(model: dict[str, Any], name: str, rotary: Mapping[str, Any]) -> None:
    """Give a kind of layer, or `kind@variant`, other rotary options, in place."""
    kind, _, variant = name.partition("@")
    options = model["variants"].get(variant) if variant else model.get(kind)
    if options is not None:
        options["rotary"] = {**(get(model, (kind, "rotary"), None) or {}), **(options.get("rotary") or {}), **rotary}
