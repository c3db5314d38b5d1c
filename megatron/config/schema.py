"""The whole configuration of a run (one frozen object, made of the sections), and every key of it as data."""

import functools
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from .features.feature import Feature, extended, features_of, with_keys
from .kind import kinds_of
from .registry import ADDED, INSIDE
from .section import Derived, Section, key
from .sections.data import DataSection, TokenizerSection
from .sections.layout import LaunchSection, ParallelSection, PrecisionSection, ZeroSection
from .sections.model import ModelSection
from .sections.output import CheckpointSection, EvaluationSection, HookSection, LoggingSection, RunSection, WatchSection
from .sections.recipe import ObjectiveSection, OptimizerSection, ScheduleSection, TrainingSection
from .tree import ANY, Path


@extended("")
class Config(Section):
    """A run, completely. After resolution every derived key has its value and nothing changes it."""

    run: RunSection = key(RunSection, "Name and directory of the run.")
    model: ModelSection = key(..., "The model.")
    parallel: ParallelSection = key(ParallelSection, "Layout of the run over ranks.")
    zero: ZeroSection = key(ZeroSection, "Tensors that data parallel ranks share.")
    precision: PrecisionSection = key(PrecisionSection, "Number formats.")
    optimizer: OptimizerSection = key(OptimizerSection, "How parameters are updated.")
    schedule: ScheduleSection = key(ScheduleSection, "How the learning rate changes.")
    training: TrainingSection = key(..., "Steps and batches.")
    objective: ObjectiveSection = key(ObjectiveSection, "The objective of training.")
    data: DataSection = key(DataSection, "Data of the run.")
    tokenizer: TokenizerSection = key(TokenizerSection, "How text becomes tokens.")
    checkpoint: CheckpointSection = key(CheckpointSection, "Checkpoints of the run.")
    evaluation: EvaluationSection = key(EvaluationSection, "Evaluation during training.")
    logging: LoggingSection = key(LoggingSection, "Logs of the run.")
    launch: LaunchSection = key(LaunchSection, "Where the run's processes start.")
    watch: WatchSection = key(WatchSection, "Reaction to ranks that hang or are slow.")
    hooks: list[HookSection] = key(list, "Hooks from packages of yours: import paths, or {type, options}.")
    deepspeed: dict[str, Any] = key(dict, "Raw DeepSpeed options, merged last into the engine's.")


@cache
def schema_of(extensions: tuple[str, ...] = ()) -> type[Config]:
    """The schema with a section in `model` for each kind of layer that the extensions add, and the keys of their
    features.

    Raises:
        RegistryError: an extension cannot be used.
    """
    kinds = {name: kind for name, kind in kinds_of(extensions).items() if name not in ModelSection.model_fields}
    features = {name: each for name, each in features_of(extensions).items() if name not in features_of()}
    if not kinds and not features:
        return Config
    options = {name: (kind.options, key(kind.options, kind.about)) for name, kind in kinds.items()}
    return cast(type[Config], _extended(Config, "", {"model": options}, features))


def _extended(
    base: type[Section], path: str, added: dict[str, dict[str, Any]], features: Mapping[str, Feature]
) -> type[Section]:
    """A section, those below it included, with further fields by path, and the keys of features."""
    fields: dict[str, Any] = dict(added.get(path, {}))
    for name, field in base.model_fields.items():
        below = f"{path}.{name}" if path else name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            inner = _extended(field.annotation, below, added, features)
            if inner is not field.annotation:
                default = ... if field.is_required() else inner
                fields[name] = (inner, key(default, field.description or ""))
    if fields:
        base = create_model(base.__name__, __base__=base, __module__=__name__, __doc__=base.__doc__, **fields)
    return with_keys(base, path, features)


_current: ContextVar[type[Config]] = ContextVar("schema", default=Config)


def current_schema() -> type[Config]:
    """The schema of the configuration that is being read: see `using`."""
    return _current.get()


