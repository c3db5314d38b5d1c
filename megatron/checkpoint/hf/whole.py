"""Export a model that is a class of transformers itself, in the form of its `save_pretrained`."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import logical_of, stored_tensors

from .tokenizer_files import write_tokenizer


def export_whole(
    config: Config, out: Path, dtype: torch.dtype, limit: int, read: Callable[[str], torch.Tensor]
) -> tuple[str, str, torch.dtype, list[str], list[str]]:
    """Write the folder. The model is in memory, in fp32.

    Args:
        dtype: of the weights.
        limit: bytes of one file of weights.
        read: gives a logical tensor by its name.

    Returns:
        The model type, the name of the class, the type and the files of weights, and notes.
    """
    model: Any = build_model(config, dtype=torch.float32, values=False)
    with torch.no_grad():
        for tensor in stored_tensors(model):
            tensor.copy_(read(logical_of(tensor).name))
    theirs = model.as_saved(dtype)
    draft = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex[:12]}")
    draft.mkdir(parents=True)
    try:
        ids, notes = write_tokenizer(draft, config.tokenizer, theirs.config.model_type, config.training.sequence_length)
        for name, value in ids.items():
            for settings in (theirs.config, theirs.generation_config):
                if value is not None and settings is not None:
                    setattr(settings, name, value)
        theirs.save_pretrained(draft, max_shard_size=limit)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    files = sorted(each.name for each in out.glob("*.safetensors"))
    return theirs.config.model_type, type(theirs).__name__, dtype, files, notes
