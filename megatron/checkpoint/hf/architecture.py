"""What the converters know of a Hugging Face architecture: its tensors, its configuration, its names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from megatron.config import Config

from .hybrids import Hybrid
from .links import Link


@dataclass(frozen=True)
class Field:
    """One option under two names.

    Attributes:
        ours: dotted key below `model`.
        theirs: attribute of the configuration object.
        values: our value -> theirs, where they are called differently; None copies the value.
        also: other values of theirs that mean one of ours.
        optional: their configuration may lack the attribute; our option is derived then.
    """

    ours: str
    theirs: str
    values: dict[Any, Any] | None = None
    also: dict[Any, Any] = field(default_factory=dict)
    optional: bool = False

    def read(self, theirs: Any) -> Any:
        """Our value of their configuration object; raises KeyError for one that we do not have."""
        return self.from_hf(getattr(theirs, self.theirs, None) if self.optional else getattr(theirs, self.theirs))

    def to_hf(self, value: Any) -> Any:
        return value if self.values is None else self.values.get(value)

    def from_hf(self, value: Any) -> Any:
        """Our value; raises KeyError for one that we do not have."""
        if self.values is None:
            return value
        return {**{theirs: ours for ours, theirs in self.values.items()}, **self.also}[value]


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face architecture.

    Attributes:
        name: its `model_type`.
        class_name: of the causal language model.
        links: its tensors and ours.
        fields: options that both sides have.
        fixed: our options (dotted, below `model`) that it always computes this way.
        required: attributes of its configuration with the one value that we compute.
        rotary: "none", "whole" (all channels of a head) or "partial".
        block: the pattern of each of its layers, variants left out.
        window: "none", "all" layers, or by "layer" (`layer_types`).
        aliases: names in a module's state dict -> names on disk, where they differ.
        renamed: (pattern, replacement): parts of names in a module's state dict -> what they are called on disk.
        prefix: may be absent from all names of a checkpoint that was saved from the model without its head.
        buffers: patterns of names that are no parameters.
        hybrid: what it has beside, where its layers are of several kinds.
        reads: what else their configuration says: our options (dotted, below `model`), and what is not computed here.
        writes: what else their configuration needs of ours.
    """

    name: str
    class_name: str
    links: tuple[Link, ...]
    fields: tuple[Field, ...]
    fixed: dict[str, Any]
    required: dict[str, Any] = field(default_factory=dict)
    rotary: str = "whole"
    block: str = "attention/mlp"
    window: str = "none"
    aliases: dict[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    prefix: str = "model."
    buffers: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    hybrid: Hybrid | None = None
    reads: Callable[[Any], tuple[dict[str, Any], list[str]]] = lambda theirs: ({}, [])
    writes: Callable[[Config], dict[str, Any]] = lambda config: {}

    @property
    def blocks(self) -> tuple[str, ...]:
        """The patterns of its layers, variants left out."""
        return (self.block,) if self.hybrid is None else tuple(self.hybrid.blocks)

    @property
    def needed(self) -> tuple[str, ...]:
        """Patterns of which a model of this architecture has some layer."""
        return self.blocks[:1] if self.hybrid is None or not self.hybrid.needed else self.hybrid.needed

    def all_links(self, ours: Collection[str]) -> tuple[Link, ...]:
        """Its tensors and ours, for a model with tensors of these names."""
        return self.links if self.hybrid is None else (*self.links, *self.hybrid.links(ours))

    def source(self, name: str, saved: Collection[str]) -> str | None:
        """The tensor, among those that a model is saved with, that a name is a second name of; None if of none."""
        return None if self.hybrid is None else self.hybrid.source(name, saved)

    @property
    def head(self) -> str:
        """Name of the head's weight on disk."""
        return next(f"{link.theirs}.weight" for link in self.links if link.ours == "head")

    def is_buffer(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)

    def canonical(self, name: str) -> str:
        """The name on disk of a complete model."""
        name = self.aliases.get(name, name)
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        whole = name.startswith((self.head.removesuffix("weight"), self.prefix))
        return name if whole else self.prefix + name
