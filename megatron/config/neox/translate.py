"""Translating flat GPT-NeoX documents: merge, classify, translate, account for every key, and write native YAML."""

import difflib
import json
import textwrap
from collections.abc import Container, Iterable
from typing import Any, Literal

from ..problems import ABSENT, YAML_WORDS, Problem
from ..schema import ANY, Config, catalog
from ..source.layers import ConfigSource, Origin
from . import architecture, corpus, layout, moe, output, post_training, recipe
from .reader import DEFAULT_OF, Flat, FlatEntry, Native, Translation
from .refused import NO_EFFECT, REFUSED, RETIRED, RETIRED_READ

TOPICS = (architecture, recipe, corpus, post_training, layout, output, moe)
TRANSLATED: dict[str, Any] = {name: default for topic in TOPICS for name, default in topic.KEYS.items()}
NAMES: frozenset[str] = frozenset(TRANSLATED) | frozenset(NO_EFFECT) | frozenset(REFUSED)

Kind = Literal["translated", "no effect", "refused", "retired", "unknown"]


def kind_of(name: str) -> Kind:
    """The class of a key, given with underscores."""
    classes: tuple[tuple[Kind, Container[str]], ...] = (
        ("translated", TRANSLATED),
        ("no effect", NO_EFFECT),
        ("refused", REFUSED),
        ("translated", RETIRED_READ),
        ("retired", RETIRED),
    )
    return next((kind for kind, names in classes if name in names), "unknown")


def plain(name: str) -> str:
    """A key as GPT-NeoX knows it: dashes are underscores."""
    return name.replace("-", "_")


def nearest(name: str) -> str:
    """The likely meaning of an unknown key, as a sentence."""
    flat = difflib.get_close_matches(name, sorted(NAMES), 1)
    keys = [key for key in catalog().values() if not key.section and ANY not in key.path]
    last = {key.path[-1]: key.name for key in reversed(keys)}
    native = difflib.get_close_matches(name, list(last), 1, 0.75 if flat else 0.4)
    parts = [f"the nearest GPT-NeoX key is {flat[0]}"] if flat else []
    parts += [f"the nearest native key is {last[native[0]]}"] if native else []
    return "; ".join(parts) or "remove it"


# Native sections that no GPT-NeoX key is called like.
SECTIONS = frozenset("run model parallel zero schedule training data evaluation logging launch extends".split())


def is_flat(values: dict[str, Any]) -> bool:
    """Whether a document has GPT-NeoX's flat keys rather than native sections.

    The values decide for names that both have (optimizer, precision, tokenizer, checkpoint, deepspeed). A document with
    keys of both kinds is taken for what most of its keys are."""
    flat = sum(_looks_flat(str(name), value) for name, value in values.items())
    native = sum(str(name) in SECTIONS or "." in str(name) for name in values)
    return flat > native


def _looks_flat(name: str, value: Any) -> bool:
    if name in SECTIONS or "." in name:
        return False
    if name == "optimizer":
        return isinstance(value, dict) and "params" in value
    if name == "precision":
        return value == "bfloat16"
    if name == "deepspeed":
        return isinstance(value, bool)
    if name in ("tokenizer", "checkpoint"):
        return False
    known = plain(name)
    if kind_of(known) != "unknown":
        return True
    return not isinstance(value, dict) and bool(difflib.get_close_matches(known, NAMES, 1, 0.8))


def translate(documents: Iterable[ConfigSource]) -> Translation:
    """The native configuration that the documents describe together.

    The same key with different values in two documents, or twice in one, is a problem in any spelling. GPT-NeoX detects
    it only where the spelling is the same. Arguments win instead."""
    result = Translation()
    flat = Flat(_merge(documents, result.problems), TRANSLATED | RETIRED_READ, result.problems)
    native = Native(flat, result)
    for name, entry in flat.entries.items():
        _classify(name, entry, native)
    for topic in TOPICS:
        topic.translate(flat, native)
    _account(flat, native)
    return result


