"""Reports of a rank during a step: each micro-batch and each layer where they take long, and all of them together where
they are brief."""

from __future__ import annotations

import mmap
from collections import Counter
from typing import Any

import pytest
import torch

from megatron.config import resolve
from megatron.engine.deepspeed.process import prepare_deepspeed
from megatron.engine.engine import build_engine
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.worker.beacon import HOOKS, SIZE, Beacon, read
from tests.training import matrix, runs
from tests.training.matrix import merged
from tests.workers import run

COUNT = 3  # micro-batches of a step
MATRIX = matrix.read()
LLAMA = merged(MATRIX["common"], {k: v for k, v in MATRIX["architectures"]["llama"].items() if k != "about"})
UPDATE = ("optimizer", COUNT, COUNT)
Told = tuple[str, int, int]  # phase, part, parts


def told(stage: int, reduce: str, brief: bool) -> list[Told]:
    """The phases of a step after the first one."""
    prepare_deepspeed(torch.device("cpu"))
    training = {"micro_batch_size": 1, "global_batch_size": 2 * COUNT}
    values = merged(LLAMA, {"zero": {"stage": stage, "reduce": reduce}, "training": training})
    config, memory, found = resolve(values, ranks=2), mmap.mmap(-1, SIZE), []
    beacon = Beacon(memory)
    engine = build_engine(config, Mesh.build(Layout.of(config, 2)), "cpu", beacon=beacon)
    runs.steps(config, engine, 0, 1)

    def hear(_: int) -> None:
        place = read(memory)
        assert place is not None
        found.append((place.phase, place.part, place.parts))

    beacon.told, beacon.brief = hear, brief
    runs.steps(config, engine, 1, 1)
    return found


def expected(stage: int, reduce: str, brief: bool) -> list[Told]:
    """Gradients are summed once where ZeRO keeps them whole until then, else after each micro-batch."""
    if brief:
        return [("forward", 0, 0), ("reduce", 0, 0), UPDATE]
    phases: list[Told] = []
    for number in range(1, COUNT + 1):
        phases += [("forward", number, COUNT), ("backward", number, COUNT)]
        if number == COUNT or (stage > 1 and reduce == "micro_batch"):
            phases.append(("reduce", 0, 0))
    return [*phases, UPDATE]


CASES: list[tuple[int, str]] = [(1, "micro_batch"), (2, "micro_batch"), (2, "step"), (3, "micro_batch"), (3, "step")]


def all_told() -> list[Any]:
    return [told(stage, reduce, brief) for stage, reduce in CASES for brief in (False, True)]


@pytest.fixture(scope="module")
def found() -> list[list[Any]]:
    return run(2, all_told)


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize(("stage", "reduce"), CASES)
def test_phases_of_a_step(found, stage, reduce, brief):
    for rank in found:
        assert rank[2 * CASES.index((stage, reduce)) + brief] == expected(stage, reduce, brief)


class Listener(Beacon):
    """Keeps the beacon that an agent would read after each report of a layer."""

    __slots__ = ("heard", "memory")

    def in_layer(self, index: int) -> None:
        super().in_layer(index)
        place = read(self.memory)
        assert place is not None
        self.heard.append((place.phase, place.part, place.layer))


def told_layers(pace: float, pipeline: int, **training: Any) -> tuple[list[Any], int]:
    """Of each pass of the second step, and where the rank is between two steps."""
    prepare_deepspeed(torch.device("cpu"))
    sizes = {"micro_batch_size": 1, "global_batch_size": COUNT * 2 // pipeline}
    more = {"zero": {"stage": 1}, "training": {**sizes, **training}, "parallel": {"pipeline": pipeline}}
    config, memory = resolve(merged(LLAMA, more), ranks=2), mmap.mmap(-1, SIZE)
    beacon = Listener(memory)
    beacon.heard, beacon.memory = [], memory
    engine = build_engine(config, Mesh.build(Layout.of(config, 2)), "cpu", beacon=beacon)
    runs.steps(config, engine, 0, 1)
    beacon.heard, beacon.pace = [], pace
    runs.steps(config, engine, 1, 1)
    heard, count, beacon.pace = beacon.heard, len(beacon.heard), 0.0
    runs.steps(config, engine, 2, 1)
    assert len(heard) == count, "brief layers are not told"
    beacon.at(HOOKS)
    place = read(memory)
    assert place is not None
    return heard, place.layer


def all_told_layers() -> list[Any]:
    recomputing = {"activation_checkpointing": {"mode": "full"}}
    cases: list[tuple[float, int, dict]] = [(9e9, 1, {}), (9e9, 1, recomputing), (9e9, 2, {}), (1e-9, 1, {})]
    return [told_layers(pace, pipeline, **training) for pace, pipeline, training in cases]


def test_layers_of_a_step() -> None:
    layers = list(range(4))
    assert LLAMA["model"]["layers"].endswith(f"x{len(layers)}")

    def passes(part: int, own: list[int]) -> list[Told]:
        return [("forward", part, each) for each in (*own, -1)] + [("backward", part, each) for each in reversed(own)]

    plain = [each for part in range(1, COUNT + 1) for each in passes(part, layers)]
    for rank, (apart, again, stages, brief) in enumerate(run(2, all_told_layers)):
        assert apart == (plain, -1) and again == (plain, -1), "also where the forward pass is computed again"
        assert brief == ([], -1)
        own = passes(0, layers[:2] if rank == 0 else layers[2:])
        assert Counter((phase, 0, layer) for phase, _, layer in stages[0]) == Counter(own * COUNT) and stages[1] == -1
