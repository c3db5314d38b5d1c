#!/usr/bin/env python
"""Print the rows that `tools/bench/gpu.sh` has found so far as one table.

python tools/bench/gpu_rows.py FOLDER/rows
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import json  # noqa: E402
from pathlib import Path  # noqa: E402

from tools.bench.beside import markdown  # noqa: E402
from tools.bench.page import as_lines  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of files that `train_step.py --json` has printed")
    files = sorted(parser.parse_args(arguments).folder.glob("*.json"))
    lines = [line for file in files for line in as_lines(json.loads(file.read_text()))]
    if lines:
        print(markdown(lines))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
