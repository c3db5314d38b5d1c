"""The configuration that a checkpoint was made with."""

from __future__ import annotations

from megatron.config import Config
from megatron.config.source.resolved_file import read_resolved_text
from megatron.config.stages import as_of

from .read.reader import Checkpoint


def config_of(checkpoint: Checkpoint) -> Config:
    """The configuration that wrote a checkpoint, as of its stage of sequence length (length and rotary options)."""
    return as_of(read_resolved_text(checkpoint.meta.config, f"checkpoint {checkpoint.path}"), checkpoint.meta.step)
