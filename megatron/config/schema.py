"""The whole configuration of a run: one frozen object, made of the sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, cast

from pydantic import create_model

from .features.feature import Feature, extended, features_of, with_keys
from .kind import kinds_of
from .section import Section, key
from .sections.data import DataSection, TokenizerSection
from .sections.layout import LaunchSection, ParallelSection, PrecisionSection, ZeroSection
from .sections.model import ModelSection
from .sections.output import CheckpointSection, EvaluationSection, HookSection, LoggingSection, RunSection, WatchSection
from .sections.recipe import ObjectiveSection, OptimizerSection, ScheduleSection, TrainingSection


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
