"""Times of a real engine's steps on gloo ranks, for plan_table.py and plan_choice.py.

Each step has two: what a clock on the wall says, and the processor time of the rank that used most. On a quiet machine
with a core for each rank the first is what a user waits. The second hardly depends on the machine's other work. It
excludes the time that a rank waits for others, such as a pipeline's bubble.

A machine's load changes over minutes, so a time is taken in rounds: each round takes every case once. A round's figure
is the median of its steps, and a time is the median of the rounds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron.config import Config
from megatron.testing.ranks import on_ranks

CLOCKS = ("wall", "cpu")
WARM_UP = 4  # steps


def timed(config: Config, ranks: int, steps: int) -> list[tuple[float, float]]:
    """On gloo ranks: seconds of each step after the first ones, by the clock and of this rank's processor."""
    import torch

    from megatron.data.loader import build_loader
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    mesh = Mesh.build(Layout.of(config, ranks))
    prepare_deepspeed(torch.device("cpu"))
    engine, found = build_engine(config, mesh, torch.device("cpu")), []
    loader = build_loader(config, data_rank=mesh.data.rank, data_ranks=mesh.data.size)
    try:
        for step in range(WARM_UP + steps):
            batch = loader.step(step)
            begin, used = time.perf_counter(), time.process_time()
            engine.step(batch, config.optimizer.lr)
            found.append((time.perf_counter() - begin, time.process_time() - used))
    finally:
        loader.close()
    return found[WARM_UP:]


def round_of(config: Config, ranks: int, steps: int) -> dict[str, float]:
    """Seconds of a step by both clocks: the median over steps of the rank that took longest.

    Raises:
        RuntimeError, TimeoutError: a rank failed.
    """
    found = on_ranks(ranks, timed, config, ranks, steps)
    pairs = [[max(values) for values in zip(*each)] for each in zip(*found)]
    return {clock: median(each[place] for each in pairs) for place, clock in enumerate(CLOCKS)}


def seconds(rounds: Sequence[dict[str, float]], clock: str) -> float:
    """Of a step, over all rounds."""
    return median(each[clock] for each in rounds)


def spread(rounds: Sequence[dict[str, float]], clock: str) -> float:
    """How far rounds are apart: the longest over the shortest, less 1."""
    times = [each[clock] for each in rounds]
    return max(times) / min(times) - 1


class Rounds:
    """Rounds of cases by name, with the settings that they were taken with, in a file that is written after each.

    Args:
        path: the file. Its rounds are kept. None keeps nothing.
        until: on the monotonic clock. No case is begun after it.
    """

    def __init__(self, path: Path | None, until: float) -> None:
        self.path, self.until = path, until
        self.found: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self.found = json.loads(path.read_text(encoding="utf-8"))

    def take(
        self, cases: Mapping[str, Mapping[str, Any]], measure: Callable[[str], dict[str, float]], rounds: int
    ) -> None:
        """Take rounds, one of every case after the other, until each case has its number. Rounds of a failed case stay
        empty.

        Args:
            cases: by name, what decides their figures, as JSON has it. Rounds of other settings are taken again.
        """
        for name, settings in cases.items():
            if not isinstance(known := self.found.get(name), dict) or known.get("settings") != settings:
                self.found[name] = {"settings": dict(settings), "rounds": []}
        failed = set[str]()
        for number in range(1, rounds + 1):
            for name in cases:
                own = self.found[name]["rounds"]
                if len(own) >= number or name in failed or time.monotonic() > self.until:
                    continue
                try:
                    own.append(measure(name))
                except (RuntimeError, TimeoutError) as error:
                    failed.add(name)
                    reason = str(error).strip().splitlines() or [type(error).__name__]
                    print(f"{name}: {reason[-1]}", file=sys.stderr, flush=True)
                    continue
                print(f"round {number}, {name}: {json.dumps(own[-1])}", file=sys.stderr, flush=True)
                self.keep()

    def keep(self) -> None:
        """All of them, or what was there before."""
        if self.path is not None:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
            new.replace(self.path)

    def whole(self, name: str, rounds: int) -> list[dict[str, float]]:
        """A case's rounds, empty if it has fewer."""
        own: list[dict[str, float]] = self.found[name]["rounds"]
        return own if len(own) >= rounds else []
