"""Measure what watching a run costs.

One run in which watchers are switched on for one of two neighbouring steps, and are off in the other.

    python -m bench watchers a.yml key.path=value ... [--ranks 2] [--rounds 100] [--hashes 100] [--json]

On are: where each rank is, for its agent (`watch`), the times of ranks (`watch.slow`), the decision about each update
(`spikes.action: report`), and hashes of the state (`training.hashes`). Off means that none of their code runs: the
beacon's methods do nothing, torch's collectives are torch's own, the engine has no gate, and the hooks are not called.

**Pairs.** Which step of a pair is watched is drawn at random. The difference of the two counts, because a load that
comes and goes meets both. Reported is the trimmed mean over all pairs, without a fifth at either end. Its interval
holds 19 of 20 draws from the pairs (bootstrap). Both clocks are given: the processor time of all threads of all ranks,
and the wall time. Most pairs are of steps in which no window ends. Some work comes once in many steps: a window's times
are exchanged, the state is hashed. It is measured in pairs of its own, and counts as often as a run has it, every
`watch.slow.every` and `--hashes` steps. In one pair of seven both steps are off. Their difference must be 0, and their
interval is the resolution of the whole method.

Three costs are not included. The first is the effect of watching on a later step: each pair begins with the caches of
the one before, watched or not. The others are the start of the run, and the agent, a process of its own for each host,
which reads the beacons and sends a heartbeat. Its processor time, with all else that it does, is given apart.

**Parts.** Then come blocks of 20 steps, in turns. In some, the calls of each watcher are counted and timed. In others,
calls that do nothing are timed in their places, and their times are subtracted. Calls that wait for others count by the
processor time of all the rank's threads, as the median of blocks. Calls of `watch` and `spikes` do not wait, and last
for microseconds, so reading the processor's clock would dominate. They count by the wall clock, as the median of steps,
so that an interrupt in one of them changes nothing. Parts do not see the functions around torch's collectives, nor what
a watcher does to others, such as to a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.runner import Result, in_folder, run_with_hook, share
from megatron.config.problems import UserError
from megatron.features.integrity.hook import HashesHook
from megatron.features.spikes.hook import SpikesHook
from megatron.parallel.messages import watched
from megatron.training.hook import Hook
from megatron.training.hooks.slow import SlowRanksHook
from megatron.worker.beacon import Beacon

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

OFF, NONE, ON, WINDOW, HASHES = "off", "none", "on", "window", "hashes"
TIMED, EMPTY = "timed", "empty"
ROUND = (
    *[ON] * 15,
    WINDOW,
    HASHES,
    *[NONE] * 3,
)  # kind of the step that each pair of a round compares with one that is off
BLOCK = 20  # steps of a block of parts
WARM = [*[ON] * 20, WINDOW, HASHES, *[OFF, ON] * 10]  # before the first step that counts
WINDOWS = 10  # steps of `watch.slow`
NEVER, TRIM, DRAWS, SEED = 10**9, 0.2, 1000, 19
TOLD = ("at", "enter", "wait", "leave")  # calls of a beacon
SHORT = ("watch", "spikes")  # whose calls do not wait
HOOKS = {"watch.slow": SlowRanksHook, "training.hashes": HashesHook, "spikes": SpikesHook}


def plan(rounds: int, blocks: int) -> list[str]:
    """The kind of each step: the first ones, pairs, equal numbers of blocks of both kinds, and one that ends them."""
    draw, steps = random.Random(SEED), list(WARM)
    for _ in range(rounds):
        for kind in draw.sample(ROUND, len(ROUND)):
            steps += draw.sample([OFF, kind], 2)
    return [*steps, *([TIMED] * BLOCK + [EMPTY] * BLOCK) * blocks, OFF]


class SilentBeacon(Beacon):
    """One without a listener, as in a run without `watch`."""

    __slots__ = ()

    def at(self, phase: int, part: int = 0, parts: int = 0, detail: bytes = b"") -> None: ...
    def begin(self, step: int) -> None: ...
    def done(self) -> None: ...
    def enter(
        self, slot: int, operation: bytes, elements: int, peer: int = -1, *, sized: bool = True, form: bytes = b""
    ) -> None: ...
    def wait(self, slot: int) -> None: ...
    def leave(self) -> None: ...

    def tells_of(self, parts: int) -> bool:
        return False


@dataclass
class WatcherCost:
    """Time of a watcher's calls on a rank, in the step or the block at work."""

    seconds: float = 0.0
    calls: int = 0

    def timed(self, function: Callable[..., Any], clock: Callable[[], float], sign: int = 1) -> Callable[..., Any]:
        """Make calls of the function count. With the sign -1 their time is subtracted: it would have passed anyway."""

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
    """Turns watchers off and on, and takes the time of each step, from this hook's `before_step` to the next.

    Args:
        output: file for {"steps": [[seconds of the processor, of the wall], ...], "agent": seconds of it meanwhile,
            "parts": {watcher: {kind: [[seconds, calls], ...]}}}. Parts are of timed and of empty blocks, or of their
            steps. Each rank has a file.
    """

    def __init__(self, output: str, rounds: int, blocks: int) -> None:
        self._output, self._plan = Path(output), plan(rounds, blocks)
        self._steps, self._begun, self._agent = list[list[float]](), [0.0, 0.0], 0.0
        self._parts = {name: WatcherCost() for name in ("watch", *HOOKS)}
        self._taken: dict[str, dict[str, list[list[float]]]] = {name: {TIMED: [], EMPTY: []} for name in self._parts}
        self._changed: list[tuple[Any, str, Any]] = []

    def on_start(self, trainer: Trainer) -> None:
        self._all = [self, *(hook for hook in trainer.hooks if hook is not self)]  # so that a step has all its hooks
        self._parts_of_engine = getattr(trainer.engine, "parts")  # noqa: B009  (the protocol does not have it)
        self._slow = next(hook for hook in self._all if isinstance(hook, SlowRanksHook))
        self._hashes = next(hook for hook in self._all if isinstance(hook, HashesHook))
        self._wrapped = wrapped_by_watch()
        self._agent = -_processor_seconds(os.getppid())

    def before_step(self, trainer: Trainer, step: int) -> None:
        ended = [time.process_time(), time.perf_counter()]
        if step:
            self._steps.append([now - then for now, then in zip(ended, self._begun, strict=True)])
            self._take(step - 1)
        kind, before = self._plan[step], self._plan[step - 1] if step else None
        if kind != before or kind not in (TIMED, EMPTY):  # before each step of a pair, so that both begin alike
            self._turn(trainer, kind)
        self._begun = [time.process_time(), time.perf_counter()]

    def on_end(self, trainer: Trainer) -> None:
        self._agent += _processor_seconds(os.getppid())
        self._back()
        found = {"steps": self._steps, "agent": self._agent, "parts": self._taken}
        self._output.with_suffix(f".{trainer.mesh.rank}").write_text(json.dumps(found))

    def _turn(self, trainer: Trainer, kind: str) -> None:
        self._back()
        off, beacon = kind in (OFF, NONE), trainer.beacon
        # in place, since the trainer is going through them
        trainer.hooks[:] = [hook for hook in self._all if not (off and isinstance(hook, tuple(HOOKS.values())))]
        engine: Any = trainer.engine
        engine.use_parts({} if off else self._parts_of_engine)
        beacon.__class__ = SilentBeacon if off else Beacon
        beacon._begun = time.monotonic()  # the silent beacon has not seen the step begin
        for module, name, function in self._wrapped:
            setattr(module, name, function.__wrapped__ if off else function)
        block = kind in (TIMED, EMPTY)
        self._hashes._every = BLOCK if block else 1 if kind == HASHES else NEVER
        self._slow._every = WINDOWS if block else 1 if kind == WINDOW else NEVER
        if block:
            self._time(trainer, kind)

    def _take(self, step: int) -> None:
        """Time of the watchers in the step, or the block, that has ended."""
        kind, last = self._plan[step], self._plan[step + 1] != self._plan[step]
        if kind in (TIMED, EMPTY):
            for name in self._parts if last else SHORT:
                self._taken[name][kind].append(self._parts[name].taken())

    def _back(self) -> None:
        while self._changed:
            changed, name, old = self._changed.pop()
            if old is None:
                del vars(changed)[name]
            else:
                vars(changed)[name] = old

    def _change(self, what: Any, name: str, new: Callable[..., Any]) -> None:
        self._changed.append((what, name, vars(what).get(name)))
        vars(what)[name] = new

    def _time(self, trainer: Trainer, kind: str) -> None:
        """Count the calls of watchers. In empty blocks calls that do nothing take their places."""
        engine: Any = trainer.engine
        gate = engine.parts["spikes"]
        watch = self._parts["watch"]
        calls = {name: getattr(Beacon, name) if kind == TIMED else _nothing for name in TOLD}
        told = {name: watch.timed(function, time.perf_counter) for name, function in calls.items()}
        trainer.beacon.__class__ = type("TimedBeacon", (Beacon,), {"__slots__": (), **told})
        spikes = self._parts["spikes"]  # which have the step's numbers exchanged earlier
        for name in ("_decide", "losses_known"):
            function = getattr(gate, name) if kind == TIMED else _nothing
            self._change(gate, name, spikes.timed(function, time.perf_counter))
        if kind == TIMED:
            self._change(gate, "meet", spikes.timed(gate.meet, time.perf_counter, -1))
            begin = gate.begin_to_meet and spikes.timed(gate.begin_to_meet, time.perf_counter, -1)
            if begin is not None:
                waits = partial(spikes.timed, clock=time.perf_counter, sign=-1)
                self._change(gate, "begin_to_meet", lambda *own: waits(begin(*own)))
        engine.use_parts(engine.parts)  # which looks their methods up
        # which need not compute the loss any more, where the gate has done so
        self._change(engine, "_result", spikes.timed(getattr(engine, "_result"), time.perf_counter))  # noqa: B009
        for name, kind_of in HOOKS.items():
            clock = time.perf_counter if name in SHORT else time.process_time
            for hook in (each for each in self._all if isinstance(each, kind_of)):
                for point in hook.points & {"before_step", "after_step", "on_numbers"}:
                    function = getattr(hook, point) if kind == TIMED else _nothing
                    self._change(hook, point, self._parts[name].timed(function, clock))


