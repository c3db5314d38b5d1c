#!/usr/bin/env python3
"""Check that a run resumes exactly: train, kill, resume on the same and another layout.

    deepy verify-resume my.yml [key.path=value ...] [--ranks N] [--steps N] [--at STEP]
    deepy verify-resume my.yml --ranks 4 --other "2 parallel.tensor=2"

On the same layout every tensor and every loss must be equal to the last bit. On another layout losses may differ by
rounding. `--other` is the number of ranks and the keys of the other layout. Without it the tool chooses one, and
`--other none` skips it. With --folder the runs are kept.

Exit status 1: they are not equal. 2: the configuration has errors. 3: a run failed by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def main(arguments: list[str] | None = None) -> int:
    """Verify the resumes and return the exit status."""
    options = _options(arguments)
    from megatron.config import ConfigError, load
    from megatron.trials.job import TrialError
    from megatron.trials.resume import TrialLayout, other_layout, verify_resume

    words, other = [options.file, *options.overrides], None
    try:
        config = load([options.file], options.overrides, ranks=options.ranks).config
        if options.other is None:
            other = other_layout(words, config, options.ranks)
        elif options.other != "none":
            number, *keys = options.other.split()
            other = TrialLayout(int(number), tuple(keys))
            load([options.file], [*options.overrides, *keys], ranks=other.ranks)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2

    def tell(text: str) -> None:
        print(f"... {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="verify_resume_") as temporary:
        folder = options.folder or Path(temporary)
        try:
            found = verify_resume(
                words, config=config, ranks=options.ranks, steps=options.steps, at=options.at, folder=folder,
                other=other, report=tell,
            )  # fmt: skip
        except (TrialError, ConfigError) as error:
            print(error, file=sys.stderr)
            return 3
    good = all(each.good for each in found)
    if options.json:
        print(json.dumps({"equal": good, "resumptions": [asdict(each) | {"equal": each.good} for each in found]}))
    else:
        print("\n".join(each.text for each in found))
        if other is None and options.other is None:
            print("no other layout was tried: the model allows none on so few ranks. Name one with --other")
    return 0 if good else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="configuration")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes on this machine (1)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="length of the runs (20)")
    parser.add_argument("--at", type=int, metavar="STEP", help="checkpoint after which ranks are killed (half)")
    parser.add_argument("--other", metavar="'N key=value ...'", help="ranks and keys of the other layout, or none")
    parser.add_argument("--folder", type=Path, help="folder of the runs, which must not exist")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_intermixed_args(arguments)
    options.at = options.steps // 2 if options.at is None else options.at
    if not 1 <= options.at < options.steps - 1 or options.ranks < 1:
        parser.error("--ranks must be at least 1, and --at from 1 to --steps - 2")
    if options.folder is not None and options.folder.exists():
        parser.error(f"--folder {options.folder} exists: nothing is overwritten")
    if options.other not in (None, "none") and not re.match(r"\s*[1-9][0-9]{0,8}(\s|$)", options.other):
        parser.error("--other must begin with a number of ranks, as in '2 parallel.tensor=2'")
    return options


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
