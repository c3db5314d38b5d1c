#!/usr/bin/env python
"""Compare two checkpoints, written by any layouts. Exit status 0: equal, 1: different, 2: error, or
the difference is damage.

    deepy checkpoint diff A B [--state weight] [--only 'layers.3.*'] [--tolerance 1e-6]
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python looks in a script's own folder first, where `inspect.py` would stand in for the standard library's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
from fnmatch import fnmatch
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.read.logical import TensorDifference, compare_meta, compare_tensors, to_json


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("a", type=Path)
    add("b", type=Path)
    add("--state", action="append", help="compare only this state (can be repeated)")
    add("--only", action="append", metavar="PATTERN", help="compare only tensors whose names match (can be repeated)")
    add(
        "--tolerance",
        type=float,
        default=0.0,
        help="largest relative difference of a tensor (by norm) that counts as equal",
    )
    add("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    if not 0 <= options.tolerance < float("inf"):
        parser.error(f"--tolerance must be 0 or more, not {options.tolerance:g}")
    return options


def same(item: TensorDifference, tolerance: float) -> bool:
    return item.equal or (not item.problem and tolerance > 0 and item.relative <= tolerance)


def show(item: TensorDifference) -> str:
    name = f"{item.tensor} ({item.state})"
    if item.problem:
        return f"{name}: {item.problem}"
    types = "" if item.dtypes[0] == item.dtypes[1] else f"; {item.dtypes[0]} in A, {item.dtypes[1]} in B"
    return (
        f"{name}: {item.differing} of {item.elements} elements differ, by {item.largest:.3g} at most, "
        f"{item.relative:.3g} relative{types}"
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        a, b = open_checkpoint(options.a), open_checkpoint(options.b)
        tensors = list(
            compare_tensors(
                a,
                b,
                lambda name, state: (
                    (not options.state or state in options.state)
                    and (not options.only or any(fnmatch(name, pattern) for pattern in options.only))
                ),
            )
        )
    except (CheckpointError, OSError) as error:
        print(f"diff: {error}", file=sys.stderr)
        return 2
    if not tensors:
        print("diff: neither checkpoint has such a tensor", file=sys.stderr)
        return 2
    meta = compare_meta(a.meta, b.meta)
    different = [item for item in tensors if not same(item, options.tolerance)]
    damaged = [f"{each.path}: {problem}" for each in (a, b) if different for problem in each.damage()]
    if damaged:
        print("\n".join(f"diff: {problem}" for problem in damaged), file=sys.stderr)
        return 2
    if options.json:
        print(to_json(tensors, meta, not different))
        return 1 if different else 0
    for name, (ours, theirs) in meta.items():
        print(f"meta data, {name}: {ours} in A, {theirs} in B")
    for item in different:
        print(show(item))
    print(f"{len(tensors) - len(different)} of {len(tensors)} tensors are equal")
    return 1 if different else 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
