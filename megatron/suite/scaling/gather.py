"""The points of a suite: validation losses of its runs and of the branches that `deepy fork` has made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.problems import UserError
from megatron.config.resolution import Resolved
from megatron.config.show.difference import described
from megatron.report.jsonl import read_lines, sound_metrics

from ..members import Member, Suite
from .points import Points

PLATEAU = ("constant", "wsd", "infinite")  # schedules with a constant rate
KINDS = ("end", "constant")


def points_of(
    suite: Suite, resolved: Mapping[str, Resolved], kind: str, name: str | None, *, embeddings: bool
) -> Points:
    """Losses of a validation set, with the sizes and FLOPs that the layers count.

    Args:
        kind: `end`: of each run the last loss, or its branches' where it has any. `constant`: of each
            run every loss at the constant rate of its schedule, after the warmup and before the decay.
        name: of the validation set. None for the only one.
        embeddings: whether parameters include the embedding and the head.

    Raises:
        UserError: no run has such losses, or there are several sets and no name.
    """
    from megatron.model.costs.describe import training_operations

    rows: list[tuple[str, float, float, float, float]] = []
    sets: set[str] = set()
    for member in suite.members:
        if member.fork is not None:  # found next to its trunk, like branches made by hand
            continue
        own = resolved[member.name].config
        parameters = _size(own, embeddings)
        for run, config in _runs(member, own, kind):
            losses = list(_losses(run / "metrics.jsonl"))
            sets |= {each for _, each, _ in losses}
            wanted = [(step, loss) for step, each, loss in losses if name in (None, each)]
            if kind == "constant":
                wanted = [(step, loss) for step, loss in wanted if _is_constant(config, step)]
            for step, loss in wanted if kind == "constant" else wanted[-1:]:
                tokens = batches_of(config).before(step) * config.training.sequence_length
                rows.append((run.name, parameters, tokens, training_operations(config, step), loss))
    if name is None and len(sets) > 1:
        raise UserError(f"--validation must name one of {', '.join(sorted(sets))}")
    if not rows:
        has = f"; there are {', '.join(sorted(sets))}" if sets else ""
        at = " at a constant rate" if kind == "constant" else ""
        raise UserError(f"no run of {suite.folder} has a validation loss{f' {name!r}' if name else ''}{at}{has}")
    return Points.of(rows)


def _runs(member: Member, config: Config, kind: str) -> Iterator[tuple[Path, Config]]:
    """The folders whose losses count, with their configurations."""
    branches = []
    if kind == "end":
        for folder in sorted(member.folder.parent.glob(f"{member.folder.name}-from-*")):
            if (folder / "config.yml").is_file():
                branches.append((folder, described(str(folder)).config))
    yield from branches or [(member.folder, config)]


def _losses(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, validation set, loss) of a run's file, nothing for a run that has not begun."""
    for record in read_lines(path, sound_metrics) if path.is_file() else ():
        for name, values in record.get("validation", {}).items():
            if values["loss"] is not None and math.isfinite(values["loss"]) and record["step"] > 0:
                yield record["step"], name, values["loss"]


def _is_constant(config: Config, step: int) -> bool:
    """Whether the update before `step` had the peak's rate, or that of an infinite schedule's constant part."""
    from megatron.training.schedule import Schedule

    if config.schedule.type not in PLATEAU:
        return False
    schedule, last = Schedule(config), step - 1
    return last > 0 and schedule.lr(last) == schedule.lr(last - 1)


def _size(config: Config, embeddings: bool) -> int:
    """Parameters."""
    from megatron.model.costs.describe import totals

    if config.model.vocab_size is None:
        raise UserError("sizes need the vocabulary's: give model.vocab_size, or a local tokenizer in tokenizer.path")
    total = totals(config)
    return total.parameters if embeddings else total.non_embedding_parameters
