#!/usr/bin/env python
"""Measure what watching a run costs.

Blocks of steps take turns with every watcher on, and with all off.

    python tools/bench/watchers.py a.yml key.path=value ... [--ranks 2] [--rounds 20] [--hashes 100] [--json]

On are: where each rank is, for its agent (`watch`), the times of ranks (`watch.slow`, every 10 steps), the decision
about each update (`spikes.action: report`), and hashes of the state (`training.hashes`). Blocks of 20 steps of one run
take turns, so that a change of the machine's load meets all; which comes first changes from round to round.

In blocks of the first two kinds watchers are off or on, and what is compared is the processor time of all threads of
all ranks: others may use the processors too. In a block hashes are taken once; a run that takes them every `--hashes`
steps has that share of what they cost. What stays on in all is the wrapper of torch's collectives, which then does
nothing. Where the processors are busy with other work, this difference drowns in the spread of the steps.

In blocks of the third kind the calls of each watcher are counted and timed; in the fourth kind calls that do nothing
are timed in their places, and taken off. What is left are the "parts". Calls that wait for others count by the
processor time of all the rank's threads, as the median of blocks. Those of `watch` and `spikes` do not wait, and last
for microseconds, in which the clock of the processor would be seen above all: they count by the wall clock, as the
median of steps, so that an interrupt in one of them changes nothing. Parts do not see what a watcher does to others,
such as to a cache.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from megatron.config import split_arguments  # noqa: E402
from megatron.launch.command_line import main as launch  # noqa: E402
from megatron.training.hook import Hook  # noqa: E402
from megatron.training.hooks.hashes import HashesHook  # noqa: E402
from megatron.training.hooks.slow import SlowRanksHook  # noqa: E402
from megatron.training.hooks.spikes import SpikesHook  # noqa: E402

if TYPE_CHECKING:
    from megatron.engine.protocol import Engine
    from megatron.training.trainer import Trainer

BLOCK = 20  # steps of a turn, after which `watch.slow` has exchanged as many windows as it does at once
MODES = OFF, ON, TIMED, EMPTY = "off", "on", "timed", "empty"
WARM = len(MODES) * BLOCK  # steps before the first that counts
TOLD = ("at", "enter", "wait", "leave")  # what a beacon is told
SHORT = ("watch", "spikes")  # whose calls do not wait
HOOKS = {"watch.slow": SlowRanksHook, "training.hashes": HashesHook, "spikes": SpikesHook}


def mode(step: int) -> str:
    """Of the block of a step: each kind once in a round, another one first in each round."""
    round_, turn = divmod(step // BLOCK, len(MODES))
    return MODES[(turn + round_) % len(MODES)]


@dataclass
class WatcherCost:
    """What the calls of a watcher took on a rank, in the step or the block at work."""

    seconds: float = 0.0
    calls: int = 0

    def timed(self, function: Callable[..., Any], clock: Callable[[], float], sign: int = 1) -> Callable[..., Any]:
        """The function, whose calls count; with the sign -1 their time is taken off: it would have passed anyway."""

        def call(*arguments: Any, **options: Any) -> Any:
            begin = clock()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += sign * (clock() - begin)
                self.calls += max(sign, 0)

        return call

    def taken(self) -> list[float]:
        """[seconds, calls] of what has ended."""
        found = [self.seconds, self.calls]
        self.seconds, self.calls = 0.0, 0
        return found


class WatcherTurns(Hook):
    """Turns watchers off and on, and takes the processor time of each block.

    Args:
        output: file for {"blocks": [[mode, seconds, seconds of hashes], ...], "parts": {watcher: {mode: [[seconds,
            calls], ...]}}}, of timed and of empty blocks, or of their steps; one file for each rank.
    """

    def __init__(self, output: str) -> None:
        self._output, self._found, self._hashing = Path(output), list[list[Any]](), WatcherCost()
        self._parts = {name: WatcherCost() for name in ("watch", *HOOKS)}
        self._taken: dict[str, dict[str, list[list[float]]]] = {name: {TIMED: [], EMPTY: []} for name in self._parts}
        self._begun: tuple[str, float] | None = None
        self._all: list[Hook] = []
        self._changed: list[tuple[Any, str, Any]] = []

    def on_start(self, trainer: Trainer) -> None:
        self._all = list(trainer.hooks)

    def before_step(self, trainer: Trainer, step: int) -> None:
        self._take(SHORT)
        if step % BLOCK:
            return
        self._end()
        now, watchers = mode(step), tuple(HOOKS.values())
        gate = getattr(trainer.engine, "gate")  # noqa: B009  (the protocol does not have it)
        gate._judges = now in (ON, TIMED)
        trainer.hooks = [hook for hook in self._all if now != OFF or not isinstance(hook, watchers)]
        for hook in self._all:
            if isinstance(hook, HashesHook) and now == ON:
                self._change(hook, "after_step", self._hashing.timed(hook.after_step, time.process_time))
        for name in TOLD:
            if now == OFF:
                self._change(trainer.beacon, name, _nothing)
            elif now != ON:
                function = getattr(trainer.beacon, name) if now == TIMED else _nothing
                self._change(trainer.beacon, name, self._parts["watch"].timed(function, time.perf_counter))
        if now in (TIMED, EMPTY):
            self._time(trainer.engine, gate, now)
        self._begun = (now, time.process_time())

    def on_end(self, trainer: Trainer) -> None:
        self._end()
        found = {"blocks": self._found, "parts": self._taken}
        self._output.with_suffix(f".{trainer.mesh.rank}").write_text(json.dumps(found))

    def _end(self) -> None:
        if self._begun is not None:
            now, begin = self._begun
            self._take([name for name in self._parts if name not in SHORT])
            self._found.append([now, time.process_time() - begin, self._hashing.seconds])
        self._begun, self._hashing.seconds = None, 0.0
        while self._changed:
            changed, name, old = self._changed.pop()
            if old is None:
                del vars(changed)[name]
            else:
                vars(changed)[name] = old

    def _take(self, names: Iterable[str]) -> None:
        """What these watchers took in the step, or the block, that has ended."""
        for name in names:
            taken = self._parts[name].taken()
            if self._begun is not None and self._begun[0] in (TIMED, EMPTY) and len(self._found) >= WARM // BLOCK:
                self._taken[name][self._begun[0]].append(taken)

    def _change(self, what: Any, name: str, new: Callable[..., Any]) -> None:
        self._changed.append((what, name, vars(what).get(name)))
        vars(what)[name] = new

    def _time(self, engine: Engine, gate: Any, now: str) -> None:
        """Have the calls of hooks and of the gate counted; in empty blocks those that do nothing instead of them."""
        spikes = self._parts["spikes"]  # which have the step's numbers exchanged a little earlier
        self._change(gate, "_decide", spikes.timed(gate._decide, time.perf_counter))
        if now == TIMED:
            self._change(gate, "meet", spikes.timed(gate.meet, time.perf_counter, -1))
        # which need not compute the loss any more, where the gate has done so
        self._change(engine, "_result", spikes.timed(getattr(engine, "_result"), time.perf_counter))  # noqa: B009
        for name, kind in HOOKS.items():
            clock = time.perf_counter if name in SHORT else time.process_time
            for hook in (each for each in self._all if isinstance(each, kind)):
                for point in ("before_step", "after_step", "on_numbers"):
                    function = getattr(hook, point) if now == TIMED else _nothing
                    self._change(hook, point, self._parts[name].timed(function, clock))


def _nothing(*arguments: Any, **options: Any) -> None:
    """In the place of what tells where a rank is."""


def shares(ranks: list[list[list[Any]]], every: int) -> list[float]:
    """What watchers add to a step, as a share of it, of each round.

    Args:
        ranks: of each rank, [mode, seconds, seconds of hashes] of its blocks.
        every: steps between hashes.
    """
    blocks = [
        (turns[0][0], sum(each[1] for each in turns), sum(each[2] for each in turns))
        for turns in zip(*ranks, strict=True)
    ][WARM // BLOCK :]
    found = []
    for at in range(0, len(blocks) - len(MODES) + 1, len(MODES)):
        round_ = {name: (seconds, hashing) for name, seconds, hashing in blocks[at : at + len(MODES)]}
        seconds, hashing = round_[ON]
        found.append((seconds - hashing * (1 - BLOCK / every)) / round_[OFF][0] - 1)
    return found


def parts_of(ranks: list[dict[str, dict[str, list[list[float]]]]], every: int) -> dict[str, dict[str, float]]:
    """Of each watcher the calls and seconds in a step, over all ranks: medians of steps or blocks.

    Args:
        ranks: of each rank, [seconds, calls] of each watcher's timed blocks and empty ones, or of their steps.
        every: steps between hashes, of which a block has one.
    """

    def median(taken: list[list[float]], index: int) -> float:
        return statistics.median(each[index] for each in taken)

    found = {}
    for name in ranks[0]:
        steps = 1 if name in SHORT else BLOCK
        seconds = sum(median(each[name][TIMED], 0) - median(each[name][EMPTY], 0) for each in ranks) / steps
        calls = sum(median(each[name][TIMED], 1) for each in ranks) / steps
        found[name] = {"seconds": seconds * BLOCK / every if name == "training.hashes" else seconds, "calls": calls}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Train, and print what watchers add."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="a.yml", help="files and overrides of the run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hashes", type=int, default=100, help="steps between hashes")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_intermixed_args(arguments)
    if options.rounds < 2 or options.hashes < BLOCK:
        parser.error(f"--rounds must be at least 2, and --hashes at least {BLOCK}")
    files, overrides = split_arguments(options.sources)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "turns")
        steps = WARM + len(MODES) * BLOCK * options.rounds
        own = [f"run.dir={folder}/run", f"training.steps={steps}", "spikes.action=report", f"training.hashes={BLOCK}"]
        own += ["checkpoint.at_end=false", "checkpoint.every=null", "evaluation.at_end=false"]
        own += ["logging.console=quiet", "logging.curve=false"]
        own.append(f"hooks=[{{type: 'tools.bench.watchers:WatcherTurns', options: {{output: '{output}'}}}}]")
        os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
        script = str(Path(__file__).resolve().parents[2] / "train.py")
        if status := launch(["--ranks", str(options.ranks), script, *files, *overrides, *own]):
            return status
        ranks = [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(options.ranks)]
    result = _result(ranks, options.rounds, options.hashes)
    print(json.dumps(result) if options.json else _text(result))
    return 0


def _result(ranks: list[dict[str, Any]], rounds: int, every: int) -> dict[str, Any]:
    blocks = [each["blocks"] for each in ranks]
    found = shares(blocks, every)
    off = [sum(each[1] for each in turns) for turns in zip(*blocks, strict=True) if turns[0][0] == OFF]
    parts = parts_of([each["parts"] for each in ranks], every)
    low, middle, high = statistics.quantiles(found, n=4)
    step = statistics.median(off) / BLOCK
    return {
        "ranks": len(ranks), "rounds": rounds, "hashes": every, "added": middle, "quartiles": [low, high],
        "step_processor_seconds": step, "parts": parts,
        "added_by_parts": sum(each["seconds"] for each in parts.values()) / step,
    }  # fmt: skip


def _text(result: dict[str, Any]) -> str:
    step, (low, high) = result["step_processor_seconds"], result["quartiles"]
    lines = [
        f"{result['ranks']} ranks, {result['rounds']} rounds of {len(MODES) * BLOCK} steps; a step without watchers "
        f"takes {1e3 * step:.1f} ms of processor time over all ranks",
        f"blocks with watchers take {result['added']:.2%} more ({low:.2%} to {high:.2%} in half of the rounds)",
        f"inside the watchers' own calls: {result['added_by_parts']:.2%}",
        f"{'watcher':16} {'calls a step':>12} {'us a step':>10} {'of it':>7}",
    ]
    for name, part in result["parts"].items():
        seconds = part["seconds"]
        lines.append(f"{name:16} {part['calls']:12.1f} {1e6 * seconds:10.1f} {seconds / step:7.2%}")
    return "\n".join(lines)


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
