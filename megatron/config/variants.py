"""Named variants of a kind's options: `attention@local` with `model.variants.local: {window: 512}`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from .derive import View, derivations
from .kind import LayerKind, kinds_of
from .pattern import Kind
from .problems import Problem
from .schema import Path, current_schema, dotted, parse_path
from .section import Section
from .sections.model import ModelSection
from .source.layers import Origin
from .source.structure import check_structure
from .tree import drop, get, put, thaw


def overlay(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, mapping by mapping, as files are merged. Neither is changed.

    An empty mapping adds nothing to one that is there, and where the base has none a mapping is taken whole."""
    merged = thaw(base)
    for name, value in over.items():
        beneath = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(beneath, dict)
        merged[name] = overlay(beneath, value) if both else thaw(value)
    return merged


def kinds_with_variant(view: View, variant: str) -> list[str]:
    """The kinds that the layer pattern uses with this variant, in order of first use."""
    named = (each.name for block in view.blocks for each in block.kinds if each.variant == variant)
    return list(dict.fromkeys(named))


def check_variants(values: dict[str, Any], origin: Callable[[Path], Origin]) -> list[Problem]:
    """Unknown and wrong options of variants. Wrong options are removed from `values`, so that the rest can be checked.

    Args:
        values: the values before derivation, all defaults present.
        origin: where the value at a path came from.
    """
    problems: list[Problem] = []
    for name, own in values["model"]["variants"].items():
        for kind in kinds_with_variant(View(values), name):
            prefix = ("model", "variants", name)
            trial = {**values, "model": {**values["model"], kind: overlay(values["model"][kind], own)}}

            def of_the_variant(path: Path, prefix: Path = prefix) -> Origin:
                return origin((*prefix, *path[2:]))

            _, found, _ = check_structure(trial, of_the_variant)
            for each in found:
                path = (*prefix, *parse_path(each.key)[2:])
                fix = each.fix.replace(f"model.{kind}.", f"{dotted(prefix)}.")
                problems.append(replace(each, key=dotted(path), rule=f"{each.rule} (an option of {kind})", fix=fix))
                drop(values, path)
    return problems


def complete_variants(view: View, given: dict[str, Any]) -> dict[Path, Origin]:
    """Add to each variant the derived options that its own values change, in place.

    A variant with fewer heads has fewer key/value heads too, unless the base or the variant says otherwise.

    Args:
        view: the resolved values.
        given: the values before derivation, all defaults present.

    Returns:
        The origins of the options that were added.
    """
    origins: dict[Path, Origin] = {}
    for name, own in view["model.variants"].items():
        for kind in kinds_with_variant(view, name):
            values = {**view.values, "model": {**view.values["model"], kind: overlay(given["model"][kind], own)}}
            trial = View(values, view.name, view.ranks)
            for rule in derivations(current_schema()):
                path = tuple(rule.key.split("."))
                if path[:2] != ("model", kind) or get(values, path, None) is not None:
                    continue
                value, left_open = rule.value(path, trial), get(own, path[2:]) is None
                put(values, path, value)
                if left_open or value != get(view.values, path):
                    put(own, path[2:], value)
                    origins[("model", "variants", name, *path[2:])] = rule.origin
    return origins


def options_of(model: ModelSection, kind: Kind) -> Any:
    """The options of a layer: its kind's, with its variant's on top.

    Args:
        model: of a resolved configuration.
        kind: a mixer or ffn of a block of `model.blocks`.

    Returns:
        The section object (`AttentionOptions`, `MLPOptions`, ...), every derived option filled in.
    """
    base: Section = getattr(model, kind.name)
    if kind.variant is None:
        return base
    return type(base).model_validate(overlay(base.model_dump(), model.variants[kind.variant]))


def used_kinds(model: ModelSection) -> Iterator[tuple[int, LayerKind, Any]]:
    """(number of the block, kind, options) of every layer of the pattern, and of modules that predict further tokens,
    whose blocks have the next numbers."""
    kinds = kinds_of(tuple(model.extensions))
    for number, block in enumerate((*model.blocks, *model.further_blocks)):
        for each in block.kinds:
            yield number, kinds[each.name], options_of(model, each)
