"""Costs of pipeline schedules: bubbles, and micro-batches whose activations are kept."""

from itertools import accumulate
from typing import NamedTuple

from .pipelines import (
    BACKWARD,
    FORWARD,
    INPUTS,
    V_SHAPED,
    WEIGHTS,
    HasSchedule,
    Instruction,
    Table,
    is_file,
    least_micro_batches,
    needs,
    table_of,
)


class Costs(NamedTuple):
    """Times of the parts of a micro-batch in all layers of a rank: a forward pass, and both parts of a backward pass.
    One of them may be the unit."""

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0


EQUAL = Costs()


def live_micro_batches(parallel: HasSchedule, rank: int, micro_batches: int) -> float:
    """The most micro-batches whose activations a rank keeps at a time, in units of all of its layers."""
    ranks, each = parallel.pipeline, parallel.stages_per_rank
    if is_file(parallel.schedule):
        return most_live(table_of(parallel, micro_batches)[rank]) / each
    if parallel.schedule == "zb_h1":
        first = (each - 1) * ranks + ranks - 1 - rank
        return min(first + 1 + rank, each * micro_batches) / each
    if parallel.schedule in V_SHAPED:
        return (
            ranks + 0.5
            if parallel.schedule == "dualpipe_v"
            else min(ranks, micro_batches, (micro_batches + 1 + rank) / 2)
        )
    if each > 1:
        return min((each - 1) * ranks + 2 * (ranks - 1 - rank) + 1, each * micro_batches) / each
    return max(1, min(ranks - rank, micro_batches))


def most_live(own: list[Instruction]) -> int:
    """The most micro-batches of a stage that a rank keeps at a time, over its stages."""
    live = accumulate({FORWARD: 1, INPUTS: 0}.get(it.kind, -1) for it in own)
    return max(live, default=0)


class Slot(NamedTuple):
    """When a rank executes an instruction, in the units of the given costs."""

    rank: int
    it: Instruction
    begin: float
    end: float


def timeline(
    table: Table, stages_per_rank: int, forward: float = 1.0, backward: float = 2.0, weights: float | None = None
) -> list[Slot]:
    """When each instruction is executed if messages take no time.

    Args:
        forward, backward: times of all layers of a rank for one micro-batch.
        weights: the second part of `backward`, by default half of it.
    """
    stages, found, ready = len(table) * stages_per_rank, list[Slot](), dict[Instruction, float]()
    clock, at = [0.0] * len(table), [0] * len(table)
    cost = {FORWARD: forward / stages_per_rank, BACKWARD: backward / stages_per_rank}
    cost[WEIGHTS] = cost[BACKWARD] / 2 if weights is None else weights / stages_per_rank
    cost[INPUTS] = cost[BACKWARD] - cost[WEIGHTS]
    while any(place < len(own) for place, own in zip(at, table, strict=True)):
        for rank, own in enumerate(table):
            while at[rank] < len(own) and needs(own[at[rank]], stages) <= ready.keys():
                it = own[at[rank]]
                begin = max([clock[rank], *(ready[each] for each in needs(it, stages))])
                clock[rank] = ready[it.result] = begin + cost[it.kind]
                found.append(Slot(rank, it, begin, clock[rank]))
                at[rank] += 1
    return found


def bubble(slots: list[Slot]) -> float:
    """Time of a step beyond the work of a rank, of equal ranks."""
    return max(slot.end for slot in slots) - sum(slot.end - slot.begin for slot in slots if slot.rank == 0)


def bubble_factor(parallel: HasSchedule, micro_batches: int, costs: Costs = EQUAL) -> float:
    """The bubble over that of 1F1B with one stage per rank, p - 1 micro-batches.

    In closed form, but for a file, `dualpipe_v`, and a V of few micro-batches or with I < F: their tables are executed
    without messages."""
    (f, i, w), ranks, schedule = costs, parallel.pipeline, parallel.schedule
    if schedule == "zb_h1":
        waits = max(f + i - w, f, i) / parallel.stages_per_rank
    elif schedule == "zbv" and micro_batches >= 2 * ranks - 1 and i >= f:
        waits = max(f, i, 2 * (i - w)) / 2
    elif is_file(schedule) or schedule in V_SHAPED:
        table = table_of(parallel, max(micro_batches, least_micro_batches(parallel)))
        each = 2 if schedule in V_SHAPED else parallel.stages_per_rank
        waits = bubble(timeline(table, each, f, i + w, w)) / (ranks - 1)
    else:
        return 1 / parallel.stages_per_rank
    return waits / sum(costs)