def wrapped_by_watch() -> list[tuple[Any, str, Any]]:
    """Where torch keeps its collectives, their names, and what `watch` has put there, with torch's own inside."""
    import torch.distributed as dist

    return [
        (place, name, function)
        for place in (dist, dist.distributed_c10d, dist.Work)
        for name, function in vars(place).items()
        if type(function) is FunctionType and function.__globals__ is vars(watched)
    ]


def _nothing(*arguments: Any, **options: Any) -> None:
    """In the place of what a watcher does."""


def _processor_seconds(pid: int) -> float:
    """Seconds of all threads of a process so far, or 0 where the system does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def differences(kinds: Sequence[str], seconds: Sequence[float]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """From the pairs of a plan: of each kind, seconds of its steps less their neighbours' seconds, and the latter."""
    found: dict[str, list[float]] = {kind: [] for kind in dict.fromkeys(ROUND)}
    off = []
    for at in range(len(WARM), len(seconds) - 1, 2):
        pair = {kinds[at]: seconds[at], kinds[at + 1]: seconds[at + 1]}
        if OFF not in pair:
            break  # of parts
        (kind,) = pair.keys() - {OFF}
        found[kind].append(pair[kind] - pair[OFF])
        off.append(pair[OFF])
    return {kind: np.array(each) for kind, each in found.items()}, np.array(off)


