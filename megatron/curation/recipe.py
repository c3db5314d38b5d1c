"""A recipe: sources, stages and an output, read from YAML. All mistakes are reported together, with their lines."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megatron.config.arithmetic.shards import has_secret
from megatron.config.problems import ABSENT, ConfigError, Problem
from megatron.config.schema import describe_type, dotted
from megatron.config.section import Section, key
from megatron.config.source.structure import nearest
from megatron.config.source.yaml_source import read_file

RECIPE = "{recipe}"  # in a text: the folder of the recipe
ESCALATE = "escalate"  # the stage whose options are stages
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
    """A stage of a recipe."""

    name: str  # of its kind
    title: str  # its number, from 1, and name, as the output and the page have it
    options: Section  # its checked options
    only: tuple[str, ...] = ()  # sources whose documents it treats. Empty: all.
    inner: "tuple[Stage, ...]" = ()  # the levels of `escalate`, which has no options

    def to_json(self) -> list[Any]:
        options = [each.to_json() for each in self.inner] or self.options.model_dump(mode="json")
        return [self.name, options, *([list(self.only)] if self.only else [])]


@dataclass(frozen=True)
class Recipe:
    """A recipe without mistakes."""

    section: RecipeSection
    stages: tuple[Stage, ...]

    def to_json(self) -> dict[str, Any]:
        """The values that determine the output: neither the executor nor the number of workers."""
        values = self.section.model_dump(mode="json", exclude={"executor", "workers", "slurm", "stages", "output"})
        return values | {"stages": [each.to_json() for each in self.stages]}


def read_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read and check a recipe.

    Args:
        overrides: values of keys at its top, which replace the file's. A source keeps the other keys of the file's
            source of its name.

    Raises:
        ConfigError: with all mistakes.
    """
    found = read_file(str(path))
    known = found.values.get("sources")
    written = {each["name"]: each for each in known if _named(each)} if isinstance(known, list) else {}
    values = {**found.values, **(overrides or {})}
    if overrides and "sources" in overrides:
        values["sources"] = [written.get(each["name"], {}) | each for each in overrides["sources"]]
    values = _with_folder(values, str(Path(path).parent))
    problems = list(found.problems)
    if found.unread:
        raise ConfigError(problems)

    def where(at: tuple) -> str:
        while at and at not in found.places:
            at = at[:-1]
        return str(found.places[at]) if at else str(path)

    section, wrong = checked(RecipeSection, values, (), where)
    problems += wrong
    given = values.get("stages")
    sources = [*dict.fromkeys([*written, *(each.name for each in (section.sources if section else ()))])]
    stages, wrong = _stages(given if isinstance(given, list) else [], ("stages",), sources, where)
    problems += wrong
    if section is not None:
        problems += list(_cross(section, where))
    if problems or section is None:
        raise ConfigError(problems)
    return Recipe(section, tuple(stages))


def _named(source: Any) -> bool:
    return isinstance(source, dict) and isinstance(source.get("name"), str)


def _with_folder(value: Any, folder: str) -> Any:
    """Values with the folder of the recipe in place of {recipe} in texts."""
    if isinstance(value, str):
        return value.replace(RECIPE, folder)
    if isinstance(value, dict):
        return {name: _with_folder(each, folder) for name, each in value.items()}
    return [_with_folder(each, folder) for each in value] if isinstance(value, list) else value


def _stages(given: list[Any], at: tuple, sources: list[str], where: Any) -> tuple[list[Stage], list[Problem]]:
    stages, problems = list[Stage](), list[Problem]()
    for number, each in enumerate(given):
        found, wrong = _stage(each, number + 1, (*at, number), sources, where)
        stages += found
        problems += wrong
    return stages, problems


def _stage(each: Any, number: int, at: tuple, sources: list[str], where: Any) -> tuple[list[Stage], list[Problem]]:
    from .stages import STAGES

    names = [name for name in each if name != "only"] if isinstance(each, dict) else [each]
    name = names[0] if len(names) == 1 and isinstance(names[0], str) else None
    inside = at[-2] == ESCALATE
    known = {name: kind for name, kind in STAGES.items() if kind.work or not inside}
    if name not in known and (name != ESCALATE or inside):
        rule = f"a stage must be one of {', '.join([*known, *([] if inside else [ESCALATE])])}, with its options"
        fix = nearest(str(name), [*known, ESCALATE]) or "write `- exact: {}`, for example"
        return [], [Problem(dotted(at), f"{rule} as a mapping", fix, each, where(at))]
    only = each.get("only", []) if isinstance(each, dict) else []
    problems = []
    if not isinstance(only, list) or (sources and not set(map(str, only)) <= set(sources)):
        rule = f"{dotted(at)}.only must be a list of sources, which are {', '.join(sources)}"
        problems.append(Problem(f"{dotted(at)}.only", rule, "name sources of the recipe", only, where((*at, "only"))))
        only = []
    title, own = f"{number:02d}_{name}", (each[name] if isinstance(each, dict) else None) or {}
    if name == ESCALATE:
        levels, wrong = _stages(own if isinstance(own, list) else [], (*at, name), sources, where)
        if not isinstance(own, list) or len(own) < 2:
            rule = (
                f"{dotted((*at, name))} must be a list of at least two stages: the second is asked if the first removes"
            )
            fix = "write escalate: [{blocklist: ...}, {classifier: ...}]"
            wrong.append(Problem(dotted((*at, name)), rule, fix, own, where((*at, name))))
        return [Stage(ESCALATE, title, Section(), tuple(map(str, only)), tuple(levels))], problems + wrong
    options, wrong = checked(STAGES[name].options, own, (*at, name), where)
    problems += wrong
    if options is None:
        return [], problems
    problems += STAGES[name].rules(options, dotted((*at, name)), where((*at, name)))
    return [Stage(name, title, options, tuple(map(str, only)))], problems


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
    paths: dict[tuple[str | int, ...], str] = {("output",): section.output}
    paths |= {("sources", number, "path"): each.path for number, each in enumerate(section.sources)}
    for place, path in paths.items():
        if has_secret(path):
            rule = f"{dotted(place)} must not have a password, key or signature: the report and the ids would show it"
            fix = "give the URL without it, and the credentials as the store's package reads them (a file, variables)"
            found.append(Problem(dotted(place), rule, fix, ABSENT, where(place)))
    if section.executor == "slurm" and section.slurm is None:
        rule = "executor: slurm must have the section slurm"
        found.append(Problem("slurm", rule, "add slurm: {partition: NAME}", ABSENT, where(("executor",))))
    if section.executor == "ray" and importlib.util.find_spec("ray") is None:
        rule = "executor: ray must have the package ray, which is not installed"
        found.append(Problem("executor", rule, "pip install ray, or use executor: local", "ray", where(("executor",))))
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
