"""Print the rows that `bench/gpu.sh` has found so far as one table.

python -m bench gpu-rows FOLDER/rows
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.runner import Result, markdown


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of files that `train-step --json` has printed")


def measure(given: argparse.Namespace) -> Result:
    files = sorted(given.folder.glob("*.json"))
    made = [row for file in files for row in json.loads(file.read_text())]
    return Result(made, markdown(made) if made else "")
