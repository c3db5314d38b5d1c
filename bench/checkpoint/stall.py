"""Measure for how long training stands still at a save, and what for.

    python -m bench stall a.yml key.path=value ... [--ranks 2] [--every 20] [--saves 10] [--json]

One run saves every `--every` steps, in the background unless the configuration says otherwise. The stall of a save is
all that the step waits for:

- the end of the save before, where that still runs
- the check that the values are finite
- the ranks' exchange, which shows whether any has found something
- the saver's call, which copies to host memory (or writes) and contains the first wait

Each is given as the median over saves of the slowest rank, by the clock and as processor time of the rank's main
thread. The share is of all stalls in the time of the steps. The first save is not counted: it is one of a run that has
not settled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.runner import Result, in_folder, run_with_hook, share
from megatron.config.problems import UserError
from megatron.training.hook import Hook
from megatron.training.hooks.checkpoint import CheckpointHook

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

WHOLE, BEFORE, LOOK, MEET, SAVE = "whole", "the save before", "look at values", "meeting of ranks", "the saver's call"
PARTS = (WHOLE, BEFORE, LOOK, MEET, SAVE)
CLOCKS = (time.perf_counter, time.thread_time)


class SaveParts(Hook):
    """Times the parts of each save on every rank, and writes JSON into `output` in the end.

    Args:
        output: path, to which the rank is added.
    """

    def __init__(self, output: str) -> None:
        self._output, self._inside = Path(output), False
        self._saves: list[dict[str, list[float]]] = []
        self._at: list[float] = []  # when each save began

    def on_start(self, trainer: Trainer) -> None:
        hook: Any = next(each for each in trainer.hooks if isinstance(each, CheckpointHook))
        saver, exchange, whole = hook._saver, trainer.exchange, hook._save_if_due
        for owner, name, part in ((saver, "_settle", BEFORE), (exchange, "sum", MEET), (hook, "_inspect", LOOK)):
            setattr(owner, name, self._timed(getattr(owner, name), part))
        saver.save = self._timed(saver.save, SAVE)

        def save_if_due(trainer: Trainer) -> None:
            known, self._inside = hook._saved_step, True
            self._saves.append({})
            self._at.append(time.perf_counter())
            self._timed(whole, WHOLE)(trainer)
            self._inside = False
            if hook._saved_step == known:
                self._saves.pop()
                self._at.pop()

        hook._save_if_due = save_if_due

    def on_end(self, trainer: Trainer) -> None:
        found = {"saves": self._saves, "at": self._at}
        self._output.with_suffix(f".{trainer.mesh.rank}").write_text(json.dumps(found))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = [clock() for clock in CLOCKS]
            try:
                return function(*arguments, **options)
            finally:
                if self._inside:
                    now = self._saves[-1].setdefault(part, [0.0] * len(CLOCKS))
                    for place, clock in enumerate(CLOCKS):
                        now[place] += clock() - begin[place]

        return call


def options(parser: argparse.ArgumentParser) -> None:
    share(parser, "sources", "--ranks")
    parser.add_argument("--every", type=int, default=20, help="steps between saves")
    parser.add_argument("--saves", type=int, default=10)


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    if given.ranks < 1 or given.every < 1 or given.saves < 3:
        raise UserError("--ranks and --every must be at least 1, and --saves at least 3")
    output, steps = folder / "parts", given.every * (given.saves + 1) + 1
    own = [f"run.dir={folder}/run", f"training.steps={steps}", f"checkpoint.every={given.every}"]
    own += ["checkpoint.at_end=false", "checkpoint.log_spaced=false", "checkpoint.keep_last=2"]
    given.sources = ["checkpoint.asynchronous=true", *given.sources]  # unless a later override says otherwise
    own.append("evaluation.at_end=false")
    run_with_hook(given, "bench.checkpoint.stall:SaveParts", {"output": str(output)}, own, quiet=True)
    result = summary([json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(given.ranks)])
    return Result(result, _text(result, given.every))


def summary(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results over all ranks: of each part [clock, processor] in seconds, and the share of the stalls.

    The first save does not count. The time of the steps ends where the last one begins.
    """
    saves = list(zip(*(each["saves"][1:] for each in ranks), strict=True))
    found: dict[str, Any] = {}
    for part in PARTS:
        slowest = [[max(rank.get(part, (0.0, 0.0))[place] for rank in save) for save in saves] for place in (0, 1)]
        found[part] = [statistics.median(each) for each in slowest]
    stalls = [sum(save[WHOLE][0] for save in each["saves"][1:-1]) for each in ranks]
    seconds = ranks[0]["at"][-1] - ranks[0]["at"][1]
    return {"saves": len(saves), "parts": found, "seconds": seconds, "share": max(stalls) / seconds}


def _text(result: dict[str, Any], every: int) -> str:
    lines = [f"{'ms of a save':18} {'clock':>8} {'processor':>10}"]
    for part, seconds in result["parts"].items():
        lines.append(f"{part:18} {1e3 * seconds[0]:8.1f} {1e3 * seconds[1]:10.1f}")
    lines.append(f"stalls are {result['share']:.2%} of the steps' time, with a save every {every} steps")
    return "\n".join(lines)
