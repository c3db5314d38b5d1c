"""The configuration that a checkpoint was made with."""

from __future__ import annotations

from megatron.config import Config
from megatron.config.source.resolved_file import read_resolved_text
from megatron.config.stages import as_of

from .format.errors import CheckpointError
from .read.reader import Checkpoint

ADAPTERS = "adapters"  # in the meta data of a checkpoint of adapters: the hash of the weights under them


def config_of(checkpoint: Checkpoint, *, whole: bool = True) -> Config:
    """The configuration that wrote a checkpoint, as of its stage of sequence length (length and rotary options).

    Raises:
        CheckpointError: with `whole`, of a checkpoint that has adapters and not the weights under them.
    """
    if whole:
        refuse_adapters(checkpoint)
    return as_of(read_resolved_text(checkpoint.meta.config, f"checkpoint {checkpoint.path}"), checkpoint.meta.step)


def refuse_adapters(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` if a checkpoint has adapters and not the weights under them."""
    if ADAPTERS in checkpoint.meta.extra:
        raise CheckpointError(
            checkpoint.path,
            "it has adapters, without the weights that they belong to: `deepy adapter merge` makes a whole checkpoint",
        )