def trimmed(values: np.ndarray) -> float:
    """The mean without a fifth of the values at either end."""
    out = int(TRIM * len(values))
    return float(np.sort(values)[out : len(values) - out].mean())


def added(kinds: Mapping[str, np.ndarray], off: np.ndarray, weights: Mapping[str, float]) -> tuple[float, float, float]:
    """Time that watchers add to a step, as a share of one without them: the estimate and the ends of its interval.

    Args:
        kinds: differences of pairs in seconds, by kind.
        off: seconds of the steps without watchers.
        weights: of the kinds that count, how many steps of a run are of each.
    """
    draw = np.random.default_rng(SEED)

    def share(pick: Callable[[np.ndarray], np.ndarray]) -> float:
        return sum(weight * trimmed(pick(kinds[kind])) for kind, weight in weights.items()) / trimmed(pick(off))

    drawn = [share(lambda values: draw.choice(values, len(values))) for _ in range(DRAWS)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return share(lambda values: values), float(low), float(high)


def weights_of(windows: int, hashes: int) -> dict[str, float]:
    """How often the steps of a run are of each kind. Arguments are the steps between windows and between hashes."""
    rare = {WINDOW: 1 / windows, HASHES: 1 / hashes}
    return {ON: 1 - sum(rare.values()), **rare}


def parts_of(ranks: list[dict[str, dict[str, list[list[float]]]]], every: int) -> dict[str, dict[str, float]]:
    """Of each watcher the calls and seconds in a step, over all ranks: medians of steps or blocks.

    Args:
        ranks: of each rank, [seconds, calls] of each watcher's timed blocks and empty ones, or of their steps.
        every: steps between hashes. A block has one hash.
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


def options(parser: argparse.ArgumentParser) -> None:
    share(parser, "sources", "--ranks", "--rounds", rounds=100)
    parser.add_argument("--blocks", type=int, default=20, help=f"of {BLOCK} steps for the parts, of either kind")
    parser.add_argument("--hashes", type=int, default=100, help="steps between hashes")


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    """Train, and find what watchers add."""
    if min(given.ranks, given.rounds, given.blocks) < 2 or given.hashes < BLOCK:
        raise UserError(f"--ranks, --rounds and --blocks must be at least 2, and --hashes at least {BLOCK}")
    output, steps = folder / "turns", plan(given.rounds, given.blocks)
    own = [f"run.dir={folder}/run", f"training.steps={len(steps)}", "spikes.action=report"]
    own += [f"training.hashes={BLOCK}", f"watch.slow.every={WINDOWS}", f"watch.slow.factor={NEVER}"]
    own += ["checkpoint.at_end=false", "checkpoint.every=null", "evaluation.at_end=false"]
    hook = {"output": str(output), "rounds": given.rounds, "blocks": given.blocks}
    run_with_hook(given, "bench.launch.watchers:WatcherTurns", hook, own)
    ranks = [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(given.ranks)]
    result = _result(ranks, steps, given.hashes)
    return Result(result, _text(result))


def _result(ranks: list[dict[str, Any]], planned: Sequence[str], every: int) -> dict[str, Any]:
    steps = np.array([each["steps"] for each in ranks])  # [ranks, steps, clocks]
    clocks = {"processor": steps[..., 0].sum(0), "wall": steps[..., 1].mean(0)}
    found: dict[str, Any] = {"ranks": len(ranks), "hashes": every}
    for clock, seconds in clocks.items():
        kinds, off = differences(planned, seconds)
        found[clock] = {
            "pairs": len(off),
            "step": trimmed(off),
            "added": added(kinds, off, weights_of(WINDOWS, every)),
            "none": added(kinds, off, {NONE: 1.0}),
            "kinds": {kind: trimmed(each) for kind, each in kinds.items()},
        }
    parts = parts_of([each["parts"] for each in ranks], every)
    own = sum(each["seconds"] for each in parts.values()) / found["processor"]["step"]
    agent = ranks[0]["agent"] / float(clocks["processor"].sum())
    return {**found, "agent": agent, "parts": parts, "added_by_parts": own}


def _text(result: dict[str, Any]) -> str:
    step = result["processor"]["step"]
    lines = [
        f"{result['ranks']} ranks, {result['processor']['pairs']:,} pairs of steps. A step without watchers takes "
        f"{1e3 * step:.2f} ms of processor time over all ranks, {1e3 * result['wall']['step']:.2f} ms by the clock",
        f"{'':16} {'watchers add':>12} {'(19 of 20 draws)':>20}   {'in pairs of which none is watched':>33}",
    ]
    for clock in ("processor", "wall"):
        (middle, low, high), none = result[clock]["added"], result[clock]["none"]
        interval, nothing = f"{low:.2%} to {high:.2%}", f"{none[0]:.2%} ({none[1]:.2%} to {none[2]:.2%})"
        lines.append(f"{clock:16} {middle:12.2%} {interval:>20}   {nothing:>33}")
    lines.append("us that a step takes more (processor): " + ", ".join(
        f"{kind} {1e6 * seconds:.0f}" for kind, seconds in result["processor"]["kinds"].items()))  # fmt: skip
    lines += [
        f"the agent, with all that it does: {result['agent']:.2%} of the ranks' processor time",
        f"inside the watchers' own calls: {result['added_by_parts']:.2%}",
        f"{'watcher':16} {'calls a step':>12} {'us a step':>10} {'of it':>7}",
    ]
    for name, part in result["parts"].items():
        seconds = part["seconds"]
        lines.append(f"{name:16} {part['calls']:12.1f} {1e6 * seconds:10.1f} {seconds / step:7.2%}")
    return "\n".join(lines)
