#!/usr/bin/env python3
"""List what a configuration can name: ready configurations, tasks, devices, and the parts of a run.

    deepy list                  ready configurations, their size and the memory of their training state
    deepy list llama moe        those whose name has one of these words
    deepy list optimizers       another list

The lists are configurations, tasks, devices, kinds, optimizers, objectives, schedules, features, architectures and
runners. Names of `layouts/` are parts: deepy train pythia/70m layouts/bf16. `--json` prints one JSON document. Exit
status 2 means that no name has the word.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.config.registry import INSIDE  # noqa: E402
from megatron.installation import configuration_names, near_names, root  # noqa: E402

Rows = list[dict[str, Any]]
PARTS = ("family", "suite")  # what the files of a family extend
STATE_BYTES = 16  # of a parameter in bf16 with AdamW: weight 2, gradient 2, fp32 master 4, two moments 8
ROLES = ("objective", "schedule", "feature", "architecture", "runner")
NOTES = {
    "configurations": (
        "state is the memory of weights, gradients and AdamW's states in bf16: 16 bytes a parameter. ZeRO shares it\n"
        "over ranks, and activations are added to it (`deepy plan NAME --gpus 8 --gpu h100`). All need data.train and\n"
        "a tokenizer, but for quickstart, whose data `make quickstart` makes, and test/*, which need no files.\n"
        "More: deepy list tasks, devices, kinds, optimizers, objectives, schedules, features, architectures, runners"
    ),
    "tasks": "These need no data. `deepy benchmarks` has data of known ones, and `lm_eval ls tasks` lists all others.",
    "devices": "Another device or network: `deepy plan --machine FILE`.",
    "kinds": "A mixer stands before the slash of model.layers, an ffn behind it, a side after '+' (docs/models.md).",
    "optimizers": "state is the least of each, without the fp32 master. Options: docs/optimizers.md.",
}


def sizes() -> dict[str, int]:
    """Parameters of the ready configurations that set their vocabulary's size, as `--count` has counted them."""
    counted: dict[str, int] = json.loads((root() / "configs" / "sizes.json").read_text(encoding="utf-8"))
    return counted


def about(name: str) -> str:
    """The first sentence of a configuration's first comment."""
    lines = (root() / "configs" / f"{name}.yml").read_text(encoding="utf-8").splitlines()
    comment = lines[: next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    text = " ".join(line[1:].strip() for line in comment)
    return re.split(r"(?<=[a-z)\d])[.:] (?=[A-Za-z])", text, maxsplit=1)[0].rstrip(".:")


def configurations() -> Rows:
    """Ready configurations. The files that they extend are no configurations."""
    counted, rows = sizes(), []
    for name in configuration_names():
        if name.rpartition("/")[2] not in PARTS:
            number = counted.get(name)
            size = f"{number / 1e9:,.2f}B" if number and number >= 1e9 else f"{number / 1e6:,.1f}M" if number else ""
            state = f"{number * STATE_BYTES / 2**30:,.1f} GiB" if number else ""
            rows.append({"name": name, "parameters": size, "state": state, "about": about(name)})
    return rows


def tasks() -> Rows:
    """Tasks of this project. The harness has thousands more."""
    from megatron.evaluation.select import own_tasks

    return [{"name": name} for name in own_tasks()]


def devices() -> Rows:
    """Devices that plans know."""
    from megatron.plan.devices import known_devices

    return [
        {
            "name": name,
            "memory": f"{each.memory:g} GiB",
            "bandwidth": f"{each.bandwidth:,g} GB/s",
            "per host": each.per_host,
            "about": each.name,
        }
        for name, each in known_devices()[0].items()
    ]


def kinds() -> Rows:
    """Kinds of layers for `model.layers`."""
    from megatron.config.registry import load

    found = [(name, load(path)) for name, path in INSIDE["kind"].items()]
    return [
        {"name": name, "role": kind.role, "about": kind.about.removeprefix("Options of ").rstrip(".")}
        for name, kind in found
    ]


def optimizers() -> Rows:
    """Names for `optimizer.type`."""
    from megatron.config import load
    from megatron.config.optimizer_kind import optimizer_kind

    rows = []
    for name in INSIDE["optimizer"]:
        given = [f"optimizer.type={name}", "schedule.type=constant"]
        config = load([str(root() / "configs/test/tiny_llama.yml")], given, ranks=1).config
        kind = optimizer_kind(config)
        assert kind is not None  # each of this package is described
        rows.append({"name": name, "state": f"{kind.state_bytes(config)} bytes a parameter"})
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "configurations": configurations,
    "tasks": tasks,
    "devices": devices,
    "kinds": kinds,
    "optimizers": optimizers,
    **{f"{role}s": lambda role=role: [{"name": name} for name in INSIDE[role]] for role in ROLES},  # type: ignore[misc]
}


def count() -> dict[str, int]:
    """Count the parameters of all ready configurations, which takes half a minute."""
    from megatron.config import ConfigError, load
    from megatron.model.costs.describe import totals

    counted = {}
    for name in configuration_names():
        given = ["data.train=null", "data.validation=null", "data.synthetic=copy"]
        try:
            config = load([str(root() / "configs" / f"{name}.yml")], given, check_inputs=False, here=False).config
        except ConfigError:  # a part, or a model that reads a file
            continue
        if config.model.vocab_size is not None:
            counted[name] = totals(config).parameters
    return counted


def table(rows: Rows) -> str:
    """Rows as columns under their keys."""
    head = dict.fromkeys(rows[0])
    cells = [[str(key) for key in head], *([str(row[key]) for key in head] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def main(arguments: list[str] | None = None) -> int:
    """Print a list. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a list, or a part of a configuration's name")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)  # writes configs/sizes.json
    options = parser.parse_args(arguments)
    if options.count:
        text = json.dumps(count(), indent=1)
        (root() / "configs" / "sizes.json").write_text(f"{text}\n", encoding="utf-8")
        return 0
    words = [word.lower() for word in options.words]
    which = words.pop(0) if words and words[0] in TABLES else "configurations"
    found = [row for row in TABLES[which]() if not words or any(word in row["name"] for word in words)]
    if which == "configurations" and not words and not options.json:
        found = [row for row in found if not row["name"].startswith("test/")]
    if not found:
        near = near_names(" ".join(words))
        print(f"none of the {which} has that name. Near are {', '.join(near) or 'none'}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(table(found))
    if note := NOTES.get(which):
        print(f"\n{note}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
