"""A recipe: sources, stages and an output, read from YAML. All mistakes are reported together, with their lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megatron.config.catalog import describe_type, dotted
from megatron.config.problems import ABSENT, ConfigError, Problem
from megatron.config.section import Section, key
from megatron.config.source.structure import nearest
from megatron.config.source.yaml_source import read_file

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class SourceSection(Section):
    name: str = key(..., "Name of the source, the first part of the ids of its documents.")
    path: str = key(
        ...,
        "A file, a folder or a glob: a path, or an fsspec URL such as s3://bucket/folder. {stdlib}: Python's library.",
    )
    format: Literal["auto", "jsonl", "parquet", "warc", "text"] = key(
        "auto", "Format of the files. auto: by their endings. text: each file is one document."
    )
    endings: list[str] = key(list, "Of a folder, only files with these endings are read.")
    skip: list[str] = key(list, "Folders of these names are skipped.")
    text: str = key("text", "Key or column that has the text.")
    priority: int = key(1, "Of duplicates in several sources, the one of the smallest number is kept.", ge=0)


class LimitsSection(Section):
    document: int = key(1 << 27, "A longer record is quarantined.", unit="bytes", ge=1)
    expansion: int = key(1000, "A compressed file that grows by a larger factor is quarantined from there on.", ge=2)


class SlurmSection(Section):
    partition: str = key(..., "Partition of the jobs.")
    time: str = key("24:00:00", "Time limit of a task, as sbatch takes it.")
    memory: int = key(4, "Memory of a task.", unit="GB", ge=1)
    prepare: str | None = key(None, "Shell command that makes datatrove's programs available in a job.")


class RecipeSection(Section):
    output: str = key(..., "Folder of the result: a path, or an fsspec URL.")
    sources: list[SourceSection] = key(..., "Where documents come from.", min_length=1)
    stages: list[Any] = key(list, "Treatment of each document, in order: one name with options each.")
    executor: Literal["local", "slurm", "ray"] = key("local", "Program that runs the tasks.")
    workers: int = key(1, "Tasks at the same time. The output does not depend on it.", ge=1)
    shard_bytes: int = key(1 << 28, "Input files are grouped to tasks of this size.", unit="bytes", ge=1)
    limits: LimitsSection = key(LimitsSection, "Bounds for hostile or broken input.")
    slurm: SlurmSection | None = key(None, "Options of executor: slurm.")


@dataclass(frozen=True)
class Stage:
    """A stage of a recipe.

    Attributes:
        name: of its kind.
        title: its number, from 1, and name, as the output and the page have it.
        options: its checked options.
    """

    name: str
    title: str
    options: Section


@dataclass(frozen=True)
class Recipe:
    """A recipe without mistakes."""

    section: RecipeSection
    stages: tuple[Stage, ...]

    def to_json(self) -> dict[str, Any]:
        """The values that determine the output: neither the executor nor the number of workers."""
        values = self.section.model_dump(mode="json", exclude={"executor", "workers", "slurm", "stages", "output"})
        return values | {"stages": [[each.name, each.options.model_dump(mode="json")] for each in self.stages]}


def read_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read and check a recipe.

    Args:
        overrides: values of keys at its top, which replace the file's.

    Raises:
        ConfigError: with all mistakes.
    """
    from .stages import STAGES

    found = read_file(str(path))
    problems, values = list(found.problems), {**found.values, **(overrides or {})}
    if found.unread:
        raise ConfigError(problems)

    def where(at: tuple) -> str:
        while at and at not in found.places:
            at = at[:-1]
        return str(found.places[at]) if at else str(path)

    section, wrong = checked(RecipeSection, values, (), where)
    problems += wrong
    given = values.get("stages")
    stages = []
    for number, each in enumerate(given if isinstance(given, list) else ()):
        at = ("stages", number)
        name = (
            next(iter(each)) if isinstance(each, dict) and len(each) == 1 else each if isinstance(each, str) else None
        )
        if name not in STAGES:
            rule = f"a stage must be one of {', '.join(STAGES)}, with its options as a mapping"
            fix = nearest(str(name), STAGES) or "write `- exact: {}`, for example"
            problems.append(Problem(dotted(at), rule, fix, each, where(at)))
            continue
        own = (each[name] if isinstance(each, dict) else None) or {}
        options, wrong = checked(STAGES[name].options, own, (*at, name), where)
        problems += wrong
        if options is not None:
            problems += STAGES[name].rules(options, dotted((*at, name)), where((*at, name)))
            stages.append(Stage(name, f"{number + 1:02d}_{name}", options))
    if section is not None:
        problems += list(_cross(section, where))
    if problems or section is None:
        raise ConfigError(problems)
    return Recipe(section, tuple(stages))


def _cross(section: RecipeSection, where: Any) -> list[Problem]:
    found, names = [], [each.name for each in section.sources]
    for number, name in enumerate(names):
        at = ("sources", number, "name")
        if not NAME.fullmatch(name):
            rule = "sources.name must have 1 to 64 letters, digits, '_' and '-', the first a letter or digit"
            found.append(Problem(dotted(at), rule, "rename the source", name, where(at)))
        elif name in names[:number]:
            rule = f"sources must have different names, and source {names.index(name) + 1} is {name!r} too"
            found.append(Problem(dotted(at), rule, "rename one of them", name, where(at)))
    if section.executor == "slurm" and section.slurm is None:
        rule = "executor: slurm must have the section slurm"
        found.append(Problem("slurm", rule, "add slurm: {partition: NAME}", ABSENT, where(("executor",))))
    return found


def checked(model: type[Section], values: Any, at: tuple, where: Any) -> tuple[Any, list[Problem]]:
    """A section made of values, or None, and what is wrong with them.

    Args:
        at: the path of the section in the file.
        where: the place of a path, as text.
    """
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        return None, [_problem(model, each, at, where) for each in error.errors(include_url=False)]


def _problem(model: type[Section], error: Any, at: tuple, where: Any) -> Problem:
    inner, path = error["loc"], (*at, *error["loc"])
    owner: Any = model
    for part in inner[:-1]:
        if isinstance(owner, type) and issubclass(owner, Section) and part in owner.model_fields:
            owner = _inside(owner.model_fields[part].annotation)
    fields = owner.model_fields if isinstance(owner, type) and issubclass(owner, Section) else {}
    name, place = dotted(path), where(path)
    if error["type"] == "extra_forbidden":
        fix = nearest(str(inner[-1]), fields) or f"the keys there are: {', '.join(fields)}"
        return Problem(name, f"unknown key in {dotted(path[:-1]) or 'the recipe'}", fix, error["input"], place)
    field = fields.get(inner[-1]) if inner else None
    if field is None:
        keys = f"must be a mapping with the keys {', '.join(model.model_fields)}" if not inner else error["msg"]
        return Problem(name, f"{name} {keys}", "indent its keys below it", error["input"], place)
    limits = {
        limit: getattr(each, limit)
        for each in field.metadata
        for limit in ("ge", "gt", "le", "lt")
        if hasattr(each, limit)
    }
    words = describe_type(field.annotation, limits)
    if error["type"] == "missing":
        return Problem(name, f"{name} is required", f"give {words}: {field.description}", ABSENT, place)
    return Problem(
        name, f"{name} must be {words}", f"see what the key means: {field.description}", error["input"], place
    )


def _inside(annotation: Any) -> Any:
    from typing import get_args

    for each in get_args(annotation) or (annotation,):
        if isinstance(each, type) and issubclass(each, Section):
            return each
    return annotation
