"""`python -m megatron.plan FILE RANKS PER_HOST DEVICE`: the line that the launcher prints before it starts ranks.

FILE is the resolved configuration ("-": standard input), DEVICE a device's name as torch gives it. Prints nothing where
nothing is known of the device."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.config import Config
from megatron.config.source.resolved_file import read_resolved, read_resolved_text

from .prediction import predict, steps_after


def steps_left(config: Config) -> tuple[int, float]:
    """`steps_after` the newest checkpoint, intact or not, from which the run would continue."""
    folder, done = Path(config.checkpoint.dir or ""), 0
    if config.checkpoint.resume == "auto" and config.checkpoint.dir:
        names = [each.name.removeprefix("step_") for each in folder.glob("step_*")]
        done = max((int(each) for each in names if each.isascii() and each.isdigit()), default=0)
    return steps_after(config, done)


def main(words: Sequence[str]) -> int:
    """Print the line. The exit status does not depend on whether the run fits."""
    file, ranks, per_host, device = words
    config = read_resolved_text(sys.stdin.read(), "-", own=True) if file == "-" else read_resolved(file, own=True)
    try:
        found = predict(config, int(ranks), device, int(per_host))
    except Exception as error:  # a run must not fail because of its plan, and a user's kind may have no counts
        print(f"plan: none, since the formulas fail: {type(error).__name__}: {error}")
        return 0
    if found is not None:
        print(found.text(*steps_left(config)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
