"""Compare the steps of pipeline schedules with their tables, on CPU ranks whose passes take a set time.

    python -m bench pipelines [--ranks 4] [--micro-batches 8] [--unit 0.1]     a table of measured steps
    python -m bench pipelines --picture docs/pipeline_bubbles.png              bubbles of tables at 4 and 16 ranks

Each pass of a tiny model sleeps: a forward pass of all layers of a rank for --unit seconds, and each of the two parts
of a backward pass too. Ranks that sleep need no core. Messages and the model itself take little of a step, and a first
run without sleeping measures them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.plan.step_times import timed
from bench.runner import Result, grid, share
from megatron.config import Config, resolve
from megatron.config.arithmetic.pipeline_costs import timeline
from megatron.config.arithmetic.pipelines import one_forward_one_backward, table_of
from megatron.report.figures import new_figure, write_figure
from megatron.testing.ranks import on_ranks

SCHEDULES = {"1f1b": 1, "asynchronous": 1, "interleaved": 2, "zb_h1": 2, "zbv": 2, "dualpipe_v": 2}  # stages per rank
COSTS = {"F = I = W": (1.0, 1.0, 1.0), "F = 1, I = 1.4, W = 0.7": (1.0, 1.4, 0.7)}  # the second is with attention


def slowed(config: Config, ranks: int, steps: int, unit: float) -> list[float]:
    """On gloo ranks: seconds of each step if a part of a pass takes `unit` seconds of all layers of a rank."""
    from megatron.engine.deepspeed.table import TableExecutor

    each = unit / config.parallel.stages_per_rank

    def slow(name: str, parts: Callable[[Any], int]) -> Any:
        call = getattr(TableExecutor, name)

        def changed(executor: Any, *arguments: Any) -> Any:
            time.sleep(each * parts(executor))
            return call(executor, *arguments)

        return mock.patch.object(TableExecutor, name, changed)

    with (
        slow("_forward", lambda _: 1),
        slow("_backward", lambda executor: 2 if executor._later is None else 1),
        slow("_add_to_weights", lambda _: 1),
    ):
        return [seconds for seconds, _ in timed(config, ranks, steps)]


def configured(schedule: str, ranks: int, micro_batches: int, folder: Path) -> Config:
    """A tiny model with two blocks per rank."""
    each, name = SCHEDULES[schedule], schedule
    if schedule == "1f1b":  # DeepSpeed's engine would execute it
        name = str(folder / "1f1b.csv")
        table = one_forward_one_backward(ranks, micro_batches)
        Path(name).write_text("\n".join(",".join(map(str, own)) for own in table))
    values = {
        "model": {
            "layers": f"(attention/mlp) x{2 * ranks}",
            "hidden_size": 16,
            "vocab_size": 32,
            "attention": {"heads": 2},
        },
        "training": {"steps": 8, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": micro_batches},
        "data": {"synthetic": "copy"},
        "parallel": {"pipeline": ranks, "stages_per_rank": each, "schedule": name, "pipeline_split": "uniform"},
    }
    return resolve(values, ranks=ranks)


def predicted(schedule: str, ranks: int, micro_batches: int, costs: tuple[float, float, float]) -> float:
    """Of a step's passes, in the unit of the costs."""
    parallel = SimpleNamespace(pipeline=ranks, stages_per_rank=SCHEDULES[schedule], schedule=schedule)
    forward, inputs, weights = costs
    slots = timeline(table_of(parallel, micro_batches), parallel.stages_per_rank, forward, inputs + weights, weights)
    return max(slot.end for slot in slots)


def compared(ranks: int, micro_batches: int, unit: float) -> list[dict[str, Any]]:
    """Seconds of a step of each schedule: of its passes by the table, without sleeping, and measured."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for schedule, each in SCHEDULES.items():
            config = configured(schedule, ranks, micro_batches, Path(folder))
            plain, slow = (
                median(map(max, zip(*on_ranks(ranks, slowed, config, ranks, 3, each_pass))))
                for each_pass in (0.0, unit)
            )
            passes = unit * predicted(schedule, ranks, micro_batches, COSTS["F = I = W"])
            seconds = {"predicted": passes, "without_sleeping": plain, "measured": slow}
            rows.append({"schedule": schedule, "stages_per_rank": each, **seconds})
            print(f"{schedule}: {slow:.2f} s", file=sys.stderr)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    heads = [
        "schedule",
        "stages per rank",
        "passes, predicted",
        "step without sleeping",
        "step, measured",
        "difference",
    ]
    cells = [
        [f"`{row['schedule']}`", row["stages_per_rank"]]
        + [f"{row[name]:.2f} s" for name in ("predicted", "without_sleeping", "measured")]
        + [f"{row['measured'] / row['predicted'] - 1:+.1%}"]
        for row in rows
    ]
    return grid([heads, *cells])


def draw(path: Path) -> None:
    """Bubbles of five schedules at 4 and 16 ranks, with 4 micro-batches per rank."""
    figure = new_figure(9.0, 3.2)
    names = [name for name in SCHEDULES if name != "asynchronous"]
    for axes, ranks in zip(figure.subplots(1, 2, sharey=True), (4, 16), strict=True):
        for shift, (about, costs) in zip((-0.2, 0.2), COSTS.items(), strict=True):
            work = 4 * ranks * sum(costs)
            shares = [100 * (predicted(name, ranks, 4 * ranks, costs) / work - 1) for name in names]
            bars = axes.bar([place + shift for place in range(len(names))], shares, 0.38, label=about)
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        labels = [f"{name}\n{SCHEDULES[name]} per rank" for name in names]
        axes.set_xticks(range(len(names)), labels, fontsize=7)
        axes.set_title(f"{ranks} ranks, {4 * ranks} micro-batches", fontsize=9)
    figure.axes[0].set_ylabel("bubble, % of the step's work")
    figure.axes[0].legend(fontsize=8)
    write_figure(figure, path)


def options(parser: argparse.ArgumentParser) -> None:
    share(parser, "--ranks", ranks=4)
    parser.add_argument("--micro-batches", type=int, default=8, help="at least twice the ranks")
    parser.add_argument("--unit", type=float, default=0.1, help="seconds of a forward pass of a rank's layers")
    parser.add_argument("--picture", type=Path, help="only draw bubbles of tables into this PNG file")


def measure(given: argparse.Namespace) -> Result | int:
    if given.picture is not None:
        draw(given.picture)
        return 0
    rows = compared(given.ranks, given.micro_batches, given.unit)
    return Result(rows, table(rows))
