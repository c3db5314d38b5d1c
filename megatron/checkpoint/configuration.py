"""The configuration that a checkpoint was made with."""

from __future__ import annotations

import tempfile

from megatron.config import Config, read_resolved
from megatron.config.stages import as_of

from .reader import Checkpoint


def config_of(checkpoint: Checkpoint) -> Config:
    """The configuration of the run that wrote a checkpoint, as of the stage of sequence length that it was written in:
    its sequences are those that the model has learned from, and its rotary options those that it was trained with."""
    with tempfile.NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as file:
        file.write(checkpoint.meta.config)
        file.flush()
        return as_of(read_resolved(file.name), checkpoint.meta.step)
