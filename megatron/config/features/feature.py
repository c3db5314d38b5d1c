"""Declarations of features, without torch: keys, rules, engine part, hook, memory and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import create_model

from ..registry import FEATURE, RegistryError, load, registry_of
from ..section import Section

if TYPE_CHECKING:
    from ..problems import Problem
    from ..rule_context import RuleContext

S = TypeVar("S", bound=Section)
Rule = Callable[["RuleContext"], Iterator["Problem"]]


@dataclass(frozen=True)
class Keys(Generic[S]):
    """Keys that a feature adds to a section.

    Attributes:
        section: its path, such as "logging" or "evaluation.samples". The top level is "".
        fields: a section with these keys. The section of a `Config` is a subclass.
        after: the key behind which they are listed in resolved files and documentation. By default they come last.
    """

    section: str
    fields: type[S]
    after: str = ""

    def of(self, config: Any) -> S:
        """The section of a `Config`, typed by these keys."""
        return reduce(getattr, self.section.split(".") if self.section else (), config)


@dataclass(frozen=True)
class Message:
    """Collectives of one rank in a step.

    Attributes:
        phase: one of "exchange", "forward", "backward" or "update".
        group: the axis of the mesh, or "replicas": the ranks with the same parameters.
        elements: of all messages together.
    """

    phase: str
    group: str
    operation: str
    dtype: str
    elements: int
    messages: int = 1


@dataclass(frozen=True)
class Feature:
    """An optional part of a run. A run that does not want it imports this description only.

    Attributes:
        about: one sentence.
        wanted: whether a run of this `Config` has it.
        keys: keys that it adds to sections.
        rules: each checks the whole configuration.
        engine: import path of its `EnginePart`, if it has one.
        before: the part attaches before the first of these that the engine lists, else after all others.
        hook: import path of its `Hook`, which `of(parts)` makes, if it has one.
        hook_before: the hook acts before the first of these, else directly before the state is saved.
        memory: (config, layout, parameters of a rank) -> bytes by name, which a plan adds to the memory of a rank.
        needs: names of features that a run of such a `Config` then has too.
        skips_updates: whether its part may skip an update after gradients were summed.
        skipped_batches: the most batches of training data that it may skip.
        clips: whether its part clips gradients in place of the global norm.
        shares: numbers that it adds to the message in which ranks exchange a step's results.
        identity: keys that must have the values of the checkpoint in a run that resumes.
        reading: the `Config` of a process that only reads weights, where the feature would change them.
        draws: whether its part draws random numbers in a forward pass, by the numbers of samples.
        traffic: the messages of its part in a step of a `Config`, or the reason that no formula exists.
        status: import path of a function (config, folder of a run) -> lines, which `deepy status` adds.
        share: (number of this run's share of each batch of training data, number of shares), if runs share them.
    """

    about: str
    wanted: Callable[[Any], bool]
    keys: tuple[Keys[Any], ...] = ()
    rules: tuple[Rule, ...] = ()
    engine: str = ""
    before: tuple[str, ...] = ()
    hook: str = ""
    hook_before: tuple[str, ...] = ()
    needs: Callable[[Any], tuple[str, ...]] = lambda config: ()
    skips_updates: Callable[[Any], bool] = lambda config: False
    skipped_batches: Callable[[Any], int] = lambda config: 0
    clips: Callable[[Any], bool] = lambda config: False
    shares: Callable[[Any, Any], int] = lambda config, layout: 0
    memory: Callable[[Any, Any, Any], Mapping[str, float]] = lambda config, layout, weights: {}
    identity: tuple[str, ...] = ()
    reading: Callable[[Any], Any] = lambda config: config
    draws: Callable[[Any], bool] = lambda config: False
    traffic: Callable[[Any], Iterable[Message] | str] = lambda config: ()
    status: str = ""
    share: Callable[[Any], tuple[int, int]] | None = None


def only_where(wanted: Callable[[Any], bool], rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules, for runs whose configuration wants the feature."""

    def limited(rule: Rule) -> Rule:
        return lambda context: rule(context) if wanted(context.config) else iter(())

    return tuple(map(limited, rules))


@cache
def features_of(extensions: tuple[str, ...] = ()) -> Mapping[str, Feature]:
    """All features by name, in the order of the registry.

    Raises:
        RegistryError: an extension, or its description of a feature, cannot be used.
    """
    registry = registry_of(extensions)
    found = {}
    for name in registry.names(FEATURE):
        found[name] = registry.load(FEATURE, name)
        if not isinstance(found[name], Feature):
            rule = f"{registry.path(FEATURE, name)} must be a megatron.config.features.feature.Feature"
            raise RegistryError(rule, "describe it as examples/plugin/my_lab/worst_label/options.py does")
    return MappingProxyType(found)


def load_of(feature: str, name: str) -> Any:
    """Import "module:name" from the folder of a feature inside, for a tool that is about the feature.

    Raises:
        RegistryError: there is no such feature.
    """
    folder = registry_of().path(FEATURE, feature).partition(":")[0].rpartition(".")[0]
    return load(f"{folder}.{name}")


def wanted_features(config: Any) -> dict[str, Feature]:
    """The features that a run of this `Config` has, by name, with the features that they need."""
    features = features_of(tuple(config.model.extensions))
    wanted = {name for name, feature in features.items() if feature.wanted(config)}
    wanted |= {name for each in wanted for name in features[each].needs(config)}
    return {name: feature for name, feature in features.items() if name in wanted}


def for_reading(config: Any) -> Any:
    """The `Config` of a process that reads the weights of checkpoints, and trains nothing."""
    return reduce(lambda found, feature: feature.reading(found), wanted_features(config).values(), config)


def share_of(config: Any) -> tuple[int, int]:
    """This run's share of each batch of training data, and the number of shares."""
    found = (each.share(config) for each in wanted_features(config).values() if each.share is not None)
    return next(found, (0, 1))


def in_order(inside: Iterable[str], features: Mapping[str, tuple[str, ...]], last: str = "") -> list[str]:
    """Names inside and of features. A feature stands before the first name that it gives, else before `last`."""
    names = list(inside)
    for name, before in features.items():
        end = names.index(last) if last in names else len(names)
        names.insert(min((names.index(each) for each in before if each in names), default=end), name)
    return names


def logged(name: str) -> Rule:
    """The rule that `name`, a number of steps or None, must be a multiple of `logging.every`."""

    def rule(context: RuleContext) -> Iterator[Problem]:
        every, lines = context.value(name), context.config.logging.every
        if every is not None and every % lines:
            yield context.problem(
                name,
                "logging.every",
                rule="must be a multiple of logging.every, since they are part of the logged lines",
                fix=f"use {-(-every // lines) * lines}",
            )

    return rule


def with_keys(base: type[S], section: str, features: Mapping[str, Feature]) -> type[S]:
    """A section with the keys that features add to it, or `base` itself.

    Raises:
        RegistryError: a feature adds a key that is there already.
    """
    every = [(name, keys) for name, feature in features.items() for keys in feature.keys]
    added = [(name, keys) for name, keys in every if keys.section == section]
    if not added:
        return base
    fields = list(base.model_fields.items())
    for feature, keys in added:
        names = [name for name, _ in fields]
        for taken in sorted(keys.fields.model_fields.keys() & set(names)):
            name = f"{section}.{taken}" if section else taken
            raise RegistryError(f"feature {feature} must not add the key {name}, which is there already", "rename it")
        place = names.index(keys.after) + 1 if keys.after in names else len(names)
        fields[place:place] = keys.fields.model_fields.items()
    # pydantic orders fields as the last base does, and takes methods from the first.
    order = create_model("Order", __base__=Section, **{name: (field.annotation, field) for name, field in fields})  # type: ignore[call-overload]
    bases = (base, *(keys.fields for _, keys in added), order)
    return create_model(base.__name__, __base__=bases, __module__=base.__module__, __doc__=base.__doc__)


def extended(section: str) -> Callable[[type[S]], type[S]]:
    """Decorator of a section of the schema: the features inside add their keys."""
    return lambda base: with_keys(base, section, features_of())