@contextmanager
def using_extensions(extensions: tuple[str, ...]) -> Iterator[type[Config]]:
    """Inside, keys are looked up in the schema with these extensions.

    Raises:
        RegistryError: an extension cannot be used.
    """
    token = _current.set(schema_of(extensions))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


_INDEX = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    path: tuple[str, ...]  # its path. `ANY` stands for names and indices that the user chooses.
    annotation: Any  # the Python type
    default: Any  # `PydanticUndefined` if the key is required
    sentence: str
    unit: str | None
    derived: str | None  # derived, rule: the formula that fills it in, and its function (None where only a start can)
    rule: Derived | None
    limits: dict[str, Any]  # bounds, such as {"gt": 0}. For a name of the registry also its role and its other words.
    section: bool  # whether it is a group of keys

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined

    @property
    def nullable(self) -> bool:
        return type(None) in get_args(self.annotation)


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def without_none(annotation: Any) -> Any:
    """`X | None` as X."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = tuple(each for each in get_args(annotation) if each is not type(None))
        return functools.reduce(operator.or_, rest)
    return annotation


def section_of(annotation: Any) -> type[Section] | None:
    """The section class that an annotation names, if it names one."""
    bare = without_none(annotation)
    return bare if isinstance(bare, type) and not get_args(bare) and issubclass(bare, Section) else None


def member_of(annotation: Any) -> Any | None:
    """The type of the members of a mapping or list annotation, if it is one."""
    bare = without_none(annotation)
    arguments = get_args(bare)
    if get_origin(bare) is dict:
        return arguments[1]
    return arguments[0] if get_origin(bare) is list else None


def _limits(field: FieldInfo) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for constraint in field.metadata:
        for name in ("gt", "ge", "lt", "le", "min_length"):
            if getattr(constraint, name, None) is not None:
                found[name] = getattr(constraint, name)
    extra = _extra(field)
    if "role" in extra:
        found |= {"role": extra["role"], "words": extra["words"]}
    return found


def _extra(field: FieldInfo) -> dict[str, Any]:
    """The facts of `section.key` that pydantic does not have."""
    extra = field.json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}


def _keys(section: type[Section], above: tuple[str, ...]) -> typing.Iterator[Key]:
    for name, field in section.model_fields.items():
        extra = _extra(field)
        path = (*above, name)
        inner = section_of(field.annotation)
        yield Key(
            path=path,
            annotation=field.annotation,
            default=field.get_default(call_default_factory=True),
            sentence=field.description or "",
            unit=extra.get("unit"),
            derived=extra.get("derived"),
            rule=next((each for each in field.metadata if isinstance(each, Derived)), None),
            limits=_limits(field),
            section=inner is not None,
        )
        member = field.annotation
        while inner is None and (member := member_of(member)) is not None:
            path, inner = (*path, ANY), section_of(member)
        if inner is not None:
            yield from _keys(inner, path)


@cache
def catalog_of(schema: type[Config]) -> dict[tuple[str, ...], Key]:
    """All keys of a schema by path, in its order."""
    return {key.path: key for key in _keys(schema, ())}


def catalog() -> dict[tuple[str, ...], Key]:
    """All keys of the current schema."""
    return catalog_of(current_schema())


def type_at(path: Path) -> Any | None:
    """The annotation of what stands at a path (a key, or a member of a mapping or list), or None if nothing can."""
    return _walk(current_schema(), path)[1]


def pattern_of(path: Path) -> tuple[str, ...]:
    """The path as the catalog has it: names and indices that the user chose become `ANY`."""
    return _walk(current_schema(), path)[0]


@functools.lru_cache(maxsize=4096)  # a configuration has hundreds of keys, each looked up several times
def _walk(schema: type[Config], path: Path) -> tuple[tuple[str, ...], Any | None]:
    """The pattern of a path, and the annotation of what stands there."""
    annotation: Any = schema
    pattern: list[str] = []
    for part in path:
        section = section_of(annotation)
        pattern.append(str(part) if section else ANY)
        if section:
            field = section.model_fields.get(str(part))
            annotation = field.annotation if field else None
        else:
            annotation = member_of(annotation)
    return tuple(pattern), annotation


def lookup(path: Path) -> Key | None:
    """The key at a path, with user-chosen names in it, or None if the schema has no such key."""
    return catalog().get(pattern_of(path))


@functools.lru_cache(maxsize=4096)
def parse_path(name: str) -> Path:
    """`data.train.0.path` as a path: parts of digits are indices."""
    return tuple(int(part) if _INDEX.fullmatch(part) else part for part in name.split("."))


def describe_type(annotation: Any, limits: dict[str, Any] | None = None) -> str:
    """A type in words: "a whole number above 0", "one of adamw, lion, sgd, muon"."""
    bare, limits = without_none(annotation), limits or {}
    if "role" in limits:
        names = [*limits["words"], *(INSIDE[limits["role"]] if limits["role"] not in ADDED else ())]
        path = "an import path (package.module:name)"
        return f"one of {', '.join(names)}, or {path}" if names else path
    origin, arguments = get_origin(bare), get_args(bare)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is Union:
        return " or ".join(describe_type(each) for each in arguments)
    if origin is dict:
        return f"a mapping of names to {_plural(describe_type(arguments[1]))}"
    if origin is list:
        return f"a list of {_plural(describe_type(arguments[0]))}" + (", not empty" if limits.get("min_length") else "")
    if origin is tuple:
        return f"a list of {len(arguments)} {_plural(describe_type(arguments[0]))}"
    if (section := section_of(bare)) is not None:
        return "a mapping with the keys " + ", ".join(section.model_fields)
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "anything"}
    bounds = _bounds(bare, limits, {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"})
    return " ".join(part for part in (words.get(bare, str(bare)), bounds) if part)


def type_name(annotation: Any, limits: dict[str, Any] | None = None) -> str:
    """A type in figures, for tables: "int > 0", "float in [0, 1)", "one of adamw, lion, sgd, muon"."""
    bare, limits = without_none(annotation), limits or {}
    origin, arguments = get_origin(bare), get_args(bare)
    names = {int: "int", float: "float", str: "str", bool: "bool", Any: "any"}
    if bare in names and "role" not in limits:
        bounds = _bounds(bare, limits, {"gt": ">", "ge": "\u2265", "lt": "<", "le": "\u2264"})
        return f"{names[bare]} {bounds}".strip()
    if origin is Union:
        return " or ".join(type_name(each) for each in arguments)
    if origin is list:
        return f"list of {type_name(arguments[0])}" + (", not empty" if limits.get("min_length") else "")
    if origin is tuple:
        return f"list of {len(arguments)} {type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of names to {type_name(arguments[1])}"
    return describe_type(annotation, limits)


def _bounds(bare: Any, limits: dict[str, Any], words: dict[str, str]) -> str:
    """The limits of a number: an interval where it has both ends, else its one end in `words`."""
    low = next((name for name in ("ge", "gt") if name in limits), None)
    high = next((name for name in ("le", "lt") if name in limits), None)
    if low and high:
        start, end, closed = limits[low], limits[high], low == "ge"
        if bare is int and not closed:
            start, closed = start + 1, True
        return f"in {'[' if closed else '('}{start}, {end}{']' if high == 'le' else ')'}"
    return " ".join(f"{words[name]} {limits[name]}" for name in (low, high) if name)


def _plural(words: str) -> str:
    for one, many in (
        ("a whole number", "whole numbers"),
        ("a number", "numbers"),
        ("a mapping", "mappings"),
        ("a list", "lists"),
    ):
        if words.startswith(one):
            return many + words[len(one) :]
    return words
