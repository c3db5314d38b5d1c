"""The configuration that a checkpoint was made with."""

from __future__ import annotations

from megatron.config import Config
from megatron.config.source.resolved_file import read_resolved_text
from megatron.config.stages import as_of

from .read.reader import Checkpoint


def config_of(checkpoint: Checkpoint) -> Config:
    """The configuration of the run that wrote a checkpoint, as of the stage of sequence length that it was written in:
    its sequences are those that the model has learned from, and its rotary options those that it was trained with."""
    return as_of(read_resolved_text(checkpoint.meta.config, f"checkpoint {checkpoint.path}"), checkpoint.meta.step)
