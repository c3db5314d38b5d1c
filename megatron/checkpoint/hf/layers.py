"""Which layers an architecture has: our pattern of a configuration's list of layers, and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.pattern import BlockPattern
from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link

from .parts import Found, nothing_read


def _no_links(_ours: Collection[str]) -> tuple[Link, ...]:
    return ()


def _no_source(_name: str, _saved: Collection[str]) -> str | None:
    return None


def _no_settings(_model: ModelSection, _names: list[str]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Layers:
    """The layers of an architecture whose configuration lists them. Those that say it otherwise are subclasses.

    Attributes:
        blocks: the patterns of its layers, variants left out, and the name that the configuration has for each.
        values: further options of ours (dotted), and what we do not compute, from their configuration.
        settings: further settings of theirs, from our section and their names of our layers.
        links: further tensors, from the names of all of ours.
        source: the tensor that a name is a second name of, among the names that a model is saved with; None if of none.
        needed: a model with none of these patterns is not one of this architecture; empty stands for the first.
    """

    blocks: dict[str, str]
    values: Callable[[PreTrainedConfig], Found] = nothing_read
    settings: Callable[[ModelSection, list[str]], dict[str, Any]] = _no_settings
    links: Callable[[Collection[str]], tuple[Link, ...]] = field(default=_no_links)
    source: Callable[[str, Collection[str]], str | None] = field(default=_no_source)
    needed: tuple[str, ...] = ()

    def read(self, theirs: PreTrainedConfig) -> Found:
        """The pattern, and further options; what we do not compute."""
        values, problems = self.values(theirs)
        return {"layers": self.pattern(theirs), **values}, problems

    def write(self, config: Config) -> dict[str, Any]:
        """Settings of theirs that say which layer is which."""
        settings = self.settings(config.model, self.names(config.model))
        return {"max_position_embeddings": config.training.sequence_length, **settings}

    def pattern(self, theirs: PreTrainedConfig) -> str:
        """Our layer pattern of their list of layers."""
        names = {theirs: ours for ours, theirs in self.blocks.items()}
        runs = itertools.groupby(
            names[each] for each in getattr(theirs, "layers_block_type", None) or theirs.layer_types
        )
        return " ".join(f"{name} x{len(list(run))}" for name, run in runs)

    def names(self, model: ModelSection) -> list[str]:
        """Their name of each of our layers."""
        return [self.blocks[without_variants(block)] for block in model.blocks]


@dataclass(frozen=True)
class Uniform(Layers):
    """The same block in every layer."""

    def pattern(self, theirs: PreTrainedConfig) -> str:
        (block,) = self.blocks
        return f"({block}) x{theirs.num_hidden_layers}"

    def write(self, config: Config) -> dict[str, Any]:
        return self.settings(config.model, self.names(config.model))


def uniform(block: str) -> Uniform:
    return Uniform({block: ""})


def runs_of(blocks: list[str]) -> str:
    """A pattern of these blocks, each run of equal ones written once."""
    runs = ((block, len(list(run))) for block, run in itertools.groupby(blocks))
    return " ".join(f"({block}) x{count}" if count > 1 else block for block, count in runs)


def numbers_of(ours: Collection[str]) -> list[int]:
    """The numbers of the layers that have tensors of these names."""
    return sorted({int(name.split(".")[1]) for name in ours if name.startswith("layers.")})


def without_variants(block: BlockPattern) -> str:
    """A block's pattern by the names of its kinds; mixers side by side are a sum, so their order is the alphabet's."""
    mixers = "+".join(("&".join(sorted(kind.name for kind in block.mixers)), *(kind.name for kind in block.side)))
    return "/".join(filter(None, (mixers, block.ffn.name if block.ffn else "")))
