"""Steps of the architectures of tests/layouts.yml on each class of layouts, counted on the stand-in of a GPU.

python -m tests.stand_ins.gpu.layouts --write [ARCHITECTURE]     counts them again, into layouts.json
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from megatron.config import ConfigError, resolve
from tests.training.matrix import merged, read

from .cases import found, run_all
from .program import LIFE

TABLE = Path(__file__).with_name("layouts.json")
LIVES = Path(__file__).with_name("lives.json")
LIVED = ["llama", "moe", "state space"]  # architectures of these
CLASSES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ZeRO 1": (2, {}),
    "ZeRO 2": (2, {"zero": {"stage": 2}}),
    "ZeRO 3": (2, {"zero": {"stage": 3}}),
    "TP": (2, {"parallel": {"tensor": 2}}),
    "PP": (2, {"parallel": {"pipeline": 2}}),
    "CP": (2, {"parallel": {"context": 2}}),
    "EP": (2, {"parallel": {"expert": 2}}),
}
ADVICE = "if that is meant: python -m tests.stand_ins.gpu.layouts --write"
SIZE = re.compile(r"(.*) of (\d+) bytes")


def architectures() -> list[str]:
    return list(read()["architectures"])


def recorded() -> list[str]:
    """Architectures that the table has."""
    return list(json.loads(TABLE.read_text()))


def values_of(architecture: str, name: str) -> dict[str, Any] | None:
    """The configuration in bf16, two micro-batches a step. None if rules of the configuration reject the layout."""
    matrix = read()
    own = {key: value for key, value in matrix["architectures"][architecture].items() if key not in ("about", "apart")}
    ranks, layout = CLASSES[name]
    if name == "EP" and "moe" not in own["model"].get("layers", ""):
        return None
    data = ranks if not {"tensor", "pipeline", "context"} & layout.get("parallel", {}).keys() else 1
    common = {"precision": {"compute": "bf16"}, "zero": {"stage": 1}, "tokenizer": {"eod_id": 0}}
    common["model"] = {"kernels": "torch"}  # whatever is installed
    step = {"training": {"compile": "off", "global_batch_size": 8 * data, "activation_checkpointing": {"mode": "none"}}}
    values = merged(matrix["common"], own, common, step, layout)
    try:
        resolve(values, ranks=ranks)
    except ConfigError:
        return None
    return values


def count(names: list[str], environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """A row for each architecture and each class that it can run on. Of a run that failed, the end of its log."""
    with tempfile.TemporaryDirectory() as made:
        folder, jobs, places = Path(made), [], []
        for architecture in names:
            for name in CLASSES:
                if (values := values_of(architecture, name)) is not None:
                    file = folder / f"{len(jobs)}.yml"
                    file.write_text(yaml.safe_dump(values))
                    jobs.append((str(file.with_suffix(".json")), CLASSES[name][0], [str(file)]))
                    places.append((architecture, name))
        run_all(folder, jobs, environment)
        table: dict[str, dict[str, Any]] = {architecture: {} for architecture in names}
        for (architecture, name), (output, *_) in zip(places, jobs):
            done, log = Path(output).exists(), Path(f"{output}.log")
            table[architecture][name] = row(json.loads(Path(output).read_text())) if done else log.read_text()[-3000:]
        return table


def lives(names: list[str], environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Calls of the device in the first evaluation, save and resume of a run on one rank, and in a token of a sample."""
    with tempfile.TemporaryDirectory() as made:
        folder, jobs = Path(made), []
        for number, name in enumerate(names):
            file = folder / f"{number}.yml"
            values: Any = values_of(name, "one rank")
            values["tokenizer"] = {"type": "bytes"}  # for samples
            values["model"]["vocab_size"] = 257
            values["evaluation"] = {"every": 2, "samples": {"every": 2, "prompts": ["A page of a text."], "tokens": 9}}
            file.write_text(yaml.safe_dump(values))
            own = [f"run.dir={folder / str(number)}", "checkpoint.every=2"]
            output = str(file.with_suffix(f".{LIFE}.json"))
            jobs += [(output, 1, [str(file), *own, f"training.steps={steps}"]) for steps in (2, 4)]
        run_all(folder, jobs, environment)
        counted = {name: found(jobs[2 * number][0]) for number, name in enumerate(names)}
    kept = ("kernels", "waits", "pageable")
    return {name: {part: {key: row[key] for key in kept} for part, row in own.items()} for name, own in counted.items()}


def row(counted: dict[str, Any]) -> dict[str, Any]:
    """Kernels, waits, groups and pageable copies of a step, and each collective as [messages, bytes]."""
    step, messages, sizes = counted["step"], Counter[str](), Counter[str]()
    for each, times in step["collectives"].items():
        operation, size = SIZE.fullmatch(each).groups()  # type: ignore[union-attr]
        messages[operation] += times
        sizes[operation] += times * int(size)
    kept = {name: step[name] for name in ("kernels", "waits", "pageable")}
    return {**kept, "groups": counted["start"]["groups"], "collectives": {k: [messages[k], sizes[k]] for k in messages}}


def main() -> None:
    from .build import build

    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        environment = build(Path(folder))
        names = sys.argv[2:] or architectures()
        for begin in range(0, len(names), 6):  # what is found is kept, should a later one fail
            table |= count(names[begin : begin + 6], environment)
            for name in names[begin : begin + 6]:
                print(
                    name, {each: row if isinstance(row, str) else row["kernels"] for each, row in table[name].items()}
                )
            lines = (
                f"  {json.dumps(name)}: {{\n{_lines(table[name])}\n  }}" for name in architectures() if name in table
            )
            TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        LIVES.write_text(json.dumps(lives(LIVED, environment), indent=1) + "\n")


def _lines(rows: dict[str, dict]) -> str:
    return ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())


if __name__ == "__main__":
    main()
