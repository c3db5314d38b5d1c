"""From sources of values to one frozen configuration with the origin of each key, or all of its problems."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import rules
from .derive import AT_START, NEED_RANKS, NEED_TOKENIZER, View, derive, unknown_after
from .kind import kinds_of
from .problems import ABSENT, ConfigError, Problem, list_problems
from .rule_context import RuleContext
from .schema import Config, Path, current_schema, dotted, lookup, parse_path, pattern_of, using_extensions
from .sections.output import RUN_NAME
from .sections.recipe import OptimizerSection
from .source.extensions import admit_names, extensions_of, refuse_names
from .source.files import gather, normalise, run_name, translate_flat
from .source.layers import DEFAULT, ConfigSource, Origin, Overridden, merge
from .source.structure import check_structure
from .tree import get, leaves, put, thaw
from .variants import check_variants, complete_variants

FEW = 2  # overridden values that a start prints in full
OPEN = frozenset(tuple[str | int, ...](name.split(".")) for name in (*AT_START, *NEED_RANKS, *NEED_TOKENIZER))


class Origins(Mapping[str, Origin]):
    """The origin of each value, by dotted key. All are found when the first one is read, because that is a fifth of the
    work. A plan resolves hundreds of layouts and reads no origin."""

    def __init__(self, find: Callable[[], dict[str, Origin]]) -> None:
        self._find = find

    @cached_property
    def _found(self) -> dict[str, Origin]:
        return self._find()

    def __getitem__(self, key: str) -> Origin:
        return self._found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __reduce__(self) -> tuple[type[dict], tuple[dict[str, Origin]]]:
        return dict, (self._found,)  # another process gets the values


@dataclass(frozen=True)
class Resolved:
    """A run's configuration and its history.

    Attributes:
        config: frozen, every derivable key filled in.
        origins: where each value came from, by dotted key.
        overridden: values that lost to later ones.
        warnings: allowed values that are probably not meant.
        notes: of the translation of a GPT-NeoX file.
        ranks: the number of ranks it was resolved for, or None if unknown.
    """

    config: Config
    origins: Mapping[str, Origin]
    overridden: tuple[Overridden, ...] = ()
    warnings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: int | None = None

    def summary(self, *, short: bool = False) -> str:
        """The text for a start: overridden values, notes of a translation, and warnings. With `short`, many overridden
        values are only named."""
        parts = [f"note: {note}" for note in self.notes]
        if short and len(self.overridden) > FEW:
            names = list(dict.fromkeys(each.key for each in self.overridden))
            named = ", ".join(names[:FEW]) + (", ..." if len(names) > FEW else "")
            parts.append(f"{len(self.overridden)} values are overridden ({named}). deepy config show lists them")
        else:
            parts += [f"override: {each}" for each in self.overridden]
        return "\n".join(parts + ([list_problems(self.warnings)] if self.warnings else []))


def resolve(
    values: dict[str, Any], *, ranks: int | None = 1, check_inputs: bool = False, whose: str | None = None
) -> Config:
    """The configuration that a plain nested dictionary describes (shorthands allowed).

    Args:
        values: nested dictionaries of keys.
        ranks: processes of the whole run, or None if unknown.
        check_inputs: also check the inputs of a start: data and files that exist.
        whose: the checkpoint that the values come from, or None if they are the user's own.

    Raises:
        ConfigError: with all problems.
    """
    return combine([ConfigSource(thaw(values))], ranks=ranks, check_inputs=check_inputs, whose=whose).config


def load(
    files: Sequence[str | os.PathLike],
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    check_inputs: bool = True,
    here: bool = True,
    whose: str | None = None,
) -> Resolved:
    """The configuration of a run from its files and overrides.

    Args:
        files: YAML files, merged left to right, in the native form or GPT-NeoX's flat one.
        overrides: `key.path=value`, merged last.
        ranks: processes of the whole run. None takes `launch.ranks`. If that is not set either, keys that depend on the
            data parallel size are neither derived nor checked.
        check_inputs: also check the inputs of a start: data, tokenizer and checkpoint files, folders to write into.
        here: False where the run will start later and elsewhere, in a scheduler's job. This machine's GPUs, folders and
            programs are then not checked.
        whose: as of `resolve`.

    Raises:
        ConfigError: with all problems.
    """
    sources, notes = translate_flat(gather(files, overrides))
    name = run_name(files[0]) if files else "run"
    given: dict[str, Any] = {"check_inputs": check_inputs, "notes": notes, "files": files, "here": here, "whose": whose}
    return combine(sources, ranks=ranks, name=name, **given)


def combine(
    sources: list[ConfigSource],
    *,
    ranks: int | None,
    check_inputs: bool = True,
    name: str = "run",
    notes: tuple[str, ...] = (),
    files: Sequence[str | os.PathLike] = (),
    here: bool = True,
    whose: str | None = None,
) -> Resolved:
    """Merge sources left to right, fill in defaults and derived keys, and check everything.

    Raises:
        ConfigError: with all problems of all sources.
    """
    if whose is None:
        admit_names(sources)
    else:
        refuse_names(sources, whose)
    with using_extensions(extensions_of(sources)):
        for source in (source for source in sources if source.resolved):
            # A resolved file has all keys. No rule warns about defaults, which no user chose.
            known = ((path, value, lookup(path)) for path, value in leaves(source.values))
            source.places |= {path: DEFAULT for path, value, key in known if key is not None and key.default == value}
        merged, overridden = merge([normalise(source) for source in sources])
        _add_default_members(merged)
        _add_sizes_of_whole_models(merged)
        config, found, unknown = check_structure(merged.values, merged.origin)
        if merged.unread:  # what is missing may stand there: only what is wrong by itself is said
            raise ConfigError([*merged.problems, *(each for each in found if each.value is not ABSENT)])
        launch = config.launch
        if ranks is None and launch.hostfile is None and launch.runner in ("auto", "local"):
            ranks = launch.ranks  # of each host

        given = thaw(config.model_dump())
        problems = [*merged.problems, *found, *check_variants(given, merged.origin)]
        unknown = unknown_after(unknown, lambda key: get(merged.values, parse_path(key), None) is not None)
        view = View(thaw(given), name, ranks)
        derived = derive(view)
        derived.update(complete_variants(view, given))
        named = _fill_in_the_name(view)
        config = current_schema().model_validate(view.values)
        origin = _origins(merged, derived, view.values)

        context = RuleContext(config, ranks, origin, tuple(os.fspath(file) for file in files), here, resolve, named)
        for each in rules.broken(context, inputs=check_inputs):  # a rule that has read an unknown value would mislead
            if not any(".".join(pattern_of(parse_path(key))) in unknown for key in each.keys):
                problems.append(each)
        if any(each.fatal for each in problems):
            raise ConfigError(problems)
        origins = Origins(lambda: {dotted(path): origin(path) for path, _ in leaves(view.values)})
        return Resolved(config, origins, tuple(overridden), tuple(problems), notes, ranks)


def _fill_in_the_name(view: View) -> bool:
    """Put the run's name into the URLs of stores, so that one line serves all runs of a suite. Returns whether a URL
    had it."""
    named = False
    for number, level in enumerate(view["checkpoint.levels"]):
        url = level["url"]
        if url is not None and RUN_NAME in url:
            path = ("checkpoint", "levels", number, "url")
            put(view.values, path, url.replace(RUN_NAME, str(view["run.name"])))
            named = True
    return named


def _origins(merged: ConfigSource, derived: dict[Path, Origin], values: dict[str, Any]) -> Callable[[Path], Origin]:

    def origin(path: Path) -> Origin:
        if path in derived:
            return derived[path]
        if path in OPEN and get(values, path, None) is None and (key := lookup(path)) and key.derived:
            return Origin("start", text=key.derived)
        return merged.origin(path) if get(merged.values, path) is not ABSENT else DEFAULT

    return origin


def _add_sizes_of_whole_models(merged: ConfigSource) -> None:
    """Keys of `model` that follow from a kind that is the whole model."""
    model = merged.values.get("model")
    layers = model.get("layers") if isinstance(model, dict) else None
    kind = kinds_of().get(layers) if isinstance(layers, str) else None
    if kind is None or kind.stack is None or not isinstance(model, dict):
        return
    own = model.get(layers)
    for name, value in kind.stack(own if isinstance(own, dict) else {}).items():
        path = ("model", *name.split("."))
        if get(merged.values, path) is ABSENT and isinstance(get(merged.values, path[:-1], {}), dict):
            put(merged.values, path, value)
            merged.places[path] = Origin("derived", text="the model's class", keys=(f"model.{layers}.config",))


def _add_default_members(merged: ConfigSource) -> None:
    """Defaults of `optimizer.groups`: the user's own groups join them, key by key."""
    groups = OptimizerSection.model_fields["groups"].get_default(call_default_factory=True)
    given = get(merged.values, ("optimizer", "groups"), {})
    if not isinstance(given, dict) or not isinstance(merged.values.get("optimizer", {}), dict):
        return  # of the wrong type, which is reported elsewhere
    for name, group in groups.items():
        for option, value in group.model_dump(exclude_defaults=True).items():
            path = ("optimizer", "groups", name, option)
            beside = given.get(name, {})
            if isinstance(beside, dict) and option not in beside:
                put(merged.values, path, value)
                merged.places[path] = DEFAULT
