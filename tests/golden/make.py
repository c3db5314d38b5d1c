"""Writes what configurations and models must stay equal to: run once, with the code that sets the standard.

    python -m tests.golden.make FOLDER

`cases.json.gz` has the inputs of each case (what a user gives), so that it stands on no other file. `resolved.json.gz`
every resolved value with its origin, in order. `models.json.gz` every logical tensor with its shape, role, shard and
weighted sums of its initial values. Names, shapes and shards are compared exactly. Initial values come from functions
whose last bit may differ between processors, so their sums are compared to six digits.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.format.table import tensor_to_dict
from megatron.config import ConfigError, load
from megatron.config.resolution import combine
from megatron.config.schema import Path as KeyPath
from megatron.config.source.layers import ConfigSource
from megatron.config.tree import get, leaves, put, thaw
from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import stored_tensors

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def read(name: str) -> Any:
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))


def write(folder: Path, name: str, value: Any) -> None:
    text = json.dumps(value, separators=(",", ":"))
    (folder / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def resolved(values: dict[str, Any], ranks: int | None) -> list[tuple[str, Any, str]]:
    """Every key of the resolved configuration in its order: its path, its value and its origin."""
    found = combine([ConfigSource(thaw(values))], ranks=ranks, check_inputs=False)
    lines = []
    for path, value in leaves(thaw(found.config.model_dump())):
        name = ".".join(map(str, path))
        lines.append((name, value, str(found.origins.get(name, "default"))))
    return json.loads(json.dumps(lines))


def tensors(values: dict[str, Any]) -> list[list[Any]]:
    """Every stored tensor of the model in its order: name, shape, role, shard, and two sums of its initial values."""
    model = build_model(combine([ConfigSource(thaw(values))], ranks=1, check_inputs=False).config)
    found = []
    for tensor in stored_tensors(model):
        logical, flat = tensor.logical, tensor.detach().double().flatten()
        waves = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * math.e)
        shard = tensor_to_dict(logical)["shard"]
        sums = [(flat * waves).sum().item(), flat.square().sum().sqrt().item()]
        form = [list(logical.shape), logical.role.value, shard, logical.keep_fp32, logical.matrices]
        found.append([logical.name, *form, str(tensor.dtype), sums])
    return json.loads(json.dumps(found))


def _given(found: Any) -> dict[str, Any]:
    """Values of the user, without their files."""
    values = thaw(found.config.model_dump())
    given: dict[str, Any] = {}
    for path, _ in leaves(values):
        inside: KeyPath = path
        if found.origins[".".join(map(str, path))].given:
            cut = next((n for n, part in enumerate(inside) if isinstance(part, int)), len(inside))
            put(given, inside[:cut], get(values, inside[:cut]))  # lists as a whole
    return given


def _cases() -> dict[str, dict[str, Any]]:
    from tests.training.matrix import merged
    from tests.training.matrix import read as matrix

    found = {}
    for file in sorted((ROOT / "configs").rglob("*.yml")):
        name = str(file.relative_to(ROOT / "configs").with_suffix(""))
        try:
            found[name] = _given(load([str(file)], [], ranks=None, check_inputs=False))
        except ConfigError:
            continue  # a layout or a part of others, no run by itself
    layouts = matrix()
    for name, entry in layouts["architectures"].items():
        own = {key: value for key, value in entry.items() if key not in ("about", "apart")}
        found[f"matrix/{name}"] = merged(layouts["common"], own)
    return found


def main(folder: Path) -> None:
    cases = _cases()
    small = [name for name in cases if name.startswith(("matrix/", "test/"))]
    write(folder, "cases", cases)
    write(folder, "resolved", {name: resolved(values, 1 if name in small else None) for name, values in cases.items()})
    write(folder, "models", {name: tensors(cases[name]) for name in small})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
