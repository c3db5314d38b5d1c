"""The order of an architecture's layers: our pattern of a configuration's list of layers, and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.pattern import BlockPattern
from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link

from .parts import Found


@dataclass(frozen=True)
class Layers:
    """The layers of an architecture whose configuration lists them. Subclasses read other forms.

    Attributes:
        blocks: patterns of its layers, without variants -> names in the configuration.
        values: further options of ours (dotted) from their configuration, and problems.
        settings: further settings of theirs, from our section and their names of our layers.
        links: further tensors, from the names of all of ours.
        source: the saved tensor that a name is a second name of, or None.
        needed: patterns. A model of this architecture has at least one. Default: the first.
    """

    blocks: dict[str, str]
    values: Callable[[PreTrainedConfig], Found] = lambda theirs: ({}, [])
    settings: Callable[[ModelSection, list[str]], dict[str, Any]] = lambda model, names: {}
    links: Callable[[Collection[str]], tuple[Link, ...]] = lambda ours: ()
    source: Callable[[str, Collection[str]], str | None] = lambda name, saved: None
    needed: tuple[str, ...] = ()

    def read(self, theirs: PreTrainedConfig) -> Found:
        """The pattern and further options, and problems."""
        values, problems = self.values(theirs)
        return {"layers": self.pattern(theirs), **values}, problems

    def write(self, config: Config) -> dict[str, Any]:
        """Their settings that order the layers."""
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
    """A pattern of these blocks, with each run of equal ones written once."""
    runs = ((block, len(list(run))) for block, run in itertools.groupby(blocks))
    return " ".join(f"({block}) x{count}" if count > 1 else block for block, count in runs)


def numbers_of(ours: Collection[str]) -> list[int]:
    """The numbers of the layers that have tensors of these names."""
    return sorted({int(name.split(".")[1]) for name in ours if name.startswith("layers.")})


def without_variants(block: BlockPattern) -> str:
    """A block's pattern by the names of its kinds. Parallel mixers are a sum, so they are sorted."""
    mixers = "+".join(("&".join(sorted(kind.name for kind in block.mixers)), *(kind.name for kind in block.side)))
    return "/".join(filter(None, (mixers, block.ffn.name if block.ffn else "")))
