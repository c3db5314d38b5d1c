#!/usr/bin/env python
"""What watching a run costs: a run whose blocks of steps take turns with every watcher on, and with all off.

    python tools/bench/watchers.py a.yml key.path=value ... [--ranks 2] [--rounds 20] [--hashes 100] [--json]

On are: where each rank is, for its agent (`watch`), the times of ranks (`watch.slow`, every 10 steps), the decision
about each update (`spikes.action: report`), and hashes of the state (`training.hashes`). Blocks of 10 steps of one run
take turns, so that a change of the machine's load meets both; which comes first changes from round to round. What is
compared is the processor time of all threads of all ranks: others may use the processors too. In a block hashes are
taken once; a run that takes them every `--hashes` steps has that share of what they cost. What stays on in both is the
wrapper of torch's collectives, which then does nothing.
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
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from megatron.config import split_arguments  # noqa: E402
from megatron.launch.command_line import main as launch  # noqa: E402
from megatron.training.hook import Hook  # noqa: E402
from megatron.training.hooks.hashes import HashesHook  # noqa: E402
from megatron.training.hooks.slow import SlowRanksHook  # noqa: E402

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

BLOCK = 10  # steps of a turn
WARM = 2 * BLOCK  # steps before the first that counts
SILENT = ("at", "enter", "wait", "leave")  # what a beacon is told


def is_on(step: int) -> bool:
    """Whether a step is of a block with watchers: the first block of a round is another one in each round."""
    round_, turn = divmod(step // BLOCK, 2)
    return (turn + round_) % 2 == 1


class WatcherTurns(Hook):
    """Turns watchers on and off, and takes the processor time of each block.

    Args:
        output: file for [on, seconds, seconds of hashes] of each block, one file for each rank.
    """

    def __init__(self, output: str) -> None:
        self._output, self._found, self._hashing = Path(output), list[list[Any]](), [0.0]
        self._begun: tuple[bool, float] | None = None
        self._all: list[Hook] = []

    def on_start(self, trainer: Trainer) -> None:
        self._all = list(trainer.hooks)
        for hook in self._all:
            if isinstance(hook, HashesHook):
                self._measure(hook)

    def before_step(self, trainer: Trainer, step: int) -> None:
        if step % BLOCK:
            return
        self._end()
        on, gate = is_on(step), getattr(trainer.engine, "gate")  # noqa: B009  (the protocol does not have it)
        watchers = (HashesHook, SlowRanksHook)
        trainer.hooks = self._all if on else [hook for hook in self._all if not isinstance(hook, watchers)]
        gate._judges = on
        for name in SILENT:
            if on:
                vars(trainer.beacon).pop(name, None)
            else:
                vars(trainer.beacon)[name] = _nothing
        self._begun = (on, time.process_time())

    def on_end(self, trainer: Trainer) -> None:
        self._end()
        self._output.with_suffix(f".{trainer.mesh.rank}").write_text(json.dumps(self._found))

    def _end(self) -> None:
        if self._begun is not None:
            on, begin = self._begun
            self._found.append([on, time.process_time() - begin, self._hashing[0]])
        self._begun, self._hashing[0] = None, 0.0

    def _measure(self, hook: HashesHook) -> None:
        """Count what hashes take."""
        work = hook.after_step

        def timed(*arguments: Any) -> None:
            begin = time.process_time()
            work(*arguments)
            self._hashing[0] += time.process_time() - begin

        vars(hook)["after_step"] = timed


def _nothing(*arguments: Any, **options: Any) -> None:
    """In the place of what tells where a rank is."""


def shares(ranks: list[list[list[Any]]], every: int) -> list[float]:
    """What watchers add to a step, as a share of it, of each round.

    Args:
        ranks: of each rank, [on, seconds, seconds of hashes] of its blocks.
        every: steps between hashes.
    """
    blocks = [
        (turns[0][0], sum(each[1] for each in turns), sum(each[2] for each in turns))
        for turns in zip(*ranks, strict=True)
    ][WARM // BLOCK :]
    found = []
    for at in range(0, len(blocks) - 1, 2):
        (_, off, _), (_, on, hashing) = sorted(blocks[at : at + 2], key=lambda each: each[0])
        found.append((on - hashing * (1 - BLOCK / every)) / off - 1)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Train, and print the share."""
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
        steps = WARM + 2 * BLOCK * options.rounds
        own = [f"run.dir={folder}/run", f"training.steps={steps}", "spikes.action=report", f"training.hashes={BLOCK}"]
        own += ["checkpoint.at_end=false", "checkpoint.every=null", "evaluation.at_end=false"]
        own += ["logging.console=quiet", "logging.curve=false"]
        own.append(f"hooks=[{{type: 'tools.bench.watchers:Turns', options: {{output: '{output}'}}}}]")
        os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
        script = str(Path(__file__).resolve().parents[2] / "train.py")
        if status := launch(["--ranks", str(options.ranks), script, *files, *overrides, *own]):
            return status
        ranks = [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(options.ranks)]
    found = shares(ranks, options.hashes)
    off = [sum(each[1] for each in turns) for turns in zip(*ranks, strict=True) if not turns[0][0]]
    low, middle, high = statistics.quantiles(found, n=4)
    result = {
        "ranks": options.ranks, "rounds": options.rounds, "hashes": options.hashes, "added": middle,
        "quartiles": [low, high], "step_processor_seconds": statistics.median(off) / BLOCK,
    }  # fmt: skip
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{options.ranks} ranks, {options.rounds} rounds of {2 * BLOCK} steps: watchers add {middle:.2%} to the "
            f"processor time of a step ({low:.2%} to {high:.2%} in half of the rounds), which is "
            f"{1e3 * result['step_processor_seconds']:.1f} ms over all ranks without them"
        )
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
