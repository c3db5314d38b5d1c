"""An imported model's settings and tokenizer files, which every checkpoint of its runs keeps and an export writes back.

The contents of config.json and generation_config.json are kept. The tokenizer's files stay in the imported folder.
Their names and checksums are kept.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from megatron.config.file_access import LARGEST, UnsafeName, path_inside, read_json
from megatron.config.sections.data import TokenizerSection
from megatron.data.errors import DataError
from megatron.data.tokenizer import build_tokenizer

from ..format.errors import CheckpointError, understanding
from ..format.meta import IMPORTED
from .versions import IDS, finite

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja", re.ASCII)
# Settings that name code or files of another folder, or that the writing program sets.
_NOT_KEPT = ("auto_map", "transformers_weights", "_name_or_path", "transformers_version")
LARGEST_SETTINGS = 2**20  # bytes of config.json: every rank of every run from it reads them


def file_in(folder: Path, name: str) -> Path:
    """A file of a Hugging Face folder. In the hub's cache it is a link to one in `blobs`.

    Raises:
        CheckpointError: the name or a link leads out of the folder or the model's cache.
    """
    snapshots = folder.resolve().parent
    cached = snapshots.name == "snapshots" and (snapshots.parent / "blobs").is_dir()
    try:
        return path_inside(folder, name, root=snapshots.parent if cached else None)
    except UnsafeName as error:
        raise CheckpointError(folder, str(error)) from error


@dataclass(frozen=True)
class Companions:
    """Content of an imported folder except for its weights.

    Attributes:
        config, generation: the contents of config.json and, if any, of generation_config.json.
        files: the tokenizer's files -> SHA-256.
        tokenizer: a run's hash of tokenizer.json, or None.
        dtype: of most of its weights.
    """

    folder: str
    config: dict[str, Any]
    generation: dict[str, Any] | None
    files: dict[str, str]
    tokenizer: str | None
    dtype: str

    @classmethod
    def read(cls, folder: Path, section: TokenizerSection, dtype: str) -> Companions:
        """Read a folder.

        Raises:
            CheckpointError: a file is damaged, too large, or a link that leads elsewhere.
        """
        generation = _settings(folder, GENERATION) if os.path.lexists(folder / GENERATION) else None
        names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
        names += [f"{each.parent.name}/{each.name}" for each in sorted(folder.glob("additional_chat_templates/*"))]
        files = {name: _checksum(file_in(folder, name)) for name in names if _is_tokenizer_file(name)}
        known = build_tokenizer(section).hash if section.type != "none" else None
        return cls(str(folder.absolute()), _settings(folder, "config.json"), generation, files, known, dtype)

    @classmethod
    def of(cls, extra: Mapping[str, Any], subject: object) -> Companions | None:
        """From a checkpoint's meta data. None if its run started from no imported model."""
        if IMPORTED not in extra:
            return None
        with understanding(subject):
            found = cls(**extra[IMPORTED])
            if not (isinstance(found.config["model_type"], str) and isinstance(found.files, dict)):
                raise ValueError(f"{IMPORTED} has another form")
        return found

    def extra(self) -> dict[str, Any]:
        """The entry in a checkpoint's meta data."""
        return {IMPORTED: asdict(self)}

    @property
    def model_type(self) -> str:
        return self.config["model_type"]

    def same_tokenizer(self, section: TokenizerSection) -> bool:
        """Whether a run reads the imported model's tokenizer, or none."""
        if section.type == "none":
            return True
        try:
            return build_tokenizer(section).hash == self.tokenizer
        except DataError:
            return False

    def settings(self, more: Mapping[str, Any] = MappingProxyType({}), *, ids: bool = True) -> PreTrainedConfig:
        """Its configuration.

        Args:
            more: settings that replace its own, except for special ids.
            ids: keep the special ids. Otherwise each is None.

        Raises:
            ValueError, TypeError, StrictDataclassError: the installed transformers rejects it.
        """
        values = {name: finite(value) for name, value in self.config.items() if name not in _NOT_KEPT}
        values |= {name: value for name, value in more.items() if name not in IDS}
        return CONFIG_MAPPING[self.model_type].from_dict(values if ids else values | dict.fromkeys(IDS))

    def copy_tokenizer(self, out: Path) -> list[str]:
        """Copy the tokenizer's files, byte for byte.

        Returns:
            Names of files that have changed or are gone. If there are any, no file is copied.

        Raises:
            CheckpointError: a name is no tokenizer file's.
        """
        contents = {}
        for name, checksum in self.files.items():
            if not _is_tokenizer_file(name):
                raise CheckpointError(self.folder, f"{name!r:.200} is no file of a tokenizer")
            try:
                content = _content(file_in(Path(self.folder), name))
            except (CheckpointError, OSError):
                continue
            if hashlib.sha256(content).hexdigest() == checksum:
                contents[name] = content
        lost = [name for name in self.files if name not in contents]
        for name, content in () if lost else contents.items():
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_bytes(content)
        return lost

    def changed(self, theirs: PreTrainedConfig) -> list[str]:
        """A sentence for each setting that differs in an exported configuration, and for each dropped one."""
        before, after = self.settings().to_dict(), theirs.to_dict()
        names = sorted(name for name in before if name not in _NOT_KEPT and before[name] != after.get(name))
        dropped = [name for name in _NOT_KEPT[:2] if self.config.get(name)]
        return [
            *(f"{name} is {after.get(name)!r:.80}, and the imported model has {before[name]!r:.80}" for name in names),
            *(
                f"{name} of the imported config.json was not written: it names files that do not come along"
                for name in dropped
            ),
        ]


def not_kept(folder: Path) -> list[str]:
    """Names in an imported folder that no export will have. The model card is written again."""
    known = {"config.json", GENERATION, "README.md", *TOKENIZER_FILES}
    used = (".safetensors", ".safetensors.index.json", "additional_chat_templates/")
    names = sorted(each.name + "/" * each.is_dir() for each in folder.iterdir())
    return [name for name in names if name not in known and not name.endswith(used) and not name.startswith(".")]


def _is_tokenizer_file(name: object) -> bool:
    return isinstance(name, str) and (name in TOKENIZER_FILES or _TEMPLATE.fullmatch(name) is not None)


def _settings(folder: Path, name: str) -> dict[str, Any]:
    file = file_in(folder, name)
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(file, f"it cannot be read ({error}): fetch it again") from error
    if not isinstance(found, dict) or file.stat().st_size > LARGEST_SETTINGS:
        raise CheckpointError(file, f"it must be a JSON object of at most {LARGEST_SETTINGS >> 20} MiB")
    return found


def _content(file: Path) -> bytes:
    with file.open("rb") as opened:
        content = opened.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise CheckpointError(file, f"it is too large: it must have at most {LARGEST >> 20} MiB")
    return content


def _checksum(file: Path) -> str:
    return hashlib.sha256(_content(file)).hexdigest()
