"""Descriptions of kinds of layers, without torch: options, rules, and the path of the module.

The `options.py` of a kind ends with such a description, which `registry` names. Whatever else knows of kinds (the layer
pattern, the sections of `model`, derivation, rules, the layer stack) reads it there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from .problems import ABSENT
from .registry import KIND, RegistryError, load, registry_of
from .section import Section
from .tree import get

if TYPE_CHECKING:
    from .problems import Problem
    from .rule_context import RuleContext
    from .schema import Config

O = TypeVar("O", bound=Section)


@dataclass(frozen=True)
class KindUse(Generic[O]):
    """A kind as the layer pattern uses it, plain or with a variant: the argument of its rules.

    Attributes:
        context: the whole configuration, and where its values came from.
        kind: its name in the pattern.
        variant: the name of its variant, or None.
        options: its options, the variant's on top.
    """

    context: RuleContext
    kind: str
    variant: str | None
    options: O

    @property
    def config(self) -> Config:
        return self.context.config

    @property
    def hidden_size(self) -> int:
        return self.context.config.model.hidden_size

    def key(self, name: str) -> str:
        """The whole name of a key. One that begins with a dot is an option of this kind: the variant's own where the
        variant gives it, else the base's."""
        if not name.startswith("."):
            return name
        own = self.config.model.variants[self.variant] if self.variant else {}
        said = get(own, tuple(name[1:].split(".")), ABSENT) is not ABSENT
        return f"model.variants.{self.variant}{name}" if said else f"model.{self.kind}{name}"

    def given(self, name: str) -> bool:
        """Whether the user gave this key (see `key`)."""
        return self.context.given(self.key(name))

    def problem(self, keys: str, *others: str, rule: str, fix: str, fatal: bool = True) -> Problem:
        """A problem with the first of `keys`, which are separated by spaces, in view of the others (see `key`)."""
        names = map(self.key, " ".join((keys, *others)).split())
        return self.context.problem(*names, rule=rule, fix=fix, fatal=fatal)

    def warning(self, keys: str, *others: str, rule: str, fix: str) -> Problem:
        """A problem that does not stop the run."""
        return self.problem(keys, *others, rule=rule, fix=fix, fatal=False)


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer.

    Attributes:
        role: "mixer" (before the slash of the pattern), "ffn" (after it) or "side" (only after a '+').
        options: the section of its options, `model.<kind>`.
        about: one sentence about that section.
        layer: import path of its module, "package.module:Class".
        rules: each checks one use of the kind in the pattern.
        stack_rules: each checks the whole configuration, also where the pattern does not have the kind.
        packages: names of packages of fused kernels that the module can use, and how to get each.
        keeps_fp32: whether some of its parameters stay in fp32 in every precision.
        attends: whether it is softmax attention, which `residual.norm: hybrid` treats apart.
        experts: how many experts it has with these options. Their load is counted (`model/expert_tally.py`).
        weights: parameters in large matrices, and separately in routed experts, from its options and the hidden size. A
            lower bound: a size without a short formula counts 0.
        compiles: whether torch.compile gains from a block of it: it has no loops or kernels of its own.
        mixes_samples: whether, with these options, a token's result depends on other samples of its batch.
        keeps_buffers: whether, with these options, checkpoints keep tensors of it that are no parameters.
        clips_logits: whether, with these options, its layers have a `logit_clip` (`model/logit_clip.py`).
        exchange: how models with it are exchanged, where no architecture of transformers has it. "" for no way.
        context: how its layers compute where several ranks share a sequence (`parallel.context`). `"alone"`: each token
            by itself. `"attends"`: by `parallel.context_method`. `"scans"`: all ranks at once, with the states of the
            ranks before (`kinds/common/recurrence/sequence_scan.py`). `"states"`: ranks wait for the state of the rank
            before (`model/relay.py`), which its `new_state` makes. `""`: not at all.
        neighbours: whether, where it attends, it also needs the token before a rank's first one.
        columns: whether its layers can read and write a part of the stream's channels (`parallel.columns`).
        draws: whether, with these options, a forward pass in training draws random numbers.
        repeats: whether its layers can be in a recurrent group, which runs them several times with the same weights:
            they hand nothing to later layers and count nothing by layer.
        linears: names of its linear layers with these options, which may have adapters. Of a whole model: of all its
            blocks. None: it does not say.
        whole: import path of a class with the interface of `model.stack.Model`, for a kind that is a whole model.
        stack: of such a kind: values of other keys of `model`, from its options as they were given.
        outline: of such a kind: number of its blocks, and logical name of its token embedding, from its options.
        scales_input: whether, with these options, its layers multiply their normalised input by vectors of their own.
            The norm before them has none.
        fetches: import path of the class that keeps its experts outside of the device (`decoding/outside.py`), or "".
        stays: import path of the engine in which decoded tokens stay with its experts, or "".
        head_width: channels over which its query-key products sum, if its option `scale` multiplies those.
    """

    role: Literal["mixer", "ffn", "side"]
    options: type[Section]
    about: str
    layer: str
    rules: tuple[Callable[[KindUse[Any]], Iterator[Problem]], ...] = ()
    stack_rules: tuple[Callable[[RuleContext], Iterator[Problem]], ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    keeps_fp32: bool = False
    attends: bool = False
    exchange: str = ""
    experts: Callable[[Any], int] = lambda options: 0
    weights: Callable[[Any, int], tuple[int, int]] = lambda options, width: (0, 0)
    compiles: bool = False
    mixes_samples: Callable[[Any], bool] = lambda options: False
    keeps_buffers: Callable[[Any], bool] = lambda options: False
    clips_logits: Callable[[Any], bool] = lambda options: False
    context: Literal["", "alone", "attends", "scans", "states"] = ""
    neighbours: bool = False
    columns: bool = False
    draws: Callable[[Any], bool] = lambda options: False
    repeats: bool = False
    linears: Callable[[Any], tuple[str, ...] | None] = lambda options: None
    scales_input: Callable[[Any], bool] = lambda options: False
    fetches: str = ""
    stays: str = ""
    head_width: Callable[[Any], int] | None = None
    whole: str = ""
    stack: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    outline: Callable[[Any], tuple[int, str]] = lambda options: (1, "")

    @property
    def module(self) -> Any:
        """The class of its layers. This imports torch."""
        return load(self.layer)


@cache
def kinds_of(extensions: tuple[str, ...] = ()) -> Mapping[str, LayerKind]:
    """All kinds of layers by name, with the kinds of the extensions.

    Raises:
        RegistryError: an extension, or what it says of a kind, cannot be used.
    """
    registry = registry_of(extensions)
    found = {}
    for name in registry.names(KIND):
        found[name] = registry.load(KIND, name)
        if not isinstance(found[name], LayerKind):
            rule = f"{registry.path(KIND, name)} must be a megatron.config.kind.LayerKind"
            raise RegistryError(rule, "describe the kind as the options.py of a kind in megatron/kinds does")
    return MappingProxyType(found)
