"""Files and overrides as sources in the order in which they are merged: bases first, overrides last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path as File

from ...installation import configuration_file
from ..problems import Problem
from .layers import ConfigSource
from .yaml_source import read_file, read_override

MOST_FILES = 40  # of a run, each counted as often as it is extended: files that extend files can double at each level


def gather(files: Sequence[str | os.PathLike], overrides: Sequence[str] = ()) -> list[ConfigSource]:
    """All sources, in the order in which they are merged.

    A file's bases (`extends:`, one path or a list, seen from the file's folder) come before the file itself. Other
    words are names of ready configurations, such as `pythia/70m`.
    """
    sources: list[ConfigSource] = []
    for file in files:
        path = os.fspath(file)
        sources += _with_bases(configuration_file(path) or path, (), [MOST_FILES])
    return sources + [read_override(argument) for argument in overrides]


def run_name(file: str | os.PathLike) -> str:
    """The name of the run of a configuration file: mistral-7b for `configs/mistral/7b.yml`, since many folders have a
    7b.yml.

    A file of the working directory, or of a folder called `configs`, has only its own name.
    """
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
        source.problems.append(
            Problem("extends", "extends must be a path or a list of paths", "write extends: base.yml", bases, where)
        )
        return [source]
    chain = (*open_files, os.path.realpath(path))
    sources: list[ConfigSource] = []
    for name in names:
        base = os.path.join(os.path.dirname(path), name)
        if left[0] <= 0:
            rule = f"a file extends at most {MOST_FILES} files, with the bases of bases"
            source.problems.append(Problem("extends", rule, "put what they have in common into one", name, where))
            source.unread = True
            break
        if os.path.realpath(base) in chain:
            circle = " -> ".join([*(File(each).name for each in chain), File(base).name])
            source.problems.append(
                Problem(
                    "extends",
                    f"the files extend each other in a circle: {circle}",
                    "remove one of the extends",
                    name,
                    where,
                )
            )
            source.unread = True
        elif not os.path.isfile(base):
            source.unread = True
            source.problems.append(
                Problem(
                    "extends",
                    f"there is no file {base}",
                    "give the path as seen from the folder of the file that says extends",
                    name,
                    where,
                )
            )
        else:
            sources += _with_bases(base, chain, left)
    return [*sources, source]
