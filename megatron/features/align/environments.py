"""Problems with a difficulty: functions (difficulty, draw) -> a record with `prompt` and `answer`. No torch here.

A problem is a function of its key only, so each run, layout and restart has the same."""

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


def strings(difficulty: int, draw: np.random.Generator) -> dict[str, Any]:
    """A puzzle on a random word of `difficulty` + 2 letters: count a letter, drop it, shift all, or take each nth."""
    word, kind, step = _word(difficulty + 2, draw), int(draw.integers(0, 4)), int(draw.integers(2, 4))
    letter = word[int(draw.integers(0, len(word)))]
    shifted = "".join(_LETTERS[(_LETTERS.index(each) + step) % len(_LETTERS)] for each in word)
    question, answer = [
        (f"count {letter} in {word}", str(word.count(letter))),
        (f"drop {letter} from {word}", word.replace(letter, "") or "nothing"),
        (f"shift {word} by {step}", shifted),
        (f"each {step} of {word}", word[step - 1 :: step]),
    ][kind]
    return {"prompt": f"{question}:", "answer": answer}


def sudoku(difficulty: int, draw: np.random.Generator) -> dict[str, Any]:
    """A grid with one solution and up to `difficulty` empty cells: 4 by 4 with up to 8 of them, else 9 by 9.

    A cell stays where a second solution would appear without it."""
    box = 2 if difficulty <= 8 else 3
    side = box * box
    lines = [[int(band) * box + int(line) for band in draw.permutation(box) for line in draw.permutation(box)]
             for _ in range(2)]  # fmt: skip
    digits = draw.permutation(side)
    whole = [int(digits[(box * (row % box) + row // box + column) % side]) + 1
             for row in lines[0] for column in lines[1]]  # fmt: skip
    cells, empty = list(whole), 0
    for place in draw.permutation(side * side).tolist():
        cells[place] = 0
        if empty == difficulty or not _has_one_solution(cells, box):
            cells[place] = whole[place]
        else:
            empty += 1

    def shown(values: list[int]) -> str:
        text = "".join(str(each) if each else "." for each in values)
        return "/".join(text[begin : begin + side] for begin in range(0, len(text), side))

    return {"prompt": f"sudoku {shown(cells)}:", "answer": shown(whole)}


def puzzles(difficulty: int, draw: np.random.Generator) -> dict[str, Any]:
    """A problem of one of the other environments."""
    return (arithmetic, sorting, reversal, strings, sudoku)[int(draw.integers(0, 5))](difficulty, draw)


def _has_one_solution(cells: list[int], box: int) -> bool:
    side = box * box
    units = [(row, side + column, 2 * side + row // box * box + column // box)
             for row in range(side) for column in range(side)]  # fmt: skip
    used = [0] * (3 * side)
    for value, own in zip(cells, units):
        for unit in own if value else ():
            used[unit] |= 1 << value

    def solutions(empty: list[tuple[int, int, int]], most: int) -> int:
        if not empty:
            return 1
        taken, best = max(
            ((used[a] | used[b] | used[c], (a, b, c)) for a, b, c in empty), key=lambda x: x[0].bit_count()
        )
        rest, found = [each for each in empty if each != best], 0
        for bit in (1 << value for value in range(1, side + 1)):
            if not taken & bit and found < most:
                for unit in best:
                    used[unit] |= bit
                found += solutions(rest, most - found)
                for unit in best:
                    used[unit] &= ~bit
        return found

    return solutions([own for value, own in zip(cells, units) if not value], 2) == 1


def _word(letters: int, draw: np.random.Generator) -> str:
    return "".join(_LETTERS[place] for place in draw.integers(0, len(_LETTERS), size=letters))


def problem(environment: Environment, levels: tuple[int, int], *key: int | str) -> dict[str, Any]:
    """The problem of a key. Its difficulty is one of the levels from the first to the last."""
    draw = generator(*key)
    difficulty = int(draw.integers(levels[0], levels[1] + 1))
    return {**environment(difficulty, draw), "difficulty": difficulty}
