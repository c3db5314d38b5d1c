"""Which instruction of a pipeline's table is blamed if a rank hangs in it, and which ones wait for it."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.config import resolve
from megatron.config.arithmetic.pipelines import FORWARD, Instruction
from megatron.config.sections.output import WatchSection
from megatron.config.variants import overlay
from megatron.engine.deepspeed.table import TableExecutor
from megatron.engine.engine import build_engine
from megatron.launch.agent.rank_probe import Sight
from megatron.launch.watch.diagnosis import diagnose, rank_of
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.watched import watched_collectives
from megatron.worker.beacon import Beacon
from tests.engine.deepspeed.test_table import values_of
from tests.training import runs
from tests.workers import run

LIMITS = {name: 0.0 for name, value in WatchSection().model_dump().items() if isinstance(value, float)}
HANGS = Instruction(0, FORWARD, 2)
CASES = [("asynchronous", 1, 0), ("zb_h1", 1, 2), ("interleaved", 2, 0), ("zbv", 2, 3)]


def stuck(values: list[dict[str, Any]], folder: Path) -> list[tuple[dict, bool]]:
    """Of each run, what the agent of this rank sees while rank 0 hangs, and whether calls are noted afterwards."""
    rank = int(os.environ["RANK"])
    return [once(each, folder / str(number), rank) for number, each in enumerate(values)]


def once(values: dict[str, Any], seen: Path, rank: int) -> tuple[dict, bool]:
    sight, config, found = Sight(rank), resolve(values, ranks=2), list[dict]()
    beacon, mesh = Beacon(sight.memory), Mesh.build(Layout.of(config, 2))
    engine = build_engine(config, mesh, "cpu", beacon=beacon)
    forward, after, hangs = TableExecutor._forward, time.monotonic() + 60, seen.with_suffix(".hangs")

    def hang(executor: Any, it: Instruction, *more: Any) -> None:
        while beacon._step == 1 and it == HANGS and not seen.exists() and time.monotonic() < after:
            hangs.touch()
            time.sleep(0.01)
            found[:] = [sight.tell(os.getpid(), True, LIMITS)]
        forward(executor, it, *more)

    def look() -> None:
        while rank and not seen.exists() and time.monotonic() < after:
            time.sleep(0.01)
            report = sight.tell(os.getpid(), True, LIMITS)
            if hangs.exists() and any(call["inside"] and call["age"] > 0.3 for call in report["calls"]):
                found.append(report)
                seen.touch()

    watcher = threading.Thread(target=look)
    watcher.start()
    with watched_collectives(beacon, mesh), mock.patch.object(TableExecutor, "_forward", hang):
        for step in range(3):
            beacon.begin(step)
            runs.steps(config, engine, step, 1)
            beacon.done()
    watcher.join()
    inside = beacon.inside
    beacon._words.release()
    sight.close()
    return found[-1], inside


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[dict, bool]]]:
    values = [
        overlay(values_of("fp32: gpt2 on pp2", schedule=name, stages_per_rank=each), {"zero": {"stage": zero}})
        for name, each, zero in CASES
    ]
    return run(2, stuck, values, tmp_path_factory.mktemp("hangs"))


@pytest.mark.parametrize("case", CASES, ids=[name for name, *_ in CASES])
def test_the_instruction_and_the_waiting_rank_are_named(reports, case: tuple[str, int, int]):
    """DeepSpeed's own schedule, whose messages are blocking calls, is in test_hangs.py."""
    ranks = [own[CASES.index(case)] for own in reports]
    assert not any(inside for _, inside in ranks)
    found = diagnose([rank_of(each, "here") for each, _ in ranks])
    assert found.culprits == (0,) and found.late, found.sentence
    waits = r"rank 1 waits in recv from rank 0 for \d[FBI]\d( since [\d.]+ s)?; "
    hangs = r"rank 0 is in forward of step 1 \(\d+ of \d+\): 0F2, stage 0, micro-batch 2( since [\d.]+ s)?"
    assert re.fullmatch(waits + hangs, found.sentence), found.sentence
