"""Data of the project's own tasks, made from fixed seeds and Python's own library: no network is needed."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import datasets

WORDS = (
    "apple river stone cloud garden window mountain paper silver candle bridge forest island button ladder mirror "
    "pencil rocket saddle ticket violin wagon yellow zebra anchor basket camera dragon engine feather"
).split()

_HOLDERS = (ast.stmt, ast.ExceptHandler, ast.match_case)  # nodes that definitions are in


def _split(rows: list[dict]) -> dict[str, datasets.Dataset]:
    return {"test": datasets.Dataset.from_list(rows)}


def arithmetic(**_: object) -> dict[str, datasets.Dataset]:
    """Sums, differences and products of small numbers, after two solved examples; three wrong answers nearby."""
    draw = random.Random(20)
    rows = []
    for index in range(400):
        lines = []
        for _example in range(3):
            sign = "+-*"[index % 3]
            most = 12 if sign == "*" else 99
            a, b = draw.randint(1, most), draw.randint(1, most)
            lines.append((f"{a} {sign} {b} =", {"+": a + b, "-": a - b, "*": a * b}[sign]))
        question, answer = lines[-1]
        wrong = draw.sample([answer + move for move in (-10, -2, -1, 1, 2, 10)], 3)
        choices = [answer, *wrong]
        draw.shuffle(choices)
        shown = "\n".join(f"{text} {result}" for text, result in lines[:-1])
        rows.append({
            "question": f"{shown}\n{question}",
            "choices": [str(choice) for choice in choices],
            "answer": choices.index(answer),
        })
    return _split(rows)


def induction(**_: object) -> dict[str, datasets.Dataset]:
    """A row of random words that begins again, so the next word can be looked up. Wrong answers are from the row."""
    draw = random.Random(21)
    rows = []
    for _row in range(400):
        row = draw.sample(WORDS, 8)
        known = draw.randint(2, 6)
        choices = draw.sample([word for word in row if word not in (row[known], row[known - 1])], 3) + [row[known]]
        draw.shuffle(choices)
        rows.append({
            "question": " ".join([*row, *row[:known]]),
            "choices": choices,
            "answer": choices.index(row[known]),
        })
    return _split(rows)


def copying(**_: object) -> dict[str, datasets.Dataset]:
    """Lines that repeat a word; the last line is to be written to its end."""
    draw = random.Random(23)
    rows = []
    for _row in range(100):
        words = draw.sample(WORDS, 4)
        lines = [f"{word} {word}" for word in words]
        rows.append({"question": "\n".join([*lines[:-1], words[-1]]), "answer": f" {words[-1]}"})
    return _split(rows)


def _modules() -> Iterator[tuple[str, str]]:
    """(path, source) of the library's modules, those of its tests left out, by path."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not re.search(r"(^|/)(test|tests|idlelib|lib2to3|site-packages|dist-packages|__pycache__)/", name):
            try:
                yield name, path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def source(**_: object) -> dict[str, datasets.Dataset]:
    """About one module in forty of the standard library, its first 4000 characters."""
    chosen = [(name, text) for name, text in _modules() if zlib.crc32(name.encode()) % 40 == 0 and len(text) > 500]
    return _split([{"path": name, "text": text[:4000]} for name, text in chosen[:100]])


def cloze(**_: object) -> dict[str, datasets.Dataset]:
    """Sentences of documentation texts of which the last word stands in an earlier sentence too (as in LAMBADA)."""
    rows = []
    for name, text in _modules():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in _definitions(tree):
            found = _last_word(ast.get_docstring(node) or "")
            if found is not None:
                rows.append({"path": name, "context": found[0], "word": found[1]})
    draw = random.Random(22)
    draw.shuffle(rows)
    return _split(rows[:500])


def _definitions(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """What has a documentation text, in the order of `ast.walk`; no definition is in an expression."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        waiting.extend(each for each in ast.iter_child_nodes(node) if isinstance(each, _HOLDERS))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield node


def _last_word(text: str) -> tuple[str, str] | None:
    prose = " ".join(text.split())
    match = re.match(r"(.{80,600}?) ([a-z]{4,12})\.( [A-Z]|$)", prose)
    if match is None or not re.search(rf"\b{match[2]}\b", match[1]):
        return None
    return match[1], match[2]
