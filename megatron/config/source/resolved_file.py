"""The resolved configuration as a file: every value with all its digits, and its origin as a comment."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from ..file_access import replace_file
from ..problems import ABSENT, YAML_WORDS, ConfigError, Problem, counted
from ..schema import Config, Path, dotted, using_extensions
from ..tree import put, thaw
from .extensions import admit_names, extensions_of, refuse_names
from .structure import check_structure, set_apart
from .yaml_source import RESOLVED, read_file

if TYPE_CHECKING:
    from ..resolution import Resolved

_HASH = re.compile(r"^# hash: ([0-9a-f]{64})$", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_COLUMN = 48  # where comments start, if the value leaves room


def config_hash(config: Config) -> str:
    """A SHA-256 of all values of a configuration, in hexadecimal. Origins do not count."""
    return _hash(thaw(config.model_dump()))


def _hash(values: dict[str, Any]) -> str:
    content = json.dumps(values, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def _shared(values: Any, file: Any) -> Any:
    """`values` without the keys that a file does not have, since they are younger than it."""
    if isinstance(values, list) and isinstance(file, list):
        return [_shared(each, other) for each, other in zip(values, file, strict=True)]
    if not isinstance(values, dict) or not isinstance(file, dict):
        return values
    return {name: _shared(value, file[name]) for name, value in values.items() if name in file}


def scalar(value: Any) -> str:
    """A scalar, or a list of scalars, in YAML that 1.1 and 1.2 readers understand alike."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in YAML_WORDS else _quoted(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(scalar, value)) + "]"
    if value == {}:
        return "{}"
    raise TypeError(f"{type(value).__name__} cannot be written to a configuration file")


def _number(value: float) -> str:
    """All digits, with the point and the exponent's sign without which YAML 1.1 reads text."""
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    mantissa, e, exponent = repr(value).partition("e")
    mantissa += "" if "." in mantissa else ".0"
    return mantissa + (e + (exponent if exponent[:1] in "+-" else f"+{exponent}") if e else "")


def _quoted(text: str) -> str:
    """In double quotes, with everything escaped that YAML does not allow or that breaks a line."""
    parts = []
    for letter in text:
        code = ord(letter)
        if letter in '"\\':
            parts.append("\\" + letter)
        elif letter.isprintable():
            parts.append(letter)
        else:
            parts.append(f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return '"' + "".join(parts) + '"'


def _lines(value: Any, path: Path, resolved: Resolved, indent: int) -> Iterator[str]:
    for name, item in value.items():
        yield from _entry(" " * indent + f"{scalar(name)}:", item, (*path, name), resolved, indent)


def _entry(head: str, item: Any, path: Path, resolved: Resolved, indent: int) -> Iterator[str]:
    if isinstance(item, dict) and item:
        yield head
        yield from _lines(item, path, resolved, indent + 2)
    elif isinstance(item, list) and any(isinstance(each, (dict, list)) for each in item):
        yield head
        for index, each in enumerate(item):
            yield from _item(each, (*path, index), resolved, indent + 2)
    else:
        origin = resolved.origins.get(dotted(path), "default")
        comment = "".join(letter if letter.isprintable() else " " for letter in str(origin))
        yield f"{head} {scalar(item)}".ljust(_COLUMN) + f"  # {comment}"


def _item(each: Any, path: Path, resolved: Resolved, indent: int) -> Iterator[str]:
    """A list's item: its first line carries the dash."""
    if isinstance(each, dict) and each:
        first, *rest = _lines(each, path, resolved, indent + 2)
        yield " " * indent + "- " + first[indent + 2 :]
        yield from rest
    else:
        yield from _entry(" " * indent + "-", each, path, resolved, indent)


def to_yaml(resolved: Resolved) -> str:
    """The whole configuration as YAML with origins."""
    ranks = "an unknown number of ranks" if resolved.ranks is None else counted(resolved.ranks, "rank")
    head = [f"{RESOLVED}{ranks}. Each value is followed by its origin.", f"# hash: {config_hash(resolved.config)}"]
    return "\n".join([*head, *_lines(thaw(resolved.config.model_dump()), (), resolved, 0)]) + "\n"


def save_resolved(resolved: Resolved, path: str | os.PathLike) -> None:
    """Write the configuration that all processes of the run will read. The file appears whole or not at all."""
    file = File(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, to_yaml(resolved))


def read_resolved(path: str | os.PathLike, *, own: bool = False) -> Config:
    """The configuration that `save_resolved` wrote, equal to the last digit. Nothing is derived again. Keys that came
    after the file was written have their defaults, and keys that no longer exist are ignored.

    Args:
        own: whether the user starts this configuration, so that the modules that it names may be imported.

    Raises:
        ConfigError: the file is missing, damaged, or was edited, or names modules that the user has not admitted.
    """
    return _checked(os.fspath(path), os.fspath(path), own)


def read_resolved_text(text: str, name: str, *, own: bool = False) -> Config:
    """As `read_resolved`, from the text of such a file, which messages call `name`."""
    with tempfile.NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        return _checked(file.name, name, own)


def _checked(file: str, name: str, own: bool) -> Config:
    source = read_file(file)
    if source.problems:
        raise ConfigError(source.problems)
    gone = set_apart(source.values)
    if own:
        admit_names([source])
    else:
        refuse_names([source], name)
    with using_extensions(extensions_of([source])):
        config, problems, _ = check_structure(source.values, source.origin)
    if problems:
        raise ConfigError(problems)
    saved = _HASH.search(File(file).read_text(encoding="utf-8"))
    values = _shared(thaw(config.model_dump()), source.values)
    for path, value in gone.items():
        put(values, path, value)
    if saved is None or saved.group(1) != _hash(values):
        rule = "a resolved configuration is not edited: " + (
            "its hash is missing" if saved is None else "its values do not give its hash"
        )
        raise ConfigError([Problem("", rule, "change the run's YAML or overrides, and start again", ABSENT, name)])
    return config
