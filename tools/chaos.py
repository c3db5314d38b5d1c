#!/usr/bin/env python3
"""Inject faults into a run, and check that it ends like an undisturbed one.

    deepy chaos my.yml [key.path=value ...] --minutes 30 --seed 1 [--ranks N] [--steps N] [--every N]

Ranks, agents and launchers are killed and stopped, checkpoints damaged, disks filled, gradients and weights changed, in
an order drawn from the seed. At the end of each run its weights, optimizer states and losses must equal an undisturbed
run bit for bit. Each batch must be read once, and no process or private file may remain. The tool prints the faults,
the seconds until detection and recovery, and the lost steps.

The configuration and the overrides set the layout: zero.stage, parallel.tensor, parallel.pipeline, ... `--faults` lists
the kinds of faults, and `--only` selects some of them. Full disks, read-only disks and networks that are cut or slow
need root.

Exit status 1: a check failed (the run's folder is kept). 2: the configuration has errors. 3: the run fails without any
fault, or no fault is possible.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def main(arguments: list[str] | None = None, hosts: Any = None) -> int:
    """Run. Returns the exit status.

    Args:
        hosts: simulated hosts, as in `tests/chaos/hosts.py`, with `--ranks` on each.
    """
    from megatron.config import ConfigError, load
    from megatron.trials.chaos import SPARES, Arena, Round, chaos, overrides, where
    from megatron.trials.faults import FAULTS
    from megatron.trials.job import TrialError

    options, count = _options(arguments), 1 if hosts is None else len(hosts.names) - SPARES
    names = [each.name for each in FAULTS]
    if options.faults:
        print("\n".join(names))
        return 0
    if unknown := [each for each in options.only or () if each not in names]:
        print(f"--only {unknown[0]!r}: must be one of {', '.join(names)}", file=sys.stderr)
        return 2
    words = [options.file, *options.overrides]
    try:
        own = [*options.overrides, *overrides(options.steps, options.every)]
        config = load([options.file], own, ranks=options.ranks * count).config
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos_"))
    end = time.monotonic() + 60 * options.minutes

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    rounds: list[Round] = []
    happened: list[str] = []

    def hear(fault: str) -> None:
        happened.append(fault)
        tell(fault)

    def enough() -> bool:
        return time.monotonic() > end or (options.most is not None and len(happened) >= options.most)

    arena = Arena(folder, words, config, options.ranks, options.steps, options.every, hear, hosts)
    try:
        for each in chaos(arena, seed=options.seed, until=enough, only=options.only or ()):
            rounds.append(each)
            tell(f"run {each.number}: {len(each.events)} faults, " + ("; ".join(each.problems) or "equal in every bit"))
            if each.problems:
                break
    except TrialError as error:
        print(error, file=sys.stderr)
        return 3
    _print(rounds, options, where(config, options.ranks, count))
    return 1 if any(each.problems for each in rounds) else 0


def _print(rounds: list, options: argparse.Namespace, where: str) -> None:
    from megatron.trials.chaos import table

    if options.json:
        print(json.dumps({"where": where, "seed": options.seed, "rounds": [asdict(each) for each in rounds]}))
    else:
        print(table(rounds))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="configuration")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--minutes", type=float, default=30.0, help="inject no fault after this time (30)")
    parser.add_argument("--most", type=int, metavar="N", help="inject at most N faults")
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults (1)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="length of a run (300)")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="steps between checkpoints (10)")
    parser.add_argument("--only", action="append", metavar="NAME", help="this kind of fault. May be repeated")
    parser.add_argument("--faults", action="store_true", help="list the kinds of faults")
    parser.add_argument("--folder", type=Path, help="folder of the runs, which must not exist")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_intermixed_args(arguments)
    if options.file is None and not options.faults:
        parser.error("no configuration file")
    if options.folder is not None and options.folder.exists():
        parser.error(f"--folder {options.folder} exists: nothing is overwritten")
    if not 0 < options.minutes < float("inf"):
        parser.error("--minutes must be a number above 0")
    if options.most is not None and options.most < 1:
        parser.error("--most must be at least 1")
    if not 1 <= 3 * options.every <= options.steps or options.ranks < 1:
        parser.error("--ranks must be at least 1, and --steps at least three times --every")
    return options


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
