"""Names of a record's numbers in TensorBoard and W&B, which group them by the part before the first `/`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .jsonl import flatten

_GROUPS = {
    "loss": "loss/train",
    "lr": "optimizer/lr",
    "grad_norm": "optimizer/grad_norm",
    "tokens_per_second": "speed/tokens_per_second",
    "tflops": "speed/tflops",
    "mfu": "speed/mfu",
    "peak_tflops": "speed/peak_tflops",
    "step_seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "eta_seconds": "speed/eta_seconds",
    "memory_bytes": "memory/bytes",
}


def tagged(record: Mapping[str, Any]) -> dict[str, float]:
    """`loss/train` next to `loss/<validation set>`, `experts/layer_3/load/7`, and the rest below `train`."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if key == "validation":
            for name, numbers in value.items():
                found.update({f"{what}/{name}": number for what, number in flatten(numbers).items()})
        elif key == "moe":
            for layer, numbers in value.items():
                found.update(_lists(numbers, f"experts/layer_{layer}/"))
        elif key == "statistics":
            found.update({f"{what}/{layer}": number for layer, each in value.items() for what, number in each.items()})
        elif key == "communication":
            found.update(flatten(value, "communication/"))
        elif key != "step":
            found.update({_GROUPS.get(name, f"train/{name}"): number for name, number in flatten({key: value}).items()})
    return found


def _lists(numbers: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Numbers, and each member of lists of them by its place."""
    spread = {
        name: dict(zip(map(str, range(len(value))), value)) if isinstance(value, (list, tuple)) else value
        for name, value in numbers.items()
    }
    return flatten(spread, prefix)