def _merge(documents: Iterable[ConfigSource], problems: list[Problem]) -> dict[str, FlatEntry]:
    merged: dict[str, FlatEntry] = {}
    for document in documents:
        for spelling, value in document.values.items():
            spelling = str(spelling)
            name = plain(spelling)
            entry = FlatEntry(value, document.origin((spelling,)), spelling)
            earlier = merged.setdefault(name, entry)
            same = earlier.value == value and isinstance(earlier.value, bool) == isinstance(value, bool)
            if document.fallback.kind == "argument":
                merged[name] = entry
            elif not same:
                rule = f"{earlier.origin} already says {earlier.spelling} = {earlier.value!r}: GPT-NeoX files must not "
                rule += "contradict each other"
                fix = "remove one of the two"
                problems.append(Problem(spelling, rule, fix, ABSENT if value is None else value, str(entry.origin)))
    return merged


def _classify(name: str, entry: FlatEntry, native: Native) -> None:
    kind = kind_of(name)
    if kind == "no effect":
        native.idle[name] = NO_EFFECT[name]
    elif kind == "refused":
        refusal = REFUSED[name]
        if refusal.accepts(entry.value):
            native.idle[name] = "at a value that changes nothing"
        else:
            native.flat.problem(name, refusal.rule, refusal.fix)
    elif kind == "retired":
        native.flat.problem(name, "GPT-NeoX has no such key", RETIRED[name])
    elif kind == "unknown":
        rule, fix = "neither GPT-NeoX nor this framework has such a key", nearest(name)
        if entry.spelling in SECTIONS:
            rule, fix = "a native section among flat GPT-NeoX keys", "move it to a file of its own, after this one"
        native.flat.problem(name, rule, fix)


def _account(flat: Flat, native: Native) -> None:
    """One line for all keys without effect, so that none is dropped in silence."""
    troubled = {plain(problem.key) for problem in native.result.problems}
    for name in flat.entries:
        if name not in native.used | troubled:
            reason = "not needed with the other keys" if flat.given(name) else "null says nothing"
            native.idle.setdefault(name, reason)
    by_reason: dict[str, list[str]] = {}
    for name in flat.entries:
        if name in native.idle and name not in native.used:
            by_reason.setdefault(native.idle[name], []).append(name)
    if by_reason:
        parts = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
        native.note(f"GPT-NeoX keys without effect here: {parts}")


COMMENT_COLUMN = 56


def to_native_yaml(translation: Translation) -> str:
    """The native YAML file that says the same as the GPT-NeoX files.

    Each value has a comment with the key, the file and the line it came from, or that it is GPT-NeoX's default. The
    notes stand on top. The values read back are equal to `translation.values`."""
    lines = ["# Translated from GPT-NeoX keys."]
    for note in translation.notes:
        lines += textwrap.wrap(note, 108, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False)
    for name in sorted(translation.values, key=list(Config.model_fields).index):
        lines += ["", *_lines(name, translation.values[name], (name,), translation.origins)]
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any, path: tuple[str, ...], origins: dict[str, Origin]) -> list[str]:
    origin = origins.get(".".join(path))
    indent = "  " * (len(path) - 1)
    if origin is None and isinstance(value, dict):
        inner = [line for key, item in value.items() for line in _lines(key, item, (*path, key), origins)]
        return [f"{indent}{_scalar(name)}:", *inner]
    text = f"{indent}{_scalar(name)}: {flow(value)}"
    return [f"{text.ljust(COMMENT_COLUMN)}  # {_said(origin)}" if origin else text]


def _said(origin: Origin) -> str:
    if origin.kind == "default":
        return f"{DEFAULT_OF} default ({origin.text.removeprefix(DEFAULT_OF).strip()})"
    return f"{origin.text}, {origin.file}:{origin.line}"


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
