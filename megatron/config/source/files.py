"""Files and overrides in the order in which they are merged, with short forms and flat files of GPT-NeoX translated."""

import os
from collections.abc import Sequence
from pathlib import Path as File
from typing import Any

from ...installation import configuration_file
from ..problems import ABSENT, ConfigError, Problem
from ..schema import Config, Path, dotted, lookup, parse_path
from ..tree import drop, get, put
from .layers import ConfigSource, Origin
from .structure import nearest
from .yaml_source import read_file, read_override

MOST_FILES = 40  # of a run, each counted as often as it is extended: files that extend files can double at each level


def gather(files: Sequence[str | os.PathLike], overrides: Sequence[str] = ()) -> list[ConfigSource]:
    """All sources, in the order in which they are merged.

    A file's bases (`extends:`, one path or a list, seen from the file's folder) come before the file itself. Other
    words are names of ready configurations, such as `pythia/70m`."""
    sources: list[ConfigSource] = []
    for file in files:
        path = os.fspath(file)
        sources += _with_bases(configuration_file(path) or path, (), [MOST_FILES])
    return sources + [read_override(argument) for argument in overrides]


def run_name(file: str | os.PathLike) -> str:
    """The name of the run of a configuration file: mistral-7b for `configs/mistral/7b.yml`, since many folders have a
    7b.yml.

    A file of the working directory, or of a folder called `configs`, has only its own name."""
    typed = os.fspath(file)
    path = File(configuration_file(typed) or typed).absolute()
    folder = path.parent
    alone = folder == File.cwd() or folder.name in ("", "configs")
    return path.stem if alone else f"{folder.name}-{path.stem}"


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A user's words as (files, overrides): `key.path=value` is an override unless there is a file of that name."""
    overrides = [each for each in arguments if "=" in each and not os.path.isfile(each)]
    return [each for each in arguments if each not in overrides], overrides


def _with_bases(path: str, open_files: tuple[str, ...], left: list[int]) -> list[ConfigSource]:
    """A file and its bases. `left` counts down the files that may still be read."""
    source = read_file(path)
    left[0] -= 1
    where = str(source.origin(("extends",)))
    bases = source.values.pop("extends", None)
    if bases is None:
        return [source]
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        rule, fix = "extends must be a path or a list of paths", "write extends: base.yml"
        source.problems.append(Problem("extends", rule, fix, bases, where))
        return [source]
    chain = (*open_files, os.path.realpath(path))
    sources: list[ConfigSource] = []
    for name in names:
        base = os.path.join(os.path.dirname(path), name)
        if left[0] <= 0:
            rule = f"a file extends at most {MOST_FILES} files, with the bases of bases"
            fix = "put what they have in common into one"
        elif os.path.realpath(base) in chain:
            circle = " -> ".join([*(File(each).name for each in chain), File(base).name])
            rule, fix = f"the files extend each other in a circle: {circle}", "remove one of the extends"
        elif not os.path.isfile(base):
            rule, fix = (
                f"there is no file {base}",
                "give the path relative to the folder of the file that says extends",
            )
        else:
            sources += _with_bases(base, chain, left)
            continue
        source.unread = True
        source.problems.append(Problem("extends", rule, fix, name, where))
        if left[0] <= 0:
            break
    return [*sources, source]


def translate_flat(sources: list[ConfigSource]) -> tuple[list[ConfigSource], tuple[str, ...]]:
    """`sources` with all flat ones replaced by one native one, at the place of the last of them.

    Flat files are read together, since GPT-NeoX lets one file's key bear on another's. Overrides of flat keys
    (`train_iters=10`) count as flat too once there is a flat file.

    Returns:
        The native sources, and what the translation has to say.
    """
    files = [source for source in sources if source.fallback.kind == "file" and not _native(source)]
    if not files:
        return sources, ()
    from .. import neox  # needed by few runs, and large

    flat = [source for source in files if neox.is_flat(source.values)]
    if not flat:
        return sources, ()
    last = flat[-1]
    flat += [source for source in sources if source.fallback.kind == "argument" and _flat_argument(source)]
    translation = neox.translate(flat)
    places: dict[Path, Origin] = {parse_path(key): origin for key, origin in translation.origins.items()}
    read = [problem for source in flat for problem in source.problems]
    native = ConfigSource(translation.values, places, last.fallback, read, any(source.unread for source in flat))
    native.problems += translation.problems
    result = [
        native if source is last else source
        for source in sources
        if source is last or not any(source is each for each in flat)
    ]
    return result, tuple(translation.notes)


# Sections whose names GPT-NeoX has for keys of its own: such a file is inspected more closely.
_AMBIGUOUS = {"optimizer", "precision", "tokenizer", "checkpoint", "deepspeed"}


def _native(source: ConfigSource) -> bool:
    """Whether this is plainly no flat file: known sections only, and one that GPT-NeoX has no key like."""
    names = set(source.values)
    return names <= set(Config.model_fields) and (not names or bool(names - _AMBIGUOUS))


