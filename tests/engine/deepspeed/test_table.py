"""Any table of instructions computes what DeepSpeed's own schedule does, bit for bit."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.config.arithmetic.pipeline_costs import bubble, live_micro_batches, most_live, timeline
from megatron.config.arithmetic.pipelines import (
    BACKWARD,
    FORWARD,
    Instruction,
    Message,
    Table,
    interleaved,
    one_forward_one_backward,
    table_of,
)
from megatron.config.variants import overlay
from megatron.engine.deepspeed.table import TableExecutor
from megatron.worker.beacon import Beacon
from tests.config.arithmetic.test_pipelines import drawn_table
from tests.selection import toured
from tests.training import runs
from tests.training.matrix import cases
from tests.workers import run

BF16 = {"precision": "bf16", "zero": {"stage": 1}}


def values_of(name: str, **parallel: Any) -> dict[str, Any]:
    case = next(case for case in cases() if case.name == name)
    return {**case.values, "parallel": {**case.values["parallel"], **parallel}}


def written(path: Path, table: Table) -> str:
    path.write_text("\n".join(",".join(map(str, own)) for own in table))
    return str(path)


def bits(values: dict[str, Any], ranks: int) -> list:
    found = run(ranks, runs.train, values, ranks)
    return [(*each[:3], [(one[0].name, one[-1].tobytes()) for one in each[3]]) for each in found]


@pytest.mark.parametrize("more", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layers", toured(["(attention/mlp) (attention/moe) x3", "(attention/mlp) x4"], "layouts"))
def test_our_1f1b_is_deepspeeds(layers: str, more: dict, tmp_path: Path):
    """Dropout, tied embeddings, experts and their tables: losses, norms, the evaluation and all weights."""
    model = {"model": {"layers": layers, "moe": {"experts": 4}}}
    values = overlay(overlay(values_of("fp32: gpt2 on pp2"), more), model)
    ours = overlay(values, {"parallel": {"schedule": written(tmp_path / "a.csv", one_forward_one_backward(2, 4))}})
    assert bits(ours, 2) == bits(values, 2)


@pytest.mark.parametrize("architecture", toured(["gpt2", "rwkv7"], "layouts"))
def test_no_schedule_changes_a_bit(architecture: str, tmp_path: Path):
    """Interleaved, all forward passes first, and in orders that were drawn."""
    values = values_of(f"fp32: {architecture} on pp2, two stages per rank")
    expected = bits(values, 2)
    forward_first = [sorted(own, key=forward_passes_first) for own in interleaved(2, 2, 4)]
    drawn = (drawn_table(2, 2, 4, random.Random(seed).choices(range(6), k=64)) for seed in (1, 2))
    for number, table in enumerate([forward_first, *drawn]):
        values["parallel"]["schedule"] = written(tmp_path / f"{number}.csv", table)
        assert bits(values, 2) == expected


def waiting_products(values: dict, ranks: int) -> tuple[int, int]:
    """Products of this rank that are split, and how many gradients of weights waited in a step."""
    config, engine = runs.start(values, ranks)
    later, counted = engine.table._later, list[int]()
    take = later.take
    later.take = lambda: counted.append(len(found := take())) or found
    data = engine.mesh.data
    engine.step(runs.local_batch(config, 0, data.rank, data.size), config.optimizer.lr)
    split = sum(getattr(module, "linear", None) == later.linear for module in engine.module.modules())
    return split, sum(counted)


def test_weights_wait_in_a_split_table():
    values = values_of("fp32: neox on pp2, zero bubble")
    for split, waited in run(2, waiting_products, values, 2):
        assert split == 2 * 5 and waited == 4 * split  # of two blocks, in four micro-batches


def delayed(values: dict, ranks: int, seed: int) -> tuple[list, list[str]]:
    """Results, and the order of a rank's passes, if each is late by a time that was drawn."""
    from megatron.engine.deepspeed.message_driven import MessageDriven

    execute, done = MessageDriven._execute, list[str]()

    def late(executor: Any, it: Instruction, *more: Any) -> None:
        time.sleep(random.Random(f"{seed} {it}").choice((0.0, 0.0, 0.1)))
        done.append(str(it))
        execute(executor, it, *more)

    with mock.patch.object(MessageDriven, "_execute", late):
        found = runs.train(values, ranks)
    return [*found[:3], [(one[0].name, one[-1].tobytes()) for one in found[3]]], done


@pytest.mark.parametrize("more", toured([{}, BF16], "layouts"), ids=["fp32", "bf16"])
def test_results_do_not_depend_on_the_order_of_arrival(more: dict):
    """Four stages: the bits of DeepSpeed's 1F1B, in other orders."""
    values = overlay(values_of("fp32: gpt2 on pp4"), more)
    expected = [list(each) for each in bits(values, 4)]
    driven, orders = overlay(values, {"parallel": {"schedule": "asynchronous"}}), set[str]()
    for seed in (1, 2):
        found = run(4, delayed, driven, 4, seed)
        assert [result for result, _ in found] == expected
        orders.add(" ".join(it for _, done in found for it in done))
    assert len(orders) == 2


