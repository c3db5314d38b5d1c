"""A pipeline schedule as text and as a picture, with its bubble and the micro-batches that ranks keep."""

from pathlib import Path
from typing import Any

from megatron.config import Config, ConfigError, Problem
from megatron.config.arithmetic.pipeline_costs import Slot, bubble, live_micro_batches, timeline
from megatron.config.arithmetic.pipelines import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    check_table,
    ranks_of_stages,
    table_of,
)
from megatron.report.figures import new_figure, write_figure

_MARKS = {FORWARD: "", BACKWARD: "-", INPUTS: "-", WEIGHTS: "="}
_WIDEST = 4000  # instructions of a rank in a picture
# by stage of the rank: backward and forward passes
_COLORS = (("#fd8d3c", "#fdbe85", "#e6550d", "#fdd0a2"), ("#6baed6", "#bdd7e7", "#3182bd", "#deebf7"))


def slots_of(config: Config) -> list[Slot]:
    """When the ranks of a pipeline execute their instructions. A backward pass takes twice a forward pass.

    Raises:
        ConfigError: the configuration has no pipeline.
    """
    parallel, count = config.parallel, config.training.accumulation or 1
    if parallel.pipeline == 1:
        rule = "must be 2 or more to have a schedule"
        raise ConfigError([Problem("parallel.pipeline", rule, "add parallel.pipeline=4", 1)])
    table = table_of(parallel, count)
    check_table(table, ranks_of_stages(parallel), count)
    return timeline(table, parallel.stages_per_rank)


def document(config: Config) -> dict[str, Any]:
    """For `--json`: the table, its bubble as a share of a step without one, and the kept micro-batches of each rank."""
    slots, parallel, count = slots_of(config), config.parallel, config.training.accumulation or 1
    ranks = range(parallel.pipeline)
    return {
        "schedule": parallel.schedule,
        "stages_per_rank": parallel.stages_per_rank,
        "micro_batches": count,
        "bubble": bubble(slots) / (3 * count),
        "live_micro_batches": [live_micro_batches(parallel, rank, count) for rank in ranks],
        "table": [[str(slot.it) for slot in slots if slot.rank == rank] for rank in ranks],
    }


def text(config: Config, width: int = 120) -> str:
    """A line per rank with the most micro-batches that it keeps. A forward pass of a stage is one cell, a backward pass
    two, with the number of its micro-batch. A part of a backward pass is one."""
    slots, facts = slots_of(config), document(config)
    unit, size = 1 / facts["stages_per_rank"], len(str(facts["micro_batches"] - 1)) + 1
    whole = round(max(slot.end for slot in slots) / unit)
    lines = []
    for rank, kept in enumerate(facts["live_micro_batches"]):
        cells = ["." * (size - 1)] * whole
        for slot in (slot for slot in slots if slot.rank == rank):
            for cell in range(round(slot.begin / unit), round(slot.end / unit)):
                cells[cell] = _MARKS[slot.it.kind] + str(slot.it.micro_batch)
        row = "".join(cell.rjust(size) for cell in cells)
        row = row if len(row) <= width else row[: width - 4] + " ..."
        lines.append(f"rank {rank} keeps {kept:g}: {row}")
    longest = max(line.index(":") for line in lines)
    lines = [line.replace(": ", ": " + " " * (longest - line.index(":")), 1) for line in lines]
    return "\n".join([
        *lines,
        f"Bubble: {facts['bubble']:.1%} of the step's work. A backward pass (-) takes twice a forward pass. A rank"
        " keeps the activations of this number of micro-batches.",
    ])


def draw(config: Config, path: Path) -> None:
    """A bar per instruction: a row per rank, a colour per stage of a rank, dark for backward passes."""
    slots, ranks = slots_of(config), config.parallel.pipeline
    if len(slots) > _WIDEST * ranks:
        rule = f"must have at most {_WIDEST} instructions per rank in a picture"
        raise ConfigError([
            Problem("--plot", rule, "use fewer micro-batches (a smaller global_batch_size)", len(slots))
        ])
    figure = new_figure(9.0, 0.4 * ranks + 1.2)
    axes = figure.subplots()
    for slot in slots:
        color = "#bdbdbd" if slot.it.kind == WEIGHTS else _COLORS[slot.it.kind == FORWARD][slot.it.stage // ranks % 4]
        axes.broken_barh([(slot.begin, slot.end - slot.begin)], (slot.rank - 0.4, 0.8), facecolor=color)
        if len(slots) <= 40 * ranks:
            axes.text((slot.begin + slot.end) / 2, slot.rank, slot.it.micro_batch, ha="center", va="center", fontsize=6)
    share = bubble(slots) / (3 * (config.training.accumulation or 1))
    axes.set(xlabel="time, in forward passes of a rank's layers", ylabel="rank of the pipeline")
    axes.set_title(
        f"{config.parallel.schedule}: forward blue, backward orange, its weights grey, bubble {share:.1%}", fontsize=9
    )
    axes.set_yticks(range(ranks))
    axes.invert_yaxis()
    write_figure(figure, path)
