"""Parts of a Hugging Face configuration that are more than a table of fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.config import Config
from megatron.config.variants import options_of

from .rope import rope_parameters, rope_values

MOST = torch.finfo(torch.float32).max  # stands for no limit: JSON has no infinite numbers

Found = tuple[dict[str, Any], list[str]]
"""Our options (dotted, below `model`), and a sentence for each setting that we do not compute."""


class ConfigPart(Protocol):
    """A part of a configuration."""

    def read(self, theirs: Any, /) -> Found:
        """Our options of their configuration object."""
        ...

    def write(self, config: Config, /) -> dict[str, Any]:
        """Their settings of our configuration."""
        ...


@dataclass(frozen=True)
class Functions:
    """A part that is two functions."""

    read: Callable[[Any], Found] = lambda theirs: ({}, [])
    write: Callable[[Config], dict[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class RotaryPart:
    """Rotary options that all layers share, and the longest sequence.

    Attributes:
        partial: whether it can rotate only part of a head's channels.
        section: of our options.
    """

    partial: bool = False
    section: str = "attention"

    def read(self, theirs: Any) -> Found:
        longest = theirs.max_position_embeddings
        rotary, problems = rope_values(theirs.rope_parameters, partial=self.partial, longest=longest)
        return {f"{self.section}.rotary": rotary}, problems

    def write(self, config: Config) -> dict[str, Any]:
        rotary = getattr(config.model, self.section).rotary
        dynamic = rotary.scaling.type == "dynamic"
        return {
            "max_position_embeddings": rotary.scaling.original_length if dynamic else config.training.sequence_length,
            "rope_parameters": rope_parameters(rotary, partial=self.partial),
        }


@dataclass(frozen=True)
class WindowPart:
    """One sliding window in all layers, or in none."""

    section: str = "attention"

    def read(self, theirs: Any) -> Found:
        return {f"{self.section}.window": theirs.sliding_window}, []

    def write(self, config: Config) -> dict[str, Any]:
        """The window of the first layer. Reading back shows layers that differ."""
        first = config.model.blocks[0].mixer
        return {"sliding_window": None if first is None else options_of(config.model, first).window}


def unlimited(value: float) -> bool:
    """Whether an upper limit in a configuration has no effect."""
    return math.isinf(value) or value >= MOST
