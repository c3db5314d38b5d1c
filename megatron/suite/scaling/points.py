"""Points of a scaling law, also from a suite: losses of runs with their parameters, tokens and FLOPs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.problems import UserError
from megatron.config.resolution import Resolved
from megatron.config.show.difference import described
from megatron.report.jsonl import read_lines, sound_metrics

from ..members import Member, Suite

COLUMNS = ("run", "parameters", "tokens", "loss")
FLOPS_OF_A_TOKEN = 6  # and parameter, forward and backward, where nothing better is known (Kaplan et al. 2020)


@dataclass(frozen=True)
class Points:
    """One loss after another, several of one run where its curve has them."""

    runs: tuple[str, ...]  # the run of each point
    parameters: np.ndarray  # parameters, tokens, flops: float64 [n]. FLOPs are of all tokens, forward and backward.
    tokens: np.ndarray
    flops: np.ndarray
    loss: np.ndarray  # float64 [n], nats per token, above 0

    @classmethod
    def of(cls, rows: Sequence[tuple[str, float, float, float, float]]) -> Points:
        """Points of rows (run, parameters, tokens, FLOPs, loss)."""
        numbers = np.array([row[1:] for row in rows], np.float64).reshape(len(rows), 4)
        return cls(tuple(row[0] for row in rows), *(numbers[:, column] for column in range(4)))

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def names(self) -> list[str]:
        """Each run once, in the order of its first point."""
        return list(dict.fromkeys(self.runs))

    def take(self, places: Sequence[int] | np.ndarray) -> Points:
        """The points at some places, repeated ones more than once."""
        at = np.asarray(places, np.int64)
        runs = tuple(self.runs[place] for place in at)
        return Points(runs, self.parameters[at], self.tokens[at], self.flops[at], self.loss[at])

    def resampled(self, draw: np.random.Generator) -> Points:
        """A bootstrap sample of runs, each with all its points.

        Points of one run are not independent of each other, so runs are drawn. A run that is drawn again counts as
        another one."""
        names, places = self.names, self.places()
        chosen = [(number, names[each]) for number, each in enumerate(draw.integers(0, len(names), len(names)))]
        taken = self.take([place for _, name in chosen for place in places[name]])
        runs = tuple(f"{name}#{number}" for number, name in chosen for _ in places[name])
        return Points(runs, taken.parameters, taken.tokens, taken.flops, taken.loss)

    def places(self) -> dict[str, list[int]]:
        """Of each run the places of its points."""
        found: dict[str, list[int]] = {}
        for place, run in enumerate(self.runs):
            found.setdefault(run, []).append(place)
        return found


def read_points(path: Path) -> Points:
    """Read a table of points: CSV with the columns run, parameters, tokens, loss, and flops if it is known.

    Raises:
        UserError: it cannot be read, or a line, which is named, has no such numbers.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{path}: must have the columns {', '.join(COLUMNS)}, and lacks {', '.join(missing)}")
            return Points.of([_row(path, reader.line_num, each) for each in reader])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: must be a table of points that can be read ({error})") from error


def _row(path: Path, line: int, values: dict[str, str]) -> tuple[str, float, float, float, float]:
    try:
        parameters, tokens, loss = (float(values[name]) for name in COLUMNS[1:])
        flops = float(values.get("flops") or FLOPS_OF_A_TOKEN * parameters * tokens)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}:{line}: parameters, tokens, flops and loss must be numbers ({error})") from error
    if not all(math.isfinite(each) and each > 0 for each in (parameters, tokens, flops, loss)):
        raise UserError(f"{path}:{line}: parameters, tokens, flops and loss must be above 0")
    return values["run"], parameters, tokens, flops, loss


def write_points(points: Points, path: Path) -> None:
    """Write a table that `read_points` reads."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*COLUMNS[:3], "flops", COLUMNS[3]])
        numbers = zip(points.parameters, points.tokens, points.flops, points.loss)
        for run, (parameters, tokens, flops, loss) in zip(points.runs, numbers):
            table.writerow([run, f"{parameters:.0f}", f"{tokens:.0f}", repr(float(flops)), repr(float(loss))])


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
    from megatron.model.costs.describe import totals

    if config.model.vocab_size is None:
        raise UserError("sizes need the vocabulary's: give model.vocab_size, or a local tokenizer in tokenizer.path")
    total = totals(config)
    return total.parameters if embeddings else total.non_embedding_parameters
