"""Measure memory and messages of a step with long sequences.

Results of several numbers of context parallel ranks must agree.

    python -m bench long-context a.yml key.path=value ... [--lengths 8192 32768] [--context 1 2 4] [--folded]
        [--json FILE]

Each pair of a length and a number of ranks is a run of its own of one step, with one sample per step. A rank's peak is
its resident memory at its highest. *Of the step* is the peak less the peak before the step, when model, optimizer and
libraries are there. Bytes are sent over the context axis, by the rank that sends most. Loss and gradient norm must
equal the ones on the first number of ranks at the same length. The exit status is 1 where they differ by more than
--tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.runner import Result, grid, run_with_hook, share
from megatron.training.hook import Hook
from megatron.training.hooks.log import memory_bytes

if TYPE_CHECKING:
    from megatron.training.exchange import StepReport
    from megatron.training.trainer import Trainer

TOLERANCE = 1e-5  # fp32 rounds to 6e-8, and a loss is a mean over all tokens


@dataclass(frozen=True)
class StepMemory:
    """One rank's view of a step: peaks of resident memory (bytes) before and after it, and bytes sent, by group."""

    before: int
    after: int
    loss: float
    norm: float
    sent: dict[str, int]


@dataclass(frozen=True)
class Row:
    """A run: memory in bytes, of the rank that needs most, and the most bytes of a rank over the context axis."""

    length: int
    ranks: int
    peak: int
    step: int
    sent: int
    loss: float
    norm: float


class MemoryHook(Hook):
    """Writes what each rank sees into a file per rank."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._before = 0

    def before_step(self, trainer: Trainer, step: int) -> None:
        self._before = memory_bytes(trainer.exchange.device)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        groups = trainer.extra_metrics.get("communication", {})
        sent = {name: sum(each["bytes"] for each in operations.values()) for name, operations in groups.items()}
        peak = memory_bytes(trainer.exchange.device)
        seen = StepMemory(
            self._before,
            peak,
            float(report.loss),
            math.nan if report.grad_norm is None else float(report.grad_norm),
            sent,
        )
        (self._folder / f"{os.environ['RANK']}.json").write_text(json.dumps(asdict(seen)))


def one_run(sources: list[str], length: int, ranks: int, folded: bool) -> Row:
    """Train one step of one sample.

    Args:
        folded: the ranks share the rows of matrices, too.

    Raises:
        SystemExit: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder, "seen")
        seen.mkdir()
        own = [
            f"run.dir={folder}/run",
            f"training.sequence_length={length}",
            "training.steps=1",
            "training.global_batch_size=1",
            "training.micro_batch_size=1",
            f"parallel.{'folded' if folded else 'context'}={ranks}",
            "evaluation.every=null",
            "checkpoint.every=null",
            "logging.communication=counts",
        ]
        given = argparse.Namespace(sources=sources, ranks=ranks)
        run_with_hook(given, "bench.step.long_context:MemoryHook", {"folder": str(seen)}, own)
        found = [StepMemory(**json.loads(path.read_text())) for path in sorted(seen.iterdir())]
    return Row(
        length,
        ranks,
        max(each.after for each in found),
        max(each.after - each.before for each in found),
        max(each.sent.get("context", 0) for each in found),
        found[0].loss,
        found[0].norm,
    )


def difference(row: Row, first: Row) -> float:
    """The larger relative difference of loss and gradient norm."""
    return max(abs(row.loss / first.loss - 1.0), abs(row.norm / first.norm - 1.0))


def table(rows: list[Row]) -> str:
    """In Markdown."""
    lines = [["tokens", "context ranks", "loss", "gradient norm", "differs by"]]
    lines[0] += ["peak of a rank, MiB", "of the step", "sent"]
    first: dict[int, Row] = {}
    for row in rows:
        base = first.setdefault(row.length, row)
        apart = "" if base is row else f"{difference(row, base):.1e}"
        cells = [f"{row.length:,}", str(row.ranks), f"{row.loss:.6f}", f"{row.norm:.6f}", apart]
        cells += [f"{each / 2**20:,.1f}" if each else "–" for each in (row.peak, row.step, row.sent)]
        lines.append(cells)
    return grid(lines)


def options(parser: argparse.ArgumentParser) -> None:
    share(parser, "sources")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], metavar="N")
    parser.add_argument("--context", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="numbers of ranks")
    parser.add_argument("--folded", action="store_true", help="ranks share the rows of matrices, too")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="relative (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")


def measure(given: argparse.Namespace) -> Result:
    """Train each pair of a length and a number of ranks."""
    made = []
    for length in given.lengths:
        for ranks in given.context:
            made.append(one_run(given.sources, length, ranks, given.folded))
            print(f"{length:,} tokens, {ranks} ranks: {made[-1].peak / 2**20:,.0f} MiB", file=sys.stderr, flush=True)
    document = [asdict(row) for row in made]
    if given.json:
        Path(given.json).write_text(json.dumps(document, indent=1) + "\n")
    first = {row.length: row for row in reversed(made)}
    apart = any(not difference(row, first[row.length]) <= given.tolerance for row in made)
    return Result(document, table(made), int(apart))
