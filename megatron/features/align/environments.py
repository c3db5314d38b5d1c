"""Problems with a difficulty: functions (difficulty, draw) -> a record with `prompt` and `answer`. No torch here.

A problem is a function of its key only, so each run, layout and restart has the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megatron.data.hashing import generator

Environment = Callable[[int, np.random.Generator], dict[str, Any]]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def addition(difficulty: int, draw: np.random.Generator) -> dict[str, Any]:
    """The sum of two numbers of up to `difficulty` digits."""
    one, other = draw.integers(0, 10**difficulty, size=2).tolist()
    return {"prompt": f"{one}+{other}=", "answer": str(one + other)}


def arithmetic(difficulty: int, draw: np.random.Generator) -> dict[str, Any]:
    """A sum, difference or product of `difficulty` + 1 numbers below 10, from left to right."""
    value = int(draw.integers(0, 10))
    text = str(value)
    for _ in range(difficulty):
        sign, operand = "+-*"[draw.integers(0, 3)], int(draw.integers(0, 10))
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[sign]
        text = f"({text}){sign}{operand}" if sign == "*" and len(text) > 1 else f"{text}{sign}{operand}"
    return {"prompt": f"{text}=", "answer": str(value)}


def sorting(difficulty: int, draw: np.random.Generator) -> dict[str, Any]:
    """The letters of a random word of `difficulty` + 1 letters, in order."""
    word = _word(difficulty + 1, draw)
    return {"prompt": f"sort {word}:", "answer": "".join(sorted(word))}


def reversal(difficulty: int, draw: np.random.Generator) -> dict[str, Any]:
    """A random word of `difficulty` + 1 letters, backwards."""
    word = _word(difficulty + 1, draw)
    return {"prompt": f"reverse {word}:", "answer": word[::-1]}


def _word(letters: int, draw: np.random.Generator) -> str:
    return "".join(_LETTERS[place] for place in draw.integers(0, len(_LETTERS), size=letters))


def problem(environment: Environment, levels: tuple[int, int], *key: int | str) -> dict[str, Any]:
    """The problem of a key. Its difficulty is one of the levels from the first to the last."""
    draw = generator(*key)
    difficulty = int(draw.integers(levels[0], levels[1] + 1))
    return {**environment(difficulty, draw), "difficulty": difficulty}
