"""Tables of pipeline schedules: compared with torch's generators, closed forms and simulations. Illegal tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import ConfigError, Problem, resolve
from megatron.config.arithmetic import machine
from megatron.config.arithmetic.pipeline_costs import (
    Costs,
    bubble,
    bubble_factor,
    live_micro_batches,
    most_live,
    timeline,
)
from megatron.config.arithmetic.pipelines import (
    BACKWARD,
    FORWARD,
    Instruction,
    ScheduleError,
    Table,
    check_table,
    forward_only,
    interleaved,
    one_forward_one_backward,
    ranks_of_stages,
    read_table,
    rounds,
    table_of,
)
from megatron.config.resolution import combine
from megatron.config.rules import cost
from megatron.config.sections.layout import ParallelSection
from megatron.config.source.layers import ConfigSource

SIZES = [(2, 2, 4), (2, 3, 6), (4, 2, 8), (4, 3, 16), (8, 2, 8)]  # ranks, stages per rank, micro-batches


def words(own: list[Instruction]) -> str:
    return " ".join(map(str, own))


def loop(ranks: int, each: int) -> list[int]:
    return ranks_of_stages(section(pipeline=ranks, stages_per_rank=each, schedule="interleaved"))


def section(**values) -> ParallelSection:
    return ParallelSection.model_validate(values)


def test_published_table():
    """Two ranks with two stages each, four micro-batches."""
    first, second = interleaved(2, 2, 4)
    assert words(first) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert words(second) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


@pytest.mark.parametrize("schedule", ["interleaved", "zb_h1"])
@pytest.mark.parametrize(("ranks", "each", "micro_batches"), [*SIZES, (4, 1, 8)])
def test_interleaved_is_torchs(ranks: int, each: int, micro_batches: int, schedule: str):
    known = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=each,
        _n_microbatches=micro_batches,
        number_of_rounds=max(1, micro_batches // ranks),
        microbatches_per_round=micro_batches // max(1, micro_batches // ranks),
        _num_stages=ranks * each,
    )
    name = {"interleaved": "ScheduleInterleaved1F1B", "zb_h1": "ScheduleInterleavedZeroBubble"}[schedule]
    make = getattr(torch_schedules, name)._calculate_single_rank_operations
    for rank, own in enumerate(
        table_of(section(pipeline=ranks, stages_per_rank=each, schedule=schedule), micro_batches)
    ):
        assert [str(it) for it in own] == [str(action) for action in make(known, rank) if action is not None]


@pytest.mark.parametrize(("ranks", "each", "micro_batches"), SIZES)
def test_closed_forms(ranks: int, each: int, micro_batches: int):
    """The bubble is (p - 1) / v micro-batches. Rank r keeps ((v - 1) p + 2 (p - 1 - r) + 1) / v of them."""
    table = interleaved(ranks, each, micro_batches)
    check_table(table, loop(ranks, each), micro_batches)
    assert bubble(timeline(table, each, 1.0, 2.0)) == pytest.approx(3 * (ranks - 1) / each)
    parallel = section(pipeline=ranks, stages_per_rank=each, schedule="interleaved")
    for rank, own in enumerate(table):
        assert live_micro_batches(parallel, rank, micro_batches) == most_live(own) / each
    split = section(pipeline=ranks, stages_per_rank=each, schedule="zb_h1")
    table = table_of(split, micro_batches)
    check_table(table, loop(ranks, each), micro_batches)
    assert bubble(timeline(table, each, 1.0, 2.0)) == pytest.approx((ranks - 1) / each)  # (p - 1) (F + I - W) / v
    for rank, own in enumerate(table):
        assert live_micro_batches(split, rank, micro_batches) == most_live(own) / each
    plain = one_forward_one_backward(ranks, micro_batches)
    check_table(plain, loop(ranks, 1), micro_batches)
    assert bubble(timeline(plain, 1, 1.0, 2.0)) == pytest.approx(3 * (ranks - 1))
    for rank, own in enumerate(plain):
        assert live_micro_batches(section(pipeline=ranks), rank, micro_batches) == most_live(own)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 7), (4, 8), (4, 19), (8, 16), (5, 40)])
def test_tables_in_a_v_are_torchs(ranks: int, micro_batches: int, schedule: str):
    """An overlapped pair of torch's is executed one after the other. If all parts take the same time, the bubble is
    the skew of the start, (p - 1) F / v."""
    known = SimpleNamespace(pp_group_size=ranks, _n_microbatches=micro_batches, num_stages=2 * ranks)
    name = {"zbv": "ScheduleZBVZeroBubble", "dualpipe_v": "ScheduleDualPipeV"}[schedule]
    make = getattr(torch_schedules, name)._calculate_single_rank_operations
    parallel = section(pipeline=ranks, stages_per_rank=2, schedule=schedule)
    table = table_of(parallel, micro_batches)
    check_table(table, ranks_of_stages(parallel), micro_batches)
    assert bubble(timeline(table, 2, 1.0, 2.0)) == pytest.approx(
        bubble_factor(parallel, micro_batches) * 3 * (ranks - 1)
    )
    assert bubble_factor(parallel, micro_batches) == pytest.approx(1 / 6)
    for rank, own in enumerate(table):
        theirs = [part for each in make(known, rank) if each is not None for part in each.sub_actions or (each,)]
        assert [str(it) for it in own] == [str(part) for part in theirs]
        assert live_micro_batches(parallel, rank, micro_batches) == most_live(own) / 2


COSTS = [(1, 1, 1), (1, 1, 0.8), (1, 1.1, 1), (1, 1.4, 0.7), (1, 2, 0.5), (1, 2.4, 0.7), (1, 1.2, 1.1), (1, 3, 0)]
COSTS += [(0.3, 2, 1.4), (2, 1, 1)]


@pytest.mark.parametrize(("schedule", "each"), [("zb_h1", 1), ("zb_h1", 3), ("zbv", 2), ("dualpipe_v", 2)])
def test_bubbles_of_unequal_parts(schedule: str, each: int):
    """Against executed tables, with a forward pass and both parts of a backward pass of any length."""
    for ranks, costs in itertools.product((2, 3, 4), map(Costs._make, COSTS)):
        for count in {ranks, 2 * ranks, 5 * ranks} if schedule != "dualpipe_v" else {2 * ranks, 5 * ranks}:
            parallel = section(pipeline=ranks, stages_per_rank=each, schedule=schedule)
            table, (forward, inputs, weights) = table_of(parallel, count), costs
            slots = timeline(table, each, forward, inputs + weights, weights)
            wanted = bubble(slots) / ((ranks - 1) * sum(costs))
            assert bubble_factor(parallel, count, costs) == pytest.approx(wanted), (ranks, count, costs)
            if schedule == "dualpipe_v" and costs.weights <= costs.forward:  # why a plan does not try it
                others = [section(pipeline=ranks, stages_per_rank=2, schedule=name) for name in ("zbv", "zb_h1")]
                assert wanted >= min(bubble_factor(other, count, costs) for other in others) - 1e-9


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 6])
def test_zbv_with_few_micro_batches(micro_batches: int):
    parallel = section(pipeline=4, stages_per_rank=2, schedule="zbv")
    table = table_of(parallel, micro_batches)
    check_table(table, ranks_of_stages(parallel), micro_batches)
    assert [most_live(own) / 2 for own in table] == [live_micro_batches(parallel, r, micro_batches) for r in range(4)]


def test_a_file_in_a_v(tmp_path: Path):
    """Its first rank has the last stage."""
    file = tmp_path / "v.csv"
    table = table_of(section(pipeline=2, stages_per_rank=2, schedule="zbv"), 4)
    file.write_text("\n".join(",".join(map(str, own)) for own in table))
    parallel = section(pipeline=2, stages_per_rank=2, schedule=str(file))
    assert ranks_of_stages(parallel) == [0, 1, 1, 0] and table_of(parallel, 4) == table
    assert resolve({**VALUES, "parallel": parallel.model_dump(exclude_unset=True), "training": BATCHES_OF_4}, ranks=2)


@pytest.mark.parametrize("homes", [[0, 1, 0, 1], [0, 1, 1, 0]])
def test_evaluation_has_every_forward_pass_once(homes: list[int]):
    made = rounds(forward_only(homes, 3), 4)
    done = [it for each in made for it in each.instructions if it is not None]
    assert sorted(done) == [Instruction(stage, FORWARD, micro) for stage in range(4) for micro in range(3)]


def orders(ranks: int, each: int, micro_batches: int) -> Iterator:
    """How often each rank may choose between instructions."""
    return st.lists(st.integers(0, 5), min_size=4 * each * micro_batches, max_size=4 * each * micro_batches * ranks)


def drawn_table(ranks: int, each: int, micro_batches: int, choices: list[int]) -> Table:
    """A legal table: in turn, each rank takes one of the instructions whose inputs exist."""
    stages, done, table = ranks * each, set[Instruction](), [list[Instruction]() for _ in range(ranks)]
    turn = 0
    while sum(map(len, table)) < 2 * stages * micro_batches:
        rank, ready = turn % ranks, []
        for stage in range(rank, stages, ranks):
            for kind in (FORWARD, BACKWARD):
                made = [it.micro_batch for it in done if it.stage == stage and it.kind == kind]
                it = Instruction(stage, kind, len(made))  # in the order of the micro-batches
                near = Instruction(stage - 1 if kind == FORWARD else stage + 1, kind, it.micro_batch)
                own = kind == FORWARD or it._replace(kind=FORWARD) in done
                if it.micro_batch < micro_batches and own and (near in done or not 0 <= near.stage < stages):
                    ready.append(it)
        if ready:
            it = ready[choices[turn % len(choices)] % len(ready)]
            table[rank].append(it)
            done.add(it)
        turn += 1
    return table


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_of_instructions_is_executed(data):
    """Each message has both ends in one round, after the instruction that makes it and before the one that needs it."""
    ranks, each, micro_batches = data.draw(st.sampled_from([(2, 1, 3), (2, 2, 4), (3, 2, 3), (4, 1, 4)]))
    table = drawn_table(ranks, each, micro_batches, data.draw(orders(ranks, each, micro_batches)))
    made = check_table(table, loop(ranks, each), micro_batches)
    for rank, own in enumerate(table):
        assert [it for one in made if (it := one.instructions[rank]) is not None] == own
    sent = [message.made for one in made for message in one.messages]
    assert len(sent) == len(set(sent)) == 2 * (ranks * each - 1) * micro_batches
    again = "\n".join(",".join(map(str, own)) for own in table)
    assert read_table(again, ranks) == table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n1F0,1B0,1F1,1B1", "rank 0: 0B1 must be there once, and is there 0 times"),
        ("0F0,0B0,0F1,0B1,0F1\n1F0,1B0,1F1,1B1", "rank 0: 0F1 must be there once, and is there 2 times"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,7F0", "rank 1: 7F0 must not be there"),
        ("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1", "backward passes of stage 0 must be in the order"),
        ("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1", "rank 0 waits for ever at 0B0|rank 1 waits for ever at 1B0"),
        ("0F1,0F0,0B0,0B1\n1F0,1F1,1B0,1B1", "rank 0: forward passes of stage 0 must be in the order"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1", "rank 1: forward passes of stage 1 must be in the order"),
        ("0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1I1", "rank 1: 1W1 must be there once, and is there 0 times"),
        ("0F0,0F1,0W0,0I0,0B1\n1F0,1B0,1F1,1B1", "rank 0 waits for ever at 0W0"),
        ("0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1B0,1F1,1B1", "backward passes of stage 0 must be in the order"),
        ("0F0,0F1,0B0,0B1", "one row per rank of the pipeline: 2, not 1"),
        ("0F0,0F1,0X0,0B1\n1F0", "row 1: '0X0' must be a stage, F, B, I or W, and a micro-batch"),
        ("0F99999999999999999999\n", "must be a stage, F, B, I or W"),
    ],
)
def test_what_cannot_be_executed_is_refused(text: str, says: str):
    with pytest.raises(ScheduleError, match=says):
        check_table(read_table(text, 2), [0, 1], 2)


VALUES = {
    "model": {"layers": "(attention/mlp) x4", "hidden_size": 32, "vocab_size": 96, "attention": {"heads": 4}},
    "training": {"steps": 1, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 4},
    "data": {"synthetic": "copy"},
}
BATCHES_OF_4 = {**VALUES["training"], "global_batch_size": 8}


def test_a_file_is_checked_before_the_start(tmp_path: Path):
    good, bad, split, stuck = (tmp_path / f"{name}.csv" for name in ("good", "bad", "split", "stuck"))
    stuck.write_text("\n0F0,0F1,0B0,0B1\n\n1B0,1F0,1F1,1B1\n")
    split.write_text("0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1B1\n")
    good.write_text("0F0, 0F1, , 0B0, 0B1\n1F0,1B0,1F1,1B1\n")
    bad.write_bytes(b"0F0,\xff\n1F0\n")
    values = {**VALUES, "parallel": {"pipeline": 2, "schedule": str(good)}}
    config = resolve(values, ranks=2)
    assert words(table_of(config.parallel, 2)[0]) == "0F0 0F1 0B0 0B1"
    for parallel, training, says in (
        ({"schedule": str(bad)}, {}, "must be a table for 2 ranks"),
        ({}, {"global_batch_size": 8}, "line 1, rank 0: 0B2 must be there once"),
        ({}, {"global_batch_size": 8}, r"use 2 micro-batches, which the table has \(training.global_batch_size=4\)"),
        ({"schedule": str(stuck)}, {}, "line 4, rank 1 waits for ever at 1B0, which needs 1F0"),
        ({"stages_per_rank": 2}, {}, "stages_per_rank=2 and 2 micro-batches"),
        ({"schedule": str(split)}, {"compile": "layer"}, "must go without compiled layers"),
    ):
        changed = {**values, "parallel": {**values["parallel"], **parallel}}
        changed["training"] = {**VALUES["training"], **training}
        with pytest.raises(ConfigError, match=says):
            resolve(changed, ranks=2)


@pytest.mark.parametrize("gpu", [False, True])
def test_more_kept_passes_than_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool):
    """All forward passes first: 16 on each of two ranks, whose outputs have 2 * 1024 * 32 numbers of 4 bytes. Their
    memory is certain. The inputs of two blocks per stage, weights and states make it a warning."""
    file, stream = tmp_path / "first.csv", 4 * 2 * 1024 * 32
    rows = [[f"{rank}{kind}{micro}" for kind in "FB" for micro in range(16)] for rank in range(2)]
    file.write_text("\n".join(map(",".join, rows)))
    training = {**VALUES["training"], "sequence_length": 1024, "global_batch_size": 32}
    values = {**VALUES, "training": training, "launch": {"device": "auto" if gpu else "cpu"}}
    monkeypatch.setattr(machine, "has_gpu", lambda: gpu)

    def found(room: int, schedule: str = str(file)) -> list[Problem]:
        monkeypatch.setattr(cost, "LARGEST_GPU", room if gpu else 1)
        monkeypatch.setattr(machine, "memory_bytes", lambda: 2 * room)
        source = ConfigSource({**values, "parallel": {"pipeline": 2, "schedule": schedule}})
        try:
            problems = combine([source], ranks=2).warnings
        except ConfigError as error:
            problems = error.problems
        return [each for each in problems if each.key == "parallel.schedule"]

    (problem,) = found(16 * stream - 1)
    assert problem.fatal and "rank 0 keeps 16 forward passes of its stages" in problem.rule
    assert problem.fix == "keep at most 15 of them: parallel.schedule=1f1b, with one stage per rank, keeps 2"
    (problem,) = found(16 * stream)
    assert not problem.fatal and problem.fix.startswith("keep at most 7 of them")
    assert not found(16 * stream, "1f1b")
    (problem,) = found(2 * stream - 1 if gpu else 3 * stream // 2 - 1, "1f1b")
    assert problem.fatal and problem.fix.endswith("that share a sequence (parallel.context)")


def test_memory_is_only_certain_where_the_device_is_known(monkeypatch: pytest.MonkeyPatch):
    """Two ranks keep 2 and 1 outputs of 256 KiB. With columns, four ranks keep halves of them."""
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 2**18)
    training = {**VALUES["training"], "sequence_length": 1024, "global_batch_size": 8}

    def found(device: str, **more: Any) -> list[bool]:
        changes = {"training": training, "launch": {"device": device}, "parallel": {"pipeline": 2, **more}}
        try:
            problems = combine([ConfigSource({**VALUES, **changes})], ranks=2 * more.get("columns", 1)).warnings
        except ConfigError as error:
            problems = error.problems
        return [each.fatal for each in problems if each.key == "parallel.schedule"]

    assert found("cpu") == [True] and found("auto") == [False]
    monkeypatch.setattr(machine, "memory_bytes", lambda: 3 * 2**18)
    assert found("cpu", columns=2) != [True]
    monkeypatch.setattr(machine, "memory_bytes", lambda: 3 * 2**18 - 1)
    assert found("cpu", columns=2) == [True]
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert not found("cpu")  # ranks of two machines