EXECUTED = [
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb_h1", 1),
    ("zb_h1", 3),
    ("zbv", 2),
    ("dualpipe_v", 2),
]


def executed(values: dict, ranks: int, schedules: list[tuple[str, int]]) -> list[tuple[list[Instruction], int]]:
    """The instructions of this rank in a step of each schedule, and the most micro-batches of a stage that it kept."""
    found = []
    for schedule, each in schedules:
        parallel = {"schedule": schedule, "stages_per_rank": each}
        zero = {"stage": 2} if schedule == "1f1b" else {"stage": 0}  # at which 1F1B is a table too
        config, engine = runs.start(overlay(values, {"parallel": parallel, "zero": zero}), ranks)
        execute, done, live = TableExecutor._execute, list[Instruction](), list[int]()

        def noted(table: Any, it: Instruction, *more: Any, execute=execute, done=done, live=live) -> None:
            execute(table, it, *more)
            done.append(it)
            live.append(len(table._kept.keys() | table._waiting.keys()))

        with mock.patch.object(TableExecutor, "_execute", noted):
            engine.step(runs.local_batch(config, 0, 0, 1), config.optimizer.lr)
        found.append((done, max(live)))
    return found


def test_executed_bubbles_and_live_activations_are_those_of_the_formulas():
    """Four ranks, eight micro-batches. Each passes its own instructions on to a simulation with equal parts."""
    values = overlay(values_of("fp32: llama on pp4"), {"model": {"layers": "(attention/mlp) x12"}})
    values = overlay(values, {"training": {"micro_batch_size": 1}})
    of_ranks = run(4, executed, values, 4, EXECUTED)
    for number, (schedule, each) in enumerate(EXECUTED):
        parallel: Any = SimpleNamespace(pipeline=4, stages_per_rank=each, schedule=schedule)
        table = [own[number][0] for own in of_ranks]
        assert table == table_of(parallel, 8)
        waits = {"1f1b": 3, "interleaved": 3 / each, "zb_h1": 1 / each}.get(schedule, 1 / 2)  # for each rank before
        assert bubble(timeline(table, each)) == pytest.approx(3 * waits)
        for rank, (_, live) in enumerate(own[number] for own in of_ranks):
            assert live == most_live(table[rank]) == each * live_micro_batches(parallel, rank, 8)


def several(values: list[dict], ranks: int) -> list[list]:
    """Results of runs, one after another."""
    found = [runs.train(each, ranks) for each in values]
    return [[*each[:3], [(one[0].name, one[-1].tobytes()) for one in each[3]]] for each in found]


@pytest.mark.parametrize(("wire", "more"), toured([("top_k", {"zero": {"stage": 0}}), ("int8_block", BF16)], "layouts"))
def test_compressed_gradients_of_any_schedule(wire: str, more: dict):
    """With the same stages, the bits of 1F1B by DeepSpeed, or of another schedule: errors are fed back alike."""
    compress = {"parallel": {"communication": {"compress": {"data": wire}}}}
    values = overlay(overlay(values_of("fp32: llama on pp2 · dp2, ZeRO 1"), more), compress)
    values = overlay(values, {"training": {"micro_batch_size": 1}})
    alike = [[("1f1b", 1), ("zb_h1", 1), ("asynchronous", 1)], [("interleaved", 2), ("zb_h1", 2)]]
    for schedules in alike:
        made = [overlay(values, {"parallel": {"schedule": s, "stages_per_rank": each}}) for s, each in schedules]
        for expected, *others in run(4, several, made, 4):
            assert all(other == expected for other in others)


class Sent:
    """A message of gloo, which does not report its end."""

    done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.done = True


def test_memory_of_messages_is_freed_within_a_step():
    """On CPUs the oldest are waited for. On accelerators, only those are freed that have been received."""
    for device, left in (("cpu", range(12, 20)), ("cuda", range(20))):
        executor: Any = object.__new__(TableExecutor)
        executor._engine, executor._stages = SimpleNamespace(device=torch.device(device)), 2
        executor._beacon, executor._axis = Beacon(), SimpleNamespace(ranks=(0, 1))
        message = Message(Instruction(0, FORWARD, 0), 0, 1)
        executor._sent = [(torch.tensor(number), Sent(), message) for number in range(20)]
        executor._release_sent()
        assert [int(tensor) for tensor, *_ in executor._sent] == [*left]
        executor._sent[-1][1].wait()
        executor._release_sent()
        assert [int(tensor) for tensor, *_ in executor._sent] == [*left[:-1]]


def forward_passes_first(it: Instruction) -> tuple:
    return it.kind == BACKWARD, -it.stage if it.kind == BACKWARD else it.stage
