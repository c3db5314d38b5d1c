"""A translation as native YAML, with the GPT-NeoX key behind each value as a comment."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from ..schema import Config
from ..words import YAML_WORDS
from .documents import FlatOrigin, Translation

COMMENT_COLUMN = 56


def to_native_yaml(translation: Translation) -> str:
    """The native YAML file that says the same as the GPT-NeoX files.

    Each value has a comment with the key, the file and the line it came from, or that it is GPT-NeoX's default. The
    notes stand on top. The values read back are equal to `translation.values`.
    """
    lines = ["# Translated from GPT-NeoX keys."]
    for note in translation.notes:
        lines += textwrap.wrap(note, 108, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False)
    for name in sorted(translation.values, key=list(Config.model_fields).index):
        lines += ["", *_lines(name, translation.values[name], (name,), translation.origins)]
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any, path: tuple[str, ...], origins: dict[str, FlatOrigin]) -> list[str]:
    origin = origins.get(".".join(path))
    indent = "  " * (len(path) - 1)
    if origin is None and isinstance(value, dict):
        inner = [line for key, item in value.items() for line in _lines(key, item, (*path, key), origins)]
        return [f"{indent}{_scalar(name)}:", *inner]
    text = f"{indent}{_scalar(name)}: {flow(value)}"
    return [f"{text.ljust(COMMENT_COLUMN)}  # {_said(origin)}" if origin else text]


def _said(origin: FlatOrigin) -> str:
    if origin.path is None:
        return f"GPT-NeoX's default ({origin.key})"
    place = origin.path if origin.line is None else f"{origin.path}:{origin.line}"
    return f"{origin.key}, {place}"


def flow(value: Any) -> str:
    """A value on one line of YAML that every YAML version reads the same."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        text = repr(value)
        mantissa, e, exponent = text.partition("e")
        return text if not e or "." in mantissa else f"{mantissa}.0e{exponent}"  # 1e-08 is text in YAML 1.1
    if isinstance(value, str) and value.replace("_", "").isalpha() and value.lower() not in YAML_WORDS:
        return value
    return json.dumps(value)
