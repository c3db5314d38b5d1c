#!/usr/bin/env python3
"""Branch a run off at a checkpoint, and let the learning rate decay to its floor.

    deepy fork runs/trunk --at 3000 --steps 300          makes runs/trunk-from-3000
    deepy train runs/trunk-from-3000/fork.yml            trains it

The trunk's rate must be constant at that step (schedule.type constant, wsd or infinite). The branch reads the batches
that the trunk would have read, on any layout, and both ledgers name the other run. Its checkpoint needs no space, since
its files are links to the trunk's.

Exit status 2: there is no such checkpoint, or no branch can begin there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.config.admitted import add_flag  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Make the branch and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the trunk")
    parser.add_argument("--at", type=int, required=True, metavar="STEP", help="step of the checkpoint to begin from")
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="length of the branch and of the decay")
    parser.add_argument("--output", type=Path, help="directory of the branch (default: RUN-from-STEP)")
    add_flag(parser)
    options = parser.parse_args(arguments)
    if options.at < 1 or options.steps < 1:
        parser.error("--at and --steps must be at least 1")
    from megatron.checkpoint import CheckpointError
    from megatron.config.problems import UserError
    from megatron.training.start.fork import fork

    folder = options.output or options.run.with_name(f"{options.run.name}-from-{options.at}")
    try:
        file = fork(options.run, options.at, options.steps, folder)
    except (CheckpointError, OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"a branch of {options.run} from step {options.at}, {options.steps} steps of decay. Start it with")
    print(f"  deepy train {file}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