def _flat_argument(source: ConfigSource) -> bool:
    """Whether an override is of a flat key: no dot in it, and no section's name."""
    dotted = "." in source.fallback.text.partition("=")[0]
    return bool(source.values) and not dotted and not set(source.values) & set(Config.model_fields)


def convert(files: Sequence[str]) -> str:
    """The native YAML that says what GPT-NeoX files say, with notes and origins as comments.

    Raises:
        ConfigError: a file cannot be read or is not flat, or a key cannot be translated.
    """
    from .. import neox

    sources = gather(files)
    problems = [problem for source in sources for problem in source.problems]
    for source in sources:
        if not source.problems and not neox.is_flat(source.values):
            rule = "convert reads GPT-NeoX's flat keys, and this file has native sections"
            fix = "remove the file: it needs no conversion"
            problems.append(Problem("", rule, fix, ABSENT, source.fallback.file or ""))
    if problems:
        raise ConfigError(problems)
    translation = neox.translate(sources)
    if translation.problems:
        raise ConfigError(translation.problems)
    return neox.to_native_yaml(translation)


def normalise(source: ConfigSource) -> ConfigSource:
    """`source` with its short forms written out, in place: see the branches below. Returns it."""
    _empty_sections(source, source.values, ())
    if isinstance(source.values.get("precision"), str):
        _move(source, ("precision",), {"compute": source.values["precision"]}, ("precision", "compute"))
    _grid(source, ("parallel", "tensor"))
    _listed(source, ("data", "train"), "path", "stream")
    for name in ("validation", "test"):
        path = ("data", name)
        value = get(source.values, path, None)
        if isinstance(value, (str, list)) or (
            isinstance(value, dict) and any(isinstance(value.get(each), str) for each in ("path", "stream"))
        ):
            _move(source, path, {name: value}, (*path, name))
        named = get(source.values, path, None)
        for member in named if isinstance(named, dict) else ():
            _listed(source, (*path, member), "path", "stream")
    for index, phase in enumerate(_list(get(source.values, ("data", "phases"), None))):
        if isinstance(phase, dict):
            _listed(source, ("data", "phases", index, "sources"), "path", "stream")
    _listed(source, ("hooks",), "type")
    _listed(source, ("logging", "sinks"), "type")
    _comms_logger(source)
    return source


_SIDES = {"rows": "tensor", "columns": "columns", "depth": "depth"}  # sides of a grid, with their keys


def _grid(source: ConfigSource, path: Path) -> None:
    """Turn the sides of a grid of tensor parallel ranks into keys: {rows, columns, depth} to tensor, columns, depth."""
    sides = get(source.values, path, None)
    if not isinstance(sides, dict):
        return
    places = {side: source.origin((*path, side)) for side in sides}
    drop(source.values, path)
    for side, size in sides.items():
        if side in _SIDES:
            inner = (*path[:-1], _SIDES[side])
            if get(source.values, inner, size) != size:
                rule = f"must not differ from {dotted(inner)}, which is the same side of the grid"
                source.problems.append(Problem(dotted((*path, side)), rule, "remove one", size, str(places[side])))
            put(source.values, inner, size)
            source.places[inner] = places[side]
        else:
            rule, fix = "must be one of rows, columns and depth", nearest(side, _SIDES) or "use rows"
            source.problems.append(Problem(dotted((*path, side)), rule, fix, size, str(places[side])))


def _comms_logger(source: ConfigSource) -> None:
    """Turn DeepSpeed's logger of communication, which waits for the device after every operation, into our account,
    which does not wait. A key of the account in the source has precedence."""
    path, account = ("deepspeed", "comms_logger"), ("logging", "communication")
    asked, logging = get(source.values, path, None), source.values.get("logging", {})
    if not isinstance(asked, dict) or not isinstance(logging, dict):
        return  # a rule reports that
    if asked.get("enabled") and logging.get("communication") is None:
        source.places[account] = source.origin(path)
        put(source.values, account, "counts")
    drop(source.values, path)


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _listed(source: ConfigSource, path: Path, key: str, *others: str) -> None:
    """A text, a list of texts, or one mapping with `key` or another of these keys, as a list of such mappings."""
    value = get(source.values, path, None)
    if isinstance(value, str) or (isinstance(value, dict) and any(each in value for each in (key, *others))):
        _move(source, path, [value], (*path, 0))
    for index, item in enumerate(_list(get(source.values, path, None))):
        if isinstance(item, str):
            _move(source, (*path, index), {key: item}, (*path, index, key))


def _move(source: ConfigSource, path: Path, value: Any, inner: Path) -> None:
    """Put `value` at `path`. The places of `path` and below now also hold for `inner`."""
    origin, below = source.origin(path), source.places_at(path)
    put(source.values, path, value)
    for rest, place in below.items():
        source.places[(*inner, *rest)] = place
    source.places[inner] = source.places[path] = origin


def _empty_sections(source: ConfigSource, values: dict[str, Any], above: Path) -> None:
    """`evaluation:` with nothing below it is an empty section, not null."""
    for name, value in values.items():
        key = lookup((*above, name))
        if key and value is None and key.section:
            values[name] = {}
        elif key and isinstance(value, dict):
            _empty_sections(source, value, (*above, name))
