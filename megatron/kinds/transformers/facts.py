"""Facts about a class of transformers that the configuration needs. transformers imports torch, which the launcher does
not. Another process therefore finds them, unless torch is imported here anyway."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron.config.registry import load
from megatron.installation import run_apart

SECONDS = 600  # for the other process


class FactsError(ValueError):
    """The model cannot be built. `key` is the option at fault, as in `.config`."""

    def __init__(self, key: str, rule: str, fix: str) -> None:
        self.key, self.rule, self.fix = key, rule, fix
        super().__init__(key, rule, fix)

    def __str__(self) -> str:
        return f"{self.rule}: {self.fix}"


@dataclass(frozen=True)
class Facts:
    """A class of transformers with its settings.

    Attributes:
        hidden_size, vocab_size: of the matrix that makes the logits.
        tied: whether that matrix is the token embedding.
        parameters: number of trainable elements, tied ones once.
        matrices: elements of matrices that a token is multiplied by, without embedding and head.
        idle: parameters of experts that a token does not use.
        documents: whether positions that begin again keep documents of a sample apart. None: the model is too large to
            try it before processes start.
        positions: rows of a learned table of positions. None: it has none.
        sizes: parameters of each block of its stack. Empty: the class has no stack of `layers` blocks.
        linears: names of the linear layers of its blocks, without experts and routers.
        table: logical name of the token embedding, which may be of the output layer that it is tied to.
        divided: numbers that tensor parallel ranks divide, by name.
        uncut: why the class cannot be cut over such ranks. "": it can.
        settings: the configuration of the class, as in a config.json.
    """

    class_name: str = ""
    hidden_size: int = 0
    vocab_size: int = 0
    layers: int = 0
    tied: bool = False
    parameters: int = 0
    matrices: int = 0
    idle: int = 0
    documents: bool | None = None
    positions: int | None = None
    sizes: list[int] = field(default_factory=list)
    linears: list[str] = field(default_factory=list)
    table: str = ""
    divided: dict[str, int] = field(default_factory=dict)
    uncut: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def facts_of(options: Mapping[str, Any]) -> Facts:
    """The facts of a model with these options (`TransformersOptions`).

    Raises:
        FactsError: the class cannot be built with them, or computes no causal language model that can be trained.
    """
    try:
        settings = json.dumps(options["settings"], sort_keys=True)
        if options["settings"] and settings in _known:
            return _known[settings]
        text = json.dumps(dict(options), sort_keys=True)
    except TypeError as error:
        raise FactsError(".options", f"must be values of JSON ({error})", "use numbers, texts and lists") from error
    if not isinstance(options["config"], str) or not options["config"]:
        raise FactsError(
            ".config",
            "must be a folder, a config.json or a model type of transformers",
            "give config: qwen3, or a path",
        )
    if not isinstance(options["options"], Mapping) or not isinstance(options["settings"], Mapping):
        raise FactsError(".options", "must be names with values", "write options: {num_hidden_layers: 4}")
    found = _found(text, _time_of(options["config"]))
    if "key" in found:
        raise FactsError(found["key"], found["rule"], found["fix"])
    facts = Facts(**found)
    _known[json.dumps(facts.settings, sort_keys=True)] = facts
    return facts


_known: dict[str, Facts] = {}  # by their settings


def _time_of(given: str) -> int | None:
    """When the file with the settings was changed."""
    path = Path(given)
    try:
        return (path / "config.json" if path.is_dir() else path).stat().st_mtime_ns
    except (OSError, ValueError):
        return None


@cache
def _found(text: str, changed: int | None) -> dict[str, Any]:
    """The facts, or the key, the rule and the fix of a problem. Both are found once."""
    if "torch" in sys.modules:
        return load("megatron.kinds.transformers.inspection:inspect")(json.loads(text))
    said = ""
    try:
        done = run_apart("megatron.kinds.transformers.inspection", text, SECONDS)
        said = (done.stderr.strip().splitlines() or [""])[-1]
        return json.loads(done.stdout.strip().rsplit("\n", 1)[-1])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        rule = f"must be a model that transformers can build here. The attempt ended with: {said or error}"
        return {"key": ".config", "rule": rule, "fix": "install transformers, or use layers of deepy"}
