"""Rewards of tests."""

from __future__ import annotations

import os
import time
from typing import Any


def digits(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """A share of the completion that even a model without training has at times."""
    return sum(each.isdigit() or each in "abcdefghijklmnop" for each in completion) / 5


def constant(prompt: str, completion: str, record: dict[str, Any]) -> float:
    return 1.0


def by_word(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """Misbehaves as the completion says."""
    print("a line on standard output is no answer", flush=True)
    if completion == "hang":
        while True:
            time.sleep(1)
    if completion == "die":
        os._exit(3)
    if completion == "raise":
        raise ValueError("no number")
    if completion == "leave":
        raise SystemExit(0)
    return {"none": float("nan"), "good": 1.0}.get(completion, 0.25)


def unwritable(difficulty: int, draw: Any) -> dict[str, Any]:
    """A problem whose answer JSON cannot write."""
    return {"prompt": "1+1=", "answer": {2}}
