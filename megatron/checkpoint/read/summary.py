"""Content of a checkpoint, for people and scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from math import prod, sqrt
from typing import Any

from ..format.fragment import FragmentSpec
from .logical import TensorStream
from .reader import Checkpoint


def describe(
    checkpoint: Checkpoint, *, norms: bool = False, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Any]:
    """Step, layout, versions, sizes and tensors of a checkpoint as plain values.

    Args:
        norms: also the 2-norm and the largest magnitude of each tensor and state, which reads all values.
        wanted: function of a tensor's name: whether to list it.
    """
    meta = {name: value for name, value in asdict(checkpoint.meta).items() if name != "config"}
    states: dict[str, dict[str, Any]] = {}
    for (name, state), dtype in checkpoint.stored.items():
        if wanted(name):
            states.setdefault(name, {})[state] = {"dtype": str(dtype).removeprefix("torch.")}
            if norms:
                states[name][state] |= _size(checkpoint, name, state)
    return {
        "path": str(checkpoint.path),
        **meta,
        "config_hash": checkpoint.meta.config_hash,
        "parameters": sum(
            prod(tensor.shape) for name, tensor in checkpoint.tensors.items() if checkpoint.has_weights(name)
        ),
        "files": len(checkpoint.records),
        "bytes": sum(record.size for record in checkpoint.records),
        "fragments": len(checkpoint.index),
        "tensors": [
            {"name": name, "shape": list(checkpoint.tensors[name].shape), "states": found}
            for name, found in states.items()
        ],
    }


def _size(checkpoint: Checkpoint, name: str, state: str) -> dict[str, float]:
    squares, largest, odd = 0.0, 0.0, 0
    with TensorStream(checkpoint) as stream:
        for values in stream.values(FragmentSpec.whole(checkpoint.tensors[name], state)):
            values = values.double()
            finite = values.isfinite()
            odd += int((~finite).sum())
            squares += float(values.square().sum())
            largest = max(largest, float(values[finite].abs().max()) if finite.any() else 0.0)
    return {"norm": sqrt(squares) if squares == squares else squares, "largest": largest, "not_finite": odd}
