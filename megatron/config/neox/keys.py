"""Every GPT-NeoX key, in one of three classes: translated, without effect, refused."""

from __future__ import annotations

import difflib
from collections.abc import Container
from functools import cache
from typing import Any, Literal

from ..catalog import ANY, catalog
from . import architecture, corpus, layout, moe, mup, output, recipe
from .inert import NO_EFFECT
from .refused import REFUSED, RETIRED, RETIRED_READ

TOPICS = (architecture, recipe, corpus, layout, output, moe, mup)
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


@cache
def _native_names() -> tuple[str, ...]:
    return tuple(key.name for key in catalog().values() if not key.section and ANY not in key.path)


def nearest(name: str) -> str:
    """What an unknown key may have meant, as a sentence."""
    flat = difflib.get_close_matches(name, sorted(NAMES), 1)
    last = {key.rsplit(".", 1)[-1]: key for key in reversed(_native_names())}
    native = difflib.get_close_matches(name, list(last), 1, 0.75 if flat else 0.4)
    parts = [f"the nearest GPT-NeoX key is {flat[0]}"] if flat else []
    parts += [f"the nearest native key is {last[native[0]]}"] if native else []
    return "; ".join(parts) or "remove it"
