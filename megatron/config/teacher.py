"""The teacher of a run (`objective.teacher`): the model that a checkpoint describes, on the run's layout. No torch."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from .admitted import refuse_strange
from .features.feature import features_of
from .file_access import read_json
from .problems import ConfigError, UserError
from .schema import Config
from .sections.data import TokenizerSection
from .sequences import as_of, choose_cut
from .source.resolved_file import read_resolved_text
from .tree import thaw
from .variants import used_kinds

META = "meta.json"  # facts of a checkpoint except tensors
_LARGEST = 64 << 20  # bytes


def teacher_config(path: str) -> Config:
    """The configuration of the run that wrote the checkpoint `path`, as of its last step.

    Raises:
        UserError: it is no checkpoint, or cannot be read.
    """
    try:
        found = (Path(path) / META).stat()
    except OSError as error:
        raise UserError(f"objective.teacher: there is no checkpoint {path}") from error
    if found.st_size > _LARGEST:
        raise UserError(f"objective.teacher: {path}/{META} has {found.st_size} bytes, and is no checkpoint's")
    return _read(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4)
def _read(path: str, *_state: int) -> Config:
    try:
        values = read_json(Path(path) / META)
        text, step, told = values["config"], values["step"], values["config_hash"]
        if hashlib.sha256(text.encode()).hexdigest() != told:
            raise ValueError("its configuration does not have its checksum")
        return as_of(read_resolved_text(text, f"checkpoint {path}"), int(step))
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"objective.teacher: the configuration of {path} cannot be read: {error}") from error


def on_layout(config: Config) -> dict[str, Any]:
    """The teacher as the ranks of a run compute it, to be resolved: its own model, with the run's layout, batches and
    precision.

    Args:
        config: of the run.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    assert config.objective.teacher is not None
    own = teacher_config(config.objective.teacher)
    student = thaw(config.model_dump())
    values = {key: student[key] for key in ("parallel", "precision", "training", "data", "tokenizer", "launch", "run")}
    values["model"] = model = thaw(own.model_dump())["model"]
    model["extensions"] = list(dict.fromkeys([*model["extensions"], *student["model"]["extensions"]]))
    if model["parametrization"]["type"] != "standard":  # its rates are of a kind of optimizer, and nothing is updated
        module, colon, _ = own.optimizer.type.partition(":")
        refuse_strange([module] if colon else [], f"checkpoint {config.objective.teacher}")
        values |= {"optimizer": {"type": own.optimizer.type}, "schedule": {"type": "constant"}}
    parallel, training = values["parallel"], values["training"]
    if not any(kind.experts(options) for _, kind, options in used_kinds(own.model)):
        parallel.update(expert=1, expert_tensor=None)
    if config.parallel.context > 1:
        parallel["context_cut"] = choose_cut(config)[0]  # both read the same tokens
    parallel["pipeline_split"] = type(config.parallel)().pipeline_split
    training.update(sequence_schedule=[], weight_average=None)
    for keys in (keys for feature in features_of().values() for keys in feature.keys):
        if keys.section == "training":  # of the student only
            training.update(keys.fields().model_dump())
    training["activation_checkpointing"] = {}
    return values


def same_tokens(one: TokenizerSection, other: TokenizerSection) -> bool | None:
    """Whether ids mean the same texts to both tokenizers, or None if that is not known."""
    if one.type == "none" or other.type == "none":
        return None
    if one.type != other.type:
        return False
    if one.path == other.path:
        return True
    if one.path is None or other.path is None:
        return False
    first, second = _content(Path(one.path)), _content(Path(other.path))
    if first is not None and second is not None:
        return first == second
    return True if Path(one.path).name == Path(other.path).name else None


def _content(path: Path) -> bytes | None:
    """The digest of a tokenizer's file, or None where there is none here."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return hashlib.sha256(file.read_bytes()).digest()
    except OSError:
        return None
