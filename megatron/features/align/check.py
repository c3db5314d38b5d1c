"""Whether a configuration is one of reinforcement learning, before align.py starts any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .options import wanted


def before_start(words: Sequence[str], config: Any) -> list[str]:
    """A sentence for each mistake."""
    return [] if wanted(config) else ["deepy align needs align.prompts or align.environment. deepy train works without"]
