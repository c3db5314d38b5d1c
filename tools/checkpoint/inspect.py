#!/usr/bin/env python
"""Show the contents of a checkpoint, or of a folder of checkpoints, and their damage.

Exit status 1: something is damaged.

deepy checkpoint inspect runs/x                                 a line per checkpoint
deepy checkpoint inspect runs/x/checkpoints/step_00001000       its tensors
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python looks in a script's own folder first, where `inspect.py` would stand in for the standard library's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
from fnmatch import fnmatch
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.read.logical import describe
from megatron.checkpoint.read.reader import Checkpoint
from megatron.checkpoint.save.store import Store, find_checkpoint, folder_of


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("path", type=Path, help="a checkpoint, a folder of checkpoints or a run's directory")
    add("--only", action="append", metavar="PATTERN", help="list only tensors whose names match (can be repeated)")
    add("--norms", action="store_true", help="read all values: norm, largest magnitude, values that are not finite")
    add("--config", action="store_true", help="print the configuration's text")
    add("--quick", action="store_true", help="check the sizes of the files, not every byte")
    add("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(arguments)


def examine(path: Path, quick: bool) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint, if it can be opened at all, and what is wrong with it."""
    try:
        checkpoint = open_checkpoint(path, verify="none")
    except CheckpointError as error:
        return None, error.problems
    return checkpoint, checkpoint.damage(checksums=not quick)


def show_folder(store: Store, options: argparse.Namespace) -> int:
    found = [(path, *examine(path, options.quick)) for path in store.paths()]
    if options.json:
        print(
            json.dumps([
                {"path": str(path), "damage": damage, **({"step": checkpoint.step} if checkpoint else {})}
                for path, checkpoint, damage in found
            ])
        )
    else:
        for path, checkpoint, damage in found:
            size = sum(record.size for record in checkpoint.records) / 2**20 if checkpoint else 0
            print(f"{path.name}: {'; '.join(damage) if damage else f'intact, {size:.1f} MiB'}")
    return 1 if any(damage for *_, damage in found) else 0


def show_checkpoint(checkpoint: Checkpoint, damage: list[str], options: argparse.Namespace) -> None:
    def wanted(name: str) -> bool:
        return not options.only or any(fnmatch(name, pattern) for pattern in options.only)

    summary = describe(checkpoint, norms=options.norms and not damage, wanted=wanted)
    if options.json:
        config = {"config": checkpoint.meta.config} if options.config else {}
        print(json.dumps({**summary, "damage": damage, **config}))
        return
    print(
        f"{summary['path']}: step {summary['step']}, {summary['parameters']:,} parameters, "
        f"{summary['bytes'] / 2**20:.1f} MiB in {summary['files']} files, {summary['fragments']} fragments"
    )
    entries = ("layout", "versions", "optimizer", "schedule", "loss_scaler", "data", "ledger", "extra", "config_hash")
    for name in entries:
        if summary[name]:
            print(f"{name.replace('_', ' ')}: {summary[name]}")
    for tensor in summary["tensors"]:
        states = ", ".join(" ".join([state, *_facts(facts)]) for state, facts in tensor["states"].items())
        print(f"  {tensor['name']} {tensor['shape']}: {states}")
    if options.config:
        print(checkpoint.meta.config)
    print("\n".join(["damaged:", *(f"  {problem}" for problem in damage)]) if damage else "intact")


def _facts(facts: dict) -> list[str]:
    found = [facts["dtype"]]
    if "norm" in facts:
        found += [f"norm {facts['norm']:.6g}", f"max {facts['largest']:.4g}"]
    if facts.get("not_finite"):
        found.append(f"{facts['not_finite']} NOT FINITE")
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        folder = folder_of(options.path)
        if folder is not None:
            return show_folder(Store(folder), options)
        if options.path.is_dir():
            find_checkpoint(options.path)  # an error that says what can be named
        checkpoint, damage = examine(options.path, options.quick)
        if checkpoint is None:
            raise CheckpointError(options.path, damage)
        show_checkpoint(checkpoint, damage, options)
    except (CheckpointError, OSError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 1
    return 1 if damage else 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
