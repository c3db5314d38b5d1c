"""Checkpoints of small models that others learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import Meta, write_tensors
from megatron.checkpoint.format.fragment import WEIGHT, FragmentSpec
from megatron.config import to_yaml
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import logical_of, stored_tensors
from megatron.testing.checks import noise


def write_teacher(folder: Path, values: dict[str, Any]) -> str:
    """A checkpoint of a model with drawn weights. Returns its path."""
    resolved = combine([ConfigSource(values)], ranks=1, check_inputs=False)
    tensors = stored_tensors(build_model(resolved.config))
    items = [(FragmentSpec.whole(logical_of(each), WEIGHT), torch.float32) for each in tensors]

    def drawn(number: int) -> list[torch.Tensor]:
        tensor = tensors[number]
        return [(tensor.detach() + 3 * torch.from_numpy(noise(logical_of(tensor)))).flatten()]

    return str(write_tensors(folder / "step_00000003", items, drawn, Meta(3, to_yaml(resolved))))
