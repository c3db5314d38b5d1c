"""Where GPT-NeoX's flat files join: they are translated together, before anything is merged with native sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..catalog import Path, parse_path
from ..problems import ABSENT, ConfigError, Problem
from ..schema import Config
from .files import gather
from .layers import ConfigSource
from .origins import Origin

if TYPE_CHECKING:
    from ..neox import FlatDocument, FlatProblem


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
    translation = neox.translate([_document(source) for source in flat])
    known = {name.replace("-", "_"): source.origin((name,)) for source in flat for name in source.values}

    places: dict[Path, Origin] = {}
    for key, origin in translation.origins.items():
        if origin.path is None:
            places[parse_path(key)] = Origin("default", text=f"GPT-NeoX's {origin.key}")
        elif origin.line is None:
            places[parse_path(key)] = known.get(origin.key.replace("-", "_"), Origin("argument", text=origin.path))
        else:
            places[parse_path(key)] = Origin("file", file=origin.path, line=origin.line, text=origin.key)
    read = [problem for source in flat for problem in source.problems]
    native = ConfigSource(translation.values, places, last.fallback, read, any(source.unread for source in flat))
    native.problems += [_problem(each) for each in translation.problems]
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
    translation = neox.translate([_document(source) for source in sources])
    if translation.problems:
        raise ConfigError([_problem(each) for each in translation.problems])
    return neox.to_native_yaml(translation)


def _document(source: ConfigSource) -> FlatDocument:
    from ..neox import FlatDocument

    lines = {name: source.origin((name,)).line for name in source.values}
    path = source.fallback.file or str(source.fallback)
    known = {name: line for name, line in lines.items() if line is not None}
    return FlatDocument(path, source.values, known, override=source.fallback.kind == "argument")


def _problem(flat: FlatProblem) -> Problem:
    place = f"{flat.path}:{flat.line}" if flat.line is not None else flat.path
    return Problem(flat.key, flat.rule, flat.fix, ABSENT if flat.value is None else flat.value, place)
