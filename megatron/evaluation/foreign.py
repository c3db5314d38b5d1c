"""Checks that a configuration's tokenizer is the one that a checkpoint was trained with. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron.config import Config
from megatron.config.file_access import read_json
from megatron.config.sections.data import TokenizerSection
from megatron.data.agreement import is_local
from megatron.data.errors import DataError
from megatron.data.manifest import read_manifest
from megatron.data.tokenizer import Tokenizer, build_tokenizer

META = "meta.json"  # of a checkpoint. megatron.checkpoint has this name, but imports torch
KEY = "tokenizer"  # in checkpoint.allow_changes: the user accepts the difference
SAMPLE = (
    "The year 2024 cost 1,234.50 dollars, didn't it?  Two  spaces, a\ttab.\n\ndef f(x_1):\n    return x_1 ** 2  # sum\n"
    "Zürich, naïve café, Ελληνικά, русский, 中文, 日本語, 한국어, עברית, \N{GRINNING FACE} e\N{COMBINING ACUTE ACCENT}"
)


def tokenizer_problems(config: Config, checkpoint: Path | None) -> list[str]:
    """A sentence if the configuration's tokenizer gives other ids than that of the checkpoint's training.

    The checkpoint's tokenizer is known from a Hugging Face folder, or from the configuration in a checkpoint of ours,
    if it is on this machine. The manifests of the run's token files name it too.

    Args:
        checkpoint: a checkpoint, a Hugging Face folder, a folder of checkpoints or a run's directory. None if
            unknown.
    """
    if checkpoint is None or KEY in config.checkpoint.allow_changes or config.tokenizer.type == "none":
        return []
    try:
        own = build_tokenizer(config.tokenizer)
        found = next(_differences(own, checkpoint), None)
    except DataError as error:
        return [str(error)]
    if found is None:
        return []
    return [
        f"tokenizer.path: the tokenizer must be the one that {checkpoint} was trained with: {found}. Fix: give that "
        f"one, or checkpoint.allow_changes=[{KEY}] if you know that ids mean the same"
    ]


def _differences(own: Tokenizer, checkpoint: Path) -> Iterator[str]:
    if (checkpoint / "config.json").is_file() and not (checkpoint / META).is_file():
        if (checkpoint / "tokenizer.json").is_file():
            section = TokenizerSection(type="huggingface", path=str(checkpoint))
            yield from _difference(own, build_tokenizer(section), str(checkpoint / "tokenizer.json"))
        return
    values = _recorded(checkpoint)
    section = TokenizerSection(**values.get("tokenizer") or {})
    if section.type != "none" and is_local(section):
        yield from _difference(own, build_tokenizer(section), f"its run's {section.path or section.type}")
    data = values.get("data") or {}
    for prefix in sorted({str(each["path"]) for each in _sources(data) if each.get("path")}):
        manifest = read_manifest(prefix)
        if manifest is not None and manifest.tokenizer.get("hash") != own.hash:
            yield f"{prefix} was made with {manifest.tokenizer.get('name')}, and this is {own.name}"


def _sources(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The token files that a run was trained on."""
    blends = [data.get("train"), *(phase.get("sources") for phase in data.get("phases") or [])]
    for blend in blends:
        yield from (each if isinstance(each, dict) else {"path": each} for each in blend or [])


def _recorded(checkpoint: Path) -> dict[str, Any]:
    """The configuration in a checkpoint, or in the newest of a folder or a run. {} if none can be read."""
    newest = [sorted(folder.glob("step_*"))[-1:] for folder in (checkpoint, checkpoint / "checkpoints")]
    for each in (checkpoint, *newest[0], *newest[1]):
        try:
            values = yaml.safe_load(read_json(each / META)["config"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
            continue  # the ranks report a damaged checkpoint
        return values if isinstance(values, dict) else {}
    return {}


def _difference(own: Tokenizer, other: Tokenizer, name: str) -> Iterator[str]:
    """Differences in the meaning of `other`'s ids. Additional tokens of `own`, and the form of its file, do not
    matter."""
    if own.hash == other.hash and own.eod_id == other.eod_id:
        return
    if own.size < other.size:
        yield f"it has {own.size} ids, and {name} has {other.size}"
        return
    unlike = next((each for each in range(other.size) if own.token(each) != other.token(each)), None)
    if unlike is not None:
        yield f"its id {unlike} is {own.token(unlike)!r}, and that of {name} is {other.token(unlike)!r}"
    elif own.encode(SAMPLE) != other.encode(SAMPLE):
        yield f"it splits words in another way than {name}"
    elif other.eod_id is not None and own.eod_id != other.eod_id:
        yield f"its documents end with id {own.eod_id}, and with {other.eod_id} in {name}"
