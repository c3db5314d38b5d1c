"""Names of the registry, and import paths into a user's packages: each must stand for something."""

from __future__ import annotations

from collections.abc import Iterator

from ..catalog import lookup
from ..names.importable import check_importable
from ..optimizer_kind import NOT_BUILT
from ..problems import Problem
from ..registry import ADDED, OPTIMIZER, Registry, RegistryError, registry_of
from ..rule_context import RuleContext
from ..source.structure import nearest
from ..tree import leaves


def names_stand_for_something(context: RuleContext) -> Iterator[Problem]:
    for path, value in leaves(context.config.model_dump()):
        key = lookup(path)
        if key is None or "role" not in key.limits or not isinstance(value, str) or value in key.limits["words"]:
            continue
        role, registry = key.limits["role"], _registry(context)
        inside = registry_of().names(role)
        names = (
            *key.limits["words"],
            *(name for name in registry.names(role) if role not in ADDED or name not in inside),
        )
        if role in ADDED and value in inside:
            rule = f"{value} must be turned on by keys of its own, not listed in {ADDED[role]}"
            yield context.problem_at(path, rule=rule, fix="remove it here")
        elif value in inside:
            continue
        elif role == OPTIMIZER and value in NOT_BUILT and ":" not in registry.tables[role].get(value, ""):
            rule, fix = NOT_BUILT[value]
            yield context.problem_at(path, rule=f"{key.name} must be one that is built: {rule}", fix=fix)
        elif ":" not in registry.tables[role].get(value, value):
            others = f"use one of: {', '.join(names)}" if names else "write it as package.module:name"
            known = f"one of {', '.join(names)}, or " if names else ""
            rule = f"{key.name} must be {known}an import path (package.module:name)"
            yield context.problem_at(path, rule=rule, fix=nearest(value, names) or others)
        else:
            try:
                check_importable(registry.path(role, value))
            except RegistryError as error:
                yield context.problem_at(path, rule=error.rule, fix=error.fix)


def _registry(context: RuleContext) -> Registry:
    """With the extensions' names. Another rule reports an extension that cannot be loaded."""
    try:
        return registry_of(tuple(context.config.model.extensions))
    except RegistryError:
        return registry_of()
