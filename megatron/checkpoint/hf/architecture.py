"""Description of a Hugging Face architecture: its tensors, its configuration, its names.

An architecture is described once, in a file of `architectures/` or in a user's package, and used in both directions.
Only `megatron/config/registry.py` names it (role `architecture`)."""

import itertools
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron.config import Config
from megatron.config.pattern import BlockPattern
from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link

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


def unlimited(value: float) -> bool:
    """Whether an upper limit in a configuration has no effect."""
    return math.isinf(value) or value >= MOST


@dataclass(frozen=True)
class Layers:
    """The layers of an architecture whose configuration lists them. Subclasses read other forms.

    Attributes:
        blocks: patterns of its layers, without variants -> names in the configuration.
        values: further options of ours (dotted) from their configuration, and problems.
        settings: further settings of theirs, from our section and their names of our layers.
        links: further tensors, from the names of all of ours.
        source: the saved tensor that a name is a second name of, or None.
        unused: whether a model with tensors of these names has no use for a tensor of this name, which files may have.
        needed: patterns. A model of this architecture has at least one. Default: the first.
    """

    blocks: dict[str, str]
    values: Callable[[PreTrainedConfig], Found] = lambda theirs: ({}, [])
    settings: Callable[[ModelSection, list[str]], dict[str, Any]] = lambda model, names: {}
    links: Callable[[Collection[str]], tuple[Link, ...]] = lambda ours: ()
    source: Callable[[str, Collection[str]], str | None] = lambda name, saved: None
    unused: Callable[[str, Collection[str]], bool] = lambda name, needed: False
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
        runs = itertools.groupby(names[x] for x in getattr(theirs, "layers_block_type", None) or theirs.layer_types)
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


def listed(model: ModelSection, names: list[str]) -> dict[str, Any]:
    """Their two lists, of names of a mixer and a feed-forward network with a space between them."""
    mixers, ffns = zip(*(name.split() for name in names))
    return {"layer_types": list(mixers), "mlp_layer_types": list(ffns)}


@dataclass(frozen=True)
class Listed(Layers):
    """Layers whose names in `blocks` a function of the configuration gives.

    Attributes:
        listed: the name of each layer.
    """

    listed: Callable[[PreTrainedConfig], list[str]] = lambda theirs: theirs.layer_types

    def pattern(self, theirs: PreTrainedConfig) -> str:
        ours = {theirs: block for block, theirs in self.blocks.items()}
        return runs_of([ours[name] for name in self.listed(theirs)])


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


SCORER = "ForSequenceClassification"  # end of the name of a class with outputs for a whole text


@dataclass(frozen=True)
class Field:
    """One option under two names.

    Attributes:
        ours: dotted key below `model`.
        theirs: attribute of the configuration object.
        values: our value -> theirs, where they differ. None copies the value.
        also: other values of theirs -> ours.
        optional: their configuration may lack the attribute. Our option is then derived.
    """

    ours: str
    theirs: str
    values: dict[Any, Any] | None = None
    also: dict[Any, Any] = field(default_factory=dict)
    optional: bool = False

    def read(self, theirs: Any) -> Any:
        """Our value from their configuration object. KeyError for a value that we do not have."""
        return self.from_hf(getattr(theirs, self.theirs, None) if self.optional else getattr(theirs, self.theirs))

    def to_hf(self, value: Any) -> Any:
        return value if self.values is None else self.values.get(value)

    def from_hf(self, value: Any) -> Any:
        """Our value. KeyError for one that we do not have."""
        if self.values is None:
            return value
        return {**{theirs: ours for ours, theirs in self.values.items()}, **self.also}[value]


@dataclass(frozen=True)
class Power(Field):
    """Our number is theirs to a power (-1: the inverse). Integers of theirs stay integers."""

    power: float = -1.0

    def to_hf(self, value: Any) -> Any:
        found = value ** (1.0 / self.power)
        return round(found) if abs(found - round(found)) < 1e-9 * abs(found) else found

    def from_hf(self, value: Any) -> Any:
        return float(value) ** self.power


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face architecture.

    Attributes:
        name: its `model_type`.
        links: its tensors and ours.
        layers: its blocks, and how its configuration orders them. Default: an attention and an MLP in every layer.
        fields: options that both sides have.
        fixed: our options (dotted, below `model`) with the values that it always has.
        required: attributes of its configuration with the only value that we compute.
        parts: further conversions of its configuration, such as rotary options.
        aliases: names in a module's state dict -> names on disk, where they differ.
        renamed: (pattern, replacement) for parts of names in a module's state dict -> on disk.
        prefix: missing from all names of a checkpoint that was saved from the model without its head.
        buffers: patterns of names that are no parameters.
        predicts_more: its files may have layers after the last, or a module `mtp`, which predict further tokens.
        further_block: the pattern of such a layer, if ours can be one (`model.multi_token_prediction`). Without it they
            are skipped.
        further_copies: tensors of each such layer that are copies of others (see `source`).
        newer: why version 4 of transformers does not give this model's logits. "" if it does.
        older: settings that version 4 reads in addition, from settings of version 5.
        by_layer: settings that `per_layer_config` may give to single layers.
        own_class: name of its class, of a causal language model, where transformers has none for `name`.
    """

    name: str
    links: tuple[Link, ...]
    layers: Layers = Uniform({"attention/mlp": ""})
    fields: tuple[Field, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    parts: tuple[ConfigPart, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    prefix: str = "model."
    buffers: tuple[str, ...] = (r".*rotary_emb\.(\w*inv_freq|(cos|sin)_cached)",)
    predicts_more: bool = False
    further_block: str = ""
    further_copies: tuple[str, ...] = ()
    newer: Callable[[ModelSection], str] = lambda model: ""
    older: Callable[[dict[str, Any]], dict[str, Any]] = lambda settings: {}
    by_layer: tuple[str, ...] = ()
    own_class: str = ""

    @property
    def class_name(self) -> str:
        """Name of the class of the causal language model."""
        return self.own_class or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.name]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The patterns of its layers, without variants."""
        return tuple(self.layers.blocks)

    @property
    def needed(self) -> tuple[str, ...]:
        """Patterns: every model of this architecture has at least one."""
        return self.layers.needed or self.blocks[:1]

    def all_links(self, ours: Collection[str]) -> tuple[Link, ...]:
        """Its tensors and ours, for a model with tensors of these names."""
        return (*self.links, *self.layers.links(ours))

    @property
    def head(self) -> str:
        """Name of the head's weight on disk."""
        return next(f"{link.theirs}.weight" for link in self.links if link.ours == "head")

    def is_buffer(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)

    def further(self, names: Collection[str], layers: int) -> list[str]:
        """Names on disk of the layers from this number on, if it may have layers after its last."""
        if not self.predicts_more:
            return []
        numbers = {name: re.match(rf"{re.escape(self.prefix)}layers\.(\d+)\.", name) for name in names}
        return [name for name, hit in numbers.items() if (int(hit[1]) >= layers if hit else name.startswith("mtp."))]

    def keeps_further(self, model: ModelSection) -> bool:
        """Whether it has our model's modules that predict further tokens."""
        return any(without_variants(block) == self.further_block for block in model.further_blocks)

    def canonical(self, name: str) -> str:
        """The name on disk of a complete model."""
        name = self.aliases.get(name, name)
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        whole = name.startswith((self.head.removesuffix("weight"), self.prefix, "score."))
        return name if whole else self.prefix + name
