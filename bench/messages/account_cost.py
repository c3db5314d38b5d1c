"""Measure what counting and timing messages costs a run.

Its steps take turns without the account, with counts, and with times.

    python -m bench account-cost a.yml key.path=value ... [--ranks 2] [--rounds 100] [--json]

Each turn is a whole step with all that comes after it, on the same ranks in the same run. A change of the machine's
load therefore meets all three. The order of the three changes from round to round. Each ratio is taken within one
round, and reported are the median and the quartiles. Of each step the seconds of the clock are taken, and the processor
time of rank 0's main thread, which waiting for others does not add to. Before the run, blocks of small all-reduces are
measured in the same way. The cost of an account per message, times the messages of a step, is its share without the
noise of steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench.runner import Result, in_folder, run_with_hook, share
from megatron.config.problems import UserError
from megatron.parallel.messages.account import Recorder
from megatron.parallel.messages.timing import HostClock
from megatron.training.hook import Hook
from megatron.training.hooks.communication import CommunicationHook

if TYPE_CHECKING:
    from megatron.training.exchange import StepReport
    from megatron.training.trainer import Trainer

WAYS = ("off", "counts", "times")
FIRST = 6  # steps before the first that counts
BLOCK, BLOCKS = 100, 40  # all-reduces of a turn, and rounds of them


def way_of(step: int) -> str:
    """Which turn a step is: the first of a round is another one in each round."""
    round_, turn = divmod(step, len(WAYS))
    return WAYS[(turn + round_) % len(WAYS)]


class AccountTurns(Hook):
    """Counts each step, times it, or does neither, and takes the time of each.

    Args:
        output: file for rank 0's list of [way, seconds, processor seconds].
    """

    def __init__(self, output: str) -> None:
        self._output = Path(output)
        self._found: list[list[Any]] = []
        self._blocks: list[list[Any]] = []
        self._messages = 0
        self._hook: CommunicationHook | None = None
        self._begun = (0.0, 0.0)

    def on_start(self, trainer: Trainer) -> None:
        one = torch.ones(1)
        for turn in range(BLOCKS * len(WAYS)):
            way = way_of(turn)
            recorder = None if way == "off" else Recorder(trainer.mesh, HostClock() if way == "times" else None)
            if recorder is not None:
                recorder.install()
                if recorder.timer is not None:
                    recorder.timer.active = True
            wall, begun = time.perf_counter(), time.thread_time()
            for _ in range(BLOCK):
                dist.all_reduce(one)
            self._blocks.append([way, (time.perf_counter() - wall) / BLOCK, (time.thread_time() - begun) / BLOCK])
            if recorder is not None:
                recorder.remove()

    def before_step(self, trainer: Trainer, step: int) -> None:
        self._leave(trainer)
        way = way_of(step)
        if way != "off":
            self._hook = CommunicationHook(trainer.config.run.dir, 1, timed=way == "times")
            self._hook.on_start(trainer)  # a run does that once, and compares clocks once in a hundred steps
            self._hook.before_step(trainer, step)
        self._begun = (time.perf_counter(), time.thread_time())

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        if self._hook is not None:
            self._hook.on_numbers(trainer, report)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if self._hook is not None:
            self._hook.after_step(trainer, step, report)
            groups = trainer.extra_metrics["communication"].values()
            self._messages = sum(each["messages"] for operations in groups for each in operations.values())
        wall, processor = self._begun
        self._found.append([way_of(step), time.perf_counter() - wall, time.thread_time() - processor])

    def on_end(self, trainer: Trainer) -> None:
        self._leave(trainer)
        if trainer.is_main:
            facts = {"steps": self._found, "blocks": self._blocks, "messages": self._messages}
            self._output.write_text(json.dumps(facts))

    def _leave(self, trainer: Trainer) -> None:
        """Leave torch as it was."""
        if self._hook is not None:
            self._hook.on_end(trainer)
            self._hook = None


def ratios(found: list[list[Any]], column: int) -> dict[str, tuple[float, float, float]]:
    """Way -> (median, first quartile, third quartile) of its share of the step without an account, by rounds."""
    rounds = [found[at : at + len(WAYS)] for at in range(FIRST, len(found) - len(WAYS) + 1, len(WAYS))]
    times = [{each[0]: each[column] for each in turns} for turns in rounds]
    shares = {way: [each[way] / each["off"] for each in times] for way in WAYS[1:]}
    quartiles = {way: statistics.quantiles(each, n=4) for way, each in shares.items()}
    return {way: (middle, low, high) for way, (low, middle, high) in quartiles.items()}


def added(blocks: list[list[Any]]) -> dict[str, tuple[float, float, float]]:
    """Way -> (median, first quartile, third quartile) of the processor seconds that it adds to a message, by rounds."""
    rounds = [{each[0]: each[2] for each in blocks[at : at + len(WAYS)]} for at in range(0, len(blocks), len(WAYS))]
    found = {way: statistics.quantiles([each[way] - each["off"] for each in rounds], n=4) for way in WAYS[1:]}
    return {way: (middle, low, high) for way, (low, middle, high) in found.items()}


def options(parser: argparse.ArgumentParser) -> None:
    share(parser, "sources", "--ranks", "--rounds", rounds=100)


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    """Train, and compare the steps of each round."""
    if given.rounds < 2:
        raise UserError("--rounds must be at least 2")
    output, steps = folder / "turns.json", FIRST + given.rounds * len(WAYS)
    own = [f"run.dir={folder}/run", f"training.steps={steps}", "logging.communication=off", "logging.every=1"]
    run_with_hook(given, "bench.messages.account_cost:AccountTurns", {"output": str(output)}, own)
    facts = json.loads(output.read_text())
    found = facts["steps"]
    result = {"ranks": given.ranks, "rounds": given.rounds, "clock": ratios(found, 1), "processor": ratios(found, 2)}
    result |= {"added": added(facts["blocks"]), "messages": facts["messages"]}
    result["step_seconds"] = statistics.median(each[1] for each in found if each[0] == "off")
    return Result(result, _text(result))


def _text(result: dict[str, Any]) -> str:
    whole = f"a step without an account takes {result['step_seconds']:.3f} s"
    lines = [f"{result['ranks']} ranks, {result['rounds']} rounds, {whole}"]
    for name in ("clock", "processor"):
        for way, (middle, low, high) in result[name].items():
            lines.append(f"{way:6}  {name:9}  {middle:.4f} of it ({low:.4f} to {high:.4f} in half of the rounds)")
    for way, (middle, low, high) in result["added"].items():
        share_of_step = result["messages"] * middle / result["step_seconds"]
        added_us = f"{1e6 * middle:.1f} us to a message ({1e6 * low:.1f} to {1e6 * high:.1f})"
        lines.append(f"{way:6}  adds {added_us}: {share_of_step:.2%} of a step with {result['messages']} messages")
    return "\n".join(lines)
